"""A face that does as it is told, and an ASGI server made by hand: events in, events out, and time is virtual."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from trimcp.budget import Budget
from trimcp.channel import Kind, MessageChannel, Outgoing
from trimcp.support.deadlines import Deadlines
from trimcp.transports.http.asgi.app import AsgiApp
from trimcp.transports.http.interfaces import Admitted, Application, Head, HttpReply, HttpResponse, Upgrade
from trimcp.transports.http.settings import HttpLimits
from trimcp.wire.jsonrpc import Request, encode_result

TEXT = (("Content-Type", "text/plain"),)


@attrs.define(eq=False)
class DummyHandler:
    """Takes a body and answers as told."""

    answer: Callable[[bytes, HttpReply], None] = lambda body, reply: reply.send(HttpResponse(200, TEXT, body))
    max_body: int = 1000
    reply: HttpReply | None = None
    body: bytes | None = None
    disconnects: int = 0
    writables: int = 0
    gone: trio.Event = attrs.field(factory=trio.Event)

    @property
    def at_rest(self) -> bool:
        return False

    def start(self, body: bytes, reply: HttpReply) -> None:
        self.body, self.reply = body, reply
        self.answer(body, reply)

    def too_large(self, beginning: bytes) -> HttpResponse:
        return HttpResponse(413, TEXT, b"%d" % len(beginning))

    def refused(self, response: HttpResponse) -> HttpResponse:
        return response

    def disconnected(self, slow: str | None = None) -> None:
        assert self.reply is not None
        assert self.reply.gone
        self.disconnects += 1
        self.gone.set()

    def writable(self) -> None:
        self.writables += 1


@attrs.define(eq=False)
class DummyFace:
    """Answers each path as told."""

    routes: dict[str, Callable[[Head], Admitted]] = attrs.field(factory=dict)
    heads: list[Head] = attrs.field(factory=list)
    ended: list[tuple[str, int, int]] = attrs.field(factory=list)
    connections: int = 0
    deadlines: Deadlines = attrs.field(factory=Deadlines)
    budget: Budget = attrs.field(factory=Budget)

    async def admit(self, head: Head) -> Admitted:
        self.heads.append(head)
        route = self.routes.get(head.path)
        return HttpResponse(404, TEXT, b"nothing here") if route is None else route(head)

    def done(self, head: Head, status: int, sent: int) -> None:
        self.ended.append((head.path, status, sent))

    def __setitem__(self, path: str, found: Admitted) -> None:
        self.routes[path] = lambda head: found

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Application]:
        async with trio.open_nursery() as nursery:
            yield self
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def failing(face: DummyFace, trouble: trio.Event) -> AsyncIterator[DummyFace]:
    """Run a face that fails once there is trouble."""

    async def fail() -> None:
        await trouble.wait()
        raise OSError("the disk is full")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fail)
        yield face


@asynccontextmanager
async def app_of(face: DummyFace, **options: Any) -> AsyncIterator[AsgiApp]:
    """An application whose lifespan is entered."""
    app = AsgiApp(face.running, **options)
    async with app.lifespan():
        yield app


async def echo(channel: MessageChannel) -> None:
    """Send back every message as it came, until the peer leaves."""
    async with channel:
        try:
            while True:
                for incoming in await channel.receive():
                    assert isinstance(incoming.message, Request), incoming.message
                    answer = encode_result(incoming.message.id, {"size": incoming.size})
                    await channel.send([Outgoing(answer, Kind.REPLY, incoming.message.id)])
        except (trio.EndOfChannel, trio.BrokenResourceError):
            pass


def upgrade(serve: Callable[[MessageChannel], Awaitable[None]] = echo, **options: Any) -> Upgrade:
    return Upgrade(serve, **{"subprotocol": "mcp", "max_message": 1000, **options})


def http_scope(path: str = "/", method: str = "POST", **changes: Any) -> dict[str, Any]:
    """The scope of a request over HTTP, as Hypercorn makes it."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.1"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost:8000"), (b"accept", b"*/*")],
        "client": ("127.0.0.1", 40312),
        "server": ("127.0.0.1", 8000),
        "extensions": {},
        **changes,
    }


def websocket_scope(path: str = "/", **changes: Any) -> dict[str, Any]:
    scope = http_scope(path, type="websocket", scheme="ws", extensions={"websocket.http.response": {}})
    del scope["method"]
    return {**scope, "subprotocols": [], **changes}


@attrs.define(eq=False)
class Call:
    """The server's end of one ASGI call.

    Attributes:
        events: what the application sent.
        stalled: while it is set, `send` waits, shielded from cancellation as Hypercorn's is where it writes.
        shielded: ... or not, as where it waits for a window.
        error: what `send` raises, if anything.
    """

    app: AsgiApp
    scope: dict[str, Any]
    events: list[dict[str, Any]] = attrs.field(factory=list)
    stalled: bool = False
    shielded: bool = True
    error: Exception | None = None
    over: trio.Event = attrs.field(factory=trio.Event)
    put: trio.MemorySendChannel[dict[str, Any]] = attrs.field(init=False)
    _events: trio.MemoryReceiveChannel[dict[str, Any]] = attrs.field(init=False)
    _lot: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    def __attrs_post_init__(self) -> None:
        self.put, self._events = trio.open_memory_channel[dict[str, Any]](100)

    async def run(self) -> None:
        try:
            await self.app(self.scope, self._events.receive, self._send)
        finally:
            self.over.set()

    async def _send(self, event: Any) -> None:
        with trio.CancelScope(shield=self.shielded):
            while self.stalled:
                await self._lot.park()
            await trio.lowlevel.checkpoint()
        if self.error is not None:
            raise self.error
        self.events.append(event)

    def body(self, data: bytes = b"", *, more: bool = False) -> None:
        """Let a part of the request's body arrive."""
        self.put.send_nowait({"type": "http.request", "body": data, "more_body": more})

    def leave(self) -> None:
        """Let the client leave."""
        kind = "http" if self.scope["type"] == "http" else "websocket"
        self.put.send_nowait({"type": f"{kind}.disconnect", "code": 1006})

    def read_on(self) -> None:
        self.stalled = False
        self._lot.unpark_all()

    @property
    def status(self) -> int:
        return int(self.events[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.events[0]["headers"])

    @property
    def data(self) -> bytes:
        return b"".join(event["body"] for event in self.events[1:])

    @property
    def finished(self) -> bool:
        return bool(self.events) and self.events[-1].get("more_body") is False


@asynccontextmanager
async def calling(app: AsgiApp, scope: dict[str, Any]) -> AsyncIterator[Call]:
    """Call the application, and wait for the call's end after the body."""
    call = Call(app, scope)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(call.run)
        yield call


async def call_once(app: AsgiApp, scope: dict[str, Any], body: bytes = b"") -> Call:
    """Make a whole request."""
    async with calling(app, scope) as call:
        call.body(body)
    assert call.finished
    return call


QUICK = HttpLimits(body_timeout=30, linger_timeout=1, linger_bytes=100_000, low_water=1000)
