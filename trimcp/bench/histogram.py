"""Times in buckets whose edges grow by a fixed ratio: any number of them in little memory, to within half a percent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final

import attrs

__all__ = ["Histogram"]

_PER_FOLD: Final = 100  # buckets for each factor of e: one is 1 % wide
_LEAST: Final = 1e-8
_LONGEST: Final = 1e9


@attrs.define(eq=False)
class Histogram:
    """Times in seconds. What is read back is off by at most 0.51 %; count, sum, least and most are exact.

    Attributes:
        count: how many there are.
        total: their sum.
        least, most: the shortest and the longest; 0 of none.
    """

    count: int = 0
    total: float = 0.0
    least: float = 0.0
    most: float = 0.0
    _buckets: dict[int, int] = attrs.field(init=False, factory=dict)

    def add(self, times: Iterable[float]) -> None:
        """Take in some more; what is below 10 ns counts as that."""
        buckets, log = self._buckets, math.log
        times = [min(max(each, _LEAST), _LONGEST) for each in times]
        if not times:
            return
        for each in times:
            index = math.floor(log(each) * _PER_FOLD)
            buckets[index] = buckets.get(index, 0) + 1
        least = min(times)
        self.least = least if not self.count else min(self.least, least)
        self.most = max(self.most, max(times))
        self.count += len(times)
        self.total += sum(times)

    def merge(self, other: Histogram) -> None:
        """Take in what another one holds."""
        if not other.count:
            return
        for index, count in other._buckets.items():
            self._buckets[index] = self._buckets.get(index, 0) + count
        self.least = other.least if not self.count else min(self.least, other.least)
        self.most = max(self.most, other.most)
        self.count += other.count
        self.total += other.total

    @property
    def mean(self) -> float | None:
        """The mean, or None of none."""
        return self.total / self.count if self.count else None

    def percentile(self, percent: float) -> float | None:
        """Return the time that this many percent do not exceed, or None of none.

        It is the time of rank ceil(percent / 100 * count), the least that may be called so; 0 gives the shortest.
        """
        if not self.count:
            return None
        # A product such as 99.9 / 100 * 1000 may come out above 999 by a rounding, and must not be taken for 1000.
        rank = max(1, math.ceil(round(percent / 100 * self.count, 9)))
        if rank >= self.count:
            return self.most
        for index in sorted(self._buckets):
            rank -= self._buckets[index]
            if rank <= 0:
                middle = math.exp((index + 0.5) / _PER_FOLD)
                return min(max(middle, self.least), self.most)
        raise AssertionError("the buckets hold all that was counted")

    def buckets(self) -> Iterator[tuple[float, int]]:
        """The upper edges and the counts of all buckets that are not empty, from the shortest times on."""
        for index in sorted(self._buckets):
            yield math.exp((index + 1) / _PER_FOLD), self._buckets[index]
