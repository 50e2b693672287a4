"""What `trimcp bench` says yes or no to: as lines, as annotations, as JUnit, and as an exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import attrs
import pytest

from tests.bench.test_regression import TEN, a_run
from tests.cli.reports import a_report, some_errors
from tests.cli.test_app import trimcp
from tests.cli.test_bench_run import ADD, SERVER, measuring
from trimcp.bench.report import Failures, Report
from trimcp.cli.bench.verdict import Judgement, github_lines, read_reports, read_requirements, write_junit
from trimcp.cli.exits import Failure

HOSTILE = "boom%\n::warning::x <a & 'b'> \x1b[31m"


def judged(report: Report, *required: str, baseline: tuple[Report, ...] = (), tolerance: float = 0.1) -> Judgement:
    return Judgement.of(report, read_requirements(required), baseline, tolerance)


@pytest.mark.parametrize(
    ("required", "errors", "code"),
    [
        ((), {}, 0),
        ((), some_errors(), 1),
        (("p50<1s",), {}, 0),
        (("p50<1us",), {}, 5),
        (("p50<1us",), some_errors(), 1),
        (("errors<90%",), some_errors(), 0),
        (("errors<0.1%",), some_errors(), 5),
        (("errors<90%,p50<1us",), some_errors(), 5),
    ],
)
def test_the_exit_code_says_what_failed(required: tuple[str, ...], errors: dict[str, Failures], code: int) -> None:
    assert judged(a_report(errors=errors), *required).exit_code == code


def test_what_was_required_stands_below_the_table() -> None:
    lines = list(judged(a_report(), "p50<5ms,rate>1000").lines())
    assert lines == [
        ("  required    p50<5ms: kept, 1.003 ms", ""),
        ("              rate>1000: BROKEN, 500", "bold red"),
    ]


def test_a_regression_stands_below_the_table_and_the_whole_always() -> None:
    found = judged(a_run(2, slow={"tool3": 0.002}), baseline=(a_run(1),))
    assert found.exit_code == 5
    text = [line for line, _ in found.lines()]
    assert text[0] == "  baseline    24 figures compared, 2 WORSE"
    assert text[1].startswith("              WORSE: p50 of tool3: 534 µs before, 2.54 ms now: × 4.8")
    assert [line.split(":")[0].strip() for line in text[3:]] == ["p50", "p99", "calls per second", "CPU per call"]
    assert judged(a_run(2), baseline=(a_run(1),)).exit_code == 0


def test_annotations_are_commands_of_github_and_nobody_else_writes_them() -> None:
    title = f"of {HOSTILE}: a, b"
    (line,) = github_lines(title, judged(a_report(), "p50<1us"))
    assert line.startswith("::error title=of boom%25")
    assert line.endswith("%3A a%2C b::p50<1us: 1,002.759 us")
    assert "\n" not in line
    assert "\x1b" not in line
    assert list(github_lines("t", judged(a_report(), "p50<1s"))) == ["::notice title=t::all of 2 checks passed"]


def test_junit_has_a_case_for_each_check(tmp_path: Path) -> None:
    file = tmp_path / "bench.xml"
    report = a_report(errors=some_errors())
    write_junit(str(file), HOSTILE, report, judged(report, "p50<1s,rate>99999"))
    suite = ET.fromstring(file.read_text())
    assert (suite.get("tests"), suite.get("failures"), suite.get("time")) == ("3", "2", "2.000")
    cases = {case.get("name"): case.find("failure") for case in suite}
    assert list(cases) == ["every answer is right", "p50<1s", "rate>99999"]
    assert cases["p50<1s"] is None
    told = cases["rate>99999"]
    assert told is not None
    assert told.get("message") == "500"
    with pytest.raises(Failure, match="cannot write"):
        write_junit(str(tmp_path), "x", report, judged(report))


def test_a_baseline_that_cannot_be_used_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = measuring(monkeypatch)
    file = tmp_path / "figures.json"
    for text, why in {
        "{": "is no valid JSON",
        '{"rounds": []}': "holds a comparison of two servers",
        "[1]": "does not hold the figures",
    }.items():
        file.write_text(text)
        result = trimcp("bench", "--baseline", str(file), *ADD, "server.py")
        assert (result.exit_code, why in result.stderr) == (2, True), result.stderr
    assert trimcp("bench", "--baseline", str(tmp_path / "none"), *ADD, "server.py").exit_code == 2
    for words in (["--require", "p99"], ["--junit", "/none/x.xml"], ["--compare", "x", "--require", "p99<1s"]):
        result = trimcp("bench", *words, *ADD, "server.py")
        assert (result.exit_code, result.stderr.startswith(("trimcp: --", "Error"))) == (2, True), result.stderr
    assert measured.asked == []


def test_a_baseline_of_another_load_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "figures.json"
    file.write_text(json.dumps(a_run(1).to_json()))
    measured = measuring(monkeypatch)
    result = trimcp("bench", "--baseline", str(file), *ADD, "--", "node", "server.js")
    assert (result.exit_code, measured.asked) == (2, [])
    assert "--baseline: the baseline was measured with another mix" in result.stderr


def test_the_command_judges_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, file, junit = tmp_path / "before.json", tmp_path / "figures.json", tmp_path / "bench.xml"
    script = tmp_path / "mix.json"
    script.write_text(json.dumps([{"tool": label} for label in TEN]))
    before.write_text(json.dumps(a_run(1).to_json()))
    measuring(monkeypatch, a_run(2, slow={"tool3": 0.002}))
    words = [
        "--script",
        str(script),
        "--under-way",
        "8",
        "--require",
        "p50<5ms",
        "--baseline",
        str(before),
        "--github",
        "--junit",
        str(junit),
        "--save",
        str(file),
    ]
    result = trimcp("bench", *words, "--", "node", "server.js")
    assert result.exit_code == 5, result.output
    assert "p50<5ms: kept" in result.stdout
    assert "::error title=trimcp bench" in result.stdout
    assert "WORSE: p50 of tool3" in result.stdout
    checks: list[dict[str, Any]] = json.loads(file.read_text())["checks"]
    assert [each["name"] for each in checks if not each["passed"]] == [
        "baseline: p50 of tool3",
        "baseline: p99 of tool3",
    ]
    assert ET.fromstring(junit.read_text()).get("failures") == "2"


def test_what_one_measurement_saves_the_next_is_compared_with(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = ("--seconds", "3", "-q", *ADD, "--", sys.executable, SERVER)
    assert trimcp("bench", "--save", str(file), *command).exit_code == 0
    (report,) = read_reports([str(file)], "--baseline")
    assert report.requests["add"].count == report.latency.count
    assert sum(each.whole.count for each in report.slices) == report.calls
    spent = [each.cpu for each in report.slices]
    assert None not in spent  # on a busy machine there is a slice in which the server had no core
    assert sum(filter(None, spent)) > 0
    assert all(each.rss and each.work_cpu for each in report.slices)
    result = trimcp("bench", "--baseline", str(file), "--tolerance", "9", *command)
    assert result.exit_code == 0, result.output
    assert "figures compared, none worse" in result.stdout


def test_errors_are_no_regression_of_a_server_that_always_had_them() -> None:
    bad = {"boom": Failures(500, "no")}
    run = attrs.evolve(a_run(1), errors=bad)
    found = judged(run, "errors<90%", baseline=(run,))
    assert found.exit_code == 0
