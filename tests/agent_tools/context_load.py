"""Load on contexts in one process: agents that update theirs at a rate, with a watcher each, checked one by one.

python -m tests.agent_tools.context_load --contexts 1000 --agents 50 --rate 10 --seconds 60 [--file contexts.db]

It fails if an update is lost, comes twice or out of order, if a watcher does not see the last state, if a context takes
more than 8 KiB, or if anything is left at the end.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import trio

from trimcp.agent_tools.contexts.actor import ContextActor
from trimcp.agent_tools.contexts.state import ContextLimits
from trimcp.agent_tools.contexts.table import ContextTable
from trimcp.budget import Budget
from trimcp.session.agent_context import ContextEvent
from trimcp.store.contexts import ContextStore, MemoryContexts
from trimcp.store.contexts_sqlite import SqliteContexts

MOST_PER_CONTEXT = 8 * 1024


@attrs.define
class ContextLoad:
    """What to do.

    Attributes:
        contexts, agents: of each; the contexts are shared out evenly.
        rounds: updates of each context.
        rate: updates of each context per second; infinity for as fast as possible.
        again: how often to do all of it once more, to see what stays. Only with a clock that jumps.
    """

    contexts: int = 1_000
    agents: int = 50
    rounds: int = 600
    rate: float = 10.0
    again: int = 0


@attrs.define
class LoadFigures:
    """What was measured. Times in seconds; memory in bytes, and `left` what each further time left behind."""

    updates: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    slowest: float = 0.0
    seen: int = 0
    states: int = 0
    per_context: float = 0.0
    left: list[int] = attrs.field(factory=list)
    writes: int = 0


class WatchedInOrder:
    """What one watcher has seen of a context whose update number n sets `n` to n."""

    def __init__(self) -> None:
        self.n = self.updates = self.states = 0

    def see(self, event: ContextEvent) -> None:
        if event.kind == "destroyed":
            return
        assert event.content is not None
        if event.kind == "state":
            self.states += 1
            n = event.content.get("n", 0)
            assert n >= self.n, f"{n} after {self.n}"
        else:
            self.updates += 1
            n = event.content["n"]
            assert n == self.n + 1, f"{n} after {self.n}"
        assert event.version == n, "an update was applied twice, or never"
        self.n = n


def update_of(n: int) -> dict[str, Any]:
    return {
        "n": n,
        "last_query_time": f"2025-12-12T10:00:{n % 60:02}Z",
        "user_verified": n % 2 == 0,
        "intermediate_results": {f"step-{n % 8}": {"balance": n / 4, "note": f"update {n}"}},
    }


async def put_load(load: ContextLoad, store: ContextStore, budget: Budget, *, memory: bool = True) -> LoadFigures:
    """Put the load on a table over this store, and return what was measured."""
    figures = LoadFigures()
    table = ContextTable(ContextLimits(), store, budget)
    async with table.running():
        with _traced(memory) as traced:
            await _live(load, table, figures, traced)
            for _ in range(load.again):  # emptied tables keep their size, so that a further time shows what stays
                await _forget(table)
                left = traced()
                await _live(load, table, figures, traced)
                await _forget(table)
                figures.left.append(traced() - left)
        figures.updates, figures.writes = table.statistics().updates, table.statistics().writes
        assert (table.statistics().contexts, budget.held) == (0, 0)
    assert figures.updates == load.contexts * load.rounds * (1 + load.again)
    return figures


async def _live(load: ContextLoad, table: ContextTable, figures: LoadFigures, traced: Callable[[], int]) -> None:
    """Make the contexts, put the load on them, and destroy them."""
    before = traced()
    actors = [
        await table.find_or_make(("principal", f"agent-{number % load.agents}"), f"ctx-{number}")
        for number in range(load.contexts)
    ]
    await _run(load, actors, figures)
    for actor in actors:
        assert (actor.version, actor.snapshot()["n"]) == (load.rounds, load.rounds)
    figures.per_context = (traced() - before) / load.contexts
    async with trio.open_nursery() as nursery:
        for actor in actors:
            nursery.start_soon(actor.destroy, "the load is over")


async def _forget(table: ContextTable) -> None:
    """Wait until no ended id is remembered. Where a test's clock jumps, that takes no time."""
    await trio.sleep(table.limits.gone + 1)
    assert table.statistics().gone == 0


async def _run(load: ContextLoad, actors: list[ContextActor], figures: LoadFigures) -> None:
    seen = [WatchedInOrder() for _ in actors]
    watching = trio.Event()
    opened = 0

    async def watch(actor: ContextActor, mine: WatchedInOrder) -> None:
        nonlocal opened
        async with actor.watch() as channel:
            opened += 1
            if opened == len(actors):
                watching.set()
            while mine.n < load.rounds:
                mine.see(await channel.receive())

    async def agent(mine: list[ContextActor], offset: float) -> None:
        began = trio.current_time() + offset
        for n in range(1, load.rounds + 1):
            if math.isfinite(load.rate):
                await trio.sleep_until(began + n / load.rate)
            if mine[0]._shared.durable:
                async with trio.open_nursery() as nursery:
                    for actor in mine:
                        nursery.start_soon(one, actor, n)
            else:
                for actor in mine:
                    await one(actor, n)

    async def one(actor: ContextActor, n: int) -> None:
        sent = time.perf_counter()
        applied = await actor.update(update_of(n))
        figures.slowest = max(figures.slowest, time.perf_counter() - sent)
        assert applied.version == n

    async with trio.open_nursery() as nursery:
        for actor, mine in zip(actors, seen, strict=True):
            nursery.start_soon(watch, actor, mine)
        await watching.wait()
        cpu, began = time.process_time(), time.perf_counter()
        for number in range(load.agents):
            offset = number / load.agents / load.rate if math.isfinite(load.rate) else 0.0
            nursery.start_soon(agent, actors[number :: load.agents], offset)
    figures.cpu, figures.seconds = time.process_time() - cpu, time.perf_counter() - began
    assert all(mine.n == load.rounds for mine in seen)
    figures.seen = sum(mine.updates for mine in seen)
    figures.states = sum(mine.states for mine in seen)


@contextmanager
def _traced(memory: bool) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the memory allocated since; 0 if nobody wants to know, for that takes time."""
    if not memory:
        yield lambda: 0
        return
    gc.collect()
    tracemalloc.start()
    try:
        base = tracemalloc.get_traced_memory()[0]

        def grown() -> int:
            gc.collect()
            return tracemalloc.get_traced_memory()[0] - base

        yield grown
    finally:
        tracemalloc.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, default=1_000)
    parser.add_argument("--agents", type=int, default=50)
    parser.add_argument("--rate", type=float, default=10.0, help="updates of each context per second")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--file", help="keep the contexts in this file; it must not exist")
    parser.add_argument("--memory", action="store_true", help="measure memory, which takes several times as long")
    options = parser.parse_args()
    load = ContextLoad(options.contexts, options.agents, round(options.seconds * options.rate), options.rate)
    store = MemoryContexts() if options.file is None else SqliteContexts(options.file)

    async def run() -> None:
        figures = await put_load(load, store, Budget(), memory=options.memory)
        assert figures.per_context <= MOST_PER_CONTEXT
        print(json.dumps(attrs.asdict(figures), indent=2))
        print(
            f"{figures.updates / figures.seconds:,.0f} updates/s, {1e6 * figures.cpu / figures.updates:.1f} us of CPU"
        )

    trio.run(run)


if __name__ == "__main__":
    main()
