"""Servers in this process, on real sockets, for tests that give them hooks or look at what they log."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import attrs
import trio

import trimcp
from tests.fuzz.effort import PATIENCE
from tests.hostile.network import Place, Wire, http, post
from tests.hostile.peers import enveloped
from tests.hostile.server_for_attack import make_server
from trimcp.transports.http.settings import HttpSettings
from trimcp.wire.revisions import LATEST_LEGACY, OLDEST

__all__ = ["BINDS", "WAYS", "Near", "doors", "near", "reached", "statuses"]

BINDS: dict[str, Any] = {
    "127.0.0.1": {"host": "127.0.0.1", "port": 0},
    "localhost": {"host": "localhost", "port": 0},
    "0.0.0.0": {"host": "0.0.0.0", "port": 0},
    "every address": {"host": None, "port": 0},
    "a Unix socket": {"uds": "mcp.sock"},
}

WAYS = ["memory", "framed", "session", "session on hypercorn", "http+sse", "websocket", "websocket on hypercorn"]


@attrs.frozen
class Near(Place):
    """A server that listens, for clients by hand. Those of `tests.hostile.network` take it for a `Served`."""

    url: str
    server: trimcp.Server[Any]

    async def at_work(self) -> None:
        """Wait until a handler is at work."""
        with trio.fail_after(PATIENCE):
            while not self.server.statistics().running:  # noqa: ASYNC110  # a network is between
                await trio.sleep(0.001)

    async def connect(self, *, receive_buffer: int | None = None) -> Wire:
        """A connection to it."""
        if self.url.startswith("http+unix:"):
            sock = trio.socket.socket(trio.socket.AF_UNIX)
            await sock.connect(unquote(self.url.split("/")[2]))
            return Wire(trio.SocketStream(sock))
        return Wire(await trio.open_tcp_stream("127.0.0.1", int(self.url.rpartition(":")[2].partition("/")[0])))


@asynccontextmanager
async def near(
    host: str,
    server: trimcp.Server[Any] | None = None,
    *,
    bind: str = "127.0.0.1",
    folder: Path | None = None,
    settings: HttpSettings | None = None,
    **options: Any,
) -> AsyncIterator[Any]:
    """Serve as long as the block runs, by our own listener or Hypercorn; options are those of `serve_http`."""
    server = server or make_server()
    place = dict(BINDS[bind])
    if "uds" in place:
        assert folder is not None
        place["uds"] = folder / place["uds"]
    stop = trio.Event()
    how: dict[str, Any] = {"software": host, "settings": settings, "stop": stop, "grace": 0.1, **place, **options}
    async with trio.open_nursery() as nursery:

        async def serve(task_status: trio.TaskStatus[list[str]]) -> None:
            await trimcp.serve_http(server, task_status=task_status, **how)

        yield Near((await nursery.start(serve))[0], server)
        stop.set()


@asynccontextmanager
async def reached(
    server: trimcp.Server[Any], way: str, client: trimcp.Client | None = None, **options: Any
) -> AsyncIterator[trimcp.ClientSession]:
    """A session with a server in this process, in one of WAYS; options are those of `near`."""
    client = client or trimcp.Client("tester")
    revision = OLDEST if way == "http+sse" else LATEST_LEGACY
    if way in ("memory", "framed"):
        async with client.connect(trimcp.in_process(server, framed=way == "framed"), revision=revision) as session:
            yield session
        return
    async with near("hypercorn" if "hypercorn" in way else "own", server, **options) as place:
        target: Any = trimcp.http(place.url)
        if way == "http+sse":
            target = trimcp.http(place.url.replace("/mcp", "/sse"), mode="sse")
        elif "websocket" in way:
            target = trimcp.websocket(place.url.replace("http", "ws", 1).replace("/mcp", "/ws"))
        async with client.connect(target, revision=revision) as session:
            yield session


_EVENTS = "Accept: text/event-stream"
_KEY = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="
_WEBSOCKET = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", _KEY)


def doors(*lines: str) -> list[bytes]:
    """One request to each way in, with these headers."""
    call = post(enveloped(1, "tools/call", name="echo", arguments={})[:-1], *lines)
    sse, websocket = http("GET", "/sse", _EVENTS, *lines), http("GET", "/ws", *_WEBSOCKET, *lines)
    return [call, sse, websocket]


async def statuses(server: Place, requests: list[bytes]) -> list[int]:
    """The status that each request gets on a connection of its own."""
    found = []
    for said in requests:
        async with server.wire() as wire:
            await wire.say(said)
            found.append((await wire.head()).status)
    return found
