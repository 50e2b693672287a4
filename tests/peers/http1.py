"""A client of HTTP/1.1 without a library: it sends any bytes, and reads responses strictly."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from typing import Any

import attrs
import orjson
import trio

__all__ = ["BOTH", "Answer", "HttpWire", "http_request", "post"]

BOTH = "application/json, text/event-stream"
"""What a client of Streamable HTTP accepts."""


def http_request(
    method: str = "GET",
    path: str = "/echo",
    *lines: str,
    body: bytes | None = None,
    version: str = "1.1",
    host: str = "localhost",
) -> bytes:
    """A request with these header lines; a body gets its length."""
    length = [] if body is None else [f"Content-Length: {len(body)}"]
    head = [f"{method} {path} HTTP/{version}", f"Host: {host}", *lines, *length, "", ""]
    return "\r\n".join(head).encode() + (body or b"")


def post(text: bytes, *lines: str, session: str | None = None, path: str = "/mcp") -> bytes:
    """A POST of a message, with the headers its era wants: without a session those of the newest revision."""
    ours = ["Content-Type: application/json", f"Accept: {BOTH}"]
    if session is None and path == "/mcp":
        message = _loaded(text)
        ours += ["MCP-Protocol-Version: 2026-07-28", f"Mcp-Method: {message.get('method', 'tools/call')}"]
        params = message.get("params")
        name = params.get("name", params.get("uri")) if isinstance(params, dict) else None
        ours += [f"Mcp-Name: {name}"] if isinstance(name, str) and name.isprintable() and name.isascii() else []
    elif session is not None:
        ours += ["MCP-Protocol-Version: 2025-11-25", f"Mcp-Session-Id: {session}"]
    return http_request("POST", path, *ours, *lines, body=text)


def _loaded(text: bytes) -> dict[str, Any]:
    try:
        message = orjson.loads(text)
    except ValueError:
        return {}
    return message if isinstance(message, dict) and isinstance(message.get("method", ""), str) else {}


@attrs.define
class Answer:
    """A response, as far as it was read; header names are lower case."""

    status: int
    headers: dict[str, str]
    body: bytes = b""

    @property
    def messages(self) -> list[Any]:
        """What it carries, as JSON or as events."""
        if self.headers.get("content-type") != "text/event-stream":
            return [orjson.loads(self.body)] if self.body else []
        found = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        return [orjson.loads(text) for text in found if text]

    @property
    def reply(self) -> Any:
        """The last message, which is the answer."""
        return self.messages[-1]


@attrs.define(eq=False)
class HttpWire:
    """The client's end of one connection. What is read raises `EOFError` where the server closed before its end."""

    stream: Any  # a trio.abc.Stream; most tests have a trio.SocketStream and want its socket
    buffer: bytearray = attrs.field(factory=bytearray)
    _events: bytearray = attrs.field(factory=bytearray)

    async def send(self, *pieces: bytes) -> None:
        """Write bytes as they are."""
        await self.stream.send_all(b"".join(pieces))

    async def request(
        self, method: str = "GET", path: str = "/echo", *lines: str, body: bytes | None = None, version: str = "1.1"
    ) -> None:
        """Send a request; see `http_request`."""
        await self.send(http_request(method, path, *lines, body=body, version=version))

    async def fetch(self, method: str = "GET", path: str = "/echo", *lines: str, body: bytes | None = None) -> Answer:
        """Send a request and read the response."""
        await self.request(method, path, *lines, body=body)
        return await self.answer(method)

    async def ask(self, *pieces: bytes) -> Answer:
        """Write, as far as the server takes it, and read one response; those that only say "continue" are skipped."""
        with contextlib.suppress(trio.BrokenResourceError):  # it has closed, after an answer
            await self.send(*pieces)
        while (answer := await self.answer()).status == 100:
            pass
        return answer

    async def open_events(self, *lines: str) -> str:
        """Open a stream of HTTP+SSE, and return where to POST to it."""
        await self.request("GET", "/sse", "Accept: text/event-stream", *lines)
        head = await self.head()
        assert head.status == 200, head
        [path] = re.findall(rb"data: (/\S+)", await self.chunk())
        return str(path.decode())

    async def head(self) -> Answer:
        """Read the head of a response; the body is still to come."""
        first, *lines = (await self.until(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        assert first.startswith("HTTP/1.1 "), first
        pairs = [line.partition(":") for line in lines if line]
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        assert len(headers) == len(pairs), f"a header came twice: {lines}"
        return Answer(int(first.split(" ")[1]), headers)

    async def answer(self, method: str = "POST") -> Answer:
        """Read a whole response; the method it answers says whether it has a body."""
        answer = await self.head()
        if method == "HEAD" or answer.status in (100, 204, 304):
            return answer
        if answer.headers.get("transfer-encoding") == "chunked":
            answer.body = b"".join([chunk async for chunk in self.chunks()])
        elif "content-length" in answer.headers:
            answer.body = await self.exactly(int(answer.headers["content-length"]))
        elif answer.status != 202:
            answer.body = await self.rest()
        return answer

    async def chunks(self) -> AsyncIterator[bytes]:
        """The chunks of a body, to the last one."""
        while chunk := await self.chunk():
            yield chunk

    async def chunk(self) -> bytes:
        """Read a chunk of a body; b"" is the last one."""
        size = int(await self.until(b"\r\n"), 16)
        data = await self.exactly(size + 2)
        assert data.endswith(b"\r\n"), data
        return data[:-2]

    async def message(self) -> Any:
        """Read the next event that carries a message."""
        while True:
            while (end := self._events.find(b"\n\n")) < 0:
                chunk = await self.chunk()
                if not chunk:
                    raise EOFError("the stream has ended")
                self._events += chunk
            event = bytes(self._events[:end])
            del self._events[: end + 2]
            for line in event.split(b"\n"):
                if line.startswith((b"data: {", b"data: [")):
                    return orjson.loads(line[6:])

    async def until(self, mark: bytes) -> bytes:
        """Read to the end of the mark."""
        at = 0
        while (found := self.buffer.find(mark, at)) < 0:
            at = max(0, len(self.buffer) - len(mark))
            await self._more()
        return self._take(found + len(mark))

    async def exactly(self, size: int) -> bytes:
        """Read so many bytes."""
        while len(self.buffer) < size:
            await self._more()
        return self._take(size)

    async def rest(self) -> bytes:
        """Everything until the server closes. A reset raises `trio.BrokenResourceError`."""
        with contextlib.suppress(EOFError):
            while True:
                await self._more()
        return self._take(len(self.buffer))

    async def everything(self) -> bytes:
        """Everything until the server closes, also with a reset."""
        with contextlib.suppress(trio.BrokenResourceError):
            return await self.rest()
        return self._take(len(self.buffer))

    async def closed(self) -> None:
        """Wait until the server has closed, without another byte."""
        assert await self.rest() == b""

    def _take(self, size: int) -> bytes:
        taken = bytes(self.buffer[:size])
        del self.buffer[:size]
        return taken

    async def _more(self) -> None:
        data = await self.stream.receive_some(1 << 18)
        if not data:
            raise EOFError(f"the server closed after {bytes(self.buffer[:300])!r}")
        self.buffer += data
