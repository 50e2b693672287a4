"""An event store in a file, for replies that are too many or too large for memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Final

import attrs

from trimcp.transports.http.events import OVERHEAD, BoundedEvents, Entry

log: logging.Logger = logging.getLogger("trimcp.http")


@attrs.define(eq=False)
class SqliteEvents(BoundedEvents[int]):
    """Events in a file, for sessions whose replies are too many or too large for memory.

    The file is a place to put things, not a record: it is private to the user, emptied at the start (the sessions of
    an earlier process are gone, so nobody can ask for their events) and removed at the end, and it names no session.
    An event costs some hundred bytes of memory still. Appending takes 20 microseconds, and 4 milliseconds per MiB.

    Args:
        path: the file; created if it is not there. Each process needs its own.
        max_events: as in `MemoryEvents`, and so are the others.

    Raises:
        OSError: it cannot be created, or another store has it.
        ValueError: there is something else at `path`, which was left alone.
    """

    path: Path = attrs.field(converter=Path)
    _file: _File = attrs.field(init=False)
    _rows: Iterator[int] = attrs.field(init=False, factory=lambda: count(1))
    _unwanted: list[int] = attrs.field(init=False, factory=list)
    _complained: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self._file = _File(self.path)

    def append(self, session: str, stream: int, seq: int, data: bytes, *, reply: bool) -> None:
        """Keep an event, or count it if the disk does not take it."""
        if self._closed:
            return
        entry = Entry(stream, seq, len(data) + OVERHEAD, reply, next(self._rows))
        evicted = self._add(session, entry)
        kept = entry not in evicted
        self._unwanted += [gone.kept for gone in evicted if gone is not entry]
        if not self._write([(entry.kept, data)] if kept else []) and kept:
            self._evict(session, self._sessions[session], entry)

    def after(self, session: str, stream: int, seq: int) -> list[tuple[int, bytes]]:
        """Return what follows an event, as far as it can be read."""
        found: list[tuple[int, bytes]] = []
        for entry in self._entries_after(session, stream, seq):
            try:
                data = self._file.read(entry.kept)
            except self._file.errors as error:
                self._complain(error)
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
        """Put rows into the file, and take out what is unwanted; False if the disk refused, to be tried again."""
        if self._closed or not (rows or self._unwanted):
            return True
        try:
            self._file.write(rows, self._unwanted)
        except self._file.errors as error:
            self._complain(error)
            return False
        self._unwanted.clear()
        return True

    def _complain(self, error: Exception) -> None:
        # Once: a full disk fails every event of every session, and its log is often on it.
        if not self._complained:
            self._complained = True
            log.error(
                "the event store %r fails; what it does not keep cannot be resumed", str(self.path), exc_info=error
            )


class _File:
    """An SQLite file with one table: row number and data."""

    MARK: Final = 0x7472696D
    """What says that a file is ours and may be emptied ("trim"; SQLite keeps it at byte 68 of the file)."""

    def __init__(self, path: Path) -> None:
        # Not at the top: some builds of Python have none, and most servers need none.
        import sqlite3

        self._path = path
        self.errors: type[Exception] = sqlite3.Error
        self._lock = _claim(path, self.MARK)
        try:
            self._connection = sqlite3.connect(path, timeout=0, check_same_thread=False)
            try:
                self._prepare()
            except BaseException:  # an interrupt too: the file would stay locked
                self._connection.close()
                raise
        except sqlite3.Error as error:
            os.close(self._lock)
            raise OSError(f"cannot keep events in {str(path)!r}: {error}") from error

    def _prepare(self) -> None:
        for pragma in (
            f"application_id = {self.MARK}",
            # Nobody else reads it, so there need be no shared memory beside it.
            "locking_mode = EXCLUSIVE",
            "journal_mode = WAL",
            # After a crash of the machine nobody will ask for any of it.
            "synchronous = OFF",
            "journal_size_limit = 1048576",
            "cache_size = -256",
        ):
            self._connection.execute(f"PRAGMA {pragma}").fetchall()
        self._connection.execute("CREATE TABLE events (row INTEGER PRIMARY KEY, data BLOB NOT NULL)")

    def write(self, rows: list[tuple[int, bytes]], unwanted: list[int]) -> None:
        """Delete and insert, both or neither."""
        with self._connection:
            self._connection.executemany("DELETE FROM events WHERE row = ?", [(row,) for row in unwanted])
            self._connection.executemany("INSERT INTO events VALUES (?, ?)", rows)

    def read(self, row: int) -> bytes | None:
        """Return the data of a row, if it is there."""
        found = self._connection.execute("SELECT data FROM events WHERE row = ?", (row,)).fetchone()
        return None if found is None else bytes(found[0])

    def close(self) -> None:
        self._connection.close()
        # On a full disk the log may be left.
        for path in (Path(f"{self._path}-wal"), self._path):
            try:
                path.unlink(missing_ok=True)
            except OSError:
                log.warning("could not remove %r", str(path), exc_info=True)
        os.close(self._lock)


def _claim(path: Path, mark: int) -> int:
    """Empty the file, or create it, for this process alone; return a descriptor that holds the claim until closed."""
    # No following of links: in a directory where others can write they would name the file that is emptied.
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0), 0o600)
    try:
        head = os.read(descriptor, 100)
        if head and not (head.startswith(b"SQLite format 3\0") and head[68:72] == mark.to_bytes(4, "big")):
            raise ValueError(f"{str(path)!r} is no event store; name a file that may be overwritten")
        try:
            import fcntl
        except ImportError:  # Windows, where no file that another has open can be replaced anyway
            pass
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fchmod(descriptor, 0o600)
        # SQLite throws away the log that lies beside an empty file.
        os.ftruncate(descriptor, 0)
    except BlockingIOError as error:
        os.close(descriptor)
        raise OSError(f"another process keeps its events in {str(path)!r}; each needs a file of its own") from error
    except BaseException:  # an interrupt too: the lock is the descriptor's
        os.close(descriptor)
        raise
    return descriptor
