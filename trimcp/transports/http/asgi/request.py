"""One HTTP request under an ASGI server, from its scope to the end of its response.

Scopes differ between servers: prefixes are given in different forms, and headers are pairs of bytes. A call only moves
bytes. The application runs the handlers, so a server that shields its `send` from cancellation delays only this call.
(ASGI specification, "HTTP & WebSocket ASGI Message Format".)
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

import attrs
import trio

from trimcp.budget import LARGE, MemoryAccount, MemoryCharge
from trimcp.channel import Link, PeerProgress
from trimcp.framing.gathering import Gathered
from trimcp.support.addresses import host_port, is_loopback_address
from trimcp.transports.descriptors import PIECE
from trimcp.transports.http.interfaces import (
    BODILESS,
    Application,
    Handler,
    Head,
    HttpResponse,
    Tunnel,
    Upgrade,
    stalled,
)
from trimcp.transports.http.settings import HttpLimits

Scope: TypeAlias = MutableMapping[str, Any]
"""The connection's data that the server passes to the application."""

AsgiEvent: TypeAlias = MutableMapping[str, Any]
"""An event that server and application send each other during a call."""

Receive: TypeAlias = Callable[[], Awaitable[AsgiEvent]]
Send: TypeAlias = Callable[[AsgiEvent], Awaitable[None]]

PEER_CLOSED: Final = "trimcp.peer_closed"
"""The extension of a `websocket` scope that waits until the peer is gone, even with unread events."""

MESSAGES: Final = "trimcp.messages"
"""The extension of a `websocket` scope that bounds messages; called before the first one.

It takes the size limit in bytes, and the `MemoryAccount` that counts an incomplete message.
"""

CUT: Final = "trimcp.cut"
"""The extension of a `websocket` scope that closes the connection at once, whatever is still to be sent."""

_BEGINNING: Final = 64 * 1024  # bytes of a too large body that are searched for its id
_MAX_DIGITS: Final = 18
_NEARLY: Final = 0.9

_log = logging.getLogger("trimcp.http")


def plain(status: int, text: str, *headers: tuple[str, str]) -> HttpResponse:
    """Return a response of one line of text, for errors of the host itself."""
    return HttpResponse(status, (("Content-Type", "text/plain; charset=utf-8"), *headers), f"{text}\n".encode())


def response_start(kind: str, response: HttpResponse, length: int | None) -> AsgiEvent:
    """Return the event that begins a response; `length` is None if it is unknown."""
    headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in response.headers]
    if length is not None and response.status not in BODILESS:
        headers.append((b"content-length", b"%d" % length))
    return {"type": kind, "status": response.status, "headers": headers}


@attrs.define(eq=False)
class SendTimer:
    """Measures `send`, to distinguish a client that left from one that the server dropped as too slow.

    Some servers limit how long a client may not read; ours does, with the same limit. Such a server ends the
    connection, lets `send` return normally, and then reports that the client left.
    """

    _progress: PeerProgress = attrs.field(converter=PeerProgress)  # from its seconds
    _sending: bool = attrs.field(init=False, default=False)
    # when the last `send` ended that took nearly the whole limit
    _late: float = attrs.field(init=False, default=-math.inf)

    def begin(self) -> trio.CancelScope:
        """Note the start of a `send`; return a scope that is cancelled when it takes too long."""
        self._sending = True
        return self._progress.step()

    def end(self) -> None:
        if self._slow:
            self._late = trio.current_time()
        self._sending = False

    @property
    def cut(self) -> bool:
        """Whether a connection that has ended just now was dropped by the server."""
        late = trio.current_time() - self._late <= (1 - _NEARLY) * self._progress.patience
        return late or (self._sending and self._slow)

    @property
    def _slow(self) -> bool:
        return self._progress.silence >= _NEARLY * self._progress.patience


@attrs.define(eq=False)
class HttpCall:
    """One `http` call of an ASGI server: `holding` counts the memory it uses."""

    application: Application
    head: Head
    limits: HttpLimits
    holding: MemoryAccount
    _receive: Receive
    _send: Send
    _status: int = attrs.field(init=False, default=0)
    _sent: int = attrs.field(init=False, default=0)
    _ending: bool = attrs.field(init=False, default=False)
    _received: bool = attrs.field(init=False, default=False)
    _drained: int = attrs.field(init=False, default=0)
    _enough: trio.Event = attrs.field(init=False, factory=trio.Event)
    _timer: SendTimer = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._timer = SendTimer(self.limits.stall_timeout)

    async def run(self) -> None:
        """Answer the request. Returns once the server has the whole response or the client has left."""
        try:
            found = await self.application.admit(self.head)
            if isinstance(found, HttpResponse):
                await self._respond(found)
            elif isinstance(found, Upgrade | Tunnel):
                await self._respond(plain(426, "this is a WebSocket, or needs HTTP/2"))
            else:
                await self._handle(found)
        finally:
            self.application.done(self.head, self._status, self._sent)

    # The request

    async def _handle(self, handler: Handler) -> None:
        body = await self._read(handler)
        if isinstance(body, HttpResponse):
            await self._respond(body)
        elif body is not None:
            reply = AsgiReply(self.limits.low_water, MemoryCharge(self.holding), handler)
            budget, large = self.holding.budget, len(body) >= LARGE
            if large and not budget.take_turn():
                await self.holding.wait_for_turn(len(body))
            handler.start(body, reply)
            if large:
                budget.parsed()
            del body  # otherwise it would stay in memory, beside its parsed form, until the response is there
            self.holding.holder = reply
            try:
                await self._pump(reply)
            finally:
                self._leave(reply)

    async def _read(self, handler: Handler) -> bytes | HttpResponse | None:
        """Return the body, the response to one that is too large or too slow, or None if the client left."""
        body, counted, most, size, kept = Gathered(), MemoryCharge(self.holding), handler.max_body, 0, 0
        length = self.head.headers.get("content-length", "")  # the server has checked it
        hopeless = length.isascii() and length.isdigit() and int(length[:_MAX_DIGITS]) > most
        try:
            with trio.move_on_after(self.limits.body_timeout) as scope:
                while not self._received:
                    event = await self._receive()
                    if event["type"] != "http.request":
                        _log.debug("%s left in the middle of a request", self.head.peer)
                        return None
                    self._received = not event.get("more_body", False)
                    piece = event.get("body", b"")
                    size += len(piece)
                    scope.deadline += len(piece) / self.limits.body_rate
                    # A body known to be too large is read up to here as well: a client that sends everything before it
                    # reads would lose the response to a reset.
                    if not (hopeless and kept >= _BEGINNING):
                        body.add(piece)
                        kept += len(piece)
                        counted.set(kept)
                    if size > most:
                        return handler.too_large(body.beginning(min(most, _BEGINNING)))
                    if not self.holding.fits(0):
                        self.holding.refuse("bodies")
                        return plain(503, "too much is being received; try again later", ("Retry-After", "1"))
                return body.take()
            return plain(408, "the body took too long")
        finally:
            counted.set(0)

    # The response

    async def _respond(self, response: HttpResponse) -> None:
        reply = AsgiReply(self.limits.low_water)
        reply.send(response)
        await self._pump(reply)

    async def _pump(self, reply: AsgiReply) -> None:
        """Move bytes until the response is finished, or the client is gone."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, reply, nursery.cancel_scope)
            try:
                await self._move(reply)
            except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
                pass  # some servers raise this when the client is gone
            nursery.cancel_scope.cancel(reason="the response has ended")

    async def _move(self, reply: AsgiReply) -> None:
        handler, head = reply.handler, await reply.begin()
        if head is not None:
            await self._send(response_start("http.response.start", head, reply.length))
            self._status = head.status
        while not (reply.aborted or reply.lost):  # the server closes a connection whose response has no end
            await reply.news()
            if piece := reply.take():
                if self.head.method != "HEAD" and not await self._body(piece):
                    return None
                reply.consumed(len(piece))
            elif reply.finished:
                return await self._end()
            if handler is not None and not reply.gone and not reply.waiting:
                handler.writable()
        return None

    async def _body(self, piece: bytes) -> bool:
        """Send a piece; return False if it took too long: the client may read nothing."""
        with self._timer.begin() as scope:
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
            self._sent += len(piece)
            self._timer.end()
        return not scope.cancelled_caught

    async def _end(self) -> None:
        if not self._received:
            # The client has its answer, but may still be sending. A server closes at once after an early end, and
            # closing a connection with unread bytes resets it, which can destroy the response in transit.
            with trio.move_on_after(self.limits.linger_timeout):
                await self._enough.wait()
        # A separate event for the end: many servers report a disconnect after it, which must not count as a client that
        # left during the body. From here on nothing is cancelled at once: the server may be preparing the connection
        # for the next request.
        self._ending = True
        with trio.move_on_after(self.limits.stall_timeout):
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _watch(self, reply: AsgiReply, scope: trio.CancelScope) -> None:
        """Detect that the client left, which `send` does not report, and drop its other input."""
        while (event := await self._receive())["type"] == "http.request":
            self._received = not event.get("more_body", False)
            self._drained += len(event.get("body", b""))
            if self._received or self._drained > self.limits.linger_bytes:
                self._enough.set()
        if self._ending:
            scope.deadline = trio.current_time() + self.limits.linger_timeout  # some servers wait for ever for a window
        else:
            self._leave(reply)
            scope.cancel(reason="the client has left")

    def _leave(self, reply: AsgiReply) -> None:
        """Note that the client left before the response was finished, without waiting for `send`."""
        if not self._ending and not reply.aborted and not reply.lost:
            unread = reply.waiting
            reply.lose()
            slow = stalled(self.head.peer, self.limits.stall_timeout, unread) if self._timer.cut else None
            if slow is None:
                _log.debug("%s left before a response was finished", self.head.peer)
            if reply.handler is not None:
                reply.handler.disconnected(slow)


@attrs.define(eq=False)
class AsgiReply:
    """An `HttpReply` whose bytes a pump takes."""

    low_water: int  # bytes that may still wait when `room` returns
    amount: MemoryCharge = attrs.field(factory=MemoryCharge)  # counts the bytes that wait
    handler: Handler | None = None  # None if the host responds itself
    head: HttpResponse | None = attrs.field(init=False, default=None)  # set once the response has begun
    length: int | None = attrs.field(init=False, default=None)  # of the whole body, if known
    finished: bool = attrs.field(init=False, default=False)  # everything was written
    aborted: bool = attrs.field(init=False, default=False)  # the connection is to be closed at once
    lost: bool = attrs.field(init=False, default=False)  # the client left before the end
    waiting: int = attrs.field(init=False, default=0)  # bytes that the server has not accepted
    _chunks: deque[bytes] = attrs.field(init=False, factory=deque)
    _offset: int = attrs.field(init=False, default=0)
    _pump: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    _writers: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)

    # Called by the application

    def send(self, response: HttpResponse) -> None:
        self.length = len(response.body)
        self.start(response)
        self.finish()

    def start(self, response: HttpResponse) -> None:
        # Without the body, which would stay in memory after it was sent.
        self.head = HttpResponse(response.status, response.headers)
        self.write(response.body)
        self._pump.unpark_all()

    def write(self, data: bytes) -> None:
        if data and not self.gone:
            self._chunks.append(data)
            self.waiting += len(data)
            self._count()
            self._pump.unpark_all()

    def finish(self, data: bytes = b"", trailers: tuple[tuple[str, str], ...] = ()) -> None:
        self.write(data)
        self.finished = True
        self._pump.unpark_all()

    def abort(self) -> None:
        """Close the connection, as far as the server does that for a response without an end."""
        self.aborted = True
        self._forget()

    @property
    def at_rest(self) -> bool:
        """Whether the response is complete and waits for the reader, or no handler is running; see `Evictable`."""
        if self.finished:
            return True
        # A response sent as a whole is not at rest: its head has to be sent before its connection may be closed.
        return self.length is None and self.handler is not None and self.handler.at_rest

    def evict(self, why: str) -> None:
        self.abort()

    @property
    def gone(self) -> bool:
        return self.finished or self.lost or self.aborted

    async def room(self) -> None:
        await trio.lowlevel.checkpoint()
        while self.waiting > self.low_water and not self.lost and not self.aborted:
            await self._writers.park()

    # Called by the pump

    async def begin(self) -> HttpResponse | None:
        """Wait for the head of the response, and return it; None if there will be none."""
        while self.head is None and not self.aborted:
            await self._pump.park()
        return None if self.aborted else self.head

    async def news(self) -> None:
        """Wait for bytes to send, the end, or an abort."""
        while not (self._chunks or self.finished or self.aborted):
            await self._pump.park()

    def take(self) -> bytes:
        """Return the next bytes to send, of bounded size, or b"" if none wait. They are counted until `consumed`."""
        if not self._chunks:
            return b""
        first, offset = self._chunks[0], self._offset
        if len(first) - offset > PIECE:
            self._offset += PIECE
            return first[offset : offset + PIECE]
        self._chunks.popleft()
        self._offset = 0
        parts, size = [first[offset:]], len(first) - offset
        while self._chunks and size + len(self._chunks[0]) <= PIECE:
            parts.append(self._chunks.popleft())
            size += len(parts[-1])
        return b"".join(parts)

    def consumed(self, size: int) -> None:
        """Note that the server has accepted this many bytes."""
        self.waiting = max(0, self.waiting - size)
        self._count()
        if self.waiting <= self.low_water:
            self._writers.unpark_all()

    def _count(self) -> None:
        """Count the waiting bytes, and the used part of the first piece: it stays in memory until it is used up."""
        self.amount.set(self.waiting + self._offset)

    def lose(self) -> None:
        """Note that the client left: drop the waiting bytes."""
        self.lost = True
        self._forget()

    def _forget(self) -> None:
        self._chunks.clear()
        self.waiting = self._offset = 0
        self.amount.set(0)
        self._pump.unpark_all()
        self._writers.unpark_all()


@attrs.define(eq=False)
class _AsgiHead(Head):
    """The head of a request of which an ASGI server says how it came."""

    version: str = ""  # of HTTP; "" if it does not say

    @property
    def link(self) -> Link:
        link = super().link
        known = self.version in ("1.0", "1.1", "2", "3")
        return link if self.websocket else link._replace(transport=f"HTTP/{self.version}" if known else "HTTP")


def read_head(scope: Scope, root: str = "") -> Head | HttpResponse:
    """Return the head of the request that an `http` or `websocket` scope describes, or its refusal.

    `root`: the prefix under which the application is mounted, for scopes without it in `root_path`.
    """
    headers = _headers(scope["headers"])
    authority = headers.pop(":authority", None)
    hosts = headers.pop("host", None) or authority or []
    # With two, a request can evade a check of one of them; a server may have joined them already.
    if len(hosts) != 1 or not hosts[0] or "," in hosts[0]:
        return plain(400, "a request needs exactly one Host")
    if "transfer-encoding" in headers and "content-length" in headers:
        # A proxy before the server may have used the other one, and read the rest of this body as another request.
        refusal = plain(400, "the body is delimited in no way that everybody reads alike")
        return attrs.evolve(refusal, headers=(*refusal.headers, ("Connection", "close")))
    joined = {name: ", ".join(values) for name, values in headers.items() if name[:1] != ":"}
    joined["host"] = hosts[0]
    root = (scope.get("root_path") or root).rstrip("/")
    return _AsgiHead(
        method=scope.get("method", "GET"),
        path=_below(root, scope),
        query=scope.get("query_string", b"").decode("latin-1"),
        headers=joined,
        peer=_peer(scope.get("client")),
        loopback=_is_loopback(scope.get("server")),
        secure=scope.get("scheme") in ("https", "wss"),
        root=root,
        websocket=scope["type"] == "websocket",
        version=str(scope.get("http_version", "")),
    )


def _headers(pairs: Iterable[tuple[bytes, bytes]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in pairs:
        found.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1").strip(" \t"))
    return found


def _below(root: str, scope: Scope) -> str:
    """Return the path below the prefix: some routers remove it, others keep it and only set `root_path`."""
    path: str = scope["path"]
    if not root or not (path == root or path.startswith(f"{root}/")):
        return path or "/"
    raw = scope.get("raw_path")
    if raw and unquote(raw.decode("latin-1").partition("?")[0]) == root + path:
        return path  # a path without the prefix may look as if it had it: /mcp below /mcp
    return path[len(root) :] or "/"


def _peer(client: tuple[str, int | None] | None) -> str:
    if client is None or client[1] is None:
        return "unix"
    return host_port(*client)


def _is_loopback(server: tuple[str, int | None] | None) -> bool:
    """Return whether a request came over loopback; True if unknown, because that is checked more strictly."""
    if server is None or server[1] is None:
        return True
    return is_loopback_address(server[0]) is not False
