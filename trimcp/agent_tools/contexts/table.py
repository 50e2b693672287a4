"""All contexts of one run, by owner and id: making and finding them, their bounds together, and their end."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import attrs
import trio

from trimcp.agent_tools.callers import Owner
from trimcp.agent_tools.contexts.actor import ContextActor
from trimcp.agent_tools.contexts.history import ToolHistory
from trimcp.agent_tools.contexts.live import EndedIds, LiveContexts, checked_id, is_id, is_minted, new_id
from trimcp.agent_tools.contexts.merging import MAX_DEPTH, StateBounds, size_of
from trimcp.agent_tools.contexts.saving import Saver, UnloadedContexts
from trimcp.agent_tools.contexts.state import ContextLimits, StatesShared, first_state, share_of
from trimcp.agent_tools.contexts.stores import ContextKey, ContextStore, KeptContext
from trimcp.agent_tools.messages import errors
from trimcp.budget import Budget
from trimcp.session.agent_context import ContextEvent
from trimcp.support.nurseries import open_service_nursery
from trimcp.support.values import valued

log: logging.Logger = logging.getLogger("trimcp.agent_tools")

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
        self._bounds = StateBounds(limits.max_state, limits.max_depth, limits.max_members)
        self._saver = Saver(store)
        self._states = StatesShared(limits, self._bounds, store.durable, self._saver.save)
        self._live = LiveContexts(self._states, budget, self._end)
        self._shared = self._live.shared
        self._unloaded = UnloadedContexts(store)
        self._ending: dict[ContextKey, ContextActor] = {}
        self._ended = EndedIds(limits, self._shared.deadlines)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ContextTable]:
        """Run while the block does. At its end all contexts end; a store that is durable keeps them.

        Raises:
            OSError: the store cannot be opened.
        """
        shared = self._shared
        async with self._store.opened():
            if self.durable:
                await self._unloaded.count()
            async with open_service_nursery() as nursery:
                shared.nursery = nursery
                nursery.start_soon(shared.deadlines.run)
                if self.durable:
                    nursery.start_soon(self._saver.run)
                    nursery.start_soon(self._unloaded.sweep, self._forgotten)
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
                await self._saver.close(_LAST_WRITE)
        self._ended.clear()
        self._unloaded.counts.clear()

    # Making and finding

    def get(self, owner: Owner, id: str) -> ContextActor | None:
        """Return a context in memory, which pushes its idle deadline on; None if it has ended or is not in memory."""
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
        await trio.lowlevel.checkpoint_if_cancelled()
        actor = self.get(owner, id) or await self._seek(owner, id, address)
        if actor is None:
            if is_minted(id):
                raise errors.UnknownContext("there is no such context")
            actor = self._make(owner, checked_id(id), None, None, None, permissions, address)
        return actor

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
            self._ended.forget((owner, id))
            if (self._live.find(owner, id) or await self._seek(owner, id, address)) is not None:
                raise errors.NameTaken("there is a context with this id")
        actor = self._make(owner, id, state, ttl, session, permissions, address)
        if self.durable:
            try:
                await actor.save()
            except errors.AgentToolsError:
                self._end(actor, "the service could not keep it")
                raise
        return actor

    async def _seek(self, owner: Owner, id: str, address: str | None) -> ContextActor | None:
        """Return a context, from the store if need be, or None. Raises ContextGone if it has ended."""
        key, unloaded = (owner, id), self._unloaded
        while True:
            actor = self._live.find(owner, id)
            if actor is not None:
                return actor
            if not unloaded.open:
                raise errors.draining()
            ending, reason = self._ending.get(key), self._ended.why(key)
            if ending is not None or reason is not None:
                raise errors.context_gone(reason if ending is None else ending.ended)
            if key in unloaded.loading:
                await unloaded.loading[key].wait()
                continue
            if not unloaded.counts.get(owner) or not is_id(id):
                return None
            async with unloaded.loaded(key, share_of(owner, address)[0]) as kept:
                return None if kept is None else self._revive(kept)

    def _revive(self, kept: KeptContext) -> ContextActor:
        """Make an actor of what the store had."""
        if not self._unloaded.open:
            raise errors.draining()
        state = dict(kept.state)
        # Larger bounds than those of now may have held when it was written: it is kept, and may only shrink.
        size = size_of(state, StateBounds(self._bounds.size * 64, MAX_DEPTH, self._bounds.members * 64))
        history = ToolHistory(kept.history) if kept.history else None
        ends = trio.current_time() + kept.ends - time.time()
        share = share_of(kept.owner, None)
        actor = self._live.add(kept.owner, kept.id, state, size, share, ends, kept.created, kept.version, history)
        actor.used()  # by whoever looks for it now, and perhaps before
        self._unloaded.take(kept.owner)
        self._saver.save(actor)  # the store learns that it is in use
        return actor

    def _make(
        self,
        owner: Owner,
        id: str,
        state: Mapping[str, Any] | None,
        ttl: float | None,
        session: str | None,
        permissions: Sequence[str],
        address: str | None,
    ) -> ContextActor:
        """Make a new context, after all checks. Nothing waits between these and the end of this."""
        if not self._unloaded.open:
            raise errors.draining()
        if self._live.find(owner, id) is not None:
            raise errors.NameTaken("there is a context with this id")
        if ttl is not None and (not ttl > 0):
            raise errors.MalformedMessage("`ttl` is a number of seconds greater than 0")
        share = share_of(owner, address)
        other = self._live.make_room(owner, share, self._unloaded.counts)
        if other is not None:
            why = "its place is needed: it was never used" if other.fresh else "its place is needed by others"
            self._end(other, why)
        first, size = first_state(state, session, permissions, self._bounds)
        lifetime = self.limits.lifetime if ttl is None else min(ttl, self.limits.lifetime)
        actor = self._live.add(owner, id, first, size, share, trio.current_time() + lifetime, time.time(), 0, None)
        if self.durable:
            self._saver.save(actor)
        return actor

    # Ending

    async def end_session(self, owner: Owner, session: str, reason: str, *, address: str | None = None) -> None:
        """End all contexts of an owner that belong to a session, those that only the store has too, and wait for that.

        Raises UnknownContext if there is none, AgentToolsError if the store failed.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._unloaded.counts.get(owner):
            account, known = share_of(owner, address)[0], self._live.by_owner.get(owner, {})
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

    def _end(self, actor: ContextActor, reason: str, *, keep: bool = False) -> None:
        """End a context, in memory only with `keep`; no effect if it has ended."""
        if actor.ended is not None:
            return
        nursery, key = self._shared.nursery, actor.key
        assert nursery is not None
        self._live.end(actor)
        self._ending[key] = actor
        if keep:
            actor.stop(reason, None)
        else:
            self._ended.add(key, reason)
            actor.stop(reason, ContextEvent("destroyed", actor.id, actor.version, reason=reason))
        nursery.start_soon(self._finish, actor, keep)

    async def _finish(self, actor: ContextActor, keep: bool) -> None:
        try:
            await actor.unwind(self.limits.cleanup)
            if self.durable and not keep:
                deleted = self._saver.delete(actor, actor.key)
                with trio.move_on_after(_LAST_WRITE, shield=True):  # or it would come back at the next start
                    await deleted.wait()
        finally:  # an interrupt ends a clean-up, too, and somebody waits
            del self._ending[actor.key]
            actor.forget()
            self._live.forget(actor)

    def _forgotten(self, owner: Owner, id: str) -> None:
        """Note that the store has forgotten a context that nobody used."""
        actor = self._live.find(owner, id)
        if actor is not None:  # used again just now
            self._saver.save(actor)
        else:
            self._unloaded.take(owner)

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
            gone=len(self._ended),
            bytes=self._live.bytes,
            updates=self._states.updates,
            replaced=self._states.replaced,
            writes=self._saver.writes,
        )
