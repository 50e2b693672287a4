"""Stores that several tables of one process share, as processes share a file, and that do what a test says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import attrs
import trio

from trimcp.agent_tools.callers import Owner
from trimcp.store.contexts import ContextKey, ContextStore, KeptContext


@attrs.define(eq=False)
class Hub:
    """What the stores share."""

    rows: dict[ContextKey, KeptContext] = attrs.field(factory=dict)
    changes: list[ContextKey] = attrs.field(factory=list)  # a stamp is a place in it, counted from 1
    stores: list[SharedStore] = attrs.field(factory=list)

    def open(self) -> SharedStore:
        store = SharedStore(self)
        self.stores.append(store)
        return store


@attrs.define(eq=False)
class SharedStore(ContextStore):
    """The store of one table. `deaf` keeps it from being told; `broken` makes all it does fail."""

    hub: Hub
    shared: bool = True
    deaf: bool = False
    forgets: bool = False
    broken: Exception | None = None
    writes: int = 0
    _seen: int = 0
    _told: trio.Event = attrs.field(factory=trio.Event)

    async def _work(self) -> None:
        await trio.lowlevel.checkpoint()
        if self.broken is not None:
            raise self.broken

    def _note(self, key: ContextKey) -> int:
        self.hub.changes.append(key)
        for store in self.hub.stores:
            if store is not self:
                store._told.set()
        return len(self.hub.changes)

    async def counts(self) -> Mapping[Owner, int]:
        await self._work()
        owners = [owner for owner, _ in self.hub.rows]
        return {owner: owners.count(owner) for owner in owners}

    async def ids(self, owner: Owner) -> Sequence[str]:
        await self._work()
        return [id for each, id in self.hub.rows if each == owner]

    async def load(self, owner: Owner, id: str) -> KeptContext | None:
        await self._work()
        return self.hub.rows.get((owner, id))

    async def write(self, kept: Sequence[KeptContext], deleted: Sequence[ContextKey]) -> Mapping[ContextKey, int]:
        self.writes += 1
        await self._work()
        for key in deleted:
            self.hub.rows.pop(key, None)
            self._note(key)
        stamps = {}
        for one in kept:
            row = self.hub.rows.get(one.key)
            if (0 if row is None else row.stamp) == one.stamp:
                stamps[one.key] = self._note(one.key)
                self.hub.rows[one.key] = attrs.evolve(one, stamp=stamps[one.key])
        return stamps

    async def expire(self, now: float) -> Sequence[ContextKey]:
        await self._work()
        keys = [key for key, one in self.hub.rows.items() if one.until < now]
        for key in keys:
            del self.hub.rows[key]
            self._note(key)
        return keys

    @property
    def alone(self) -> bool:
        return len(self.hub.stores) == 1

    @property
    def told(self) -> bool:
        return self._told.is_set() and not self.deaf

    async def wait_told(self) -> None:
        await self._told.wait()
        if self.deaf:
            await trio.sleep_forever()

    async def changed(self) -> Mapping[ContextKey, int] | None:
        self._told = trio.Event()
        await self._work()
        before, self._seen = self._seen, len(self.hub.changes)
        if self.forgets:
            return None
        return {key: stamp for stamp, key in enumerate(self.hub.changes, 1) if stamp > before}


@attrs.define(eq=False)
class Between(ContextStore):
    """A shared store of the package, with the switches of `SharedStore`."""

    inner: ContextStore
    shared: bool = True
    deaf: bool = False
    forgets: bool = False
    broken: Exception | None = None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        async with self.inner.opened():
            yield

    def _work(self) -> None:
        if self.broken is not None:
            raise self.broken

    async def counts(self) -> Mapping[Owner, int]:
        self._work()
        return await self.inner.counts()

    async def ids(self, owner: Owner) -> Sequence[str]:
        self._work()
        return await self.inner.ids(owner)

    async def load(self, owner: Owner, id: str) -> KeptContext | None:
        self._work()
        return await self.inner.load(owner, id)

    async def write(
        self, kept: Sequence[KeptContext], deleted: Sequence[ContextKey]
    ) -> Mapping[ContextKey, int] | None:
        self._work()
        return await self.inner.write(kept, deleted)

    async def expire(self, now: float) -> Sequence[ContextKey]:
        self._work()
        return await self.inner.expire(now)

    @property
    def alone(self) -> bool:
        return self.inner.alone

    @property
    def told(self) -> bool:
        return self.inner.told and not self.deaf

    async def wait_told(self) -> None:
        await self.inner.wait_told()
        if self.deaf or self.broken is not None:
            await trio.sleep_forever()

    async def changed(self) -> Mapping[ContextKey, int] | None:
        self._work()
        found = await self.inner.changed()
        return None if self.forgets else found
