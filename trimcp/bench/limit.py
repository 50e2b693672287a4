"""The search for the highest rate at which a server keeps to its requirements. Sans-I/O."""

from __future__ import annotations

import math
from typing import Final

import attrs

from trimcp.bench.report import Report

_NARROW: Final = 1.1  # the search ends where the rates that held and broke are this close
_MOST: Final = 24  # measurements
_SURE: Final = 0.95
_REPEATS: Final = 2  # measurements at each of the two last rates


@attrs.frozen
class Trial:
    """One measurement of the search."""

    rate: float  # calls that should begin per second
    confidence: float  # the share of resamples that kept to the requirements
    report: Report | None = None
    why: str = ""  # what broke, "" if nothing did

    @property
    def held(self) -> bool:
        """Whether the requirements were rather kept than not."""
        return self.confidence >= 0.5


@attrs.frozen
class Knee:
    """What the search found."""

    rate: float | None  # the highest rate that rather held than not; None if none did
    sure: float | None  # the highest rate that held in 95 % of the resamples, and all below it
    broken: float | None  # the lowest rate that held in 5 % at most, and all above it; None if none broke


@attrs.define(eq=False)
class LimitSearch:
    """Doubles the rate until the requirements break, halves the distance until it is small, and repeats both ends."""

    start: float  # the first rate, in calls per second
    most: float = math.inf  # the highest rate to try
    trials: list[Trial] = attrs.field(init=False, factory=list)

    def next_rate(self) -> float | None:
        """Return the rate to measure next, or None: the search is over."""
        if not self.trials:
            return self.start
        if len(self.trials) >= _MOST:
            return None
        likely = self._likely()
        held = max((rate for rate, share in likely.items() if share >= 0.5), default=None)
        broke = min((rate for rate, share in likely.items() if share < 0.5), default=None)
        if broke is None:
            assert held is not None
            return min(2 * held, self.most) if held < self.most else self._again(held)
        if held is None:
            return broke / 2 if broke > self.start / 64 else None
        if broke / held > _NARROW:
            return math.sqrt(held * broke)
        return self._again(held, broke)

    def _again(self, *rates: float) -> float | None:
        """Return one of these rates that was not measured often enough, or None."""
        counts = {rate: sum(each.rate == rate for each in self.trials) for rate in rates}
        return next((rate for rate, count in counts.items() if count < _REPEATS), None)

    def knee(self) -> Knee:
        """Return the highest rate that held, and between which rates it lies."""
        likely = self._likely()
        return Knee(
            max((rate for rate, share in likely.items() if share >= 0.5), default=None),
            max((rate for rate, share in likely.items() if share >= _SURE), default=None),
            min((rate for rate, share in likely.items() if share <= 1 - _SURE), default=None),
        )

    def _likely(self) -> dict[float, float]:
        """Return by rate how likely it holds: what was measured, made to fall with the rate.

        Neighbours that rise where they should fall are replaced by their mean (isotonic regression).
        """
        blocks: list[tuple[float, list[float]]] = []  # the sum of confidences, and the rates
        for trial in sorted(self.trials, key=lambda each: each.rate):
            blocks.append((trial.confidence, [trial.rate]))
            while len(blocks) > 1 and _rises(*blocks[-2:]):
                (one, rates), (other, more) = blocks[-2:]
                blocks[-2:] = [(one + other, rates + more)]
        return {rate: total / len(rates) for total, rates in blocks for rate in rates}


def _rises(before: tuple[float, list[float]], after: tuple[float, list[float]]) -> bool:
    same = before[1][-1] == after[1][0]  # measured twice
    return same or before[0] / len(before[1]) < after[0] / len(after[1])
