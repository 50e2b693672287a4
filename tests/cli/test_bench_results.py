"""Where the figures go: the table to one stream, JSON and plot to files, and none of it lost for another's sake."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from rich.console import Console

from tests.cli.reports import a_report
from tests.cli.test_bench_options import typed
from trimcp.bench.report import Report
from trimcp.cli.bench.run import show_results
from trimcp.cli.exits import Failure
from trimcp.cli.screen import Screen


@attrs.define
class Streams:
    out: str
    err: str


def shown(done: list[list[Report]], *words: str) -> Streams:
    screen = Screen()
    out, err = io.StringIO(), io.StringIO()
    screen.out = Console(file=out, width=80, markup=False, highlight=False, soft_wrap=True)
    screen.err = Console(file=err, width=80, markup=False, highlight=False, soft_wrap=True)
    show_results(screen, typed(*words), done)
    return Streams(out.getvalue(), err.getvalue())


def test_the_table_goes_to_standard_output() -> None:
    streams = shown([[a_report()]])
    assert "1,000 answered rightly" in streams.out
    assert streams.err == ""


def test_json_takes_standard_output_for_itself(capsys: pytest.CaptureFixture[str]) -> None:
    streams = shown([[a_report()]], "--json")
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(a_report().to_json()))
    assert "1,000 answered rightly" in streams.err
    assert streams.out == ""
    assert shown([[a_report()]], "--json", "--quiet") == Streams("", "")


def test_json_goes_to_a_file_beside_the_table(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    assert "1,000 answered rightly" in shown([[a_report()]], "--save", str(file)).out
    assert json.loads(file.read_text())["per_second"] == 500.0


def test_two_servers_are_compared(tmp_path: Path) -> None:
    file, plot = tmp_path / "figures.json", tmp_path / "plot.svg"
    done = [[a_report(), a_report()], [a_report(calls=500), a_report(calls=500)]]
    streams = shown(done, "--save", str(file), "--plot", str(plot))
    assert "2.00 to 2.00" in streams.out
    assert json.loads(file.read_text())["ratios"]["per_second"]["median"] == 2.0
    assert "two servers in 2 rounds" in plot.read_text()
    assert "500 calls answered per second" in plot.read_text()


def test_a_plot_tells_apart_what_has_the_same_name(tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    shown([[a_report(target="old.py")], [a_report(target="new.py")]], "--plot", str(plot))
    assert ">old.py · library 1.0 · " in plot.read_text()
    assert ">new.py · library 1.0 · " in plot.read_text()
    shown([[a_report()], [a_report()]], "--plot", str(plot))
    assert ">1: python library.py · library 1.0 · " in plot.read_text()
    assert ">2: python library.py · library 1.0 · " in plot.read_text()
    shown([[a_report()], [a_report(server_name="other")]], "--plot", str(plot))
    assert ">library 1.0 · " in plot.read_text()


def test_a_plot_says_of_a_rate_that_it_is_an_estimate(tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    long = a_report(milliseconds=1500.0, calls=0, parts=6.6)
    shown([[long]], "--plot", str(plot))
    assert ">roughly 3.30 calls answered per second; " in plot.read_text()
    shown([[a_report()], [long]], "--plot", str(plot))
    assert ": roughly 3.30 calls answered per second" in plot.read_text()
    assert plot.read_text().count("roughly") == 1


def test_a_round_that_was_interrupted_is_shown_and_not_compared(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    half = a_report(calls=7, interrupted=True)
    streams = shown([[a_report(), half], [a_report(calls=500)]], "--save", str(file))
    assert "1 round of: " in streams.out
    assert [each["calls"] for each in json.loads(file.read_text())["unpaired"]] == [7]
    shown([[a_report(), half], [a_report(calls=500), a_report(calls=600)]], "--save", str(file))
    assert len(json.loads(file.read_text())["rounds"]) == 1
    assert [each["calls"] for each in json.loads(file.read_text())["unpaired"]] == [7, 600]
    streams = shown([[half], []], "--save", str(file), "--plot", str(tmp_path / "plot.svg"))
    assert "7 answered rightly" in streams.out
    assert "interrupted" in streams.out
    value: Any = json.loads(file.read_text())
    assert (value["rounds"], value["ratios"], len(value["unpaired"])) == ([], {}, 1)


def test_what_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    plot = tmp_path / "plot.svg"
    with pytest.raises(Failure, match=r"cannot write .*taken: Is a directory"):
        shown([[a_report()]], "--save", str(tmp_path / "taken"), "--plot", str(plot))
    assert plot.exists()


def test_the_reference_names_all_figures() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "command.md").read_text("utf-8")
    figures = a_report().to_json()
    inner = [name for part in ("latency_ms", "cost", "generator", "progress") for name in figures[part]]
    inner += figures["over_time"][0]
    assert [name for name in (*figures, *inner) if f"`{name}`" not in page and f"`{name}." not in page] == []
