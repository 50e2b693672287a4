"""Promise 12, a client's side: what servers say with a little wrong in it does no harm, and nothing of it is kept."""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress

import pytest
import trio
import trio.testing

import trimcp
from tests.fuzz.effort import PATIENCE, count
from tests.guarantees.harm import MUTATIONS, OnEngines, a_client, hostile, session_with
from tests.guarantees.report import figure
from tests.peers.processes import MIB, memory_of
from trimcp.transports.http.client.policy import Timeouts
from trimcp.transports.websocket.client import WebSocketServer
from trimcp.wire.revisions import V2025_11_25

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
]


@pytest.mark.parametrize("roots", [False, True])
async def test_twenty_thousand_mutations_from_a_child_do_no_harm(roots: bool) -> None:
    client = trimcp.Client("c")
    if roots:
        client.set_roots(["file:///a"])
    async with client.connect(hostile(MUTATIONS)) as session:
        with trio.fail_after(PATIENCE):
            await session.call_tool("x")
            base = memory_of(os.getpid())
            before = trio.lowlevel.current_statistics().tasks_living, len(os.listdir("/proc/self/fd"))
            await session.call_tool("x")
        kept = memory_of(os.getpid()) - base
        on = "stdio, client with roots" if roots else "stdio, client"
        figure(12, "kept after 20,000 mutations", round(kept / MIB, 3), 2, "MiB", on)
        assert kept <= 2 * MIB
        await trio.testing.wait_all_tasks_blocked(0.1)
        assert (trio.lowlevel.current_statistics().tasks_living, len(os.listdir("/proc/self/fd"))) == before


async def test_twenty_thousand_mutations_from_a_server_do_no_harm(port: int) -> None:
    async with session_with(port, "mutations") as session:
        await session.call_tool("harm")
        base = memory_of(os.getpid())
        await session.call_tool("harm")
        kept = memory_of(os.getpid()) - base
        figure(12, "kept after 20,000 mutations", round(kept / MIB, 3), 2, "MiB", "events of HTTP, client")
        assert kept <= 2 * MIB
        await session.call_tool("fine")


@OnEngines
async def test_mutations_of_replies_fail_their_calls_alone(port: int, engine: str) -> None:
    many = count(200)
    async with session_with(port, "mutated_reply", engine, timeouts=Timeouts(silence=1.0)) as session:
        await _call_all(session, min(many, 1_000))
        await _call_fine(session)  # which leaves a connection idle, as the last call below does
        base, before = memory_of(os.getpid()), _counts()
        answered = await _call_all(session, many)
        with trio.fail_after(PATIENCE):
            # A connection that was given up closes when the other side does; one that an answer of ours has left idle
            # closes a few seconds later, with the next call.
            while _counts() > before:
                await trio.sleep(0.05)
                await _call_fine(session)
        kept = memory_of(os.getpid()) - base
        print(f"{answered} of {many} replies were answers all the same")
        figure(
            12, f"kept after {many:,} mutations", round(kept / MIB, 3), 2, "MiB", f"replies of HTTP, client, {engine}"
        )
        assert answered
        assert kept <= 2 * MIB


async def _call_all(session: trimcp.ClientSession, count: int) -> int:
    answered = 0
    for n in range(count):
        with trio.fail_after(PATIENCE):
            try:
                await session.call_tool("harm")
                answered += 1
            except (trimcp.ConnectionLost, trimcp.InvalidReply, trimcp.RemoteError):
                pass
            if n % 50 == 0:
                await _call_fine(session)
    return answered


async def _call_fine(session: trimcp.ClientSession) -> None:
    """Make a call that is answered, which a tool's is not where the server had closed its connection just before."""
    while True:
        with suppress(trimcp.ConnectionLost):
            await session.call_tool("fine")
            return


def _counts() -> tuple[int, int]:
    """Tasks and descriptors of this process."""
    gc.collect()
    return trio.lowlevel.current_statistics().tasks_living, len(os.listdir("/proc/self/fd"))


async def test_mutations_over_websocket_do_no_harm(port: int) -> None:
    many = count(2_000)
    server = WebSocketServer(f"ws://127.0.0.1:{port}/ws_mutations?{many}")
    with trio.fail_after(PATIENCE):
        async with a_client().connect(server, revision=V2025_11_25) as session:
            await session.call_tool("harm")
            base, before = memory_of(os.getpid()), _counts()
            await session.call_tool("harm")
            kept = memory_of(os.getpid()) - base
            figure(
                12, f"kept after {many:,} mutations", round(kept / MIB, 3), 2, "MiB", "messages over WebSocket, client"
            )
            assert kept <= 2 * MIB
            assert _counts() == before
            await session.call_tool("fine")


async def test_mutations_of_frames_end_their_connection_alone(port: int) -> None:
    many = count(150)
    answered = await _connect_all(port, min(many, 1_000))
    base, before = memory_of(os.getpid()), _counts()
    answered = await _connect_all(port, many)
    kept = memory_of(os.getpid()) - base
    print(f"{answered} of {many} calls were answered all the same")
    figure(12, f"kept after {many:,} mutations", round(kept / MIB, 3), 2, "MiB", "frames over WebSocket, client")
    assert answered
    assert kept <= 2 * MIB
    assert _counts() == before


async def _connect_all(port: int, count: int) -> int:
    server = WebSocketServer(f"ws://127.0.0.1:{port}/ws_frames")
    answered = 0
    for _ in range(count):
        try:
            with trio.fail_after(PATIENCE):
                async with a_client().connect(server, revision=V2025_11_25) as session:
                    await session.call_tool("harm")
                    answered += 1
        except (trimcp.ConnectionLost, trimcp.InvalidReply, trimcp.RemoteError):
            pass
    return answered
