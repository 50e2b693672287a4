"""A store in memory that several applications of one process share, as processes share a file."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count

import attrs
import trio

from trimcp.store.shared import (
    MOST_LETTERS,
    MOST_MARKS,
    AppendEvent,
    DropEvents,
    EndSession,
    KeptSession,
    Letter,
    RecordChange,
    SaveSession,
    SharedStore,
    SharedTurn,
    TurnAnswer,
    Write,
)
from trimcp.support.rates import TokenBucket


@attrs.define(eq=False)
class _Asked:
    """A turn, and who asked for it."""

    turn: SharedTurn
    process: str
    round: int
    until: float
    come: bool = False


@attrs.define(eq=False)
class _Quota:
    """What all use up of one quota."""

    bucket: TokenBucket | None
    turns: dict[str, _Asked] = attrs.field(factory=dict)
    round: int = 0

    def waiting(self) -> list[_Asked]:
        return sorted((each for each in self.turns.values() if not each.come), key=lambda each: each.round)

    def ask(self, turn: SharedTurn, process: str, until: float) -> _Asked:
        if turn.id not in self.turns:
            own = [each.round for each in self.waiting() if each.turn.whose == turn.whose]
            self.turns[turn.id] = _Asked(turn, process, max([self.round, *own]) + 1, until)
        asked = self.turns[turn.id]
        asked.process, asked.until = process, until
        return asked

    def go_on(self, turn: SharedTurn, now: float) -> list[tuple[str, str]]:
        self.turns = {id: each for id, each in self.turns.items() if each.until > now}
        come = []
        for each in self.waiting():
            running = len(self.turns) - len(self.waiting())
            if running >= (turn.running or running + 1) or (self.bucket and not self.bucket.take(now)):
                break
            each.come, self.round = True, each.round
            come.append((each.process, each.turn.id))
        return come


@attrs.define(eq=False)
class MemoryHub:
    """What the stores share."""

    sessions: dict[str, KeptSession] = attrs.field(factory=dict)
    until: dict[str, float] = attrs.field(factory=dict)  # of sessions, on Trio's clock
    events: dict[tuple[str, int], dict[int, bytes]] = attrs.field(factory=dict)
    agreed: dict[str, bytes] = attrs.field(factory=dict)
    leased: dict[str, MemoryStore] = attrs.field(factory=dict)  # those whose lease is not over
    quotas: dict[str, _Quota] = attrs.field(factory=dict)
    records: dict[tuple[str, str], tuple[bytes, float]] = attrs.field(factory=dict)  # and until when
    marks: dict[tuple[str, str], float] = attrs.field(factory=dict)
    numbers: count[int] = attrs.field(factory=lambda: count(1))

    def expire(self) -> None:
        for session in [id for id, until in self.until.items() if until < trio.current_time()]:
            self.forget(session)

    def forget(self, session: str) -> None:
        self.sessions.pop(session, None)
        self.until.pop(session, None)
        for key in [key for key in self.events if key[0] == session]:
            del self.events[key]


@attrs.define(eq=False)
class MemoryStore(SharedStore):
    """The share of one application. `broken` makes all it does fail."""

    hub: MemoryHub
    name: str = ""
    broken: Exception | None = None
    commits: int = 0
    _letters: list[bytes] = attrs.field(factory=list)
    _come: trio.Event = attrs.field(factory=trio.Event)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        self.name = f"memory-{next(self.hub.numbers)}"
        self._letters.clear()
        self.hub.leased[self.name] = self
        try:
            yield
        finally:
            self.hub.leased.pop(self.name, None)

    async def _work(self) -> None:
        await trio.lowlevel.checkpoint()
        if self.broken is not None:
            raise self.broken
        self.hub.expire()

    async def commit(self, writes: Sequence[Write]) -> Collection[Write]:
        self.commits += 1
        await self._work()
        return [write for write in writes if not self._carry_out(write)]

    def _carry_out(self, write: Write) -> bool:
        hub = self.hub
        if isinstance(write, Letter):
            if write.to is None:
                for other in hub.leased.values():
                    if other is not self:
                        other.put(write.data)
                return True
            to = hub.leased.get(write.to)
            return to is not None and to.put(write.data)
        kept, session = hub.sessions.get(write.session), write.session
        if self.name not in hub.leased:
            return False
        if kept is None and isinstance(write, SaveSession) and write.new:
            kept = KeptSession(self.name, write.fence, b"")
        if kept is None or (kept.holder, kept.fence) != (self.name, write.fence):
            return False
        match write:
            case SaveSession():
                holder = "" if write.release else self.name
                hub.sessions[session] = attrs.evolve(kept, data=write.data, holder=holder)
                hub.until[session] = trio.current_time() + write.ttl
            case EndSession():
                hub.forget(session)
            case AppendEvent():
                hub.events.setdefault((session, write.stream), {})[write.seq] = write.data
            case DropEvents(before=int(before)):
                events = hub.events.get((session, write.stream), {})
                for seq in [seq for seq in events if seq < before]:
                    del events[seq]
            case DropEvents():
                hub.events.pop((session, write.stream), None)
        return True

    def put(self, letter: bytes) -> bool:
        if len(self._letters) >= MOST_LETTERS:
            return False
        self._letters.append(letter)
        self._come.set()
        return True

    async def load(self, session: str) -> KeptSession | None:
        await self._work()
        kept = self.hub.sessions.get(session)
        return None if kept is None else attrs.evolve(kept, gone=kept.holder not in self.hub.leased)

    async def take(self, session: str, fence: int) -> KeptSession | None:
        await self._work()
        hub, kept = self.hub, self.hub.sessions.get(session)
        if kept is None or kept.fence != fence or self.name not in hub.leased:
            return None
        if kept.holder in hub.leased and kept.holder != self.name:
            return None
        hub.sessions[session] = taken = attrs.evolve(kept, holder=self.name, fence=fence + 1)
        streams = [number for (id, number), events in hub.events.items() if id == session and events]
        return attrs.evolve(taken, streams=streams)

    async def after(self, session: str, stream: int, seq: int) -> Sequence[tuple[int, bytes]]:
        await self._work()
        return [each for each in sorted(self.hub.events.get((session, stream), {}).items()) if each[0] > seq]

    async def agree(self, name: str, data: bytes) -> bytes:
        await self._work()
        return self.hub.agreed.setdefault(name, data)

    async def turns(self, ended: Sequence[SharedTurn], asked: Sequence[SharedTurn]) -> TurnAnswer:
        await self._work()
        now, come, after = trio.current_time(), list[tuple[str, str]](), list[float | None]()
        for turn in ended:
            quota = self._quota(turn, now)
            quota.turns.pop(turn.id, None)
            come += quota.go_on(turn, now)
        for turn in asked:
            quota = self._quota(turn, now)
            known = turn.id in quota.turns
            place = quota.ask(turn, self.name, now + self.lease)
            come += quota.go_on(turn, now)
            waiting = quota.waiting()
            if place.come:
                after.append(0.0)
            elif not known and len(waiting) > turn.waiting:
                del quota.turns[turn.id]
                after.append(None)
            else:
                bucket = quota.bucket
                after.append(bucket.wait(waiting.index(place) + 1) if bucket else self.lease)
        return TurnAnswer(after, come)

    def _quota(self, turn: SharedTurn, now: float) -> _Quota:
        if turn.quota not in self.hub.quotas:
            rate = turn.per_second
            self.hub.quotas[turn.quota] = _Quota(None if rate is None else TokenBucket(rate, turn.burst, now))
        return self.hub.quotas[turn.quota]

    async def first_use(self, owner: str, mark: str, seconds: float) -> bool:
        await self._work()
        now, marks = trio.current_time(), self.hub.marks
        for key in [key for key, until in marks.items() if until < now]:
            del marks[key]
        if (owner, mark) in marks or sum(key[0] == owner for key in marks) >= MOST_MARKS:
            return False
        marks[owner, mark] = now + seconds
        return True

    async def records(self, kind: str) -> Mapping[str, bytes]:
        await self._work()
        now = trio.current_time()
        return {name: data for (of, name), (data, until) in self.hub.records.items() if of == kind and until >= now}

    async def change_records(self, kind: str, changes: Sequence[RecordChange], seconds: float) -> bool:
        found = await self.records(kind)
        if any(found.get(change.name) not in (change.known, change.data) for change in changes):
            return False
        for change in changes:
            if change.data is None:
                self.hub.records.pop((kind, change.name), None)
            else:
                self.hub.records[kind, change.name] = change.data, trio.current_time() + seconds
        return True

    async def receive(self) -> Sequence[bytes]:
        await self._work()
        while not self._letters:
            self._come = trio.Event()
            await self._come.wait()
        letters, self._letters = self._letters, []
        return letters

    async def renew(self) -> bool:
        await self._work()
        return self.hub.leased.get(self.name) is self

    async def retire(self) -> bool:
        await self._work()
        if self._letters and self.name in self.hub.leased:
            return False
        self.hub.leased.pop(self.name, None)
        return True

    async def gone(self, name: str) -> bool:
        await self._work()
        return name not in self.hub.leased
