"""MCP's tunnel keeps the contract of channels on both sides, over a real connection of HTTP/2."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock

from tests.fuzz.effort import PATIENCE
from tests.transports.grpc_support import meeting_served, target_at
from tests.transports.websocket_support import Meeting, ids, outgoing
from trimcp.channel import Kind, MessageChannel, Outgoing
from trimcp.framing.grpc import GrpcStatus, json_rpc_header, message_frame
from trimcp.testing.contract import check_channel
from trimcp.transports.descriptors import PIECE
from trimcp.transports.grpc.channel import GrpcChannel
from trimcp.wire.jsonrpc import Malformed


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[MessageChannel, MessageChannel]]:
    """The client's and the server's channel of one call."""
    meeting = Meeting()
    async with meeting_served(meeting) as (served, _), target_at(served).connect() as client:
        yield client, await meeting.channel()
        meeting.done.set()


@asynccontextmanager
async def turned() -> AsyncIterator[tuple[MessageChannel, MessageChannel]]:
    async with pair() as (client, server):
        yield server, client


@pytest.mark.parametrize("ends", [pair, turned], ids=["client", "server"])
async def test_it_keeps_the_contract(ends: object) -> None:
    await check_channel(ends)


async def test_a_session_that_reads_nothing_holds_up_neither_side() -> None:
    """The server sends until the client's window is full, and must still hear that the client has read."""
    sent: list[int] = []
    async with pair() as (client, server), trio.open_nursery() as nursery:
        text = Outgoing(b'{"jsonrpc":"2.0","method":"x","params":{"a":"%b"}}' % (b"x" * 10_000), Kind.NOTIFICATION)
        with trio.move_on_after(0.5):
            while True:  # until the server's window is full: its channel is not received from
                await client.send([text])

        async def answer() -> None:
            for number in range(60):
                await server.send([text])
                sent.append(number)

        nursery.start_soon(answer)
        with trio.fail_after(PATIENCE):
            heard = 0
            while heard < 60:
                heard += len(await client.receive())
    assert len(sent) == 60


async def test_what_is_unread_is_bounded_by_the_window() -> None:
    async with pair() as (client, server):
        assert isinstance(server, GrpcChannel)
        big = Outgoing(b'"%b"' % (b"x" * 2_000_000), Kind.NOTIFICATION)
        with trio.move_on_after(0.5) as scope:
            await client.send([big])
        assert scope.cancelled_caught
        assert len(server._stream._arrived) <= server._stream.window


async def test_what_breaks_the_protocol_ends_the_call() -> None:
    for wrong, why in ((b"\x01\0\0\0\0", "no header that says how"), (message_frame(b"\xff"), "no JsonRpc")):
        async with pair() as (client, server):
            assert isinstance(client, GrpcChannel)
            await client._stream.send(wrong)
            with trio.fail_after(5), pytest.raises(trio.BrokenResourceError, match=why):
                await server.receive()
            with trio.fail_after(5), pytest.raises(trio.BrokenResourceError, match=why):
                await client.receive()


async def test_a_message_over_the_limit_is_malformed_and_the_next_one_is_not() -> None:
    async with pair() as (client, server):
        server.set_max_message(1_000)
        big = b'{"jsonrpc":"2.0","id":"big","method":"x","params":{"a":"%b"}}' % (b"x" * 5_000)
        await client.send([Outgoing(big, Kind.REQUEST), outgoing(2)])
        arrived = list(await server.receive())
        while len(arrived) < 2:
            arrived += await server.receive()
        assert isinstance(arrived[0].message, Malformed)
        assert arrived[0].message.id == "big"
        assert ids(arrived[1:]) == [2]


class _Bytes:
    """A call of which only the beginning of a message arrives."""

    too_slow = half_closed = False

    def __init__(self) -> None:
        self.gone, self.given = trio.Event(), False
        self.trailers: tuple[tuple[str, str], ...] = ()
        self.sent: list[bytes] = []

    async def receive(self) -> bytes:
        if self.given:
            await trio.sleep_forever()
        self.given = True
        return json_rpc_header(1_000) + b"{"

    async def send(self, data: bytes) -> None:
        self.sent.append(data)

    def credit(self, size: int) -> None: ...

    def finish(self, trailers: tuple[tuple[str, str], ...] = ()) -> None:
        self.trailers = trailers


async def _doubled(data: bytes) -> bytes:
    return message_frame(2 * data)


@pytest.mark.parametrize("write", [None, _doubled], ids=["JSON", "another kind"])
async def test_what_is_gathered_before_it_is_sent_is_bounded(write: Callable[[bytes], Awaitable[bytes]] | None) -> None:
    call, text = _Bytes(), b'"%b"' % (b"x" * 20_000)
    batch = [*[Outgoing(text, Kind.NOTIFICATION)] * 40, Outgoing(text * 10, Kind.NOTIFICATION)]
    await GrpcChannel(call, 1 << 20, write=write).send(batch)
    frames = [await write(each.data) for each in batch] if write else []
    frames = frames or [json_rpc_header(len(each.data)) + each.data for each in batch]
    assert b"".join(call.sent) == b"".join(frames)
    assert max(map(len, call.sent[:-1])) < PIECE + len(frames[0])
    assert len(call.sent) < 30


async def test_a_message_has_to_become_whole(autojump_clock: MockClock) -> None:
    call = _Bytes()
    channel = GrpcChannel(call, 10_000, message_timeout=30)
    began = trio.current_time()
    with pytest.raises(trio.BrokenResourceError, match="a message took too long"):
        await channel.receive()
    assert call.trailers[0] == ("grpc-status", str(int(GrpcStatus.DEADLINE_EXCEEDED)))
    assert trio.current_time() - began == pytest.approx(30, abs=0.5)
