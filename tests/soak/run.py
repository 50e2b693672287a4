"""Soak: mixed load on servers and clients for some minutes, and what stays of it: `nox -s soak -- --minutes 10`.

Four processes: this one makes the load, one serves HTTP, HTTP+SSE and WebSocket, one serves over stdio, and one is our
client. Every half minute a line is printed, in the end a report (with `--json FILE` also for programs). The exit code
is 1 if memory grew by more than 40 bytes per call, or if a task, descriptor, thread or child is left.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from tests.peers.messages import call
from tests.peers.processes import ENVIRONMENT, MIB, ChildServer, memory_of
from tests.peers.servers import ServerProcess, start_server, stop_server
from tests.soak.load import Load, soak_lines, soak_network
from tests.soak.slopes import Sample, Track

__all__ = ["main"]

_PROGRAM: Final = [sys.executable, "-m", "tests.soak.server_for_soak"]
# Else the C library keeps freed blocks for later use as it likes, and nothing can be told from what is resident.
_MALLOC: Final = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "1"}
_OPTIONS: Final[dict[str, Any]] = {
    "session_idle": 5.0,
    "max_sessions": 1_000,
    "silence": 0.2,
    "limits": {"head_timeout": 2.0, "body_timeout": 2.0, "linger_timeout": 0.1, "stall_timeout": 2.0},
}
_EVERY: Final = 1.0  # seconds between two samples
_REST: Final = 40.0  # seconds in which everything has to be gone: idle sessions, and threads that wait for work


@attrs.define
class Soaked:
    """A process, what it bears, and what was seen of it."""

    track: Track
    pid: int
    calls: Callable[[], int]
    counts: Callable[[], Awaitable[dict[str, int]]] | None

    async def sample(self, seconds: float) -> None:
        """Look at it once."""
        counts = await self.counts() if self.counts is not None else {}
        self.track.samples.append(Sample(seconds, self.calls(), memory_of(self.pid), counts))

    async def rest(self) -> None:
        """Wait until it counts what it counted at first, or long enough."""
        assert self.counts is not None
        with trio.move_on_after(_REST):
            while True:
                self.track.rest = await self.counts()
                if self.track.rest == self.track.base:
                    return
                await trio.sleep(0.25)


@attrs.define(eq=False)
class OurClient:
    """The process in which our client is soaked."""

    @property
    def calls(self) -> int:
        """How many it has made."""
        return self.seen.get("calls", 0)

    process: trio.Process
    seen: dict[str, int] = attrs.field(factory=dict)
    _lock: trio.Lock = attrs.field(factory=trio.Lock)

    async def counts(self, word: bytes = b"count") -> dict[str, int]:
        """Let it count itself."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        async with self._lock:
            await self.process.stdin.send_all(word + b"\n")
            line = b""
            while not line.endswith(b"\n"):
                chunk = await self.process.stdout.receive_some()
                assert chunk, "the client's process has ended"
                line += chunk
        told = json.loads(line)
        self.seen = told["seen"]
        counts: dict[str, int] = told["counts"]
        return counts


async def lines_counts(target: ChildServer) -> dict[str, int]:
    """What the server over stdio counts of itself, asked when nobody else talks to it."""
    await target.say(call("statistics", "statistics"))
    answer = await target.answer("statistics")
    counts: dict[str, int] = json.loads(answer["result"]["content"][0]["text"])
    return counts


async def soak(minutes: float, seed: int) -> list[Track]:
    """Soak for so long, and return what was seen of each process."""
    command = [*_PROGRAM, json.dumps(_OPTIONS)]
    server = await trio.to_thread.run_sync(partial(start_server, command, **_MALLOC))
    try:
        return await _soak(server, minutes * 60, seed)
    finally:
        stop_server(server)


async def _soak(server: ServerProcess, seconds: float, seed: int) -> list[Track]:
    await server.settle()
    program = [sys.executable, "-m", "tests.soak.client_for_soak", server.url, str(seed)]
    async with _process([*_PROGRAM, "stdio"]) as piped, _process(program) as ours, trio.open_nursery() as nursery:
        target, client = ChildServer(piped), OurClient(ours)
        nursery.start_soon(target.watch_errors)
        nursery.start_soon(_echo, ours)
        await target.meet("2025-11-25")
        loads = Load(random.Random(seed)), Load(random.Random(seed + 1))
        network, lines = loads
        soaked = [
            Soaked(Track("server"), server.process.pid, lambda: network.calls + client.calls, server.counts),
            Soaked(Track("server over stdio"), piped.pid, lambda: lines.calls, None),
            Soaked(Track("client"), ours.pid, lambda: client.calls, client.counts),
        ]
        for each, counts in zip(soaked, (server.base, await lines_counts(target), await client.counts()), strict=True):
            each.track.base = counts
        await client.counts(b"start")
        async with trio.open_nursery() as work:
            work.start_soon(soak_network, server, network)
            work.start_soon(soak_lines, target, lines)
            work.start_soon(_look, soaked, network.done)
            await trio.sleep(seconds)
            for load in loads:
                load.done.set()
        soaked[1].counts = partial(lines_counts, target)
        await client.counts(b"stop")
        for each in soaked:
            await each.rest()
        print("of each kind:", json.dumps({**network.kinds, **lines.kinds, **client.seen}), flush=True)
        complaints = [line for line in (server.errors + target.errors).splitlines() if b"ERROR" in line]
        for process in (piped, ours):
            assert process.stdin is not None
            await process.stdin.aclose()
            with trio.move_on_after(10):
                await process.wait()
        nursery.cancel_scope.cancel()
    soaked[0].track.complaints = len([line for line in complaints if b"the handler of tools/call crashed" not in line])
    return [each.track for each in soaked]


@asynccontextmanager
async def _process(command: list[str]) -> AsyncIterator[trio.Process]:
    process = await trio.lowlevel.open_process(command, stdin=-1, stdout=-1, stderr=-1, env={**ENVIRONMENT, **_MALLOC})
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                assert stream is not None
                await stream.aclose()


async def _echo(process: trio.Process) -> None:
    """What the client complains about is ours to see."""
    assert process.stderr is not None
    async for chunk in process.stderr:
        sys.stderr.buffer.write(chunk)
        sys.stderr.buffer.flush()


async def _look(soaked: list[Soaked], done: trio.Event) -> None:
    """Take samples, and print a line every half minute."""
    began, looks = trio.current_time(), 0
    while not done.is_set():
        await trio.sleep(_EVERY)
        seconds = trio.current_time() - began
        for each in soaked:
            await each.sample(seconds)
        looks += 1
        if looks % 30 == 0:
            told = [f"{each.track.name} {each.calls():,} calls {memory_of(each.pid) / MIB:.1f} MiB" for each in soaked]
            print(f"{seconds:6.0f} s  " + "; ".join(told), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=20_000)
    parser.add_argument("--json", type=Path, help="where the report is written, too")
    options = parser.parse_args()
    tracks = trio.run(soak, options.minutes, options.seed)
    reports = {track.name: track.report() for track in tracks}
    faults = [fault for track in tracks for fault in track.faults()]
    if options.json is not None:
        whole = {"minutes": options.minutes, "seed": options.seed, "faults": faults, "processes": reports}
        options.json.write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
    for name, report in reports.items():
        print(f"{name}: {json.dumps(report)}")
    print("\n".join(faults) or "nothing grows, and nothing is left")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
