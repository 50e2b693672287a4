"""Promise 15: all attacks on memory at once, from 200 connections, beside a client with 100 calls a second."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from tests.guarantees.report import figure
from tests.guarantees.worlds import left_of
from tests.hostile import attackers
from tests.peers.clients import on
from tests.peers.processes import ENVIRONMENT, KIB, MIB
from tests.peers.servers import ServerPool, ServerProcess
from tests.peers.serving import SOFTWARE
from tests.stopwatch import Stopwatch
from trimcp.budget import DEFAULT_MEMORY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
]


@attrs.define
class Calls:
    """What became of calls at a steady rate, each counted from its turn on, less what was waited for a processor."""

    seconds: float
    took: list[float] = attrs.field(factory=list)
    failed: list[object] = attrs.field(factory=list)

    @property
    def p99(self) -> float:
        return sorted(self.took)[len(self.took) * 99 // 100]

    async def make(self, server: ServerProcess, *, per_second: int = 100, lanes: int = 8) -> None:
        """Make calls at this rate, whether the ones before are answered or not, over so many connections in turn."""
        async with AsyncExitStack() as stack:
            ways = [await stack.enter_async_context(on(server, "modern")) for _ in range(lanes)]
            turns = [trio.Lock() for _ in ways]
            for lane in ways:
                await lane.ask("warm", "echo")
            began = trio.current_time()
            async with trio.open_nursery() as nursery:
                for n in range(round(self.seconds * per_second)):
                    await trio.sleep_until(began + n / per_second)
                    nursery.start_soon(self._call, ways[n % lanes], turns[n % lanes], n, Stopwatch((server.pid,)))

    async def _call(self, lane: Any, turn: trio.Lock, n: int, clock: Stopwatch) -> None:
        async with turn:
            answer = await lane.ask(n, "echo", text="beside")
        self.took.append(clock.took())
        if answer.get("result", {}).get("content") != [{"type": "text", "text": "beside"}]:
            self.failed.append(answer)


@attrs.frozen
class Outcome:
    """What an attack came to: bytes, seconds, and what became of what was tried; `left` may be `most_left`."""

    grown: int
    left: int
    most_left: float
    quiet: Calls
    beside: Calls
    came: dict[str, int]


async def attacked(server: ServerProcess, *, seconds: float = 8) -> Outcome:
    """Attack a server with all there is, while somebody calls it, and look at it again within five seconds."""
    await server.warm()
    quiet, beside = Calls(2), Calls(seconds)
    await quiet.make(server)
    base = server.forget_peak()
    command = [sys.executable, str(Path(attackers.__file__)), str(server.port)]
    command += ["http2"] if server.software == "own" else []
    pipes = subprocess.PIPE
    crowd = await trio.lowlevel.open_process(command, stdin=pipes, stdout=pipes, env=ENVIRONMENT)
    try:
        assert crowd.stdout is not None
        assert crowd.stdin is not None
        said = b""
        while not said.endswith(b"\n"):
            said += await crowd.stdout.receive_some()
        await beside.make(server)
        grown = server.peak - base
        await crowd.stdin.aclose()
        came = json.loads(b"".join([piece async for piece in crowd.stdout]))
        await crowd.wait()
    finally:
        if crowd.returncode is None:
            crowd.kill()
            with trio.CancelScope(shield=True):
                await crowd.wait()
        for pipe in (crowd.stdin, crowd.stdout):
            if pipe is not None:
                await trio.aclose_forcefully(pipe)
    # How many sessions they begin goes by the machine; what each may keep for half an hour is promise 8's.
    most_left = 32 * MIB + max(0, came.get("sessions 200", 0) - 2_000) * 20 * KIB
    left = await left_of(server, base, most_left)
    # Sessions that nobody ended may stay for half an hour, and the little that each of them keeps; nothing else may. Of
    # the tasks that run jobs one may stay. How soon the others have ended goes by the machine, so they are waited for.
    counts = await server.counts()
    stays = {"sessions": counts["sessions"], "held": counts["held"], "tasks": server.base["tasks"] + 1}
    server.base = {**server.base, **stays}
    await server.at_rest()
    return Outcome(grown, left, most_left, quiet, beside, came)


# What Hypercorn reads ahead on each connection, and keeps of a response that was cut, nobody tells us.
MOST = {"own": DEFAULT_MEMORY + 64 * MIB, "hypercorn": DEFAULT_MEMORY + 128 * MIB}


# Promised are five times on our own listener; four times that where the machine has more to do. Hypercorn reads
# as much as there is in each turn, before anybody can say no.
SLOWER = {"own": 4 * 5, "hypercorn": 100}


@pytest.mark.parametrize("host", SOFTWARE)
async def test_all_attacks_at_once_are_bounded_and_a_client_beside_them_is_served(host: str) -> None:
    async with ServerPool()(host, fresh=True) as server:
        found = await attacked(server)
    print(f"{host}: {found.came}")
    where = f"http {host}"
    lost = figure(15, "calls lost beside 200 attacking connections", len(found.beside.failed), 0, "calls", where)
    grown = figure(15, "memory beside that, all attacks at once", found.grown / MIB, MOST[host] / MIB, "MiB", where)
    most_left = found.most_left / MIB
    left = figure(15, "memory 5 s after the attackers left", found.left / MIB, most_left, "MiB", where)
    figure(15, "p99 of the client's calls", found.beside.p99 * 1_000, None, "ms", where)
    times = found.beside.p99 / max(found.quiet.p99, 0.002)
    figure(15, "p99 of these calls, over that in quiet", times, 5 if host == "own" else None, "times", where)
    assert lost == 0
    assert grown <= MOST[host] / MIB
    assert left <= most_left
    assert times <= SLOWER[host]
    assert MOST["own"] == DEFAULT_MEMORY + 64 * MIB
