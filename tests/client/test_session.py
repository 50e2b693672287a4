"""The typed verbs, in every revision, against a server made by hand."""

from __future__ import annotations

import functools
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from tests.client.peers import HandMade, Scripted, connected, discover_result, error, initialize_result, text
from trimcp.client.client import Client
from trimcp.errors import ErrorReply, InvalidReply, LocalError, RemoteError
from trimcp.session.limits import Limits
from trimcp.wire.capabilities import ServerCapabilities
from trimcp.wire.content import TextContent, TextResourceContents
from trimcp.wire.prompts import CompleteResult, Completion, GetPromptResult, ListPromptsResult, Prompt, PromptMessage
from trimcp.wire.resources import (
    ListResourcesResult,
    ListResourceTemplatesResult,
    ReadResourceResult,
    Resource,
    ResourceTemplate,
)
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, REVISIONS
from trimcp.wire.tools import CallToolResult, ListToolsResult, Tool, ToolAnnotations

every_revision = pytest.mark.parametrize("revision", REVISIONS, ids=str)


def full_server() -> HandMade:
    """One of everything."""
    server = HandMade()

    @server.method("tools/list")
    async def tools(params: Any, ctx: Any) -> Any:
        schema = {"type": "object", "properties": {"text": {"type": "string"}}}
        return ListToolsResult([Tool("echo", schema, description="says it again")])

    @server.tool
    async def echo(params: Any, ctx: Any) -> Any:
        return text(params.arguments["text"])

    @server.tool
    async def sulk(params: Any, ctx: Any) -> Any:
        return CallToolResult([TextContent("no")], is_error=True)

    @server.method("resources/list")
    async def resources(params: Any, ctx: Any) -> Any:
        return ListResourcesResult([Resource("x:1", "one")])

    @server.method("resources/templates/list")
    async def templates(params: Any, ctx: Any) -> Any:
        return ListResourceTemplatesResult([ResourceTemplate("x:{n}", "any")])

    @server.method("resources/read")
    async def read(params: Any, ctx: Any) -> Any:
        return ReadResourceResult([TextResourceContents(uri=params.uri, text="hello")])

    @server.method("prompts/list")
    async def prompts(params: Any, ctx: Any) -> Any:
        return ListPromptsResult([Prompt("greet")])

    @server.method("prompts/get")
    async def prompt(params: Any, ctx: Any) -> Any:
        return GetPromptResult([PromptMessage("user", TextContent(f"hi {params.arguments['name']}"))])

    @server.method("completion/complete")
    async def complete(params: Any, ctx: Any) -> Any:
        known = params.context.arguments if params.context else {}
        return CompleteResult(Completion([f"{params.argument.value}{params.ref.type}{known}"]))

    return server


@every_revision
async def test_every_verb_in_every_revision(revision: Any) -> None:
    async with connected(full_server(), revision=revision) as session:
        assert [tool.name for tool in await session.list_tools()] == ["echo"]
        assert (await session.call_tool("echo", {"text": "ho"})).content == [TextContent("ho")]
        assert (await session.call_tool("sulk")).is_error is True
        assert [resource.uri for resource in await session.list_resources()] == ["x:1"]
        assert [template.uri_template for template in await session.list_resource_templates()] == ["x:{n}"]
        assert (await session.read_resource("x:7")).contents[0].text == "hello"
        assert [prompt.name for prompt in await session.list_prompts()] == ["greet"]
        prompt = await session.get_prompt("greet", {"name": "Ada"})
        assert prompt.messages[0].content == TextContent("hi Ada")
        context = {"a": "b"} if revision.name >= "2025-06" else None
        completion = await session.complete_prompt("greet", "name", "A", context)
        assert completion.values == [f"Aref/prompt{context or {}}"]
        assert (await session.complete_resource("x:{n}", "n", "1")).values == ["1ref/resource{}"]
        await session.ping()
        with pytest.raises(RemoteError) as caught:
            await session.call_tool("nowhere")
        assert caught.value.code == -32602
        assert session.statistics().pending == 0
        assert session.peer is not None
        await trio.testing.wait_all_tasks_blocked()
        assert session.peer.statistics().running == 0


async def test_every_verb_is_a_checkpoint() -> None:
    async with connected(full_server()) as session:
        methods = [
            session.list_tools,
            session.list_resources,
            session.list_resource_templates,
            session.list_prompts,
            session.ping,
            functools.partial(session.call_tool, "echo", {"text": ""}),
            functools.partial(session.read_resource, "x:1"),
            functools.partial(session.get_prompt, "greet", {"name": ""}),
            functools.partial(session.complete_prompt, "greet", "name", ""),
            functools.partial(session.set_log_level, "info"),
            functools.partial(session.list_page, "tools/list"),
        ]
        for method in methods:
            with trio.testing.assert_checkpoints():
                await method()
        with trio.testing.assert_checkpoints():
            async with session.calling("echo", {"text": ""}) as call:
                await call.result()


async def test_what_the_server_did_not_declare_is_an_empty_list_and_is_not_asked_for() -> None:
    server = HandMade(capabilities=ServerCapabilities())
    async with connected(server) as session:
        with trio.testing.assert_checkpoints():
            assert await session.list_tools() == []
        assert await session.list_resources() == []
        assert await session.list_resource_templates() == []
        assert await session.list_prompts() == []
    assert server.asked == []


async def test_lists_follow_cursors_and_pages_can_be_had_one_by_one() -> None:
    server = HandMade()

    @server.method("tools/list")
    async def tools(params: Any, ctx: Any) -> Any:
        n = int(params.cursor or 0)
        more = {"next_cursor": str(n + 1)} if n < 3 else {}
        return ListToolsResult([Tool(f"t{n}", {"type": "object"})], **more)

    async with connected(server) as session:
        assert [tool.name for tool in await session.list_tools()] == ["t0", "t1", "t2", "t3"]
        page = await session.list_page("tools/list", "2")
        assert (page.tools[0].name, page.next_cursor) == ("t2", "3")
        with pytest.raises(LocalError, match="not paged"):
            await session.list_page("tools/call")


@pytest.mark.parametrize("knows", [True, False])
async def test_an_empty_cursor_may_mean_that_there_is_none(knows: bool) -> None:
    """Serializers that leave nothing out write it so."""
    server = HandMade()

    @server.method("tools/list")
    async def tools(params: Any, ctx: Any) -> Any:
        if params.cursor == "" and not knows:
            raise ErrorReply(-32602, "invalid cursor")
        return ListToolsResult([Tool("t", {"type": "object"})], next_cursor="")

    async with connected(server) as session:
        assert [tool.name for tool in await session.list_tools()] == ["t"]


async def test_an_empty_cursor_may_be_one() -> None:
    server = HandMade()

    @server.method("tools/list")
    async def tools(params: Any, ctx: Any) -> Any:
        first = params.cursor is None
        return ListToolsResult([Tool(f"t{params.cursor}", {"type": "object"})], next_cursor="" if first else None)

    async with connected(server) as session:
        assert [tool.name for tool in await session.list_tools()] == ["tNone", "t"]


@pytest.mark.parametrize(("cursor", "why"), [("same", "circle"), (None, "more than 5 pages")])
async def test_a_list_without_end_is_given_up(cursor: str | None, why: str) -> None:
    server = HandMade()

    @server.method("prompts/list")
    async def prompts(params: Any, ctx: Any) -> Any:
        return ListPromptsResult([], next_cursor=cursor or f"{params.cursor or ''}x")

    async with connected(server, Client("c", max_pages=5)) as session:
        with pytest.raises(InvalidReply, match=why):
            await session.list_prompts()


def weather_server(content: dict[str, Any]) -> HandMade:
    server = HandMade()
    output = {"type": "object", "properties": {"degrees": {"type": "number"}}, "required": ["degrees"]}

    @server.method("tools/list")
    async def tools(params: Any, ctx: Any) -> Any:
        return ListToolsResult([Tool("weather", {"type": "object"}, output_schema=output)])

    @server.tool
    async def weather(params: Any, ctx: Any) -> Any:
        return CallToolResult([TextContent("?")], **content)

    return server


@pytest.mark.parametrize("revision", REVISIONS[2:], ids=str)
async def test_structured_results_are_checked_once_the_tool_was_listed(revision: Any) -> None:
    async with connected(weather_server({"structured_content": {"degrees": "warm"}}), revision=revision) as session:
        assert (await session.call_tool("weather")).structured_content == {"degrees": "warm"}
        await session.list_tools()
        with pytest.raises(InvalidReply, match=r"'weather'.*\$\.degrees"):
            await session.call_tool("weather")
        with pytest.raises(InvalidReply):
            async with session.calling("weather") as call:
                await call.result()
        await session.ping()


async def test_what_tools_promised_is_forgotten_when_their_list_changes() -> None:
    server = weather_server({"structured_content": {"degrees": "warm"}})
    async with connected(server, revision=LATEST_LEGACY) as session:
        await session.list_tools()
        with pytest.raises(InvalidReply):
            await session.call_tool("weather")
        server.session.notify_latest("notifications/tools/list_changed")
        await trio.testing.wait_all_tasks_blocked()
        assert not (await session.call_tool("weather")).is_error


async def test_a_promised_structure_that_is_missing_is_an_invalid_reply_unless_the_tool_failed() -> None:
    async with connected(weather_server({})) as session:
        await session.list_tools()
        with pytest.raises(InvalidReply, match="promises structured content"):
            await session.call_tool("weather")
    async with connected(weather_server({"is_error": True})) as session:
        await session.list_tools()
        assert (await session.call_tool("weather")).is_error


async def test_output_validation_can_be_turned_off() -> None:
    async with connected(weather_server({}), Client("c", validate_output=False)) as session:
        await session.list_tools()
        assert not (await session.call_tool("weather")).is_error


async def test_an_invalid_answer_fails_its_call_alone() -> None:
    def script(message: dict[str, Any]) -> Any:
        if message.get("method") == "server/discover":
            return discover_result(message["id"], tools={})
        tools: Any = "none" if len(server.heard) == 2 else []
        return {"id": message["id"], "result": {"tools": tools, "ttlMs": 0, "cacheScope": "private"}}

    server = Scripted(script)
    async with Client("c").connect(server) as session:
        with pytest.raises(InvalidReply, match=r"tools/list.*\$\.tools"):
            await session.list_tools()
        assert await session.list_tools() == []


@pytest.mark.parametrize("revision", [LATEST_LEGACY, LATEST], ids=str)
async def test_meta_goes_along(revision: Any) -> None:
    server = HandMade()
    seen: list[Any] = []

    @server.tool
    async def look(params: Any, ctx: Any) -> Any:
        seen.append(ctx.meta["traceparent"])
        return text("")

    async with connected(server, revision=revision) as session:
        await session.call_tool("look", meta={"traceparent": "00-aa-bb-01"})
        async with session.calling("look", meta={"traceparent": "00-cc-dd-01"}) as call:
            await call.result()
    assert seen == ["00-aa-bb-01", "00-cc-dd-01"]


async def test_calls_are_approved_with_the_tools_annotations() -> None:
    server = full_server()
    client = Client("c")
    seen: list[Any] = []

    @server.method("tools/list")
    async def tools(params: Any, ctx: Any) -> Any:
        hints = ToolAnnotations(destructive_hint=True)
        return ListToolsResult([Tool("echo", {"type": "object"}, annotations=hints)])

    @client.approve_call
    async def approve(tool: Tool | None, arguments: Any) -> bool:
        seen.append((tool and tool.annotations and tool.annotations.destructive_hint, arguments))
        return bool(arguments.get("text") == "please")

    async with connected(server, client) as session:
        await session.call_tool("echo", {"text": "please"})
        with pytest.raises(LocalError, match="'echo' was not approved"):
            await session.call_tool("echo", {"text": "now"})
        with pytest.raises(LocalError, match="not approved"):
            async with session.calling("secret"):
                pass
    assert seen == [(True, {"text": "please"}), (True, {"text": "now"}), (None, {})]
    assert [params.arguments for name, params in server.asked if name == "tools/call"] == [{"text": "please"}]


def chatty_server() -> HandMade:
    server = HandMade()

    @server.tool
    async def chat(params: Any, ctx: Any) -> Any:
        await ctx.debug("hush")
        await ctx.warning({"n": 1}, logger="lungs")
        return text("")

    return server


@every_revision
async def test_log_messages_reach_the_handler_in_order_before_the_session_ends(revision: Any) -> None:
    client = Client("c")
    seen: list[Any] = []

    @client.logging
    async def take(params: Any) -> None:
        await trio.lowlevel.checkpoint()
        seen.append((params.level, params.data, params.logger))
        if len(seen) == 1:
            raise ValueError("a crash of the handler is logged, and the next message comes all the same")

    async with connected(chatty_server(), client, revision) as session:
        await session.call_tool("chat")
        await session.call_tool("chat")
        await trio.testing.wait_all_tasks_blocked()
        assert seen == [("warning", {"n": 1}, "lungs")] * 2
        await session.set_log_level("debug")
        await session.call_tool("chat")
    assert [level for level, *_ in seen] == ["warning", "warning", "debug", "warning"]


async def test_without_a_handler_a_modern_server_is_not_asked_for_logs() -> None:
    levels: list[Any] = []
    server = HandMade()

    @server.tool
    async def level(params: Any, ctx: Any) -> Any:
        levels.append(ctx.admission.log_level)
        return text("")

    async with connected(server, revision=LATEST) as session:
        await session.call_tool("level")
        await session.set_log_level("error")
        await session.call_tool("level")
    assert levels == [None, "error"]


async def test_a_slow_log_handler_costs_the_oldest_messages() -> None:
    client = Client("c", limits=attrs.evolve(Limits(), logs_kept=3))
    server = HandMade()
    seen: list[Any] = []
    gate = trio.Event()

    @server.tool
    async def flood(params: Any, ctx: Any) -> Any:
        for n in range(10):
            await ctx.info(n)
        return text("")

    @client.logging
    async def take(params: Any) -> None:
        await gate.wait()
        seen.append(params.data)

    async with connected(server, client) as session:
        await session.call_tool("flood")
        await trio.testing.wait_all_tasks_blocked()
        dropped = session.statistics().dropped
        gate.set()
    assert len(seen) + dropped == 10
    assert seen[-3:] == [7, 8, 9]


async def test_roots_changes_are_told_where_there_is_a_word_for_it() -> None:
    for revision, heard in ((LATEST_LEGACY, ["notifications/roots/list_changed"]), (LATEST, [])):
        client = Client("c", roots=["file:///a"])
        server = HandMade()
        async with connected(server, client, revision):
            await trio.testing.wait_all_tasks_blocked()
            server.heard.clear()
            client.set_roots(["file:///b"])
            await trio.testing.wait_all_tasks_blocked()
            assert server.heard == heard
    with pytest.raises(ValueError, match="as_uri"):
        client.set_roots(["/b"])


async def test_legacy_only_words_are_refused_locally_in_a_modern_session() -> None:
    async with connected(HandMade(), revision=LATEST) as session:
        with pytest.raises(LocalError, match="logging/setLevel"):
            await session.session.call("logging/setLevel")


async def test_a_request_of_an_extension_is_under_the_work_clock_too(autojump_clock: Any) -> None:
    def script(message: dict[str, Any]) -> Any:
        if message["method"] == "server/discover":
            return discover_result(message["id"])
        return {"id": message["id"], "result": {"n": 1}} if message["method"] == "com.example/quick" else None

    async with Client("c", request_timeout=5).connect(Scripted(script), revision=LATEST) as session:
        assert (await session.request("com.example/quick"))["n"] == 1
        with pytest.raises(trio.TooSlowError):
            await session.request("com.example/slow", {"x": 1})
        with pytest.raises(LocalError, match="its own method"):
            await session.request("tools/list")


@pytest.mark.parametrize("revision", [r for r in REVISIONS if not r.modern], ids=str)
@pytest.mark.parametrize("refuses", [False, True])
async def test_a_legacy_server_is_told_the_level_of_log_messages(revision: Any, refuses: bool) -> None:
    def script(message: dict[str, Any]) -> Any:
        if message.get("method") == "initialize":
            return initialize_result(message["id"], revision.name, logging={})
        if message.get("method") == "logging/setLevel" and not refuses:
            return {"id": message["id"], "result": {}}
        return error(message["id"], -32603) if "id" in message else None

    server, client = Scripted(script), Client("c", log_level="warning")
    async with client.connect(server, revision=revision):
        pass
    assert "logging/setLevel" not in server.methods  # nobody takes what it would bring
    client.logging(lambda params: None)
    async with client.connect(server, revision=revision):
        pass
    levels = [m["params"]["level"] for m in server.heard if m.get("method") == "logging/setLevel"]
    assert levels == ["warning"]
