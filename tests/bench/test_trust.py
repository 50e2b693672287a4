"""The figures against servers of which they are known: a distribution, a stall, answers that are lost, a slow phase."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
import trio

from tests.bench.support import FakeChannel, reply
from tests.bench.test_engine import counts, measured
from trimcp.bench.report import Report

RESOLVED = 0.0052  # buckets are 1 % wide
PERCENTILES = (10, 50, 75, 90, 99, 99.9)


def percentiles(report: Report) -> list[float]:
    return [report.latency.percentile(each) or 0.0 for each in PERCENTILES]


def known(times: list[float]) -> list[float]:
    times = sorted(times)
    return [times[max(math.ceil(round(each / 100 * len(times), 6)), 1) - 1] for each in PERCENTILES]


@pytest.mark.parametrize("options", [{"under_way": 8}, {"rate": 300.0}, {"rate": 300.0, "spacing": "poisson"}])
async def test_percentiles_are_those_of_the_distribution(options: dict[str, Any], autojump_clock: object) -> None:
    chance = Random(5)
    delays: list[float] = []

    def serve(message: dict[str, Any], channel: FakeChannel) -> None:
        delays.append(0.002 + chance.expovariate(1 / 0.005))
        channel.answer_after(delays[-1], reply(message))

    report = await measured(serve, count=20_000, **options)
    assert counts(report) == {}
    assert percentiles(report) == pytest.approx(known(delays), rel=RESOLVED)
    exact = [0.002 - 0.005 * math.log(1 - each / 100) for each in PERCENTILES]
    assert percentiles(report)[:5] == pytest.approx(exact[:5], rel=0.05)


def stalling(start: float, end: float, delay: float) -> Any:
    """A server that answers nothing between two moments, and then what came meanwhile."""

    def serve(message: dict[str, Any], channel: FakeChannel) -> None:
        now = trio.current_time() - began
        channel.answer_after((end - now if start <= now < end else 0.0) + delay, reply(message))

    began = trio.current_time()
    return serve


async def test_a_stall_counts_for_every_call_that_was_due_in_it(autojump_clock: object) -> None:
    report = await measured(stalling(5.0, 7.0, 0.01), rate=100.0, seconds=19.995)
    due = [number / 100 for number in range(2000)]
    expected = [0.01 + (7.0 - each if 5.0 <= each < 7.0 else 0.0) for each in due]
    assert percentiles(report) == pytest.approx(known(expected), rel=RESOLVED, abs=0.0005)
    assert report.latency.percentile(99) == pytest.approx(1.81, rel=0.01)
    assert report.late == 0


async def test_a_stall_counts_also_for_calls_that_found_no_place(autojump_clock: object) -> None:
    """With four places the calls of two seconds wait in us: their time is what users would have waited all the same."""
    report = await measured(stalling(5.0, 7.0, 0.01), rate=100.0, seconds=19.995, under_way=4)
    assert report.latency.percentile(99) == pytest.approx(1.9, rel=0.15)
    assert report.late > 190


async def test_a_closed_loop_hides_the_stall_and_says_that_it_is_not_corrected(autojump_clock: object) -> None:
    report = await measured(stalling(5.0, 7.0, 0.01), under_way=1, seconds=20.0)
    assert report.latency.percentile(99.9) == pytest.approx(0.01, rel=0.02)
    assert report.latency.most == pytest.approx(2.01, rel=0.02)


async def test_answers_that_are_lost_are_timeouts_and_no_times(autojump_clock: object) -> None:
    chance = Random(3)
    lost: list[bool] = []

    def serve(message: dict[str, Any], channel: FakeChannel) -> None:
        if message["method"] == "tools/call":
            lost.append(chance.random() < 0.1)
            if not lost[-1]:
                channel.answer_after(0.01, reply(message))

    report = await measured(serve, count=2000, rate=100.0, timeout=0.5)
    assert report.timed_out == sum(lost) == pytest.approx(200, rel=0.2)
    assert report.latency.count == 2000 - sum(lost)
    assert report.latency.most == pytest.approx(0.01, rel=0.02)


async def test_a_slow_phase_is_seen_when_it_was(autojump_clock: object) -> None:
    def serve(message: dict[str, Any], channel: FakeChannel) -> None:
        slow = 4.0 <= trio.current_time() - began < 6.0
        channel.answer_after(0.2 if slow else 0.02, reply(message))

    began = trio.current_time()
    report = await measured(serve, rate=50.0, seconds=10.0)
    medians = [each.p50 for each in report.over_time]
    assert [each is not None and each > 0.1 for each in medians] == [second in (4, 5) for second in range(10)]
    slow = [each.start for each in report.slices if (each.whole.percentile(50) or 0.0) > 0.1]
    assert (min(slow), max(slow)) == (pytest.approx(4.25, abs=0.3), pytest.approx(6.0, abs=0.3))
