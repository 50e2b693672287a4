"""The settings of a supervised upstream: what is refused."""

from __future__ import annotations

import math

import pytest

from trimcp.fleet import Breaker, Health, UpstreamState, UpstreamStatistics
from trimcp.support.cleaning import one_line


@pytest.mark.parametrize("value", [0, -1.0])
def test_what_would_never_or_always_happen_is_refused(value: float) -> None:
    for build in (
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


def test_the_last_reason_is_the_newest() -> None:
    statistics = UpstreamStatistics(UpstreamState.UP, 0, None, 1, 0, 0, 0, 0, 0, 0, 0, ())
    assert statistics.last_reason is None
    statistics = UpstreamStatistics(UpstreamState.UP, 0, None, 1, 0, 0, 0, 0, 0, 0, 0, ("old", "new"))
    assert statistics.last_reason == "new"


def test_what_a_server_said_fits_into_a_line_of_a_log() -> None:
    assert one_line("it died:\n  \x1b[31mlast\twords\r\n") == "it died: \\x1b[31mlast words"
    assert len(one_line("x " * 10_000, 500)) <= 500
