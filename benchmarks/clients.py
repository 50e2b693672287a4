"""Clients under measurement: each implementation's own calls a server that is the same for all, from the other core.

`peers/FILE client REVISION TARGET...` connects, and then takes a turn for each line that it is sent: so many calls at a
time, whose replies it checks, for so long. It says what that cost its own process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import attrs
from cells import Cell
from environments import Peer
from processes import LOAD_CORE, on_core
from servers import Failed, Program

from trimcp.bench.cost import memory_of

__all__ = ["Calling", "calling", "figures"]

# Beside the seconds that a turn takes.
SLACK = 30.0


@attrs.frozen
class Calling:
    """A client that is connected."""

    program: Program
    under_way: int

    def turn(self, amount: str, limit: float = SLACK) -> dict[str, Any]:
        """Let it call for some seconds, or so many times ("100x"), and return what it says.

        Raises:
            Failed: a reply was wrong or did not come.
        """
        with suppress(BrokenPipeError):  # the next line says why
            self.program.tell(f"{amount} {self.under_way}")
        found: dict[str, Any] = json.loads(self.program.line("before it had counted its calls", limit))
        if not found["calls"]:
            raise Failed("not one call was answered in time")
        return {**found, "memory": memory_of(self.program.pid)[1]}


@contextmanager
def calling(peer: Peer, cell: Cell, target: Sequence[str]) -> Iterator[Calling]:
    """Start a peer's client for a cell, let it warm up, and end it with the block.

    Args:
        peer: whose client.
        cell: in which revision, and how many calls at a time.
        target: a URL, or the command of a server over stdio.

    Raises:
        Failed: it could not connect, or a reply was wrong.
    """
    command = [*on_core(LOAD_CORE), *peer.program, "client", cell.revision, *target]
    with Program.started(command, peer.environment) as program:
        if (said := program.line("before it was connected")) != "ready":
            raise Failed(f"it said {said[:200]!r}")
        client = Calling(program, cell.under_way)
        # Compilers that work while a program runs need their calls.
        client.turn(f"{max(cell.warm_calls // peer.weight, cell.under_way)}x")
        yield client


def figures(found: dict[str, Any]) -> dict[str, tuple[str, float]]:
    """Return unit and value of each figure of a turn."""
    return {
        "cpu": ("µs", found["cpu"] / found["calls"] * 1e6),
        "rate": ("per second", found["calls"] / found["wall"]),
        **{name: ("ms", found[name]) for name in ("p50", "p99", "p99.9")},
        "memory": ("MiB", found["memory"] / 2**20),
    }
