"""Handlers of requests to the endpoint of Streamable HTTP: a POST's exchange, a GET's stream, and a DELETE.

After its body was read, a POST gets a plan (`routing`) and a session, and its exchange becomes the sink of all messages
of its request. The response is JSON if the answer is the first message; otherwise it becomes a stream of events
(`Exchange.become_stream`). Until 2025-11-25 the stream belongs to a session, and the call goes on when its reader
disconnects. Since 2026-07-28 a disconnect cancels the call, as `Revision.disconnect_cancels` defines.
"""

from __future__ import annotations

from collections.abc import Hashable

import attrs

from trimcp.budget import owner_of
from trimcp.channel import NOWHERE, Incoming, Kind, LaneCounts, Link, Outgoing, Sink, lane_of
from trimcp.errors import LocalError
from trimcp.framing.sse import encode_event
from trimcp.security import security_event
from trimcp.support.nurseries import server_ends
from trimcp.transports.http.endpoint.routing import PostPlan, id_of
from trimcp.transports.http.interfaces import (
    JSON_HEADERS,
    Handler,
    Head,
    HttpReply,
    HttpResponse,
    PushedSession,
    refusal,
)
from trimcp.transports.http.state.sessions import HttpSession, Shared
from trimcp.transports.http.state.streams import SSE_HEADERS, EventStream, StreamSink
from trimcp.wire.codes import ERRORS, FORBIDDEN, OVERLOADED
from trimcp.wire.jsonrpc import Malformed, Message, RequestId, as_message, parse_value


@attrs.frozen
class Forms:
    """The allowed formats of a POST's response, from its headers and our settings."""

    events: bool  # whether the client accepts a stream of events
    may_stream: bool  # whether the response may become a stream
    as_event: bool  # whether an answer that is the first message is also sent as an event


@attrs.define(eq=False)
class Exchange(Handler, StreamSink):
    """A POST and its response: the request's `Handler`, then the `Sink` and `Origin` of its messages."""

    shared: Shared
    head: Head
    forms: Forms
    plan: PostPlan = attrs.field(init=False)  # set after the body was read
    session: HttpSession | None = attrs.field(init=False, default=None)  # the legacy session named by the request
    # The session made for this request alone, until it has ended.
    own: PushedSession | None = attrs.field(init=False, default=None)
    awaited: int = attrs.field(init=False, default=0)  # requests in the body that are not answered yet
    # no handler is running: before the request, or after the answer
    at_rest: bool = attrs.field(init=False, default=True)
    _reply: HttpReply | None = attrs.field(init=False, default=None)  # None once nothing more will be sent
    _stream: EventStream | None = attrs.field(init=False, default=None)
    _gone: bool = attrs.field(init=False, default=False)

    # Called by the host

    @property
    def max_body(self) -> int:
        return self.shared.service.max_message

    def start(self, body: bytes, reply: HttpReply) -> None:
        """Deliver the message to its session, or respond with the reason why there is none."""
        shared, head = self.shared, self.head
        settings = shared.settings
        limits = settings.limits
        value = parse_value(body, limits)
        if shared.second_protocol is not None:
            other = shared.second_protocol.take(head, body, value)
            if other is not None:
                reply.handler = other
                other.start(body, reply)
                return
        message = as_message(value, limits)
        if shared.tracer is not None:
            shared.show("<--", message)
        for dialect in settings.dialects:
            response = dialect(head, body)
            if response is not None:
                self._send(reply, response)
                return
        plan = shared.routing.route(head, message, events=self.forms.events)
        pushed = plan if isinstance(plan, HttpResponse) else self._find_session(plan, message)
        if isinstance(pushed, HttpResponse):
            pushed.headers = (*pushed.headers, *self.head.reply_headers)
            self._send(reply, pushed)
            return
        self._reply, self.at_rest = reply, False
        shared.exchanges += 1
        asked, own = self.awaited, self.own
        if asked and (self.forms.may_stream or self.plan.always_streams):
            shared.silent.add(self)
        pushed.deliver((Incoming(message, len(body), self, head.headers, head.principal),))
        if not asked and not self.at_rest:
            self._accept(message, own)

    def too_large(self, beginning: bytes) -> HttpResponse:
        return self.shared.too_large(self.head, beginning)

    def disconnected(self, slow: str | None = None) -> None:
        """Cancel the request, or let it go on without its reader, as its revision defines."""
        self._gone = True
        stream = self._stream
        if stream is not None and stream.reply is self._reply:  # otherwise another connection has resumed it
            stream.detach()
        own, self.own = self.own, None
        if own is not None and not self.at_rest:
            self._end()
            own.disconnect(slow or "the client closed its request", slow=slow is not None, ending=server_ends())

    def _find_session(self, plan: PostPlan, message: Message) -> PushedSession | HttpResponse:
        """Find or make the session that the plan names, or return the response that refuses it."""
        shared, head = self.shared, self.head
        sessions, place = shared.sessions, plan.place
        self.plan, self.awaited = plan, plan.awaited
        if place == "single":
            self.own = single = shared.service.open_for_one(head.holding, sessions)
            return single
        if place == "known":
            session = sessions.find(head.headers["mcp-session-id"], head.principal)
            if session is None:
                return refusal(404, "there is no such session; initialize anew", id=id_of(message))
            if plan.awaited and session.fresh:
                sessions.use(session)
        elif place == "new":
            owner = owner_of(head.principal, head.peer)
            if shared.draining or not sessions.has_room(owner):
                if not shared.draining:
                    security_event("flood_refused", what="sessions", peer=head.peer, owner=owner)
                return refusal(503, "no more sessions now; try again later", id=id_of(message), code=OVERLOADED)
            session = shared.make_session(shared, head.principal, owner, head.link)
        else:
            self.own = own = shared.service.open(NOWHERE, head.holding, sessions)
            if plan.revision is not None:
                own.assume(plan.revision)
            return own
        self.session = session
        return session.pushed

    def _send(self, reply: HttpReply, response: HttpResponse) -> None:
        if response.body:
            self.shared.show("-->", response.body)
        reply.send(response)

    # Called by the deadline queue

    def timed_out(self) -> None:
        """Become a stream, because nothing was sent for the time `silence`."""
        if not self.at_rest:
            self.become_stream()

    # Called by the session

    @property
    def link(self) -> Link | None:
        return self.head.link

    @property
    def name(self) -> str:
        return "POST"

    @property
    def client(self) -> str:
        return self.head.address

    @property
    def sink(self) -> Sink:
        return self

    def post(self, outgoing: Outgoing) -> None:
        """Send a message that belongs to this request; the answer ends it."""
        kind, stream = outgoing.kind, self._stream
        if kind is Kind.REPLY:
            self._answer(outgoing)
            return
        if stream is not None and kind is Kind.NOTIFICATION and not self.at_rest:  # nearly always
            stream.post(outgoing)
            return
        stream = None if self.at_rest else self.become_stream()
        asks = kind is Kind.REQUEST
        if stream is not None and (stream.read or stream.events is not None or not asks):
            stream.post(outgoing)
        elif asks:
            raise LocalError("the client cannot be asked: the response to its request is no stream that is being read")
        else:
            self._drop(outgoing)

    def post_latest(self, key: Hashable, outgoing: Outgoing) -> None:
        stream = None if self.at_rest else self.become_stream()
        if stream is not None:
            stream.post_latest(key, outgoing)
        else:
            self._drop(outgoing)

    def unanswered(self, request_id: RequestId) -> None:
        """End the response without an answer, unless another request in the body still waits for one."""
        self.awaited -= 1
        if self.awaited > 0 or self.at_rest:
            return
        stream, reply = self._stream, self._reply
        self._end()
        if stream is not None:
            self._close_stream(stream, None)
        elif not self._gone and reply is not None:
            reply.send(HttpResponse(200, (*SSE_HEADERS, *self.head.reply_headers)))

    def release(self) -> None:
        """Close the client's connection, if it can resume the stream later."""
        if self.session is not None and self.session.can_poll and not self.at_rest:
            stream = self.become_stream()
            if stream is not None:
                stream.release(self.shared.settings.retry)

    # Private

    def become_stream(self) -> EventStream | None:
        """Return the stream that the response is from now on, or None if it cannot be one."""
        if self._stream is not None:
            return self._stream
        reply, session, forms = self._reply, self.session, self.forms
        may = forms.events if self.plan.always_streams else forms.may_stream
        if self._gone or reply is None or not may:
            return None
        first = b""
        if session is None:
            stream = EventStream(self.shared.open_streams, counts=self._counts)
        else:
            stream = session.new_stream()
            if session.can_poll:
                first = stream.prime()
        self._stream = stream
        stream.open(reply, self.head.reply_headers, first)
        if self.plan.always_streams:  # an admitted call may finish after its token expires; a subscription may not
            stream.until, stream.on_lapse = self.head.until, self._lapse
        return stream

    def _answer(self, outgoing: Outgoing) -> None:
        if self.at_rest:
            return
        stream, reply = self._stream, self._reply
        if outgoing.request_id is not None:
            self.awaited -= 1
            if stream is not None and self.awaited > 0:
                stream.post(outgoing)
                return
        if self.plan.place == "new":
            self._open(outgoing.error)
        self._end()
        if stream is not None:
            self._close_stream(stream, outgoing.data)
        elif not self._gone and reply is not None:
            reply.send(self._whole(outgoing))

    def _lapse(self) -> None:
        own, self.own = self.own, None
        if own is not None and not self.at_rest:
            self._end()
            own.disconnect("the access token has expired")

    def _open(self, error: int | None) -> None:
        """Register the new session, and send its id to the client."""
        session = self.session
        assert session is not None
        if error is None:
            self.shared.add(session)
            headers = (*self.head.reply_headers, ("Mcp-Session-Id", session.id))
            self.head = attrs.evolve(self.head, reply_headers=headers)  # other requests may share the head
        else:
            session.pushed.close()

    def _close_stream(self, stream: EventStream, data: bytes | None) -> None:
        delivered = stream.read  # perhaps by another connection than the first one
        stream.end(data)
        if self.session is not None:
            self.session.stream_ended(stream, delivered=delivered)

    def _whole(self, outgoing: Outgoing) -> HttpResponse:
        """Return the complete response with an answer, to be sent in one write."""
        status, headers, data, error = 200, self.head.reply_headers, outgoing.data, outgoing.error
        if error is None:
            pass
        elif error == FORBIDDEN:
            status = 403  # in every revision, as for a token without the rights
            auth, scope = self.shared.settings.auth, (outgoing.headers or {}).get("scope")
            if auth is not None and scope:
                headers = (*headers, *auth.insufficient(scope.split()).headers)
        elif self.plan.statuses:
            kind = ERRORS.get(error)
            status = 200 if kind is None else kind.http_status
            if status == 503:
                headers = (*headers, ("Retry-After", outgoing.headers["retry-after"] if outgoing.headers else "1"))
        if self.shared.tracer is not None:
            self.shared.show("-->", data)
        if not self.forms.as_event or status != 200:
            return HttpResponse(status, (*JSON_HEADERS, *headers) if headers else JSON_HEADERS, data)
        body = encode_event(data) if self.session is None else self.session.as_events(data)
        return HttpResponse(200, (*SSE_HEADERS, *headers) if headers else SSE_HEADERS, body)

    def _accept(self, message: Message, own: PushedSession | None) -> None:
        """Respond to a message without requests, after its session has received it."""
        if type(message) is Malformed:
            data = {"reason": message.reason}
            response = refusal(400, message.message, *self.head.reply_headers, code=message.code, data=data)
            self.shared.show("-->", response.body)
        else:
            response = HttpResponse(202, self.head.reply_headers)
        self.own, reply = None, self._reply  # the session is not closed: handlers of the message go on
        self._end()
        if reply is not None:
            reply.send(response)
        if own is not None:
            own.leave()

    def _drop(self, outgoing: Outgoing) -> None:
        """Count a message that cannot be sent: the client accepts no stream, or the response is over."""
        counts = self._counts
        if counts is not None:
            counts.drop(lane_of(outgoing))

    @property
    def _counts(self) -> LaneCounts | None:
        session, own = self.session, self.own
        if session is not None:
            return session.pushed.counts
        return None if own is None else own.counts

    def _end(self) -> None:
        """Note that nothing more will be sent, and drop all references, to leave no cycle."""
        self.at_rest = True
        self._reply = None
        own, self.own = self.own, None
        shared = self.shared
        shared.exchanges -= 1
        shared.silent.remove(self)
        if own is not None:
            own.close()
        if self.session is not None:
            self.session.used = shared.deadlines.now()


@attrs.define(eq=False)
class SessionGet(Handler):
    """A GET: the stream for messages that belong to no request, or the rest of a lost stream.

    With `Last-Event-ID` it resumes the stream of that event, and no other.
    """

    session: HttpSession
    head: Head
    _stream: EventStream | None = attrs.field(init=False, default=None)
    _reply: HttpReply | None = attrs.field(init=False, default=None)

    def start(self, body: bytes, reply: HttpReply) -> None:
        session = self.session
        session.shared.sessions.use(session)
        last = self.head.headers.get("last-event-id") if session.resumable else None
        if not last:
            self._stream, self._reply = session.listen(reply, self.head.reply_headers), reply
            self._stream.until = self.head.until
            return
        found = session.find_stream(last)
        if found is None:
            reply.send(
                refusal(400, "the events after this Last-Event-ID are not kept (any more)", *self.head.reply_headers)
            )
            return
        stream, after = found
        was_over = stream.ended
        stream.resume(reply, self.head.reply_headers, after)
        if was_over:
            session.stream_ended(stream, delivered=True)
        else:
            self._stream, self._reply = stream, reply
            stream.until = self.head.until

    def disconnected(self, slow: str | None = None) -> None:
        if self._stream is not None and self._stream.reply is self._reply:
            self._stream.detach()

    def writable(self) -> None:
        if self._stream is not None and self._stream.reply is self._reply:
            self._stream.writable()


@attrs.define(eq=False)
class SessionDelete(Handler):
    """A DELETE: the client ends its session."""

    session: HttpSession
    head: Head

    def start(self, body: bytes, reply: HttpReply) -> None:
        self.session.end("the client ended its session")
        reply.send(HttpResponse(200, self.head.reply_headers))
