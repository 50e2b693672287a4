"""Promise 12: a lot of what is right leaves nothing behind: calls, sessions and connections by the thousand."""

from __future__ import annotations

import gc
import math
import os
import sys
import weakref
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import trimcp
from tests.guarantees.report import figure
from tests.guarantees.worlds import WORLDS, Home, Homes, World
from tests.hostile.server_for_attack import make_server
from tests.peers.messages import call, notification, request
from tests.peers.processes import KIB, memory_of
from trimcp.session.drive import drive


@pytest.mark.slow
@pytest.mark.parametrize("world", [world for world in WORLDS if world.own], ids=str)
async def test_calls_by_the_thousand_leave_nothing(homes: Homes, world: World) -> None:
    many = 4_000
    async with homes(world) as home:
        await _call_all(home, many)
        tasks, grown = (await home.counts())["tasks"], math.inf
        for _ in range(3):  # what calls leave is left by those of each round; a page that Python took, by those of one
            base = await home.kept()
            await _call_all(home, many)
            grown = min(grown, await home.kept() - base)
            if grown <= 40 * many:
                break
        left = (await home.counts())["tasks"] - tasks
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


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
async def test_the_fourth_thousand_of_served_sessions_adds_nothing_even_without_the_garbage_collector(
    autojump_clock: Any,
) -> None:
    server = make_server()
    hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}
    texts = [request(1, "initialize", **hello), notification("notifications/initialized"), call(2, "echo", text="x")]
    grown = objects = 0
    gc.collect()
    gc.disable()
    try:
        async with server.running() as running:
            for _ in range(4):
                memory, before = memory_of(os.getpid()), len(gc.get_objects())
                for _ in range(1_000):
                    await _one(running, texts)
                await trio.sleep(1_000)  # Trio forgets an alarm that is off when it would have rung: see below
                grown, objects = memory_of(os.getpid()) - memory, len(gc.get_objects()) - before
    finally:
        gc.enable()
    assert grown <= 0.5 * KIB * 1_000
    assert objects <= 100


async def _one(running: trimcp.Running, texts: list[bytes]) -> None:
    ours, theirs = trimcp.memory_channels()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(running.serve, ours)
        async with theirs:
            await theirs.send([trimcp.channel.Outgoing(text, trimcp.channel.Kind.REQUEST) for text in texts])
            replies = 0
            while replies < 2:
                replies += len(await theirs.receive())


@pytest.mark.slow
async def test_connections_of_a_client_leave_no_objects(autojump_clock: Any) -> None:
    server = make_server()
    counts: list[int] = []
    for _ in range(3):
        for _ in range(200):
            async with trimcp.Client("c").connect(trimcp.in_process(server, framed=True)) as session:
                await session.ping()
        # Trio forgets the alarms of connections that have ended when they would have rung, or there are a thousand.
        await trio.sleep(1_000)
        # More than once: what a finalizer let go of in one collection is found in the next.
        for _ in range(3):
            gc.collect()
        counts.append(len(gc.get_objects()))
    assert counts[2] - counts[1] <= 100


async def test_what_was_written_is_let_go_at_once() -> None:
    server: trimcp.Server[None] = trimcp.Server("here")
    ours, theirs = trimcp.memory_channels()
    async with server.running() as running, trio.open_nursery() as nursery, theirs:
        session = running.session()
        nursery.start_soon(drive, session, ours)
        await wait_all_tasks_blocked()
        outgoing = trimcp.channel.Outgoing(b"{}", trimcp.channel.Kind.NOTIFICATION)
        gone = weakref.ref(outgoing)
        session.sink.post(outgoing)
        del outgoing
        await wait_all_tasks_blocked()
        assert gone() is None
