"""The sessions of Streamable HTTP from 2025-03-26 to 2025-11-25: a table from id to session, and their streams.

A session without open streams owns no task. It belongs to who made it: to anybody else there is no such session.
(basic/transports, "Session Management", "Listening for Messages from the Server".)
"""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

import attrs
import trio

from trimcp.channel import Kind, Outgoing, lane_of
from trimcp.errors import LocalError
from trimcp.framing.sse import encode_event
from trimcp.masking import digest
from trimcp.security import security_event
from trimcp.transports.http.events import EventStore, event_id, parse_event_id
from trimcp.transports.http.model import Reply
from trimcp.transports.http.settings import Settings
from trimcp.transports.http.streams import EventStream, Journal
from trimcp.transports.trace import Tracer
from trimcp.wire.jsonrpc import RequestId

if TYPE_CHECKING:
    from trimcp.transports.http.exchange import Exchange
    from trimcp.transports.http.service import PushedSession, Service

__all__ = ["HttpSession", "SessionTable"]


@attrs.define(eq=False)
class HttpSession:
    """One session, and a `Sink` for what belongs to none of its requests.

    Such messages go to the stream of a GET. While nobody reads one, lists that changed and resources that were updated
    are kept, the latest of each; other notices are dropped and counted, unless a client can come back for them.

    Attributes:
        id: what the client sends in `Mcp-Session-Id`; secret.
        principal: whose it is.
        pushed: the session itself.
        used: when it was last used, on Trio's clock.
        under_way: exchanges that are not answered.
        streams: those that have not ended, by number, if a client can come back for them.
    """

    id: str
    principal: str | None
    settings: Settings
    events: EventStore | None
    tracer: Tracer | None = None
    pushed: PushedSession = attrs.field(init=False)
    used: float = attrs.field(init=False, factory=trio.current_time)
    under_way: int = attrs.field(init=False, default=0)
    streams: dict[int, EventStream] = attrs.field(init=False, factory=dict)
    _ended: dict[int, float] = attrs.field(init=False, factory=dict)
    _unread: dict[int, None] = attrs.field(init=False, factory=dict)
    _number: int = attrs.field(init=False, default=0)
    _own: EventStream = attrs.field(init=False)
    _closed: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self._own = EventStream(self.settings.stream_buffer, tracer=self.tracer)

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

    # Streams

    def new_stream(self) -> EventStream:
        """Return a new stream, kept for clients that come back if they can."""
        self._number += 1
        if not self.resumable:
            return EventStream(self.settings.stream_buffer, tracer=self.tracer)
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
        journal = Journal(self.events, self.id, number)
        return EventStream(self.settings.stream_buffer, journal, tracer=self.tracer)

    def as_events(self, data: bytes) -> bytes:
        """Return an answer with nothing before it as a whole stream, kept like others: most streams are no more."""
        if self.tracer is not None:
            self.tracer.note("-->", data)
        if not self.resumable:
            return encode_event(data)
        assert self.events is not None
        self._number = number = self._number + 1
        prime, seq = b"", 1
        if self.can_poll:
            prime, seq = encode_event(b"", id=event_id(number, 1), retry=self.settings.retry), 2
        self.events.append(self.id, number, seq, data, reply=True)
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
            self.events.drop_stream(self.id, number)

    def listen(self, reply: Reply, headers: tuple[tuple[str, str], ...]) -> EventStream:
        """Let this response carry what belongs to no request, instead of any that did before."""
        before = self._own
        if before.journal is None and self.resumable:
            self._own = self.new_stream()
            self._own.counts = before.counts
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

    def withdraw(self, request_id: RequestId) -> bool:
        """Return False: what was posted has left."""
        return False

    def unanswered(self, request_id: RequestId) -> None:
        """Do nothing: no request came in by this road."""

    def release(self) -> None:
        """Do nothing: the stream is no request's."""

    def close(self) -> None:
        """End every stream, now that the session has ended."""
        if self._closed:
            return
        self._closed = True
        streams, self.streams = self.streams, {}
        for stream in (self._own, *streams.values()):
            stream.end()
        if self.events is not None:
            self.events.drop_session(self.id)

    def waiting(self) -> tuple[Sequence[Outgoing], int]:
        """Return what is kept for the reader of the GET stream, and the bytes that it has not taken."""
        return self._own.waiting()

    # Exchanges

    def exchange_began(self, exchange: Exchange) -> None:
        """Count an exchange."""
        self.under_way += 1
        exchange.session = self

    def exchange_ended(self, exchange: Exchange, error: int | None) -> None:
        """Count it no longer."""
        self.under_way -= 1
        self.used = trio.current_time()


@attrs.define(eq=False)
class SessionTable:
    """The sessions of one face, by id."""

    settings: Settings
    events: EventStore | None
    tracer: Tracer | None = None
    _sessions: dict[str, HttpSession] = attrs.field(init=False, factory=dict)

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[HttpSession]:
        return iter(list(self._sessions.values()))

    @property
    def full(self) -> bool:
        """Whether there may be no more."""
        return len(self._sessions) >= self.settings.max_sessions

    def make(self, service: Service, principal: str | None) -> HttpSession:
        """Return a new session, which is found by its id once it was added."""
        session = HttpSession(secrets.token_urlsafe(24), principal, self.settings, self.events, self.tracer)
        session.pushed = service.open(session)
        session._own.counts = session.pushed.counts
        return session

    def add(self, session: HttpSession) -> None:
        """Let it be found."""
        self._sessions[session.id] = session

    def find(self, id: str, principal: str | None) -> HttpSession | None:
        """Return a session of this principal's; there is no other's."""
        session = self._sessions.get(id)
        if session is not None and session.principal != principal:
            security_event("foreign_session", session=digest(id), owner=session.principal, principal=principal)
            return None
        return session

    def remove(self, session: HttpSession, why: str) -> None:
        """End a session: its handlers are stopped, its streams end, its events are forgotten."""
        self._sessions.pop(session.id, None)
        session.pushed.disconnect(why)

    def sweep(self, now: float) -> None:
        """End sessions that are idle for too long, and forget streams that nobody will ask for."""
        for session in self:
            if not session.idle:
                session.used = now
            elif now - session.used >= self.settings.session_idle:
                self.remove(session, "the session was idle for too long")
                continue
            session.forget_streams(now)
