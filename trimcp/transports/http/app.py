"""The HTTP face of a server: routes, who may come in, and which conduct a request belongs to. Knows no server software.

A request is judged by its head: path, Host and Origin, method, identity, content types. What is left is a POST with a
message, whose revision decides: since 2026-07-28 each is an exchange of its own; before, it belongs to a session, made
by `initialize`. This is one of the three places that may ask about an era. (basic/transports, "Streamable HTTP".)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from weakref import WeakKeyDictionary

import attrs
import trio

from trimcp.channel import Incoming, MessageChannel
from trimcp.security import security_event
from trimcp.transports.http.accept import accepts, is_compressed, is_json
from trimcp.transports.http.events import MemoryEvents
from trimcp.transports.http.exchange import JSON_HEADERS, Exchange
from trimcp.transports.http.identity import Refused, identify
from trimcp.transports.http.model import Admitted, Handler, Head, Response, Upgrade
from trimcp.transports.http.routing import Routing
from trimcp.transports.http.service import Service
from trimcp.transports.http.sessions import SessionTable
from trimcp.transports.http.settings import Settings
from trimcp.transports.http.sse2024 import LegacyPost, LegacyStream, StreamTable
from trimcp.transports.http.standalone import Deletion, Listening
from trimcp.transports.http.streams import EventStream
from trimcp.transports.http.ticker import Ticker
from trimcp.transports.trace import Tracer, traced
from trimcp.wire.codes import INVALID_REQUEST, OVERLOADED
from trimcp.wire.jsonrpc import Message, encode_error, parse

__all__ = ["HttpFace"]

_SUBPROTOCOL: Final = "mcp"

# Clients send the same two headers with each request; a stranger may send others, of which few and short are kept.
_MOST_FORMS: Final = 256
_LONGEST_FORM: Final = 256


def refusal(status: int, text: str, *headers: tuple[str, str], code: int = INVALID_REQUEST) -> Response:
    """Return a response that says in JSON-RPC what is wrong, with no id: nothing of the body was read."""
    return Response(status, (*JSON_HEADERS, *headers), encode_error(None, code, text))


@attrs.define(eq=False)
class HttpFace:
    """One server over HTTP. A `Face` to its host.

    Args:
        service: what is served.
        settings: how.

    Attributes:
        sessions: of Streamable HTTP, until 2025-11-25.
        streams: sessions of HTTP+SSE.
        exchanges: POSTs that are not answered yet.
        draining: whether no more work is taken.
        connections: open now, where our own listener is the host.
    """

    service: Service
    settings: Settings
    sessions: SessionTable = attrs.field(init=False)
    streams: StreamTable = attrs.field(init=False, factory=StreamTable)
    ticker: Ticker = attrs.field(init=False)
    exchanges: int = attrs.field(init=False, default=0)
    draining: bool = attrs.field(init=False, default=False)
    connections: int = attrs.field(init=False, default=0)
    _known_forms: dict[tuple[str | None, str | None], tuple[bool, bool, bool]] = attrs.field(init=False, factory=dict)
    _tracer: Tracer | None = attrs.field(init=False)
    _routing: Routing = attrs.field(init=False)
    # Weak, because a host that loses a connection before the body is there has no response to report.
    _began: WeakKeyDictionary[Head, tuple[float, str | None]] = attrs.field(init=False, factory=WeakKeyDictionary)

    def __attrs_post_init__(self) -> None:
        settings = self.settings
        events = settings.events if settings.events is not None or not settings.resumable else MemoryEvents()
        self._tracer = None if settings.trace is None else Tracer(settings.trace)
        self.sessions = SessionTable(settings, events, self._tracer)
        self.ticker = Ticker(settings)
        self._routing = Routing(self.service, settings, self.sessions)

    def statistics(self) -> dict[str, int]:
        """Return how many connections, exchanges, sessions and streams of HTTP+SSE there are now."""
        return {
            "connections": self.connections,
            "exchanges": self.exchanges,
            "sessions": len(self.sessions),
            "streams": len(self.streams),
        }

    # For the host

    async def admit(self, head: Head) -> Admitted:
        """Judge a request by its head."""
        settings = self.settings
        if settings.access_log is not None:
            self._began[head] = (trio.current_time(), None)
        if settings.health and head.path in ("/healthz", "/readyz"):
            return self._health(head)
        reason = settings.origins.refuse(head)
        if reason is not None:
            security_event("origin_refused", why=reason, peer=head.peer, path=head.path)
            return refusal(403, reason)
        admitted = await self._find(head)
        cors = settings.origins.cors(head)
        if cors and isinstance(admitted, Response):
            return attrs.evolve(admitted, headers=(*admitted.headers, *cors))
        if cors and isinstance(admitted, Exchange | Listening | LegacyStream | LegacyPost | Deletion):
            admitted.headers = (*admitted.headers, *cors)
        return admitted

    def done(self, head: Head, status: int, sent: int) -> None:
        """Note a response in the access log."""
        access = self.settings.access_log
        if access is not None:
            began, principal = self._began.pop(head, (trio.current_time(), None))
            access.record(head, status, sent, began, principal, head.headers.get("mcp-method"))

    # Routes

    async def _find(self, head: Head) -> Admitted:
        settings, path = self.settings, head.path
        extra = settings.routes.get(path)
        if extra is None and path not in (
            settings.path,
            settings.websocket_path,
            settings.sse_path,
            settings.sse_path and settings.messages_path,
        ):
            return refusal(404, "there is nothing here; check the path of the URL")
        preflight = settings.origins.preflight(head)
        if preflight is not None:
            return preflight
        identity = None if settings.authenticate is None else await identify(settings.authenticate, head)
        if isinstance(identity, Refused):
            # Who shows no credentials is only asking which are wanted, and a check that broke has an ERROR of its own.
            if identity.status < 500 and ("authorization" in head.headers or identity.status != 401):
                security_event("authentication_failed", why=identity.message, peer=head.peer, path=head.path)
            return refusal(identity.status, identity.message, *identity.headers)
        principal = None if identity is None else identity.id
        if settings.access_log is not None and head in self._began:
            self._began[head] = (self._began[head][0], principal)
        if extra is not None:
            return await extra(head)
        if path == settings.path:
            return self._streamable(head, principal)
        if path == settings.websocket_path:
            return self._websocket(head, principal)
        return self._http_sse(head, principal)

    def _streamable(self, head: Head, principal: str | None) -> Admitted:
        method = head.method
        if method == "POST":
            return self._post(head, principal)
        if method == "GET" and self._routing.keeps_sessions:
            if not accepts(head.headers.get("accept"))[1]:
                return refusal(406, "a GET is answered with text/event-stream")
            return self._with_session(head, principal, lambda session: Listening(self, session, head))
        if method == "DELETE" and self._routing.keeps_sessions:
            return self._with_session(head, principal, lambda session: Deletion(self, session))
        allowed = "GET, POST, DELETE" if self._routing.keeps_sessions else "POST"
        return refusal(405, f"{head.method[:20]!r} is no method of this endpoint", ("Allow", allowed))

    def _post(self, head: Head, principal: str | None) -> Admitted:
        headers = head.headers
        fits, json, sse = self._forms(headers.get("content-type"), headers.get("accept"))
        if not fits:
            return refusal(415, "the body must be application/json in UTF-8")
        if is_compressed(headers.get("content-encoding")):
            return refusal(415, "the body must not be compressed", ("Accept-Encoding", "identity"))
        if not json and not sse:
            return refusal(406, "answers are application/json or text/event-stream")
        if self.exchanges >= self.settings.max_exchanges:
            security_event("flood_refused", what="exchanges", peer=head.peer, most=self.settings.max_exchanges)
            return refusal(503, "too much is under way; try again later", ("Retry-After", "1"), code=OVERLOADED)
        return Exchange(self, head, principal, json, sse)

    def _forms(self, content: str | None, accept: str | None) -> tuple[bool, bool, bool]:
        """Return whether the body is JSON, and which forms of answer the client takes: the same at each request."""
        known = self._known_forms.get((content, accept))
        if known is None:
            known = (is_json(content), *accepts(accept))
            if len(self._known_forms) < _MOST_FORMS and len(content or "") + len(accept or "") < _LONGEST_FORM:
                self._known_forms[content, accept] = known
        return known

    def _with_session(self, head: Head, principal: str | None, make: Callable[..., Handler]) -> Admitted:
        id = head.headers.get("mcp-session-id")
        if id is None:
            return refusal(400, "the header Mcp-Session-Id is missing")
        session = self.sessions.find(id, principal)
        return refusal(404, "there is no such session; initialize anew") if session is None else make(session)

    def _websocket(self, head: Head, principal: str | None) -> Admitted:
        if not head.websocket:
            return refusal(426, "this is a WebSocket", ("Upgrade", "websocket"))
        if self.draining:
            return refusal(503, "shutting down", ("Retry-After", "1"))
        offered = [name.strip() for name in head.headers.get("sec-websocket-protocol", "").split(",")]
        agreed = _SUBPROTOCOL if _SUBPROTOCOL in offered else None
        return Upgrade(self._serve, agreed, self.settings.max_message, principal, head.headers)

    async def _serve(self, channel: MessageChannel) -> None:
        write = self.settings.trace
        await self.service.serve(channel if write is None else traced(channel, write))

    def _http_sse(self, head: Head, principal: str | None) -> Admitted:
        wanted = "GET" if head.path == self.settings.sse_path else "POST"
        if head.method != wanted:
            return refusal(405, f"{head.method[:20]!r} is no method of this endpoint", ("Allow", wanted))
        if wanted == "POST":
            return LegacyPost.find(self, head, principal)
        if not accepts(head.headers.get("accept"))[1]:
            return refusal(406, "a GET is answered with text/event-stream")
        if len(self.streams) >= self.settings.max_sessions or self.draining:
            if not self.draining:
                security_event("flood_refused", what="sessions", peer=head.peer, most=self.settings.max_sessions)
            return refusal(503, "too many sessions; try again later", ("Retry-After", "1"))
        return LegacyStream(self, head, principal)

    def _health(self, head: Head) -> Response:
        if head.method not in ("GET", "HEAD"):
            return Response(405, (("Allow", "GET, HEAD"),))
        text = (("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store"))
        if head.path == "/readyz" and self.draining:
            return Response(503, text, b"draining\n")
        return Response(200, text, b"ok\n")

    # What a POST brings

    def take(self, exchange: Exchange, body: bytes) -> None:
        """Give a body to the session it is meant for."""
        self.exchanges += 1
        settings = self.settings
        message = parse(body, settings.limits)
        self.show("<--", message)
        for dialect in settings.dialects:
            response = dialect(exchange.head, body)
            if response is not None:
                exchange.refuse(response)
                return
        session = self._routing.route(exchange, message)
        if session is None:
            return
        self.ticker.expect(exchange)
        head = exchange.head
        session.deliver((Incoming(message, len(body), exchange, head.headers, exchange.principal),))
        self._routing.delivered(exchange, message)

    def show(self, direction: str, message: Message | bytes) -> None:
        """Show a message to whoever traces."""
        if self._tracer is not None:
            self._tracer.note(direction, message)

    def new_stream(self, event: str | None = None) -> EventStream:
        """Return a stream that belongs to no session."""
        return EventStream(self.settings.stream_buffer, event=event, tracer=self._tracer)

    def ended(self, exchange: Exchange) -> None:
        """Note that an exchange is answered."""
        self.exchanges -= 1
        self.ticker.settled(exchange)

    # Its life

    async def run(self) -> None:
        """Look after what waits, until cancelled: whoever serves runs this beside the host."""
        await self.ticker.run(self.sessions)

    async def drain(self, grace: float) -> None:
        """Take no more work, let calls under way answer for `grace` seconds, cancel them, and end every stream.

        Cancelling it cuts the grace short.
        """
        self.draining = True
        await self.service.drain(grace)
        self.end()

    def end(self) -> None:
        """End every session and stream now."""
        self.draining = True
        for session in self.sessions:
            self.sessions.remove(session, "the server is shutting down")
        self.streams.end()
