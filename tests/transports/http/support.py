"""A face without protocol, a client without library, and connections between them in memory."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import attrs
import trio
from trio.testing import memory_stream_pair

from trimcp.budget import Budget
from trimcp.transports.http.deadlines import Deadlines
from trimcp.transports.http.h1.connection import H1Connection, Hosting, UpgradeWebSocket
from trimcp.transports.http.h1.wires import StreamWire
from trimcp.transports.http.seams import Admitted, Head, HttpReply, HttpResponse, Upgrade
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

    def disconnected(self, slow: str | None = None) -> None:
        assert self._reply is not None
        self.gone += 1

    def writable(self) -> None:
        self.drained += 1


@attrs.define(eq=False, slots=False)
class DummyFace:
    """Admits everything except `/no` (403 at once) and `/bug` (crashes); `/ws` is a WebSocket."""

    max_body: int = 4 * 1024 * 1024
    handlers: list[DummyHandler] = attrs.field(factory=list)
    ended: list[tuple[str, int, int]] = attrs.field(factory=list)
    held: trio.Event | None = None
    connections: int = 0
    deadlines: Deadlines = attrs.field(factory=Deadlines)
    budget: Budget = attrs.field(factory=Budget)

    async def admit(self, head: Head) -> Admitted:
        if self.held is not None:
            await self.held.wait()
        if head.path == "/no":
            return HttpResponse(403, JSON, b'"no"')
        if head.path == "/bug":
            raise RuntimeError("the face's bug")
        if head.path == "/ws" and head.websocket:
            return Upgrade(_never, None, 1024)
        self.handlers.append(DummyHandler(head, self.max_body))
        return self.handlers[-1]

    def done(self, head: Head, status: int, sent: int) -> None:
        self.ended.append((head.path, status, sent))


async def _never(channel: object) -> None:
    raise AssertionError("nobody opens this channel")


@attrs.define(eq=False)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


@attrs.define(eq=False)
class RawClient:
    """The client's end of a connection: bytes out, responses in, with nothing checked on the way out."""

    stream: trio.abc.Stream
    buffer: bytearray = attrs.field(factory=bytearray)

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def request(
        self, method: str = "GET", path: str = "/echo", *lines: str, body: bytes | None = None, version: str = "1.1"
    ) -> None:
        await self.send(request(method, path, *lines, body=body, version=version))

    async def ask(self, method: str = "GET", path: str = "/echo", *lines: str, body: bytes | None = None) -> Answer:
        await self.request(method, path, *lines, body=body)
        return await self.answer(method)

    async def answer(self, method: str = "GET") -> Answer:
        """The next response; the method it answers says whether it has a body."""
        status, headers = await self.head()
        if method == "HEAD" or status in (100, 204, 304):
            return Answer(status, headers, b"")
        if headers.get("transfer-encoding") == "chunked":
            return Answer(status, headers, b"".join([chunk async for chunk in self.chunks()]))
        if "content-length" in headers:
            return Answer(status, headers, await self.exactly(int(headers["content-length"])))
        return Answer(status, headers, await self.rest())

    async def head(self) -> tuple[int, dict[str, str]]:
        lines = (await self.until(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        assert lines[0].startswith("HTTP/1.1 "), lines
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        lowered = {name.lower(): value for name, value in headers.items()}
        assert len(lowered) == len([line for line in lines[1:] if line]), "a header came twice"
        return int(lines[0].split(" ")[1]), lowered

    async def chunks(self) -> AsyncIterator[bytes]:
        while (chunk := await self.chunk()) != b"":
            yield chunk

    async def chunk(self) -> bytes:
        size = int(await self.until(b"\r\n"), 16)
        data = await self.exactly(size + 2)
        assert data.endswith(b"\r\n")
        return data[:-2]

    async def until(self, mark: bytes) -> bytes:
        while mark not in self.buffer:
            await self._more()
        return self._take(self.buffer.index(mark) + len(mark))

    async def exactly(self, size: int) -> bytes:
        while len(self.buffer) < size:
            await self._more()
        return self._take(size)

    async def rest(self) -> bytes:
        """Everything until the server closes. A reset raises `trio.BrokenResourceError`."""
        with contextlib.suppress(EOFError):
            while True:
                await self._more()
        return self._take(len(self.buffer))

    async def closed(self) -> None:
        """Wait until the server has closed, without another byte."""
        assert await self.rest() == b""

    def _take(self, size: int) -> bytes:
        taken = bytes(self.buffer[:size])
        del self.buffer[:size]
        return taken

    async def _more(self) -> None:
        data = await self.stream.receive_some(65536)
        if not data:
            raise EOFError(f"the server closed after {bytes(self.buffer)!r}")
        self.buffer += data


def request(
    method: str = "GET", path: str = "/echo", *lines: str, body: bytes | None = None, version: str = "1.1"
) -> bytes:
    length = [] if body is None else [f"Content-Length: {len(body)}"]
    return "\r\n".join([f"{method} {path} HTTP/{version}", "Host: h", *lines, *length, "", ""]).encode() + (body or b"")


@attrs.define(eq=False)
class Memory:
    """Connections in memory to one face."""

    face: DummyFace
    hosting: Hosting
    connections: list[H1Connection] = attrs.field(factory=list)
    ended: int = 0
    over: trio.Event = attrs.field(factory=trio.Event)

    def connect(self, pair: Callable[[], tuple[trio.abc.Stream, trio.abc.Stream]] = memory_stream_pair) -> RawClient:
        ours, theirs = pair()
        connection = H1Connection(self.hosting, StreamWire(theirs), peer="test")
        self.connections.append(connection)
        self.hosting.nursery.start_soon(self._run, connection)
        return RawClient(ours)

    async def _run(self, connection: H1Connection) -> None:
        await connection.run()
        self.ended += 1
        self.over.set()
        self.connections.remove(connection)


@asynccontextmanager
async def memory(
    face: DummyFace | None = None,
    limits: HttpLimits | None = None,
    upgrade_websocket: UpgradeWebSocket | None = None,
) -> AsyncIterator[Memory]:
    """Open a face that connections in memory lead to; leaving cuts them off."""
    async with trio.open_nursery() as nursery:
        face = DummyFace() if face is None else face
        hosting = Hosting(face, HttpLimits() if limits is None else limits, nursery, upgrade_websocket)
        nursery.start_soon(face.deadlines.run)
        yield Memory(face, hosting)
        nursery.cancel_scope.cancel()
