"""An event store in a file, for replies that are too many or too large for memory."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from itertools import count
from pathlib import Path
from typing import Final

import attrs

from trimcp.store.database import Database, FileKind
from trimcp.store.events import OVERHEAD, BoundedEvents, Entry
from trimcp.support.cleaning import log_crash
from trimcp.support.files import UnusableFile

log: logging.Logger = logging.getLogger("trimcp.http")

_KIND: Final = FileKind(
    "events",
    mark=0x7472696D,  # "trim"
    forms=("CREATE TABLE events (row INTEGER PRIMARY KEY, data BLOB NOT NULL)",),
    # After a crash of the machine its contents are of no use.
    pragmas=("synchronous = OFF", "journal_size_limit = 1048576", "cache_size = -256"),
    temporary=True,
)


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
    _database: Database = attrs.field(init=False)
    _rows: Iterator[int] = attrs.field(init=False, factory=lambda: count(1))
    _unwanted: list[int] = attrs.field(init=False, factory=list)
    _warned: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self._database = Database(self.path, _KIND)

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
                with self._database.faults():
                    data = self._database.ask("SELECT data FROM events WHERE row = ?", entry.kept)
            except UnusableFile as error:
                self._warn(error)
                continue
            if data is not None:
                found.append((entry.seq, data))
        return found

    def close(self) -> None:
        if not self._closed:
            super().close()
            self._unwanted.clear()
            self._database.close()

    def _remove(self, gone: Collection[Entry[int]]) -> None:
        self._unwanted += [entry.kept for entry in gone]
        self._write([])

    def _write(self, rows: list[tuple[int, bytes]]) -> bool:
        """Write rows to the file, and delete unwanted ones; return False if the disk failed, to be tried again."""
        if self._closed or not (rows or self._unwanted):
            return True
        try:
            with self._database.faults(), self._database.transaction() as connection:
                connection.executemany("DELETE FROM events WHERE row = ?", [(row,) for row in self._unwanted])
                connection.executemany("INSERT INTO events VALUES (?, ?)", rows)
        except UnusableFile as error:
            self._warn(error)
            return False
        self._unwanted.clear()
        return True

    def _warn(self, error: Exception) -> None:
        # Logged once: a full disk fails every event of every session, and the log is often on the same disk.
        if not self._warned:
            self._warned = True
            log_crash(log, error, "the event store %r fails; what it does not keep cannot be resumed", str(self.path))
