"""One connection to the server before the load, with a client of every era: its transport, revision and tools."""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, cast

import attrs
import trio

from trimcp.bench.plan import CLIENT, NUMBER, MixEntry, Plan, PreparedRequest, prepare
from trimcp.bench.replicas import reads_header
from trimcp.bench.report import WireName
from trimcp.client.client import Client
from trimcp.client.session import ClientSession
from trimcp.errors import ConnectionLost, LocalError
from trimcp.framing.headers import find_mirrors
from trimcp.transports.stdio.child import StdioServer
from trimcp.transports.targets import masked_url
from trimcp.wire.capabilities import TASKS, declares
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, Revision
from trimcp.wire.tools import Tool

if TYPE_CHECKING:
    from trimcp.agent_tools.client.wire import AgentTarget
    from trimcp.transports.grpc.client import GrpcServer
    from trimcp.transports.http.client.target import HttpServer
    from trimcp.transports.websocket.client import WebSocketServer

Target: TypeAlias = "StdioServer | HttpServer | WebSocketServer | GrpcServer"
T = TypeVar("T")

_NAMED = 10
_TRANSPORTS: Final[Mapping[str, WireName]] = {"ws": "websocket", "gr": "grpc"}
_AGENTS: Final[Mapping[str, WireName]] = {"ws": "agents_websocket", "gr": "agents_grpc"}
_MORE_ARGUMENTS = ("additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf", "if")


@attrs.frozen
class Found:
    """The discovered properties of a server."""

    transport: WireName  # the transport of the messages
    revision: Revision  # the negotiated revision
    # `name`, `version`: as the server declares them
    name: str | None
    version: str | None
    requests: tuple[PreparedRequest, ...]  # the requests of the plan, ready to be sent

    @property
    def spoken(self) -> str:
        """What is spoken: the revision's date, or that it is another protocol."""
        return "agent tools" if self.transport in ("agents_http", *_AGENTS.values()) else self.revision.name


def name_of(target: Target) -> str:
    """Return a display name of a server: its command line, or its URL without user and query."""
    return shlex.join(target.command) if isinstance(target, StdioServer) else masked_url(target.url, path=True)


def as_planned(target: Target, plan: Plan) -> Target:
    """Return the target with the plan's transport."""
    if plan.transport != "auto" and getattr(target, "url", "").startswith("http"):
        mode = "sse" if plan.transport == "sse" else "streamable"
        return cast(Target, attrs.evolve(cast(Any, target), mode=mode))
    return target


async def discover(target: Target, plan: Plan) -> Found:
    """Connect to a server with a usual client, check that it has what the plan calls, and disconnect.

    Raises McpError: it cannot be reached, or lacks something that the plan calls; the text says what to do.
    """
    return await _within(plan, target, _discover_agents if "agent" in plan.steps else _discover)


async def list_tools(target: Target, plan: Plan) -> Sequence[Tool]:
    """Return the tools of a server. Raises as `discover`."""

    async def ask(target: Target, plan: Plan) -> Sequence[Tool]:
        if "agent" in plan.steps:
            return await _tools_of_agents(target, plan)
        async with _client(plan).connect(target, revision=plan.revision) as session:
            return await session.list_tools()

    return await _within(plan, target, ask)


async def _within(plan: Plan, target: Target, ask: Callable[[Target, Plan], Awaitable[T]]) -> T:
    try:
        with trio.move_on_after(3 * plan.opening):
            return await ask(as_planned(target, plan), plan)
    except trio.TooSlowError as error:
        raise ConnectionLost(f"{name_of(target)} was not ready: {error}") from None
    raise ConnectionLost(f"{name_of(target)} was not ready within {3 * plan.opening:g} seconds")


def _client(plan: Plan) -> Client:
    return Client(CLIENT["name"], CLIENT["version"], connect_timeout=plan.opening)


async def _discover(target: Target, plan: Plan) -> Found:
    if isinstance(target, StdioServer):
        async with _client(plan).connect(target, revision=plan.revision) as session:
            return await _look(session, plan, "stdio")
    async with target.connect() as channel, _client(plan).connect(channel, revision=plan.revision) as session:
        transport: WireName = _TRANSPORTS.get(target.url[:2].lower(), "http")
        if getattr(channel, "speaks_sse", False):
            transport = "sse"
        return await _look(session, plan, transport)


# Agent tools


def agent_target(target: Target, plan: Plan) -> AgentTarget:
    """Return a service of agent tools at the same URL. Raises LocalError: there can be none."""
    from trimcp.agent_tools.client.wire import AgentTarget

    if isinstance(target, StdioServer):
        raise LocalError("agent tools have a URL: http://, ws:// or grpc:// and a host")
    auth = getattr(target, "auth", None)
    return AgentTarget(target.url, headers=target.headers, uds=target.uds, auth=auth, timeout=plan.opening)


async def _tools_of_agents(target: Target, plan: Plan) -> list[Tool]:
    from trimcp.agent_tools.client.connection import connect

    async with connect(agent_target(target, plan)) as agent:
        manifests = await agent.tools()
    return [
        Tool(name=each["name"], input_schema=each.get("parameters") or {"type": "object"})
        for each in manifests
        if isinstance(each.get("name"), str)
    ]


async def _discover_agents(target: Target, plan: Plan) -> Found:
    tools = {tool.name: tool for tool in await _tools_of_agents(target, plan)}
    transport: WireName = _AGENTS.get(agent_target(target, plan).url[:2].lower(), "agents_http")
    for entry in plan.mix:
        if NUMBER not in entry.label:
            _check_tool(entry, tools)
    requests = tuple(prepare(entry, LATEST, progress=False, http=False) for entry in plan.mix)
    return Found(transport, LATEST, None, None, requests)


# What the server has


async def _look(session: ClientSession, plan: Plan, transport: WireName) -> Found:
    called = {entry.params["name"] for entry in plan.mix if entry.method == "tools/call"}
    tools = {tool.name: tool for tool in await session.list_tools()} if called else {}
    extensions = session.server_capabilities.extensions or {}
    if "task" in plan.steps and not (session.revision.modern and TASKS in extensions):
        raise LocalError(f"there are no tasks with this server in {session.revision.name}, as --step task needs")
    if "change" in plan.steps and not declares(session.server_capabilities, "resources.subscribe"):
        raise LocalError("the server does not tell changes of resources, as --step change needs")
    if plan.cut and not (transport == "http" and session.revision.resumable):
        raise LocalError(
            f"--cut needs Streamable HTTP, and a revision such as {LATEST_LEGACY.name} that resumes streams"
        )
    if reads_header(plan.replica_by) and transport not in ("http", "sse"):
        raise LocalError("--replica-by with a header needs HTTP; elsewhere it is serverInfo or _meta:KEY")
    requests = []
    for entry in plan.mix:
        tool = None
        if entry.method == "tools/call" and NUMBER not in entry.label:
            tool = _check_tool(entry, tools)
        mirrors = find_mirrors(tool.input_schema) if tool is not None else ()
        http = transport == "http"
        requests.append(prepare(entry, session.revision, progress=plan.progress, http=http, mirrors=mirrors))
    info = session.server_info
    name, version = (None, None) if info is None else (info.name, info.version)
    return Found(transport, session.revision, name, version, tuple(requests))


def _check_tool(entry: MixEntry, tools: Mapping[str, Tool]) -> Tool:
    """Return the tool to call. Raises at once for mistakes that would otherwise make every call fail."""
    tool = tools.get(entry.label)
    if tool is None:
        raise LocalError(f"the server has no tool {entry.label!r:.60}; it has {_listed(list(tools))}")
    schema: Any = tool.input_schema
    arguments = entry.params.get("arguments") or {}
    missing = [name for name in schema.get("required") or () if name not in arguments]
    if missing:
        raise LocalError(f"the tool {entry.label!r:.60} needs {_listed(missing)}")
    known = schema.get("properties")
    unknown = [name for name in arguments if name not in known] if isinstance(known, Mapping) else []
    # A server may ignore unknown arguments, and then the measured call is not the intended one.
    if unknown and not any(schema.get(keyword) for keyword in _MORE_ARGUMENTS):
        raise LocalError(
            f"the tool {entry.label!r:.60} has no argument {_listed(unknown)}; it takes {_listed(list(known))}"
        )
    return tool


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(f"{name:.60}" for name in names[:_NAMED]) + more
