"""Tasks with implementations of others: FastMCP's, both ways, the official package for Node and the Inspector."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

import trimcp
from tests.interop.peers import HERE, NODE, inspect, serving

FASTMCP = Path(os.environ["TRIMCP_FASTMCP_TASKS"])
PEER = HERE / "fastmcp_tasks_peer.py"


@pytest.fixture(scope="module")
def ours() -> Iterator[str]:
    """Run our server of tasks on a free port; yield its URL."""
    words = [sys.executable, str(HERE / "tasks_server.py")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def run(*words: str | Path) -> Any:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


async def test_we_follow_the_tasks_of_fastmcp(tmp_path: Path) -> None:
    client = trimcp.Client("tasks", tasks=True)
    with serving([FASTMCP, PEER, "serve"], tmp_path / "log") as served:
        async with client.connect(served.http) as session:
            task = await session.start_task("double", {"number": 21})
            assert task.id is not None
            assert (await session.task(task.id).result()).text == "42"
            failed = await session.call_tool("fail")
            assert (failed.is_error, "no luck" in failed.text) == (True, True)
            held = await session.start_task("wait")
            assert (await held.state()).status == "working"
            await held.cancel()
            with pytest.raises(trimcp.RemoteError, match="cancelled"), trio.fail_after(60):
                await held.result()


def test_fastmcp_follows_our_tasks(ours: str) -> None:
    assert run(FASTMCP, PEER, "call", ours) == {
        "plain": ["plain", False],
        "count": ["counted to 3", False],
        "ask": ["Hello Ada", False],
        "fail": ["no luck", True],
        "wait": ["working", "cancelled"],
    }


def test_the_official_package_follows_our_tasks(ours: str) -> None:
    assert run(NODE, HERE / "node_tasks.mjs", ours)["told"] == {
        "plain": ["immediate", "plain", False],
        "count": ["task", "counted to 3", False],
        "ask": ["task", "Hello Ada", False],
        "fail": ["task", "no luck", True],
        "wait": "cancelled",
    }


@pytest.mark.parametrize(("tool", "text", "failed"), [("count", "counted to 3", False), ("fail", "no luck", True)])
def test_the_inspector_follows_our_tasks(ours: str, tool: str, text: str, failed: bool, tmp_path: Path) -> None:
    (said,) = inspect(ours, "http", "modern", tmp_path, "--method", "tools/call", "--tool-name", tool)
    assert (said["result"]["content"][0]["text"], said["result"]["isError"]) == (text, failed)
