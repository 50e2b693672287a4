"""`trimcp bench --find-limit`: one measurement after the other, at rising rates, until the requirements break."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import attrs

from trimcp.bench.limit import Knee, LimitSearch
from trimcp.bench.report import FORMAT, Report
from trimcp.bench.requirements import Requirement
from trimcp.cli.bench.table import headline, milliseconds, row, three, what_times_are
from trimcp.cli.text import Line, theirs

START = 50.0
"""Calls per second at first."""
_KEPT_UP = 0.95


@attrs.frozen
class Step:
    """One measurement of the search."""

    rate: float
    confidence: float  # the share of resamples that kept to the requirements
    report: Report
    why: str  # what broke, "" if nothing did

    @property
    def held(self) -> bool:
        """Whether the requirements were rather kept than not."""
        return self.confidence >= 0.5

    @property
    def line(self) -> str:
        """It in one line."""
        times = "  ".join(f"p{each} {milliseconds(self.report.latency.percentile(each))}" for each in (50, 99))
        generator = f"generator {100 * self.report.generator.busy:.0f} %"
        said = "held" if self.held else f"BROKE: {self.why}"
        return f"{three(self.rate):>10} a second  {times}  {generator}  {said} ({100 * self.confidence:.0f} % sure)"


@attrs.frozen
class Limit:
    """What the search found."""

    knee: Knee
    steps: tuple[Step, ...]

    @property
    def of_generator(self) -> bool:
        """Whether the generator was at its own limit at a rate that was tried."""
        return any(step.report.generator.saturated for step in self.steps)

    def lines(self, requirements: Sequence[Requirement]) -> Iterator[Line]:
        """Yield it as a table."""
        yield headline(self.steps[0].report), "bold"
        yield f"  required: {', '.join(each.text for each in requirements)}", "dim"
        yield "", ""
        for step in sorted(self.steps, key=lambda each: each.rate):
            yield f"  {theirs(step.line)}", "" if step.held else "red"
        yield "", ""
        knee = self.knee
        if knee.rate is None:
            yield row("limit", "none found: the lowest rate broke already"), "bold red"
        else:
            below = "" if knee.broken is None else f", {three(knee.broken)} broke"
            sure = "no rate surely held" if knee.sure is None else f"{three(knee.sure)} surely held"
            yield row("limit", f"{three(knee.rate)} calls per second; {sure}{below}"), "bold"
        if knee.broken is None and knee.rate is not None:
            yield row("", "no rate surely broke: the limit is at this rate or above it"), "yellow"
        if self.of_generator:
            yield (
                row("", "SATURATED: the generator was at its own limit; try --processes"),
                "bold yellow",
            )
        yield row("", what_times_are(self.steps[0].report.plan)), "dim"

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        steps = [{"rate": each.rate, "confidence": each.confidence, **each.report.to_json()} for each in self.steps]
        return {
            "format": FORMAT,
            "limit": {**attrs.asdict(self.knee), "of_generator": self.of_generator},
            "steps": steps,
        }


async def find_limit(
    measure_at: Callable[[float], Awaitable[Report]], requirements: Sequence[Requirement], start: float
) -> Limit | None:
    """Search, and return what was found; None if it was interrupted before anything was measured.

    `measure_at`: measures at a rate; a report that was interrupted ends the search.
    """
    search, steps = LimitSearch(start), list[Step]()
    while (rate := search.next_rate()) is not None:
        report = await measure_at(rate)
        if report.interrupted:
            break
        step = judge_step(rate, report, requirements)
        if report.generator.saturated:
            search.most = min(search.most, rate)  # a higher rate would say nothing of the server
        search.record(rate, step.confidence)
        steps.append(step)
    return Limit(search.knee(), tuple(steps)) if steps else None


def judge_step(rate: float, report: Report, requirements: Sequence[Requirement]) -> Step:
    """Say whether a measurement at a rate held. A server that falls behind the rate does not hold it."""
    over = report.calls + report.failures + report.cancelled + report.timed_out
    if over < _KEPT_UP * rate * report.seconds:
        return Step(rate, 0.0, report, f"only {three(over / report.seconds)} a second were over in time")
    sure = {each: each.confidence(report) for each in requirements}
    least = min(sure, key=lambda each: sure[each])
    return Step(rate, sure[least], report, f"{least.text} was {least.judge(report).words}")
