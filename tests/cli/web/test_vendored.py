"""The libraries of the page are those of npm: by their sums here, and from the registry in `nox -s vendored`."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "trimcp/cli/web/page/vendor"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (FOLDER / "README.md").read_text("utf-8").splitlines()
    if "@" in line and line.startswith("|")
]


def test_every_file_has_a_sum() -> None:
    assert {row[0] for row in ROWS} == {file.name for file in FOLDER.iterdir() if file.name != "README.md"}


@pytest.mark.parametrize(("name", "package", "expected"), ROWS)
def test_a_file_is_as_it_was_published(name: str, package: str, expected: str) -> None:
    assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == expected
