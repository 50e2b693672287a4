"""A store of contexts in an SQLite file: they outlive a restart, and kill -9 with the state as of the last answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, Final, TypeVar

import attrs

from trimcp.store.contexts import ContextKey, ContextStore, KeptContext, Owner
from trimcp.store.database import Database, FileKind
from trimcp.store.peers import SharedFile
from trimcp.wire.jsonrpc import encode, parse_value

_KIND: Final = FileKind(
    "contexts",
    mark=0x74726D63,  # "trmc"
    # The texts come last: what comes before them is found without reading them. So `until` needs no index, which each
    # save would change.
    forms=(
        "CREATE TABLE contexts (principal TEXT NOT NULL, agent TEXT NOT NULL, id TEXT NOT NULL, "
        "version INTEGER NOT NULL, created REAL NOT NULL, ends REAL NOT NULL, until REAL NOT NULL, "
        "state BLOB NOT NULL, history BLOB NOT NULL, UNIQUE (principal, agent, id))",
        "ALTER TABLE contexts ADD COLUMN stamp INTEGER NOT NULL DEFAULT 1;"
        # Numbers are not used again: a stamp is the number of the latest change.
        "CREATE TABLE changes (stamp INTEGER PRIMARY KEY AUTOINCREMENT, principal TEXT, agent TEXT, id TEXT)",
    ),
    pragmas=("synchronous = FULL", "secure_delete = ON", "journal_size_limit = 16777216"),
)
_REMEMBERED: Final = 10_000  # changes
_AT_ONCE: Final = 500  # contexts forgotten in one transaction
_SIZES: Final = (64, 8, 1)  # rows in one statement; below the 999 values that old versions of SQLite allow

_LOAD: Final = (
    "SELECT version, created, ends, until, state, history, stamp FROM contexts "
    "WHERE principal = ? AND agent = ? AND id = ?"
)
_SAVE: Final = (
    "INSERT INTO contexts (principal, agent, id, version, created, ends, until, state, history, stamp) VALUES {} "
    "ON CONFLICT (principal, agent, id) DO UPDATE SET version = excluded.version, created = excluded.created, "
    "ends = excluded.ends, until = excluded.until, state = excluded.state, history = excluded.history, "
    "stamp = excluded.stamp"
)
_CHANGED: Final = "INSERT INTO changes (stamp, principal, agent, id) VALUES {}"
_NEWEST: Final = "SELECT seq FROM sqlite_sequence WHERE name = 'changes'"
# Joined rather than compared as rows, for which SQLite would read the whole table.
_STAMPS: Final = (
    "SELECT one.principal, one.agent, one.id, one.stamp FROM (VALUES {}) AS named CROSS JOIN contexts AS one "
    "ON one.principal = named.column1 AND one.agent = named.column2 AND one.id = named.column3"
)
_DELETE: Final = (
    "DELETE FROM contexts WHERE rowid IN (SELECT one.rowid FROM (VALUES {}) AS ended CROSS JOIN contexts AS one "
    "ON one.principal = ended.column1 AND one.agent = ended.column2 AND one.id = ended.column3)"
)

T = TypeVar("T")


@attrs.define(eq=False)
class SqliteContexts(SharedFile, ContextStore):
    """Contexts in a file, for the processes of one machine.

    A commit waits for the disk (write-ahead log, `synchronous=FULL`), and one commit has all updates that arrived
    during the last one. So an update takes as long as the disk needs, a few milliseconds, and thousands per second do
    not take longer. All work on the file is done in a thread.

    The file has the states and the tool histories, readable for the user who runs the server alone, and not encrypted.
    Content of contexts that have ended is overwritten.

    Args:
        path: the file; made if it does not exist. Several processes of one machine may use it at once.
    """

    shared: bool = attrs.field(init=False, default=_KIND.shared)
    _kind = _KIND
    _seen: int = attrs.field(init=False, default=0)  # the latest change that `changed` has returned

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Keep the file open while the block runs.

        Raises:
            OSError: it cannot be opened, or another store of this process has it; where it cannot be shared (Windows),
                another process.
            ValueError: it is another kind of file, which was not changed.
        """
        async with self._used() as database:
            if self.shared:
                self._seen, _ = await database.read(lambda database: _changed(database, 0))
            yield

    async def counts(self) -> Mapping[Owner, int]:
        return await self._open.read(_counts)

    async def ids(self, owner: Owner) -> Sequence[str]:
        return await self._open.read(lambda database: _ids(database, owner))

    async def load(self, owner: Owner, id: str) -> KeptContext | None:
        return await self._open.read(lambda database: _load(database, owner, id))

    async def write(self, kept: Sequence[KeptContext], deleted: Sequence[ContextKey]) -> Mapping[ContextKey, int]:
        stamps = await self._open.change(lambda database: _write(database, kept, deleted))
        self._wake()
        return {one.key: stamp for one, stamp in zip(kept, stamps, strict=True) if stamp}

    async def expire(self, now: float) -> Sequence[ContextKey]:
        keys = await self._open.change(lambda database: _expire(database, now))
        if keys:
            self._wake()
        return keys

    @property
    def alone(self) -> bool:
        return self._peers is None or self._peers.alone

    @property
    def told(self) -> bool:
        return self._peers is not None and self._peers.woken

    async def wait_told(self) -> None:
        await self._wait_woken()

    async def changed(self) -> Mapping[ContextKey, int] | None:
        self._clear()
        self._seen, keys = await self._open.read(lambda database: _changed(database, self._seen))
        return keys


def _counts(database: Database) -> dict[Owner, int]:
    rows = database.connection.execute("SELECT principal, agent, count(*) FROM contexts GROUP BY principal, agent")
    return {(principal, agent): count for principal, agent, count in rows}


def _ids(database: Database, owner: Owner) -> list[str]:
    rows = database.connection.execute("SELECT id FROM contexts WHERE principal = ? AND agent = ?", owner)
    return [id for (id,) in rows]


def _load(database: Database, owner: Owner, id: str) -> KeptContext | None:
    row = database.connection.execute(_LOAD, (*owner, id)).fetchone()
    if row is None:
        return None
    version, created, ends, until, state, history, stamp = row
    if not type(version) is type(stamp) is int or not all(type(time) is float for time in (created, ends, until)):
        raise ValueError("a row holds what was not written there")
    entries = [encode(entry) for entry in _read(history, list)]
    return KeptContext(owner, id, version, _read(state, dict), entries, created, ends, until, stamp)


def _write(database: Database, kept: Sequence[KeptContext], deleted: Sequence[ContextKey]) -> list[int]:
    """Return the stamp of each, or 0 where another process has changed it."""
    _with_values(database, _DELETE, [(*owner, id) for owner, id in deleted])
    _note(database, deleted)
    found = _with_values(database, _STAMPS, [(*one.owner, one.id) for one in kept])
    now = {((principal, agent), id): stamp for principal, agent, id, stamp in found}
    same = [now.get(one.key, 0) == one.stamp for one in kept]
    stamps = _note(database, [one.key for one, may in zip(kept, same, strict=True) if may])
    given = [next(stamps) if may else 0 for may in same]
    rows = [
        (
            *one.owner,
            one.id,
            one.version,
            one.created,
            one.ends,
            one.until,
            encode(dict(one.state)),
            b"[%b]" % b",".join(one.history),
            stamp,
        )
        for one, stamp in zip(kept, given, strict=True)
        if stamp
    ]
    _with_values(database, _SAVE, rows)
    return given


def _note(database: Database, keys: Sequence[ContextKey]) -> Iterator[int]:
    """Have other processes find that these contexts were changed, and return the stamps of that."""
    first = (database.ask(_NEWEST) or 1) + 1
    _with_values(database, _CHANGED, [(stamp, *owner, id) for stamp, (owner, id) in enumerate(keys, first)])
    return count(first)


def _changed(database: Database, after: int) -> tuple[int, dict[ContextKey, int] | None]:
    newest = database.ask(_NEWEST) or 0
    if newest - after > _REMEMBERED:
        return newest, None
    rows = database.connection.execute(
        "SELECT principal, agent, id, stamp FROM changes WHERE stamp > ? AND stamp <= ? ORDER BY stamp", (after, newest)
    )
    return newest, {((principal, agent), id): stamp for principal, agent, id, stamp in rows}


def _with_values(database: Database, statement: str, rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Execute a statement for many rows, with several in each, and return what it finds.

    Between two statements Python's lock is released and taken again, for which a busy event loop lets the thread wait
    up to 5 ms.
    """
    done, found = 0, list[tuple[Any, ...]]()
    for size in _SIZES:
        while len(rows) - done >= size:
            some = rows[done : done + size]
            values = ", ".join([f"({', '.join('?' * len(some[0]))})"] * size)
            found += database.connection.execute(statement.format(values), [value for row in some for value in row])
            done += size
    return found


def _expire(database: Database, now: float) -> list[ContextKey]:
    rows = database.connection.execute(
        "SELECT rowid, principal, agent, id FROM contexts WHERE until < ? LIMIT ?", (now, _AT_ONCE)
    ).fetchall()
    database.connection.executemany("DELETE FROM contexts WHERE rowid = ?", [(row[0],) for row in rows])
    keys = [((principal, agent), id) for _, principal, agent, id in rows]
    _note(database, keys)
    database.ask("DELETE FROM changes WHERE stamp <= ?", (database.ask(_NEWEST) or 0) - _REMEMBERED)
    return keys


def _read(text: bytes, kind: type[T]) -> T:
    value = parse_value(bytes(text))
    if not isinstance(value, kind):
        raise ValueError("the store of contexts has text that it did not write")
    return value
