"""Where contexts are kept beside the memory of the process: the interface, and the store that keeps nothing.

A context that is in use is an actor in the memory of a process (`actor`). A store is asked for a context when it is not
in memory, is told each new state, and is told when one has ended. So a store needs no locks and no queries. Several
processes may use a store that is `shared`; over another one, an owner's requests have to reach one process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import attrs
import trio

Owner: TypeAlias = tuple[str, str]
"""Whose a context or a registered tool is: the principal's id ("" without one), and the agent's."""

ContextKey: TypeAlias = tuple[Owner, str]
"""A context's owner and id; an id alone names nothing, since two agents may use the same one."""


# Mutable only because attrs takes three times as long to create a frozen object. Do not change it.
@attrs.define(eq=False)
class KeptContext:
    """A context as a store keeps it. Times are seconds since 1970, since they outlast the process.

    Attributes:
        owner, id: whose it is, and its name.
        version: the number of updates that led to this state.
        state: the members that agents and handlers wrote. Never changed later, so another thread may read it.
        history: the tool history, the oldest first: one JSON object each, as text.
        created: when it was made.
        ends: when its lifetime is over, whatever happens.
        until: when the store may forget it: later than it can be in use without another save, at most `ends`.
        stamp: of the write that this state builds on, for a store that is shared; 0 for a new context.
    """

    owner: Owner
    id: str
    version: int
    state: Mapping[str, Any]
    history: Sequence[bytes]
    created: float
    ends: float
    until: float
    stamp: int = 0

    @property
    def key(self) -> ContextKey:
        return self.owner, self.id


class ContextStore(ABC):
    """Keeps contexts. What a store in Redis, a file or a database implements.

    One task calls `write` at a time, and nothing is written for a context that is being loaded. An update is answered
    after the `write` that contains it has returned: from then on the state has to survive whatever the store promises
    to survive (kill -9, for `SqliteContexts`). All states that wait are written together, so a slow store costs time,
    not throughput.

    Attributes:
        durable: whether contexts outlive the process. If not, the table calls none of the methods below `opened`.
        shared: whether several processes use it at once. Only then `write` compares stamps, and the methods below
            `expire` are called.
    """

    durable: bool = True
    shared: bool = False

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Keep the store open while the block runs. Raises OSError if it cannot be opened."""
        yield

    @abstractmethod
    async def counts(self) -> Mapping[Owner, int]:
        """Return how many contexts each owner has. Called once, after the store was opened."""

    async def ids(self, owner: Owner) -> Sequence[str]:
        """Return the ids of an owner's contexts. Asked when a session ends: those of it that are not in memory end too.

        A store that does not have this leaves them to their time.
        """
        return ()

    @abstractmethod
    async def load(self, owner: Owner, id: str) -> KeptContext | None:
        """Return a context as last written, or None if there is none. The caller looks at its times.

        Raises:
            Exception: it cannot be read. The request fails; the next one tries again.
        """

    @abstractmethod
    async def write(
        self, kept: Sequence[KeptContext], deleted: Sequence[ContextKey]
    ) -> Mapping[ContextKey, int] | None:
        """Keep these contexts, in place of what was kept of them, and forget those: all of it, or nothing.

        A key that is deleted may not be there. No context is in both.

        A store that is shared deletes first, and a context may be in both then. It keeps only contexts that have the
        stamp that they build on, gives each a new one, which is larger, and returns these.

        Raises:
            Exception: nothing was written. Updates that waited for it fail, and the states in memory go back to what
                was written before.
        """

    @abstractmethod
    async def expire(self, now: float) -> Sequence[ContextKey]:
        """Forget contexts whose `until` is before `now`, and return some of them: call again until none is left.

        A store that forgets by itself returns the keys that it forgot since the last call.
        """

    @property
    def alone(self) -> bool:
        """Whether no other process uses the store now."""
        return True

    @property
    def told(self) -> bool:
        """Whether another process may have changed something since `changed` was called last.

        It is true before the other process learns that its change is kept. Must not wait.
        """
        return False

    async def wait_told(self) -> None:
        """Wait until `told` is true."""
        await trio.sleep_forever()

    async def changed(self) -> Mapping[ContextKey, int] | None:
        """Return the contexts that were written or deleted since the last call, with their latest stamps.

        None if that is not known any more: it may be each of them. Changes of this process may be among them.
        """
        return {}


class MemoryContexts(ContextStore):
    """Keeps nothing: contexts live in the memory of the process, and end with it. The default."""

    durable = False

    async def counts(self) -> Mapping[Owner, int]:
        return {}

    async def load(self, owner: Owner, id: str) -> KeptContext | None:
        return None

    async def write(self, kept: Sequence[KeptContext], deleted: Sequence[ContextKey]) -> None:
        return

    async def expire(self, now: float) -> Sequence[ContextKey]:
        return ()
