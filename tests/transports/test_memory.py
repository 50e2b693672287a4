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


async def test_max_message_of_a_framed_pair() -> None:
    left, right = memory_channels(framed=True, max_message=100)
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
