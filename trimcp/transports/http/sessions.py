"""The sessions of Streamable HTTP from 2025-03-26 to 2025-11-25, and the streams of each.

A session without open streams owns no task. (basic/transports, "Session Management", "Listening for Messages from the
Server".)
"""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Sequence
from typing import Final

import attrs
import trio

from trimcp.budget import Holding
from trimcp.channel import Kind, Outgoing, Sink, lane_of
from trimcp.errors import LocalError
from trimcp.framing.sse import encode_event
from trimcp.transports.http.events.store import event_id, parse_event_id
from trimcp.transports.http.seams import HttpReply, PushedSession
from trimcp.transports.http.settings import HttpSettings
from trimcp.transports.http.shares import Table
from trimcp.transports.http.streams import EventStream, Journal, OpenStreams, SessionEvents

__all__ = ["HttpSession"]

_EACH: Final = 6 * 1024  # bytes that a session takes in which nothing happens


def new_session_id() -> str:
    """Return an id that nobody can guess."""
    return secrets.token_urlsafe(24)


@attrs.define(eq=False)
class HttpSession(Sink):
    """One session, and the `Sink` of what belongs to none of its requests.

    Such messages go to the stream of a GET. While nobody reads one, lists that changed and resources that were updated
    are kept, the latest of each; other notices are dropped and counted, unless a client can come back for them.

    `id` is what the client sends in `Mcp-Session-Id`; see `Tabled`. `events` keeps events for a client that comes back,
    and `holding` counts what the session makes us keep.

    Attributes:
        fresh: whether nothing was ever asked in it, and nobody ever listened to it.
        pushed: the session itself.
        used: when it was last used, on Trio's clock.
        streams: those that have not ended, by number, if a client can come back for them.
    """

    table: Table[HttpSession]
    id: str
    principal: str | None
    owner: str
    settings: HttpSettings
    open_streams: OpenStreams
    events: SessionEvents | None
    holding: Holding
    pushed: PushedSession = attrs.field(init=False)
    fresh: bool = attrs.field(init=False, default=True)
    used: float = attrs.field(init=False, factory=trio.current_time)
    streams: dict[int, EventStream] = attrs.field(init=False, factory=dict)
    _ended: dict[int, float] = attrs.field(init=False, factory=dict)
    _unread: dict[int, None] = attrs.field(init=False, factory=dict)
    _number: int = attrs.field(init=False, default=0)
    _own: EventStream = attrs.field(init=False)
    _closed: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self._own = EventStream(self.open_streams)
        self.holding.add(_EACH)
        self.holding.holder = self

    def attach(self, pushed: PushedSession) -> None:
        """Say which session it is: that one needs this as its sink to be made."""
        self.pushed = pushed
        self._own.counts = pushed.counts

    @property
    def resumable(self) -> bool:
        """Whether events have ids by which a client can come back."""
        revision = self.pushed.revision
        return self.events is not None and revision is not None and revision.resumable

    @property
    def can_poll(self) -> bool:
        """Whether a client may be sent away from a stream, to come back for the rest."""
        revision = self.pushed.revision
        return self.resumable and revision is not None and revision.priming_event

    @property
    def idle(self) -> bool:
        """Whether nothing is at work and nobody reads. A call that waits for an answer nobody will give is no work."""
        if self.pushed.busy:
            return False
        return not any(stream.read for stream in self.streams.values()) and not self._own.read

    @property
    def at_rest(self) -> bool:
        """Whether no handler is at work in it; see `Holder`."""
        return self.pushed.at_rest

    def give_way(self, why: str) -> None:
        """End it; see `Holder`."""
        self.end(why)

    def end(self, why: str) -> None:
        """End it: its handlers are stopped, its streams end, its events are forgotten."""
        self.table.remove(self)
        self.pushed.disconnect(why)

    # Streams

    def new_stream(self) -> EventStream:
        """Return a new stream, kept for clients that come back if they can."""
        self._number += 1
        if not self.resumable:
            return EventStream(self.open_streams, counts=self.pushed.counts)
        stream = self.streams[self._number] = self._stream(self._number)
        return stream

    def find_stream(self, event: str) -> tuple[EventStream, int] | None:
        """Return the stream of this session an event's id belongs to, and the event's number in it."""
        found = parse_event_id(event)
        if found is None:
            return None
        number, seq = found
        stream = self.streams.get(number)
        if stream is None and (number in self._ended or number in self._unread):
            stream = self._stream(number)
            stream.ended = True
        return None if stream is None else (stream, seq)

    def _stream(self, number: int) -> EventStream:
        assert self.events is not None
        return EventStream(self.open_streams, Journal(self.events, number), counts=self.pushed.counts)

    def as_events(self, data: bytes) -> bytes:
        """Return an answer with nothing before it as a whole stream, kept like others: most streams are no more."""
        if (tracer := self.open_streams.tracer) is not None:
            tracer.note("-->", data)
        if not self.resumable:
            return encode_event(data)
        assert self.events is not None
        self._number = number = self._number + 1
        prime, seq = b"", 1
        if self.can_poll:
            prime, seq = encode_event(b"", id=event_id(number, 1), retry=self.settings.retry), 2
        self.events.append(number, seq, data, reply=True)
        self._keep(number, delivered=True)
        return prime + encode_event(data, id=event_id(number, seq))

    def stream_ended(self, stream: EventStream, *, delivered: bool) -> None:
        """Keep what ended for a while, in case its last bytes were lost; to the session's end if nobody read it.

        But not too many, of which the oldest go, those that were read first.
        """
        if stream.journal is not None:
            self.streams.pop(stream.journal.stream, None)
            self._keep(stream.journal.stream, delivered=delivered)

    def _keep(self, number: int, *, delivered: bool) -> None:
        if delivered:
            self._unread.pop(number, None)
            self._ended[number] = trio.current_time()
        else:
            self._unread[number] = None
        if len(self._ended) + len(self._unread) > self.settings.max_replays:
            self._forget(next(iter(self._ended or self._unread)))

    def forget_streams(self, now: float) -> None:
        """Forget streams that were read to their end long ago."""
        old = [number for number, ended in self._ended.items() if now - ended >= self.settings.replay_time]
        for number in old:
            self._forget(number)

    def _forget(self, number: int) -> None:
        self._ended.pop(number, None)
        self._unread.pop(number, None)
        if self.events is not None:
            self.events.forget(number)

    def listen(self, reply: HttpReply, headers: tuple[tuple[str, str], ...]) -> EventStream:
        """Let this response carry what belongs to no request, instead of any that did before."""
        before = self._own
        if before.journal is None and self.resumable:
            self._own = self.new_stream()
            for key, outgoing in before.withheld():
                self._own.send_latest(key, outgoing)
        elif before.reply is not None:
            before.reply.finish()
        own = self._own
        prime = own.prime(self.settings.retry) if self.can_poll else b""
        own.open(reply, headers, prime)
        return own

    # The sink of what belongs to no request

    @property
    def full(self) -> bool:
        """Whether the reader of the GET stream is behind."""
        return self._own.full

    async def room(self) -> None:
        """Wait for the reader of the GET stream."""
        await self._own.room()

    def post(self, outgoing: Outgoing) -> None:
        """Send a message on the GET stream, or deal with there being none."""
        if self._own.read or (outgoing.kind is Kind.NOTIFICATION and self._own.journal is not None):
            self._own.send(outgoing)
        elif outgoing.kind is Kind.REQUEST:
            raise LocalError("the client cannot be asked outside a request: it reads no stream (GET) of this session")
        else:
            self.pushed.counts.drop(lane_of(outgoing))

    def post_latest(self, key: Hashable, outgoing: Outgoing) -> None:
        """Send a message, or keep the latest until somebody reads."""
        self._own.send_latest(key, outgoing)

    def settle_latest(self, key: Hashable, *, keep: bool) -> None:
        """Send what is kept, or drop it."""
        self._own.settle_latest(key, keep=keep)

    def close(self) -> None:
        """End every stream, now that the session has ended."""
        if self._closed:
            return
        self._closed = True
        streams, self.streams = self.streams, {}
        for stream in (self._own, *streams.values()):
            stream.end()
        if self.events is not None:
            self.events.forget_all()
        self.holding.close()

    def waiting(self) -> tuple[Sequence[Outgoing], int]:
        """Return what is kept for the reader of the GET stream, and the bytes that it has not taken."""
        return self._own.waiting()
