"""Provide tools to a service from another program: `await agent_tools.provide("ws://host", [get_weather], token=...)`.

The program dials in and offers its tools, which the service calls on the same connection. A call that arrives is run as
any call of a server is, so limits, quotas, filters, records and cancellation are those of `Server`.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import Any, Final, NoReturn, TypeAlias

import attrs
import trio

from trimcp.agent_tools.bindings.websocket import AgentStream
from trimcp.agent_tools.callers import AgentCaller
from trimcp.agent_tools.catalog.catalog import Catalog
from trimcp.agent_tools.catalog.entries import Implemented
from trimcp.agent_tools.client import connection, supervised, wire
from trimcp.agent_tools.contexts.state import ContextLimits
from trimcp.agent_tools.contexts.table import ContextTable
from trimcp.agent_tools.messages import errors, messages
from trimcp.agent_tools.service import AgentRun
from trimcp.channel import Incoming, Sink
from trimcp.errors import ConnectionLost, LocalError, McpError
from trimcp.server.server import Server
from trimcp.session.limits import Limits
from trimcp.session.push import Pushed
from trimcp.store.contexts import MemoryContexts
from trimcp.support.bounds import check_number
from trimcp.support.cleaning import one_line
from trimcp.support.restarts import RestartCount, Restarts

Tools: TypeAlias = Server[Any] | Iterable[Callable[..., Any] | Implemented]
"""A server whose tools are provided, or functions: plain, or with options in an `Implemented`."""

_MAX_CALLS: Final = 100
_LONGEST: Final = 500

_log = logging.getLogger("trimcp.agent_tools")


async def provide(
    url: str | wire.AgentTarget,
    tools: Tools,
    *,
    token: str | None = None,
    headers: Mapping[str, str] | None = None,
    uds: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
    max_calls: int | None = None,
    restarts: Restarts = supervised.RESTARTS,
    on_registered: Callable[[list[dict[str, Any]]], object] | None = None,
    random: Random | None = None,
    task_status: trio.TaskStatus[list[dict[str, Any]]] = trio.TASK_STATUS_IGNORED,
) -> NoReturn:
    """Provide tools to a service until cancelled. A lost connection is opened again, after a pause.

    The tools exist at the service exactly as long as the connection. When that is lost the calls under way are
    cancelled here, and have failed there. Cancelling this, or a call there, cancels the functions that run.

    Args:
        url: the service, such as "ws://localhost:8080" or "grpcs://host"; or an `AgentTarget` with all options. Tools
            cannot be provided over HTTP.
        tools: a server, whose tools are offered as they are at the time of connecting, or functions. Their schemas
            follow from their type hints, as for `Server.tool`.
        token, headers, uds, ssl_context: see `AgentTarget`.
        max_calls: calls of functions that run at once; as many more may wait, and others are refused. 100 by default.
            A server has `limits` of its own.
        restarts: the pauses, and when the service is given up.
        on_registered: called after each connection with the `name`, `version`, `hash` and `status` of every tool.
        random: varies the pauses.
        task_status: `nursery.start` returns what the first `on_registered` would get.

    Raises:
        AgentToolsError: the service refuses the tools or the token.
        ConnectionLost: it was given up, see `Restarts.most`.
        LocalError, TypeError, ValueError: the tools or options cannot be used.
    """
    target = connection.target_of(
        url, connection.MAX_ROUNDS, token=token, headers=headers, uds=uds, ssl_context=ssl_context
    )
    server = _server_of(tools, max_calls)
    async with (
        server.running() as running,
        ContextTable(ContextLimits(), MemoryContexts(), server.budget).running() as contexts,
    ):
        # No call of a provider has a context: the table stays empty.
        run = AgentRun(running, contexts, Catalog(server))
        count = RestartCount(restarts) if random is None else RestartCount(restarts, random)
        provision = ToolProvision(run, on_registered, task_status)
        await supervised.keep_open(target, count, provision.use, provision.may_pass)


def _server_of(tools: Tools, max_calls: int | None) -> Server[Any]:
    if isinstance(tools, Server):
        if max_calls is not None:
            raise LocalError("max_calls is for functions; a server has Limits")
        return tools
    check_number("max_calls", max_calls, whole=True, optional=True)
    most = _MAX_CALLS if max_calls is None else max_calls
    server: Server[Any] = Server("provider", limits=Limits(max_running=most, backlog_requests=most))
    for tool in tools:
        if isinstance(tool, Implemented):
            server.add_tool(tool.function, **tool.options)
        else:
            server.add_tool(tool)
    return server


@attrs.define(eq=False)
class ToolProvision:
    """Keeps the tools of a run offered to one service, over one connection after another."""

    _run: AgentRun
    _on_registered: Callable[[list[dict[str, Any]]], object] | None
    _task_status: trio.TaskStatus[list[dict[str, Any]]]
    _registered: bool = attrs.field(init=False, default=False)

    async def use(self, opened: wire.AgentWire, begun: Callable[[], None]) -> None:
        """Offer the tools over a connection until it is lost, and cancel the calls that are then under way."""
        pushed: Pushed | None = None
        why = "the provider has stopped"

        def begin(out: Sink) -> Callable[[Incoming], None]:
            nonlocal pushed
            pushed = self._run.server.open(out)
            stream = AgentStream(self._run, AgentCaller(), pushed.session, transport="provider")
            return lambda incoming: stream.receive(_without_context(incoming))

        def registered(answer: messages.ToolsRegistered) -> None:
            begun()
            self._note(answer.tools)

        offer = messages.ProvideTools(tools=[each.to_json() for each in self._run.catalog.manifests()])
        try:
            await opened.provide(offer, begin, registered)
        except ConnectionLost as error:
            why = str(error)
            raise
        finally:
            if pushed is not None:
                pushed.disconnect(why)

    def may_pass(self, error: McpError) -> bool:
        """Whether it may go better over the next connection."""
        # A connection that the service has not found lost yet holds the names.
        return isinstance(error, supervised.PASSING) or (isinstance(error, errors.NameTaken) and self._registered)

    def _note(self, tools: list[dict[str, Any]]) -> None:
        """Tell what the service made of the offer."""
        shown = ", ".join(f"{tool.get('name')} ({tool.get('status')})" for tool in tools)
        _log.info("providing tools: %s", one_line(shown, _LONGEST))
        if self._on_registered is not None:
            self._on_registered(tools)
        if not self._registered:
            self._registered = True
            self._task_status.started(tools)


def _without_context(incoming: Incoming) -> Incoming:
    """Return a request without what is the service's own: its contexts, and that somebody there answers questions."""
    value: Any = incoming.message
    left: Any = {name: member for name, member in value.items() if name not in ("context_id", "statuses")}
    return Incoming(left, incoming.size)
