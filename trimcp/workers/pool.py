"""The worker processes of a running server: a bounded number, reused, each with one call at a time.

A worker whose call was given up is killed, and the next call that needs one starts another. It counts until it was
reaped, so that there are never more processes than the bound says.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from typing import Final

import attrs
import trio

from trimcp.session.limits import Quota
from trimcp.session.turns import MOST_WAITING, Turns
from trimcp.values import valued
from trimcp.workers.process import Turn, WorkerProcess

__all__ = ["ProcessStatistics", "WorkerPool", "cores"]

log: logging.Logger = logging.getLogger("trimcp.server")

_IDLE_TIME: Final = 60.0  # seconds


@attrs.frozen
@valued
class ProcessStatistics:
    """A snapshot of the worker processes of one run of a server.

    Attributes:
        most: how many there may be.
        alive: how many there are, those that start or end included.
        busy: how many have a call, or are ending because it was given up.
        waiting: calls that wait for one.
        started: how many were started so far.
        killed: how many were killed with their call: cancelled, out of time, disconnected.
        crashed: how many ended by themselves, or ran out of memory.
    """

    most: int
    alive: int
    busy: int
    waiting: int
    started: int
    killed: int
    crashed: int


@attrs.define(eq=False, repr=False)
class WorkerPool:
    """The worker processes of one run of a server.

    Args:
        nursery: where their tasks run; they end with it.
        most: how many there may be.
        idle_time: seconds after which one that has nothing to do ends.
    """

    _nursery: trio.Nursery
    most: int
    idle_time: float = _IDLE_TIME
    _turns: Turns = attrs.field(init=False)
    _alive: int = attrs.field(init=False, default=0)
    _idle: list[WorkerProcess] = attrs.field(init=False, factory=list)
    _gone: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    _started: int = attrs.field(init=False, default=0)
    _killed: int = attrs.field(init=False, default=0)
    _crashed: int = attrs.field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self._turns = Turns(Quota(running=self.most, waiting=MOST_WAITING), "processes")

    @property
    def waiting(self) -> int:
        """Calls that wait for one now."""
        return self._turns.waiting

    @property
    def refused(self) -> int:
        """Calls refused so far, because no worker would have been free in time."""
        return self._turns.refused

    def statistics(self) -> ProcessStatistics:
        """Return a snapshot."""
        return ProcessStatistics(
            most=self.most,
            alive=self._alive,
            busy=self._turns.running,
            waiting=self._turns.waiting,
            started=self._started,
            killed=self._killed,
            crashed=self._crashed,
        )

    @asynccontextmanager
    async def worker(
        self, memory: int | None, whose: Hashable, deadline: float = math.inf
    ) -> AsyncIterator[WorkerProcess]:
        """Lend a worker whose address space has this bound.

        If the block ends before the worker is `done`, with a cancellation for instance, the worker is killed.

        Args:
            memory: bytes, or None.
            whose: what stands for the session; while workers are scarce, sessions take turns.
            deadline: when it would be too late to begin, on Trio's clock.

        Raises:
            ErrorReply: it could not begin before the deadline.
            OSError: none could be started.
        """
        worker = await self._take(memory, whose, deadline)
        try:
            yield worker
        finally:
            if worker.done and worker.usable:
                self._give_back(worker)
            else:
                self._killed += not worker.killed
                worker.kill()

    async def _take(self, memory: int | None, whose: Hashable, deadline: float) -> WorkerProcess:
        turn = Turn(self._turns, await self._turns.take(whose, deadline))
        try:
            worker = self._fitting(memory)
            if worker is None:
                while self._alive >= self.most:  # idle ones with another bound, or some that are ending
                    if self._idle:
                        self._idle.pop(0).kill()
                    await self._gone.park()
                worker = await self._nursery.start(self._keep, memory, turn)
        except BaseException:  # cancelled, or no process could be started
            turn.give_back()
            raise
        worker.turn, worker.done = turn, False
        worker.idle_scope.deadline = math.inf
        worker.clear_output()
        return worker

    def _fitting(self, memory: int | None) -> WorkerProcess | None:
        """Return the idle worker with this bound that worked last; the others may end meanwhile."""
        for worker in reversed(self._idle):
            if worker.memory == memory and worker.usable:
                self._idle.remove(worker)
                return worker
        return None

    def _give_back(self, worker: WorkerProcess) -> None:
        turn, worker.turn = worker.turn, None
        assert turn is not None
        worker.idle_scope.deadline = trio.current_time() + self.idle_time
        self._idle.append(worker)
        turn.give_back()

    async def _keep(self, memory: int | None, turn: Turn, *, task_status: trio.TaskStatus[WorkerProcess]) -> None:
        self._alive += 1
        worker: WorkerProcess | None = None
        try:
            worker = await WorkerProcess.start(memory)
            self._started += 1
            worker.turn = turn
            log.debug("started worker process %d", worker.process.pid)
            await worker.keep(_Passed(task_status, worker))
        finally:
            self._alive -= 1
            if worker is not None:
                log.debug("worker process %d is gone", worker.process.pid)
                if worker in self._idle:
                    self._idle.remove(worker)
                self._crashed += worker.crashed
                if worker.turn is not None:
                    worker.turn.give_back()
            self._gone.unpark_all()


@attrs.frozen(eq=False, repr=False)
class _Passed(trio.TaskStatus[None]):
    """Reports the worker itself as started, to the call that waits for it."""

    _status: trio.TaskStatus[WorkerProcess]
    _worker: WorkerProcess

    def started(self, value: None = None) -> None:
        self._status.started(self._worker)


def cores() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
