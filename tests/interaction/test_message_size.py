"""How large a message may be is said once, with the limits of a server or a client, and holds on every road."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import trimcp
from tests.peers.serving import IN_MEMORY, NETWORK
from tests.peers.serving import connected as connected_over
from trimcp.wire.revisions import LATEST_LEGACY

LARGEST = 6 * 1024 * 1024
SMALLEST = 10_000

EveryRoad = pytest.mark.parametrize("road", [*NETWORK, "stdio", *IN_MEMORY])


def make_server(limits: trimcp.Limits) -> trimcp.Server[Any]:
    server = trimcp.Server("s", limits=limits)

    @server.tool
    async def measure(text: str) -> int:
        return len(text)

    @server.tool
    async def say(size: int) -> str:
        return "x" * size

    return server


@asynccontextmanager
async def connected(
    road: str, server_limits: trimcp.Limits, client_limits: trimcp.Limits | None = None
) -> AsyncIterator[trimcp.ClientSession]:
    client, server = trimcp.Client("c", limits=client_limits), make_server(server_limits)
    if road == "stdio":
        root = {"PYTHONPATH": str(Path(trimcp.__file__).parents[1])}
        child = trimcp.stdio(sys.executable, __file__, str(server_limits.max_message), env=root)
        async with client.connect(child, revision=LATEST_LEGACY) as session:
            yield session
    else:
        async with connected_over(server, road, client) as session:
            yield session


@EveryRoad
async def test_a_server_takes_what_its_limits_say(road: str) -> None:
    """The default is 4 MiB, so both directions show whether anybody still has an opinion of its own."""
    async with connected(road, trimcp.Limits(max_message=LARGEST)) as session:
        answer = await session.call_tool("measure", {"text": "x" * (LARGEST - 1_000)})
        assert answer.content == [trimcp.Text(str(LARGEST - 1_000))]
    async with connected(road, trimcp.Limits(max_message=SMALLEST)) as session:
        # An ASGI server can only end the connection over a message that is too large.
        ends = road == "websocket on hypercorn"
        error, why = (trimcp.ConnectionLost, "1009") if ends else (trimcp.RemoteError, "10,?000")
        with pytest.raises(error, match=why):
            await session.call_tool("measure", {"text": "x" * SMALLEST})
        if not ends:
            assert (await session.call_tool("measure", {"text": "x"})).content == [trimcp.Text("1")]


@pytest.mark.parametrize(
    ("road", "why"),
    [
        ("websocket", r"code 1009 \(message too big\): 'a message may have 10,000 bytes'"),
        ("grpc", "RESOURCE_EXHAUSTED: a message may have 10,000 bytes"),
    ],
)
async def test_what_is_sixteen_times_too_large_ends_the_connection_with_the_reason(road: str, why: str) -> None:
    async with connected(road, trimcp.Limits(max_message=SMALLEST)) as session:
        with pytest.raises(trimcp.ConnectionLost, match=why):
            await session.call_tool("measure", {"text": "x" * (17 * SMALLEST)})


@EveryRoad
async def test_a_client_takes_what_its_limits_say(road: str) -> None:
    async with connected(road, trimcp.Limits(), trimcp.Limits(max_message=SMALLEST)) as session:
        with pytest.raises(trimcp.InvalidReply, match="10,000 bytes"):
            await session.call_tool("say", {"size": SMALLEST})
        result = await session.call_tool("say", {"size": SMALLEST - 1_000})
        assert result.content == [trimcp.Text("x" * (SMALLEST - 1_000))]


if __name__ == "__main__":
    trimcp.run_stdio(make_server(trimcp.Limits(max_message=None if sys.argv[1] == "None" else int(sys.argv[1]))))
