"""The memory of processes, and a server that is a child of this one, read and written byte by byte."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import orjson
import trio

import trimcp
from tests.fuzz.effort import PATIENCE
from tests.hostile import server_for_attack
from tests.peers.messages import call, initialize, notification

__all__ = [
    "ENVIRONMENT",
    "KIB",
    "MIB",
    "ChildServer",
    "Measured",
    "child_server",
    "forget_peak",
    "grown",
    "memory_of",
    "seconds_an_interpreter_needs",
]

KIB = 1024
MIB = 1024 * KIB
PROGRAM = Path(server_for_attack.__file__)
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(trimcp.__file__).parent.parent)}


def memory_of(pid: int, *, peak: bool = False) -> int:
    """Bytes of memory a process has resident now, or had at most since `forget_peak`."""
    wanted = "VmHWM:" if peak else "VmRSS:"
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(wanted):
            return int(line.split()[1]) * KIB
    raise AssertionError("the process is gone")


def forget_peak(pid: int | None = None) -> int:
    """Let the peak of a process, by default of ours, begin at what is resident now, and return that."""
    pid = os.getpid() if pid is None else pid
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return memory_of(pid)


def grown(base: int) -> int:
    """Bytes that we had at most since `forget_peak` returned `base`, above that."""
    return memory_of(os.getpid(), peak=True) - base


async def seconds_an_interpreter_needs(modules: str) -> float:
    """How long it takes here and now until one with these modules, and nothing to do, is gone."""
    program = f"import sys, {modules}; print(flush=True); sys.stdin.read()"
    process = await trio.lowlevel.open_process([sys.executable, "-c", program], stdin=-1, stdout=-1, env=ENVIRONMENT)
    assert process.stdin is not None
    assert process.stdout is not None
    async with process.stdout, process.stdin:
        await process.stdout.receive_some(1)
        began = trio.current_time()
        await process.stdin.aclose()
        await process.wait()
    return trio.current_time() - began


class Measured:
    """A process whose memory is measured."""

    @property
    def pid(self) -> int:
        raise NotImplementedError

    @property
    def memory(self) -> int:
        """Bytes resident now."""
        return memory_of(self.pid)

    @property
    def peak(self) -> int:
        """Bytes resident at most since `forget_peak`."""
        return memory_of(self.pid, peak=True)

    def forget_peak(self) -> int:
        """Let the peak begin at what is resident now, and return that."""
        return forget_peak(self.pid)


@attrs.define(eq=False)
class ChildServer(Measured):
    """A server over standard input and output.

    Attributes:
        process: the process.
        errors: what it wrote to its standard error, up to now.
        silent: set once it can write nothing more there.
    """

    process: trio.Process
    errors: bytearray = attrs.field(factory=bytearray)
    silent: trio.Event = attrs.field(factory=trio.Event)
    _data: bytearray = attrs.field(factory=bytearray)

    @property
    def pid(self) -> int:
        return self.process.pid

    async def pour(self, data: bytes) -> None:
        """Write bytes as they are."""
        assert self.process.stdin is not None
        await self.process.stdin.send_all(data)

    async def say(self, *texts: bytes) -> None:
        """Write messages, each on a line, all in one write."""
        await self.pour(b"".join(text + b"\n" for text in texts))

    async def line(self) -> bytes:
        """Read one line, with its line ending."""
        assert self.process.stdout is not None
        start = 0
        while (end := self._data.find(b"\n", start)) < 0:
            start = len(self._data)
            chunk = await self.process.stdout.receive_some(MIB)
            assert chunk, f"the server ended: {self.errors.decode()[-2000:]}"
            self._data += chunk
        line = bytes(self._data[: end + 1])
        del self._data[: end + 1]
        return line

    async def hear(self) -> Any:
        """Read one message."""
        return orjson.loads(await self.line())

    async def answer(self, id: Any) -> Any:
        """Read until the answer to this request, and return it."""
        while True:
            message = await self.hear()
            if isinstance(message, dict) and message.get("id") == id and "method" not in message:
                return message

    async def meet(self, revision: str = "2025-11-25", **capabilities: Any) -> None:
        """Initialize."""
        await self.say(initialize(revision, **capabilities), notification("notifications/initialized"))
        await self.answer("hello")

    async def statistics(self) -> dict[str, int]:
        """What the server counts of itself."""
        await self.say(call("statistics", "statistics"))
        message = await self.answer("statistics")
        counts: dict[str, int] = json.loads(message["result"]["content"][0]["text"])
        return counts

    async def at_rest(self) -> dict[str, int]:
        """What the server counts of itself while nothing is under way: of each number the least of twenty answers.

        More is counted while what was given up still ends, and while another worker task takes the call of the one that
        was woken for it. Neither lasts for twenty calls; what leaks does.
        """
        answers = [await self.statistics() for _ in range(20)]
        return {what: min(counts[what] for counts in answers) for what in answers[0]}

    async def warmed(self) -> None:
        """Let the server do a little of everything, so that later growth is the attack's."""
        for n in range(300):
            await self.say(call(n, "echo", text="x" * 1000))
            await self.answer(n)
            await self.say(call(n, "stream", count=2))
            await self.answer(n)

    async def watch_errors(self) -> None:
        assert self.process.stderr is not None
        async for chunk in self.process.stderr:
            self.errors += chunk
        self.silent.set()

    async def end(self) -> int:
        """Close its input and wait until it has exited."""
        assert self.process.stdin is not None
        await self.process.stdin.aclose()
        return await self.process.wait()


@asynccontextmanager
async def child_server(
    environment: Mapping[str, str] | None = None, *, program: Path = PROGRAM, **options: Any
) -> AsyncIterator[ChildServer]:
    """Yield a new server process; it is killed in the end unless it has exited."""
    process = await trio.lowlevel.open_process(
        [sys.executable, str(program), json.dumps(options)],
        stdin=-1,
        stdout=-1,
        stderr=-1,
        env={**ENVIRONMENT, **(environment or {})},
    )
    self = ChildServer(process)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(self.watch_errors)
        try:
            with trio.fail_after(PATIENCE):
                yield self
        finally:
            with trio.CancelScope(shield=True):
                if process.returncode is None:
                    process.kill()
                await process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with trio.CancelScope(shield=True):
                    await stream.aclose()
