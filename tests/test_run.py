"""The functions a program ends with; how it ends, on signals and without input, is promise 7 (tests/guarantees)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import trimcp
from trimcp.transports.http.client.target import HttpServer
from trimcp.transports.stdio.child import StdioServer
from trimcp.transports.websocket.client import WebSocketServer


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
