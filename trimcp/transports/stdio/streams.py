"""Trio streams over single file descriptors.

`FdReceiver` and `FdSender` do not block. `ThreadReceiver` and `ThreadSender` are for descriptors that may block:
regular files, some devices, a shared terminal whose flags must not change, Windows. They cost five times as much. A
blocked thread cannot be interrupted: the program exits without waiting for it, and the thread closes its descriptor
itself.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from abc import abstractmethod
from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import trio

from trimcp.transports.descriptors import PIECE, READ_SIZE, unread_bytes

if TYPE_CHECKING:
    from outcome import Outcome


T = TypeVar("T")


class _Stream(trio.abc.AsyncResource):
    """A stream with a synchronous `close`."""

    @abstractmethod
    def close(self) -> None:
        """Close without waiting; a task that waits on this stream gets `trio.ClosedResourceError`."""

    async def aclose(self) -> None:
        """Close, then execute a checkpoint."""
        self.close()
        await trio.lowlevel.checkpoint()


class _FdStream(_Stream):
    """A descriptor in non-blocking mode."""

    def __init__(self, fd: int, *, dontwait: bool = False, restore: bool = False) -> None:
        self._fd = fd
        self._restore = restore
        self._socket = socket.socket(fileno=fd) if dontwait else None
        if not dontwait:
            os.set_blocking(fd, False)

    def close(self) -> None:
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        trio.lowlevel.notify_closing(fd)
        if self._restore:
            os.set_blocking(fd, True)
        if self._socket is not None:
            self._socket.close()
        else:
            os.close(fd)


class FdReceiver(_FdStream, trio.abc.ReceiveStream):
    """Bytes from a descriptor, read without blocking. Cancelling `receive_some` loses nothing.

    `fd` is a socket, or a pipe or terminal that may be made non-blocking, and is owned by this. `dontwait`, for a
    socket whose flags others share: use MSG_DONTWAIT, and do not change the flags. `restore`: make it blocking again
    when it is closed.
    """

    _emptied = False  # whether the last read left nothing: then a read before the next wait would most likely fail
    _left: int | None = None  # bytes until the end of input, after `end_after_buffered`

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if self._emptied:
            return await self.receive_later(max_bytes)
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            data = self.receive_nowait(max_bytes)
        except trio.WouldBlock:
            return await self.receive_later(max_bytes)
        await trio.lowlevel.cancel_shielded_checkpoint()
        return data

    async def receive_later(self, max_bytes: int | None = None) -> bytes:
        """Like `receive_some`, but wait before the first read: cheaper when no input is there yet."""
        while True:
            if self._fd < 0 or self._left is not None:
                await trio.lowlevel.checkpoint()
            else:
                try:
                    await trio.lowlevel.wait_readable(self._fd)
                except trio.ClosedResourceError:
                    # Closed, which `receive_nowait` reports, or woken by `end_after_buffered`.
                    pass
            try:
                return self.receive_nowait(max_bytes)
            except trio.WouldBlock:
                continue

    def receive_nowait(self, max_bytes: int | None = None) -> bytes:
        """Return the input that has arrived, or b"" at the end of input, or raise `trio.WouldBlock`."""
        size = READ_SIZE if max_bytes is None else max_bytes
        if self._fd < 0:
            raise trio.ClosedResourceError("this stream was closed")
        if self._left is not None:
            size = min(size, self._left)
            if not size:
                return b""
        try:
            data = os.read(self._fd, size) if self._socket is None else self._socket.recv(size, socket.MSG_DONTWAIT)
        except BlockingIOError:
            if self._left is not None:
                return b""
            raise trio.WouldBlock from None
        except OSError as exc:
            if exc.errno == errno.EIO:  # a terminal that hung up
                return b""
            raise trio.BrokenResourceError(f"reading failed: {exc}") from exc
        self._emptied = len(data) < size
        if self._left is not None:
            self._left -= len(data)
        return data

    def duplicate(self) -> FdReceiver:
        """Return a second stream over the same pipe, to read on after this one is closed."""
        return FdReceiver(os.dup(self._fd))

    def end_after_buffered(self) -> None:
        """End the input of a pipe after the bytes in it now, even if another process holds its other end open."""
        if self._fd < 0 or self._left is not None:
            return
        self._left = unread_bytes(self._fd)
        trio.lowlevel.notify_closing(self._fd)


class FdSender(_FdStream, trio.abc.SendStream):
    """Bytes to a descriptor, written without blocking. The arguments are those of `FdReceiver`."""

    _broken = False
    _taken = 0  # bytes accepted in writes that had to wait

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Write all of `data`, without waiting if the system accepts it. Cancelling may leave a part of it written."""
        await trio.lowlevel.checkpoint_if_cancelled()
        total = len(data)
        sent = self.send_nowait(data)
        if sent == total:
            await trio.lowlevel.cancel_shielded_checkpoint()
            return
        with memoryview(data) as view:
            while sent < total:
                await self._writable()
                with view[sent:] as rest:
                    taken = self.send_nowait(rest)
                sent += taken
                self._taken += taken

    def send_nowait(self, data: bytes | bytearray | memoryview) -> int:
        """Write what the system accepts now and return the number of bytes. Raises what `send_all` does."""
        self._check()
        try:
            if self._socket is None:
                return os.write(self._fd, data)
            return self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as exc:
            raise trio.BrokenResourceError(f"writing failed: {exc}") from exc

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until a write would accept at least one byte."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check()
        await self._writable()

    async def _writable(self) -> None:
        try:
            await trio.lowlevel.wait_writable(self._fd)
        except trio.ClosedResourceError:
            self._check()

    def _check(self) -> None:
        if self._fd < 0:
            raise trio.ClosedResourceError("this stream was closed")
        if self._broken:
            raise trio.BrokenResourceError("the peer is gone")

    def write_progress(self) -> Hashable:
        """Return a value that changes when the system accepts more of the current write, or the peer reads."""
        return self._taken, unread_bytes(self._fd)

    def fileno(self) -> int:
        """Return the descriptor; -1 once it is closed."""
        return self._fd

    def give_up(self) -> None:
        """Let the current write and all later ones raise `trio.BrokenResourceError`."""
        self._broken = True
        if self._fd >= 0:
            trio.lowlevel.notify_closing(self._fd)


class _ThreadStream(_Stream):
    """A descriptor that may block: one read or write at a time, each in a thread."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._busy = False
        self._closed = False
        self._waiting = trio.lowlevel.ParkingLot()

    def _start(self, call: Callable[[], T], finish: Callable[[T], None]) -> None:
        """Run `call` in a thread, which cannot be interrupted; then `finish` with its result, unless closed."""
        token = trio.lowlevel.current_trio_token()
        self._busy = True

        def deliver(result: Outcome[T]) -> None:
            try:
                token.run_sync_soon(self._finished, result, finish)
            except trio.RunFinishedError:
                os.close(self._fd)

        trio.lowlevel.start_thread_soon(call, deliver)

    def _finished(self, result: Outcome[T], finish: Callable[[T], None]) -> None:
        self._busy = False
        if self._closed:
            os.close(self._fd)
        else:
            finish(result.unwrap())
            self._waiting.unpark_all()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._waiting.unpark_all()
            if not self._busy:
                os.close(self._fd)  # otherwise the thread closes it when its call returns


class ThreadReceiver(_ThreadStream, trio.abc.ReceiveStream):
    """Bytes from a descriptor that may block, which this owns. Cancelling `receive_some` loses nothing."""

    _data = b""
    _ended = False

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._data or self._ended:
            await trio.lowlevel.cancel_shielded_checkpoint()
        while not (self._data or self._ended or self._closed):
            if not self._busy:
                self._start(self._read, self._arrive)
            await self._waiting.park()
        if self._closed:
            raise trio.ClosedResourceError("this stream was closed")
        size = len(self._data) if max_bytes is None else max_bytes
        data, self._data = self._data[:size], self._data[size:]
        return data

    def _read(self) -> bytes:
        try:
            return os.read(self._fd, READ_SIZE)
        except OSError:
            return b""

    def _arrive(self, data: bytes) -> None:
        if not self._ended:
            self._data = data
            self._ended = not data

    def end_after_buffered(self) -> None:
        """End the input after what has been read."""
        self._ended = True
        self._waiting.unpark_all()


class ThreadSender(_ThreadStream, trio.abc.SendStream):
    """Bytes to a descriptor that may block, which this owns."""

    _broken = False
    _error: OSError | None = None
    _taken = 0  # bytes, counted by the thread

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Write all of `data`. If cancelled, the thread finishes the write and the stream is broken."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check()
        self._broken = True
        self._start(partial(self._write, bytes(data)), self._report)
        while self._busy and not self._closed:
            await self._waiting.park()
        if self._closed:
            raise trio.ClosedResourceError("this stream was closed")
        if self._error is not None:
            raise trio.BrokenResourceError(f"writing failed: {self._error}") from self._error
        self._broken = False

    async def wait_send_all_might_not_block(self) -> None:
        """Return at once: only a write in the thread could find out."""
        await trio.lowlevel.checkpoint()
        self._check()

    def _check(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this stream was closed")
        if self._broken:
            raise trio.BrokenResourceError("an earlier write failed or was cut short")

    def _write(self, data: bytes) -> OSError | None:
        try:
            with memoryview(data) as view:
                sent = 0
                while sent < len(data):
                    taken = os.write(self._fd, view[sent : sent + PIECE])  # blocks until the whole piece is written
                    sent += taken
                    self._taken += taken
        except OSError as error:
            return error
        return None

    def _report(self, error: OSError | None) -> None:
        self._error = error

    def write_progress(self) -> Hashable:
        """Return a value that changes when the system accepts more of the current write, or the peer reads."""
        return self._taken, 0 if self._closed else unread_bytes(self._fd)

    def give_up(self) -> None:
        """Let all later writes raise `trio.BrokenResourceError`."""
        self._broken = True


AnyReceiver: TypeAlias = FdReceiver | ThreadReceiver
AnySender: TypeAlias = FdSender | ThreadSender

# The stream classes for pipes on this system.
if sys.platform == "win32":
    PipeReceiver: TypeAlias = ThreadReceiver
    PipeSender: TypeAlias = ThreadSender
else:
    PipeReceiver: TypeAlias = FdReceiver
    PipeSender: TypeAlias = FdSender
