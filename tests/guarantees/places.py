"""Where a WebSocket is served: on a port of its own, beside HTTP, and under Hypercorn."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.peers.clients import on
from tests.peers.messages import request
from tests.peers.servers import ServerPool, ServerProcess
from tests.peers.websockets import RawWebSocket, message, upgrade

Places = pytest.mark.parametrize("place", ["alone", "beside", "hypercorn"])


@asynccontextmanager
async def serving(servers: ServerPool, place: str, **options: object) -> AsyncIterator[ServerProcess]:
    """A server with a WebSocket."""
    software = "hypercorn" if place == "hypercorn" else "own"
    if place == "alone":
        options["alone"] = True
    async with servers(software, **options) as server:
        await server.warm()
        yield server


@asynccontextmanager
async def raw(server: ServerProcess, *, receive_buffer: int | None = None) -> AsyncIterator[RawWebSocket]:
    """A connection on which nothing was said yet."""
    async with server.wire(receive_buffer=receive_buffer) as wire:
        yield await upgrade(wire)


async def alive(server: ServerProcess) -> bool:
    async with on(server, "websocket") as lane:
        return (await lane.ask(1, "echo", text="alive"))["id"] == 1


def calls(*ids: int, tool: str = "echo", **arguments: object) -> bytes:
    return b"".join(message(request(id, "tools/call", name=tool, arguments=arguments)) for id in ids)
