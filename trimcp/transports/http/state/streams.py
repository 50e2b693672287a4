"""Streams of server-sent events: written to their reader, and kept for a client that reconnects.

A stream of a legacy session outlives its connection: the client may resume it with the id of the last event it
received. Each stream has its own bounded buffer, so a slow reader delays no other stream. (2025-11-25 basic/transports,
"Resumability and Redelivery"; WHATWG HTML, "Server-sent events".)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Final

import attrs
import trio

from trimcp.budget import MemoryCharge
from trimcp.channel import Kind, LaneCounts, Outgoing, Sink, lane_of
from trimcp.framing.sse import COMMENT, encode_event, in_one_line
from trimcp.store.events import OVERHEAD, EventStore, event_id
from trimcp.support.deadlines import Deadline, Deadlines
from trimcp.transports.http.interfaces import HttpReply, HttpResponse
from trimcp.transports.trace import Tracer

_COUNTED: Final = 32 * 1024  # bytes of events after which the budget's count is updated

SSE_HEADERS: Final = (
    ("Content-Type", "text/event-stream"),
    ("Cache-Control", "no-cache, no-transform"),
    ("X-Accel-Buffering", "no"),
)
"""Headers of every stream. The last asks nginx and similar proxies not to buffer (2026-07-28, "Receiving Messages")."""


@attrs.define(eq=False)
class SessionEvents:
    """The events of one session in the store, and how much memory they use."""

    store: EventStore
    session: str
    amount: MemoryCharge
    _uncounted: int = attrs.field(init=False, default=0)  # bytes kept since the last count

    def append(self, stream: int, seq: int, data: bytes, *, reply: bool) -> None:
        self.store.append(self.session, stream, seq, data, reply=reply)
        self._uncounted += len(data) + OVERHEAD
        if self._uncounted >= _COUNTED:
            self._count()

    def replay(self, stream: EventStream, reply: HttpReply, headers: tuple[tuple[str, str], ...], after: int) -> None:
        """Send a stream on this response from now on, beginning with the kept events after number `after`."""
        kept = self.store.after(self.session, stream.number, after)
        stream.open(reply, headers, b"".join(stream.encode(data, seq) for seq, data in kept))

    def forget(self, stream: int) -> None:
        self.store.drop_stream(self.session, stream)
        self._count()

    def forget_all(self) -> None:
        self.store.drop_session(self.session)
        self.amount.set(0)

    def _count(self) -> None:
        self._uncounted = 0
        self.amount.set(self.store.held(self.session))


@attrs.define(eq=False)
class OpenStreams:
    """The streams that are being read. It writes comments on silent ones, so that proxies keep them open."""

    deadlines: Deadlines
    keep_alive: float  # seconds of silence on a stream, at most
    bound: int  # bytes that may wait for one reader before senders wait
    tracer: Tracer | None = None  # writes every message to the trace
    _read: dict[EventStream, None] = attrs.field(init=False, factory=dict)
    _deadline: Deadline = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._deadline = self.deadlines.new(self._look)

    def add(self, stream: EventStream) -> None:
        """Keep a stream alive from now on; call it when a reader connects."""
        self._read[stream] = None
        if not self._deadline.is_set:
            self._deadline.set(self.keep_alive / 2)  # a stream is silent for at most two such periods

    def remove(self, stream: EventStream) -> None:
        self._read.pop(stream, None)

    def _look(self) -> None:
        now = time.time()
        for stream in list(self._read):
            if stream.until <= now:
                stream.until = math.inf
                stream.lapse()
            else:
                stream.keep_alive()
        if self._read:
            self._deadline.set(self.keep_alive / 2)


@attrs.define(eq=False)
class EventStream:
    """One stream of events. Without `events` they have no ids, and an event without a reader is lost."""

    open_streams: OpenStreams
    events: SessionEvents | None = None  # keeps them
    number: int = 0  # among the streams of its session
    event: str | None = None  # the type of each event, see `name_events`; 2024-11-05 requires "message"
    counts: LaneCounts | None = None  # counts messages dropped because the reader was slow or gone
    reply: HttpReply | None = attrs.field(init=False, default=None)  # the response that the reader reads now
    until: float = attrs.field(init=False, default=math.inf)  # seconds since 1970; then the reader's authorization ends
    # called then, to end more than the response
    on_lapse: Callable[[], object] | None = attrs.field(init=False, default=None)
    ended: bool = attrs.field(init=False, default=False)  # whether its last event was written
    written: bool = attrs.field(init=False, default=True)  # whether anything was written since `keep_alive`
    latest: dict[Hashable, Outgoing] = attrs.field(init=False, factory=dict)  # held back for a slow or absent reader
    _seq: int = attrs.field(init=False, default=0)
    _plain: bool = attrs.field(init=False)  # whether events are neither kept nor traced
    _before: bytes = attrs.field(init=False)  # an event's bytes until its number, or until its data if it has none
    _after: bytes = attrs.field(init=False)  # and from its number to its data

    def __attrs_post_init__(self) -> None:
        self._plain = self.events is None and self.open_streams.tracer is None
        self.name_events(self.event)

    def name_events(self, event: str | None) -> None:
        """Give the events that follow this type."""
        self.event = event
        beginning = b"data: " if event is None else b"event: %b\ndata: " % event.encode()
        kept = self.events is not None
        self._before, self._after = (b"id: %d-" % self.number, b"\n" + beginning) if kept else (beginning, b"")

    # The reader

    @property
    def read(self) -> bool:
        return self.reply is not None

    @property
    def full(self) -> bool:
        """Whether senders should wait for the reader."""
        reply = self.reply
        return reply is not None and reply.waiting >= self.open_streams.bound

    async def room(self) -> None:
        """Wait until the reader has read enough, or has left. Always a checkpoint: hosts have other bounds."""
        if self.reply is not None:
            await self.reply.room()
        await trio.lowlevel.checkpoint()

    def open(self, reply: HttpReply, headers: tuple[tuple[str, str], ...], first: bytes = b"") -> None:
        """Send the stream on this response from now on; `first` are bytes to begin with."""
        self.reply = reply
        self.written = True
        self.open_streams.add(self)
        reply.start(HttpResponse(200, (*SSE_HEADERS, *headers), first))
        self.writable()

    def resume(self, reply: HttpReply, headers: tuple[tuple[str, str], ...], after: int) -> None:
        """Like `open`, beginning with the kept events after the event number `after`."""
        assert self.events is not None
        if self.reply is not None:
            self.reply.finish()  # the client has left it, since it reconnects
        self.events.replay(self, reply, headers, after)
        if self.ended:
            self._leave()

    def go_on(self, seq: int) -> None:
        """Number events from here on: another process has numbered those before."""
        self._seq = seq

    def detach(self) -> None:
        self.reply = None
        self.open_streams.remove(self)

    def release(self, retry: int) -> None:
        """Close the reader's connection, and ask the client to reconnect after `retry` milliseconds."""
        if self.reply is not None and self.events is not None and not self.ended:
            self.reply.write(b"retry: %d\n\n" % retry)
            self._leave()

    def lapse(self) -> None:
        """End the response, since the reader's token has expired; with a new one the client may resume the stream."""
        self._leave(b": the access token has expired\n\n")
        if self.on_lapse is not None:
            self.on_lapse()

    def keep_alive(self) -> None:
        """Write a comment if nothing was written since the last call, so that no proxy closes the connection."""
        silent, self.written = not self.written, False
        if silent and self.reply is not None and not self.reply.waiting:
            self.reply.write(COMMENT)
            self.written = True

    # Writing

    def prime(self) -> bytes:
        """Return an event without data, whose id lets the client resume even before the first message.

        It says nothing of `retry`, which some clients do not know: that comes where the server is about to close.
        """
        self._seq += 1
        return encode_event(b"", id=event_id(self.number, self._seq))

    def take(self, data: bytes, *, reply: bool = False) -> bytes:
        """Return a message as an event, after storing it if events are kept."""
        tracer, events = self.open_streams.tracer, self.events
        if tracer is not None:
            tracer.note("-->", data)
        if not data.isascii():
            data = in_one_line(data)
        if events is None:
            return b"".join((self._before, data, b"\n\n"))
        self._seq = seq = self._seq + 1
        events.append(self.number, seq, data, reply=reply)
        return b"".join((self._before, b"%d" % seq, self._after, data, b"\n\n"))  # as `encode`, without a call

    def post(self, outgoing: Outgoing) -> None:
        """Write a message. Without a reader it is only kept, or dropped and counted if events are not kept."""
        if self.ended:
            return
        reply = self.reply
        if self._plain and outgoing.data.isascii():
            event = b"".join((self._before, outgoing.data, b"\n\n"))
        else:
            event = self.take(outgoing.data, reply=outgoing.kind is Kind.REPLY)
        if reply is not None:
            self.written = True
            reply.write(event)
        elif self.events is None and self.counts is not None:
            self.counts.drop(lane_of(outgoing))

    def post_latest(self, key: Hashable, outgoing: Outgoing) -> None:
        """Write a message. If the reader is slow or gone, keep it until later, only the latest for each key."""
        reply = self.reply
        if reply is not None and not self.latest and reply.waiting < self.open_streams.bound:
            self.post(outgoing)
            return
        if key in self.latest and self.counts is not None:
            self.counts.merge(lane_of(outgoing))
        self.latest[key] = outgoing

    def withheld(self) -> list[tuple[Hashable, Outgoing]]:
        """Return the messages that were held back, and forget them."""
        kept, self.latest = self.latest, {}
        return list(kept.items())

    def finish_latest(self, key: Hashable, *, keep: bool) -> None:
        outgoing = self.latest.pop(key, None)
        if outgoing is not None and keep:
            self.post(outgoing)

    def waiting(self) -> tuple[Sequence[Outgoing], int]:
        return list(self.latest.values()), 0 if self.reply is None else self.reply.waiting

    def writable(self) -> None:
        """Write the messages that were held back, now that the reader has room."""
        while self.latest and self.reply is not None and not self.full:
            key = next(iter(self.latest))
            self.post(self.latest.pop(key))

    def end(self, data: bytes | None = None) -> None:
        """Write the last message, if there is one, and end the stream."""
        if self.ended:
            return
        event = b"" if data is None else self.take(data, reply=True)
        self.ended = True
        self.on_lapse = None  # who ends may be who is told, and would otherwise be kept by what it keeps
        self.latest.clear()
        self._leave(event)

    def _leave(self, data: bytes = b"") -> None:
        """End the response after `data`; the stream goes on."""
        reply = self.reply
        if reply is not None:
            self.detach()
            reply.finish(data)

    def encode(self, data: bytes, seq: int) -> bytes:
        """Return a kept message as an event. It has no line break, see `Outgoing`."""
        return b"".join((self._before, b"%d" % seq, self._after, data, b"\n\n"))


class StreamSink(Sink):
    """The common part of sinks that send their messages on one `EventStream`, once they have one."""

    __slots__ = ()

    _stream: EventStream | None

    @property
    def full(self) -> bool:
        stream = self._stream
        if stream is None:
            return False
        reply = stream.reply
        return reply is not None and reply.waiting >= stream.open_streams.bound

    async def room(self) -> None:
        """Wait for the reader of this stream only."""
        if self._stream is not None:
            await self._stream.room()

    def post(self, outgoing: Outgoing) -> None:
        if self._stream is not None:
            self._stream.post(outgoing)

    def post_latest(self, key: Hashable, outgoing: Outgoing) -> None:
        if self._stream is not None:
            self._stream.post_latest(key, outgoing)

    def finish_latest(self, key: Hashable, *, keep: bool) -> None:
        stream = self._stream
        if stream is not None and stream.latest:
            stream.finish_latest(key, keep=keep)

    def waiting(self) -> tuple[Sequence[Outgoing], int]:
        return ((), 0) if self._stream is None else self._stream.waiting()

    def writable(self) -> None:
        if self._stream is not None:
            self._stream.writable()
