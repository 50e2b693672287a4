"""Work clocks: timeouts of calls that restart at each progress report and pause while a person is asked."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import trio

from trimcp.support.slotted import slotted


@slotted
class WorkClock:
    """Limits how long the peer may work on a call: progress restarts it, and it pauses while a person is asked."""

    limit: float  # seconds without progress
    cap: float  # seconds in all
    scope: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    _until: float = attrs.field(init=False)
    _remaining: float | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        now = trio.current_time()
        self.cap += now
        self._set(now + self.limit)

    def _set(self, until: float) -> None:
        self._until = until
        self.scope.deadline = min(until, self.cap)

    def restart(self, progress: object = None) -> None:
        """Restart, because there was progress."""
        if self._remaining is None:
            self._set(trio.current_time() + self.limit)
        else:
            self._remaining = self.limit

    def pause(self) -> None:
        """Pause: a person is being asked."""
        if self._remaining is None:
            self._remaining = self._until - trio.current_time()
            self.scope.deadline = self.cap

    def resume(self) -> None:
        """Continue after a pause."""
        if self._remaining is not None:
            remaining, self._remaining = self._remaining, None
            self._set(trio.current_time() + remaining)

    def stop(self) -> None:
        """Stop for good: the answer has arrived."""
        self.cap = math.inf
        self._remaining = None
        self._set(self.cap)


@slotted
class Clocks:
    """The work clocks of one session's calls."""

    limit: float | None = None  # seconds without progress after which a call fails, or None
    cap: float | None = None  # seconds after which a call fails in any case, or None
    tells: bool = True  # whether requests tell the peer how long the caller waits
    asked: int = attrs.field(init=False, default=0)  # number of people being asked now
    _running: set[WorkClock] = attrs.field(init=False, factory=set)

    def __bool__(self) -> bool:
        return self.limit is not None or self.cap is not None

    def deadline(self) -> float:
        """Return until when the calling task waits for an answer, on Trio's clock; infinity if peers are not told.

        The work clock is not included, because the peer's own progress restarts it.
        """
        if not self.tells:
            return math.inf
        until = deadline_around()
        return until if self.cap is None else min(until, trio.current_time() + self.cap)

    @contextmanager
    def including(self, clock: WorkClock) -> Iterator[None]:
        """While the block runs, pause this clock together with those of the calls."""
        if self.asked:
            clock.pause()
        self._running.add(clock)
        try:
            yield
        finally:
            self._running.discard(clock)

    @contextmanager
    def running(self) -> Iterator[WorkClock]:
        """Run a clock around the block. Raises trio.TooSlowError: the clock expired and cancelled the block."""
        clock = WorkClock(math.inf if self.limit is None else self.limit, math.inf if self.cap is None else self.cap)
        with self.including(clock), clock.scope:
            yield clock
        if clock.scope.cancelled_caught:
            raise trio.TooSlowError("the peer took too long without a sign of progress")

    @contextmanager
    def person(self) -> Iterator[None]:
        """Pause every clock of the session while a person answers in the block."""
        self.asked += 1
        for clock in self._running:
            clock.pause()
        try:
            yield
        finally:
            self.asked -= 1
            if not self.asked:
                for clock in self._running:
                    clock.resume()


def deadline_around() -> float:
    """Return the same as `trio.current_effective_deadline`, in less time.

    Trio makes two calls for each scope, which takes a tenth of a whole request; this reads its scopes directly.
    """
    try:
        status: Any = trio.lowlevel.current_task()._cancel_status
        if status.effectively_cancelled:
            return -math.inf
        until: float = math.inf
        while status is not None:
            scope = status._scope
            if scope._deadline < until:
                until = scope._deadline
            if scope._shield:
                break
            status = status._parent
        return until
    except AttributeError:  # another version of Trio
        return trio.current_effective_deadline()


def virtual_time() -> bool:
    """Return whether Trio runs with a test clock. It would jump while a thread works, so no threads are used then."""
    testing = sys.modules.get("trio.testing")
    return testing is not None and isinstance(trio.lowlevel.current_clock(), testing.MockClock)
