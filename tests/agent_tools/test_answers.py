"""What a tool returned is the result of a `tool_response`, whatever its return type says."""

from __future__ import annotations

from typing import Any, TypedDict

import pytest

import trimcp
from tests.agent_tools.world import Asking
from tests.peers.states import until
from trimcp.agent_tools import AgentTools
from trimcp.agent_tools.messages.messages import ToolRequest


class Point(TypedDict):
    x: int
    result: int


async def result_of(server: trimcp.Server[Any], tool: str) -> Any:
    """Call a tool and return the whole `tool_response`."""
    tools = AgentTools(server)
    async with server.running() as running:
        run = tools.run_of(running)
        asking = Asking(run)
        run.start_call(ToolRequest(tool_name=tool, request_id="1"), run.caller(None, None, loopback=True), None, asking)
        await until(lambda: bool(asking.answers))
    return asking.answers[0]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"temperature": 5}, {"temperature": 5}),
        ({"result": 1}, {"result": 1}),
        ([1, {"a": None}], [1, {"a": None}]),
        ("plain", "plain"),
        ('{"a":1}', '{"a":1}'),
        ("[not JSON", "[not JSON"),
        ("{", "{"),
        (None, None),
        (7, "7"),  # MCP has it as text, like the text "7"
    ],
)
async def test_a_tool_without_a_return_type(value: Any, expected: Any) -> None:
    server: trimcp.Server[None] = trimcp.Server("s")

    @server.tool
    async def untyped():
        return value

    response = await result_of(server, "untyped")
    assert (response["status"], response["result"]) == ("success", expected)


async def test_a_tool_with_a_return_type() -> None:
    server: trimcp.Server[None] = trimcp.Server("s")

    @server.tool
    async def number() -> int:
        return 7

    @server.tool
    async def point() -> Point:
        return {"x": 1, "result": 2}

    @server.tool
    async def exact() -> int:
        return 2**53 + 1

    assert (await result_of(server, "number"))["result"] == 7
    assert (await result_of(server, "exact"))["result"] == 2**53 + 1
    assert (await result_of(server, "point"))["result"] == {"x": 1, "result": 2}
