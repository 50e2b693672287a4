"""gRPC under an ASGI server that speaks HTTP/2: MCP through `Mcp.Exchange`, health checks, and services of others.

Requests of other kinds go to the HTTP face, so that one port serves both. Callers are identified as over HTTP, by the
same hook; a refusal becomes a gRPC status. Two tasks of a call connect its channel and the server, as for a WebSocket.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import Final, Protocol, TypeAlias

import attrs
import orjson
import trio

from trimcp.budget import owner_of
from trimcp.framing.grpc import GrpcDecoder, GrpcStatus, encode_text, json_of, message_frame, status_of_refusal
from trimcp.security import security_event
from trimcp.transports.descriptors import PIECE
from trimcp.transports.grpc.channel import EXCHANGE, REFUSED, GrpcChannel
from trimcp.transports.http.asgi.app import AsgiApp
from trimcp.transports.http.asgi.request import (
    FLOW,
    FLOW_WINDOW,
    AsgiEvent,
    Receive,
    Scope,
    Send,
    SendTimer,
    plain,
    response_start,
)
from trimcp.transports.http.seams import Face, Head, HttpResponse, Upgrade
from trimcp.transports.http.settings import HttpLimits
from trimcp.transports.http.shares import Shares

HEALTH: Final = "/grpc.health.v1.Health/"
"""The service of health checks."""

_CONTENT_TYPE: Final = "application/grpc"
_TRAILERS: Final = "http.response.trailers"
_CLOSING: Final = 2.0  # seconds for the status of a call whose session has ended
_SERVING, _NOT_SERVING, _SERVICE_UNKNOWN = (message_frame(bytes((0x08, value))) for value in (1, 2, 3))
_MOST_CHECK: Final = 1_024


class GrpcFace(Face, Protocol):
    """What a face offers to gRPC beside `Face`."""

    @property
    def draining(self) -> trio.Event:
        """Set once no new work is taken."""
        ...

    @property
    def max_calls(self) -> int:
        """How many sessions may be open at once."""
        ...

    async def authorize(self, head: Head) -> HttpResponse | None:
        """Check a request's Host, Origin and caller; return its refusal, or None."""

    def upgrade(self, head: Head, subprotocol: str | None = None) -> Upgrade | HttpResponse:
        """Return how to serve a session on this connection, or the refusal."""
        ...


GrpcService: TypeAlias = "Callable[[GrpcApp, GrpcFace, Head, Scope, Receive, Send], Awaitable[None]]"
"""Answers the calls of one service, whose callers have been identified."""


@attrs.define(eq=False)
class GrpcApp(AsgiApp):
    """An ASGI application that serves gRPC and, beside it, a face over HTTP.

    Args:
        services: other services, by the beginning of their paths: "/package.Service/".
    """

    services: Mapping[str, GrpcService] = attrs.field(factory=dict, kw_only=True)
    _calls: set[ExchangeCall] = attrs.field(init=False, factory=set)  # that are channels
    _shares: Shares[ExchangeCall] = attrs.field(init=False, factory=Shares)

    async def serve_http(self, face: Face, head: Head, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a call, or pass a request on to the face; see `AsgiApp.serve_http`."""
        service = self._service(head.path)
        is_grpc = head.headers.get("content-type", "").startswith(_CONTENT_TYPE)
        if (service is None and not is_grpc) or self._face is None:
            await super().serve_http(face, head, scope, receive, send)
        elif is_grpc and _TRAILERS not in (scope.get("extensions") or {}):
            await _respond(send, plain(426, "gRPC needs HTTP/2", ("Upgrade", "h2c")))
        else:
            await self._call(self._face, service, head, scope, receive, send)  # type: ignore[arg-type]  # a GrpcFace

    def _service(self, path: str) -> GrpcService | None:
        if path == EXCHANGE:
            return _exchange
        name = path[: path.rfind("/") + 1]
        return _check_health if name == HEALTH else self.services.get(name)

    async def _call(
        self, face: GrpcFace, service: GrpcService | None, head: Head, scope: Scope, receive: Receive, send: Send
    ) -> None:
        # A health probe may be sent by anybody, as over HTTP.
        refused = None if service is _check_health else await face.authorize(head)
        if refused is not None:
            await refuse(head, send, refused)
            face.done(head, refused.status, 0)
        elif service is None:
            await end_call(send, GrpcStatus.UNIMPLEMENTED, "there is no such method")
            face.done(head, 404, 0)
        else:
            await service(self, face, head, scope, receive, send)

    async def serve_stream(
        self,
        face: GrpcFace,
        head: Head,
        scope: Scope,
        receive: Receive,
        send: Send,
        found: Upgrade | HttpResponse,
        write: Callable[[bytes], bytes] | None = None,
    ) -> None:
        """Serve a call as a channel of messages, or refuse it.

        Args:
            face, head, scope, receive, send: as for a service.
            found: how to serve it, or the refusal.
            write: returns the frame of a JSON text; None for those of MCP's tunnel.
        """
        owner = owner_of(head.principal, head.peer)
        if not isinstance(found, HttpResponse) and not self._has_room(face.max_calls, owner):
            security_event("flood_refused", what="sessions", peer=head.peer, most=face.max_calls)
            found = plain(503, "there are too many sessions; try again later")
        if isinstance(found, HttpResponse):
            await refuse(head, send, found)
            face.done(head, found.status, 0)
            return
        call = ExchangeCall(face, head, self.limits, scope, receive, send, owner)
        self._calls.add(call)
        self._shares.add(call, used=True)
        try:
            await call.run(found, write)
        finally:
            self._forget(call)

    def _has_room(self, most: int, owner: str) -> bool:
        """Return whether one more session of this owner may begin, after ending another one if necessary."""
        if len(self._calls) < most:
            return True
        other = self._shares.make_way(owner, "session")
        if other is None:
            return False
        self._forget(other)
        other.give_way("there are too many sessions")
        return True

    def _forget(self, call: ExchangeCall) -> None:
        self._calls.discard(call)
        self._shares.remove(call)


async def _exchange(app: GrpcApp, face: GrpcFace, head: Head, scope: Scope, receive: Receive, send: Send) -> None:
    await app.serve_stream(face, head, scope, receive, send, face.upgrade(head))


@attrs.define(eq=False)
class ExchangeCall:
    """One call of `Mcp.Exchange`: a `ByteCall` to its channel.

    Attributes:
        owner: whose share of all sessions it counts into.
        gone: set once the peer is gone.
        half_closed: whether it has said everything, and still listens.
        too_slow: whether it was dropped because it read nothing for too long.
    """

    face: GrpcFace
    head: Head
    limits: HttpLimits
    scope: Scope
    _receive: Receive
    _send: Send
    owner: str
    gone: trio.Event = attrs.field(init=False, factory=trio.Event)
    too_slow: bool = attrs.field(init=False, default=False)
    _ended: bool = attrs.field(init=False, default=False)  # the peer has said everything
    _arrived: bytearray = attrs.field(init=False, factory=bytearray)  # not a list: pieces may be tiny
    _waiting: int = attrs.field(init=False, default=0)  # bytes received and not used yet
    _arrival: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    _used: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    _leaving: bytes | None = attrs.field(init=False, default=None)  # what the pump is to send
    _pump: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    _accepted: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    _status: tuple[GrpcStatus, str] | None = attrs.field(init=False, default=None)  # once the call was ended here
    _why: str = attrs.field(init=False, default="the peer is gone")
    _grant: Callable[[int], object] | None = attrs.field(init=False, default=None)
    _finished: trio.Event = attrs.field(init=False, factory=trio.Event)
    _sent: int = attrs.field(init=False, default=0)
    _timer: SendTimer = attrs.field(init=False)
    _running: trio.CancelScope = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._timer = SendTimer(self.limits.stall_timeout)

    async def run(self, upgrade: Upgrade, write: Callable[[bytes], bytes] | None = None) -> None:
        """Serve the session until either side ends the call."""
        extensions = self.scope.get("extensions") or {}
        if FLOW in extensions:
            self._grant = extensions[FLOW]()
        channel = GrpcChannel(
            self,
            upgrade.max_message,
            message_timeout=self.limits.body_timeout,
            message_rate=self.limits.body_rate,
            window=FLOW_WINDOW,
            principal=upgrade.principal,
            headers=upgrade.headers,
            read=upgrade.read,
            write=write,
        )
        if self.head.holding is not None:
            self.head.holding.holder = self
        try:
            async with trio.open_nursery() as nursery:
                self._running = nursery.cancel_scope
                nursery.start_soon(self._pump_in)
                nursery.start_soon(self._pump_out)
                await upgrade.serve(channel)
                if time.time() >= self.head.until:
                    await self.close(GrpcStatus.UNAUTHENTICATED, "the access token has expired")
                elif self.face.draining.is_set():
                    await self.close(GrpcStatus.UNAVAILABLE, "the server is shutting down")
                await self.close(GrpcStatus.OK)
                with trio.move_on_after(_CLOSING):
                    await self._finished.wait()
                nursery.cancel_scope.cancel(reason="the call has ended")
        finally:
            self.face.done(self.head, 200, self._sent)

    @property
    def idle(self) -> bool:
        """Whether no handler of its session is running."""
        holder = None if self.head.holding is None else self.head.holding.holder
        return holder is not None and holder.at_rest

    # For the budget, through the session

    @property
    def at_rest(self) -> bool:
        return True  # its session knows whether a handler is running

    def give_way(self, why: str) -> None:
        """End it for somebody else. What the peer has not taken of a message is memory, too: then reset the stream."""
        self._end(GrpcStatus.UNAVAILABLE, why)
        if self._leaving is not None:
            self._why, self._leaving = why, None
            self._running.cancel(reason=why)

    # Called by the channel

    @property
    def half_closed(self) -> bool:
        return self._ended and not self.gone.is_set()

    async def send(self, data: bytes) -> None:
        self._check()
        self._leaving = data
        self._pump.unpark()
        while self._leaving is not None:
            await self._accepted.park()
            self._check()

    def _check(self) -> None:
        if self.gone.is_set() or self._status is not None:
            raise trio.BrokenResourceError(self._why)

    async def receive(self) -> bytes:
        while not self._arrived:
            if self._ended:
                await trio.lowlevel.checkpoint()
                return b""
            if self.gone.is_set():
                raise trio.BrokenResourceError(self._why)
            if self._status is not None:
                raise trio.ClosedResourceError("this call was ended")
            await self._arrival.park()
        arrived = bytes(self._arrived)
        self._arrived = bytearray()
        await trio.lowlevel.cancel_shielded_checkpoint()
        return arrived

    def credit(self, size: int) -> None:
        self._waiting -= size
        self._used.unpark_all()
        if self._grant is not None and not self._ended:
            self._grant(size)

    async def close(self, status: GrpcStatus, message: str = "") -> None:
        self._end(status, message)
        await trio.lowlevel.checkpoint()

    def _end(self, status: GrpcStatus, message: str) -> None:
        if self._status is None:
            self._status = status, message
            self._pump.unpark_all()
            self._arrival.unpark_all()
            self._accepted.unpark_all()

    def progress(self) -> Hashable:
        return object()  # only the server sees it, and this side drops a peer that does not read

    # Run by the call

    async def _pump_in(self) -> None:
        """Take what arrives. Where the server knows windows nothing here waits, else others of its streams would."""
        while (event := await self._receive())["type"] == "http.request":
            if body := event.get("body", b""):
                self._arrived += body
                self._waiting += len(body)
            if not event.get("more_body", False):
                self._ended = True
            self._arrival.unpark_all()
            del event, body
            while self._grant is None and self._waiting >= FLOW_WINDOW:
                await self._used.park()
        if self._timer.cut:
            self._drop()
        self._leave()

    def _leave(self) -> None:
        """Note that the peer is gone."""
        self.gone.set()
        self._arrival.unpark_all()
        self._accepted.unpark_all()
        self._pump.unpark_all()

    def _drop(self) -> None:
        self.too_slow = True
        self._why = f"the peer read nothing for {self.limits.stall_timeout:g} seconds"

    async def _pump_out(self) -> None:
        """Pass on what is sent, then the status. Servers shield this from cancellation, so only this task does it."""
        try:
            await self._send(_start())
            while not self.gone.is_set():
                if self._leaving is not None:
                    if not await self._pass_on(self._leaving):
                        return self._drop()
                    self._leaving = None
                    self._accepted.unpark_all()
                elif self._status is not None:
                    await self._send({"type": "http.response.body", "body": b"", "more_body": False})
                    await self._send(_trailers(*self._status))
                    break
                else:
                    await self._pump.park()
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # some servers raise this when the peer is gone
        finally:
            self._finished.set()
            self._leave()  # also if the server is cancelled: nobody takes anything any more
        return None

    async def _pass_on(self, data: bytes) -> bool:
        """Send bytes; return False if the peer took nothing of them for too long."""
        with memoryview(data) as view:
            for start in range(0, len(data), PIECE):
                piece = data if len(data) <= PIECE else bytes(view[start : start + PIECE])
                with self._timer.begin() as scope:
                    await self._send({"type": "http.response.body", "body": piece, "more_body": True})
                    self._timer.end()
                if scope.cancelled_caught:
                    return False
                self._sent += len(piece)
        return True


# Other answers


def _start(*also: tuple[bytes, bytes]) -> AsgiEvent:
    headers = [(b"content-type", _CONTENT_TYPE.encode()), *also]
    return {"type": "http.response.start", "status": 200, "headers": headers, "trailers": True}


def _said(status: GrpcStatus, message: str) -> list[tuple[bytes, bytes]]:
    said = [(b"grpc-status", b"%d" % status)]
    if message:
        said.append((b"grpc-message", encode_text(message).encode("ascii")))
    return said


def _trailers(status: GrpcStatus, message: str = "") -> AsgiEvent:
    return {"type": "http.response.trailers", "headers": _said(status, message), "more_trailers": False}


async def end_call(send: Send, status: GrpcStatus, message: str, *headers: tuple[bytes, bytes]) -> None:
    """Answer a call with nothing but a status.

    It is in trailers: Hypercorn ends a response of headers alone with a frame of data, which clients do not expect.
    """
    await send(_start((REFUSED.encode("ascii"), b"1"), *headers))
    await send({"type": "http.response.body", "body": b"", "more_body": False})
    await send(_trailers(status, message))


async def refuse(head: Head, send: Send, refused: HttpResponse) -> None:
    """Refuse a request: a call of gRPC with the status for this response, any other with the response."""
    if not head.headers.get("content-type", "").startswith(_CONTENT_TYPE):
        await _respond(send, refused)
        return
    headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in refused.headers]
    kept = [pair for pair in headers if pair[0] in (b"www-authenticate", b"retry-after")]
    await end_call(send, status_of_refusal(refused.status), _text_of(refused), *kept)


def _text_of(refused: HttpResponse) -> str:
    """Return the text of a refusal, whose body is a JSON-RPC error or a line of text."""
    try:
        return str(orjson.loads(refused.body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return refused.body.decode("utf-8", "replace").strip()


async def _respond(send: Send, response: HttpResponse) -> None:
    await send(response_start("http.response.start", response, len(response.body)))
    await send({"type": "http.response.body", "body": response.body, "more_body": False})


async def answer_each(
    app: GrpcApp,
    face: GrpcFace,
    head: Head,
    receive: Receive,
    send: Send,
    decoder: GrpcDecoder,
    answer: Callable[[bytes], bytes],
) -> None:
    """Answer each message of a call with one, in turn, until the caller has said everything or is silent for long."""
    status, ended, sent = GrpcStatus.OK, False, 0
    await send(_start())
    while decoder.fault is None:
        for request in decoder.take(1):
            data = message_frame(answer(request if isinstance(request, bytes) else b""))
            with trio.move_on_after(app.limits.stall_timeout) as scope:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            if scope.cancelled_caught:
                return face.done(head, 200, sent)
            sent += len(data)
        if decoder.behind:
            continue
        if ended:
            break
        event: AsgiEvent | None = None
        with trio.move_on_after(app.limits.idle_timeout):
            event = await receive()
        if event is None:
            break
        if event["type"] != "http.request":
            return face.done(head, 200, sent)
        decoder.feed(event.get("body", b""))
        ended = not event.get("more_body", False)
    if decoder.fault is not None:
        status = decoder.fault.status
    await send({"type": "http.response.body", "body": b"", "more_body": False})
    await send(_trailers(status, decoder.fault.reason if decoder.fault else ""))
    return face.done(head, 200, sent)


async def _check_health(app: GrpcApp, face: GrpcFace, head: Head, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer `grpc.health.v1.Health`: `Check`, and `Watch` until the caller leaves."""
    decoder, ended = GrpcDecoder(_MOST_CHECK), False
    with trio.move_on_after(_CLOSING * 5):
        while not ended and decoder.fault is None:
            event = await receive()
            if event["type"] != "http.request":
                return
            decoder.feed(event.get("body", b""))
            ended = not event.get("more_body", False)
            if decoder.waiting > _MOST_CHECK + 8:
                break
    found = decoder.take(2)
    if not ended or len(found) != 1:
        await end_call(send, GrpcStatus.INVALID_ARGUMENT, "a health check is one small message")
        face.done(head, 400, 0)
        return
    known = _named(found[0]) in KNOWN_SERVICES
    watches = head.path.endswith("/Watch")
    if not watches and (not known or not head.path.endswith("/Check")):
        status = GrpcStatus.UNIMPLEMENTED if known else GrpcStatus.NOT_FOUND
        await end_call(send, status, "there is no such method" if known else "there is no such service")
        face.done(head, 404, 0)
        return
    await send(_start())
    told = _NOT_SERVING if face.draining.is_set() else _SERVING
    await send({"type": "http.response.body", "body": told if known else _SERVICE_UNKNOWN, "more_body": True})
    if watches:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_until_gone, receive, nursery.cancel_scope)
            await face.draining.wait()
            if known and told is _SERVING:
                await send({"type": "http.response.body", "body": _NOT_SERVING, "more_body": True})
            nursery.cancel_scope.cancel(reason="there is nothing more to tell")
    await send({"type": "http.response.body", "body": b"", "more_body": False})
    await send(_trailers(GrpcStatus.OK))
    face.done(head, 200, len(told))


KNOWN_SERVICES: Final = (b"", b"trimcp.v1.Mcp", b"trimcp.v1.AgentTools")
"""The names of services whose health can be asked for; the empty one is the server's."""


def _named(request: object) -> bytes:
    """Return the service that a HealthCheckRequest names: its field 1."""
    return json_of(request) or b"" if isinstance(request, bytes) else b"?"


async def _until_gone(receive: Receive, scope: trio.CancelScope) -> None:
    while (await receive())["type"] == "http.request":
        pass
    scope.cancel(reason="the caller has left")
