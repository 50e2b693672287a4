"""The official Python SDK's client against our server, over a real pipe and in both eras.

It runs on asyncio, as it does for the people who use it; only our side is Trio.
"""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import mcp_types as t
import pytest
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.subscriptions import ResourceUpdated, ToolsListChanged

SERVER = Path(__file__).with_name("server_for_peers.py")
Body = Callable[[Client], Awaitable[None]]

both_eras = pytest.mark.parametrize("mode", ["legacy", "auto"])
# The client warns of what the modern era lacks, also where it speaks the legacy one.
deprecated = pytest.mark.filterwarnings("ignore::mcp.MCPDeprecationWarning")
NEGOTIATED = {"legacy": "2025-11-25", "auto": "2026-07-28"}


def converse(mode: str, body: Body, **callbacks: Any) -> float:
    """Run `body` with a client connected to our server; return how many seconds the server took to end."""
    failures: list[Exception] = []
    left = 0.0

    async def main() -> None:
        nonlocal left
        parameters = StdioServerParameters(command=sys.executable, args=[str(SERVER)])
        with anyio.fail_after(30):
            async with Client(parameters, mode=mode, **callbacks) as client:
                # Kept aside, because the client's task groups would wrap it in three groups.
                try:
                    await body(client)
                except Exception as failure:
                    failures.append(failure)
                left = time.monotonic()

    anyio.run(main)
    if failures:
        raise failures[0]
    return time.monotonic() - left


@both_eras
def test_it_agrees_on_the_newest_revision_of_its_era(mode: str) -> None:
    async def body(client: Client) -> None:
        assert client.protocol_version == NEGOTIATED[mode]
        assert client.server_info is not None
        assert (client.server_info.name, client.server_info.version) == ("interop", "1.0")
        assert client.instructions == "Ask for anything."
        capabilities = client.server_capabilities
        assert capabilities.tools is not None
        assert capabilities.resources is not None
        assert capabilities.prompts is not None
        assert capabilities.completions is not None
        assert capabilities.tasks is None

    converse(mode, body)


def test_it_adopts_the_modern_revision_without_asking() -> None:
    async def body(client: Client) -> None:
        result = await client.call_tool("echo", {"text": "hi"})
        assert result.content == [t.TextContent(type="text", text="hi")]

    converse("2026-07-28", body)


@both_eras
def test_it_is_gone_soon_after_its_input_ends(mode: str) -> None:
    async def body(client: Client) -> None:
        await client.list_tools()

    # The SDK kills after two seconds, and promises of ours end at one.
    assert converse(mode, body) < 1.5


@both_eras
def test_tools_are_listed_with_their_schemas(mode: str) -> None:
    async def body(client: Client) -> None:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert {"echo", "add", "count", "fail", "crash", "greet", "think", "places"} <= set(tools)
        echo = tools["echo"]
        assert echo.description == "Return the text as it came."
        assert echo.input_schema["required"] == ["text"]
        assert echo.input_schema["properties"]["text"]["type"] == "string"
        assert echo.input_schema["properties"]["text"]["description"] == "whatever you like."
        assert tools["add"].output_schema is not None
        assert tools["add"].output_schema["properties"]["total"]["type"] == "integer"
        assert "ctx" not in tools["count"].input_schema["properties"]

    converse(mode, body)


@both_eras
def test_tools_answer_and_fail_as_the_specification_says(mode: str) -> None:
    async def body(client: Client) -> None:
        result = await client.call_tool("echo", {"text": "grüße 🎈\n"})
        assert result.content == [t.TextContent(type="text", text="grüße 🎈\n")]
        assert not result.is_error
        assert (await client.call_tool("add", {"a": 2, "b": 3})).structured_content == {"total": 5}

        failed = await client.call_tool("fail", {})
        assert failed.is_error
        assert failed.content == [t.TextContent(type="text", text="no luck today")]
        with pytest.raises(MCPError) as crashed:
            await client.call_tool("crash", {})
        assert crashed.value.error.code == t.INTERNAL_ERROR
        assert "swordfish" not in crashed.value.error.model_dump_json()
        wrong = await client.call_tool("add", {"a": 2, "b": "three"})
        assert wrong.is_error
        assert isinstance(wrong.content[0], t.TextContent)
        assert "$.b" in wrong.content[0].text
        with pytest.raises(MCPError) as unknown:
            await client.call_tool("no_such_tool", {})
        assert unknown.value.error.code == t.INVALID_PARAMS

    converse(mode, body)


@both_eras
def test_progress_arrives_in_order_and_whole(mode: str) -> None:
    seen: list[tuple[float, float | None, str | None]] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        seen.append((progress, total, message))

    async def body(client: Client) -> None:
        await client.call_tool("count", {"to": 50}, progress_callback=on_progress)
        assert seen == [(n, 50, f"now {n}") for n in range(1, 51)]

    converse(mode, body)


@both_eras
def test_a_call_it_gives_up_stops_here(mode: str) -> None:
    async def body(client: Client) -> None:
        with anyio.move_on_after(0.2) as scope:
            await client.call_tool("wait_for_ever", {})
        assert scope.cancelled_caught
        result = await client.call_tool("was_cancelled", {})
        assert result.content == [t.TextContent(type="text", text="stopped")]

    converse(mode, body)


@both_eras
def test_many_calls_at_once_each_get_their_own_answer(mode: str) -> None:
    answers: dict[int, str] = {}

    async def body(client: Client) -> None:
        async def ask(number: int) -> None:
            (content,) = (await client.call_tool("echo", {"text": str(number)})).content
            assert isinstance(content, t.TextContent)
            answers[number] = content.text

        async with anyio.create_task_group() as tasks:
            for number in range(200):
                tasks.start_soon(ask, number)
        assert answers == {number: str(number) for number in range(200)}

    converse(mode, body)


@both_eras
def test_resources_and_templates_are_listed_and_read(mode: str) -> None:
    async def body(client: Client) -> None:
        listed = {resource.uri: resource for resource in (await client.list_resources()).resources}
        assert set(listed) == {"interop://greeting", "interop://bytes"}
        assert listed["interop://greeting"].mime_type == "text/plain"
        (template,) = (await client.list_resource_templates()).resource_templates
        assert template.uri_template == "interop://items/{name}"

        (text,) = (await client.read_resource("interop://greeting")).contents
        assert isinstance(text, t.TextResourceContents)
        assert text.text == "hello"
        (blob,) = (await client.read_resource("interop://bytes")).contents
        assert isinstance(blob, t.BlobResourceContents)
        assert base64.b64decode(blob.blob) == bytes(range(256))
        (found,) = (await client.read_resource("interop://items/lamp")).contents
        assert isinstance(found, t.TextResourceContents)
        assert (found.uri, found.text) == ("interop://items/lamp", "item lamp")
        with pytest.raises(MCPError) as missing:
            await client.read_resource("interop://nowhere")
        assert missing.value.error.code == {"legacy": -32002, "auto": t.INVALID_PARAMS}[mode]

    converse(mode, body)


@both_eras
def test_prompts_and_completion(mode: str) -> None:
    async def body(client: Client) -> None:
        (prompt,) = (await client.list_prompts()).prompts
        assert prompt.name == "review"
        assert prompt.arguments is not None
        assert [(argument.name, argument.required) for argument in prompt.arguments] == [("path", True)]
        (message,) = (await client.get_prompt("review", {"path": "setup.py"})).messages
        assert message.role == "user"
        assert message.content == t.TextContent(type="text", text="Please review setup.py.")

        reference = t.PromptReference(type="ref/prompt", name="review")
        found = await client.complete(reference, {"name": "path", "value": "set"})
        assert found.completion.values == ["setup.py", "setup.cfg"]

    converse(mode, body)


@both_eras
def test_a_log_message_arrives_before_the_answer(mode: str) -> None:
    logs: list[tuple[str, Any]] = []

    async def on_log(params: t.LoggingMessageNotificationParams) -> None:
        logs.append((params.level, params.data))

    async def body(client: Client) -> None:
        await client.call_tool("warn", {"text": "mind the gap"})
        assert logs == [("warning", "mind the gap")]

    converse(mode, body, logging_callback=on_log, log_level="info")


@both_eras
def test_two_questions_in_a_row_are_put_to_the_user(mode: str) -> None:
    asked: list[str] = []

    async def answer(context: Any, params: t.ElicitRequestParams) -> t.ElicitResult:
        asked.append(params.message)
        content: dict[str, Any] = {"name": "Ada"} if "name" in params.message else {"colour": "green"}
        return t.ElicitResult(action="accept", content=content)

    async def body(client: Client) -> None:
        result = await client.call_tool("greet", {})
        assert result.content == [t.TextContent(type="text", text="Ada likes green")]
        assert asked == ["Your name?", "Your colour?"]

    converse(mode, body, elicitation_callback=answer)


@both_eras
def test_a_question_declined(mode: str) -> None:
    async def decline(context: Any, params: t.ElicitRequestParams) -> t.ElicitResult:
        return t.ElicitResult(action="decline")

    async def body(client: Client) -> None:
        result = await client.call_tool("greet", {})
        assert result.content == [t.TextContent(type="text", text="nobody")]

    converse(mode, body, elicitation_callback=decline)


@both_eras
def test_its_model_is_sampled_and_its_roots_are_listed(mode: str) -> None:
    async def sample(context: Any, params: t.CreateMessageRequestParams) -> t.CreateMessageResult:
        assert params.max_tokens == 50
        content = t.TextContent(type="text", text="42")
        return t.CreateMessageResult(role="assistant", model="deep-thought", content=content)

    async def roots(context: Any) -> t.ListRootsResult:
        return t.ListRootsResult(roots=[t.Root(uri="file:///srv/data", name="data")])

    async def body(client: Client) -> None:
        thought = await client.call_tool("think", {"question": "the answer?"})
        assert thought.content == [t.TextContent(type="text", text="deep-thought says 42")]
        listed = await client.call_tool("places", {})
        assert not listed.is_error
        assert "file:///srv/data" in listed.model_dump_json()

    converse(mode, body, sampling_callback=sample, list_roots_callback=roots)


@both_eras
def test_a_question_to_a_client_that_cannot_answer_fails_at_once(mode: str) -> None:
    async def body(client: Client) -> None:
        if mode == "legacy":
            assert (await client.call_tool("greet", {})).is_error
            return
        with pytest.raises(MCPError) as refused:
            await client.call_tool("greet", {})
        assert refused.value.error.code == -32021

    converse(mode, body)


def test_it_listens_to_changes_and_stops() -> None:
    async def body(client: Client) -> None:
        uri = "interop://greeting"
        async with client.listen(tools_list_changed=True, resource_subscriptions=[uri]) as subscription:
            assert subscription.honored.tools_list_changed
            assert subscription.honored.resource_subscriptions == [uri]
            await client.call_tool("grow", {})
            heard = {await anext(subscription), await anext(subscription)}
        assert heard == {ToolsListChanged(), ResourceUpdated(uri=uri)}
        assert "grown" in {tool.name for tool in (await client.list_tools()).tools}
        assert (await client.call_tool("grown", {})).content == [t.TextContent(type="text", text="new")]

    converse("auto", body)


@deprecated
def test_changes_come_unasked_in_the_legacy_era() -> None:
    methods: list[str] = []

    async def on_message(message: Any) -> None:
        methods.append(message.method)

    async def body(client: Client) -> None:
        await client.subscribe_resource("interop://greeting")
        await client.call_tool("grow", {})
        await client.list_tools()
        assert sorted(methods) == ["notifications/resources/updated", "notifications/tools/list_changed"]
        await client.unsubscribe_resource("interop://greeting")

    converse("legacy", body, message_handler=on_message)


@deprecated
def test_the_log_level_can_be_set_in_the_legacy_era() -> None:
    logs: list[Any] = []

    async def on_log(params: t.LoggingMessageNotificationParams) -> None:
        logs.append(params.data)

    async def body(client: Client) -> None:
        await client.set_logging_level("error")
        await client.call_tool("warn", {"text": "too low"})
        await client.set_logging_level("warning")
        await client.call_tool("warn", {"text": "just right"})
        assert logs == ["just right"]

    converse("legacy", body, logging_callback=on_log)


@deprecated
@both_eras
def test_pings(mode: str) -> None:
    async def body(client: Client) -> None:
        if mode == "legacy":
            await client.send_ping()
            return
        # 2026-07-28 has no such method.
        with pytest.raises(MCPError) as refused:
            await client.send_ping()
        assert refused.value.error.code == t.METHOD_NOT_FOUND

    converse(mode, body)
