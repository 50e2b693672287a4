"""The far end of a connection, for `check_cells.py`: MCP spoken by hand, with as little of Trio as will do."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import attrs
import orjson
import trio

__all__ = [
    "CLOSE",
    "INITIALIZED",
    "LEGACY",
    "MODERN",
    "OLDEST",
    "Http",
    "Http2",
    "Peer",
    "call_agent",
    "cancel",
    "check",
    "dial",
    "echo",
    "frame",
    "initialize",
    "message",
    "opened",
    "request",
    "standard_pipes",
]

LEGACY = "2025-11-25"
MODERN = "2026-07-28"
OLDEST = "2024-11-05"
_META = "io.modelcontextprotocol/"
_ENVELOPE = {
    f"{_META}protocolVersion": MODERN,
    f"{_META}clientInfo": {"name": "check", "version": "1"},
    f"{_META}clientCapabilities": {},
}

# Words

_ids = count(1)


def request(revision: str, method: str, params: dict[str, Any], **meta: Any) -> tuple[int, bytes]:
    """Return a request's id, and the request."""
    id = next(_ids)
    meta = {**(_ENVELOPE if revision == MODERN else {}), **meta}
    params = {**params, "_meta": meta} if meta else params
    return id, orjson.dumps({"jsonrpc": "2.0", "id": id, "method": method, "params": params})


def echo(revision: str, text: str = "") -> tuple[int, str, bytes]:
    """Return a call's id, the text it has to return, and the request."""
    text = text or "hello number"
    id, data = request(revision, "tools/call", {"name": "echo", "arguments": {"text": text}})
    return id, text, data


def initialize(revision: str) -> tuple[int, bytes]:
    """Return the request that opens a legacy session."""
    client = {"name": "check", "version": "1"}
    return request(revision, "initialize", {"protocolVersion": revision, "capabilities": {}, "clientInfo": client})


INITIALIZED = orjson.dumps({"jsonrpc": "2.0", "method": "notifications/initialized"})


def cancel(revision: str, id: int) -> bytes:
    """Return the notification that takes a request back."""
    params = {"requestId": id, **({"_meta": _ENVELOPE} if revision == MODERN else {})}
    return orjson.dumps({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params})


def check(reply: bytes, wanted: dict[int, str]) -> None:
    """Check the reply to one of the calls that are wanted, which then is not any more."""
    message = orjson.loads(reply)
    text = wanted.pop(message["id"])
    if message["result"]["content"] != [{"type": "text", "text": text}]:
        raise AssertionError(f"wanted {text[:100]!r}, got {reply[:1000]!r}")


# Bytes


class Peer:
    """The far end of a pipe or socket, with as little of Trio as will do."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader = reader
        self._writer = writer
        self._buffer = bytearray()
        for fd in {reader, writer}:
            os.set_blocking(fd, False)

    async def send(self, data: bytes) -> None:
        """Write all of it."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._writer, view) :]
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._writer)

    async def until(self, mark: bytes) -> bytes:
        """Read up to a mark, and return what was before it."""
        while (at := self._buffer.find(mark)) < 0:
            await self._more()
        return self._take(at, len(mark))

    async def exactly(self, size: int) -> bytes:
        """Read so many bytes."""
        while len(self._buffer) < size:
            await self._more()
        return self._take(size, 0)

    async def lines(self) -> list[bytes]:
        """Read, and return all whole lines that are there then."""
        while b"\n" not in self._buffer:
            await self._more()
        *lines, rest = bytes(self._buffer).split(b"\n")
        self._buffer[:] = rest
        return lines

    def close(self) -> None:
        """Close it."""
        for fd in {self._reader, self._writer}:
            os.close(fd)

    def _take(self, size: int, more: int) -> bytes:
        taken = bytes(self._buffer[:size])
        del self._buffer[: size + more]
        return taken

    async def _more(self) -> None:
        await trio.lowlevel.wait_readable(self._reader)
        data = os.read(self._reader, 1 << 16)
        if not data:
            raise EOFError(f"the other side has closed, after {bytes(self._buffer)!r}")
        self._buffer += data


@contextmanager
def standard_pipes() -> Iterator[Peer]:
    """Make this process's standard input and output pipes, and yield their other ends."""
    saved = os.dup(0), os.dup(1)
    (reader, far_writer), (far_reader, writer) = os.pipe(), os.pipe()
    for fd, stands_for in ((reader, 0), (writer, 1)):
        os.dup2(fd, stands_for)
        os.close(fd)
    peer = Peer(far_reader, far_writer)
    try:
        yield peer
    finally:
        peer.close()
        for stands_for, fd in enumerate(saved):
            os.dup2(fd, stands_for)
            os.close(fd)


# HTTP


@attrs.frozen
class Http:
    """One connection to an HTTP server, and what each request says."""

    peer: Peer
    revision: str
    session: str = ""
    more: str = ""  # headers that each request has, with their line ends

    async def post(
        self, data: bytes, *, method: str = "", name: str = "", path: str = "/mcp"
    ) -> tuple[str, list[bytes]]:
        """POST a message; returns the session named in the response, and the messages in it."""
        headers = "Accept: application/json, text/event-stream\r\nContent-Type: application/json\r\n"
        if self.revision == MODERN:
            headers += f"MCP-Protocol-Version: {MODERN}\r\nMcp-Method: {method}\r\n"
            headers += f"Mcp-Name: {name}\r\n" if name else ""
        await self.send("POST", path, f"{headers}Content-Length: {len(data)}\r\n", data)
        head = await self.head()
        session = head.get("mcp-session-id", "")
        if head.get("transfer-encoding") == "chunked":
            body = b"".join([chunk async for chunk in self.chunks()])
        else:
            body = await self.peer.exactly(int(head.get("content-length", 0)))
        if head.get("content-type", "").startswith("text/event-stream"):
            return session, [line[6:] for line in body.split(b"\n") if line.startswith(b"data: {")]
        return session, [body] if body else []

    async def send(self, method: str, path: str, headers: str, data: bytes = b"") -> None:
        """Send a request."""
        headers += self.more
        if self.session:
            headers += f"Mcp-Session-Id: {self.session}\r\nMCP-Protocol-Version: {self.revision}\r\n"
        await self.peer.send(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode() + data)

    async def head(self) -> dict[str, str]:
        """Read the head of a response, which has to be a good one."""
        first, *lines = (await self.peer.until(b"\r\n\r\n")).decode().split("\r\n")
        if first[9:12] not in ("200", "202", "204"):
            raise AssertionError(f"{first}: {await self.peer.exactly(1)!r}...")
        return {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}

    async def chunks(self) -> AsyncIterator[bytes]:
        """Read the chunks of a body."""
        while chunk := await self.chunk():
            yield chunk

    async def chunk(self) -> bytes:
        """Read one chunk, which is empty at the end of the body."""
        size = int(await self.peer.until(b"\r\n"), 16)
        chunk: bytes = await self.peer.exactly(size)
        await self.peer.exactly(2)
        return chunk


@attrs.define
class Http2:
    """One connection of HTTP/2, with one request at a time; `head` is that of each, compressed."""

    peer: Peer
    head: bytes
    _last: int = -1

    async def start(self) -> None:
        """Begin the connection, with a window that is never full."""
        window = struct.pack(">L", 1 << 30)
        await self.peer.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b"") + _frame(8, 0, 0, window))

    async def post(self, data: bytes) -> bytes:
        """Send a request, and return the body of its response."""
        self._last += 2
        await self.peer.send(_frame(1, 4, self._last, self.head) + _frame(0, 1, self._last, data))
        body = b""
        while True:
            high, low, kind, flags, id = struct.unpack(">HBBBL", await self.peer.exactly(9))
            payload = await self.peer.exactly(high << 8 | low)
            if kind in (3, 7):
                raise AssertionError(f"the server ended it: {payload!r}")
            if id == self._last and kind == 0:
                body += payload
                if flags & 1:
                    return body


def _frame(kind: int, flags: int, id: int, payload: bytes) -> bytes:
    return struct.pack(">HBBBL", len(payload) >> 8, len(payload) & 0xFF, kind, flags, id) + payload


async def call_agent(http: Http, id: str, path: str = "/tools/call", **members: str) -> None:
    """Call a tool by the agent-tools protocol, and check the answer."""
    message = {"type": "tool_request", "tool_name": "echo", "arguments": {"text": "hello number"}, "request_id": id}
    data = orjson.dumps({**message, **members})
    head = f"Accept: application/json\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    await http.send("POST", path, head, data)
    size = int((await http.head())["content-length"])
    reply = orjson.loads(await http.peer.exactly(size))
    if reply != {"type": "tool_response", "request_id": id, "status": "success", "result": "hello number"}:
        raise AssertionError(f"got {reply}")


async def opened(http: Http) -> Http:
    """Open a legacy session on a connection."""
    session, [reply] = await http.post(initialize(http.revision)[1])
    assert b'"protocolVersion"' in reply
    http = attrs.evolve(http, session=session)
    await http.post(INITIALIZED)
    return http


def dial(path: str) -> Peer:
    """Connect to a Unix socket."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        fd = sock.detach()
    return Peer(fd, fd)


# WebSocket


def frame(data: bytes) -> bytes:
    """Return a client's text message, masked with zeros (RFC 6455, section 5.2)."""
    size = len(data)
    length = bytes((0x80 | size,)) if size < 126 else b"\xfe" + size.to_bytes(2, "big")
    return b"\x81" + length + bytes(4) + data


CLOSE = b"\x88\x82\0\0\0\0\x03\xe8"
"""A client's Close frame with code 1000, masked with zeros."""


async def message(peer: Peer) -> bytes:
    """Read a server's text message."""
    first, size = await peer.exactly(2)
    assert first == 0x81
    return await peer.exactly(size if size < 126 else int.from_bytes(await peer.exactly(2), "big"))
