"""One run of a server with many connections."""

from __future__ import annotations

import trio

from trimcp.client.client import Client
from trimcp.server.server import Server
from trimcp.transports.memory import memory_channels


async def test_many_connections_share_one_run() -> None:
    server: Server[None] = Server("shared")
    with_us: list[int] = []

    @server.tool
    async def look() -> int:
        with_us.append(len(next(iter(server.runs)).sessions))
        return 1

    async with server.running() as running, trio.open_nursery() as nursery:
        first_ours, first = memory_channels()
        second_ours, second = memory_channels()
        nursery.start_soon(running.serve, first_ours)
        nursery.start_soon(running.serve, second_ours)
        async with Client("a").connect(first) as one, Client("b").connect(second) as two:
            await one.call_tool("look")
            await two.call_tool("look")
        assert with_us == [2, 2]
        while running.sessions:
            await trio.testing.wait_all_tasks_blocked()
