"""`trimcp record --agent-tools` stands between an agent and a service; `trimcp replay` plays the agent again."""

from __future__ import annotations

import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from click.testing import CliRunner

import trimcp
from tests.cli.test_recording import TRIMCP, run
from tests.fuzz.effort import PATIENCE
from trimcp import agent_tools
from trimcp.agent_tools import AgentTools
from trimcp.agent_tools.client.websocket import open_agent_channel
from trimcp.agent_tools.client.wire import AgentTarget
from trimcp.cli.app import app
from trimcp.cli.recording import relay_agent
from trimcp.testing import Transcript, replay
from trimcp.testing.play import as_agent, as_mcp, play
from trimcp.testing.transcript import JournalWriter
from trimcp.transports.websocket.client import WebSocketServer


@asynccontextmanager
async def service(answer: str = "sunny") -> AsyncIterator[str]:
    """A service; yields the URL of its WebSocket."""
    server = trimcp.Server("weather")

    @server.tool
    async def weather(city: str, *, ctx: trimcp.Context[Any]) -> str:
        await ctx.report_progress(1, 2)
        return f"{city}: {answer}"

    @server.tool
    async def hang(*, ctx: trimcp.Context[Any]) -> None:
        await ctx.report_progress(1)
        await trio.sleep_forever()

    tools = AgentTools(
        server,
        authenticate=trimcp.bearer_tokens({"secret-token": "ada"}),
        registration=agent_tools.RegistrationRules(scope=None),
    )
    async with trio.open_nursery() as nursery:
        serve = partial(trimcp.serve_http, server, agent_tools=tools, port=0)
        (url, *_) = await nursery.start(serve)
        yield url.replace("http://", "ws://").removesuffix("/mcp")
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def recording(url: str, journal: Path) -> AsyncIterator[str]:
    """What the command runs; yields where the agent connects."""
    send, told = trio.open_memory_channel[str](10)
    writer = JournalWriter(journal, url, tell=send.send_nowait)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(relay_agent, AgentTarget(url), 0, writer)
            assert "recording to" in await told.receive()
            yield (await told.receive()).rpartition(" ")[2]
    finally:
        writer.close()


async def converse(at: str) -> None:
    """Contexts, progress, a cancelled call, and a tool that the agent provides and the service calls."""
    async with agent_tools.connect(at, token="secret-token") as agent:
        await agent.tools()
        async with agent.context(state={"city": "Oslo"}) as context:
            async with context.watch() as watch:
                await watch.receive()
                await context.update({"city": "Bergen"})
                await watch.receive()
            async with context.calling("weather", {"city": "Bergen"}) as call:
                assert [step.progress async for step in call.progress] == [1]
                assert await call.result() == "Bergen: sunny"
            async with context.calling("hang", {}) as call:
                async for _ in call.progress:
                    break


@pytest.mark.slow
async def test_an_agent_is_recorded_and_replayed_to_the_same_service_and_another(tmp_path: Path) -> None:
    journal = tmp_path / "agent.jsonl"
    with trio.fail_after(PATIENCE):
        async with service() as url:
            async with recording(url, journal) as at:
                await converse(at)
            text = journal.read_text()
            assert "secret-token" not in text
            said = [json.loads(line)["message"] for line in text.splitlines()[1:]]
            assert {"tool_request", "tool_response", "tool_progress", "context_state"} <= {one["type"] for one in said}
            words: tuple[str, ...] = ("-H", "Authorization: Bearer secret-token")
            code, output = await run("replay", str(journal), url, *words)
            assert (code, output.startswith("the server says the same: ")) == (0, True), output
            code, output = await run("replay", str(journal), url)
            assert code == 3
        async with service("grey") as url:
            code, output = await run("replay", str(journal), url, *words)
            assert code == 1
            assert '$.result is "Bergen: grey", expected "Bergen: sunny"' in output
            assert "1 differences in what the server says" in output


async def played(journal: Path, url: str) -> list[str]:
    async with open_agent_channel(AgentTarget(url, "secret-token")) as channel:
        return await play(Transcript.load(journal).messages, channel)


async def test_a_provider_is_replayed_with_the_ids_that_the_service_chooses_now(tmp_path: Path) -> None:
    journal, name = tmp_path / "provider.jsonl", "ada.double"

    def double(number: int) -> int:
        return 2 * number

    async def call_when_there_is_one(url: str, expected: Any) -> None:
        async with agent_tools.supervise(url, token="secret-token") as agent:
            while name not in [tool["name"] for tool in await agent.tools()]:
                pass  # each time it waits for the service's answer
            assert await agent.call(name, {"number": 4}) == expected

    with trio.fail_after(PATIENCE):
        async with service() as url:
            async with recording(url, journal) as at, trio.open_nursery() as nursery:
                nursery.start_soon(partial(agent_tools.provide, at, [double], token="secret-token"))
                await call_when_there_is_one(url, 8)
                nursery.cancel_scope.cancel()
            said = [message for _, message in Transcript.load(journal).messages]
            assert [message["type"] for message in said] == [
                *("provide_tools", "tools_registered", "tool_request", "tool_response")
            ]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(call_when_there_is_one, url, 8)
                assert await played(journal, url) == []
                nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_the_command_says_where_the_agent_connects_and_ends_when_it_leaves(tmp_path: Path) -> None:
    journal = tmp_path / "agent.jsonl"
    with trio.fail_after(PATIENCE):
        async with service() as url, trio.open_nursery() as nursery:
            words = [*TRIMCP, "record", str(journal), "--agent-tools", "--port", "0", url]
            process = await nursery.start(partial(trio.run_process, words, stderr=subprocess.PIPE, check=False))
            said = b""
            while said.count(b"\n") < 2:
                said += await process.stderr.receive_some()
            at = said.decode().split("the agent connects to ")[1].strip()
            port = at.rpartition(":")[2]
            code, output = await run("record", str(tmp_path / "two"), "--agent-tools", "--port", port, url)
            assert (code, f"cannot listen on 127.0.0.1:{port}" in output, "Traceback" in output) == (2, True, False), (
                output
            )
            async with agent_tools.connect(at, token="secret-token") as agent:
                assert await agent.call("weather", {"city": "Oslo"}) == "Oslo: sunny"
            assert await process.wait() == 0
    assert len(Transcript.load(journal).messages) == 2


async def test_web_pages_and_a_second_agent_are_refused_and_a_service_that_refuses_is_told(tmp_path: Path) -> None:
    with trio.fail_after(PATIENCE):
        async with service() as url:
            async with recording(url, tmp_path / "one.jsonl") as at:
                for headers, status in (({"Origin": "https://page.example"}, "403"), ({}, "400")):
                    with pytest.raises(trimcp.ConnectionLost, match=status):
                        await WebSocketServer(at, headers).open()
                with pytest.raises(trimcp.ConnectionLost, match="404"):
                    await WebSocketServer(f"{at}/elsewhere").open()
                async with agent_tools.connect(at, token="secret-token") as agent:
                    await agent.tools()
                    with pytest.raises(agent_tools.Draining, match="503"):
                        async with agent_tools.connect(at, token="secret-token"):
                            pass
                    await agent.tools()
            with pytest.RaisesGroup(agent_tools.Unauthenticated):
                async with recording(url, tmp_path / "two.jsonl") as at:
                    with pytest.raises(trimcp.ConnectionLost, match="502"):
                        async with agent_tools.connect(at, token="wrong"):
                            pass


def test_what_cannot_be_recorded_or_replayed_is_said(tmp_path: Path) -> None:
    journal = tmp_path / "agent.jsonl"
    journal.write_text(
        '{"trimcp_journal": 1}\n{"from": "client", "message": {"type": "list_tools", "request_id": "1"}}\n'
    )
    for words, said in (
        (["record", "x.jsonl", "--port", "1", "ws://127.0.0.1:1"], "--port is for --agent-tools"),
        (["record", "x.jsonl", "--agent-tools", "http://127.0.0.1:1/mcp"], "over WebSocket: write ws://HOST:PORT"),
        (["replay", str(journal), "server.py"], "over WebSocket: write ws://HOST:PORT"),
        (["replay", str(journal), "--side", "server"], "an agent starts no server"),
    ):
        found = CliRunner().invoke(app, words)
        assert (found.exit_code, said in found.output) == (2, True), found.output


async def test_a_recording_of_agent_tools_is_not_replayed_as_one_of_mcp(tmp_path: Path) -> None:
    transcript = Transcript([(True, {"type": "list_tools", "request_id": "1"})], recorded=True)
    with pytest.raises(TypeError, match="trimcp replay FILE ws://"):
        await replay(transcript, trimcp.Server("weather"))


@pytest.mark.parametrize(
    ("message", "from_client", "asks"),
    [
        ({"type": "tool_request", "request_id": "1", "tool_name": "a"}, False, True),
        ({"type": "context_update", "request_id": "1", "context_id": "c", "updates": {}}, True, True),
        ({"type": "context_update", "request_id": "1", "context_id": "c", "updates": {}}, False, False),
        ({"type": "context_update", "context_id": "c", "updates": {}}, False, False),
        ({"type": "tool_response", "request_id": "1", "status": "success", "result": None}, True, False),
        ({"type": "tool_progress", "request_id": "1", "progress": 1}, False, False),
        ({"type": "tool_cancel", "request_id": "1", "reason": "late"}, True, False),
        ({"type": "error", "request_id": "1", "error": {"code": "X"}}, False, False),
        ({"odd": 1}, False, False),
        ([1, 2], False, False),
    ],
)
def test_messages_have_the_shape_of_mcp_and_get_theirs_back(message: Any, from_client: bool, asks: bool) -> None:
    shaped = as_mcp(message, from_client)
    assert as_agent(shaped) == message
    assert ("method" in shaped and "id" in shaped) is asks
