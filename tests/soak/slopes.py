"""Whether something grows: a robust line through what was measured, and the verdict on it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import attrs

__all__ = ["BOUND", "Sample", "Track", "theil_sen"]

BOUND = 40.0
"""Bytes per call that a soaked process may grow by: promise 12."""

_WARM = 3  # the first one of so many parts only warms up: the allocator keeps what the first rounds took
_ENOUGH = 10_000  # calls after the warm-up; what an allocator does by chance, some 400 KiB, is less than the bound then
_MOST = 400  # samples a slope is taken from; pairs grow with the square


@attrs.frozen
class Sample:
    """One look at a process: when, after how many calls, how many bytes it had resident, and what else it counts."""

    seconds: float
    calls: int
    memory: int
    counts: dict[str, int] = attrs.field(factory=dict)


def theil_sen(points: Sequence[tuple[float, float]]) -> float:
    """The median of the slopes between all pairs of points: a few wild ones do not move it."""
    step = max(1, len(points) // _MOST)
    chosen = points[::step]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for n, a in enumerate(chosen) for b in chosen[n + 1 :] if b[0] > a[0]]
    return median(slopes) if slopes else 0.0


@attrs.define
class Track:
    """What was seen of one process.

    Attributes:
        name: of the process.
        samples: looks at it while it worked.
        base, rest: what it counted before the first client came and after the last one went; they must be equal.
        complaints: errors in its log that nobody asked for.
    """

    name: str
    samples: list[Sample] = attrs.field(factory=list)
    base: dict[str, int] = attrs.field(factory=dict)
    rest: dict[str, int] = attrs.field(factory=dict)
    complaints: int = 0

    @property
    def warm(self) -> list[Sample]:
        """The samples that count."""
        return self.samples[len(self.samples) // _WARM :]

    @property
    def slope(self) -> float:
        """Bytes of memory per call."""
        return theil_sen([(each.calls, each.memory) for each in self.warm])

    def slope_of(self, count: str) -> float:
        """How many more of something there are after a thousand calls; reported, and judged by `rest`."""
        return 1_000 * theil_sen([(each.calls, each.counts.get(count, 0)) for each in self.warm])

    def faults(self) -> list[str]:
        """What is wrong, a line each."""
        found = []
        if not self.warm or self.warm[-1].calls - self.warm[0].calls < _ENOUGH:
            found.append(f"{self.name}: too little was measured, {_ENOUGH:,} calls are needed")
        elif self.slope > BOUND:
            found.append(f"{self.name}: memory grows by {self.slope:.1f} bytes per call, at most {BOUND:g} are allowed")
        if self.complaints:
            found.append(f"{self.name}: {self.complaints} errors were logged")
        found += [
            f"{self.name}: {self.rest.get(what)} {what} are left, there were {count}"
            for what, count in self.base.items()
            if self.rest.get(what) != count
        ]
        return found

    def report(self) -> dict[str, object]:
        """The figures as JSON."""
        last = self.samples[-1] if self.samples else Sample(0, 0, 0)
        return {
            "calls": last.calls,
            "bytes_per_call": round(self.slope, 2),
            "memory_first": self.warm[0].memory if self.warm else 0,
            "memory_last": last.memory,
            "per_thousand_calls": {what: round(self.slope_of(what), 3) for what in self.base},
            "base": self.base,
            "rest": self.rest,
        }
