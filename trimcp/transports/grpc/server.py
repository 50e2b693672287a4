"""What is served through gRPC: MCP through `Mcp.Exchange`, health checks, and the services of a second protocol.

A call is a request like another one: the application identifies the caller, a host reads and writes. What refuses it
is turned into a status here. A call of one message is a `Handler`; one whose two directions go their own ways is a
`Tunnel`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any, Final, Protocol

import attrs
import orjson
import trio

from trimcp.budget import owner_of
from trimcp.framing.grpc import (
    ACCEPTED_ENCODINGS,
    GRPC_HEADERS,
    OK_TRAILERS,
    PREFIX,
    UNKNOWN_ENCODING,
    GrpcDecoder,
    GrpcFault,
    GrpcStatus,
    decode_timeout,
    json_of,
    message_frame,
    status_of_refusal,
    status_trailers,
    whole_message,
)
from trimcp.security import security_event
from trimcp.support.shares import BoundedShares
from trimcp.transports.grpc.channel import EXCHANGE, GrpcChannel
from trimcp.transports.http.interfaces import (
    Admitted,
    ByteStream,
    Handler,
    Head,
    HttpReply,
    HttpResponse,
    Tunnel,
    Upgrade,
    refusal,
)

HEALTH: Final = "/grpc.health.v1.Health/"
"""The service of health checks."""

_SERVING, _NOT_SERVING, _SERVICE_UNKNOWN = (message_frame(bytes((0x08, value))) for value in (1, 2, 3))
_MOST_CHECK: Final = 1_024
_SILENCE: Final = 60.0  # seconds until the next request on a stream of small ones
_KEPT: Final = ("www-authenticate", "retry-after")


class GrpcService(Protocol):
    """One service of a second protocol."""

    def admit(self, routes: GrpcRoutes, head: Head, /) -> Admitted:
        """Admit a call by its head; the caller has been identified."""
        ...

    def refused(self, refused: HttpResponse, /) -> HttpResponse:
        """Return the answer to a call that would be refused with this response over HTTP."""
        return refused_call(refused)


# Answers


def status_response(status: int, message: str = "", *headers: tuple[str, str]) -> HttpResponse:
    """Return the answer to a call that consists of a status."""
    return HttpResponse(200, (*GRPC_HEADERS, *headers, *status_trailers(status, message)))


def fault_response(fault: GrpcFault) -> HttpResponse:
    """Return the answer to a request whose messages cannot be read."""
    return status_response(fault.status, fault.reason, *(ACCEPTED_ENCODINGS if fault is UNKNOWN_ENCODING else ()))


def refused_call(refused: HttpResponse) -> HttpResponse:
    """Return the answer to a call that would be refused with this response over HTTP."""
    return status_response(status_of_refusal(refused.status), refusal_text(refused), *kept_headers(refused))


def refusal_text(refused: HttpResponse) -> str:
    """Return the text of a refusal, whose body is a JSON-RPC error, a line of text, or nothing."""
    try:
        return str(orjson.loads(refused.body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return refused.body.decode("utf-8", "replace").strip() or HTTPStatus(refused.status).phrase


def kept_headers(refused: HttpResponse) -> list[tuple[str, str]]:
    """Return the headers of a refusal that say what to do about it."""
    return [(name.lower(), value) for name, value in refused.headers if name.lower() in _KEPT]


def timeout_of(head: Head) -> float:
    """Return the seconds that the caller gives a call; infinity if it does not say."""
    seconds = decode_timeout(head.headers["grpc-timeout"]) if "grpc-timeout" in head.headers else None
    return math.inf if seconds is None else seconds


def has_bad_timeout(head: Head) -> bool:
    """Return whether the caller says how long a call may take, and nobody understands it."""
    return "grpc-timeout" in head.headers and decode_timeout(head.headers["grpc-timeout"]) is None


# What there is


@attrs.define(eq=False)
class GrpcRoutes:
    """The services of one application."""

    upgrade: Callable[[Head], Upgrade | HttpResponse]  # returns how to serve a session for a call, or the refusal
    draining: trio.Event  # set once no new work is taken
    max_calls: int  # how many sessions may be open at once
    services: Mapping[str, GrpcService]  # other services, by the beginning of their paths: "/package.Service/"
    watchers: set[HealthRequest] = attrs.field(init=False, factory=set)
    calls: BoundedShares[ExchangeCall] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.calls = BoundedShares(what="session", most=self.max_calls)

    def admits_anyone(self, head: Head) -> bool:
        """Return whether a call without credentials is answered: a health probe may be sent by anybody."""
        return head.path.startswith(HEALTH)

    def admit(self, head: Head) -> Admitted:
        """Admit a call of an identified caller by its head, or refuse it with a status."""
        path = head.path
        if has_bad_timeout(head):
            return status_response(GrpcStatus.INVALID_ARGUMENT, "the header grpc-timeout is malformed")
        if path == EXCHANGE:
            return self.tunnel(head, self.upgrade(head))
        method = path.rfind("/") + 1
        service = self.services.get(path[:method])
        if service is not None:
            return service.admit(self, head)
        if path in (f"{HEALTH}Check", f"{HEALTH}Watch"):
            return HealthRequest(self, head)
        return status_response(GrpcStatus.UNIMPLEMENTED, "there is no such method")

    def refused(self, head: Head, refused: HttpResponse) -> HttpResponse:
        """Return the answer to a call that would be refused with this response over HTTP."""
        service = self.services.get(head.path[: head.path.rfind("/") + 1])
        return refused_call(refused) if service is None else service.refused(refused)

    def health(self, name: bytes) -> bytes:
        """Return the message that tells the state of a service; the empty name is the server's."""
        if name not in (b"", b"trimcp.v1.Mcp", b"grpc.health.v1.Health") and f"/{name.decode('latin-1')}/" not in (
            self.services
        ):
            return _SERVICE_UNKNOWN
        return _NOT_SERVING if self.draining.is_set() else _SERVING

    def drain(self) -> None:
        """Tell those who watch the health that no new work is taken."""
        watchers, self.watchers = self.watchers, set()
        for watcher in watchers:
            watcher.tell_end()

    def tunnel(self, head: Head, found: Upgrade | HttpResponse, **kind: Any) -> Tunnel | HttpResponse:
        """Return how to serve a call as a channel of messages, or its refusal.

        `kind`: `read` and `write` of the `GrpcChannel`; without them messages are those of MCP's tunnel.
        """
        if isinstance(found, HttpResponse):
            return self.refused(head, found)
        call = ExchangeCall(self, head, found, kind)
        return Tunnel(call.serve) if self.calls.has_room(call.owner) else self.refused(head, self.too_many(head))

    def too_many(self, head: Head) -> HttpResponse:
        """Note that a session was refused, and return the refusal."""
        security_event("flood_refused", what="sessions", peer=head.peer, most=self.max_calls)
        return refusal(503, "there are too many sessions; try again later")


@attrs.define(eq=False)
class ExchangeCall:
    """One call that is a channel of messages, such as `Mcp.Exchange`."""

    _routes: GrpcRoutes
    _head: Head
    _upgrade: Upgrade
    _kind: Mapping[str, Any]
    owner: str = attrs.field(init=False)  # whose share of all sessions it counts into
    _stream: ByteStream | None = attrs.field(init=False, default=None)
    _channel: GrpcChannel | None = attrs.field(init=False, default=None)
    _due: float = attrs.field(init=False, factory=trio.current_time)  # when its caller's time is over
    _why: str = attrs.field(init=False, default="")  # it was ended for somebody else

    def __attrs_post_init__(self) -> None:
        self.owner = owner_of(self._head.principal, self._head.peer)

    async def serve(self, stream: ByteStream) -> None:
        """Serve the session until either side ends the call; see `Tunnel.serve`."""
        routes, upgrade = self._routes, self._upgrade
        stream.start(GRPC_HEADERS)
        if not routes.calls.has_room(self.owner):  # others have begun since its head was judged
            refused = routes.refused(self._head, routes.too_many(self._head))
            stream.finish(tuple(pair for pair in refused.headers if pair[0].startswith("grpc-")))
            return
        routes.calls.add(self, used=True)
        self._stream = stream
        if (holding := self._head.holding) is not None:
            holding.holder = self
        self._channel = channel = GrpcChannel(
            stream,
            upgrade.max_message,
            message_timeout=stream.message_timeout,
            message_rate=stream.message_rate,
            window=stream.window,
            encoding=self._head.headers.get("grpc-encoding"),
            ending=self._ending,
            principal=upgrade.principal,
            headers=upgrade.headers,
            **self._kind,
        )
        self._due += timeout_of(self._head)
        try:
            with trio.CancelScope(deadline=self._due):
                await upgrade.serve(channel)
            stream.finish(self._ending())
        finally:
            routes.calls.remove(self)
            self._stream = self._channel = None

    def _ending(self) -> tuple[tuple[str, str], ...]:
        if trio.current_time() >= self._due:
            return status_trailers(GrpcStatus.DEADLINE_EXCEEDED, "the time of the call is over")
        if time.time() >= self._head.until:
            return status_trailers(GrpcStatus.UNAUTHENTICATED, "the access token has expired")
        if self._why or self._routes.draining.is_set():
            return status_trailers(GrpcStatus.UNAVAILABLE, self._why or "the server is shutting down")
        return OK_TRAILERS

    # For the budget and the shares, through the session

    @property
    def idle(self) -> bool:
        """Whether no handler of its session is running."""
        holding = self._head.holding
        holder = None if holding is None else holding.holder
        return holder is not None and holder.at_rest

    @property
    def at_rest(self) -> bool:
        return True  # its session knows whether a handler is running

    def evict(self, why: str) -> None:
        """End it for somebody else. What the peer has not taken of a message is memory, too: then reset the stream."""
        self._why = why
        if self._stream is not None and self._channel is not None:
            if self._channel.sends:
                self._stream.reset(why)
            else:
                self._stream.finish(self._ending())


# Small services


@attrs.define(eq=False)
class HealthRequest(Handler):
    """One call of `grpc.health.v1.Health`: `Check`, or `Watch` until the caller leaves."""

    _routes: GrpcRoutes
    _head: Head
    _reply: HttpReply | None = attrs.field(init=False, default=None)  # of one who watches

    @property
    def max_body(self) -> int:
        return _MOST_CHECK + PREFIX

    def too_large(self, beginning: bytes) -> HttpResponse:
        return status_response(GrpcStatus.INVALID_ARGUMENT, "a health check is one small message")

    def refused(self, response: HttpResponse) -> HttpResponse:
        return refused_call(response)

    def start(self, body: bytes, reply: HttpReply) -> None:
        """Answer a check, or the beginning of a watch."""
        asked = whole_message(body, _MOST_CHECK, self._head.headers.get("grpc-encoding"))
        if isinstance(asked, GrpcFault):
            return reply.send(fault_response(asked))
        name = json_of(asked)  # its field 1, as there
        if name is None:
            return reply.send(status_response(GrpcStatus.INVALID_ARGUMENT, "this is no HealthCheckRequest"))
        state = self._routes.health(name)
        if self._head.path.endswith("/Check"):
            if state is _SERVICE_UNKNOWN:
                return reply.send(status_response(GrpcStatus.NOT_FOUND, "there is no such service"))
            return reply.send(HttpResponse(200, GRPC_HEADERS, state, OK_TRAILERS))
        reply.start(HttpResponse(200, GRPC_HEADERS, state))
        if state is _NOT_SERVING:
            return reply.finish(trailers=OK_TRAILERS)
        self._reply = reply
        self._routes.watchers.add(self)
        return None

    def tell_end(self) -> None:
        """Tell one who watches that no new work is taken, and end it."""
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.finish(_NOT_SERVING, OK_TRAILERS)

    def disconnected(self, slow: str | None = None) -> None:
        self._reply = None
        self._routes.watchers.discard(self)


@attrs.frozen
class MissingService(GrpcService):
    """A service that cannot be served: each call is told why."""

    why: str

    def admit(self, routes: GrpcRoutes, head: Head) -> HttpResponse:
        return status_response(GrpcStatus.UNIMPLEMENTED, self.why)


def answer_each(answer: Callable[[bytes], bytes], most: int, head: Head) -> Tunnel:
    """Return how to answer each message of a call with one, in turn, until the caller ends it or is silent for long.

    `most`: bytes of the largest message.
    """
    return Tunnel(partial(_answer_each, answer, GrpcDecoder(most, encoding=head.headers.get("grpc-encoding"))))


async def _answer_each(answer: Callable[[bytes], bytes], decoder: GrpcDecoder, stream: ByteStream) -> None:
    stream.start(GRPC_HEADERS)
    with trio.CancelScope() as silence:
        try:
            while decoder.fault is None:
                before = decoder.taken
                for request in decoder.take(1):
                    assert isinstance(request, bytes)
                    await stream.send(message_frame(answer(request)))
                stream.credit(decoder.taken - before)
                if not decoder.behind:
                    silence.deadline = trio.current_time() + _SILENCE
                    if not (data := await stream.receive()):
                        break
                    silence.deadline = math.inf
                    decoder.feed(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return
    fault = decoder.fault
    stream.finish(OK_TRAILERS if fault is None else status_trailers(fault.status, fault.reason))
