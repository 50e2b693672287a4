"""A server that does what a test says, in real HTTP/1.1: on a Unix socket, where time may be virtual, or a port.

httpx2 reaches it in memory, as nobody closes the clients that tests make.
"""

from __future__ import annotations

import contextvars
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import attrs
import h11
import httpcore2
import httpx2
import orjson
import trio
import trio.testing
from trio.testing import memory_stream_pair

from trimcp.channel import Incoming, Kind, MessageChannel, Outgoing
from trimcp.framing.sse import encode_event
from trimcp.transports.http.client.channel import HttpChannel
from trimcp.transports.http.client.exchanges import Http
from trimcp.transports.http.client.h1 import H1Engine
from trimcp.transports.http.client.httpx_engine import HttpxEngine
from trimcp.transports.http.client.target import HttpServer
from trimcp.wire.jsonrpc import encode_notification, encode_request, encode_result
from trimcp.wire.revisions import V2025_11_25, V2026_07_28, Revision

URL = "http://server.test/mcp"


@attrs.define(eq=False)
class Exchange:
    """One request, and the ways to answer it."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    at: float
    connection: int
    gone: trio.Event = attrs.field(factory=trio.Event)
    answered: bool = False
    _send: Callable[..., Awaitable[None]] = attrs.field(default=None)

    @property
    def message(self) -> dict[str, Any]:
        loaded: dict[str, Any] = orjson.loads(self.body)
        return loaded

    @property
    def id(self) -> Any:
        return self.message["id"]

    @property
    def called(self) -> str:
        """The method of the message, or of the HTTP request if it has no message."""
        return self.message.get("method", "reply") if self.body else self.method

    async def respond(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        """Reply in one write."""
        self.answered = True
        fields = {"content-length": str(len(body)), **(headers or {})}
        head = h11.Response(status_code=status, headers=list(fields.items()))
        await self._send(head, h11.Data(data=body), h11.EndOfMessage())

    async def start(self, status: int, headers: Mapping[str, str] | None = None) -> None:
        self.answered = True
        await self._send(h11.Response(status_code=status, headers=list((headers or {}).items())))

    async def write(self, data: bytes) -> None:
        await self._send(h11.Data(data=data))

    async def finish(self) -> None:
        await self._send(h11.EndOfMessage())

    async def json(self, value: Any, status: int = 200, **headers: str) -> None:
        head = {name.replace("_", "-"): text for name, text in headers.items()}
        data = value if isinstance(value, bytes) else orjson.dumps(value)
        await self.respond(status, data, {"content-type": "application/json", **head})

    async def result(self, result: Any = None, **headers: str) -> None:
        await self.json(encode_result(self.id, {} if result is None else result), **headers)

    async def events(self, *events: bytes, **headers: str) -> None:
        """Begin a stream of events with these."""
        head = {name.replace("_", "-"): text for name, text in headers.items()}
        await self.start(200, {"content-type": "text/event-stream; charset=utf-8", **head})
        for event in events:
            await self.write(event)


Handler: TypeAlias = Callable[[Exchange], Awaitable[None]]


@attrs.define(eq=False)
class Scripted:
    """The server. Every request is noted in `asked` and given to `handler`."""

    handler: Handler
    asked: list[Exchange] = attrs.field(factory=list)
    connections: int = 0
    open: int = 0
    path: str = ""
    nursery: trio.Nursery = attrs.field(default=None)
    changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    def called(self, method: str | None = None) -> list[Exchange]:
        return [each for each in self.asked if method is None or each.called == method]

    @property
    def calls(self) -> list[str]:
        return [each.called for each in self.asked]

    async def wait_for(self, method: str, count: int = 1) -> Exchange:
        """Wait until so many requests of this method have come, and return the last of them."""
        while len(found := self.called(method)) < count:
            await self.changed.park()
        return found[count - 1]

    async def serve(self, stream: trio.abc.Stream) -> None:
        """Serve one connection."""
        self.connections += 1
        self.open += 1
        number = self.connections
        try:
            async with stream:
                await self._serve(stream, number)
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the client left
        finally:
            self.open -= 1
            self.changed.unpark_all()

    async def _serve(self, stream: trio.abc.Stream, number: int) -> None:
        http = h11.Connection(h11.SERVER)

        async def send(*events: h11.Event) -> None:
            data = b"".join(http.send(event) or b"" for event in events)
            if data:
                await stream.send_all(data)

        while True:
            exchange = await self._next(http, stream, number, send)
            if exchange is None:
                return
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, http, stream, exchange)
                try:
                    await self.handler(exchange)
                except trio.BrokenResourceError:
                    exchange.gone.set()  # it left while it was written to
                if not exchange.answered:
                    await exchange.gone.wait()
                nursery.cancel_scope.cancel()
            if exchange.gone.is_set() or http.our_state is not h11.DONE:
                return
            http.start_next_cycle()

    async def _next(
        self, http: h11.Connection, stream: trio.abc.Stream, number: int, send: Callable[..., Awaitable[None]]
    ) -> Exchange | None:
        body = b""
        request: h11.Request | None = None
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                http.receive_data(await stream.receive_some(65536))
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                assert request is not None
                headers = {name.decode(): value.decode() for name, value in request.headers}
                method, target = request.method.decode(), request.target.decode()
                exchange = Exchange(method, target, headers, body, trio.current_time(), number, send=send)
                self.asked.append(exchange)
                self.changed.unpark_all()
                return exchange
            else:
                return None

    async def _watch(self, http: h11.Connection, stream: trio.abc.Stream, exchange: Exchange) -> None:
        try:
            data = await stream.receive_some(65536)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            data = b""
        if data:
            http.receive_data(data)
        else:
            exchange.gone.set()

    # Its clients

    def client(self) -> httpx2.AsyncClient:
        """A client whose connections lead here, whatever address it is given."""
        transport = httpx2.AsyncHTTPTransport(verify=False)
        transport._pool = httpcore2.AsyncConnectionPool(network_backend=_Backend(self), max_connections=None)
        return httpx2.AsyncClient(transport=transport)

    def target(self, url: str = URL, **settings: Any) -> HttpServer:
        """Return a target whose connections lead here, over the engine that `engine` says."""
        if engine.get() == "httpx2":
            return HttpServer(url, client=self.client(), **settings)
        return HttpServer(url, uds=self.path, **settings)

    @property
    def refuse(self) -> bool:
        """Whether new connections are refused."""
        return not os.path.exists(self.path)

    @refuse.setter
    def refuse(self, refuse: bool) -> None:
        hidden = self.path + ".hidden"
        if refuse != self.refuse:
            os.rename(*((self.path, hidden) if refuse else (hidden, self.path)))

    @property
    def refusal(self) -> str:
        """What a client says that was refused, over the engine that `engine` says."""
        if engine.get() == "httpx2":
            return f"cannot connect to {URL.removesuffix('/mcp')}: connection refused"
        missing = "No such file or directory; is the server running, and is this its address?"
        return f"cannot connect to the socket {self.path!r}: {missing}"


engine: contextvars.ContextVar[str] = contextvars.ContextVar("engine", default="trimcp")
"""What carries the requests of clients: "trimcp" or "httpx2". The fixture `on_both_engines` sets it."""


async def close_idle(channel: MessageChannel) -> None:
    """Close the connections of a client that wait for a request."""
    assert isinstance(channel, HttpChannel)
    carrier = channel.http.engine
    if isinstance(carrier, H1Engine):
        for connection in list(carrier.pool._idle):
            connection.cut()
        await trio.testing.wait_all_tasks_blocked()
    else:
        assert isinstance(carrier, HttpxEngine)
        await carrier._client._transport._pool.aclose()


@asynccontextmanager
async def exchanges_with(url: str, **settings: Any) -> AsyncIterator[Http]:
    """Exchanges over sockets with the server at `url`, over the engine that `engine` says."""
    async with AsyncExitStack() as stack:
        if engine.get() == "httpx2":
            limits = httpx2.Limits(max_connections=None)
            transport = httpx2.AsyncHTTPTransport(verify=False, uds=settings.pop("uds", None), limits=limits)
            settings["client"] = await stack.enter_async_context(httpx2.AsyncClient(transport=transport))
        http = await stack.enter_async_context(HttpServer(url, **settings).exchanges())
        assert http.statistics().client == engine.get()
        yield http


@attrs.define(eq=False)
class _Backend(httpcore2.AsyncNetworkBackend):
    server: Scripted

    async def connect_tcp(self, host: str, port: int, *args: Any, **settings: Any) -> httpcore2.AsyncNetworkStream:
        await trio.lowlevel.checkpoint()
        if self.server.refuse:
            raise httpcore2.ConnectError("connection refused")
        ours, theirs = memory_stream_pair()
        stream = _Stream(ours)
        self.server.nursery.start_soon(self._serve, theirs, stream)
        return stream

    async def _serve(self, theirs: trio.abc.Stream, stream: _Stream) -> None:
        await self.server.serve(theirs)
        stream.over = True


@attrs.define(eq=False)
class _Stream(httpcore2.AsyncNetworkStream):
    stream: trio.abc.Stream
    over: bool = False

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            with trio.fail_after(float("inf") if timeout is None else timeout):
                return bytes(await self.stream.receive_some(max_bytes))
        except trio.TooSlowError:
            raise httpcore2.ReadTimeout from None
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise httpcore2.ReadError(str(error)) from None

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        try:
            await self.stream.send_all(buffer)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise httpcore2.WriteError(str(error)) from None

    async def aclose(self) -> None:
        await self.stream.aclose()

    def get_extra_info(self, info: str) -> Any:
        return self.over if info == "is_readable" else None


@asynccontextmanager
async def scripted(handler: Handler) -> AsyncIterator[Scripted]:
    """Run a server on a Unix socket for as long as the body runs."""
    with TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as sock:
        server = Scripted(handler, path=f"{folder}/s")
        sock.bind(server.path)
        sock.listen(1_024)
        async with trio.open_nursery() as nursery:
            listener = trio.SocketListener(trio.socket.from_stdlib_socket(sock))
            server.nursery = nursery
            nursery.start_soon(trio.serve_listeners, server.serve, [listener])
            yield server
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def listening(handler: Handler) -> AsyncIterator[tuple[Scripted, int]]:
    """Run a server on a port of this machine, and yield it with the port."""
    async with trio.open_nursery() as nursery:
        server = Scripted(handler)
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, server.serve, [listener])
        yield server, listener.socket.getsockname()[1]
        nursery.cancel_scope.cancel()


# What servers do


def legacy(
    then: Handler, *, revision: Revision = V2025_11_25, session: str | None = "s1", get: Handler | None = None
) -> Handler:
    """A server that shakes hands in a legacy revision, and does `then` with everything after that."""

    async def handle(exchange: Exchange) -> None:
        if exchange.method == "GET":
            await (exchange.respond(405) if get is None else get(exchange))
        elif exchange.method == "DELETE":
            await exchange.respond(200)
        elif exchange.called == "initialize":
            head = {} if session is None else {"mcp_session_id": session}
            await exchange.result(welcome(revision), **head)
        elif exchange.called == "notifications/initialized":
            await exchange.respond(202)
        else:
            await then(exchange)

    return handle


def welcome(revision: Revision = V2025_11_25) -> dict[str, Any]:
    return {
        "protocolVersion": revision.name,
        "serverInfo": {"name": "scripted", "version": "1"},
        "capabilities": {"tools": {}, "resources": {"subscribe": True}, "logging": {}},
    }


# What clients send


def request(id: int, method: str = "tools/call", *, modern: bool = True, **params: Any) -> Outgoing:
    headers = {"mcp-protocol-version": V2026_07_28.name, "mcp-method": method} if modern else None
    return Outgoing(encode_request(id, method, params), Kind.REQUEST, id, headers=headers)


def notification(method: str, belongs_to: int | None = None, **params: Any) -> Outgoing:
    return Outgoing(encode_notification(method, params), Kind.NOTIFICATION, belongs_to)


def cancellation(id: int) -> Outgoing:
    return Outgoing(encode_notification("notifications/cancelled", {"requestId": id}), Kind.CANCEL, id)


def answer(id: int, result: Any = None) -> Outgoing:
    return Outgoing(encode_result(id, {} if result is None else result), Kind.REPLY, id)


def event(message: Any, **fields: Any) -> bytes:
    return encode_event(message if isinstance(message, bytes) else orjson.dumps(message), **fields)


def reply_event(id: Any, result: Any = None, /, **fields: Any) -> bytes:
    return event(encode_result(id, {} if result is None else result), **fields)


async def shake_hands(channel: MessageChannel, revision: Revision = V2025_11_25) -> None:
    """Do what a session of the legacy era does first."""
    await channel.send([request(0, "initialize", modern=False, protocolVersion=revision.name)])
    await receive(channel, 1)
    await channel.send([notification("notifications/initialized")])


async def receive(channel: MessageChannel, count: int = 1) -> Sequence[Any]:
    """Return the next messages."""
    arrived: list[Incoming] = []
    while len(arrived) < count:
        arrived += await channel.receive()
    return [each.message for each in arrived]


def lines(events: Iterable[bytes]) -> bytes:
    return b"".join(events)
