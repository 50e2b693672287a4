"""The tasks that run jobs: a crew, of which each hand takes one job after another, within one cancel scope.

A job that never waits needs neither a task nor a scope of its own, so a hand that has ended one takes the next; its
scope is renewed once it was cancelled. A job that does wait delays nobody: a hand that takes one while others are left
calls another hand first. One stays when there is nothing to do, the rest go home. So does a hand whose job left
something behind that the next one would meet: a changed context variable, or a cancel scope that is still open.
"""

from __future__ import annotations

import contextvars
from collections import deque
from typing import TYPE_CHECKING, Final, TypeAlias

import attrs
import trio

if TYPE_CHECKING:
    from trimcp.session.job import Job
    from trimcp.session.runner import Runner
    from trimcp.session.session import Session

__all__ = ["Crew"]

# Jobs in a row after which a hand leaves the rest to the one it called, so that the loop gets its turn between them.
# Fewer would let a flood be read much faster than it is worked off, and what waits would be tasks and not bytes.
_TURN: Final = 256

_Order: TypeAlias = "tuple[Runner, Session, Job]"


@attrs.define(eq=False, repr=False)
class Crew:
    """Runs jobs as tasks of one nursery, for one session or for many.

    Args:
        nursery: where the jobs live; they end before it does.
    """

    nursery: trio.Nursery
    # While there are orders a hand is on its way to them, or at work without having waited yet.
    _orders: deque[_Order] = attrs.field(init=False, factory=deque)
    _idle: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    _coming: bool = attrs.field(init=False, default=False)
    _context: contextvars.Context = attrs.field(init=False, factory=contextvars.copy_context)

    def take(self, runner: Runner, session: Session, job: Job) -> None:
        """Let a hand run a job, from the next turn of the loop on. Never waits."""
        self._orders.append((runner, session, job))
        if not self._coming:
            self._call()

    def _call(self) -> None:
        """Let one more hand come to the orders: the idle one, or a new one."""
        self._coming = True
        if self._idle:
            self._idle.unpark()
        else:
            # Whoever delivers may be a task of the peer's, in the same process; its context is none of the handler's.
            self._context.run(self.nursery.start_soon, self._hand)

    async def _hand(self) -> None:
        """Run jobs for as long as there are any, then wait for more, unless another hand does already."""
        me = trio.lowlevel.current_task()
        context = contextvars.copy_context()
        while await self._shift(me, context):
            pass

    async def _shift(self, me: trio.lowlevel.Task, context: contextvars.Context) -> bool:
        """Run jobs within one cancel scope. Returns whether to go on with another one, else the hand goes home."""
        order: _Order | None = None
        left_open = False
        taken = 0
        try:
            with trio.CancelScope() as scope:
                around = _innermost_scope(me)
                self._coming = False
                while not scope.cancel_called:
                    if not self._orders or taken == _TURN:
                        taken = 0
                        if self._idle:
                            return False
                        me.name = "waiting for a job"
                        await self._idle.park()
                        self._coming = False
                        continue
                    order = runner, session, job = self._orders.popleft()
                    if self._orders and not self._coming:
                        self._call()
                    me.name = job.request.verb.name
                    job.scope, job.task = scope, me
                    if job.reason is None:
                        await runner.attempt(session, job)
                    left_open = _innermost_scope(me) is not around
                    if left_open:
                        runner.blame(session, job, RuntimeError("the handler left a cancel scope or a nursery open"))
                    order = None
                    runner.end(session, job)
                    runner.check(job)
                    if left_open or _changed(context):
                        return False
                    del runner, session, job  # what a request held is not kept until the next one
                    taken += 1
        except BaseException:  # a scope around all of this was cancelled, or worse; the job under way ends all the same
            if order is not None:
                runner, session, job = order
                runner.end(session, job)
            if left_open:  # which Trio has noticed, too
                return False
            raise
        if order is not None:  # its scope was cancelled
            runner, session, job = order
            await runner.settle(session, job)
        return True


def _innermost_scope(task: trio.lowlevel.Task) -> object:
    """Return what stands for the innermost cancel scope around what a task does. Trio has no public word for it."""
    return getattr(task, "_cancel_status", None)


def _changed(before: contextvars.Context) -> bool:
    """Return whether the current context differs from what it was."""
    try:
        return contextvars.copy_context() != before
    except Exception:  # values are compared, and theirs may not want to be
        return True
