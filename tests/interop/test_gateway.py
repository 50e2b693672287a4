"""Servers that people use behind one gateway of ours, used by the official clients in four languages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client

from tests.interop.peers import HERE, NODE, Served, run_scenarios, serving
from tests.interop.test_compiled_peers import command

CALLS: list[tuple[str, dict[str, Any], str]] = [
    ("time__convert_time", {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}, "+9.0h"),
    ("everything__echo", {"message": "through the gateway"}, "through the gateway"),
    ("everything__get-sum", {"a": 2, "b": 40}, "42"),
]
ERAS = {"legacy": "2025-11-25", "modern": "2026-07-28"}


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, dict[str, Any], str]]:
    """What each client calls: a tool of each server, with a repository of its own for git's."""
    repository = tmp_path_factory.mktemp("repository")
    git = ["git", "-C", str(repository), "-c", "user.name=Ann", "-c", "user.email=ann@example.org"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "The first of all"]):
        subprocess.run([*git, *words], check=True)
    return [*CALLS, ("git__git_log", {"repo_path": str(repository)}, "The first of all")]


@pytest.fixture(scope="module")
def gateway(calls: list[tuple[str, dict[str, Any], str]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("gateway")
    everything = Path(os.environ["TRIMCP_NODE_EVERYTHING"], "@modelcontextprotocol", "server-everything", "dist")
    servers = {
        "time": {"command": sys.executable, "args": ["-m", "mcp_server_time"], "shared": True},
        "git": {"command": sys.executable, "args": ["-m", "mcp_server_git"]},
        "everything": {"command": str(NODE), "args": [str(everything / "index.js")]},
    }
    file = folder / "servers.json"
    file.write_text(json.dumps({"mcpServers": servers}))
    words = [sys.executable, HERE / "gateway_for_peers.py", file]
    with serving(words, folder / "gateway.log", orderly=True) as served:
        yield served


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("kind", ["node", "go", "rust"])
def test_an_official_client_uses_them_as_one(
    kind: str, era: str, gateway: Served, calls: list[tuple[str, dict[str, Any], str]], tmp_path: Path
) -> None:
    env = {"CALLS": json.dumps(calls), "REVISION": ERAS[era]}
    words: list[Any] = [NODE, HERE / "node_gateway.mjs", era] if kind == "node" else [*command(kind), "call", "http"]
    outcomes = run_scenarios([*words, gateway.http], tmp_path / "client.log", env=env)
    assert outcomes == {name: "" for name, _, _ in calls}


@pytest.mark.parametrize("mode", ["legacy", "auto"])
@pytest.mark.filterwarnings("ignore::mcp.MCPDeprecationWarning")
def test_the_official_python_client_uses_them_as_one(
    mode: str, gateway: Served, calls: list[tuple[str, dict[str, Any], str]]
) -> None:
    async def use() -> None:
        with anyio.fail_after(60):
            async with Client(gateway.http, mode=mode) as client:
                listed = {tool.name for tool in (await client.list_tools()).tools}
                for name, arguments, text in calls:
                    assert name in listed
                    result = await client.call_tool(name, arguments)
                    assert not result.is_error
                    assert text in str(result.content)

    anyio.run(use)
