"""Faulty channels fail as they are told to, the same way every time."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import attrs
import httpx2
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

import trimcp
from tests.peers.serving import served
from trimcp.channel import Kind, MessageChannel, Outgoing
from trimcp.testing import Fault, Faults, FaultyChannel, SlowChannel, connected, faulty
from trimcp.testing.contract import check_channel
from trimcp.transports.memory import memory_channels
from trimcp.wire.jsonrpc import Notification, Request, Response, encode_request, parse
from trimcp.wire.revisions import REVISIONS, Revision


def requests(count: int) -> list[Outgoing]:
    return [Outgoing(encode_request(n, "m"), Kind.REQUEST, n) for n in range(count)]


async def ids_sent_through(**faults: float) -> list[object]:
    left, right = memory_channels()
    async with right, FaultyChannel(left, seed=3, **faults) as faulty:
        await faulty.send(requests(20))
        arrived = await right.receive()
    return [each.message.id if isinstance(each.message, Request) else "garbage" for each in arrived]


async def test_without_faults_they_keep_the_contract() -> None:
    @asynccontextmanager
    async def make() -> AsyncIterator[tuple[MessageChannel, MessageChannel]]:
        left, right = memory_channels()
        yield SlowChannel(left), FaultyChannel(right)

    await check_channel(make)


@pytest.mark.parametrize("kind", [SlowChannel, FaultyChannel])
def test_they_can_do_what_the_channel_inside_can(kind: type[SlowChannel | FaultyChannel]) -> None:
    inside, _ = memory_channels()
    inside.half_open, inside.mirrors_headers = False, True
    outside = kind(inside)
    assert (outside.half_open, outside.mirrors_headers) == (False, True)


async def test_delays_run_on_trios_clock(autojump_clock: MockClock) -> None:
    left, right = memory_channels()
    async with SlowChannel(left, send_delay=5) as slow_sender, SlowChannel(right, receive_delay=7) as slow_reader:
        start = trio.current_time()
        await slow_sender.send(requests(1))
        assert trio.current_time() - start == 5
        await slow_reader.receive()
        assert trio.current_time() - start == 12


async def test_reading_stops_until_released() -> None:
    left, right = memory_channels()
    async with left, SlowChannel(right) as slow, trio.open_nursery() as nursery:
        slow.stop_reading()
        await left.send(requests(1))
        nursery.start_soon(slow.receive)
        await wait_all_tasks_blocked()
        assert nursery.child_tasks
        slow.resume()
        await wait_all_tasks_blocked()
        assert not nursery.child_tasks


async def test_duplicates_reorderings_and_garbage() -> None:
    order = list(range(20))
    doubled = await ids_sent_through(duplicate=0.3)
    assert len(doubled) > 20
    assert sorted(set(doubled), key=str) == sorted(order, key=str)
    shuffled = await ids_sent_through(reorder=0.3)
    assert shuffled != order
    assert sorted(shuffled, key=str) == sorted(order, key=str)
    garbled = await ids_sent_through(garble=0.3)
    assert "garbage" in garbled
    assert [each for each in garbled if each != "garbage"] == [n for n, each in enumerate(garbled) if each != "garbage"]
    assert garbled == await ids_sent_through(garble=0.3)


async def test_a_stall_lasts_as_long_as_it_should(autojump_clock: MockClock) -> None:
    start = trio.current_time()
    await ids_sent_through(stall=1, stall_seconds=3)
    assert trio.current_time() - start == 60


async def test_a_cut_ends_the_connection_for_both() -> None:
    left, right = memory_channels()
    async with right, FaultyChannel(left, seed=4, cut=0.2) as faulty:
        with pytest.raises(trio.BrokenResourceError, match="cut on purpose"):
            await faulty.send(requests(100))
        arrived = await right.receive()
        assert 0 < len(arrived) < 100
        with pytest.raises(trio.EndOfChannel):
            await right.receive()


async def arriving_through(faults: Faults, count: int = 20) -> list[Any]:
    """Receive so many requests with faults, and return what came of them."""
    left, right = memory_channels()
    arrived: list[Any] = []
    async with left, FaultyChannel(right, faults) as faulty_channel:
        await left.send(requests(count))
        await left.aclose()
        with pytest.raises(trio.EndOfChannel):
            while True:
                arrived += [each.message for each in await faulty_channel.receive()]
    return [each.id if isinstance(each, Request) else "garbage" for each in arrived]


async def test_what_is_received_is_spoiled_as_well() -> None:
    order = list(range(20))
    doubled = await arriving_through(Faults(3, duplicate=0.3))
    assert len(doubled) > 20
    assert sorted(set(doubled)) == order
    shuffled = await arriving_through(Faults(3, reorder=0.3))
    assert shuffled != order
    assert sorted(shuffled) == order
    assert "garbage" in await arriving_through(Faults(3, garble=0.3))
    mixed = await arriving_through(Faults(3, garbage=0.3))
    assert len(mixed) > 20
    assert [each for each in mixed if each != "garbage"] == order


async def test_only_one_direction_is_spoiled_if_so_wanted() -> None:
    assert await arriving_through(Faults(3, duplicate=1, on="send")) == list(range(20))
    assert len(await arriving_through(Faults(3, duplicate=1, on="receive"))) == 40
    assert await ids_sent_through(duplicate=1, on="receive") == list(range(20))


async def test_a_delay_keeps_the_order_and_what_is_early_does_not_wait(autojump_clock: MockClock) -> None:
    left, right = memory_channels()
    faults = Faults(5, delay=10)
    async with left, FaultyChannel(right, faults) as slow:
        await left.send(requests(3))
        start, times = trio.current_time(), []
        for number in range(3):
            [incoming] = await slow.receive()
            assert incoming.message == Request(number, "m")
            times.append(trio.current_time() - start)
    delays = [fault.seconds for fault in faults.journal]
    assert [fault.kind for fault in faults.journal] == ["delay"] * 3
    assert 0 < min(delays) < max(delays) < 10
    assert times == pytest.approx([sum(delays[:1]), sum(delays[:2]), sum(delays)])


async def test_a_receive_that_is_cancelled_loses_nothing_and_waits_no_longer(autojump_clock: MockClock) -> None:
    left, right = memory_channels()
    async with left, FaultyChannel(right, Faults(stall=1, stall_seconds=10)) as slow:
        await left.send(requests(1))
        start = trio.current_time()
        for _ in range(4):
            with trio.move_on_after(2):
                await slow.receive()
        [incoming] = await slow.receive()
        assert incoming.message == Request(0, "m")
        assert trio.current_time() - start == pytest.approx(10)


async def test_what_is_sent_late_does_not_hold_up_what_is_received(autojump_clock: MockClock) -> None:
    left, right = memory_channels()
    slow = FaultyChannel(right, Faults(stall=1, stall_seconds=10, on="send"))
    async with left, slow, trio.open_nursery() as nursery:
        nursery.start_soon(slow.send, requests(1))
        await wait_all_tasks_blocked()
        await left.send(requests(1))
        with trio.fail_after(1):
            assert len(await slow.receive()) == 1


async def test_a_send_that_is_cancelled_while_held_up_breaks_the_channel(autojump_clock: MockClock) -> None:
    left, right = memory_channels()
    async with left, FaultyChannel(right, Faults(stall=1, stall_seconds=10)) as slow:
        with trio.move_on_after(1):
            await slow.send(requests(2))
        with pytest.raises(trio.BrokenResourceError, match="cut short"):
            await slow.send(requests(1))


async def test_a_cut_while_receiving_breaks_the_connection_for_both() -> None:
    left, right = memory_channels()
    faults = Faults(4, cut=0.2)
    async with left, FaultyChannel(right, faults) as faulty_channel:
        await left.send(requests(100))
        arrived = len(await faulty_channel.receive())
        assert list(faults.journal) == [Fault("cut", "receive", arrived)]
        for _ in range(2):
            with pytest.raises(trio.BrokenResourceError, match="cut on purpose"):
                await faulty_channel.receive()
        with pytest.raises(trio.BrokenResourceError, match="cut on purpose"):
            await faulty_channel.send(requests(1))
        with pytest.raises(trio.BrokenResourceError):
            await left.send(requests(1))


async def test_the_same_seed_does_the_same_however_messages_are_batched() -> None:
    async def sent(sizes: list[int]) -> list[Fault]:
        left, right = memory_channels()
        faults = Faults(9, garble=0.2, duplicate=0.2, garbage=0.2)
        async with right, FaultyChannel(left, faults) as channel:
            rest = requests(12)
            for size in sizes:
                await channel.send(rest[:size])
                del rest[:size]
        return list(faults.journal)

    assert await sent([12]) == await sent([1] * 12) == await sent([5, 7])
    assert len(await sent([12])) > 3


async def test_a_second_connection_is_spoiled_elsewhere() -> None:
    faults = Faults(9, duplicate=0.3)
    first, second = await arriving_through(faults), await arriving_through(faults)
    assert first != second
    assert {fault.connection for fault in faults.journal} == {0, 1}


def test_garbage_is_one_line_and_no_message() -> None:
    for seed in range(300):
        garbage = Faults(seed, garbage=1).draw("send", 0, 0).garbage
        assert garbage is not None
        assert b"\n" not in garbage
        assert not isinstance(parse(garbage), Request | Notification | Response)


# Whole conversations


@attrs.define(eq=False)
class Watched:
    """A server that counts the handlers that are at work."""

    server: trimcp.Server[Any]
    at_work: int = 0
    calls: int = 0


def make_server() -> Watched:
    watched = Watched(trimcp.Server("s"))

    @watched.server.tool
    async def work(seconds: float, *, ctx: trimcp.Context[Any]) -> str:
        watched.at_work += 1
        watched.calls += 1
        try:
            await trio.sleep(seconds / 2)
            await ctx.report_progress(1, 2)
            await trio.sleep(seconds / 2)
            return "done"
        finally:
            watched.at_work -= 1

    return watched


ENDS = (trimcp.ConnectionLost, trimcp.InvalidReply, trimcp.RemoteError, trio.TooSlowError)
"""What a call may end with, besides a result."""


async def call(session: trimcp.ClientSession, seconds: float, ends: list[str]) -> None:
    try:
        result = await session.call_tool("work", {"seconds": seconds})
    except ENDS as error:
        ends.append(type(error).__name__)
    else:
        assert result.content == [trimcp.Text("done")]
        ends.append("result")


async def converse(target: Any, watched: Watched | None, *, patience: float, revision: Revision | None) -> list[str]:
    """Call a few times through faults. However each call ends, it does, and nothing is left."""
    client = trimcp.Client("c", request_timeout=patience, connect_timeout=2 * patience)
    ends: list[str] = []
    opening = trio.CancelScope(deadline=trio.current_time() + 10 * patience)
    with opening:
        try:
            async with client.connect(target, revision=revision) as session:
                opening.deadline = trio.current_time() + 1000 * patience
                async with trio.open_nursery() as nursery:
                    for number in range(6):
                        nursery.start_soon(call, session, number * patience / 50, ends)
                await call(session, 0, ends)
                assert session.statistics().pending == 0
                assert len(ends) == 7
        except ENDS as error:
            ends.append(f"no connection: {type(error).__name__}")
    assert ends or opening.cancelled_caught
    for _ in range(1000):  # a cancellation may still be on its way
        if watched is None or not watched.at_work:
            break
        await trio.sleep(0.01)
    assert watched is None or watched.at_work == 0
    return ends


chances = st.builds(
    partial(Faults, stall_seconds=7, delay=0.5),
    seed=st.integers(0, 2**32),
    cut=st.sampled_from([0, 0, 0.02, 0.1]),
    stall=st.sampled_from([0, 0.1]),
    duplicate=st.sampled_from([0, 0.2]),
    reorder=st.sampled_from([0, 0.3]),
    garble=st.sampled_from([0, 0, 0.1]),
    garbage=st.sampled_from([0, 0.2]),
)


@given(faults=chances, revision=st.sampled_from(REVISIONS), framed=st.booleans())
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_whatever_happens_each_call_ends_and_both_sides_rest(faults: Faults, revision: Revision, framed: bool) -> None:
    watched = make_server()
    target = faulty(trimcp.in_process(watched.server, framed=framed), faults)
    run = partial(converse, target, watched, patience=30, revision=revision)
    trio.run(run, clock=MockClock(autojump_threshold=0))


@given(faults=chances, revision=st.sampled_from(REVISIONS[1:]))
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
def test_so_it_does_over_http(faults: Faults, revision: Revision) -> None:
    async def main() -> None:
        watched = make_server()
        app = trimcp.asgi_app(watched.server)
        web = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app))
        async with app.lifespan(), web:
            target = faulty(trimcp.http("http://localhost/mcp", client=web), faults)
            await converse(target, watched, patience=30, revision=revision)

    trio.run(main, clock=MockClock(autojump_threshold=0))


PROGRAM = """
import trimcp, trio
server = trimcp.Server("s")
@server.tool
async def work(seconds: float) -> str:
    await trio.sleep(seconds)
    return "done"
trimcp.run_stdio(server)
"""
MIXED = {"delay": 0.01, "duplicate": 0.2, "reorder": 0.2, "garbage": 0.3}
SAME = {"RemoteError"}  # a request that comes twice is refused the second time, and that answer may come first


async def test_over_a_real_pipe() -> None:
    target = faulty(trimcp.stdio(sys.executable, "-c", PROGRAM), seed=1, **MIXED)
    ends = await converse(target, None, patience=5, revision=None)
    assert len(ends) == 7
    assert set(ends) <= SAME | {"result"}
    assert "result" in ends
    assert {fault.kind for fault in target.faults.journal} == {"delay", "duplicate", "reorder", "garbage"}


@pytest.mark.parametrize("how", ["http", "websocket"])
async def test_over_real_sockets(how: str) -> None:
    watched = make_server()
    async with served(watched.server, how) as place:
        target = faulty(place.target(), seed=2, **MIXED)
        ends = await converse(target, watched, patience=5, revision=None)
    assert len(ends) == 7
    assert set(ends) <= SAME | {"result"}
    assert "result" in ends
    assert {"duplicate", "garbage"} <= {fault.kind for fault in target.faults.journal}


@pytest.mark.parametrize("how", ["stdio", "http", "websocket"])
async def test_a_real_connection_that_is_cut(how: str) -> None:
    faults = Faults(12, cut=0.15)
    if how == "stdio":
        target = faulty(trimcp.stdio(sys.executable, "-c", PROGRAM), faults)
        ends = await converse(target, None, patience=5, revision=None)
    else:
        watched = make_server()
        async with served(watched.server, how) as place:
            ends = await converse(faulty(place.target(), faults), watched, patience=5, revision=None)
    assert [fault.kind for fault in faults.journal].count("cut") >= 1
    assert any("ConnectionLost" in end for end in ends)


async def test_connected_takes_faults(autojump_clock: MockClock) -> None:
    watched = make_server()
    faults = Faults(1, stall=0.2, stall_seconds=5, duplicate=0.2, garbage=0.2)
    async with connected(watched.server, faults=faults) as session:
        for _ in range(10):
            ends: list[str] = []
            await call(session, 1, ends)
            assert ends in (["result"], ["RemoteError"])
        await wait_all_tasks_blocked()
        assert session.peer is not None
        assert session.peer.statistics().running == 0
    assert {fault.kind for fault in faults.journal} == {"stall", "duplicate", "garbage"}
