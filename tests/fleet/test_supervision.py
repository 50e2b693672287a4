"""The settings of a supervised upstream: how long its pauses are, and what is refused."""

from __future__ import annotations

import math
from random import Random

import pytest

from trimcp.cleaning import one_line
from trimcp.fleet import Breaker, Health, Restarts, UpstreamState, UpstreamStatistics


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
        lambda: Breaker(failures=int(value)),
        lambda: Breaker(open_for=value),
        lambda: Health(owing=value),
        lambda: Health(idle=value),
        lambda: Health(patience=value),
    ):
        with pytest.raises(ValueError, match=r"(greater than 0|at least 1), not"):
            build()
    with pytest.raises(ValueError, match="greater than 0, not nan"):
        Health(idle=math.nan)
    assert Health(idle=math.inf).idle == math.inf


@pytest.mark.parametrize("name", ["first_pause", "longest_pause", "lasting"])
def test_a_pause_may_be_no_pause_but_not_less(name: str) -> None:
    assert Restarts(**{name: 0}).pause(3, Random(1)) >= 0
    for value in (-0.5, math.nan):
        with pytest.raises(ValueError, match=f"{name} is a number of at least 0"):
            Restarts(**{name: value})


def test_the_last_reason_is_the_newest() -> None:
    statistics = UpstreamStatistics(UpstreamState.UP, 0, None, 1, 0, 0, 0, 0, 0, 0, 0, ())
    assert statistics.last_reason is None
    statistics = UpstreamStatistics(UpstreamState.UP, 0, None, 1, 0, 0, 0, 0, 0, 0, 0, ("old", "new"))
    assert statistics.last_reason == "new"


def test_what_a_server_said_fits_into_a_line_of_a_log() -> None:
    assert one_line("it died:\n  \x1b[31mlast\twords\r\n") == "it died: \\x1b[31mlast words"
    assert len(one_line("x " * 10_000, 500)) <= 500
