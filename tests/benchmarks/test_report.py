"""The page and its tables."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from bars import BARS
from cells import CELLS, SECTIONS, cell
from names import BEFORE, FASTMCP, FLOOR, HYPERCORN, MCP, OURS, TYPESCRIPT
from report import (
    bars_table,
    failures,
    figure_table,
    full_tables,
    generator,
    noise,
    number,
    page,
    ratio,
    summary,
    table,
    tables,
)
from results import BUSY, Results, Spread

CPU = SECTIONS[0].figures[0]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.01234, "0.012"),
        (0.5, "0.5"),
        (3.14159, "3.14"),
        (31.4159, "31.4"),
        (31.0, "31"),
        (314.159, "314"),
        (31415.9, "31,416"),
        (-0.25, "-0.25"),
    ],
)
def test_numbers_have_the_digits_that_mean_something(value: float, text: str) -> None:
    assert number(value) == text


def test_ratios_have_as_many_as_they_need() -> None:
    assert ratio(Spread(0.0625, 0.06, 0.07)) == "0.062 (0.060 to 0.070)"
    assert ratio(Spread(0.333, 0.333, 0.333)) == "0.33"
    assert ratio(Spread(24.4, 20.0, 31.0)) == "24 (20 to 31)"


def test_a_table_is_markdown() -> None:
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def found() -> Results:
    results = Results(made={"date": "2026-11-21", "command": "nox -s bench", "seconds": 1200.0})
    for peer, values in {
        OURS: [10.0, 12.0, 11.0],
        HYPERCORN: [5.0],
        MCP: [400.0, 440.0, 420.0],
        TYPESCRIPT: [20.0, 22.0, 22.0],
        FLOOR: [3.0],
    }.items():
        results.add("stdio-2025", "cpu", peer, "µs", values)
    return results


def rows(text: str) -> list[list[str]]:
    lines = [[part.strip() for part in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert len({len(line) for line in lines}) == 1
    return [lines[0], *lines[2:]]


def test_a_figure_has_a_column_for_each_that_was_measured() -> None:
    head, row = rows(figure_table(CPU, CELLS, found()))
    assert head == [CPU.title, OURS, HYPERCORN, MCP, TYPESCRIPT, FLOOR, f"{OURS} / best peer"]
    assert row == [
        cell("stdio-2025").title,
        "11 (10 to 12)",
        "5",
        "420 (400 to 440)",
        "22 (20 to 22)",
        "3",
        # Neither the minimal server nor ours on Hypercorn is a peer.
        "0.50 (0.50 to 0.55)",
    ]


def test_a_peer_that_failed_is_shown_as_such() -> None:
    results = found()
    results.fail("stdio-2025", FASTMCP, "exit code 1: 3 x wrong: `a|b`")
    head, row = rows(figure_table(CPU, CELLS, results))
    assert row[head.index(FASTMCP)] == "failed"
    assert rows(failures(results).replace("\\|", "/"))[1][:2] == ["stdio-2025", FASTMCP]
    assert "\\`a\\|b\\`" in failures(results)
    assert FASTMCP in tables(results)


def test_a_peer_that_does_not_offer_something_is_not_shown_as_failed() -> None:
    results = found()
    results.add("stdio-2026", "cpu", OURS, "µs", [12.0])
    assert "failed" not in figure_table(CPU, CELLS, results)


def test_a_cell_without_anybody_else_has_no_ratio() -> None:
    results = Results()
    results.add("stdio-2025", "cpu", OURS, "µs", [12.0])
    assert rows(figure_table(CPU, CELLS, results)) == [[CPU.title, OURS], [cell("stdio-2025").title, "12"]]
    assert figure_table(CPU, CELLS, Results()) == ""


def test_how_busy_the_generator_was_is_shown_and_not_compared() -> None:
    results = found()
    for peer, busy in ((OURS, 0.25), (MCP, 0.1)):
        results.add("stdio-2025", BUSY, peer, "share of a core", [busy])
    (figure,) = (figure for figure in SECTIONS[0].figures if figure.name == BUSY)
    assert rows(figure_table(figure, CELLS, results))[1] == [cell("stdio-2025").title, "0.25", "0.1"]


def test_what_a_busy_generator_measured_is_marked() -> None:
    results = found()
    assert "nowhere" in generator(results)
    results.add("stdio-2025", BUSY, OURS, "share of a core", [0.95])
    results.add("stdio-2025", BUSY, MCP, "share of a core", [0.1])
    _, row = rows(figure_table(CPU, CELLS, results))
    assert [one.endswith("†") for one in row] == [False, True, False, False, False, False, False]
    assert f"{OURS} (stdio-2025)" in generator(results)


def test_the_bars_are_all_there() -> None:
    whole = found()
    whole.made["whole"] = True
    listed = rows(bars_table(whole))[1:]
    bars = [bar for bar in BARS if bar.against != (BEFORE,)]
    assert [row[0] for row in listed] == [bar.what for bar in bars]
    by_peer = {row[1]: row for row in listed if row[2]}
    assert by_peer[TYPESCRIPT][2:] == ["0.50 (0.50 to 0.55)", "at most 0.6", "met, 17% to spare"]
    assert by_peer[MCP][2:] == ["0.026 (0.025 to 0.027)", "at most 1/15", "met, 61% to spare"]
    assert summary(found()) == f"{len(bars)} bars: 2 met, {len(bars) - 2} not measured"


def test_a_part_of_a_run_tells_the_bars_it_is_about() -> None:
    assert {row[1] for row in rows(bars_table(found()))[1:]} == {TYPESCRIPT, MCP}


def test_a_missed_bar_is_hard_to_overlook() -> None:
    results = Results()
    results.add("stdio-2025", "cpu", OURS, "µs", [30.0, 10.0, 31.0])
    results.add("stdio-2025", "cpu", TYPESCRIPT, "µs", [20.0, 20.0, 20.0])
    assert "| **missed** by 150%, not in every round |" in bars_table(results)


def test_how_noisy_it_was_is_told() -> None:
    results = found()
    results.made |= {"pulse_ms": [10.0, 12.0, 20.0], "load_average": [0.5, 1.5], "stolen": 0.021}
    told = noise(results)
    assert "took 12 ms of CPU, 10 at best and 20 at worst" in told
    assert "0.5 before the run and 1.5 after" in told
    assert "2.1% of the time" in told


@pytest.mark.parametrize("made", [page, full_tables])
def test_no_place_is_left_empty(made: Callable[[Results], str]) -> None:
    text = made(found())
    assert "<!--" not in text
    assert "\n\n\n" not in text


def test_it_says_when_it_was_measured_and_what_failed() -> None:
    assert "took 20 minutes on 2026-11-21" in page(found())
    assert "Nothing: every implementation did" in full_tables(found())


def test_a_part_is_not_shown_as_the_whole() -> None:
    results = found()
    assert "preliminary" in page(results)
    results.made["whole"] = True
    assert "preliminary" not in page(results)


@pytest.mark.parametrize(("made", "name"), [(page, "performance.md"), (full_tables, "performance/tables.md")])
def test_the_pages_in_the_documentation_are_made_from_the_results(made: Callable[[Results], str], name: str) -> None:
    docs = Path(__file__).parents[2] / "docs"
    results = Results.read(docs / "performance" / "results.json")
    file = docs / name
    assert made(results) == file.read_text("utf-8"), "run: python benchmarks/report.py"
    for link in re.findall(r"\(([\w/-]+\.(?:svg|png|md|json))\)", made(results)):
        assert (file.parent / link).exists()


def test_the_page_says_what_was_measured_in_a_run_of_its_own() -> None:
    part = {"date": "tuesday", "command": "nox -s bench -- --keep", "load_average": [7.25, 8], "cells": ["a", "b"]}
    text = page(Results({"whole": True, "parts": [part]}))
    assert "`nox -s bench -- --keep` on tuesday, at a load average of 7.25 before and 8 after: `a`, `b`." in text
