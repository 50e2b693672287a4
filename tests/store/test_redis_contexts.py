"""Contexts in Redis while it fails: what is answered, what is kept, and how it goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.lowlevel

from tests.agent_tools.tables import ADA, BOB, open_table
from tests.store.redis_server import RedisServer, redis_server, relayed, slowed, until
from tests.store.test_contexts import kept, plain
from trimcp.agent_tools.contexts.state import ContextLimits
from trimcp.agent_tools.contexts.table import ContextTable
from trimcp.agent_tools.messages.errors import AgentToolsError, ContextGone, UnknownContext
from trimcp.budget import Budget
from trimcp.errors import ConnectionLost, LocalError
from trimcp.store.contexts import Owner
from trimcp.store.contexts_sqlite import SqliteContexts
from trimcp.store.naming import contexts_of
from trimcp.store.redis.connection import RedisLimits
from trimcp.store.redis.contexts import RedisContexts
from trimcp.store.redis.resp import RedisRefusal

PLACE = 'trimcp:context:{["ada","agent-a","ctx-001"]}'

pytestmark = pytest.mark.needs("redis-server")


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


def patient(server: RedisServer, seconds: float = 30.0) -> RedisContexts:
    return RedisContexts(server.url, limits=RedisLimits(patience=seconds))


# What it does once, and for how long


async def test_a_write_whose_answer_was_lost_is_done_once(server: RedisServer) -> None:
    """It has run, and is sent again: both the new context and the one that was made again under an id are kept once."""
    async with relayed(server, b"write:") as (url, drops, asked):
        store = RedisContexts(url)
        async with store.opened():
            first = await store.write([kept()], [])
            drops.append(True)
            stamps = await store.write([kept(version=8, stamp=first[kept().key]), kept(BOB)], [kept(BOB).key])
            assert set(stamps) == {kept().key, kept(BOB).key}
            assert not drops
            assert sum(b"EVALSHA" in data and b"write:" in data for data in asked) >= 3
            assert await store.counts() == {ADA: 1, ("bob", "agent-b"): 1}
            for key, stamp in stamps.items():
                row = await store.load(*key)
                assert row is not None
                assert row.stamp == stamp
            assert set(await store.changed() or ()) == set(stamps)


async def test_an_answer_that_is_lost_for_good_leaves_it_open(server: RedisServer) -> None:
    async with relayed(server, b"write:") as (url, drops, _):
        store = RedisContexts(url, limits=RedisLimits(patience=0.01))
        async with table_over(store) as table:
            actor = await table.create(ADA, "ctx-001")
            drops += [True] * 100
            with pytest.raises(AgentToolsError, match="it may or may not have been kept"):
                await actor.update({"a": 1})
            drops.clear()
            await until(lambda: not store.failure)
            found = await table.find(ADA, "ctx-001")
            assert found is actor
            assert (found.version, found.snapshot()["a"]) == (1, 1)  # it has been
            assert (await actor.update({"b": 1})).version == 2


async def test_every_key_has_an_expiry_and_the_prefix(server: RedisServer) -> None:
    store = RedisContexts(server.url, prefix="mine")
    async with store.opened():
        await store.write([kept(until=time.time() + 100), kept(BOB, ends=1e18, until=float("inf"))], [])
        row = await store.load(*kept(BOB).key)
        assert row is not None
        assert row.until == float("inf")
        await store.expire(0.0)
        commands = store._redis.commands
        keys = await commands.run("KEYS", "*")
        assert len(keys) >= 7
        for key in keys:
            assert key.startswith(b"mine:")
            assert await commands.run("PTTL", key) > 0, key
        context = next(key for key in keys if b'{["ada' in key)
        assert 100_000 < await commands.run("PTTL", context) < 100_000 + 3_700_000


async def test_names_cannot_leave_their_place(server: RedisServer) -> None:
    owners = [("a/b", "c"), ("a", "b/c"), ("", "a/b/c"), ("a}{b", "%2F"), ("\u00e9:*", "[a]?")]
    store = RedisContexts(server.url)
    async with store.opened():
        await store.write([kept(owner, id="x/y z\u00e9{}") for owner in owners], [])
        assert await store.counts() == dict.fromkeys(owners, 1)
        for owner in owners:
            assert await store.ids(owner) == ["x/y z\u00e9{}"]
            row = await store.load(owner, "x/y z\u00e9{}")
            assert row is not None
            assert plain(row) == plain(kept(owner, id="x/y z\u00e9{}"))
        assert set(await store.changed() or ()) == {(owner, "x/y z\u00e9{}") for owner in owners}
        assert await store.expire(5e9) != ()
        assert await store.counts() == {}


async def test_one_that_is_used_while_others_are_forgotten_stays(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = RedisContexts(server.url), RedisContexts(server.url)
    async with store.opened(), other.opened():
        stamps = await store.write([kept(until=1.0), kept(BOB, until=1.0)], [])
        ask = store._ask

        async def use_meanwhile(*parts: Any) -> Any:
            due = await ask(*parts)
            await other.write([kept(stamp=stamps[kept().key])], [])
            return due

        monkeypatch.setattr(RedisContexts, "_ask", lambda _, *parts: use_meanwhile(*parts))
        assert await store.expire(2.0) == [kept(BOB).key]
        monkeypatch.undo()
        assert await store.load(*kept().key) is not None
        assert await store.counts() == {ADA: 1}


# What is found there


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ('{"form":2}', "a newer trimcp wrote the context"),
        ("[]", "not written so"),
        ("{", "not written so"),
        ('{"form":1,"version":1,"times":[1,2],"state":{},"history":[]}', "not written so"),
        ('{"form":1,"version":"1","times":[1,2,3],"state":{},"history":[]}', "not written so"),
        ('{"form":1,"version":1,"times":[1,2,true],"state":{},"history":[]}', "not written so"),
        ('{"form":1,"version":1,"times":[1,2,3],"state":[],"history":[]}', "not written so"),
    ],
)
async def test_what_was_not_written_so_is_refused_and_not_changed(value: str, text: str, server: RedisServer) -> None:
    store = RedisContexts(server.url)
    async with open_table(store) as table:
        commands = store._redis.commands
        await commands.run("HSET", PLACE, "stamp", "5-0", "value", value)
        with pytest.raises(ValueError, match=text):
            await store.load(ADA, "ctx-001")
        for attempt in (table.find, table.find_or_make, table.create):
            with pytest.raises(AgentToolsError, match="could not read the context"):
                await attempt(ADA, "ctx-001")
        assert await commands.run("HGET", PLACE, "value") == value.encode()


async def test_keys_of_another_kind_are_refusals(server: RedisServer) -> None:
    server.say("SET trimcp:contexts:owners text")
    with pytest.raises(RedisRefusal, match="WRONGTYPE"):
        async with open_table(RedisContexts(server.url)):
            pass


# While it fails


async def test_one_that_was_killed_and_started_again_has_what_was_answered(server: RedisServer) -> None:
    answered = 0
    async with open_table(patient(server)) as table, trio.open_nursery() as nursery:
        actor = await table.create(ADA, "ctx-001")

        async def update() -> None:
            nonlocal answered
            while True:
                applied = await actor.update({"n": answered + 1})
                answered += 1
                assert applied.version == answered

        nursery.start_soon(update)
        for _ in range(3):
            before = answered
            await until(lambda: answered > before + 50)  # noqa: B023  # within the round
            server.kill()
            server.start()
        before = answered
        await until(lambda: answered > before)
        nursery.cancel_scope.cancel()
    async with open_table(patient(server)) as table:
        version = (await table.find(ADA, "ctx-001")).version
        assert answered <= version <= answered + 1


async def test_while_it_is_away_each_waits_a_bounded_time(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_table(patient(server, 0.2)) as table:
        actor = await table.create(ADA, "ctx-001")
        server.kill()
        with trio.fail_after(20):
            with pytest.raises(AgentToolsError, match="could not keep the update"):
                await actor.update({"a": 1})
            with pytest.raises(AgentToolsError, match="could not read the context"):
                await table.find(ADA, "ctx-001")
            with pytest.raises(AgentToolsError):
                await table.create(ADA, "ctx-002")
        server.start()
        await until(lambda: not store_of(table).failure)
        assert (await table.find(ADA, "ctx-001")).version == 0
        assert (await actor.update({"a": 1})).version == 1
    assert "the store of contexts works again" in [record.getMessage() for record in caplog.records]


def store_of(table: ContextTable) -> RedisContexts:
    store = table._store
    assert isinstance(store, RedisContexts)
    return store


async def test_a_full_memory_refuses_updates_and_lets_contexts_end(server: RedisServer) -> None:
    async with open_table(RedisContexts(server.url)) as table:
        actor, other = [await table.create(ADA, f"ctx-{number}", {"a": 1}) for number in range(2)]
        server.say("CONFIG SET maxmemory 1")
        with pytest.raises(AgentToolsError, match="nothing was changed"):
            await actor.update({"a": 2})
        assert (await table.find(ADA, "ctx-0")).snapshot()["a"] == 1
        await other.destroy()
        assert await store_of(table).load(ADA, "ctx-1") is None
        server.say("CONFIG SET maxmemory 0")
        assert (await actor.update({"a": 2})).version == 1
        assert await store_of(table).counts() == {ADA: 1}


async def test_data_that_was_flushed_ends_the_contexts(server: RedisServer) -> None:
    async with open_table(RedisContexts(server.url)) as table, open_table(RedisContexts(server.url)) as other:
        made = [await table.create(ADA, f"ctx-{number}", {"a": 1}) for number in range(2)]
        await other.find(ADA, "ctx-0")
        server.say("FLUSHALL")
        for each in (table, other):
            with pytest.raises((ContextGone, UnknownContext)):
                await each.find(ADA, "ctx-0")
        with pytest.raises(ContextGone):
            await made[1].update({"a": 2})
        anew = await table.create(BOB, "ctx-0", {"b": 1})
        assert (await other.find(BOB, "ctx-0")).snapshot()["b"] == 1
        assert (await anew.update({"b": 2})).version == 1


async def test_one_that_is_slow_costs_time_alone(server: RedisServer) -> None:
    """Each answer 200 ms late: updates of many contexts wait together."""
    async with slowed(server, 0.2) as url, table_over(RedisContexts(url)) as table:

        async def use(owner: Owner) -> None:
            actor = await table.create(owner, "ctx")
            assert (await actor.update({"n": 1})).version == 1
            assert await table.find(owner, "ctx") is actor

        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(use, (f"p{number}", "agent"))
        # 160 questions: looks and writes together, and reads of strangers four at once.
        assert trio.current_time() - began < 0.2 * 40


def table_over(store: RedisContexts) -> AbstractAsyncContextManager[ContextTable]:
    return ContextTable(ContextLimits(), store, Budget()).running()


# How it is named


def test_urls_name_stores(tmp_path: Path) -> None:
    store = contexts_of(f"sqlite://{tmp_path}/a%20b.db")
    assert isinstance(store, SqliteContexts)
    assert store.path == tmp_path / "a b.db"
    assert isinstance(contexts_of("redis://host"), RedisContexts)
    assert "secret" not in repr(contexts_of("redis://:secret@host"))
    for wrong in ("contexts.db", "sqlite://", "http://host", "redis:host"):
        with pytest.raises(LocalError):
            contexts_of(wrong)


async def test_one_that_cannot_be_reached_is_one_sentence(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.kill()
    with pytest.raises(OSError, match=r"cannot use unix:.*Connection refused"):
        async with open_table(RedisContexts(server.url)):
            pass
    store = RedisContexts(server.url)
    with pytest.raises(ConnectionLost, match="it is not open"):
        await store.counts()
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]
