"""The agent-tools client against the service, over every transport and on both hosts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import attrs
import pytest
import trio

import trimcp
from tests.fuzz.effort import PATIENCE
from tests.peers.serving import served
from trimcp import agent_tools
from trimcp.agent_tools.messages.messages import ToolProgress
from trimcp.errors import ConnectionLost

TRANSPORTS = ("http", "http on hypercorn", "websocket", "websocket on hypercorn", "grpc")

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)


@attrs.define(eq=False)
class Site:
    """A service, and what became of its calls."""

    url: str
    cancelled: list[str] = attrs.field(factory=list)
    began: trio.Event = attrs.field(factory=trio.Event)
    ended: trio.Event = attrs.field(factory=trio.Event)
    place: Any = None


@asynccontextmanager
async def site(transport: str, **options: Any) -> AsyncIterator[Site]:
    server = trimcp.Server("service")
    found = Site("")

    @server.tool
    async def echo(value: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """Return the value."""
        return value

    @server.tool
    async def say(text: str) -> str:
        """Return the text."""
        return text

    @server.tool
    async def count(number: int, ctx: trimcp.Context) -> int:
        """Count with progress."""
        for reached in range(1, number + 1):
            await ctx.report_progress(reached, number, f"step {reached}")
        return number

    @server.tool
    async def wait(ctx: trimcp.Context) -> None:
        """Wait for ever."""
        found.began.set()
        try:
            await trio.sleep_forever()
        finally:
            found.cancelled.append(ctx.cancel_reason.value if ctx.cancel_reason else "")
            found.ended.set()

    @server.tool
    async def fail() -> None:
        """Report an error."""
        raise trimcp.ToolError("it is broken")

    @server.tool
    async def crash() -> None:
        """Crash."""
        raise KeyError("secret")

    @server.tool
    async def sure(ctx: trimcp.Context) -> str:
        """Ask whether it is sure."""
        return (await ctx.elicit("Sure?", bool)).action

    @server.tool
    async def secret() -> None:
        """Be called by nobody."""

    @server.tool
    async def remember(key: str, value: str, ctx: trimcp.Context) -> int:
        """Keep a value in the context."""
        assert ctx.agent_context is not None
        return await ctx.agent_context.update({key: value})

    def registered(city: str) -> str:
        return f"{city} is sunny"

    tools = agent_tools.AgentTools(
        server,
        implementations={"get_weather": registered},
        allow=lambda call: call.name != "secret",
        authenticate=trimcp.bearer_tokens({"token": "agent-7", "other": "agent-8"}),
        **options,
    )
    async with served(server, transport.replace("websocket", "http"), agent_tools=tools) as place:
        base = place.url.removesuffix("/mcp")
        found.url = base.replace("http", "ws", 1) if transport.startswith("websocket") else base
        found.place = place
        with trio.fail_after(PATIENCE):
            yield found


@asynccontextmanager
async def agent_at(transport: str, **options: Any) -> AsyncIterator[tuple[agent_tools.AgentConnection, Site]]:
    async with site(transport) as found, agent_tools.connect(found.url, token="token", **options) as agent:
        yield agent, found


async def test_a_call_returns_the_result(transport: str) -> None:
    async with agent_at(transport) as (agent, _):
        assert await agent.call("echo", {"value": {"n": [1, 2**53 + 1, "ä"]}}) == {"n": [1, 2**53 + 1, "ä"]}
        assert await agent.call("echo") is None
        assert await agent.call("say", {"text": "v"}, version="1", timeout=10) == "v"
        async with agent.calling("count", {"number": 3}) as call:
            assert await call.result() == 3


async def test_progress_arrives_in_order_before_the_result(transport: str) -> None:
    seen: list[ToolProgress] = []
    async with agent_at(transport) as (agent, _):
        assert await agent.call("count", {"number": 3}, on_progress=seen.append) == 3
    assert seen
    assert [each.progress for each in seen] == sorted(each.progress for each in seen)
    assert (seen[-1].progress, seen[-1].total, seen[-1].message) == (3, 3, "step 3")


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("none", {}, agent_tools.UnknownTool),
        ("count", {"number": "three"}, agent_tools.InvalidArguments),
        ("fail", {}, agent_tools.ToolFailed),
        ("crash", {}, agent_tools.ToolCrashed),
        ("secret", {}, agent_tools.NotAllowed),
    ],
)
async def test_errors_are_of_their_class(
    transport: str, name: str, arguments: dict[str, Any], error: type[Exception]
) -> None:
    async with agent_at(transport) as (agent, _):
        with pytest.raises(error) as caught:
            await agent.call(name, arguments)
        assert caught.type is error
        assert "secret" not in str(caught.value) or name == "secret"
        if name == "crash":
            assert caught.value.data["incident"]
        with pytest.raises(agent_tools.UnknownTool):
            await agent.call("echo", version="9")


async def test_a_deadline_ends_the_call_there(transport: str) -> None:
    async with agent_at(transport) as (agent, found):
        for timeout in (0.1, 1, 10):  # a busy machine may not have begun with the call when the first is over
            if not found.began.is_set():
                with pytest.raises(agent_tools.DeadlinePassed):
                    await agent.call("wait", timeout=timeout)
        await found.ended.wait()


async def test_cancelling_a_call_cancels_its_handler(transport: str) -> None:
    async with agent_at(transport) as (agent, found), trio.open_nursery() as nursery:
        nursery.start_soon(agent.call, "wait")
        await found.began.wait()
        nursery.cancel_scope.cancel(reason="enough")
    assert found.ended.is_set()
    assert found.cancelled in (["cancelled by peer"], ["disconnected"])


async def test_a_call_in_a_context_ends_with_it(transport: str) -> None:
    async with agent_at(transport) as (agent, found):
        async with agent.context(state={"a": 1}) as context, trio.open_nursery() as nursery:

            async def call() -> None:
                with pytest.raises(agent_tools.RequestCancelled, match="done with it"):
                    await context.call("wait")

            nursery.start_soon(call)
            await found.began.wait()
            await context.destroy("done with it")
        with pytest.raises(agent_tools.ContextGone):
            await context.read()


async def test_a_context_is_read_updated_and_watched(transport: str) -> None:
    async with agent_at(transport) as (agent, _):
        async with agent.context("ctx-001", state={"a": 1}) as context:
            assert context.id == "ctx-001"
            async with context.watch() as events:
                first = await events.receive()
                assert first.kind == "state"
                assert first.content is not None
                assert first.content["a"] == 1
                applied = await context.update({"a": 2, "b": {"c": None}}, first.version)
                assert applied.version == first.version + 1
                with pytest.raises(agent_tools.VersionConflict) as conflict:
                    await context.update({"a": 3}, first.version)
                assert conflict.value.data["version"] == applied.version
                assert await context.call("remember", {"key": "k", "value": "v"}) == applied.version + 1
                updates = [await events.receive(), await events.receive()]
                assert [(each.kind, each.content) for each in updates] == [
                    ("update", {"a": 2, "b": {"c": None}}),
                    ("update", {"k": "v"}),
                ]
                state = await context.read()
                assert state.version == applied.version + 1
                assert (state.state["a"], state.state["k"]) == (2, "v")
                (entry,) = state.state["tool_history"]
                assert (entry["tool"], entry["status"]) == ("remember", "success")
                async with agent.existing_context("ctx-001").watch() as again:
                    assert (await again.receive()).kind == "state"
                await context.destroy("over")
                last = [each async for each in events][-1]
                assert (last.kind, last.reason) == ("destroyed", "over")
        with pytest.raises(agent_tools.ContextGone):
            await context.update({"a": 1})


async def test_whoever_closed_the_channel_of_a_watch_goes_on_in_its_block(transport: str) -> None:
    async with agent_at(transport) as (agent, _), agent.context("ctx-001") as context:
        async with context.watch() as events:
            assert (await events.receive()).kind == "state"
            await events.aclose()
            with pytest.raises(trio.ClosedResourceError):
                await events.receive()
            for number in range(3):  # whose events nobody takes
                await context.update({"number": number})
            async with context.watch() as others:  # what was told before it has arrived
                assert (await others.receive()).version == 3
        assert (await context.read()).version == 3


async def test_a_context_of_somebody_else_does_not_exist(transport: str) -> None:
    async with (
        site(transport) as found,
        agent_tools.connect(found.url, token="token") as agent,
        agent.context() as context,
        agent_tools.connect(found.url, token="other") as other,
    ):
        theirs = other.existing_context(context.id)
        with pytest.raises(agent_tools.UnknownContext):
            await theirs.read()
        with pytest.raises(agent_tools.UnknownContext):
            async with theirs.watch() as events:
                await events.receive()


async def test_tools_are_listed_registered_and_removed(transport: str) -> None:
    manifest = {
        "name": "get_weather",
        "description": "Get current weather for a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
    async with agent_at(transport) as (agent, _):
        assert "echo" in {tool["name"] for tool in await agent.tools()}
        registered = await agent.register(manifest)
        assert (registered["name"], registered["version"], registered["status"]) == ("get_weather", "1", "registered")
        assert await agent.call("get_weather", {"city": "Beijing"}) == "Beijing is sunny"
        (listed,) = await agent.tools("get_weather")
        assert listed["parameters"] == manifest["parameters"]
        await agent.remove("get_weather")
        with pytest.raises(agent_tools.UnknownTool):
            await agent.tools("get_weather")


async def test_a_bad_token_is_refused(transport: str) -> None:
    async with site(transport) as found:
        with pytest.raises(agent_tools.Unauthenticated):
            async with agent_tools.connect(found.url, token="wrong") as agent:
                await agent.tools()


async def test_a_service_that_ends_is_a_lost_connection(transport: str) -> None:
    async with agent_at(transport) as (agent, found), trio.open_nursery() as nursery:

        async def call() -> None:
            with pytest.raises((ConnectionLost, agent_tools.Draining, agent_tools.RequestCancelled)):
                await agent.call("wait")

        nursery.start_soon(call)
        await found.began.wait()
        found.place.scope.cancel()


async def test_questions_of_a_tool_are_answered(transport: str) -> None:
    asked: list[dict[str, Any]] = []

    def answer(questions: dict[str, Any]) -> dict[str, Any]:
        asked.append(questions)
        return {key: {"action": "accept", "content": {"value": True}} for key in questions}

    async with agent_at(transport) as (agent, _):
        with pytest.raises(agent_tools.InputRequired) as caught:
            await agent.call("sure")
        (question,) = caught.value.questions.values()
        assert question["params"]["message"] == "Sure?"
        assert await agent.call("sure", on_input=answer) == "accept"
        assert len(asked) == 1


async def test_a_session_has_several_contexts_which_end_together(transport: str) -> None:
    async with agent_at(transport) as (agent, found), AsyncExitStack() as stack:
        one, two = [await stack.enter_async_context(agent.context(session="user-1")) for _ in range(2)]
        other = await stack.enter_async_context(agent.context("mine", state={"a": 1}))
        for context, session in ((one, "user-1"), (two, "user-1"), (other, "mine")):
            assert (await context.read()).state["session_id"] == session
        with pytest.raises(agent_tools.MalformedMessage):
            await one.update({"session_id": "user-2"})
        async with agent_tools.connect(found.url, token="other") as stranger:
            with pytest.raises(agent_tools.UnknownContext):
                await stranger.end_session("user-1")
        async with trio.open_nursery() as nursery, one.watch() as events:
            await events.receive()
            called = trio.Event()

            async def call() -> None:
                with pytest.raises(agent_tools.RequestCancelled, match="logged out"):
                    await two.call("wait")
                called.set()

            nursery.start_soon(call)
            await found.began.wait()
            await agent.end_session("user-1", "logged out")
            assert (await events.receive()).reason == "logged out"
            await called.wait()
        for context in (one, two):
            with pytest.raises(agent_tools.ContextGone):
                await context.read()
        assert (await other.read()).state["a"] == 1
        with pytest.raises(agent_tools.UnknownContext):
            await agent.end_session("user-1")
        await agent.end_session("mine")
