"""Opens, uses and closes sessions over a network, as cheaply as Python can, and checks every reply.

Three kinds: Streamable HTTP of 2025-11-25 with a GET stream, HTTP+SSE of 2024-11-05, which is all stream, and a
WebSocket.

What the load costs must not hide what a server costs, so this is no client: it sends by what `trimcp bench` sends with,
and an open stream is a socket in a list that nobody reads.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import cache
from itertools import count
from typing import Any, Protocol
from urllib.parse import urljoin, urlsplit

import attrs
import orjson
import trio
from check_far_end import CLOSE, frame

from trimcp.bench.channels import FrameReader
from trimcp.bench.connection import LoadConnection, LoadSite, events_in
from trimcp.bench.plan import Plan
from trimcp.bench.supply import INITIALIZED, Load, Supply
from trimcp.bench.tally import Tally
from trimcp.framing.sse import EventDecoder
from trimcp.transports.http.client.target import HttpServer
from trimcp.wire.revisions import LATEST_LEGACY

__all__ = ["Connection", "Session", "SseSession", "StreamableSession", "WebSocketSession", "call", "each", "echo"]

STREAMABLE, SSE = "2025-11-25", "2024-11-05"
EVENTS = "text/event-stream"
UPGRADE = (
    b"GET %b HTTP/1.1\r\nHost: %b\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Protocol: mcp\r\n\r\n"
)
MAX_MESSAGE = 1 << 20
_ids = count(1)


@attrs.frozen
class Answer:
    """A response: its status, the session it opens, and the JSON-RPC message in it, if any."""

    status: int
    session_id: str | None
    message: dict[str, Any] | None


@cache
def _load() -> Load:
    """Return what all connections share; it is nobody's measurement."""
    plan, tally = Plan(), Tally()
    return Load(plan, LATEST_LEGACY, Supply(plan, (), tally), tally)


@attrs.define(eq=False)
class Connection:
    """One keep-alive connection to a server of this URL, with one request at a time."""

    url: str
    _http: LoadConnection = attrs.field(init=False)
    _decoder: EventDecoder = attrs.field(factory=EventDecoder)
    _events: list[bytes] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        self._http = LoadConnection(LoadSite.of(HttpServer(self.url), _load()), _load())

    async def request(self, method: str, headers: dict[str, str], body: bytes = b"", path: str = "") -> Answer:
        """Send a request, to the URL's path or another, and return the whole response."""
        http = self._http
        await self._send(method, headers, body, path)
        data = await http.body()
        message = None
        if data and http.reply.status == 200:
            if http.reply.content_type == EVENTS:
                data = events_in([data], EventDecoder())[-1].data
            message = orjson.loads(data)
        return Answer(http.reply.status, http.reply.headers.get("mcp-session-id"), message)

    async def open_stream(self, headers: dict[str, str]) -> None:
        """Send a GET, and see that the response is a stream of events."""
        http = self._http
        await self._send("GET", {"accept": EVENTS, **headers})
        while not http.reply.status:
            self._take(await http.more())
        if http.reply.status != 200 or http.reply.content_type != EVENTS:
            raise AssertionError(f"GET: {http.reply.status} {http.reply.content_type!r}")

    async def rest(self) -> None:
        """Read what is left of the response, until the server ends it."""
        with suppress(trio.BrokenResourceError):
            await self._http.body()

    async def event(self) -> str:
        """Return the data of the next event of a response that is a stream."""
        while not self._events:
            self._take(await self._http.more())
        return self._events.pop(0).decode()

    def fileno(self) -> int:
        """Return the descriptor of its socket, which has to be open."""
        sock = self._http.socket
        assert sock is not None
        return sock.fileno()

    async def close(self) -> None:
        """Close the connection; the next request opens another."""
        await self._http.close()

    async def _send(self, method: str, headers: dict[str, str], body: bytes = b"", path: str = "") -> None:
        if body:
            headers = {**headers, "content-type": "application/json", "content-length": str(len(body))}
        url = urljoin(self.url, path) if path else None
        await self._http.request(self._http.site.head(method, headers, url=url) + b"\r\n" + body)

    def _take(self, pieces: list[bytes]) -> None:
        self._events += [event.data for event in events_in(pieces, self._decoder) if event.data]


class Session(Protocol):
    """A legacy session with an open stream."""

    stream: Connection

    async def open(self, connection: Connection) -> None:
        """Initialize, with the stream open in the end."""

    async def ask(self, connection: Connection, method: str, params: dict[str, Any]) -> Answer:
        """Send a request and return the answer to it."""

    async def close(self, connection: Connection) -> None:
        """End the session."""


@attrs.define(eq=False)
class StreamableSession:
    """A session of 2025-11-25, its GET stream open."""

    stream: Connection
    headers: dict[str, str] = attrs.field(factory=dict)

    async def open(self, connection: Connection) -> None:
        """Initialize, and open the stream."""
        await self.initialize(connection)
        await self.stream.open_stream(self.headers)

    async def initialize(self, connection: Connection) -> None:
        """Begin the session, without a stream."""
        answer = await self.ask(connection, "initialize", _offer(STREAMABLE))
        _accept(answer, STREAMABLE)
        assert answer.session_id is not None
        self.headers = {"mcp-session-id": answer.session_id, "mcp-protocol-version": STREAMABLE}
        accepted = await connection.request("POST", self._both, INITIALIZED)
        if accepted.status != 202:
            raise AssertionError(f"initialized: {accepted}")

    async def ask(self, connection: Connection, method: str, params: dict[str, Any]) -> Answer:
        """Send a request and return the response to it."""
        id = next(_ids)
        answer = await connection.request("POST", self._both, _request(id, method, params))
        if answer.status != 200 or answer.message is None or answer.message.get("id") != id:
            raise AssertionError(f"{method}: {answer}")
        return answer

    async def close(self, connection: Connection) -> None:
        """Delete the session, and see its stream end."""
        await self.delete(connection)
        await self.stream.rest()
        await self.stream.close()

    async def delete(self, connection: Connection) -> None:
        """End the session."""
        answer = await connection.request("DELETE", self.headers)
        if answer.status not in (200, 202, 204):
            raise AssertionError(f"DELETE: {answer}")

    @property
    def _both(self) -> dict[str, str]:
        return {"accept": "application/json, text/event-stream", **self.headers}


@attrs.define(eq=False)
class SseSession:
    """A session of 2024-11-05: answers come on the stream, and the session ends with it."""

    stream: Connection
    path: str = ""

    async def open(self, connection: Connection) -> None:
        """Open the stream, and initialize."""
        await self.stream.open_stream({})
        parts = urlsplit(await self.stream.event())
        self.path = f"{parts.path}?{parts.query}" if parts.query else parts.path
        _accept(await self.ask(connection, "initialize", _offer(SSE)), SSE)
        await self._send(connection, INITIALIZED)

    async def ask(self, connection: Connection, method: str, params: dict[str, Any]) -> Answer:
        """Send a request, and return the next message on the stream, which has to answer it."""
        id = next(_ids)
        await self._send(connection, _request(id, method, params))
        answer = Answer(200, None, orjson.loads(await self.stream.event()))
        if answer.message is None or answer.message.get("id") != id:
            raise AssertionError(f"{method}: {answer}")
        return answer

    async def close(self, connection: Connection) -> None:
        """Close the stream; there is nothing else."""
        await self.stream.close()

    async def _send(self, connection: Connection, body: bytes) -> None:
        accepted = await connection.request("POST", {}, body, self.path)
        if accepted.status not in (200, 202):
            raise AssertionError(f"POST: {accepted}")


@attrs.define(eq=False)
class WebSocketSession:
    """A session of 2025-11-25 on a WebSocket of its own, on which nobody reads but for an answer."""

    stream: Connection
    _socket: trio.SocketStream = attrs.field(init=False)
    _frames: FrameReader = attrs.field(factory=lambda: FrameReader(MAX_MESSAGE))

    async def open(self, connection: Connection) -> None:
        """Connect, and initialize."""
        place = urlsplit(self.stream.url)
        self._socket = await trio.open_tcp_stream(place.hostname, place.port)
        await self._socket.send_all(UPGRADE % (place.path.encode(), place.netloc.encode()))
        head = b""
        while b"\r\n\r\n" not in head:
            head += await self._some()
        if not head.startswith(b"HTTP/1.1 101 "):
            raise AssertionError(f"upgrade: {head[:200]!r}")
        _accept(await self.ask(connection, "initialize", _offer(STREAMABLE)), STREAMABLE)
        await self._socket.send_all(frame(INITIALIZED))

    async def ask(self, connection: Connection, method: str, params: dict[str, Any]) -> Answer:
        """Send a request, and return the next message, which has to answer it."""
        id = next(_ids)
        await self._socket.send_all(frame(_request(id, method, params)))
        messages: list[bytes] = []
        while not messages:
            messages = self._frames.feed(await self._some())
        answer = Answer(200, None, orjson.loads(messages[0]))
        if answer.message is None or answer.message.get("id") != id:
            raise AssertionError(f"{method}: {answer}")
        return answer

    async def close(self, connection: Connection) -> None:
        """Close the connection, as the protocol of WebSockets wants it, and see it end."""
        await self._socket.send_all(CLOSE)
        with suppress(trio.BrokenResourceError):
            while await self._socket.receive_some():
                pass
        await self._socket.aclose()

    async def _some(self) -> bytes:
        data = bytes(await self._socket.receive_some())
        if not data:
            raise AssertionError("the server closed the connection")
        return data


def _offer(revision: str) -> dict[str, Any]:
    return {"protocolVersion": revision, "capabilities": {}, "clientInfo": {"name": "bench", "version": "1.0"}}


def _accept(answer: Answer, revision: str) -> None:
    assert answer.message is not None
    if answer.message["result"]["protocolVersion"] != revision:
        raise AssertionError(f"the server speaks {answer.message['result']['protocolVersion']}")


def _request(id: int, method: str, params: dict[str, Any]) -> bytes:
    return orjson.dumps({"jsonrpc": "2.0", "id": id, "method": method, "params": params})


async def echo(session: Session, connection: Connection) -> None:
    """Call `echo` once in a session."""
    text = f"hello number {next(_ids)}"
    if await call(session, connection, "echo", {"text": text}) != text:
        raise AssertionError(f"wanted {text!r}")


async def call(session: Session, connection: Connection, tool: str, arguments: dict[str, Any]) -> str:
    """Call a tool once in a session, and return the text of its result."""
    answer = await session.ask(connection, "tools/call", {"name": tool, "arguments": arguments})
    assert answer.message is not None
    try:
        found: str = answer.message["result"]["content"][0]["text"]
    except (KeyError, IndexError):
        raise AssertionError(f"{tool}: {answer}") from None
    return found


async def each(
    sessions: Sequence[Session], work: Callable[[Session, Connection], Awaitable[object]], under_way: int
) -> None:
    """Do something with each session, so many at a time, over as many connections that are closed in the end."""
    left = iter(sessions)

    async def worker(connection: Connection) -> None:
        try:
            for session in left:
                await work(session, connection)
        finally:
            await connection.close()

    async with trio.open_nursery() as nursery:
        for _ in range(under_way):
            nursery.start_soon(worker, Connection(sessions[0].stream.url))
