"""Promise 12: input with a little wrong in it does no harm, nor does a lot of what is right: nothing of it is kept.

Some thousands on each transport, so that every run of the promises has them; `nox -s fuzz` makes twenty thousand of
each kind, and `nox -s soak` goes on for minutes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import trio

from tests.guarantees.peers import Peer
from tests.guarantees.report import figure
from tests.guarantees.worlds import LOCAL, WORLDS, Home, Homes, World
from tests.hostile.mutations import of_frames, of_http2, of_messages, of_requests
from tests.hostile.network import HOSTS, Pool, Served, initialize
from tests.hostile.peers import MIB, target
from tests.hostile.test_http_mutations import _HASTY, _post_all, _say_all
from tests.hostile.test_server import _SEEDS, _mutate, mutated

pytestmark = pytest.mark.slow
OnBoth = pytest.mark.parametrize("host", HOSTS)


@pytest.fixture(scope="module")
def servers() -> Iterator[Pool]:
    """Servers that log nothing of the tool that crashes when it is told to."""
    pool = Pool()
    yield pool
    pool.close()


SEED = 12
MANY = 2_000


def survived(grown: float, on: str, many: int = MANY) -> None:
    """What everything after the mutations comes to; that it did not crash, hang or tell was seen on the way."""
    figure(12, f"kept after {many:,} mutations", grown / MIB, 2, "MiB", on)
    assert grown <= 2 * MIB


@pytest.mark.parametrize("revision", ["2025-03-26", "2025-11-25", None], ids=str)
async def test_mutations_over_stdio_do_no_harm(revision: str | None) -> None:
    rng = random.Random(SEED)
    async with target() as server:
        if revision is not None:
            await server.meet(revision)
        await _mutate(server, rng, MANY)
        base = server.memory
        await _mutate(server, rng, MANY)
        grown = server.memory - base
        assert await server.end() == 0
    survived(grown, f"stdio, {revision or '2026-07-28'}")
    assert server.errors.count(b"Traceback") == server.errors.count(b"the handler of tools/call crashed")


@pytest.mark.parametrize("world", LOCAL, ids=str)
async def test_mutations_in_this_process_do_no_harm(homes: Homes, world: World) -> None:
    rng = random.Random(SEED)
    async with homes(world) as home, home.peer() as peer:
        await _mutate_here(peer, rng, MANY)
        base, tasks = await home.kept(), trio.lowlevel.current_statistics().tasks_living
        await _mutate_here(peer, rng, MANY)
        survived(await home.kept() - base, str(world))
        assert trio.lowlevel.current_statistics().tasks_living <= tasks


async def _mutate_here(peer: Peer, rng: random.Random, count: int) -> None:
    for n in range(count):
        await peer.say(mutated(rng, rng.choice(_SEEDS))[:-1])
        if n % 100 == 99:
            await peer.say(peer.call(f"mark {n}", "echo"))
            with trio.fail_after(10):
                while (heard := await peer.hear()).get("id") != f"mark {n}":
                    assert "Traceback" not in str(heard)
                    assert "secret of the handler" not in str(heard)
            peer.heard.clear()


async def _over_the_network(server: Served, mutate: Callable[[int], Any], on: str, many: int) -> None:
    await server.warm()
    await mutate(max(many // 2, 250))
    await _sessions_over(server)
    base = await server.kept()
    await mutate(many)
    await _sessions_over(server)
    survived(await server.kept() - base, on, many)


async def _sessions_over(server: Served) -> None:
    with trio.fail_after(20):
        while (await server.counts())["sessions"]:  # noqa: ASYNC110  # it is another process
            await trio.sleep(0.1)
    await server.at_rest()


def _many(host: str, own: int = MANY) -> int:
    """Hypercorn takes ten times as long for each."""
    return own if host == "own" else 150


@OnBoth
async def test_mutations_of_requests_do_no_harm(servers: Pool, host: str) -> None:
    async with servers(host, **_HASTY) as server:
        make = of_requests(random.Random(SEED), await initialize(server))
        await _over_the_network(server, lambda many: _say_all(server, make, many), f"http, {host}", _many(host))


@OnBoth
async def test_mutations_over_http_sse_do_no_harm(servers: Pool, host: str) -> None:
    async with servers(host, **{**_HASTY, "silence": 5.0}) as server:
        make = of_messages(random.Random(SEED))
        await _over_the_network(
            server, lambda many: _post_all(server, make, many), f"http+sse, {host}", _many(host, 1_000)
        )


@OnBoth
async def test_mutations_over_websocket_do_no_harm(servers: Pool, host: str) -> None:
    async with servers(host, limits={"stall_timeout": 0.5}) as server:
        make = of_frames(random.Random(SEED))

        async def mutate(many: int) -> None:
            await _say_all(server, make, many, websocket=True, patience=0.05)

        await _over_the_network(server, mutate, f"websocket, {host}", _many(host, 1_000))


async def test_mutations_over_http_2_do_no_harm(servers: Pool) -> None:
    async with servers("hypercorn", **_HASTY) as server:
        make = of_http2(random.Random(SEED))

        async def mutate(many: int) -> None:
            await _say_all(server, make, many, patience=0.2)

        await _over_the_network(server, mutate, "http/2, hypercorn", 300)


# What is right, and a lot of it


@pytest.mark.parametrize("world", [world for world in WORLDS if world.own], ids=str)
async def test_calls_by_the_thousand_leave_nothing(homes: Homes, world: World) -> None:
    many = 4_000
    async with homes(world) as home:
        await _call_all(home, many)
        base, tasks = await home.kept(), (await home.counts())["tasks"]
        await _call_all(home, many)
        grown, left = await home.kept() - base, (await home.counts())["tasks"] - tasks
    each = figure(12, f"kept of each of {many:,} calls that are over", max(0, grown) / many, 40, "bytes", str(world))
    figure(12, "tasks left by calls that are over", max(0, left), 0, "", str(world))
    assert each <= 40
    assert left <= 0


async def _call_all(home: Home, many: int) -> None:
    """Call so many times, a hundred at once: if chance said how many wait, it would also say what they leave free."""
    for first in range(0, many, 2_000):
        async with home.peer() as peer:
            for some in range(first, first + 2_000, 100):
                texts = [peer.call(n, "echo", text=f"number {n}") for n in range(some, some + 100)]
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(peer.pour, texts)
                    for _ in texts:
                        assert "result" in await peer.hear()
            peer.heard.clear()
    if home.served is not None:
        await home.served.at_rest()
