"""A server of a test's own over real sockets in this process, for tests that look at what both sides write down."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import trio

import trimcp
from trimcp.session.scopes import open_service_nursery

__all__ = ["NETWORK", "served", "target"]

NETWORK = ("http", "http on hypercorn", "sse", "websocket", "websocket on hypercorn")


@asynccontextmanager
async def served(server: trimcp.Server[Any], road: str, **settings: Any) -> AsyncIterator[str]:
    """Serve and yield the address to connect to; then stop in an orderly way."""
    stop = trio.Event()
    serve = partial(
        trimcp.serve_http,
        server,
        port=0,
        software="hypercorn" if "hypercorn" in road else "own",
        settings=trimcp.HttpSettings(**settings),
        stop=stop,
        grace=1.0,
    )
    async with open_service_nursery() as nursery:
        [url] = await nursery.start(serve)
        if road.startswith("websocket"):
            url = url.replace("http", "ws", 1).replace("/mcp", "/ws")
        yield url.replace("/mcp", "/sse") if road == "sse" else url
        stop.set()


def target(url: str, road: str, **options: Any) -> Any:
    """What a client connects to, there."""
    if road.startswith("websocket"):
        return trimcp.websocket(url, **options)
    return trimcp.http(url, mode="sse" if road == "sse" else "streamable", **options)
