"""The deadlines of many connections, watched by one task.

A cancel scope for each request would cost a tenth of what a request costs, and nearly no deadline is ever reached. So
to move one is to write a number; the watching task looks at it when it would have been due as it stood before.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator

import attrs
import trio

__all__ = ["Deadline", "Deadlines"]


@attrs.define(eq=False)
class Deadlines:
    """What watches; `run` is its task."""

    _heap: list[tuple[float, int, Deadline]] = attrs.field(init=False, factory=list)
    _numbers: Iterator[int] = attrs.field(init=False, factory=itertools.count)
    _sleep: trio.CancelScope | None = attrs.field(init=False, default=None)
    _closed: int = attrs.field(init=False, default=0)

    def new(self, on_passed: Callable[[], None]) -> Deadline:
        """Return a deadline that is not set. When it passes, `on_passed` is called; it must not raise."""
        return Deadline(self, on_passed)

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            with trio.CancelScope(deadline=self._heap[0][0] if self._heap else math.inf) as self._sleep:
                await trio.sleep_forever()
            self._look(trio.current_time())

    def _look_at(self, when: float, deadline: Deadline) -> None:
        heapq.heappush(self._heap, (when, next(self._numbers), deadline))
        if self._sleep is not None and when < self._sleep.deadline:
            self._sleep.deadline = when

    def _forget_one(self) -> None:
        """Throw out closed ones before they outnumber the others: connections may come and go much faster."""
        self._closed += 1
        if self._closed > max(100, len(self._heap) // 2):
            self._closed = 0
            self._heap = [entry for entry in self._heap if not entry[2].closed]
            heapq.heapify(self._heap)

    def _look(self, now: float) -> None:
        while self._heap and self._heap[0][0] <= now:
            when, _, deadline = heapq.heappop(self._heap)
            deadline.come(when, now)


class Deadline:
    """One deadline of one connection.

    Attributes:
        passed: whether it passed since it was last set or cleared.
    """

    __slots__ = ("_due", "_looked_at", "_on_passed", "_watch", "passed")

    def __init__(self, watch: Deadlines, on_passed: Callable[[], None]) -> None:
        self._watch = watch
        self._on_passed: Callable[[], None] | None = on_passed
        self._due = math.inf
        self._looked_at = math.inf  # when the watch looks here next; never later than due
        self.passed: bool = False

    def set(self, seconds: float) -> None:
        """Let it pass in so many seconds, whatever was set before."""
        self.passed = False
        self._due = due = trio.current_time() + seconds
        if due < self._looked_at:
            self._looked_at = due
            self._watch._look_at(due, self)

    def clear(self) -> None:
        """Let it never pass."""
        self.passed = False
        self._due = math.inf

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._on_passed is None

    def close(self) -> None:
        """Let it never pass, and forget what would be called."""
        if self._on_passed is not None:
            self._due = math.inf
            self._on_passed = None
            self._watch._forget_one()

    def come(self, when: float, now: float) -> None:
        """For the watch, which looks because of what was due at `when`."""
        if when != self._looked_at:
            return  # it was moved to an earlier time since, and looked at then
        self._looked_at = math.inf
        if self._due > now:
            if self._due < math.inf:
                self._looked_at = self._due
                self._watch._look_at(self._due, self)
        elif self._on_passed is not None:
            self._due = math.inf
            self.passed = True
            self._on_passed()
