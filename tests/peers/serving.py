"""A server of a test's own, served in this process over any transport, for our client and for raw ones."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import unquote

import attrs
import trio

import trimcp
from tests.fuzz.effort import PATIENCE
from tests.peers.http1 import HttpWire
from tests.peers.http2_relay import translated
from trimcp.support.nurseries import open_service_nursery
from trimcp.wire.revisions import LATEST_LEGACY, OLDEST, Revision

__all__ = [
    "HTTP2",
    "IN_MEMORY",
    "NETWORK",
    "ON_EACH",
    "SOFTWARE",
    "At",
    "Place",
    "ServedHere",
    "answering",
    "connect",
    "connected",
    "served",
    "target_of",
]

IN_MEMORY = ("memory", "framed")
NETWORK = ("http", "http/2", "http on hypercorn", "http+sse", "websocket", "websocket on hypercorn", "grpc")
SOFTWARE = ("own", "hypercorn")
"""What listens: our own listener, or Hypercorn."""
HTTP2 = "own by HTTP/2"
"""Our own listener, reached through a proxy that speaks HTTP/2 to it."""
ON_EACH = (*SOFTWARE, HTTP2)
"""For tests of requests and WebSockets. Those about bytes of HTTP/1.1, such as its heads, mean nothing over HTTP/2."""


async def connect(port: int, *, receive_buffer: int | None = None, source: str = "") -> trio.SocketStream:
    """Connect to a port of this machine.

    Args:
        port: where a server listens.
        receive_buffer: bytes the kernel keeps for us; with few, little is taken unless it is read.
        source: the address that the connection comes from; every 127.x.y.z is this machine.
    """
    sock = trio.socket.socket()
    try:
        if source:
            await sock.bind((source, 0))
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await sock.connect(("127.0.0.1", port))
    except BaseException:
        sock.close()
        raise
    return trio.SocketStream(sock)


class Place:
    """A server that listens somewhere on this machine.

    Attributes:
        url: where its endpoint is, as it was reported.
    """

    url: str

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2].partition("/")[0])

    async def connect(self, **options: Any) -> HttpWire:
        """A connection on which nothing was sent; options are those of `connect`."""
        if self.url.startswith("http+unix:"):
            return HttpWire(await trio.open_unix_socket(unquote(self.url.split("/")[2])))
        return HttpWire(await connect(self.port, **options))

    @asynccontextmanager
    async def wire(self, **options: Any) -> AsyncIterator[HttpWire]:
        """The same for as long as the block runs."""
        wire = await self.connect(**options)
        try:
            yield wire
        finally:
            await trio.aclose_forcefully(wire.stream)

    async def statuses(self, requests: list[bytes]) -> list[int]:
        """The status that each request gets on a connection of its own."""
        found = []
        for request in requests:
            async with self.wire() as wire:
                await wire.send(request)
                found.append((await wire.head()).status)
        return found


@attrs.define
class At(Place):
    """An address."""

    url: str


@attrs.define(eq=False)
class ServedHere(Place):
    """A server in this process.

    Attributes:
        transport: which the test uses.
        server: what is served.
        url: where, for this transport.
        stop: set to end it in an orderly way.
        ended: set once it has.
        scope: cancelled to end it at once.
    """

    transport: str
    server: trimcp.Server[Any]
    url: str = ""
    stop: trio.Event = attrs.field(factory=trio.Event)
    ended: trio.Event = attrs.field(factory=trio.Event)
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    async def at_work(self) -> None:
        """Wait until a handler is at work."""
        with trio.fail_after(PATIENCE):
            while not self.server.statistics().running:  # noqa: ASYNC110  # a network is between
                await trio.sleep(0.001)

    def target(self, url: str = "", **options: Any) -> Any:
        """What a client connects to: here, or at another form of this address."""
        return target_of(url or self.url, self.transport, **options)


def target_of(url: str, transport: str, **options: Any) -> Any:
    """What a client connects to at this address."""
    if transport.startswith("websocket"):
        return trimcp.websocket(url, **options)
    if transport == "grpc":
        return trimcp.grpc(url, **options)
    return trimcp.http(url, mode="sse" if transport.startswith("http+sse") else "streamable", **options)


@asynccontextmanager
async def served(
    server: trimcp.Server[Any],
    transport: str = "http",
    *,
    settings: trimcp.HttpSettings | None = None,
    grace: float = 1.0,
    **options: Any,
) -> AsyncIterator[ServedHere]:
    """Serve over the network as long as the block runs, then end in an orderly way.

    Args:
        server: what is served.
        transport: one of NETWORK ("http/2": behind a proxy that speaks it), "http+sse on hypercorn", "http+sse" or
            "websocket" and " by http/2" (that proxy), "websocket alone" (no HTTP beside it) or "http over unix".
        settings: of the HTTP side.
        grace: seconds for what is under way in the end.
        options: other ones of `trimcp.serve_http`; by default it listens on a free port of 127.0.0.1.
    """
    place = ServedHere(transport, server)
    serve: Any = trimcp.serve_websocket if transport == "websocket alone" else trimcp.serve_http
    if transport == "grpc":
        serve = trimcp.serve_grpc
    else:
        options["software"] = "hypercorn" if "hypercorn" in transport else "own"
    with TemporaryDirectory() as folder:
        if transport == "http over unix":
            options["uds"] = f"{folder}/mcp.sock"
        elif "uds" not in options:
            options = {"port": 0, **options}

        async def run(task_status: trio.TaskStatus[list[str]]) -> None:
            with place.scope:
                await serve(
                    server,
                    settings=settings,
                    stop=place.stop,
                    grace=grace,
                    task_status=task_status,
                    **options,
                )
            place.ended.set()

        async with open_service_nursery() as nursery, AsyncExitStack() as stack:
            place.url = (await nursery.start(run))[0]
            if transport in ("websocket", "websocket on hypercorn", "websocket by http/2"):
                place.url = place.url.replace("http", "ws", 1).replace("/mcp", "/ws")
            elif transport.startswith("http+sse"):
                place.url = place.url.replace("/mcp", "/sse")
            if transport.endswith("http/2"):
                place.url = place.url.replace(
                    f":{place.port}/", f":{await stack.enter_async_context(translated(place.port))}/"
                )
            yield place
            place.stop.set()


@asynccontextmanager
async def connected(
    server: trimcp.Server[Any],
    transport: str,
    client: trimcp.Client | None = None,
    *,
    revision: Revision | None = None,
    **options: Any,
) -> AsyncIterator[trimcp.ClientSession]:
    """Yield a client's session with a server in this process, over any transport; options are those of `served`.

    By default they speak the newest revision with sessions, and the first one over HTTP+SSE.
    """
    client = client or trimcp.Client("tester")
    revision = revision or (OLDEST if transport == "http+sse" else LATEST_LEGACY)
    if transport in IN_MEMORY:
        inside = trimcp.in_process(server, framed=transport == "framed")
        async with client.connect(inside, revision=revision) as session:
            yield session
        return
    async with (
        served(server, transport, **options) as place,
        client.connect(place.target(), revision=revision) as session,
    ):
        yield session


@asynccontextmanager
async def answering(answer: Callable[[trio.SocketStream], Awaitable[object]]) -> AsyncIterator[int]:
    """Let each connection be answered by a function, and yield the port."""

    async def serve(stream: trio.SocketStream) -> None:
        async with stream:
            await answer(stream)

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, listeners)
        yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()
