"""Where tasks are kept: the interface, and the store in the memory of the process, which is the default.

A task is run by one process, its runner, for as long as that renews its lease. Once the lease is over another process
may claim the task. Whoever lost it learns that from the next `save`, which then changes nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeAlias

import attrs

from trimcp.wire.lifecycle import ENDED, TaskStatus

Restart: TypeAlias = Literal["fail", "resume", "again"]
"""What becomes of a task whose process has ended: it fails, begins again where it was, or begins anew."""


@attrs.define(eq=False)
class KeptTask:
    """A task as a store keeps it. Times are seconds since 1970; all values are JSON.

    It has more than 20 fields because all that another process needs to go on with it is kept together.

    Attributes:
        id: its id.
        owner: whose it is, for the bound on how many one may have.
        principal: who asked, as `Principal.facts`; None if nobody authenticated, and the id alone protects it.
        params: of the call: name, arguments and `_meta`.
        restart: what becomes of it after a restart.
        created, updated: when it began, and changed last.
        until: when it may be forgotten.
        status, message: as clients see them.
        progress: the last report, or None.
        result: the result's JSON text, once it is completed.
        error: the error, once it has failed.
        questions: what it asks now, by key.
        answers: what was answered of that.
        used: the keys of all questions so far, with those by which the handler knows them.
        memory: what the handler was answered before, or None.
        checkpoint: the JSON text that its handler saved last, or None.
        runs: how often a process began it.
        runner, lease: the process that runs it, and until when it alone may.
        note: what another process was told for it: answers, or that it is cancelled.
    """

    id: str
    owner: str
    principal: Mapping[str, Any] | None
    params: Mapping[str, Any]
    restart: Restart
    created: float
    updated: float
    until: float
    status: TaskStatus = "working"
    message: str | None = None
    progress: Mapping[str, Any] | None = None
    result: bytes | None = None
    error: Mapping[str, Any] | None = None
    questions: Mapping[str, Any] = attrs.field(factory=dict)
    answers: dict[str, Any] = attrs.field(factory=dict)
    used: dict[str, str] = attrs.field(factory=dict)
    memory: Mapping[str, Any] | None = None
    checkpoint: bytes | None = None
    runs: int = 0
    runner: str = ""
    lease: float = 0.0
    note: dict[str, Any] = attrs.field(factory=dict)

    @property
    def ended(self) -> bool:
        return self.status in ENDED


def noted(known: dict[str, Any], note: Mapping[str, Any]) -> None:
    """Add a note to what was told before."""
    answers = {**known.get("answers", {}), **note.get("answers", {})}
    known.update(note, answers=answers)


class TaskStore:
    """Keeps tasks: this one in the memory of the process. One that keeps them elsewhere is a subclass with all methods.

    Attributes:
        durable: whether tasks outlive the process.
    """

    durable: bool = False

    def __init__(self) -> None:
        self._tasks: dict[str, KeptTask] = {}

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Keep the store open while the block runs. Raises OSError if it cannot be opened."""
        yield

    async def create(self, task: KeptTask) -> None:
        """Keep a new task. Once this returns, `load` finds it, and it survives what the store promises to survive."""
        self._tasks[task.id] = task

    async def save(self, task: KeptTask) -> bool:
        """Keep a task as it is now, without its note; return False if it has another runner or is gone."""
        found = self._tasks.get(task.id)
        return found is not None and found.runner == task.runner

    async def load(self, id: str) -> KeptTask | None:
        """Return a task, or None if there is none."""
        return self._tasks.get(id)

    async def count(self, owner: str) -> int:
        """Return how many tasks an owner has."""
        return sum(task.owner == owner for task in self._tasks.values())

    async def tell(self, id: str, note: Mapping[str, Any]) -> None:
        """Tell the runner of a task: members of `answers` are added to those told before."""
        if (task := self._tasks.get(id)) is not None:
            noted(task.note, note)

    async def renew(self, runner: str, lease: float) -> Sequence[tuple[str, Mapping[str, Any]]]:
        """Extend the lease of all that a runner runs, and return what was told for it since, by task."""
        mine = [task for task in self._tasks.values() if task.runner == runner and not task.ended]
        told = [(task.id, task.note) for task in mine if task.note]
        for task in mine:
            task.lease, task.note = lease, {}
        return told

    async def claim(self, runner: str, now: float, lease: float) -> Sequence[KeptTask]:
        """Make this the runner of all tasks that have not ended and whose lease is over, and return them."""
        over = [task for task in self._tasks.values() if not task.ended and task.lease < now]
        # Copies: the last runner may still hold the old objects.
        claimed = [attrs.evolve(task, runner=runner, lease=lease) for task in over]
        self._tasks.update((task.id, task) for task in claimed)
        return claimed

    async def release(self, ids: Collection[str], runner: str) -> None:
        """End the lease of tasks, so that others may claim them at once."""
        for id in ids:
            if (task := self._tasks.get(id)) is not None and task.runner == runner:
                task.lease = 0.0

    async def forget(self, ids: Collection[str], now: float) -> None:
        """Forget these tasks, and all whose time is over."""
        for id in [*ids, *(id for id, task in self._tasks.items() if task.until < now)]:
            self._tasks.pop(id, None)
