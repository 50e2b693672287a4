"""Deadlines of many connections, requests and streams, watched by one task.

A cancel scope for each request would cost a tenth of the request's time, and few deadlines ever pass. So moving a
deadline only stores a number; the watching task checks it at the earlier time. Things with equal times
(`DeadlineQueue`) share one deadline, that of the oldest.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Protocol

import attrs
import trio


@attrs.define(eq=False)
class Deadlines:
    """Watches deadlines; `run` is its task."""

    now: Callable[[], float] = attrs.field(init=False, default=trio.current_time)  # the time on Trio's clock
    _heap: list[tuple[float, int, Deadline]] = attrs.field(init=False, factory=list)
    _numbers: Iterator[int] = attrs.field(init=False, factory=itertools.count)
    _sleep: trio.CancelScope | None = attrs.field(init=False, default=None)
    _closed: int = attrs.field(init=False, default=0)

    def new(self, on_passed: Callable[[], None]) -> Deadline:
        """Return a deadline that is not set. When it passes, `on_passed` is called; it must not raise."""
        return Deadline(self, on_passed)

    async def run(self) -> None:
        """Watch until cancelled."""
        self.now = trio.lowlevel.current_clock().current_time  # as `nurseries.own_clock` does
        try:
            while True:
                with trio.CancelScope(deadline=self._heap[0][0] if self._heap else math.inf) as self._sleep:
                    await trio.sleep_forever()
                self._look(self.now())
        finally:
            self.now = trio.current_time

    def _look_at(self, when: float, deadline: Deadline) -> None:
        heapq.heappush(self._heap, (when, next(self._numbers), deadline))
        if self._sleep is not None and when < self._sleep.deadline:
            self._sleep.deadline = when

    def _forget_one(self) -> None:
        """Remove closed deadlines before they outnumber the others: short connections may leave many behind."""
        self._closed += 1
        if self._closed > max(100, len(self._heap) // 2):
            self._closed = 0
            self._heap = [entry for entry in self._heap if entry[2]._on_passed is not None]
            heapq.heapify(self._heap)

    def _look(self, now: float) -> None:
        while self._heap and self._heap[0][0] <= now:
            when, _, deadline = heapq.heappop(self._heap)
            deadline.come(when, now)


@attrs.define(eq=False)
class Deadline:
    """A deadline that can be set, moved and cleared at low cost."""

    _watch: Deadlines
    _on_passed: Callable[[], None] | None
    passed: bool = attrs.field(init=False, default=False)  # whether it passed since it was set or cleared
    _due: float = attrs.field(init=False, default=math.inf)
    _looked_at: float = attrs.field(init=False, default=math.inf)  # when the watch checks it next; never later than due

    def set(self, seconds: float) -> None:
        """Let it pass in so many seconds, whatever was set before."""
        self.passed = False
        self._due = due = self._watch.now() + seconds
        if due < self._looked_at:
            self._looked_at = due
            self._watch._look_at(due, self)

    @property
    def is_set(self) -> bool:
        return self._due < math.inf

    def put_off(self, seconds: float) -> None:
        """Move it later by so many seconds."""
        self._due += seconds

    def clear(self) -> None:
        """Unset it."""
        self.passed = False
        self._due = math.inf

    def close(self) -> None:
        """Unset it for good, and forget its callback."""
        if self._on_passed is not None:
            self._due = math.inf
            self._on_passed = None
            self._watch._forget_one()

    def come(self, when: float, now: float) -> None:
        """Called by the watch at the time `when`: pass, or be checked again at the new time."""
        if when != self._looked_at:
            return  # it was moved to an earlier time and checked then
        self._looked_at = math.inf
        if self._due > now:
            if self._due < math.inf:
                self._looked_at = self._due
                self._watch._look_at(self._due, self)
        elif self._on_passed is not None:
            self._due = math.inf
            self.passed = True
            self._on_passed()


class Timed(Protocol):
    def timed_out(self) -> None:
        """Called when the item's time in a `DeadlineQueue` has passed. Must not raise."""


@attrs.define(eq=False)
class DeadlineQueue:
    """Gives each item the same time limit, at the cost of one entry in a dict."""

    _deadlines: Deadlines
    _seconds: float
    _since: dict[Timed, float] = attrs.field(init=False, factory=dict)  # the oldest first
    _deadline: Deadline = attrs.field(init=False)
    _is_set: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self._deadline = self._deadlines.new(self._look)

    def add(self, item: Timed) -> None:
        """Call `item.timed_out` after the queue's time, unless it is removed before."""
        self._since[item] = self._deadlines.now()
        if not self._is_set:
            self._is_set = True
            self._deadline.set(self._seconds)

    def remove(self, item: Timed) -> None:
        """Remove an item; no effect if it is not there."""
        self._since.pop(item, None)

    def _look(self) -> None:
        now = self._deadlines.now()
        while self._since:
            item, since = next(iter(self._since.items()))
            if (left := since + self._seconds - now) > 0:
                self._deadline.set(left)
                return
            del self._since[item]
            item.timed_out()
        self._is_set = False
