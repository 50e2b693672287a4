"""The measured tools on FastMCP of the official Python SDK, version 1.

official_1.py stdio | sse | websocket | http [--reply json|sse] | client REVISION TARGET...
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from mcp.server.fastmcp import Context, FastMCP
from serving import BODIES, COUNTED, TOOLS, counts, option, serve

sizes = {} if BODIES is None else {"max_request_body_size": BODIES}
server = FastMCP("bench", log_level="WARNING", json_response=option("--reply", "sse") == "json", **sizes)


@server.tool()
async def echo(text: str) -> str:
    """Return the text."""
    return text


@server.tool()
async def add(a: int, b: int) -> int:
    """Return the sum."""
    return a + b


@server.tool()
async def stream(n: int, ctx: Context) -> str:
    """Report every number on the way."""
    for number in range(1, n + 1):
        await ctx.report_progress(number, n)
    return "done"


@server.resource("bench://greeting")
async def greeting() -> str:
    """Return a greeting."""
    return "hello"


@server.prompt()
async def greet(name: str) -> str:
    """Ask for a greeting."""
    return f"Say hello to {name}."


async def nothing(text: str = "") -> str:
    """Return the text; one tool of many."""
    return text


for number in range(TOOLS):
    server.add_tool(nothing, name=f"tool_{number}")

if COUNTED:
    server.tool()(counts)


def websocket_app() -> Any:
    """Return what serves it over WebSocket; this SDK has the transport but no application for it."""
    from mcp.server.websocket import websocket_server
    from starlette.applications import Starlette
    from starlette.routing import WebSocketRoute
    from starlette.websockets import WebSocket

    async def endpoint(socket: WebSocket) -> None:
        security = server.settings.transport_security
        inner = server._mcp_server
        async with websocket_server(socket.scope, socket.receive, socket.send, security) as streams:
            await inner.run(*streams, inner.create_initialization_options())

    warnings.simplefilter("ignore", DeprecationWarning)
    return Starlette(routes=[WebSocketRoute("/ws", endpoint)])


@asynccontextmanager
async def connected(target: Any) -> AsyncIterator[Any]:
    """Connect a client to a server, and yield its session."""
    from mcp.client.session import ClientSession
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamable_http_client

    opened = streamable_http_client(target) if isinstance(target, str) else stdio_client(target)
    async with opened as (read, write, *_), ClientSession(read, write) as session:
        await session.initialize()
        yield session


if __name__ == "__main__":
    if sys.argv[1] == "client":
        import anyio
        from calling import called, target

        anyio.run(called, connected(target()))
    elif sys.argv[1] == "stdio":
        server.run("stdio")
    elif sys.argv[1] == "http":
        serve(server.streamable_http_app(), "/mcp")
    elif sys.argv[1] == "sse":
        serve(server.sse_app(), "/sse")
    else:
        serve(websocket_app(), "/ws")
