"""Worker tasks. Each runs jobs one after another inside a cancel scope that it reuses.

A job that never waits needs neither a task nor a scope of its own, so a task that has ended one takes the next; the
scope is renewed once it was cancelled. A job that does wait delays nobody: a task that takes one while others are left
starts another task first. When there is nothing to do one task stays and the rest end. So does a task whose job left
something behind that the next one would meet: a changed context variable, or a cancel scope that is still open.
"""

from __future__ import annotations

import contextvars
from collections import deque
from typing import Final

import attrs
import trio

from trimcp.budget import LARGE
from trimcp.session.job import Job
from trimcp.session.scopes import innermost_scope

__all__ = ["Crew"]

# Jobs that one task runs in a row before it leaves the rest to the next one, so that other tasks run in between.
# Fewer would let a flood be read much faster than it is worked off, and what waits would be tasks and not bytes.
# A job with a large result counts as all of them, because making it takes as long as many small ones.
_TURN: Final = 256


@attrs.define(eq=False, repr=False)
class Crew:
    """Runs jobs in tasks of one nursery, for one session or for many.

    Args:
        nursery: where the jobs live; they end before it does.
    """

    nursery: trio.Nursery
    # While there are jobs a task is on its way to them, or at work without having waited yet.
    _jobs: deque[Job] = attrs.field(init=False, factory=deque)
    _idle: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    _coming: bool = attrs.field(init=False, default=False)
    _context: contextvars.Context = attrs.field(init=False, factory=contextvars.copy_context)

    def take(self, job: Job) -> None:
        """Let a worker task run a job, from the next turn of the loop on. Never waits."""
        self._jobs.append(job)
        if not self._coming:
            self._call()

    def _call(self) -> None:
        """Let one more task come to the jobs: the idle one, or a new one."""
        self._coming = True
        if self._idle:
            self._idle.unpark()
        else:
            # Whoever delivers may be a task of the peer's, in the same process; its context is none of the handler's.
            self._context.run(self.nursery.start_soon, self._work)

    async def _work(self) -> None:
        """Run jobs for as long as there are any, then wait for more, unless another task does already."""
        me = trio.lowlevel.current_task()
        context = contextvars.copy_context()
        while await self._work_in_scope(me, context):
            pass

    async def _work_in_scope(self, me: trio.lowlevel.Task, context: contextvars.Context) -> bool:
        """Run jobs within one cancel scope. Returns whether to go on with another one; else the task ends."""
        job: Job | None = None
        left_open = False
        taken = 0
        try:
            with trio.CancelScope() as scope:
                around = innermost_scope(me)
                self._coming = False
                while not scope.cancel_called:
                    if not self._jobs or taken >= _TURN:
                        taken = 0
                        if self._idle:
                            return False
                        me.name = "waiting for a job"
                        await self._idle.park()
                        self._coming = False
                        continue
                    job = self._jobs.popleft()
                    if self._jobs and not self._coming:
                        self._call()
                    me.name = job.request.verb.name
                    job.scope, job.task = scope, me
                    if job.reason is None:
                        left_open = await job.attempt(me, around)
                        if job.failure is not None:
                            break
                    ended, job = job, None
                    ended.end()
                    if _changed(context):
                        return False
                    reply = ended.reply
                    taken = _TURN if reply is not None and len(reply) >= LARGE else taken + 1
                    del ended, reply  # what a request held is not kept until the next one
        except BaseException:  # a scope around all of this was cancelled, or worse; the job under way ends all the same
            if not left_open:  # which Trio has noticed, too
                if job is not None:
                    job.end()
                raise
        if job is not None:  # its scope was cancelled, or it has failed
            left_open = await job.settle(me) or left_open
        return not left_open and not _changed(context)


def _changed(before: contextvars.Context) -> bool:
    """Return whether the current context differs from what it was."""
    try:
        return contextvars.copy_context() != before
    except Exception:  # values are compared, and theirs may not want to be
        return True
