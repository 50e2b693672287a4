"""An event store in a file, for replies that are too many or too large for memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

import attrs

from trimcp.support.cleaning import log_crash, one_line
from trimcp.support.files import OwnedDatabase, UnusableFile, claim_file, is_database
from trimcp.transports.http.state.events import OVERHEAD, BoundedEvents, Entry

log: logging.Logger = logging.getLogger("trimcp.http")


@attrs.define(eq=False)
class SqliteEvents(BoundedEvents[int]):
    """Events in a file, for sessions whose replies are too many or too large for memory.

    The file is temporary: private to the user, emptied at the start and removed at the end. Sessions of an earlier
    process are gone, so their events are of no use. It contains no session ids. Each event still uses some hundred
    bytes of memory. Appending takes 20 microseconds, and 4 milliseconds per MiB.

    Args:
        path: the file; created if it does not exist. Each process needs its own.
        max_events: this and the other bounds are those of `MemoryEvents`.

    Raises:
        OSError: the file cannot be created, or another store uses it (`trimcp.LocalError`, too; likewise the next).
        ValueError: `path` is a different kind of file, which was not changed.
    """

    path: Path = attrs.field(converter=Path)
    _file: _File = attrs.field(init=False)
    _rows: Iterator[int] = attrs.field(init=False, factory=lambda: count(1))
    _unwanted: list[int] = attrs.field(init=False, factory=list)
    _warned: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self._file = _File(self.path)

    def append(self, session: str, stream: int, seq: int, data: bytes, *, reply: bool) -> None:
        """Keep an event, or count it as evicted if the write fails."""
        if self._closed:
            return
        entry = Entry(stream, seq, len(data) + OVERHEAD, reply, next(self._rows))
        evicted = self._add(session, entry)
        kept = entry not in evicted
        self._unwanted += [gone.kept for gone in evicted if gone is not entry]
        if not self._write([(entry.kept, data)] if kept else []) and kept:
            self._forget(session, entry)

    def after(self, session: str, stream: int, seq: int) -> list[tuple[int, bytes]]:
        """Return the events after an event, as far as they can be read."""
        found: list[tuple[int, bytes]] = []
        for entry in self._entries_after(session, stream, seq):
            try:
                data = self._file.read(entry.kept)
            except self._file.errors as error:
                self._warn(error)
                continue
            if data is not None:
                found.append((entry.seq, data))
        return found

    def close(self) -> None:
        if not self._closed:
            super().close()
            self._unwanted.clear()
            self._file.close()

    def _remove(self, kept: list[int]) -> None:
        self._unwanted += kept
        self._write([])

    def _write(self, rows: list[tuple[int, bytes]]) -> bool:
        """Write rows to the file, and delete unwanted ones; return False if the disk failed, to be tried again."""
        if self._closed or not (rows or self._unwanted):
            return True
        try:
            self._file.write(rows, self._unwanted)
        except self._file.errors as error:
            self._warn(error)
            return False
        self._unwanted.clear()
        return True

    def _warn(self, error: Exception) -> None:
        # Logged once: a full disk fails every event of every session, and the log is often on the same disk.
        if not self._warned:
            self._warned = True
            log_crash(log, error, "the event store %r fails; what it does not keep cannot be resumed", str(self.path))


class _File:
    """An SQLite file with one table: row number and data."""

    MARK: Final = 0x7472696D
    """Marks a file as ours, which may be emptied ("trim"; SQLite stores it at byte 68 of the file)."""

    def __init__(self, path: Path) -> None:
        # Not imported at the top: some builds of Python lack it, and most servers do not need it.
        import sqlite3

        self._path = path
        self.errors: type[Exception] = sqlite3.Error
        try:
            self._database = OwnedDatabase(path, _claim(path, self.MARK), self._prepare)
        except sqlite3.Error as error:
            why = f"{one_line(str(error))}; check the disk and what lies beside it ({path.name}-wal)"
            raise UnusableFile(f"cannot keep events in {str(path)!r}: {why}") from error

    def _prepare(self, connection: Any) -> None:
        self._connection = connection
        for pragma in (
            f"application_id = {self.MARK}",
            # No other process reads it, so no shared-memory file is needed.
            "locking_mode = EXCLUSIVE",
            "journal_mode = WAL",
            # After a crash of the machine its contents are of no use.
            "synchronous = OFF",
            "journal_size_limit = 1048576",
            "cache_size = -256",
        ):
            connection.execute(f"PRAGMA {pragma}").fetchall()
        connection.execute("CREATE TABLE events (row INTEGER PRIMARY KEY, data BLOB NOT NULL)")

    def write(self, rows: list[tuple[int, bytes]], unwanted: list[int]) -> None:
        """Delete and insert in one transaction."""
        with self._connection:
            self._connection.executemany("DELETE FROM events WHERE row = ?", [(row,) for row in unwanted])
            self._connection.executemany("INSERT INTO events VALUES (?, ?)", rows)

    def read(self, row: int) -> bytes | None:
        """Return the data of a row, or None if it is missing."""
        found = self._connection.execute("SELECT data FROM events WHERE row = ?", (row,)).fetchone()
        return None if found is None else bytes(found[0])

    def close(self) -> None:
        self._database.close(self._remove)

    def _remove(self) -> None:
        # On a full disk the write-ahead log may be left over.
        for path in (Path(f"{self._path}-wal"), self._path):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                log_crash(log, error, "could not remove %r", str(path), level=logging.WARNING)


def _claim(path: Path, mark: int) -> int:
    """Empty or create the file, for this process alone; return a descriptor that holds the lock until it is closed."""
    wrong = f"{str(path)!r} is no event store; name a file that may be overwritten"
    busy = f"another process keeps its events in {str(path)!r}; each needs a file of its own"
    descriptor = claim_file(path, fits=lambda head: is_database(head, mark), wrong=wrong, busy=busy)
    # SQLite discards the log beside an empty file.
    os.ftruncate(descriptor, 0)
    return descriptor
