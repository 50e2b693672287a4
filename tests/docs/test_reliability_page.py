"""The tables of docs/reliability.md are those of the figures that are kept beside it."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
_WRITER: dict[str, Any] = runpy.run_path(str(DOCS / "reliability.py"))


def test_the_page_says_what_was_measured() -> None:
    page = _WRITER["PAGE"].read_text(encoding="utf-8")
    kept = json.loads(_WRITER["KEPT"].read_text(encoding="utf-8"))
    assert page == _WRITER["page"](page, kept), "run: python docs/reliability.py"
    assert _WRITER["TABLES"].read_text(encoding="utf-8") == _WRITER["tables"](kept), "run: python docs/reliability.py"


def test_every_promise_has_its_tests() -> None:
    assert list(_WRITER["PROMISES"]) == list(range(1, 21))
    for number in _WRITER["PROMISES"]:
        assert list(_WRITER["TESTS"].glob(f"test_{number:02}_*.py"))


def _figure(value: float, bound: float | None, what: str = "w") -> dict[str, Any]:
    return {"promise": 3, "what": what, "value": value, "bound": bound, "unit": "MiB", "on": "stdio"}


@pytest.mark.parametrize(
    ("value", "bound", "verdict"),
    [
        (8, 8, "met"),
        (8.1, 8, "**1 of 2 figures over**"),
        (0, 0, "met"),
        (1, 0, "**1 of 2 figures over**"),
        (9, None, "met"),
    ],
)
def test_a_figure_over_its_bound_is_not_met(value: float, bound: float | None, verdict: str) -> None:
    assert _WRITER["verdict"]([_figure(0, 1), _figure(value, bound)]) == verdict


def test_the_worst_of_a_kind_is_shown_and_the_nearest_to_its_bound_first() -> None:
    table = _WRITER["details"]([_figure(1, 8), _figure(2, 8), _figure(2, 3, "v"), _figure(7, None, "u")])
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    assert rows == [
        "| v | 2 MiB | 3 MiB | stdio | 1 |",
        "| w | 2 MiB | 8 MiB | stdio | 2 |",
        "| u | 7 MiB |  | stdio | 1 |",
    ]
