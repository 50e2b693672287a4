"""A store of tasks in an SQLite file: they outlive a restart, and kill -9 with their last checkpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from trimcp.store.database import Database, FileKind
from trimcp.store.tasks import KeptTask, TaskStore, noted
from trimcp.wire.jsonrpc import encode, parse_value

_KIND: Final = FileKind(
    "tasks",
    mark=0x74726D6B,  # "trmk"
    forms=(
        "CREATE TABLE tasks (id TEXT PRIMARY KEY, owner TEXT NOT NULL, ended INTEGER NOT NULL, until REAL NOT NULL, "
        "runner TEXT NOT NULL, lease REAL NOT NULL, note BLOB NOT NULL, facts BLOB NOT NULL, result BLOB, "
        "checkpoint BLOB) WITHOUT ROWID;"
        "CREATE INDEX owners ON tasks (owner);"
        "CREATE INDEX leases ON tasks (lease) WHERE NOT ended",
    ),
    pragmas=("synchronous = FULL", "secure_delete = ON", "journal_size_limit = 16777216"),
)
_COLUMNS: Final = ("id", "owner", "until", "runner", "lease", "note", "result", "checkpoint")
_FACTS: Final = tuple(each.name for each in attrs.fields(KeptTask) if each.name not in _COLUMNS)
_INSERT: Final = (
    "INSERT INTO tasks (owner, ended, until, facts, result, checkpoint, runner, lease, id, note) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, '{}')"
)
_UPDATE: Final = (
    "UPDATE tasks SET owner = ?, ended = ?, until = ?, facts = ?, result = ?, checkpoint = ? "
    "WHERE id = ? AND runner = ? RETURNING 1"
)
_SELECT: Final = "SELECT id, owner, until, runner, lease, note, result, checkpoint, facts FROM tasks WHERE "


@attrs.define(eq=False)
class SqliteTasks(TaskStore):
    """Tasks in a file, for the processes of one machine. All work on it is done in a thread.

    A change is answered once the disk has it (write-ahead log, `synchronous=FULL`). The file has arguments, results
    and checkpoints, readable for the user who runs the server alone, and not encrypted. What is forgotten is
    overwritten.

    Args:
        path: the file; made if it does not exist. Several processes of one machine may use it at once.
    """

    durable = True

    path: Path = attrs.field(converter=Path)
    _database: Database | None = attrs.field(init=False, default=None)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Keep the file open while the block runs.

        Raises:
            OSError: it cannot be opened, or another store of this process has it.
            ValueError: it is another kind of file, which was not changed.
        """
        self._database = database = await trio.to_thread.run_sync(Database, self.path, _KIND)
        try:
            yield
        finally:
            self._database = None
            # A thread that has the file cannot be given up: its lock would stay until the process ends.
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(database.close)

    @property
    def _open(self) -> Database:
        if self._database is None:
            raise OSError(f"the tasks in {str(self.path)!r} are not open")
        return self._database

    async def create(self, task: KeptTask) -> None:
        values = _values(task)
        await self._open.change(lambda database: database.ask(_INSERT, *values, task.runner, task.lease, task.id))

    async def save(self, task: KeptTask) -> bool:
        values = _values(task)
        found = await self._open.change(lambda database: database.ask(_UPDATE, *values, task.id, task.runner))
        return found is not None

    async def load(self, id: str) -> KeptTask | None:
        found = await self._open.read(lambda database: _select(database, "id = ?", id))
        return found[0] if found else None

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

        await self._open.change(change)

    async def renew(self, runner: str, lease: float) -> Sequence[tuple[str, Mapping[str, Any]]]:
        def change(database: Database) -> list[tuple[str, Mapping[str, Any]]]:
            database.ask("UPDATE tasks SET lease = ? WHERE runner = ? AND NOT ended", lease, runner)
            told = _select(database, "runner = ? AND NOT ended AND note != '{}'", runner)
            database.ask("UPDATE tasks SET note = '{}' WHERE runner = ? AND note != '{}'", runner)
            return [(task.id, task.note) for task in told]

        return await self._open.change(change)

    async def claim(self, runner: str, now: float, lease: float) -> Sequence[KeptTask]:
        def change(database: Database) -> list[KeptTask]:
            found = _select(database, "NOT ended AND lease < ?", now)
            database.ask("UPDATE tasks SET runner = ?, lease = ? WHERE NOT ended AND lease < ?", runner, lease, now)
            return [attrs.evolve(task, runner=runner, lease=lease) for task in found]

        return await self._open.change(change)

    async def release(self, ids: Collection[str], runner: str) -> None:
        def change(database: Database) -> None:
            for id in ids:
                database.ask("UPDATE tasks SET lease = 0 WHERE id = ? AND runner = ?", id, runner)

        await self._open.change(change)

    async def forget(self, ids: Collection[str], now: float) -> None:
        def change(database: Database) -> None:
            database.ask("DELETE FROM tasks WHERE until < ?", now)
            for id in ids:
                database.ask("DELETE FROM tasks WHERE id = ?", id)

        await self._open.change(change)


def _values(task: KeptTask) -> tuple[object, ...]:
    """Return what the columns hold that a runner changes."""
    facts = encode({name: getattr(task, name) for name in _FACTS})
    return task.owner, task.ended, task.until, facts, task.result, task.checkpoint


def _select(database: Database, where: str, *values: object) -> list[KeptTask]:
    found = []
    for id, owner, until, runner, lease, note, result, checkpoint, facts in database.connection.execute(
        _SELECT + where, values
    ).fetchall():
        known, told = parse_value(bytes(facts)), parse_value(note if isinstance(note, bytes) else note.encode())
        if not isinstance(known, dict) or not isinstance(told, dict):
            raise ValueError("the store of tasks has text that it did not write")
        columns = {"until": until, "runner": runner, "lease": lease, "note": told}
        facts = {name: value for name, value in known.items() if name in _FACTS}
        found.append(KeptTask(id, owner, result=result, checkpoint=checkpoint, **columns, **facts))
    return found
