"""A token bucket: what goes through at once, on average, and when the next may."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trimcp.support.rates import TokenBucket


def test_it_begins_full_and_fills_at_its_rate() -> None:
    bucket = TokenBucket(2, 3, now=10)
    assert [bucket.take(10) for _ in range(4)] == [True, True, True, False]
    assert bucket.wait() == pytest.approx(0.5)
    assert not bucket.take(10.4)
    assert bucket.take(10.5)
    assert bucket.refill(100) == 3


@given(st.lists(st.floats(0, 3), max_size=60), st.integers(1, 50), st.integers(1, 50))
@example([0.0, *[0.98] * 58, 0.98 - 4e-8], 50, 50)  # what rounding may lack is not added up
def test_no_more_goes_through_than_the_burst_and_the_rate(pauses: list[float], rate: int, burst: int) -> None:
    bucket, now, taken = TokenBucket(rate, burst, 0), 0.0, 0
    for pause in pauses:
        now += pause
        while bucket.take(now):
            taken += 1
    assert taken <= burst + now * rate + 1e-6


def test_who_waits_as_long_as_told_gets_a_token() -> None:
    for rate in (0.1, 1 / 3, 7):
        bucket = TokenBucket(rate, 1, now=1e5)
        assert bucket.take(1e5)
        assert bucket.take(1e5 + bucket.wait())
