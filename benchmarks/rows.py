"""What a module that measures by itself hands back: plain rows, a value for each round."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from environments import find_peers

__all__ = ["Rows", "command_line"]


class Rows:
    """Collects values; `data` is what is handed back, in the order in which rows first got a value."""

    def __init__(self) -> None:
        self.data: list[dict[str, Any]] = []
        self._found: dict[tuple[str, str, str], dict[str, Any]] = {}

    def add(self, cell: str, figure: str, peer: str, unit: str, value: float) -> None:
        """Note a value of one more round."""
        row = self._found.get((cell, figure, peer))
        if row is None:
            row = {"cell": cell, "figure": figure, "peer": peer, "unit": unit, "values": []}
            self._found[cell, figure, peer] = row
            self.data.append(row)
        row["values"].append(value)


def command_line(description: str, measure: Callable[..., list[dict[str, Any]]], *, rounds: int) -> None:
    """Measure as the command line says, and print what was found."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="less of everything, to find large mistakes")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"how often each peer has its turn ({rounds})")
    parser.add_argument("--peer", action="append", help="only the peer of this name (repeatable)")
    parser.add_argument("--cell", action="append", help="only this cell (repeatable)")
    parser.add_argument("--json", type=Path, help="also write every value to this file")
    options = parser.parse_args()
    found = measure(find_peers(options.peer), rounds=options.rounds, quick=options.quick, cells=options.cell)
    for cell, figure, unit in dict.fromkeys((row["cell"], row["figure"], row["unit"]) for row in found):
        print(f"{cell}, {figure}, {unit}")
        for row in found:
            if (row["cell"], row["figure"]) == (cell, figure):
                low, middle, high = min(row["values"]), statistics.median(row["values"]), max(row["values"])
                print(f"    {row['peer']:22} {middle:12,.2f}  ({low:,.2f} to {high:,.2f})")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1), "utf-8")
