"""Reads contexts that only the store has: each once at a time, and for each account one at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Container
from contextlib import asynccontextmanager
from typing import Final

import trio

from trimcp.agent_tools.callers import Owner
from trimcp.agent_tools.contexts.stores import ContextKey, ContextStore, KeptContext
from trimcp.agent_tools.messages import errors
from trimcp.support.cleaning import log_crash

log: logging.Logger = logging.getLogger("trimcp.agent_tools")

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

    async def count(self) -> None:
        """Ask the store how many there are."""
        self.counts = {owner: count for owner, count in (await self._store.counts()).items() if count}

    def take(self, owner: Owner) -> None:
        """Note that one of an owner's is in memory now, or gone."""
        left = self.counts.get(owner, 0) - 1
        if left > 0:
            self.counts[owner] = left
        else:
            self.counts.pop(owner, None)

    @asynccontextmanager
    async def loaded(self, key: ContextKey, account: str) -> AsyncIterator[KeptContext | None]:
        """Read a context and yield it, or None if there is none or its time is over; others wait for the block.

        Raises:
            AgentToolsError: the store failed.
        """
        event = self.loading[key] = trio.Event()
        try:
            yield await self.read(*key, account)
        finally:
            del self.loading[key]
            event.set()

    async def read(self, owner: Owner, id: str, account: str) -> KeptContext | None:
        """Return a context as the store has it, or None if there is none or its time is over. Raises as `loaded`."""
        async with self._turn(account):
            kept = await self._store.load(owner, id)
        return None if kept is None or min(kept.until, kept.ends) <= time.time() else kept

    async def of_session(self, owner: Owner, session: str, account: str, known: Container[str]) -> list[str]:
        """Return the ids of an owner's contexts that belong to a session, but for those that are `known`.

        Raises as `loaded`.
        """
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
        """Let the block read from the store once it is this account's turn: it reads one thing at a time.

        Raises:
            AgentToolsError: the block raised something else, which is logged once, as failed writes are.
        """
        turns = self.readers.get(account)
        if turns is None:
            turns = self.readers[account] = trio.Lock()
        try:
            async with turns, self._reads:
                if not self.open:
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
                self.readers.pop(account, None)

    async def sweep(self, forgotten: Callable[[Owner, str], object]) -> None:
        """Have the store forget what nobody used for too long; call a function with each that it forgot."""
        while True:
            try:
                while ended := await self._store.expire(time.time()):
                    for owner, id in ended:
                        forgotten(owner, id)
            except Exception as error:  # whatever the store raises
                log_crash(log, error, "the store of contexts could not forget old ones")
            await trio.sleep(_SWEEP)
