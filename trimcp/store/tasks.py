"""Where tasks are kept: the interface, and the store in the memory of the process, which is the default.

A task is run by one process, its runner, which keeps a lease by renewing it. A task without a runner, or whose runner's
lease is over, waits until a process claims it; their owners take turns. Whoever lost a task learns that from the next
`save`, which then changes nothing. What the clocks of processes say means nothing for leases: the store's own counts.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Literal, TypeAlias

import attrs
import trio

from trimcp.wire.jsonrpc import encode, parse_value
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
        until: when it may be forgotten, if it has ended or nobody runs it.
        status, message: as clients see them.
        progress: the last report, or None.
        result: the result's JSON text, once it is completed.
        error: the error, once it has failed.
        questions: what it asks now, by key.
        answers: what was answered of that.
        used: the keys of all questions so far, with those by which the handler knows them.
        memory: what the handler was answered before, or None.
        checkpoint: the JSON text that its handler saved last, or None.
        runs: how often a process began it, since one last ended in order.
        runner: the process that runs it; "" if none does.
        note: what another process was told for it: answers, or that it is cancelled.
        saves: how often it was saved, where saves may arrive in another order.
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
    note: dict[str, Any] = attrs.field(factory=dict)
    saves: int = 0

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    @property
    def principal_id(self) -> str | None:
        return None if self.principal is None else self.principal["id"]

    def ask(self, asked: Mapping[str, Any]) -> None:
        """Wait for answers to what a handler asks. A key names one question of a task."""
        questions = {}
        for key, question in asked.items():
            name = key if key not in self.used else f"{key}#{len(self.used)}"
            self.used[name] = key
            questions[name] = question
        self.status, self.questions = "input_required", questions

    def wanted(self, answers: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of these answers that it waits for."""
        return {key: each for key, each in answers.items() if key in self.questions and key not in self.answers}

    def answer(self, answers: Mapping[str, Any]) -> bool:
        """Take answers to what is asked, each once; return whether there were any. With all of them it works on."""
        new = self.wanted(answers)
        self.answers.update(new)
        if len(self.answers) == len(self.questions):
            self.status = "working"
        return bool(new)

    def remember(self) -> None:
        """Add what was answered to what the handler was answered before."""
        assert self.memory is not None
        answers = {self.used[key]: answer for key, answer in self.answers.items()}
        self.memory = {**self.memory, "answers": {**self.memory["answers"], **answers}}
        self.questions, self.answers = {}, {}


COLUMNS: Final = ("id", "owner", "until", "updated", "runner", "note", "result", "checkpoint")
"""What a store keeps of a task by itself; the rest is one JSON object, the facts."""
_FORM: Final = 1
_FACTS: Final = tuple(each.name for each in attrs.fields(KeptTask) if each.name not in COLUMNS)


def facts_of(task: KeptTask) -> bytes:
    """Return the facts of a task as JSON."""
    return encode({"form": _FORM, **{name: getattr(task, name) for name in _FACTS}})


def restored(columns: Mapping[str, Any], facts: bytes, note: bytes | str) -> KeptTask:
    """Return a task from what a store kept of it. Raises ValueError: it was not written so, or by a newer trimcp."""
    known, told = parse_value(facts), parse_value(note.encode() if isinstance(note, str) else note)
    if not isinstance(known, dict) or not isinstance(told, dict):
        raise ValueError("the store of tasks has text that it did not write")
    if known.pop("form", None) != _FORM:
        raise ValueError(f"another trimcp wrote the task: this one knows form {_FORM}")
    return KeptTask(**{**columns, **{name: value for name, value in known.items() if name in _FACTS}, "note": told})


def noted(known: dict[str, Any], note: Mapping[str, Any]) -> None:
    """Add a note to what was told before."""
    answers = {**known.get("answers", {}), **note.get("answers", {})}
    known.update(note, answers=answers)


def in_turn(waiting: OrderedDict[str, list[str]], most: int) -> list[tuple[str, str]]:
    """Take up to `most` tasks out of those that wait, and return the owner and id of each; owners take turns."""
    taken: list[tuple[str, str]] = []
    while waiting and len(taken) < most:
        owner, ids = waiting.popitem(last=False)
        taken.append((owner, ids.pop(0)))
        if ids:
            waiting[owner] = ids
    return taken


class TaskStore:
    """Keeps tasks: this one in the memory of the process. One that keeps them elsewhere is a subclass with all methods.

    Attributes:
        durable: whether tasks outlive the process, and other processes may run them.
    """

    durable: bool = False

    def __init__(self) -> None:
        self._tasks: dict[str, KeptTask] = {}
        self._waiting: OrderedDict[str, list[str]] = OrderedDict()
        self._leases: dict[str, float] = {}
        self._count = 0
        self._told: trio.Event = trio.Event()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Keep the store open while the block runs. Raises OSError if it cannot be opened."""
        yield

    async def create(self, task: KeptTask) -> None:
        """Keep a new task. Once this returns, `load` finds it, and it survives what the store promises to survive.

        It waits for a process to claim it if it has no runner.
        """
        self._tasks[task.id] = task
        if not task.runner:
            self._put_back([task])

    async def save(self, task: KeptTask) -> bool:
        """Keep a task as it is now, without its note; return False if it has another runner or is gone."""
        found = self._tasks.get(task.id)
        return found is not None and found.runner == task.runner

    async def load(self, id: str) -> KeptTask | None:
        """Return a task, or None if there is none."""
        return self._tasks.get(id)

    async def updated(self, ids: Collection[str]) -> Mapping[str, float]:
        """Return when each of these tasks changed last; those that are gone are left out."""
        return {id: self._tasks[id].updated for id in ids if id in self._tasks}

    async def count(self, owner: str) -> int:
        """Return how many tasks an owner has."""
        return sum(task.owner == owner for task in self._tasks.values())

    async def tell(self, id: str, note: Mapping[str, Any]) -> None:
        """Tell the runner of a task: members of `answers` are added to those told before."""
        if (task := self._tasks.get(id)) is not None:
            noted(task.note, note)
            self._notify()

    async def renew(self, runner: str, lease: float) -> Sequence[tuple[str, Mapping[str, Any]]]:
        """Give a runner a lease of so many seconds from now; return what was told for its tasks since, by task."""
        self._leases[runner] = time.monotonic() + lease
        mine = [task for task in self._tasks.values() if task.runner == runner and not task.ended]
        told = [(task.id, task.note) for task in mine if task.note]
        for task in mine:
            task.note = {}
        return told

    async def claim(self, runner: str, most: int) -> Sequence[KeptTask]:
        """Make this, which has a lease, the runner of up to `most` tasks that wait for one, and return them.

        Among them are those whose runner's lease is over. Their owners take turns.
        """
        now = time.monotonic()
        self._leases = {name: until for name, until in self._leases.items() if until >= now}
        self._put_back(task for task in self._tasks.values() if task.runner and task.runner not in self._leases)
        claimed = []
        for _, id in in_turn(self._waiting, most):
            # A copy: the last runner may still hold the old object.
            claimed.append(attrs.evolve(self._tasks[id], runner=runner))
            self._tasks[id] = claimed[-1]
        return claimed

    async def held(self, runner: str) -> Collection[str]:
        """Return the ids of the tasks that have this runner and have not ended."""
        return [task.id for task in self._tasks.values() if task.runner == runner and not task.ended]

    async def release(self, ids: Collection[str], runner: str) -> None:
        """Let tasks have no runner, so that others may claim them at once."""
        found = [self._tasks[id] for id in ids if id in self._tasks]
        self._put_back(task for task in found if task.runner == runner)

    async def forget(self, ids: Collection[str], now: float) -> None:
        """Forget these tasks, and all whose time is over, except those at work: the time of day may have been set."""
        over = [task for task in self._tasks.values() if task.until < now]
        held = {name for name, until in self._leases.items() if until >= time.monotonic()}
        for id in [*ids, *(task.id for task in over if task.ended or task.runner not in held)]:
            if (task := self._tasks.pop(id, None)) is not None and id in self._waiting.get(task.owner, ()):
                self._waiting[task.owner].remove(id)
                if not self._waiting[task.owner]:
                    del self._waiting[task.owner]

    async def news(self, seen: int) -> int:
        """Wait for news after number `seen`, and return the number of the latest: a task waits, changed, or was told.

        What the caller did itself need not be news. It may return without any.
        """
        while self._count <= seen:
            await self._told.wait()
        return self._count

    def _put_back(self, tasks: Iterable[KeptTask]) -> None:
        for task in tasks:
            if not task.ended:
                # A copy: the last runner may still hold the old object.
                self._tasks[task.id] = attrs.evolve(task, runner="")
                self._waiting.setdefault(task.owner, []).append(task.id)
                self._notify()

    def _notify(self) -> None:
        self._count += 1
        self._told.set()
        self._told = trio.Event()
