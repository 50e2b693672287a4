"""What is counted when, and what is kept of what a server said."""

from __future__ import annotations

from itertools import pairwise

import pytest

from trimcp.bench.tally import Tally


def a_tally(began: float | None = 0.0) -> Tally:
    tally = Tally()
    if began is not None:
        tally.begin(began)
    return tally


def test_nothing_right_is_counted_before_the_beginning() -> None:
    tally = a_tally(None)
    tally.right(0.5, 1.0)
    tally.reported(3)
    tally.given_up(timeout=True)
    tally.begin(2.0)
    tally.right(0.25, 2.5)
    tally.end(3.0)
    assert (tally.calls, tally.progress, tally.timed_out) == (1, 0, 0)
    assert (tally.latency.count, tally.latency.most) == (1, 0.25)


def test_a_failure_in_the_warm_up_is_a_failure() -> None:
    tally = a_tally(None)
    tally.wrong("wrong text", "boo", 1.0)
    tally.begin(2.0)
    tally.end(3.0)
    assert (tally.failed, tally.errors["wrong text"].count, tally.over_time[0].errors) == (1, 1, 0)


def test_what_comes_after_the_end_is_seen_in_the_times_only() -> None:
    tally = a_tally()
    tally.right(0.1, 0.5)
    tally.end(1.0)
    tally.right(7.0, 6.0)
    tally.reported(1)
    tally.given_up(timeout=False)
    assert (tally.calls, tally.progress, tally.cancelled) == (1, 0, 0)
    assert (tally.latency.count, tally.latency.most) == (2, 7.0)
    assert tally.after == 1


def test_a_call_that_is_cut_off_counts_in_part_too() -> None:
    tally = a_tally(None)
    tally.begin(10.0)
    tally.right(4.0, 11.0)  # a quarter of it lies inside
    tally.right(0.5, 11.5)
    tally.end(12.0)
    tally.right(2.0, 13.0)  # half
    tally.right(4.0, 14.0)  # half, from the very beginning to the very end
    tally.right(16.0, 18.0)  # two sixteenths
    assert (tally.calls, tally.after) == (2, 3)
    assert tally.parts == 0.25 + 1 + 0.5 + 0.5 + 0.125


def test_calls_are_counted_in_the_second_they_end_in() -> None:
    tally = a_tally(10.0)
    tally.right(0.1, 10.2)
    tally.right(0.3, 10.999)
    tally.wrong("x", "", 11.0)
    tally.right(0.5, 13.5)
    tally.end(14.0)
    seconds = [(each.second, each.calls, each.errors) for each in tally.over_time]
    assert seconds == [(0, 2, 0), (1, 0, 1), (2, 0, 0), (3, 1, 0)]
    assert tally.over_time[0].p50 == 0.1
    assert tally.over_time[0].p99 == 0.3
    assert tally.over_time[1].p50 is None


@pytest.mark.parametrize(("end", "seconds"), [(2.2, [1, 2]), (2.7, [1, 1, 1]), (0.3, [1])])
def test_an_end_that_comes_late_is_no_second_of_its_own(end: float, seconds: list[int]) -> None:
    tally = a_tally()
    for now in (0.1, 1.1, 2.1):
        if now < end:
            tally.right(0.1, now)
    tally.end(end)
    assert [each.calls for each in tally.over_time] == seconds


def test_what_is_recent_is_what_came_since_the_last_one() -> None:
    tally = a_tally()
    tally.right(0.1, 0.2)
    tally.reported(4)
    times, reported = tally.take_recent(0.5)
    assert (times.count, reported) == (1, 4)
    tally.right(0.3, 1.2)  # the second that ends in between takes nothing away from that
    times, reported = tally.take_recent(1.5)
    assert (times.count, times.most, reported) == (1, 0.3, 0)
    assert tally.latency.count == 2


def test_the_many_are_counted_like_the_few() -> None:
    tally = a_tally()
    for number in range(10_000):
        tally.right(1e-4, number / 10_000)
    tally.end(1.0)
    assert (tally.calls, tally.latency.count, tally.over_time[0].calls) == (10_000, 10_000, 10_000)


def test_the_first_example_is_kept_cut_and_harmless() -> None:
    tally = a_tally()
    tally.wrong("wrong text", "red \x1b[31m\nand\u202e " + "x" * 500, 0.1)
    tally.wrong("wrong text", "another", 0.2)
    tally.wrong("no JSON-RPC", {"a": "\x07"}, 0.3)
    found = tally.errors["wrong text"]
    assert found.count == 2
    assert found.example.startswith("red \\x1b[31m and\\u202e xxx")
    assert found.example.endswith("x…")
    assert len(found.example) < 230
    assert tally.errors["no JSON-RPC"].example == "{'a': '\\x07'}"


def test_a_server_cannot_make_up_kinds_without_end() -> None:
    tally = a_tally()
    for number in range(1000):
        tally.wrong(f"error {number}", "no", 0.1)
    assert len(tally.errors) == 41
    assert tally.errors["other"].count == 960
    assert tally.failed == 1000


def test_the_mean_follows_what_answers_take() -> None:
    tally = a_tally(None)
    tally.right(1.0, 0.1)
    assert tally.mean == 1.0
    for _ in range(200):
        tally.right(3.0, 0.1)
    assert tally.mean == pytest.approx(3.0, rel=0.01)


# Slices


def test_a_slice_has_what_came_since_the_last_one_by_request() -> None:
    tally = a_tally(10.0)
    tally.right(0.1, 10.1, "echo")
    tally.right(0.2, 10.2, "list")
    tally.wrong("boom", "", 10.2)
    tally.cut(10.25, cpu=0.5, rss=7)
    tally.right(0.3, 10.3, "echo")
    tally.cut(10.5)
    first, second = tally.slices
    assert (first.start, first.seconds, first.cpu, first.rss, first.errors) == (0.0, 0.25, 0.5, 7, {"boom": 1})
    assert {label: times.count for label, times in first.times.items()} == {"echo": 1, "list": 1}
    assert (second.start, second.whole.most, second.cpu) == (0.25, 0.3, None)
    assert tally.requests["echo"].count == 2
    tally.end(11.0)
    tally.right(0.9, 11.5, "echo")
    assert tally.requests["echo"].count == 3


def test_however_long_it_takes_there_are_few_slices_and_nothing_is_lost() -> None:
    tally = a_tally()
    now = 0.0
    while now < 100.0:
        now += tally.slice_length
        tally.right(0.1, now, "echo")
        tally.cut(now, cpu=1.0)
    assert 30 <= len(tally.slices) < 60
    assert tally.slice_length == 2.0
    assert sum(each.whole.count for each in tally.slices) == tally.calls
    assert all(each.start + each.seconds == later.start for each, later in pairwise(tally.slices))


def test_the_rest_at_the_end_is_no_slice_of_its_own() -> None:
    tally = a_tally()
    for now in (0.25, 0.5, 0.55):
        tally.right(0.1, now, "echo")
        tally.cut(now, lag=now)
    assert [(each.seconds, each.whole.count, each.lag) for each in tally.slices] == [
        (0.25, 1, 0.25),
        (pytest.approx(0.3), 2, 0.55),
    ]


def test_requests_without_end_are_counted_together() -> None:
    tally = a_tally()
    for number in range(150):
        tally.right(0.1, 0.1, f"tool{number}")
    tally.cut(1.0)
    assert len(tally.requests) == 101
    assert tally.requests["others"].count == 50
    assert len(tally.slices[0].times) == 101
