"""A clock for tests over sockets, which live in real time, on a machine that does other things too."""

from __future__ import annotations

import time

import pytest
import trio


class SteadyClock(trio.abc.Clock):
    """Real time without the pauses in which the machine did not run this process.

    A limit of half a second passes in no less than that. But where the process had to stand still for a second, hardly
    more has passed than what it waited for, so that a peer in the same process that says something every 20 ms has
    said it before a limit passes, on a busy machine too.
    """

    LONGEST = 0.2  # it waits for at a time; more than what tests give to `wait_all_tasks_blocked`
    STEP = 0.01  # passes at most between two looks when it does not wait

    def __init__(self) -> None:
        self._now = 0.0
        self._read = 0.0
        self._most = 0.0

    def start_clock(self) -> None:
        self._read = time.perf_counter()

    def current_time(self) -> float:
        read = time.perf_counter()
        self._now += min(read - self._read, self._most)
        self._read, self._most = read, self.STEP
        return self._now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        seconds = min(max(0.0, deadline - self.current_time()), self.LONGEST)
        self._most = seconds + self.STEP
        return seconds


@pytest.fixture
def steady_clock() -> SteadyClock:
    """Real time in which a busy machine lets no limit pass."""
    return SteadyClock()
