"""What contexts cost: memory while they idle, time for an update, and nothing once they have ended."""

from __future__ import annotations

import math
import sqlite3
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

import trimcp
from tests.agent_tools.context_load import MOST_PER_CONTEXT, ContextLoad, put_load, update_of
from tests.agent_tools.tables import ADA, begin, open_table
from tests.yardsticks import assert_costs
from trimcp.agent_tools.contexts.actor import ActorContext
from trimcp.budget import Budget
from trimcp.session.context import Context
from trimcp.store.contexts import MemoryContexts
from trimcp.store.contexts_sqlite import SqliteContexts
from trimcp.testing.connect import connected

SOME, FEW = 400, 100
CALL = {
    "request_id": "req-abc-123",
    "tool": "query_user_balance",
    "version": "1",
    "arguments": {"user_id": "U12345", "currency": "EUR"},
    "status": "success",
    "at": "2025-12-12T10:00:00Z",
}


async def test_every_update_of_a_load_is_applied_once_and_in_order(autojump_clock: Any) -> None:
    """1,000 contexts of 50 agents, 10 updates each, and all that the load program checks of them."""
    figures = await put_load(ContextLoad(1_000, 50, 10), MemoryContexts(), Budget(), memory=False)
    assert figures.updates == 10_000
    assert figures.seen == 10_000  # each of them by its watcher, none as part of a whole state
    assert figures.states == 1_000


async def test_a_load_as_fast_as_possible_loses_nothing() -> None:
    figures = await put_load(ContextLoad(100, 10, 100, math.inf), MemoryContexts(), Budget(), memory=False)
    assert figures.updates == 10_000
    assert figures.states + figures.seen <= 10_100


async def test_a_load_on_a_file_is_written_in_few_writes(tmp_path: Path) -> None:
    path = tmp_path / "contexts.db"
    figures = await put_load(ContextLoad(200, 50, 10, math.inf), SqliteContexts(path), Budget(), memory=False)
    assert figures.updates == 2_000
    assert figures.writes < 1_000
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT count(*) FROM contexts").fetchone() == (0,)
    connection.close()


@pytest.mark.alone
async def test_an_idle_context_takes_at_most_8_kib_and_nothing_stays(autojump_clock: Any) -> None:
    """With the state of ten updates, after it was watched."""
    figures = await put_load(ContextLoad(SOME, 50, 10, again=5), MemoryContexts(), Budget())
    print(figures)
    assert figures.per_context <= MOST_PER_CONTEXT, f"{figures.per_context:.0f} bytes"
    # Sets of Trio's change their size now and then by 32 KiB, and closed deadlines go when they are many: a time shows
    # that, but not most of the times.
    assert statistics.median(figures.left) < 16 * SOME, f"{figures.left} bytes stay"


@pytest.mark.alone
@pytest.mark.parametrize("durable", [False, True])
async def test_so_does_one_with_a_full_history(durable: bool, tmp_path: Path) -> None:
    import gc
    import tracemalloc

    async with open_table(SqliteContexts(tmp_path / "contexts.db") if durable else None) as table:
        first = await table.create(ADA)
        await first.update(update_of(1))
        gc.collect()
        tracemalloc.start()
        try:
            base, counted = tracemalloc.get_traced_memory()[0], table.statistics().bytes
            actors = [await table.find_or_make(("p", f"agent-{n % 50}"), f"ctx-{n}") for n in range(FEW)]
            async with trio.open_nursery() as nursery:
                for actor in actors:
                    for each in range(5):
                        nursery.start_soon(actor.update, update_of(each))
            for n, actor in enumerate(actors):
                for each in range(100):
                    call = begin(actor, f"{n}-{each}")
                    actor.end_call(call.id)
                    actor.record({**CALL, "request_id": call.id})
            if durable:
                await actors[-1].update({})  # written with all that waited before it
            actors.clear()
            del actor, call, nursery
            gc.collect()
            each = (tracemalloc.get_traced_memory()[0] - base) // FEW
        finally:
            tracemalloc.stop()
        assert each <= MOST_PER_CONTEXT
        # What the budget counts is about what there is, rather more.
        assert 0.7 * each <= (table.statistics().bytes - counted) / FEW <= 1.7 * each


@pytest.mark.alone
async def test_an_update_takes_at_most_15_microseconds() -> None:
    async with open_table() as table:
        actors = [await table.find_or_make(("p", f"agent-{n % 50}"), f"ctx-{n}") for n in range(1_000)]
        owners = [(actor.owner, actor.id) for actor in actors]

        def update_all() -> None:
            for owner, id in owners:
                actor = table.get(owner, id)
                assert actor is not None
                actor.apply({"last_query_time": "2025-12-12T10:00:00Z", "user_verified": True})

        assert_costs(update_all, at_most=15)  # of a millisecond, for a thousand
        assert table.statistics().updates >= 1_000


@pytest.mark.alone
async def test_an_update_costs_its_patch_and_not_the_state() -> None:
    async with open_table(max_state=10_000_000) as table:
        small = await table.create(ADA, state={"a": 1})
        large = await table.create(ADA, state={"a": 1, "b": {str(n): "x" * 100 for n in range(5_000)}})

        def update(actor: Any) -> None:
            for n in range(500):
                actor.apply({"a": n})

        assert_costs(lambda: update(large), at_most=2, times=lambda: update(small))


# What handlers see


async def test_calls_of_mcp_have_no_context() -> None:
    server = trimcp.Server("s")

    @server.tool
    async def look(ctx: trimcp.Context) -> bool:
        return ctx.agent_context is None

    async with connected(server) as session:
        assert (await session.call_tool("look")).data in (True, {"result": True})


async def test_a_call_from_an_origin_with_a_context_has_it() -> None:
    async with open_table() as table:
        mine = ActorContext(await table.create(ADA, "ctx-001", {"a": 1}))
        job: Any = SimpleNamespace(origin=SimpleNamespace(agent_context=mine))
        session: Any = None
        ctx = Context[Any](session, job, None)
        assert ctx.agent_context is mine
        assert ctx.agent_context.read()["a"] == 1
        await trio.lowlevel.checkpoint()
