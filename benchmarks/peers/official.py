"""The measured tools on the official Python SDK's MCPServer; the same modes as `ours.py`."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
import time

import anyio
from mcp import Client
from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("echo", version="1.0", log_level="WARNING")


@server.tool()
async def echo(text: str) -> str:
    """Return the text."""
    return text


@server.tool()
async def count(to: int, ctx: Context) -> str:
    """Report every number on the way."""
    for number in range(1, to + 1):
        await ctx.report_progress(number, to)
    return "done"


@server.tool()
async def counts() -> str:
    """Return how many blocks of memory, objects and tasks there are, after a collection of garbage."""
    gc.collect()
    return f"{sys.getallocatedblocks()} {len(gc.get_objects())} {len(asyncio.all_tasks())}"


def over_http() -> None:
    import uvicorn  # as the SDK does

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(2048)
        print(listener.getsockname()[1], flush=True)
        app = server.streamable_http_app(json_response=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


async def in_memory(server: object, calls: int, under_way: int) -> None:
    async with Client(server) as client:
        await client.call_tool("echo", {"text": "warm"})

        async def caller(share: int) -> None:
            for number in range(share):
                result = await client.call_tool("echo", {"text": f"hello {number}"})
                if result.content[0].text != f"hello {number}":
                    raise AssertionError(result)

        wall, cpu = time.perf_counter(), time.process_time()
        async with anyio.create_task_group() as group:
            for _ in range(under_way):
                group.start_soon(caller, calls // under_way)
        print(time.perf_counter() - wall, time.process_time() - cpu)


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    elif sys.argv[1] == "http":
        over_http()
    else:
        anyio.run(in_memory, server, int(sys.argv[2]), int(sys.argv[3]))
