"""The functions a program ends with, in real processes: drain on signals, the end of input, the trace."""

from __future__ import annotations

import json
import signal
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

import trimcp
from tests.peers.processes import seconds_an_interpreter_needs
from trimcp.transports.http.client.target import HttpServer
from trimcp.transports.stdio.child import StdioServer
from trimcp.transports.websocket.client import WebSocketServer

SERVER = textwrap.dedent(
    """
    import sys, trio, trimcp

    server = trimcp.Server("run")

    @server.tool
    async def nap(seconds: float) -> str:
        print("napping", file=sys.stderr, flush=True)
        try:
            await trio.sleep(seconds)
            return "slept"
        finally:
            print("clean-up ran", file=sys.stderr, flush=True)

    trimcp.run_stdio(server, grace={grace})
    """
)


@attrs.define(eq=False)
class Child:
    """A server process spoken to by hand."""

    process: trio.Process
    errors: str = ""

    async def say(self, id: int | None, method: str, **params: Any) -> None:
        message = {"jsonrpc": "2.0", "method": method, "params": params, **({} if id is None else {"id": id})}
        assert self.process.stdin is not None
        await self.process.stdin.send_all(json.dumps(message).encode() + b"\n")

    async def hear(self) -> dict[str, Any]:
        data = b""
        assert self.process.stdout is not None
        while not data.endswith(b"\n"):
            chunk = await self.process.stdout.receive_some()
            assert chunk, f"the server ended: {self.errors}"
            data += chunk
        message: dict[str, Any] = json.loads(data)
        return message

    async def watch(self, words: str) -> None:
        """Read standard error until these words have come."""
        assert self.process.stderr is not None
        while words not in self.errors:
            self.errors += (await self.process.stderr.receive_some()).decode()

    async def end(self) -> int:
        """Wait for the process and read the rest of its standard error."""
        assert self.process.stderr is not None
        async for chunk in self.process.stderr:
            self.errors += chunk.decode()
        return await self.process.wait()


@asynccontextmanager
async def child(grace: float = 5.0) -> AsyncIterator[Child]:
    pipe = {"stdin": -1, "stdout": -1, "stderr": -1}
    process = await trio.lowlevel.open_process([sys.executable, "-c", SERVER.format(grace=grace)], **pipe)
    try:
        with trio.fail_after(30):
            self = Child(process)
            await self.say(0, "initialize", protocolVersion="2025-11-25", capabilities={}, clientInfo=CLIENT)
            await self.hear()
            await self.say(None, "notifications/initialized")
            yield self
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


CLIENT = {"name": "by hand", "version": "0"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_calls_under_way_answer_and_exits_quietly(number: signal.Signals) -> None:
    async with child() as server:
        await server.say(1, "tools/call", name="nap", arguments={"seconds": 0.5})
        await server.watch("napping")
        server.process.send_signal(number)
        reply = await server.hear()
        assert reply["result"]["content"][0]["text"] == "slept"
        assert await server.end() == 0
        assert "Traceback" not in server.errors


async def test_after_the_grace_calls_are_cancelled_with_an_error_and_clean_up() -> None:
    async with child(grace=0.2) as server:
        await server.say(1, "tools/call", name="nap", arguments={"seconds": 600})
        await server.watch("napping")
        server.process.send_signal(signal.SIGTERM)
        reply = await server.hear()
        assert reply["id"] == 1
        assert "drain" in reply["error"]["message"]
        assert await server.end() == 0
        assert "clean-up ran" in server.errors
        assert "Traceback" not in server.errors


async def test_a_second_signal_ends_at_once() -> None:
    async with child(grace=600) as server:
        await server.say(1, "tools/call", name="nap", arguments={"seconds": 600})
        await server.watch("napping")
        server.process.send_signal(signal.SIGTERM)
        reply: dict[str, Any] = {}
        id = 1
        while "error" not in reply:  # a refusal shows that the first signal has arrived
            id += 1
            await server.say(id, "tools/list")
            reply = await server.hear()
            assert reply["id"] == id
        server.process.send_signal(signal.SIGTERM)
        assert await server.end() == 128 + signal.SIGTERM


@pytest.mark.parametrize("how", ["signal", "end of input"])
async def test_an_idle_server_is_gone_soon(how: str) -> None:
    async with child() as server:
        began = trio.current_time()
        if how == "signal":
            server.process.send_signal(signal.SIGTERM)
        else:
            assert server.process.stdin is not None
            await server.process.stdin.aclose()
        assert await server.end() == 0
        elapsed = trio.current_time() - began
        assert "Traceback" not in server.errors
    # Promised are 0.5 s and 1 s, most of it for the interpreter; four times that, or of what it takes here.
    control = await seconds_an_interpreter_needs("trio, trimcp")
    assert elapsed < max(2.0 if how == "signal" else 4.0, 10 * control)


async def test_a_client_that_closes_the_input_as_well_shortens_the_grace() -> None:
    async with child(grace=600) as server:
        await server.say(1, "tools/call", name="nap", arguments={"seconds": 600})
        await server.watch("napping")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.stdin is not None
        began = trio.current_time()
        await server.process.stdin.aclose()
        assert await server.end() == 0
        elapsed = trio.current_time() - began
        assert "clean-up ran" in server.errors
    assert elapsed < max(4.0, 10 * await seconds_an_interpreter_needs("trio, trimcp"))


async def test_in_process_is_something_to_connect_to() -> None:
    server: trimcp.Server[None] = trimcp.Server("here")

    @server.tool
    async def echo(text: str) -> str:
        return text

    async with trimcp.Client("c").connect(trimcp.in_process(server, framed=True)) as session:
        assert (await session.call_tool("echo", {"text": "hi"})).content == [trimcp.Text("hi")]


async def test_the_environment_turns_the_trace_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "trace.txt"
    monkeypatch.setenv("TRIMCP_TRACE", str(trace))
    async with trimcp.Client("c").connect(trimcp.in_process(trimcp.Server("here"))) as session:
        await session.list_tools()
    text = trace.read_text()
    assert "--> " in text
    assert '"tools/list"' in text
    assert "<-- " in text


@pytest.mark.parametrize(
    "words",
    [("prog", "a", "b"), (["prog", "a", "b"],), (("prog", "a", "b"),), (["prog"], "a", "b"), (Path("prog"), "a", "b")],
    ids=str,
)
def test_a_command_is_words_or_a_list_of_them(words: tuple[Any, ...]) -> None:
    assert trimcp.stdio(*words).command == ("prog", "a", "b")
    hash(trimcp.stdio(*words).command)


@pytest.mark.parametrize("words", [(5,), (["prog", 5],), (None,), ([["prog"]],), ("prog", ["a"])], ids=str)
def test_what_is_no_command_is_told_what_one_is(words: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match=r'list of texts, .* such as \["python", "server.py"\], not'):
        trimcp.stdio(*words)
    with pytest.raises(TypeError, match="list of texts"):
        trimcp.StdioServer("python server.py")


def test_a_hosts_configuration_gives_servers_to_connect_to(tmp_path: Path) -> None:
    config = tmp_path / "servers.json"
    entries = {
        "weather": {"command": "python", "args": ["-m", "weather"], "env": {"LEVEL": "3"}},
        "web": {"url": "https://example.org/mcp", "headers": {"X-Key": "k"}},
        "socket": {"url": "wss://example.org/ws"},
    }
    config.write_text(json.dumps({"mcpServers": entries}))
    servers = trimcp.load_servers(config)
    assert list(servers) == ["weather", "web", "socket"]
    weather, web, socket = servers.values()
    assert isinstance(weather, StdioServer)
    assert weather.command == ("python", "-m", "weather")
    assert dict(weather.env or {}) == {"LEVEL": "3"}
    assert isinstance(web, HttpServer)
    assert (web.url, web.headers) == ("https://example.org/mcp", {"x-key": "k"})
    assert isinstance(socket, WebSocketServer)
    assert socket.url == "wss://example.org/ws"


async def test_a_client_takes_the_server_itself() -> None:
    server = trimcp.Server("here", revisions=["2025-11-25", "2026-07-28"])
    server.add_tool(lambda: "pong", name="ping")
    for revision in ("2025-11-25", "2026-07-28"):
        async with trimcp.Client("c", revisions=[revision]).connect(server) as session:
            assert session.revision.name == revision
            assert (await session.call_tool("ping")).text == "pong"
    assert not server.runs


@pytest.mark.parametrize("make", [trimcp.Client, trimcp.Server])
def test_revisions_may_be_given_by_name(make: Any) -> None:
    for given in (["2025-11-25", trimcp.REVISIONS[0]], iter(["2024-11-05", "2025-11-25"])):
        assert [each.name for each in make("x", revisions=given).profile.revisions] == ["2024-11-05", "2025-11-25"]
    for wrong in ("2025-11-25", [3], ["tomorrow"]):
        with pytest.raises(TypeError, match="their names in a list"):
            make("x", revisions=wrong)
