"""A store of contexts in an SQLite file: they outlive a restart, and kill -9 with the state as of the last answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import attrs
import trio

from trimcp.agent_tools.callers import Owner
from trimcp.agent_tools.contexts.stores import ContextKey, ContextStore, KeptContext
from trimcp.support.cleaning import one_line
from trimcp.support.files import OwnedDatabase, UnusableFile, WrongFile, claim_file, is_database
from trimcp.wire.jsonrpc import encode, parse_value

_MARK: Final = 0x74726D63
"""Marks a file as ours ("trmc", as SQLite's `application_id`)."""

_FORM: Final = 1  # of the table, in `user_version`
_AT_ONCE: Final = 500  # contexts forgotten in one transaction
_SIZES: Final = (64, 8, 1)  # rows in one statement; below the 999 values that old versions of SQLite allow

_LOAD: Final = (
    "SELECT version, created, ends, until, state, history FROM contexts WHERE principal = ? AND agent = ? AND id = ?"
)
_SAVE: Final = (
    "INSERT INTO contexts (principal, agent, id, version, created, ends, until, state, history) VALUES {} "
    "ON CONFLICT (principal, agent, id) DO UPDATE SET version = excluded.version, created = excluded.created, "
    "ends = excluded.ends, until = excluded.until, state = excluded.state, history = excluded.history"
)
# Joined rather than compared as rows, for which SQLite would read the whole table.
_DELETE: Final = (
    "DELETE FROM contexts WHERE rowid IN (SELECT one.rowid FROM (VALUES {}) AS ended CROSS JOIN contexts AS one "
    "ON one.principal = ended.column1 AND one.agent = ended.column2 AND one.id = ended.column3)"
)

T = TypeVar("T")


@attrs.define(eq=False)
class SqliteContexts(ContextStore):
    """Contexts in a file, for one process.

    A commit waits for the disk (write-ahead log, `synchronous=FULL`), and one commit has all updates that arrived
    during the last one. So an update takes as long as the disk needs, a few milliseconds, and thousands per second do
    not take longer. All work on the file is done in a thread.

    The file has the states and the tool histories, readable for the user who runs the server alone, and not encrypted.
    Content of contexts that have ended is overwritten.

    Args:
        path: the file; made if it does not exist. Each process needs its own.
    """

    path: Path = attrs.field(converter=Path)
    _file: _ContextsFile | None = attrs.field(init=False, default=None)
    _turns: trio.CapacityLimiter = attrs.field(init=False, factory=lambda: trio.CapacityLimiter(1))

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Keep the file open while the block runs.

        Raises:
            OSError: it cannot be opened, or another process uses it.
            ValueError: it is another kind of file, which was not changed.
        """
        self._file = file = await self._in_thread(lambda: _ContextsFile(self.path))
        try:
            yield
        finally:
            # A thread that has the file cannot be given up: its lock would stay until the process ends.
            with trio.CancelScope(shield=True):
                await self._in_thread(file.close)
            self._file = None

    async def counts(self) -> Mapping[Owner, int]:
        return await self._with_file(_ContextsFile.counts)

    async def ids(self, owner: Owner) -> Sequence[str]:
        return await self._with_file(lambda file: file.ids(owner))

    async def load(self, owner: Owner, id: str) -> KeptContext | None:
        return await self._with_file(lambda file: file.load(owner, id))

    async def write(self, kept: Sequence[KeptContext], deleted: Sequence[ContextKey]) -> None:
        await self._with_file(lambda file: file.write(kept, deleted))

    async def expire(self, now: float) -> Sequence[ContextKey]:
        return await self._with_file(lambda file: file.expire(now))

    async def _with_file(self, function: Callable[[_ContextsFile], T]) -> T:
        file = self._file
        if file is None:
            raise OSError(f"the contexts in {str(self.path)!r} are not open")
        return await self._in_thread(lambda: function(file))

    async def _in_thread(self, function: Callable[[], T]) -> T:
        """Call a function in a thread, one at a time: SQLite's connection is not for several."""
        return await trio.to_thread.run_sync(function, limiter=self._turns)


class _ContextsFile:
    """The file, for one thread at a time."""

    def __init__(self, path: Path) -> None:
        # Not imported at the top: some builds of Python lack it.
        import sqlite3

        self._path, self._damage = path, sqlite3.DatabaseError
        lock = _claim(path)
        try:
            self._database = OwnedDatabase(path, lock, self._prepare, isolation_level=None)
        except ValueError as error:
            raise WrongFile(f"{str(path)!r} is no store of contexts: {error}; name another file") from None
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> UnusableFile:
        name = self._path.name
        damaged = type(error) is self._damage or not isinstance(error, self._damage)
        todo = f"move it away with {name}-wal to begin anew" if damaged else "check the disk"
        return UnusableFile(f"cannot keep contexts in {str(self._path)!r}: {one_line(str(error))}; {todo}")

    def _prepare(self, connection: Any) -> None:
        self._connection = connection
        # No other process may use it: each would have an actor for the same context.
        self._ask("PRAGMA locking_mode = EXCLUSIVE")
        mark, form = self._ask("PRAGMA application_id"), self._ask("PRAGMA user_version")
        if mark != _MARK and (mark or form or self._ask("SELECT count(*) FROM sqlite_master")):
            raise ValueError("it is a database of another program")
        if form not in (0, _FORM):
            raise ValueError(f"it was written by another version of trimcp (form {form}, not {_FORM})")
        for pragma in (
            "journal_mode = WAL",
            "synchronous = FULL",
            "secure_delete = ON",
            "journal_size_limit = 16777216",
        ):
            self._ask(f"PRAGMA {pragma}")
        if not form:
            with _Transaction(self._connection):
                self._connection.execute(
                    "CREATE TABLE contexts (principal TEXT NOT NULL, agent TEXT NOT NULL, id TEXT NOT NULL, "
                    # The texts come last: what comes before them is found without reading them. So `until` needs no
                    # index, which each save would change.
                    "version INTEGER NOT NULL, created REAL NOT NULL, ends REAL NOT NULL, until REAL NOT NULL, "
                    "state BLOB NOT NULL, history BLOB NOT NULL, UNIQUE (principal, agent, id))"
                )
                self._connection.execute(f"PRAGMA user_version = {_FORM}")
                self._connection.execute(f"PRAGMA application_id = {_MARK}")

    def _ask(self, statement: str) -> Any:
        row = self._connection.execute(statement).fetchone()
        return None if row is None else row[0]

    def counts(self) -> dict[Owner, int]:
        try:
            rows = self._connection.execute("SELECT principal, agent, count(*) FROM contexts GROUP BY principal, agent")
            return {(principal, agent): count for principal, agent, count in rows}
        except self._damage as error:
            raise self._unusable(error) from error

    def ids(self, owner: Owner) -> list[str]:
        rows = self._connection.execute("SELECT id FROM contexts WHERE principal = ? AND agent = ?", owner)
        return [id for (id,) in rows]

    def load(self, owner: Owner, id: str) -> KeptContext | None:
        try:
            row = self._connection.execute(_LOAD, (*owner, id)).fetchone()
            if row is None:
                return None
            version, created, ends, until, state, history = row
            if type(version) is not int or not all(type(time) is float for time in (created, ends, until)):
                raise ValueError("a row holds what was not written there")
            entries = [encode(entry) for entry in _read(history, list)]
            return KeptContext(owner, id, version, _read(state, dict), entries, created, ends, until)
        except (self._damage, ValueError, TypeError) as error:
            raise self._unusable(error) from error

    def write(self, kept: Sequence[KeptContext], deleted: Sequence[ContextKey]) -> None:
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
            )
            for one in kept
        ]
        with _Transaction(self._connection):
            self._with_values(_SAVE, rows)
            self._with_values(_DELETE, [(*owner, id) for owner, id in deleted])

    def _with_values(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Execute a statement for many rows, with several in each.

        Between two statements Python's lock is released and taken again, for which a busy event loop lets the thread
        wait up to 5 ms.
        """
        done = 0
        for size in _SIZES:
            while len(rows) - done >= size:
                some = rows[done : done + size]
                values = ", ".join([f"({', '.join('?' * len(some[0]))})"] * size)
                self._connection.execute(statement.format(values), [value for row in some for value in row])
                done += size

    def expire(self, now: float) -> list[ContextKey]:
        with _Transaction(self._connection):
            rows = self._connection.execute(
                "SELECT rowid, principal, agent, id FROM contexts WHERE until < ? LIMIT ?", (now, _AT_ONCE)
            ).fetchall()
            self._connection.executemany("DELETE FROM contexts WHERE rowid = ?", [(row[0],) for row in rows])
        return [((principal, agent), id) for _, principal, agent, id in rows]

    def close(self) -> None:
        self._database.close()


class _Transaction:
    """Commits what the block did, or undoes all of it."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if kind is None:
            try:
                self._connection.execute("COMMIT")
            except BaseException:  # an interrupt too: what is half written is not left to the next write
                self._undo()
                raise
        else:
            self._undo()

    def _undo(self) -> None:
        if self._connection.in_transaction:  # SQLite undoes it by itself after some errors
            self._connection.execute("ROLLBACK")


def _read(text: bytes, kind: type[T]) -> T:
    value = parse_value(bytes(text))
    if not isinstance(value, kind):
        raise ValueError("the store of contexts has text that it did not write")
    return value


def _claim(path: Path) -> int:
    """Open the file for this process alone, making it if need be; return a descriptor that holds the lock."""
    return claim_file(
        path,
        fits=is_database,
        wrong=f"{str(path)!r} is no store of contexts: it is no database; name another file",
        busy=f"the contexts in {str(path)!r} are in use by another process or table",
    )
