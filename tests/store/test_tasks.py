"""Stores of tasks: one contract, held by each."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

from trimcp.store.tasks import KeptTask, TaskStore
from trimcp.store.tasks_sqlite import SqliteTasks


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> TaskStore:
    return TaskStore() if request.param == "memory" else SqliteTasks(tmp_path / "tasks.db")


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
        "lease": 10.0,
    }
    return KeptTask(id, **{**given, **more})


async def test_a_task_is_found_as_it_was_saved(store: TaskStore) -> None:
    async with store.opened():
        kept = task()
        await store.create(kept)
        assert attrs.asdict(await found(store)) == attrs.asdict(kept)
        kept.status, kept.result, kept.checkpoint = "completed", b'{"content":[]}', b"[1]"
        kept.progress, kept.used, kept.memory = {"progress": 1.5}, {"b": "c"}, {"answers": {}}
        assert await store.save(kept)
        assert attrs.asdict(await found(store)) == attrs.asdict(kept)
        assert await store.load("b") is None
        assert await store.count("principal ada") == 1
        assert await store.count("principal eve") == 0


async def found(store: TaskStore, id: str = "a") -> KeptTask:
    kept = await store.load(id)
    assert kept is not None
    return kept


async def test_a_lease_that_is_over_lets_another_runner_have_the_task(store: TaskStore) -> None:
    async with store.opened():
        mine = task()
        await store.create(mine)
        await store.create(task("ended", status="failed"))
        assert await store.claim("two", 9.0, 20.0) == []
        assert [(each.id, each.runner) for each in await store.claim("two", 11.0, 20.0)] == [("a", "two")]
        mine.status = "completed"
        assert not await store.save(mine)
        assert (await found(store)).status == "working"
        await store.release(["a"], "one")  # which has it no more
        assert await store.claim("three", 11.0, 20.0) == []
        await store.release(["a"], "two")
        assert [each.id for each in await store.claim("three", 11.0, 20.0)] == ["a"]


async def test_what_is_told_for_a_task_is_heard_once(store: TaskStore) -> None:
    async with store.opened():
        await store.create(task())
        await store.create(task("b", runner="two"))
        await store.tell("a", {"answers": {"x": {"action": "accept"}}})
        await store.tell("a", {"answers": {"y": {}}, "cancelled": True})
        await store.tell("unknown", {"cancelled": True})
        assert await store.renew("two", 30.0) == []
        told = await store.renew("one", 30.0)
        assert [(id, dict(note)) for id, note in told] == [
            ("a", {"answers": {"x": {"action": "accept"}, "y": {}}, "cancelled": True})
        ]
        assert await store.renew("one", 40.0) == []
        assert (await found(store)).lease == 40.0


async def test_tasks_are_forgotten_by_name_and_by_time(store: TaskStore) -> None:
    async with store.opened():
        for id, until in (("a", 5.0), ("b", 50.0), ("c", 50.0)):
            await store.create(task(id, until=until))
        await store.forget(["b", "unknown"], 6.0)
        assert [await store.load(id) is None for id in "abc"] == [True, True, False]


async def test_a_file_keeps_them_and_processes_may_share_it(tmp_path: Path) -> None:
    path = tmp_path / "tasks.db"
    async with opened(path) as store:
        await store.create(task(checkpoint=b'{"step":1}'))
    async with opened(path) as store:
        assert (await found(store)).checkpoint == b'{"step":1}'
    assert path.stat().st_mode & 0o077 == 0
    with pytest.raises(OSError, match="not open"):
        await SqliteTasks(path).load("a")
    (tmp_path / "other.db").write_text("something else")
    with pytest.raises(ValueError, match="no such database"):
        async with opened(tmp_path / "other.db"):
            pass


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[SqliteTasks]:
    store = SqliteTasks(path)
    async with store.opened():
        yield store
