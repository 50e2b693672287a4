"""Trio streams over file descriptors that may block, each served by a thread of its own.

For regular files, some devices, a terminal whose flags are not ours to set, and Windows. Five times the cost
of `descriptors`, and nothing can interrupt a blocked thread: it is a daemon, and closes its descriptor
itself.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Hashable

import trio

from trimcp.transports.descriptors import PIECE, READ_SIZE, unread_bytes

__all__ = ["ThreadReceiver", "ThreadSender"]


class ThreadReceiver(trio.abc.ReceiveStream):
    """Bytes from a descriptor that may block, read by a thread of its own, one chunk ahead of who asks.

    Owns `fd`. The thread starts with the first `receive_some`; since nothing can interrupt its read, it is a
    daemon and closes the descriptor itself once that read has returned. Cancelling `receive_some` loses
    nothing.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._started = False
        self._closed = False
        self._ended = False
        self._rest = b""
        self._wanted = threading.Semaphore(0)
        self._deliver, self._chunks = trio.open_memory_channel[bytes](2)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Return what is there, at least one byte, or b"" at the end of input."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._closed:
            raise trio.ClosedResourceError("this stream was closed")
        if not self._started:
            self._started = True
            token = trio.lowlevel.current_trio_token()
            threading.Thread(target=self._run, args=(token,), name="trimcp reader", daemon=True).start()
        if self._rest:
            await trio.lowlevel.cancel_shielded_checkpoint()
            data = self._rest
        else:
            try:
                data = await self._chunks.receive()
            except trio.EndOfChannel:
                return b""
            self._wanted.release()
        size = len(data) if max_bytes is None else max_bytes
        self._rest = data[size:]
        return data[:size]

    def _run(self, token: trio.lowlevel.TrioToken) -> None:
        try:
            while not self._closed:
                try:
                    data = os.read(self._fd, READ_SIZE)
                except OSError:
                    data = b""
                token.run_sync_soon(self._arrive, data)
                if not data:
                    break
                self._wanted.acquire()
        except trio.RunFinishedError:
            pass
        finally:
            os.close(self._fd)

    def _arrive(self, data: bytes) -> None:
        if self._closed or self._ended:
            return
        if data:
            self._deliver.send_nowait(data)
        else:
            self.end_after_buffered()

    def end_after_buffered(self) -> None:
        """End the input behind what the thread has handed over."""
        self._ended = True
        self._deliver.close()

    def close(self) -> None:
        """Close without waiting for the thread; a task that is receiving gets `trio.ClosedResourceError`."""
        if self._closed:
            return
        self._closed = True
        self._deliver.close()
        self._chunks.close()
        self._wanted.release()
        if not self._started:
            self._started = True
            os.close(self._fd)

    async def aclose(self) -> None:
        """Like `close`, and a checkpoint."""
        self.close()
        await trio.lowlevel.checkpoint()


class ThreadSender(trio.abc.SendStream):
    """Bytes to a descriptor that may block, written by a thread of its own, which owns `fd`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._started = False
        self._closed = False
        self._broken = False
        self._todo: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._report, self._reports = trio.open_memory_channel[OSError | None](1)
        self._taken = 0  # bytes, counted by the thread

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Write all of `data`. Cancelling it leaves the write to the thread and the stream broken."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check()
        if not self._started:
            self._started = True
            token = trio.lowlevel.current_trio_token()
            threading.Thread(target=self._run, args=(token,), name="trimcp writer", daemon=True).start()
        self._broken = True
        self._todo.put(bytes(data))
        error = await self._reports.receive()
        if error is not None:
            raise trio.BrokenResourceError(f"writing failed: {error}") from error
        self._broken = False

    async def wait_send_all_might_not_block(self) -> None:
        """Return at once: only the thread would know."""
        await trio.lowlevel.checkpoint()
        self._check()

    def _check(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this stream was closed")
        if self._broken:
            raise trio.BrokenResourceError("an earlier write failed or was cut short")

    def _run(self, token: trio.lowlevel.TrioToken) -> None:
        try:
            while (data := self._todo.get()) is not None:
                error: OSError | None = None
                try:
                    view = memoryview(data)
                    while view:
                        taken = os.write(self._fd, view[:PIECE])  # it would block until all was taken
                        self._taken += taken
                        view = view[taken:]
                except OSError as exc:
                    error = exc
                token.run_sync_soon(self._finish, error)
        except trio.RunFinishedError:
            pass
        finally:
            os.close(self._fd)

    def taken(self) -> Hashable:
        """Return what changes whenever more of the write under way is taken, or more is read of what was."""
        return self._taken, 0 if self._closed else unread_bytes(self._fd)

    def _finish(self, error: OSError | None) -> None:
        if not self._closed:
            self._report.send_nowait(error)

    def give_up(self) -> None:
        """Let every write from now on raise `trio.BrokenResourceError`."""
        self._broken = True

    def close(self) -> None:
        """Close without waiting for the thread; a task that is sending gets `trio.ClosedResourceError`."""
        if self._closed:
            return
        self._closed = True
        self._report.close()
        self._reports.close()
        if self._started:
            self._todo.put(None)
        else:
            os.close(self._fd)

    async def aclose(self) -> None:
        """Like `close`, and a checkpoint."""
        self.close()
        await trio.lowlevel.checkpoint()
