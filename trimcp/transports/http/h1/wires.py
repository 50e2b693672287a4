"""Bytes of a connection, without HTTP: over a socket, or over any Trio byte stream (TLS, memory).

A socket is used without Trio's stream around it, so that any task can write at once without waiting. Only data that the
system does not accept costs a task.

On Linux a `Poller` wakes the tasks that read from many sockets, a bounded number of them in each turn of Trio's loop.
Trio alone wakes all whose sockets have input. With hundreds of connections that many requests are then read before the
first is answered: their objects outlive each other, so the garbage collector copies and traverses them, and they leave
the processor's caches. Some dozens at a time cost the same however many there are, and are answered sooner. A socket is
registered once, not for each wait as in Trio, which saves a system call for each request.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import select
import socket
import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from contextlib import suppress
from types import TracebackType
from typing import ClassVar, Final, NoReturn, Self, TypeAlias

import trio

from trimcp.transports.descriptors import AnySocket, progress_of, socket_under, unread_bytes, wait_peer_closed

_PIECE: Final = 64 * 1024
RESET: Final = struct.pack("ii", 1, 0)
"""The value of SO_LINGER (on, 0 seconds) with which closing resets a connection."""


_AT_ONCE: Final = 32
"""Sockets whose readers wake in one turn. With 16 the turns themselves cost more, with 64 the collector begins to."""


class Poller:
    """Watches sockets with a single epoll; `run` is its task. Leaving its `with` block closes it."""

    __slots__ = ("_epoll", "_readers")

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._readers: dict[int, PolledWire] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._epoll.close()

    def add(self, fd: int, reader: PolledWire) -> None:
        """Call `reader` about the input of a socket, what is there already included, until it is removed.

        Raises OSError: the system cannot watch it.
        """
        # Edge-triggered: a socket that nobody reads at the moment does not come up again and again.
        self._epoll.register(fd, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)
        self._readers[fd] = reader

    def remove(self, fd: int) -> None:
        """Forget a socket, before it is closed or used otherwise. No effect if it is not there."""
        if self._readers.pop(fd, None) is not None and not self._epoll.closed:
            self._epoll.unregister(fd)

    async def run(self) -> None:
        """Wake readers until cancelled."""
        epoll, readers = self._epoll, self._readers
        while True:
            await trio.lowlevel.wait_readable(epoll.fileno())
            while found := epoll.poll(0, _AT_ONCE):
                for fd, events in found:
                    readers[fd].input_came(ended=events != select.EPOLLIN)
                if len(found) < _AT_ONCE:
                    break
                await trio.lowlevel.checkpoint()


Take: TypeAlias = Callable[[bytes], bool]
"""Takes input at once and returns True, or returns False and leaves it to the reader."""


class Wire(ABC):
    """One connection's bytes. One task reads and closes; at most one task drains; any task may call `try_write`."""

    __slots__ = ("_open", "_scope", "error")
    at_once: ClassVar[bool] = True
    """Whether `try_write` can write, and `is_quiet` knows of all input: a stream may hold some back (TLS)."""

    def __init__(self) -> None:
        self._open = True
        self._scope: trio.CancelScope | None = None  # around a wait that `wake` ends
        self.error: int | None = None  # the system's number of the first error that ended the connection, or None

    @property
    def timed_out(self) -> bool:
        """Whether it broke because the peer acknowledged nothing for too long (`open_tcp`, `unacknowledged`)."""
        return self.error == errno.ETIMEDOUT

    @property
    def certificate(self) -> str | None:
        """The digest of the client's TLS certificate (RFC 8705 section 3.1), or None."""
        return None

    @abstractmethod
    async def read(self, max_bytes: int, take: Take | None = None) -> bytes | None:
        """Wait for input and return it: b"" once the peer has closed, None after `wake`. Cancelling loses nothing.

        A wire may offer input to `take` at once instead of waking the reader. If `take` returns True, it has taken the
        input, and the reader waits on. What it raises is raised here.
        """

    @abstractmethod
    def is_quiet(self) -> bool:
        """Return whether nothing waits to be read, not even the peer's end, as far as that is known at once."""

    async def wait_peer_closed(self) -> bool:
        """Wait, without reading, until the peer is known to send no more: True. False after `wake`.

        Not every wire can detect this; see `descriptors.wait_peer_closed`.
        """
        with trio.CancelScope() as self._scope:
            try:
                self._note(await wait_peer_closed(self.socket))
                return True
            finally:
                self._scope = None
        return False

    def wake(self) -> None:
        """Let the current `read` or `wait_peer_closed` return None or False; no effect if there is none."""
        if self._scope is not None:
            self._scope.cancel(reason="the connection has something else to do than to wait")

    @abstractmethod
    def try_write(self, data: bytes | bytearray) -> int:
        """Write without waiting, and return how many bytes were accepted.

        Raises trio.BrokenResourceError: the peer is gone.
        """

    @abstractmethod
    async def write_some(self, data: bytearray) -> int:
        """Wait until the first bytes of `data` are accepted, and return how many. Other tasks may append meanwhile.

        If cancelled, an unknown part may have been written. Raises trio.BrokenResourceError: the peer is gone.
        """

    async def write_all(self, data: bytes) -> None:
        """Write everything. Raises, and is cancelled, as `write_some`."""
        left = bytearray(data)
        while left:
            del left[: await self.write_some(left)]

    @abstractmethod
    def progress(self) -> Hashable:
        """Return a value that changes while the peer reads what was written; None if that is unknown."""

    @abstractmethod
    async def shut_write(self) -> None:
        """Close the sending side, where the wire can do that separately."""

    @abstractmethod
    def shut_write_now(self) -> None:
        """Do what `shut_write` does, where that needs no waiting."""

    def hold_back(self) -> None:  # noqa: B027  # most wires cannot
        """Let the system keep what is written next until `shut_write_now`, so that both arrive as one."""

    @abstractmethod
    def lift_timeout(self) -> None:
        """Remove the system's time limit for unacknowledged data: the protocol after HTTP pings its peer."""

    @abstractmethod
    async def close(self, *, reset: bool = False) -> None:
        """Close, within a second even if the peer does not respond. Safe to call twice.

        No task may read or drain any more.

        `reset`: send a reset instead of an end of file, and drop what was not delivered.
        """

    @property
    @abstractmethod
    def socket(self) -> AnySocket | None:
        """Its socket, for the functions of `descriptors`; None without one."""

    def _note(self, error: int | None) -> None:
        """Record the system's error that ended the connection."""
        self.error = self.error or error


class SocketWire(Wire):
    """A connected TCP or Unix stream socket, which this owns and makes non-blocking."""

    __slots__ = ("_fd", "_reading", "_sock")

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        sock.setblocking(False)
        if sock.family != getattr(socket, "AF_UNIX", None):
            # Each response is one write, so there is nothing to gather, and an event must not wait for an
            # acknowledgement.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._fd = sock.fileno()
        self._reading = False

    async def read(self, max_bytes: int, take: Take | None = None) -> bytes | None:
        """Wait for input and return it. Always lets other tasks run first, also if input is there."""
        self._reading = True
        try:
            # Before the attempt, not after a failed one: between two requests there is usually nothing to read yet.
            await trio.lowlevel.wait_readable(self._fd)
            return self._sock.recv(max_bytes)
        except (BlockingIOError, trio.ClosedResourceError):
            return None
        except OSError as error:
            self._note(error.errno)
            return b""
        finally:
            self._reading = False

    def is_quiet(self) -> bool:
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def wake(self) -> None:
        super().wake()
        if self._reading:
            trio.lowlevel.notify_closing(self._fd)  # closes nothing: Trio's call to end a wait from outside

    def try_write(self, data: bytes | bytearray) -> int:
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._note(error.errno)
            raise trio.BrokenResourceError(f"writing failed: {error}") from error

    async def write_some(self, data: bytearray) -> int:
        """If cancelled, nothing was written."""
        while True:
            try:
                await trio.lowlevel.wait_writable(self._fd)
            except trio.ClosedResourceError:  # `wake` was meant for the reader
                if not self._open:
                    raise
            if taken := self.try_write(data):
                return taken

    def progress(self) -> Hashable:
        return unread_bytes(self._fd) if self._open else None

    async def shut_write(self) -> None:
        self.shut_write_now()

    def shut_write_now(self) -> None:
        with suppress(OSError):  # the peer has already closed
            self._sock.shutdown(socket.SHUT_WR)

    def hold_back(self) -> None:
        if sys.platform == "linux":
            with suppress(OSError):  # a Unix socket, or closed
                self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)

    def lift_timeout(self) -> None:
        _lift_timeout(self._sock)

    async def close(self, *, reset: bool = False) -> None:
        """Close without waiting."""
        if not self._open:
            return
        self._open = False
        if reset:
            with suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        trio.lowlevel.notify_closing(self._fd)
        self._sock.close()

    @property
    def socket(self) -> AnySocket:
        return self._sock


class PolledWire(SocketWire):
    """A connected socket whose reader is woken by a `Poller`, which has to run, unless `take` takes the input."""

    __slots__ = ("_ended", "_error", "_has_input", "_input", "_max_bytes", "_poller", "_take", "_waiting")

    def __init__(self, sock: socket.socket, poller: Poller) -> None:
        super().__init__(sock)
        self._waiting: trio.lowlevel.Task | None = None
        self._has_input = False  # whether there may be input about which the poller says nothing any more
        self._ended = False  # whether the peer has ended the connection, perhaps after unread input
        self._take: Take | None = None
        self._max_bytes = 0
        self._input: bytes | None = None  # for the reader, once it goes on
        self._error: Exception | None = None  # raised by `take`
        self._poller = poller
        poller.add(self._fd, self)

    def input_came(self, *, ended: bool) -> None:
        """Note that there is input: all of it has to be read before this is called again. Does not raise.

        `ended`: after the input the peer has ended or broken the connection, which is not said again either.
        """
        self._has_input = True
        if ended:
            self._ended = True
        if self._waiting is None:
            return
        try:
            data, take = self._receive(self._max_bytes), self._take
            if data is None:
                return
            if data and take is not None and take(data):
                if not self._has_input:
                    return
                data = None
        except Exception as error:  # it belongs to the reader, not to the task of all connections
            self._error = error
        else:
            self._input = data
        self._resume()

    async def read(self, max_bytes: int, take: Take | None = None) -> bytes | None:
        if self._has_input:
            await trio.lowlevel.checkpoint()
            return self._receive(max_bytes)
        self._max_bytes, self._take = max_bytes, take
        self._waiting = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._stop_waiting)
        data, self._input = self._input, None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return data

    def _receive(self, max_bytes: int) -> bytes | None:
        """Return input that is there, or None if there is none, as `read` does."""
        try:
            data = self._sock.recv(max_bytes)
        except BlockingIOError:
            self._has_input = False
            return None
        except OSError as error:
            self._note(error.errno)
            return b""
        # Less than asked for was all there is (epoll(7)), except for an end, and the poller says when there is more.
        self._has_input = self._ended or len(data) == max_bytes
        return data

    def wake(self) -> None:
        self._resume()
        super().wake()

    async def close(self, *, reset: bool = False) -> None:
        """Close without waiting."""
        if self._open:  # else its number may be another connection's by now
            self._poller.remove(self._fd)
        self._take = None  # which knows the connection that knows this: so that none waits for a collector
        await super().close(reset=reset)

    def _resume(self) -> None:
        """Let the waiting reader go on."""
        task, self._waiting = self._waiting, None
        if task is not None:
            trio.lowlevel.reschedule(task)

    def _stop_waiting(self, cancel: Callable[[], NoReturn]) -> trio.lowlevel.Abort:
        self._waiting = None
        return trio.lowlevel.Abort.SUCCEEDED


class StreamWire(Wire):
    """A Trio stream, which this owns, for TLS and tests. Each response costs a task: `try_write` accepts nothing.

    `wakes`: whether `wake` ends a `read`, which costs each read a cancel scope.
    """

    __slots__ = ("_certificate", "_heard", "_stream", "_wakes")
    at_once: ClassVar[bool] = False

    def __init__(self, stream: trio.abc.Stream, *, wakes: bool = True) -> None:
        super().__init__()
        self._stream = stream
        self._wakes = wakes
        self._certificate: str | None = None
        self._heard = False  # whether the peer has sent anything: TLS cannot be closed in order before

    @property
    def certificate(self) -> str | None:
        if self._certificate is None and self._heard and isinstance(self._stream, trio.SSLStream):
            shown = self._stream.getpeercert(binary_form=True)
            digest = b"" if shown is None else base64.urlsafe_b64encode(hashlib.sha256(shown).digest())
            self._certificate = digest.rstrip(b"=").decode()
        return self._certificate or None

    async def read(self, max_bytes: int, take: Take | None = None) -> bytes | None:
        if not self._wakes:
            return await self._receive(max_bytes)
        with trio.CancelScope() as self._scope:
            try:
                return await self._receive(max_bytes)
            finally:
                self._scope = None
        return None

    async def _receive(self, max_bytes: int) -> bytes:
        try:
            data = bytes(await self._stream.receive_some(max_bytes))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._note(_errno_of(error))
            return b""
        self._heard = True
        return data

    def is_quiet(self) -> bool:
        """The socket is asked: what has arrived there may be no data of the peer's, but is nothing to build on."""
        sock = socket_under(self._stream)
        if sys.platform == "win32" or sock is None:
            return True
        poll = select.poll()
        poll.register(sock.fileno(), select.POLLIN)
        return not poll.poll(0)

    def try_write(self, data: bytes | bytearray) -> int:
        return 0

    async def write_some(self, data: bytearray) -> int:
        """Write 64 KiB at most, so that progress is seen."""
        piece = bytes(data[:_PIECE])
        try:
            await self._stream.send_all(piece)
        except trio.BrokenResourceError as error:
            self._note(_errno_of(error))
            raise
        return len(piece)

    def progress(self) -> Hashable:
        return progress_of(self._stream)

    async def shut_write(self) -> None:
        """Do nothing: TLS cannot close one direction."""
        if isinstance(self._stream, trio.abc.HalfCloseableStream):
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):  # the peer has already closed
                await self._stream.send_eof()

    def shut_write_now(self) -> None:
        """Do nothing: a stream is closed by a task."""

    def lift_timeout(self) -> None:
        if (sock := self.socket) is not None:
            _lift_timeout(sock)

    async def close(self, *, reset: bool = False) -> None:
        if not self._open:
            return
        self._open = False
        # Shielded, because TLS sends its close also when cancelled; bounded, because the peer may not read.
        with trio.CancelScope(shield=True) as scope:
            if reset or not self._heard:
                await trio.aclose_forcefully(self._stream)
            else:
                scope.deadline = trio.current_time() + 1
                await self._stream.aclose()

    @property
    def socket(self) -> AnySocket | None:
        return socket_under(self._stream)


def wire_over(stream: trio.abc.Stream) -> Wire:
    """Return the wire over a client's stream, which it takes over. Nobody has to `wake` it."""
    if not isinstance(stream, trio.SocketStream):
        return StreamWire(stream, wakes=False)
    family, kind, protocol = stream.socket.family, stream.socket.type, stream.socket.proto
    return SocketWire(socket.socket(family, kind, protocol, fileno=stream.socket.detach()))


def _errno_of(error: BaseException | None) -> int | None:
    """Return the system's error behind Trio's exception, if Trio says what broke the connection."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return None if error is None else error.errno


def _lift_timeout(sock: socket.socket | trio.socket.SocketType) -> None:
    # The limit also ends connections whose peer acknowledges but has no room for more (see `open_tcp`).
    if sys.platform == "linux":
        with suppress(OSError):  # a Unix socket, or closed
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
