"""Opens, uses and closes Streamable HTTP sessions over bare sockets, as cheaply as Python can, and checks every reply.

What the load costs must not hide what a server costs, so this is no client: it knows the few forms of HTTP/1.1 that
the servers under measurement answer with, and an open stream is a socket in a list that nobody reads.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import Any

import attrs
import orjson
import trio

__all__ = ["Connection", "Session", "each"]

REVISION = "2025-11-25"
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
    """One keep-alive connection, with one request at a time."""

    port: int
    _socket: trio.socket.SocketType | None = None
    _buffer: bytearray = attrs.field(factory=bytearray)

    async def request(self, method: str, headers: str, body: bytes = b"") -> Answer:
        """Send a request and return the whole response."""
        status, found = await self.head(method, headers, body)
        data = await self._body(status, found)
        message = None
        if data:
            if found.get("content-type", "").startswith("text/event-stream"):
                data = next(line[5:] for line in reversed(data.splitlines()) if line.startswith(b"data:"))
            message = orjson.loads(data)
        if found.get("connection", "").lower() == "close":
            self.close()
        return Answer(status, found, message)

    async def head(self, method: str, headers: str, body: bytes = b"") -> tuple[int, dict[str, str]]:
        """Send a request and return the status and headers of the response."""
        if self._socket is None:
            self._socket = trio.socket.socket()
            await self._socket.connect(("127.0.0.1", self.port))
            self._socket.setsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NODELAY, 1)
        length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        request = f"{method} /mcp HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n{length}{headers}\r\n".encode() + body
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


@attrs.define(eq=False)
class Session:
    """A legacy session with an open stream."""

    stream: Connection
    headers: str = ""

    async def open(self, connection: Connection) -> None:
        """Initialize, and open the stream."""
        client = {"name": "bench", "version": "1.0"}
        params = {"protocolVersion": REVISION, "capabilities": {}, "clientInfo": client}
        answer = await self._post(connection, "initialize", params)
        assert answer.message is not None
        if answer.message["result"]["protocolVersion"] != REVISION:
            raise AssertionError(f"the server speaks {answer.message['result']['protocolVersion']}")
        self.headers = f"Mcp-Session-Id: {answer.headers['mcp-session-id']}\r\nMCP-Protocol-Version: {REVISION}\r\n"
        body = orjson.dumps({"jsonrpc": "2.0", "method": "notifications/initialized"})
        accepted = await connection.request("POST", self._accepting("application/json, text/event-stream"), body)
        if accepted.status != 202:
            raise AssertionError(f"initialized: {accepted}")
        status, headers = await self.stream.head("GET", self._accepting("text/event-stream"))
        if status != 200 or not headers["content-type"].startswith("text/event-stream"):
            raise AssertionError(f"GET: {status} {headers}")

    async def call(self, connection: Connection, tool: str = "echo") -> str:
        """Call a tool once, and return the text of its result."""
        text = f"hello number {next(_ids)}"
        arguments = {"text": text} if tool == "echo" else {}
        answer = await self._post(connection, "tools/call", {"name": tool, "arguments": arguments})
        assert answer.message is not None
        found: str = answer.message["result"]["content"][0]["text"]
        if tool == "echo" and found != text:
            raise AssertionError(f"wanted {text!r}, got {answer}")
        return found

    async def close(self, connection: Connection) -> None:
        """Delete the session, and see its stream end."""
        answer = await connection.request("DELETE", self.headers)
        if answer.status not in (200, 202, 204):
            raise AssertionError(f"DELETE: {answer}")
        await self.stream.rest()
        self.stream.close()

    async def _post(self, connection: Connection, method: str, params: dict[str, Any]) -> Answer:
        id = next(_ids)
        body = orjson.dumps({"jsonrpc": "2.0", "id": id, "method": method, "params": params})
        answer = await connection.request("POST", self._accepting("application/json, text/event-stream"), body)
        if answer.status != 200 or answer.message is None or answer.message.get("id") != id:
            raise AssertionError(f"{method}: {answer}")
        return answer

    def _accepting(self, types: str) -> str:
        return f"Accept: {types}\r\n{self.headers}"


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
            nursery.start_soon(worker, Connection(sessions[0].stream.port))
