"""A peer of HTTP/2 that sends the frames it is told to, honest or not, and calls of gRPC as bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import attrs
import hpack
import trio
from h2 import config, events, settings
from h2.connection import H2Connection

from trimcp.transports.http.h2 import frames as h2
from trimcp.transports.http.h2.frames import Code, Setting
from trimcp.transports.http.h2.heads import write_block

__all__ = ["Answer", "Frame", "FramePeer", "H2Client", "grpc_call", "preface", "request_fields"]

Fields = Sequence[tuple[str, str]]


@attrs.frozen
class Frame:
    """A frame as it was received."""

    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def ends(self) -> bool:
        return bool(self.flags & h2.END_STREAM) and self.kind in (h2.DATA, h2.HEADERS)

    @property
    def code(self) -> Code:
        """The error of a RST_STREAM or a GOAWAY."""
        return Code(h2.word_at(self.payload, 0 if self.kind == h2.RST_STREAM else 4))


@attrs.define
class Answer:
    """What was received on a stream."""

    headers: dict[str, str] = attrs.field(factory=dict)
    body: bytes = b""
    trailers: dict[str, str] = attrs.field(factory=dict)
    reset: Code | None = None
    ended: bool = False

    @property
    def status(self) -> int:
        return int(self.headers[":status"])


def preface(settings: Mapping[Setting, int] | None = None) -> bytes:
    """The first bytes of a client."""
    return h2.PREFACE + h2.settings_frame(dict(settings or {}))


def request_fields(path: str, method: str = "POST", headers: Fields = (), authority: str = "127.0.0.1") -> Fields:
    return [(":method", method), (":scheme", "http"), (":authority", authority), (":path", path), *headers]


@attrs.define(eq=False)
class FramePeer:
    """A client of HTTP/2 on a stream. It grants what it receives again, unless `grants` is False."""

    stream: trio.abc.Stream
    grants: bool = True
    acknowledges: bool = True
    streams: dict[int, Answer] = attrs.field(factory=dict)
    goaway: Frame | None = None
    closed: bool = False
    frames: list[Frame] = attrs.field(factory=list)
    _encoder: hpack.Encoder = attrs.field(factory=hpack.Encoder)
    _decoder: hpack.Decoder = attrs.field(factory=hpack.Decoder)
    _buffer: bytes = b""
    _next: int = 1
    _block: bytes = b""

    async def start(self, settings: Mapping[Setting, int] | None = None) -> None:
        await self.send(preface(settings))

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    def head(self, fields: Fields, *, end: bool = False, stream: int | None = None, plain: bool = False) -> bytes:
        """The frame of a head; without `stream` of a new one, whose number is `last` then; `plain` without a table."""
        if stream is None:
            stream, self._next = self._next, self._next + 2
        flags = h2.END_HEADERS | (h2.END_STREAM if end else 0)
        block = write_block(fields) if plain else self._encoder.encode(fields)
        return h2.frame(h2.HEADERS, flags, stream, block)

    @property
    def last(self) -> int:
        return self._next - 2

    async def ask(
        self,
        path: str,
        body: bytes | None = b"",
        *,
        method: str = "POST",
        headers: Fields = (),
        authority: str = "test",
    ) -> int:
        """Send a request, with a body as far as one window takes it; without one the stream stays open."""
        data = self.head(request_fields(path, method, headers, authority), end=body == b"")
        if body:
            for at in range(0, len(body), h2.MAX_FRAME):
                piece = body[at : at + h2.MAX_FRAME]
                data += h2.frame(h2.DATA, h2.END_STREAM * (at + len(piece) == len(body)), self.last, piece)
        await self.send(data)
        return self.last

    async def fetch(self, path: str, body: bytes = b"", *, method: str = "POST", headers: Fields = ()) -> Answer:
        return await self.answer(await self.ask(path, body, method=method, headers=headers))

    async def receive(self) -> Frame | None:
        """Receive a frame and note what it says; None at the end of the connection."""
        while (size := self._complete()) is None:
            try:
                data = await self.stream.receive_some()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                data = b""
            if not data:
                self.closed = True
                return None
            self._buffer += data
        *_, kind, flags, id = h2.HEADER.unpack_from(self._buffer)
        frame = Frame(kind, flags, id, self._buffer[h2.HEADER_SIZE : size])
        self._buffer = self._buffer[size:]
        self.frames.append(frame)
        await self._note(frame)
        return frame

    def _complete(self) -> int | None:
        if len(self._buffer) < h2.HEADER_SIZE:
            return None
        high, low, *_ = h2.HEADER.unpack_from(self._buffer)
        size = h2.HEADER_SIZE + (high << 8 | low)
        return size if size <= len(self._buffer) else None

    async def _note(self, frame: Frame) -> None:
        if frame.kind == h2.SETTINGS and not frame.flags & h2.ACK and self.acknowledges:
            await self._say(h2.frame(h2.SETTINGS, h2.ACK, 0))
        elif frame.kind == h2.GOAWAY:
            self.goaway = frame
        elif not frame.stream:
            return
        answer = self.streams.setdefault(frame.stream, Answer())
        if frame.kind in (h2.HEADERS, h2.CONTINUATION):
            self._block += frame.payload
            if frame.flags & h2.END_HEADERS:
                fields = dict(self._decoder.decode(self._block))
                self._block = b""
                if answer.headers and answer.headers[":status"] != "100":
                    answer.trailers = fields
                else:
                    answer.headers = fields
        elif frame.kind == h2.DATA:
            answer.body += frame.payload
            if self.grants and frame.payload:
                more = len(frame.payload)
                await self._say(h2.window_update(0, more) + h2.window_update(frame.stream, more))
        elif frame.kind == h2.RST_STREAM:
            answer.reset = frame.code
        answer.ended = answer.ended or frame.ends

    async def _say(self, data: bytes) -> None:
        try:
            await self.send(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # what the other side has said is still read

    async def answer(self, id: int) -> Answer:
        """Receive until a stream has ended, or the connection has."""
        while True:
            answer = self.streams.get(id)
            if answer is not None and (answer.ended or answer.reset is not None):
                return answer
            if await self.receive() is None:
                return self.streams.setdefault(id, Answer())

    async def until_closed(self) -> Frame | None:
        """Receive until the connection has ended; return the GOAWAY, if there was one."""
        while await self.receive() is not None:
            pass
        return self.goaway

    async def __aiter__(self) -> AsyncIterator[Frame]:
        while (frame := await self.receive()) is not None:
            yield frame


@attrs.define(eq=False)
class H2Client:
    """A connection of the library h2, over which even what is wrong can be sent.

    Args:
        stream: to the server.
        window: bytes that each stream may send us before we allow more.
    """

    stream: trio.abc.Stream
    window: int = 65535
    connection: H2Connection = attrs.field(init=False)
    seen: list[events.Event] = attrs.field(init=False, factory=list)

    def __attrs_post_init__(self) -> None:
        options = config.H2Configuration(
            client_side=True,
            header_encoding=None,
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
        )
        self.connection = H2Connection(options)
        values = {settings.SettingCodes.INITIAL_WINDOW_SIZE: self.window}
        self.connection.local_settings = settings.Settings(client=True, initial_values=values)
        self.connection.initiate_connection()

    async def flush(self) -> None:
        await self.stream.send_all(self.connection.data_to_send())

    async def request(
        self,
        path: bytes = b"/",
        method: bytes = b"POST",
        body: bytes | None = b"",
        extra: Sequence[tuple[bytes, bytes]] = (),
    ) -> int:
        """Send a request, and leave its body open if that is None."""
        number = self.connection.get_next_available_stream_id()
        scheme = b"http" if path else b""  # a plain CONNECT has neither
        head = [(b":method", method), (b":path", path), (b":scheme", scheme), (b":authority", b"localhost"), *extra]
        self.connection.send_headers(number, [pair for pair in head if pair[1]], end_stream=body == b"")
        await self.flush()
        if body:
            await self.send_body(number, body)
        return number

    async def send_body(self, number: int, body: bytes) -> None:
        """Send a body, as far as one window lets us."""
        for start in range(0, len(body), 16384):
            piece = body[start : start + 16384]
            self.connection.send_data(number, piece, end_stream=start + 16384 >= len(body))
        await self.flush()

    async def event(self, kind: type[Any], number: int | None = None) -> Any:
        """Wait for an event of a kind, on that stream; every event is returned once. None if the connection ends."""
        while True:
            for event in self.seen:
                if isinstance(event, kind) and number in (None, getattr(event, "stream_id", None)):
                    self.seen.remove(event)
                    return event
            try:
                data = await self.stream.receive_some(65536)
            except trio.BrokenResourceError:
                data = b""
            if not data:
                return None
            for event in self.connection.receive_data(bytes(data)):
                if isinstance(event, events.DataReceived) and self.window:
                    self.connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                self.seen.append(event)
            await self.flush()

    async def response(self, number: int) -> tuple[int, bytes]:
        """Wait for a whole response; its status and body."""
        head = await self.event(events.ResponseReceived, number)
        await self.event(events.StreamEnded, number)
        data = [event for event in self.seen if isinstance(event, events.DataReceived) and event.stream_id == number]
        self.seen = [event for event in self.seen if event not in data]
        return int(dict(head.headers)[b":status"]), b"".join(event.data for event in data)


def grpc_call(path: str, *messages: bytes) -> bytes:
    """A connection of HTTP/2 that begins with one call, which stays open: framed messages to this path."""
    fields = request_fields(path, headers=[("te", "trailers"), ("content-type", "application/grpc")])
    head = h2.frame(h2.HEADERS, h2.END_HEADERS, 1, hpack.Encoder().encode(fields))
    return preface() + head + h2.frame(h2.DATA, 0, 1, b"".join(messages))
