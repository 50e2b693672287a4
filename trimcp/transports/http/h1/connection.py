"""One HTTP/1.1 connection: what is read when, which bodies are dropped, and how the connection ends.

One task reads all the time, also while a handler works, so it notices at once when the client leaves. Only this task
closes. Responses are written by the task that answers (`H1Writer`), so a request costs no task here.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import attrs
import trio

from trimcp.budget import LARGE, MemoryAccount, MemoryCharge, owner_of
from trimcp.framing.gathering import Gathered
from trimcp.security import security_event
from trimcp.support.cleaning import log_crash
from trimcp.support.deadlines import Deadline
from trimcp.support.slotted import slotted
from trimcp.transports.descriptors import READ_SIZE
from trimcp.transports.http.h1.hosting import Hosting
from trimcp.transports.http.h1.parser import H1Request, Http2Begins, RequestParser, RequestRefused
from trimcp.transports.http.h1.wires import Wire
from trimcp.transports.http.h1.writer import H1Reply, H1Writer, encode_head
from trimcp.transports.http.interfaces import Application, Handler, HttpResponse, Tunnel, Upgrade, stalled
from trimcp.transports.http.settings import HttpLimits

if TYPE_CHECKING:
    from trimcp.transports.http.h2.connection import H2Connection

log: logging.Logger = logging.getLogger("trimcp.http")

_DROPPED: Final = 64 * 1024  # a body up to this size is read and dropped, to keep the connection
_BODY_READ: Final = 256 * 1024  # bytes per read of a body of known length: each read costs a turn of the loop
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


@slotted
class H1Connection:
    """Serves one client. `run` is its task.

    It has more than 300 lines because one task reads, judges and answers the requests of a connection in turn.

    `wire` is closed when `run` ends; `peer`, `loopback` and `secure` are copied into every `Head`.
    """

    _hosting: Hosting
    _wire: Wire
    _peer: str = attrs.field(default="", kw_only=True, alias="peer")
    _loopback: bool = attrs.field(default=True, kw_only=True, alias="loopback")
    _secure: bool = attrs.field(default=False, kw_only=True, alias="secure")
    writer: H1Writer = attrs.field(init=False)
    _application: Application = attrs.field(init=False)
    _limits: HttpLimits = attrs.field(init=False)
    _holding: MemoryAccount = attrs.field(init=False)
    _parser: RequestParser = attrs.field(init=False)
    _deadline: Deadline = attrs.field(init=False)
    _reply: H1Reply | None = attrs.field(init=False, default=None)  # the current response
    _parked: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    _closing: bool = attrs.field(init=False, default=False)  # end after the current response
    _lost: bool = attrs.field(init=False, default=False)  # end at once: the client is gone, or is being dropped
    # the client has sent its last byte; the rest of a finished response is still sent
    _half_closed: bool = attrs.field(init=False, default=False)
    _reset: bool = attrs.field(init=False, default=False)
    _yielded: bool = attrs.field(init=False, default=True)  # whether other tasks could run since the last head
    _upgraded: trio.CancelScope | None = attrs.field(init=False, default=None)  # around a WebSocket
    _http2: H2Connection | None = attrs.field(init=False, default=None)  # once the client has begun with HTTP/2

    def __attrs_post_init__(self) -> None:
        hosting, peer = self._hosting, self._peer
        self._application, self._limits = application, limits = hosting.application, hosting.limits
        self._holding = holding = application.budget.holding(owner_of(None, peer), self)
        self._parser = RequestParser(limits, peer=peer, loopback=self._loopback, secure=self._secure, holding=holding)
        self._deadline = application.deadlines.new(self.wake)
        amount = MemoryCharge(holding)
        self.writer = H1Writer(self, self._wire, hosting.nursery, application.deadlines, limits, amount)

    async def run(self) -> None:
        """Serve until either side ends the connection. A crash ends this connection only, and is logged."""
        try:
            await self._serve()
        except Exception as error:  # a bug here or in a library, which must not end other connections
            log_crash(log, error, "serving a connection from %s crashed", self._peer)
            self._reset = True
        except BaseExceptionGroup as group:
            cancelled, crash = group.split(trio.Cancelled)
            if cancelled is None or not (crash is None or isinstance(crash, ExceptionGroup)):
                raise
            if crash is not None:
                log_crash(log, crash, "serving a connection from %s crashed", self._peer)
            raise cancelled from None
        finally:
            await self._end()

    # Called by the budget

    @property
    def at_rest(self) -> bool:
        """Whether no handler is running: a request is incomplete, or its response waits for the client to read."""
        if self._http2 is not None:
            return self._http2.at_rest
        reply = self._reply
        return reply is None or reply.ended or reply.handler is None or reply.handler.at_rest

    @property
    def idle(self) -> bool:
        """Whether no request is in progress, so that closing loses no response. False for a WebSocket."""
        if self._http2 is not None:
            return self._http2.idle
        return self.at_rest and self._upgraded is None

    def evict(self, why: str) -> None:
        log.debug("the connection from %s is cut: %s", self._peer, why)
        if self._http2 is not None:
            self._http2.evict(why)
            return
        if self._upgraded is not None:
            self._upgraded.cancel(reason=why)
            return
        self._lost = self._reset = True
        self._abandon("gave way", why)  # at once: a running handler would go on writing
        self.writer.give_up()

    # Called by the reply and the writer

    def will_close(self, request: H1Request) -> bool:
        self._closing = self._closing or self._hosting.ending or not request.keep_alive
        return self._closing

    def finishing(self) -> None:
        """Let the end of a stream leave together with that of the connection, which its head could not tell of.

        So a client or a balancer that knows of the one knows of the other before it sends another request.
        """
        if self._hosting.ending:
            self._wire.hold_back()

    def finished(self) -> None:
        """Go on to the next request, unless a part of the response still waits to be written."""
        writer = self.writer
        if not writer.waiting and not writer.broken:
            self._replied()

    def drained(self) -> None:
        """Go on to the next request, or tell the handler that it may write more."""
        reply = self._reply
        if reply is None:
            self._parked.unpark_all()
        elif reply.ended:
            self._replied()
        elif reply.handler is not None:
            reply.handler.writable()

    def _replied(self) -> None:
        reply = self._reply
        if reply is None:
            return
        self._reply = None
        if self._hosting.ending:
            self._closing = True
            self._wire.shut_write_now()
        self._deadline.set(self._limits.idle_timeout)
        if self._closing or self._parser.buffered or reply.handler is None:
            self.wake()  # otherwise the reader would go on waiting for input
        reply.detach()
        self._application.done(reply.request.head, reply.status, reply.sent)

    def wake(self) -> None:
        """Wake the reader to check what has changed: `writer.broken`, `Hosting.draining`, the end of a response."""
        if self._http2 is not None:
            self._http2.wake()
        elif self._parked:
            self._parked.unpark_all()
        else:
            self._wire.wake()

    # Requests

    async def _serve(self) -> None:
        self._deadline.set(self._limits.head_timeout)
        first = True
        try:
            while not (self._closing or self._lost):
                request = await self._next_request(first)
                if request is not None:
                    await self._take(request)
                elif self._reply is not None:
                    await self._read_on()
                first = False
        except RequestRefused as refusal:
            http2 = first and isinstance(refusal, Http2Begins)
            if not http2:
                self._refuse(refusal)
        else:
            http2 = False
        if http2:
            await self._serve_http2()
        elif not self._lost:
            self._deadline.clear()
            self._reset = not await self.writer.linger(self._parked)

    async def _next_request(self, first: bool) -> H1Request | None:
        """Return the next request, or None if the connection ends or the request is being answered already.

        The first head's time counts from accepting.
        """
        parser = self._parser
        if parser.buffered and not self._yielded:
            await trio.lowlevel.checkpoint()  # a client that pipelines must not keep other connections waiting
        timed = first
        while True:
            request = parser.next_head()
            if request is not None:
                self._deadline.clear()
                self._yielded = False
                return request
            if parser.buffered and not timed:
                timed = True
                self._deadline.set(self._limits.head_timeout)
            if not await self._more(idle=not parser.buffered) or self._reply is not None:
                return None

    async def _take(self, request: H1Request) -> None:
        try:
            if self._secure:
                request.head.certificate = self._wire.certificate
            admitted = await self._application.admit(request.head)
        except Exception as error:  # as in `run`; the request is refused
            log_crash(log, error, "judging a request from %s crashed", self._peer)
            admitted = HttpResponse(500)
        if isinstance(admitted, HttpResponse):
            await self._respond_unread(request, admitted)
        elif isinstance(admitted, Upgrade):
            await self._upgrade(request, admitted)
        elif isinstance(admitted, Tunnel):
            await self._respond_unread(request, HttpResponse(426, (("Upgrade", "h2c"),)))
        elif request.length is not None and request.length > admitted.max_body:
            await self._respond_unread(request, admitted.too_large(self._parser.next_data() or b""))
        else:
            body = b"" if request.length == 0 else await self._read_body(request, admitted)
            if body is not None:
                if (request.length or len(body)) < LARGE:
                    self._start(request, admitted, body)
                else:
                    budget = self._holding.budget
                    if not budget.take_turn():
                        await self._holding.wait_for_turn(len(body))
                        if self._lost:
                            return  # the connection was ended meanwhile
                    self._start(request, admitted, body)
                    budget.parsed()
                del body  # otherwise it would stay in memory, beside its parsed form, until the response is there
                await self._read_on()

    def _answer(self, data: bytes) -> bool:
        """Begin to answer input that is one whole request with a head like the one before, as nearly always.

        Returns False if it is anything else, or cannot be answered now; then nothing has happened.
        """
        if self._reply is not None or self._closing:
            return False
        found = self._parser.next_whole(data)
        if found is None:
            return False
        request, body = found
        head = request.head
        handler = None if head.again is None or len(body) >= LARGE else head.again(head)
        if handler is None or len(body) > handler.max_body:
            return False
        self._start(request, handler, body)
        return True

    def _start(self, request: H1Request, handler: Handler, body: bytes) -> None:
        reply = self._reply = H1Reply(self, request, handler)
        try:
            handler.start(body, reply)
        except Exception as error:  # as in `run`; the request fails alone
            log_crash(log, error, "answering a request from %s crashed", self._peer)
            if reply.status:
                reply.abort()
            else:
                reply.send(HttpResponse(500))

    async def _read_body(self, request: H1Request, handler: Handler) -> bytes | None:
        """Return the whole body, or None if the client is gone or was refused."""
        parser, holding = self._parser, self._holding
        data = parser.next_data()
        if data is not None and len(data) == request.length:
            return data
        if request.expects and data is None:
            self.writer.write(_CONTINUE)
        body, size = Gathered(), 0
        counted: MemoryCharge | None = None
        self._deadline.set(self._limits.body_timeout)
        try:
            while data != b"":
                if data is not None:
                    body.add(data)
                    size += len(data)
                    self._deadline.put_off(len(data) / self._limits.body_rate)
                    if size > handler.max_body:
                        beginning = body.beginning(READ_SIZE)
                        del body  # a dropped body is not kept while the client reads the response
                        await self._respond_unread(request, handler.too_large(beginning))
                        return None
                    if request.length is None and parser.buffered:
                        # a client that sends tiny chunks must not keep other connections waiting
                        await trio.lowlevel.checkpoint()
                else:
                    if counted is not None or size >= holding.budget.step:
                        counted = counted or MemoryCharge(holding)
                        counted.set(size)
                        if not holding.fits(0):
                            holding.refuse("bodies")
                            del body
                            raise RequestRefused(503, "too much is being received; try again later")
                    if size >= READ_SIZE:
                        await holding.budget.reads.wait(1)
                    most = READ_SIZE if request.length is None else _BODY_READ
                    if not await self._more(most):
                        return None
                data = parser.next_data()
            self._deadline.clear()
            return body.take()
        finally:
            if counted is not None:
                counted.set(0)

    async def _respond_unread(self, request: H1Request, response: HttpResponse) -> None:
        """Respond without a handler. A small body is read and dropped; after a large one the connection is closed."""
        length = request.length
        if length != 0 and (request.expects or length is None or length > _DROPPED):
            self._closing = True
        self._reply = H1Reply(self, request, None)
        self._reply.send(response)
        await self._read_on()
        if length and not (self._closing or self._lost):
            self._deadline.set(self._limits.body_timeout)
            while self._parser.next_data() != b"":
                if not self._parser.buffered and not await self._more(answered=True):
                    return
            self._deadline.set(self._limits.idle_timeout)

    async def _upgrade(self, request: H1Request, upgrade: Upgrade) -> None:
        serve = self._hosting.serve_websocket
        if serve is None or upgrade.open is None or request.length != 0:
            await self._respond_unread(request, HttpResponse(400))
            return
        self._deadline.close()
        head, rest = request.head, self._parser.rest()
        del request
        self._parser = RequestParser(self._limits)  # the old one remembers the request
        self._lost = True
        try:
            with trio.CancelScope() as self._upgraded:
                deadlines = self._application.deadlines
                self._lost = await serve(rest, self._wire, self.writer, deadlines, head, upgrade)
                self._closing = True
        finally:
            self._application.done(head, 101, 0)

    async def _serve_http2(self) -> None:
        """Speak HTTP/2 from the first byte on."""
        from trimcp.transports.http.h2.connection import H2Connection  # loaded with the first of them

        self._deadline.close()
        self._http2 = H2Connection(
            *(self._hosting, self._wire, self.writer, self._holding, self._peer, self._loopback, self._secure)
        )
        try:
            await self._http2.run(self._parser.rest())
        finally:
            self._reset = self._http2.lost

    # Reading

    async def _more(self, most: int = READ_SIZE, *, idle: bool = False, answered: bool = False) -> bool:
        """Wait for more input; return False if the connection ends. Raises RequestRefused: it took too long.

        `most`: bytes. `idle`: no request has begun, so the connection can end without a response. `answered`: it was
        sent already.
        """
        while True:
            if idle and self._reply is not None:
                return True  # to a request that came whole
            if self._deadline.passed:
                if idle or answered:
                    self._lost = True
                    return False
                raise RequestRefused(408, "the request took too long")
            if self.writer.broken or (idle and self._hosting.draining and self._wire.is_quiet()):
                self._lost = True  # what has come already is answered
                return False
            data = await self._wire.read(most, self._answer if idle else None)
            self._yielded = True
            if data:
                if not (idle and self._answer(data)):
                    self._parser.feed(data)
                return True
            if data is not None and not (idle and self._reply is not None):
                self._lost = True
                if not idle:
                    log.debug("%s left in the middle of a request", self._peer)
                return False

    async def _read_on(self) -> None:
        """Read until the response is finished, so that a client that leaves is noticed at once."""
        parser = self._parser
        while self._reply is not None:
            if self.writer.broken:
                self._abandon("read nothing" if self.writer.stalled else "left")
            elif self._half_closed:
                await self._parked.park()
            elif parser.buffered >= self._limits.max_pipelined:
                if await self._wire.wait_peer_closed():
                    self._input_ended()
            elif data := await self._wire.read(READ_SIZE, self._answer):
                self._yielded = True
                if not self._answer(data):
                    parser.feed(data)
                del data
            elif data is None or self._reply is None:
                self._lost = self._lost or data is not None
            else:
                self._input_ended()

    def _input_ended(self) -> None:
        """Handle the end of the client's input: a finished response is still sent, any other is abandoned."""
        if self._reply is not None and self._reply.ended:
            self._half_closed = self._closing = True
        else:
            self._abandon("left")

    def _abandon(self, how: str, slow: str | None = None) -> None:
        """Abandon an unfinished response. `slow` is the reason if the connection was ended here, not by the client."""
        reply = self._reply
        if reply is None:
            return
        self._reply = None
        self._lost = self._reset = True
        self.writer.give_up()
        sent = max(0, reply.sent - self.writer.undelivered)
        handler = None if reply.ended or reply.aborted else reply.handler
        reply.detach()
        if slow is None and (self.writer.stalled or self._wire.timed_out):
            slow = stalled(self._peer, self._limits.stall_timeout, self.writer.undelivered)
        if not reply.aborted:
            log.debug("%s %s before a response was finished", self._peer, how)
        if handler is not None:
            handler.disconnected(slow)
        self._application.done(reply.request.head, reply.status, sent)

    # The end

    def _refuse(self, refusal: RequestRefused) -> None:
        """Respond to an invalid or refused request, and log the reason."""
        status, reason = refusal.status, refusal.reason
        if status in (408, 503):  # the budget has already logged a 503
            log.debug("refused a request from %s: %d, %s", self._peer, status, reason)
        elif status in (413, 431):
            security_event("oversize", status=status, why=reason, peer=self._peer)
        else:
            security_event("garbage", status=status, why=reason, peer=self._peer)
        self._closing = True
        body = f"{HTTPStatus(status).phrase}: {reason}\n".encode()
        again = (("Retry-After", "1"),) if status == 503 else ()
        headers = (("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body))), *again)
        self.writer.write(encode_head(status, headers, "Connection: close\r\n") + body)

    async def _end(self) -> None:
        """Close, and break the reference cycles between connection, reply and writer."""
        self._deadline.close()
        try:
            self._abandon("was cut off")
        except Exception as error:  # as in `run`; the socket is closed nevertheless
            log_crash(log, error, "ending a connection from %s crashed", self._peer)
        finally:
            self.writer.close()
            self._holding.close()
            await self._wire.close(reset=self._reset)
