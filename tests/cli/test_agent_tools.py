"""`trimcp run --agent-tools`: what a module has of them, or a server's tools with default settings."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx2
import pytest
import trio

from tests.cli.test_serving import serving
from trimcp.cli.loading import load_program

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "agent_tools.py")
PLAIN = """
import trimcp
server = trimcp.Server("plain")
@server.tool
def add(a: int, b: int) -> int:
    return a + b
"""


async def post(url: str, path: str, body: object, **headers: str) -> httpx2.Response:
    async with httpx2.AsyncClient(trust_env=False) as client:
        with trio.fail_after(30):
            return await client.post(url.removesuffix("/mcp") + path, json=body, headers=headers)


@pytest.mark.slow
async def test_the_agent_tools_of_a_module_are_served() -> None:
    async with serving("--agent-tools", "--port", "0", server=EXAMPLE) as served:
        url = await served.url()
        assert "agent tools: /tools, /contexts, /schemas, /agent" in await served.until("agent tools")
        assert "ANYBODY ON THIS MACHINE" in served.text
        manifest = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
        assert (await post(url, "/tools/register", manifest)).status_code == 200
        call = {"type": "tool_request", "tool_name": "get_weather", "arguments": {"city": "Oslo"}, "request_id": "1"}
        assert (await post(url, "/mcp", call)).status_code == 401
        answer = await post(url, "/mcp", call, Authorization="Bearer demo-token")
        assert answer.json()["result"] == {"city": "Oslo", "temperature": -3, "unit": "Celsius"}


@pytest.mark.slow
async def test_a_server_without_any_gets_the_default_ones(tmp_path: Path) -> None:
    file = tmp_path / "plain.py"
    file.write_text(PLAIN)
    async with serving("--agent-tools", "--port", "0", server=str(file)) as served:
        url = await served.url()
        answer = await post(url, "/tools/call", {"tool_name": "add", "arguments": {"a": 1, "b": 2}, "request_id": "1"})
        assert answer.json() == {"type": "tool_response", "request_id": "1", "status": "success", "result": 3}
        assert (await post(url, "/tools/register", {"name": "more"})).status_code == 403


@pytest.mark.slow
async def test_without_the_flag_none_are_served() -> None:
    async with serving("--http", "--port", "0", server=EXAMPLE) as served:
        url = await served.url()
        assert (await post(url, "/tools/call", {"tool_name": "add", "request_id": "1"})).status_code == 404


def test_those_of_another_server_are_not_taken(tmp_path: Path) -> None:
    file = tmp_path / "two_servers.py"
    file.write_text(
        PLAIN + "from trimcp.agent_tools import AgentTools\n"
        "other = trimcp.Server('other')\ntheirs = AgentTools(other)\nours = AgentTools(server)\n"
    )
    loaded = load_program(str(file))
    assert loaded.agent_tools is sys.modules["two_servers"].ours
    assert load_program(f"{file}:other").agent_tools.server.info.name == "other"
