"""Whether a server became slower: one measurement beside earlier ones, with the noise of all of them.

The rule, also in docs/howto/bench.md:

- A measurement is cut into slices, and a figure is read in each. Other work on the machine makes slices worse and never
  better, so the better ones count.
- The times of a request are compared with those of all requests in the same slice: what makes all of them slow counts
  against none. Their figure is the median over the half of the slices that is faster.
- The times, the rate and the CPU time of all requests together are those of the slice that a fifth of the slices
  surpasses.
- Rate and p99 of all requests together vary most from run to run where a machine has other work. They are judged only
  with three earlier measurements or more. How much earlier ones differ counts as noise, of all figures.
- A fixed piece of work is timed in each slice. Where it took 15 % more or less time than before, of the CPU or in all,
  or where the generator itself woke half as late again, the machine was another one: then no figure of all requests
  together is judged.
- The noise of a figure is found by drawing the slices anew, 200 times. A change is a regression if it is larger than
  the tolerance even with the noise of both taken off, at a level at which equal servers differ in any figure once in a
  hundred comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from statistics import NormalDist, median, pstdev
from typing import Final

import attrs

from trimcp.bench.plan import Plan
from trimcp.bench.report import Histogram, Report, Slice
from trimcp.errors import LocalError

TOLERANCE: Final = 0.10
"""How much worse a figure may be, as a share, besides the noise."""

_LEVEL: Final = 0.01  # the chance that equal servers differ in any figure
_RESAMPLES: Final = 200
_LEAST_SLICES: Final = 8
_LEAST_CALLS: Final = 100  # of a request in each measurement, for its times to be compared
_BETTER: Final = 0.2  # the part of the slices that are better than the one compared
_TAIL: Final = 2.5  # the tolerance of p99 is so many times as large
_ANOTHER_MACHINE: Final = 0.15  # the difference of the piece of work from which it was another machine
_LATER: Final = 1.5  # how many times later the generator's loop may be on the same machine
_LAG: Final = 0.001  # seconds of that which say nothing
_SEVERAL: Final = 3
_SAME: Final = (
    *("mix", "sessions", "session_calls", "under_way", "rate", "spacing", "stages", "stages_of"),
    *("think", "cancel", "timeout", "progress", "reply"),
)


@attrs.frozen
class FigureChange:
    """How a figure changed."""

    figure: str  # such as "p50"
    label: str  # the request, or "" for all of them
    # `before`, `after`: in seconds, or calls per second
    before: float
    after: float
    ratio: float  # after / before, the change that all requests share taken out where `label` is set
    # `low`, `high`: the ratio lies between them, but for chance
    low: float
    high: float
    worse: bool  # whether it is a regression
    judged: bool = True  # whether it could have been one


@attrs.frozen
class Comparison:
    """A measurement beside earlier ones."""

    changes: tuple[FigureChange, ...]
    machine: float  # how many times as long a fixed piece of work took
    notes: tuple[str, ...]  # what could not be compared

    @property
    def worse(self) -> tuple[FigureChange, ...]:
        """The regressions."""
        return tuple(each for each in self.changes if each.worse)


def compare(before: Sequence[Report], after: Report, tolerance: float = TOLERANCE) -> Comparison:
    """Compare a measurement with earlier ones of the same load.

    Raises LocalError: they cannot be compared; the text says why.
    """
    for each in before:
        check_same_load(each.plan, after.plan)
        if each.transport != after.transport:
            raise LocalError(f"the baseline was measured over another transport, {each.transport}")
    runs = [_ComparedRun(each) for each in (*before, after)]
    short = [run for run in runs if len(run.slices) < _LEAST_SLICES]
    if short:
        raise LocalError(
            f"{_LEAST_SLICES} slices are needed to know the noise, and one measurement has {len(short[0].slices)}: "
            f"measure for {_LEAST_SLICES / 2:g} seconds or more"
        )
    *earlier, now = runs
    machine = now.work / median(run.work for run in earlier) if now.work and all(run.work for run in earlier) else 1.0
    free = now.free / median(run.free for run in earlier)
    later = max(now.lag, _LAG) / max(median(run.lag for run in earlier), _LAG)
    another = max(abs(math.log(machine)), abs(math.log(free))) > _ANOTHER_MACHINE or later > _LATER
    labels = [label for label in now.labels if all(label in run.labels for run in earlier)]
    figures = [_ComparedFigure("p50", label, tolerance) for label in labels if len(labels) > 1]
    figures += [_ComparedFigure("p99", label, _TAIL * tolerance) for label in labels if len(labels) > 1]
    several = len(earlier) >= _SEVERAL
    figures.append(_ComparedFigure("p50", "", tolerance, not another))
    figures.append(_ComparedFigure("p99", "", _TAIL * tolerance, several and not another))
    if not after.plan.paced:
        figures.append(_ComparedFigure("rate", "", tolerance, several and not another))
    if all(run.knows_cpu for run in runs):
        figures.append(_ComparedFigure("cpu", "", tolerance, not another))
    limit = NormalDist().inv_cdf(1 - _LEVEL / len(figures))
    found = [each.change(earlier, now, limit) for each in figures]
    notes = (
        []
        if not another
        else [
            f"the machine was another one: a fixed piece of work took {machine:.2f} times the CPU time, and waited "
            f"{free:.2f} times as long for a core, and the generator woke {later:.1f} times as late; "
            "figures of all requests together are not judged"
        ]
    )
    missing = [label for label in after.requests if label not in labels]
    if missing:
        notes.append(f"too few calls to compare: {', '.join(missing)}")
    changes = [*found]
    errors, expected = after.error_share, max(each.error_share for each in before)
    if after.failures > 3 and errors > 2 * expected + 3 / max(after.calls, 1):
        changes.append(FigureChange("errors", "", expected, errors, math.inf, math.inf, math.inf, worse=True))
    return Comparison(tuple(changes), machine, tuple(notes))


def check_same_load(before: Plan, after: Plan) -> None:
    """Check that two measurements may be compared. Raises LocalError: they put another load on the server."""
    was, now = before.to_json(), after.to_json()
    other = [name for name in _SAME if was[name] != now[name]]
    if other:
        raise LocalError(f"the baseline was measured with another {', '.join(other)}")


@attrs.define(eq=False)
class _ComparedRun:
    """One measurement as it is compared."""

    report: Report
    slices: list[Slice] = attrs.field(init=False)
    labels: list[str] = attrs.field(init=False)
    _values: dict[tuple[str, str], list[float]] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self.slices = [each for each in self.report.slices if each.times]
        called = {label for each in self.slices for label in each.times}
        counted = self.report.requests.items()
        self.labels = [label for label, times in counted if label in called and times.count >= _LEAST_CALLS]

    @property
    def work(self) -> float:
        """The CPU seconds of the fixed piece of work."""
        return median(each.work_cpu for each in self.slices)

    @property
    def free(self) -> float:
        """How much longer than its CPU time the piece of work took: 1 on a machine with a free core."""
        took = sum(each.work_cpu for each in self.slices)
        return max(sum(each.work for each in self.slices) / took, 1.0) if took else 1.0

    @property
    def lag(self) -> float:
        """How late the generator's loop usually was, in seconds: a slow server does not make it later."""
        return median(each.lag for each in self.slices)

    @property
    def knows_cpu(self) -> bool:
        return any(each.cpu for each in self.slices)

    def values(self, figure: str, label: str) -> list[float]:
        """Return the logarithms of a figure in each slice that knows it."""
        key = figure, label
        if key not in self._values:
            self._values[key] = list(self._relative(figure, label) if label else self._whole(figure))
        return self._values[key]

    def _whole(self, figure: str) -> Iterable[float]:
        for each in self.slices:
            count = sum(times.count for times in each.times.values())
            if figure == "rate":
                yield math.log(count / each.seconds)
            elif figure == "cpu":
                if each.cpu:
                    yield math.log(each.cpu / count)
            else:
                yield median(_logs(each.times, figure).values())

    def _relative(self, figure: str, label: str) -> Iterable[float]:
        """Yield the times of a request beside those of all, in the faster half of the slices."""
        known = [_logs(each.times, figure) for each in self.slices if label in each.times]
        known.sort(key=lambda logs: median(logs.values()))
        for logs in known[: max(len(known) // 2, _LEAST_SLICES)]:
            yield logs[label] - median(logs.values())


def _logs(times: Mapping[str, Histogram], figure: str) -> dict[str, float]:
    percent = float(figure[1:])
    return {label: math.log(each.percentile(percent) or 1e-8) for label, each in times.items()}


@attrs.frozen
class _ComparedFigure:
    """A figure that measurements are compared by."""

    name: str
    label: str  # the request whose times they are, or "" for all
    tolerance: float
    judged: bool = True

    def change(self, earlier: Sequence[_ComparedRun], now: _ComparedRun, limit: float) -> FigureChange:
        """Return how it changed; `limit` is the number of standard errors that chance may explain."""
        olds, errors = zip(*(self._read(run) for run in earlier), strict=True)
        new, error = self._read(now)
        old = median(olds)
        spread = max(olds) - min(olds)
        noise = limit * math.sqrt(error**2 + median(errors) ** 2) + spread
        ratio = new - old
        bad = -ratio if self.name == "rate" else ratio
        worse = self.judged and bad - noise > math.log1p(self.tolerance)
        before, after = math.exp(old), math.exp(new)
        if self.label:
            before, after = (self._whole(runs) for runs in (earlier, [now]))
        low, high = math.exp(ratio - noise), math.exp(ratio + noise)
        return FigureChange(self.name, self.label, before, after, math.exp(ratio), low, high, worse, self.judged)

    def _read(self, run: _ComparedRun) -> tuple[float, float]:
        """Return the figure of a measurement, as a logarithm, and its standard error."""
        values = sorted(run.values(self.name, self.label))
        if self.name == "rate":
            values.reverse()
        at = 0.5 if self.label else _BETTER
        choose = Random(0)  # noqa: S311 - statistics
        drawn = (_at(sorted(choose.choices(range(len(values)), k=len(values))), at) for _ in range(_RESAMPLES))
        return values[_at(range(len(values)), at)], pstdev(values[each] for each in drawn)

    def _whole(self, runs: Sequence[_ComparedRun]) -> float:
        """Return the percentile of this request as a table shows it."""
        percent = float(self.name[1:])
        return median(run.report.requests[self.label].percentile(percent) or 0.0 for run in runs)


def _at(sorted_values: Sequence[int], share: float) -> int:
    return sorted_values[int(share * len(sorted_values))]
