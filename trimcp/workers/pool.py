"""The worker processes of a running server: a bounded number, reused, each with one call at a time.

This module starts, kills and reaps workers and exchanges lines of JSON with them. `workers.remote` and `worker.serve`
know what the lines mean. A worker whose call was given up is killed; the next call starts another one. A killed worker
counts until it was reaped, so the bound holds for the processes that really exist.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import orjson
import trio

from trimcp.security import security_event
from trimcp.session.incoming.turns import MOST_WAITING, Turns
from trimcp.session.limits import Quota
from trimcp.support.descendants import signal_name
from trimcp.support.slotted import valued
from trimcp.wire.jsonrpc import Malformed, encode, parse_value
from trimcp.workers.output import OutputBound, WorkerOutput
from trimcp.workers.programs import PlainProgram, Started, pipe

if TYPE_CHECKING:
    from trimcp.workers.bubblewrap import Sandbox

log: logging.Logger = logging.getLogger("trimcp.server")

MAX_LINE: Final = 64 * 1024 * 1024
"""Bytes of the longest message of a worker, such as a result."""

_MAX_SANDBOXED: Final = 16 * 1024 * 1024
"""The same for one in a sandbox, whose messages are bounded as those of a peer: in members and depth, too."""

_START: Final = str(Path(__file__).parent.with_name("worker_program") / "start.py")
_CHUNK: Final = 64 * 1024
_DRAINED: Final = 0.5  # seconds to read what a dead worker left in its pipes
_IDLE_TIME: Final = 60.0  # seconds
_STOPPED: Final = 5.0  # seconds between two looks whether a process was stopped (SIGSTOP); at the second it is killed


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
    """One worker process. Its output is copied to our standard error, marked and bounded."""

    process: Started  # the process, leader of its own group
    memory: int | None  # the bound of its address space in bytes, or None
    # the sandbox it is in, or None. One in a sandbox has one call, which may leave nothing to the next.
    sandbox: Sandbox | None
    output: WorkerOutput  # what it writes
    _connection: trio.SocketStream
    _output_pipe: trio.lowlevel.FdStream
    _parent_pipe: int
    # cancelled after being idle for too long; the pool sets its deadline
    idle_scope: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    killed: bool = attrs.field(init=False, default=False)  # whether its group was sent SIGKILL
    # whether it ended by itself, or was killed for an error of its own
    crashed: bool = attrs.field(init=False, default=False)
    # whether its call has ended, with a result or an exception; then it can take another
    done: bool = attrs.field(init=False, default=True)
    turn: _Turn | None = attrs.field(init=False, default=None)  # its call's turn; None while it is idle
    # the id of its call, which each of its messages repeats. No call before could know it.
    call: str = attrs.field(init=False, default="")
    strayed: bool = attrs.field(init=False, default=False)  # whether it wrote what belongs to none of its calls
    _why: str | None = attrs.field(init=False, default=None)  # it was killed
    _send: trio.MemorySendChannel[Any] = attrs.field(init=False)
    _receive: trio.MemoryReceiveChannel[Any] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        # No buffer: while a call waits for a slow client, nothing is read from its worker, so the worker waits too.
        self._send, self._receive = trio.open_memory_channel[Any](0)

    @staticmethod
    async def start(
        memory: int | None, sandbox: Sandbox | None, nursery: trio.Nursery, bound: OutputBound
    ) -> WorkerProcess:
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
            output_end, output = pipe(theirs, ours)
            # -P: otherwise the file's directory comes first in sys.path, and our modules hide the standard library's
            command = [sys.executable, "-P", _START, str(far.fileno()), str(parent_end)]
            kept = far.fileno(), parent_end
            process: Started
            if sandbox is None:
                process = await PlainProgram.start_worker(command, output_end, kept)
            else:
                from trimcp.workers.bubblewrap import start_worker  # few servers need it

                process = await start_worker(nursery, sandbox, command, output_end, kept)
            ours.pop_all()
        connection = trio.SocketStream(trio.socket.from_stdlib_socket(near))
        return WorkerProcess(process, memory, sandbox, WorkerOutput(bound), connection, output, parent_pipe)

    async def keep(self, started: Callable[[], None]) -> None:
        """Serve the process until it has ended and was reaped. Cancelling it kills the process.

        `started`: called once the process is ready for a call.
        """
        try:
            with self.idle_scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.output.forward, self._output_pipe)
                    nursery.start_soon(self._watch, nursery.cancel_scope)
                    await self._write(self._setup())
                    started()
                    await self._read()
                    if self.sandbox is not None:
                        with trio.move_on_after(_DRAINED):  # so that bwrap tells how the worker ended, not that we kill
                            await self.process.exited()
                    self._note_end()
        finally:
            self._kill_group()
            await self.process.end()
            self._send.close()
            self._connection.socket.close()
            os.close(self._parent_pipe)
            self._output_pipe.close()

    def _setup(self) -> bytes:
        path = [os.path.abspath(each) for each in sys.path]  # "" is the current directory
        argv = sys.argv if self.sandbox is None else sys.argv[:1]  # a command line may hold secrets
        # Not orjson: an argument may hold lone surrogates, which only the standard library's module can encode.
        return json.dumps({"path": path, "argv": argv, "memory": self.memory}).encode()

    async def _read(self) -> None:
        """Pass on the worker's messages until it ends, or writes a line that is not JSON or too long."""
        line = bytearray()
        most = MAX_LINE if self.sandbox is None else _MAX_SANDBOXED
        try:
            while chunk := await self._connection.receive_some(_CHUNK):
                *ended, rest = chunk.split(b"\n")
                for each in ended:
                    line += each
                    await self._send.send(self._parsed(line))
                    line = bytearray()
                line += rest
                if len(line) > most:
                    self._why = f"said more than {most // 2**20} MiB at once"
                    return
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the worker has ended, or its call was given up
        except ValueError as error:
            self._why = "wrote what is no message"
            self.breach(str(error))

    def _parsed(self, line: bytearray) -> Any:
        """Return a message. Raises ValueError if it is none, or from a sandbox and too much."""
        if self.sandbox is None:
            return orjson.loads(line)
        value = parse_value(bytes(line))
        if isinstance(value, Malformed):
            raise ValueError(value.message)
        return value

    def breach(self, what: str) -> None:
        """Tell of a worker that did what its tool does not declare."""
        security_event("worker_refused", what=what, worker=self.output.mark, sandboxed=self.sandbox is not None)

    async def _watch(self, scope: trio.CancelScope) -> None:
        """Detect the end of the process, even if a descendant holds its pipes open; `keep` reaps it.

        Until it is reaped, the system does not reuse its id and its group's id.
        """
        # Kill it if it stays stopped: what its call waits for would never come.
        before = False
        while True:
            with trio.move_on_after(_STOPPED) as patience:
                await self.process.exited()
            if not patience.cancelled_caught:
                break
            now = self.process.stopped
            if now and before:
                self._why, self.crashed = "was stopped by a signal", True
                self._kill_group()
            before = now
        self._note_end()
        scope.deadline = trio.current_time() + _DRAINED

    def _note_end(self) -> None:
        """Note that the process has ended, and kill the rest of its group."""
        self.crashed = self.crashed or not self.killed
        self._kill_group()

    def _kill_group(self) -> None:
        if not self.killed:
            self.killed = True
            self.process.kill()

    @property
    def usable(self) -> bool:
        return not self.killed and not self.idle_scope.cancel_called

    def kill(self, *, crashed: bool = False) -> None:
        """Kill the process and its descendants, and receive nothing more from it. `keep` reaps it.

        `crashed`: count it as ended by itself.
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

    async def receive(self) -> dict[str, Any]:
        """Return the next message for this call. Raises trio.EndOfChannel once the process has ended and was reaped.

        What it wrote for an earlier call, and what is no message, is passed over; then it is not used again.
        """
        while True:
            message = await self._receive.receive()
            if type(message) is dict and message.get("call") == self.call:
                return message
            if self.sandbox is not None:  # whatever it is, nobody there may say it
                return {"say": "a message that belongs to no call"}
            if not self.strayed:
                self.strayed = True
                self.breach("a message that belongs to no call")

    @property
    def may_go_on(self) -> bool:
        """Whether it can take another call: it is alive, and nothing is left of earlier ones."""
        waiting = self._receive.statistics().tasks_waiting_send
        return self.usable and self.sandbox is None and not (self.strayed or waiting or self.process.stopped)

    def begin(self, turn: _Turn, tool: str) -> None:
        """Begin a call of this tool."""
        self.turn, self.done, self.call = turn, False, secrets.token_hex(8)
        self.idle_scope.deadline = math.inf
        self.output.begin(tool, self.process.pid)

    def end_reason(self, cpu_time: float | None) -> str:
        """Return how the process ended by itself, as readable text: "was ended by SIGSEGV"."""
        code = self.process.returncode
        if self._why is not None:
            return self._why
        if code is None:
            return "cannot be killed"
        if code >= 0:
            return f"ended with exit code {code}"
        if code == -signal.SIGXCPU and cpu_time is not None:
            return f"used more than {math.ceil(cpu_time)} s of processor time"
        perhaps = "; perhaps the system ran out of memory" if code == -signal.SIGKILL else ""
        return f"was ended by {signal_name(-code)}{perhaps}"


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
    _bounds: dict[bool, OutputBound] = attrs.field(init=False)  # of plain workers, and of those in sandboxes
    _gone: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    _started: int = attrs.field(init=False, default=0)
    _killed: int = attrs.field(init=False, default=0)
    _crashed: int = attrs.field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self.turns = Turns(Quota(running=self.most, waiting=MOST_WAITING), "processes")
        now = trio.current_time()
        self._bounds = {sandboxed: OutputBound(sandboxed=sandboxed, now=now) for sandboxed in (False, True)}

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
        self,
        memory: int | None,
        whose: Hashable,
        deadline: float = math.inf,
        *,
        tool: str = "",
        sandbox: Sandbox | None = None,
    ) -> AsyncIterator[WorkerProcess]:
        """Provide a worker for one call, with this bound of its address space.

        If the block ends before the worker is `done`, for example when cancelled, the worker is killed. While all
        workers are busy, sessions (`whose`) take turns. `tool` marks what the worker writes; in a sandbox it is new.

        Raises ErrorReply: the deadline has passed. Raises OSError: no process could be started.
        """
        worker = await self._take(memory, sandbox, whose, deadline, tool)
        try:
            yield worker
        finally:
            if worker.done and worker.may_go_on:
                self._give_back(worker)
            else:
                self._killed += not worker.killed and not (worker.done and sandbox is not None)
                worker.kill()

    async def _take(
        self, memory: int | None, sandbox: Sandbox | None, whose: Hashable, deadline: float, tool: str
    ) -> WorkerProcess:
        turn = _Turn(self.turns, await self.turns.acquire(whose, deadline))
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
        worker.begin(turn, tool)
        return worker

    def _fitting(self, memory: int | None) -> WorkerProcess | None:
        """Take the idle worker with this bound that was used last, so that the others reach their idle time."""
        for worker in self._idle[::-1]:
            if worker.memory == memory and worker.usable:
                self._idle.remove(worker)
                if worker.may_go_on:
                    return worker
                worker.kill(crashed=True)  # it was stopped, or said something while nobody had called it
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
            worker = await WorkerProcess.start(memory, sandbox, self._nursery, self._bounds[sandbox is not None])
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
