"""One HTTP request under an ASGI server, from its head to the end of its response.

The call only pumps bytes. The work happens where the face runs it, so a server that shields its `send` from
cancellation holds nobody but this pump.
"""

from __future__ import annotations

import logging
from typing import Final

import attrs
import trio

from trimcp.framing.gathering import Gathered
from trimcp.transports.http.asgi_reply import AsgiReply
from trimcp.transports.http.asgi_scope import AsgiEvent, Receive, Send, plain
from trimcp.transports.http.limits import HttpLimits
from trimcp.transports.http.model import Face, Handler, Head, Response, Upgrade

__all__ = ["Bodies", "Handing", "HttpCall", "response_start"]

_BODILESS: Final = frozenset((204, 304))
_BEGINNING: Final = 64 * 1024  # bytes of a body that is too large in which its id is looked for
_SMALL: Final = 4 * 1024  # a body that is taken also while others wait for the rest of theirs
_MAX_DIGITS: Final = 18
_NEARLY: Final = 0.9

_log = logging.getLogger("trimcp.http")


@attrs.define(eq=False)
class Bodies:
    """What the calls of one application have in common.

    Attributes:
        receiving: bytes of the bodies that are not complete.
    """

    receiving: int = 0


def response_start(kind: str, response: Response, length: int | None) -> AsgiEvent:
    """Return the event that begins a response; `length` is None where only the end will tell."""
    headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in response.headers]
    if length is not None and response.status not in _BODILESS:
        headers.append((b"content-length", b"%d" % length))
    return {"type": kind, "status": response.status, "headers": headers}


@attrs.define(eq=False)
class Handing:
    """How long a server holds what was handed to it, to tell a client that left from one that the server cut off.

    A server that limits how long a client may take nothing (ours does, with the same limit) ends the connection, lets
    `send` return as if nothing was, and then says that the client left.

    Args:
        limit: seconds.
    """

    limit: float
    _began: float | None = attrs.field(init=False, default=None)
    _late: float | None = attrs.field(init=False, default=None)

    def begin(self) -> None:
        """Note that something is being handed over."""
        self._began = trio.current_time()

    def end(self) -> None:
        """Note that the server has taken it."""
        now, began = trio.current_time(), self._began
        if began is not None and now - began >= _NEARLY * self.limit:
            self._late = now
        self._began = None

    @property
    def cut(self) -> bool:
        """Whether a connection that has ended just now was cut off by the server."""
        now = trio.current_time()
        if self._began is not None and now - self._began >= _NEARLY * self.limit:
            return True
        return self._late is not None and now - self._late <= (1 - _NEARLY) * self.limit


@attrs.define(eq=False)
class HttpCall:
    """One `http` call of an ASGI server.

    Args:
        face: who answers.
        head: of the request.
        limits: how large and slow a request may be.
        bodies: what it has in common with others.
    """

    face: Face
    head: Head
    limits: HttpLimits
    bodies: Bodies
    _receive: Receive
    _send: Send
    _status: int = attrs.field(init=False, default=0)
    _sent: int = attrs.field(init=False, default=0)
    _ending: bool = attrs.field(init=False, default=False)
    _received: bool = attrs.field(init=False, default=False)
    _drained: int = attrs.field(init=False, default=0)
    _enough: trio.Event = attrs.field(init=False, factory=trio.Event)
    _handing: Handing = attrs.field(init=False)
    _stalled: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self._handing = Handing(self.limits.stall_timeout)

    async def run(self) -> None:
        """Answer the request. Returns once the response is with the server or the client has left."""
        try:
            found = await self.face.admit(self.head)
            if isinstance(found, Response):
                await self._respond(found)
            elif isinstance(found, Upgrade):
                await self._respond(plain(426, "this is a WebSocket"))
            else:
                await self._handle(found)
        finally:
            self.face.done(self.head, self._status, self._sent)

    # The request

    async def _handle(self, handler: Handler) -> None:
        body = await self._read(handler)
        if isinstance(body, Response):
            await self._respond(body)
        elif body is not None:
            reply = AsgiReply(self.limits.low_water)
            handler.start(body, reply)
            try:
                await self._pump(reply, handler)
            finally:
                self._leave(reply, handler)

    async def _read(self, handler: Handler) -> bytes | Response | None:
        """Return the body, the answer to one that is too large or too slow, or None if the client left."""
        body, bodies, most, size, kept = Gathered(), self.bodies, handler.max_body, 0, 0
        hopeless = self._announced() > most
        try:
            with trio.move_on_after(self.limits.body_timeout):
                while not self._received:
                    event = await self._receive()
                    if event["type"] != "http.request":
                        _log.debug("%s left in the middle of a request", self.head.peer)
                        return None
                    self._received = not event.get("more_body", False)
                    piece = event.get("body", b"")
                    size += len(piece)
                    # Also if it is known to be too large it is read so far: a client that sends everything before it
                    # listens would lose the answer to a reset.
                    if not (hopeless and kept >= _BEGINNING):
                        body.add(piece)
                        kept += len(piece)
                        bodies.receiving += len(piece)
                    if size > most:
                        return handler.too_large(body.beginning(min(most, _BEGINNING)))
                    if bodies.receiving > self.limits.max_bodies and kept > _SMALL:
                        return plain(503, "too much is being received; try again later")
                return body.take()
            return plain(408, "the body took too long")
        finally:
            bodies.receiving -= kept

    def _announced(self) -> int:
        """Return how large the body will be, as far as its head says; the server has checked that."""
        length = self.head.headers.get("content-length", "")
        return int(length[:_MAX_DIGITS]) if length.isascii() and length.isdigit() else 0

    # The response

    async def _respond(self, response: Response) -> None:
        """Send a response of ours, or one for which the body was not read."""
        reply = AsgiReply(self.limits.low_water)
        reply.send(response)
        await self._pump(reply, None)

    async def _pump(self, reply: AsgiReply, handler: Handler | None) -> None:
        """Move bytes until the response is finished, or the client is gone."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, reply, handler, nursery.cancel_scope)
            try:
                await self._move(reply, handler)
            except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
                pass  # how some servers tell that the client is gone
            nursery.cancel_scope.cancel(reason="the response has ended")

    async def _move(self, reply: AsgiReply, handler: Handler | None) -> None:
        head = await reply.begin()
        if head is not None:
            await self._send(response_start("http.response.start", head, reply.length))
            self._status = head.status
        while not (reply.aborted or reply.lost):  # what has no end is cut by the server
            await reply.news()
            if piece := reply.take():
                if self.head.method != "HEAD" and not await self._body(piece):
                    return None
                reply.taken(len(piece))
            elif reply.finished:
                return await self._end()
            if handler is not None and not reply.gone and not reply.waiting:
                handler.writable()
        return None

    async def _body(self, piece: bytes) -> bool:
        """Hand over a piece; False if it was not taken for too long: over HTTP/2 a client may never grant a window."""
        self._handing.begin()
        with trio.move_on_after(self.limits.stall_timeout):
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
            self._sent += len(piece)
            self._handing.end()
            return True
        self._stalled = True
        return False

    async def _end(self) -> None:
        if not self._received:
            # The client has its answer, but may be sending still. A server closes at once after an early end, and a
            # connection closed with bytes unread is reset, which can destroy the answer on its way.
            with trio.move_on_after(self.limits.linger_timeout):
                await self._enough.wait()
        # An event of its own, so that the disconnect many servers report after the last event is told from a client
        # that left in the middle of the body. From here on nothing is cancelled at once: the server may be half-way
        # through making the connection ready for the next request.
        self._ending = True
        with trio.move_on_after(self.limits.stall_timeout):
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _watch(self, reply: AsgiReply, handler: Handler | None, scope: trio.CancelScope) -> None:
        """Learn of the client's leaving, which sending does not tell, and drop what else it sends."""
        while (event := await self._receive())["type"] == "http.request":
            self._received = not event.get("more_body", False)
            self._drained += len(event.get("body", b""))
            if self._received or self._drained > self.limits.linger_bytes:
                self._enough.set()
        if self._ending:
            scope.deadline = trio.current_time() + self.limits.linger_timeout  # some servers wait for ever for a window
        else:
            self._leave(reply, handler)
            scope.cancel(reason="the client has left")

    def _leave(self, reply: AsgiReply, handler: Handler | None) -> None:
        """Note that nobody reads the response any more, if it is not finished: at once, whatever `send` waits for."""
        if not self._ending and not reply.aborted and not reply.lost:
            unread = reply.waiting
            reply.lose()
            slow = self._too_slow(unread) if self._stalled or self._handing.cut else None
            if slow is None:
                _log.debug("%s left before a response was finished", self.head.peer)
            if handler is not None:
                handler.disconnected(slow)

    def _too_slow(self, unread: int) -> str:
        """Report a client that was dropped because it took nothing, and return the reason in words."""
        from trimcp.security import security_event

        seconds = self.limits.stall_timeout
        security_event("peer_stalled", peer=self.head.peer, seconds=seconds, unread_bytes=unread)
        return f"the peer read nothing for {seconds:g} seconds"
