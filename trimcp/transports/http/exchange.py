"""One POST and its answer: when it is JSON, when it becomes a stream, and what a disconnect means.

An exchange is the road of everything that belongs to its request. The answer is JSON until there is something to say
before it; then the response becomes a stream of events. Until 2025-11-25 the stream belongs to a session and the call
goes on without its reader; since 2026-07-28 the reader's leaving cancels it, as `Revision.disconnect_cancels` says.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Final

import attrs

from trimcp.channel import Kind, LaneCounts, Outgoing, Sink, lane_of
from trimcp.errors import LocalError
from trimcp.framing.sse import encode_event
from trimcp.security import security_event
from trimcp.transports.http.model import Head, Reply, Response
from trimcp.transports.http.streams import SSE_HEADERS, EventStream
from trimcp.wire.codes import ERRORS, INVALID_REQUEST
from trimcp.wire.jsonrpc import RequestId, encode_error, scan_id

if TYPE_CHECKING:
    from trimcp.transports.http.app import HttpFace
    from trimcp.transports.http.service import PushedSession
    from trimcp.transports.http.sessions import HttpSession

__all__ = ["JSON_HEADERS", "Exchange"]

JSON_HEADERS: Final = (("Content-Type", "application/json"),)


@attrs.define(eq=False)
class Exchange:
    """One POST, from its head to the end of its response. A `Handler` to the host, a `Sink` to its session.

    Args:
        face: what it came in by.
        head: the request's.
        principal: who asks.
        json: whether the client takes JSON.
        sse: whether it takes events.

    Attributes:
        answered: whether the response has ended, or is owed no more.
        headers: of the response, beside the content's type.
        session: the legacy session it came in for, or None.
        own: the session that was made for this exchange alone, or None.
        statuses: whether errors have the HTTP status of the specification's table, as clients since 2026-07-28 read it.
        malformed: whether the body was no message, or may be none: an error then has its status in every revision.
        always_streams: whether the answer is nothing without what comes before it.
        awaited: requests in the body that are not answered yet.
        opening: whether it is the `initialize` of a session that is not in the table yet.
    """

    face: HttpFace
    head: Head
    principal: str | None
    json: bool
    sse: bool
    answered: bool = attrs.field(init=False, default=False)
    headers: tuple[tuple[str, str], ...] = attrs.field(init=False, default=())
    session: HttpSession | None = attrs.field(init=False, default=None)
    own: PushedSession | None = attrs.field(init=False, default=None)
    statuses: bool = attrs.field(init=False, default=False)
    malformed: bool = attrs.field(init=False, default=False)
    always_streams: bool = attrs.field(init=False, default=False)
    awaited: int = attrs.field(init=False, default=0)
    opening: bool = attrs.field(init=False, default=False)
    _reply: Reply | None = attrs.field(init=False, default=None)
    _stream: EventStream | None = attrs.field(init=False, default=None)
    _gone: bool = attrs.field(init=False, default=False)

    # For the host

    @property
    def max_body(self) -> int:
        """Bytes of the largest message."""
        return self.face.settings.max_message

    def start(self, body: bytes, reply: Reply) -> None:
        """Take the message and begin to work on it."""
        self._reply = reply
        self.face.take(self, body)

    def too_large(self, beginning: bytes) -> Response:
        """Refuse a body beyond the limit, by the id of its request if that can be read."""
        self.answered = True
        security_event("oversize", most=self.max_body, peer=self.head.peer, principal=self.principal)
        text = f"a message may have {self.max_body} bytes"
        body = encode_error(scan_id(beginning), INVALID_REQUEST, text, {"reason": "size"})
        return Response(413, (*JSON_HEADERS, *self.headers), body)

    def disconnected(self, slow: str | None = None) -> None:
        """Cancel the request, or let it go on without its reader, as its revision wants."""
        self._gone = True
        stream = self._stream
        if stream is not None and stream.reply is self._reply:  # else another connection has taken it up
            stream.detach()
            self.face.ticker.unwatch(stream)
        own, self.own = self.own, None
        if own is not None and not self.answered:
            self._end()
            own.disconnect(slow or "the client closed its request", slow=slow is not None)

    def writable(self) -> None:
        """Write what was held back for a slow reader."""
        if self._stream is not None:
            self._stream.writable()

    # For the session

    @property
    def name(self) -> str:
        """What to call it in a log."""
        return "POST"

    @property
    def client(self) -> str:
        """The client's address, without the port."""
        return self.head.peer.rpartition(":")[0]

    @property
    def sink(self) -> Sink:
        """Itself: the road of all that belongs to its request."""
        return self

    @property
    def full(self) -> bool:
        """Whether its reader is behind."""
        return self._stream is not None and self._stream.full

    async def room(self) -> None:
        """Wait for its reader, and for no other."""
        if self._stream is not None:
            await self._stream.room()

    def post(self, outgoing: Outgoing) -> None:
        """Send a message that belongs to this request; the answer ends it."""
        if outgoing.kind is Kind.REPLY:
            self._answer(outgoing)
            return
        stream = self._stream if not self.answered and self._streaming() else None
        asks = outgoing.kind is Kind.REQUEST
        if stream is not None and (stream.read or stream.journal is not None or not asks):
            stream.send(outgoing)
        elif asks:
            raise LocalError("the client cannot be asked: the response to its request is no stream that is being read")
        else:
            self._drop(outgoing)

    def post_latest(self, key: Hashable, outgoing: Outgoing) -> None:
        """Send a message, or keep it while the reader is behind."""
        if not self.answered and self._streaming():
            assert self._stream is not None
            self._stream.send_latest(key, outgoing)
        else:
            self._drop(outgoing)

    def _drop(self, outgoing: Outgoing) -> None:
        """Count what nobody can be told: the client wants no stream, or it is over."""
        counts = self._counts
        if counts is not None:
            counts.drop(lane_of(outgoing))

    @property
    def _counts(self) -> LaneCounts | None:
        session, own = self.session, self.own
        if session is not None:
            return session.pushed.counts
        return None if own is None else own.counts

    def settle_latest(self, key: Hashable, *, keep: bool) -> None:
        """Send what was kept back, or drop it."""
        if self._stream is not None:
            self._stream.settle_latest(key, keep=keep)

    def withdraw(self, request_id: RequestId) -> bool:
        """Return False: what was posted has left."""
        return False

    def unanswered(self, request_id: RequestId) -> None:
        """End the response without an answer, once nothing else in the body waits for one."""
        self.awaited -= 1
        if self.awaited > 0 or self.answered:
            return
        stream, reply = self._stream, self._reply
        self._end()
        if stream is not None:
            self._close_stream(stream, None)
        elif not self._gone and reply is not None:
            reply.send(Response(200, (*SSE_HEADERS, *self.headers)))

    def release(self) -> None:
        """Let the client's connection go, if it can come back for the rest of the stream."""
        session = self.session
        if session is None or self.answered or not session.can_poll or not self._streaming():
            return
        stream = self._stream
        assert stream is not None
        stream.release(self.face.settings.retry)
        self.face.ticker.unwatch(stream)

    def close(self) -> None:
        """Do nothing: it ends with its answer."""

    def waiting(self) -> tuple[Sequence[Outgoing], int]:
        """Return what is held back for the reader, and the bytes that it has not taken."""
        return ((), 0) if self._stream is None else self._stream.waiting()

    # Its own

    def accepted(self) -> None:
        """Answer that nothing will be answered: there was no request in the body."""
        if not self.answered:
            self.refuse(Response(202, self.headers))

    def refuse(self, response: Response) -> None:
        """Send this response instead of any other."""
        if response.body:
            self.face.show("-->", response.body)
        reply = self._reply
        self._end()
        if reply is not None:
            reply.send(response)

    def grow_impatient(self) -> None:
        """Become a stream, since nothing was said for so long."""
        if not self.answered and not self._gone:
            self._streaming()

    def _streaming(self) -> bool:
        """Return whether the response is a stream, after having made it one if that can be."""
        if self._stream is not None:
            return True
        reply = self._reply
        if self._gone or reply is None or not self.sse:
            return False
        if self.face.settings.reply == "json" and not self.always_streams:
            return False
        session = self.session
        self._stream = self.face.new_stream() if session is None else session.new_stream()
        self._stream.counts = self._counts
        self._stream.open(reply, self.headers, self._prime(self._stream))
        self.face.ticker.watch(self._stream)
        return True

    def _prime(self, stream: EventStream) -> bytes:
        session = self.session
        if session is None or not session.can_poll:
            return b""
        return stream.prime(self.face.settings.retry)

    def _answer(self, outgoing: Outgoing) -> None:
        if self.answered:
            return
        if outgoing.request_id is not None:
            self.awaited -= 1
        last = outgoing.request_id is None or self.awaited <= 0
        stream, reply = self._stream, self._reply
        if stream is not None and not last:
            stream.send(outgoing)
            return
        if self.opening:
            self._open(outgoing.error)
        self._end(outgoing.error)
        if stream is not None:
            self._close_stream(stream, outgoing.data)
        elif not self._gone and reply is not None:
            reply.send(self._whole(outgoing))

    def _open(self, error: int | None) -> None:
        """Let the new session be found from now on, and tell the client its id."""
        session = self.session
        assert session is not None
        if error is None:
            self.face.sessions.add(session)
            self.headers = (*self.headers, ("Mcp-Session-Id", session.id))
        else:
            session.pushed.close()

    def _close_stream(self, stream: EventStream, data: bytes | None) -> None:
        delivered = stream.read  # maybe by another connection than the one it began on
        stream.end(data)
        self.face.ticker.unwatch(stream)
        if self.session is not None:
            self.session.stream_ended(stream, delivered=delivered)

    def _whole(self, outgoing: Outgoing) -> Response:
        """Return a response that says all there is to say, in one write."""
        status = 200
        if outgoing.error is not None and (self.statuses or self.malformed):
            kind = ERRORS.get(outgoing.error)
            status = 200 if kind is None else kind.http_status
        headers = self.headers
        if status == 503:
            headers = (*headers, ("Retry-After", outgoing.headers["retry-after"] if outgoing.headers else "1"))
        as_event = self.sse and (self.face.settings.reply == "sse" or not self.json)
        if not as_event or status != 200:
            self.face.show("-->", outgoing.data)
            return Response(status, (*JSON_HEADERS, *headers), outgoing.data)
        if self.session is not None:
            body = self.session.as_events(outgoing.data)
        else:
            self.face.show("-->", outgoing.data)
            body = encode_event(outgoing.data)
        return Response(200, (*SSE_HEADERS, *headers), body)

    def _end(self, error: int | None = None) -> None:
        """Note that nothing more is owed. What it held is let go, so that no cycle is left."""
        self.answered = True
        self._reply = None
        own, self.own = self.own, None
        session = self.session
        self.face.ended(self)
        if own is not None:
            own.close()
        if session is not None:
            session.exchange_ended(self, error)
