"""Channels over WebSocket: the contract, both of our sides against each other, and peers that break every rule."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.transports.websocket_support import connected
from trimcp.channel import MessageChannel
from trimcp.testing.check_channel import check_channel


@pytest.mark.parametrize("client", [True, False])
async def test_contract(client: bool) -> None:
    @asynccontextmanager
    async def make() -> AsyncIterator[tuple[MessageChannel, MessageChannel]]:
        async with connected() as (ours, theirs):
            yield (ours, theirs) if client else (theirs, ours)

    await check_channel(make)
