"""Every message of an agent, at the entrance that all faces share, from those who lack the right for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

import trimcp
from tests.agent_tools.world import WEATHER, Asking, World, answered, make_world
from tests.peers.states import until
from trimcp.agent_tools.callers import AgentCaller
from trimcp.agent_tools.messages.errors import AgentToolsError, UnknownContext, error_from
from trimcp.agent_tools.messages.messages import (
    MESSAGES,
    ContextCreate,
    ContextDestroy,
    ContextRead,
    ContextUpdate,
    ContextWatch,
    ListTools,
    RegisterTool,
    RemoveTool,
    ToolRequest,
)
from trimcp.agent_tools.service import AgentRun

OWNER = AgentCaller(trimcp.Principal("demo", scopes=["tools:register", "read"]), "a")
WEAK = AgentCaller(trimcp.Principal("weak", scopes=[]), "a")
OTHER = AgentCaller(trimcp.Principal("other", scopes=["tools:register", "read"]), "a")
OTHER_AGENT = AgentCaller(trimcp.Principal("demo", scopes=["tools:register", "read"]), "b")
NOBODY = AgentCaller(None, loopback=True)

Ask = Callable[[AgentRun, AgentCaller], Awaitable[Any]]


async def call(run: AgentRun, caller: AgentCaller, tool: str = "guarded") -> None:
    """Call a tool with what its schema refuses: who may not call it learns nothing of that."""
    asking = Asking(run)
    run.start_call(ToolRequest(tool_name=tool, request_id="r", arguments={"wrong": 1}), caller, None, asking)
    await until(lambda: bool(asking.answers))
    if "error" in asking.answers[0]:
        raise error_from(asking.answers[0]["error"])


def sending(message: Any) -> Ask:
    async def send(run: AgentRun, caller: AgentCaller) -> None:
        await answered(run, message, caller)

    return send


async def watch(run: AgentRun, caller: AgentCaller) -> None:
    await answered(run, ContextWatch(context_id="ctx"), caller)
    raise AssertionError("it is watched")


async def provide(run: AgentRun, caller: AgentCaller) -> None:
    await run.catalog.register_all((WEATHER,), caller)


async def cancel(run: AgentRun, caller: AgentCaller) -> None:
    """A call that is not found is not cancelled; nobody is told whether there is one."""
    session = run.server.session()
    if run.call_of(caller, "ctx", "under way", session) is None:
        raise UnknownContext("no such call")


TABLE: dict[str, tuple[Ask, dict[str, AgentCaller], str]] = {
    "tool_request": (call, {"without scopes": WEAK}, "forbidden"),
    "list_tools": (sending(ListTools(name="guarded")), {"without scopes": WEAK}, "unknown_tool"),
    "register_tool": (sending(RegisterTool(tool=WEATHER)), {"without scopes": WEAK, "no token": NOBODY}, "forbidden"),
    "provide_tools": (provide, {"without scopes": WEAK, "no token": NOBODY}, "forbidden"),
    "remove_tool": (
        sending(RemoveTool(name="get_weather")),
        {"without scopes": WEAK, "no token": NOBODY, "another": OTHER, "another agent": OTHER_AGENT},
        "forbidden",
    ),
    **{
        kind: (ask, {"another": OTHER, "another agent": OTHER_AGENT, "no token": NOBODY}, code)
        for kind, ask, code in [
            ("context_read", sending(ContextRead(context_id="ctx")), "unknown_context"),
            ("context_update", sending(ContextUpdate(context_id="ctx", updates={}, version=1)), "unknown_context"),
            ("context_destroy", sending(ContextDestroy(context_id="ctx")), "unknown_context"),
            ("context_watch", watch, "unknown_context"),
            ("tool_cancel", cancel, "unknown_context"),
        ]
    },
}
OPEN = {
    "context_create": "it begins a context of the caller's own",
    "context_unwatch": "it ends a watch of its own connection",
}
CASES = [(kind, who) for kind, (_, callers, _) in TABLE.items() for who in callers]


def test_the_table_has_every_message_of_an_agent() -> None:
    assert {each.type for each in MESSAGES.values() if each.asks} | {"tool_cancel"} == {*TABLE, *OPEN}


@asynccontextmanager
async def running() -> AsyncIterator[tuple[World, AgentRun]]:
    world = make_world()
    async with world.server.running() as served:
        run = world.agent_tools.run_of(served)
        await answered(run, RegisterTool(tool=WEATHER), OWNER)
        await answered(run, ContextCreate(context_id="ctx", state={"notes": "mine"}), OWNER)
        context = run.contexts.get(OWNER.owner, "ctx")
        call = ToolRequest(tool_name="wait", request_id="under way", arguments={})
        run.start_call(call, OWNER, context, Asking(run))
        await world.began.wait()
        yield world, run
        world.release.set()


@pytest.mark.parametrize(("kind", "who"), CASES)
async def test_who_lacks_a_right_is_refused(kind: str, who: str) -> None:
    ask, callers, code = TABLE[kind]
    async with running() as (world, run):
        with pytest.raises(AgentToolsError) as caught:
            await ask(run, callers[who])
        assert caught.value.code == code
        assert "arguments" not in str(caught.value)
        assert "mine" not in str(caught.value)
        assert (world.calls, world.reasons) == (["wait"], [])


async def test_who_lacks_scopes_finds_no_such_tool_among_all() -> None:
    async with running() as (_, run):
        for caller, sees in ((OWNER, True), (WEAK, False)):
            listed: Any = await answered(run, ListTools(), caller)
            assert ("guarded" in [tool["name"] for tool in listed.tools]) is sees
