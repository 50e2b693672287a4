"""Measures cells of `check.py` in this process, and writes what was counted as JSON: `check_measure.py FILE CELL...`.

A process of its own, so that its standard streams are free and its hash seed is the same every time. Instead of
counting it can just do the work, `--repeat TIMES`, for a profiler that looks from outside.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import sys
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import trio
import trio.testing
from check_cells import CELLS, Cell, Work
from check_count import BYTECODES, CALLS, Counter, place_of

_STUCK = 300
_SHOWN = 5
_TIMES = 4  # more, if something was kept
_REST = 70.0  # more than what is kept for a minute, less than what an idle connection is


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("cells", nargs="+", choices=list(CELLS), metavar="cell")
    parser.add_argument("--repeat", type=int)
    options = parser.parse_args()
    if options.repeat is None:
        faulthandler.dump_traceback_later(_STUCK, exit=True)
    gc.disable()
    measured: dict[str, Any] = {}
    for name in options.cells:
        cell = CELLS[name]

        async def measure(cell: Cell = cell, name: str = name) -> None:
            async with cell.open() as work:
                for _ in range(options.repeat or 0):
                    await work()
                if options.repeat is None:
                    measured[name] = await _measured(cell, work)

        run(measure)
        gc.collect()
    options.file.write_text(json.dumps(measured), "utf-8")


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run in Trio without what differs from run to run: time, and the order in which tasks take their turn."""
    trio._core._run._r = SimpleNamespace(random=float)  # 0.0: the oldest task first
    trio.run(main, clock=Standstill())


class Standstill(trio.abc.Clock):
    """A clock by which no time passes but when it is told. Trio's own for tests takes thirty bytecodes to say so."""

    now = 0.0

    def start_clock(self) -> None:
        """Do nothing."""

    def current_time(self) -> float:
        """Return always the same."""
        return self.now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Return how long it is until then."""
        return deadline - self.now


async def rest(cell: Cell) -> None:
    """Let time pass, so that deadlines that were met and replies kept for a minute are forgotten."""
    if cell.rests:
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, Standstill)
        clock.now += _REST
    await trio.testing.wait_all_tasks_blocked()
    heads = sys.modules.get("trimcp.transports.http.h1.writer")
    if heads is not None:
        # Heads of a second that is over stay, at most 64, until others take their place. How many depends on the hour.
        heads._head.cache_clear()
    gc.collect()


async def _measured(cell: Cell, work: Work) -> dict[str, Any]:
    for _ in range(2):  # what is made at the first use, and what is then kept, has been made
        await work()
    functions = {}
    for what in (BYTECODES, CALLS):
        gc.collect()
        counter = Counter(what)
        counter.start()
        await work()
        counter.stop()
        functions[what] = counter.functions()
    return {"count": cell.count, "functions": functions, "memory": await _memory(cell, work)}


async def _memory(cell: Cell, work: Work) -> dict[str, Any]:
    """Count what the work holds at its worst, what it leaves to the garbage collector, and what stays.

    What stays is the least of several times: a memory that forgets half whenever it is full grows between two of its
    turns, and when they come depends on the digits of a duration. What leaks does so each time.
    """
    await rest(cell)
    tracemalloc.start()
    await work()
    await rest(cell)
    before = tracemalloc.take_snapshot()
    held, _ = tracemalloc.get_traced_memory()
    blocks = sys.getallocatedblocks()
    tracemalloc.reset_peak()
    await work()
    _, peak = tracemalloc.get_traced_memory()
    garbage = gc.collect()
    await rest(cell)
    kept = sys.getallocatedblocks() - blocks
    after = tracemalloc.take_snapshot()
    for _ in range(_TIMES if kept > 0 else 0):
        blocks = sys.getallocatedblocks()
        await work()
        await rest(cell)
        kept = min(kept, sys.getallocatedblocks() - blocks)
    tracemalloc.stop()
    lines = sorted(after.compare_to(before, "lineno"), key=lambda line: -line.count_diff)
    places = [
        (f"{place[1]}:{line.traceback[0].lineno}", line.count_diff)
        for line in lines
        if line.count_diff > 0 and (place := place_of(line.traceback[0].filename)) is not None
    ]
    return {"peak": peak - held, "garbage": garbage, "kept": kept, "places": places[:_SHOWN]}


if __name__ == "__main__":
    main()
