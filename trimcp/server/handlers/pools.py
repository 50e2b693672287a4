"""The quotas, threads and worker processes that the calls of one run share, each made when first used.

A request passes its session's quota, then its principal's, then that of its tool, resource, prompt or completion.
The order is fixed, so no two requests can wait for each other.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar, get_args

import attrs
import trio

from trimcp.session.context import Context, client_key
from trimcp.session.limits import Limits, Quota
from trimcp.support.slotted import slotted

# Most servers have neither quotas nor such tools, and do not load these modules.
if TYPE_CHECKING:
    from trimcp.server.handlers.shared_turns import TurnDesk
    from trimcp.session.incoming.turns import Turns, TurnStatistics
    from trimcp.workers.pool import WorkerPool

_T = TypeVar("_T")
_Handler: TypeAlias = Callable[[Any, Any], Awaitable[Any]]

Kind: TypeAlias = Literal["tool", "resource", "prompt", "completion"]

# The number of sessions or principals at which idle ones are first removed.
_MANY: Final = 1_024


@slotted
class Pools:
    """The quotas, threads and worker processes of one run."""

    limits: Limits  # the quotas of sessions and principals, and the default quotas
    # `max_threads`, `max_processes`: as in `Server`
    max_threads: int
    max_processes: int | None
    nursery: trio.Nursery  # runs the tasks of worker processes, which end with it
    # whether `limits` has a default quota for any of tools, resources, prompts and completions
    bounded: bool = attrs.field(init=False)
    # `threads`, `processes`: None until first used
    threads: Turns | None = attrs.field(init=False, default=None)
    processes: WorkerPool | None = attrs.field(init=False, default=None)
    # where several processes share the quotas of principals, and of what they call
    desk: TurnDesk | None = attrs.field(init=False, default=None)
    # the turns of each session, where sessions have a quota
    sessions: dict[Hashable, Turns] = attrs.field(init=False, factory=dict)
    _principals: dict[Hashable, Turns] = attrs.field(init=False, factory=dict)
    _named: dict[tuple[str, str], Turns] = attrs.field(init=False, factory=dict)
    _usual: dict[str, Quota] = attrs.field(init=False)
    _refused: int = attrs.field(init=False, default=0)
    _sweep_at: int = attrs.field(init=False, default=_MANY)

    def __attrs_post_init__(self) -> None:
        kinds: dict[str, Quota] = {kind: getattr(self.limits, kind) for kind in get_args(Kind)}
        self._usual = {kind: quota for kind, quota in kinds.items() if quota.bounds}
        self.bounded = bool(self._usual)

    def use_threads(self) -> Turns:
        if self.threads is None:
            from trimcp.session.incoming.turns import MOST_WAITING

            self.threads = _turns(Quota(running=self.max_threads, waiting=MOST_WAITING), "threads")
        return self.threads

    def use_processes(self) -> WorkerPool:
        if self.processes is None:
            from trimcp.workers.pool import WorkerPool, cores

            self.processes = WorkerPool(self.nursery, self.max_processes or cores())
        return self.processes

    # Quotas

    def shared(self, handler: _Handler) -> _Handler:
        """Return a handler that first waits for its session's turn, then its principal's, if they have quotas."""
        limits = self.limits
        if limits.principal.bounds:
            handler = self._queued(
                handler, self._principals, lambda ctx: ctx.principal, limits.principal, "this principal"
            )
        if limits.session.bounds:
            handler = self._queued(handler, self.sessions, client_key, limits.session, "this session")
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

    def in_turn(
        self,
        ctx: Context[Any],
        kind: Kind,
        name: str,
        own: Quota | None,
        function: Callable[..., Awaitable[_T]],
        *args: Any,
    ) -> Awaitable[_T]:
        """Return `function(self, ctx, *args)`; under a quota, an awaitable that first waits for a turn.

        Waiting raises as `Turns.acquire` does.

        `kind`, `name`: the tool, resource, prompt or completion that it uses.
        """
        quota = own
        if quota is None and self.bounded:
            quota = self._usual.get(kind)
        if quota is None:
            return function(self, ctx, *args)
        return self._wait_for_turn(ctx, (kind, name), quota, function, *args)

    async def _wait_for_turn(
        self, ctx: Context[Any], key: tuple[str, str], quota: Quota, function: Callable[..., Awaitable[_T]], *args: Any
    ) -> _T:
        turns = self._named.get(key)
        if turns is None or turns.quota is not quota:
            turns = self._named[key] = self._shared_turns(quota, key[1], f"{key[0]} {key[1]}")
        async with _turn(ctx, turns):
            return await function(self, ctx, *args)

    def _kept(self, table: dict[Hashable, Turns], key: Hashable, quota: Quota, name: str) -> Turns:
        turns = table.get(key)
        if turns is None:
            if len(table) >= self._sweep_at:
                for idle in [key for key, turns in table.items() if turns.idle]:
                    self._refused += table.pop(idle).refused
                self._sweep_at = max(_MANY, 2 * len(table))
            # A session that is an object is in one process only.
            turns = (
                _turns(quota, name) if not isinstance(key, str) else self._shared_turns(quota, name, f"{name} {key}")
            )
            table[key] = turns
        return turns

    def _shared_turns(self, quota: Quota, name: str, key: str) -> Turns:
        """Return the turns of a quota that holds for all processes, if there are others; `key` is theirs, too."""
        if self.desk is None:
            return _turns(quota, name)
        from trimcp.server.handlers.shared_turns import SharedTurns

        return SharedTurns(quota, name, desk=self.desk, key=key)

    def closed(self, session: Hashable) -> None:
        turns = self.sessions.pop(session, None)
        if turns is not None:
            self._refused += turns.refused

    # Statistics

    def quotas(self) -> Mapping[str, TurnStatistics]:
        """Return a snapshot of the quota of each tool, resource, prompt and completion used so far."""
        return {f"{kind} {name}": turns.statistics() for (kind, name), turns in sorted(self._named.items())}

    @property
    def refused(self) -> int:
        """Requests refused so far."""
        return self._refused + sum(used.refused for used in self._in_use())

    @property
    def waiting(self) -> int:
        """Requests now waiting for a turn."""
        return sum(used.waiting for used in self._in_use())

    def _in_use(self) -> list[Turns]:
        pools = self.threads, None if self.processes is None else self.processes.turns
        quotas = *self.sessions.values(), *self._principals.values(), *self._named.values()
        return [*quotas, *filter(None, pools)]


def _turns(quota: Quota, name: str) -> Turns:
    from trimcp.session.incoming.turns import Turns

    return Turns(quota, name)


@asynccontextmanager
async def _turn(ctx: Context[Any], turns: Turns) -> AsyncIterator[None]:
    _, job = ctx.internals
    began_waiting = trio.current_time()
    since = await turns.acquire(client_key(ctx), ctx.deadline)
    job.with_extras().waited += since - began_waiting
    try:
        yield
    finally:
        turns.give_back(since)
