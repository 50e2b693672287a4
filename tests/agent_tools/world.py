"""A server with one tool for each thing that may happen to a call, and what conforms to the published schemas."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache
from typing import Any, TypedDict

import attrs
import jsonschema
import orjson
import trio

import trimcp
from tests.peers.states import until
from trimcp.agent_tools import AgentCaller, AgentMessage, AgentRun, AgentTools, ContextActor, RegistrationRules
from trimcp.agent_tools.answering import Found, Later, message_of
from trimcp.agent_tools.messages.answers import CallAnswer
from trimcp.agent_tools.messages.messages import published
from trimcp.agent_tools.service import AgentBinding, AgentCall
from trimcp.channel import NOWHERE
from trimcp.session.push import Pushed
from trimcp.session.scopes import cancellation_text
from trimcp.session.session import Session
from trimcp.transports.http.interfaces import Head

TOKENS = {"demo-token": "demo", "other-token": "other", "weak-token": "weak", "short-token": "demo"}
"""Static tokens, and whose they are. `weak` lacks every scope; the short one ends in a minute."""

WEATHER = {
    "name": "get_weather",
    "description": "Get current weather for a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@cache
def _validators() -> dict[str, Any]:
    schemas = orjson.loads(published())
    kinds = [each["$ref"].rpartition("/")[2] for each in schemas["oneOf"]]
    return {
        kind: jsonschema.Draft202012Validator({"$ref": f"#/$defs/{kind}", "$defs": schemas["$defs"]}) for kind in kinds
    }


def conforms(message: Any) -> Any:
    """Return a message of the service, after comparing it with the published schema of its type."""
    assert isinstance(message, dict), message
    assert message["type"] in _validators(), message
    _validators()[message["type"]].validate(message)
    return message


class Asking(AgentBinding):
    """Asks without a connection, and watches no longer than for the first event. Keeps the answers of its calls."""

    transport = "none"
    out = NOWHERE

    def __init__(self, run: AgentRun) -> None:
        self.run = run
        self.answers: list[Any] = []

    def open_session(self) -> tuple[Session, Pushed]:
        own = self.run.server.open_for_one()
        return own.session, own

    def watch(self, message: Any, received: Any, context: ContextActor, /) -> Found:
        return message_of(context.whole())

    def answered(self, call: AgentCall, answer: CallAnswer, /) -> None:
        self.answers.append(orjson.loads(answer.encode(call.request)))


async def answered(run: AgentRun, message: AgentMessage, caller: AgentCaller) -> Any:
    """Return the answer to a message that is no call, as every binding gets it."""
    found = run.receive(message, caller, Asking(run))
    return await found.answer() if isinstance(found, Later) else found


def call_of(tool: str, id: str = "r1", context: str | None = None, **members: Any) -> dict[str, Any]:
    """A `tool_request`; members beyond those of the message are arguments of the tool."""
    known = ("version", "timeout", "progress", "statuses", "input_responses", "request_state")
    given = {name: members.pop(name) for name in known if name in members}
    request = {"type": "tool_request", "tool_name": tool, "arguments": members, "request_id": id, **given}
    return request if context is None else {**request, "context_id": context}


class Weather(TypedDict):
    city: str
    temperature: int
    unit: str


def get_weather(city: str) -> Weather:
    return {"city": city, "temperature": 5, "unit": "Celsius"}


def identify(head: Head) -> trimcp.Principal | trimcp.Refused:
    """Know the tokens of `TOKENS`; the agent is the principal's client, if the token has one."""
    _, _, token = head.headers.get("authorization", "").partition(" ")
    id = TOKENS.get(token)
    if id is None:
        return trimcp.Refused()
    scopes = frozenset() if id == "weak" else frozenset(("tools:register", "read"))
    ends = time.time() + 60 if token == "short-token" else None
    return trimcp.Principal(id, scopes=scopes, claims={"client_id": f"agent-of-{id}", "team": id}, expires_at=ends)


@attrs.define(eq=False)
class World:
    """A server, and what its tools went through.

    Attributes:
        server, agent_tools: what is served.
        calls: the tools that ran, in order.
        began: set once one that waits has begun.
        reasons: why those were cancelled.
        release: set to let those that wait return.
        audit: the records.
    """

    server: trimcp.Server[Any]
    agent_tools: AgentTools = attrs.field(init=False)
    calls: list[str] = attrs.field(factory=list)
    began: trio.Event = attrs.field(factory=trio.Event)
    reasons: list[str] = attrs.field(factory=list)
    release: trio.Event = attrs.field(factory=trio.Event)
    audit: list[dict[str, Any]] = attrs.field(factory=list)

    @property
    def draining(self) -> bool:
        """Whether the server has begun to end."""
        return any(running._drained for running in self.agent_tools._runs)

    async def wait_for(self, count: int = 1) -> None:
        """Wait until so many tools were cancelled."""
        await until(lambda: len(self.reasons) >= count)


def make_world(*, limits: trimcp.Limits | None = None, anonymous: bool = False, **options: Any) -> World:
    """A new server; the options are those of `AgentTools`."""
    audit: list[dict[str, Any]] = []
    server = trimcp.Server("world", "1", limits=limits, audit=trimcp.guard.Audit(write=audit.append))
    world = World(server, audit=audit)

    @server.tool
    async def echo(text: str) -> str:
        world.calls.append("echo")
        return text

    @server.tool
    async def fail() -> str:
        raise trimcp.ToolError("the tool says no")

    @server.tool(timeout=0.01)
    async def slow() -> str:
        await trio.sleep_forever()
        raise AssertionError

    @server.tool
    async def odd() -> str:
        raise trimcp.ErrorReply(-7, "an error of its own")

    @server.middleware
    async def spoil(ctx: Any, params: Any, call_next: Any) -> Any:
        if getattr(params, "arguments", None) == {"text": "spoil me"}:
            params.arguments["text"] = 7
        return await call_next(ctx, params)

    @server.tool
    async def crash() -> str:
        raise KeyError("a secret")

    @server.tool
    async def wait() -> str:
        world.calls.append("wait")
        world.began.set()
        try:
            await world.release.wait()
        except trio.Cancelled as cancelled:
            world.reasons.append(cancellation_text(cancelled))
            raise
        return "released"

    @server.tool(quota=trimcp.Quota(running=1, waiting=0))
    async def single() -> str:
        world.began.set()
        await world.release.wait()
        return "done"

    @server.tool(quota=trimcp.Quota(per_second=0.1, burst=1, waiting=0))
    async def seldom() -> str:
        return "done"

    @server.tool
    async def count_to(number: int, ctx: trimcp.Context) -> int:
        for reached in range(1, number + 1):
            await ctx.report_progress(reached, number, f"at {reached}")
        return number

    @server.tool
    async def hurry(number: int, ctx: trimcp.Context) -> int:
        for reached in range(1, number + 1):
            ctx.report_progress_nowait(reached, number, "x" * 100)
        await ctx.report_progress(number + 1)
        return number

    @server.tool
    async def count_and_wait(ctx: trimcp.Context) -> str:
        await ctx.report_progress(1, 2)
        return await wait()

    @server.tool(scopes=["read"])
    async def guarded(text: str) -> str:
        return text

    @server.tool
    async def forbidden() -> str:
        raise AssertionError

    @server.tool
    async def remember(key: str, value: str, ctx: trimcp.Context) -> int:
        assert ctx.agent_context is not None
        return await ctx.agent_context.update({"intermediate_results": {key: value}})

    @server.tool
    async def ask(ctx: trimcp.Context) -> str:
        answer = await ctx.elicit("How old?", int)
        return f"{answer.action} {answer.value}"

    def allow(access: Any) -> bool | trimcp.guard.Denied:
        return trimcp.guard.Denied("nobody may") if access.name == "forbidden" else True

    settings: dict[str, Any] = {
        "implementations": {"get_weather": get_weather},
        "registration": RegistrationRules(anonymous_on_loopback=anonymous),
        "authenticate": identify,
        "allow": allow,
        "anonymous": options.pop("anonymous_agents", None),
        **options,
    }
    world.agent_tools = AgentTools(server, **settings)
    return world


def events_of(body: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the type and message of each event of a stream."""
    for block in body.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if lines:
            yield lines["event"], conforms(orjson.loads(lines["data"]))
