"""Byte streams that are cut, stalled, garbled and come in small pieces, and what channels over them make of it."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock, memory_stream_pair

import trimcp
from trimcp.channel import Kind, Outgoing
from trimcp.testing import CutStream, FaultyStream
from trimcp.transports.stream import StreamChannel
from trimcp.wire.jsonrpc import Malformed, Request, encode_request


def requests(count: int) -> list[Outgoing]:
    return [Outgoing(encode_request(n, "m"), Kind.REQUEST, n) for n in range(count)]


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


async def through(data: bytes, **faults: float) -> bytes:
    """Send bytes through a faulty stream and return what arrives until it breaks or ends."""
    near, far = memory_stream_pair()
    stream = FaultyStream(near, seed=4, **faults)
    arrived = b""
    async with stream, far, trio.open_nursery() as nursery:

        async def send() -> None:
            try:
                await stream.send_all(data)
            except trio.BrokenResourceError:
                assert faults.get("cut")
            else:
                await stream.send_eof()

        nursery.start_soon(send)
        while piece := await far.receive_some():
            arrived += piece
    return arrived


DATA = bytes(range(256)) * 4


async def test_small_pieces_lose_nothing() -> None:
    assert await through(DATA, small=3) == DATA


async def test_bytes_are_garbled_and_none_is_lost() -> None:
    garbled = await through(DATA, small=16, garble=0.2)
    assert len(garbled) == len(DATA)
    wrong = sum(left != right for left, right in zip(garbled, DATA, strict=True))
    assert 5 < wrong < 100
    assert garbled == await through(DATA, small=16, garble=0.2)


async def test_a_cut_leaves_the_beginning() -> None:
    arrived = await through(DATA, small=16, cut=0.05)
    assert 0 < len(arrived) < len(DATA)
    assert DATA.startswith(arrived)


async def test_stalls_take_trios_time(autojump_clock: MockClock) -> None:
    start = trio.current_time()
    await through(b"x" * 10, small=1, stall=1, stall_seconds=5)
    assert trio.current_time() - start == 50


async def test_what_is_read_is_spoiled_as_well() -> None:
    near, far = memory_stream_pair()
    stream = FaultyStream(far, seed=1, small=4, garble=0.5)
    async with near, stream:
        await near.send_all(DATA)
        await near.send_eof()
        arrived, sizes = b"", set()
        while piece := await stream.receive_some(1000):
            arrived += piece
            sizes.add(len(piece))
    assert sizes == {1, 2, 3, 4}
    assert len(arrived) == len(DATA)
    assert arrived != DATA


async def test_a_session_over_small_pieces_and_stalls(autojump_clock: MockClock) -> None:
    server = trimcp.Server("s")

    @server.tool
    async def echo(text: str) -> str:
        return text

    near, far = memory_stream_pair()
    stream = FaultyStream(far, seed=3, small=7, stall=0.05)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.serve, StreamChannel(near, near))
        async with trimcp.Client("c").connect(StreamChannel(stream, stream)) as session:
            result = await session.call_tool("echo", {"text": "äöü" * 300})
            assert result.content == [trimcp.Text("äöü" * 300)]
