"""Deadlines pass when they should, however they were moved, and cost nothing in between."""

from __future__ import annotations

import gc
import math
import random
import weakref

import pytest
import trio
from trio.testing import MockClock

from trimcp.support.deadlines import DeadlineQueue, Deadlines


async def test_one_passes_when_it_is_due(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    deadlines = Deadlines()
    nursery.start_soon(deadlines.run)
    passed: list[float] = []
    deadline = deadlines.new(lambda: passed.append(trio.current_time()))
    start = trio.current_time()

    deadline.set(10)
    await trio.sleep(9)
    assert not deadline.passed
    deadline.set(10)  # later
    await trio.sleep(9)
    deadline.set(2)
    deadline.set(1)  # earlier
    await trio.sleep(5)
    assert passed == [start + 19]
    assert deadline.passed
    deadline.set(3)
    assert not deadline.passed
    deadline.clear()
    await trio.sleep(100)
    deadline.set(1)
    deadline.close()
    await trio.sleep(100)
    assert passed == [start + 19]


async def test_many_pass_exactly_when_they_are_due(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    deadlines = Deadlines()
    nursery.start_soon(deadlines.run)
    choose = random.Random(7)
    passed: dict[int, float] = {}
    due: dict[int, float] = {}
    every = [deadlines.new(lambda n=n: passed.setdefault(n, trio.current_time())) for n in range(50)]
    for _ in range(300):
        n = choose.randrange(50)
        if n not in passed:
            seconds = choose.choice([math.inf, 1, 3, 10, 75])
            every[n].set(seconds) if seconds < math.inf else every[n].clear()
            due[n] = trio.current_time() + seconds
        await trio.sleep(choose.random())
    await trio.sleep(100)
    assert passed == {n: when for n, when in due.items() if when < math.inf}


async def test_moving_one_piles_nothing_up() -> None:
    deadlines = Deadlines()
    deadline = deadlines.new(lambda: None)
    for _ in range(1_000):
        deadline.clear()
        deadline.set(75)
    assert len(deadlines._heap) == 1


async def test_moving_one_to_and_fro_piles_nothing_up(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    deadlines = Deadlines()
    nursery.start_soon(deadlines.run)
    deadline = deadlines.new(lambda: None)
    for _ in range(1_000):
        deadline.set(75)
        await trio.sleep(8)
        deadline.set(10)
        await trio.sleep(8)
        assert len(deadlines._heap) <= 10


async def test_closed_ones_do_not_pile_up(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    deadlines = Deadlines()
    nursery.start_soon(deadlines.run)
    passed: list[float] = []
    start = trio.current_time()
    kept = [deadlines.new(lambda: passed.append(trio.current_time())) for _ in range(3)]
    for n, deadline in enumerate(kept):
        deadline.set(70 + n)
    for _ in range(10_000):
        deadline = deadlines.new(lambda: None)
        deadline.set(75)
        deadline.close()
        deadline.close()
    assert len(deadlines._heap) <= 300
    await trio.sleep(100)
    assert passed == [start + 70, start + 71, start + 72]


async def test_a_closed_one_keeps_nothing_alive() -> None:
    class Owner:
        def passed(self) -> None: ...

    deadlines = Deadlines()
    owner = Owner()
    deadline = deadlines.new(owner.passed)
    deadline.set(75)
    deadline.close()
    gone = weakref.ref(owner)
    gc.disable()
    del owner
    assert gone() is None
    gc.enable()


class _Item:
    def __init__(self, passed: list[float]) -> None:
        self._passed = passed

    def timed_out(self) -> None:
        self._passed.append(trio.current_time())


async def test_all_in_a_queue_have_the_same_time(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    deadlines = Deadlines()
    nursery.start_soon(deadlines.run)
    queue = DeadlineQueue(deadlines, 2.1)
    passed: list[float] = []
    due: list[float] = []
    for n in range(30):
        item = _Item(passed)
        queue.add(item)
        if n % 3:
            queue.remove(item)
            queue.remove(item)
        else:
            due.append(trio.current_time() + 2.1)
        await trio.sleep(0.3)
    await trio.sleep(2.1)
    assert [round(at, 6) for at in passed] == [round(at, 6) for at in due]
    assert queue._since == {}
    await trio.sleep(60)
    queue.add(_Item(passed))
    await trio.sleep(2.2)
    assert len(passed) == len(due) + 1


async def test_a_queue_wakes_nobody_more_often_than_its_time(
    autojump_clock: MockClock, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines = Deadlines()
    nursery.start_soon(deadlines.run)
    looks: list[float] = []
    look = deadlines._look
    monkeypatch.setattr(Deadlines, "_look", lambda self, now: (looks.append(now), look(now)))
    queue = DeadlineQueue(deadlines, 2.0)
    for _ in range(1_000):  # answered soon, as nearly all are
        item = _Item([])
        queue.add(item)
        await trio.sleep(0.01)
        queue.remove(item)
    assert len(looks) <= 5
    await trio.sleep(60)
    assert len(looks) <= 6
