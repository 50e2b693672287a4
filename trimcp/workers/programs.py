"""One external program from its start to its end: its input, its bounded output, and the end of all it started.

How a program is started and killed differs (`Started`); what is done with its pipes does not.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from threading import Thread
from typing import Final, Protocol

import attrs
import trio

from trimcp.support.descendants import MARK, Descendants, signal_until_gone

log: logging.Logger = logging.getLogger("trimcp.server")

INHERITED: Final = ("PATH", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "LC_MESSAGES", "TZ")
"""The environment variables that a program inherits by default."""

_CHUNK: Final = 64 * 1024  # bytes; a pipe holds no more, so one read empties that of a program that has ended
_ERRORS: Final = 16 * 1024  # bytes of standard error that are kept, the last ones
_ENDED: Final = 5.0  # seconds for the system to end killed processes
_DRAINED: Final = 0.5  # seconds to read what an ended program left in its pipes


class Started(Protocol):
    """A program that was started, with all processes that it has started in turn."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None:
        """The exit status, or minus a signal; None until the end."""

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped it, so that it does nothing until another lets it go on."""
        ...

    async def exited(self) -> None:
        """Wait until the program has ended. What it started may go on."""

    def kill(self) -> None:
        """Kill what is left, without waiting."""

    async def end(self) -> int | None:
        """Kill what is left and wait until it is gone. Return the exit status, or minus a signal; None if it stays.

        It cannot be cancelled, but waits for a few seconds at the most. Calling it again only returns the status.
        """


@attrs.frozen
class Pipes:
    """The program's ends of its standard streams, as descriptors. They are closed once it was started."""

    stdin: int
    stdout: int
    stderr: int


Start = Callable[[Pipes], Awaitable[Started]]
"""Starts a program with these standard streams. Raises OSError if that fails."""


@attrs.frozen
class Finished:
    """How a program ended."""

    status: int | None  # its exit status, or minus the signal that ended it; None if it cannot be killed
    output: bytes  # what it wrote to standard output
    errors: bytes  # the last of what it wrote to standard error
    overflow: bool  # whether it wrote more output than allowed, and was killed for it


@attrs.define(eq=False)
class _Captured:
    most: int
    output: bytearray = attrs.field(factory=bytearray)
    errors: bytearray = attrs.field(factory=bytearray)
    overflow: bool = False

    async def read_output(self, stream: trio.lowlevel.FdStream, scope: trio.CancelScope) -> None:
        while chunk := await stream.receive_some(_CHUNK):
            self.output += chunk
            if len(self.output) > self.most:
                self.overflow = True
                scope.cancel(reason="the program wrote more than it may")
                return

    async def read_errors(self, stream: trio.lowlevel.FdStream) -> None:
        while chunk := await stream.receive_some(_CHUNK):
            self.errors += chunk
            del self.errors[:-_ERRORS]


def worker_loads() -> bool:
    """Return whether this is a worker process that loads the module of its tool. The other tools in it do not run here.

    What they need need not be here either, and looking for it would cost each worker's start.
    """
    worker = sys.modules.get("trimcp.worker_program.serve")
    return worker is not None and worker.loading


def environment_of(inherit: Collection[str], home: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return a program's environment: the variables of ours that it inherits, those of its directory, and `env`."""
    inherited = {name: os.environ[name] for name in inherit if name in os.environ}
    # Exported shell functions are code that a shell started by the program would run.
    inherited = {name: value for name, value in inherited.items() if not value.startswith("()")}
    return {**inherited, "HOME": home, "TMPDIR": home, **env}


async def run_program(start: Start, given: bytes, most: int) -> Finished:
    """Run a program to its end. Cancelling kills it, with everything it has started.

    Nothing of it is left when this returns or raises.

    `most`: bytes of output it may write. Raises OSError: it could not be started.
    """
    captured = _Captured(most)
    with ExitStack() as ours:
        with ExitStack() as theirs:
            stdin, near_in = pipe(theirs, ours, near_writes=True)
            stdout, near_out = pipe(theirs, ours)
            stderr, near_err = pipe(theirs, ours)
            program = await start(Pipes(stdin, stdout, stderr))
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_write, near_in, given)
                nursery.start_soon(captured.read_output, near_out, nursery.cancel_scope)
                nursery.start_soon(captured.read_errors, near_err)
                await program.exited()
                await program.end()  # what it started holds its pipes open, and would keep us reading
                nursery.cancel_scope.deadline = trio.current_time() + _DRAINED
        finally:
            status = await program.end()
    return Finished(status, bytes(captured.output), bytes(captured.errors), captured.overflow)


def pipe(theirs: ExitStack, ours: ExitStack, *, near_writes: bool = False) -> tuple[int, trio.lowlevel.FdStream]:
    """Return the program's end of a new pipe and ours, each to be closed by a stack."""
    reading, writing = os.pipe()
    far, near = (reading, writing) if near_writes else (writing, reading)
    theirs.callback(os.close, far)
    stream = trio.lowlevel.FdStream(near)
    ours.callback(stream.close)
    return far, stream


async def _write(stream: trio.lowlevel.FdStream, given: bytes) -> None:
    with suppress(trio.BrokenResourceError):  # it need not read its input
        await stream.send_all(given)
    stream.close()


@attrs.define(eq=False, repr=False)
class PlainProgram:
    """A program as a child process, leader of a group of its own."""

    process: trio.Process
    _descendants: Descendants | None  # what is killed with it beyond its group; None for nothing
    _killed: bool = attrs.field(init=False, default=False)
    _ended: bool = attrs.field(init=False, default=False)

    @staticmethod
    async def start(
        command: Sequence[str], environment: Mapping[str, str], directory: str | os.PathLike[str], pipes: Pipes
    ) -> PlainProgram:
        """Start a program in a session of its own. Raises OSError if that fails."""
        mark = Descendants.new_mark()
        process = await trio.lowlevel.open_process(
            list(command),
            stdin=pipes.stdin,
            stdout=pipes.stdout,
            stderr=pipes.stderr,
            env={**environment, MARK: mark},
            cwd=directory,
            start_new_session=True,
        )
        return PlainProgram(process, Descendants(process.pid, mark))

    @staticmethod
    async def start_worker(command: Sequence[str], output: int, keep: Sequence[int]) -> PlainProgram:
        """Start a worker process, with these descriptors and our environment. Raises OSError if that fails."""
        process = await trio.lowlevel.open_process(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=keep,
            process_group=0,
        )
        return PlainProgram(process, None)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.returncode

    @property
    def stopped(self) -> bool:
        if hasattr(os, "waitid"):
            with suppress(ChildProcessError):
                return os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        return False

    async def exited(self) -> None:
        if sys.platform != "linux":
            await self.process.wait()
            return
        handle = os.pidfd_open(self.pid)  # not reaped yet, so its id, which is its group's, is not used again
        try:
            await trio.lowlevel.wait_readable(handle)
        finally:
            os.close(handle)

    def kill(self) -> None:
        if not self._killed:
            self._killed = True
            # To the group at once: processes that fork and fork cannot escape one by one.
            with suppress(ProcessLookupError, PermissionError):  # macOS: a group of zombies
                os.killpg(self.pid, signal.SIGKILL)

    async def end(self) -> int | None:
        self.kill()
        if not self._ended:
            self._ended = True
            with trio.move_on_after(_ENDED, shield=True) as scope:
                await self.process.wait()
                if self._descendants is not None:
                    await signal_until_gone(self.process, self._descendants, "SIGKILL")
            if scope.cancelled_caught:
                log.error("process %d, or what it started, survived SIGKILL", self.pid)
        return self.returncode


def bounded_by(prlimit: str, memory: int | None, cpu_time: float | None, processes: int | None) -> list[str]:
    """Return the beginning of a command line that bounds each process of what follows.

    `processes`: how many there may be, in namespaces of users of their own; their first process is one more.
    """
    prefix = [prlimit, "--core=0"]
    if memory is not None:
        prefix.append(f"--as={int(memory)}")
    if cpu_time is not None:
        seconds = math.ceil(cpu_time)
        prefix.append(f"--cpu={seconds}:{seconds + 1}")  # SIGXCPU tells what happened, SIGKILL cannot be ignored
    if processes is not None:
        prefix.append(f"--nproc={processes + 1}")
    return [*prefix, "--"]


def in_real_time(function: Callable[[], Awaitable[Finished]]) -> Finished:
    """Run to the end in an event loop of its own, while the caller's waits: a test clock would jump meanwhile."""
    finished: list[Finished] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            finished.append(trio.run(function))
        except BaseException as error:  # raised again by the caller
            failed.append(error)

    thread = Thread(target=run, name="trimcp program in real time")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return finished[0]
