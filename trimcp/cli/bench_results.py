"""Where the figures of `trimcp bench` go in the end: the terminal, a file with JSON, a plot."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click

from trimcp.bench.report import Report
from trimcp.cli.bench_compare import Pair, comparison_json, describe_comparison
from trimcp.cli.bench_options import BenchOptions
from trimcp.cli.bench_plot import Curve, draw
from trimcp.cli.bench_table import Line, describe_report, headline, per_second, setting, what
from trimcp.cli.exits import USAGE, Failure
from trimcp.cli.screen import Screen

__all__ = ["show_results"]


def show_results(screen: Screen, options: BenchOptions, done: Sequence[Sequence[Report]]) -> None:
    """Print the table of what was measured, and write the files that were asked for.

    Args:
        screen: where. Standard output is left to the JSON if that goes there.
        options: of the command.
        done: the reports of each server, in the order in which they were measured.

    Raises:
        Failure: a file cannot be written; all the rest was done before.
    """
    pairs = _pairs(done)
    if not (options.quiet and options.json):
        console = screen.err if options.json else screen.out
        for text, style in _lines(done, pairs):
            console.print(text, style=style)
    failures = [failure for write in (_write_json, _write_plot) for failure in [write(options, done, pairs)] if failure]
    if failures:
        raise failures[0]


def _pairs(done: Sequence[Sequence[Report]]) -> list[Pair]:
    """Return the rounds that are whole."""
    if len(done) < 2:
        return []
    pairs = zip(done[0], done[1], strict=False)
    return [(first, second) for first, second in pairs if not (first.interrupted or second.interrupted)]


def _unpaired(done: Sequence[Sequence[Report]], pairs: Sequence[Pair]) -> list[Report]:
    paired = {id(report) for pair in pairs for report in pair}
    return [report for rounds in done for report in rounds if id(report) not in paired]


def _lines(done: Sequence[Sequence[Report]], pairs: Sequence[Pair]) -> Iterator[Line]:
    if pairs:
        yield from describe_comparison(pairs)
        return
    for rounds in done:
        for report in rounds:
            yield from describe_report(report)


def _write_json(options: BenchOptions, done: Sequence[Sequence[Report]], pairs: Sequence[Pair]) -> Failure | None:
    if not options.json and options.save is None:
        return None
    value: Any = done[0][0].to_json() if len(done) == 1 else comparison_json(pairs, _unpaired(done, pairs))
    text = json.dumps(value, allow_nan=False)
    if options.json:
        click.echo(text)
    if options.save is not None:
        try:
            Path(options.save).write_text(text + "\n", "utf-8")
        except OSError as error:
            return Failure(f"cannot write {options.save}: {error.strerror}", USAGE)
    return None


def _write_plot(options: BenchOptions, done: Sequence[Sequence[Report]], pairs: Sequence[Pair]) -> Failure | None:
    if options.plot is None:
        return None
    if pairs:
        first, _ = pairs[0]
        title = f"{what(first.plan)} · two servers in {len(pairs)} rounds"
        curves, note = [_curve(rounds) for rounds in zip(*pairs, strict=True)], setting(first)
    else:
        report = next(report for rounds in done for report in rounds)
        title, curves, note = headline(report), [Curve(_summary(report), [report])], ""
    try:
        draw(options.plot, title, curves, note)
    except Failure as failure:
        return failure
    return None


def _curve(rounds: Sequence[Report]) -> Curve:
    rate = per_second(median(report.per_second for report in rounds))
    return Curve(f"{headline(rounds[0], calls=False)}: {rate} calls answered per second", rounds)


def _summary(report: Report) -> str:
    wrong = f", {report.failures:,} wrong" if report.failures else ""
    return f"{per_second(report.per_second)} calls answered per second{wrong}; {setting(report)}"
