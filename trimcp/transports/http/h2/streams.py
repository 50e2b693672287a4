"""One request of HTTP/2 on a server: its body, its response, or its two directions.

It is the `HttpReply` of a handler, or carries the bytes of a `ByteStream`. What waits for the peer to read is kept here
and weighed; it is dropped with the stream. A stream that holds much has an account of its own in the budget, so that it
gives way alone.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from email.utils import formatdate
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import trio

from trimcp.budget import LARGE, Amount, Holding
from trimcp.cleaning import log_crash
from trimcp.framing.gathering import Gathered
from trimcp.transports.http.h1.parser import RequestRefused, read_target
from trimcp.transports.http.h2.engine import Http2Stream
from trimcp.transports.http.h2.frames import Code
from trimcp.transports.http.h2.heads import RequestFields, write_block
from trimcp.transports.http.seams import Admitted, Handler, Head, HttpResponse, Tunnel, Upgrade, stalled

if TYPE_CHECKING:
    from trimcp.transports.http.h2.connection import H2Connection
    from trimcp.transports.http.h2.tunnels import TunnelStream

log: logging.Logger = logging.getLogger("trimcp.http")

STREAM_COST: Final = 3 * 1024
"""Bytes that a stream takes, beside its head and its body."""

_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"})
_BODILESS: Final = frozenset({204, 304})
_BEGINNING: Final = 64 * 1024  # bytes of a body that is too large, which are searched for its id
_SMALL: Final = 16 * 1024  # bytes that are sent at once if the windows let it
_DROPPED: Final = 16 * 1024 * 1024  # bytes of a body that come after the response, at most
_CONTINUE: Final = write_block(((":status", "100"),))
_WEBSOCKET_KEY: Final = "AAAAAAAAAAAAAAAAAAAAAA=="  # HTTP/2 needs none (RFC 8441 section 5), the front asks for one


class RequestStream(Http2Stream):
    """One request. An `HttpReply` to its handler, a `Holder` to the budget.

    Attributes:
        fields: its head, as it was sent.
        head: as the front knows it; None before it was looked at.
        handler: answers it, or None.
        status: of the response, once it has begun.
        sent: bytes of the response's body that were given to the connection.
        ended: whether the response is complete, though parts of it may still wait here.
        weight: bytes that count for it in its connection's account.
        due: when its body has to be complete, on Trio's clock.
    """

    __slots__ = (
        *(
            "_amount",
            "_bodiless",
            "_body",
            "_connection",
            "_dropping",
            "_end",
            "_first",
            "_judged",
            "_own",
            "_queue",
            "_queued",
        ),
        *(
            "_room",
            "_size",
            "_stalls_at",
            "_started",
            "_trailers",
            "_tunnel",
            "due",
            "ended",
            "fields",
            "handler",
            "head",
            "sent",
        ),
        *("status", "weight"),
    )

    def __init__(self, connection: H2Connection, fields: RequestFields, weight: int) -> None:
        super().__init__()
        self.fields = fields
        self.weight = weight
        self.head: Head | None = None
        self.handler: Handler | None = None
        self.status = 0
        self.sent = 0
        self.ended = False
        self.due = math.inf
        self._connection: H2Connection | None = connection
        self._started = False  # whether the handler was
        self._judged = False  # whether the front has answered for its head
        self._first: bytes | None = None  # the body, as long as it is one piece
        self._body: Gathered | None = None
        self._size = 0  # bytes of the body that have arrived
        self._queue: deque[bytes | memoryview] | None = None  # of the response, what could not be sent yet
        self._queued = 0
        self._end = False  # whether the last byte of the body is in the queue
        self._trailers: bytes | None = None
        self._bodiless = False
        self._room: trio.lowlevel.ParkingLot | None = None
        self._stalls_at = math.inf
        self._own: Holding | None = None
        self._amount: Amount | None = None
        self._tunnel: TunnelStream | None = None
        self._dropping: H2Connection | None = None  # whose account is closed: it was answered before its body was there

    # The request

    def begin(self) -> None:
        """Look at the head: the front is asked, unless it has answered for an equal head."""
        connection = self._connection
        assert connection is not None
        known = self.fields.kept
        if known is not None:
            handler = known.again(known)
            if handler is not None:
                self.head = known
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

    def _read_head(self, connection: H2Connection) -> Head | HttpResponse:
        fields, limits = self.fields, connection.hosting.limits
        if fields.size > limits.max_head or fields.number > limits.max_headers:
            return HttpResponse(431)
        method, headers = fields.method, fields.headers
        websocket = method == "CONNECT" and fields.protocol == "websocket"
        if websocket:
            method, headers = "GET", {**headers, "sec-websocket-key": _WEBSOCKET_KEY}
        if method not in _METHODS:
            return HttpResponse(501)
        if len(fields.path) > limits.max_request_line:
            return HttpResponse(414)
        try:
            path, query = read_target(method, fields.path, headers)
        except RequestRefused as refusal:
            return HttpResponse(refusal.status)
        self._own = connection.holding.budget.holding(connection.owner, self)
        return connection.head(self._own, method=method, path=path, query=query, headers=headers, websocket=websocket)

    async def _admit(self, connection: H2Connection, head: Head) -> None:
        admitted: Admitted
        try:
            admitted = await connection.hosting.face.admit(head)
        except Exception as error:  # the request is refused
            log_crash(log, error, "judging a request from %s crashed", head.peer)
            admitted = HttpResponse(500)
        if self._connection is None:
            return  # it was given up meanwhile
        if isinstance(admitted, HttpResponse):
            self._judged = True
            self.send(admitted)
        elif isinstance(admitted, Upgrade | Tunnel):
            from trimcp.transports.http.h2.tunnels import serve_tunnel

            await serve_tunnel(self, connection, head, admitted)
        else:
            if head.again is not None and self.fields.kept is None:
                # What is equal may share the head, and then counts for its connection. What holds much has its own.
                head.holding, self.fields.kept = connection.holding, head
            self._take(admitted)

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
        if self._size + (self.left or 0) > handler.max_body:
            self._refuse_body(handler)
        elif not self.receives:
            self._complete()
        else:
            if self.fields.headers.get("expect", "").lower() == "100-continue":
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
        if handler is not None and self._size > handler.max_body:
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

    @property
    def is_large(self) -> bool:
        """Whether much of a body has arrived, and not its end."""
        return self._size >= LARGE

    def _drop_no_more(self, connection: H2Connection) -> None:
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
        self._first = self._body = None
        self._size = 0
        return (first or b"") if body is None else body.take()

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

    def _refuse_body(self, handler: Handler) -> None:
        self.handler = None
        self._refuse(handler.too_large(self._taken()[:_BEGINNING]))

    def _refuse(self, response: HttpResponse) -> None:
        """Answer in place of the handler, and take nothing more."""
        handler, self.handler = self.handler, None
        if handler is not None:
            response = handler.refused(response)
        self._taken()
        self._unweigh()
        self.send(response)

    # The reply

    def send(self, response: HttpResponse) -> None:
        connection, body = self._connection, response.body
        if connection is None or self.status:
            return
        trailers = response.trailers
        bodiless = not body or self._is_bodiless(response.status)
        block = self._block(response, len(body) if not trailers and (body or self._bodiless) else None)
        if bodiless:
            self.ended = True
            if trailers:
                self._send_head(block, end=False)
                self._send_head(write_block(trailers), end=True)
            else:
                self._send_head(block, end=True)
            self._finished()
            return
        connection.engine.send_head(self, block, end=False)  # written together with what follows
        self.finish(body, trailers)

    def start(self, response: HttpResponse) -> None:
        if self._connection is None or self.status:
            return
        self._is_bodiless(response.status)
        self._send_head(self._block(response, None), end=False)
        if response.body:
            self.write(response.body)

    def write(self, data: bytes) -> None:
        """Send more of the body: at once, or with other pieces in this turn of Trio's loop."""
        if self._connection is None or not self.status or self.ended or self._bodiless or not data:
            return
        self.sent += len(data)
        if self._sends_at_once(data, end=False):
            self._connection.wrote(self)
        else:
            self._enqueue(data)

    def finish(self, data: bytes = b"", trailers: tuple[tuple[str, str], ...] = ()) -> None:
        if self._connection is None or not self.status or self.ended:
            return
        self.ended = self._end = True
        if self._room is not None:
            self._room.unpark_all()
        if self._bodiless:
            data = b""
        self.sent += len(data)
        if trailers:
            self._trailers = write_block(trailers)
        if self._sends_at_once(data, end=not trailers):
            self._end = False
            if self._trailers is not None:
                self._connection.engine.send_head(self, self._trailers, end=True)
            self._connection.flush()
            self._finished()
        else:
            self._enqueue(data)

    def abort(self) -> None:
        connection = self._connection
        if connection is not None and not self.ended:
            self.ended = True
            self.handler = None
            connection.engine.reset(self, Code.INTERNAL_ERROR)
            connection.flush()
            self._finished()

    @property
    def waiting(self) -> int:
        connection = self._connection
        return 0 if connection is None else self._queued + connection.writer.waiting

    @property
    def gone(self) -> bool:
        return self.ended or self._connection is None

    async def room(self) -> None:
        while (connection := self._connection) is not None and not self.ended:
            if self._queued <= connection.hosting.limits.low_water:
                await connection.writer.room()
                return
            if self._room is None:
                self._room = trio.lowlevel.ParkingLot()
            await self._room.park()

    def _is_bodiless(self, status: int) -> bool:
        self.status = status
        self._bodiless = status in _BODILESS or self.fields.method == "HEAD"
        return self._bodiless

    def _block(self, response: HttpResponse, length: int | None) -> bytes:
        self.status = response.status
        now = int(time.time())
        try:
            return response_block(now, response.status, response.headers, length)
        except ValueError as error:  # the body is sent without these headers
            log_crash(log, error, "the headers of a response with status %d cannot be sent", response.status)
            return response_block(now, response.status, (), length)

    def _send_head(self, block: bytes, *, end: bool) -> None:
        connection = self._connection
        if connection is not None:
            connection.engine.send_head(self, block, end=end)
            connection.flush()

    # What waits for the peer

    @property
    def has_unsent(self) -> bool:
        return self._queued > 0 or self._end

    def _sends_at_once(self, data: bytes, *, end: bool) -> bool:
        """Give everything to the engine, and return True, if nothing waits and the windows let it."""
        connection, size = self._connection, len(data)
        if connection is None or self._queued or size > _SMALL or size > self.send_window or connection.full:
            return False
        engine = connection.engine
        if size > engine.send_window:
            return False
        engine.send_data(self, data, end=end)
        return True

    def _enqueue(self, data: bytes) -> None:
        connection = self._connection
        if connection is None:
            return
        queue = self._queue
        if queue is None:
            queue = self._queue = deque()
        if data:
            queue.append(data)
            self._queued += len(data)
        connection.push(self)
        if self._queued:
            self._weigh()
            if self._stalls_at == math.inf:
                self._stalls_at = trio.current_time() + connection.hosting.limits.stall_timeout

    def send_some(self, most: int) -> int:
        """Give the connection so many bytes as the windows let; return how many these were, at least 1 at the end."""
        connection, queue = self._connection, self._queue
        if connection is None or queue is None:
            return 0
        engine, sent = connection.engine, 0
        while queue and sent < most:
            data = queue[0]
            if len(queue) > 1 and len(data) < 1_024:  # pieces of a burst share a frame
                data = b"".join(queue) if self._queued <= most else data
                if len(data) == self._queued:
                    queue.clear()
                    queue.append(data)
            if len(data) > most - sent:
                data = memoryview(data)[: most - sent]
            last = self._end and self._trailers is None and len(data) == self._queued
            taken = engine.send_data(self, data, end=last)
            if not taken:
                break
            sent += taken
            self._queued -= taken
            if taken == len(queue[0]):
                queue.popleft()
            else:
                queue[0] = memoryview(queue[0])[taken:]
        if sent:
            self._stalls_at = (
                trio.current_time() + connection.hosting.limits.stall_timeout if self._queued else math.inf
            )
            if self._amount is not None:
                self._weigh()
        if not self._queued and self._end:
            self._end = False
            if self._trailers is not None:
                engine.send_head(self, self._trailers, end=True)
            elif self.sends:
                engine.send_data(self, b"", end=True)
            self._finished()
            return max(sent, 1)
        if self._room is not None and self._queued <= connection.hosting.limits.low_water:
            self._room.unpark_all()
        return sent

    def writable(self) -> None:
        """Tell the handler that the socket has taken everything."""
        handler, tunnel = self.handler, self._tunnel
        if tunnel is not None:
            tunnel.writable()
        elif handler is not None and not self.ended:
            handler.writable()

    def window_opened(self) -> None:
        if self.has_unsent and self._connection is not None:
            self._connection.push(self)

    # The budget

    def _holding(self) -> Holding:
        """Return the account that large things are counted in: its own."""
        connection, head = self._connection, self.head
        assert connection is not None
        if self._own is None:
            self._own = connection.holding.budget.holding(connection.holding.owner.name, self)
        if head is not None and head.principal is not None and head.holding is not self._own:
            self._own.move(f"principal {head.principal}")
        return self._own

    def _weigh(self) -> None:
        size = self._size + self._queued
        if self._amount is None:
            if size < LARGE:
                return
            self._amount = Amount(self._holding())
        self._amount.set(size)

    def _unweigh(self) -> None:
        if self._amount is not None:
            self._amount.set(0)

    @property
    def at_rest(self) -> bool:
        handler = self.handler
        return handler is None or self.ended or handler.at_rest

    def give_way(self, why: str) -> None:
        connection = self._connection
        if connection is not None:
            log.debug("a request from %s gives way: %s", connection.peer, why)
            connection.engine.reset(self, Code.ENHANCE_YOUR_CALM)
            connection.flush()
            self.give_up("gave way", why)

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
        if self in connection.receiving:
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
        if not self.ended:
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
            connection.hosting.face.done(head, self.status, sent)

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
            connection.hosting.face.done(head, self.status, self.sent)

    def _detach(self, connection: H2Connection) -> None:
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


@lru_cache(maxsize=256)  # within one second most responses begin alike
def response_block(now: int, status: int, headers: tuple[tuple[str, str], ...], length: int | None) -> bytes:
    """Return the block of a response's head. Raises ValueError if a header cannot be sent."""
    fields = [(":status", str(status)), ("date", _date(now))]
    fields += [(name.lower(), value) for name, value in headers]
    if length is not None and status not in _BODILESS:
        fields.append(("content-length", str(length)))
    return write_block(fields)


@lru_cache(maxsize=1)
def _date(now: int) -> str:
    return formatdate(now, usegmt=True)
