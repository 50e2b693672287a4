"""A store in memory that several applications of one process share, as processes share a file."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from itertools import count

import attrs
import trio

from trimcp.store.shared import (
    MOST_LETTERS,
    AppendEvent,
    DropEvents,
    EndSession,
    KeptSession,
    Letter,
    SaveSession,
    SharedStore,
    Write,
)


@attrs.define(eq=False)
class MemoryHub:
    """What the stores share."""

    sessions: dict[str, KeptSession] = attrs.field(factory=dict)
    until: dict[str, float] = attrs.field(factory=dict)  # of sessions, on Trio's clock
    events: dict[tuple[str, int], dict[int, bytes]] = attrs.field(factory=dict)
    agreed: dict[str, bytes] = attrs.field(factory=dict)
    leased: dict[str, MemoryStore] = attrs.field(factory=dict)  # those whose lease is not over
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
            case DropEvents(seq=None):
                hub.events.pop((session, write.stream), None)
            case DropEvents():
                hub.events.get((session, write.stream), {}).pop(write.seq, None)
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

    async def gone(self, name: str) -> bool:
        await self._work()
        return name not in self.hub.leased
