"""Writes what contexts have changed to a store, all that waits at once, and tells each context the outcome."""

from __future__ import annotations

import logging
from typing import Final

import attrs
import trio

from trimcp.agent_tools.contexts.state import StoredState
from trimcp.agent_tools.contexts.stores import ContextKey, ContextStore
from trimcp.support.cleaning import log_crash

log: logging.Logger = logging.getLogger("trimcp.agent_tools")

_AT_ONCE: Final = 16 * 1024 * 1024  # bytes of text from which the rest waits for the next write


@attrs.define(eq=False, repr=False)
class Saver:
    """One task that writes to a store; while it writes, what changes waits for the next write, most of it together."""

    _store: ContextStore
    writes: int = attrs.field(init=False, default=0)  # number of writes so far
    _changed: dict[StoredState, None] = attrs.field(init=False, factory=dict)
    _deleted: dict[ContextKey, trio.Event] = attrs.field(init=False, factory=dict)
    _wanted: bool = attrs.field(init=False, default=False)
    _closing: bool = attrs.field(init=False, default=False)
    _failing: bool = attrs.field(init=False, default=False)
    _waiting: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    # The last write outlives the block that ends; `close` bounds it.
    _scope: trio.CancelScope = attrs.field(init=False, factory=lambda: trio.CancelScope(shield=True))
    _done: trio.Event = attrs.field(init=False, factory=trio.Event)

    def save(self, context: StoredState) -> None:
        """Write a context's newest state soon."""
        if self._done.is_set():
            context.note_failed()
            return
        self._changed[context] = None
        self._want()

    def delete(self, context: StoredState, key: ContextKey) -> trio.Event:
        """Delete a context soon; the event is set once that was tried. If it failed, later writes try again."""
        self._changed.pop(context, None)
        event = self._deleted[key] = trio.Event()
        if self._done.is_set():
            event.set()
        self._want()
        return event

    def _want(self) -> None:
        self._wanted = True
        self._waiting.unpark_all()

    async def run(self) -> None:
        """Write until closed. Shielded from cancellation: `close` ends it."""
        try:
            with self._scope:
                while True:
                    while not self._wanted:
                        if self._closing:
                            return
                        await self._waiting.park()
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
        if self._changed or self._deleted:
            self._wanted = True
        self._waiting.unpark_all()
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
        self._wanted = False
        deleted, self._deleted = self._deleted, {}
        kept = [context.to_store() for context in changed]
        # A context that is made again under the id of one that was deleted: the new one takes its row.
        made_again = {one.key for one in kept}
        try:
            await self._store.write(kept, [key for key in deleted if key not in made_again])
        except BaseException as error:  # whatever the store raises, or the end
            for context in (*changed, *rest):
                if context.note_failed():
                    self._changed.setdefault(context)
                else:
                    self._changed.pop(context, None)
            for key, event in deleted.items():
                event.set()
                self._deleted.setdefault(key, event)
            if not isinstance(error, Exception):
                raise
            self._failed(error)
            return
        self.writes += 1
        self._wanted |= bool(rest)
        if self._failing:
            self._failing = False
            log.warning("the store of contexts works again")
        for context, one in zip(changed, kept, strict=True):
            context.note_stored(one)
        for event in deleted.values():
            event.set()

    def _failed(self, error: Exception) -> None:
        if not self._failing:  # logged once: a full disk fails every write, and the log is often on the same disk
            self._failing = True
            log_crash(log, error, "the store of contexts failed; updates fail until it works again")
