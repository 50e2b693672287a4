"""Our client against servers in use: two in Python over pipes, in both eras, and one in Node over all it has."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

import trimcp
from tests.interop.peers import HERE, NODE, Served, serving
from trimcp.wire.revisions import V2024_11_05, V2025_03_26, V2025_06_18

EVERYTHING = Path(
    os.environ["TRIMCP_NODE_EVERYTHING"], "@modelcontextprotocol", "server-everything", "dist", "index.js"
)

both_eras = pytest.mark.parametrize("revision", [trimcp.LATEST_LEGACY, trimcp.LATEST], ids=lambda r: r.name)


def text_of(result: trimcp.CallToolResult) -> str:
    """The text of a result that consists of text alone."""
    return "\n".join(content.text for content in result.content if isinstance(content, trimcp.Text))


def time_server() -> trimcp.StdioServer:
    return trimcp.stdio(sys.executable, "-m", "mcp_server_time", "--local-timezone", "UTC")


@contextmanager
def everything_over(transport: str, folder: Path) -> Iterator[Served]:
    """Run the Node server over one of its transports for the network."""
    command = [NODE, "--import", (HERE / "loopback.mjs").as_uri(), EVERYTHING, transport]
    with serving(command, folder / f"{transport}.log", env={"PORT": "0"}) as served:
        yield served


@pytest.fixture(scope="module")
def everything_http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The Node server over Streamable HTTP."""
    with everything_over("streamableHttp", tmp_path_factory.mktemp("everything")) as served:
        yield served


@pytest.fixture(scope="module")
def everything_sse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The Node server over HTTP+SSE."""
    with everything_over("sse", tmp_path_factory.mktemp("everything")) as served:
        yield served


@pytest.fixture(params=["stdio", "http", "sse"])
def everything(request: pytest.FixtureRequest) -> Any:
    """Where the Node server is: over a pipe, Streamable HTTP, or HTTP+SSE, which a client has to find out."""
    if request.param == "stdio":
        return trimcp.stdio(str(NODE), str(EVERYTHING), "stdio")
    served: Served = request.getfixturevalue(f"everything_{request.param}")
    return trimcp.http(served.http if request.param == "http" else served.sse)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A Git repository with one commit and one untracked file."""
    identity = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org"]
    (tmp_path / "kept.txt").write_text("kept\n", "utf-8")
    for command in (["init", "-q"], ["add", "kept.txt"], [*identity, "commit", "-q", "-m", "Keep a file"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    (tmp_path / "new.txt").write_text("new\n", "utf-8")
    return tmp_path


def git_server(repository: Path) -> trimcp.StdioServer:
    return trimcp.stdio(sys.executable, "-m", "mcp_server_git", "--repository", str(repository))


@both_eras
async def test_time_server(revision: trimcp.Revision) -> None:
    client = trimcp.Client("interop", version="1.0")
    with trio.fail_after(30):
        async with client.connect(time_server(), revision=revision) as session:
            assert session.revision == revision
            assert session.server_info.name == "mcp-time"
            assert [tool.name for tool in await session.list_tools()] == ["get_current_time", "convert_time"]

            noon = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Kathmandu"}
            result = await session.call_tool("convert_time", noon)
            assert not result.is_error
            assert result.structured_content["time_difference"] == "+5.75h"

            nowhere = await session.call_tool("get_current_time", {"timezone": "Nowhere/At_All"})
            assert nowhere.is_error
            assert "Nowhere/At_All" in text_of(nowhere)
            with pytest.raises(trimcp.RemoteError) as unknown:
                await session.call_tool("no_such_tool", {})
            assert unknown.value.code == -32602


async def test_time_server_by_negotiation() -> None:
    client = trimcp.Client("interop", version="1.0")
    with trio.fail_after(30):
        async with client.connect(time_server()) as session:
            assert session.revision == trimcp.LATEST
            result = await session.call_tool("get_current_time", {"timezone": "Asia/Tokyo"})
            assert result.structured_content["timezone"] == "Asia/Tokyo"
            assert await session.list_resources() == []
            assert await session.list_prompts() == []


@both_eras
async def test_git_server(revision: trimcp.Revision, repository: Path) -> None:
    client = trimcp.Client("interop", version="1.0")
    path = {"repo_path": str(repository)}
    with trio.fail_after(30):
        async with client.connect(git_server(repository), revision=revision) as session:
            assert "new.txt" in text_of(await session.call_tool("git_status", path))
            assert "Keep a file" in text_of(await session.call_tool("git_log", path))
            assert not (await session.call_tool("git_add", path | {"files": ["new.txt"]})).is_error
            assert "+new" in text_of(await session.call_tool("git_diff_staged", path))
            outside = await session.call_tool("git_status", {"repo_path": str(repository.parent)})
            assert outside.is_error


async def test_git_server_answers_many_calls_at_once(repository: Path) -> None:
    client = trimcp.Client("interop", version="1.0")
    answers: list[str] = []
    with trio.fail_after(60):
        async with client.connect(git_server(repository)) as session:

            async def ask() -> None:
                answers.append(text_of(await session.call_tool("git_log", {"repo_path": str(repository)})))

            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(ask)
    assert len(answers) == 20
    assert len(set(answers)) == 1


async def test_everything_server_tools_resources_and_prompts(everything: Any) -> None:
    client = trimcp.Client("interop", version="1.0")
    with trio.fail_after(60):
        async with client.connect(everything) as session:
            assert session.revision == trimcp.LATEST_LEGACY
            assert session.server_info.name == "mcp-servers/everything"
            tools = {tool.name for tool in await session.list_tools()}
            assert {"echo", "get-sum", "get-structured-content"} <= tools
            assert "trigger-elicitation-request" not in tools  # offered only to clients that can answer

            assert text_of(await session.call_tool("get-sum", {"a": 2, "b": 3})) == "The sum of 2 and 3 is 5."
            weather = await session.call_tool("get-structured-content", {"location": "Chicago"})
            assert set(weather.structured_content) == {"temperature", "conditions", "humidity"}
            assert (await session.call_tool("get-sum", {"a": "two"})).is_error
            image = (await session.call_tool("get-tiny-image", {})).content[1]
            assert image.mime_type == "image/png"
            links = (await session.call_tool("get-resource-links", {"count": 2})).content[1:]
            assert [link.uri for link in links] == [
                "demo://resource/dynamic/blob/1",
                "demo://resource/dynamic/text/2",
            ]
            embedded = (await session.call_tool("get-resource-reference", {"resourceId": 3})).content[1]
            assert embedded.resource.uri == "demo://resource/dynamic/text/3"

            resources = {resource.uri for resource in await session.list_resources()}
            assert "demo://resource/static/document/features.md" in resources
            templates = {template.uri_template for template in await session.list_resource_templates()}
            assert "demo://resource/dynamic/text/{resourceId}" in templates
            (contents,) = (await session.read_resource("demo://resource/dynamic/text/7")).contents
            assert contents.text.startswith("Resource 7:")
            with pytest.raises(trimcp.RemoteError):
                await session.read_resource("demo://resource/nowhere")

            assert "args-prompt" in {prompt.name for prompt in await session.list_prompts()}
            prompt = await session.get_prompt("args-prompt", {"city": "Oslo"})
            assert prompt.messages[0].content.text == "What's weather in Oslo?"
            completion = await session.complete_prompt(
                "completable-prompt", "name", "E", context={"department": "Sales"}
            )
            assert completion.values == ["Eve"]


async def test_everything_server_streams_progress_and_can_be_cancelled(everything: Any) -> None:
    client = trimcp.Client("interop", version="1.0")
    with trio.fail_after(60):
        async with client.connect(everything) as session:
            steps = {"duration": 0.3, "steps": 3}
            async with session.calling("trigger-long-running-operation", steps) as call:
                seen = [step.progress async for step in call.progress]
                assert "completed" in text_of(await call.result())
            assert seen == [1, 2, 3]

            with pytest.raises(trio.TooSlowError), trio.fail_after(0.2):
                await session.call_tool("trigger-long-running-operation", {"duration": 600, "steps": 2})
            assert text_of(await session.call_tool("echo", {"message": "still here"})) == "Echo: still here"


async def test_everything_server_asks_us(everything: Any) -> None:
    client = trimcp.Client("interop", version="1.0", roots=[trimcp.wire.Root(uri="file:///srv/data", name="data")])

    @client.elicitation
    async def answer(request: trimcp.ElicitParams) -> trimcp.ElicitResult:
        content = {"name": "Ada", "check": True, "integer": 7}
        return trimcp.ElicitResult(action="accept", content=content)

    @client.sampling
    async def sample(request: trimcp.CreateMessageParams) -> trimcp.CreateMessageResult:
        assert request.max_tokens == 9
        return trimcp.CreateMessageResult(role="assistant", model="deep-thought", content=trimcp.Text("42"))

    with trio.fail_after(60):
        async with client.connect(everything) as session:
            answered = text_of(await session.call_tool("trigger-elicitation-request", {}))
            assert "- Name: Ada\n- Agreed to terms: true\n- Favorite Integer: 7" in answered
            sampled = await session.call_tool("trigger-sampling-request", {"prompt": "?", "maxTokens": 9})
            assert '"text": "42"' in text_of(sampled)
            assert "file:///srv/data" in text_of(await session.call_tool("get-roots-list", {}))


async def test_everything_server_tells_of_a_changed_resource(everything: Any) -> None:
    client = trimcp.Client("interop", version="1.0")
    uri = "demo://resource/dynamic/text/1"
    with trio.fail_after(60):
        async with client.connect(everything) as session, session.listen(resources=[uri]) as changes:
            await session.call_tool("toggle-subscriber-updates", {})
            async for change in changes:
                assert change.uri == uri
                break


async def test_everything_server_answers_many_calls_at_once(everything: Any) -> None:
    client = trimcp.Client("interop", version="1.0")
    answers: dict[int, str] = {}
    with trio.fail_after(60):
        async with client.connect(everything) as session:

            async def ask(number: int) -> None:
                answers[number] = text_of(await session.call_tool("echo", {"message": str(number)}))

            async with trio.open_nursery() as nursery:
                for number in range(50):
                    nursery.start_soon(ask, number)
    assert answers == {number: f"Echo: {number}" for number in range(50)}


@pytest.mark.parametrize("revision", [V2025_06_18, V2025_03_26, V2024_11_05], ids=lambda r: r.name)
async def test_everything_server_in_older_revisions(everything: Any, revision: trimcp.Revision) -> None:
    client = trimcp.Client("interop", version="1.0")
    with trio.fail_after(60):
        async with client.connect(everything, revision=revision) as session:
            assert session.revision == revision
            assert text_of(await session.call_tool("get-sum", {"a": 2, "b": 3})) == "The sum of 2 and 3 is 5."
