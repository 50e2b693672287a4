"""A histogram of times with logarithmic buckets: bounded memory for any number of times, errors of at most 0.51 %."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import attrs

_PER_FOLD: Final = 100  # buckets for each factor of e: one is 1 % wide
_LEAST: Final = 1e-8
_MOST: Final = 1e9
_ZERO: Final = 2_000  # makes every index positive, so that truncating rounds down: ln(_LEAST) is -18.4


@attrs.define(eq=False)
class Histogram:
    """Times in seconds. Percentiles have an error of at most 0.51 %; the four public numbers are exact, 0 if empty."""

    count: int = 0
    total: float = 0.0
    least: float = 0.0
    most: float = 0.0
    _buckets: Counter[int] = attrs.field(init=False, factory=Counter)

    def add(self, times: Sequence[float]) -> None:
        """Add times; those below 10 ns count as 10 ns."""
        if not times:
            return
        least, most = min(times), max(times)
        if least < _LEAST or most > _MOST:
            times = [min(max(each, _LEAST), _MOST) for each in times]
            least, most = min(times), max(times)
        log = math.log
        self._buckets.update([int(log(each) * _PER_FOLD + _ZERO) for each in times])
        self._extend(len(times), sum(times), least, most)

    @staticmethod
    def merged(histograms: Iterable[Histogram]) -> Histogram:
        """Return the sum of histograms."""
        whole = Histogram()
        for each in histograms:
            if each.count:
                whole._buckets.update(each._buckets)
                whole._extend(each.count, each.total, each.least, each.most)
        return whole

    def _extend(self, count: int, total: float, least: float, most: float) -> None:
        self.least = min(self.least, least) if self.count else least
        self.most = max(self.most, most)
        self.count += count
        self.total += total

    @property
    def mean(self) -> float | None:
        """The mean, or None if empty."""
        return self.total / self.count if self.count else None

    def percentile(self, percent: float) -> float | None:
        """Return the shortest time that this percentage of the times does not exceed, or None if empty.

        It is the time of rank ceil(percent / 100 * count): of 100 times the 99th percentile is the second largest.
        """
        if not self.count:
            return None
        # Rounding may make a product such as 0.999 * 1000 slightly larger than 999; ceil must not make it 1000.
        rank = max(1, math.ceil(round(percent / 100 * self.count, 6)))
        if rank >= self.count:
            return self.most
        if rank == 1:
            return self.least
        for index in sorted(self._buckets):
            rank -= self._buckets[index]
            if rank <= 0:
                return min(max(_edge(index + 0.5), self.least), self.most)
        raise AssertionError("the buckets hold all that was counted")

    @staticmethod
    def bars(histograms: Sequence[Histogram], most: int) -> tuple[list[float], list[list[float]]]:
        """Return the edges of at most `most` bars for all histograms, and for each histogram the shares in percent.

        Each bar has the same number of whole buckets; an empty bar is added at each end.
        """
        indexes = [index for each in histograms for index in each._buckets]
        if not indexes:
            return [], [[] for _ in histograms]
        width = max(1, math.ceil((max(indexes) + 1 - min(indexes)) / most))
        start = min(indexes) - width
        edges = list(range(start, max(indexes) + 1 + 2 * width, width))
        shares = []
        for each in histograms:
            shares.append([0.0] * (len(edges) - 1))
            for index, count in each._buckets.items():
                shares[-1][(index - start) // width] += 100 * count / each.count
        return [_edge(index) for index in edges], shares

    def buckets(self) -> Iterator[tuple[float, int]]:
        """Yield the upper edge and the count of each non-empty bucket, from the shortest times on."""
        for index in sorted(self._buckets):
            yield _edge(index + 1), self._buckets[index]


def _edge(index: float) -> float:
    return math.exp((index - _ZERO) / _PER_FOLD)
