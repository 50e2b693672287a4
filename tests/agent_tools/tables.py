"""Tables of contexts for tests, a store that does what a test says, and a call that knows why it was cancelled."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import attrs
import trio

from trimcp.agent_tools.callers import Owner
from trimcp.agent_tools.contexts.state import ContextLimits
from trimcp.agent_tools.contexts.table import ContextTable
from trimcp.budget import Budget
from trimcp.store.contexts import ContextKey, ContextStore, KeptContext, MemoryContexts

ADA: Owner = ("ada", "agent-a")
BOB: Owner = ("bob", "agent-b")
EMPTY: dict[str, Any] = {"permissions": [], "tool_history": [], "intermediate_results": {}}


@asynccontextmanager
async def open_table(
    store: ContextStore | None = None, *, budget: Budget | None = None, **limits: Any
) -> AsyncIterator[ContextTable]:
    """A table at work. At its end nothing of it is left: no context, task, timer or counted byte."""
    budget = Budget() if budget is None else budget
    held = budget.held
    table = ContextTable(ContextLimits(**limits), MemoryContexts() if store is None else store, budget)
    tasks = all_tasks()
    async with table.running():
        yield table
    assert_empty(table, budget, held)
    assert all_tasks() == tasks


def all_tasks() -> int:
    return trio.lowlevel.current_statistics().tasks_living


def assert_empty(table: ContextTable, budget: Budget, held: int = 0) -> None:
    statistics = table.statistics()
    for name in ("contexts", "stored", "owners", "calls", "watchers", "tasks", "ending", "gone", "bytes"):
        assert getattr(statistics, name) == 0, name
    assert budget.held == held
    assert not table._unloaded.loading


@attrs.define(eq=False)
class FakeCall:
    """A call in a context, which ends as soon as it is cancelled, unless it is stubborn."""

    actor: Any
    id: str
    stubborn: bool = False
    reasons: list[str] = attrs.field(factory=list)

    def cancel(self, reason: str, /) -> None:
        self.reasons.append(reason)
        if not self.stubborn:
            self.actor.end_call(self.id)


def begin(actor: Any, id: str = "req-1", *, stubborn: bool = False) -> FakeCall:
    call = FakeCall(actor, id, stubborn)
    actor.begin_call(id, call)
    return call


@attrs.define(eq=False)
class ScriptedStore(ContextStore):
    """A durable store in memory. `hold` stops it before what it does; `broken` makes it fail after that."""

    rows: dict[ContextKey, KeptContext] = attrs.field(factory=dict)
    writes: list[tuple[list[KeptContext], list[ContextKey]]] = attrs.field(factory=list)
    loads: list[ContextKey] = attrs.field(factory=list)
    broken: Exception | None = None
    gate: trio.Event | None = None

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Let nothing through while the block runs."""
        self.gate = gate = trio.Event()
        try:
            yield
        finally:
            self.gate = None
            gate.set()

    async def _work(self) -> None:
        await trio.lowlevel.checkpoint()
        if self.gate is not None:
            await self.gate.wait()
        if self.broken is not None:
            raise self.broken

    async def counts(self) -> Mapping[Owner, int]:
        await self._work()
        counts: dict[Owner, int] = {}
        for owner, _ in self.rows:
            counts[owner] = counts.get(owner, 0) + 1
        return counts

    async def ids(self, owner: Owner) -> Sequence[str]:
        await self._work()
        return [id for each, id in self.rows if each == owner]

    async def load(self, owner: Owner, id: str) -> KeptContext | None:
        self.loads.append((owner, id))
        await self._work()
        return self.rows.get((owner, id))

    async def write(self, kept: Sequence[KeptContext], deleted: Sequence[ContextKey]) -> None:
        self.writes.append((list(kept), list(deleted)))
        assert len({one.key for one in kept} | set(deleted)) == len(kept) + len(deleted)
        await self._work()
        for one in kept:
            self.rows[one.key] = one
        for key in deleted:
            self.rows.pop(key, None)

    async def expire(self, now: float) -> Sequence[ContextKey]:
        await self._work()
        keys = [key for key, one in self.rows.items() if one.until < now]
        for key in keys:
            del self.rows[key]
        return keys
