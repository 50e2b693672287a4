"""State shared by the requests to one application, and the sessions of Streamable HTTP from 2025-03-26 to 2025-11-25.

The application and the exchanges both use `Shared`, so that neither imports the other. A session without open streams
owns no task. (basic/transports, "Session Management", "Listening for Messages from the Server".)
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

import attrs
import trio

from trimcp.budget import Budget, MemoryAccount, MemoryCharge
from trimcp.channel import Kind, Link, Outgoing, lane_of
from trimcp.errors import LocalError
from trimcp.framing.sse import encode_event, in_one_line
from trimcp.principal import Principal
from trimcp.security import security_event
from trimcp.store.events import EventStore, MemoryEvents, parse_event_id
from trimcp.support.deadlines import Deadline, DeadlineQueue, Deadlines
from trimcp.support.shares import Table
from trimcp.transports.http.endpoint.routing import Routing
from trimcp.transports.http.interfaces import (
    Admitted,
    Head,
    HttpReply,
    HttpResponse,
    PushedSession,
    SecondProtocol,
    Service,
    refusal,
)
from trimcp.transports.http.settings import HttpSettings
from trimcp.transports.http.state.streams import EventStream, OpenStreams, SessionEvents, StreamSink
from trimcp.transports.trace import Tracer
from trimcp.wire.jsonrpc import Message, scan_id
from trimcp.wire.revisions import Revision

if TYPE_CHECKING:
    from trimcp.store.letters import PostBox

_EACH: Final = 6 * 1024  # bytes that an idle session uses
_FOR_EVENTS: Final = 4  # divisor: events kept for reconnecting clients may use this part of the memory budget
_PRIMED: Final = b"id: %d-1\ndata: \n\nid: %d-2\ndata: "  # the first two events of a stream
_SWEEP: Final = 30.0  # seconds between two checks for idle sessions


def new_session_id() -> str:
    return secrets.token_urlsafe(24)


@attrs.define(eq=False)
class HttpSession(StreamSink):
    """One session, and the `Sink` of messages that belong to none of its requests.

    Such messages are sent on the stream of a GET. Without a reader, the latest notification of each changed list and
    each updated resource is kept. Other notifications are dropped and counted, unless a client can resume the stream.
    """

    shared: Shared
    principal: Principal | None
    owner: str  # whose share of the table it counts into
    link: Link  # how its first request has come
    id: str = attrs.field(init=False, factory=new_session_id)  # the secret in `Mcp-Session-Id`
    fresh: bool = attrs.field(init=False, default=True)  # not used yet by a request or a stream
    holding: MemoryAccount = attrs.field(init=False)
    events: SessionEvents | None = attrs.field(init=False, default=None)  # kept for clients that reconnect
    pushed: PushedSession = attrs.field(init=False)
    used: float = attrs.field(init=False, factory=trio.current_time)  # the last use, on Trio's clock
    streams: dict[int, EventStream] = attrs.field(init=False, factory=dict)  # those that have not ended
    _ended: dict[int, float] = attrs.field(init=False, factory=dict)
    _unread: dict[int, None] = attrs.field(init=False, factory=dict)
    _number: int = attrs.field(init=False, default=0)
    _stream: EventStream = attrs.field(init=False)  # the stream of the GET
    _closed: bool = attrs.field(init=False, default=False)
    _agreed: Revision | None = attrs.field(init=False, default=None)  # the revision, once it is known

    def __attrs_post_init__(self) -> None:
        shared = self.shared
        self.holding = holding = shared.budget.holding(self.owner)
        holding.add(_EACH)
        if shared.events is not None:
            self.events = SessionEvents(shared.events, self.id, MemoryCharge(holding))
        self.pushed = shared.service.open(self, holding, shared.sessions)
        self._stream = EventStream(shared.open_streams, counts=self.pushed.counts)
        holding.holder = self

    @property
    def resumable(self) -> bool:
        """Whether events have ids with which a client can resume a stream."""
        revision = self._agreed or self._find_revision()
        return self.events is not None and revision is not None and revision.resumable

    @property
    def can_poll(self) -> bool:
        """Whether the server may close a stream, so that the client reconnects later for the rest."""
        revision = self._agreed or self._find_revision()
        return revision is not None and revision.priming_event and self.resumable

    def _find_revision(self) -> Revision | None:
        self._agreed = self.pushed.revision  # it stays what the handshake has agreed on
        return self._agreed

    @property
    def idle(self) -> bool:
        """Whether no handler is running and no stream is read.

        A call that waits for the answer of an unreachable client does not count as running.
        """
        if self.pushed.busy:
            return False
        return not any(stream.read for stream in self.streams.values()) and not self._stream.read

    @property
    def at_rest(self) -> bool:
        return self.pushed.at_rest

    def evict(self, why: str) -> None:
        self.end(why)

    def end(self, why: str, *, ending: bool = False) -> None:
        """End it, or all (`ending`): its handlers are cancelled, its streams end, its events are forgotten."""
        self.shared.sessions.remove(self)
        self.pushed.disconnect(why, ending=ending)

    # Streams

    def new_stream(self) -> EventStream:
        """Return a new stream, which can be resumed if the session keeps events."""
        self._number += 1
        if not self.resumable:
            return EventStream(self.shared.open_streams, counts=self.pushed.counts)
        stream = self.streams[self._number] = self._kept_stream(self._number)
        return stream

    def find_stream(self, event: str) -> tuple[EventStream, int] | None:
        """Return the stream of an event's id, if it belongs to this session, and the event's number in it."""
        found = parse_event_id(event)
        if found is None:
            return None
        number, seq = found
        stream = self.streams.get(number)
        if stream is None and (number in self._ended or number in self._unread):
            stream = self._kept_stream(number)
            stream.ended = True
        return None if stream is None else (stream, seq)

    def _kept_stream(self, number: int) -> EventStream:
        assert self.events is not None
        return EventStream(self.shared.open_streams, self.events, number, counts=self.pushed.counts)

    def as_events(self, data: bytes) -> bytes:
        """Return an answer that is the only message of its stream, encoded as a stream and kept like others."""
        revision, events = self._agreed or self._find_revision(), self.events
        if events is None or revision is None or not revision.resumable:
            return encode_event(data)
        if not data.isascii():
            data = in_one_line(data)
        self._number = number = self._number + 1
        if revision.priming_event:
            seq, beginning = 2, _PRIMED % (number, number)
        else:
            seq, beginning = 1, b"id: %d-1\ndata: " % number
        events.append(number, seq, data, reply=True)
        self._keep(number, delivered=True)
        return b"".join((beginning, data, b"\n\n"))

    def stream_ended(self, stream: EventStream, *, delivered: bool) -> None:
        """Keep an ended stream for a while, in case its last bytes were lost; an unread one until the session ends.

        Above the bound the oldest are dropped, those that were read first.
        """
        if stream.events is not None:
            self.streams.pop(stream.number, None)
            self._keep(stream.number, delivered=delivered)

    def _keep(self, number: int, *, delivered: bool) -> None:
        if delivered:
            self._unread.pop(number, None)
            self._ended[number] = self.shared.deadlines.now()
        else:
            self._unread[number] = None
        if len(self._ended) + len(self._unread) > self.shared.settings.max_replays:
            self._forget(next(iter(self._ended or self._unread)))

    def forget_streams(self, now: float) -> None:
        """Forget streams that were read to their end more than `replay_time` ago."""
        old = [number for number, ended in self._ended.items() if now - ended >= self.shared.settings.replay_time]
        for number in old:
            self._forget(number)

    def _forget(self, number: int) -> None:
        self._ended.pop(number, None)
        self._unread.pop(number, None)
        if self.events is not None:
            self.events.forget(number)

    def listen(self, reply: HttpReply, headers: tuple[tuple[str, str], ...]) -> EventStream:
        """Send messages that belong to no request on this response, in place of an earlier GET's."""
        before = self._stream
        if before.events is None and self.resumable:
            self._stream = self.new_stream()
            for key, outgoing in before.withheld():
                self._stream.post_latest(key, outgoing)
        elif before.reply is not None:
            before.reply.finish()
        own = self._stream
        prime = own.prime() if self.can_poll else b""
        own.open(reply, headers, prime)
        return own

    # The sink of messages that belong to no request

    def post(self, outgoing: Outgoing) -> None:
        """Send a message on the GET stream. If no stream is read: raise for a request, drop and count others."""
        if self._stream.read or (outgoing.kind is Kind.NOTIFICATION and self._stream.events is not None):
            self._stream.post(outgoing)
        elif outgoing.kind is Kind.REQUEST:
            raise LocalError("the client cannot be asked outside a request: it reads no stream (GET) of this session")
        else:
            self.pushed.counts.drop(lane_of(outgoing))

    def close(self) -> None:
        """End every stream after the session has ended."""
        if self._closed:
            return
        self._closed = True
        streams, self.streams = self.streams, {}
        for stream in (self._stream, *streams.values()):
            stream.end()
        if self.events is not None:
            self.events.forget_all()
        self.holding.close()


@attrs.define(eq=False)
class Shared:
    """State shared by all requests of one application."""

    service: Service
    settings: HttpSettings
    budget: Budget = attrs.field(init=False)
    events: EventStore | None = attrs.field(init=False)  # kept for clients that reconnect
    deadlines: Deadlines = attrs.field(init=False, factory=Deadlines)  # the clock, run by the application
    # exchanges without an answer yet, to be made streams after `silence`
    silent: DeadlineQueue = attrs.field(init=False)
    open_streams: OpenStreams = attrs.field(init=False)  # the streams that are being read
    sessions: Table[HttpSession] = attrs.field(init=False)  # of Streamable HTTP, until 2025-11-25
    routing: Routing = attrs.field(init=False)
    second_protocol: SecondProtocol | None = attrs.field(init=False, default=None)  # another protocol beside MCP
    # whether the head alone decides if a request is admitted: nobody is identified, no access is logged
    judged_by_head: bool = attrs.field(init=False, default=False)
    exchanges: int = attrs.field(init=False, default=0)  # POSTs that are not answered yet
    draining: bool = attrs.field(init=False, default=False)  # whether new work is refused
    make_session: Callable[..., HttpSession] = attrs.field(init=False, default=HttpSession)
    # where processes share sessions: letters between them, what hands a request to one of them, by its name, and what
    # runs beside that, begun by `nursery.start` before the first request
    letters: PostBox | None = attrs.field(init=False, default=None)
    forward: Callable[[Head, str], Admitted] | None = attrs.field(init=False, default=None)
    parts: list[Callable[..., Awaitable[None]]] = attrs.field(init=False, factory=list)
    tracer: Tracer | None = attrs.field(init=False)
    _sweep: Deadline = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        settings, deadlines = self.settings, self.deadlines
        self.budget = self.service.budget
        self.events = settings.events
        if self.events is None and settings.resumable:
            self.events = MemoryEvents(max_total_bytes=self.budget.bound // _FOR_EVENTS)
        self.tracer = None if settings.trace is None else Tracer(settings.trace)
        self._sweep = deadlines.new(self._look)
        self.silent = DeadlineQueue(deadlines, settings.silence)
        self.open_streams = OpenStreams(deadlines, settings.keep_alive, settings.stream_buffer, self.tracer)
        self.sessions = Table(what="session", most=settings.max_sessions)
        self.routing = Routing.of(self.service.revisions, stateless=settings.stateless)

    def show(self, direction: str, message: Message | bytes) -> None:
        """Write a message to the trace, if there is one."""
        if self.tracer is not None:
            self.tracer.note(direction, message)

    def too_large(self, head: Head, beginning: bytes) -> HttpResponse:
        """Refuse a message beyond the limit, with the id of its request if that can be read in its beginning."""
        most = self.service.max_message
        security_event("oversize", most=most, peer=head.peer, principal=head.principal)
        text = f"a message may have {most} bytes"
        return refusal(413, text, *head.reply_headers, id=scan_id(beginning), data={"reason": "size"})

    def add(self, session: HttpSession) -> None:
        """Add a session to the table, and end it when it was idle for too long."""
        self.sessions.add(session)
        if not self._sweep.is_set:
            self._sweep.set(min(_SWEEP, self.settings.session_idle))

    def _look(self) -> None:
        """End sessions that are idle for too long, and forget streams that were read long ago."""
        now = trio.current_time()
        for session in self.sessions:
            if not session.idle:
                session.used = now
            elif now - session.used >= self.settings.session_idle:
                session.end("the session was idle for too long")
                continue
            session.forget_streams(now)
        if len(self.sessions):
            self._sweep.set(min(_SWEEP, self.settings.session_idle))
