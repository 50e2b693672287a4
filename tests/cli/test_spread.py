"""`trimcp run --workers`: each worker gets its share of the connections, and agent tools are those of all."""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio

import trimcp
from tests.cli.test_serving import serving
from tests.store.redis_server import redis_server
from trimcp import agent_tools
from trimcp.wire.revisions import LATEST

pytestmark = pytest.mark.slow

SERVER = """
import os
import trimcp
from trimcp.agent_tools import AgentTools, RegistrationRules

server = trimcp.Server("pids", "1")

@server.tool
async def pid() -> int:
    return os.getpid()

def named(name: str) -> str:
    return f"{name} of {os.getpid()}"

tools = AgentTools(
    server,
    implementations={"named": named},
    authenticate=trimcp.bearer_tokens({"token": "ada", "token-of-calc": "calc"}),
)
"""
MANIFEST = {
    "name": "named",
    "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
}


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "pids.py"
    path.write_text(SERVER)
    return str(path)


async def test_each_worker_gets_its_share_of_the_connections(file: str) -> None:
    async with serving("--http", "--port", "0", "--workers", "2", server=file) as served:
        url, pids = await served.url(), Counter[str]()
        async with trio.open_nursery() as nursery:
            for _ in range(20):  # each has a connection of its own, and keeps it

                async def connect(task_status: trio.TaskStatus[str]) -> None:
                    async with trimcp.Client("c").connect(trimcp.http(url), revision=LATEST) as session:
                        task_status.started(str((await session.call_tool("pid")).data))
                        await trio.sleep_forever()

                pids[await nursery.start(connect)] += 1
            nursery.cancel_scope.cancel()
        assert len(pids) == 2
        assert min(pids.values()) >= 7, pids


@pytest.mark.parametrize(
    "store", ["a folder of their own", "sqlite", pytest.param("redis", marks=pytest.mark.needs("redis-server"))]
)
async def test_agent_tools_of_workers_are_those_of_all(file: str, tmp_path: Path, store: str) -> None:
    words = ["--agent-tools", "--port", "0", "--workers", "2"]
    if store == "redis":
        with redis_server() as redis:
            await _share_tools(file, [*words, "--store", redis.url])
    elif store == "sqlite":
        await _share_tools(file, [*words, "--store", f"sqlite://{tmp_path}/s.db"])
    else:
        await _share_tools(file, words)


async def _share_tools(file: str, words: list[str]) -> None:
    """Agents and a provider, each on a connection of its own: what one does the others see, whoever serves them."""
    async with serving(*words, server=file) as served, trio.open_nursery() as nursery:
        url = (await served.url()).removesuffix("/mcp")

        async def provide(task_status: trio.TaskStatus[object]) -> None:
            def add(a: int, b: int) -> int:
                return a + b

            await agent_tools.provide(url.replace("http", "ws"), [add], token="token-of-calc", task_status=task_status)

        await nursery.start(provide)
        async with agent_tools.connect(url, token="token") as first:
            await first.register(MANIFEST)
            pids = Counter[str]()
            # All stay connected, for of those with equally many whoever is first gets the next.
            async with first.context("ctx-1", state={"n": 0}), AsyncExitStack() as agents:
                for number in range(12):
                    agent = await agents.enter_async_context(agent_tools.connect(url, token="token"))
                    pids[str(await agent.call("pid"))] += 1
                    assert str(await agent.call("named", {"name": "x"})).startswith("x of ")
                    assert await agent.call("calc.add", {"a": number, "b": 1}) == number + 1
                    again = agent.existing_context("ctx-1")
                    assert (await again.read()).state["n"] == number
                    await again.update({"n": number + 1})
        nursery.cancel_scope.cancel()
    assert len(pids) == 2, pids
