"""Promise 9: blocking tools never freeze the loop: they have threads, and those that compute have processes."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import trio

import trimcp
from tests.fuzz.effort import PATIENCE
from tests.guarantees.report import figure
from tests.guarantees.worlds import WORLDS, Home, Homes, World
from tests.peers.clients import Peer
from tests.peers.serving import IN_MEMORY, NETWORK, connected
from tests.workers import heavy_tools

pytestmark = [pytest.mark.slow, pytest.mark.alone]
Everywhere = pytest.mark.parametrize("world", WORLDS, ids=str)

THREADS = 200


async def worst_echo(peer: Peer, name: str, count: int = 50) -> float:
    """The longest that one of these echoes took, in seconds."""
    worst = 0.0
    for n in range(count):
        began = trio.current_time()
        await peer.ask(f"{name}{n}", "echo")
        worst = max(worst, trio.current_time() - began)
    return worst


async def under_way(home: Home) -> int:
    """How many calls it works on."""
    if home.running is None:
        return (await home.counts())["running"]
    return sum(session.statistics().running for session in home.running.sessions)


@Everywhere
async def test_two_hundred_blocked_threads_delay_no_echo(homes: Homes, world: World) -> None:
    async with homes(world) as home, home.peer() as peer:
        await worst_echo(peer, "warm")
        control = await worst_echo(peer, "control")
        await peer.say(*(peer.call(f"block{n}", "block") for n in range(THREADS)))
        with trio.fail_after(PATIENCE):
            while await under_way(home) < THREADS:  # noqa: ASYNC110  # it is another process
                await trio.sleep(0.05)
        # The best of three rounds: a loop that threads hold up is held up in each, a busy machine now and then.
        worst = min([await worst_echo(peer, f"beside{number}") for number in range(3)])
        figure(9, "the longest of 50 echoes beside 200 blocked threads", worst * 1_000, 50, "ms", str(world))
        figure(9, "the longest of 50 echoes alone", control * 1_000, None, "ms", str(world))
        await peer.say(peer.call("release", "release"))
        ended = {(await peer.hear())["id"] for _ in range(THREADS + 1)}
        assert ended == {"release", *(f"block{n}" for n in range(THREADS))}
    # On a machine that starves both, the run without the threads says what it can do.
    assert worst <= 4 * max(0.05, control)


# Those that compute

BURNING = max(1, (os.cpu_count() or 1) - 1)  # a loop that has no processor to itself waits for one

_CHILD = f"""
import sys
sys.path[:0] = {[str(Path(trimcp.__file__).parent.parent)]!r}
import trimcp
from tests.guarantees.test_09_blocking_tools import computing
if __name__ == "__main__":
    trimcp.run_stdio(computing())
"""


def computing() -> trimcp.Server[None]:
    """A server with a tool that computes for ever, in a process of its own."""
    server: trimcp.Server[None] = trimcp.Server("heavy", max_processes=BURNING)
    server.add_tool(heavy_tools.burn, run="process")

    @server.tool
    async def echo(text: str = "") -> str:
        return text

    return server


@asynccontextmanager
async def reached_anyhow(way: str, tmp_path: Path) -> AsyncIterator[trimcp.ClientSession]:
    if way != "stdio":
        async with connected(computing(), way) as session:
            yield session
        return
    program = tmp_path / "computing.py"
    program.write_text(_CHILD)
    async with trimcp.Client("c").connect(trimcp.stdio(sys.executable, str(program))) as session:
        yield session


async def worst_call(session: trimcp.ClientSession, count: int = 50) -> float:
    worst = 0.0
    for _ in range(count):
        began = trio.current_time()
        await session.call_tool("echo")
        worst = max(worst, trio.current_time() - began)
    return worst


@pytest.mark.parametrize("way", [*IN_MEMORY, *NETWORK, "stdio"])
async def test_what_computes_in_processes_delays_no_echo(way: str, tmp_path: Path) -> None:
    async with reached_anyhow(way, tmp_path) as session, trio.open_nursery() as nursery:
        await worst_call(session)
        control = await worst_call(session)
        before = workers()
        for _ in range(BURNING):
            nursery.start_soon(session.call_tool, "burn")
        with trio.fail_after(PATIENCE):
            while len(workers() - before) < BURNING:  # noqa: ASYNC110  # they are other processes
                await trio.sleep(0.05)
        worst = min([await worst_call(session) for _ in range(3)])
        figure(9, "the longest of 50 echoes beside a process that computes", worst * 1_000, 50, "ms", way)
        nursery.cancel_scope.cancel()
    assert worst <= 4 * max(0.05, control)


def workers() -> set[int]:
    """The processes below this one that are busy."""
    mine = {os.getpid()}
    found = set()
    for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda each: int(each.name)):
        with suppress(OSError):
            state, parent, *rest = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(parent) in mine:
                mine.add(int(folder.name))
                if state == "R" and int(rest[9]) > 10:  # ticks of its own
                    found.add(int(folder.name))
    return found
