"""Load over what one connection carries for a session: lines of a process, frames of WebSocket, events of HTTP+SSE.

The part of RFC 6455 is here that a load client needs: trio-websocket takes about 100 µs per message, several times too
much to measure fast servers; and what reads frames of strangers (`framing.frames`) takes seven times as long as this.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final

import attrs
import orjson
import trio

from trimcp.bench.connection import LoadConnection, LoadSite, events_in
from trimcp.bench.mux import LoadCaller, LoadChannel, Writer
from trimcp.bench.replicas import named_by_headers
from trimcp.bench.supply import Load
from trimcp.bench.tally import Tally
from trimcp.channel import CLIENT_MAX_MESSAGE
from trimcp.errors import ConnectionLost, McpError
from trimcp.framing.frames import text_frame
from trimcp.framing.gathering import Gathered
from trimcp.framing.lines import encode_lines
from trimcp.framing.sse import Event, EventDecoder
from trimcp.transports.descriptors import READ_SIZE
from trimcp.transports.http.client.h1 import whole_request
from trimcp.transports.http.h1.replies import UnreadableReply
from trimcp.transports.http.h1.wires import Wire, wire_over
from trimcp.transports.stdio.child import ChildChannel, StdioServer
from trimcp.transports.stdio.streams import FdReceiver, FdSender
from trimcp.transports.targets import origin, resolved

if TYPE_CHECKING:
    from trimcp.transports.websocket.client import WebSocketServer

_REAPED: Final = 0.2


@attrs.define(eq=False)
class LineChannel:
    """Messages as lines over two byte streams. A line may exceed `max_message` by the size of one read."""

    _receiver: trio.abc.ReceiveStream
    _sender: trio.abc.SendStream
    _tally: Tally
    _max_message: int
    _child: ChildChannel | None = None
    _rest: Gathered = attrs.field(init=False, factory=Gathered)  # an incomplete line
    _writer: Writer = attrs.field(init=False)
    _receive: Callable[[int], Awaitable[bytes | bytearray]] = attrs.field(init=False)
    _why: str | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        sender = self._sender
        now = sender.send_nowait if isinstance(sender, FdSender) else None
        self._writer = Writer(now, sender.send_all, self._tally)
        receiver = self._receiver
        self._receive = receiver.receive_later if isinstance(receiver, FdReceiver) else receiver.receive_some

    def send(self, messages: Sequence[bytes]) -> None:
        self._writer.write(encode_lines(messages))

    async def run(self) -> None:
        await self._writer.run()

    async def receive(self) -> Sequence[bytes]:
        chunk = bytes(await self._receive(READ_SIZE))
        if not chunk:
            raise trio.EndOfChannel("the server closed its output")
        self._tally.bytes_in += len(chunk)
        lines = chunk.split(b"\n")
        if self._rest.size:
            self._rest.add(lines[0])
            if len(lines) == 1:
                if self._rest.size > self._max_message:
                    self._why = f"the server sent a message larger than {self._max_message:,} bytes"
                    raise trio.BrokenResourceError(self._why)
                return ()
            lines[0] = self._rest.take()
        if rest := lines.pop():
            self._rest.add(rest)
        return [line for line in lines if line and not line.isspace()]

    async def close_reason(self) -> str:
        if self._why is not None:
            return self._why
        if self._child is None:
            return "the server closed the connection"
        # A process closes its pipes shortly before its exit code is known.
        with trio.move_on_after(_REAPED):
            await self._child.process.wait()
        return self._child.close_reason()


@asynccontextmanager
async def open_process(server: StdioServer, load: Load, caller: LoadCaller) -> AsyncIterator[LoadChannel]:
    """Start a new server process."""
    async with server.connect() as child:
        load.pids.add(child.process.pid)
        receiver, sender = child.streams
        yield LineChannel(receiver, sender, load.tally, CLIENT_MAX_MESSAGE, child)


# WebSocket

_CONTINUATION, _TEXT, _CLOSE, _PING, _PONG = 0x0, 0x1, 0x8, 0x9, 0xA
_FIN: Final = 0x80
_CLOSE_FRAME: Final = b"\x88\x82\0\0\0\0\x03\xe8"  # Close with status 1000, masked with the key 0


@attrs.define(eq=False)
class FrameReader:
    """Parses the server's bytes into messages and pings."""

    max_message: int
    pings: list[bytes] = attrs.field(init=False, factory=list)  # the payloads of pings to answer
    fault: str | None = attrs.field(init=False, default=None)  # the reason why reading stopped, or None
    _rest: Gathered = attrs.field(init=False, factory=Gathered)  # an incomplete frame
    _needed: int = attrs.field(init=False, default=2)
    _message: Gathered | None = attrs.field(init=False, default=None)  # the incomplete message in fragments

    def feed(self, data: bytes) -> list[bytes]:
        """Return the texts of the messages completed by these bytes."""
        if self._rest.size:
            self._rest.add(data)
            if self._rest.size < self._needed:
                return []
            data = self._rest.take()
        messages: list[bytes] = []
        at, end = 0, len(data)
        while self.fault is None:
            self._needed = 2
            if end - at < 2:
                break
            first, size = data[at], data[at + 1]
            start = at + 2
            if size > 125:
                start += 2 if size == 126 else 8
                if end < start:
                    self._needed = start - at
                    break
                # A masked frame and a length beyond 63 bits both get a size above every limit.
                size = int.from_bytes(data[at + 2 : start], "big") if size in (126, 127) else 1 << 64
            if size > self.max_message:
                self.fault = f"a frame that is masked, or larger than {self.max_message:,} bytes"
                break
            if end - start < size:
                self._needed = start - at + size
                break
            at = start + size
            self._take(first, data[start:at], messages)
        if at < end:
            self._rest.add(data[at:])
        return messages

    def _take(self, first: int, payload: bytes, messages: list[bytes]) -> None:
        if first == _FIN | _TEXT and self._message is None:
            messages.append(payload)
        elif first == _FIN | _PING:
            self.pings.append(payload)
        elif first == _FIN | _CLOSE:
            code = int.from_bytes(payload[:2], "big") if payload else 1005
            self.fault = f"the server closed it (code {code}) {payload[2:].decode(errors='replace')}".rstrip()
        elif first in (_TEXT, _CONTINUATION, _FIN) and (first == _TEXT) is (self._message is None):
            if self._message is None:
                self._message = Gathered()
            self._message.add(payload)
            if self._message.size > self.max_message:
                self.fault = f"a message larger than {self.max_message:,} bytes"
            elif first == _FIN:
                messages.append(self._message.take())
                self._message = None
        elif first != _FIN | _PONG:
            self.fault = f"a frame that begins with {first:#04x}, which no MCP server sends"


@attrs.define(eq=False)
class _FrameChannel:
    """Messages as text frames over one connection."""

    _wire: Wire
    _tally: Tally
    _reader: FrameReader
    _first: bytes
    _writer: Writer = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._writer = Writer(self._wire.try_write, self._wire.write_all, self._tally)

    def send(self, messages: Sequence[bytes]) -> None:
        pieces: list[bytes] = []
        for message in messages:
            pieces += text_frame(message, masked=True)
        self._writer.write(b"".join(pieces))

    async def run(self) -> None:
        await self._writer.run()

    async def receive(self) -> Sequence[bytes]:
        reader = self._reader
        if reader.fault is not None:
            raise trio.BrokenResourceError(reader.fault)
        data, self._first = self._first or await self._wire.read(READ_SIZE), b""
        if not data:
            raise trio.EndOfChannel("the server closed the connection")
        self._tally.bytes_in += len(data)
        messages = reader.feed(data)
        for payload in reader.pings:
            self._writer.write(bytes((_FIN | _PONG, 0x80 | len(payload))) + b"\0\0\0\0" + payload)
        reader.pings.clear()
        return messages

    async def close_reason(self) -> str:
        return self._reader.fault or "the server closed the connection"


@asynccontextmanager
async def open_frames(server: WebSocketServer, load: Load, caller: LoadCaller) -> AsyncIterator[LoadChannel]:
    """Open a new WebSocket."""
    context = load.ssl_context or server.ssl_context
    stream, early = await attrs.evolve(server, timeout=load.plan.opening, ssl_context=context).open()
    wire = wire_over(stream)
    try:
        yield _FrameChannel(wire, load.tally, FrameReader(CLIENT_MAX_MESSAGE), early)
        with suppress(trio.BrokenResourceError):
            wire.try_write(_CLOSE_FRAME)  # if possible without waiting
    finally:
        await wire.close()


# HTTP+SSE (2024-11-05): one stream carries the responses of all POSTs

_LISTEN: Final = {"accept": "text/event-stream"}
_SEND: Final = {"content-type": "application/json"}


@asynccontextmanager
async def open_events(site: LoadSite, load: Load, caller: LoadCaller) -> AsyncIterator[LoadChannel]:
    """Open a new stream of events."""
    channel = _EventChannel(load, caller, site)
    try:
        await channel.open()
        yield channel
    finally:
        await channel.stream.close()


@attrs.define(eq=False)
class _EventChannel:
    """One session: the stream, and connections for POSTs, at most one for each concurrent call."""

    _load: Load
    _caller: LoadCaller
    _site: LoadSite
    stream: LoadConnection = attrs.field(init=False)
    _decoder: EventDecoder = attrs.field(init=False, factory=lambda: EventDecoder(CLIENT_MAX_MESSAGE))
    _head: bytes = attrs.field(init=False, default=b"")
    _arrived: list[Event] = attrs.field(init=False, factory=list)
    # what waits for a connection: no more than there are calls, and answers to the server
    _outgoing: trio.MemorySendChannel[bytes] = attrs.field(init=False)
    _posts: trio.MemoryReceiveChannel[bytes] = attrs.field(init=False)
    _senders: int = attrs.field(init=False, default=0)
    _nursery: trio.Nursery | None = attrs.field(init=False, default=None)
    _why: str = attrs.field(init=False, default="the server ended its event stream")

    def __attrs_post_init__(self) -> None:
        self.stream = LoadConnection(self._site, self._load)
        self._outgoing, self._posts = trio.open_memory_channel[bytes](math.inf)

    # The stream

    async def open(self) -> None:
        """Open the stream and wait for its first event, the endpoint for POSTs.

        Raises ConnectionLost: no endpoint was received; the text has the reason.
        """
        patience = self._load.plan.opening
        stream = self.stream
        try:
            with trio.fail_after(patience):
                await stream.request(whole_request(self._site.head("GET", _LISTEN), None))
                while not self._arrived:
                    pieces = await stream.more()
                    status = stream.reply.status
                    if status and (status != 200 or stream.reply.content_type != "text/event-stream"):
                        raise ConnectionLost(f"the server does not speak HTTP+SSE here: HTTP {status}")
                    self._arrived += events_in(pieces, self._decoder)
        except trio.TooSlowError:
            raise ConnectionLost(f"the server named no endpoint within {patience:g} seconds") from None
        except (trio.BrokenResourceError, UnreadableReply) as error:
            raise ConnectionLost(str(error)) from None
        self._caller.replica = named_by_headers(self._load.plan.replica_by, stream.reply.headers)
        event = self._arrived.pop(0)
        url = self._site.url
        target = resolved(event.data.decode(errors="replace").strip(), url)
        if event.event != "endpoint" or target is None or origin(target) != origin(url):
            raise ConnectionLost(f"the server named no endpoint of its own but {event.data[:200]!r}")
        self._head = self._site.head("POST", _SEND, url=target)

    async def receive(self) -> Sequence[bytes]:
        try:
            if not self._arrived:
                if self.stream.reply.complete:
                    raise trio.EndOfChannel(self._why)
                self._arrived += events_in(await self.stream.more(), self._decoder)
        except UnreadableReply as error:
            self._why = str(error)
            raise trio.BrokenResourceError(self._why) from None
        arrived, self._arrived = self._arrived, []
        return [event.data for event in arrived if event.data]

    async def close_reason(self) -> str:
        return self._why

    # Sending

    def send(self, messages: Sequence[bytes]) -> None:
        for message in messages:
            if not self._posts.statistics().tasks_waiting_receive and self._senders <= self._load.plan.places:
                self._add_sender()
            self._outgoing.send_nowait(message)

    def _add_sender(self) -> None:
        if self._nursery is not None:
            self._senders += 1
            self._nursery.start_soon(self._post_all)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._add_sender()
            await trio.sleep_forever()

    async def _post_all(self) -> None:
        connection = LoadConnection(self._site, self._load)
        try:
            async for message in self._posts:
                await self._post(connection, message)
        finally:
            await connection.close()

    async def _post(self, connection: LoadConnection, message: bytes) -> None:
        try:
            body = await connection.post(self._head, message)
            if connection.reply.status < 300:
                return
            kind, why = f"HTTP {connection.reply.status}", body.decode(errors="replace")
        except (McpError, UnreadableReply, trio.BrokenResourceError) as error:
            await connection.close()
            kind, why = "connection lost", str(error)
        self._caller.fail(orjson.loads(message).get("id"), kind, why, trio.current_time())
