"""All contexts of one run, by owner and id: making and finding them, their bounds together, and their end.

`LiveContexts` has those in memory: how many each owner may have, and which gives way to a newcomer's.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final

import attrs
import trio

from trimcp.agent_tools.contexts.actor import ContextActor
from trimcp.agent_tools.contexts.history import ToolHistory
from trimcp.agent_tools.contexts.merging import ANY_SIZE, EMPTY_OBJECT, StateSize, patched, size_of
from trimcp.agent_tools.contexts.saving import SharedContexts, StoreWriter, UnloadedContexts
from trimcp.agent_tools.contexts.state import (
    OF_CONTEXT,
    ContextLimits,
    ContextsShared,
    memory_of,
    refuse_server_members,
)
from trimcp.agent_tools.messages import errors
from trimcp.budget import Budget, MemoryAccount, owner_of
from trimcp.security import security_event
from trimcp.session.agent_context import ContextEvent
from trimcp.store.contexts import ContextKey, ContextStore, KeptContext, Owner
from trimcp.support.nurseries import open_service_nursery
from trimcp.support.slotted import valued

_MINTED: Final = "ctx_"
_RANDOM: Final = 16  # bytes of a minted id
_MINTED_LENGTH: Final = len(_MINTED) + 22  # as text
_LONGEST: Final = 256


def new_id() -> str:
    """Return an id that nobody can guess."""
    return _MINTED + secrets.token_urlsafe(_RANDOM)


def is_minted(id: str) -> bool:
    """Return whether an id has the form of those that the service gives out."""
    return len(id) == _MINTED_LENGTH and id.startswith(_MINTED)


def is_id(id: str) -> bool:
    """Return whether this can be an id."""
    return 0 < len(id) <= _LONGEST and id.isprintable()


def checked_id(id: str, *, new: bool = False) -> str:
    """Return an id that an agent chose. Raises errors.MalformedMessage, for a `new` one also if only we give it out."""
    if not is_id(id):
        raise errors.MalformedMessage(f"a context's id is 1 to {_LONGEST} printable characters")
    if new and is_minted(id):
        raise errors.MalformedMessage(f"ids that begin with {_MINTED} are given by the service")
    return id


def account_of(owner: Owner, address: str | None) -> str:
    """Return whose share a context counts into, as the budget names it: its principal's, else the address's."""
    return owner_of(owner[0] or None, address)


_LATER: Final = 60.0  # seconds after which an owner with too many contexts may try again


@attrs.define(eq=False, repr=False)
class LiveContexts(ContextsShared):
    """All contexts of one run that are in memory and have not ended; and the memory of those that are ending, too."""

    _budget: Budget = attrs.field(kw_only=True, alias="budget")
    by_owner: dict[Owner, dict[str, ContextActor]] = attrs.field(init=False, factory=dict)  # those of each, by id
    _holdings: dict[tuple[str, str], MemoryAccount] = attrs.field(init=False, factory=dict)  # by account and agent
    # why others have ended, and until when that is said, the oldest first; see `ended_ids`
    ended: dict[ContextKey, tuple[str, float]] = attrs.field(init=False, factory=dict)
    _count: int = attrs.field(init=False, default=0)

    def __iter__(self) -> Iterator[ContextActor]:
        return iter([actor for contexts in self.by_owner.values() for actor in contexts.values()])

    def find(self, owner: Owner, id: str) -> ContextActor | None:
        """Return a context, or None."""
        contexts = self.by_owner.get(owner)
        return None if contexts is None else contexts.get(id)

    def count_of(self, owner: Owner) -> int:
        """Return how many an owner has."""
        return len(self.by_owner.get(owner, ()))

    def make_room(self, owner: Owner, account: str, stored: Mapping[Owner, int]) -> ContextActor | None:
        """Return the context that has to end for a newcomer's, or None if there is room.

        `stored` says how many each owner has that are not in memory. Raises TooMuch if the owner has too many, or all
        have and none gives way.
        """
        most = self.limits.max_per_owner
        # Callers without a principal have a share by address. Of what a store kept of them nobody knows the addresses.
        own = self.count_of(owner) + stored.get(owner, 0) if owner[0] else self.shares.held(account)
        if own >= most:
            raise errors.TooMuch(f"you may have {most:,} contexts", retry_after=_LATER)
        if self._count + sum(stored.values()) < self.limits.max_contexts:
            return None
        found: ContextActor | None = self.shares.make_room(account, "context")
        if found is None:
            security_event("flood_refused", what="context", owner=account, why="contexts")
            raise errors.TooMuch("there are too many contexts", retry_after=_LATER)
        return found

    def add(self, kept: KeptContext, size: StateSize, account: str, ends: float) -> ContextActor:
        """Add a context, which ends then on Trio's clock. Raises TooMuch if there is no memory for it."""
        history = ToolHistory(kept.history)
        memory, key = OF_CONTEXT + memory_of(size) + history.held, (account, kept.owner[1])
        holding = self._holdings.get(key) or self._budget.holding(account)
        if not holding.fits(memory):
            holding.refuse("context")
            if key not in self._holdings:
                holding.close()
            raise errors.TooMuch("the server has no memory for another context", retry_after=_LATER)
        self._holdings[key] = holding
        contexts = self.by_owner.setdefault(kept.owner, {})
        owner = next((other.owner for other in contexts.values()), kept.owner)  # one object for all of them
        now = kept.version, dict(kept.state), size
        actor = ContextActor(owner, kept.id, self, holding, *now, ends, kept.created, history)
        actor.stamp = kept.stamp
        actor.weigh()
        contexts[kept.id] = actor
        self.shares.add(actor)
        self._count += 1
        return actor

    def remove(self, actor: ContextActor, reason: str | None) -> None:
        """Remove a context that is ending, with the reason that is given for that: its memory counts until `forget`."""
        if reason is not None and self.limits.gone:
            self.ended_ids()[actor.key] = reason, trio.current_time() + self.limits.gone
        contexts = self.by_owner[actor.owner]
        del contexts[actor.id]
        if not contexts:
            del self.by_owner[actor.owner]
        self._count -= 1
        self.shares.remove(actor)

    def ended_ids(self) -> dict[ContextKey, tuple[str, float]]:
        """Return why contexts have ended, for the time and up to the number that the limits say."""
        ended, now = self.ended, trio.current_time()
        while ended and (len(ended) > self.limits.max_gone or next(iter(ended.values()))[1] <= now):
            del ended[next(iter(ended))]
        return ended

    def forget(self, actor: ContextActor) -> None:
        """Count an ending context no more: it is gone."""
        actor.forget()
        holding = actor.holding
        if not holding.held:
            del self._holdings[holding.owner.name, actor.owner[1]]
            holding.close()

    @property
    def bytes(self) -> int:
        """Memory counted for all."""
        return sum(holding.held for holding in self._holdings.values())


_LAST_WRITE: Final = 30.0  # seconds for the store at the end


@attrs.frozen
@valued
class ContextStatistics:
    """Contexts of one run.

    Attributes:
        contexts: those in memory.
        stored: those that only the store has.
        owners: owners with a context.
        calls, watchers, tasks: those of all contexts together.
        ending: contexts whose calls, tasks and clean-ups are ending.
        gone: ended ids remembered.
        bytes: memory counted for them.
        updates: updates applied so far.
        replaced: updates that slow watchers got as part of a whole state, of channels closed so far.
        writes: writes of the store so far.
    """

    contexts: int
    stored: int
    owners: int
    calls: int
    watchers: int
    tasks: int
    ending: int
    gone: int
    bytes: int
    updates: int
    replaced: int
    writes: int


class ContextTable:
    """All contexts of one run of a server. They live while `running` is open, in a store perhaps longer.

    Args:
        limits: their limits.
        store: where they are kept.
        budget: counts their memory.

    Attributes:
        limits: as given.
        durable: whether the store outlives the process, so that an update has to wait for it.
    """

    def __init__(self, limits: ContextLimits, store: ContextStore, budget: Budget) -> None:
        self.limits: ContextLimits = limits
        self.durable: bool = store.durable
        self._store = store
        self._writer = StoreWriter(store, lambda context: self._elsewhere.renew(context))
        self._live = LiveContexts(limits, store, self._writer.save, self._end, budget=budget)
        self._unloaded = UnloadedContexts(store)
        end = partial(self._end, delete=False)
        self._elsewhere = SharedContexts(store, self._unloaded, self._writer.turn, self._live, end, self._live.find)
        self._ending: dict[ContextKey, ContextActor] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ContextTable]:
        """Run while the block does. At its end all contexts end; a store that is durable keeps them.

        Raises:
            OSError: the store cannot be opened.
        """
        live = self._live
        async with self._store.opened():
            if self.durable:
                await self._unloaded.count()
            async with open_service_nursery() as nursery:
                live.nursery = nursery
                nursery.start_soon(live.deadlines.run)
                if self.durable:
                    nursery.start_soon(self._writer.run)
                    nursery.start_soon(self._unloaded.sweep, self._forgotten, live.count_of)
                if self._store.shared:
                    nursery.start_soon(self._elsewhere.follow)
                self._unloaded.open = True
                try:
                    yield self
                finally:
                    self._unloaded.open = False
                    await self._end_all()

    async def _end_all(self) -> None:
        for actor in self._live:
            self._end(actor, errors.ENDS, keep=self.durable)
        with trio.CancelScope(shield=True):  # each of these is bounded
            while self._ending:
                await next(iter(self._ending.values())).wait_over()
            if self.durable:
                await self._writer.close(_LAST_WRITE)
        self._live.ended.clear()
        self._unloaded.counts.clear()

    # Making and finding

    def in_memory(self) -> Iterator[ContextActor]:
        """Return the contexts that are in memory and have not ended."""
        return iter(self._live)

    def get(self, owner: Owner, id: str, *, as_it_is: bool = False) -> ContextActor | None:
        """Return a context in memory, which pushes its idle deadline on; None if it has ended or is not in memory.

        None also if another process may have changed it, unless `as_it_is`.
        """
        if not as_it_is and self._elsewhere.behind:
            return None
        actor = self._live.find(owner, id)
        if actor is not None:
            actor.used()
        return actor

    async def find(self, owner: Owner, id: str, *, address: str | None = None) -> ContextActor:
        """Return a context. Raises UnknownContext, ContextGone, AgentToolsError if the store failed."""
        await trio.lowlevel.checkpoint_if_cancelled()
        actor = self.get(owner, id) or await self._seek(owner, id, address)
        if actor is None:
            raise errors.UnknownContext("there is no such context")
        return actor

    async def find_or_make(
        self, owner: Owner, id: str, *, permissions: Sequence[str] = (), address: str | None = None
    ) -> ContextActor:
        """Return a context; make it if the agent chose its id and nobody made it yet.

        Raises UnknownContext if the id is one that only the service gives out, and as `find` and `create`.
        """
        try:
            return await self.find(owner, id, address=address)
        except errors.UnknownContext:
            if is_minted(id):
                raise
        return self._make(owner, checked_id(id), permissions, address)

    async def create(
        self,
        owner: Owner,
        id: str | None = None,
        state: Mapping[str, Any] | None = None,
        ttl: float | None = None,
        *,
        session: str | None = None,
        permissions: Sequence[str] = (),
        address: str | None = None,
    ) -> ContextActor:
        """Make a context, and return it once the store has it.

        Args:
            owner: whose it is.
            id: as the agent chose it; None for a new one that nobody can guess.
            state: its first state; without members that are null.
            ttl: seconds after which it ends (greater than 0), if that is sooner than `ContextLimits.lifetime`.
            session: the session that it belongs to; None for one of its own, with the same id.
            permissions: that member of its state.
            address: of whoever makes it, in whose share it counts if the owner has no principal.

        Raises:
            NameTaken: the owner has a context with this id.
            MalformedMessage: the id, the state or `ttl` is none.
            TooLargeMessage: the state is beyond the limits.
            TooMuch: there are too many contexts, or there is no memory for it.
            AgentToolsError: the store failed.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if id is None:
            id = new_id()
        else:
            checked_id(id, new=True)
            while (ending := self._ending.get((owner, id))) is not None:
                await ending.wait_over()
            self._live.ended.pop((owner, id), None)
            if (self._live.find(owner, id) or await self._seek(owner, id, address)) is not None:
                raise errors.NameTaken("there is a context with this id")
        actor = self._make(owner, id, permissions, address, state, ttl, session)
        if self.durable:
            try:
                await actor.save()
            except errors.AgentToolsError as error:
                if not isinstance(error, errors.NameTaken):  # as which it is another process's
                    self._end(actor, "the service could not keep it")
                raise
        return actor

    async def _seek(self, owner: Owner, id: str, address: str | None) -> ContextActor | None:
        """Return a context, from the store if need be, or None. Raises ContextGone if it has ended."""
        key, unloaded = (owner, id), self._unloaded
        await self._elsewhere.catch_up()
        while True:
            actor = self._live.find(owner, id)
            if actor is not None:
                return actor
            if not unloaded.open:
                raise errors.draining()
            if (ending := self._ending.get(key)) is not None:
                raise errors.context_gone(ending.ended)
            if (gone := self._live.ended_ids().get(key)) is not None:
                raise errors.context_gone(gone[0])
            if key in unloaded.loading:
                await unloaded.loading[key].wait()
                continue
            if not unloaded.may_have(owner) or not is_id(id):
                return None
            event = unloaded.loading[key] = trio.Event()
            try:
                kept = await unloaded.read(owner, id, account_of(owner, address))
                return None if kept is None else self._revive(kept)
            finally:
                del unloaded.loading[key]
                event.set()

    def _revive(self, kept: KeptContext) -> ContextActor:
        """Make an actor of what the store had."""
        if not self._unloaded.open:
            raise errors.draining()
        ends = trio.current_time() + kept.ends - time.time()
        actor = self._live.add(kept, size_of(kept.state, ANY_SIZE), account_of(kept.owner, None), ends)
        actor.used()  # by whoever looks for it now, and perhaps before
        self._unloaded.count_out(kept.owner)
        self._writer.save(actor)  # the store learns that it is in use
        return actor

    def _make(
        self,
        owner: Owner,
        id: str,
        permissions: Sequence[str],
        address: str | None,
        state: Mapping[str, Any] | None = None,
        ttl: float | None = None,
        session: str | None = None,
    ) -> ContextActor:
        """Make a new context, after all checks. Nothing waits between these and the end of this."""
        if not self._unloaded.open:
            raise errors.draining()
        if self._live.find(owner, id) is not None:
            raise errors.NameTaken("there is a context with this id")
        if ttl is not None and (not ttl > 0):
            raise errors.MalformedMessage("`ttl` is a number of seconds greater than 0")
        account = account_of(owner, address)
        other = self._live.make_room(owner, account, self._unloaded.counts)
        if other is not None:
            why = "its place is needed: it was never used" if other.fresh else "its place is needed by others"
            self._end(other, why)
        if state:
            refuse_server_members(state)
        patch: dict[str, Any] = dict(state or {})
        if permissions:
            patch["permissions"] = list(permissions)
        if session is not None:
            patch["session_id"] = session
        first, size, _ = patched({}, EMPTY_OBJECT, patch, self._live.bounds)
        lifetime = self.limits.lifetime if ttl is None else min(ttl, self.limits.lifetime)
        now = time.time()
        new = KeptContext(owner, id, 0, first, (), now, now + lifetime, now + lifetime)
        actor = self._live.add(new, size, account, trio.current_time() + lifetime)
        if self.durable:
            self._writer.save(actor)
        return actor

    # Ending

    async def end_session(self, owner: Owner, session: str, reason: str, *, address: str | None = None) -> None:
        """End all contexts of an owner that belong to a session, those that only the store has too, and wait for that.

        Raises UnknownContext if there is none, AgentToolsError if the store failed.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._unloaded.may_have(owner):
            account, known = account_of(owner, address), self._live.by_owner.get(owner, {})
            for id in await self._unloaded.of_session(owner, session, account, known):
                with suppress(errors.ContextGone):  # it has ended, and the store has yet to forget it
                    await self._seek(owner, id, address)
        contexts = self._live.by_owner.get(owner, {})
        found = [each for each in contexts.values() if each.session == session]
        if not found:
            raise errors.UnknownContext("there is no context of such a session")
        for actor in found:
            self._end(actor, reason)
        for actor in found:
            await actor.wait_over()

    def _end(self, actor: ContextActor, reason: str, *, keep: bool = False, delete: bool = True) -> None:
        """End a context, in memory only with `keep`; without `delete` the store has it no more. At most once."""
        if actor.ended is not None:
            return
        nursery = self._live.nursery
        assert nursery is not None
        self._live.remove(actor, None if keep else reason)
        self._ending[actor.key] = actor
        nursery.start_soon(self._finish, actor, delete and not keep)
        last = None if keep else ContextEvent("destroyed", actor.id, actor.version, reason=reason)
        actor.stop(reason, last)

    async def _finish(self, actor: ContextActor, delete: bool) -> None:
        try:
            await actor.unwind(self.limits.cleanup)
            if self.durable and delete:
                deleted = self._writer.delete(actor, actor.key)
                with trio.move_on_after(_LAST_WRITE, shield=True):  # or it would come back at the next start
                    await deleted.wait()
        finally:  # an interrupt ends a clean-up, too, and somebody waits
            del self._ending[actor.key]
            self._live.forget(actor)

    def _forgotten(self, owner: Owner, id: str) -> None:
        """Note that the store has forgotten a context that nobody used."""
        actor = self._live.find(owner, id)
        if actor is not None:  # used again just now
            self._writer.save(actor)
        else:
            self._unloaded.count_out(owner)

    def statistics(self) -> ContextStatistics:
        """Return a snapshot. It takes a fraction of a microsecond per context."""
        actors = list(self._live)
        return ContextStatistics(
            contexts=len(actors),
            stored=sum(self._unloaded.counts.values()),
            owners=len(self._live.by_owner),
            calls=sum(len(actor.calls) for actor in actors),
            watchers=sum(actor.watchers for actor in actors),
            tasks=sum(actor.tasks for actor in actors),
            ending=len(self._ending),
            gone=len(self._live.ended_ids()),
            bytes=self._live.bytes,
            updates=self._live.updates,
            replaced=self._live.replaced,
            writes=self._writer.writes,
        )
