"""Tasks that a serving process leaves to workers: other processes, or here other runs of a server, on one store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

import trimcp
from tests.server.test_tasks import asking_client, call, get, make_server, until
from tests.store.test_tasks import RUNNING, SERVERS, WORLDS, SharedFiles, World
from trimcp.principal import Principal
from trimcp.store import database
from trimcp.testing import connected
from trimcp.watch.picture import take_picture
from trimcp.wire.lifecycle import SubscriptionFilter


@pytest.fixture(scope="module", autouse=True)
def servers() -> Iterator[None]:
    with SERVERS:
        yield
    RUNNING.clear()


@pytest.fixture(params=["redis", "sqlite"])
def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(database, "_used", SharedFiles())
    return WORLDS[request.param](tmp_path)


@asynccontextmanager
async def leaving(
    world: World, server: trimcp.Server[Any] | None = None, principal: str = "ada"
) -> AsyncIterator[trimcp.ClientSession]:
    """A client of a server that carries out no task itself."""
    server = server or make_server()
    server.move_tasks(world.store(), workers=True, lease=60)
    with trio.fail_after(60):
        async with connected(server, asking_client(), principal=Principal(principal)) as session:
            yield session


@asynccontextmanager
async def working(world: World, server: trimcp.Server[Any] | None = None, **options: Any) -> AsyncIterator[Any]:
    """A worker."""
    server = server or make_server()
    server.move_tasks(world.store(), **{"lease": 60, **options})
    async with server.running():
        yield server


async def test_a_task_waits_for_a_worker_and_is_told_of_by_who_left_it(world: World) -> None:
    async with leaving(world) as session:
        made = await call(session, "count", to=3)
        assert (made["status"], made["resultType"]) == ("working", "task")
        wanted = SubscriptionFilter(task_ids=[made["taskId"]])
        async with session.subscriptions.listening(wanted) as changes, working(world):
            assert changes.acknowledged.task_ids == [made["taskId"]]
            while changes.tasks.get(made["taskId"], {}).get("status") != "completed":
                await changes.receive()
            done = await get(session, made["taskId"])
            assert done["result"]["content"][0]["text"] == "counted to 3"
            assert changes.tasks[made["taskId"]]["result"] == done["result"]


async def test_what_has_changed_before_anybody_watched_is_told_too(world: World) -> None:
    async with leaving(world) as session, working(world):
        id = (await call(session, "count", to=1))["taskId"]
        await until(session, id)
        async with session.subscriptions.listening(SubscriptionFilter(task_ids=[id])) as changes:
            assert changes.acknowledged.task_ids == [id]
        answers = [await call(session, "soon") for _ in range(20)]  # long before anybody looks by himself
        assert {each["resultType"] for each in answers} == {"complete"}


async def test_progress_of_a_task_at_a_worker_is_seen(world: World) -> None:
    async with leaving(world) as session, working(world) as server:
        made = await call(session, "wait")
        while (state := await get(session, made["taskId"])).get("statusMessage") is None:
            await trio.lowlevel.checkpoint()
        assert state["_meta"]["trimcp/progress"] == {"progress": 1, "total": 2, "message": "waiting"}
        shown = [(each.transport, each.principal) for each in take_picture(server).sessions]
        assert shown == [("task", "ada")]
        await session.request_raw("tasks/cancel", {"taskId": made["taskId"]})
        assert (await until(session, made["taskId"]))["status"] == "cancelled"


async def test_questions_and_answers_pass_between_the_processes(world: World) -> None:
    async with leaving(world) as session, working(world):
        assert (await session.call_tool("ask")).text == "{'name': 'Ada'} {'name': 'Ada'}"


async def test_answers_that_nobody_asked_for_are_not_kept(world: World) -> None:
    async with leaving(world) as session, working(world) as server:
        id = (await call(session, "ask"))["taskId"]
        (key,) = (await until(session, id, "input_required"))["inputRequests"]
        store = world.store()
        async with store.opened():
            for number in range(3):
                update = {"taskId": id, "inputResponses": {f"unknown {number}": {"x": "x" * 1000}}}
                await session.request_raw("tasks/update", update)
            kept = await store.load(id)
            assert kept is not None
            assert kept.note == {}
        answer = {"action": "accept", "content": {"name": "Ada"}}
        await session.request_raw("tasks/update", {"taskId": id, "inputResponses": {key: answer}})
        assert (await until(session, id, "input_required", without=key))["inputRequests"]
        assert server.statistics().running == 0


async def test_an_answer_that_is_soon_there_is_that_of_the_call(world: World) -> None:
    async with leaving(world) as session, working(world):
        answer = await call(session, "soon")
        assert (answer["resultType"], answer["content"][0]["text"]) == ("complete", "soon done")
        with pytest.raises(trimcp.RemoteError, match="out of order"):
            await session.call_tool("refuse")


async def test_a_call_that_is_cancelled_before_there_was_a_task_leaves_none_at_work(world: World) -> None:
    stopped, began = trio.Event(), trio.Event()

    def with_held() -> trimcp.Server[None]:
        server = make_server()

        @server.tool(task="allowed", task_after=60)
        async def held() -> str:
            began.set()
            try:
                await trio.sleep_forever()
            finally:
                stopped.set()

        return server

    async with leaving(world, with_held()) as session, working(world, with_held()):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.call_tool, "held")
            await began.wait()
            nursery.cancel_scope.cancel()
        await stopped.wait()


async def test_a_task_that_was_cancelled_while_it_waited_never_begins(world: World) -> None:
    async with leaving(world) as session:
        id = (await call(session, "count", to=3))["taskId"]
        await session.request_raw("tasks/cancel", {"taskId": id})
        async with working(world):
            state = await until(session, id)
            assert (state["status"], "trimcp/progress" in state["_meta"]) == ("cancelled", False)


async def test_principals_take_turns_at_a_worker(world: World) -> None:
    order: list[str] = []

    def with_note() -> trimcp.Server[None]:
        server = make_server()

        @server.tool(task="required")
        async def note(whose: str) -> str:
            order.append(whose)
            await trio.lowlevel.checkpoint()
            return whose

        return server

    async with leaving(world, with_note()) as ada, leaving(world, with_note(), "bob") as bob:
        ids = [(await call(ada, "note", whose="ada"))["taskId"] for _ in range(4)]
        last = (await call(bob, "note", whose="bob"))["taskId"]
        async with working(world, with_note(), running=1):
            assert (await until(bob, last))["status"] == "completed"
            for id in ids:
                await until(ada, id)
    assert order == ["ada", "bob", "ada", "ada", "ada"]


async def test_workers_take_no_more_than_they_have_places(world: World) -> None:
    async with leaving(world) as session, working(world, running=2) as one, working(world, running=2) as two:
        ids = [(await call(session, "wait"))["taskId"] for _ in range(5)]
        with trio.fail_after(30):
            while (one.statistics().running, two.statistics().running) != (2, 2):
                await trio.lowlevel.checkpoint()
        await session.request_raw("tasks/cancel", {"taskId": ids[0]})
        assert (await until(session, ids[0]))["status"] == "cancelled"
        with trio.fail_after(30):
            while (await get(session, ids[4])).get("statusMessage") is None:  # which waited for the place
                await trio.lowlevel.checkpoint()
        assert (one.statistics().running, two.statistics().running) == (2, 2)


async def test_a_worker_that_ends_leaves_what_it_has_to_the_next(world: World) -> None:
    saw: list[Any] = []
    half = trio.Event()

    def worker() -> trimcp.Server[None]:
        server = make_server()

        @server.tool(task="required", restart="resume")
        async def steps(ctx: trimcp.Context) -> str:
            saw.append(ctx.task.saved)
            if ctx.task.saved is None:
                await ctx.task.checkpoint(1)
                half.set()
                await trio.sleep_forever()
            return "all steps"

        return server

    async with leaving(world, worker()) as session:
        id = (await call(session, "steps"))["taskId"]
        fresh = (await call(session, "count", to=1))["taskId"]  # which would fail after a restart, once it has begun
        async with working(world, worker(), running=1):
            await half.wait()
        assert (await get(session, id))["status"] == "working"
        async with working(world, worker()):
            assert (await until(session, id))["result"]["content"][0]["text"] == "all steps"
            assert (await until(session, fresh))["status"] == "completed"
    assert saw == [None, 1]


async def test_a_worker_whose_claim_was_lost_gives_the_tasks_back(world: World) -> None:
    async with leaving(world) as session:
        store = world.store()
        claim, lost = store.claim, trio.Event()

        async def losing(runner: str, most: int) -> Any:
            got = await claim(runner, most)
            if got and not lost.is_set():
                lost.set()
                raise OSError("the answer was lost")
            return got

        store.claim = losing  # type: ignore[method-assign]
        server = make_server()
        server.move_tasks(store, lease=1)
        async with server.running():
            id = (await call(session, "count", to=1))["taskId"]
            await lost.wait()
            other = (await call(session, "count", to=2))["taskId"]
            assert (await until(session, other))["status"] == "completed"
            assert (await until(session, id))["status"] == "completed"


async def test_a_worker_whose_store_fails_when_it_begins_a_task_begins_it_later(world: World) -> None:
    async with leaving(world) as session:
        store, server, failed = world.store(), make_server(), trio.Event()
        server.move_tasks(store, lease=1)
        save = store.save

        async def failing(task: Any) -> bool:
            if not failed.is_set():
                failed.set()
                raise OSError("it is away")
            return await save(task)

        async with server.running():
            store.save = failing  # type: ignore[method-assign]
            id = (await call(session, "count", to=1))["taskId"]
            await failed.wait()
            assert (await until(session, id))["status"] == "completed"


async def test_a_worker_begins_no_task_for_which_it_has_no_memory(world: World) -> None:
    begun, some, go = list[int](), trio.Event(), trio.Event()

    def with_large(**options: Any) -> trimcp.Server[None]:
        server: trimcp.Server[None] = trimcp.Server("large", **options)
        server.tasks(poll_interval=0.01, grace=0)

        @server.tool(task="required")
        async def large(text: str) -> int:
            begun.append(len(text))
            some.set()
            await go.wait()
            return len(text)

        return server

    async with leaving(world, with_large()) as session:
        ids = [(await call(session, "large", text="x" * 3_000_000))["taskId"] for _ in range(3)]
        async with working(world, with_large(memory=16 * 1024 * 1024)) as server:
            await some.wait()
            while not server.budget.refused:  # it has looked at the others
                await trio.lowlevel.checkpoint()
            assert len(begun) < 3
            assert server.budget.held <= server.budget.bound
            go.set()
            for id in ids:
                assert (await until(session, id))["status"] == "completed"


async def test_a_store_that_no_other_process_sees_has_no_workers() -> None:
    with pytest.raises(ValueError, match="that other processes see"):
        make_server(workers=True)
    assert trimcp.Server("none").move_tasks(None) is None
