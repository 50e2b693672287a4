"""A server that counts aloud, for clients that write down what they hear."""

from __future__ import annotations

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
