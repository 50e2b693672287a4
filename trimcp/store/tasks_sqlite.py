"""A store of tasks in an SQLite file: they outlive a restart, and kill -9 with their last checkpoint."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import attrs

from trimcp.store.database import Database, FileKind
from trimcp.store.peers import SharedFile
from trimcp.store.tasks import COLUMNS, KeptTask, TaskStore, facts_of, noted, restored
from trimcp.wire.jsonrpc import encode

T = TypeVar("T")

_KIND: Final = FileKind(
    "tasks",
    mark=0x74726D6B,  # "trmk"
    forms=(
        "CREATE TABLE tasks (id TEXT PRIMARY KEY, owner TEXT NOT NULL, ended INTEGER NOT NULL, until REAL NOT NULL, "
        "updated REAL NOT NULL, runner TEXT NOT NULL, note BLOB NOT NULL, facts BLOB NOT NULL, result BLOB, "
        "checkpoint BLOB) WITHOUT ROWID;"
        "CREATE INDEX owners ON tasks (owner);"
        "CREATE INDEX runs ON tasks (runner) WHERE NOT ended;"
        # Leases are in the time since the machine has started, which nobody sets. One of before that begins later than
        # now, or is over.
        "CREATE TABLE runners (name TEXT PRIMARY KEY, since REAL NOT NULL, until REAL NOT NULL);"
        # Owners of tasks that wait, in the order in which they are served.
        "CREATE TABLE turns (owner TEXT PRIMARY KEY, turn INTEGER NOT NULL)",
    ),
    pragmas=("synchronous = FULL", "secure_delete = ON", "journal_size_limit = 16777216"),
)
_INSERT: Final = (
    "INSERT INTO tasks (owner, ended, until, updated, facts, result, checkpoint, id, runner, note) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, '{}')"
)
_UPDATE: Final = (
    "UPDATE tasks SET owner = ?, ended = ?, until = ?, updated = ?, facts = ?, result = ?, checkpoint = ? WHERE id = ?"
)
_SELECT: Final = "SELECT id, owner, until, updated, runner, note, result, checkpoint, facts FROM tasks WHERE "
_OVER: Final = "DELETE FROM runners WHERE since > :now OR until < :now"
_FORGOTTEN: Final = (
    "DELETE FROM tasks WHERE until < :day AND (ended OR runner NOT IN "
    "(SELECT name FROM runners WHERE since <= :now AND until >= :now))"
)
_LEFT: Final = (
    "UPDATE tasks SET runner = '' WHERE NOT ended AND runner != '' AND runner NOT IN (SELECT name FROM runners)"
)
_WAITS: Final = (
    "SELECT EXISTS (SELECT 1 FROM turns) OR EXISTS (SELECT 1 FROM runners WHERE since > :now OR until < :now) "
    "OR EXISTS (SELECT 1 FROM tasks WHERE NOT ended AND runner != '' AND runner NOT IN (SELECT name FROM runners))"
)
_QUEUE: Final = (
    "INSERT OR IGNORE INTO turns SELECT owner, (SELECT coalesce(max(turn), 0) FROM turns) + row_number() OVER "
    "(ORDER BY min(until)) FROM tasks WHERE NOT ended AND runner = '' GROUP BY owner"
)
_IDLE: Final = "DELETE FROM turns WHERE owner NOT IN (SELECT owner FROM tasks WHERE NOT ended AND runner = '')"
_WAITING: Final = (
    "SELECT owner, id FROM (SELECT owner, id, turn, row_number() OVER (PARTITION BY owner ORDER BY until, id) AS round "
    "FROM tasks JOIN turns USING (owner) WHERE NOT ended AND runner = '') ORDER BY round, turn LIMIT ?"
)


@attrs.define(eq=False)
class SqliteTasks(SharedFile, TaskStore):
    """Tasks in a file, for the processes of one machine. All work on it is done in a thread.

    A change is answered once the disk has it (write-ahead log, `synchronous=FULL`). The file has arguments, results
    and checkpoints, readable for the user who runs the server alone, and not encrypted. What is forgotten is
    overwritten.

    Args:
        path: the file; made if it does not exist. Several processes of one machine may use it at once.
    """

    durable = True
    _kind = _KIND

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Keep the file open while the block runs. Raises as any `SharedFile` does."""
        async with self._used():
            yield

    async def create(self, task: KeptTask) -> None:
        values = _values(task)

        def change(database: Database) -> None:
            database.ask(_INSERT, *values, task.id, task.runner)
            if not task.runner:
                database.ask(_QUEUE)

        await self._change(change, wake=not task.runner)

    async def save(self, task: KeptTask) -> bool:
        values, runner, updated = _values(task), task.runner, task.updated

        def change(database: Database) -> bool | None:
            before = database.ask("SELECT updated FROM tasks WHERE id = ? AND runner = ?", task.id, runner)
            if before is not None:
                database.ask(_UPDATE, *values, task.id)
            return None if before is None else bool(before != updated)

        changed = await self._open.change(change)
        if changed:  # a checkpoint alone concerns nobody
            self._wake()
        return changed is not None

    async def load(self, id: str) -> KeptTask | None:
        found = await self._open.read(lambda database: _select(database, "id = ?", id))
        return found[0] if found else None

    async def updated(self, ids: Collection[str]) -> Mapping[str, float]:
        def read(database: Database) -> dict[str, float]:
            found = {id: database.ask("SELECT updated FROM tasks WHERE id = ?", id) for id in ids}
            return {id: float(at) for id, at in found.items() if at is not None}

        return await self._open.read(read)

    async def count(self, owner: str) -> int:
        found = await self._open.read(
            lambda database: database.ask("SELECT count(*) FROM tasks WHERE owner = ?", owner)
        )
        return int(found)

    async def tell(self, id: str, note: Mapping[str, Any]) -> None:
        def change(database: Database) -> None:
            for task in _select(database, "id = ?", id):
                noted(task.note, note)
                database.ask("UPDATE tasks SET note = ? WHERE id = ?", encode(task.note), id)

        await self._change(change)

    async def renew(self, runner: str, lease: float) -> Sequence[tuple[str, Mapping[str, Any]]]:
        def lasts(database: Database) -> bool:
            until = database.ask("SELECT until FROM runners WHERE name = ?", runner)
            told = "SELECT EXISTS (SELECT 1 FROM tasks WHERE runner = ? AND NOT ended AND note != '{}')"
            return until is not None and until > time.monotonic() + lease * 0.7 and not database.ask(told, runner)

        def change(database: Database) -> list[tuple[str, Mapping[str, Any]]]:
            now = time.monotonic()
            database.ask("INSERT OR REPLACE INTO runners VALUES (?, ?, ?)", runner, now, now + lease)
            told = _select(database, "runner = ? AND NOT ended AND note != '{}'", runner)
            database.ask("UPDATE tasks SET note = '{}' WHERE runner = ? AND note != '{}'", runner)
            return [(task.id, task.note) for task in told]

        return () if await self._open.read(lasts) else await self._change(change, wake=False)

    async def claim(self, runner: str, most: int) -> Sequence[KeptTask]:
        def waits(database: Database) -> bool:
            return bool(database.connection.execute(_WAITS, {"now": time.monotonic()}).fetchone()[0])

        def change(database: Database) -> list[KeptTask]:
            run = database.connection.execute
            run(_OVER, {"now": time.monotonic()})
            run(_LEFT)
            run(_QUEUE)
            claimed = list[KeptTask]()
            for owner, id in run(_WAITING, (most,)).fetchall():
                run("UPDATE tasks SET runner = ? WHERE id = ?", (runner, id))
                run("UPDATE turns SET turn = (SELECT max(turn) FROM turns) + 1 WHERE owner = ?", (owner,))
                claimed += _select(database, "id = ?", id)
            run(_IDLE)
            return claimed

        return await self._change(change, wake=False) if await self._open.read(waits) else ()

    async def held(self, runner: str) -> Collection[str]:
        statement = "SELECT id FROM tasks WHERE runner = ? AND NOT ended"
        found = await self._open.read(lambda database: database.connection.execute(statement, (runner,)).fetchall())
        return [id for (id,) in found]

    async def release(self, ids: Collection[str], runner: str) -> None:
        def change(database: Database) -> None:
            for id in ids:
                database.ask("UPDATE tasks SET runner = '' WHERE id = ? AND runner = ? AND NOT ended", id, runner)
            database.ask(_QUEUE)

        await self._change(change)

    async def forget(self, ids: Collection[str], now: float) -> None:
        def change(database: Database) -> None:
            database.connection.execute(_FORGOTTEN, {"day": now, "now": time.monotonic()})
            for id in ids:
                database.ask("DELETE FROM tasks WHERE id = ?", id)
            database.ask(_IDLE)

        await self._change(change, wake=False)

    async def news(self, seen: int) -> int:
        await self._wait_woken()  # on a system without sockets others are heard when leases are renewed
        self._clear()
        return seen + 1

    async def _change(self, function: Callable[[Database], T], *, wake: bool = True) -> T:
        """Change the file, and have other processes look at it."""
        result = await self._open.change(function)
        if wake:
            self._wake()
        return result


def _values(task: KeptTask) -> tuple[object, ...]:
    """Return what the columns hold that a runner changes."""
    return task.owner, task.ended, task.until, task.updated, facts_of(task), task.result, task.checkpoint


def _select(database: Database, where: str, *values: object) -> list[KeptTask]:
    found = []
    for *columns, facts in database.connection.execute(_SELECT + where, values).fetchall():
        row: dict[str, Any] = dict(zip(COLUMNS, columns, strict=True))
        found.append(restored(row, facts, row["note"]))
    return found
