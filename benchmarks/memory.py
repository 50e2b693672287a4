"""Calls between an implementation's own client and server within one process: `python memory.py [--quick]`.

One process and one core is all there is to it, so what counts is its CPU time: both sides of a call, and no bytes on
the way where an implementation can do without. `peers/FILE memory COUNT UNDER_WAY` does the work and checks each text.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection, Sequence
from typing import Any

from environments import Peer
from processes import SERVER_CORE, on_core
from rows import Rows, command_line

__all__ = ["CELLS", "measure"]

CELLS = {"memory-1": 1, "memory-64": 64}
CALLS, QUICK_CALLS = 20_480, 5_120
# Of a slow peer; with fewer, starting and stopping the callers would count.
LEAST_CALLS = 1_024
LIMIT = 120.0


def measure(
    peers: Sequence[Peer], *, rounds: int, quick: bool, cells: Collection[str] | None = None
) -> list[dict[str, Any]]:
    """Return for each cell and peer how many calls a second of CPU and of wall-clock time carry, in each round.

    Args:
        peers: who takes part; those that have no client of their own are left out.
        rounds: in each, every peer has its turn.
        quick: fewer calls.
        cells: only these.
    """
    rows = Rows()
    for cell, under_way in CELLS.items():
        if cells is not None and cell not in cells:
            continue
        for _ in range(rounds):
            for peer in peers:
                if peer.memory:
                    count = max((QUICK_CALLS if quick else CALLS) // peer.weight, LEAST_CALLS)
                    wall, cpu = _spent(peer, count, under_way)
                    rows.add(cell, "rate", peer.name, "per second", count / cpu)
                    rows.add(cell, "wall-rate", peer.name, "per second", count / wall)
    return rows.data


def _spent(peer: Peer, count: int, under_way: int) -> tuple[float, float]:
    """Return the wall-clock and CPU seconds of so many calls."""
    command = [*on_core(SERVER_CORE), *peer.program, "memory", str(count), str(under_way)]
    environment = {**os.environ, **peer.environment}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True, timeout=LIMIT)
    wall, cpu = map(float, done.stdout.split())
    return wall, cpu


if __name__ == "__main__":
    command_line("Calls between client and server within one process.", measure, rounds=3)
