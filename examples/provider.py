"""A provider: tools in a process of their own, which brings them to the server of agent_tools.py.

    trimcp run examples/agent_tools.py --agent-tools --port 8080
    python examples/provider.py

From then on they are tools of that server, for agents and for MCP clients alike:

    trimcp call http://localhost:8080/mcp units.convert celsius=20 to=Fahrenheit -H "Authorization: Bearer demo-token"

What to look at:

- The schemas follow from the type hints, as for `@server.tool`. The server puts the agent's name before theirs.
- Stop this program while `units.measure` runs: the call fails at once, and the tools are gone from the server's list.
- Stop the server: the function that runs is cancelled here. Start it again: the tools are back.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

import trio

import trimcp
from trimcp import agent_tools


def convert(celsius: float, to: Literal["Fahrenheit", "Kelvin"]) -> float:
    """Convert a temperature."""
    return celsius * 9 / 5 + 32 if to == "Fahrenheit" else celsius + 273.15


async def measure(seconds: int, ctx: trimcp.Context) -> list[float]:
    """Measure the temperature of this room once per second, with progress."""
    found = []
    for second in range(seconds):
        await trio.sleep(1)
        found.append(20.0 + second % 3 / 10)
        await ctx.report_progress(second + 1, seconds, f"{found[-1]} degrees Celsius")
    return found


def show(tools: Sequence[dict[str, Any]]) -> None:
    """Say under which names the server has them: with the agent's id before a point."""
    print("provided:", ", ".join(tool["name"] for tool in tools), flush=True)


async def main(url: str) -> None:
    # `units-token` is one of those that agent_tools.py knows, and says that this is the agent `units`.
    await agent_tools.provide(url, [convert, measure], token="units-token", on_registered=show)  # noqa: S106


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        trio.run(main, sys.argv[1] if len(sys.argv) > 1 else "ws://localhost:8080")
