"""The server of which several processes run: it counts aloud, asks, and tells of changes.

    python tests/replicas/server.py PORT STORE LEASE GRACE

serves at a port; `trimcp run` serves `server`.
"""

from __future__ import annotations

import sys
from typing import Any

import attrs
import trio

import trimcp
from trimcp.agent_tools import AgentTools

server = trimcp.Server("replicated", "1.0")


@attrs.frozen
class Choice:
    number: int


@server.tool
async def count(to: int, pause: float, *, ctx: trimcp.Context[Any]) -> str:
    """Count with a pause after each number."""
    for number in range(1, to + 1):
        await ctx.report_progress(number, to)
        await trio.sleep(pause)
    return f"counted to {to}"


@server.tool
async def choose(name: str, *, ctx: trimcp.Context[Any]) -> str:
    """Ask for a number."""
    answer = await ctx.elicit(f"Which number for {name}?", Choice)
    return f"{name}: {None if answer.value is None else answer.value.number}"


@server.resource("note://{name}")
async def note(name: str) -> str:
    """A note."""
    return f"the note {name}"


@server.tool
async def change(name: str) -> str:
    """Tell who watches a note that it has changed."""
    server.resource_updated(f"note://{name}")
    return "changed"


def main(port: int, store: str, lease: float, grace: float) -> None:
    shared = (
        trimcp.SqliteStore(store.removeprefix("sqlite://"), lease=lease)
        if store.startswith("sqlite:")
        else trimcp.RedisStore(store, lease=lease)
    )
    contexts = store if not store.startswith("sqlite:") else f"{store}-contexts"
    trimcp.run_http(
        server,
        port=port,
        store=shared,
        grace=grace,
        agent_tools=AgentTools(server, store=contexts),
        ready=lambda urls: print("ready", flush=True),
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
