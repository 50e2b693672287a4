"""The measured tools on trimcp: `stdio` serves them, `memory COUNT UNDER_WAY` calls them in this process."""

from __future__ import annotations

import sys
import time

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
    else:
        trio.run(in_memory, int(sys.argv[2]), int(sys.argv[3]))
