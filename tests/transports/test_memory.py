"""Memory channels keep the channel contract, framed and unframed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from trimcp.channel import Kind, MessageChannel, Outgoing
from trimcp.testing.contract import check_channel
from trimcp.transports.memory import memory_channels
from trimcp.wire.jsonrpc import Malformed, Notification, encode_notification


@pytest.mark.parametrize("framed", [False, True])
async def test_contract(framed: bool) -> None:
    @asynccontextmanager
    async def make() -> AsyncIterator[tuple[MessageChannel, MessageChannel]]:
        yield memory_channels(framed=framed)

    await check_channel(make)


@pytest.mark.parametrize("framed", [False, True])
async def test_garbage_is_a_message(framed: bool) -> None:
    left, right = memory_channels(framed=framed)
    async with left, right:
        good = Outgoing(encode_notification("hello"), Kind.NOTIFICATION)
        await left.send([Outgoing(b"{nonsense", Kind.NOTIFICATION), good])
        first, second = await right.receive()
        assert isinstance(first.message, Malformed)
        assert second.message == Notification("hello")


@pytest.mark.parametrize("framed", [False, True])
async def test_a_message_beyond_the_limit_is_told_by_its_id(framed: bool) -> None:
    left, right = memory_channels(framed=framed)
    right.set_max_message(100)
    async with left, right:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                left.send,
                [
                    Outgoing(b'{"id":7,"x":"' + b"x" * 100 + b'"}', Kind.REQUEST, 7),
                    Outgoing(encode_notification("hello"), Kind.NOTIFICATION),
                ],
            )
            first, second = await right.receive()
        assert isinstance(first.message, Malformed)
        assert (first.message.reason, first.message.id) == ("size", 7)
        assert second.message == Notification("hello")


@pytest.mark.parametrize("framed", [False, True])
async def test_the_first_end_takes_what_a_server_takes_and_the_second_what_a_client_does(framed: bool) -> None:
    server, client = memory_channels(framed=framed)
    text = b'{"jsonrpc":"2.0","id":7,"method":"x","params":{"a":"' + b"x" * 4 * 1024 * 1024 + b'"}}'
    async with server, client:
        for sender, receiver, fits in ((client, server, False), (server, client, True)):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(sender.send, [Outgoing(text, Kind.REQUEST, 7)])
                [arrived] = await receiver.receive()
            assert isinstance(arrived.message, Malformed) is not fits
