"""The quotas that a request of one run has to pass, and the turns of each.

A request passes its session's quota, then its principal's, then that of what it asks for: always in this order, so
that no two requests wait for each other. Where nothing is bounded there is no gate.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, Literal, TypeAlias, TypeVar, get_args

import attrs
import trio

from trimcp.session.context import Context, client_key
from trimcp.session.limits import Limits, Quota
from trimcp.session.turns import Turns, TurnStatistics

__all__ = ["Gate"]

_T = TypeVar("_T")
_Handler: TypeAlias = Callable[[Any, Any], Awaitable[Any]]

Kind: TypeAlias = Literal["tool", "resource", "prompt", "completion"]
_KINDS: Final = get_args(Kind)

# So many sessions or principals are kept before idle ones are looked for and forgotten.
_MANY: Final = 1_024


def _principal(ctx: Context[Any]) -> str | None:
    return ctx.principal


@attrs.define(eq=False, repr=False)
class Gate:
    """The quotas of one run.

    Args:
        limits: the quotas of sessions, principals, and of what has none of its own.
    """

    limits: Limits
    _usual: dict[str, Quota] = attrs.field(init=False)
    _sessions: dict[Hashable, Turns] = attrs.field(init=False, factory=dict)
    _principals: dict[Hashable, Turns] = attrs.field(init=False, factory=dict)
    _named: dict[tuple[str, str], Turns] = attrs.field(init=False, factory=dict)
    _refused: int = attrs.field(init=False, default=0)
    _sweep_at: int = attrs.field(init=False, default=_MANY)

    def __attrs_post_init__(self) -> None:
        kinds: dict[str, Quota] = {kind: getattr(self.limits, kind) for kind in _KINDS}
        self._usual = {kind: quota for kind, quota in kinds.items() if quota.bounds}

    @property
    def refused(self) -> int:
        """Requests that were refused so far."""
        tables = (self._sessions, self._principals, self._named)
        return self._refused + sum(turns.refused for table in tables for turns in table.values())

    @property
    def waiting(self) -> int:
        """Requests that wait for a turn now."""
        tables = (self._sessions, self._principals, self._named)
        return sum(turns.waiting for table in tables for turns in table.values())

    def statistics(self) -> Mapping[str, TurnStatistics]:
        """Return a snapshot of the quota of each tool, resource, prompt and completion that was asked for."""
        return {f"{kind} {name}": turns.statistics() for (kind, name), turns in sorted(self._named.items())}

    def shared(self, handler: _Handler) -> _Handler:
        """Return a handler that first waits for its session's turn, then its principal's, where they are bounded."""
        limits = self.limits
        if limits.principal.bounds:
            handler = self._queued(handler, self._principals, _principal, limits.principal, "this principal")
        if limits.session.bounds:
            handler = self._queued(handler, self._sessions, client_key, limits.session, "this session")
        return handler

    def _queued(
        self,
        handler: _Handler,
        table: dict[Hashable, Turns],
        key_of: Callable[[Context[Any]], Hashable],
        quota: Quota,
        name: str,
    ) -> _Handler:
        async def call(ctx: Context[Any], params: Any) -> Any:
            key = key_of(ctx)
            if key is None:
                return await handler(ctx, params)
            async with _turn(ctx, self._kept(table, key, quota, name)):
                return await handler(ctx, params)

        return call

    async def pass_through(
        self,
        ctx: Context[Any],
        kind: Kind,
        name: str,
        own: Quota | None,
        function: Callable[..., Awaitable[_T]],
        *args: Any,
    ) -> _T:
        """Wait for a turn of what is asked for, then return `await function(*args)`. Also raises as `Turns.take` does.

        Args:
            ctx: the request's.
            kind, name: what it asks for.
            own: its own quota, or None for that of its kind.
            function, args: what to do then.
        """
        quota = self._usual.get(kind) if own is None else own
        if quota is None:
            return await function(*args)
        turns = self._named.get((kind, name))
        if turns is None or turns.quota is not quota:
            turns = self._named[(kind, name)] = Turns(quota, name)
        async with _turn(ctx, turns):
            return await function(*args)

    def _kept(self, table: dict[Hashable, Turns], key: Hashable, quota: Quota, name: str) -> Turns:
        turns = table.get(key)
        if turns is None:
            if len(table) >= self._sweep_at:
                self._forget_idle(table)
                self._sweep_at = max(_MANY, 2 * len(table))
            turns = table[key] = Turns(quota, name)
        return turns

    def _forget_idle(self, table: dict[Hashable, Turns]) -> None:
        for key in [key for key, turns in table.items() if turns.idle]:
            self._refused += table.pop(key).refused

    def closed(self, session: Hashable) -> None:
        """Forget a session."""
        turns = self._sessions.pop(session, None)
        if turns is not None:
            self._refused += turns.refused


@asynccontextmanager
async def _turn(ctx: Context[Any], turns: Turns) -> AsyncIterator[None]:
    _, job = ctx.internals
    began_waiting = trio.current_time()
    since = await turns.take(client_key(ctx), ctx.deadline)
    job.waited += since - began_waiting
    try:
        yield
    finally:
        turns.give_back(since)
