"""`trimcp bench` with several generators, as real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_app import SERVER, trimcp
from tests.cli.test_bench_run import ADD
from trimcp.cli.bench.team import SECRET

TARGET = ("--", sys.executable, SERVER)
OWN = "a secret of this test, long enough"


def test_two_processes_are_one_measurement(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    words = ("--sessions", "3", "--seconds", "1", "--processes", "2", "--save", str(file))
    result = trimcp("bench", *words, *ADD, *TARGET)
    assert result.exit_code == 0, result.output
    assert "all generators begin, within" in result.stderr
    assert "in 2 processes" in result.stdout
    report = json.loads(file.read_text())
    assert report["plan"]["sessions"] == 3
    assert report["seconds"] == pytest.approx(1.0, abs=0.3)
    assert sum(count for _, count in report["histogram"]) == report["calls"] + report["after"]
    assert report["generator"]["processes"] == 2
    assert report["cost"]["cpu_seconds"] > 0


def test_what_keeps_a_process_from_beginning_is_said_once() -> None:
    result = trimcp("bench", "--processes", "2", "--sessions", "2", "--tool", "nope", *TARGET)
    assert result.exit_code == 2
    assert result.stderr.count("the server has no tool") == 1
    result = trimcp("bench", "--processes", "2", *ADD, *TARGET)
    assert (result.exit_code, "2 generators need at least as many --sessions" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "secret", "why"),
    [
        (("--join", "127.0.0.1:9"), "", "need one secret of 16 characters"),
        (("--listen", "127.0.0.1:0"), "short", "need one secret of 16 characters"),
        (("--join", "nowhere"), OWN, "--join takes HOST:PORT"),
        (("--listen", "127.0.0.1:99999"), OWN, "--listen takes HOST:PORT"),
        (("--listen", "127.0.0.1:0", "--join", "x:1"), OWN, "leave out"),
    ],
)
def test_what_is_wrong_is_said(words: tuple[str, ...], secret: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, secret)
    result = trimcp("bench", *words, *ADD, *TARGET)
    assert (result.exit_code, why in result.stderr) == (2, True), result.output


def test_generators_join_from_elsewhere_and_whoever_is_killed_is_told() -> None:
    environment = {**os.environ, SECRET: OWN}
    command = [sys.executable, "-m", "trimcp.cli", "bench"]
    seconds = ("--seconds", "4", "--warm-up", "0", "--sessions", "2")
    words = [*command, "--listen", "127.0.0.1:0", "--processes", "2", *seconds, *ADD, *TARGET]
    with subprocess.Popen(words, env=environment, stdout=-1, stderr=-1, text=True) as listener:
        assert listener.stderr is not None
        while "waiting for 2 generators at " not in (line := listener.stderr.readline()):
            assert line, "the listener ended"
        joining = [*command, "--join", line.split()[-1], "-q", *TARGET]
        generators = [subprocess.Popen(joining, env=environment, stderr=subprocess.DEVNULL) for _ in range(2)]
        while "all generators begin" not in (line := listener.stderr.readline()):
            assert line, "the listener ended"
        generators[0].send_signal(signal.SIGKILL)
        told, why = listener.communicate(timeout=60)
        codes = [each.wait(60) for each in generators]
    assert listener.returncode == 1
    assert codes == [-signal.SIGKILL, 0]
    assert "died: the connection was lost" in why
    assert "1 a generator died: generator" in told
