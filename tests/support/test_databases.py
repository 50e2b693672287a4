"""Databases of which each is used by one process alone."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from trimcp.support.files import OwnedDatabase, UnusableFile, claim_file, is_database


def claimed(path: Path) -> int:
    return claim_file(path, fits=is_database, wrong="wrong", busy="busy")


@pytest.mark.parametrize("raised", [KeyboardInterrupt, sqlite3.OperationalError, ValueError])
def test_a_file_whose_opening_failed_is_given_up(raised: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "kept.db"
    connections: list[Any] = []

    def prepare(connection: Any) -> None:
        connections.append(connection)
        raise raised

    with pytest.raises(raised):
        OwnedDatabase(path, claimed(path), prepare)
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connections[0].execute("SELECT 1")
    OwnedDatabase(path, claimed(path), lambda connection: None).close()


def test_a_file_is_given_up_after_the_last_that_is_done_with_it(tmp_path: Path) -> None:
    path = tmp_path / "kept.db"
    database = OwnedDatabase(path, claimed(path), lambda connection: None)

    def last() -> None:
        with pytest.raises(UnusableFile, match="busy"):
            claimed(path)
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        database.close(last)
    OwnedDatabase(path, claimed(path), lambda connection: None).close()


@pytest.mark.parametrize(
    ("head", "mark", "fits"),
    [
        (b"", 7, True),
        (b"SQLite format 3\0" + bytes(84), None, True),
        (b"SQLite format 3\0" + bytes(55) + b"\x07" + bytes(28), 7, True),
        (b"SQLite format 3\0" + bytes(84), 7, False),
        (b"SQLite format 3\0", 7, False),
        (b"something else", None, False),
    ],
)
def test_a_database_is_told_by_its_head(head: bytes, mark: int | None, fits: bool) -> None:
    assert is_database(head, mark) is fits
