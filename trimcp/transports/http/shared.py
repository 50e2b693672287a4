"""What all requests of one HTTP face share: its settings, its clock, and the tables of what is under way.

It lies below the face and below what answers a request, so that neither has to know the face.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
import trio

from trimcp.budget import Amount, Budget
from trimcp.security import security_event
from trimcp.transports.http.deadlines import Deadline, DeadlineQueue, Deadlines
from trimcp.transports.http.events.store import EventStore, MemoryEvents
from trimcp.transports.http.routing import Routing
from trimcp.transports.http.seams import Head, HttpResponse, Service, refusal
from trimcp.transports.http.sessions import HttpSession, new_session_id
from trimcp.transports.http.settings import HttpSettings
from trimcp.transports.http.shares import Table
from trimcp.transports.http.streams import OpenStreams, SessionEvents
from trimcp.transports.trace import Tracer
from trimcp.wire.jsonrpc import Message, scan_id

__all__ = ["Shared"]

_FOR_EVENTS: Final = 4  # the part of all memory, as a divisor, that events kept for clients that come back may take
_SWEEP: Final = 30.0


@attrs.define(eq=False)
class Shared:
    """What all requests of one face share.

    Args:
        service: what is served.
        settings: how.

    Attributes:
        budget: counts what all peers make us keep.
        events: keeps events for clients that come back, or None.
        deadlines: the clock; somebody runs it.
        silent: exchanges that are not answered yet and shall not be silent for too long.
        open_streams: the streams that are being read.
        sessions: of Streamable HTTP, until 2025-11-25.
        routing: says what to do with a POST.
        exchanges: POSTs that are not answered yet.
        draining: whether no more work is taken.
    """

    service: Service
    settings: HttpSettings
    budget: Budget = attrs.field(init=False)
    events: EventStore | None = attrs.field(init=False)
    deadlines: Deadlines = attrs.field(init=False, factory=Deadlines)
    silent: DeadlineQueue = attrs.field(init=False)
    open_streams: OpenStreams = attrs.field(init=False)
    sessions: Table[HttpSession] = attrs.field(init=False)
    routing: Routing = attrs.field(init=False)
    exchanges: int = attrs.field(init=False, default=0)
    draining: bool = attrs.field(init=False, default=False)
    _tracer: Tracer | None = attrs.field(init=False)
    _sweep: Deadline = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        settings, deadlines = self.settings, self.deadlines
        self.budget = self.service.budget
        self.events = settings.events
        if self.events is None and settings.resumable:
            self.events = MemoryEvents(max_total_bytes=self.budget.bound // _FOR_EVENTS)
        self._tracer = None if settings.trace is None else Tracer(settings.trace)
        self._sweep = deadlines.new(self._look)
        self.silent = DeadlineQueue(deadlines, settings.silence)
        self.open_streams = OpenStreams(deadlines, settings.keep_alive, settings.stream_buffer, self._tracer)
        self.sessions = Table("session", settings.max_sessions)
        self.routing = Routing.of(self.service.revisions, stateless=settings.stateless)

    def show(self, direction: str, message: Message | bytes) -> None:
        """Show a message to whoever traces."""
        if self._tracer is not None:
            self._tracer.note(direction, message)

    def too_large(
        self, head: Head, principal: str | None, headers: Sequence[tuple[str, str]], beginning: bytes
    ) -> HttpResponse:
        """Refuse a message beyond the limit, by the id of its request if that can be read in its beginning."""
        most = self.service.max_message
        security_event("oversize", most=most, peer=head.peer, principal=principal)
        text = f"a message may have {most} bytes"
        return refusal(413, text, *headers, id=scan_id(beginning), data={"reason": "size"})

    # Sessions

    def new_session(self, principal: str | None, owner: str) -> HttpSession:
        """Return a new session in this owner's share, which is found by its id once it was added."""
        id, holding = new_session_id(), self.budget.holding(owner)
        events = None if self.events is None else SessionEvents(self.events, id, Amount(holding))
        session = HttpSession(
            self.sessions, id, principal, owner, self.settings, self.open_streams, events, holding=holding
        )
        session.attach(self.service.open(session, holding, self.sessions))
        return session

    def add(self, session: HttpSession) -> None:
        """Let a session be found, and end it when it was idle for too long."""
        self.sessions.add(session)
        if not self._sweep.is_set:
            self._sweep.set(min(_SWEEP, self.settings.session_idle))

    def _look(self) -> None:
        """End sessions that are idle for too long, and forget streams that nobody will ask for."""
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
