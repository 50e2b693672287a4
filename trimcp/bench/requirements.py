"""What a measurement has to keep to, such as `p99<50ms`: reading it, and judging a report by it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Final

import attrs

from trimcp.bench.report import Failures, Histogram, Report, Slice
from trimcp.errors import LocalError

_FORM: Final = re.compile(
    r"\s*(?:(?P<label>.+):)?(?P<figure>p\d+(?:\.\d+)?|[a-z_]+)\s*(?P<sign><=|>=|<|>)\s*"
    r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[^\s\d].*?)?\s*"
)
_EXAMPLE: Final = "p99<50ms,errors<0.1%,rate>2000,rss_growth<5MiB/h"
_TIMES: Final = {"µs": 1e-6, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_SHARES: Final = {"%": 0.01}
_BYTES: Final = {"KiB": 1024.0, "MiB": 1024.0**2, "GiB": 1024.0**3, "kB": 1e3, "MB": 1e6, "GB": 1e9}
_GROWTHS: Final = {
    f"{unit}/{period}": size / seconds
    for unit, size in _BYTES.items()
    for period, seconds in {"s": 1.0, "min": 60.0, "h": 3600.0}.items()
}
_RATES: Final = {"": 1.0, "/s": 1.0}
_LEAST_GROWTH: Final = 60.0  # seconds below which a growth of memory says nothing
_RESAMPLES: Final = 200


def _rss_growth(report: Report) -> float | None:
    return report.rss_growth if report.seconds >= _LEAST_GROWTH else None


_FIGURES: Final[Mapping[str, tuple[Mapping[str, float], Callable[[Report], float | None]]]] = {
    "rate": (_RATES, lambda report: report.per_second),
    "errors": (_SHARES, lambda report: report.error_share),
    "late": (_SHARES, lambda report: report.late / max(report.calls + report.failures, 1)),
    "cpu": (_TIMES, lambda report: report.cpu_per_call),
    "rss": (_BYTES, lambda report: None if report.cost is None else report.cost.rss),
    "peak_rss": (_BYTES, lambda report: None if report.cost is None else report.cost.peak_rss),
    "rss_growth": (_GROWTHS, _rss_growth),
}
"""The units of each figure of a whole measurement, and how it is read from a report: None if it is not known."""

_OF_TIMES: Final = ("mean", "min", "max")


@attrs.frozen
class Check:
    """One thing that was checked."""

    name: str
    passed: bool
    text: str  # what was found


@attrs.frozen
class Requirement:
    """One of the conditions of `--require`."""

    text: str  # as it was typed
    figure: str
    label: str | None  # the request whose times are meant; None for all
    sign: str
    limit: float  # in seconds, bytes, shares, or calls per second
    unit: str

    @staticmethod
    def read(text: str) -> tuple[Requirement, ...]:
        """Return the conditions in a list with commas. Raises LocalError: one is none; the text says what is wrong."""
        return tuple(_read(each) for each in text.split(","))

    @property
    def about_errors(self) -> bool:
        """Whether it says how many errors are allowed."""
        return self.figure == "errors"

    def holds(self, value: float) -> bool:
        """Whether a value keeps to it."""
        if self.sign[0] == "<":
            return value < self.limit or (self.sign == "<=" and value == self.limit)
        return value > self.limit or (self.sign == ">=" and value == self.limit)

    def show(self, value: float) -> str:
        """Return a value in the unit of the limit."""
        number = value / _units(self.figure)[self.unit]
        return f"{number:,.3f}".rstrip("0").rstrip(".") + (f" {self.unit}" if self.unit else "")

    def judge(self, report: Report) -> Check:
        """Say whether a report keeps to it. What is not known is not kept."""
        value = self._value(report)
        if value is None:
            return Check(self.text, False, self._why_unknown(report))
        return Check(self.text, self.holds(value), self.show(value) + self._doubt(report))

    def confidence(self, report: Report, seed: int = 0) -> float:
        """Return the share of resamples of the report's slices that keep to it, from 0 to 1.

        A resample draws as many slices as there are, each as often as chance wants. What slices do not know is judged
        once, by the whole report.
        """
        slices = [each for each in report.slices if each.seconds > 0]
        if not slices or self.figure in ("late", "rss", "peak_rss", "rss_growth"):
            return float(self.judge(report).passed)
        choose = Random(seed)  # noqa: S311 - statistics
        drawn = (_resampled(report, choose.choices(slices, k=len(slices))) for _ in range(_RESAMPLES))
        return sum(self.judge(each).passed for each in drawn) / _RESAMPLES

    # Reading the figure

    def _times(self, report: Report) -> Histogram:
        return report.latency if self.label is None else report.requests.get(self.label, Histogram())

    def _value(self, report: Report) -> float | None:
        if self.figure in _FIGURES:
            return _FIGURES[self.figure][1](report)
        if self.figure in _OF_TIMES:
            return self._times(report).figures[self.figure]
        return self._times(report).percentile(float(self.figure[1:]))

    def _doubt(self, report: Report) -> str:
        if self.figure[1:2].isdigit():
            count = self._times(report).count
            if count * (1 - float(self.figure[1:]) / 100) < 1:
                return f" (the slowest of only {count:,} calls)"
        return ""

    def _why_unknown(self, report: Report) -> str:
        if self.label is not None and self.label not in report.requests:
            return f"no right answer to {self.label:.60}; there were some to {', '.join(report.requests) or 'nothing'}"
        if self.figure == "rss_growth" and report.cost is not None:
            return f"not known: measure for {_LEAST_GROWTH:g} seconds or more"
        if self.figure in ("cpu", "rss", "peak_rss", "rss_growth"):
            return "not known: name the server's process with --pid"
        return "not known: there were no right answers"


def _resampled(report: Report, slices: Sequence[Slice]) -> Report:
    """Return the report as it would be if these had been its slices."""
    whole = Slice.merged(slices)
    latency = whole.whole
    return attrs.evolve(
        report,
        seconds=sum(each.seconds for each in slices),
        calls=latency.count,
        parts=float(latency.count),
        errors={kind: Failures(count, "") for kind, count in whole.errors.items()},
        latency=latency,
        requests=whole.times,
        cost=report.cost and attrs.evolve(report.cost, cpu_seconds=whole.cpu or 0.0),
    )


def _units(figure: str) -> Mapping[str, float]:
    return _FIGURES[figure][0] if figure in _FIGURES else _TIMES


def _read(text: str) -> Requirement:
    found = _FORM.fullmatch(text)
    if found is None:
        raise LocalError(f"{text.strip()!r:.60} is no requirement; write them as in {_EXAMPLE}")
    figure, label, unit = found["figure"], found["label"], found["unit"] or ""
    if figure not in (*_FIGURES, *_OF_TIMES) and not (figure[1:2].isdigit() and 0 < float(figure[1:]) < 100):
        names = ", ".join(["p50", "p99.9", *_OF_TIMES, *_FIGURES])
        raise LocalError(f"there is no figure {figure!r:.60}; there are {names}")
    if label is not None and figure in _FIGURES:
        raise LocalError(f"{figure} is a figure of all requests together, and not of {label.strip()!r:.60} alone")
    units = _units(figure)
    if unit not in units:
        listed = ", ".join(filter(None, units))
        raise LocalError(f"{figure} is measured in {listed}: {text.strip()!r:.60} has {unit!r:.20}")
    limit = float(found["number"]) * units[unit]
    return Requirement(text.strip(), figure, None if label is None else label.strip(), found["sign"], limit, unit)
