"""The least a server on Trio can be: `echo` and nothing else, in order to see what a machine allows.

    minimal.py stdio | http

No schema, no sessions, no tasks, no cancelling, no limits and no errors: requests are answered one after the other
where they are read, and every call is taken for `echo`. Nobody should serve with it; what a real server costs beyond it
is the price of everything it leaves out.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import httptools
import orjson
import trio

CHUNK = 1 << 18
TOOL = {
    "name": "echo",
    "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
}
INFO = {"name": "minimal", "version": "1.0"}


def answer(line: bytes) -> bytes | None:
    """Return the response to a message, or None when it wants none."""
    message = orjson.loads(line)
    id = message.get("id")
    if id is None:
        return None
    return orjson.dumps({"jsonrpc": "2.0", "id": id, "result": result_of(message["method"], message.get("params"))})


def result_of(method: str, params: Any) -> dict[str, Any]:
    """Return what a request comes to."""
    if method == "tools/call":
        content = [{"type": "text", "text": params["arguments"]["text"]}]
        return {"content": content, "isError": False, "resultType": "complete"}
    if method == "initialize":
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": INFO}
    if method == "server/discover":
        versions = ["2026-07-28"]
        found = {"supportedVersions": versions, "capabilities": {"tools": {}}, "serverInfo": INFO}
        return {**found, "resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
    if method == "tools/list":
        return {"tools": [TOOL], "resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
    return {"resultType": "complete"}


# Standard input and output


async def over_stdio() -> None:
    """Answer every line; what arrived together is answered together."""
    reader, writer = trio.lowlevel.FdStream(os.dup(0)), trio.lowlevel.FdStream(os.dup(1))
    rest = b""
    async with reader, writer:
        while data := await reader.receive_some(CHUNK):
            *lines, rest = (rest + data).split(b"\n")
            replies = [reply for line in lines if line and (reply := answer(line)) is not None]
            if replies:
                await writer.send_all(b"\n".join(replies) + b"\n")


# HTTP


class Exchange:
    """What the parser of one connection tells, and the responses it makes ready."""

    def __init__(self) -> None:
        self.parser: Any = httptools.HttpRequestParser(self)
        self.body = b""
        self.ready: list[bytes] = []

    def on_message_begin(self) -> None:
        self.body = b""

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        if self.parser.get_method() != b"POST":
            self.ready.append(b"HTTP/1.1 405 Method Not Allowed\r\nAllow: POST\r\nContent-Length: 0\r\n\r\n")
        elif (reply := answer(self.body)) is None:
            self.ready.append(b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n")
        else:
            head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(reply)
            self.ready.append(head + reply)


async def serve_connection(stream: trio.SocketStream) -> None:
    """Answer one connection's requests in order until it closes."""
    exchange = Exchange()
    try:
        while data := await stream.receive_some(CHUNK):
            exchange.parser.feed_data(data)
            if exchange.ready:
                await stream.send_all(b"".join(exchange.ready))
                exchange.ready.clear()
    except trio.BrokenResourceError:
        pass


async def over_http() -> None:
    """Serve on a free port, whose URL is the first line of standard output."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    print(f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}/mcp", flush=True)
    await trio.serve_listeners(serve_connection, listeners)


if __name__ == "__main__":
    trio.run({"stdio": over_stdio, "http": over_http}[sys.argv[1]])
