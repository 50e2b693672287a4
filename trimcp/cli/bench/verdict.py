"""What `trimcp bench` has to say yes or no to: requirements, a baseline, right answers; as lines, for CI, as JUnit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any, Final

import attrs

from trimcp.bench.regression import Comparison, FigureChange, compare
from trimcp.bench.report import Report
from trimcp.bench.requirements import Check, Requirement
from trimcp.cli.bench.table import milliseconds, row, three, write_result
from trimcp.cli.exits import BROKEN, TOOL_ERROR, Failure
from trimcp.cli.text import Line, count_of, theirs
from trimcp.errors import LocalError
from trimcp.support.files import UnusableFile, read_text

_WRONG: Final = TOOL_ERROR
_NAMES: Final = {"cpu": "CPU per call", "rate": "calls per second", "errors": "errors"}


def read_requirements(texts: Sequence[str]) -> tuple[Requirement, ...]:
    """Return the requirements that were typed. Raises Failure: one is none."""
    try:
        return tuple(each for text in texts for each in Requirement.read(text))
    except LocalError as error:
        raise Failure(f"--require: {error}") from None


def read_reports(files: Sequence[str], option: str) -> tuple[Report, ...]:
    """Return the figures that earlier measurements saved. Raises Failure: a file cannot be read or holds others."""
    reports = []
    for file in files:
        try:
            value = json.loads(read_text(file, ""))
        except UnusableFile as error:
            raise Failure(f"{option}: {error}") from None
        except (ValueError, RecursionError) as error:
            raise Failure(f"{option}: {file} is no valid JSON: {error}") from None
        if isinstance(value, dict) and "rounds" in value:
            raise Failure(f"{option}: {file} holds a comparison of two servers, and not the figures of one")
        try:
            reports.append(Report.from_json(value))
        except LocalError as error:
            raise Failure(f"{option}: {file}: {error}") from None
    return tuple(reports)


@attrs.frozen
class Judgement:
    """All that was checked of a measurement."""

    answers: Check  # whether every answer is right
    required: tuple[Check, ...]
    comparison: Comparison | None
    tolerates_errors: bool  # whether a requirement says how many errors are allowed

    @staticmethod
    def of(
        report: Report, requirements: Sequence[Requirement], baseline: Sequence[Report], tolerance: float
    ) -> Judgement:
        """Judge a report. Raises Failure: it cannot be compared with the baseline."""
        failures = f"{report.failures:,} were not" if report.failures else ""
        answers = Check("every answer is right", report.right, failures or ("" if report.right else "there was none"))
        required = tuple(each.judge(report) for each in requirements)
        try:
            comparison = compare(baseline, report, tolerance) if baseline else None
        except LocalError as error:
            raise Failure(f"--baseline: {error}") from None
        return Judgement(answers, required, comparison, any(each.about_errors for each in requirements))

    @property
    def checks(self) -> tuple[Check, ...]:
        """All that was checked, the answers first."""
        changes = () if self.comparison is None else self.comparison.changes
        compared = (Check(f"baseline: {_named(each)}", not each.worse, _changed(each)) for each in changes)
        return self.answers, *self.required, *compared

    @property
    def exit_code(self) -> int:
        """The exit code that says it."""
        if not self.answers.passed and not self.tolerates_errors:
            return _WRONG
        return 0 if all(each.passed for each in self.checks[1:]) else BROKEN

    def lines(self) -> Iterator[Line]:
        """Yield it as lines below the table."""
        title = "required"
        for each in self.required:
            said = f"{each.name}: {'kept' if each.passed else 'BROKEN'}, {each.text}"
            yield row(title, theirs(said)), "" if each.passed else "bold red"
            title = ""
        if self.comparison is None:
            return
        changes, worse = self.comparison.changes, self.comparison.worse
        found = f"{len(worse)} WORSE" if worse else "none worse"
        yield row("baseline", f"{count_of(len(changes), 'figure')} compared, {found}"), "bold red" if worse else ""
        for change in changes:
            if change.worse or not change.label:
                said = f"{'WORSE: ' if change.worse else ''}{_named(change)}: {_changed(change)}"
                yield row("", theirs(said)), "red" if change.worse else "dim"
        for note in self.comparison.notes:
            yield row("", theirs(note)), "yellow"

    def to_json(self) -> list[dict[str, Any]]:
        """Return it as JSON values."""
        return [attrs.asdict(each) for each in self.checks]


def _named(change: FigureChange) -> str:
    name = _NAMES.get(change.figure, change.figure)
    return f"{name} of {change.label}" if change.label else name


def _changed(change: FigureChange) -> str:
    if change.figure == "errors":
        return f"{100 * change.before:.2g} % before, {100 * change.after:.2g} % now"
    show = three if change.figure == "rate" else milliseconds
    text = f"{show(change.before)} before, {show(change.after)} now"
    apart = ", what all requests share apart" if change.label else ""
    judged = "" if change.judged else ", not judged"
    return f"{text}: × {change.ratio:.2f} ({change.low:.2f} to {change.high:.2f}{apart}{judged})"


def github_lines(title: str, judgement: Judgement) -> Iterator[str]:
    """Yield what failed as annotations of a GitHub workflow, or one notice that nothing did."""
    failed = [each for each in judgement.checks if not each.passed]
    for each in failed:
        yield f"::error title={_property(title)}::{_data(f'{each.name}: {each.text}')}"
    if not failed:
        yield f"::notice title={_property(title)}::{_data(f'all of {len(judgement.checks)} checks passed')}"


def _data(text: str) -> str:
    return theirs(text, 400).replace("%", "%25")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _attribute(text: str) -> str:
    return f'"{escape(text)}"'


def write_junit(file: str, title: str, report: Report, judgement: Judgement) -> None:
    """Write what was checked as a suite of tests. Raises Failure: the file cannot be written."""
    name = _attribute(theirs(title, 400))
    failed = sum(not each.passed for each in judgement.checks)
    head = f'<testsuite name={name} tests="{len(judgement.checks)}" failures="{failed}" time="{report.seconds:.3f}">'
    cases = []
    for each in judgement.checks:
        text = theirs(each.text, 400)
        inner = f"<system-out>{escape(text)}</system-out>" if each.passed else f"<failure message={_attribute(text)}/>"
        cases.append(f"  <testcase classname={name} name={_attribute(theirs(each.name, 400))}>{inner}</testcase>")
    whole = ['<?xml version="1.0" encoding="UTF-8"?>', head, *cases, "</testsuite>", ""]
    write_result(file, "\n".join(whole))
