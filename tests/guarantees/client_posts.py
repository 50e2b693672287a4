"""Servers by hand over HTTP, for what our client promises: they say events on one stream, and hear what is POSTed."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import orjson
import trio

import trimcp
from tests.peers.http1 import HttpWire
from trimcp.transports.http.client.target import HttpServer
from trimcp.wire.revisions import LATEST, OLDEST, V2025_11_25, Revision

__all__ = ["ASKING", "INFO", "POSTED", "REPLYING", "Asked", "HandOfPosts", "posted_to_by_hand", "question"]

ASKING = ("http events", "http json", "http+sse")
"""Where a server may ask: on the stream of a call, on the one for what is unasked if replies are JSON, or on the one
that there is."""

REPLYING = ("http 2026 events", "http 2026 json")
"""Since 2026-07-28 it asks with its replies, which are events or JSON as before."""

POSTED = ASKING + REPLYING

_JSON = "Content-Type: application/json"
_EVENTS = "Content-Type: text/event-stream"
INFO = {"name": "by hand", "version": "1"}


@attrs.define(eq=False)
class Asked:
    """A request that was made of it, and ways to answer.

    Attributes:
        message: what was POSTed, if anything.
        over: set once it was answered, so that its connection may have the next one.
    """

    wire: HttpWire
    method: str
    message: Any
    over: trio.Event = attrs.field(factory=trio.Event)

    async def answer(self, status: int = 202, body: bytes = b"", *lines: str) -> None:
        """Answer as a whole."""
        await self.begin(f"{status} X", f"Content-Length: {len(body)}", *lines)
        await self.pour(body)
        self.over.set()

    async def begin(self, status: str, *lines: str) -> None:
        """Say the head of an answer."""
        await self.wire.send("\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode())

    async def pour(self, *pieces: bytes) -> None:
        """Write bytes as they are."""
        for piece in pieces:
            await self.wire.stream.send_all(piece)

    async def chunk(self, *pieces: bytes) -> None:
        """Write a piece of an answer that says no length."""
        await self.pour(b"%x\r\n" % sum(map(len, pieces)), *pieces, b"\r\n")

    async def listen(self) -> None:
        """Make the answer a stream of events."""
        await self.begin("200 X", _EVENTS, "Transfer-Encoding: chunked")


@attrs.define(eq=False)
class HandOfPosts:
    """A server by hand.

    Attributes:
        road: one of POSTED.
        taking: set unless it accepts no answers now.
        greeted: set once the handshake is over, where there is one.
        asked: the calls that were made of it.
    """

    road: str
    taking: trio.Event = attrs.field(factory=trio.Event)
    greeted: trio.Event = attrs.field(factory=trio.Event)
    asked: tuple[trio.MemorySendChannel[Asked], trio.MemoryReceiveChannel[Asked]] = attrs.field(
        factory=lambda: trio.open_memory_channel[Asked](math.inf)
    )
    _events: Asked | None = None
    _listening: trio.Event = attrs.field(factory=trio.Event)
    _heard: tuple[trio.MemorySendChannel[Any], trio.MemoryReceiveChannel[Any]] = attrs.field(
        factory=lambda: trio.open_memory_channel[Any](math.inf)
    )

    @property
    def revision(self) -> Revision:
        """The revision that is spoken there."""
        return OLDEST if self.road == "http+sse" else LATEST if "2026" in self.road else V2025_11_25

    @property
    def json(self) -> bool:
        """Whether it replies with JSON."""
        return self.road.endswith("json")

    async def say(self, *texts: bytes) -> None:
        """Say messages on its stream."""
        await self._listening.wait()
        assert self._events is not None
        await self._events.chunk(b"".join(b"data: %b\n\n" % text for text in texts))

    async def hear(self) -> Any:
        """The next answer to what it asked."""
        return await self._heard[1].receive()

    def stop_reading(self) -> None:
        """Accept no answers, before `read_on`."""
        self.taking = trio.Event()

    def read_on(self) -> None:
        """Accept them again."""
        self.taking.set()

    async def called(self) -> Asked:
        """The next call."""
        return await self.asked[1].receive()

    async def reply(self, asked: Asked, *pieces: bytes) -> None:
        """Answer a call with a message, as this road does. It may be of many pieces."""
        size = sum(map(len, pieces))
        if self.road == "http+sse":
            assert self._events is not None
            await self._events.chunk(b"data: ", *pieces, b"\n\n")
        elif self.json:
            await asked.begin("200 X", _JSON, "Transfer-Encoding: chunked")
            await asked.pour(b"%x\r\n" % size, *pieces, b"\r\n0\r\n\r\n")
            asked.over.set()
        else:
            await asked.listen()
            await asked.chunk(b"data: ", *pieces, b"\n\n")
            await asked.pour(b"0\r\n\r\n")
            asked.over.set()

    async def result(self, asked: Asked, **result: Any) -> None:
        """Answer a call with a result."""
        await self.reply(asked, orjson.dumps({"jsonrpc": "2.0", "id": asked.message["id"], "result": result}))

    async def leave(self) -> None:
        """Be gone without a word, where its stream is the connection."""
        assert self.road == "http+sse"
        assert self._events is not None
        await trio.aclose_forcefully(self._events.wire.stream)

    # Serving

    async def serve(self, stream: trio.SocketStream) -> None:
        """Serve one connection for as long as it lasts."""
        wire = HttpWire(stream)
        try:
            while True:
                head = (await wire.until(b"\r\n\r\n")).decode("latin-1").lower()
                length = head.partition("content-length:")[2].partition("\r\n")[0]
                body = await wire.exactly(int(length or 0))
                asked = Asked(wire, head.partition(" ")[0].upper(), orjson.loads(body) if body else {})
                await self._take(asked)
                await asked.over.wait()
        except (EOFError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass

    async def _take(self, asked: Asked) -> None:
        said = asked.message
        if asked.method != "POST":
            await self._without_a_message(asked)
        elif "method" not in said:
            await self.taking.wait()
            self._heard[0].send_nowait(said)
            await asked.answer()
        elif "id" not in said:
            await asked.answer()
            self.greeted.set()  # with the first one, which is `notifications/initialized`
        elif said["method"] == "initialize":
            assert said["params"]["protocolVersion"] == self.revision.name
            await self._accept(asked)
            await self.result(asked, protocolVersion=self.revision.name, capabilities={"tools": {}}, serverInfo=INFO)
        elif said["method"] == "server/discover":
            offers = {"supportedVersions": [self.revision.name], "capabilities": {"tools": {}}, "serverInfo": INFO}
            await self.result(asked, **offers, resultType="complete", ttlMs=0, cacheScope="private")
        elif self.road == "http events" and said["params"]["name"] == "asks":
            await asked.listen()
            self._listen(asked)
        else:
            await self._accept(asked)
            self.asked[0].send_nowait(asked)

    async def _accept(self, asked: Asked) -> None:
        if self.road == "http+sse":
            await asked.answer()

    async def _without_a_message(self, asked: Asked) -> None:
        if asked.method == "GET" and self.road in ("http json", "http+sse"):
            await asked.listen()
            if self.road == "http+sse":
                await asked.chunk(b"event: endpoint\ndata: /posts\n\n")
            self._listen(asked)
        else:
            await asked.answer(200 if asked.method == "DELETE" else 405)

    def _listen(self, asked: Asked) -> None:
        self._events = asked
        self._listening.set()


def question(message: str) -> dict[str, Any]:
    """A question that is answered with a name, as it stands in a reply."""
    form = {"type": "object", "properties": {"name": {"type": "string"}}}
    return {"method": "elicitation/create", "params": {"message": message, "requestedSchema": form}}


@asynccontextmanager
async def posted_to_by_hand(
    road: str, client: trimcp.Client
) -> AsyncIterator[tuple[trimcp.ClientSession, HandOfPosts]]:
    """Yield a client's session, and what it is connected to."""
    async with trio.open_nursery() as nursery:
        hand = HandOfPosts(road)
        hand.read_on()
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, hand.serve, listeners)
        url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}/mcp"
        target = HttpServer(url, mode="sse" if road == "http+sse" else "streamable")
        async with client.connect(target, revision=hand.revision) as session, trio.open_nursery() as calls:
            if road == "http events":
                calls.start_soon(session.call_tool, "asks")
            if not hand.revision.modern:
                await hand.greeted.wait()
            yield session, hand
            calls.cancel_scope.cancel()
        nursery.cancel_scope.cancel()
