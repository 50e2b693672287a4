"""A server that counts aloud, for clients that write down what they hear."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import trio

import trimcp

server = trimcp.Server("counting", "1.0")


@server.tool
async def count(to: int, pause: float, *, ctx: trimcp.Context[Any]) -> str:
    """Count with a pause after each number."""
    for number in range(1, to + 1):
        await ctx.report_progress(number, to)
        await trio.sleep(pause)
    return f"counted to {to}"


async def main(path: str, lease: float) -> None:
    async with trio.open_nursery() as nursery:
        store = trimcp.SqliteStore(path, lease=lease)
        (url,) = await nursery.start(partial(trimcp.serve_http, server, port=0, store=store))
        print(url, flush=True)


if __name__ == "__main__":
    trio.run(main, sys.argv[1], float(sys.argv[2]))
