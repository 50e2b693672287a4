"""Our client against a server made with the official Python SDK, over a real pipe and in both eras."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import trio

import trimcp

SERVER = Path(__file__).with_name("official_server.py")

both_eras = pytest.mark.parametrize("revision", [trimcp.LATEST_LEGACY, trimcp.LATEST], ids=lambda r: r.name)


def target() -> trimcp.StdioServer:
    return trimcp.stdio(sys.executable, str(SERVER))


def text_of(result: trimcp.CallToolResult) -> str:
    """The text of a result that consists of text alone."""
    assert not result.is_error, result
    return "\n".join(content.text for content in result.content if isinstance(content, trimcp.Text))


def answering(asked: list[str]) -> trimcp.Client:
    """A client that answers every question, and writes down which came."""
    client = trimcp.Client("interop", version="1.0", roots=["file:///srv/data"])

    @client.elicitation
    async def answer(params: trimcp.ElicitFormParams) -> trimcp.ElicitResult:
        asked.append(params.message)
        answers = {"name": "Ada", "colour": "green"}
        return trimcp.ElicitResult("accept", {name: answers[name] for name in params.requested_schema.properties})

    @client.sampling
    async def sample(params: trimcp.CreateMessageParams) -> trimcp.CreateMessageResult:
        asked.append("model")
        assert params.max_tokens == 50
        return trimcp.CreateMessageResult(role="assistant", model="deep-thought", content=trimcp.Text("42"))

    return client


@both_eras
async def test_one_question_after_the_other(revision: trimcp.Revision) -> None:
    asked: list[str] = []
    with trio.fail_after(30):
        async with answering(asked).connect(target(), revision=revision) as session:
            assert text_of(await session.call_tool("greet", {})) == "Ada likes green"
    assert asked == ["Your name?", "Your colour, Ada?"]


@both_eras
async def test_three_questions_of_three_kinds(revision: trimcp.Revision) -> None:
    asked: list[str] = []
    with trio.fail_after(30):
        connection = answering(asked).connect(target(), revision=revision)
        async with connection as session, session.calling("everything_at_once", {}) as call:
            assert text_of(await call.result()) == "Ada, 42, file:///srv/data"
    assert sorted(asked) == ["Your name?", "model"]


@both_eras
async def test_a_declined_question(revision: trimcp.Revision) -> None:
    client = trimcp.Client("interop", version="1.0")

    @client.elicitation
    async def decline(params: trimcp.ElicitParams) -> trimcp.ElicitResult:
        return trimcp.ElicitResult("decline")

    with trio.fail_after(30):
        async with client.connect(target(), revision=revision) as session:
            assert text_of(await session.call_tool("outcome", {})) == "decline"
            assert (await session.call_tool("greet", {})).is_error


@both_eras
async def test_a_question_to_a_client_that_cannot_answer(revision: trimcp.Revision) -> None:
    client = trimcp.Client("interop", version="1.0")
    with trio.fail_after(30):
        async with client.connect(target(), revision=revision) as session:
            with pytest.raises(trimcp.RemoteError) as refused:
                await session.call_tool("greet", {})
            assert refused.value.code == -32021
            assert (await session.call_tool("add", {"a": 2, "b": 3})).structured_content == {"total": 5}


@both_eras
async def test_progress_in_order_and_whole(revision: trimcp.Revision) -> None:
    client = trimcp.Client("interop", version="1.0")
    with trio.fail_after(30):
        connection = client.connect(target(), revision=revision)
        async with connection as session, session.calling("count", {"to": 50}) as call:
            seen = [(step.progress, step.total, step.message) async for step in call.progress]
            assert text_of(await call.result()) == "done"
    assert seen == [(n, 50, f"now {n}") for n in range(1, 51)]


@both_eras
async def test_a_call_given_up_stops_there(revision: trimcp.Revision) -> None:
    client = trimcp.Client("interop", version="1.0")
    with trio.fail_after(30):
        async with client.connect(target(), revision=revision) as session:
            with trio.move_on_after(0.2) as scope:
                await session.call_tool("wait_for_ever", {})
            assert scope.cancelled_caught
            assert text_of(await session.call_tool("was_cancelled", {})) == "stopped"


@both_eras
async def test_log_messages(revision: trimcp.Revision) -> None:
    client = trimcp.Client("interop", version="1.0")
    logs: list[tuple[str, object]] = []

    @client.logging
    def log(params: trimcp.LoggingMessageParams) -> None:
        logs.append((params.level, params.data))

    with trio.fail_after(30):
        async with client.connect(target(), revision=revision) as session:
            await session.call_tool("warn", {"text": "mind the gap"})
    assert logs == [("warning", "mind the gap")]


@both_eras
async def test_resources_prompts_and_completion(revision: trimcp.Revision) -> None:
    client = trimcp.Client("interop", version="1.0")
    with trio.fail_after(30):
        async with client.connect(target(), revision=revision) as session:
            assert session.instructions == "Ask for anything."
            assert session.server_info is not None
            assert (session.server_info.name, session.server_info.version) == ("official", "1.0")
            assert [resource.uri for resource in await session.list_resources()] == ["official://greeting"]
            (template,) = await session.list_resource_templates()
            assert template.uri_template == "official://items/{name}"
            (contents,) = (await session.read_resource("official://items/lamp")).contents
            assert isinstance(contents, trimcp.TextResourceContents)
            assert contents.text == "item lamp"
            with pytest.raises(trimcp.RemoteError) as missing:
                await session.read_resource("official://nowhere")
            assert missing.value.code == -32602
            (message,) = (await session.get_prompt("review", {"path": "setup.py"})).messages
            assert message.content == trimcp.Text("Please review setup.py.")
            completion = await session.complete_prompt("review", "path", "setup.c")
            assert completion.values == ["setup.cfg"]
            await session.ping()


async def test_changes() -> None:
    client = trimcp.Client("interop", version="1.0")
    uri = "official://greeting"
    with trio.fail_after(30):
        async with client.connect(target(), revision=trimcp.LATEST) as session:
            async with session.listen(tools=True, resources=[uri]) as changes:
                assert changes.acknowledged.tools_list_changed
                assert changes.acknowledged.resource_subscriptions == [uri]
                assert text_of(await session.call_tool("grow", {})) == "grown"
                heard = {await changes.receive(), await changes.receive()}
            assert heard == {trimcp.ToolsChanged(), trimcp.ResourceUpdated(uri)}
            assert "grown" in {tool.name for tool in await session.list_tools()}
