"""Contexts that several processes change: what each of them finds, and what becomes of updates that cross."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.agent_tools.tables import ADA, open_table
from tests.programs import require
from tests.store.hub import Between, Hub, SharedStore
from tests.store.redis_server import RedisServer, redis_server, until
from trimcp.agent_tools.contexts.table import ContextTable
from trimcp.agent_tools.messages.errors import (
    AgentToolsError,
    ContextGone,
    NameTaken,
    UnknownContext,
    VersionConflict,
)
from trimcp.store.redis.contexts import RedisContexts

Store: TypeAlias = SharedStore | Between
Two: TypeAlias = Callable[..., AbstractAsyncContextManager[tuple[ContextTable, ContextTable, Store, Store]]]


@asynccontextmanager
async def tables_over(
    one: Store, other: Store, **limits: Any
) -> AsyncIterator[tuple[ContextTable, ContextTable, Store, Store]]:
    """Two tables, as of two processes, and the store of each."""
    async with open_table(one, **limits) as first, open_table(other, **limits) as second:
        yield first, second, one, other


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    require("redis-server")
    with redis_server() as server:
        yield server


@pytest.fixture(params=["hub", "redis"])
def two(request: pytest.FixtureRequest, tmp_path: Path) -> Two:
    if request.param == "hub":
        hub = Hub()
        return lambda **limits: tables_over(hub.open(), hub.open(), **limits)
    url = request.getfixturevalue("redis").url
    stores = [Between(RedisContexts(url, prefix=tmp_path.name)) for _ in range(2)]
    return lambda **limits: tables_over(*stores, **limits)


async def test_what_one_was_answered_the_other_finds(two: Two) -> None:
    async with two() as (first, second, one, _):
        made = await first.create(ADA, "ctx-001", {"a": 1})
        found = await second.find(ADA, "ctx-001")
        assert found.snapshot()["a"] == 1
        for number in range(5):
            assert (await found.update({"n": number})).version == 2 * number + 1
            assert first.get(ADA, "ctx-001") is None  # not before it has looked
            assert first.get(ADA, "ctx-001", as_it_is=True) is made
            assert (await first.find(ADA, "ctx-001")) is made
            assert made.snapshot()["n"] == number
            await made.update({"m": number})
            assert (await second.find(ADA, "ctx-001")).snapshot()["m"] == number
        # Where only asking tells, it has to look each time.
        assert first.get(ADA, "ctx-001") is (None if one.told else made)
        assert {"a", "n", "m"} <= set(made.snapshot())


async def test_updates_that_cross_are_both_kept(two: Two) -> None:
    async with two() as (first, second, one, _):
        made = await first.create(ADA, "ctx-001")
        found = await second.find(ADA, "ctx-001")
        await first.find(ADA, "ctx-001")
        one.deaf = True
        await found.update({"theirs": 1, "both": 1})
        assert (await made.update({"mine": 1, "both": 2})).version == 2
        assert made.snapshot().items() >= {"theirs": 1, "mine": 1, "both": 2}.items()
        await found.update({"more": 1})
        updates = [made.apply({"n": 1}), made.apply({"n": 2}), made.apply({"m": 1})]
        assert [(await update.stored()).version for update in updates] == [4, 5, 6]
        assert (await second.find(ADA, "ctx-001")).snapshot().items() >= {"more": 1, "n": 2, "m": 1}.items()
        assert found.version == made.version == 6


async def test_an_update_that_names_a_version_is_refused_after_another_process_changed_it(two: Two) -> None:
    async with two() as (first, second, one, _):
        made = await first.create(ADA, "ctx-001")
        found = await second.find(ADA, "ctx-001")
        await first.find(ADA, "ctx-001")
        one.deaf = True
        await found.update({"a": 1})
        refused, kept = made.apply({"a": 2}, 0), made.apply({"b": 2})
        with pytest.raises(VersionConflict) as conflict:
            await refused.stored()
        assert conflict.value.data == {"version": 1}
        assert (await kept.stored()).version == 2
        assert made.snapshot().items() >= {"a": 1, "b": 2}.items()


async def test_both_may_not_create_one_but_both_may_begin_it(two: Two) -> None:
    async with two() as (first, second, one, other):
        one.deaf = other.deaf = True
        outcomes: list[Any] = []

        async def create(table: ContextTable, state: dict[str, Any]) -> None:
            try:
                outcomes.append((await table.create(ADA, "ctx-001", state)).snapshot()["who"])
            except NameTaken as error:
                outcomes.append(error.code)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(create, first, {"who": "first"})
            nursery.start_soon(create, second, {"who": "second"})
        assert "name_taken" in outcomes
        (who,) = set(outcomes) - {"name_taken"}
        for table in (first, second):
            assert (await table.find(ADA, "ctx-001")).snapshot()["who"] == who
        begun = [await table.find_or_make(ADA, "ctx-002") for table in (first, second)]
        for number, actor in enumerate(begun):
            await actor.update({f"n{number}": number})
        assert (await first.find_or_make(ADA, "ctx-002")).created == begun[1].created
        assert begun[1].snapshot().items() >= {"n0": 0, "n1": 1}.items()


async def test_one_that_another_process_ended_ends_here(two: Two) -> None:
    async with two() as (first, second, one, _):
        made = await first.create(ADA, "ctx-001")
        late = await first.create(ADA, "ctx-002")
        async with made.watch() as watch:
            await watch.receive()
            await (await second.find(ADA, "ctx-001")).destroy()
            while (event := await watch.receive()).kind == "state":  # the other one has noted that it is used
                pass
            assert (event.kind, event.reason) == ("destroyed", "it was ended by another process")
        with pytest.raises(ContextGone):
            await first.find(ADA, "ctx-001")
        found = await second.find(ADA, "ctx-002")
        await wait_all_tasks_blocked()
        one.deaf = True
        await found.destroy()
        with pytest.raises(ContextGone):
            await late.update({"a": 1})
        assert late.ended == "it was ended by another process"
        assert await one.counts() == {}


async def test_one_made_anew_under_its_id_is_another_one(two: Two) -> None:
    async with two(gone=0.0) as (first, second, one, _):
        made = await first.create(ADA, "ctx-001", {"old": 1})
        found = await second.find(ADA, "ctx-001")
        await wait_all_tasks_blocked()
        one.deaf = True
        await found.destroy()
        await second.create(ADA, "ctx-001", {"new": 1})
        with pytest.raises(ContextGone):
            await made.update({"a": 1})
        await made.wait_over()
        assert "old" not in (await first.find(ADA, "ctx-001")).snapshot()


async def test_watchers_see_what_other_processes_change(two: Two) -> None:
    async with two() as (first, second, _, _):
        made = await first.create(ADA, "ctx-001")
        found = await second.find(ADA, "ctx-001")
        async with made.watch() as watch:
            assert (await watch.receive()).kind == "state"
            await found.update({"a": 1})
            event = await watch.receive()
            assert (event.kind, event.version, event.content["a"]) == ("state", 1, 1)
            await made.update({"b": 1})
            event = await watch.receive()
            assert (event.kind, event.version, event.content) == ("update", 2, {"b": 1})


async def test_calls_of_both_are_in_the_history_once(two: Two) -> None:
    async with two() as (first, second, one, other):
        made = await first.create(ADA, "ctx-001")
        found = await second.find(ADA, "ctx-001")
        await wait_all_tasks_blocked()
        one.deaf = other.deaf = True
        for number in range(3):
            for name, actor in (("made", made), ("found", found)):
                actor.record({"request_id": f"{name}-{number}", "tool": "t"})
            await until(lambda: not made.recorded and not found.recorded)
        one.deaf = other.deaf = False
        for table in (first, second):
            history = (await table.find(ADA, "ctx-001")).snapshot()["tool_history"]
            assert len(history) == 6
            assert {entry["request_id"] for entry in history} == {
                f"{n}-{i}" for n in ("made", "found") for i in range(3)
            }


@pytest.mark.parametrize("two", ["hub"], indirect=True)  # time that jumps is over before another process has answered
async def test_one_that_another_process_uses_is_not_ended_for_idleness(two: Two, autojump_clock: Any) -> None:
    async with two(idle=10.0) as (first, second, _, _):
        made = await first.create(ADA, "ctx-001")
        for _ in range(10):
            await trio.sleep(9)
            (await second.find(ADA, "ctx-001")).used()
        assert made.ended is None
        await trio.sleep(45)
        assert made.ended is not None
        with pytest.raises((UnknownContext, ContextGone)):
            await second.find(ADA, "ctx-001")


async def test_whoever_lost_track_looks_at_everything(two: Two) -> None:
    async with two() as (first, second, one, _):
        made = [await first.create(ADA, f"c{number}") for number in range(3)]
        one.forgets = True
        await (await second.find(ADA, "c1")).update({"a": 1})
        await first.find(ADA, "c0")
        assert [actor.version for actor in made] == [0, 1, 0]


async def test_a_store_that_cannot_be_read_is_asked_again(two: Two, caplog: pytest.LogCaptureFixture) -> None:
    async with two() as (first, second, one, _):
        made = await first.create(ADA, "ctx-001")
        await wait_all_tasks_blocked()
        one.broken = OSError("the disk is away")
        await (await second.find(ADA, "ctx-001")).update({"a": 1})
        await wait_all_tasks_blocked()
        with pytest.raises(AgentToolsError, match="could not read"):
            await first.find(ADA, "ctx-001")
        assert [record.levelno for record in caplog.records].count(logging.ERROR) == 1
        one.broken = None
        assert (await first.find(ADA, "ctx-001")) is made
        assert made.version == 1


async def test_a_change_that_could_not_be_read_is_not_forgotten(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    async with two() as (first, second, one, _):
        made = await first.create(ADA, "ctx-001")
        found = await second.find(ADA, "ctx-001")

        async def fail(*_: Any) -> None:
            raise OSError("the disk is away")

        with monkeypatch.context() as broken:
            broken.setattr(type(one), "load", fail)
            await found.update({"a": 1})
            with pytest.raises(AgentToolsError, match="could not read"):
                await first.find(ADA, "ctx-001")
        assert (await first.find(ADA, "ctx-001")) is made
        assert made.version == 1


async def test_whoever_looks_at_the_same_time_looks_together(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    async with two() as (first, second, one, _):
        await first.create(ADA, "ctx-001")
        await (await second.find(ADA, "ctx-001")).update({"a": 1})
        changed, looks = type(one).changed, 0

        async def counted(store: Any) -> Any:
            nonlocal looks
            looks += store is one
            return await changed(store)

        monkeypatch.setattr(type(one), "changed", counted)
        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(first.find, ADA, "ctx-001")
        assert looks <= 5


async def test_a_session_ends_with_the_contexts_of_all_processes(two: Two) -> None:
    async with two() as (first, second, one, _):
        for number, table in enumerate((first, second)):
            await table.create(ADA, f"c{number}", session="s")
        await first.end_session(ADA, "s", "over")
        assert await one.counts() == {}
        for table in (first, second):
            with pytest.raises((ContextGone, UnknownContext)):
                await table.find(ADA, "c1")
