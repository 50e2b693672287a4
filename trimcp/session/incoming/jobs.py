"""The peer's requests that run or wait, and the worker tasks that run them.

A request starts at once while a slot is free (`Jobs`). Otherwise it waits in the mailbox until a job ends. A worker
task (`HandlerTasks`) runs jobs one after another inside a cancel scope that it reuses.
"""

from __future__ import annotations

import contextvars
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import attrs
import trio

from trimcp.budget import STEP, MemoryCharge, TurnBound, results_per_turn
from trimcp.session.incoming.job import CancelReason, Job
from trimcp.session.limits import Limits
from trimcp.session.queues import LazyParkingLot, Mailbox
from trimcp.session.scopes import WaitingTasks
from trimcp.support.nurseries import innermost_scope, own_clock
from trimcp.support.slotted import slotted
from trimcp.wire.jsonrpc import RequestId

_RUNNING: Final = 4096  # bytes that a running request takes beside its text: its records, and a task once it waits
# Jobs that one task runs in a row before it leaves the rest to the next one, so that other tasks run in between.
# With fewer, a flood would be read much faster than it is processed, and would wait as tasks instead of bytes.
_TURN: Final = 256
_MOST_LOOKED: Final = 1_000  # members of a result whose size is estimated


@slotted
class HandlerTasks:
    """Worker tasks in one nursery that run the jobs of one or more sessions.

    A job that never waits needs no task and no scope of its own, so a task that has ended one takes the next. A job
    that waits delays no other: a task that takes a job while others are queued starts another task first. When no job
    is queued, one idle task stays and the rest end. A task also ends if its job changed a context variable or left a
    cancel scope open, which the next job would see.
    """

    nursery: trio.Nursery  # where the jobs run; they end before it does
    # While jobs are queued, one task is scheduled to take them, or runs and has not waited yet.
    _jobs: deque[Job] = attrs.field(init=False, factory=deque)
    _idle: WaitingTasks = attrs.field(init=False, factory=WaitingTasks)  # one task at most
    _coming: bool = attrs.field(init=False, default=False)
    _context: contextvars.Context = attrs.field(init=False, factory=contextvars.copy_context)
    # bounds the large results of a turn of the event loop, whether their handlers have waited or not
    results: TurnBound = attrs.field(init=False, factory=results_per_turn)
    now: Callable[[], float] = attrs.field(init=False, factory=own_clock)  # the time on Trio's clock

    def run_soon(self, job: Job) -> None:
        """Have a worker task run a job, from the next turn of the event loop on. Never blocks."""
        self._jobs.append(job)
        if not self._coming:
            self._call()

    def _call(self) -> None:
        """Schedule one more task for the queued jobs: the idle one, or a new one."""
        self._coming = True
        if self._idle.tasks:
            self._idle.wake()
        else:
            # The caller may be a task of the peer in the same process, whose context must not reach the handler.
            self._context.run(self.nursery.start_soon, self._work)

    async def _work(self) -> None:
        """Run jobs while any are queued, then wait for more, unless another task waits already."""
        me = trio.lowlevel.current_task()
        context = contextvars.copy_context()
        self._coming = False  # here, not in each scope: others may be coming when this task has unwound
        self.results.refill()
        while await self._work_in_scope(me, context):
            pass

    async def _work_in_scope(self, me: trio.lowlevel.Task, context: contextvars.Context) -> bool:
        """Run jobs within one cancel scope. Returns whether this task may run more; else it must end."""
        job: Job | None = None
        left_open = cancelled = False
        taken = 0
        try:
            with trio.CancelScope() as scope:
                around = innermost_scope(me)
                while not cancelled:
                    if not self._jobs or taken >= _TURN or self.results.left <= 0:
                        taken = 0
                        if self._jobs and not self._coming:
                            self._call()
                        if self._idle.tasks:
                            return False
                        me.name = "waiting for a job"
                        await self._idle.wait()
                        self._coming = False
                        self.results.refill()
                        continue
                    job = self._jobs.popleft()
                    if self._jobs and not self._coming:
                        self._call()
                    me.name = job.request.method.name
                    job.scope, job.task = scope, me
                    if job.cancelled is None:
                        left_open = await job.attempt(me, around)
                        if job.failure is not None:
                            break
                    ended, job = job, None
                    # Who cancels its scope leaves a trace in the job. To ask each time would be to ask the clock, too.
                    if ended.cancelled is not None or ended.extras is not None:
                        cancelled = scope.cancel_called
                    ended.end()
                    if _changed(context):
                        return False
                    taken += 1
                    del ended  # so that the memory of a request is not kept until the next one
        except BaseException:  # an outer scope was cancelled, or worse; the running job still has to be ended
            if not left_open:  # Trio has noticed it, too
                if job is not None:
                    job.end()
                raise
        if job is not None:  # its scope was cancelled, or it has failed
            left_open = await job.unwind(me) or left_open
        return not left_open and not _changed(context)


def _size_about(result: object) -> int:
    """Return about how many bytes a result takes: those of its texts and of what is binary, in its first members."""
    size, looked = 0, 0
    rest: list[Any] = [result]
    while rest and looked < _MOST_LOOKED:
        item = rest.pop()
        looked += 1
        if isinstance(item, str | bytes):
            size += len(item)
        elif isinstance(item, Mapping):
            rest.extend(item.values())
        elif isinstance(item, list | tuple):
            rest.extend(item)
        else:
            rest.extend(getattr(item, field.name, None) for field in getattr(item, "__attrs_attrs__", ()))
    return size


def _changed(before: contextvars.Context) -> bool:
    """Return whether the current context differs from `before`."""
    try:
        return contextvars.copy_context() != before
    except Exception:  # values are compared, and users' values may not support that
        return True


@slotted
class Jobs:
    """The requests of one session's peer that were admitted and are not answered yet."""

    limits: Limits  # how many may run and wait, and their memory. A single job may exceed it.
    # runs them, perhaps with those of other sessions; None until the session is driven
    tasks: HandlerTasks | None = None
    by_id: dict[RequestId, Job] = attrs.field(init=False, factory=dict)  # all of them
    mailbox: Mailbox = attrs.field(init=False)  # those that wait for a slot
    running: int = attrs.field(init=False, default=0)  # those that have a slot
    # those that wait for the peer's answer to a question; they have no slot
    parked: int = attrs.field(init=False, default=0)
    # memory of the jobs that run or are parked, including results that wait for the reader
    bytes_running: int = attrs.field(init=False, default=0)
    bytes_unread: int = attrs.field(init=False, default=0)  # memory of the results in it
    _unread: LazyParkingLot = attrs.field(init=False, factory=LazyParkingLot)  # tasks that wait until it shrinks
    idle: LazyParkingLot = attrs.field(init=False, factory=LazyParkingLot)  # tasks that wait until no job is left
    notices: int = attrs.field(init=False, default=0)  # notification handlers that run
    refused: int = attrs.field(init=False, default=0)  # requests refused for lack of room, or at the end of the session
    # threads that still run after their call ended, because threads cannot be stopped
    abandoned_threads: int = attrs.field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self.mailbox = Mailbox(self.limits.backlog_requests, self.limits.backlog_bytes)

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[Job]:
        return iter(self.by_id.values())

    # Start

    def start(self, job: Job, now: float) -> bool:
        """Give a job a slot and run it; return False if there is no room. `now` is the time on Trio's clock."""
        assert self.tasks is not None
        limits, held = self.limits, self.bytes_running
        if self.running >= limits.max_running or (held and held + job.size > limits.running_bytes):
            return False
        self.running += 1
        self.bytes_running = held + job.size
        job.started = True
        job.since = now
        self.tasks.run_soon(job)
        return True

    def start_waiting(self) -> None:
        """Start waiting jobs, as far as there are slots."""
        while self.mailbox and self.start(self.mailbox.first(), trio.current_time()):
            self.mailbox.take()

    # Waiting for the peer

    @contextmanager
    def waiting_for_peer(self, job: Job) -> Iterator[None]:
        """Release the job's slot while it waits for the peer. Afterwards it takes one again, even if none is free."""
        extras = job.with_extras()
        extras.parked += 1
        if extras.parked == 1:
            self.running -= 1
            self.parked += 1
            if extras.clock is not None:
                extras.clock.pause()
            job.session.next_jobs()
        try:
            yield
        finally:
            extras.parked -= 1
            if not extras.parked:
                if extras.clock is not None:
                    extras.clock.resume()
                self.parked -= 1
                if not job.over:
                    self.running += 1

    def too_much_unread(self, amount: MemoryCharge) -> bool:
        """Return whether results wait for the reader and there is no room for more, here or in the budget."""
        holding = amount.holding
        return self.bytes_unread > self.limits.running_bytes or (holding is not None and not holding.fits(0))

    async def until_read(self, job: Job) -> None:
        """Wait until less is unread, before the handler begins: otherwise its result would have to be kept, too."""
        job.started = False
        while self.bytes_unread and self.too_much_unread(job.session.memory):
            await self._unread.park()
        self._unread.unpark()  # the next one checks for itself
        job.started = True

    async def until_turn(self, job: Job, result: object) -> bool:
        """Wait until a result may be encoded, which is counted with the job meanwhile. Return False if it was dropped.

        Handlers that end in the same turn of the event loop have all made their results before anybody gives way.
        """
        assert self.tasks is not None
        size, memory = _size_about(result), job.session.memory
        holding = memory.holding
        much = self.bytes_running + size > 2 * self.limits.running_bytes and self.bytes_running > job.size
        if much or not (holding is None or holding.fits(size) or holding.budget.held + size <= holding.budget.bound):
            job.drop_result()
            return False
        job.size += size
        self.bytes_running += size
        if size >= STEP:
            job.session.weigh()
        try:
            await self.tasks.results.wait()
        finally:
            job.size -= size
            self.bytes_running -= size
        return True

    async def wait_for_reader(self, job: Job) -> None:
        """Wait until there is room for the job's result, which is counted with the job meanwhile.

        When results exceed twice the bound of running requests, the newest are dropped.
        """
        assert job.reply is not None
        size = len(job.reply)
        if self.bytes_running + size > 2 * self.limits.running_bytes and self.bytes_unread:
            size = len(job.drop_result())
        job.size += size
        self.bytes_running += size
        self.bytes_unread += size
        if size >= STEP:
            job.session.weigh()
        try:
            await job.sink.room()
        finally:
            self.bytes_unread -= size
            if self._unread.lot:
                self._unread.unpark()

    # End

    def cancel(self, job: Job, reason: CancelReason, detail: str | None = None) -> None:
        """Stop a job's handler. A waiting job is answered at once, if an answer is due."""
        job.cancel(reason, detail)
        if not job.started and self.mailbox.remove(job):
            job.finish(job.cancelled_reply())

    def cancel_all(self, reason: CancelReason, detail: str | None = None) -> None:
        """Stop every handler, and refuse what waits."""
        for job in list(self):
            self.cancel(job, reason, detail)
            if reason is CancelReason.LIMIT and job.reply is not None:
                job.drop_result()  # now: others may use the memory before the job's task has unwound

    async def wait_idle(self) -> None:
        """Wait until no job is left; always a checkpoint."""
        await trio.lowlevel.checkpoint()
        while self.by_id:
            await self.idle.park()

    # Accounting

    @property
    def bytes_held(self) -> int:
        """Approximate memory of the running and waiting jobs."""
        held = self.mailbox.bytes_queued
        if self.tasks is not None:
            held += self.bytes_running + _RUNNING * (self.running + self.parked & ~3)
        return held

    @property
    def at_rest(self) -> bool:
        """Whether no handler is running: all jobs wait for the peer to read."""
        return all(not job.started or job.reply is not None for job in self)
