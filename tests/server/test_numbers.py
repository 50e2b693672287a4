"""Integers that JSON of 64 bits cannot carry: who returns them and who asks for them is told so."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import trio

import trimcp
import trimcp.testing
from tests.client.peers import as_json
from trimcp.channel import Kind, Outgoing
from trimcp.transports.memory import memory_channels
from trimcp.wire.codes import INVALID_REQUEST
from trimcp.wire.jsonrpc import Batch

BIG = 2**64
VALUES: dict[str, Any] = {
    "an integer": BIG,
    "a negative integer": -(2**63) - 1,
    "a huge integer": 10**5_000,
    "an integer inside": {"a": [{"b": BIG}]},
}


@pytest.mark.parametrize("structured", [True, False])
@pytest.mark.parametrize("kind", VALUES)
@trimcp.testing.every_revision
async def test_a_result_that_json_cannot_carry_is_a_tool_error_that_says_so(
    kind: str, structured: bool, revision: trimcp.Revision, caplog: pytest.LogCaptureFixture
) -> None:
    value = VALUES[kind]
    server: trimcp.Server[None] = trimcp.Server("s")

    @server.tool(structured=structured)
    async def odd() -> Any:
        return value

    @server.tool(output_schema={"type": "object"}, structured=structured)
    async def promised() -> Any:
        return {"value": value}

    @server.tool
    async def fine() -> int:
        return 2**63 - 1

    async with trimcp.testing.connected(server, revision=revision) as session:
        for name in ("odd", "promised"):
            result = await session.call_tool(name)
            assert result.is_error
            assert result.text.startswith(f"the result of {name} cannot be sent: JSON cannot carry this value: ")
            assert "64-bit" in result.text
        assert (await session.call_tool("fine")).text == str(2**63 - 1)
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.ERROR]


async def test_an_argument_beyond_64_bits_is_not_sent_and_the_caller_is_told() -> None:
    server: trimcp.Server[None] = trimcp.Server("s")

    @server.tool
    async def take(n: int) -> str:
        return str(n)

    async with trimcp.testing.connected(server) as session:
        with pytest.raises(trimcp.LocalError, match="64-bit"):
            await session.call_tool("take", {"n": BIG})
        assert (await session.call_tool("take", {"n": 2**64 - 1})).text == str(2**64 - 1)


async def test_an_argument_beyond_64_bits_that_arrives_is_refused_by_its_id() -> None:
    server: trimcp.Server[None] = trimcp.Server("s")
    ours, theirs = memory_channels()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.serve, ours)
        text = b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"take","arguments":{"n":%d}}}' % BIG
        await theirs.send([Outgoing(text, Kind.REQUEST)])
        [incoming] = await theirs.receive()
        said = as_json(incoming.message)
        assert (said["id"], said["code"], said["message"]) == (1, INVALID_REQUEST, "an integer does not fit in 64 bits")
        await theirs.aclose()


async def test_of_an_array_only_the_messages_that_hold_an_integer_beyond_64_bits_are_refused() -> None:
    server: trimcp.Server[None] = trimcp.Server("s")

    @server.tool
    async def take(n: int) -> str:
        return str(n)

    call = {"jsonrpc": "2.0", "method": "tools/call"}
    ours, theirs = memory_channels()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.serve, ours)
        hello = {"protocolVersion": "2025-03-26", "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}
        first = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": hello}
        await theirs.send([Outgoing(json.dumps(first).encode(), Kind.REQUEST)])
        await theirs.receive()
        batch = [
            {**call, "id": 1, "params": {"name": "take", "arguments": {"n": 1}}},
            {**call, "id": 2, "params": {"name": "take", "arguments": {"n": BIG}}},
            {"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progressToken": 1, "progress": BIG}},
            {**call, "id": BIG, "params": {"name": "take", "arguments": {"n": 2}}},
            {**call, "id": "last", "params": {"name": "take", "arguments": {"n": 3}}},
        ]
        await theirs.send([Outgoing(json.dumps(batch).encode(), Kind.REQUEST)])
        [incoming] = await theirs.receive()
        assert isinstance(incoming.message, Batch)
        told = {each["id"]: each.get("message") for each in map(as_json, incoming.message.members)}
        why = "an integer does not fit in 64 bits"
        assert told == {1: None, 2: why, None: why, "last": None}
        await theirs.aclose()


async def test_half_a_character_in_a_key_of_a_result_is_a_tool_error_as_in_a_text() -> None:
    server: trimcp.Server[None] = trimcp.Server("s")

    @server.tool
    async def odd() -> dict[str, int]:
        return {"\ud800": 1}

    async with trimcp.testing.connected(server) as session:
        result = await session.call_tool("odd")
    assert result.is_error
    assert "surrogates not allowed" in result.text


@pytest.mark.parametrize("kind", ["tool", "prompt", "resource"])
def test_half_a_character_in_a_docstring_is_refused_where_it_is_written(kind: str) -> None:
    async def odd() -> str:
        return "odd"

    odd.__doc__ = "Half \ud800 a character."
    server: trimcp.Server[None] = trimcp.Server("s")
    register = server.resource("odd://it") if kind == "resource" else getattr(server, kind)
    with pytest.raises(TypeError, match="the docstring is a text that cannot be sent: it has a lone surrogate"):
        register(odd)
