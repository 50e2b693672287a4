"""Stores of tasks: one contract, held by each."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import attrs
import pytest
import trio
import trio.testing

from tests.programs import require
from tests.store.redis_server import RedisServer, redis_server, relayed
from trimcp.store import database
from trimcp.store.redis.connection import RedisLimits
from trimcp.store.redis.tasks import RedisTasks
from trimcp.store.tasks import KeptTask, TaskStore
from trimcp.store.tasks_sqlite import SqliteTasks

LONG = 600.0


class World(Protocol):
    """Makes stores that are processes to each other."""

    def __init__(self, folder: Path) -> None: ...

    def store(self) -> TaskStore: ...

    def end_lease(self, runner: str) -> None:
        """Make the lease of a runner be over."""


class MemoryWorld(World):
    def __init__(self, folder: Path) -> None:
        self.only = TaskStore()

    def store(self) -> TaskStore:
        return self.only

    def end_lease(self, runner: str) -> None:
        del self.only._leases[runner]


class SqliteWorld(World):
    """Several stores of one process on one file: refused elsewhere, as they would cost each other their locks."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tasks.db"

    def store(self) -> TaskStore:
        return SqliteTasks(self.path)

    def end_lease(self, runner: str) -> None:
        connection = sqlite3.connect(self.path)
        connection.execute("UPDATE runners SET until = since WHERE name = ?", (runner,))
        connection.commit()
        connection.close()


class RedisWorld(World):
    """All tests on one server, each with keys of its own."""

    def __init__(self, folder: Path) -> None:
        require("redis-server")
        self.server = RUNNING[0] if RUNNING else SERVERS.enter_context(redis_server())
        RUNNING[:] = [self.server]
        self.prefix = folder.name

    def store(self) -> TaskStore:
        return RedisTasks(self.server.url, prefix=self.prefix)

    def end_lease(self, runner: str) -> None:
        self.server.say(f"DEL {self.prefix}:tasks:lease:{runner}")


SERVERS = ExitStack()
RUNNING: list[RedisServer] = []
WORLDS: dict[str, type[World]] = {"memory": MemoryWorld, "redis": RedisWorld, "sqlite": SqliteWorld}


@pytest.fixture(scope="module", autouse=True)
def servers() -> Iterator[None]:
    with SERVERS:
        yield
    RUNNING.clear()


class SharedFiles(set[tuple[int, int]]):
    """In place of the files that a process has open: none is."""

    def add(self, element: tuple[int, int]) -> None:
        pass


@pytest.fixture(params=sorted(WORLDS))
def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(database, "_used", SharedFiles())
    return WORLDS[request.param](tmp_path)


@asynccontextmanager
async def opened(world: World) -> AsyncIterator[tuple[TaskStore, TaskStore]]:
    """Open two stores, with runners "one" and "two"."""
    async with AsyncExitStack() as stack:
        one, two = world.store(), world.store()
        await stack.enter_async_context(one.opened())
        await stack.enter_async_context(two.opened())
        await one.renew("one", LONG)
        await two.renew("two", LONG)
        yield one, two


def task(id: str = "a", **more: Any) -> KeptTask:
    given: dict[str, Any] = {
        "owner": "principal ada",
        "principal": {"id": "ada"},
        "params": {"name": "tool", "arguments": {"x": [1, None]}},
        "restart": "resume",
        "created": 1.0,
        "updated": 2.0,
        "until": 1_000.0,
        "runner": "one",
    }
    return KeptTask(id, **{**given, **more})


async def found(store: TaskStore, id: str = "a") -> KeptTask:
    kept = await store.load(id)
    assert kept is not None
    return kept


async def test_a_task_is_found_as_it_was_saved(world: World) -> None:
    async with opened(world) as (one, two):
        kept = task()
        await one.create(kept)
        assert attrs.asdict(await found(two)) == attrs.asdict(kept)
        kept.status, kept.result, kept.checkpoint = "completed", b'{"content":[]}', b"[1]"
        kept.progress, kept.used, kept.memory = {"progress": 1.5}, {"b": "c"}, {"answers": {}}
        kept.updated, kept.until = 1764369600.123456, 2_000.0
        assert await one.save(kept)
        assert attrs.asdict(await found(two)) == attrs.asdict(kept)
        kept.result = None
        assert await one.save(kept)
        assert (await found(two)).result is None
        assert await two.load("b") is None
        assert dict(await two.updated(["a", "b"])) == {"a": 1764369600.123456}
        assert await two.count("principal ada") == 1
        assert await two.count("principal eve") == 0


async def test_a_lease_that_is_over_lets_another_runner_have_the_task(world: World) -> None:
    async with opened(world) as (one, two):
        mine = task()
        await one.create(mine)
        await one.create(task("ended", status="failed"))
        assert list(await two.claim("two", 10)) == []
        assert list(await one.held("one")) == ["a"]
        world.end_lease("one")
        assert [(each.id, each.runner) for each in await two.claim("two", 10)] == [("a", "two")]
        await one.renew("one", LONG)  # too late
        mine.status = "completed"
        assert not await one.save(mine)
        assert (await found(one)).status == "working"
        await one.release(["a"], "one")  # which has it no more
        assert list(await one.claim("one", 10)) == []
        assert list(await one.held("one")) == []
        await two.release(["a", "unknown"], "two")
        assert [each.id for each in await one.claim("one", 10)] == ["a"]
        assert list(await one.held("one")) == ["a"]


async def test_a_lease_does_not_depend_on_the_time_of_day(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(world) as (one, two):
        await one.create(task())
        monkeypatch.setattr(time, "time", lambda: 9e9)  # somebody has set the clock
        assert list(await two.claim("two", 10)) == []
        world.end_lease("one")
        monkeypatch.setattr(time, "time", lambda: 0.0)
        assert [each.id for each in await two.claim("two", 10)] == ["a"]


async def test_who_has_no_lease_runs_nothing(world: World) -> None:
    async with opened(world) as (one, two):
        await one.create(task(runner="three"))
        await one.create(task("b", runner=""))
        assert sorted(each.id for each in await two.claim("two", 10)) == ["a", "b"]


async def test_a_task_without_a_runner_waits_for_one_and_owners_take_turns(world: World) -> None:
    async with opened(world) as (one, two):
        for id in "abcdef":
            await one.create(task(id, owner="ada", runner="", until=1_000.0 + ord(id)))
        for id in "uv":
            await one.create(task(id, owner="bob", runner="", until=2_000.0 + ord(id)))
        assert [each.id for each in await two.claim("two", 1)] == ["a"]
        assert [each.id for each in await two.claim("two", 1)] == ["u"]
        assert [each.id for each in await one.claim("one", 3)] == ["b", "v", "c"]
        await one.create(task("x", owner="eve", runner=""))
        assert [each.id for each in await two.claim("two", 2)] == ["d", "x"]
        await one.forget(["e"], 0.0)
        assert [each.id for each in await two.claim("two", 9)] == ["f"]
        assert list(await two.claim("two", 9)) == []
        await two.release(["a"], "two")
        assert [each.id for each in await one.claim("one", 9)] == ["a"]
        ended = await found(one)
        ended.status = "completed"
        assert await one.save(ended)
        world.end_lease("one")
        assert sorted(each.id for each in await two.claim("two", 9)) == ["b", "c", "v"]


async def test_what_is_told_for_a_task_is_heard_once(world: World) -> None:
    async with opened(world) as (one, two):
        await one.create(task())
        await two.create(task("b", runner="two"))
        await two.tell("a", {"answers": {"x": {"action": "accept"}}})
        await two.tell("a", {"answers": {"y": {}}, "cancelled": True})
        await two.tell("unknown", {"cancelled": True})
        assert list(await two.renew("two", LONG)) == []
        told = await one.renew("one", LONG)
        assert [(id, dict(note)) for id, note in told] == [
            ("a", {"answers": {"x": {"action": "accept"}, "y": {}}, "cancelled": True})
        ]
        assert list(await one.renew("one", LONG)) == []


async def test_what_was_told_for_a_task_reaches_its_next_runner(world: World) -> None:
    async with opened(world) as (one, two):
        await one.create(task())
        await one.create(task("b", runner=""))
        await two.tell("a", {"cancelled": True})
        await two.tell("b", {"cancelled": True})
        world.end_lease("one")
        assert sorted(each.id for each in await two.claim("two", 9)) == ["a", "b"]
        assert sorted(id for id, _ in await two.renew("two", LONG)) == ["a", "b"]


@pytest.mark.parametrize("what", ["waits", "told", "changed", "released"])
async def test_others_hear_of_it(world: World, what: str) -> None:
    async with opened(world) as (one, two):
        await one.create(task())
        seen, heard = 0, trio.Event()
        with trio.move_on_after(0.2):  # what was said before
            while True:
                seen = await two.news(seen)

        async def hear() -> None:
            await two.news(seen)
            heard.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hear)
            await trio.testing.wait_all_tasks_blocked()
            assert not heard.is_set()
            if what == "waits":
                await one.create(task("b", runner=""))
            elif what == "told":
                await one.tell("a", {"cancelled": True})
            elif what == "released":
                await one.release(["a"], "one")
            elif not isinstance(world, MemoryWorld):
                await one.save(task(updated=3.0))
            else:
                nursery.cancel_scope.cancel()  # whoever shares this memory is told by the run itself


async def test_tasks_are_forgotten_by_name_and_by_time(world: World) -> None:
    async with opened(world) as (one, two):
        for id, until in (("a", 5.0), ("b", 50.0), ("c", 50.0)):
            await one.create(task(id, until=until, status="completed", result=b"{}"))
        await two.forget(["b", "unknown"], 6.0)
        assert [await one.load(id) is None for id in "abc"] == [True, True, False]
        assert await one.count("principal ada") == 1


async def test_no_task_at_work_is_forgotten_because_somebody_set_the_clock(world: World) -> None:
    async with opened(world) as (one, two):
        until = time.time() + 100.0
        await one.create(task("a", until=until))
        await one.create(task("b", until=until, runner=""))
        await one.create(task("c", until=until, status="completed", result=b"{}"))
        await two.forget([], until + 1_000.0)
        left = [id for id in "abc" if await one.load(id) is not None]
    assert left == (["a", "b", "c"] if isinstance(world, RedisWorld) else ["a"])  # Redis goes by a clock of its own


async def test_any_text_is_kept(world: World) -> None:
    async with opened(world) as (one, two):
        owner = 'address "\N{SNOWMAN}" {x}:*'
        kept = task(owner=owner, runner="", result=b"", checkpoint=b'"\\u0000"', message="\x00")
        kept.result = None
        await one.create(kept)
        assert [attrs.asdict(each) for each in await two.claim("two", 1)] == [{**attrs.asdict(kept), "runner": "two"}]
        assert await two.count(owner) == 1


async def test_a_file_keeps_them_for_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "tasks.db"
    async with SqliteTasks(path).opened():
        pass
    store = SqliteTasks(path)
    async with store.opened():
        await store.create(task(checkpoint=b'{"step":1}'))
    store = SqliteTasks(path)
    async with store.opened():
        assert (await found(store)).checkpoint == b'{"step":1}'
    assert path.stat().st_mode & 0o077 == 0
    with pytest.raises(OSError, match="not open"):
        await SqliteTasks(path).load("a")
    (tmp_path / "other.db").write_text("something else")
    with pytest.raises(ValueError, match="no such database"):
        async with SqliteTasks(tmp_path / "other.db").opened():
            pass


async def test_a_lease_of_before_the_machine_started_is_over(tmp_path: Path) -> None:
    store = SqliteTasks(tmp_path / "tasks.db")
    async with store.opened():
        await store.renew("one", LONG)
        await store.create(task())
        await store.renew("two", LONG)
        connection = sqlite3.connect(store.path)
        connection.execute("UPDATE runners SET since = since + 1e6, until = until + 1e6 WHERE name = 'one'")
        connection.commit()
        connection.close()
        assert [each.id for each in await store.claim("two", 1)] == ["a"]


@pytest.mark.needs("redis-server")
async def test_what_redis_is_sent_twice_is_done_once() -> None:
    with redis_server() as server:
        async with relayed(server, b"") as (url, drops, _):
            store, beside = RedisTasks(url), RedisTasks(server.url)
            async with store.opened(), beside.opened():
                await store.renew("one", LONG)
                await store.create(task("first", runner=""))  # the server knows the scripts
                first = (await store.claim("one", 1))[0]
                first.status = "completed"
                await store.save(first)
                await store.tell("first", {"cancelled": True})
                await store.renew("one", LONG)
                drops.append(True)
                await store.create(task(runner="", until=9e9))
                drops.append(True)
                await store.tell("a", {"cancelled": True})
                drops.append(True)
                (mine,) = await store.claim("one", 1)
                assert mine.id == "a"
                drops += [True, True]
                assert [id for id, _ in await store.renew("one", LONG)] == ["a"]
                assert [id for id, _ in await store.renew("one", LONG)] == []
                drops.append(True)
                assert await store.save(mine)
                late = attrs.evolve(mine, checkpoint=b"1", saves=mine.saves - 1)
                mine.checkpoint = b"2"
                assert await store.save(mine)
                assert await store.save(late)  # as one that was on its way
                assert (await found(beside)).checkpoint == b"2"
                drops.append(True)
                await store.release(["a"], "one")
                assert not drops
                assert [each.id for each in await store.claim("one", 9)] == ["a"]


@pytest.mark.needs("redis-server")
async def test_everything_in_redis_has_an_end() -> None:
    with redis_server() as server:
        store = RedisTasks(server.url)
        async with store.opened():
            await store.renew("one", LONG)
            await store.renew("two", LONG)
            far = 4e9
            await store.create(task(until=far))
            await store.create(task("b", runner="", until=far))
            await store.create(task("c", runner="", until=far, owner="bob"))
            await store.tell("a", {"cancelled": True})
            await store.tell("b", {"cancelled": True})
            assert len(await store.claim("two", 1)) == 1
            await store.release(["b"], "two")
            kept = await found(store)
            kept.status = "completed"
            await store.save(kept)
            ask = store._redis.commands.run
            keys = await ask("KEYS", "*")
            assert len(keys) > 8
            forever = [key for key in keys if await ask("PTTL", key) < 0]
            assert forever == []
            indexes = [key for key in keys if key.endswith((b":due", b":runners", b":turns")) or b":of:" in key]
            assert [key for key in indexes if await ask("PEXPIRETIME", key) < far * 1000] == []  # none before its tasks
            await store.forget(["a", "b", "c"], 0.0)
            left = {key.decode() for key in await ask("KEYS", "*")}
            assert not [key for key in left if key.startswith(("trimcp:task:", "trimcp:tasks:of", "trimcp:tasks:wait"))]
            assert left.isdisjoint(("trimcp:tasks:due", "trimcp:tasks:turns"))


@pytest.mark.needs("redis-server")
async def test_what_changes_between_two_steps_is_not_lost() -> None:
    with redis_server() as server:
        store, beside = RedisTasks(server.url), RedisTasks(server.url)
        async with store.opened(), beside.opened():
            await store.renew("one", LONG)
            await store.create(task(until=9e9))
            await beside._release(["a"], "one", "1")  # as who saw that its lease was over, which is renewed by now
            assert list(await store.held("one")) == ["a"]
            assert await store.save(await found(store))

            ask, notes = store._ask, [{"answers": {"x": {}}}, {"cancelled": True}]

            async def telling(*parts: Any) -> Any:
                reply = await ask(*parts)
                if parts[0] == "HMGET" and notes:  # more is told after the note was read, and before that is dropped
                    await beside.tell("a", notes.pop())
                return reply

            await beside.tell("a", notes[0])
            store._ask = telling  # type: ignore[method-assign]
            heard = [note for _ in range(3) for _, note in await store.renew("one", LONG)]
            assert any("x" in note["answers"] for note in heard)
            assert any(note.get("cancelled") for note in heard)
            assert list(await store.renew("one", LONG)) == []


@pytest.mark.needs("redis-server")
async def test_tasks_outlive_a_redis_that_is_killed() -> None:
    with redis_server() as server:
        store = RedisTasks(server.url, limits=RedisLimits(patience=30.0))
        async with store.opened():
            await store.renew("one", LONG)
            await store.create(task(until=9e9))
            for step in range(3):
                server.kill()
                server.start()
                kept = await found(store)
                kept.checkpoint = b"%d" % step
                assert await store.save(kept)
            assert (await found(store)).checkpoint == b"2"
            assert list(await store.held("one")) == ["a"]
        with pytest.raises(OSError, match="has a task that was not written so"):
            async with store.opened():
                server.say("HSET trimcp:task:{a} facts []")
                await store.load("a")
