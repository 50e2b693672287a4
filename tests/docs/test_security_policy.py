"""SECURITY.md says where each defence is tested: those tests exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def named() -> Iterator[Path]:
    """The files and folders in the last column of each table; one without a folder is in that of the one before."""
    for line in (ROOT / "SECURITY.md").read_text("utf-8").splitlines():
        if not line.startswith("|"):
            continue
        folder = ROOT
        for name in re.findall(r"`([\w/]+(?:\.py)?)`", line.rstrip("| ").rpartition("|")[2]):
            path = ROOT / name if name.startswith("tests") else folder / name
            folder = path.parent
            yield path


def test_where_it_says_that_something_is_tested_there_are_tests() -> None:
    paths = list(named())
    assert len(paths) > 50
    assert [str(path.relative_to(ROOT)) for path in paths if not path.exists()] == []


def test_every_defence_has_a_test() -> None:
    rows = [line.split("|") for line in (ROOT / "SECURITY.md").read_text("utf-8").splitlines() if line.startswith("| ")]
    tables = [row for row in rows if len(row) == 5 and not row[1].strip().startswith(("it tries", "---"))]
    assert len(tables) > 25
    assert [row[1].strip() for row in tables if "`test" not in row[3]] == []
