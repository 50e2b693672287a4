"""`trimcp bench --find-limit`: what is measured in which order, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.cli.reports import a_report
from tests.cli.test_app import trimcp
from tests.cli.test_bench_run import ADD
from trimcp.bench.limit import LimitSearch, Trial
from trimcp.bench.plan import Plan
from trimcp.bench.report import Generator, Report
from trimcp.bench.requirements import Requirement
from trimcp.cli.bench import run as bench_run
from trimcp.cli.bench.limit import judge_trial, limit_lines

WORDS = ("bench", "--find-limit", "--require", "p99<50ms", *ADD)


class Slowing:
    """Stands in for `measure`: a server whose calls take long above a rate."""

    def __init__(self, limit: float, busy: float = 0.1) -> None:
        self.limit, self.busy, self.rates = limit, busy, list[float]()

    async def __call__(self, target: Any, plan: Plan, **options: Any) -> Report:
        assert plan.rate is not None
        self.rates.append(plan.rate)
        report = a_report(plan=plan, milliseconds=1.0 if plan.rate <= self.limit else 100.0)
        generator = Generator(self.busy * 2.0, 2.0, 1000)
        return attrs.evolve(report, calls=round(plan.rate * report.seconds), generator=generator)


def test_the_limit_is_told_and_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Slowing(900.0)
    monkeypatch.setattr(bench_run, "measure", server)
    file = tmp_path / "limit.json"
    result = trimcp(*WORDS, "--save", str(file), "--", "node", "server.js")
    assert result.exit_code == 0, result.output
    assert "limit       872 calls per second; 872 surely held, 951 broke" in result.stdout
    assert "BROKE: p99<50ms was 100 ms (0 % sure)" in result.stdout
    assert server.rates[:6] == [50, 100, 200, 400, 800, 1600]
    saved = json.loads(file.read_text())
    assert saved["limit"]["rate"] == pytest.approx(872, rel=0.01)
    assert [each["rate"] for each in saved["steps"]] == server.rates


def test_where_the_generator_is_the_limit_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_run, "measure", Slowing(70.0, busy=0.9))
    result = trimcp(*WORDS, "--", "node", "server.js")
    assert "SATURATED: the generator was at its own limit; try --processes" in result.stdout


def test_a_server_that_never_holds_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_run, "measure", Slowing(0.0))
    result = trimcp(*WORDS, "--rate", "4", "--", "node", "server.js")
    assert result.exit_code == 5
    assert "none found: the lowest rate broke already" in result.stdout


@pytest.mark.parametrize(("confidences", "said"), [((1.0, 0.1), "100 rather broke"), ((1.0, 0.9), "the limit is at")])
def test_where_no_rate_surely_broke_it_says_what_is_known(confidences: tuple[float, float], said: str) -> None:
    search = LimitSearch(50.0)
    search.trials += [Trial(50.0 * number, sure, a_report()) for number, sure in enumerate(confidences, 1)]
    assert any(f"no rate surely broke: {said}" in text for text, _ in limit_lines(search, ()))


def test_a_server_that_falls_behind_does_not_hold() -> None:
    trial = judge_trial(1000.0, a_report(), Requirement.read("p99<50s"))
    assert (trial.held, trial.why) == (False, "only 500 a second were over in time")


@pytest.mark.parametrize(
    "words", [(), ("--require", "p99<1s", "--baseline", "x.json"), ("--require", "p99<1s", "--compare", "x")]
)
def test_what_goes_not_with_it_is_said(words: tuple[str, ...]) -> None:
    result = trimcp("bench", "--find-limit", *words, *ADD, "--", "node", "server.js")
    assert (result.exit_code, "--find-limit" in result.stderr or "--baseline" in result.stderr) == (2, True)
