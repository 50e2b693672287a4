"""Comparison of two servers measured in turns: the ratios of their figures, and their certainty. Does not measure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, Final, TypeAlias

import attrs

from trimcp.bench.report import FORMAT, Report
from trimcp.cli.bench_table import (
    headline,
    milliseconds,
    rough,
    setting,
    three,
    what_times_are,
)
from trimcp.cli.text import Line, theirs

Pair: TypeAlias = tuple[Report, Report]
"""One round: the target, and what it is compared with."""

_MEBI: Final = 1024 * 1024


@attrs.frozen
class Figure:
    """A figure that two servers are compared by."""

    name: str  # in the JSON
    label: str  # in the table
    of: Callable[[Report], float | None]  # returns it from a report; None if unknown
    show: Callable[[float], str]  # formats it
    # `more`, `less`: the words for the first server if its figure is larger, or smaller
    more: str = "more"
    less: str = "less"


def _memory(report: Report) -> float | None:
    return None if report.cost is None else report.cost.rss


_FIGURES: Final = (
    Figure("per_second", "calls/s", lambda report: report.per_second, three, "faster", "slower"),
    Figure("p50", "p50", lambda report: report.latency.percentile(50), milliseconds, "slower", "faster"),
    Figure("p99", "p99", lambda report: report.latency.percentile(99), milliseconds, "slower", "faster"),
    Figure("cpu_per_call", "CPU per call", lambda report: report.cpu_per_call, milliseconds),
    Figure("rss", "memory", _memory, lambda rss: f"{three(rss / _MEBI)} MiB"),
)


@attrs.frozen
class Ratio:
    """The ratio of a figure between the first and the second server."""

    figure: Figure
    # `first`, `second`: the median of all rounds, as text
    first: str
    second: str
    # `median`, `low`, `high`: of the ratios first / second, one per round
    median: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether the same server has the larger figure in every round."""
        return self.low > 1 or self.high < 1

    def words(self, ratio: float, width: int = 0) -> str:
        """Return a ratio in words: "43 times faster" reads better than 0.023."""
        if (factor := _factor(ratio)) == "1.00":
            return "the same"
        return f"{factor} × {self.figure.more if ratio > 1 else self.figure.less:<{width}}"

    @property
    def spread(self) -> str:
        """The range of the ratios."""
        low, high = _factor(self.low), _factor(self.high)
        if self.clear or low == high == "1.00":
            return f"{low} to {high}" if self.low >= 1 else f"{high} to {low}"
        return f"{self.words(self.low)} to {self.words(self.high)}"


def _factor(ratio: float) -> str:
    return three(max(ratio, 1 / ratio))


def ratios(pairs: Sequence[Pair]) -> list[Ratio]:
    """Return the ratios of all figures known for both servers."""
    found = []
    for figure in _FIGURES:
        values = [(figure.of(first), figure.of(second)) for first, second in pairs]
        known = [(first, second) for first, second in values if first and second]
        if not known or len(known) < len(values):
            continue
        each = [first / second for first, second in known]
        ours, theirs = (figure.show(median(side)) for side in zip(*known, strict=True))
        found.append(Ratio(figure, ours, theirs, median(each), min(each), max(each)))
    return found


def describe_comparison(pairs: Sequence[Pair]) -> Iterator[Line]:
    """Yield the figures of both, and their ratios, as lines of text."""
    first, second = pairs[0]
    for number, report in enumerate((first, second), 1):
        yield f"{number}: {headline(report)}", "bold"
        yield f"   {theirs(report.target, 150)}", "dim"
        if number == 1:
            rounds = f"{len(pairs)} rounds" if len(pairs) > 1 else "1 round"
            yield f"   {rounds} of: {setting(report)}", "dim"
    yield "", ""
    rows = [("", "1", "2", "1 compared to 2", "round by round")]
    found = ratios(pairs)
    longest = max((len(word) for each in found for word in (each.figure.more, each.figure.less)), default=0)
    rows += [
        (each.figure.label, each.first, each.second, each.words(each.median, longest), each.spread) for each in found
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        unclear = number > 0 and len(pairs) > 1 and not found[number - 1].clear
        line = "  " + "   ".join(cells) + ("   no clear difference" if unclear else "")
        yield line, "dim" if number == 0 or unclear else ""
    yield f"  {what_times_are(first.plan, len(pairs))}", "dim"
    for number, each_round in enumerate(zip(*pairs, strict=True), 1):
        yield from _doubts(number, each_round)


def _doubts(number: int, rounds: Sequence[Report]) -> Iterator[Line]:
    """Yield the reasons to doubt the figures of one of the servers."""
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for report in rounds:
        counts.update({kind: failures.count for kind, failures in report.errors.items()})
        examples.update({kind: failures.example for kind, failures in report.errors.items()})
    for kind, count in counts.most_common():
        text = f"{count:,} {theirs(kind, 40)}: {theirs(examples[kind], 150)}"
        yield f"  {number} answered wrongly: {text}", "red"
    if any(report.rough for report in rounds):
        yield f"  {number}: ROUGH: {rough(next(report for report in rounds if report.rough))}", "yellow"
    busy = max(report.generator.busy for report in rounds)
    if any(report.generator.saturated for report in rounds):
        text = "the generator was SATURATED: the rate may be its limit and not the server's"
        yield f"  {number}: {text} ({100 * busy:.0f} % of a core)", "bold yellow"


def comparison_json(pairs: Sequence[Pair], unpaired: Sequence[Report]) -> dict[str, Any]:
    """Return all rounds and the ratios as JSON values; `unpaired` has the reports without a complete round."""
    return {
        "format": FORMAT,
        "rounds": [{"first": first.to_json(), "second": second.to_json()} for first, second in pairs],
        "ratios": {
            each.figure.name: {"median": each.median, "low": each.low, "high": each.high} for each in ratios(pairs)
        },
        "unpaired": [report.to_json() for report in unpaired],
    }
