"""What a tool returned is the result of a `tool_response`, whatever its return type says."""

from __future__ import annotations

import json
from typing import Any, TypedDict

import pytest
import trio

import trimcp
from trimcp.agent_tools import AgentTools
from trimcp.agent_tools.messages.answers import CallAnswer
from trimcp.agent_tools.messages.messages import ToolRequest
from trimcp.agent_tools.service import AgentCall
from trimcp.channel import NOWHERE


class Point(TypedDict):
    x: int
    result: int


async def result_of(server: trimcp.Server[Any], tool: str) -> Any:
    """Call a tool and return the whole `tool_response`."""
    tools = AgentTools(server)
    async with server.running() as running:
        run = tools.run_of(running)
        answers: list[bytes] = []
        over = trio.Event()

        def answered(call: AgentCall, answer: CallAnswer) -> None:
            answers.append(answer.encode(call.request))
            over.set()

        request = ToolRequest(tool_name=tool, request_id="1")
        run.start_call(request, run.caller(None, None, loopback=True), None, NOWHERE, answered)
        await over.wait()
    return json.loads(answers[0])


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
