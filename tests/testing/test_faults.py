"""Faulty channels fail as they are told to, the same way every time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from trimcp.channel import Kind, MessageChannel, Outgoing
from trimcp.testing.contract import check_channel
from trimcp.testing.faults import CutStream, FaultyChannel, SlowChannel
from trimcp.transports.memory import memory_channels
from trimcp.transports.stream import StreamChannel
from trimcp.wire.jsonrpc import Malformed, Request, encode_request


def requests(count: int) -> list[Outgoing]:
    return [Outgoing(encode_request(n, "m"), Kind.REQUEST, n) for n in range(count)]


async def ids_sent_through(**faults: float) -> list[object]:
    left, right = memory_channels()
    async with right, FaultyChannel(left, seed=3, **faults) as faulty:  # type: ignore[arg-type]
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


async def test_a_cut_in_the_middle_of_a_line() -> None:
    near, far = memory_stream_pair()
    left = StreamChannel(near, CutStream(near, after=60))
    right = StreamChannel(far, far)
    async with left, right:
        with pytest.raises(trio.BrokenResourceError):
            await left.send(requests(5))
        arrived = [await right.receive(), await right.receive()]
        messages = [each.message for batch in arrived for each in batch]
        assert messages[0] == Request(0, "m")
        assert isinstance(messages[-1], Malformed)
        with pytest.raises(trio.EndOfChannel):
            await right.receive()
