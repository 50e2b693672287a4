"""Times in buckets: what is read back is what was put in, to within one percent."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimcp.bench.report import Histogram

TIMES = st.lists(st.floats(1e-8, 1e5), min_size=1, max_size=300)
PERCENTS = st.one_of(st.sampled_from([0.0, 50.0, 90.0, 99.0, 99.9, 100.0]), st.floats(0.0, 100.0))


def a_histogram(times: list[float]) -> Histogram:
    histogram = Histogram()
    histogram.add(times)
    return histogram


def exact(times: list[float], percent: float) -> float:
    rank = max(1, math.ceil(round(percent / 100 * len(times), 6)))
    return sorted(times)[rank - 1]


@given(TIMES, PERCENTS)
def test_a_percentile_is_that_of_the_sorted_times_to_within_one_percent(times: list[float], percent: float) -> None:
    found = a_histogram(times).percentile(percent)
    assert found == pytest.approx(exact(times, percent), rel=0.01)


@given(TIMES)
def test_what_is_counted_exactly_is_exact(times: list[float]) -> None:
    histogram = a_histogram(times)
    assert histogram.count == len(times)
    assert (histogram.least, histogram.most) == (min(times), max(times))
    assert histogram.mean == pytest.approx(sum(times) / len(times))
    assert (histogram.percentile(0), histogram.percentile(100)) == (min(times), max(times))


@given(TIMES, TIMES)
def test_merging_is_adding(some: list[float], more: list[float]) -> None:
    merged = Histogram.merged([a_histogram(some), a_histogram(more)])
    whole = a_histogram(some + more)
    assert list(merged.buckets()) == list(whole.buckets())
    assert (merged.count, merged.least, merged.most) == (whole.count, whole.least, whole.most)
    assert merged.total == pytest.approx(whole.total)


@given(TIMES)
def test_every_time_lies_below_the_edge_of_its_bucket(times: list[float]) -> None:
    buckets = list(a_histogram(times).buckets())
    assert sum(count for _, count in buckets) == len(times)
    assert buckets == sorted(buckets)
    for edge, count in buckets:
        inside = [each for each in times if edge / 1.0101 <= each <= edge * (1 + 1e-9)]
        assert len(inside) >= count


def test_the_memory_of_a_million_times_is_that_of_its_buckets() -> None:
    histogram = Histogram()
    for _ in range(100):
        histogram.add([each * 1e-6 for each in range(1, 10_001)])
    assert histogram.count == 1_000_000
    assert len(list(histogram.buckets())) < 1_000


def test_a_time_of_nothing_and_of_for_ever_have_a_place() -> None:
    histogram = a_histogram([0.0, -1.0, 1e12])
    assert histogram.count == 3
    assert (histogram.least, histogram.most) == (1e-8, 1e9)


def test_of_nothing_nothing_is_known() -> None:
    histogram = a_histogram([])
    assert (histogram.mean, histogram.percentile(50), list(histogram.buckets())) == (None, None, [])
    histogram = Histogram.merged([histogram, Histogram()])
    assert (histogram.count, histogram.least) == (0, 0.0)
    assert Histogram.merged([histogram, a_histogram([2.0])]).least == 2.0


def test_a_percentile_of_many_is_not_moved_by_a_rounding() -> None:
    times = [float(each) for each in range(1, 1001)]
    assert a_histogram(times).percentile(99.9) == pytest.approx(999, rel=0.006)


def test_every_time_is_in_a_bar() -> None:
    spread = a_histogram([0.0001 * 1.07**power for power in range(150)])
    narrow = a_histogram([0.001] * 999 + [0.01])
    edges, shares = Histogram.bars([spread, narrow], 90)
    assert len(edges) < 100
    assert [sum(each) for each in shares] == [pytest.approx(100), pytest.approx(100)]
    whole = [upper for share, upper in zip(shares[1], edges[1:], strict=True) if share > 99]
    assert whole == [pytest.approx(0.001, rel=0.15)]
    assert Histogram.bars([Histogram()], 90) == ([], [[]])
