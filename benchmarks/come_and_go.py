"""What a session costs that comes and goes: `python come_and_go.py [--quick]`.

Each opens a connection, initializes (2025-11-25), calls once, deletes itself and closes the connection, 64 at a time.
Every reply is checked. The rounds of the servers alternate; CPU is that of the server's process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack
from typing import Any

import trio
from environments import Peer
from http_sessions import STREAMABLE, Connection, StreamableSession, echo
from processes import LOAD_CORE, SERVER_CORE, kept_on, listening, on_core
from rows import Rows, command_line

from trimcp.bench.cost import cpu_seconds

__all__ = ["CELL", "measure"]

CELL = "come-and-go"
UNDER_WAY = 64
SESSIONS, QUICK_SESSIONS = 512, 128
# The first that a server has ever seen are slow everywhere, and compilers work meanwhile.
WARM = 1_024
PHASE_LIMIT = 120.0


def measure(
    peers: Sequence[Peer], *, rounds: int, quick: bool, cells: Collection[str] | None = None
) -> list[dict[str, Any]]:
    """Return what a session costs each peer that has sessions over Streamable HTTP.

    Args:
        peers: who takes part.
        rounds: in each, every peer has its turn.
        quick: fewer sessions.
        cells: without `CELL` among them there is nothing to do.
    """
    rows = Rows()
    if cells is None or CELL in cells:
        able = [peer for peer in peers if peer.can("http", STREAMABLE)]
        with kept_on(LOAD_CORE):
            trio.run(_measure, rows, able, rounds, QUICK_SESSIONS if quick else SESSIONS)
    return rows.data


async def _measure(rows: Rows, peers: Sequence[Peer], rounds: int, sessions: int) -> None:
    async with AsyncExitStack() as stack:
        servers = {}
        for peer in peers:
            reply = "json" if peer.can("http", STREAMABLE, "json") else "sse"
            command = [*on_core(SERVER_CORE), *peer.command("http", reply=reply)]
            servers[peer.name] = await stack.enter_async_context(listening(command, {**os.environ, **peer.environment}))
            await come_and_go(servers[peer.name][0], max(WARM // peer.weight, UNDER_WAY))
        for _ in range(rounds):
            for name, (url, process) in servers.items():
                spent, began = cpu_seconds(process), time.perf_counter()
                await come_and_go(url, sessions)
                rows.add(CELL, "cpu", name, "µs", (cpu_seconds(process) - spent) / sessions * 1e6)
                rows.add(CELL, "rate", name, "per second", sessions / (time.perf_counter() - began))


async def come_and_go(url: str, sessions: int) -> None:
    """Open, use and end so many sessions, each over a connection of its own."""
    left = iter(range(sessions))

    async def worker() -> None:
        for _ in left:
            connection = Connection(url)
            session = StreamableSession(connection)
            try:
                await session.initialize(connection)
                await echo(session, connection)
                await session.delete(connection)
            finally:
                await connection.close()

    with trio.fail_after(PHASE_LIMIT):
        async with trio.open_nursery() as nursery:
            for _ in range(UNDER_WAY):
                nursery.start_soon(worker)


if __name__ == "__main__":
    command_line("What a session costs that comes and goes.", measure, rounds=5)
