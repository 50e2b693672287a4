"""What modules that measure by themselves hand back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import rows
from rows import Rows


def test_values_of_one_figure_are_kept_in_order_of_rounds() -> None:
    found = Rows()
    found.add("cell", "cpu", "one", "ms", 1.0)
    found.add("cell", "cpu", "two", "ms", 2.0)
    found.add("cell", "cpu", "one", "ms", 3.0)
    found.add("other", "cpu", "one", "ms", 4.0)
    assert [(row["cell"], row["peer"], row["values"]) for row in found.data] == [
        ("cell", "one", [1.0, 3.0]),
        ("cell", "two", [2.0]),
        ("other", "one", [4.0]),
    ]
    assert found.data[0]["figure"] == "cpu"
    assert found.data[0]["unit"] == "ms"


def test_the_command_line_measures_what_it_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked: dict[str, Any] = {}

    def measure(peers: list[str], **options: Any) -> list[dict[str, Any]]:
        asked.update(options, peers=peers)
        return [{"cell": "c", "figure": "cpu", "peer": "one", "unit": "ms", "values": [3.0, 1.0, 2.0]}]

    file = tmp_path / "found.json"
    monkeypatch.setattr(rows, "find_peers", lambda names: names)
    monkeypatch.setattr(
        "sys.argv", ["x", "--quick", "--rounds", "2", "--peer", "one", "--cell", "c", "--json", str(file)]
    )
    rows.command_line("Measure.", measure, rounds=5)
    assert asked == {"peers": ["one"], "rounds": 2, "quick": True, "cells": ["c"]}
    assert "2.00  (1.00 to 3.00)" in capsys.readouterr().out
    assert json.loads(file.read_text())[0]["values"] == [3.0, 1.0, 2.0]
