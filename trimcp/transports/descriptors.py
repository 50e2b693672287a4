"""Trio streams over single file descriptors that need not block: the waits, the wake-ups and the closing.

They know neither framing nor whose descriptors these are; `threaded` does the same for those that may block.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import stat
import sys
from collections.abc import Hashable
from contextlib import suppress
from typing import Final

import trio

if sys.platform != "win32":
    import fcntl
    import termios

__all__ = [
    "PIECE",
    "READ_SIZE",
    "FdReceiver",
    "FdSender",
    "hung_up",
    "over_or_hung_up",
    "progress_of",
    "socket_under",
    "unheard",
    "unread_bytes",
]

READ_SIZE: Final = 65536
"""Bytes asked for per read: what a Linux pipe holds; malloc would map pages for much larger buffers."""


PIECE: Final = 65536
"""Bytes of a large write to a stream of somebody else's that are counted as one step; see `progress_of`."""


class _Descriptor:
    """One descriptor of ours, how to use it without blocking, and what to undo when it is closed."""

    __slots__ = ("_restore", "fd", "sock")

    def __init__(self, fd: int, *, dontwait: bool, restore: bool) -> None:
        self.fd = fd
        self.sock: socket.socket | None = None
        self._restore = restore
        if dontwait:
            self.sock = socket.socket(fileno=fd)
        else:
            os.set_blocking(fd, False)

    def close(self) -> None:
        if self.fd < 0:
            return
        fd, self.fd = self.fd, -1
        trio.lowlevel.notify_closing(fd)
        if self._restore:
            os.set_blocking(fd, True)
        if self.sock is not None:
            self.sock.close()
        else:
            os.close(fd)


class FdReceiver(trio.abc.ReceiveStream):
    """Bytes from a descriptor, read without blocking.

    Owns `fd` from here on. Cancelling `receive_some` loses nothing.

    Args:
        fd: a pipe's or terminal's descriptor that may be made non-blocking, or a socket's.
        dontwait: a socket whose flags belong to others: ask per call (MSG_DONTWAIT) and leave them alone.
        restore: make the descriptor blocking again when it is closed.
    """

    def __init__(self, fd: int, *, dontwait: bool = False, restore: bool = False) -> None:
        self._descriptor = _Descriptor(fd, dontwait=dontwait, restore=restore)
        self._left: int | None = None

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Return what is there, at least one byte, or b"" at the end of input.

        Raises:
            trio.ClosedResourceError: this stream was closed, before or meanwhile.
            trio.BrokenResourceError: the system reported an error.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            data = self.receive_nowait(max_bytes)
        except trio.WouldBlock:
            pass
        else:
            await trio.lowlevel.cancel_shielded_checkpoint()
            return data
        return await self.receive_later(max_bytes)

    async def receive_later(self, max_bytes: int | None = None) -> bytes:
        """Do what `receive_some` does, for less where nothing is there yet: it waits before it looks."""
        while True:
            if self._descriptor.fd < 0 or self._left is not None:
                await trio.lowlevel.checkpoint()
            else:
                try:
                    await trio.lowlevel.wait_readable(self._descriptor.fd)
                except trio.ClosedResourceError:
                    # Either closed, which receive_nowait reports, or woken by end_after_buffered.
                    pass
            try:
                return self.receive_nowait(max_bytes)
            except trio.WouldBlock:
                continue

    def receive_nowait(self, max_bytes: int | None = None) -> bytes:
        """Return what is there, or b"" at the end of input, or raise `trio.WouldBlock`."""
        descriptor = self._descriptor
        size = READ_SIZE if max_bytes is None else max_bytes
        if descriptor.fd < 0:
            raise trio.ClosedResourceError("this stream was closed")
        if self._left is not None:
            size = min(size, self._left)
            if not size:
                return b""
        try:
            if descriptor.sock is None:
                data = os.read(descriptor.fd, size)
            else:
                data = descriptor.sock.recv(size, socket.MSG_DONTWAIT)
        except BlockingIOError:
            if self._left is not None:
                return b""
            raise trio.WouldBlock from None
        except OSError as exc:
            if exc.errno == errno.EIO:  # a terminal that hung up
                return b""
            raise trio.BrokenResourceError(f"reading failed: {exc}") from exc
        if self._left is not None:
            self._left -= len(data)
        return data

    def duplicate(self) -> FdReceiver:
        """Return a second stream over the same pipe, for who goes on reading when this one is closed."""
        return FdReceiver(os.dup(self._descriptor.fd))

    def end_after_buffered(self) -> None:
        """End the input behind what has arrived by now, even if somebody holds the other end open."""
        if self._descriptor.fd < 0 or self._left is not None:
            return
        self._left = _bytes_buffered(self._descriptor.fd)
        trio.lowlevel.notify_closing(self._descriptor.fd)

    def close(self) -> None:
        """Close without waiting; a task that is receiving gets `trio.ClosedResourceError`."""
        self._descriptor.close()

    async def aclose(self) -> None:
        """Like `close`, and a checkpoint."""
        self.close()
        await trio.lowlevel.checkpoint()


class FdSender(trio.abc.SendStream):
    """Bytes to a descriptor, written without blocking. Takes what `FdReceiver` takes."""

    def __init__(self, fd: int, *, dontwait: bool = False, restore: bool = False) -> None:
        self._descriptor = _Descriptor(fd, dontwait=dontwait, restore=restore)
        self._broken = False
        self._taken = 0  # bytes of writes that were not taken at once

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Write all of `data`, at once if the system takes it. Cancelling may leave a part of it written.

        Raises:
            trio.BrokenResourceError: nobody reads any more.
            trio.ClosedResourceError: this stream was closed, before or meanwhile.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        total = len(data)
        sent = self._write(data)
        if sent == total:
            await trio.lowlevel.cancel_shielded_checkpoint()
            return
        with memoryview(data) as view:
            while sent < total:
                await self._writable()
                with view[sent:] as rest:
                    taken = self._write(rest)
                sent += taken
                self._taken += taken

    def send_nowait(self, data: bytes | bytearray | memoryview) -> int:
        """Write what the system takes now and return how many bytes that were. Raises what `send_all` does."""
        return self._write(data)

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until a write would be taken, at least in part."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check()
        await self._writable()

    async def _writable(self) -> None:
        try:
            await trio.lowlevel.wait_writable(self._descriptor.fd)
        except trio.ClosedResourceError:
            self._check()

    def _check(self) -> None:
        if self._descriptor.fd < 0:
            raise trio.ClosedResourceError("this stream was closed")
        if self._broken:
            raise trio.BrokenResourceError("the peer is gone")

    def _write(self, data: bytes | bytearray | memoryview) -> int:
        self._check()
        descriptor = self._descriptor
        try:
            if descriptor.sock is None:
                return os.write(descriptor.fd, data)
            return descriptor.sock.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as exc:
            raise trio.BrokenResourceError(f"writing failed: {exc}") from exc

    def taken(self) -> Hashable:
        """Return what changes whenever more of the write under way is taken, or more is read of what was."""
        return self._taken, unread_bytes(self._descriptor.fd)

    async def unheard(self) -> None:
        """Wait until nobody reads any more; see the function of that name."""
        await unheard(self._descriptor.fd)

    def give_up(self) -> None:
        """Let every write from now on, and the one under way, raise `trio.BrokenResourceError`."""
        self._broken = True
        if self._descriptor.fd >= 0:
            trio.lowlevel.notify_closing(self._descriptor.fd)

    def close(self) -> None:
        """Close without waiting; a task that is sending gets `trio.ClosedResourceError`."""
        self._descriptor.close()

    async def aclose(self) -> None:
        """Like `close`, and a checkpoint."""
        self.close()
        await trio.lowlevel.checkpoint()


def progress_of(stream: object) -> Hashable:
    """Return what changes while the peer reads what was written to a Trio stream; None if nobody can tell.

    A stream of ours is asked for `taken`; of a socket's, also under TLS, the system knows how much waits in it. That
    alone may be the same again after it was filled up anew, so whoever writes much counts its pieces, too.
    """
    taken = getattr(stream, "taken", None)
    if taken is not None:
        progress: Hashable = taken()
        return progress
    if isinstance(stream, trio.StapledStream):
        stream = stream.send_stream
    sock = socket_under(stream)
    return None if sock is None else unread_bytes(sock.fileno())


def socket_under(stream: object) -> trio.socket.SocketType | None:
    """Return the socket under a Trio stream, also if TLS is between, or what calls it so; None if there is none."""
    while (under := getattr(stream, "transport_stream", None)) is not None:
        stream = under
    return stream.socket if isinstance(stream, trio.SocketStream) else None


async def hung_up(sock: socket.socket | trio.socket.SocketType | None) -> int:
    """Wait until a socket's peer has sent its last byte, or the connection is broken, whatever is still unread.

    Reading tells that only behind everything that was sent before: where nobody reads on, nobody would hear of it.
    Linux tells it at once (epoll(7), EPOLLRDHUP), if all that was sent found room. Elsewhere, without a socket, and
    where the system has no descriptor to spare for the question, this waits until it is cancelled.

    Returns:
        What broke the connection (an `errno`), or 0. Who reads or writes next is not told it again. A socket that is
        closed here is a bad descriptor; one that is closed here meanwhile is waited for.
    """
    if sys.platform == "linux" and sock is not None:
        if sock.fileno() < 0:
            return errno.EBADF
        await _wait_epoll(sock.fileno(), select.EPOLLRDHUP)
        return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return await trio.sleep_forever()


async def unheard(fd: int) -> None:
    """Wait until nobody reads any more what is written to a pipe or socket; else only the next write would tell.

    Who has only ended what it says may still listen. Where nobody can tell, this waits until it is cancelled.
    """
    if sys.platform == "linux" and fd >= 0:
        await _wait_epoll(fd, 0)
    else:
        await trio.sleep_forever()


async def _wait_epoll(fd: int, events: int) -> None:
    """Wait with epoll for `events` or an error; for ever where the system cannot tell."""
    if sys.platform == "linux":
        with suppress(OSError), select.epoll(1) as watch:  # there is no descriptor to spare, or it is a file
            watch.register(fd, events)
            await trio.lowlevel.wait_readable(watch.fileno())
            return
    await trio.sleep_forever()


async def over_or_hung_up(over: trio.Event, sock: socket.socket | trio.socket.SocketType | None) -> None:
    """Wait until `over` is set, by whoever still reads, or until `hung_up` knows the same."""

    async def watch() -> None:
        await hung_up(sock)
        nursery.cancel_scope.cancel(reason="the peer has hung up")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await over.wait()
        nursery.cancel_scope.cancel(reason="it is known already")


if sys.platform != "win32":

    def _bytes_buffered(fd: int) -> int:
        answer = fcntl.ioctl(fd, termios.FIONREAD, bytes(4))
        return int.from_bytes(answer, sys.byteorder)

    def unread_bytes(fd: int) -> int:
        """Return how much of what was written to a pipe, socket or terminal was not taken out of it yet."""
        try:
            if stat.S_ISFIFO(os.fstat(fd).st_mode):
                return _bytes_buffered(fd)
            return int.from_bytes(fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        except OSError:
            return 0  # closed, or nothing that knows

else:

    def unread_bytes(fd: int) -> int:
        return 0

    def _bytes_buffered(fd: int) -> int:
        return 0
