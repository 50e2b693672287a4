"""One HTTP/1.1 connection: who may speak when, what is read and dropped, and how it ends.

One task reads all the time, also while a handler works, so that a client that leaves is noticed at once; it is the
only one that closes. Responses are written by whoever answers (`h1writer`), so a request costs no task here.

    head ── admit ──┬─ Response ─ answered at once; the body is dropped, or the connection closed
                    ├─ Upgrade ── handed over, and nothing of this applies any more
                    └─ Handler ── body ── start ── ... replied ── the next head, which may be here already
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final, TypeAlias

import attrs
import trio

from trimcp.framing.gathering import Gathered
from trimcp.transports.http.deadlines import Deadlines
from trimcp.transports.http.h1chunks import Refused
from trimcp.transports.http.h1parser import Request, RequestParser
from trimcp.transports.http.h1reply import H1Reply, encode_head
from trimcp.transports.http.h1writer import Writer
from trimcp.transports.http.limits import HttpLimits
from trimcp.transports.http.model import Face, Handler, Head, Response, Upgrade
from trimcp.transports.http.wires import PrefixedStream, Wire

__all__ = ["Connection", "Hosting", "UpgradeWebSocket"]

log: logging.Logger = logging.getLogger("trimcp.http")

UpgradeWebSocket: TypeAlias = Callable[[trio.abc.Stream, Head, Upgrade], Awaitable[None]]
"""Serves a WebSocket on a stream that begins with the request's head, until the peer leaves."""

_READ_SIZE: Final = 64 * 1024
_DROPPED: Final = 64 * 1024  # a body up to this size is read and dropped, to keep the connection
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


@attrs.define(eq=False)
class Hosting:
    """What the connections of a listener have in common.

    Attributes:
        face: what is served.
        limits: what a client may cost.
        nursery: where connections live, and the tasks that write what a socket refused.
        upgrade_websocket: serves a WebSocket, or None to refuse them.
        deadlines: watches over all connections; somebody runs it.
        draining: whether connections end with the response under way.
        receiving: bytes of the bodies that are not complete.
    """

    face: Face
    limits: HttpLimits
    nursery: trio.Nursery
    upgrade_websocket: UpgradeWebSocket | None = None
    deadlines: Deadlines = attrs.field(factory=Deadlines)
    draining: bool = False
    receiving: int = 0


def _tell(refusal: Refused, peer: str) -> None:
    """Say why a request was refused that never became one; one that came too slowly is nothing to tell of."""
    from trimcp.security import security_event

    if refusal.status in (413, 431):
        security_event("oversize", status=refusal.status, why=refusal.reason, peer=peer)
    elif refusal.status == 503:
        security_event("flood_refused", what="bodies", why=refusal.reason, peer=peer)
    elif refusal.status == 408:
        log.debug("refused a request from %s: %d, %s", peer, refusal.status, refusal.reason)
    else:
        security_event("garbage", status=refusal.status, why=refusal.reason, peer=peer)


class Connection:
    """Serves one client. `run` is its task.

    Args:
        hosting: what it shares with others.
        wire: closed when `run` ends.
        peer, loopback, secure: what every `Head` says about it.
    """

    __slots__ = (
        *("_deadline", "_face", "_hosting", "_limits", "_parked", "_parser", "_peer", "_reply", "_wire", "writer"),
        *("_closing", "_dry", "_lost", "_reset", "_rested"),
    )

    def __init__(
        self, hosting: Hosting, wire: Wire, *, peer: str = "", loopback: bool = True, secure: bool = False
    ) -> None:
        self._hosting = hosting
        self._face = hosting.face
        self._limits = hosting.limits
        self._wire = wire
        self._peer = peer
        self._parser = RequestParser(hosting.limits, peer=peer, loopback=loopback, secure=secure)
        self._deadline = hosting.deadlines.new(self._wake)
        self._reply: H1Reply | None = None  # the response under way
        self._parked = trio.lowlevel.ParkingLot()
        self.writer: Writer = Writer(self, wire, hosting.nursery, hosting.deadlines, hosting.limits)
        self._closing = False  # after the response under way
        self._lost = False  # at once: there is nobody to be polite to
        self._dry = False  # the client has sent its last byte, but is owed the rest of a finished response
        self._reset = False
        self._rested = True  # whether others could run since the last head

    async def run(self) -> None:
        """Serve until either side has had enough. A crash ends this connection only, and is logged."""
        try:
            await self._serve()
        except Exception:
            log.exception("serving a connection from %s crashed", self._peer)
            self._reset = True
        except BaseExceptionGroup as group:
            cancelled, crash = group.split(trio.Cancelled)
            if cancelled is None or not (crash is None or isinstance(crash, ExceptionGroup)):
                raise
            if crash is not None:
                log.error("serving a connection from %s crashed", self._peer, exc_info=crash)
            raise cancelled from None
        finally:
            await self._end()

    def drain(self) -> None:
        """End now if no request is under way. `Hosting.draining` sees to the rest."""
        self._wake()

    # For the reply and the writer

    def will_close(self, request: Request) -> bool:
        """Decide, for good, whether the response that begins now is the last."""
        self._closing = self._closing or self._hosting.draining or not request.keep_alive
        return self._closing

    def finished(self) -> None:
        """Go on to the next request, unless the system has yet to take a part of the response."""
        if not self.writer.waiting and not self.writer.broken:
            self._replied()

    def drained(self) -> None:
        """Go on, or tell the handler that it may."""
        reply = self._reply
        if reply is None:
            self._parked.unpark_all()
        elif reply.ended:
            self._replied()
        elif reply.handler is not None:
            reply.handler.writable()

    def broke(self) -> None:
        """Let the reader find out."""
        self._wake()

    def _replied(self) -> None:
        reply = self._reply
        if reply is None:
            return
        self._reply = None
        self._closing = self._closing or self._hosting.draining
        self._deadline.set(self._limits.idle_timeout)
        if self._closing or self._parser.buffered or reply.handler is None:
            self._wake()  # else the reader waits for what it would wait for anyway
        reply.detach()
        self._face.done(reply.request.head, reply.status, reply.sent)

    def _wake(self) -> None:
        """Let the reader look at what has changed."""
        if self._parked:
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
                if request is None:
                    return
                await self._take(request)
                first = False
        except Refused as refusal:
            self._refuse(refusal)
        if not self._lost:
            await self._linger()

    async def _next_request(self, first: bool) -> Request | None:
        """Wait for a head; None if there will be none. The first one has its time from accepting."""
        parser = self._parser
        if parser.buffered and not self._rested:
            await trio.lowlevel.checkpoint()  # who pipelines must not keep the others waiting
        timed = first
        while True:
            request = parser.next_head()
            if request is not None:
                self._deadline.clear()
                self._rested = False
                return request
            if parser.buffered and not timed:
                timed = True
                self._deadline.set(self._limits.head_timeout)
            if not await self._more(idle=not parser.buffered):
                return None

    async def _take(self, request: Request) -> None:
        try:
            admitted = await self._face.admit(request.head)
        except Exception:
            log.exception("judging a request from %s crashed", self._peer)
            admitted = Response(500)
        if isinstance(admitted, Response):
            await self._turn_away(request, admitted)
        elif isinstance(admitted, Upgrade):
            await self._upgrade(request, admitted)
        elif request.length is not None and request.length > admitted.max_body:
            await self._turn_away(request, admitted.too_large(self._parser.next_data() or b""))
        else:
            body = b"" if request.length == 0 else await self._read_body(request, admitted)
            if body is not None:
                self._start(request, admitted, body)
                await self._read_on()

    def _start(self, request: Request, handler: Handler, body: bytes) -> None:
        reply = self._reply = H1Reply(self, request, handler)
        try:
            handler.start(body, reply)
        except Exception:
            log.exception("answering a request from %s crashed", self._peer)
            if reply.status:
                reply.abort()
            else:
                reply.send(Response(500))

    async def _read_body(self, request: Request, handler: Handler) -> bytes | None:
        """Return the whole body, or None if the client is gone or was sent away."""
        parser, hosting = self._parser, self._hosting
        data = parser.next_data()
        if data is not None and len(data) == request.length:
            return data
        if request.expects and data is None:
            self.writer.write(_CONTINUE)
        body, size = Gathered(), 0
        self._deadline.set(self._limits.body_timeout)
        try:
            while data != b"":
                if data is not None:
                    body.add(data)
                    size += len(data)
                    hosting.receiving += len(data)
                    if size > handler.max_body:
                        beginning = body.beginning(_READ_SIZE)
                        del body  # what is thrown away is not kept while the client takes the answer
                        await self._turn_away(request, handler.too_large(beginning))
                        return None
                    if hosting.receiving > self._limits.max_bodies:
                        raise Refused(503, "too much is being received; try again later")
                elif not await self._more():
                    return None
                data = parser.next_data()
            self._deadline.clear()
            return body.take()
        finally:
            hosting.receiving -= size

    async def _turn_away(self, request: Request, response: Response) -> None:
        """Answer without a handler. A small body is dropped; for a large one the connection is closed."""
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

    async def _upgrade(self, request: Request, upgrade: Upgrade) -> None:
        serve = self._hosting.upgrade_websocket
        if serve is None or request.length != 0:
            await self._turn_away(request, Response(400))
            return
        self._deadline.close()
        self._lost = True
        stream = PrefixedStream(request.raw + self._parser.rest(), self._wire.into_stream())
        try:
            await serve(stream, request.head, upgrade)
        finally:
            await trio.aclose_forcefully(stream)
            self._face.done(request.head, 101, 0)

    # Reading

    async def _more(self, *, idle: bool = False, answered: bool = False) -> bool:
        """Wait for more of a request; False if there will be nothing more.

        Args:
            idle: there is no request yet: ending disturbs nobody.
            answered: there is nothing more to tell the client.

        Raises:
            Refused: it took too long.
        """
        while True:
            if self._deadline.passed:
                if idle or answered:
                    self._lost = True
                    return False
                raise Refused(408, "the request took too long")
            if self.writer.broken or (idle and self._hosting.draining):
                self._lost = True
                return False
            data = await self._wire.read(_READ_SIZE)
            self._rested = True
            if data:
                self._parser.feed(data)
                return True
            if data is not None:
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
            elif self._dry:
                await self._parked.park()
            elif parser.buffered >= self._limits.max_pipelined:
                if await self._wire.hung_up():
                    self._let_go()
            elif data := await self._wire.read(_READ_SIZE):
                parser.feed(data)
                self._rested = True
            elif data is None or self._reply is None:
                self._lost = self._lost or data is not None
            else:
                self._let_go()

    def _let_go(self) -> None:
        """Take it that the client has sent its last byte: it is owed what is finished, and nothing else."""
        if self._reply is not None and self._reply.ended:
            self._dry = self._closing = True
        else:
            self._abandon("left")

    def _abandon(self, how: str) -> None:
        """Let go of a response that does not reach its end."""
        reply = self._reply
        if reply is None:
            return
        self._reply = None
        self._lost = self._reset = True
        self.writer.give_up()
        sent = max(0, reply.sent - self.writer.undelivered)
        handler = None if reply.ended or reply.aborted else reply.handler
        reply.detach()
        slow = self._too_slow() if self.writer.stalled or self._wire.timed_out else None
        if not reply.aborted:
            log.debug("%s %s before a response was finished", self._peer, how)
        if handler is not None:
            handler.disconnected(slow)
        self._face.done(reply.request.head, reply.status, sent)

    def _too_slow(self) -> str:
        """Report a client that was dropped because it took nothing, and return the reason in words."""
        from trimcp.security import security_event

        seconds, unread = self._limits.stall_timeout, self.writer.undelivered
        security_event("peer_stalled", peer=self._peer, seconds=seconds, unread_bytes=unread)
        return f"the peer read nothing for {seconds:g} seconds"

    # The end

    def _refuse(self, refusal: Refused) -> None:
        _tell(refusal, self._peer)
        self._closing = True
        body = f"{HTTPStatus(refusal.status).phrase}: {refusal.reason}\n".encode()
        headers = (("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body))))
        self.writer.write(encode_head(refusal.status, headers, "Connection: close\r\n") + body)

    async def _linger(self) -> None:
        """See to it that the last response arrives: closing with something unread would reset the connection."""
        deadline = self._deadline
        deadline.set(self._limits.linger_timeout)
        while self.writer.waiting and not deadline.passed:
            await self._parked.park()
        if self.writer.waiting or self.writer.broken:
            self._reset = True
            return
        await self._wire.shut_write()
        left = self._limits.linger_bytes
        while left > 0 and not deadline.passed:
            data = await self._wire.read(_READ_SIZE)
            if data == b"":
                return
            left -= len(data or b"")

    async def _end(self) -> None:
        """Close, and take apart what refers to each other."""
        self._deadline.close()
        try:
            self._abandon("was cut off")
        except Exception:
            log.exception("ending a connection from %s crashed", self._peer)
        finally:
            self.writer.close()
            await self._wire.close(reset=self._reset)
