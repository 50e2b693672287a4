"""Files of SQLite: claimed by one store, given up in the end, and what each fault of the file or its disk is."""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from trimcp.store import database as database_module
from trimcp.store.database import Database, FileKind
from trimcp.support.files import UnusableFile, WrongFile

FIRST = "CREATE TABLE notes (text TEXT NOT NULL)"
KIND = FileKind("notes", 0x6E6F7465, (FIRST,), ("synchronous = NORMAL",))


@asynccontextmanager
async def opened(path: Path, kind: FileKind = KIND) -> AsyncIterator[Database]:
    database = Database(path, kind)
    try:
        yield database
    finally:
        database.close()


def note(text: str) -> Any:
    return lambda database: database.ask("INSERT INTO notes VALUES (?)", text)


def notes(database: Database) -> list[str]:
    return [text for (text,) in database.connection.execute("SELECT text FROM notes ORDER BY rowid")]


# The file


@pytest.mark.parametrize("raised", [KeyboardInterrupt, ValueError])
def test_a_file_whose_opening_failed_is_given_up(
    raised: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections: list[Any] = []

    def prepare(self: Database) -> None:
        connections.append(self.connection)
        raise raised

    with monkeypatch.context() as patched:
        patched.setattr(Database, "_prepare", prepare)
        with pytest.raises(raised):
            Database(tmp_path / "kept.db", KIND)
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connections[0].execute("SELECT 1")
    Database(tmp_path / "kept.db", KIND).close()


def test_a_file_is_given_up_even_if_it_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = attrs.evolve(KIND, temporary=True)
    database = Database(tmp_path / "kept.db", kind)
    with pytest.raises(UnusableFile, match=r"the notes in '.*kept.db' are in use"):
        Database(tmp_path / "kept.db", kind)

    def unlink(self: Path, **_: object) -> None:
        raise OSError("no")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", unlink)
        with pytest.raises(OSError, match="no"):
            database.close()
    Database(tmp_path / "kept.db", kind).close()
    assert os.listdir(tmp_path) == []


# Faults


async def test_another_process_may_make_the_file_at_the_same_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ask = tmp_path / "kept.db", Database.ask

    def slowly(self: Database, statement: str, *values: object) -> Any:
        answer = ask(self, statement, *values)
        if not path.with_suffix(".made").exists():  # between this statement and the next
            path.with_suffix(".made").touch()
            other = sqlite3.connect(path)
            other.executescript(f"BEGIN; {FIRST}; PRAGMA user_version = 1; PRAGMA application_id = {KIND.mark}; COMMIT")
            other.close()
        return answer

    monkeypatch.setattr(Database, "ask", slowly)
    async with opened(path) as database:
        await database.change(note("kept"))
        assert await database.read(notes) == ["kept"]


async def test_another_process_may_begin_the_log_at_the_same_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kind of log changes, SQLite refuses at once whoever meets another's transaction."""
    path, ask, asked = tmp_path / "kept.db", Database.ask, list[str]()
    other = sqlite3.connect(path, isolation_level=None)

    def beside(self: Database, statement: str, *values: object) -> Any:
        if statement == "PRAGMA journal_mode = WAL" and statement not in asked:
            other.execute("BEGIN IMMEDIATE")
        elif other.in_transaction:
            other.execute("COMMIT")
        asked.append(statement)
        return ask(self, statement, *values)

    monkeypatch.setattr(Database, "ask", beside)
    async with opened(path) as database:
        assert asked.count("PRAGMA journal_mode = WAL") == 2
        assert database.ask("PRAGMA journal_mode") == "wal"
    other.close()


def test_whoever_never_ends_its_transaction_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ask = tmp_path / "kept.db", Database.ask
    other = sqlite3.connect(path, isolation_level=None)

    def beside(self: Database, statement: str, *values: object) -> Any:
        if statement == "PRAGMA journal_mode = WAL":
            other.execute("BEGIN IMMEDIATE")
        return ask(self, statement, *values)

    monkeypatch.setattr(Database, "ask", beside)
    monkeypatch.setattr(database_module, "_WAIT", 0.1)
    with pytest.raises(UnusableFile, match="database is locked; end the other program that has it open"):
        Database(path, KIND)
    other.close()


async def test_a_full_disk_undoes_the_whole_change(tmp_path: Path) -> None:
    async with opened(tmp_path / "kept.db") as database:
        await database.change(note("before"))
        pages = database.ask("PRAGMA page_count")
        database.ask(f"PRAGMA max_page_count = {pages + 3}")
        with pytest.raises(UnusableFile, match="disk is full; free some space, and it goes on") as failed:
            await database.change(lambda database: (note("small")(database), note("x" * 100_000)(database)))
        assert str(tmp_path / "kept.db") in str(failed.value)
        assert await database.read(notes) == ["before"]
        database.ask("PRAGMA max_page_count = 1000000")
        await database.change(note("after"))
        assert await database.read(notes) == ["before", "after"]


async def test_a_change_that_raises_is_undone(tmp_path: Path) -> None:
    async with opened(tmp_path / "kept.db") as database:

        def fail(database: Database) -> None:
            note("half")(database)
            raise ValueError("wrong")

        with pytest.raises(ValueError, match="wrong"):
            await database.change(fail)
        await database.change(note("whole"))
        assert await database.read(notes) == ["whole"]


async def test_a_file_that_may_not_be_written_says_who_has_to_get_it(tmp_path: Path) -> None:
    async with opened(tmp_path / "kept.db") as database:
        database.ask("PRAGMA query_only = ON")
        with pytest.raises(UnusableFile, match="readonly database; give the file and its folder to the user"):
            await database.change(note("x"))
        database.ask("PRAGMA query_only = OFF")
        await database.change(note("y"))
        assert await database.read(notes) == ["y"]


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_file_that_was_deleted_takes_nothing_more(replaced: bool, tmp_path: Path) -> None:
    path = tmp_path / "kept.db"
    async with opened(path) as database:
        await database.change(note("x"))
        path.unlink()
        if replaced:
            path.write_bytes(b"")
        with pytest.raises(UnusableFile, match="was moved, replaced or deleted while it was in use; start again"):
            await database.change(note("y"))


async def test_a_file_that_a_stranger_has_locked_is_waited_for_and_then_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kept.db"
    monkeypatch.setattr(database_module, "_WAIT", 0.05)
    async with opened(path) as database:
        await database.change(note("x"))
        stranger = sqlite3.connect(path, isolation_level=None)
        try:
            stranger.execute("BEGIN IMMEDIATE")
            with pytest.raises(UnusableFile, match="database is locked; end the other program that has it open"):
                await database.change(note("y"))
            assert await database.read(notes) == ["x"]  # reading goes on
            stranger.execute("COMMIT")
        finally:
            stranger.close()
        await database.change(note("z"))
        assert await database.read(notes) == ["x", "z"]


async def test_another_process_may_have_a_file_unless_it_is_temporary(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from trimcp.store.database import Database, FileKind\n"
        f"kind = FileKind('notes', 0x6E6F7465, ({FIRST!r},), (), temporary=sys.argv[2] == 'temporary')\n"
        "Database(sys.argv[1], kind).close()\n"
    )
    for kind, error in ((KIND, b""), (attrs.evolve(KIND, temporary=True), b"are in use by another process or store")):
        path = tmp_path / ("temporary" if kind.temporary else "kept")
        database = Database(path, kind)
        command = [sys.executable, "-c", program, str(path), path.name]
        done = await trio.run_process(command, capture_stderr=True, check=False)
        database.close()
        assert error in done.stderr
        assert bool(done.stderr) is bool(error)


async def test_a_damaged_file_is_to_be_moved_away(tmp_path: Path) -> None:
    path = tmp_path / "kept.db"
    async with opened(path) as database:
        await database.change(lambda database: [note("x" * 1_000)(database) for _ in range(100)])
    data = bytearray(path.read_bytes())
    data[4096:-1] = bytes(len(data) - 4097)
    path.write_bytes(data)
    with pytest.raises(UnusableFile, match=r"malformed; move it away with kept\.db-wal to begin anew"):
        async with opened(path) as database:
            await database.read(notes)


async def test_a_file_of_a_newer_version_is_refused_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "kept.db"
    async with opened(path, attrs.evolve(KIND, forms=(FIRST, "CREATE TABLE more (text TEXT)"))):
        pass
    before = path.read_bytes()
    with pytest.raises(WrongFile, match=r"a newer trimcp wrote it \(form 2; this one knows 1\); name another file"):
        Database(path, KIND)
    assert path.read_bytes() == before
