"""Integers that JSON of 64 bits cannot carry: who returns them and who asks for them is told so."""

from __future__ import annotations

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
