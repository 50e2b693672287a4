"""The HTTP application of a server: its paths, and which requests are admitted. Independent of HTTP server software.

Requests are admitted by their head: path, Host and Origin, method, identity, content types. An admitted request gets a
handler, which answers it without this module. (basic/transports, "Streamable HTTP".)
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Final

import attrs
import trio

from trimcp.budget import Budget, give_back, owner_of
from trimcp.channel import MessageChannel
from trimcp.security import security_event
from trimcp.support.deadlines import Deadlines
from trimcp.support.nurseries import contained
from trimcp.transports.http.endpoint.accept import accepts, is_compressed, is_grpc, is_json, is_websocket_key
from trimcp.transports.http.endpoint.exchange import Exchange, Forms, SessionDelete, SessionGet
from trimcp.transports.http.endpoint.sse2024 import Sse2024
from trimcp.transports.http.interfaces import Admitted, Head, HttpResponse, Service, Upgrade, refusal, token_expired
from trimcp.transports.http.peers.identity import Authenticate, Refused, identify
from trimcp.transports.http.settings import HttpSettings
from trimcp.transports.http.state.sessions import Shared
from trimcp.transports.trace import traced
from trimcp.wire.codes import OVERLOADED

if TYPE_CHECKING:
    from trimcp.transports.grpc.server import GrpcRoutes
    from trimcp.transports.http.endpoint.sharing import SessionSharing

_SUBPROTOCOL: Final = "mcp"

# Clients send the same two headers with each request. An untrusted one may vary them, so few and short ones are cached.
_MOST_FORMS: Final = 256
_LONGEST_FORM: Final = 256


@attrs.define(eq=False)
class HttpApplication:
    """One server over HTTP. An `Application` to its host.

    It has more than 300 lines because each request is judged here, by whatever protocol it is.

    Args:
        service: the server.
        settings: paths, checks and bounds.

    Attributes:
        shared: what its requests share: clock, tables and settings.
        sse2024: the paths and streams of HTTP+SSE.
        connections: open connections, if our own listener is the host.
        deadlines: the clock; `run` runs it.
        budget: counts the memory used for all peers.
        draining: set once no new work is taken.
        sharing: shares its sessions with other processes, or None.
    """

    service: Service
    settings: HttpSettings
    shared: Shared = attrs.field(init=False)
    sse2024: Sse2024 = attrs.field(init=False)
    connections: int = attrs.field(init=False, default=0)
    deadlines: Deadlines = attrs.field(init=False)
    budget: Budget = attrs.field(init=False)
    draining: trio.Event = attrs.field(init=False, factory=trio.Event)
    sharing: SessionSharing | None = attrs.field(init=False, default=None)
    _hook: Authenticate | None = attrs.field(init=False)
    _grpc: GrpcRoutes | None = attrs.field(init=False, default=None)  # once a call has come
    _known_forms: dict[tuple[str | None, str | None], Forms | None] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self.shared = Shared(self.service, self.settings)
        self.sse2024 = Sse2024(self.shared)
        self.deadlines = self.shared.deadlines
        self.budget = self.shared.budget
        settings = self.settings
        self._hook = settings.authenticate or settings.auth
        if settings.store is not None:
            from trimcp.transports.http.endpoint import sharing  # loaded where processes share sessions

            self.sharing = sharing.SessionSharing(self.shared, settings.store, self._admit_shared)
        if settings.agent_tools is not None:
            self.shared.second_protocol = settings.agent_tools.over_http(self.service, self.shared)
            self._hook = self._hook or settings.agent_tools.authenticate
        self.shared.judged_by_head = self._hook is None and settings.access_log is None

    def statistics(self) -> dict[str, int]:
        """Return the numbers of open connections, exchanges, sessions and streams of HTTP+SSE."""
        return {
            "connections": self.connections,
            "exchanges": self.shared.exchanges,
            "sessions": len(self.shared.sessions),
            "streams": len(self.sse2024.streams),
        }

    # Called by the host

    async def admit(self, head: Head) -> Admitted:
        """Admit or refuse a request by its head; see `Application.admit`."""
        settings = self.settings
        if settings.access_log is not None:
            head.began = trio.current_time()
        # A health probe sends any address as its Host, and is not sent by a page.
        health = settings.health and head.path in ("/healthz", "/readyz")
        reason = (settings.origins.refuse_origin if health else settings.origins.refuse)(head)
        if reason is not None:
            security_event("origin_refused", why=reason, peer=head.peer, path=head.shown_path)
            refused = refusal(403, reason)
            if head.http2 and is_grpc(head.headers.get("content-type")):
                return self._grpc_routes().refused(head, refused)
            return refused
        if health:
            return self._health(head)
        head.reply_headers = cors = settings.origins.cors(head)
        admitted = await self._find(head)
        if cors and isinstance(admitted, HttpResponse):
            # A browser refuses a page the response where two say who may read it: its own, such as "*", counts.
            own = {name.lower() for name, _ in admitted.headers}
            more = (each for each in cors if each[0].lower() not in own or each[0] == "Vary")
            return attrs.evolve(admitted, headers=(*admitted.headers, *more))
        return admitted

    def done(self, head: Head, status: int, sent: int) -> None:
        """Log a response in the access log; see `Application.done`."""
        access = self.settings.access_log
        if access is not None:
            access.record(head, status, sent)

    def _upgrade(self, head: Head, subprotocol: str | None = None) -> Upgrade | HttpResponse:
        """Return how to serve a session on this connection, or the refusal."""
        if self.shared.draining:
            return refusal(503, "shutting down")
        return Upgrade(
            partial(self._serve, head),
            subprotocol,
            self.service.max_message,
            head.principal,
            head.headers,
            open=partial(self.service.open_connected, holding=head.holding, via=self.shared.sessions),
            show=None if self.settings.trace is None else self.shared.show,
            until=head.until,
        )

    # Routes

    async def _find(self, head: Head) -> Admitted:
        settings, path = self.settings, head.path
        if settings.auth is not None and path in settings.auth.metadata_paths:
            return settings.origins.preflight(head) or await settings.auth.describe(head)
        second_protocol = self.shared.second_protocol
        extra = settings.routes.get(path)
        theirs = extra is None and second_protocol is not None
        if theirs and second_protocol is not None:
            extra = second_protocol.find(head)
            theirs = extra is not None
        if extra is None and path not in (
            settings.path,
            settings.websocket_path,
            settings.sse_path,
            settings.sse_path and settings.messages_path,
        ):
            if head.method == "POST" and is_grpc(head.headers.get("content-type")):
                return await self._call(head)
            return refusal(404, "there is nothing here; check the path of the URL")
        preflight = settings.origins.preflight(head)
        if preflight is not None:
            return preflight
        if self._hook is not None and (refused := await self._identify(self._hook, head)) is not None:
            if theirs and second_protocol is not None:
                return second_protocol.refused(refused.status, refused.message, refused.headers)
            return refusal(refused.status, refused.message, *refused.headers)
        if extra is not None:
            if theirs:
                return await extra(head)
            answer: Admitted = await contained(extra, head)  # a function of the user's
            return answer
        if path == settings.path:
            sharing = self.sharing
            if sharing is not None and "mcp-session-id" in head.headers:
                elsewhere = await sharing.find(head)
                if elsewhere is not None:
                    return elsewhere
            return self._streamable(head)
        if path == settings.websocket_path:
            return self._websocket(head)
        return self.sse2024.admit(head)

    # gRPC

    async def _call(self, head: Head) -> Admitted:
        """Admit a call of gRPC, or refuse it with a status."""
        if not head.http2:
            return refusal(426, "gRPC needs HTTP/2", ("Upgrade", "h2c"))
        routes = self._grpc_routes()
        if self._hook is not None and not routes.admits_anyone(head):
            refused = await self._identify(self._hook, head)
            if refused is not None:
                return routes.refused(head, refusal(refused.status, refused.message, *refused.headers))
        return routes.admit(head)

    def _grpc_routes(self) -> GrpcRoutes:
        if self._grpc is None:
            from trimcp.transports.grpc.server import GrpcRoutes

            second_protocol = self.shared.second_protocol
            services = {} if second_protocol is None else second_protocol.grpc_services()
            self._grpc = GrpcRoutes(self._upgrade, self.draining, self.settings.max_sessions, services)
        return self._grpc

    async def _identify(self, hook: Authenticate, head: Head) -> Refused | None:
        """Note who makes a request; return the refusal of one that may not."""
        second_protocol = self.shared.second_protocol
        if second_protocol is not None and "authorization" not in head.headers and second_protocol.admits_anyone(head):
            return None
        identity = await identify(hook, head)
        if isinstance(identity, Refused):
            # A request without credentials only asks which are required, and a check that crashed is logged as an
            # ERROR.
            if identity.status < 500 and ("authorization" in head.headers or identity.status != 401):
                security_event("authentication_failed", why=identity.message, peer=head.peer, path=head.shown_path)
            return identity
        head.principal = identity
        if head.holding is not None:
            head.holding.move(owner_of(identity, None))
        return None

    def _streamable(self, head: Head) -> Admitted:
        method, keeps_sessions = head.method, self.shared.routing.keeps_sessions
        if method == "POST":
            return self._post(head)
        if not keeps_sessions or method not in ("GET", "DELETE"):
            allowed = "GET, POST, DELETE" if keeps_sessions else "POST"
            return refusal(405, f"{method[:20]!r} is no method of this endpoint", ("Allow", allowed))
        if method == "GET" and not accepts(head.headers.get("accept"))[1]:
            return refusal(406, "a GET is answered with text/event-stream")
        id = head.headers.get("mcp-session-id")
        if id is None:
            return refusal(400, "the header Mcp-Session-Id is missing")
        session = self.shared.sessions.find(id, head.principal)
        if session is None:
            return refusal(404, "there is no such session; initialize anew")
        if method == "DELETE":
            return SessionDelete(session, head)
        return SessionGet(session, head) if self.sharing is None else self.sharing.get(session, head)

    def _admit_shared(self, head: Head) -> Admitted:
        """Admit a request that came to another process, which has identified the caller."""
        return self._streamable(head) if head.path == self.settings.path else self.sse2024.admit(head)

    def _post(self, head: Head) -> Admitted:
        headers, shared = head.headers, self.shared
        content, accept = headers.get("content-type"), headers.get("accept")
        try:
            forms = self._known_forms[content, accept]
        except KeyError:
            forms = self._forms(content, accept)
        if forms is None and not is_json(content):
            return refusal(415, "the body must be application/json in UTF-8")
        if is_compressed(headers.get("content-encoding")):
            return refusal(415, "the body must not be compressed", ("Accept-Encoding", "identity"))
        if forms is None:
            return refusal(406, "answers are application/json or text/event-stream")
        made = Exchange if self.sharing is None else self.sharing.exchange(head)
        exchange = self._exchange(made, forms, head)
        if exchange is None:
            security_event("flood_refused", what="exchanges", peer=head.peer, most=self.settings.max_exchanges)
            return refusal(503, "too much is under way; try again later", code=OVERLOADED)
        if shared.judged_by_head:
            id = None if self.sharing is None else headers.get("mcp-session-id")
            if id is None:
                head.again = partial(self._exchange, made, forms)
            elif shared.sessions.has(id):
                head.again = partial(self._exchange_here, id, made, forms)
        return exchange

    def _exchange(self, made: type[Exchange], forms: Forms, head: Head) -> Exchange | None:
        """Return the handler of an admitted POST, or None if too much is under way."""
        shared = self.shared
        return None if shared.exchanges >= shared.settings.max_exchanges else made(shared, head, forms)

    def _exchange_here(self, id: str, made: type[Exchange], forms: Forms, head: Head) -> Exchange | None:
        """Return what `_exchange` does, or None where the session is not here any more."""
        return self._exchange(made, forms, head) if self.shared.sessions.has(id) else None

    def _forms(self, content: str | None, accept: str | None) -> Forms | None:
        """Return the allowed formats of a POST's response, or None. Cached, because clients repeat their headers."""
        json, events = accepts(accept)
        forms = None
        if is_json(content) and (json or events):
            reply = self.settings.reply
            forms = Forms(events, events and reply != "json", events and (reply == "sse" or not json))
        if len(self._known_forms) < _MOST_FORMS and len(content or "") + len(accept or "") < _LONGEST_FORM:
            self._known_forms[content, accept] = forms
        return forms

    def _websocket(self, head: Head) -> Admitted:
        if not head.websocket:
            return refusal(426, "this is a WebSocket", ("Upgrade", "websocket"))
        if not is_websocket_key(head.headers.get("sec-websocket-key")):
            return refusal(400, "the header Sec-WebSocket-Key is no 16 bytes in base64")
        offered = [name.strip() for name in head.headers.get("sec-websocket-protocol", "").split(",")]
        agreed = _SUBPROTOCOL if _SUBPROTOCOL in offered else None
        return self._upgrade(head, agreed)

    async def _serve(self, head: Head, channel: MessageChannel) -> None:
        channel.holding, channel.link = head.holding, head.link
        write = self.settings.trace
        with trio.CancelScope(deadline=trio.current_time() + max(0.0, head.until - time.time())) as scope:
            await self.service.serve(channel if write is None else traced(channel, write), self.shared.sessions)
        if scope.cancelled_caught:
            token_expired(head.principal)

    def _health(self, head: Head) -> HttpResponse:
        if head.method not in ("GET", "HEAD"):
            return HttpResponse(405, (("Allow", "GET, HEAD"),))
        text = (("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store"))
        if head.path == "/readyz" and self.shared.draining:
            return HttpResponse(503, text, b"draining\n")
        if head.path == "/readyz" and self.sharing is not None and self.sharing.failing:
            return HttpResponse(503, text, b"the shared store cannot be reached\n")
        return HttpResponse(200, text, b"ok\n")

    # Lifetime

    async def run(self) -> None:
        """Run the clock until cancelled. The caller runs this beside the host."""
        async with trio.open_nursery() as nursery:
            self.budget.when_low = lambda: nursery.start_soon(give_back)
            try:
                await self.deadlines.run()
            finally:
                self.budget.when_low = None

    async def drain(self, grace: float, end_idle: Callable[[], Awaitable[object]] | None = None) -> None:
        """Accept no more work, let running calls answer for `grace` seconds, cancel them, and end every stream.

        Cancelling ends the grace at once. `end_idle` lets clients go elsewhere, and ends the connections without a
        request. It is awaited before, unless calls run that their clients can reach over these only: to answer a
        question, or to cancel.
        """
        if end_idle is not None and not self._awaits_answers:
            await end_idle()
        self._end_admission()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.service.drain, grace, self.shared.sessions)
            if self.sharing is not None:
                await self.sharing.hand_over(grace)
        self.end()

    @property
    def _awaits_answers(self) -> bool:
        if self.sharing is not None and self.sharing.letters.has_come:
            return False  # what arrives at another process is handed over
        streams = self.sse2024.streams
        return not (all(each.pushed.at_rest for each in self.shared.sessions) and all(each.at_rest for each in streams))

    def _end_admission(self) -> None:
        self.shared.draining = True
        self.draining.set()
        if self._grpc is not None:
            self._grpc.drain()

    def end(self) -> None:
        """End every session and stream now."""
        self._end_admission()
        for session in self.shared.sessions:
            session.end("the server is shutting down", ending=True)
        for stream in self.sse2024.streams:
            stream.end("the server is shutting down", ending=True)
        if self.shared.second_protocol is not None:
            self.shared.second_protocol.end()
