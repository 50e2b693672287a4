"""The fixture server itself, in memory: what the suite will find, in every revision, before the suite is started."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import orjson
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import trimcp
from tests.conformance import server as fixtures
from tests.interaction.links import Wire
from trimcp.testing import connected, every_revision

ANSWERS = {
    "name": "Ada",
    "ok": True,
    "color": "red",
    "context": "a test",
    "username": "ada",
    "email": "ada@example.org",
}


@pytest.fixture
def logged() -> list[Any]:
    return []


@pytest.fixture
def client(logged: list[Any]) -> trimcp.Client:
    """A client that answers everything."""
    client = trimcp.Client("suite", roots=["file:///home", "file:///srv"])

    @client.elicitation
    def fill_in(request: trimcp.wire.ElicitFormParams) -> trimcp.ElicitResult:
        fields = request.requested_schema.properties
        content = {name: ANSWERS[name] for name in fields if name in ANSWERS}
        return trimcp.ElicitResult("accept", trimcp.fill_defaults(request.requested_schema, content))

    @client.sampling
    def answer(params: trimcp.CreateMessageParams) -> str:
        return f"{params.messages[0].content.text} {params.max_tokens}"

    @client.logging
    def log(message: trimcp.wire.LoggingMessageParams) -> None:
        logged.append(message.data)

    return client


def text_of(result: trimcp.CallToolResult) -> str:
    assert not result.is_error, result
    (block,) = result.content
    assert isinstance(block, trimcp.Text)
    return block.text


async def test_all_names_and_descriptions() -> None:
    async with connected(fixtures.server) as session:
        tools = await session.list_tools()
        prompts = await session.list_prompts()
        templates = await session.list_resource_templates()
        assert [template.uri_template for template in templates] == ["test://template/{id}/data", "skill://{+path}"]
        assert all(tool.description for tool in tools)
        assert all(prompt.description for prompt in prompts)
        assert {"test_simple_text", "test_reconnection", "test_slow"} <= {tool.name for tool in tools}
        (mirrored,) = [tool for tool in tools if "x-mcp-header" in json.dumps(tool.input_schema)]
        assert mirrored.input_schema["properties"]["region"]["x-mcp-header"] == "Region"
        assert "required" not in mirrored.input_schema
        assert {tool.name: tool.input_schema for tool in tools}["json_schema_2020_12_tool"] == fixtures.CONTACT
        capabilities = session.server_capabilities
        assert capabilities.tools.list_changed
        assert capabilities.prompts.list_changed
        assert capabilities.resources.subscribe


@every_revision
async def test_content(revision: trimcp.Revision) -> None:
    async with connected(fixtures.server, revision=revision) as session:
        assert text_of(await session.call_tool("test_simple_text")) == "This is a simple text response for testing."
        kinds = {"test_image_content": ["image"], "test_embedded_resource": ["resource"]}
        kinds["test_multiple_content_types"] = ["text", "image", "resource"]
        if revision != trimcp.REVISIONS[0]:  # which has no sound
            kinds["test_audio_content"] = ["audio"]
        for tool, expected in kinds.items():
            result = await session.call_tool(tool)
            assert [block.type for block in result.content] == expected
        failed = await session.call_tool("test_error_handling")
        assert failed.is_error
        assert failed.content == [trimcp.Text("This tool intentionally returns an error for testing")]
        structured = await session.call_tool("test_structured_content")
        assert json.loads(text_of(structured)) == {"temperature": 22.5, "conditions": "Partly cloudy"}
        assert text_of(await session.call_tool("test_x_mcp_header", {"region": "eu"})) == "region: eu"


@every_revision
async def test_resources(revision: trimcp.Revision) -> None:
    async with connected(fixtures.server, revision=revision) as session:
        read = {uri: (await session.read_resource(uri)).contents[0] for uri in ("test://static-text", fixtures.WATCHED)}
        assert read["test://static-text"].text == "This is the content of the static text resource."
        assert read["test://static-text"].mime_type == "text/plain"
        (binary,) = (await session.read_resource("test://static-binary")).contents
        assert isinstance(binary, trimcp.wire.BlobResourceContents)
        (made,) = (await session.read_resource("test://template/123/data")).contents
        assert json.loads(made.text) == {"id": "123", "templateTest": True, "data": "Data for ID: 123"}
        with pytest.raises(trimcp.RemoteError) as caught:
            await session.read_resource("test://nothing")
        assert caught.value.data["uri"] == "test://nothing"


@every_revision
async def test_prompts(revision: trimcp.Revision, client: trimcp.Client) -> None:
    async with connected(fixtures.server, client, revision=revision) as session:
        simple = await session.get_prompt("test_simple_prompt")
        assert [message.content for message in simple.messages] == [trimcp.Text("This is a simple prompt for testing.")]
        filled = await session.get_prompt("test_prompt_with_arguments", {"arg1": "a", "arg2": "b"})
        assert filled.messages[0].content.text == "Prompt with arguments: arg1='a', arg2='b'"
        about = await session.get_prompt("test_prompt_with_embedded_resource", {"resourceUri": "test://x"})
        assert [message.content.type for message in about.messages] == ["resource", "text"]
        assert about.messages[0].content.resource.uri == "test://x"
        pictured = await session.get_prompt("test_prompt_with_image")
        assert [message.content.type for message in pictured.messages] == ["image", "text"]
        assert (await session.complete_prompt("test_prompt_with_arguments", "arg1", "test")).values
        if client_can_be_asked(revision):
            asked = await session.get_prompt("test_input_required_result_prompt")
            assert "a test" in asked.messages[0].content.text


def client_can_be_asked(revision: trimcp.Revision) -> bool:
    """Whether the revision has elicitation."""
    return revision not in trimcp.REVISIONS[:2]


@every_revision
async def test_what_happens_meanwhile(
    revision: trimcp.Revision, client: trimcp.Client, logged: list[Any], autojump_clock: Any
) -> None:
    async with connected(fixtures.server, client, revision=revision) as session:
        assert text_of(await session.call_tool("test_tool_with_logging"))
        assert text_of(await session.call_tool("test_logging_tool"))
        await wait_all_tasks_blocked()
        assert logged[:3] == ["Tool execution started", "Tool processing data", "Tool execution completed"]
        assert len(logged) == 4
        async with session.calling("test_tool_with_progress") as call:
            assert [(step.progress, step.total) async for step in call.progress] == [(0, 100), (50, 100), (100, 100)]
        assert text_of(await session.call_tool("test_reconnection"))  # nothing to close here
        before = trio.current_time()
        assert text_of(await session.call_tool("test_slow", {"seconds": 3})) == "slept"
        assert trio.current_time() == before + 3
        with trio.move_on_after(1):
            await session.call_tool("test_slow", {"seconds": 9})
        await wait_all_tasks_blocked()
        assert text_of(await session.call_tool("test_cancelled_count")) == "1"


@every_revision
async def test_questions(revision: trimcp.Revision, client: trimcp.Client) -> None:
    async with connected(fixtures.server, client, revision=revision) as session:

        async def call(tool: str, **arguments: Any) -> str:
            return text_of(await session.call_tool(tool, arguments))

        assert await call("test_sampling", prompt="Why?") == "LLM response: Why? 100"
        assert await call("test_missing_capability") == "Can you hear me? 100"
        assert await call("test_list_roots") == "file:///home\nfile:///srv"
        assert "France" in await call("test_input_required_result_sampling")
        assert "file:///srv" in await call("test_input_required_result_list_roots")
        if not client_can_be_asked(revision):
            return
        assert await call("test_elicitation", message="Who?") == (
            'User response: action=accept, content={"username": "ada", "email": "ada@example.org"}'
        )
        assert await call("test_streaming_elicitation")
        assert await call("test_input_required_result_elicitation") == "Hello, Ada!"
        assert "state-ok" in await call("test_input_required_result_request_state")
        assert await call("test_input_required_result_tampered_state")
        assert await call("test_input_required_result_multiple_inputs") == "three answers"
        rounds = await call("test_input_required_result_multi_round")
        assert "Ada" in rounds
        assert "red" in rounds
        assert await call("test_input_required_result_capabilities")


async def test_forms() -> None:
    """What the forms look like on the wire."""
    client = trimcp.Client("suite")
    schemas: list[Any] = []

    @client.elicitation
    def fill_in(request: trimcp.wire.ElicitFormParams) -> trimcp.ElicitResult:
        schemas.append(request.requested_schema)
        return trimcp.ElicitResult("accept", {"untitledSingle": "none of them", "titledMulti": ["nor this"]})

    async with connected(fixtures.server, client, revision=trimcp.LATEST_LEGACY) as session:
        assert "none of them" in text_of(await session.call_tool("test_elicitation_sep1330_enums"))
        assert text_of(await session.call_tool("test_elicitation_sep1034_defaults"))
    enums, defaults = schemas
    assert list(enums.properties) == [*fixtures.SELECTIONS]
    assert {name: field.default for name, field in defaults.properties.items()} == {
        "name": "John Doe",
        "age": 30,
        "score": 95.5,
        "status": "active",
        "verified": True,
    }
    assert defaults.properties["age"].type == "integer"
    assert defaults.properties["score"].type == "number"
    assert defaults.properties["status"].enum == ["active", "inactive", "pending"]


@asynccontextmanager
async def wired(*capabilities: str) -> AsyncIterator[Any]:
    """Yield a function that calls a tool in the newest revision and returns the reply as JSON."""
    ours, theirs = trimcp.memory_channels()
    wire = Wire(theirs, trimcp.LATEST, {name: {} for name in capabilities})
    async with trio.open_nursery() as nursery, theirs:
        nursery.start_soon(fixtures.server.serve, ours)

        async def call(tool: str, **params: Any) -> dict[str, Any]:
            reply = await wire.ask(1, "tools/call", {"name": tool, "arguments": {}, **params})
            return orjson.loads(orjson.dumps(reply))

        yield call


ALL = ("elicitation", "sampling", "roots")
NAMED = {"user_name": {"action": "accept", "content": {"name": "Ada"}}}


@pytest.mark.parametrize(
    ("tool", "asked"),
    [
        ("test_input_required_result_elicitation", {"user_name": "elicitation/create"}),
        ("test_input_required_result_sampling", {"capital_question": "sampling/createMessage"}),
        ("test_input_required_result_list_roots", {"client_roots": "roots/list"}),
        ("test_input_required_result_request_state", {"confirm": "elicitation/create"}),
        ("test_input_required_result_tampered_state", {"confirm": "elicitation/create"}),
        (
            "test_input_required_result_multiple_inputs",
            {"user_name": "elicitation/create", "greeting": "sampling/createMessage", "client_roots": "roots/list"},
        ),
        ("test_input_required_result_multi_round", {"step1": "elicitation/create"}),
    ],
)
async def test_first_round(tool: str, asked: dict[str, str]) -> None:
    async with wired(*ALL) as call:
        result = (await call(tool))["result"]
        assert result["resultType"] == "input_required"
        assert {key: request["method"] for key, request in result["inputRequests"].items()} == asked
        assert isinstance(result["requestState"], str)


async def test_second_round() -> None:
    async with wired(*ALL) as call:
        tool = "test_input_required_result_elicitation"
        done = (await call(tool, inputResponses=NAMED | {"more": NAMED["user_name"]}))["result"]
        assert done["content"] == [{"type": "text", "text": "Hello, Ada!"}]
        assert done["resultType"] == "complete"
        again = (await call(tool, inputResponses={"other": NAMED["user_name"]}))["result"]
        assert again["resultType"] == "input_required"
        assert (await call(tool, inputResponses=None))["result"] == (await call(tool))["result"], "null is absent"
        for wrong in ({"user_name": 5}, {"user_name": {"content": {"name": "Ada"}}}):
            assert (await call(tool, inputResponses=wrong))["error"]["code"] == -32602


async def test_two_rounds_have_two_states() -> None:
    async with wired(*ALL) as call:
        tool = "test_input_required_result_multi_round"
        first = (await call(tool))["result"]
        answer = {"step1": {"action": "accept", "content": {"name": "Ada"}}}
        second = (await call(tool, inputResponses=answer, requestState=first["requestState"]))["result"]
        assert list(second["inputRequests"]) == ["step2"]
        assert second["requestState"] != first["requestState"]
        answer = {"step2": {"action": "accept", "content": {"color": "red"}}}
        done = (await call(tool, inputResponses=answer, requestState=second["requestState"]))["result"]
        assert done["resultType"] == "complete"


async def test_a_state_that_was_touched() -> None:
    async with wired(*ALL) as call:
        tool = "test_input_required_result_tampered_state"
        first = (await call(tool))["result"]
        answer = {"confirm": {"action": "accept", "content": {"ok": True}}}
        spoilt = await call(tool, inputResponses=answer, requestState=first["requestState"] + "-TAMPERED")
        assert spoilt["error"]["code"] == -32602


async def test_capabilities() -> None:
    async with wired("sampling") as call:
        asked = (await call("test_input_required_result_capabilities"))["result"]["inputRequests"]
        assert [request["method"] for request in asked.values()] == ["sampling/createMessage"]
    async with wired() as call:
        error = (await call("test_missing_capability"))["error"]
        assert error["code"] == -32021
        assert error["data"]["requiredCapabilities"] == {"sampling": {}}


@every_revision
async def test_changes(revision: trimcp.Revision) -> None:
    async with (
        connected(fixtures.server, revision=revision) as session,
        session.listen(tools=True, prompts=True, resources=[fixtures.WATCHED]) as changes,
    ):
        tools, prompts = len(await session.list_tools()), len(await session.list_prompts())
        for added in (1, 0):  # they come, and go
            await session.call_tool("test_trigger_tool_change")
            assert await changes.receive() == trimcp.ToolsChanged()
            assert len(await session.list_tools()) == tools + added
            await session.call_tool("test_trigger_prompt_change")
            assert await changes.receive() == trimcp.PromptsChanged()
            assert len(await session.list_prompts()) == prompts + added
        await session.call_tool("test_update_resource")
        assert await changes.receive() == trimcp.ResourceUpdated(fixtures.WATCHED)


async def test_the_program_with_pages() -> None:
    program = trimcp.stdio(sys.executable, fixtures.__file__, "--transport", "stdio", "--page-size", "3")
    async with trimcp.Client("suite").connect(program) as session:
        page = await session.list_page("tools/list")
        assert len(page.tools) == 3
        assert len(await session.list_tools()) > 30
        with pytest.raises(trimcp.RemoteError) as caught:
            await session.list_page("tools/list", "nowhere")
        assert caught.value.code == -32602


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["http", "sse", "ws"])
async def test_the_program_over(transport: str) -> None:
    command = [sys.executable, fixtures.__file__, "--transport", transport]
    async with trio.open_nursery() as nursery:
        process = await nursery.start(partial(trio.run_process, command, stdout=subprocess.PIPE))
        url = (await process.stdout.receive_some()).decode().strip()
        target = trimcp.websocket(url) if transport == "ws" else trimcp.http(url)
        async with trimcp.Client("suite").connect(target) as session:
            assert text_of(await session.call_tool("test_x_mcp_header", {"region": "eu"})) == "region: eu"
            assert session.revision == (trimcp.LATEST_LEGACY if transport == "sse" else trimcp.LATEST)
        process.terminate()  # the nursery fails if it does not end well
