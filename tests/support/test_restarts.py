"""Pauses between connections, and how many restarts there may be."""

from __future__ import annotations

import math
from random import Random

import pytest

from trimcp.support.restarts import RestartCount, Restarts


def test_pauses_are_drawn_below_a_ceiling_that_doubles() -> None:
    restarts, random = Restarts(first_pause=0.5, longest_pause=6), Random(5)
    for in_a_row, ceiling in enumerate([0.5, 1, 2, 4, 6, 6, 6]):
        drawn = [restarts.pause(in_a_row, random) for _ in range(2_000)]
        assert 0 <= min(drawn) < ceiling / 50
        assert ceiling * 0.98 < max(drawn) <= ceiling
        assert sum(drawn) / len(drawn) == pytest.approx(ceiling / 2, rel=0.1)
    assert restarts.pause(10_000, random) <= 6


def test_the_same_seed_gives_the_same_pauses() -> None:
    pauses = [[Restarts().pause(n, random) for n in range(9)] for random in (Random(1), Random(1), Random(2))]
    assert pauses[0] == pauses[1] != pauses[2]


@pytest.mark.parametrize("value", [0, -1.0])
def test_what_would_never_or_always_happen_is_refused(value: float) -> None:
    for build in (
        lambda: Restarts(most=int(value)),
        lambda: Restarts(within=value),
        lambda: Restarts(connect_timeout=value),
    ):
        with pytest.raises(ValueError, match=r"(greater than 0|at least 1), not"):
            build()


@pytest.mark.parametrize("name", ["first_pause", "longest_pause", "lasting"])
def test_a_pause_may_be_no_pause_but_not_less(name: str) -> None:
    assert Restarts(**{name: 0}).pause(3, Random(1)) >= 0
    for value in (-0.5, math.nan):
        with pytest.raises(ValueError, match=f"{name} is a number of at least 0"):
            Restarts(**{name: value})


def test_a_connection_that_lasted_ends_the_row() -> None:
    count = RestartCount(Restarts(lasting=10), Random(1))
    for since in (None, 95, None):
        count.ended(100, since)
    assert count.in_a_row == 3
    count.ended(100, 90)
    assert count.in_a_row == 0


def test_too_many_restarts_within_the_time_are_given_up() -> None:
    count = RestartCount(Restarts(most=2, within=60, first_pause=0), Random(1))
    assert [count.next_pause(now) for now in (0, 30, 59)] == [0, 0, None]
    assert count.next_pause(60, 5) == 5  # the first is no longer counted
    assert count.next_pause(61) is None
    count.forget()
    assert count.next_pause(61) == 0
