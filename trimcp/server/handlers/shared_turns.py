"""Turns under quotas that several processes share: the store counts them, and one task asks it for all that wait."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from hashlib import sha256
from heapq import heappop, heappush
from itertools import count
from secrets import token_hex
from typing import Final

import attrs
import trio

from trimcp.session.incoming.turns import Turns
from trimcp.store.shared import SharedStore, SharedTurn
from trimcp.support.cleaning import log_crash

log: logging.Logger = logging.getLogger("trimcp.server")

_AT_ONCE: Final = 500  # turns in one question
_PAUSE: Final = 0.5  # seconds before a store that failed is asked again

_MANY: Final = "too many calls wait already"
_LATE: Final = "the call could not begin before its deadline"
_AWAY: Final = "the shared store that counts calls cannot be reached"


@attrs.define(eq=False)
class _AskedTurn:
    """A turn that waits for its time, or that has it."""

    turn: SharedTurn
    deadline: float
    answered: trio.Event = attrs.field(factory=trio.Event)
    refused: str | None = None  # why
    after: float = 0.0  # seconds until its time, as expected last
    due: float = 0.0  # when it is asked for, perhaps again


@attrs.define(eq=False)
class TurnDesk:
    """Asks for the turns of one process: for those that wait when their time may have come, for others to keep them."""

    store: SharedStore  # counts the turns of all processes
    tell: Callable[[str, str], object]  # tells a process, by its name, that the time of its turn of this id has come
    _asked: dict[str, _AskedTurn] = attrs.field(init=False, factory=dict)
    _ended: dict[str, tuple[SharedTurn, float]] = attrs.field(init=False, factory=dict)  # and when
    _due: list[tuple[float, str]] = attrs.field(init=False, factory=list)  # a heap
    _changed: trio.Event = attrs.field(init=False, factory=trio.Event)
    _prefix: str = attrs.field(init=False, factory=lambda: token_hex(8))
    _numbers: count[int] = attrs.field(init=False, factory=count)
    _failing: bool = attrs.field(init=False, default=False)

    def new_id(self) -> str:
        """Return an id for a turn, as none in any process has."""
        return f"{self._prefix}-{next(self._numbers)}"

    def owner(self, whose: object) -> str:
        """Return whose turn it is for all processes: a session of this one, or a client that all of them know."""
        text = whose if isinstance(whose, str) else f"{self._prefix} {id(whose)}"
        return sha256(text.encode("utf-8", "replace")).hexdigest()[:32]

    async def wait(self, turn: SharedTurn, deadline: float) -> _AskedTurn:
        """Wait until the time of a turn has come, or it is refused."""
        asked = self._asked[turn.id] = _AskedTurn(turn, deadline)
        self._ask_at(asked, trio.current_time())
        try:
            await asked.answered.wait()
        except BaseException:  # cancelled
            self.end(turn)
            raise
        return asked

    def end(self, turn: SharedTurn) -> None:
        """End a turn, or give it up."""
        self._asked.pop(turn.id, None)
        self._ended[turn.id] = turn, trio.current_time()
        self._changed.set()

    def come(self, id: str) -> None:
        """Note that the time of a turn has come, as the store says."""
        asked = self._asked.get(id)
        if asked is not None and not asked.answered.is_set():
            asked.answered.set()
            self._ask_at(asked, trio.current_time() + self.store.lease / 4)

    def _ask_at(self, asked: _AskedTurn, due: float) -> None:
        asked.due = due
        heappush(self._due, (due, asked.turn.id))
        self._changed.set()

    def _refuse(self, asked: _AskedTurn, why: str, *, counted: bool) -> None:
        asked.refused = why
        asked.answered.set()
        del self._asked[asked.turn.id]
        if counted:
            self.end(asked.turn)

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            self._changed = trio.Event()
            if asked := self._due_now():
                await self._ask(asked)
            elif self._ended:
                await self._ask(())
            else:
                with trio.CancelScope(deadline=self._due[0][0] if self._due else math.inf):
                    await self._changed.wait()

    async def flush(self) -> None:
        """Give back what is still to be given back, after `run` was cancelled."""
        if self._ended:
            await self._ask(())

    def _due_now(self) -> list[_AskedTurn]:
        due, now, found = self._due, trio.current_time(), list[_AskedTurn]()
        while due and due[0][0] <= now and len(found) < _AT_ONCE:
            at, id = heappop(due)
            asked = self._asked.get(id)
            if asked is not None and asked.due == at:
                found.append(asked)
        return found

    async def _ask(self, asked: Iterable[_AskedTurn]) -> None:
        """Ask for turns, and give back those that have ended."""
        store, ended = self.store, dict(self._ended)
        left = [each for each in asked if each.turn.id in self._asked]
        try:
            answer = await store.turns([turn for turn, _ in ended.values()], [each.turn for each in left])
        except OSError as error:
            self._fail(left, error)
            await trio.sleep(_PAUSE)
            return
        except BaseException:  # cancelled: what is given back is so again
            for each in left:
                self._ask_at(each, trio.current_time())
            raise
        self._failing = False
        for id in ended:
            del self._ended[id]
        now = trio.current_time()
        for each, after in zip(left, answer.after, strict=True):
            if each.turn.id not in self._asked:  # given up meanwhile
                continue
            if after is None:
                self._refuse(each, _MANY, counted=False)
            elif each.answered.is_set():  # it counts for longer now
                self._ask_at(each, now + store.lease / 4)
            elif not after:
                self.come(each.turn.id)
            else:
                each.after = after if each.turn.per_second is not None else 0.0
                if now + each.after > each.deadline:
                    self._refuse(each, _LATE, counted=True)
                else:
                    self._ask_at(each, now + min(after, store.lease / 4))
        for process, id in answer.come:
            if process == store.name:
                self.come(id)
            else:
                self.tell(process, id)

    def _fail(self, asked: Iterable[_AskedTurn], error: Exception) -> None:
        """Refuse what waits; keep what runs."""
        if not self._failing:
            self._failing = True
            log_crash(log, error, "the shared store fails; calls under a quota are refused")
        now, lease = trio.current_time(), self.store.lease
        for each in asked:
            if each.answered.is_set():
                self._ask_at(each, now + lease / 4)
            elif each.turn.id in self._asked:
                self._refuse(each, _AWAY, counted=True)
        for id in [id for id, (_, at) in self._ended.items() if now - at > lease]:
            del self._ended[id]  # the store has forgotten it by itself


@attrs.define(eq=False, repr=False, kw_only=True)
class SharedTurns(Turns):
    """The turns of one quota that holds for all processes; its numbers are those of this one."""

    desk: TurnDesk
    key: str  # of the quota, for all processes
    _held: list[SharedTurn] = attrs.field(init=False, factory=list)  # they are all the same

    @property
    def idle(self) -> bool:
        return not (self.running or self.waiting)

    async def acquire(self, whose: object, deadline: float = math.inf) -> float:
        quota, desk = self.quota, self.desk
        burst = quota.burst if quota.burst is not None else max(1.0, quota.per_second or 0.0)
        turn = SharedTurn(
            self.key, desk.new_id(), desk.owner(whose), quota.running, quota.per_second, burst, quota.waiting
        )
        self.waiting: int = self.waiting + 1
        try:
            asked = await desk.wait(turn, deadline)
        finally:
            self.waiting -= 1
        if asked.refused is not None:
            raise self._refusal(f"{self.name}: {asked.refused}", asked.after or self._usual)
        self.running: int = self.running + 1
        self.begun: int = self.begun + 1
        self._held.append(turn)
        return trio.current_time()

    def give_back(self, since: float) -> None:
        super().give_back(since)
        self.desk.end(self._held.pop())
