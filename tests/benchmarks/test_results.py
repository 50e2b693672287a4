"""What a run has found, and the statistics made of it."""

from __future__ import annotations

import pytest
from results import BUSY, Failure, Results, Series, Spread, paired_ratio


def test_a_spread_is_the_median_and_the_range() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([4.0, 1.0]) == Spread(2.5, 1.0, 4.0)
    assert Spread.of([5.0]).noise == 0.0
    assert Spread.of([9.0, 10.0, 12.0]).noise == pytest.approx(0.3)


def test_a_ratio_is_that_of_the_medians_and_its_range_that_of_the_rounds() -> None:
    # The machine was twice as slow in the second round, for both.
    found = paired_ratio([10.0, 20.0, 11.0], [20.0, 40.0, 20.0])
    assert found == Spread(11 / 20, 0.5, 0.55)


@pytest.mark.parametrize(("ours", "theirs"), [([], [1.0]), ([1.0], []), ([1.0], [0.0])])
def test_there_is_no_ratio_to_nothing(ours: list[float], theirs: list[float]) -> None:
    assert paired_ratio(ours, theirs) is None


def test_a_round_that_a_peer_did_not_finish_leaves_the_others() -> None:
    assert paired_ratio([1.0, 2.0, 3.0], [2.0, 4.0]) == Spread(2 / 3, 0.5, 0.5)


def some() -> Results:
    found = Results(made={"date": "today", "pulse_ms": [1.5]}, machine={"cores": "2"}, versions={"trimcp": "0.1.0"})
    found.add("calls", "cpu", "trimcp", "µs", [12.0])
    found.add("calls", "cpu", "other", "µs", [30.123456789, 20.0])
    found.add("calls", "cpu", "trimcp", "µs", [14.0])
    found.fail("calls", "third", 'said "no"')
    return found


def test_values_of_further_rounds_are_added() -> None:
    found = some()
    assert found.values("calls", "cpu", "trimcp") == [12.0, 14.0]
    assert found.values("calls", "rate", "trimcp") == []
    assert found.peers("calls", "cpu") == ["trimcp", "other"]
    assert [one.peer for one in found.series] == ["trimcp", "other"]


def test_values_have_no_more_digits_than_they_deserve() -> None:
    assert some().values("calls", "cpu", "other") == [30.1235, 20.0]


def test_the_best_is_the_least_or_the_greatest_median() -> None:
    found = some()
    assert found.best("calls", "cpu", ["trimcp", "other", "third"]) == "trimcp"
    assert found.best("calls", "cpu", ["trimcp", "other"], more=True) == "other"
    assert found.best("calls", "cpu", ["third"]) is None


def test_the_same_failure_is_noted_once() -> None:
    found = some()
    found.fail("calls", "third", 'said "no"')
    found.fail("calls", "third", "went away")
    assert found.failures == [Failure("calls", "third", 'said "no"'), Failure("calls", "third", "went away")]


def test_a_busy_generator_marks_what_it_measured() -> None:
    found = some()
    found.add("calls", BUSY, "trimcp", "share of a core", [0.9, 0.81, 0.2])
    found.add("calls", BUSY, "other", "share of a core", [0.8, 0.9, 0.1])
    assert found.saturated("calls", "trimcp")
    assert not found.saturated("calls", "other")
    assert not found.saturated("calls", "third")


@pytest.mark.parametrize("found", [some(), Results()])
def test_json_is_read_back_as_it_was(found: Results) -> None:
    again = Results.from_json(found.to_json())
    assert again == found
    again.add("calls", "cpu", "trimcp", "µs", [16.0])
    assert again.values("calls", "cpu", "trimcp")[-1:] == [16.0]
    assert again != found


def test_json_has_a_line_for_each_series() -> None:
    lines = some().to_json().splitlines()
    assert sum('"figure"' in line for line in lines) == 2


def test_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match="format 0"):
        Results.from_json(Results().to_json().replace('"format": 1', '"format": 0'))


def test_a_series_knows_its_spread() -> None:
    assert Series("a", "b", "c", "ms", [1.0, 3.0]).spread.median == 2.0


def test_a_part_is_put_into_a_whole_run() -> None:
    whole = Results({"whole": True, "date": "monday", "load_average": [1]}, {"cores": "2"}, {"mcp": "1", "trio": "1"})
    whole.add("a", "cpu", "us", "µs", [1, 2])
    whole.add("b", "cpu", "us", "µs", [3])
    whole.fail("b", "them", "fell")
    part = Results({"date": "tuesday", "command": "x --only b", "load_average": [7]}, {}, {"trio": "2", "grpcio": "3"})
    part.add("b", "cpu", "us", "µs", [5])
    both = part.put_into(part.put_into(whole))
    assert (both.values("a", "cpu", "us"), both.values("b", "cpu", "us"), both.failures) == ([1, 2], [5], [])
    assert both.versions == {"mcp": "1", "trio": "1", "grpcio": "3"}
    assert (both.made["date"], both.made["whole"], both.machine) == ("monday", True, {"cores": "2"})
    assert both.made["parts"] == [{"date": "tuesday", "command": "x --only b", "load_average": [7], "cells": ["b"]}]
    assert Results.from_json(both.to_json()) == both
