"""SQLite files of which each is used by one process alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def is_database(head: bytes, mark: int | None = None) -> bool:
    """Return whether a file that begins like this is empty or a database, with `mark` one of this `application_id`."""
    return not head or (head.startswith(b"SQLite format 3\0") and mark in (None, int.from_bytes(head[68:72], "big")))


class OwnedDatabase:
    """A database in a file that `claim_file` has claimed, until it is closed.

    That lock is not SQLite's: a process loses that one when it closes any other descriptor of the file.
    """

    def __init__(self, path: Path, lock: int, prepare: Callable[[Any], object], **options: Any) -> None:
        """Open it, and call `prepare` with the connection. If anything is raised, the file is given up."""
        self._lock = lock
        try:
            import sqlite3  # some builds of Python lack it

            self.connection: sqlite3.Connection = sqlite3.connect(path, timeout=0, check_same_thread=False, **options)
            try:
                prepare(self.connection)
            except BaseException:  # an interrupt too: the connection has the file open
                self.connection.close()
                raise
        except BaseException:  # an interrupt too: the file would stay claimed
            os.close(lock)
            raise

    def close(self, last: Callable[[], object] = lambda: None) -> None:
        """Close it and call `last`; then others may use the file."""
        self.connection.close()
        try:
            last()
        finally:
            os.close(self._lock)
