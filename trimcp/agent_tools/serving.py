"""A server's agent tools: what is served beside MCP, by whom it is used, and what they may."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs

from trimcp.agent_tools.callers import agent_of
from trimcp.agent_tools.catalog.catalog import Catalog
from trimcp.agent_tools.catalog.entries import Implemented, version_of
from trimcp.agent_tools.catalog.rules import RegistrationRules
from trimcp.agent_tools.contexts.state import ContextLimits
from trimcp.agent_tools.contexts.table import ContextTable
from trimcp.agent_tools.messages.errors import NotAllowed
from trimcp.agent_tools.service import MAX_CALLS, AgentCall, AgentRun
from trimcp.errors import ErrorReply, LocalError
from trimcp.guard.permission import AccessRequest, Decision, judge
from trimcp.server.running import Running
from trimcp.server.server import Server
from trimcp.session.agent_context import AgentContext
from trimcp.session.context import Context
from trimcp.store.contexts import ContextStore, MemoryContexts
from trimcp.store.naming import contexts_of
from trimcp.support.bounds import check_callable, check_instance, check_number, check_truth
from trimcp.wire.codes import FORBIDDEN
from trimcp.wire.revisions import LATEST

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from trimcp.transports.http.interfaces import SecondProtocol
    from trimcp.transports.http.peers.identity import Authenticate
    from trimcp.transports.http.state.sessions import Shared

log: logging.Logger = logging.getLogger("trimcp.agent_tools")


@attrs.frozen
class AgentAccess(AccessRequest):
    """What an `allow` function of `AgentTools` decides on: a call of a tool, over either protocol.

    Attributes:
        agent: who calls: the agent's id; over MCP that of its token.
        agent_context: the context that the call belongs to, or None.
        version: the tool's version.
    """

    agent: str
    agent_context: AgentContext | None
    version: str


AgentAllow: TypeAlias = "Callable[[AgentAccess], Decision | Awaitable[Decision]]"
"""Decides on a call, sync or async: True, False or `Denied("why")`. An exception denies the call."""


class AgentTools:
    """Serves a server's tools also by the agent-tools protocol: `serve_http(server, agent_tools=AgentTools(server))`.

    Args:
        server: the server, before it runs.
        implementations: functions, by name, that a manifest can register as a tool (registration by reference).
        registration: who may register tools, how many, and how large.
        allow: decides on each call of a tool, over both protocols, beside the tool's own `allow`.
        contexts: the bounds of contexts.
        store: keeps contexts, or the URL of what does (`sqlite:///path`, `redis://host`); by default in memory, so
            that they end with the server.
        agent_claim: the claim of a token that names the agent; by default the client that it was issued to.
        authenticate: identifies callers on a port that has no check of its own: `bearer_tokens({...})`.
        anonymous: what happens on a port without any check, where all callers are the agent `anonymous` and share their
            contexts: they are served on this machine only, with a warning at the start; "loopback" is the same without
            the warning, and "anywhere" serves everybody, as behind a gateway that checks.
        strict: refuse messages with members that the protocol does not have.
        bind_permissions: whether a call in a context that has `permissions` is refused unless they include the tool: by
            its name, or by all scopes that it needs. False leaves that to `allow`.
        max_calls: calls under way, of all callers. When there are so many, whoever has 16 times as many as a newcomer
            loses the oldest of them to it; else the newcomer is refused.

    Attributes:
        catalog: the tools and who registered them.
    """

    def __init__(
        self,
        server: Server[Any],
        *,
        implementations: Mapping[str, Callable[..., Any] | Implemented] | None = None,
        registration: RegistrationRules | None = None,
        allow: AgentAllow | None = None,
        contexts: ContextLimits | None = None,
        store: ContextStore | str | None = None,
        agent_claim: str | None = None,
        authenticate: Authenticate | None = None,
        anonymous: Literal["loopback", "anywhere"] | None = None,
        strict: bool = False,
        bind_permissions: bool = True,
        max_calls: int = MAX_CALLS,
    ) -> None:
        if LATEST not in server.profile.revisions:
            raise LocalError(f"agent tools are served by calls of {LATEST.name}, which this server does not speak")
        if server.runs:
            raise LocalError("agent tools cannot be added while the server runs")
        check_instance("contexts", contexts, ContextLimits, "ContextLimits")
        check_instance("registration", registration, RegistrationRules, "RegistrationRules")
        if authenticate is not None:
            check_callable("authenticate", authenticate)
        check_truth("strict", strict)
        check_truth("bind_permissions", bind_permissions)
        self.server: Server[Any] = server
        self.contexts: ContextLimits = ContextLimits() if contexts is None else contexts
        self.store: ContextStore = MemoryContexts() if store is None else contexts_of(store)
        self.agent_claim: str | None = agent_claim
        self.authenticate: Authenticate | None = authenticate
        if anonymous not in (None, "loopback", "anywhere"):
            raise ValueError(f"anonymous is 'loopback', 'anywhere' or None, not {anonymous!r:.60}")
        self.anonymous: str | None = anonymous
        self.strict: bool = strict
        check_number("max_calls", max_calls, whole=True)
        self.max_calls: int = max_calls
        self.bind_permissions: bool = bind_permissions
        rules = RegistrationRules() if registration is None else registration
        if implementations is not None and not isinstance(implementations, Mapping):
            raise TypeError(f"implementations are functions by their name, not {implementations!r:.60}")
        self.catalog: Catalog = Catalog(server, implementations or {}, rules)
        self._allow = allow
        self._runs: dict[Running, AgentRun] = {}
        server.parts.append(self._beside)
        if allow is not None:
            server.middleware(self._decide)

    @asynccontextmanager
    async def _beside(self, running: Running) -> AsyncIterator[None]:
        """Keep an `AgentRun` for a run of the server while the block runs."""
        async with ContextTable(self.contexts, self.store, self.server.budget).running() as table:
            run = AgentRun(
                running,
                table,
                self.catalog,
                self.agent_claim,
                self.strict,
                self.max_calls,
                self.bind_permissions,
                self.anonymous == "anywhere",
            )
            self._runs[running] = run
            running.hosts.append(run.statistics)
            self.server.beside.append(run.beside)
            try:
                yield
            finally:
                self.server.beside.remove(run.beside)
                self.catalog.shared = None
                del self._runs[running]
                run.end()

    def run_of(self, running: object) -> AgentRun:
        """Return the agent tools of a run of the server. Raises LocalError if it is another server's."""
        run = self._runs.get(running) if isinstance(running, Running) else None
        if run is None:
            raise LocalError("these agent tools belong to another server than the one that is served")
        return run

    def over_http(self, running: object, shared: Shared) -> SecondProtocol:
        """Return what serves it on one port of a run of the server; `shared` is what the port's requests share."""
        from trimcp.agent_tools.bindings.http import AgentHttp

        settings = shared.settings
        if (settings.authenticate or settings.auth or self.authenticate or self.anonymous) is None:
            log.warning(
                "agent tools are served without a check of tokens: all callers on this machine are one agent, and "
                "others are refused; pass authenticate=, or AgentTools(anonymous='loopback') if that is meant"
            )
        run = self.run_of(running)
        if shared.letters is not None and self.catalog.shared is None:
            shared.parts.append(self.catalog.share(shared.letters).run)
        return AgentHttp(run, shared)

    async def _decide(self, ctx: Any, params: Any, call_next: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        """Ask `allow` before a tool is called. Middleware, so that both protocols pass it."""
        if isinstance(ctx, Context) and ctx.method == "tools/call":
            entry = self.server.tools.get(params.name)
            if entry is not None:
                origin = ctx.internals[1].origin
                try:
                    agent = (
                        origin.caller.agent
                        if isinstance(origin, AgentCall)
                        else agent_of(ctx.principal, self.agent_claim)
                    )
                except NotAllowed as error:  # the token of a caller of MCP names none
                    raise ErrorReply(FORBIDDEN, error.message) from None
                arguments = params.arguments or {}
                hints = entry.listed.annotations or None
                name, version, context = entry.listed.name, version_of(entry), ctx.agent_context
                asked = AgentAccess(ctx.method, name, ctx.principal, arguments, hints, ctx, agent, context, version)
                assert self._allow is not None  # else this is no middleware
                await judge(self._allow, asked)
        return await call_next(ctx, params)
