"""`trimcp bench` as it is typed: what is measured in which order, how it ends, and what a real server gives."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.cli.reports import a_report, a_snapshot, some_errors
from tests.cli.test_app import SERVER, read_until, started, trimcp, wait_for
from trimcp.bench.plan import MixEntry, Plan
from trimcp.bench.report import Histogram
from trimcp.cli.bench import run as bench_run
from trimcp.errors import ConnectionLost, LocalError, RemoteError

ADD = ["--tool", "add", "-a", "a:=1", "--expect", "1.5 small None False"]
ANSWERED = re.compile(r"calls +([\d,]+) answered rightly")


class Measured:
    """Stands in for `measure`: keeps what was to be measured, and has reports ready."""

    def __init__(self, *results: Any) -> None:
        self.asked: list[tuple[Any, Plan]] = []
        self.results = list(results)

    async def __call__(self, targets: Any, plan: Plan, *, on_tick: Any, tick: float, stop: trio.Event) -> Any:
        await trio.lowlevel.checkpoint()
        self.asked.append((*targets, plan))
        on_tick(a_snapshot())
        result = self.results.pop(0) if self.results else a_report(plan=plan)
        if isinstance(result, Exception):
            raise result
        return result


def measuring(monkeypatch: pytest.MonkeyPatch, *results: Any) -> Measured:
    measured = Measured(*results)
    monkeypatch.setattr(bench_run, "measure", measured)
    return measured


# In this process


def test_help_has_examples_and_the_exit_codes() -> None:
    result = trimcp("bench", "--help")
    assert result.exit_code == 0
    assert result.stdout.count("  trimcp bench ") == 11
    assert "1    some were not; the table lists them by kind" in result.stdout


@pytest.mark.parametrize("to_file", [False, True])
def test_what_is_said_before_the_measurement_may_be_shown(to_file: bool, tmp_path: Path) -> None:
    file = tmp_path / "said.txt"
    words = [f"--trace={file}" if to_file else "--trace", "--count", "3", *ADD]
    result = trimcp("bench", *words, "--", sys.executable, SERVER)
    assert result.exit_code == 0, result.output
    told = file.read_text() if to_file else result.stderr
    assert "server/discover" in told
    assert ("server/discover" in result.stderr) is not to_file


def test_a_server_may_stand_last(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = measuring(monkeypatch)
    result = trimcp("bench", "--tool", "echo", "-a", "text:=1", "--", "node", "server.js", "--fast")
    assert (result.exit_code, result.stderr.splitlines()[0]) == (0, "echo of node server.js --fast")
    ((target, plan),) = measured.asked
    assert target.command == ("node", "server.js", "--fast")
    assert plan.mix == (MixEntry.tool("echo", {"text": 1}),)


def test_what_is_wrong_is_said_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = measuring(monkeypatch)
    for words, told in [
        (["x", "--method", "ping", "--save", "nowhere/x.json"], "--save cannot write nowhere/x.json"),
        (["x", "--method", "ping", "--plot", "x.gif"], "--plot draws .svg or .png files"),
        (["x", "--method", "ping", "--header", "X: 1"], "headers are sent to a URL"),
        (["x", "--method", "ping", "--compare", "ftp://x"], "'ftp' is no way to reach a server"),
        (["x", "--method", "ping", "--rate", "0"], "--rate"),
        (["x", "--tool", "t", "--seconds", "1", "--count", "2"], "measure either for"),
        (["x", "--method", "ping", "-a", "x=1"], "--arg goes with --tool"),
        (["python", "x.py", "--method", "ping"], "a command line goes in quotes, as one word, or last, after --"),
        (["http://a", "http://b", "http://c", "--sessions", "2", "--method", "ping"], "3 servers need at least"),
    ]:
        result = trimcp("bench", *words)
        assert result.exit_code == 2
        assert told in result.stderr
    assert measured.asked == []


def test_headers_and_processes_belong_to_one_of_the_two(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = measuring(monkeypatch)
    monkeypatch.setenv("FIRST", "secret-1")
    result = trimcp(
        *("bench", "https://a.example/mcp", "--method", "ping", "--rounds", "1", "--header", "X-Key: ${FIRST}"),
        *("--pid", "11", "--compare", "https://b.example/mcp", "--compare-pid", "12"),
    )
    assert result.exit_code == 0
    (first, first_plan), (second, second_plan) = measured.asked
    assert (first.headers, first_plan.pids) == ({"x-key": "secret-1"}, (11,))
    assert (second.headers, second_plan.pids) == ({}, (12,))
    assert "secret" not in result.stdout + result.stderr
    assert "ping of https://a.example/mcp" in result.stderr


def test_who_begins_changes_from_round_to_round(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = measuring(monkeypatch)
    result = trimcp("bench", "first", "--method", "ping", "--compare", "second", "--rounds", "3")
    assert result.exit_code == 0
    assert [target.command[0] for target, _ in measured.asked] == [
        *("first", "second"),
        *("second", "first"),
        *("first", "second"),
    ]
    assert "round 3 of 3: ping of second" in result.stderr
    assert "1.00 to 1.00" in result.stdout


@pytest.mark.parametrize(
    ("results", "code"),
    [
        ([a_report(), a_report()], 0),
        ([a_report(), a_report(errors=some_errors())], 1),
        ([a_report(errors=some_errors(), calls=0), a_report()], 1),
        ([a_report(calls=0, cancelled=5, latency=Histogram()), a_report()], 0),
        ([a_report(calls=0, latency=Histogram()), a_report()], 1),
        ([LocalError("the server has no tool 't'")], 2),
        ([ConnectionLost("nobody there")], 3),
        ([RemoteError(-32603, "broken")], 4),
    ],
)
def test_the_exit_code_says_how_it_ended(monkeypatch: pytest.MonkeyPatch, results: list[Any], code: int) -> None:
    measuring(monkeypatch, *results)
    assert trimcp("bench", "x", "--method", "ping", "--compare", "y", "--rounds", "1").exit_code == code


def test_what_was_measured_before_a_server_was_lost_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    measuring(monkeypatch, a_report(), a_report(calls=500), a_report(), ConnectionLost("gone for good"))
    result = trimcp("bench", "x", "--method", "ping", "--compare", "y", "--rounds", "2")
    assert result.exit_code == 3
    assert "2.00 to 2.00" in result.stdout
    assert result.stderr.endswith("Error: gone for good\n")


def test_when_all_calls_were_given_up_that_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    measuring(monkeypatch, a_report(calls=0, cancelled=5, latency=Histogram()))
    result = trimcp("bench", "x", "--method", "ping")
    assert (result.exit_code, "5 cancelled, 0 timed out" in result.stdout) == (0, True)


def test_quiet_leaves_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    measuring(monkeypatch)
    result = trimcp("bench", "-q", "x", "--method", "ping")
    assert result.stderr == ""
    assert ANSWERED.search(result.stdout) is not None


# With a real server


@pytest.mark.slow
def test_a_server_over_standard_streams(tmp_path: Path) -> None:
    file, plot = tmp_path / "figures.json", tmp_path / "plot.svg"
    with started("bench", SERVER, *ADD, "--count", "200", "--save", str(file), "--plot", str(plot)) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert err.startswith("add of ")
    assert "calls       200 answered rightly" in out
    assert "\x1b" not in out + err, "no colours where there is no terminal"
    figures = json.loads(file.read_text())
    assert (figures["calls"], figures["errors"], figures["transport"]) == (200, {}, "stdio")
    assert sum(count for _, count in figures["histogram"]) == 200
    assert figures["cost"]["cpu_seconds"] > 0
    assert "p99.9" in plot.read_text()


@pytest.mark.slow
def test_a_wrong_answer_is_none(tmp_path: Path) -> None:
    words = ["--tool", "add", "-a", "a=1", "--expect", "2.5 small None False", "--count", "5"]
    result = trimcp("bench", SERVER, *words)
    assert result.exit_code == 1
    assert "calls       0 answered rightly" in result.stdout
    assert "5 wrong text" in result.stdout
    assert "1.5 small None False" in result.stdout, "an example of what came"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--tool", "ad", "-a", "a=1"], 2, "the server has no tool 'ad'; did you mean add?"),
        (["--tool", "add", "-a", "a=one"], 2, "a must be a whole number, not 'one'"),
        ([], 2, "--script FILE; the server has the tools add, slow, "),
        (["--tool", "ad"], 2, "the server has no tool 'ad'"),
        (["--tool", "add"], 2, "the tool 'add' needs a"),
    ],
)
def test_what_the_server_does_not_have_is_said_before_the_load(words: list[str], code: int, told: str) -> None:
    result = trimcp("bench", SERVER, *words)
    assert (result.exit_code, result.stdout) == (code, "")
    assert told in result.stderr


def test_no_server_is_no_connection() -> None:
    result = trimcp("bench", f"{sys.executable} -c 'import sys; sys.exit(\"my last words\")'", "--method", "ping")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "my last words" in result.stderr


@pytest.mark.slow
def test_ctrl_c_ends_it_and_shows_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    with started("bench", SERVER, *ADD, "--seconds", "60", "--warm-up", "0", "--save", str(file)) as process:
        assert process.stderr is not None
        lines = [process.stderr.readline() for _ in range(2)]  # the second one shows figures
        assert "per second" in lines[1]
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert ", interrupted" in out
    found = ANSWERED.search(out)
    assert found is not None
    figures = json.loads(file.read_text())
    assert figures["calls"] == int(found[1].replace(",", "")) > 0
    assert figures["interrupted"] is True
    assert figures["seconds"] < 60


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--method", "ping"], ["--tool", "t", "-a", "x=1"]])
def test_ctrl_c_before_anything_was_measured_says_so(tmp_path: Path, words: list[str]) -> None:
    file = tmp_path / "log"
    silent = f"open({str(file)!r}, 'w').write('begun'); input(); input(); input()"
    with started("bench", *words, "--", sys.executable, "-c", silent) as process:
        wait_for(file, "begun")
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.endswith("Error: interrupted before anything was measured\n")


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    file = tmp_path / "log"
    words = ["--tool", "stubborn", "-a", f'file:="{file}"', "--timeout", "50"]
    with started("bench", SERVER, *words) as process:
        wait_for(file, "begun")
        os.kill(process.pid, signal.SIGINT)
        wait_for(file, "holding on")  # it takes three seconds more, for which nobody waits
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are of POSIX systems")
def test_on_a_terminal_there_is_a_panel(tmp_path: Path) -> None:
    screen, line = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with started("bench", SERVER, *ADD, "--seconds", "60", stderr=line, env=environment) as process:
        os.close(line)
        shown = read_until(screen, "generator")
        os.kill(process.pid, signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    os.close(screen)
    assert process.returncode == 143
    assert ANSWERED.search(out) is not None or out == ""
    assert "add of" in shown
    assert "\x1b[?25l" in shown, "the cursor is hidden while it redraws itself"
