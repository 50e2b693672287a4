"""All contexts of one run, by owner and id: making and finding them, their bounds together, and their end."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import attrs
import trio

from trimcp.agent_tools.callers import Owner
from trimcp.agent_tools.contexts.actor import ContextActor, ContextsShared
from trimcp.agent_tools.contexts.history import ToolHistory
from trimcp.agent_tools.contexts.limits import ContextLimits, refuse_server_members
from trimcp.agent_tools.contexts.merging import EMPTY_OBJECT, MAX_DEPTH, StateBounds, StateSize, patched, size_of
from trimcp.agent_tools.contexts.saving import Saver
from trimcp.agent_tools.contexts.shares import ContextShare, ShareKey, share_of
from trimcp.agent_tools.contexts.state import StatesShared, memory_of
from trimcp.agent_tools.contexts.stores import ContextKey, ContextStore, KeptContext
from trimcp.agent_tools.messages import errors
from trimcp.budget.accounts import Budget
from trimcp.security import security_event
from trimcp.session.agent_context import ContextEvent
from trimcp.support.cleaning import log_crash
from trimcp.support.nurseries import open_service_nursery
from trimcp.support.values import valued
from trimcp.transports.http.state.deadlines import DeadlineQueue

log: logging.Logger = logging.getLogger("trimcp.agent_tools")

_EACH: Final = 2_048  # bytes of memory that an idle context takes beside its state and history
_MINTED: Final = "ctx_"
_RANDOM: Final = 16  # bytes of a minted id
_MINTED_LENGTH: Final = len(_MINTED) + 22  # as text
_LONGEST_ID: Final = 256
_SWEEP: Final = 60.0  # seconds between two looks for contexts in the store that nobody used
_LAST_WRITE: Final = 30.0  # seconds for the store at the end
_READS: Final = 4  # contexts read from the store at once, each for another account
_LATER: Final = 60.0  # seconds after which an owner with too many contexts may try again


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


@attrs.define(eq=False, repr=False)
class _OwnerContexts:
    """The contexts of one owner, and how many more are ending."""

    actors: dict[str, ContextActor] = attrs.field(factory=dict)
    ending: int = 0


@attrs.define(eq=False, repr=False)
class _GoneId:
    """The id of a context that has ended, and why it did."""

    table: ContextTable
    key: ContextKey
    reason: str

    def timed_out(self) -> None:
        self.table._gone.pop(self.key, None)


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
        self._budget = budget
        self._bounds = StateBounds(limits.max_state, limits.max_depth, limits.max_members)
        self._saver = Saver(store)
        self._states = StatesShared(limits, self._bounds, store.durable, self._saver.save)
        self._shared = ContextsShared(limits, self._end)
        self._owners: dict[Owner, _OwnerContexts] = {}
        self._shares: dict[ShareKey, ContextShare] = {}  # by budget owner and agent
        self._count = 0
        self._stored: dict[Owner, int] = {}  # contexts in the store that are not in memory
        self._loading: dict[ContextKey, trio.Event] = {}
        self._readers: dict[str, trio.Lock] = {}  # by account, which reads one at a time
        self._reads = trio.Semaphore(_READS)
        self._ending: dict[ContextKey, ContextActor] = {}
        self._gone: dict[ContextKey, _GoneId] = {}  # the oldest first
        self._gone_queue = DeadlineQueue(self._shared.deadlines, limits.gone)
        self._open = False
        self._unreadable = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ContextTable]:
        """Run while the block does. At its end all contexts end; a store that is durable keeps them.

        Raises:
            OSError: the store cannot be opened.
        """
        shared = self._shared
        async with self._store.opened():
            if self.durable:
                self._stored = {owner: count for owner, count in (await self._store.counts()).items() if count}
            async with open_service_nursery() as nursery:
                shared.nursery = nursery
                nursery.start_soon(shared.deadlines.run)
                if self.durable:
                    nursery.start_soon(self._saver.run)
                    nursery.start_soon(self._sweep)
                self._open = True
                try:
                    yield self
                finally:
                    self._open = False
                    await self._end_all()

    async def _end_all(self) -> None:
        for contexts in list(self._owners.values()):
            for actor in list(contexts.actors.values()):
                self._end(actor, "the service is shutting down", keep=self.durable)
        with trio.CancelScope(shield=True):  # each of these is bounded
            while self._ending:
                await next(iter(self._ending.values())).wait_over()
            if self.durable:
                await self._saver.close(_LAST_WRITE)
        self._gone.clear()
        self._stored.clear()

    # Making and finding

    def get(self, owner: Owner, id: str) -> ContextActor | None:
        """Return a context in memory, which pushes its idle deadline on; None if it has ended or is not in memory."""
        contexts = self._owners.get(owner)
        actor = None if contexts is None else contexts.actors.get(id)
        if actor is not None:
            actor.used()
        return actor

    def _find(self, owner: Owner, id: str) -> ContextActor | None:
        contexts = self._owners.get(owner)
        return None if contexts is None else contexts.actors.get(id)

    async def find(self, owner: Owner, id: str, *, address: str | None = None) -> ContextActor:
        """Return a context.

        Args:
            owner: whose it is.
            id: its id.
            address: of whoever looks for it, as for `create`.

        Raises:
            UnknownContext: this owner has none with this id.
            ContextGone: it has ended.
            AgentToolsError: the store failed.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        actor = self.get(owner, id) or await self._seek(owner, id, address)
        if actor is None:
            raise errors.UnknownContext("there is no such context")
        return actor

    async def find_or_make(
        self, owner: Owner, id: str, *, permissions: Sequence[str] = (), address: str | None = None
    ) -> ContextActor:
        """Return a context; make it if the agent chose its id and nobody made it yet.

        Args:
            owner: whose it is.
            id: its id.
            permissions: that member of a new context's state.
            address: as for `create`.

        Raises:
            UnknownContext: the id is one that only the service gives out.
            ContextGone: it has ended.
            MalformedMessage: it is no id.
            TooMuch: there are too many contexts.
            AgentToolsError: the store failed.
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
            id = _MINTED + secrets.token_urlsafe(_RANDOM)
        elif is_minted(checked_id(id)):
            raise errors.MalformedMessage(f"ids that begin with {_MINTED} are given by the service")
        else:
            while (ending := self._ending.get((owner, id))) is not None:
                await ending.wait_over()
            self._forget_gone((owner, id))
            if (self._find(owner, id) or await self._seek(owner, id, address)) is not None:
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
        key = (owner, id)
        while True:
            actor = self._find(owner, id)
            if actor is not None:
                return actor
            if not self._open:
                raise errors.draining()
            if key in self._gone or key in self._ending:
                raise errors.context_gone(self._why_gone(key))
            loading = self._loading.get(key)
            if loading is not None:
                await loading.wait()
                continue
            if not self._stored.get(owner) or not _is_id(id):
                return None
            return await self._load(owner, id, share_of(owner, address)[0])

    @asynccontextmanager
    async def _reading(self, account: str) -> AsyncIterator[None]:
        """Let the block read from the store once it is this account's turn: it reads one thing at a time.

        Raises:
            AgentToolsError: the block raised something else, which is logged once, as failed writes are.
        """
        turns = self._readers.get(account)
        if turns is None:
            turns = self._readers[account] = trio.Lock()
        try:
            async with turns, self._reads:
                if not self._open:
                    raise errors.draining()
                try:
                    yield
                except Exception as error:  # whatever the store raises
                    if not self._unreadable:
                        self._unreadable = True
                        log_crash(log, error, "the store of contexts cannot be read")
                    raise errors.AgentToolsError("the service could not read the context") from error
                self._unreadable = False
        finally:
            if not turns.locked():
                self._readers.pop(account, None)

    async def _load(self, owner: Owner, id: str, account: str) -> ContextActor | None:
        key = (owner, id)
        event = self._loading[key] = trio.Event()
        try:
            async with self._reading(account):
                kept = await self._store.load(owner, id)
            if kept is None or min(kept.until, kept.ends) <= time.time():
                return None
            return self._revive(kept)
        finally:
            del self._loading[key]
            event.set()

    def _revive(self, kept: KeptContext) -> ContextActor:
        """Make an actor of what the store had."""
        if not self._open:
            raise errors.draining()
        state = dict(kept.state)
        # Larger bounds than those of now may have held when it was written: it is kept, and may only shrink.
        size = size_of(state, StateBounds(self._bounds.size * 64, MAX_DEPTH, self._bounds.members * 64))
        history = ToolHistory(kept.history) if kept.history else None
        ends = trio.current_time() + kept.ends - time.time()
        share = share_of(kept.owner, None)
        actor = self._add(kept.owner, kept.id, state, size, share, ends, kept.created, kept.version, history)
        actor.used()  # by whoever looks for it now, and perhaps before
        left = self._stored.get(kept.owner, 0) - 1
        if left > 0:
            self._stored[kept.owner] = left
        else:
            self._stored.pop(kept.owner, None)
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
        if not self._open:
            raise errors.draining()
        if self._find(owner, id) is not None:
            raise errors.NameTaken("there is a context with this id")
        if ttl is not None and (not ttl > 0):
            raise errors.MalformedMessage("`ttl` is a number of seconds greater than 0")
        share = share_of(owner, address)
        self._check_room(owner, share)
        first: dict[str, Any] = {}
        size = EMPTY_OBJECT
        if state:
            refuse_server_members(state)
        patch: dict[str, Any] = dict(state or {})
        if permissions:
            patch["permissions"] = list(permissions)
        if session is not None:
            patch["session_id"] = session
        if patch:
            first, size, _ = patched(first, size, patch, self._bounds)
        lifetime = self.limits.lifetime if ttl is None else min(ttl, self.limits.lifetime)
        actor = self._add(owner, id, first, size, share, trio.current_time() + lifetime, time.time(), 0, None)
        if self.durable:
            self._saver.save(actor)
        return actor

    def _check_room(self, owner: Owner, key: ShareKey) -> None:
        limits, share = self.limits, self._shares.get(key)
        # Of what a store kept of callers without a principal nobody knows the addresses.
        own = (0 if share is None else share.live) + (self._stored.get(owner, 0) if owner[0] else 0)
        if own >= limits.max_per_owner:
            raise errors.TooMuch(f"you may have {limits.max_per_owner:,} contexts", retry_after=_LATER)
        if self._count + sum(self._stored.values()) < limits.max_contexts:
            return
        found = self._shared.shares.make_way(key[0], "context")
        if found is None:
            security_event("flood_refused", what="context", owner=key[0], why="contexts")
            raise errors.TooMuch("there are too many contexts", retry_after=_LATER)
        self._end(found, "its place is needed: it was never used" if found.fresh else "its place is needed by others")

    def _add(
        self,
        owner: Owner,
        id: str,
        state: dict[str, Any],
        size: StateSize,
        key: ShareKey,
        ends: float,
        created: float,
        version: int,
        history: ToolHistory | None,
    ) -> ContextActor:
        share = self._shares.get(key)
        holding = self._budget.holding(key[0]) if share is None else share.holding
        memory = _EACH + memory_of(size) + (0 if history is None else history.held)
        if not holding.fits(memory):
            holding.refuse("context")
            if share is None:
                holding.close()
            raise errors.TooMuch("the server has no memory for another context", retry_after=_LATER)
        if share is None:
            share = self._shares[key] = ContextShare(key, holding)
        contexts = self._owners.get(owner)
        if contexts is None:
            contexts = self._owners[owner] = _OwnerContexts()
        actor = ContextActor(owner, id, self._states, share, state, size, ends, created, version, history, self._shared)
        actor.hold(memory)
        contexts.actors[id] = actor
        share.live += 1
        self._shared.shares.add(actor)
        self._count += 1
        return actor

    # Ending

    async def end_session(self, owner: Owner, session: str, reason: str, *, address: str | None = None) -> None:
        """End all contexts of an owner that belong to a session, those that only the store has too, and wait for that.

        Raises:
            UnknownContext: there is none.
            AgentToolsError: the store failed.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._stored.get(owner):
            await self._load_session(owner, session, address)
        contexts = self._owners.get(owner)
        found = [] if contexts is None else [each for each in contexts.actors.values() if each.session == session]
        if not found:
            raise errors.UnknownContext("there is no context of such a session")
        for actor in found:
            self._end(actor, reason)
        for actor in found:
            await actor.wait_over()

    async def _load_session(self, owner: Owner, session: str, address: str | None) -> None:
        """Load the contexts of a session that only the store has."""
        account = share_of(owner, address)[0]
        async with self._reading(account):
            ids = await self._store.ids(owner)
        for id in ids:
            if self._find(owner, id) is None:
                async with self._reading(account):
                    kept = await self._store.load(owner, id)
                if kept is not None and kept.state.get("session_id", id) == session:
                    with suppress(errors.ContextGone):  # it has ended, and the store has yet to forget it
                        await self._seek(owner, id, address)

    def _end(self, actor: ContextActor, reason: str, *, keep: bool = False) -> None:
        """End a context, in memory only with `keep`; no effect if it has ended."""
        if actor.ended is not None:
            return
        nursery, contexts, key = self._shared.nursery, self._owners[actor.owner], actor.key
        assert nursery is not None
        del contexts.actors[actor.id]
        self._count -= 1
        self._ending[key] = actor
        contexts.ending += 1
        actor.share.live -= 1
        actor.share.ending += 1
        self._shared.shares.remove(actor)
        if keep:
            actor.stop(reason, None)
        else:
            self._remember_gone(key, reason)
            actor.stop(reason, ContextEvent("destroyed", actor.id, actor.version, reason=reason))
        nursery.start_soon(self._finish, actor, contexts, keep)

    async def _finish(self, actor: ContextActor, contexts: _OwnerContexts, keep: bool) -> None:
        try:
            await actor.unwind(self.limits.cleanup)
            if self.durable and not keep:
                deleted = self._saver.delete(actor, actor.key)
                with trio.move_on_after(_LAST_WRITE, shield=True):  # or it would come back at the next start
                    await deleted.wait()
        finally:  # an interrupt ends a clean-up, too, and somebody waits
            del self._ending[actor.key]
            actor.forget()
            contexts.ending -= 1
            if not contexts.actors and not contexts.ending:
                del self._owners[actor.owner]
            share = actor.share
            share.ending -= 1
            if not share.live and not share.ending:
                del self._shares[share.key]
                share.holding.close()

    def _remember_gone(self, key: ContextKey, reason: str) -> None:
        limits = self.limits
        if not limits.gone or not limits.max_gone:
            return
        self._forget_gone(key)
        while len(self._gone) >= limits.max_gone:
            self._forget_gone(next(iter(self._gone)))
        gone = self._gone[key] = _GoneId(self, key, reason)
        self._gone_queue.add(gone)

    def _forget_gone(self, key: ContextKey) -> None:
        gone = self._gone.pop(key, None)
        if gone is not None:
            self._gone_queue.remove(gone)

    def _why_gone(self, key: ContextKey) -> str | None:
        gone = self._gone.get(key)
        return self._ending[key].ended if gone is None else gone.reason

    async def _sweep(self) -> None:
        """Have the store forget what nobody used for too long."""
        while True:
            try:
                while ended := await self._store.expire(time.time()):
                    for owner, id in ended:
                        self._expired(owner, id)
            except Exception as error:  # whatever the store raises
                log_crash(log, error, "the store of contexts could not forget old ones")
            await trio.sleep(_SWEEP)

    def _expired(self, owner: Owner, id: str) -> None:
        actor = self._find(owner, id)
        if actor is not None:  # used again just now
            self._saver.save(actor)
        elif left := self._stored.get(owner, 0):
            self._stored[owner] = left - 1
            if left == 1:
                del self._stored[owner]

    def statistics(self) -> ContextStatistics:
        """Return a snapshot. It takes a fraction of a microsecond per context."""
        actors = [actor for contexts in self._owners.values() for actor in contexts.actors.values()]
        return ContextStatistics(
            contexts=len(actors),
            stored=sum(self._stored.values()),
            owners=len(self._owners),
            calls=sum(len(actor.calls) for actor in actors),
            watchers=sum(actor.watchers for actor in actors),
            tasks=sum(actor.tasks for actor in actors),
            ending=len(self._ending),
            gone=len(self._gone),
            bytes=sum(share.holding.held for share in self._shares.values()),
            updates=self._states.updates,
            replaced=self._states.replaced,
            writes=self._saver.writes,
        )


def is_minted(id: str) -> bool:
    """Return whether an id has the form of those that the service gives out."""
    return len(id) == _MINTED_LENGTH and id.startswith(_MINTED)


def checked_id(id: str) -> str:
    """Return an id that an agent chose.

    Raises:
        MalformedMessage: it is empty, too long, or has characters that cannot be printed.
    """
    if not _is_id(id):
        raise errors.MalformedMessage(f"a context's id is 1 to {_LONGEST_ID} printable characters")
    return id


def _is_id(id: str) -> bool:
    return 0 < len(id) <= _LONGEST_ID and id.isprintable()
