"""What other processes make of contexts that are in memory here, over a store that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import attrs
import trio

from trimcp.agent_tools.contexts.actor import ContextActor
from trimcp.agent_tools.contexts.merging import MAX_DEPTH, StateBounds, StateSize, size_of
from trimcp.agent_tools.contexts.saving import UnloadedContexts
from trimcp.agent_tools.messages.errors import AgentToolsError
from trimcp.store.contexts import ContextKey, ContextStore, KeptContext, Owner

ENDED: str = "it was ended by another process"


def size_of_stored(kept: KeptContext, bounds: StateBounds) -> StateSize:
    """Return the size of a state that a store had.

    Larger bounds than those of now may have held when it was written: it is kept, and may only shrink.
    """
    return size_of(kept.state, StateBounds(bounds.size * 64, MAX_DEPTH, bounds.members * 64))


@attrs.define(eq=False)
class SharedContexts:
    """Takes over what other processes have changed, before a context is used and while it is watched."""

    _store: ContextStore
    _unloaded: UnloadedContexts
    _bounds: StateBounds
    _turn: trio.Lock  # with it nothing is being written
    _live: Iterable[ContextActor]
    _end: Callable[[ContextActor, str], object]  # ends one that the store does not have any more
    _find: Callable[[Owner, str], ContextActor | None]
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
            with suppress(AgentToolsError):  # logged; whoever needs a context tries again
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

    def _changed(self) -> Iterator[ContextActor]:
        if self._changes is None:
            yield from self._live
            return
        for key, stamp in self._changes.items():
            actor = self._find(*key)
            if actor is not None and stamp > actor.stamp:
                yield actor

    async def renew(self, actor: ContextActor) -> None:
        """Have a context become what the store has. Raises AgentToolsError: the store failed."""
        async with self._unloaded.reading():
            kept = await self._store.load(actor.owner, actor.id)
            size = None if kept is None else size_of_stored(kept, self._bounds)
        if kept is not None and size is not None and (kept.created == actor.created or not actor.stamp):
            actor.build_on(kept, size)
        elif actor.ended is not None:
            actor.note_failed()
        elif actor.stamp:
            self._end(actor, ENDED)
