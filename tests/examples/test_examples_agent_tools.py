"""The examples of agent tools, run as their users would: the server with curl, and a provider beside it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

import trimcp
from tests.cli.test_serving import Served, connected, serving
from tests.docs.test_docs import compare
from tests.pages import ROOT, blocks_of

SERVER = str(ROOT / "examples" / "agent_tools.py")
PROVIDER = str(ROOT / "examples" / "provider.py")
HEADERS = {"Authorization": "Bearer demo-token"}

pytestmark = pytest.mark.slow


async def curl(command: str, url: str) -> str:
    """Run a curl command as it is printed, against the port that the server has; return what it prints."""
    command = command.replace("localhost:8080", url.removeprefix("http://"))
    done = await trio.run_process(["sh", "-c", command], capture_stdout=True, capture_stderr=True)
    return done.stdout.decode()


async def ready(served: Served) -> str:
    """Wait until the server says that it has agent tools, and return its URL without a path."""
    url = await served.url()
    await served.until("agent tools: ")
    assert "ANYBODY ON THIS MACHINE may register tools without a token" in served.text
    return url.removesuffix("/mcp")


@pytest.mark.needs("curl")
async def test_the_session_with_curl_works_as_the_readme_prints_it() -> None:
    (session,) = (block for block in blocks_of(ROOT / "README.md") if "--agent-tools" in block.text)
    start, *steps = re.split(r"^\$ ", session.text, flags=re.MULTILINE)[1:]
    assert start == "trimcp run examples/agent_tools.py --agent-tools --port 8080\n"
    assert len(steps) == 3
    async with serving("--agent-tools", "--port", "0", server=SERVER) as served:
        url = await ready(served)
        for step in steps:
            command, _, wanted = step.partition("\n")
            compare(wanted, await curl(command, url) + "\n", f"$ {command}")


@pytest.mark.needs("curl")
async def test_the_commands_in_the_docstring_of_the_example_work() -> None:
    docstring = (ROOT / "examples" / "agent_tools.py").read_text("utf-8").split('"""')[1]
    register, call = re.findall(r"^    (curl .*?\}')$", docstring, re.MULTILINE | re.DOTALL)
    async with serving("--agent-tools", "--port", "0", server=SERVER) as served:
        url = await ready(served)
        assert '"status":"registered"' in await curl(register, url)
        assert '"result":{"city":"Beijing","temperature":5,"unit":"Celsius"}' in await curl(call, url)


@asynccontextmanager
async def providing(url: str) -> AsyncIterator[trio.Process]:
    """Run the provider and wait until the server has its tools."""
    command = [sys.executable, PROVIDER, url.replace("http:", "ws:")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    try:
        said = b""
        while not said.endswith(b"\n"):
            said += await process.stdout.receive_some()
        assert said == b"provided: units.convert, units.measure\n"
        yield process
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            await process.stdout.aclose()


async def test_what_the_provider_brings_is_a_tool_of_the_server_while_it_runs() -> None:
    async with serving("--agent-tools", "--port", "0", server=SERVER) as served:
        url = await served.url()
        async with connected(url, headers=HEADERS) as session:
            own = {tool.name for tool in await session.list_tools()}
            assert own == {"count_to", "remember", "pay_salary"}
            async with providing(url.removesuffix("/mcp")) as process:
                theirs = {tool.name for tool in await session.list_tools()} - own
                assert theirs == {"units.convert", "units.measure"}
                result = await session.call_tool("units.convert", {"celsius": 20, "to": "Fahrenheit"})
                assert result.text == "68.0"
                async with (
                    session.listen(tools=True) as changes,
                    session.calling("units.measure", {"seconds": 60}) as call,
                ):
                    assert (await call.progress.receive()).message == "20.0 degrees Celsius"
                    process.kill()
                    with pytest.raises(trimcp.RemoteError, match="disconnected"), trio.fail_after(5):
                        await call.result()
                    assert isinstance(await anext(changes), trimcp.ToolsChanged)
                assert {tool.name for tool in await session.list_tools()} == own


@pytest.mark.usefixtures("children_hear_sigint")
async def test_the_provider_ends_quietly_when_it_is_interrupted() -> None:
    async with serving("--agent-tools", "--port", "0", server=SERVER) as served:
        url = await served.url()
        async with providing(url.removesuffix("/mcp")) as process:
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 0
