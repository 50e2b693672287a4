"""The plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cells import CELLS
from names import MCP, OURS
from results import Results


@pytest.fixture(scope="module")
def plots() -> Any:
    """The module, whose import takes half a second: only in the process that runs these tests."""
    import plots

    return plots


def found() -> Results:
    results = Results()
    for cell in CELLS:
        for place, peer in enumerate((OURS, MCP), 1):
            for figure in ("cpu", "rate", "p50", "p99", "p99.9", "memory"):
                results.add(cell.name, figure, peer, "", [place * 10.0, place * 11.0, place * 12.0])
    return results


@pytest.mark.slow
def test_every_plot_is_drawn_and_the_same_each_time(plots: Any, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        plots.draw_all(found(), folder)
    names = {"bars", "client-cpu", "cpu-per-call", "in-memory", "in-short", "latency"}
    names |= {"progress", "sessions", "windows", "workers"}
    assert {file.name for file in first.iterdir()} == {f"{name}.{kind}" for name in names for kind in ("svg", "png")}
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes()
        if file.suffix == ".svg" and file.stem not in ("bars", "workers"):  # those are of ours alone
            drawn = file.read_text("utf-8")
            assert OURS in drawn
            assert plots.COLOURS[MCP] in drawn


def test_what_was_not_measured_is_not_drawn(plots: Any, tmp_path: Path) -> None:
    assert plots.draw_all(Results(), tmp_path) == []


def test_everybody_has_a_colour_of_their_own(plots: Any) -> None:
    assert set(plots.COLOURS) == set(plots.SHOWN)
    assert len(set(plots.COLOURS.values())) == len(plots.SHOWN)
