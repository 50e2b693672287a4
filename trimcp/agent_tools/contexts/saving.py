"""What goes to the store of contexts, and what comes from it.

One task writes what contexts have changed, all that waits at once, and tells each context the outcome. Contexts that
only the store has are read each once at a time, and for each account one at a time. What other processes make of
those that are in memory here, over a store that they share, is taken over before they are used and while watched.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import attrs
import trio

from trimcp.agent_tools.contexts.merging import ANY_SIZE, size_of
from trimcp.agent_tools.contexts.state import StoredState
from trimcp.agent_tools.messages import errors
from trimcp.errors import ConnectionLost
from trimcp.store.contexts import ContextKey, ContextStore, KeptContext, Owner
from trimcp.support.cleaning import log_crash

log: logging.Logger = logging.getLogger("trimcp.agent_tools")

_AT_ONCE: Final = 16 * 1024 * 1024  # bytes of text from which the rest waits for the next write


@attrs.define(eq=False, repr=False)
class StoreWriter:
    """One task that writes to a store; while it writes, what changes waits for the next write, most of it together."""

    _store: ContextStore
    # called with a context that another process has changed since it was read here
    _renew: Callable[[Any], Awaitable[object]]
    # held from a write's beginning until its end is noted
    turn: trio.Lock = attrs.field(init=False, factory=trio.Lock)
    writes: int = attrs.field(init=False, default=0)  # number of writes so far
    _changed: dict[StoredState, None] = attrs.field(init=False, factory=dict)
    _deleted: dict[ContextKey, trio.Event] = attrs.field(init=False, factory=dict)
    _wanted: trio.Event = attrs.field(init=False, factory=trio.Event)  # a new one for each write
    _closing: bool = attrs.field(init=False, default=False)
    _failing: bool = attrs.field(init=False, default=False)
    # The last write outlives the block that ends; `close` bounds it.
    _scope: trio.CancelScope = attrs.field(init=False, factory=lambda: trio.CancelScope(shield=True))
    _done: trio.Event = attrs.field(init=False, factory=trio.Event)

    def save(self, context: StoredState) -> None:
        """Write a context's newest state soon."""
        if self._done.is_set():
            context.note_failed()
            return
        self._changed[context] = None
        self._wanted.set()

    def delete(self, context: StoredState, key: ContextKey) -> trio.Event:
        """Delete a context soon; the event is set once that was tried. If it failed, later writes try again."""
        self._changed.pop(context, None)
        event = self._deleted[key] = trio.Event()
        if self._done.is_set():
            event.set()
        self._wanted.set()
        return event

    async def run(self) -> None:
        """Write until closed. Shielded from cancellation: `close` ends it."""
        try:
            with self._scope:
                while self._wanted.is_set() or not self._closing:
                    await self._wanted.wait()
                    async with self.turn:
                        await self._write()
        finally:
            self._done.set()
            for context in self._changed:
                context.note_failed()
            for event in self._deleted.values():
                event.set()

    async def close(self, seconds: float) -> None:
        """Write what waits, for at most so many seconds, and end the task."""
        self._closing = True
        self._wanted.set()
        with trio.move_on_after(seconds, shield=True):  # what was answered is kept, also when all is cancelled
            await self._done.wait()
        self._scope.cancel(reason="the store takes too long")

    async def _write(self) -> None:
        changed, size = [], 0
        while self._changed and size < _AT_ONCE:
            context = next(iter(self._changed))
            del self._changed[context]
            changed.append(context)
            size += context.text_size
        rest = list(self._changed)  # with the next write
        self._wanted = trio.Event()
        deleted, self._deleted = self._deleted, {}
        if not (changed or deleted):
            return
        kept = [context.to_store() for context in changed]
        recorded = [context.recorded for context in changed]
        # A context that is made again under the id of one that was deleted: the new one takes its row.
        made_again = {one.key for one in kept}
        stamps: Mapping[ContextKey, int] = dict.fromkeys(made_again, 0)
        try:
            if self._store.shared:
                stamps = await self._store.write(kept, list(deleted)) or {}
            else:
                await self._store.write(kept, [key for key in deleted if key not in made_again])
        except BaseException as error:  # whatever the store raises, or the end
            unsure = isinstance(error, ConnectionLost) and not error.nothing_sent
            for contexts, sent in ((changed, unsure), (rest, False)):
                for context in contexts:
                    if context.note_failed(sent):
                        self._changed.setdefault(context)
                    else:
                        self._changed.pop(context, None)
            for key, event in deleted.items():
                event.set()
                self._deleted.setdefault(key, event)
            if not isinstance(error, Exception):
                raise
            if not self._failing:  # logged once: a full disk fails every write, and the log is often on the same disk
                self._failing = True
                log_crash(log, error, "the store of contexts failed; updates fail until it works again")
            return
        self.writes += 1
        if rest:
            self._wanted.set()
        if self._failing:
            self._failing = False
            log.warning("the store of contexts works again")
        for event in deleted.values():
            event.set()
        changed_elsewhere = []
        for context, one, calls in zip(changed, kept, recorded, strict=True):
            stamp = stamps.get(one.key)
            if stamp is not None:
                context.note_stored(one, stamp, calls)
            else:
                changed_elsewhere.append(context)
                self.save(context)
        for context in changed_elsewhere:
            try:
                await self._renew(context)
            except errors.AgentToolsError:  # the store cannot be read
                context.note_failed()
            if context.ended is not None and not context.waits:
                self._changed.pop(context, None)


_READS: Final = 4  # contexts read from the store at once, each for another account
_SWEEP: Final = 60.0  # seconds between two looks for contexts in the store that nobody used


class UnloadedContexts:
    """The contexts of a run that only its store has."""

    def __init__(self, store: ContextStore) -> None:
        self._store = store
        self.counts: dict[Owner, int] = {}  # how many each owner has
        self.open: bool = False  # whether contexts are read; False before the run and at its end
        # keys of contexts that are being loaded; whoever wants one waits for its event
        self.loading: dict[ContextKey, trio.Event] = {}
        self.readers: dict[str, trio.Lock] = {}  # accounts that read, or wait for their turn
        self._reads = trio.Semaphore(_READS)
        self._unreadable = False

    async def count(self, loaded: Callable[[Owner], int] = lambda owner: 0) -> None:
        """Ask the store how many there are; `loaded` returns how many of an owner's are in memory."""
        found = await self._store.counts()
        self.counts = {owner: count - loaded(owner) for owner, count in found.items() if count > loaded(owner)}

    def count_out(self, owner: Owner) -> None:
        """Note that one of an owner's is in memory now, or gone."""
        left = self.counts.get(owner, 0) - 1
        if left > 0:
            self.counts[owner] = left
        else:
            self.counts.pop(owner, None)

    async def read(self, owner: Owner, id: str, account: str) -> KeptContext | None:
        """Return a context as the store has it, or None if there is none or its time is over. Raises as `_turn`."""
        async with self._turn(account):
            kept = await self._store.load(owner, id)
        return None if kept is None or min(kept.until, kept.ends) <= time.time() else kept

    def may_have(self, owner: Owner) -> bool:
        """Whether the store may have contexts of an owner that are not in memory."""
        return self._store.shared or owner in self.counts

    async def of_session(self, owner: Owner, session: str, account: str, known: Container[str]) -> list[str]:
        """Return the ids of an owner's contexts that belong to a session, but for those `known`. Raises as `_turn`."""
        async with self._turn(account):
            ids = await self._store.ids(owner)
        found = []
        for id in ids:
            kept = None if id in known else await self.read(owner, id, account)
            if kept is not None and kept.state.get("session_id", id) == session:
                found.append(id)
        return found

    @asynccontextmanager
    async def _turn(self, account: str) -> AsyncIterator[None]:
        """Let the block read from the store in this account's turn: one thing at a time. Raises as `reading`."""
        turns = self.readers.get(account)
        if turns is None:
            turns = self.readers[account] = trio.Lock()
        try:
            async with turns, self._reads:
                if not self.open:
                    raise errors.draining()
                async with self.reading():
                    yield
        finally:
            if not turns.locked():
                self.readers.pop(account, None)

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Raise an AgentToolsError for whatever the block raises, which is logged once, as failed writes are."""
        try:
            yield
        except Exception as error:  # whatever the store raises
            if not self._unreadable:
                self._unreadable = True
                log_crash(log, error, "the store of contexts cannot be read")
            raise errors.AgentToolsError("the service could not read the context") from error
        self._unreadable = False

    async def sweep(self, forgotten: Callable[[Owner, str], object], loaded: Callable[[Owner], int]) -> None:
        """Have the store forget what nobody used for too long; call a function with each that it forgot."""
        while True:
            try:
                while ended := await self._store.expire(time.time()):
                    for owner, id in ended:
                        forgotten(owner, id)
                if self._store.shared:
                    await self.count(loaded)
            except Exception as error:  # whatever the store raises
                log_crash(log, error, "the store of contexts could not forget old ones")
            await trio.sleep(_SWEEP)


ENDED: Final = "it was ended by another process"


@attrs.define(eq=False)
class SharedContexts:
    """Takes over what other processes have changed, before a context is used and while it is watched."""

    _store: ContextStore
    _unloaded: UnloadedContexts
    _turn: trio.Lock  # with it nothing is being written
    _live: Iterable[StoredState]
    _end: Callable[[Any, str], object]  # ends one that the store does not have any more
    _find: Callable[[Owner, str], StoredState | None]
    _one_at_a_time: trio.Lock = attrs.field(init=False, factory=trio.Lock)
    _behind: bool = attrs.field(init=False, default=False)
    _asked: int = attrs.field(init=False, default=0)  # how often the store was asked for changes
    _known: int = attrs.field(init=False, default=0)  # the latest of these times whose answer was taken over
    # what the store said, and was not taken over yet; None for everything
    _changes: dict[ContextKey, int] | None = attrs.field(init=False, factory=dict)

    @property
    def behind(self) -> bool:
        """Whether other processes may have changed something that was not taken over yet."""
        return self._store.shared and (self._behind or self._store.told)

    async def follow(self) -> None:
        """Take over what other processes change, so that watchers see it."""
        while True:
            await self._store.wait_told()
            with suppress(errors.AgentToolsError):  # logged; whoever needs a context tries again
                await self.catch_up()

    async def catch_up(self) -> None:
        """Take over what other processes have changed so far. Raises AgentToolsError: the store failed."""
        if not self._store.shared:
            return
        asked = self._asked
        async with self._one_at_a_time:
            if self._known > asked or not self.behind:  # another task has asked since
                return
            self._behind = True
            self._asked += 1
            async with self._unloaded.reading():
                changed = await self._store.changed()
            if changed is None or self._changes is None:
                self._changes = None
            else:
                self._changes.update(changed)
            await self._take_over()
            self._behind = False
            self._known = self._asked

    async def _take_over(self) -> None:
        """Have the contexts become what the store has of which it said that they have changed."""
        for key in list(self._unloaded.loading if self._changes is None else self._changes):
            while (loading := self._unloaded.loading.get(key)) is not None:  # perhaps as it was before
                await loading.wait()
        if any(self._changed()):
            async with self._turn:
                for actor in list(self._changed()):  # but for what this process has written itself
                    await self.renew(actor)
        self._changes = {}

    def _changed(self) -> Iterator[StoredState]:
        if self._changes is None:
            yield from self._live
            return
        for key, stamp in self._changes.items():
            actor = self._find(*key)
            if actor is not None and stamp > actor.stamp:
                yield actor

    async def renew(self, actor: StoredState) -> None:
        """Have a context become what the store has. Raises AgentToolsError: the store failed."""
        async with self._unloaded.reading():
            kept = await self._store.load(actor.owner, actor.id)
            size = None if kept is None else size_of(kept.state, ANY_SIZE)
        if kept is not None and size is not None and (kept.created == actor.created or not actor.stamp):
            actor.build_on(kept, size)
        elif actor.ended is not None:
            actor.note_failed()
        elif actor.stamp:
            self._end(actor, ENDED)
