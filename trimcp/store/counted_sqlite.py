"""What the processes of one machine use up and know together, in their SQLite file: turns, what is used once, records.

Times of turns are those since the machine has started, as those of leases. What lies far ahead is of before that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from trimcp.store.database import Database
from trimcp.store.peers import SharedFile
from trimcp.store.shared import MOST_MARKS, RecordChange, SharedStore, SharedTurn, TurnAnswer

COUNTED: Final = (
    "CREATE TABLE quotas (name TEXT PRIMARY KEY, tokens REAL NOT NULL, at REAL NOT NULL, tag INTEGER NOT NULL, "
    "until REAL NOT NULL);"
    "CREATE TABLE turns (number INTEGER PRIMARY KEY, quota TEXT NOT NULL, id TEXT NOT NULL UNIQUE, "
    "whose TEXT NOT NULL, process TEXT NOT NULL, come INTEGER NOT NULL, tag INTEGER NOT NULL, until REAL NOT NULL);"
    "CREATE INDEX queues ON turns (quota, come, tag, number);"
    "CREATE TABLE marks (owner TEXT NOT NULL, mark TEXT NOT NULL, until REAL NOT NULL, PRIMARY KEY (owner, mark)) "
    "WITHOUT ROWID;"
    "CREATE INDEX used ON marks (until);"
    "CREATE TABLE records (kind TEXT NOT NULL, name TEXT NOT NULL, data BLOB NOT NULL, until REAL NOT NULL, "
    "PRIMARY KEY (kind, name))"
)
_FAR: Final = 3_600.0  # seconds; a lease is shorter
_EXPIRED: Final = 1_000  # rows forgotten in one transaction


class SqliteCounts(SharedFile, SharedStore):
    """What processes use up and know together."""

    async def turns(self, ended: Sequence[SharedTurn], asked: Sequence[SharedTurn]) -> TurnAnswer:
        def change(database: Database) -> TurnAnswer:
            now = time.monotonic()
            come: list[tuple[str, str]] = []
            for turn in ended:
                database.ask("DELETE FROM turns WHERE id = ?", turn.id)
            for turn in {turn.quota: turn for turn in ended}.values():
                come += _go_on(database, turn, now)
            return TurnAnswer([_ask(database, turn, self.name, now, self.lease, come) for turn in asked], come)

        return await self._open.change(change)

    async def first_use(self, owner: str, mark: str, seconds: float) -> bool:
        def change(database: Database) -> bool:
            ask, now = database.ask, time.time()  # such as the proofs it is for
            ask("DELETE FROM marks WHERE owner = ? AND mark = ? AND until < ?", owner, mark, now)
            uses = ask("SELECT count(*) FROM (SELECT 1 FROM marks WHERE owner = ? LIMIT ?)", owner, MOST_MARKS)
            if uses >= MOST_MARKS:
                return False
            insert = "INSERT INTO marks VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
            return bool(database.connection.execute(insert, (owner, mark, now + seconds)).rowcount)

        return await self._open.change(change)

    async def records(self, kind: str) -> dict[str, bytes]:
        def read(database: Database) -> dict[str, bytes]:
            statement = "SELECT name, data FROM records WHERE kind = ? AND until >= ? ORDER BY name"
            rows = database.connection.execute(statement, (kind, time.time())).fetchall()
            if not all(type(data) is bytes for _, data in rows):
                raise ValueError("a row holds what was not written there")
            return dict(rows)

        return await self._open.read(read)

    async def change_records(self, kind: str, changes: Sequence[RecordChange], seconds: float) -> bool:
        def write(database: Database) -> bool:
            ask, now = database.ask, time.time()
            for change in changes:
                found = "SELECT data FROM records WHERE kind = ? AND name = ? AND until >= ?"
                if ask(found, kind, change.name, now) not in (change.known, change.data):
                    return False
            for change in changes:
                if change.data is None:
                    ask("DELETE FROM records WHERE kind = ? AND name = ?", kind, change.name)
                else:
                    row = kind, change.name, change.data, now + seconds
                    ask("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?)", *row)
            return True

        return await self._open.change(write)


def _ask(
    database: Database, turn: SharedTurn, process: str, now: float, lease: float, come: list[tuple[str, str]]
) -> float | None:
    ask, quota = database.ask, turn.quota
    known = database.connection.execute(
        "UPDATE turns SET until = ?, process = ? WHERE id = ?", (now + lease, process, turn.id)
    ).rowcount
    if not known:
        # Behind one turn of each other one, and all of its own.
        last = ask("SELECT tag FROM quotas WHERE name = ?", quota) or 0
        own = ask("SELECT max(tag) FROM turns WHERE quota = ? AND NOT come AND whose = ?", quota, turn.whose) or 0
        row = (quota, turn.id, turn.whose, process, max(last, own) + 1, now + lease)
        ask("INSERT INTO turns (quota, id, whose, process, come, tag, until) VALUES (?, ?, ?, ?, 0, ?, ?)", *row)
    come += _go_on(database, turn, now)
    waits = "SELECT number, tag FROM turns WHERE id = ? AND NOT come"
    place = database.connection.execute(waits, (turn.id,)).fetchone()
    if place is None:
        return 0.0
    number, tag = place
    queue = "SELECT count(*) FROM turns WHERE quota = ? AND NOT come"
    if not known and ask(queue, quota) > turn.waiting:
        ask("DELETE FROM turns WHERE number = ?", number)
        return None
    if turn.per_second is None:
        return lease
    before: int = ask(f"{queue} AND (tag, number) <= (?, ?)", quota, tag, number)
    tokens: float = ask("SELECT tokens FROM quotas WHERE name = ?", quota)
    return max(0.001, (before - tokens) / turn.per_second)


def _go_on(database: Database, turn: SharedTurn, now: float) -> list[tuple[str, str]]:
    """Give the turns of a quota that can be given now."""
    ask, quota, rate = database.ask, turn.quota, turn.per_second
    ask("DELETE FROM turns WHERE quota = ? AND NOT until BETWEEN ? AND ?", quota, now, now + _FAR)
    row = database.connection.execute("SELECT tokens, at, tag FROM quotas WHERE name = ?", (quota,)).fetchone()
    tokens, at, tag = row or (turn.burst, now, 0)
    if rate is not None:
        tokens = min(turn.burst, tokens + max(0.0, now - at) * rate + 1e-9)
    running = ask("SELECT count(*) FROM turns WHERE quota = ? AND come", quota)
    come: list[tuple[str, str]] = []
    while (turn.running is None or running < turn.running) and (rate is None or tokens >= 1):
        first = "SELECT number, process, id, tag FROM turns WHERE quota = ? AND NOT come ORDER BY tag, number LIMIT 1"
        found = database.connection.execute(first, (quota,)).fetchone()
        if found is None:
            break
        number, process, id, tag = found
        ask("UPDATE turns SET come = 1 WHERE number = ?", number)
        come.append((process, id))
        running, tokens = running + 1, tokens - (rate is not None)
    until = now + _FAR + turn.burst / (rate or 1.0)
    ask("INSERT OR REPLACE INTO quotas VALUES (?, ?, ?, ?, ?)", quota, tokens, now, tag, until)
    return come


def forget_counted(database: Database) -> None:
    """Forget what is over."""
    database.ask("DELETE FROM records WHERE until < ?", time.time())
    now = time.monotonic()
    database.ask("DELETE FROM turns WHERE NOT until BETWEEN ? AND ?", now, now + _FAR)
    database.ask("DELETE FROM quotas WHERE NOT until BETWEEN ? AND ?", now, now + 100 * _FAR)
    old = "SELECT owner, mark FROM marks WHERE until < ? LIMIT ?"
    rows = database.connection.execute(old, (time.time(), _EXPIRED)).fetchall()
    database.connection.executemany("DELETE FROM marks WHERE owner = ? AND mark = ?", rows)
