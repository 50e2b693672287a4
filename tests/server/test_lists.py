"""Lists for whoever asks: what middleware sees of them, and what a function decides."""

from __future__ import annotations

import logging
from typing import Any

import attrs
import pytest

import trimcp
import trimcp.testing
from tests.agent_tools.world import Asking, answered
from trimcp import Principal
from trimcp.agent_tools import AgentTools
from trimcp.agent_tools.callers import AgentCaller
from trimcp.agent_tools.messages.errors import UnknownTool
from trimcp.agent_tools.messages.messages import ListTools, ToolRequest
from trimcp.wire import ReadResourceResult
from trimcp.wire.common import EmptyResult, PageParams
from trimcp.wire.lifecycle import SubscriptionsListenParams, SubscriptionsListenResult
from trimcp.wire.methods import METHODS
from trimcp.wire.prompts import CompleteParams, CompleteResult, GetPromptParams, GetPromptResult, ListPromptsResult
from trimcp.wire.resources import (
    ListResourcesResult,
    ListResourceTemplatesResult,
    ReadResourceParams,
    SubscribeParams,
)
from trimcp.wire.tools import CallToolParams, CallToolResult, ListToolsResult

LISTS = {
    "tools/list": ("tools", ListToolsResult),
    "resources/list": ("resources", ListResourcesResult),
    "resources/templates/list": ("resource_templates", ListResourceTemplatesResult),
    "prompts/list": ("prompts", ListPromptsResult),
}
SEEN: dict[str, tuple[type, type]] = {
    **{name: (PageParams, result) for name, (_, result) in LISTS.items()},
    "tools/call": (CallToolParams, CallToolResult),
    "resources/read": (ReadResourceParams, ReadResourceResult),
    "resources/subscribe": (SubscribeParams, EmptyResult),
    "resources/unsubscribe": (SubscribeParams, EmptyResult),
    "prompts/get": (GetPromptParams, GetPromptResult),
    "completion/complete": (CompleteParams, CompleteResult),
    "subscriptions/listen": (SubscriptionsListenParams, SubscriptionsListenResult),
    "example/own": (dict, dict),
}


def offering(**options: Any) -> trimcp.Server[None]:
    server: trimcp.Server[None] = trimcp.Server("s", extensions={"example/own": {}})

    @server.tool(**options)
    async def tool() -> str:
        return "called"

    @server.resource("a://b", **options)
    async def resource() -> str:
        return "read"

    @server.resource("a://all/{name}", **options)
    async def family(name: str) -> str:
        return name

    @server.prompt(**options)
    async def prompt(name: str) -> str:
        return name

    @server.complete("prompt", "name")
    @server.complete("a://all/{name}", "name")
    def suggest(typed: str) -> list[str]:
        return ["Ann"]

    @server.method("example/own")
    async def own(ctx: trimcp.Context, params: Any) -> dict[str, Any]:
        return {"own": True}

    return server


async def everything(session: trimcp.ClientSession) -> None:
    await session.list_tools()
    await session.list_resources()
    await session.list_resource_templates()
    await session.list_prompts()
    await session.call_tool("tool")
    await session.read_resource("a://b")
    await session.get_prompt("prompt", {"name": "x"})
    await session.complete_prompt("prompt", "name", "")
    await session.request("example/own", {})
    async with session.listen(resources=["a://b"]):
        pass


@trimcp.testing.every_revision
async def test_middleware_sees_the_params_and_the_result_of_each_method_as_documented(
    revision: trimcp.Revision,
) -> None:
    seen: dict[str, tuple[type, type]] = {}
    server = offering()

    @server.middleware
    async def note(ctx: Any, params: Any, call_next: Any) -> Any:
        if isinstance(ctx, trimcp.Notice):
            return await call_next(ctx, params)
        result = await call_next(ctx, params)
        seen[ctx.method] = (type(params), type(result))
        return result

    async with trimcp.testing.connected(server, revision=revision) as session:
        await everything(session)
    missing = {"subscriptions/listen"} | {name for name in SEEN if name not in METHODS}
    expected = {name: types for name, types in SEEN.items() if name not in METHODS or METHODS[name].available(revision)}
    # A subscription that its client leaves has no result.
    expected.pop("subscriptions/listen", None)
    assert {name: types for name, types in seen.items() if name in expected} == expected
    assert set(seen) <= {*expected, *missing}


@trimcp.testing.every_revision
async def test_middleware_may_change_lists_and_spoils_no_other_answer(revision: trimcp.Revision) -> None:
    server = offering()
    hide = True

    @server.middleware
    async def change(ctx: Any, params: Any, call_next: Any) -> Any:
        result = await call_next(ctx, params)
        if ctx.method in LISTS and hide:
            member, kind = LISTS[ctx.method]
            assert type(result) is kind
            if ctx.method == "tools/list":
                getattr(result, member).clear()  # in place ...
            else:
                result = attrs.evolve(result, **{member: []})  # ... or by a copy
        return result

    async def lists(session: trimcp.ClientSession) -> list[int]:
        found = [await session.list_tools(fresh=True), await session.list_resources(fresh=True)]
        found += [await session.list_resource_templates(fresh=True), await session.list_prompts(fresh=True)]
        return [len(each) for each in found]

    async with trimcp.testing.connected(server, revision=revision) as session:
        assert await lists(session) == [0, 0, 0, 0]
        hide = False
        assert await lists(session) == [1, 1, 1, 1]
        hide = True
        assert await lists(session) == [0, 0, 0, 0]


async def test_a_list_that_middleware_leaves_alone_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    server = offering()

    @server.middleware
    async def look(ctx: Any, params: Any, call_next: Any) -> Any:
        return await call_next(ctx, params)

    encoded = 0
    real = trimcp.server.running.encode

    def count(value: Any) -> bytes:
        nonlocal encoded
        encoded += 1
        return real(value)

    monkeypatch.setattr("trimcp.server.running.encode", count)
    async with trimcp.testing.connected(server) as session:
        for _ in range(5):
            assert len(await session.list_tools(fresh=True)) == 1
    assert encoded == 1


# By who asks


def staff(who: Any) -> bool:
    return who.principal is not None and who.principal.claims.get("staff") is True


STAFF = Principal("ann", claims={"staff": True})
GUEST = Principal("bob", claims={})


@pytest.mark.parametrize("who", [STAFF, GUEST, None])
@pytest.mark.parametrize("with_middleware", [False, True])
@trimcp.testing.every_revision
async def test_what_somebody_does_not_see_does_not_exist_for_them(
    who: Principal | None, with_middleware: bool, revision: trimcp.Revision
) -> None:
    server = offering(visible=staff)
    if with_middleware:

        @server.middleware
        async def look(ctx: Any, params: Any, call_next: Any) -> Any:
            return await call_next(ctx, params)

    asks: list[Any] = [
        lambda s: s.call_tool("tool"),
        lambda s: s.read_resource("a://b"),
        lambda s: s.read_resource("a://all/x"),
        lambda s: s.get_prompt("prompt", {"name": "x"}),
        lambda s: s.complete_prompt("prompt", "name", ""),
        lambda s: s.complete_resource("a://all/{name}", "name", ""),
    ]
    async with trimcp.testing.connected(server, principal=who, revision=revision) as session:
        sees = who is STAFF
        lists = [await session.list_tools(), await session.list_resources()]
        lists += [await session.list_resource_templates(), await session.list_prompts()]
        assert [len(each) for each in lists] == ([1, 1, 1, 1] if sees else [0, 0, 0, 0])
        for ask in asks:
            if sees:
                await ask(session)
                continue
            with pytest.raises(trimcp.RemoteError, match=r"unknown|not found"):
                await ask(session)
        if revision.modern:
            async with session.listen(resources=["a://b"]) as changes:
                assert bool(changes.acknowledged.resource_subscriptions) is sees


async def test_a_list_that_depends_on_who_asks_is_nobody_elses_to_keep() -> None:
    server = offering()
    server.add_tool(lambda_like, visible=staff)
    async with trimcp.testing.connected(server, principal=STAFF) as session:
        page = await session.list_page("tools/list")
        assert (page.cache_scope, len(page.tools)) == ("private", 2)
        assert (await session.list_page("prompts/list")).cache_scope == "public"
    async with trimcp.testing.connected(server, principal=GUEST) as session:
        assert [tool.name for tool in await session.list_tools()] == ["tool"]


async def lambda_like() -> str:
    return ""


async def test_a_function_that_crashes_hides_its_own_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    def crash(who: Any) -> bool:
        raise RuntimeError("the directory is down")

    server = offering()
    server.add_tool(lambda_like, visible=crash)
    async with trimcp.testing.connected(server, principal=STAFF) as session:
        assert [tool.name for tool in await session.list_tools()] == ["tool"]
        with pytest.raises(trimcp.RemoteError, match="unknown tool"):
            await session.call_tool("lambda_like")
    assert {record.levelno for record in caplog.records} == {logging.ERROR}
    assert "the directory is down" in caplog.text


async def test_pages_are_those_of_who_asks() -> None:
    server: trimcp.Server[None] = trimcp.Server("s", page_size=2)
    for number in range(6):

        async def tool() -> str:
            return ""

        server.add_tool(tool, name=f"t{number}", visible=staff if number % 2 else None)
    for who, names in ((STAFF, "012345"), (GUEST, "024")):
        async with trimcp.testing.connected(server, principal=who) as session:
            assert [tool.name for tool in await session.list_tools()] == [f"t{n}" for n in names]


async def test_agents_do_not_see_it_either() -> None:
    server = offering(visible=staff)
    agent_tools = AgentTools(server)
    async with server.running() as running:
        run = agent_tools.run_of(running)
        for who, sees in ((STAFF, True), (GUEST, False)):
            caller = AgentCaller(who, "a")
            listed: Any = await answered(run, ListTools(), caller)
            assert bool(listed.tools) is sees
            if not sees:
                with pytest.raises(UnknownTool):
                    run.start_call(ToolRequest(tool_name="tool", request_id="r"), caller, None, Asking(run))


@pytest.mark.parametrize("wrong", ["staff", True, lambda_like])
def test_what_decides_is_a_sync_function(wrong: Any) -> None:
    with pytest.raises(TypeError, match="visible is a sync function"):
        offering(visible=wrong)
