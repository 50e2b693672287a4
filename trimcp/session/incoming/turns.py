"""Turns under a quota: sessions alternate, and calls that cannot wait are refused at once.

There is no task here: a waiting task checks whether it may begin when it is woken, or when the next token is due.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from typing import Final

import attrs
import trio

from trimcp.errors import ErrorReply
from trimcp.session.limits import Quota
from trimcp.support.rates import TokenBucket
from trimcp.support.slotted import valued
from trimcp.wire.codes import OVERLOADED

MOST_WAITING: Final = 100_000
"""Calls that may wait for a thread or a process, over all sessions. In practice the sessions' limits bound them."""

# The weight of the newest turn in the average duration of a turn.
_NEWEST = 0.2


@attrs.frozen
@valued
class TurnStatistics:
    """A snapshot of the use of one quota.

    Attributes:
        running: calls that have a turn now, and `waiting` those that wait for one.
        begun: turns given so far, and `refused` those refused.
        most_running, per_second: the quota's bounds, or None.
    """

    running: int
    waiting: int
    begun: int
    refused: int
    most_running: int | None = None
    per_second: float | None = None


@attrs.define(eq=False, repr=False)
class Turns:
    """The turns of one quota."""

    quota: Quota  # how many, and how fast
    name: str  # whose turns they are, for error messages
    running: int = attrs.field(init=False, default=0)
    # turns held by threads that still run although nobody waits for them: threads cannot be stopped
    abandoned: int = attrs.field(init=False, default=0)
    begun: int = attrs.field(init=False, default=0)
    refused: int = attrs.field(init=False, default=0)
    waiting: int = attrs.field(init=False, default=0)
    _queues: OrderedDict[object, deque[trio.lowlevel.ParkingLot]] = attrs.field(init=False, factory=OrderedDict)
    _bucket: TokenBucket | None = attrs.field(init=False, default=None)
    _usual: float = attrs.field(init=False, default=0.0)

    def __attrs_post_init__(self) -> None:
        rate, burst = self.quota.per_second, self.quota.burst
        if rate is not None:
            self._bucket = TokenBucket(rate, burst if burst is not None else max(1.0, rate), trio.current_time())

    @property
    def idle(self) -> bool:
        """Whether it may be discarded and created anew without any effect."""
        if self.running or self.waiting:
            return False
        bucket = self._bucket
        return bucket is None or bucket.has(bucket.burst, trio.current_time())

    def statistics(self) -> TurnStatistics:
        """Return a snapshot."""
        quota = self.quota
        return TurnStatistics(self.running, self.waiting, self.begun, self.refused, quota.running, quota.per_second)

    async def acquire(self, whose: object, deadline: float = math.inf) -> float:
        """Wait for a turn, to be ended with `give_back`, and return when it began, on Trio's clock.

        Calls of one session (`whose`) wait behind each other, and sessions alternate. Cancelling this leaves the queue.
        Raises ErrorReply: too many wait, or it could not begin before the deadline; `data` says when to retry.
        """
        if self.waiting or not self._may_begin():
            await self._queue(whose, deadline)
        self.running += 1
        self.begun += 1
        if self._bucket is not None:
            self._bucket.tokens -= 1
        return trio.current_time()

    def give_back(self, since: float) -> None:
        """End a turn that began at `since`, and let the next one begin."""
        self.running -= 1
        held = trio.current_time() - since
        self._usual = self._usual + (held - self._usual) * _NEWEST if self._usual else held
        self._wake()

    def _may_begin(self) -> bool:
        quota = self.quota
        if quota.running is not None and self.running >= quota.running:
            return False
        return self._bucket is None or self._bucket.has(1, trio.current_time())

    async def _queue(self, whose: object, deadline: float) -> None:
        expected = self._expected()
        if self.waiting >= self.quota.waiting:
            raise self._refusal(f"{self.name}: too many calls wait already", expected)
        if trio.current_time() + expected > deadline:
            raise self._refusal(f"{self.name}: the call could not begin before its deadline", expected)
        waiter = trio.lowlevel.ParkingLot()  # the task waiting here checks again when it is woken
        self._queues.setdefault(whose, deque()).append(waiter)
        self.waiting += 1
        try:
            while not (self._is_next(whose, waiter) and self._may_begin()):
                await self._pause(whose, waiter)
        except BaseException:  # cancelled: the next in the queue must get the wake-up that may have been sent here
            self._leave(whose, waiter)
            self._wake()
            raise
        self._leave(whose, waiter)
        if whose in self._queues:
            self._queues.move_to_end(whose)
        # There may be room for more than one. The one being taken now is not counted yet.
        if self.quota.running is None or self.running + 1 < self.quota.running:
            self._wake()

    def _is_next(self, whose: object, waiter: trio.lowlevel.ParkingLot) -> bool:
        return next(iter(self._queues)) == whose and self._queues[whose][0] is waiter

    async def _pause(self, whose: object, waiter: trio.lowlevel.ParkingLot) -> None:
        """Wait to be woken; if first in the queue and only a token is missing, wait until that is available."""
        bucket, most = self._bucket, self.quota.running
        until = math.inf
        if bucket is not None and self._is_next(whose, waiter) and (most is None or self.running < most):
            until = trio.current_time() + bucket.wait()
        with trio.CancelScope(deadline=until):
            await waiter.park()

    def _leave(self, whose: object, waiter: trio.lowlevel.ParkingLot) -> None:
        queue = self._queues[whose]
        queue.remove(waiter)
        self.waiting -= 1
        if not queue:
            del self._queues[whose]

    def _wake(self) -> None:
        """Wake the first in the queue, to check whether it may begin."""
        if self._queues:
            next(iter(self._queues.values()))[0].unpark()

    def _expected(self) -> float:
        """Return the estimated waiting time of a new call, in seconds; exact if only tokens are missing."""
        quota = self.quota
        by_rate = by_slots = 0.0
        if self._bucket is not None:
            self._bucket.refill(trio.current_time())
            by_rate = self._bucket.wait(self.waiting + 1)
        if quota.running is not None and self.running + self.waiting >= quota.running:
            by_slots = self._usual * (self.waiting + 1) / quota.running
        return max(by_rate, by_slots)

    def _refusal(self, text: str, expected: float) -> ErrorReply:
        from trimcp.security import security_event

        self.refused += 1
        security_event("flood_refused", what=self.name, running=self.running, waiting=self.waiting)
        return ErrorReply(OVERLOADED, text, {"reason": "overloaded", "retryAfter": round(max(expected, 0.001), 3)})
