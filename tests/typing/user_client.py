# pyright: strict
"""A client as a user writes it, for type checkers: nothing here runs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, assert_type

import pytest
import trio

import trimcp
from tests.typing.user_server import plain, server
from trimcp.session.outgoing.listening import Change
from trimcp.testing import SlowChannel, connected, every_revision

client = trimcp.Client(
    "typed-host",
    version="1.0",
    roots=["file:///srv", trimcp.wire.Root(uri="file:///data", name="data")],
    request_timeout=30,
    log_level="warning",
    limits=trimcp.Limits(),
)


@client.elicitation
async def ask_user(params: trimcp.ElicitParams) -> trimcp.ElicitResult:
    """Ask the user."""
    if isinstance(params, trimcp.wire.ElicitURLParams):
        assert_type(params.url, str)
        return trimcp.ElicitResult(action="decline")
    assert_type(params, trimcp.wire.ElicitFormParams)
    return trimcp.ElicitResult(action="accept", content=dict.fromkeys(params.requested_schema.properties, "Ada"))


@client.sampling(tools=True)
async def ask_model(params: trimcp.CreateMessageParams, *, session: trimcp.ClientSession) -> str:
    """Ask the model."""
    assert_type(params.max_tokens, int)
    assert_type(session.revision, trimcp.Revision)
    return "42"


@client.logging
def log(params: trimcp.wire.LoggingMessageParams) -> None:
    """Print what the server logs."""
    print(params.level, params.data)


@client.approve_call
async def approve(tool: trimcp.Tool | None, arguments: Mapping[str, Any]) -> bool:
    """Decide on a call."""
    return tool is None or not (tool.annotations and tool.annotations.destructive_hint)


@client.approve_sampled
async def approve_sampled(
    params: trimcp.CreateMessageParams, result: trimcp.CreateMessageResult, *, session: trimcp.ClientSession
) -> bool:
    """Decide on the model's words, knowing who asked."""
    return session.server_info is not None and params.max_tokens > len(result.blocks)


# What must be refused: an ignored error that is none is one, to mypy's strict mode.
@client.sampling  # type: ignore[type-var]
async def wrong_result(params: trimcp.CreateMessageParams) -> int:
    """No handler of this kind: nothing said is a number."""
    return params.max_tokens


async def handlers_kept_their_types(params: trimcp.wire.ElicitFormParams, session: trimcp.ClientSession) -> None:
    """Handlers are still the functions that were written."""
    assert_type(await ask_user(params), trimcp.ElicitResult)
    assert_type(await approve(None, {}), bool)


def show(result: trimcp.CallToolResult) -> str:
    """Every kind of content, told apart by its tag or its class."""
    (block,) = result.content
    if block.type == "text":
        return block.text
    match block:
        case trimcp.wire.ImageContent() | trimcp.wire.AudioContent():
            return f"{block.mime_type}: {len(block.data)}"
        case trimcp.ResourceLink():
            return block.uri
        case trimcp.wire.EmbeddedResource(resource=contents):
            assert_type(contents, trimcp.wire.TextResourceContents | trimcp.wire.BlobResourceContents)
            return contents.text if isinstance(contents, trimcp.wire.TextResourceContents) else contents.blob


async def use(session: trimcp.ClientSession) -> None:
    """Every verb."""
    assert_type(session.revision, trimcp.Revision)
    assert_type(session.server_info, trimcp.wire.Implementation | None)
    assert_type(session.instructions, str | None)
    tools = await session.list_tools()
    assert_type(tools, trimcp.Listing[trimcp.Tool])
    assert_type(tools[0].input_schema, dict[str, Any])
    assert_type(tools[0].description or "", str)

    result = await session.call_tool("add", {"a": 1})
    assert_type(result, trimcp.CallToolResult)
    print(result.text, show(result), result.structured_content["total"], result.is_error)

    with trio.move_on_after(30):
        async with session.calling("count", {"to": 3}, meta={"traceparent": "00"}) as call:
            assert_type(call, trimcp.Call[trimcp.CallToolResult])
            async for step in call.progress:
                assert_type(step, trimcp.wire.ProgressParams)
                print(f"{step.progress}/{step.total}")
            assert_type(await call.result(), trimcp.CallToolResult)

    assert_type(await session.list_resources(fresh=True), trimcp.Listing[trimcp.wire.Resource])
    assert_type(await session.list_resource_templates(), trimcp.Listing[trimcp.wire.ResourceTemplate])
    assert_type((await session.read_resource("notes://today")).text, str)
    for contents in (await session.read_resource("notes://today")).contents:
        if isinstance(contents, trimcp.wire.TextResourceContents):
            assert_type(contents.text, str)
        else:
            assert_type(contents, trimcp.wire.BlobResourceContents)
    assert_type(await session.list_prompts(), trimcp.Listing[trimcp.wire.Prompt])
    prompt = await session.get_prompt("review", {"path": "a.py"})
    assert_type(prompt, trimcp.wire.GetPromptResult)
    assert_type(prompt.messages[0], trimcp.PromptMessage)
    assert_type(prompt.messages[0].role, Literal["user", "assistant"])
    assert_type(prompt.messages[0].text, str)
    if session.server_capabilities.tools and session.server_capabilities.tools.list_changed:
        assert_type(await session.request("com.example/clock/now", {"precise": True}), dict[str, Any])
    assert_type(await session.complete_prompt("review", "path", "a"), trimcp.wire.Completion)
    await session.complete_resource("notes://{name}", "name", "t", context={"other": "x"})

    async with session.listen(tools=True, resources=["notes://today"]) as changes:
        assert_type(changes, trimcp.Subscription)
        async for change in changes:
            if isinstance(change, trimcp.ResourceUpdated):
                assert_type(change.uri, str)
            else:
                assert_type(change, trimcp.ToolsChanged | trimcp.PromptsChanged | trimcp.ResourcesChanged)
    await session.set_log_level("debug")
    await session.ping()
    assert_type(session.statistics(), trimcp.watch.Statistics)
    await session.wait_lost()


async def main() -> None:
    """Connect to everything one can connect to."""
    stdio = trimcp.stdio("python", "weather.py", env={"TOKEN": "x"}, cwd=Path(), on_stderr=print)
    async with client.connect(stdio, revision="2025-11-25") as session:
        assert_type(session, trimcp.ClientSession)
        await use(session)
    async with client.connect(trimcp.in_process(server, framed=True), revision=trimcp.LATEST) as session:
        await use(session)
    ours, theirs = trimcp.memory_channels()
    assert_type(ours, trimcp.MessageChannel)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.serve, theirs)
        async with client.connect(ours) as session:
            try:
                await use(session)
            except trimcp.Overloaded:
                pass
            except trimcp.RemoteError as error:
                assert_type(error.code, int)
                assert_type(error.message, str)
            except trimcp.ConnectionLost:
                pass
    async with trimcp.Group(client) as group:
        assert_type(await group.open("one", stdio), trimcp.ClientSession)
        assert_type(await group.list_tools(), list[trimcp.Tool])
        assert_type(await group.call_tool("one.add", {"a": 1}), trimcp.CallToolResult)


@every_revision
async def test_timeout(revision: trimcp.Revision, autojump_clock: trio.testing.MockClock) -> None:
    """A test as users write it."""
    async with connected(server, revision=revision, wrap=SlowChannel) as session:
        assert_type(session, trimcp.ClientSession)
        with pytest.raises(trio.TooSlowError), trio.fail_after(1.5):
            await session.call_tool("count", {"to": 9})
        assert_type(session.peer.statistics(), trimcp.watch.Statistics)
    async with connected(plain, client) as session:
        result = await session.call_tool("bare")
        assert result.content == [trimcp.Text("x")]


async def keep_upstreams(client: trimcp.Client, server: trimcp.Server[None]) -> None:
    """Supervise, and make several calls at once: answers keep their types."""
    target = trimcp.in_process(server)
    restarts = trimcp.fleet.Restarts(most=3)
    async with trimcp.supervise(client, target, when_down="fail", breaker=None, restarts=restarts) as upstream:
        assert_type(upstream, trimcp.Upstream)
        assert_type(await upstream.call_tool("x", idempotent=True), trimcp.CallToolResult)
        assert_type(await upstream.use(lambda session: session.list_tools()), trimcp.Listing[trimcp.Tool])
        async with upstream.calling("x") as call:
            assert_type(await call.result(), trimcp.CallToolResult)
        async with upstream.listen(tools=True) as changes:
            async for change in changes:
                assert_type(change, Change)
        attempt = partial(upstream.call_tool, "x")
        assert_type(
            await trimcp.fleet.first_of(attempt, good=lambda result: not result.is_error), trimcp.CallToolResult
        )
        assert_type(await trimcp.fleet.hedge(attempt, after=1), trimcp.CallToolResult)
        outcomes = await trimcp.fleet.call_all({1: attempt})
        assert_type(outcomes, dict[int, trimcp.fleet.Outcome[int, trimcp.CallToolResult]])
        assert_type(outcomes[1].result(), trimcp.CallToolResult)
        async with trimcp.fleet.map_bounded(upstream.read_resource, ["a://"], most=2) as results:
            async for result in results:
                assert_type(result, trimcp.wire.ReadResourceResult)
        async with trimcp.fleet.map_bounded(upstream.read_resource, ["a://"], most=2, collect=True) as collected:
            assert_type(await collected.receive(), trimcp.fleet.Outcome[str, trimcp.wire.ReadResourceResult])
    async with trimcp.Group(client) as group:
        assert_type(await group.supervise("x", target, when_down="wait", health=None), trimcp.Upstream)


def stored(result: trimcp.CallToolResult, value: dict[str, Any]) -> trimcp.CallToolResult:
    """Turn payloads into JSON and back."""
    value["result"] = trimcp.to_json(result, revision=trimcp.LATEST_LEGACY)
    assert_type(trimcp.from_json(value["result"], trimcp.CallToolResult), trimcp.CallToolResult)
    return trimcp.from_json(value["result"], trimcp.CallToolResult, revision=trimcp.LATEST_LEGACY)
