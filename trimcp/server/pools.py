"""What the calls of one run share and wait for: quotas, threads and worker processes, each made when first used."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import trio

from trimcp.session.context import Context
from trimcp.session.limits import Limits, Quota

# Most servers bound nothing and have no such tools, and load none of it.
if TYPE_CHECKING:
    from trimcp.server.gate import Gate, Kind
    from trimcp.session.turns import Turns
    from trimcp.workers.pool import WorkerPool

__all__ = ["Pools"]

_T = TypeVar("_T")


@attrs.define(eq=False, repr=False)
class Pools:
    """The quotas, threads and worker processes of one run.

    Args:
        limits: the quotas of sessions, principals, and of what has none of its own.
        max_threads, max_processes: as in `Server`.
        nursery: where worker processes are looked after; they end with it.

    Attributes:
        bounded: whether tools, resources, prompts and completions without a quota of their own may have one.
        gate, threads, processes: None until first used.
    """

    limits: Limits
    max_threads: int
    max_processes: int | None
    nursery: trio.Nursery
    bounded: bool = attrs.field(init=False)
    gate: Gate | None = attrs.field(init=False, default=None)
    threads: Turns | None = attrs.field(init=False, default=None)
    processes: WorkerPool | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        limits = self.limits
        self.bounded = any(quota.bounds for quota in (limits.tool, limits.resource, limits.prompt, limits.completion))

    def use_gate(self) -> Gate:
        """Return the quotas of requests."""
        if self.gate is None:
            from trimcp.server.gate import Gate

            self.gate = Gate(self.limits)
        return self.gate

    def use_threads(self) -> Turns:
        """Return the turns of sync handlers in threads."""
        if self.threads is None:
            from trimcp.session.turns import MOST_WAITING, Turns

            self.threads = Turns(Quota(running=self.max_threads, waiting=MOST_WAITING), "threads")
        return self.threads

    def use_processes(self) -> WorkerPool:
        """Return the worker processes."""
        if self.processes is None:
            from trimcp.workers.pool import WorkerPool, cores

            self.processes = WorkerPool(self.nursery, self.max_processes or cores())
        return self.processes

    def in_turn(
        self,
        ctx: Context[Any],
        kind: Kind,
        name: str,
        own: Quota | None,
        function: Callable[..., Awaitable[_T]],
        *args: Any,
    ) -> Awaitable[_T]:
        """Return `function(self, ctx, *args)`, or where there is a quota what first waits for a turn.

        The arguments, and what waiting raises, are those of `Gate.pass_through`.
        """
        if own is None and not self.bounded:
            return function(self, ctx, *args)
        return self.use_gate().pass_through(ctx, kind, name, own, function, self, ctx, *args)
