"""A store of contexts in memory that takes its time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import trio

from trimcp.agent_tools import ContextStore, KeptContext
from trimcp.agent_tools.callers import Owner
from trimcp.store.contexts import ContextKey


@attrs.define(eq=False)
class SlowContexts(ContextStore):
    """Keeps contexts in memory; each write takes so many seconds."""

    seconds: float
    _rows: dict[ContextKey, KeptContext] = attrs.field(init=False, factory=dict)

    async def counts(self) -> Mapping[Owner, int]:
        return {}

    async def load(self, owner: Owner, id: str) -> KeptContext | None:
        return self._rows.get((owner, id))

    async def write(self, kept: Sequence[KeptContext], deleted: Sequence[ContextKey]) -> None:
        await trio.sleep(self.seconds)
        for one in kept:
            self._rows[one.key] = one
        for key in deleted:
            self._rows.pop(key, None)

    async def expire(self, now: float) -> Sequence[ContextKey]:
        return ()
