"""One worker process as its server sees it: started, spoken to in lines of JSON, killed with its whole group, reaped.

It knows processes, pipes and time. What the lines say is the business of `remote` here and of `worker` there.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

import attrs
import orjson
import trio

from trimcp.server.turns import Turns
from trimcp.wire.jsonrpc import encode

__all__ = ["MAX_LINE", "Turn", "Worker"]

log: logging.Logger = logging.getLogger("trimcp.server")

MAX_LINE: Final = 64 * 1024 * 1024
"""Bytes that one line of a worker's may have, a result for instance."""

_START: Final = str(Path(__file__).with_name("worker_start.py"))
_CHUNK: Final = 64 * 1024
_TAIL: Final = 64 * 1024  # what is kept of a worker's output, for the log
_LAST_WORDS: Final = 40  # lines of it that are logged
_REAPED: Final = 5.0  # seconds for the system to clear away what SIGKILL ended
_DRAINED: Final = 0.5  # seconds to read what a dead worker left in its pipes


@attrs.define(eq=False, repr=False)
class Turn:
    """A call's turn, given back once: by the call, or by who clears its worker away."""

    _turns: Turns
    _since: float
    _over: bool = attrs.field(init=False, default=False)

    def give_back(self) -> None:
        """Let the next call begin."""
        if not self._over:
            self._over = True
            self._turns.give_back(self._since)


@attrs.define(eq=False, repr=False)
class Worker:
    """A process that runs one call at a time. Its output goes to our standard error.

    Attributes:
        process: the process, leader of its own group.
        memory: bytes of address space it may have, or None.
        rest: cancelled when it has been idle for too long; the pool sets its deadline.
        killed: whether its group was sent SIGKILL.
        crashed: whether it ended by itself, or is killed for what it did.
        done: whether its call has ended, with a result or an exception; then it can have another.
        turn: the one that its call has; None while it is idle.
    """

    process: trio.Process
    memory: int | None
    _connection: trio.SocketStream
    _output: trio.lowlevel.FdStream
    _leash: int
    rest: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    killed: bool = attrs.field(init=False, default=False)
    crashed: bool = attrs.field(init=False, default=False)
    done: bool = attrs.field(init=False, default=True)
    turn: Turn | None = attrs.field(init=False, default=None)
    _oversize: bool = attrs.field(init=False, default=False)
    _tail: bytearray = attrs.field(init=False, factory=bytearray)
    _send: trio.MemorySendChannel[Any] = attrs.field(init=False)
    _receive: trio.MemoryReceiveChannel[Any] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        # Without room: a call that waits for its slow client does not read on, and so its worker waits too.
        self._send, self._receive = trio.open_memory_channel[Any](0)

    # For the one who keeps it

    @staticmethod
    async def start(memory: int | None) -> Worker:
        """Start a process. The system does that in a thread, so the event loop goes on.

        Raises:
            OSError: it could not be started.
        """
        with ExitStack() as ours, ExitStack() as theirs:
            near, far = socket.socketpair()
            ours.callback(near.close)
            theirs.callback(far.close)
            leash_end, leash = os.pipe()
            theirs.callback(os.close, leash_end)
            ours.callback(os.close, leash)
            output, output_end = os.pipe()
            ours.callback(os.close, output)
            theirs.callback(os.close, output_end)
            # -P: the first entry of its path is not the folder of the file, where ours would hide the library's modules
            process = await trio.lowlevel.open_process(
                [sys.executable, "-P", _START, str(far.fileno()), str(leash_end)],
                stdin=subprocess.DEVNULL,
                stdout=output_end,
                stderr=output_end,
                pass_fds=(far.fileno(), leash_end),
                process_group=0,
            )
            ours.pop_all()
        connection = trio.SocketStream(trio.socket.from_stdlib_socket(near))
        return Worker(process, memory, connection, trio.lowlevel.FdStream(output), leash)

    async def keep(self, task_status: trio.TaskStatus[None]) -> None:
        """Look after the process until it has ended and was reaped. Cancelling it kills the process."""
        try:
            with self.rest:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._forward_output)
                    nursery.start_soon(self._watch, nursery.cancel_scope)
                    await self._write(self._setup())
                    task_status.started()
                    await self._read()
                    self._bury()
        finally:
            self._kill_group()
            # The process is dead; this is for the system to say so.
            with trio.move_on_after(_REAPED, shield=True):
                await self.process.wait()
            self._send.close()
            self._connection.socket.close()
            os.close(self._leash)
            self._output.close()

    def _setup(self) -> bytes:
        path = [os.path.abspath(each) for each in sys.path]  # "" is where we are
        # Not orjson: an argument may be what is no text, which the library's own module can carry.
        return json.dumps({"path": path, "argv": sys.argv, "memory": self.memory}).encode()

    async def _read(self) -> None:
        """Pass on what the worker says until it ends, or says what is no line of ours."""
        line = bytearray()
        try:
            while chunk := await self._connection.receive_some(_CHUNK):
                *ended, rest = chunk.split(b"\n")
                for each in ended:
                    line += each
                    await self._send.send(orjson.loads(line))
                    line = bytearray()
                line += rest
                if len(line) > MAX_LINE:
                    self._oversize = True
                    return
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # it is gone, or whoever listened is
        except orjson.JSONDecodeError:
            log.error("the worker process %d wrote what is no message, and is killed", self.process.pid)

    async def _forward_output(self) -> None:
        """Write to standard error what the worker writes, in a thread: whoever reads it may be slow."""
        limiter = trio.CapacityLimiter(1)
        with suppress(trio.BrokenResourceError):
            while chunk := await self._output.receive_some(_CHUNK):
                self._tail += chunk
                del self._tail[:-_TAIL]
                await trio.to_thread.run_sync(_write_stderr, chunk, abandon_on_cancel=True, limiter=limiter)

    async def _watch(self, scope: trio.CancelScope) -> None:
        """Notice that the process has ended, even where a descendant holds its pipes; leave it to be reaped by `keep`.

        While it is not reaped its id, and its group's, cannot pass to somebody else.
        """
        if sys.platform == "linux":
            handle = os.pidfd_open(self.process.pid)
            try:
                await trio.lowlevel.wait_readable(handle)
            finally:
                os.close(handle)
        else:
            await self.process.wait()
        self._bury()
        scope.deadline = trio.current_time() + _DRAINED

    def _bury(self) -> None:
        """End what is left of it: it has ended by itself, if nobody killed it."""
        self.crashed = self.crashed or not self.killed
        self._kill_group()

    def _kill_group(self) -> None:
        if not self.killed:
            self.killed = True
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass  # nobody is left; macOS says so of a group of zombies

    # For who uses it

    @property
    def usable(self) -> bool:
        """Whether it can take a call, as far as is known here."""
        return not self.killed and not self.rest.cancel_called

    def kill(self, *, crashed: bool = False) -> None:
        """Kill it and its descendants, and hear nothing more of it. `keep` reaps it.

        Args:
            crashed: for what it did, which counts as its own end.
        """
        self.crashed = self.crashed or crashed
        self._kill_group()
        self._receive.close()

    async def say(self, message: Mapping[str, Any]) -> None:
        """Send it a message. If it is gone nothing is raised: `hear` tells.

        Raises:
            Unencodable: JSON cannot carry it.
        """
        await self._write(encode(message))

    async def _write(self, line: bytes) -> None:
        try:
            await self._connection.send_all(line + b"\n")
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass

    async def hear(self) -> Any:
        """Return the next thing it says.

        Raises:
            trio.EndOfChannel: it has ended, and was reaped.
        """
        return await self._receive.receive()

    def forget_output(self) -> None:
        """Forget what it has written so far: it belongs to earlier calls."""
        self._tail.clear()

    def last_words(self) -> str:
        """Return the end of what it wrote, its traceback or a fatal error perhaps. Untrusted text."""
        lines = self._tail.decode(errors="backslashreplace").rstrip().split("\n")
        return "\n".join(lines[-_LAST_WORDS:])

    def how_it_ended(self, cpu_time: float | None) -> str:
        """Say how it ended by itself, for a person: "was ended by SIGSEGV"."""
        code = self.process.returncode
        if self._oversize:
            return f"said more than {MAX_LINE // 2**20} MiB at once"
        if code is None:
            return "cannot be killed"
        if code >= 0:
            return f"ended with exit code {code}"
        if code == -signal.SIGXCPU and cpu_time is not None:
            return f"used more than {math.ceil(cpu_time)} s of processor time"
        perhaps = "; perhaps the system ran out of memory" if code == -signal.SIGKILL else ""
        return f"was ended by {_signal_name(-code)}{perhaps}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _write_stderr(data: bytes) -> None:
    while data:
        try:
            data = data[os.write(2, data) :]
        except BlockingIOError:  # somebody made it non-blocking; what is lost here is kept for the log
            return
        except OSError as error:
            if error.errno in (errno.EBADF, errno.EPIPE, errno.EIO):
                return
            raise
