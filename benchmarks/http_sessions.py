"""Opens, uses and closes sessions over HTTP on bare sockets, as cheaply as Python can, and checks every reply.

Two kinds: Streamable HTTP of 2025-11-25 with a GET stream, and HTTP+SSE of 2024-11-05, which is all stream.

What the load costs must not hide what a server costs, so this is no client: it knows the few forms of HTTP/1.1 that
the servers under measurement answer with, and an open stream is a socket in a list that nobody reads.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import Any, Protocol
from urllib.parse import urlsplit

import attrs
import orjson
import trio

__all__ = ["Connection", "Session", "SseSession", "StreamableSession", "call", "each", "echo"]

STREAMABLE, SSE = "2025-11-25", "2024-11-05"
_MOST = 1 << 20
_ids = count(1)


@attrs.frozen
class Answer:
    """A response: its status, headers by lower-case name, and the JSON-RPC message in it, if any."""

    status: int
    headers: dict[str, str]
    message: dict[str, Any] | None


@attrs.define(eq=False)
class Connection:
    """One keep-alive connection to a server of this URL, with one request at a time."""

    url: str
    _socket: trio.socket.SocketType | None = None
    _buffer: bytearray = attrs.field(factory=bytearray)
    _events: bytearray = attrs.field(factory=bytearray)

    async def request(self, method: str, headers: str, body: bytes = b"", path: str | None = None) -> Answer:
        """Send a request and return the whole response."""
        status, found = await self.head(method, headers, body, path)
        data = await self._body(status, found)
        message = None
        if data and status == 200:
            if found.get("content-type", "").startswith("text/event-stream"):
                data = next(line[5:] for line in reversed(data.splitlines()) if line.startswith(b"data:"))
            message = orjson.loads(data)
        if found.get("connection", "").lower() == "close":
            self.close()
        return Answer(status, found, message)

    async def head(
        self, method: str, headers: str, body: bytes = b"", path: str | None = None
    ) -> tuple[int, dict[str, str]]:
        """Send a request, to the URL's path or another, and return the status and headers of the response."""
        parts = urlsplit(self.url)
        if self._socket is None:
            self._socket = trio.socket.socket()
            await self._socket.connect((parts.hostname, parts.port))
            self._socket.setsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NODELAY, 1)
        length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        line = f"{method} {path or parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        request = f"{line}{length}{headers}\r\n".encode() + body
        sent = await self._socket.send(request)
        assert sent == len(request)
        lines = (await self._until(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines[1:])
        return int(lines[0].split(" ")[1]), {name.lower(): value.strip() for name, _, value in pairs}

    async def rest(self) -> None:
        """Read what is left of the response, until the server ends it."""
        try:
            while await self._chunk():
                pass
        except EOFError:
            pass

    async def event(self) -> str:
        """Return the data of the next event of a response that is a stream."""
        while True:
            while (place := self._events.find(b"\n\n")) < 0:
                # Both ends of line are allowed, but nobody mixes them.
                self._events += (await self._chunk()).replace(b"\r\n", b"\n")
            event = bytes(self._events[:place])
            del self._events[: place + 2]
            data = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if data:
                return b"\n".join(data).decode()

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self._buffer.clear()

    async def _body(self, status: int, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding") == "chunked":
            chunks = []
            while chunk := await self._chunk():
                chunks.append(chunk)
            return b"".join(chunks)
        if status in (202, 204) and "content-length" not in headers:
            return b""
        return await self._exactly(int(headers["content-length"]))

    async def _chunk(self) -> bytes:
        size = int((await self._until(b"\r\n")).partition(b";")[0], 16)
        data = await self._exactly(size)
        await self._until(b"\r\n")
        return data

    async def _until(self, end: bytes) -> bytes:
        while (place := self._buffer.find(end)) < 0:
            await self._more()
        found = bytes(self._buffer[:place])
        del self._buffer[: place + len(end)]
        return found

    async def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            await self._more()
        found = bytes(self._buffer[:size])
        del self._buffer[:size]
        return found

    async def _more(self) -> None:
        assert self._socket is not None
        if len(self._buffer) > _MOST:
            raise AssertionError("a server under measurement says more than it was asked for")
        data = await self._socket.recv(1 << 16)
        if not data:
            raise EOFError("the server closed the connection")
        self._buffer += data


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
    headers: str = ""

    async def open(self, connection: Connection) -> None:
        """Initialize, and open the stream."""
        answer = await self.ask(connection, "initialize", _offer(STREAMABLE))
        _accept(answer, STREAMABLE)
        self.headers = f"Mcp-Session-Id: {answer.headers['mcp-session-id']}\r\nMCP-Protocol-Version: {STREAMABLE}\r\n"
        accepted = await connection.request("POST", self._both, _INITIALIZED)
        if accepted.status != 202:
            raise AssertionError(f"initialized: {accepted}")
        await _open_stream(self.stream, self.headers)

    async def ask(self, connection: Connection, method: str, params: dict[str, Any]) -> Answer:
        """Send a request and return the response to it."""
        id = next(_ids)
        answer = await connection.request("POST", self._both, _request(id, method, params))
        if answer.status != 200 or answer.message is None or answer.message.get("id") != id:
            raise AssertionError(f"{method}: {answer}")
        return answer

    async def close(self, connection: Connection) -> None:
        """Delete the session, and see its stream end."""
        answer = await connection.request("DELETE", self.headers)
        if answer.status not in (200, 202, 204):
            raise AssertionError(f"DELETE: {answer}")
        await self.stream.rest()
        self.stream.close()

    @property
    def _both(self) -> str:
        return f"Accept: application/json, text/event-stream\r\n{self.headers}"


@attrs.define(eq=False)
class SseSession:
    """A session of 2024-11-05: answers come on the stream, and the session ends with it."""

    stream: Connection
    path: str = ""

    async def open(self, connection: Connection) -> None:
        """Open the stream, and initialize."""
        await _open_stream(self.stream, "")
        parts = urlsplit(await self.stream.event())
        self.path = f"{parts.path}?{parts.query}" if parts.query else parts.path
        _accept(await self.ask(connection, "initialize", _offer(SSE)), SSE)
        await self._send(connection, _INITIALIZED)

    async def ask(self, connection: Connection, method: str, params: dict[str, Any]) -> Answer:
        """Send a request, and return the next message on the stream, which has to answer it."""
        id = next(_ids)
        await self._send(connection, _request(id, method, params))
        answer = Answer(200, {}, orjson.loads(await self.stream.event()))
        if answer.message is None or answer.message.get("id") != id:
            raise AssertionError(f"{method}: {answer}")
        return answer

    async def close(self, connection: Connection) -> None:
        """Close the stream; there is nothing else."""
        self.stream.close()

    async def _send(self, connection: Connection, body: bytes) -> None:
        accepted = await connection.request("POST", "", body, self.path)
        if accepted.status not in (200, 202):
            raise AssertionError(f"POST: {accepted}")


_INITIALIZED = orjson.dumps({"jsonrpc": "2.0", "method": "notifications/initialized"})


def _offer(revision: str) -> dict[str, Any]:
    return {"protocolVersion": revision, "capabilities": {}, "clientInfo": {"name": "bench", "version": "1.0"}}


def _accept(answer: Answer, revision: str) -> None:
    assert answer.message is not None
    if answer.message["result"]["protocolVersion"] != revision:
        raise AssertionError(f"the server speaks {answer.message['result']['protocolVersion']}")


def _request(id: int, method: str, params: dict[str, Any]) -> bytes:
    return orjson.dumps({"jsonrpc": "2.0", "id": id, "method": method, "params": params})


async def _open_stream(stream: Connection, headers: str) -> None:
    status, found = await stream.head("GET", f"Accept: text/event-stream\r\n{headers}")
    if status != 200 or not found["content-type"].startswith("text/event-stream"):
        raise AssertionError(f"GET: {status} {found}")


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
            connection.close()

    async with trio.open_nursery() as nursery:
        for _ in range(under_way):
            nursery.start_soon(worker, Connection(sessions[0].stream.url))
