"""Stores of contexts: what each has to do, the file of SQLite, and kill -9."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

import trimcp
from tests.agent_tools.tables import ADA, BOB, ScriptedStore, open_table
from tests.programs import require
from tests.store.hub import Hub
from tests.store.redis_server import RedisServer, redis_server
from trimcp.agent_tools.callers import Owner
from trimcp.agent_tools.messages.errors import UnknownContext
from trimcp.store import contexts_sqlite
from trimcp.store.contexts import ContextStore, KeptContext, MemoryContexts
from trimcp.store.contexts_sqlite import SqliteContexts
from trimcp.store.redis.contexts import RedisContexts
from trimcp.wire.jsonrpc import encode

MakeStore = Callable[[], ContextStore]


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    require("redis-server")
    with redis_server() as server:
        yield server


@pytest.fixture(params=["sqlite", "redis", "scripted"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
    """What opens the same contexts again and again."""
    if request.param == "sqlite":
        return lambda: SqliteContexts(tmp_path / "contexts.db")
    if request.param == "redis":
        url = request.getfixturevalue("redis").url
        return lambda: RedisContexts(url, prefix=tmp_path.name)
    store = ScriptedStore()
    return lambda: store


def kept(owner: Owner = ADA, id: str = "ctx-001", **members: Any) -> KeptContext:
    values = {
        "version": 7,
        "state": {"a": {"b": [1, 2.5, None, True, "\u4e2d\U0001f600"]}, "large": (1 << 64) - 1, "small": -(1 << 63)},
        "history": [encode({"tool": "t"}), encode({"tool": "\u4e2d"})],
        "created": 1_700_000_000.25,
        "ends": 4_000_000_000.5,
        "until": 3_900_000_000.75,
        **members,
    }
    return KeptContext(owner, id, **values)


def plain(one: KeptContext | None) -> Any:
    if one is None:
        return None
    history = [bytes(entry) for entry in one.history]
    return (one.owner, one.id, one.version, dict(one.state), history, one.created, one.ends, one.until)


def files(folder: Path) -> list[str]:
    return [entry.name for entry in os.scandir(folder) if entry.is_file()]


# The interface


async def test_what_was_written_is_loaded_after_it_was_closed(make_store: MakeStore) -> None:
    store = make_store()
    async with store.opened():
        assert await store.load(ADA, "ctx-001") is None
        await store.write([kept(), kept(BOB, version=1, state={}, history=[])], [])
        assert plain(await store.load(ADA, "ctx-001")) == plain(kept())
    store = make_store()
    async with store.opened():
        assert plain(await store.load(ADA, "ctx-001")) == plain(kept())
        assert plain(await store.load(BOB, "ctx-001")) == plain(kept(BOB, version=1, state={}, history=[]))
        for owner in (("ada", "agent-b"), ("bob", "agent-a"), ("", "")):
            assert await store.load(owner, "ctx-001") is None


async def test_a_later_state_takes_the_place_of_an_earlier_one(make_store: MakeStore) -> None:
    store = make_store()
    async with store.opened():
        stamps = await store.write([kept()], []) or {}
        later = kept(version=8, state={"x": 1}, history=[], until=3_950_000_000.0, stamp=stamps.get(kept().key, 0))
        await store.write([later], [])
        assert plain(await store.load(ADA, "ctx-001")) == plain(later)
        assert await store.counts() == {ADA: 1}


async def test_contexts_are_deleted_and_counted(make_store: MakeStore) -> None:
    store = make_store()
    async with store.opened():
        assert await store.counts() == {}
        await store.write([kept(id=f"c{number}") for number in range(3)] + [kept(BOB)], [])
        assert await store.counts() == {ADA: 3, BOB: 1}
        await store.write([kept(id="c9")], [(ADA, "c0"), (BOB, "ctx-001"), (ADA, "unknown")])
        assert await store.counts() == {ADA: 3}
        assert await store.load(ADA, "c0") is None
        assert plain(await store.load(ADA, "c9")) == plain(kept(id="c9"))


async def test_what_nobody_may_need_is_forgotten(make_store: MakeStore) -> None:
    store = make_store()
    async with store.opened():
        await store.write([kept(id=f"c{number}", until=float(number)) for number in range(1_200)], [])
        found: list[Any] = []
        while some := await store.expire(1_100.0):
            found += some
        assert sorted(found) == sorted((ADA, f"c{number}") for number in range(1_100))
        assert await store.counts() == {ADA: 100}
        assert await store.expire(1_100.0) in ([], ())


@pytest.fixture(params=["sqlite", "redis", "hub"])
def shared_store(request: pytest.FixtureRequest, tmp_path: Path) -> ContextStore:
    if request.param == "sqlite":
        return SqliteContexts(tmp_path / "contexts.db")
    if request.param == "redis":
        return RedisContexts(request.getfixturevalue("redis").url, prefix=tmp_path.name)
    return Hub().open()


async def test_a_shared_store_keeps_what_builds_on_what_it_has(shared_store: ContextStore) -> None:
    store = shared_store
    assert store.shared
    key, beside = kept().key, kept(id="beside").key
    async with store.opened():
        first = await store.write([kept()], [])
        assert set(first) == {key}
        second = await store.write([kept(version=8, stamp=first[key])], [])
        assert second[key] > first[key]
        for stamp in (0, first[key], second[key] + 1):
            stale = kept(version=9, state={"stale": 1}, stamp=stamp)
            assert set(await store.write([stale, kept(id="beside")], [beside])) == {beside}
        row = await store.load(*key)
        assert row is not None
        assert (row.version, row.stamp, row.state) == (8, second[key], kept().state)
        assert set(await store.changed() or ()) == {key, beside}
        assert await store.changed() == {}
        anew = await store.write([kept(version=0)], [key])
        assert anew[key] > second[key]
        assert await store.changed() == anew
        assert await store.write([kept(id="gone", stamp=anew[key])], []) == {}


async def test_memory_keeps_nothing() -> None:
    store = MemoryContexts()
    assert not store.durable
    async with store.opened():
        await store.write([kept()], [])
        assert await store.load(ADA, "ctx-001") is None
        assert await store.counts() == {}
        assert await store.expire(1e12) == ()


# The file


async def test_a_write_is_whole_or_nothing(tmp_path: Path) -> None:
    store = SqliteContexts(tmp_path / "contexts.db")
    async with store.opened():
        stamp = (await store.write([kept()], []))[kept().key]
        assert store._database is not None
        pages = store._database.ask("PRAGMA page_count")
        store._database.ask(f"PRAGMA max_page_count = {pages + 3}")
        with pytest.raises(OSError, match="disk is full; free some space"):
            await store.write(
                [kept(version=8, state={"a": 1}, stamp=stamp), kept(id="large", state={"x": "x" * 100_000})], []
            )
        with pytest.raises(OSError, match="disk is full; free some space"):
            await store.write([kept(id="large", state={"x": "x" * 100_000})], [(ADA, "ctx-001")])
        assert plain(await store.load(ADA, "ctx-001")) == plain(kept())
        assert await store.counts() == {ADA: 1}
        store._database.ask("PRAGMA max_page_count = 1000000")
        await store.write([kept(version=8, state={"a": 1}, stamp=stamp)], [])
        loaded = await store.load(ADA, "ctx-001")
        assert loaded is not None
        assert loaded.version == 8


async def test_contexts_are_found_without_reading_the_others(tmp_path: Path) -> None:
    store = SqliteContexts(tmp_path / "contexts.db")
    async with store.opened():
        assert store._database is not None
        connection = store._database.connection
        several = [each.format("(?, ?, ?), (?, ?, ?)") for each in (contexts_sqlite._DELETE, contexts_sqlite._STAMPS)]
        for statement in (contexts_sqlite._LOAD, *several):
            plan = connection.execute(f"EXPLAIN QUERY PLAN {statement}", "x" * statement.count("?")).fetchall()
            assert any("USING INDEX" in row[3] or "USING COVERING INDEX" in row[3] for row in plan), plan
            assert not any(row[3].startswith("SCAN contexts") or row[3] == "SCAN one" for row in plan), plan


async def test_a_write_that_fails_in_the_middle_is_undone(tmp_path: Path) -> None:
    store = SqliteContexts(tmp_path / "contexts.db")
    async with store.opened():
        some = [kept(id=f"c{number}") for number in range(70)]
        with pytest.raises(OSError, match="cannot keep contexts"):
            await store.write([*some, kept(version=object())], [])
        assert await store.counts() == {}
        await store.write(some, [])
        assert await store.counts() == {ADA: 70}


async def test_the_file_is_for_the_user_alone_and_survives_kill_and_power_loss(tmp_path: Path) -> None:
    path = tmp_path / "contexts.db"
    path.touch(0o644)
    store = SqliteContexts(path)
    async with store.opened():
        await store.write([kept()], [])
        for folder, _, names in os.walk(tmp_path / "contexts.db-peers"):
            assert os.stat(folder).st_mode & 0o777 == 0o700
            assert len(names) == 1
        for name in files(tmp_path):
            assert (tmp_path / name).stat().st_mode & 0o777 == 0o600, name
        assert store._database is not None
        assert store._database.ask("PRAGMA journal_mode") == "wal"
        assert store._database.ask("PRAGMA synchronous") == 2  # FULL


async def test_deleted_content_is_overwritten(tmp_path: Path) -> None:
    store = SqliteContexts(tmp_path / "contexts.db")
    async with store.opened():
        await store.write([kept(state={"a": "very-secret" * 1_000})], [])
    assert b"very-secret" in (tmp_path / "contexts.db").read_bytes()
    async with store.opened():
        await store.write([], [(ADA, "ctx-001")])
    assert all(b"very-secret" not in (tmp_path / name).read_bytes() for name in files(tmp_path))


async def test_a_second_store_of_one_process_is_refused(tmp_path: Path) -> None:
    """A second descriptor of the file would cost the first one the locks of SQLite."""
    path = tmp_path / "contexts.db"
    store = SqliteContexts(path)
    async with store.opened():
        for other_store in (store, SqliteContexts(path)):
            with pytest.raises(OSError, match="in use by another process or store"):
                async with other_store.opened():
                    pass
        await store.write([kept()], [])
    async with SqliteContexts(path).opened():
        pass


async def test_a_file_of_the_first_form_is_read_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "contexts.db"
    connection = sqlite3.connect(path)
    connection.execute(contexts_sqlite._KIND.forms[0])
    connection.execute("PRAGMA application_id = 0x74726D63")
    connection.execute("PRAGMA user_version = 1")
    connection.execute(
        "INSERT INTO contexts VALUES ('ada', 'agent-a', 'ctx-001', 3, 1.0, 4e9, 4e9, CAST('{\"a\":1}' AS BLOB), "
        "CAST('[]' AS BLOB))"
    )
    connection.commit()
    connection.close()
    async with open_table(SqliteContexts(path)) as table:
        actor = await table.find(ADA, "ctx-001")
        assert (actor.version, actor.snapshot()["a"]) == (3, 1)
        assert (await actor.update({"b": 2})).version == 4


@pytest.mark.parametrize("kind", ["text", "tables", "version", "form", "link"])
async def test_another_kind_of_file_is_refused_and_not_changed(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "contexts.db"
    if kind == "text":
        path.write_text("some notes")
    elif kind == "link":
        (tmp_path / "other").write_text("")
        path.symlink_to(tmp_path / "other")
    else:
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE notes (text)" if kind == "tables" else "PRAGMA user_version = 1")
        if kind == "form":
            connection.execute("PRAGMA application_id = 0x74726D63")
            connection.execute("PRAGMA user_version = 99")
        connection.commit()
        connection.close()
    before = path.read_bytes()
    with pytest.raises(OSError if kind == "link" else ValueError, match=r"no store of contexts|symbolic"):
        async with SqliteContexts(path).opened():
            pass
    assert path.read_bytes() == before


async def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = SqliteContexts(tmp_path / "contexts.db")
    for attempt in (store.counts(), store.load(ADA, "x"), store.write([], []), store.expire(0.0)):
        with pytest.raises(OSError, match="not open"):
            await attempt


async def test_a_table_over_a_file_goes_on_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "contexts.db"
    async with open_table(SqliteContexts(path)) as table:
        made = await table.create(ADA, state={"a": 1})
        begun = await table.find_or_make(ADA, "ctx-001")
        for number in range(5):
            await begun.update({"n": number, "text": "\u4e2d"})
        begun.record({"request_id": "r", "tool": "t", "status": "success"})
        ended = await table.create(ADA, "ctx-002")
        await ended.destroy()
        id, created = made.id, made.created
    async with open_table(SqliteContexts(path)) as table:
        assert table.statistics().stored == 2
        assert table.get(ADA, id) is None  # not in memory yet
        with pytest.raises(UnknownContext):
            await table.find(ADA, "\ud800")
        made = await table.find(ADA, id)
        assert (made.snapshot()["a"], made.created) == (1, created)
        begun = await table.find_or_make(ADA, "ctx-001")
        assert begun.version == 5
        assert begun.snapshot()["n"] == 4
        assert begun.snapshot()["tool_history"] == [{"request_id": "r", "tool": "t", "status": "success"}]
        assert (await begun.update({"n": None}, version=5)).version == 6
        assert (await table.find_or_make(ADA, "ctx-002")).version == 0  # it had ended: this is a new one
        assert table.statistics().stored == 0


# kill -9

AGENTS = 8

PROGRAM = """
import sys, trio
from trimcp.agent_tools.contexts.table import ContextTable
from trimcp.agent_tools.contexts.state import ContextLimits
from trimcp.store.contexts_sqlite import SqliteContexts
from trimcp.budget import Budget

async def agent(table, number):
    actor = await table.find_or_make(("p", str(number)), f"ctx-{number}")
    while True:
        n = actor.snapshot().get("n", 0) + 1
        applied = await actor.update({"n": n, "pad": "x" * (n % 2000)}, version=n - 1)
        assert applied.version == n
        sys.stdout.write(f"{number} {n}\\n")
        sys.stdout.flush()
        if n % 50 == 0:  # one that is destroyed must not come back
            victim = await table.create(("p", str(number)), f"victim-{n}", {"n": n})
            await victim.destroy()
            sys.stdout.write(f"victim {number} {n}\\n")
            sys.stdout.flush()

async def main():
    table = ContextTable(ContextLimits(), SqliteContexts(sys.argv[1]), Budget())
    async with table.running(), trio.open_nursery() as nursery:
        for number in range(int(sys.argv[2])):
            nursery.start_soon(agent, table, number)

trio.run(main)
"""


async def check_answered(path: Path, answered: dict[str, int], victims: set[tuple[str, str]]) -> None:
    """Compare what is in the file with what was answered, and go on from there."""
    async with open_table(SqliteContexts(path)) as table:
        for agent, number in answered.items():
            actor = await table.find(("p", agent), f"ctx-{agent}")
            n = actor.snapshot()["n"]
            assert number <= n <= number + 1
            assert actor.version == n, "an update was applied twice, or never"
            assert len(actor.snapshot()["pad"]) == n % 2_000
            answered[agent] = n
        store = table._store
        for agent, id in victims:
            assert await store.load(("p", agent), id) is None


@pytest.mark.slow
def test_kill_9_keeps_what_was_answered(tmp_path: Path) -> None:
    """Killed at any moment and started again: each context is as of its last answer, or one update further."""
    path = tmp_path / "contexts.db"
    answered: dict[str, int] = {}
    victims: set[tuple[str, str]] = set()
    for lines in (150, 700, 1_500):
        with subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(path), str(AGENTS)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            try:
                for count, line in enumerate(process.stdout):
                    if count == lines:
                        os.kill(process.pid, signal.SIGKILL)  # what it has written before is read to the end
                    if not line.endswith("\n"):
                        break  # killed in the middle of it
                    *_, agent, number = line.split()
                    if line.startswith("victim"):
                        victims.add((agent, f"victim-{number}"))
                    else:
                        assert int(number) == answered.get(agent, 0) + 1
                        answered[agent] = int(number)
            finally:
                process.kill()
        assert process.returncode == -signal.SIGKILL
        trio.run(check_answered, path, answered, victims)
    assert len(answered) == AGENTS
    assert sum(answered.values()) > 2_000


async def test_times_in_the_file_are_those_of_the_wall(tmp_path: Path) -> None:
    path = tmp_path / "contexts.db"
    before = time.time()
    async with open_table(SqliteContexts(path), idle=100.0, lifetime=1_000.0) as table:
        await table.create(ADA, "ctx-001")
    after = time.time()
    store = SqliteContexts(path)
    async with store.opened():
        one = await store.load(ADA, "ctx-001")
    assert one is not None
    assert before <= one.created <= after
    assert before + 1_000 - 1 <= one.ends <= after + 1_000 + 1
    assert before + 200 - 1 <= one.until <= after + 200 + 1
    assert one.state == {}


@pytest.mark.parametrize("seed", [*range(40), 237])
async def test_a_damaged_file_is_one_sentence_and_crashes_nothing(seed: int, tmp_path: Path) -> None:
    """Bytes changed and cut off, anywhere behind the head that says what the file is, and a log beside it."""
    path = tmp_path / "contexts.db"
    store = SqliteContexts(path)
    async with store.opened():
        await store.write([kept(id=f"c{number}", state={"a": "x" * 900}) for number in range(60)], [])
    chance = random.Random(seed)
    data = bytearray(path.read_bytes())
    for _ in range(chance.choice([1, 20, 2_000])):
        data[chance.randrange(16, len(data))] = chance.randrange(256)
    if seed % 3 == 0:
        del data[chance.randrange(100, len(data)) :]
    path.write_bytes(data)
    if seed % 4 == 0:
        path.with_name("contexts.db-wal").write_bytes(chance.randbytes(5_000))

    async def use() -> None:
        async with store.opened():
            await store.counts()
            for number in range(60):
                await store.load(ADA, f"c{number}")
            await store.write([kept()], [(ADA, "c1")])
            await store.expire(0.0)

    try:
        await use()
    except (OSError, ValueError) as error:
        told = str(error)
    else:
        told = str(path)
    assert str(path) in told
    assert "\n" not in told
    if "malformed" in told or "not a database" in told:
        assert "move it away with contexts.db-wal to begin anew" in told


@pytest.mark.parametrize("kind", ["folder", "loop", "device"])
async def test_what_is_no_file_is_refused_and_not_changed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fchmod", None)  # a test that is red must not take a device's rights from everybody
    path = tmp_path / "contexts.db"
    if kind == "device":
        path = Path("/dev/null")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path)
    mode = path.lstat().st_mode
    with pytest.raises(trimcp.LocalError, match=str(path)):
        async with SqliteContexts(path).opened():
            pass
    assert path.lstat().st_mode == mode


SERVED = """
import trimcp
from trimcp.agent_tools import AgentTools, SqliteContexts

server = trimcp.Server("damaged", version="1")
agent_tools = AgentTools(server, store=SqliteContexts({path!r}))
events = {events}
"""


@pytest.mark.parametrize("what", ["contexts", "events"])
def test_the_command_ends_with_one_sentence(what: str, tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    path.write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 20)
    events = f"trimcp.SqliteEvents({str(path)!r})" if what == "events" else "None"
    program = tmp_path / "program.py"
    program.write_text(SERVED.format(path=str(path), events=events))
    command = [sys.executable, "-m", "trimcp.cli", "run", str(program), "--http", "--port", "0", "--agent-tools"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1
    assert str(path) in done.stderr
