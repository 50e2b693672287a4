"""What work costs, told beside other work of the same moments: seconds mean nothing on a machine that is busy.

Measured is the processor's time of this thread alone. Both works take turns, so that what slows one down slows down the
other, and of each the shortest turn counts, because what disturbs only ever adds. More turns are taken for as long as
the bound does not hold, so that only what costs too much in every one of them is found to.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import trio

FEWEST, MOST = 3, 40
CLEAR = 4  # what is so many times cheaper than it may be needs no further turn


class Turn:
    """The shortest time of each work so far."""

    def __init__(self) -> None:
        self.work = self.yardstick = math.inf

    @contextmanager
    def of_work(self) -> Iterator[None]:
        """Measure the body as the work that is judged."""
        began = time.thread_time()
        yield
        self.work = min(self.work, time.thread_time() - began)

    @contextmanager
    def of_yardstick(self) -> Iterator[None]:
        """Measure the body as the work it is compared with."""
        began = time.thread_time()
        yield
        self.yardstick = min(self.yardstick, time.thread_time() - began)


def turns(at_most: float) -> Iterator[Turn]:
    """Yield turns until the work costs at most so many times its yardstick.

    Raises:
        AssertionError: it cost more in every turn.
    """
    turn = Turn()
    gc.collect()
    gc.disable()  # it would look through whatever else the process holds
    try:
        for number in range(1, MOST + 1):
            yield turn
            if turn.work <= at_most * turn.yardstick / (1 if number >= FEWEST else CLEAR):
                break
    finally:
        gc.enable()
    found = f"{1000 * turn.work:.3f} ms, {turn.work / turn.yardstick:.1f} times {1000 * turn.yardstick:.3f} ms"
    print(found)
    assert turn.work <= at_most * turn.yardstick, f"{found}; at most {at_most:g} times"


def a_millisecond() -> None:
    """Plain Python that takes about a millisecond where nothing else runs, and more where everything takes more."""
    counted = {number: str(number) for number in range(8_000)}
    sum(len(text) for text in counted.values())


def assert_costs(work: Callable[[], object], *, at_most: float, times: Callable[[], object] = a_millisecond) -> None:
    """Check that `work` takes the processor at most so many times as long as the other does."""
    for turn in turns(at_most):
        with turn.of_work():
            work()
        with turn.of_yardstick():
            times()


class Other:
    """A task that always wants its turn, and how many it has had."""

    turns = 0

    async def run(self) -> None:
        while True:
            await trio.lowlevel.checkpoint()
            self.turns += 1


@asynccontextmanager
async def another_task() -> AsyncIterator[Other]:
    """Run a task beside the body, which finds in its turns how often the body let others run."""
    other = Other()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(other.run)
        yield other
        nursery.cancel_scope.cancel()
