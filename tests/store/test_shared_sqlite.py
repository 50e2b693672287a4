"""The file that processes share: those that were killed or stand still, and what its disk may do."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from tests.store.history import CountingClient, problems
from trimcp.errors import LocalError
from trimcp.store.database import Database
from trimcp.store.naming import store_of
from trimcp.store.shared import AppendEvent, DropEvents, Letter, SaveSession
from trimcp.store.shared_sqlite import _KIND, SqliteStore
from trimcp.support.files import UnusableFile, WrongFile

ROOT = Path(__file__).parents[2]
LEASE = 1.0


@asynccontextmanager
async def counting(path: Path) -> AsyncIterator[tuple[trio.Process, str]]:
    """Run a server that shares sessions in a file, and yield it with its URL."""
    command = [sys.executable, "-m", "tests.store.counting_server", str(path), str(LEASE)]
    process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert process.stdout is not None
        yield process, (await process.stdout.receive_some()).decode().strip()
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


async def test_a_process_that_stood_still_adds_nothing_to_what_others_went_on_with(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    store = SqliteStore(path)
    with trio.fail_after(60):
        async with counting(path) as (one, here), counting(path) as (_, there), store.opened():
            client = CountingClient(here)
            await client.begin()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.count, 1_000, 0.01)
                while not (client.calls and len(client.calls[0].numbers) > 20):  # noqa: ASYNC110  # another process
                    await trio.sleep(0.01)
                os.kill(one.pid, signal.SIGSTOP)
                client.url = there
                other = CountingClient(there, session=client.session)
                while (await other.count(2, 0.0)).ends != ["result"]:  # noqa: ASYNC110  # another process
                    await trio.sleep(0.05)  # until the lease is over, and the session was taken over
                (call,) = client.calls
                stream = int(call.ids[0].partition("-")[0])
                kept = await store.after(client.session, stream, 0)
                assert b'"error"' in kept[-1][1]
                os.kill(one.pid, signal.SIGCONT)
            assert call.ends == ["error"]
            assert call.resumed == 1
            assert problems([call], 60) == []
            assert await store.after(client.session, stream, 0) == kept
            client.url = here
            while (last := await client.count(3, 0.0)).ends == ["refused"]:  # noqa: ASYNC110  # another process
                await trio.sleep(0.05)  # until it is one of them again
            assert last.ends == ["result"]


async def test_a_process_that_was_killed_is_gone_at_once(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    store = SqliteStore(path)
    async with counting(path) as (process, url), store.opened():
        client = CountingClient(url)
        await client.begin()
        kept = await store.load(client.session)
        assert kept is not None
        assert not await store.gone(kept.holder)
        process.kill()
        await process.wait()
        letter = Letter(kept.holder, b"x")
        assert list(await store.commit([letter])) == [letter]
        assert await store.gone(kept.holder)
        taken = await store.take(client.session, kept.fence)
        assert taken is not None
        assert taken.holder == store.name


async def test_a_restart_loses_no_session(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    async with counting(path) as (_, url):
        client = CountingClient(url)
        await client.begin()
        assert (await client.count(3, 0.0)).ends == ["result"]
    async with counting(path) as (_, url):
        client.url = url
        assert (await client.count(3, 0.0)).ends == ["result"]


async def test_a_lease_that_is_over_is_lost(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "sessions.db", lease=1e-9)
    async with store.opened():
        write = SaveSession("s", 1, b"{}", 60.0, new=True)
        assert list(await store.commit([write])) == [write]
        assert not await store.renew()


async def test_a_clock_that_is_set_ends_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqliteStore(tmp_path / "sessions.db")
    async with store.opened():
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 3_600)
        assert await store.renew()
        assert not await store.commit([SaveSession("s", 1, b"{}", 60.0, new=True)])


async def test_a_process_of_before_a_restart_of_the_machine_is_gone_when_it_is_written_to(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "sessions.db")
    async with store.opened():
        store._open.ask("INSERT INTO processes VALUES ('long-ago', ?)", time.monotonic() + 1_000_000)
        letter = Letter("long-ago", b"x")
        assert list(await store.commit([letter])) == [letter]
        assert await store.gone("long-ago")


async def test_a_full_disk_keeps_all_of_a_commit_or_nothing(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "sessions.db")
    async with store.opened():
        await store.commit([SaveSession("s", 1, b"{}", 60.0, new=True)])
        database = store._open
        pages = database.ask("PRAGMA page_count")
        database.ask(f"PRAGMA max_page_count = {pages + 2}")
        many = [AppendEvent("s", 1, 1, number, b"x" * 1_000) for number in range(1, 100)]
        with pytest.raises(UnusableFile, match="free some space, and it goes on"):
            await store.commit(many)
        assert await store.after("s", 1, 0) == []
        database.ask(f"PRAGMA max_page_count = {pages + 1_000}")
        assert not await store.commit(many)
        assert len(await store.after("s", 1, 0)) == 99


async def test_the_file_is_its_users_alone_and_of_its_kind(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    async with SqliteStore(path).opened():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE theirs (a)")
    connection.close()
    before = other.read_bytes()
    with pytest.raises(WrongFile, match="name another file"):
        async with SqliteStore(other).opened():
            pass
    assert other.read_bytes() == before


async def test_what_was_not_written_so_is_not_taken_for_a_session(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    store = SqliteStore(path)
    async with store.opened():
        await store.commit([SaveSession("s", 1, b"{}", 60.0, new=True), AppendEvent("s", 1, 1, 1, b"x")])
        store._open.ask("UPDATE sessions SET data = 'text'")
        store._open.ask("UPDATE events SET data = 7")
        with pytest.raises(UnusableFile):
            await store.load("s")
        with pytest.raises(UnusableFile):
            await store.after("s", 1, 0)


def test_a_store_is_named_by_its_url(tmp_path: Path) -> None:
    store = store_of(f"sqlite://{tmp_path}/my%20sessions.db")
    assert isinstance(store, SqliteStore)
    assert store.path == tmp_path / "my sessions.db"
    assert store_of(store) is store


@pytest.mark.parametrize(
    "url", ["", "sqlite:", "sqlite://", "sqlite:///", "sqlite://host/x", "/path", "file:///x", "http://["]
)
def test_what_names_no_store_is_refused(url: str) -> None:
    with pytest.raises(LocalError, match="sqlite:///path"):
        store_of(url)


async def test_a_file_of_the_release_before_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    before = attrs.evolve(_KIND, forms=_KIND.forms[:1])
    database = Database(path, before)
    database.ask("INSERT INTO sessions VALUES ('s', '', 1, ?, x'7b7d')", time.time() + 600)
    for seq in (1, 2, 3):
        database.ask("INSERT INTO events VALUES ('s', 7, ?, ?)", seq, b"%d" % seq)
    database.close()
    store = SqliteStore(path)
    async with store.opened():
        assert await store.after("s", 7, 1) == [(2, b"2"), (3, b"3")]
        taken = await store.take("s", 1)
        assert taken is not None
        more = [AppendEvent("s", 2, 7, seq, b"%d" % seq) for seq in (4, 5, 6)]
        assert not await store.commit([DropEvents("s", 2, 7, before=3), *more])
        assert await store.after("s", 7, 0) == [(seq, b"%d" % seq) for seq in (3, 4, 5, 6)]
        assert await store.after("s", 7, 5) == [(6, b"6")]


async def test_events_of_a_commit_in_doubt_are_kept_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was carried out, and raised; what is written then has its events among others."""
    store, change = SqliteStore(tmp_path / "sessions.db"), Database.change
    events = [AppendEvent("s", 1, 1, seq, b"%d" % seq) for seq in range(1, 6)]

    async def in_doubt(database: Database, function: Any) -> Any:
        await change(database, function)
        raise OSError("nobody knows")

    async with store.opened():
        await store.commit([SaveSession("s", 1, b"{}", 600.0, new=True)])
        with monkeypatch.context() as patch:
            patch.setattr(Database, "change", in_doubt)
            with pytest.raises(OSError, match="nobody knows"):
                await store.commit(events[2:4])
        assert not await store.commit(events)
        assert not await store.commit([DropEvents("s", 1, 1, before=3)])
        assert [seq for seq, _ in await store.after("s", 1, 2)] == [3, 4, 5]


@pytest.mark.parametrize("parts", [b"x", bytes(12), bytes(8) + b"\xff\xff\xff\xff", "text", 7])
async def test_a_row_of_events_that_was_not_written_so_is_an_error(tmp_path: Path, parts: object) -> None:
    path = tmp_path / "sessions.db"
    store = SqliteStore(path)
    async with store.opened():
        await store.commit([SaveSession("s", 1, b"{}", 600.0, new=True), AppendEvent("s", 1, 1, 1, b"x")])
        with sqlite3.connect(path) as other:
            other.execute("UPDATE events SET parts = ?", (parts,))
        with pytest.raises(UnusableFile, match="cannot keep sessions"):
            await store.after("s", 1, 0)
