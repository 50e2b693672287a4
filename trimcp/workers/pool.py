"""The worker processes of a running server: a bounded number, reused, each with one call at a time.

This module starts, kills and reaps workers and exchanges lines of JSON with them. `workers.remote` and `worker.serve`
know what the lines mean. A worker whose call was given up is killed; the next call starts another one. A killed worker
counts until it was reaped, so the bound holds for the processes that really exist.
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
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import orjson
import trio

from trimcp.session.limits import Quota
from trimcp.session.turns import MOST_WAITING, Turns
from trimcp.values import valued
from trimcp.wire.jsonrpc import encode

if TYPE_CHECKING:
    from trimcp.workers.bubblewrap import Sandbox, SandboxedProgram

log: logging.Logger = logging.getLogger("trimcp.server")

MAX_LINE: Final = 64 * 1024 * 1024
"""Bytes of the longest line that a worker may write, such as a result."""

_START: Final = str(Path(__file__).parent.with_name("worker") / "start.py")
_CHUNK: Final = 64 * 1024
_TAIL: Final = 64 * 1024  # bytes of a worker's output that are kept for the log
_TAIL_LINES: Final = 40  # lines of that output that are logged
_REAPED: Final = 5.0  # seconds for the system to end a killed process
_DRAINED: Final = 0.5  # seconds to read what a dead worker left in its pipes
_IDLE_TIME: Final = 60.0  # seconds


@attrs.define(eq=False, repr=False)
class _Turn:
    """A call's turn. Only the first `give_back` counts: the call's, or the pool's after its worker has ended."""

    _turns: Turns
    _since: float
    _over: bool = attrs.field(init=False, default=False)

    def give_back(self) -> None:
        if not self._over:
            self._over = True
            self._turns.give_back(self._since)


@attrs.define(eq=False, repr=False)
class WorkerProcess:
    """One worker process. Its output is copied to our standard error.

    Attributes:
        process: the process, leader of its own group.
        memory: the bound of its address space in bytes, or None.
        sandbox: the sandbox it is in, or None. One in a sandbox has one call, which may leave nothing to the next.
        idle_scope: cancelled after being idle for too long; the pool sets its deadline.
        killed: whether its group was sent SIGKILL.
        crashed: whether it ended by itself, or was killed for an error of its own.
        done: whether its call has ended, with a result or an exception; then it can take another.
        turn: its call's turn; None while it is idle.
    """

    process: trio.Process | SandboxedProgram
    memory: int | None
    sandbox: Sandbox | None
    _connection: trio.SocketStream
    _output: trio.lowlevel.FdStream
    _parent_pipe: int
    idle_scope: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    killed: bool = attrs.field(init=False, default=False)
    crashed: bool = attrs.field(init=False, default=False)
    done: bool = attrs.field(init=False, default=True)
    turn: _Turn | None = attrs.field(init=False, default=None)
    _oversize: bool = attrs.field(init=False, default=False)
    _tail: bytearray = attrs.field(init=False, factory=bytearray)
    _send: trio.MemorySendChannel[Any] = attrs.field(init=False)
    _receive: trio.MemoryReceiveChannel[Any] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        # No buffer: while a call waits for a slow client, nothing is read from its worker, so the worker waits too.
        self._send, self._receive = trio.open_memory_channel[Any](0)

    @staticmethod
    async def start(memory: int | None, sandbox: Sandbox | None, nursery: trio.Nursery) -> WorkerProcess:
        """Start a process, in a thread, so the event loop is not blocked. Raises OSError if that fails.

        A task in the nursery waits for the end of a sandbox.
        """
        with ExitStack() as ours, ExitStack() as theirs:
            near, far = socket.socketpair()
            ours.callback(near.close)
            theirs.callback(far.close)
            parent_end, parent_pipe = os.pipe()
            theirs.callback(os.close, parent_end)
            ours.callback(os.close, parent_pipe)
            output, output_end = os.pipe()
            ours.callback(os.close, output)
            theirs.callback(os.close, output_end)
            # -P: otherwise the file's directory comes first in sys.path, and our modules hide the standard library's
            command = [sys.executable, "-P", _START, str(far.fileno()), str(parent_end)]
            kept = far.fileno(), parent_end
            process: trio.Process | SandboxedProgram
            if sandbox is None:
                process = await trio.lowlevel.open_process(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output_end,
                    stderr=output_end,
                    pass_fds=kept,
                    process_group=0,
                )
            else:
                from trimcp.workers.bubblewrap import start_worker  # few servers need it

                process = await start_worker(nursery, sandbox, command, output_end, kept)
            ours.pop_all()
        connection = trio.SocketStream(trio.socket.from_stdlib_socket(near))
        return WorkerProcess(process, memory, sandbox, connection, trio.lowlevel.FdStream(output), parent_pipe)

    async def keep(self, started: Callable[[], None]) -> None:
        """Serve the process until it has ended and was reaped. Cancelling it kills the process.

        Args:
            started: called once the process is ready for a call.
        """
        try:
            with self.idle_scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._forward_output)
                    nursery.start_soon(self._watch, nursery.cancel_scope)
                    await self._write(self._setup())
                    started()
                    await self._read()
                    if not isinstance(self.process, trio.Process):
                        with trio.move_on_after(_DRAINED):  # so that bwrap tells how the worker ended, not that we kill
                            await self.process.exited()
                    self._note_end()
        finally:
            self._kill_group()
            # The process is killed; wait for the system to report its end.
            with trio.move_on_after(_REAPED, shield=True):
                await (self.process.wait() if isinstance(self.process, trio.Process) else self.process.end())
            self._send.close()
            self._connection.socket.close()
            os.close(self._parent_pipe)
            self._output.close()

    def _setup(self) -> bytes:
        path = [os.path.abspath(each) for each in sys.path]  # "" is the current directory
        # Not orjson: an argument may hold lone surrogates, which only the standard library's module can encode.
        return json.dumps({"path": path, "argv": sys.argv, "memory": self.memory}).encode()

    async def _read(self) -> None:
        """Pass on the worker's messages until it ends, or writes a line that is not JSON or too long."""
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
            pass  # the worker has ended, or its call was given up
        except orjson.JSONDecodeError:
            log.error("the worker process %d wrote what is no message, and is killed", self.process.pid)

    async def _forward_output(self) -> None:
        """Copy the worker's output to standard error, in a thread: the reader of standard error may be slow."""
        limiter = trio.CapacityLimiter(1)
        with suppress(trio.BrokenResourceError):
            while chunk := await self._output.receive_some(_CHUNK):
                self._tail += chunk
                del self._tail[:-_TAIL]
                await trio.to_thread.run_sync(_write_stderr, chunk, abandon_on_cancel=True, limiter=limiter)

    async def _watch(self, scope: trio.CancelScope) -> None:
        """Detect the end of the process, even if a descendant holds its pipes open; `keep` reaps it.

        Until it is reaped, the system does not reuse its id and its group's id.
        """
        if not isinstance(self.process, trio.Process):
            await self.process.exited()
        elif sys.platform == "linux":
            handle = os.pidfd_open(self.process.pid)
            try:
                await trio.lowlevel.wait_readable(handle)
            finally:
                os.close(handle)
        else:
            await self.process.wait()
        self._note_end()
        scope.deadline = trio.current_time() + _DRAINED

    def _note_end(self) -> None:
        """Note that the process has ended, and kill the rest of its group."""
        self.crashed = self.crashed or not self.killed
        self._kill_group()

    def _kill_group(self) -> None:
        if not self.killed:
            self.killed = True
            if not isinstance(self.process, trio.Process):
                self.process.kill()
                return
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass  # no process is left; macOS raises PermissionError for a group of zombies

    @property
    def usable(self) -> bool:
        return not self.killed and not self.idle_scope.cancel_called

    def kill(self, *, crashed: bool = False) -> None:
        """Kill the process and its descendants, and receive nothing more from it. `keep` reaps it.

        Args:
            crashed: count it as ended by itself.
        """
        self.crashed = self.crashed or crashed
        self._kill_group()
        self._receive.close()

    async def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. If the process has ended, `receive` raises, not this. Raises Unencodable."""
        await self._write(encode(message))

    async def _write(self, line: bytes) -> None:
        try:
            await self._connection.send_all(line + b"\n")
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass

    async def receive(self) -> Any:
        """Return the worker's next message. Raises trio.EndOfChannel once the process has ended and was reaped."""
        return await self._receive.receive()

    def clear_output(self) -> None:
        self._tail.clear()

    def output_tail(self) -> str:
        """Return the last lines of the worker's output, such as a traceback. Untrusted text."""
        lines = self._tail.decode(errors="backslashreplace").rstrip().split("\n")
        return "\n".join(lines[-_TAIL_LINES:])

    def end_reason(self, cpu_time: float | None) -> str:
        """Return how the process ended by itself, as readable text: "was ended by SIGSEGV"."""
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


@attrs.frozen
@valued
class ProcessStatistics:
    """A snapshot of the worker processes of one run of a server.

    Attributes:
        most: the upper bound of processes.
        alive: processes that exist, including those that are starting or ending.
        busy: processes that have a call, or are ending because it was given up.
        waiting: calls that wait for a process.
        started: processes started so far.
        killed: processes killed with their call: cancelled, out of time, disconnected.
        crashed: processes that ended by themselves, or ran out of memory.
    """

    most: int
    alive: int
    busy: int
    waiting: int
    started: int
    killed: int
    crashed: int


@attrs.define(eq=False, repr=False)
class WorkerPool:
    """At most `most` worker processes, whose tasks run in the nursery. Idle ones end after `idle_time` seconds."""

    _nursery: trio.Nursery
    most: int
    idle_time: float = _IDLE_TIME
    turns: Turns = attrs.field(init=False)
    _alive: int = attrs.field(init=False, default=0)
    _idle: list[WorkerProcess] = attrs.field(init=False, factory=list)
    _gone: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    _started: int = attrs.field(init=False, default=0)
    _killed: int = attrs.field(init=False, default=0)
    _crashed: int = attrs.field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self.turns = Turns(Quota(running=self.most, waiting=MOST_WAITING), "processes")

    def statistics(self) -> ProcessStatistics:
        return ProcessStatistics(
            most=self.most,
            alive=self._alive,
            busy=self.turns.running,
            waiting=self.turns.waiting,
            started=self._started,
            killed=self._killed,
            crashed=self._crashed,
        )

    @asynccontextmanager
    async def worker(
        self, memory: int | None, whose: Hashable, deadline: float = math.inf, *, sandbox: Sandbox | None = None
    ) -> AsyncIterator[WorkerProcess]:
        """Provide a worker for one call, with this bound of its address space.

        If the block ends before the worker is `done`, for example when cancelled, the worker is killed.

        Args:
            memory: bytes, or None for no bound.
            whose: identifies the session; while all workers are busy, sessions take turns.
            deadline: the latest time to begin, on Trio's clock.
            sandbox: where the worker is to run, which then is a new one; None for a plain process.

        Raises:
            ErrorReply: the deadline has passed.
            OSError: no process could be started.
        """
        worker = await self._take(memory, sandbox, whose, deadline)
        try:
            yield worker
        finally:
            if worker.done and worker.usable and sandbox is None:
                self._give_back(worker)
            else:
                self._killed += not worker.killed and not (worker.done and sandbox is not None)
                worker.kill()

    async def _take(
        self, memory: int | None, sandbox: Sandbox | None, whose: Hashable, deadline: float
    ) -> WorkerProcess:
        turn = _Turn(self.turns, await self.turns.take(whose, deadline))
        try:
            worker = self._fitting(memory) if sandbox is None else None
            if worker is None:
                while self._alive >= self.most:  # idle ones with another bound must end first, or some are ending
                    if self._idle:
                        self._idle.pop(0).kill()
                    await self._gone.park()
                worker = await self._nursery.start(self._keep, memory, sandbox, turn)
        except BaseException:  # cancelled, or no process could be started
            turn.give_back()
            raise
        worker.turn, worker.done = turn, False
        worker.idle_scope.deadline = math.inf
        worker.clear_output()
        return worker

    def _fitting(self, memory: int | None) -> WorkerProcess | None:
        """Take the idle worker with this bound that was used last, so that the others reach their idle time."""
        for worker in reversed(self._idle):
            if worker.memory == memory and worker.usable:
                self._idle.remove(worker)
                return worker
        return None

    def _give_back(self, worker: WorkerProcess) -> None:
        turn, worker.turn = worker.turn, None
        assert turn is not None
        worker.idle_scope.deadline = trio.current_time() + self.idle_time
        self._idle.append(worker)
        turn.give_back()

    async def _keep(
        self,
        memory: int | None,
        sandbox: Sandbox | None,
        turn: _Turn,
        *,
        task_status: trio.TaskStatus[WorkerProcess],
    ) -> None:
        self._alive += 1
        worker: WorkerProcess | None = None
        try:
            worker = await WorkerProcess.start(memory, sandbox, self._nursery)
            self._started += 1
            worker.turn = turn
            log.debug("started worker process %d", worker.process.pid)
            await worker.keep(partial(task_status.started, worker))
        finally:
            self._alive -= 1
            if worker is not None:
                log.debug("worker process %d is gone", worker.process.pid)
                if worker in self._idle:
                    self._idle.remove(worker)
                self._crashed += worker.crashed
                if worker.turn is not None:
                    worker.turn.give_back()
            self._gone.unpark_all()


def cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _write_stderr(data: bytes) -> None:
    while data:
        try:
            data = data[os.write(2, data) :]
        except BlockingIOError:  # another program made it non-blocking; the lost output is still kept for the log
            return
        except OSError as error:
            if error.errno in (errno.EBADF, errno.EPIPE, errno.EIO):
                return
            raise
