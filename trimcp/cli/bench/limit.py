"""`trimcp bench --find-limit`: one measurement after the other, at rising rates, until the requirements break."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import attrs

from trimcp.bench.limit import LimitSearch, Trial
from trimcp.bench.report import FORMAT, Report
from trimcp.bench.requirements import Requirement
from trimcp.cli.bench.table import headline, percentiles, row, three, what_times_are
from trimcp.cli.text import Line, theirs

START = 50.0
"""Calls per second at first."""
_KEPT_UP = 0.95


def limit_lines(search: LimitSearch, requirements: Sequence[Requirement]) -> Iterator[Line]:
    """Yield what was found as a table."""
    reports = _reports(search)
    yield headline(reports[0]), "bold"
    yield f"  required: {', '.join(each.text for each in requirements)}", "dim"
    yield "", ""
    for trial, report in sorted(zip(search.trials, reports, strict=True), key=lambda each: each[0].rate):
        said = "held" if trial.held else f"BROKE: {trial.why}"
        text = f"{three(trial.rate):>10} a second  {percentiles(report.latency, 50, 99)}"
        text += f"  generator {100 * report.generator.busy:.0f} %  {said}"
        yield f"  {theirs(text)} ({100 * trial.confidence:.0f} % sure)", "" if trial.held else "red"
    yield "", ""
    knee = search.knee()
    if knee.rate is None:
        yield row("limit", "none found: the lowest rate broke already"), "bold red"
    else:
        below = "" if knee.broken is None else f", {three(knee.broken)} broke"
        sure = "no rate surely held" if knee.sure is None else f"{three(knee.sure)} surely held"
        yield row("limit", f"{three(knee.rate)} calls per second; {sure}{below}"), "bold"
    broke = [trial.rate for trial in search.trials if not trial.held]
    if knee.broken is None and knee.rate is not None:
        beyond = f"{three(min(broke))} rather broke" if broke else "the limit is at this rate or above it"
        yield row("", f"no rate surely broke: {beyond}"), "yellow"
    if _of_generator(reports):
        yield row("", "SATURATED: the generator was at its own limit; try --processes"), "bold yellow"
    yield row("", what_times_are(reports[0].plan)), "dim"


def limit_json(search: LimitSearch) -> dict[str, Any]:
    """Return what was found as JSON values."""
    reports = _reports(search)
    steps = [
        {"rate": trial.rate, "confidence": trial.confidence, **report.to_json()}
        for trial, report in zip(search.trials, reports, strict=True)
    ]
    limit = {**attrs.asdict(search.knee()), "of_generator": _of_generator(reports)}
    return {"format": FORMAT, "limit": limit, "steps": steps}


def _reports(search: LimitSearch) -> list[Report]:
    return [trial.report for trial in search.trials if trial.report is not None]


def _of_generator(reports: Sequence[Report]) -> bool:
    """Whether the generator was at its own limit at a rate that was tried."""
    return any(report.generator.saturated for report in reports)


async def find_limit(
    measure_at: Callable[[float], Awaitable[Report]], requirements: Sequence[Requirement], start: float
) -> LimitSearch:
    """Search, and return what was found, without a trial if it was interrupted before anything was measured.

    `measure_at`: measures at a rate; a report that was interrupted ends the search.
    """
    search = LimitSearch(start)
    while (rate := search.next_rate()) is not None:
        report = await measure_at(rate)
        if report.interrupted:
            break
        if report.generator.saturated:
            search.most = min(search.most, rate)  # a higher rate would say nothing of the server
        search.trials.append(judge_trial(rate, report, requirements))
    return search


def judge_trial(rate: float, report: Report, requirements: Sequence[Requirement]) -> Trial:
    """Say whether a measurement at a rate held. A server that falls behind the rate does not hold it."""
    over = report.calls + report.failures + report.cancelled + report.timed_out
    if over < _KEPT_UP * rate * report.seconds:
        return Trial(rate, 0.0, report, f"only {three(over / report.seconds)} a second were over in time")
    sure = {each: each.confidence(report) for each in requirements}
    least = min(sure, key=lambda each: sure[each])
    return Trial(rate, sure[least], report, f"{least.text} was {least.judge(report).text}")
