"""The measured tools on trimcp: `stdio` and `http` serve them, `memory COUNT UNDER_WAY` calls them in this process."""

from __future__ import annotations

import gc
import sys
import time
from functools import partial
from urllib.parse import urlsplit

import trio

import trimcp

server = trimcp.Server("echo", version="1.0")


@server.tool
async def echo(text: str) -> str:
    """Return the text."""
    return text


@server.tool
async def count(to: int, *, ctx: trimcp.Context) -> str:
    """Report every number on the way."""
    for number in range(1, to + 1):
        await ctx.report_progress(number, to)
    return "done"


@server.tool
async def counts() -> str:
    """Return how many blocks of memory, objects and tasks there are, after a collection of garbage."""
    gc.collect()
    return f"{sys.getallocatedblocks()} {len(gc.get_objects())} {trio.lowlevel.current_statistics().tasks_living}"


async def over_http() -> None:
    async with trio.open_nursery() as nursery:
        (url,) = await nursery.start(partial(trimcp.serve_http, server, port=0))
        print(urlsplit(url).port, flush=True)


async def in_memory(calls: int, under_way: int) -> None:
    async with trimcp.Client("bench", version="1.0").connect(trimcp.in_process(server)) as session:
        await session.call_tool("echo", {"text": "warm"})

        async def caller(share: int) -> None:
            for number in range(share):
                result = await session.call_tool("echo", {"text": f"hello {number}"})
                if result.content[0].text != f"hello {number}":
                    raise AssertionError(result)

        wall, cpu = time.perf_counter(), time.process_time()
        async with trio.open_nursery() as nursery:
            for _ in range(under_way):
                nursery.start_soon(caller, calls // under_way)
        print(time.perf_counter() - wall, time.process_time() - cpu)


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        trimcp.run_stdio(server)
    elif sys.argv[1] == "http":
        trio.run(over_http)
    else:
        trio.run(in_memory, int(sys.argv[2]), int(sys.argv[3]))
