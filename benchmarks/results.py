"""What a run has found: every value of every round, kept as it came, and the few statistics that are made of it.

Knows nothing of how values are measured and nothing of how they are shown. Written as JSON and read back unchanged, so
that tables and plots can be made again without a run.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

__all__ = ["BUSY", "SATURATED", "Failure", "Results", "Series", "Spread", "paired_ratio"]

FORMAT = 1
BUSY = "generator"
SATURATED = 0.8


@attrs.frozen
class Spread:
    """A median and the range it comes from."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    @property
    def noise(self) -> float:
        """The range as a share of the median: 0.1 means that rounds differed by a tenth of it."""
        return (self.high - self.low) / self.median if self.median else 0.0


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread | None:
    """Return the ratio of two medians, and the range of the ratios in each round.

    A round has a turn for everybody, so what slows the machine down for a while slows both and leaves their ratio.
    """
    if not ours or not theirs or not statistics.median(theirs):
        return None
    middle = statistics.median(ours) / statistics.median(theirs)
    pairs = [one / other for one, other in zip(ours, theirs, strict=False) if other]
    return Spread(middle, min(pairs, default=middle), max(pairs, default=middle))


@attrs.frozen
class Series:
    """One figure of one peer in one cell: a value for each round.

    Attributes:
        cell: what was done, by the cell's name.
        figure: what was counted, such as `cpu`.
        peer: who did it.
        unit: of the values, as it is written behind a number.
        values: in the order of the rounds.
    """

    cell: str
    figure: str
    peer: str
    unit: str
    values: list[float]

    @property
    def spread(self) -> Spread:
        """Median and range."""
        return Spread.of(self.values)


@attrs.frozen
class Failure:
    """Why a peer has no value, or not all of them, in a cell."""

    cell: str
    peer: str
    reason: str


@attrs.define(eq=True)
class Results:
    """A whole run.

    Attributes:
        made: when, by which command, how long it took, how many rounds it wanted.
        machine: what it ran on.
        versions: of everything that took part, by name.
    """

    made: dict[str, Any] = attrs.field(factory=dict)
    machine: dict[str, Any] = attrs.field(factory=dict)
    versions: dict[str, str] = attrs.field(factory=dict)
    series: list[Series] = attrs.field(factory=list)
    failures: list[Failure] = attrs.field(factory=list)
    _index: dict[tuple[str, str, str], Series] = attrs.field(factory=dict, init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        self._index = {(one.cell, one.figure, one.peer): one for one in self.series}

    def add(self, cell: str, figure: str, peer: str, unit: str, values: Iterable[float]) -> None:
        """Note the values of one more round, or of several."""
        found = self._index.get((cell, figure, peer))
        if found is None:
            found = self._index[cell, figure, peer] = Series(cell, figure, peer, unit, [])
            self.series.append(found)
        # Six digits are more than any clock here is good for.
        found.values.extend(float(f"{value:.6g}") for value in values)

    def fail(self, cell: str, peer: str, reason: str) -> None:
        """Note a failure, once however often it happens."""
        failure = Failure(cell, peer, reason)
        if failure not in self.failures:
            self.failures.append(failure)

    def values(self, cell: str, figure: str, peer: str) -> list[float]:
        """Return what was found, which may be nothing."""
        found = self._index.get((cell, figure, peer))
        return found.values if found is not None else []

    def peers(self, cell: str, figure: str) -> list[str]:
        """Return who has values, in the order they were measured."""
        return [one.peer for one in self.series if (one.cell, one.figure) == (cell, figure) and one.values]

    def best(self, cell: str, figure: str, among: Iterable[str], *, more: bool = False) -> str | None:
        """Return which of these peers has the least median, or the greatest."""
        medians = {peer: statistics.median(values) for peer in among if (values := self.values(cell, figure, peer))}
        return (max if more else min)(medians, key=medians.__getitem__) if medians else None

    def saturated(self, cell: str, peer: str) -> bool:
        """Tell whether the load generator was so busy there that it may have been the limit."""
        busy = self.values(cell, BUSY, peer)
        return bool(busy) and statistics.median(busy) > SATURATED

    def put_into(self, other: Results) -> Results:
        """Return another run's results with those of this one in the cells that this one is about.

        What they tell of the run as a whole is the other's; of this one it is noted when it was made, by which
        command, for which cells, and the load of the machine.
        """
        cells = list(dict.fromkeys([one.cell for one in (*self.series, *self.failures)]))
        parts = [part for part in other.made.get("parts", []) if not set(part["cells"]) <= set(cells)]
        told = ("date", "command", "load_average", "stolen", "seconds")
        part = {**{name: self.made[name] for name in told if name in self.made}, "cells": cells}
        return Results(
            {**other.made, "parts": [*parts, part]},
            other.machine,
            {**self.versions, **other.versions},
            [*(one for one in other.series if one.cell not in cells), *self.series],
            [*(one for one in other.failures if one.cell not in cells), *self.failures],
        )

    # As a file

    def to_json(self) -> str:
        """Return all of it; one line for each series."""
        head = {"format": FORMAT, "made": self.made, "machine": self.machine, "versions": self.versions}
        lines = json.dumps(head, indent=1, ensure_ascii=False)[:-2]
        for name in ("series", "failures"):
            items = ",\n".join("  " + json.dumps(attrs.asdict(one), ensure_ascii=False) for one in getattr(self, name))
            lines += f',\n "{name}": [\n{items}\n ]'
        return lines + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> Results:
        """Return what `to_json` has written.

        Raises:
            ValueError: it is of another format.
        """
        found = json.loads(text)
        if found.get("format") != FORMAT:
            raise ValueError(f"results of format {found.get('format')}, this is for {FORMAT}")
        return cls(
            found["made"],
            found["machine"],
            found["versions"],
            [Series(**one) for one in found["series"]],
            [Failure(**one) for one in found["failures"]],
        )

    @classmethod
    def read(cls, file: Path) -> Results:
        """Return what a file holds."""
        return cls.from_json(file.read_text("utf-8"))
