"""Which call begins when."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
import trio
import trio.testing

from tests.bench.support import ECHO, a_load, errors
from trimcp.bench.plan import MixEntry
from trimcp.bench.supply import Load


def numbers(load: Load, most: int, now: float = 0.0) -> list[int]:
    taken = []
    while len(taken) < most and (call := load.supply.take(now)) is not None:
        taken.append(call.number)
    return taken


def test_no_more_calls_begin_than_are_allowed() -> None:
    load = a_load()
    assert numbers(load, 5) == []
    load.supply.allow(3)
    assert numbers(load, 5) == [1, 2, 3]
    assert load.supply.exhausted
    load.supply.allow(math.inf)
    assert numbers(load, 2) == [4, 5]
    assert load.supply.under_way == 5
    load.supply.close(0.0)
    assert numbers(load, 5) == []
    assert load.supply.over


def test_whoever_waits_is_woken_once_there_are_calls_and_at_the_end() -> None:
    load = a_load()
    woken: list[str] = []
    load.supply.wait(lambda: woken.append("a"))
    load.supply.wait(lambda: woken.append("b"))
    load.supply.allow(1)
    assert woken == ["a", "b"]
    load.supply.wait(lambda: woken.append("c"))
    load.supply.close(0.0)
    assert woken == ["a", "b", "c"]


def test_a_milestone_is_told_once() -> None:
    load = a_load()
    told: list[int] = []
    load.supply.on_milestone = lambda: told.append(load.supply.done)
    load.supply.allow(math.inf)
    load.supply.milestone = 2
    for _ in range(3):
        load.supply.take(0.0)
        load.supply.count_ended()
    assert told == [2]
    assert (load.supply.under_way, load.supply.done) == (0, 3)


def test_a_mix_is_sent_by_its_weights_and_the_same_for_the_same_seed() -> None:
    mix = [ECHO, MixEntry("ping", weight=3.0), MixEntry("tools/list", weight=6.0)]

    def chosen(seed: int) -> list[str]:
        load = a_load(mix=mix, seed=seed)
        load.supply.allow(math.inf)
        calls = [load.supply.take(0.0) for _ in range(4000)]
        return [call.request.entry.method for call in calls if call is not None]

    first = chosen(1)
    assert chosen(1) == first
    assert chosen(2) != first
    share = Counter(first)
    assert share["tools/call"] == pytest.approx(400, rel=0.2)
    assert share["ping"] == pytest.approx(1200, rel=0.1)
    assert share["tools/list"] == pytest.approx(2400, rel=0.1)


def test_a_share_of_the_calls_is_given_up() -> None:
    load = a_load(cancel=0.25, cancel_after=0.5, timeout=9.0, timeouts=0.5)
    load.supply.allow(math.inf)
    calls = [load.supply.take(0.0) for _ in range(4000)]
    kinds = Counter((call.give_up, call.timeout) for call in calls if call is not None)
    assert kinds[0.5, False] == pytest.approx(1000, rel=0.15)
    assert kinds[9.0, True] == pytest.approx(1500, rel=0.15)
    assert kinds[math.inf, False] == pytest.approx(1500, rel=0.15)


def test_midway_is_a_part_of_the_time_that_calls_take() -> None:
    load = a_load(cancel=1.0)
    load.supply.allow(math.inf)
    load.tally.right(2.0, 0.1)
    calls = [load.supply.take(0.0) for _ in range(500)]
    moments = [call.give_up for call in calls if call is not None]
    assert 0.0 <= min(moments) < 0.1
    assert 1.9 < max(moments) < 2.0


# Open loop


async def pace(load: Load, seconds: float) -> list[float]:
    """Take every call as soon as it arrives; return when each should have begun."""
    due: list[float] = []

    def take() -> None:
        while (call := load.supply.take(trio.current_time())) is not None:
            due.append(call.due)
        load.supply.wait(take)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(load.supply.pace)
        take()
        began = trio.current_time()
        load.supply.allow(math.inf if load.plan.count is None else load.plan.count)
        await trio.sleep(seconds)
        load.supply.close(trio.current_time())
        nursery.cancel_scope.cancel()
    return [each - began for each in due]


async def test_calls_at_a_fixed_rate_arrive_at_equal_distances(autojump_clock: object) -> None:
    load = a_load(rate=10.0)
    assert await pace(load, 0.95) == pytest.approx([0.1 * each for each in range(10)])


async def test_many_people_come_at_random_and_as_often(autojump_clock: object) -> None:
    due = await pace(a_load(rate=100.0, spacing="poisson"), 20.0)
    gaps = [after - before for before, after in pairwise(due)]
    assert len(due) == pytest.approx(2000, rel=0.1)
    deviation = math.sqrt(sum((gap - 0.01) ** 2 for gap in gaps) / len(gaps))
    assert deviation == pytest.approx(0.01, rel=0.2)  # that of an exponential distribution is its mean


async def test_a_count_of_calls_arrives_and_no_more(autojump_clock: object) -> None:
    assert len(await pace(a_load(rate=10.0, count=4), 60.0)) == 4


async def test_a_call_that_waits_for_a_place_counts_from_when_it_should_have_begun(autojump_clock: object) -> None:
    load = a_load(rate=1.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(load.supply.pace)
        load.supply.allow(math.inf)
        began = trio.current_time()
        await trio.sleep(3.5)
        calls = [load.supply.take(trio.current_time()) for _ in range(5)]
        nursery.cancel_scope.cancel()
    assert [None if call is None else call.due - began for call in calls] == pytest.approx([0.0, 1.0, 2.0, 3.0, None])
    assert load.tally.late == 4


async def test_calls_that_we_ourselves_begin_late_count_from_when_they_should_have_begun(
    autojump_clock: trio.testing.MockClock,
) -> None:
    load = a_load(rate=10.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(load.supply.pace)
        load.supply.allow(math.inf)
        began = trio.current_time()
        await trio.sleep(0.05)
        autojump_clock.jump(1.0)  # we had other things to do, and 0.1 to 1.0 have passed
        await trio.testing.wait_all_tasks_blocked()
        calls = [load.supply.take(trio.current_time()) for _ in range(11)]
        nursery.cancel_scope.cancel()
    due = [call.due - began for call in calls if call is not None]
    assert due == pytest.approx([0.1 * each for each in range(11)])
    assert load.tally.late == 11


async def test_what_the_timer_is_off_by_is_nobodys_delay(mock_clock: trio.testing.MockClock) -> None:
    load = a_load(rate=10.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(load.supply.pace)
        load.supply.allow(math.inf)
        await trio.testing.wait_all_tasks_blocked()
        load.supply.take(trio.current_time())
        mock_clock.jump(0.101)
        await trio.testing.wait_all_tasks_blocked()
        call = load.supply.take(trio.current_time())
        nursery.cancel_scope.cancel()
    assert call is not None
    assert call.due == trio.current_time()


async def test_the_backlog_is_bounded_and_what_does_not_fit_fails(autojump_clock: object) -> None:
    load = a_load(rate=10.0, backlog=5)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(load.supply.pace)
        load.supply.allow(math.inf)
        await trio.sleep(0.95)
        assert errors(load) == {"not begun": 5}
        assert load.supply.done == 5
        load.supply.close(trio.current_time())
        nursery.cancel_scope.cancel()
    assert errors(load) == {"not begun": 10}
    assert load.tally.late == 10


async def test_the_end_does_not_blame_what_has_just_arrived(autojump_clock: object) -> None:
    load = a_load(rate=10.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(load.supply.pace)
        load.supply.allow(math.inf)
        await trio.sleep(0.005)
        load.supply.close(trio.current_time())
        nursery.cancel_scope.cancel()
    assert errors(load) == {}


async def test_each_arrival_wakes_one_of_those_who_wait_in_turn(autojump_clock: object) -> None:
    load = a_load(rate=1.0)
    woken: list[str] = []
    for name in "abc":
        load.supply.wait(lambda name=name: woken.append(name))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(load.supply.pace)
        load.supply.allow(math.inf)
        assert woken == []
        await trio.sleep(1.5)
        assert woken == ["a", "b"]
        load.supply.pass_on()
        assert woken == ["a", "b", "c"]
        nursery.cancel_scope.cancel()
