"""The search for the highest rate that holds, on servers that are a formula."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from trimcp.bench.limit import LimitSearch, Trial


def searched(confidence: Callable[[float], float], start: float = 50.0, **options: float) -> LimitSearch:
    search = LimitSearch(start, **options)
    while (rate := search.next_rate()) is not None:
        search.trials.append(Trial(rate, confidence(rate)))
    return search


@pytest.mark.parametrize("limit", [60.0, 130.0, 999.0, 20_000.0])
def test_the_limit_is_found_within_a_tenth(limit: float) -> None:
    search = searched(lambda rate: 1.0 if rate <= limit else 0.0)
    knee = search.knee()
    assert knee.rate is not None
    assert knee.broken is not None
    assert limit / 1.1 < knee.rate <= limit < knee.broken <= knee.rate * 1.1
    assert knee.sure == knee.rate
    assert len(search.trials) < 20


def test_both_ends_are_measured_twice() -> None:
    search = searched(lambda rate: 1.0 if rate <= 300 else 0.0)
    knee = search.knee()
    assert [sum(each.rate == rate for each in search.trials) for rate in (knee.rate, knee.broken)] == [2, 2]


def test_a_start_above_the_limit_goes_down() -> None:
    knee = searched(lambda rate: 1.0 if rate <= 7 else 0.0).knee()
    assert knee.rate == pytest.approx(7, rel=0.1)


def test_a_server_that_never_holds_is_given_up() -> None:
    search = searched(lambda rate: 0.0)
    assert search.knee().rate is None
    assert len(search.trials) < 9


def test_a_generator_that_is_at_its_limit_ends_the_search() -> None:
    search = searched(lambda rate: 1.0, most=400.0)
    assert (search.knee().rate, search.knee().broken) == (400.0, None)
    assert [each.rate for each in search.trials] == [50, 100, 200, 400, 400]


def test_one_disturbed_measurement_does_not_decide() -> None:
    told = [1.0, 0.1]  # the second measurement, at 100, met other work on the machine

    def confidence(rate: float) -> float:
        return told.pop(0) if told else float(rate <= 1000)

    knee = searched(confidence).knee()
    assert knee.rate == pytest.approx(1000, rel=0.1) or knee.rate == pytest.approx(100, rel=0.1)
    assert knee.sure is not None
    assert knee.broken is not None


def test_where_it_is_a_matter_of_chance_the_range_says_so() -> None:
    chance = Random(1)
    knee = searched(lambda rate: min(max((1100 - rate) / 200 + chance.uniform(-0.1, 0.1), 0.0), 1.0)).knee()
    assert knee.rate == pytest.approx(1000, rel=0.12)
    assert knee.sure is not None
    assert knee.broken is not None
    assert knee.sure <= knee.rate < knee.broken
