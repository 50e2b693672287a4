"""The client of the conformance suite, in memory: that it does what the scenarios wait for."""

from __future__ import annotations

import json
from typing import Annotated, Any

import pytest

import trimcp
from tests.conformance import client as fixtures
from tests.conformance import server as server_fixtures
from trimcp.testing import connected, every_revision


@pytest.fixture
def called() -> list[Any]:
    return []


@pytest.fixture
def server(called: list[Any]) -> trimcp.Server[Any]:
    """A server that notes what it is asked for."""
    server = trimcp.Server("suite", dynamic=True)

    @server.tool
    async def add_numbers(a: float, b: float) -> str:
        called.append(("add_numbers", a, b))
        return str(a + b)

    @server.tool(input_schema=server_fixtures.CONTACT)
    async def json_schema_2020_12_tool(arguments: dict[str, Any]) -> str:
        return "never called"

    @server.tool
    async def json_schema_echo(schema: dict[str, Any]) -> str:
        called.append(schema)
        return "echoed"

    @server.resource("file:///a%20name.txt")
    async def file() -> str:
        called.append("read")
        return "text"

    @server.prompt
    async def test_prompt(subject: Annotated[str, "what about"]) -> str:
        called.append(subject)
        return subject

    return server


@every_revision
async def test_it_uses_everything(revision: trimcp.Revision, server: trimcp.Server[Any], called: list[Any]) -> None:
    server.remove_tool("json_schema_2020_12_tool")
    async with connected(server, fixtures.client, revision=revision) as session:
        await fixtures.use_everything(session)
    assert called == [("add_numbers", 5, 5), {}, "read", "text"]


async def test_it_returns_a_schema_as_it_was(server: trimcp.Server[Any], called: list[Any]) -> None:
    async with connected(server, fixtures.client) as session:
        await fixtures.return_the_schema(session)
    assert called == [server_fixtures.CONTACT]


async def test_it_makes_the_calls_asked_for(
    server: trimcp.Server[Any], called: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [{"name": "add_numbers", "arguments": {"a": 1, "b": 2}}]
    monkeypatch.setenv("MCP_CONFORMANCE_CONTEXT", json.dumps({"toolCalls": calls}))
    async with connected(server, fixtures.client) as session:
        await fixtures.make_the_calls_asked_for(session)
    assert called == [("add_numbers", 1, 2)]


async def test_it_accepts_forms_with_their_defaults() -> None:
    async with connected(server_fixtures.server, fixtures.client) as session:
        result = await session.call_tool("test_elicitation_sep1034_defaults")
        told = result.content[0].text
        assert told.startswith("Elicitation completed: action=accept")
        assert json.loads(told.partition("content=")[2]) == {
            "name": "John Doe",
            "age": 30,
            "score": 95.5,
            "status": "active",
            "verified": True,
        }
        confirmed = (await session.call_tool("test_streaming_elicitation")).content[0].text
        assert confirmed == 'action=accept, content={"ok": true}'
