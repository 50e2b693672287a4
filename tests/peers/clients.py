"""Clients without a library, one class for each transport, all with the same methods: send any bytes, read messages."""

from __future__ import annotations

import fcntl
import re
import sys
import termios
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import orjson
import trio

from tests.peers.http1 import BOTH, Answer, HttpWire, http_request, post
from tests.peers.messages import as_json, initialize, modern_request, notification, reported_call, request
from tests.peers.processes import ChildServer
from tests.peers.serving import Place
from tests.peers.websockets import CLOSE, FIN, PING, PONG, TEXT, RawWebSocket, frame, message, upgrade
from trimcp.channel import Incoming, Kind, MessageChannel, Outgoing
from trimcp.session.drive import DirectEnd
from trimcp.transports.grpc.client import GrpcServer

__all__ = [
    "ROADS",
    "ChannelPeer",
    "DirectPeer",
    "EventsPeer",
    "LinePeer",
    "Peer",
    "PostPeer",
    "WebSocketPeer",
    "in_turn",
    "on",
    "open_session",
    "over_the_network",
]

ROADS = ("modern", "session", "sse", "websocket")
"""Where a listening server can be reached: Streamable HTTP in both eras, HTTP+SSE, WebSocket."""

_SLICE = 100


@attrs.define(eq=False)
class Peer:
    """A client that sends any bytes.

    Attributes:
        modern: whether every request says which revision it is in, and nothing is said before.
        status: of the last response, where there are any.
        heard: notifications that came before what was waited for.
    """

    modern: bool
    status: int = attrs.field(default=0, init=False)
    heard: list[Any] = attrs.field(factory=list, init=False)

    def request(self, id: Any, method: str, **params: Any) -> bytes:
        """A request as its revision writes it."""
        return (modern_request if self.modern else request)(id, method, **params)

    def call(self, id: Any, tool: str, **arguments: Any) -> bytes:
        """A tool call that wants to be told of its progress."""
        return reported_call(id, tool, modern=self.modern, **arguments)

    @property
    def unread(self) -> int:
        """Bytes that were written and that the server has not read, as the kernel counts them."""
        return 0

    async def say(self, *texts: bytes) -> None:
        """Write messages as they are; `hear` reads what answers them."""
        raise NotImplementedError

    async def hear_any(self) -> Any:
        """The next message."""
        raise NotImplementedError

    async def hear(self) -> Any:
        """The next answer; notifications before it go into `heard`."""
        while "method" in (heard := await self.hear_any()):
            self.heard.append(heard)
        return heard

    async def pour(self, texts: Sequence[bytes]) -> None:
        """Write many messages as fast as they are taken."""
        for first in range(0, len(texts), _SLICE):
            await self.say(*texts[first : first + _SLICE])

    async def pipeline(self, *texts: bytes) -> None:
        """Write messages one behind the other, and read nothing until `read_on`."""
        await self.say(*texts)

    def read_on(self) -> None:
        """Read what came meanwhile, and go on reading."""

    async def put(self, text: bytes) -> tuple[int, Any]:
        """Send a message and return the status and the message that answers it; None where there is none."""
        await self.say(text)
        return self.status, await self.hear()

    async def ask(self, id: Any, tool: str, **arguments: Any) -> Any:
        """Call a tool and return the answer, which has to be the next one."""
        _, answer = await self.put(self.call(id, tool, **arguments))
        assert answer["id"] == id, answer
        return answer

    async def cancel(self, id: Any) -> None:
        """Cancel a request, as its revision does."""
        await self.say(notification("notifications/cancelled", requestId=id))

    async def hang_up(self) -> None:
        """Close the connection without a closing handshake, where there is one that ends with it."""
        raise NotImplementedError

    async def meet(self) -> None:
        """Initialize, where the revision wants that."""
        if not self.modern:
            await self.say(initialize("2025-11-25"))
            assert (await self.hear())["id"] == "hello"
            await self.say(notification("notifications/initialized"))


# Lines


@attrs.define(eq=False)
class LinePeer(Peer):
    """A server's standard input and output."""

    target: ChildServer

    @property
    def unread(self) -> int:
        stdin = self.target.process.stdin
        assert isinstance(stdin, trio.lowlevel.FdStream)
        held = fcntl.ioctl(stdin.fileno(), termios.FIONREAD, bytes(4))
        return int.from_bytes(held, sys.byteorder)

    async def say(self, *texts: bytes) -> None:
        await self.target.say(*texts)

    async def hear_any(self) -> Any:
        return await self.target.hear()

    async def hang_up(self) -> None:
        assert self.target.process.stdin is not None
        await self.target.process.stdin.aclose()


# Memory


@attrs.define(eq=False)
class ChannelPeer(Peer):
    """One end of a channel."""

    channel: MessageChannel
    _arrived: deque[Any] = attrs.field(factory=deque)

    async def say(self, *texts: bytes) -> None:
        await self.channel.send([Outgoing(text, Kind.REQUEST) for text in texts])

    async def hear_any(self) -> Any:
        while not self._arrived:
            self._arrived.extend(as_json(incoming.message) for incoming in await self.channel.receive())
        return self._arrived.popleft()

    async def hang_up(self) -> None:
        await self.channel.aclose()


@attrs.define(eq=False)
class DirectPeer(Peer):
    """One end of a direct connection. It stands in for the session that would be driven over it."""

    end: DirectEnd
    paused: bool = False
    closed: trio.Event = attrs.field(factory=trio.Event)
    _arrived: deque[Any] = attrs.field(factory=deque)
    _news: trio.Event = attrs.field(factory=trio.Event)
    _readable: trio.Event = attrs.field(factory=trio.Event)

    def __attrs_post_init__(self) -> None:
        self.end.session = self

    def deliver(self, batch: Sequence[Incoming]) -> None:
        self._arrived.extend(incoming.message for incoming in batch)
        self._news.set()

    async def readable(self) -> None:
        while self.paused:
            await self._readable.wait()

    def read_on(self) -> None:
        self.paused = False
        self._readable.set()

    def forget(self) -> None:
        """Drop the messages that were not read."""
        self._arrived.clear()

    async def hang_up(self) -> None:
        self.end.close()

    def lose(self, why: str) -> None:
        self.closed.set()

    @property
    def runner(self) -> Any:
        return self

    @property
    def nursery(self) -> Any:
        return self

    @property
    def limits(self) -> Any:
        return self

    eof_grace = 0.0

    def start_soon(self, *job: Any) -> None:
        """Start nothing: there is nothing to end here."""

    async def say(self, *texts: bytes) -> None:
        for text in texts:
            if self.end.full:
                await self.end.room()
            self.end.post(Outgoing(text, Kind.REQUEST))
        await trio.lowlevel.checkpoint()

    async def hear_any(self) -> Any:
        while not self._arrived:
            self._news = trio.Event()
            await self._news.wait()
        return as_json(self._arrived.popleft())  # not before: what we make of it is none of its cost


# WebSocket


@attrs.define(eq=False)
class WebSocketPeer(Peer):
    """A WebSocket."""

    raw: RawWebSocket

    @property
    def unread(self) -> int:
        """In the send buffer of ours and the receive buffer of the server, with frame headers."""
        stream = self.raw.stream
        assert isinstance(stream, trio.SocketStream)
        ours = stream.socket.getsockname()[1]
        held = 0
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            _, local, remote, _, queues, *_ = line.split()
            leaving, arrived = (int(queue, 16) for queue in queues.split(":"))
            if int(local.partition(":")[2], 16) == ours:
                held += leaving
            elif int(remote.partition(":")[2], 16) == ours:
                held += arrived
        return held

    async def say(self, *texts: bytes) -> None:
        await self.raw.say(*map(message, texts))

    async def hear_any(self) -> Any:
        while True:
            first, payload = await self.raw.hear()
            if first == FIN | PING:
                await self.raw.say(frame(FIN | PONG, payload))
                continue
            if first in (0, FIN | CLOSE):
                raise EOFError(f"the server closed the WebSocket: {payload!r}")
            if first != FIN | PONG:
                assert first == FIN | TEXT, (first, payload)
                return orjson.loads(payload)

    async def hang_up(self) -> None:
        await trio.aclose_forcefully(self.raw.stream)

    async def say_goodbye(self) -> None:
        """Do the closing handshake (RFC 6455, section 7)."""
        await self.raw.say(b"\x88\x82\0\0\0\0\x03\xe8")
        while (await self.raw.hear())[0] not in (0, FIN | CLOSE):
            pass


# HTTP


@attrs.define(eq=False)
class _Exchanges(Peer):
    """What the peers share that POST each message: connections, and the responses on them."""

    server: Place
    nursery: trio.Nursery
    receive_buffer: int | None = None
    lines: tuple[str, ...] = ()
    path: str = "/mcp"
    session: str | None = None
    wires: list[HttpWire] = attrs.field(factory=list, init=False)
    idle: list[HttpWire] = attrs.field(factory=list, init=False)
    under_way: dict[Any, HttpWire] = attrs.field(factory=dict, init=False)
    pipe: HttpWire | None = attrs.field(default=None, init=False)

    async def pipeline(self, *texts: bytes) -> None:
        if self.pipe is None:
            self.pipe = await self.connect()
        await self.pipe.send(*map(self.posted, texts))

    def read_on(self) -> None:
        self.nursery.start_soon(self._read_pipe)

    async def _read_pipe(self) -> None:
        assert self.pipe is not None
        try:
            while True:
                self.piped(await self.pipe.answer())
        except (EOFError, trio.ClosedResourceError, trio.BrokenResourceError):
            pass

    def piped(self, answer: Answer) -> None:
        """Take a response to a pipelined request."""
        raise NotImplementedError

    async def connect(self) -> HttpWire:
        wire = await self.server.connect(receive_buffer=self.receive_buffer)
        self.wires.append(wire)
        return wire

    async def kept(self) -> HttpWire:
        """A connection that was kept and that the server has not closed meanwhile, or a new one."""
        while self.idle:
            wire = self.idle.pop()
            if not wire.stream.socket.is_readable():
                return wire
        return await self.connect()

    def posted(self, text: bytes) -> bytes:
        return post(text, *self.lines, session=self.session, path=self.path)

    def settled(self, wire: HttpWire, answer: Answer) -> None:
        """Keep a connection for the next message, if it is kept."""
        if answer.headers.get("connection") != "close":
            self.idle.append(wire)

    async def exchanged(self, text: bytes) -> Answer:
        """POST a message and read the response, on a connection that is kept where it may be."""
        wire = await self.kept()
        answer = await wire.ask(self.posted(text))
        self.settled(wire, answer)
        self.status = answer.status
        return answer

    async def leave(self) -> None:
        for wire in self.wires:
            await trio.aclose_forcefully(wire.stream)


@attrs.define(eq=False)
class PostPeer(_Exchanges):
    """Streamable HTTP: what is answered later is answered on a connection of its own."""

    _answers: tuple[trio.MemorySendChannel[Any], trio.MemoryReceiveChannel[Any]] = attrs.field(
        factory=lambda: trio.open_memory_channel[Any](1_000_000)
    )

    async def say(self, *texts: bytes) -> None:
        for text in texts:
            wire = await self.kept()
            try:
                await wire.send(self.posted(text))
            except trio.BrokenResourceError:
                pass  # it has closed, after an answer
            if found := re.search(rb'"id":("?)(\w+)\1,', text):
                self.under_way[found[2].decode()] = wire
            if self.receive_buffer is None:
                self.nursery.start_soon(self._read, wire)

    async def _read(self, wire: HttpWire) -> None:
        try:
            answer = await wire.answer()
        except (EOFError, trio.ClosedResourceError, trio.BrokenResourceError):
            return  # it was given up, or cut
        self.settled(wire, answer)
        self._heard(answer)

    def piped(self, answer: Answer) -> None:
        self._heard(answer)

    def _heard(self, answer: Answer) -> None:
        for said in answer.messages if answer.body else ():
            self._answers[0].send_nowait((answer.status, said))
        if not answer.body:
            self.status = answer.status

    async def hear_any(self) -> Any:
        self.status, said = await self._answers[1].receive()
        return said

    async def put(self, text: bytes) -> tuple[int, Any]:
        answer = await self.exchanged(text)
        *progress, reply = answer.messages if answer.body else [None]
        self.heard += progress
        return self.status, reply

    async def pour(self, texts: Sequence[bytes]) -> None:
        """Pipeline them on twenty connections."""
        async with trio.open_nursery() as nursery:
            for first in range(20):
                nursery.start_soon(self._pour, texts[first::20])

    async def _pour(self, texts: Sequence[bytes]) -> None:
        wire = await self.connect()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wire.send, *map(self.posted, texts))
            for text in texts if self.receive_buffer is None else ():
                answer = await wire.answer()
                assert answer.reply["id"] == orjson.loads(text)["id"], "answers on a connection come in order"
                self._heard(answer)

    async def cancel(self, id: Any) -> None:
        if self.modern:
            await trio.aclose_forcefully(self.under_way[str(id)].stream)
        else:
            await super().cancel(id)

    async def meet(self) -> None:
        if not self.modern:
            self.session = await open_session(self.server, *self.lines)

    async def hang_up(self) -> None:
        await self.leave()

    async def delete(self) -> int:
        """End the session."""
        session, self.session = self.session, None
        async with self.server.wire() as wire:
            return (await wire.ask(http_request("DELETE", "/mcp", f"Mcp-Session-Id: {session}", *self.lines))).status


@attrs.define(eq=False)
class EventsPeer(_Exchanges):
    """HTTP+SSE: a stream to read, and POSTs beside it, which are answered themselves only if they are refused."""

    stream: HttpWire = attrs.field(kw_only=True)
    _refusals: deque[Any] = attrs.field(factory=deque, init=False)

    async def say(self, *texts: bytes) -> None:
        for text in texts:
            answer = await self.exchanged(text)
            self._refusals.extend(answer.messages if answer.body else ())

    def piped(self, answer: Answer) -> None:
        self._refusals.extend(answer.messages if answer.body else ())

    async def hear_any(self) -> Any:
        return self._refusals.popleft() if self._refusals else await self.stream.message()

    async def hang_up(self) -> None:
        await trio.aclose_forcefully(self.stream.stream)

    async def pour(self, texts: Sequence[bytes]) -> None:
        """Pipeline them on ten connections."""
        async with trio.open_nursery() as nursery:
            for first in range(10):
                nursery.start_soon(self._pour, texts[first::10])

    async def _pour(self, texts: Sequence[bytes]) -> None:
        async with self.server.wire() as wire, trio.open_nursery() as nursery:
            nursery.start_soon(wire.send, *map(self.posted, texts))
            for _ in texts:
                assert (await wire.answer()).status == 202

    async def meet(self) -> None:
        await self.say(initialize("2024-11-05"))
        assert (await self.hear())["id"] == "hello"
        await self.say(notification("notifications/initialized"))


# Meeting


async def open_session(server: Place, *lines: str, revision: str = "2025-11-25", **capabilities: Any) -> str:
    """Begin a session over Streamable HTTP, and return its id."""
    async with server.wire() as wire:
        ours = ("Content-Type: application/json", f"Accept: {BOTH}", *lines)
        answer = await wire.fetch("POST", "/mcp", *ours, body=initialize(revision, **capabilities))
        assert answer.status == 200, answer
        session = answer.headers["mcp-session-id"]
        accepted = await wire.ask(post(notification("notifications/initialized"), *lines, session=session))
        assert accepted.status == 202
        return session


@asynccontextmanager
async def over_the_network(
    transport: str, server: Place, *lines: str, modern: bool, receive_buffer: int | None = None
) -> AsyncIterator[Any]:
    """Yield a peer that is initialized; in the end its connections are closed without a closing handshake.

    Args:
        transport: "http", "sse", "websocket" or "grpc".
        server: where it connects to.
        lines: header lines of each request.
        modern: whether it speaks the newest revision.
        receive_buffer: bytes the kernel keeps for it; with any, it reads nothing over HTTP but what it is asked to.
    """
    async with trio.open_nursery() as nursery:
        if transport == "http":
            posts = PostPeer(modern, server, nursery, receive_buffer, lines)
            await posts.meet()
            try:
                yield posts
            finally:
                await posts.leave()
                if posts.session is not None:
                    await posts.delete()
        elif transport == "sse":
            async with server.wire(receive_buffer=receive_buffer) as stream:
                path = await stream.open_events(*lines)
                peer = EventsPeer(modern, server, nursery, receive_buffer, lines, path, stream=stream)
                await peer.meet()
                try:
                    yield peer
                finally:
                    await peer.leave()
        elif transport == "grpc":
            headers = dict(line.split(": ", 1) for line in lines)
            async with GrpcServer(f"grpc://127.0.0.1:{server.port}", headers).connect() as channel:
                tunnelled = ChannelPeer(modern, channel)
                await tunnelled.meet()
                yield tunnelled
        else:
            async with server.wire(receive_buffer=receive_buffer) as wire:
                frames = WebSocketPeer(modern, await upgrade(wire, *lines))
                await frames.meet()
                yield frames
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def on(server: Place, road: str, *lines: str, **options: Any) -> AsyncIterator[Any]:
    """Yield a peer on one of ROADS; options are those of `over_the_network`. A WebSocket that is read is closed."""
    transport = "http" if road in ("modern", "session") else road
    async with over_the_network(transport, server, *lines, modern=road == "modern", **options) as peer:
        yield peer
        if road == "websocket" and not options:  # who does not read does not close either
            await peer.say_goodbye()


def in_turn(count: int, make: Callable[[int], bytes]) -> list[bytes]:
    """So many messages, each made from its number."""
    return [make(number) for number in range(count)]
