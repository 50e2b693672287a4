"""A provider: a program whose tools a service offers as long as it runs.

In one shell:       trimcp run examples/agent_tools.py --agent-tools --port 8080
In another one:     python examples/provider.py [URL]         (by default ws://localhost:8080)

Then agents call them, and clients of MCP see them in the list of tools:

    curl -X POST http://localhost:8080/tools/call -H "Authorization: Bearer demo-token" \
        -H "Content-Type: application/json" \
        -d '{"tool_name": "demo.convert", "arguments": {"celsius": 5}, "request_id": "req-002"}'

What to look at:

- The schemas follow from the type hints, as for `@server.tool`. The service puts the provider's name before theirs.
- Stop this program while `demo.countdown` runs: the call fails at once, and the tools are gone from the list.
- Stop the service: the function that runs is cancelled here. Start it again: the tools are back.
"""

from __future__ import annotations

import logging
import sys

import trio

import trimcp
from trimcp import agent_tools

TOKEN = "demo-token"  # noqa: S105  # the token of the example


def convert(celsius: float) -> float:
    """Convert degrees Celsius into degrees Fahrenheit."""
    return celsius * 9 / 5 + 32


async def countdown(number: int, ctx: trimcp.Context) -> str:
    """Count down once a second, with progress."""
    for reached in range(1, number + 1):
        await trio.sleep(1)
        await ctx.report_progress(reached, number)
    return "lift-off"


async def main(url: str) -> None:
    await agent_tools.provide(url, [convert, countdown], token=TOKEN)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    trio.run(main, sys.argv[1] if len(sys.argv) > 1 else "ws://localhost:8080")
