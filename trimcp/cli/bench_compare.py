"""Two servers measured in turns: how far apart they are, and how sure one may be. It measures nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, Final, TypeAlias

import attrs

from trimcp.bench.report import FORMAT, Failures, Report
from trimcp.cli.bench_table import Line, headline, milliseconds, per_second, setting, three
from trimcp.cli.text import one_line

__all__ = ["Pair", "Ratio", "comparison_json", "describe_comparison", "ratios"]

Pair: TypeAlias = tuple[Report, Report]
"""One round: the target, and what it is compared with."""

_MEBI: Final = 1024 * 1024


@attrs.frozen
class _Figure:
    """A figure of a report.

    Attributes:
        name: in the JSON.
        label: in the table.
        of: reads it; None where it is not known.
        show: writes it.
    """

    name: str
    label: str
    of: Callable[[Report], float | None]
    show: Callable[[float], str]


def _cpu(report: Report) -> float | None:
    return None if report.cost is None or not report.calls else report.cost.cpu_seconds / report.calls


def _memory(report: Report) -> float | None:
    return None if report.cost is None else report.cost.rss


_FIGURES: Final = (
    _Figure("per_second", "calls/s", lambda report: report.per_second, per_second),
    _Figure("p50", "p50", lambda report: report.latency.percentile(50), milliseconds),
    _Figure("p99", "p99", lambda report: report.latency.percentile(99), milliseconds),
    _Figure("cpu_per_call", "CPU per call", _cpu, milliseconds),
    _Figure("rss", "memory", _memory, lambda rss: f"{three(rss / _MEBI)} MiB"),
)


@attrs.frozen
class Ratio:
    """How a figure of the first server relates to the second's.

    Attributes:
        name, label: of the figure, for programs and for people.
        first, second: the median of all rounds, as text.
        median, low, high: of the ratios first / second, each of one round.
    """

    name: str
    label: str
    first: str
    second: str
    median: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether every round says the same about which of the two is larger."""
        return self.low > 1 or self.high < 1


def ratios(pairs: Sequence[Pair]) -> list[Ratio]:
    """Return the ratios of all figures that are known of both."""
    found = []
    for figure in _FIGURES:
        values = [(figure.of(first), figure.of(second)) for first, second in pairs]
        known = [(first, second) for first, second in values if first and second]
        if not known or len(known) < len(values):
            continue
        each = [first / second for first, second in known]
        ours, theirs = (figure.show(median(side)) for side in zip(*known, strict=True))
        found.append(Ratio(figure.name, figure.label, ours, theirs, median(each), min(each), max(each)))
    return found


def describe_comparison(pairs: Sequence[Pair]) -> Iterator[Line]:
    """Yield the figures of both, and their ratios, as lines of text."""
    first, second = pairs[0]
    for number, report in enumerate((first, second), 1):
        yield f"{number}: {headline(report)}", "bold"
        yield f"   {one_line(report.target, 150)}", "dim"
        if number == 1:
            rounds = f"{len(pairs)} rounds" if len(pairs) > 1 else "1 round"
            yield f"   {rounds} of: {setting(report)}", "dim"
    yield "", ""
    rows = [("", "1", "2", "1 / 2", "lowest to highest")]
    found = ratios(pairs)
    rows += [
        (each.label, each.first, each.second, _shown(each.median), f"{_shown(each.low)} to {_shown(each.high)}")
        for each in found
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        unclear = number > 0 and len(pairs) > 1 and not found[number - 1].clear
        line = "  " + "   ".join(cells) + ("   no clear difference" if unclear else "")
        yield line, "dim" if number == 0 or unclear else ""
    for number, each_round in enumerate(zip(*pairs, strict=True), 1):
        yield from _doubts(number, each_round)


def _shown(ratio: float) -> str:
    return three(ratio) if ratio >= 0.0995 else f"{ratio:.2g}"


def _doubts(number: int, rounds: Sequence[Report]) -> Iterator[Line]:
    """Yield what makes the figures of one of the servers less than they seem."""
    errors: dict[str, Failures] = {}
    for report in rounds:
        for kind, failures in report.errors.items():
            before = errors.get(kind)
            errors[kind] = Failures(failures.count + (before.count if before else 0), failures.example)
    for kind, failures in sorted(errors.items(), key=lambda item: -item[1].count):
        text = f"{failures.count:,} {one_line(kind, 40)}: {one_line(failures.example, 150)}"
        yield f"  {number} answered wrongly: {text}", "red"
    busy = max(report.generator.busy for report in rounds)
    if any(report.generator.saturated for report in rounds):
        text = "the generator was SATURATED: the rate may be its limit and not the server's"
        yield f"  {number}: {text} ({100 * busy:.0f} % of a core)", "bold yellow"


def comparison_json(pairs: Sequence[Pair], unpaired: Sequence[Report]) -> dict[str, Any]:
    """Return all rounds and the ratios as JSON values; `unpaired` is what no whole round came of."""
    return {
        "format": FORMAT,
        "rounds": [{"first": first.to_json(), "second": second.to_json()} for first, second in pairs],
        "ratios": {each.name: {"median": each.median, "low": each.low, "high": each.high} for each in ratios(pairs)},
        "unpaired": [report.to_json() for report in unpaired],
    }
