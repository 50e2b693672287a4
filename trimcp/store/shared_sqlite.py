"""What the processes of one machine keep together, in an SQLite file: they wake each other by Unix datagrams."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager
from struct import Struct
from typing import Any, Final

import attrs

from trimcp.errors import LocalError
from trimcp.store.counted_sqlite import COUNTED, SqliteCounts, forget_counted
from trimcp.store.database import Database, FileKind
from trimcp.store.shared import (
    LEASE,
    MOST_LETTERS,
    AppendEvent,
    DropEvents,
    EndSession,
    KeptSession,
    Letter,
    SaveSession,
    Write,
)
from trimcp.support.bounds import checked

_KIND: Final = FileKind(
    "sessions",
    mark=0x7472_6D73,  # "trms"
    forms=(
        # Leases are in the time since the machine has started, which nobody sets. One of before that is no process: it
        # has no socket.
        "CREATE TABLE processes (name TEXT PRIMARY KEY, until REAL NOT NULL);"
        "CREATE TABLE sessions (id TEXT PRIMARY KEY, holder TEXT NOT NULL, fence INTEGER NOT NULL, "
        "until REAL NOT NULL, data BLOB NOT NULL);"
        "CREATE INDEX ends ON sessions (until);"
        "CREATE TABLE events (session TEXT NOT NULL, stream INTEGER NOT NULL, seq INTEGER NOT NULL, "
        "data BLOB NOT NULL, UNIQUE (session, stream, seq));"
        # Numbers are not used again: letters are read in their order.
        "CREATE TABLE letters (number INTEGER PRIMARY KEY AUTOINCREMENT, receiver TEXT NOT NULL, data BLOB NOT NULL);"
        "CREATE INDEX receivers ON letters (receiver);"
        "CREATE TABLE agreed (name TEXT PRIMARY KEY, data BLOB NOT NULL)",
        # Events of a stream that were written together are one row: a number (from that of the row) and a size of each.
        "ALTER TABLE events ADD COLUMN parts BLOB;" + COUNTED,
    ),
    # After a power cut the last few commits may be missing; kill -9 loses none.
    pragmas=("synchronous = NORMAL", "journal_size_limit = 16777216"),
)
_LETTERS: Final = 1_000  # read at once,
_LETTER_BYTES: Final = 4 * 1024 * 1024  # and after so many bytes no more
_PART: Final = Struct("<QI")  # of a row of events
_TOGETHER: Final = 64  # events in a row,
_TOGETHER_BYTES: Final = 32_768  # unless one alone has more
_EXPIRED: Final = 500  # sessions forgotten in one transaction


@attrs.define(eq=False, field_transformer=checked())
class SqliteStore(SqliteCounts):
    """What the processes of one machine keep together, in a file that they all name.

    A commit does not wait for the disk: kill -9 loses nothing, a power cut the last few. A process that was killed is
    gone for the others at once, since the system has closed its socket; one that stands still is so after its lease.

    Args:
        path: the file; made if it does not exist. The user's alone, not encrypted.
        lease: seconds.
    """

    lease: float = LEASE
    name: str = attrs.field(init=False, default="")
    _kind = _KIND
    _in_doubt: bool = attrs.field(init=False, default=False)  # whether the last commit may have been carried out
    _unread: bool = attrs.field(init=False, default=True)  # there may be letters, whatever datagrams say

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Keep the file open while the block runs.

        Raises:
            LocalError: this system has no Unix datagrams.
            OSError: it cannot be opened, or this process has it open already.
            ValueError: it is another kind of file, which was not changed.
        """
        if not _KIND.shared:
            raise LocalError("processes share sessions in a file on Linux and macOS only")
        async with self._used(self._end) as database:
            assert self._peers is not None
            self.name, self._unread = self._peers.name, True
            await database.change(self._begin)
            yield

    def _begin(self, database: Database) -> None:
        database.ask("INSERT INTO processes VALUES (?, ?)", self.name, time.monotonic() + self.lease)

    def _end(self, database: Database) -> None:
        try:
            with database.faults(), database.transaction():
                _end_process(database, self.name)
        except OSError:
            pass  # the lease ends by itself
        finally:
            database.close()

    async def commit(self, writes: Sequence[Write]) -> Collection[Write]:
        again, self._in_doubt = self._in_doubt, True
        refused, receivers = await self._open.change(lambda database: _Commit(database, self.name, again).run(writes))
        self._in_doubt = False
        for name in receivers:
            if self._peers is not None and not self._peers.wake_one(name):  # it was killed
                await self._open.change(lambda database, name=name: _end_process(database, name))  # type: ignore[misc]
                refused += [write for write in writes if isinstance(write, Letter) and write.to == name]
        return refused

    async def load(self, session: str) -> KeptSession | None:
        return await self._open.read(lambda database: _load(database, session))

    async def take(self, session: str, fence: int) -> KeptSession | None:
        kept = await self.load(session)
        if kept is None or kept.fence != fence or (kept.holder != self.name and not await self.gone(kept.holder)):
            return None
        return await self._open.change(lambda database: _take(database, session, kept, self.name))

    async def after(self, session: str, stream: int, seq: int) -> Sequence[tuple[int, bytes]]:
        return await self._open.read(lambda database: _after(database, session, stream, seq))

    async def agree(self, name: str, data: bytes) -> bytes:
        return await self._open.change(lambda database: _agree(database, name, data))

    async def receive(self) -> Sequence[bytes]:
        while True:
            peers = self._peers
            if peers is None:
                raise OSError(f"the sessions in {str(self.path)!r} are not open")
            if not self._unread:
                await peers.wait()
                peers.clear()
            letters = await self._open.change(lambda database: _receive(database, self.name))
            self._unread = bool(letters)  # there may be more
            if letters:
                return letters

    async def renew(self) -> bool:
        return await self._open.change(lambda database: _renew(database, self.name, self.lease))

    async def retire(self) -> bool:
        self._unread = not await self._open.change(lambda database: _retire(database, self.name))
        return not self._unread

    async def gone(self, name: str) -> bool:
        if not await self._open.read(lambda database: _is_leased(database, name)):
            return True
        if name == self.name or self._peers is None or self._peers.wake_one(name):
            return False
        await self._open.change(lambda database: _end_process(database, name))
        return True


def _is_leased(database: Database, name: str) -> bool:
    try:
        return bool(database.ask("SELECT until >= ? FROM processes WHERE name = ?", time.monotonic(), name))
    except UnicodeEncodeError:
        return False


def _retire(database: Database, name: str) -> bool:
    if _is_leased(database, name) and database.ask("SELECT 1 FROM letters WHERE receiver = ? LIMIT 1", name):
        return False
    _end_process(database, name)
    return True


def _end_process(database: Database, name: str) -> None:
    database.ask("DELETE FROM processes WHERE name = ?", name)
    database.ask("DELETE FROM letters WHERE receiver = ?", name)


def _load(database: Database, session: str) -> KeptSession | None:
    statement = "SELECT holder, fence, data FROM sessions WHERE id = ? AND until >= ?"
    row = database.connection.execute(statement, (session, time.time())).fetchone()
    if row is None:
        return None
    holder, fence, data = row
    if not (type(holder) is str and type(fence) is int and type(data) is bytes):
        raise ValueError("a row holds what was not written there")
    return KeptSession(holder, fence, data, gone=not _is_leased(database, holder))


def _take(database: Database, session: str, known: KeptSession, name: str) -> KeptSession | None:
    kept = _load(database, session)
    if kept is None or (kept.holder, kept.fence) != (known.holder, known.fence) or not _is_leased(database, name):
        return None
    if kept.holder != name:
        if _is_leased(database, kept.holder):
            return None
        _end_process(database, kept.holder)
    fence = kept.fence + 1
    database.ask("UPDATE sessions SET holder = ?, fence = ? WHERE id = ?", name, fence, session)
    streams = database.connection.execute("SELECT DISTINCT stream FROM events WHERE session = ?", (session,))
    return KeptSession(name, fence, kept.data, streams=[stream for (stream,) in streams])


def _after(database: Database, session: str, stream: int, seq: int) -> list[tuple[int, bytes]]:
    # That after which the number is, or that which has it, and all that follow.
    first = "SELECT max(seq) FROM events WHERE session = ? AND stream = ? AND seq <= ?"
    begin = database.ask(first, session, stream, seq) or 0
    statement = "SELECT seq, data, parts FROM events WHERE session = ? AND stream = ? AND seq >= ? ORDER BY seq"
    found: dict[int, bytes] = {}
    for row in database.connection.execute(statement, (session, stream, begin)):
        found.update(_unpacked(*row))
    return [(number, found[number]) for number in sorted(found) if number > seq]


def _packed(
    session: str, stream: int, events: Sequence[tuple[int, bytes]]
) -> tuple[str, int, int, bytes, bytes | None]:
    """Return the row of some events of a stream."""
    first = events[0][0]
    if len(events) == 1:
        return session, stream, first, events[0][1], None
    parts = b"".join([_PART.pack(seq - first, len(data)) for seq, data in events])
    return session, stream, first, b"".join([data for _, data in events]), parts


def _unpacked(first: Any, data: Any, parts: Any) -> Iterator[tuple[int, bytes]]:
    """Yield the events of a row. Raises ValueError, TypeError: it was not written so."""
    if type(first) is not int or type(data) is not bytes:
        raise ValueError("a row holds what was not written there")
    if parts is None:
        yield first, data
        return
    if len(parts) % _PART.size:
        raise ValueError("a row holds what was not written there")
    at = 0
    for more, size in _PART.iter_unpack(parts):
        yield first + more, data[at : at + size]
        at += size
    if at != len(data):
        raise ValueError("a row holds what was not written there")


def _agree(database: Database, name: str, data: bytes) -> bytes:
    database.ask("INSERT INTO agreed VALUES (?, ?) ON CONFLICT DO NOTHING", name, data)
    found = database.ask("SELECT data FROM agreed WHERE name = ?", name)
    assert type(found) is bytes
    return found


def _receive(database: Database, name: str) -> list[bytes]:
    rows = database.connection.execute(
        "SELECT number, data FROM letters WHERE receiver = ? ORDER BY number LIMIT ?", (name, _LETTERS)
    )
    letters: list[bytes] = []
    size, last = 0, 0
    for number, data in rows:
        letters.append(data)
        size, last = size + len(data), number
        if size > _LETTER_BYTES:
            break
    rows.close()
    if letters:
        database.ask("DELETE FROM letters WHERE receiver = ? AND number <= ?", name, last)
    return letters


def _renew(database: Database, name: str, lease: float) -> bool:
    """Renew a lease, and forget what others have left behind."""
    now, connection = time.monotonic(), database.connection
    renewed = connection.execute(
        "UPDATE processes SET until = ? WHERE name = ? AND until >= ?", (now + lease, name, now)
    ).rowcount
    ended = connection.execute("SELECT id FROM sessions WHERE until < ? LIMIT ?", (time.time(), _EXPIRED)).fetchall()
    connection.executemany("DELETE FROM events WHERE session = ?", ended)
    connection.executemany("DELETE FROM sessions WHERE id = ?", ended)
    for (left,) in connection.execute("SELECT name FROM processes WHERE until < ?", (now,)).fetchall():
        _end_process(database, left)
    forget_counted(database)
    return bool(renewed)


class _Commit:
    """One commit: what is looked up is looked up once."""

    def __init__(self, database: Database, name: str, again: bool) -> None:
        self._database = database
        self._name = name
        self._again = again  # whether another one before it may have had some of its events
        self._held: dict[str, int] = {}  # the fences of the sessions that this process holds; 0 of others
        self._letters: dict[str, int] = {}  # how many more a process may get; 0 if it is gone
        self._events: dict[tuple[str, int], list[tuple[int, bytes]]] = {}  # by session and stream

    def run(self, writes: Sequence[Write]) -> tuple[list[Write], list[str]]:
        """Return the writes that are refused, and who has got letters."""
        leased = _is_leased(self._database, self._name)
        refused: list[Write] = []
        for write in writes:
            if type(write) is AppendEvent and self._held.get(write.session) == write.fence:  # nearly always
                self._events.setdefault((write.session, write.stream), []).append((write.seq, write.data))
            elif isinstance(write, Letter):
                if not self._send(write):
                    refused.append(write)
            elif not leased or not self._change(write):
                refused.append(write)
        self._append()
        return refused, list(self._letters)

    def _append(self) -> None:
        """Write the events of each stream as one row, if they are not large."""
        rows, total = list[tuple[Any, int]](), 0
        for (session, stream), events in self._events.items():
            some: list[tuple[int, bytes]] = []
            for event in events:
                if some and (len(some) >= _TOGETHER or total + len(event[1]) > _TOGETHER_BYTES):
                    rows.append((_packed(session, stream, some), some[-1][0]))
                    some, total = [], 0
                some.append(event)
                total += len(event[1])
            rows.append((_packed(session, stream, some), some[-1][0]))
            total = 0
        if rows:
            if self._again:  # and has left other rows of them
                several = [(row[0], row[1], row[2], last) for row, last in rows if row[4] is not None]
                left = "DELETE FROM events WHERE session = ? AND stream = ? AND seq > ? AND seq <= ?"
                self._database.connection.executemany(left, several)
            statement = "INSERT OR REPLACE INTO events (session, stream, seq, data, parts) VALUES (?, ?, ?, ?, ?)"
            self._database.connection.executemany(statement, [row for row, _ in rows])
            self._events.clear()

    def _change(self, write: Any) -> bool:
        ask, session = self._database.ask, write.session
        fence = self._held.get(session)
        if fence is None:
            kept = self._database.connection.execute("SELECT holder, fence FROM sessions WHERE id = ?", (session,))
            holder, number = kept.fetchone() or (self._name, 0)
            fence = number if holder == self._name else -1
        if fence == 0 and isinstance(write, SaveSession) and write.new:
            ask("INSERT INTO sessions VALUES (?, ?, ?, 0, x'')", session, self._name, write.fence)
            fence = write.fence
        self._held[session] = fence
        if fence != write.fence or fence <= 0:
            return False
        match write:
            case SaveSession():
                until = time.time() + write.ttl
                holder = "" if write.release else self._name
                statement = "UPDATE sessions SET data = ?, until = ?, holder = ? WHERE id = ?"
                ask(statement, write.data, until, holder, session)
                self._held[session] = -1 if write.release else fence
            case AppendEvent():
                self._events.setdefault((session, write.stream), []).append((write.seq, write.data))
            case EndSession():
                self._append()
                ask("DELETE FROM events WHERE session = ?", session)
                ask("DELETE FROM sessions WHERE id = ?", session)
                self._held[session] = 0
            case DropEvents(before=int(before)):
                self._append()  # the row that has this one, or ends before it, stays
                of_it = "FROM events WHERE session = ? AND stream = ? AND seq"
                statement = f"DELETE {of_it} < (SELECT max(seq) {of_it} <= ?)"
                ask(statement, session, write.stream, session, write.stream, before)
            case DropEvents():
                self._append()
                ask("DELETE FROM events WHERE session = ? AND stream = ?", session, write.stream)
        return True

    def _send(self, letter: Letter) -> bool:
        database = self._database
        if letter.to is None:
            statement = "SELECT name FROM processes WHERE until >= ? AND name != ?"
            names = [
                name for (name,) in database.connection.execute(statement, (time.monotonic(), self._name)).fetchall()
            ]
            for name in names:
                self._send_to(name, letter.data)
            return True
        return self._send_to(letter.to, letter.data)

    def _send_to(self, name: str, data: bytes) -> bool:
        database = self._database
        room = self._letters.get(name)
        if room is None:
            if not _is_leased(database, name):
                return False
            room = MOST_LETTERS - database.ask("SELECT count(*) FROM letters WHERE receiver = ?", name)
        self._letters[name] = room - 1
        if room <= 0:
            return False
        database.ask("INSERT INTO letters (receiver, data) VALUES (?, ?)", name, data)
        return True
