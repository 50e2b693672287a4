"""The line through what was measured, and the verdict on it."""

from __future__ import annotations

import random

from tests.soak.slopes import Sample, Track, theil_sen


def track(grows: float, *, jitter: int = 0, jump: int = 0) -> Track:
    """A process that grows by so many bytes with each call, takes more at first, and jitters."""
    rng = random.Random(1)
    made = Track("p", base={"tasks": 3}, rest={"tasks": 3})
    for n in range(300):
        memory = 50_000_000 + int(grows * n * 100) + rng.randrange(-jitter, jitter + 1) + (jump * min(n, 98) // 98)
        made.samples.append(Sample(n, n * 100, memory, {"tasks": 3 + n % 5}))
    return made


def test_a_line_is_found_whatever_else_there_is() -> None:
    points = [(x, 3.0 * x + (1e9 if x % 10 == 0 else 0)) for x in range(200)]
    assert abs(theil_sen(points) - 3.0) < 1e-6
    assert theil_sen([]) == theil_sen([(1, 1)]) == 0.0


def test_what_does_not_grow_has_no_faults() -> None:
    assert track(0, jitter=300_000).faults() == []
    assert track(0, jump=30_000_000).faults() == [], "what the first rounds take is no slope"
    assert track(30).faults() == []


def test_what_grows_is_a_fault_and_so_is_what_stays() -> None:
    [fault] = track(60, jitter=100_000).faults()
    assert "memory grows by" in fault
    left = track(0)
    left.rest = {"tasks": 4}
    assert left.faults() == ["p: 4 tasks are left, there were 3"]
    left.rest, left.complaints = left.base, 2
    assert left.faults() == ["p: 2 errors were logged"]
    assert Track("p").faults() == ["p: too little was measured, 10,000 calls are needed"]


def test_the_report_has_every_figure() -> None:
    report = track(10).report()
    assert report["calls"] == 29_900
    assert report["bytes_per_call"] == 10.0
    assert report["per_thousand_calls"] == {"tasks": 0.0}
