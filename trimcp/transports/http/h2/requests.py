"""One request of HTTP/2 on a server: what the front says of its head, its body, its time, and how it ends."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Final

import trio

from trimcp.budget import LARGE, owner_of
from trimcp.framing.gathering import Gathered
from trimcp.support.cleaning import log_crash
from trimcp.transports.http.h1.parser import METHODS, RequestRefused, read_target
from trimcp.transports.http.h2.frames import Code
from trimcp.transports.http.h2.heads import RequestFields, write_block
from trimcp.transports.http.h2.replies import ReplyStream, StreamOwner
from trimcp.transports.http.interfaces import Admitted, Handler, Head, HttpResponse, Tunnel, Upgrade, stalled

if TYPE_CHECKING:
    from trimcp.transports.http.h2.tunnels import TunnelStream

log: logging.Logger = logging.getLogger("trimcp.http")

STREAM_COST: Final = 3 * 1024
"""Bytes that a stream takes, beside its head and its body."""

_BEGINNING: Final = 64 * 1024  # bytes of a body that is too large, which are searched for its id
_DROPPED: Final = 16 * 1024 * 1024  # bytes of a body that come after the response, at most
_CONTINUE: Final = write_block(((":status", "100"),))
_WEBSOCKET_KEY: Final = "AAAAAAAAAAAAAAAAAAAAAA=="  # HTTP/2 needs none (RFC 8441 section 5), the front asks for one


class RequestStream(ReplyStream):
    """One request. An `Evictable` to the budget.

    It has more than 300 lines because the head, the body and the end of a request decide about the same response.
    """

    __slots__ = ("_body", "_dropping", "_first", "_judged", "_started", "_tunnel", "due")

    def __init__(self, connection: StreamOwner, fields: RequestFields, weight: int) -> None:
        super().__init__(connection, fields, weight)
        self.due: float = math.inf  # when its body has to be complete, on Trio's clock
        self._started = False  # whether the handler was
        self._judged = False  # whether the front has answered for its head
        self._first: bytes | None = None  # the body, as long as it is one piece
        self._body: Gathered | None = None
        self._tunnel: TunnelStream | None = None
        self._dropping: StreamOwner | None = None  # its connection, if it was answered before its body was there

    # The request

    def begin(self) -> None:
        """Look at the head: the front is asked, unless it has answered for an equal head."""
        connection = self._connection
        assert connection is not None
        fields = self.fields
        known: Head | None = (fields.shared or fields).kept
        again = None if known is None else known.again
        if known is not None and again is not None:
            if fields.shared is not None:
                known = known.with_headers(fields.headers)
            handler = again(known)
            if handler is not None:
                self.head: Head | None = known
                if known.principal is None or self._counts_for(known):
                    self._take(handler)
                return
        head = self._read_head(connection)
        if isinstance(head, HttpResponse):
            self.head = Head("", "")
            self._judged = True
            self.send(head)
            return
        self.head = head
        connection.hosting.nursery.start_soon(self._admit, connection, head)

    def _read_head(self, connection: StreamOwner) -> Head | HttpResponse:
        fields, limits = self.fields, connection.hosting.limits
        if fields.size > limits.max_head or fields.number > limits.max_headers:
            return HttpResponse(431)
        method, headers = fields.method, fields.headers
        if method == "CONNECT" and fields.protocol == "websocket":
            method, headers = "GET", {**headers, "sec-websocket-key": _WEBSOCKET_KEY}
        if method not in METHODS:
            return HttpResponse(501)
        if len(fields.path) > limits.max_request_line:
            return HttpResponse(414)
        self._own = connection.holding.budget.holding(connection.owner, self)
        try:
            path, query = read_target(method, fields.path, headers)
        except RequestRefused as refusal:
            return HttpResponse(refusal.status)
        return Head(
            *(method, path, query, headers, connection.peer, connection.loopback, connection.secure),
            certificate=connection.wire.certificate if connection.secure else None,
            websocket=fields.protocol is not None,
            http2=True,
            holding=self._own,
        )

    async def _admit(self, connection: StreamOwner, head: Head) -> None:
        admitted: Admitted
        try:
            admitted = await connection.hosting.application.admit(head)
        except Exception as error:  # the request is refused
            log_crash(log, error, "judging a request from %s crashed", head.peer)
            admitted = HttpResponse(500)
        if self._connection is None or not (head.principal is None or self._counts_for(head)):
            return  # it was given up meanwhile, or is now
        if isinstance(admitted, HttpResponse):
            self._judged = True
            self.send(admitted)
        elif isinstance(admitted, Upgrade | Tunnel):
            from trimcp.transports.http.h2.tunnels import TunnelStream, serve_tunnel

            tunnel = TunnelStream(self, connection)
            self.into_tunnel(tunnel)
            await serve_tunnel(tunnel, connection.hosting, head, admitted)
        else:
            fields = self.fields.shared or self.fields
            if head.again is not None and fields.kept is None:
                # What is equal may share the head, and then counts for its connection. What holds much has its own.
                head.holding = connection.holding
                fields.kept = head if fields is self.fields else head.with_headers(fields.headers)
            self._take(admitted)

    def _counts_for(self, head: Head) -> bool:
        """Count it in its caller's share of all streams, not in that of an address that others have, too."""
        connection, owner = self._connection, owner_of(head.principal, head.peer)
        assert connection is not None
        streams = connection.hosting.streams
        if not streams.admit(owner):
            self.evict("its caller has too many", Code.REFUSED_STREAM)
            return False
        streams.release(self.owner)
        self.owner = owner
        return True

    def into_tunnel(self, tunnel: TunnelStream) -> None:
        """Give what arrives to a tunnel from now on."""
        self._judged = True
        self._tunnel = tunnel
        if self._connection is not None:
            self._connection.receiving.pop(self, None)
        data = self._taken()
        if data:
            tunnel.arrived(data)
        if not self.receives:
            tunnel.peer_ended()

    def _take(self, handler: Handler) -> None:
        """Go on with a handler."""
        self._judged = True
        self.handler = handler
        expects = self.receives and self.fields.headers.get("expect", "").lower() == "100-continue"
        if self._size + (self.left or 0) > handler.max_body:
            if self._size or expects:  # else its beginning is waited for, which has the id of a message
                self._refuse_body(handler)
        elif not self.receives:
            self._complete()
        else:
            if expects:
                self._send_head(_CONTINUE, end=False)
            if data := self._taken():
                self.arrived(data)  # what waited for the front's answer

    def arrived(self, data: bytes) -> None:
        tunnel, connection = self._tunnel, self._connection
        if tunnel is not None:
            tunnel.arrived(data)
            return
        size = len(data)
        if connection is None or self.status:
            if (dropping := self._dropping) is not None:
                self._size += size
                dropping.engine.credit(self, size)
                if self._size > _DROPPED:
                    self._drop_no_more(dropping)
            return
        if not self._size:
            self._first = data
        else:
            if self._body is None:
                self._body = Gathered()
                if self._first is not None:
                    self._body.add(self._first)
                    self._first = None
            self._body.add(data)
        self._size += size
        if not self._judged:
            return  # it is not allowed again, so that no more than a window arrives
        handler = self.handler
        if handler is not None and self._size + (self.left or 0) > handler.max_body:
            self._refuse_body(handler)
        elif self.receives:
            self.due += size / connection.hosting.limits.body_rate
            if self._size >= LARGE:
                self._weigh()
                holding = self._holding()
                if not holding.fits(0):
                    holding.refuse("bodies")
                    self._refuse(HttpResponse(503, (("Retry-After", "1"),)))
                    return
            connection.engine.credit(self, size)
            connection.flush()

    def _drop_no_more(self, connection: StreamOwner) -> None:
        self._dropping = None
        connection.receiving.pop(self, None)
        connection.engine.reset(self, Code.NO_ERROR)  # the rest of the request is of no use (RFC 9113 section 8.1)
        connection.flush()

    def peer_ended(self) -> None:
        tunnel, connection = self._tunnel, self._connection or self._dropping
        if connection is not None:
            connection.receiving.pop(self, None)
        if tunnel is not None:
            tunnel.peer_ended()
        elif self.handler is not None and not self.status:
            self._complete()

    def _taken(self) -> bytes:
        """Return what has arrived of the body, and forget it."""
        first, body = self._first, self._body
        self._forget_body()
        return (first or b"") if body is None else body.take()

    def _forget_body(self) -> None:
        self._first = self._body = None
        self._size = 0

    def _complete(self) -> None:
        """Start the handler; a large body waits for its turn to be parsed."""
        connection = self._connection
        size = self._size
        if connection is None:
            return
        if size < LARGE:
            self._start(self._taken())
        elif (budget := connection.holding.budget).take_turn():
            self._start(self._taken())
            budget.parsed()
        else:
            connection.hosting.nursery.start_soon(self._start_in_turn, size)

    async def _start_in_turn(self, size: int) -> None:
        holding = self._holding()
        self._unweigh()  # it is counted while it waits
        budget = holding.budget
        await holding.wait_for_turn(size)
        if self._connection is not None and not self.status:
            self._start(self._taken())
        budget.parsed()

    def _start(self, body: bytes) -> None:
        if len(body) >= LARGE:
            self._part_from_equals()
        handler = self.handler
        assert handler is not None
        self._unweigh()
        self._started = True
        try:
            handler.start(body, self)
        except Exception as error:  # the request fails alone
            log_crash(log, error, "answering a request from %s crashed", "" if self.head is None else self.head.peer)
            if self.status:
                self.abort()
            else:
                self.send(HttpResponse(500))

    def _part_from_equals(self) -> None:
        """Let what is kept of a large body count in this stream's own account, not in that of all with its head."""
        head = self.head
        if head is not None and head.again is not None:
            own = self._holding()
            self.head = head = head.with_headers(head.headers)
            head.holding = own
            assert head.again is not None
            self.handler = head.again(head) or self.handler

    def _refuse_body(self, handler: Handler) -> None:
        self.handler, body = None, self._body
        beginning = (self._first or b"")[:_BEGINNING] if body is None else body.beginning(_BEGINNING)
        self._refuse(handler.too_large(beginning))

    def _refuse(self, response: HttpResponse) -> None:
        """Answer in place of the handler, and take nothing more."""
        handler, self.handler = self.handler, None
        if handler is not None:
            response = handler.refused(response)
        self._forget_body()
        self._unweigh()
        self.send(response)

    # The clock

    def look(self, now: float) -> float:
        """End what takes too long; return when to look again."""
        connection = self._connection
        if connection is None:
            if (dropping := self._dropping) is None or now < self.due:
                return self.due
            self._drop_no_more(dropping)
            return math.inf
        if now >= self._stalls_at:
            patience = connection.hosting.limits.stall_timeout
            why = stalled(connection.peer, patience, self._queued)
            connection.engine.reset(self, Code.CANCEL)
            connection.flush()
            self.give_up("read nothing", why)
            return math.inf
        if self.due < math.inf and self.receives:
            if now >= self.due:
                self.due = math.inf
                self._judged = True
                self._refuse(HttpResponse(408))
                return math.inf
            return min(self.due, self._stalls_at)
        return self._stalls_at

    # The end

    def was_reset(self, code: int, reason: str) -> None:
        self.give_up("gave up")

    def give_up(self, how: str, slow: str | None = None) -> None:
        """Drop everything: the client has left, or is being dropped. `slow` is the reason if this side ended it."""
        connection, head = self._connection, self.head
        if connection is None:
            self._dropping = None
            return
        handler = None if self.ended else self.handler
        tunnel = self._tunnel
        if slow is None and connection.writer.stalled:
            slow = stalled(connection.peer, connection.hosting.limits.stall_timeout, self._queued)
        sent = max(0, self.sent - self._queued)
        if not self.ended and tunnel is None:  # its session says so itself
            log.debug("%s %s before a response was finished", connection.peer, how)
        self._detach(connection)
        if tunnel is not None:
            tunnel.lost(slow or f"the peer {how}", slow=slow is not None)
        elif handler is not None and self._started:
            try:
                handler.disconnected(slow)
            except Exception as error:  # the others are told nevertheless
                log_crash(log, error, "giving up a request from %s crashed", connection.peer)
        if head is not None and head.method:
            connection.hosting.application.done(head, self.status, sent)

    def _finished(self) -> None:
        """Note that everything was given to the connection."""
        connection, head = self._connection, self.head
        if connection is None:
            return
        tunnel = self._tunnel
        self._detach(connection)
        if tunnel is not None:
            tunnel.finished()
        if self.receives:
            # A client that is still sending its request might not look at the response before that is done.
            self._dropping, self.due = connection, trio.current_time() + connection.hosting.limits.linger_timeout
            connection.receiving[self] = None
        if head is not None and head.method:
            connection.hosting.application.done(head, self.status, self.sent)

    def _detach(self, connection: StreamOwner) -> None:
        self._connection = None
        self.handler = self._tunnel = None
        self._first = self._body = self._queue = self._trailers = None
        self._queued = self._size = 0
        self._end = False
        self.ended = True
        if self._amount is not None:
            self._amount.set(0)
        if self._own is not None:
            self._own.close()
        if self._room is not None:
            self._room.unpark_all()
        connection.closed(self)
