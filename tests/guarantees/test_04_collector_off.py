"""Promises 4 and 17: what waits for a peer that reads nothing is gone with its connection, without the collector."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
import trio

import trimcp
from tests.agent_tools.rpc_support import PB
from tests.peers.http1 import HttpWire, post
from tests.peers.http2 import FramePeer
from tests.peers.messages import modern_request
from tests.peers.serving import ServedHere, served
from tests.peers.websockets import handshake, message
from trimcp.agent_tools import AgentTools
from trimcp.framing.grpc import json_rpc_header, message_frame
from trimcp.transports.http.h2.frames import Setting

pytestmark = pytest.mark.slow

_SIZE = 12_000_000  # more than the system takes for a peer that does not read
_MANY = 4
_SPARE = 2_000_000
_LITTLE = 100_000
_LONG = 20.0  # seconds that everything may take on a busy machine; what waits for the collector waits for ever
_GRPC = (("te", "trailers"), ("content-type", "application/grpc"))


def make_server() -> trimcp.Server[Any]:
    server = trimcp.Server("s", version="1")

    @server.tool
    async def big(size: int) -> str:
        return "x" * size

    @server.tool
    async def told(size: int, ctx: trimcp.Context[Any]) -> str:
        """Progress, then as much as `big`."""
        await ctx.report_progress(1, 2)
        return "x" * size

    return server


Ask = Callable[[HttpWire, int], Awaitable[object]]


def tool_request(tool: str, size: int) -> bytes:
    return orjson.dumps({"type": "tool_request", "tool_name": tool, "arguments": {"size": size}, "request_id": "r"})


def mcp_call(tool: str, size: int) -> bytes:
    return modern_request(1, "tools/call", name=tool, arguments={"size": size}, _meta={"progressToken": 1})


async def by_http1(wire: HttpWire, body: bytes, path: str = "/mcp") -> None:
    await wire.send(post(body, path=path))


async def by_http2(wire: HttpWire, path: str, body: bytes, headers: Any) -> None:
    """Ask on a connection whose windows are closed."""
    peer = FramePeer(wire.stream, grants=False)
    await peer.start({Setting.INITIAL_WINDOW_SIZE: 0})
    await peer.ask(path, body, headers=headers, authority="127.0.0.1")


async def by_websocket(wire: HttpWire, path: str, text: bytes) -> None:
    await wire.send(handshake(path=path))
    await wire.head()
    await wire.send(message(text))


def rpc(method: str, tool: str, *, both: bool) -> Ask:
    async def ask(wire: HttpWire, size: int) -> None:
        request = PB.ToolRequest(tool_name=tool)
        if both:
            request.arguments.update({"size": size})
        else:
            request.arguments_json = b'{"size":%d}' % size
        body = message_frame(request.SerializeToString())
        await by_http2(wire, f"/trimcp.v1.AgentTools/{method}", body, _GRPC)

    return ask


async def by_exchange(wire: HttpWire, size: int) -> None:
    text = mcp_call("big", size)
    await by_http2(wire, "/trimcp.v1.Mcp/Exchange", json_rpc_header(len(text)) + text, _GRPC)


_JSON = (("content-type", "application/json"), ("accept", "application/json, text/event-stream"))
_MODERN = (*_JSON, ("mcp-protocol-version", "2026-07-28"), ("mcp-method", "tools/call"))

FACES: dict[str, Ask] = {
    "mcp, http/1.1": lambda wire, size: by_http1(wire, mcp_call("big", size)),
    "mcp, http/1.1, events": lambda wire, size: by_http1(wire, mcp_call("told", size)),
    "mcp, http/2": lambda wire, size: by_http2(wire, "/mcp", mcp_call("big", size), (*_MODERN, ("mcp-name", "big"))),
    "mcp, http/2, events": lambda wire, size: by_http2(
        wire, "/mcp", mcp_call("told", size), (*_MODERN, ("mcp-name", "told"))
    ),
    "mcp, websocket": lambda wire, size: by_websocket(wire, "/ws", mcp_call("big", size)),
    "mcp, grpc": by_exchange,
    "agent tools, http/1.1": lambda wire, size: by_http1(wire, tool_request("big", size), "/tools/call"),
    "agent tools, http/2": lambda wire, size: by_http2(wire, "/tools/call", tool_request("told", size), _JSON),
    "agent tools, websocket": lambda wire, size: by_websocket(wire, "/agent", tool_request("big", size)),
    "agent tools, grpc": rpc("Call", "big", both=False),
    "agent tools, grpc, both forms": rpc("Call", "big", both=True),
    "agent tools, grpc, stream": rpc("CallStream", "told", both=False),
}


@asynccontextmanager
async def without_collector() -> AsyncIterator[None]:
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        gc.enable()


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(_LONG):
        while not condition():  # noqa: ASYNC110  # a network is between
            await trio.sleep(0.01)


async def unread(place: ServedHere, ask: Ask, size: int, budget: Any) -> int:
    """Ask on several connections, read nothing until all answers wait, and leave; return what was held at most."""
    wires = [await place.connect(receive_buffer=4_096) for _ in range(_MANY)]
    most = 0
    for wire in wires:
        await ask(wire, size)

    def waits() -> bool:
        nonlocal most
        most = max(most, budget.held)
        return bool(most >= _MANY * size / 3)

    await until(waits)
    for wire in wires:
        await trio.aclose_forcefully(wire.stream)
    return most


@pytest.mark.parametrize("face", FACES)
async def test_what_nobody_reads_is_gone_with_its_connection(face: str) -> None:
    server = make_server()
    async with served(server, "http", agent_tools=AgentTools(server)) as place:
        budget = server.budget
        await unread(place, FACES[face], _SIZE, budget)  # imports
        await until(lambda: not place.server.statistics().running and budget.held < _LITTLE)
        async with without_collector():
            idle, _ = tracemalloc.get_traced_memory()
            for _ in range(2):
                most = await unread(place, FACES[face], _SIZE, budget)
                assert most >= _MANY * _SIZE / 3, "it is weighed"
                await until(lambda: not place.server.statistics().running and budget.held < _LITTLE)
            await until(lambda: tracemalloc.get_traced_memory()[0] - idle < _SPARE)
