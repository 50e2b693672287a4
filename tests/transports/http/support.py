"""A face that does as it is told, and connections in memory that lead to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import NoReturn

import attrs
import trio
from trio.testing import memory_stream_pair

from tests.peers.http1 import HttpWire
from tests.peers.http2 import FramePeer
from trimcp.budget import Budget
from trimcp.support.deadlines import Deadlines
from trimcp.transports.http.h1.connection import H1Connection
from trimcp.transports.http.h1.hosting import Hosting, ServeWebSocket
from trimcp.transports.http.h1.wires import StreamWire, Take, Wire
from trimcp.transports.http.h2.frames import Setting
from trimcp.transports.http.interfaces import Admitted, ByteStream, Head, HttpReply, HttpResponse, Tunnel, Upgrade
from trimcp.transports.http.settings import HttpLimits

JSON = (("Content-Type", "application/json"),)


@attrs.define(eq=False, slots=False)
class DummyHandler:
    """A request under way. What it does at once depends on the path; the rest is up to the test.

    `/echo` answers with the body, `/crash` raises, `/half` begins a response and raises; others wait.
    """

    head: Head
    max_body: int = 4 * 1024 * 1024
    body: bytes | None = None
    gone: int = 0
    drained: int = 0
    beginning: bytes | None = None
    _reply: HttpReply | None = None

    @property
    def reply(self) -> HttpReply:
        assert self._reply is not None
        return self._reply

    @property
    def at_rest(self) -> bool:
        return False

    def start(self, body: bytes, reply: HttpReply) -> None:
        assert self._reply is None
        self.body = body
        self._reply = reply
        if self.head.path == "/echo":
            reply.send(HttpResponse(200, JSON, body))
        elif self.head.path == "/half":
            reply.start(HttpResponse(200, JSON, b"{"))
        if self.head.path in ("/crash", "/half"):
            raise RuntimeError("the handler's bug")

    def too_large(self, beginning: bytes) -> HttpResponse:
        assert self._reply is None
        self.beginning = beginning
        return HttpResponse(413, JSON, b'"too large"')

    def refused(self, response: HttpResponse) -> HttpResponse:
        return response

    def disconnected(self, slow: str | None = None) -> None:
        assert self._reply is not None
        self.gone += 1

    def writable(self) -> None:
        self.drained += 1


@attrs.define(eq=False, slots=False)
class DummyFace:
    """Admits everything except `/no` (403 at once) and `/bug` (crashes); `/ws` is a WebSocket.

    `judged` counts the heads that it was asked about. With `again` it is not asked about a head like the one before.
    """

    max_body: int = 4 * 1024 * 1024
    handlers: list[DummyHandler] = attrs.field(factory=list)
    ended: list[tuple[str, int, int]] = attrs.field(factory=list)
    held: trio.Event | None = None
    again: bool = True
    serve: Callable[[ByteStream], Awaitable[None]] | None = None  # what is at /tunnel
    judged: int = 0
    connections: int = 0
    deadlines: Deadlines = attrs.field(factory=Deadlines)
    budget: Budget = attrs.field(factory=Budget)

    async def admit(self, head: Head) -> Admitted:
        self.judged += 1
        if self.held is not None:
            await self.held.wait()
        if head.path == "/no":
            return HttpResponse(403, JSON, b'"no"')
        if head.path == "/bug":
            raise RuntimeError("the face's bug")
        if head.path == "/tunnel" and self.serve is not None:
            return Tunnel(self.serve)
        if head.path == "/ws" and head.websocket:
            return Upgrade(_never, None, 1024, open=_no_session)
        head.again = self._take
        return self._handler(head)

    def _handler(self, head: Head) -> DummyHandler:
        self.handlers.append(DummyHandler(head, self.max_body))
        return self.handlers[-1]

    def _take(self, head: Head) -> DummyHandler | None:
        return self._handler(head) if self.again else None

    def done(self, head: Head, status: int, sent: int) -> None:
        self.ended.append((head.path, status, sent))


async def _never(channel: object) -> None:
    raise AssertionError("nobody opens this channel")


def _no_session(writer: object) -> NoReturn:
    raise AssertionError("nobody opens this session")


class OfferingWire(StreamWire):
    """A wire that offers what it reads before it wakes its reader, as that of a socket with a poller does."""

    __slots__ = ()

    async def read(self, max_bytes: int, take: Take | None = None) -> bytes | None:
        while True:
            data = await super().read(max_bytes)
            if not data or take is None or not take(data):
                return data


@attrs.define(eq=False)
class Memory:
    """Connections in memory to one face."""

    face: DummyFace
    hosting: Hosting
    wire: Callable[[trio.abc.Stream], Wire] = StreamWire
    connections: list[H1Connection] = attrs.field(factory=list)
    ended: int = 0
    over: trio.Event = attrs.field(factory=trio.Event)

    def connect(self, pair: Callable[[], tuple[trio.abc.Stream, trio.abc.Stream]] = memory_stream_pair) -> HttpWire:
        ours, theirs = pair()
        connection = H1Connection(self.hosting, self.wire(theirs), peer="test")
        self.connections.append(connection)
        self.hosting.nursery.start_soon(self._run, connection)
        return HttpWire(ours)

    async def connect_http2(self, settings: Mapping[Setting, int] | None = None) -> FramePeer:
        peer = FramePeer(self.connect().stream)
        await peer.start(settings)
        return peer

    async def _run(self, connection: H1Connection) -> None:
        await connection.run()
        self.ended += 1
        self.over.set()
        self.connections.remove(connection)


@asynccontextmanager
async def memory(
    face: DummyFace | None = None,
    limits: HttpLimits | None = None,
    serve_websocket: ServeWebSocket | None = None,
    wire: Callable[[trio.abc.Stream], Wire] = StreamWire,
) -> AsyncIterator[Memory]:
    """Open a face that connections in memory lead to; leaving cuts them off."""
    async with trio.open_nursery() as nursery:
        face = DummyFace() if face is None else face
        hosting = Hosting(face, HttpLimits() if limits is None else limits, nursery, serve_websocket)
        nursery.start_soon(face.deadlines.run)
        yield Memory(face, hosting, wire)
        nursery.cancel_scope.cancel()
