"""Calls that a server carries out as tasks: when they become some, and what a client is told of them."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pytest
import trio

import trimcp
from trimcp.errors import LocalError
from trimcp.principal import Principal
from trimcp.store.tasks import KeptTask, TaskStore
from trimcp.testing import connected, every_revision
from trimcp.watch.picture import take_picture
from trimcp.wire.codes import INVALID_PARAMS, METHOD_NOT_FOUND, MISSING_CAPABILITY, OVERLOADED
from trimcp.wire.lifecycle import SubscriptionFilter
from trimcp.wire.revisions import LATEST
from trimcp.wire.tools import CallToolParams

TASKS = "io.modelcontextprotocol/tasks"
NEEDED: Any = {"requiredCapabilities": {"extensions": {TASKS: {}}}}
FORM = {"type": "object", "properties": {"name": {"type": "string"}}}
ENDED = ("completed", "failed", "cancelled")


def asking_client(**options: Any) -> trimcp.Client:
    client = trimcp.Client("tasks", tasks=True, **options)
    client.elicitation(lambda params: trimcp.ElicitResult("accept", {"name": "Ada"}))
    return client


def make_server(**settings: Any) -> trimcp.Server[None]:
    server: trimcp.Server[None] = trimcp.Server("tasks")
    server.tasks(**{"poll_interval": 0.01, "grace": 0, **settings})

    @server.tool(task="required")
    async def count(to: int, ctx: trimcp.Context) -> str:
        """Count, with a report for each number."""
        for number in range(to):
            await ctx.report_progress(number + 1, to, "counting")
            await ctx.log("error", "nobody hears this")
        assert ctx.task.id is not None
        return f"counted to {to}"

    @server.tool(task="required")
    async def wait(ctx: trimcp.Context) -> str:
        """Wait for ever."""
        await ctx.report_progress(1, 2, "waiting")
        await trio.sleep_forever()

    @server.tool(task="required")
    async def fail() -> str:
        """Fail as a tool does."""
        raise trimcp.ToolError("no luck")

    @server.tool(task="required")
    async def refuse() -> str:
        """Fail as a request does."""
        raise trimcp.ErrorReply(7, "out of order", {"why": "rain"})

    @server.tool(task="required")
    async def ask(ctx: trimcp.Context) -> str:
        """Ask twice."""
        first = await ctx.elicit("First?", FORM)
        second = await ctx.elicit("Second?", FORM)
        return f"{first.content} {second.content}"

    @server.tool(task="allowed", task_after=5)
    async def soon(seconds: float = 0) -> str:
        """Take a while."""
        await trio.sleep(seconds)
        return "soon done"

    @server.tool
    async def plain() -> str:
        """Be no task."""
        return "plain"

    return server


async def call(session: trimcp.ClientSession, name: str, **arguments: Any) -> Any:
    """Return the answer to a call as JSON, whatever it is."""
    return await (await session.session.start_call("tools/call", CallToolParams(name, arguments))).raw()


async def get(session: trimcp.ClientSession, id: str) -> Any:
    return await session.request_raw("tasks/get", {"taskId": id})


async def until(session: trimcp.ClientSession, id: str, *statuses: str, without: str = "") -> Any:
    """Look until a task has one of these statuses, by default a final one, and return what was told of it then."""
    while True:
        state = await get(session, id)
        if state["status"] in (statuses or ENDED) and without not in state.get("inputRequests", ()):
            return state
        await trio.sleep(0.005)


@asynccontextmanager
async def in_memory(server: trimcp.Server[Any], client: trimcp.Client) -> AsyncIterator[trimcp.ClientSession]:
    async with connected(server, client) as session:
        yield session


@asynccontextmanager
async def framed(server: trimcp.Server[Any], client: trimcp.Client) -> AsyncIterator[trimcp.ClientSession]:
    async with connected(server, client, framed=True) as session:
        yield session


@asynccontextmanager
async def over_http(server: trimcp.Server[Any], client: trimcp.Client) -> AsyncIterator[trimcp.ClientSession]:
    async with trio.open_nursery() as nursery:
        (url, *_) = await nursery.start(partial(trimcp.serve_http, server, port=0))
        async with client.connect(url) as session:
            yield session
        nursery.cancel_scope.cancel()


Connect = Callable[[trimcp.Server[Any], trimcp.Client], AbstractAsyncContextManager[trimcp.ClientSession]]
each_way = pytest.mark.parametrize("connect", [in_memory, framed, over_http], ids=["memory", "framed", "http"])


@each_way
async def test_a_call_becomes_a_task_that_is_told_of_until_it_has_its_result(connect: Connect) -> None:
    async with connect(make_server(), asking_client()) as session:
        assert session.server_capabilities.extensions == {TASKS: {}}
        made = await call(session, "count", to=3)
        assert made["resultType"] == "task"
        assert made["status"] == "working"
        assert made.keys().isdisjoint(("result", "error", "inputRequests", "task", "requestState"))
        assert (type(made["ttlMs"]), made["pollIntervalMs"]) == (int, 10)
        done = await until(session, made["taskId"])
        assert (done["resultType"], done["status"]) == ("complete", "completed")
        assert done["result"]["content"] == [{"type": "text", "text": "counted to 3"}]
        assert done["_meta"]["trimcp/progress"] == {"progress": 3, "total": 3, "message": "counting"}
        assert done["createdAt"] == made["createdAt"] <= done["lastUpdatedAt"]
        assert done == await get(session, made["taskId"])  # as often as one likes


@each_way
async def test_what_a_handler_raises_is_a_result_or_an_error(connect: Connect) -> None:
    async with connect(make_server(), asking_client()) as session:
        failed = await until(session, (await call(session, "fail"))["taskId"])
        assert (failed["status"], failed["result"]["isError"]) == ("completed", True)
        refused = await until(session, (await call(session, "refuse"))["taskId"])
        assert (refused["status"], refused["statusMessage"]) == ("failed", "out of order")
        assert refused["error"] == {"code": 7, "message": "out of order", "data": {"why": "rain"}}
        assert "result" not in refused


@each_way
async def test_questions_of_a_handler_wait_in_its_task_and_free_its_slot(connect: Connect) -> None:
    async with connect(make_server(running=1), asking_client()) as session:
        id = (await call(session, "ask"))["taskId"]
        asks = await until(session, id, "input_required")
        (key,) = asks["inputRequests"]
        assert asks["inputRequests"][key]["params"]["message"] == "First?"
        assert (await until(session, (await call(session, "count", to=1))["taskId"]))["status"] == "completed"
        answer = {"action": "accept", "content": {"name": "Ada"}}
        update = {"taskId": id, "inputResponses": {"unknown": answer}}
        assert "taskId" not in await session.request_raw("tasks/update", update)
        assert (await get(session, id))["inputRequests"].keys() == {key}
        await session.request_raw("tasks/update", {"taskId": id, "inputResponses": {key: answer}})
        again = await until(session, id, "input_required", without=key)
        (second,) = again["inputRequests"]
        assert second != key  # a key names one question of a task
        late = {key: {"action": "decline"}, second: answer}
        await session.request_raw("tasks/update", {"taskId": id, "inputResponses": late})
        done = await until(session, id)
        assert done["result"]["content"][0]["text"] == "{'name': 'Ada'} {'name': 'Ada'}"


async def test_some_of_several_answers_leave_the_task_waiting_for_the_others() -> None:
    server = make_server()

    @server.tool(task="required")
    async def both(ctx: trimcp.Context) -> str:
        found = {}

        async def one(name: str) -> None:
            found[name] = (await ctx.elicit(name, FORM)).content

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, "left")
            nursery.start_soon(one, "right")
        return json.dumps(found, sort_keys=True)

    async with connected(server, asking_client()) as session:
        id = (await call(session, "both"))["taskId"]
        asked = (await until(session, id, "input_required"))["inputRequests"]
        names = {question["params"]["message"]: key for key, question in asked.items()}
        for name, others in (("left", {names["right"]}), ("right", set[str]())):
            answers: dict[str, Any] = (
                {names["left"]: {"action": "decline"}} if name == "right" else {}
            )  # which it has by then
            answers[names[name]] = {"action": "accept", "content": {"name": name}}
            await session.request_raw("tasks/update", {"taskId": id, "inputResponses": answers})
            state = await get(session, id)
            assert set(state.get("inputRequests", {})) == others
        done = await until(session, id)
        assert json.loads(done["result"]["content"][0]["text"]) == {
            "left": {"name": "left"},
            "right": {"name": "right"},
        }


async def test_what_asks_before_the_handler_is_answered_before_there_is_a_task() -> None:
    server = make_server()
    runs = []

    @server.tool(task="required", confirm=True)
    async def greet(name: Annotated[str, trimcp.Elicit("Name?")]) -> str:
        runs.append(name)
        return f"Hello {name}"

    client = trimcp.Client("tasks", tasks=True)
    asked: list[str] = []

    @client.elicitation
    def answer(params: Any) -> trimcp.ElicitResult:
        asked.append(params.message)
        content: dict[str, Any] = {"value": "Ada"} if params.message == "Name?" else {"confirm": True}
        names = list(params.requested_schema.properties)
        return trimcp.ElicitResult("accept", {names[0]: next(iter(content.values()))})

    async with connected(server, client) as session:
        first = await call(session, "greet")
        assert first["resultType"] == "input_required"
        assert "taskId" not in first
        task = await session.start_task("greet")
        assert task.id is not None
        assert len(asked) == 2
        assert (await task.result()).text == "Hello Ada"
        assert (len(asked), runs) == (2, ["Ada"])


@each_way
async def test_a_task_is_cancelled_and_its_handler_with_it(connect: Connect) -> None:
    server = make_server()
    stopped = trio.Event()

    @server.tool(task="required")
    async def held(ctx: trimcp.Context) -> str:
        try:
            await trio.sleep_forever()
        finally:
            assert ctx.cancel_reason is trimcp.CancelReason.PEER
            stopped.set()

    async with connect(server, asking_client()) as session:
        id = (await call(session, "held"))["taskId"]
        assert (await get(session, id))["status"] == "working"
        assert (await session.request_raw("tasks/cancel", {"taskId": id})).keys() == {"resultType", "_meta"}
        with trio.fail_after(5):
            await stopped.wait()
        assert (await until(session, id))["status"] == "cancelled"
        await session.request_raw("tasks/cancel", {"taskId": id})  # again, and of one that has ended
        waiting = (await call(session, "ask"))["taskId"]
        await until(session, waiting, "input_required")
        await session.request_raw("tasks/cancel", {"taskId": waiting})
        assert (await until(session, waiting))["status"] == "cancelled"


async def test_a_call_that_is_soon_done_is_answered_without_a_task(autojump_clock: trio.testing.MockClock) -> None:
    async with connected(make_server(), asking_client()) as session:
        assert (await call(session, "soon"))["content"][0]["text"] == "soon done"
        assert (await call(session, "soon", seconds=4))["resultType"] == "complete"
        made = await call(session, "soon", seconds=6)
        assert made["resultType"] == "task"
        await trio.sleep(2)
        assert (await get(session, made["taskId"]))["status"] == "completed"


async def test_a_call_that_is_cancelled_before_it_is_a_task_leaves_none(autojump_clock: trio.testing.MockClock) -> None:
    server = make_server()
    async with connected(server, asking_client()) as session:
        with trio.move_on_after(1):
            await session.call_tool("soon", {"seconds": 60})
        await trio.testing.wait_all_tasks_blocked()
        assert server.statistics().running == 0
        (runs,) = server._tasks.runs.values()  # type: ignore[union-attr]
        assert not runs.tasks
        assert server.budget.held == 0


async def test_progress_before_there_is_a_task_is_that_of_the_call() -> None:
    server = make_server()
    reported = trio.Event()

    @server.tool(task="allowed", task_after=60)
    async def steps(ctx: trimcp.Context) -> str:
        await ctx.report_progress(1, 2, "one")
        await reported.wait()
        return "done"

    async with connected(server, asking_client()) as session, session.calling("steps") as running:
        assert (await running.progress.receive()).message == "one"
        reported.set()
        assert (await running.result()).text == "done"


@every_revision
async def test_a_client_that_did_not_declare_tasks_gets_none(revision: trimcp.Revision) -> None:
    async with connected(make_server(), revision=revision) as session:
        assert (await session.call_tool("soon")).text == "soon done"
        if not revision.tasks:
            result = await session.call_tool("count", {"to": 1})
            assert result.is_error
            assert "as a task only" in result.text
            return
        with pytest.raises(trimcp.RemoteError, match="as a task only") as info:
            await session.call_tool("count", {"to": 1})
        assert (info.value.code, info.value.data) == (MISSING_CAPABILITY, NEEDED)
        for verb in ("get", "update", "cancel"):
            with pytest.raises(trimcp.RemoteError) as info:
                await session.request_raw(f"tasks/{verb}", {"taskId": "any"})
            assert (info.value.code, info.value.data) == (MISSING_CAPABILITY, NEEDED)
        wanted = SubscriptionFilter(task_ids=["any"])
        with pytest.raises(trimcp.RemoteError) as info:
            async with session.subscriptions.listening(wanted):
                pass
        assert (info.value.code, info.value.data) == (MISSING_CAPABILITY, NEEDED)


@every_revision
async def test_declaring_tasks_has_no_effect_where_the_revision_has_none(revision: trimcp.Revision) -> None:
    async with connected(make_server(), asking_client(), revision=revision) as session:
        declared = session.server_capabilities.extensions
        assert declared == ({TASKS: {}} if revision.name >= "2025-06-18" else None)
        task = await session.start_task("soon", {"seconds": 0})
        assert (await task.result()).text == "soon done"
        if not revision.tasks:
            assert "as a task only" in (await session.call_tool("count", {"to": 1})).text
            with pytest.raises(trimcp.McpError) as info:
                await session.request_raw("tasks/update", {"taskId": "any", "inputResponses": {}})
            assert getattr(info.value, "code", None) == METHOD_NOT_FOUND


async def test_a_server_without_tasks_declares_and_serves_nothing_of_them() -> None:
    server: trimcp.Server[None] = trimcp.Server("none")

    @server.tool(task="never")
    async def plain() -> str:
        return "plain"

    async with connected(server, asking_client()) as session:
        assert session.server_capabilities.extensions is None
        assert (await session.call_tool("plain")).text == "plain"
        with pytest.raises(trimcp.RemoteError) as info:
            await get(session, "any")
        assert info.value.code == METHOD_NOT_FOUND


@each_way
async def test_what_is_wrong_with_a_request_about_a_task(connect: Connect) -> None:
    async with connect(make_server(), asking_client()) as session:
        for verb in ("get", "update", "cancel"):
            for params in ({"taskId": "unknown", "inputResponses": {}}, {}):
                with pytest.raises(trimcp.RemoteError) as info:
                    await session.request_raw(f"tasks/{verb}", params)
                assert info.value.code == INVALID_PARAMS
        id = (await call(session, "wait"))["taskId"]
        with pytest.raises(trimcp.RemoteError, match="must be an object"):
            await session.request_raw("tasks/update", {"taskId": id, "inputResponses": []})
        for name in ("tasks/result", "tasks/list"):
            with pytest.raises(trimcp.RemoteError) as info:
                await session.request_raw(name, {"taskId": id})
            assert info.value.code == METHOD_NOT_FOUND
        wrong = await call(session, "count", to="x")
        assert wrong["isError"]  # at once: it could not be begun


async def test_a_task_is_seen_by_its_principal_alone() -> None:
    server = make_server()
    async with server.running(), connected(server, asking_client(), principal=Principal("ada")) as session:
        made = await call(session, "wait")
        assert (await get(session, made["taskId"]))["status"] == "working"
        for other in (Principal("eve"), None):
            async with connected(server, asking_client(), principal=other) as stranger:
                for verb in ("get", "update", "cancel"):
                    with pytest.raises(trimcp.RemoteError, match="no such task"):
                        params = {"taskId": made["taskId"], "inputResponses": {}}
                        await stranger.request_raw(f"tasks/{verb}", params)
                wanted = SubscriptionFilter(task_ids=[made["taskId"]])
                async with stranger.subscriptions.listening(wanted) as changes:
                    assert changes.acknowledged.task_ids is None
    assert len(made["taskId"]) >= 32


@each_way
async def test_changes_of_a_task_are_notified_to_who_listens(connect: Connect) -> None:
    server = make_server()
    go = trio.Event()

    @server.tool(task="required")
    async def steps(ctx: trimcp.Context) -> str:
        await go.wait()
        await ctx.report_progress(1, 2, "half")
        return "whole"

    async with connect(server, asking_client()) as session:
        id = (await call(session, "steps"))["taskId"]
        wanted = SubscriptionFilter(task_ids=[id, "unknown"])
        async with session.subscriptions.listening(wanted) as changes:
            assert changes.acknowledged.task_ids == [id]
            go.set()
            while changes.tasks.get(id, {}).get("status") != "completed":
                await changes.receive()
            assert changes.tasks[id]["result"]["content"][0]["text"] == "whole"
            assert "resultType" not in changes.tasks[id]


async def test_bounds_of_an_owner_and_of_all() -> None:
    server = make_server(most=2, running=1)
    async with connected(server, asking_client()) as session:
        first = (await call(session, "wait"))["taskId"]
        second = (await call(session, "count", to=1))["taskId"]
        with pytest.raises(trimcp.RemoteError, match="too many tasks") as info:
            await call(session, "count", to=1)
        assert info.value.code == OVERLOADED
        await until(session, first, "working")
        assert [one.kind for one in take_picture(server).beside] == []  # it waits for its turn, as a request would
        await session.request_raw("tasks/cancel", {"taskId": first})
        assert (await until(session, second))["status"] == "completed"


async def test_results_of_tasks_count_in_the_budget_and_give_way() -> None:
    server: trimcp.Server[None] = trimcp.Server("large", memory=16 * 1024 * 1024)
    server.tasks(poll_interval=0.01)

    @server.tool(task="required")
    async def large() -> str:
        return "x" * 4_000_000

    async with connected(server, asking_client()) as session:
        first = await until(session, (await call(session, "large"))["taskId"])
        assert first["status"] == "completed"
        assert server.budget.held >= 4_000_000
        state = first
        for _ in range(4):
            state = await until(session, (await call(session, "large"))["taskId"])
        assert (state["status"], state["error"]["message"].startswith("the call was carried out")) == ("failed", True)
        assert server.budget.held <= server.budget.bound
    assert server.budget.held == 0


async def test_a_task_that_takes_too_long_fails_and_a_result_is_forgotten() -> None:
    server = make_server(longest=0.05, ttl=0.2, lease=0.03)
    async with connected(server, asking_client()) as session:
        id = (await call(session, "wait"))["taskId"]
        failed = await until(session, id)
        assert (failed["status"], "longer than 0.05 seconds" in failed["statusMessage"]) == ("failed", True)
        with pytest.raises(trimcp.RemoteError, match="no such task"), trio.fail_after(10):
            while True:
                await get(session, id)
                await trio.sleep(0.02)


@pytest.mark.parametrize("kept", ["memory", "file"])
@pytest.mark.parametrize("seconds", [1e8, -1e8])
async def test_a_clock_that_is_set_ends_no_task(
    kept: str, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, day = TaskStore() if kept == "memory" else trimcp.SqliteTasks(tmp_path / "tasks.db"), time.time
    async with connected(make_server(store=store, ttl=60), asking_client()) as session:
        id = (await call(session, "wait"))["taskId"]
        monkeypatch.setattr(time, "time", lambda: day() + seconds)
        await store.forget((), time.time())  # as happens now and then
        assert (await get(session, id))["status"] == "working"
        await session.request_raw("tasks/cancel", {"taskId": id})
        ended = await until(session, id)
        assert (ended["status"], ended["ttlMs"] >= 60_000) == ("cancelled", True)
        assert ended["lastUpdatedAt"] >= ended["createdAt"]
        await store.forget((), time.time())
        assert await get(session, id) == ended
        monkeypatch.setattr(time, "time", lambda: day() + seconds + 61)
        with pytest.raises(trimcp.RemoteError, match="no such task"):
            await get(session, id)


@pytest.mark.parametrize("seconds", [1e8, -1e8])
async def test_what_is_left_of_its_time_after_a_restart_is_no_more_than_all_of_it(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, day = tmp_path / "tasks.db", time.time

    def serving(longest: float) -> trimcp.Server[None]:
        server = make_server(store=trimcp.SqliteTasks(path), grace=0, longest=longest)

        @server.tool(task="required", restart="again")
        async def again() -> None:
            await trio.sleep_forever()

        return server

    async with connected(serving(60), asking_client()) as session:
        id = (await call(session, "again"))["taskId"]
    monkeypatch.setattr(time, "time", lambda: day() + seconds)
    async with connected(serving(0.05), asking_client()) as session:
        ended = await until(session, id)
        assert (ended["status"], "longer than 0.05 seconds" in ended["statusMessage"]) == ("failed", True)


async def test_tasks_at_work_are_requests_in_the_picture_and_others_are_beside() -> None:
    server = make_server()
    async with connected(server, asking_client(), principal=Principal("ada")) as session:
        working = (await call(session, "wait"))["taskId"]
        while (await get(session, working)).get("statusMessage") is None:
            pass
        asking = (await call(session, "ask"))["taskId"]
        await until(session, asking, "input_required")
        picture = take_picture(server)
        shown = [each for each in picture.sessions if each.transport == "task"]
        assert [(each.principal, [one.target for one in each.requests]) for each in shown] == [("ada", ["wait"])]
        request = shown[0].requests[0]
        assert (request.progress, request.total, request.message) == (1, 2, "waiting")
        assert [(one.kind, one.state) for one in picture.beside] == [("task", "ask: input_required")]
        assert asking not in picture.beside[0].name
        with server.observe() as observation:
            observation.cancel(request.key, "enough")
        assert (await until(session, working))["status"] == "cancelled"


async def test_no_task_outlives_the_run_of_its_server(autojump_clock: trio.testing.MockClock) -> None:
    server = make_server(grace=5)
    ended: list[str] = []

    @server.tool(task="required")
    async def held(ctx: trimcp.Context) -> str:
        try:
            await trio.sleep_forever()
        finally:
            ended.append(str(ctx.cancel_reason))

    @server.tool(task="required")
    async def short() -> str:
        await trio.sleep(3)
        ended.append("short")
        return "short"

    async with connected(server, asking_client()) as session:
        held_id = (await call(session, "held"))["taskId"]
        short_id = (await call(session, "short"))["taskId"]
    assert ended == ["short", str(trimcp.CancelReason.DRAIN)]
    async with connected(server, asking_client()) as session:  # the memory of the process still has them
        assert (await get(session, short_id))["status"] == "completed"
        failed = await until(session, held_id)
        assert (failed["status"], failed["error"]["data"]["started"]) == ("failed", True)


async def test_a_checkpoint_is_what_the_handler_begins_again_with() -> None:
    server = make_server(grace=0)
    saw: list[Any] = []
    again = trio.Event()

    @server.tool(task="required", restart="resume")
    async def resumed(ctx: trimcp.Context) -> str:
        saw.append(ctx.task.saved)
        if ctx.task.saved is None:
            await ctx.task.checkpoint({"step": 1})
            again.set()
            await trio.sleep_forever()
        return f"from step {ctx.task.saved['step']}"

    @server.tool(task="required", restart="again")
    async def anew(ctx: trimcp.Context) -> str:
        if not saw:
            await trio.sleep_forever()
        return "anew"

    async with connected(server, asking_client()) as session:
        other = (await call(session, "anew"))["taskId"]
        id = (await call(session, "resumed"))["taskId"]
        await again.wait()
    async with connected(server, asking_client()) as session:
        assert (await until(session, id))["result"]["content"][0]["text"] == "from step 1"
        assert (await until(session, other))["result"]["content"][0]["text"] == "anew"
    assert saw == [None, {"step": 1}]


async def test_a_checkpoint_is_checked_also_where_there_is_no_task() -> None:
    server = make_server()

    @server.tool(task="allowed")
    async def saving(value: Any, ctx: trimcp.Context) -> str:
        await ctx.task.checkpoint({1, 2} if value is None else value)
        return f"{ctx.task.saved}"

    @server.tool(task="allowed")
    def threaded(ctx: trimcp.ThreadContext) -> str:
        ctx.task.checkpoint(1)
        return f"{ctx.task.id is None} {ctx.task.saved}"

    async with connected(server) as session:
        assert (await session.call_tool("saving", {"value": 1})).text == "None"
        with pytest.raises(trimcp.RemoteError, match="internal error"):
            await session.call_tool("saving", {"value": None})
        assert (await session.call_tool("threaded")).text == "True None"
    async with connected(server, asking_client()) as session:
        assert (await session.call_tool("threaded")).text == "False 1"
        with pytest.raises(trimcp.RemoteError):
            await session.call_tool("saving", {"value": "x" * 1_100_000})


def test_options_that_are_none() -> None:
    server: trimcp.Server[None] = trimcp.Server("options")

    async def work() -> None: ...

    for options in (
        {"task": "sometimes"},
        {"task": "required", "task_after": 1},
        {"task_after": 1},
        {"task": "allowed", "restart": "maybe"},
        {"task": "allowed", "task_after": -1},
    ):
        with pytest.raises((TypeError, ValueError)):
            server.add_tool(work, **options)
    for settings in ({"store": 1}, {"ttl": 0}, {"running": 1.5}, {"lease": -1}, {"workers": True}):
        with pytest.raises((TypeError, ValueError)):
            server.tasks(**settings)
    with pytest.raises(LocalError, match="named by a URL"):
        server.tasks("tasks.db")


async def test_tasks_begin_before_the_server_does(caplog: pytest.LogCaptureFixture) -> None:
    server: trimcp.Server[None] = trimcp.Server("late")

    async def work() -> None: ...

    async with server.running():
        with pytest.raises(LocalError, match="before"):
            server.add_tool(work, task="required")
        with pytest.raises(LocalError, match="while the server runs"):
            server.tasks()
    caplog.set_level(logging.INFO, "trimcp.server")
    server.add_tool(work, task="required")
    assert "runs as a task only" in caplog.text


@pytest.mark.parametrize("revision", trimcp.REVISIONS[1:-1], ids=str)
async def test_over_http_no_earlier_revision_makes_tasks(revision: trimcp.Revision) -> None:
    async with trio.open_nursery() as nursery:
        (url, *_) = await nursery.start(partial(trimcp.serve_http, make_server(), port=0))
        async with asking_client().connect(url, revision=revision) as session:
            assert (await session.start_task("soon", {"seconds": 0})).id is None
            assert "as a task only" in (await session.call_tool("count", {"to": 1})).text
        nursery.cancel_scope.cancel()


async def test_a_server_that_is_a_child_process_has_tasks_too(tmp_path: Path) -> None:
    program = tmp_path / "child.py"
    program.write_text(
        "import trimcp, trio\n"
        "server = trimcp.Server('child')\n"
        "server.tasks(poll_interval=0.01, grace=0)\n"
        "@server.tool(task='required')\n"
        "async def count(to: int, ctx: trimcp.Context) -> str:\n"
        "    for number in range(to):\n"
        "        await ctx.report_progress(number + 1, to)\n"
        "        await trio.sleep(0.01)\n"
        "    return f'counted to {to}'\n"
        "trimcp.run_stdio(server)\n"
    )
    async with asking_client().connect(trimcp.stdio(sys.executable, str(program))) as session:
        async with session.calling("count", {"to": 5}) as running:
            told = [progress.progress async for progress in running.progress]
            assert (await running.result()).text == "counted to 5"
        assert told == sorted(told)
        assert told[-1] == 5


async def test_middleware_filters_and_the_audit_see_the_work_of_a_task_once() -> None:
    records: list[Any] = []
    server: trimcp.Server[None] = trimcp.Server("seen", audit=trimcp.guard.Audit(write=records.append))
    server.tasks(poll_interval=0.01, grace=0)
    seen: list[str] = []

    @server.tool(task="required")
    async def work() -> str:
        return "work"

    @server.middleware
    async def see(ctx: Any, params: Any, call_next: Any) -> Any:
        if ctx.method == "tools/call":
            seen.append("middleware")
        return await call_next(ctx, params)

    @server.filter
    def pass_on(ctx: Any, params: Any, result: Any) -> Any:
        seen.append("filter")
        return result

    async with connected(server, asking_client()) as session:
        assert (await session.call_tool("work")).text == "work"
    assert seen == ["middleware", "filter"]
    found = [(each["target"], each["transport"], each["outcome"]) for each in records]
    assert sorted(found) == [("work", "stream", "ok"), ("work", "task", "ok")]
    assert len(next(each["task"] for each in records if "task" in each)) == 8


async def test_the_header_that_names_a_task_is_compared_if_it_is_there() -> None:
    import httpx2

    server = make_server()
    async with trio.open_nursery() as nursery:
        (url, *_) = await nursery.start(partial(trimcp.serve_http, server, port=0))
        async with asking_client().connect(url) as session, httpx2.AsyncClient() as web:
            id = (await call(session, "wait"))["taskId"]
            meta = {
                "io.modelcontextprotocol/protocolVersion": LATEST.name,
                "io.modelcontextprotocol/clientCapabilities": {"extensions": {TASKS: {}}},
            }
            body = {"jsonrpc": "2.0", "id": 1, "method": "tasks/get", "params": {"taskId": id, "_meta": meta}}
            headers = {
                "accept": "application/json, text/event-stream",
                "mcp-protocol-version": LATEST.name,
                "mcp-method": "tasks/get",
            }
            for more, status in (({}, 200), ({"mcp-name": id}, 200), ({"mcp-name": "other"}, 400)):
                reply = await web.post(url, json=body, headers={**headers, **more})
                assert reply.status_code == status
        nursery.cancel_scope.cancel()


async def test_tasks_in_a_file_are_found_by_the_next_process(tmp_path: Path) -> None:
    path, saw = tmp_path / "tasks.db", list[Any]()
    there = [trio.Event() for _ in range(3)]  # set once the handler has come so far

    def serving() -> trimcp.Server[None]:
        server = make_server(store=trimcp.SqliteTasks(path), grace=0)

        @server.tool(task="required", restart="resume")
        async def steps(ctx: trimcp.Context) -> str:
            saw.append(ctx.task.saved)
            for step in range(ctx.task.saved or 0, 3):
                await ctx.task.checkpoint(step + 1)
                there[step].set()
                if step + 1 == len(saw):
                    await trio.sleep_forever()
            return "all steps"

        return server

    answer = {"action": "accept", "content": {"name": "Ada"}}
    async with connected(serving(), asking_client()) as session:
        done = (await call(session, "count", to=2))["taskId"]
        before = await until(session, done)
        asking = (await call(session, "ask"))["taskId"]
        asked = await until(session, asking, "input_required")
        lost = (await call(session, "wait"))["taskId"]
        resumed = (await call(session, "steps"))["taskId"]
        await there[0].wait()
    async with connected(serving(), asking_client()) as session:
        await there[1].wait()
        assert await get(session, done) == before
        assert (await get(session, asking))["inputRequests"] == asked["inputRequests"]
        assert (await until(session, lost))["status"] == "failed"
    async with connected(serving(), asking_client()) as session:
        await there[2].wait()
    async with connected(serving(), asking_client()) as session:
        assert (await until(session, resumed))["result"]["content"][0]["text"] == "all steps"
        for count in (1, 2):
            state = await until(session, asking, "input_required")
            await session.request_raw(
                "tasks/update", {"taskId": asking, "inputResponses": dict.fromkeys(state["inputRequests"], answer)}
            )
            while (state := await get(session, asking))["status"] == "working":
                pass
            assert state["status"] == ("input_required" if count == 1 else "completed")
    assert saw == [None, 1, 2, 3]


async def test_a_key_that_a_handler_uses_for_another_question_is_told_under_another_name() -> None:
    server = make_server()
    runs: list[str] = []

    @server.tool(task="required")
    async def changing(ctx: trimcp.Context) -> str:
        runs.append("First?" if not runs else "Second?")
        return str((await ctx.elicit(runs[-1], FORM, key="name")).content)

    async with connected(server, asking_client()) as session:
        id = (await call(session, "changing"))["taskId"]
        asked = {}
        for message in ("First?", "Second?"):
            ((key, question),) = (await until(session, id, "input_required"))["inputRequests"].items()
            asked[key] = question["params"]["message"]
            answer = {"action": "accept", "content": {"name": message}}
            await session.request_raw("tasks/update", {"taskId": id, "inputResponses": {key: answer}})
        assert (await until(session, id))["result"]["content"][0]["text"] == "{'name': 'Second?'}"
    assert list(asked.values()) == ["First?", "Second?"]


async def test_an_end_is_told_once_it_is_kept(autojump_clock: trio.testing.MockClock) -> None:
    class SlowStore(TaskStore):
        async def save(self, task: KeptTask) -> bool:
            await trio.sleep(10)
            return await super().save(task)

    async with connected(make_server(store=SlowStore()), asking_client()) as session:
        id = (await call(session, "count", to=1))["taskId"]
        began = trio.current_time()
        assert (await until(session, id))["status"] == "completed"
        assert trio.current_time() - began >= 10


async def test_who_has_lost_a_task_to_another_process_stops(autojump_clock: trio.testing.MockClock) -> None:
    store, stopped, go = TaskStore(), trio.Event(), trio.Event()
    server = make_server(store=store)

    @server.tool(task="required", restart="resume")
    async def steps(ctx: trimcp.Context, more: bool) -> str:
        await ctx.task.checkpoint(1)
        await go.wait()
        try:
            if more:
                await ctx.task.checkpoint(2)
        except trio.Cancelled:
            stopped.set()
            raise
        return "too late"

    async with connected(server, asking_client()) as session:
        ids = [(await call(session, "steps", more=more))["taskId"] for more in (True, False)]
        await trio.testing.wait_all_tasks_blocked()
        store._leases.clear()
        await store.renew("another", 60)
        taken = await store.claim("another", 9)
        assert [task.checkpoint for task in taken] == [b"1", b"1"]
        go.set()
        with trio.fail_after(1):
            await stopped.wait()
        await trio.testing.wait_all_tasks_blocked()
        for id, task in zip(ids, taken, strict=True):
            assert (await get(session, id))["status"] == "working"
            assert (task.runner, task.checkpoint) == ("another", b"1")


async def test_another_process_passes_on_what_it_is_told(autojump_clock: trio.testing.MockClock) -> None:
    store = TaskStore()
    async with (
        connected(make_server(store=store, poll_interval=1), asking_client()) as one,
        connected(make_server(store=store, poll_interval=1), asking_client()) as other,
    ):
        waits = (await call(one, "wait"))["taskId"]
        asks = (await call(one, "ask"))["taskId"]
        (key,) = (await until(other, asks, "input_required"))["inputRequests"]
        answer = {"action": "accept", "content": {"name": "Ada"}}
        await other.request_raw("tasks/update", {"taskId": asks, "inputResponses": {key: answer}})
        await other.request_raw("tasks/cancel", {"taskId": waits})
        assert (await until(other, waits))["status"] == "cancelled"
        second = await until(one, asks, "input_required", without=key)
        assert len(second["inputRequests"]) == 1


@pytest.mark.parametrize("orderly", [False, True])
async def test_a_task_whose_processes_always_crash_fails(orderly: bool, autojump_clock: trio.testing.MockClock) -> None:
    store, saw, id = TaskStore(), list[Any](), ""
    for _ in range(5):
        server = make_server(store=store)

        @server.tool(task="required", restart="again")
        async def fatal(ctx: trimcp.Context) -> str:
            saw.append(ctx.task.saved)
            await ctx.task.checkpoint("kept by nobody")
            await trio.sleep_forever()

        with trio.CancelScope() as process:
            async with connected(server, asking_client()) as session:
                if not saw:
                    id = (await call(session, "fatal"))["taskId"]
                await trio.testing.wait_all_tasks_blocked()
                if not orderly:
                    process.cancel()
                    await trio.sleep_forever()
        store._leases.clear()  # as it is some time after a crash
    async with connected(make_server(store=store), asking_client()) as session:
        state = await get(session, id)
    if orderly:
        assert "unknown tool" in state["statusMessage"]  # which this server has not; it was begun, then
    else:
        assert state["statusMessage"] == "5 processes have ended while they ran this task"
    assert (state["status"], saw) == ("failed", [None] * 5)


async def test_a_task_that_had_not_begun_begins_after_a_restart(autojump_clock: trio.testing.MockClock) -> None:
    store = TaskStore()
    async with connected(make_server(store=store, running=1), asking_client()) as session:
        begun = (await call(session, "wait"))["taskId"]
        waiting = (await call(session, "count", to=1))["taskId"]
        await trio.testing.wait_all_tasks_blocked()
    async with connected(make_server(store=store), asking_client()) as session:
        assert (await until(session, begun))["status"] == "failed"
        assert (await until(session, waiting))["status"] == "completed"


async def test_a_checkpoint_waits_for_a_store_that_is_away(autojump_clock: trio.testing.MockClock) -> None:
    class Away(TaskStore):
        since = math.inf

        async def save(self, task: KeptTask) -> bool:
            if self.since <= trio.current_time() < self.since + 100:
                raise OSError("it is away")
            return await super().save(task)

    store, begun = Away(), list[Any]()
    server = make_server(store=store, poll_interval=1)

    @server.tool(task="required", restart="fail")
    async def steps(ctx: trimcp.Context) -> str:
        begun.append(ctx.task.saved)
        for step in range(3):
            await ctx.task.checkpoint(step)
            store.since = trio.current_time() + 1
            await trio.sleep(2)
        return "all steps"

    async with connected(server, asking_client()) as session:
        began, id = trio.current_time(), (await call(session, "steps"))["taskId"]
        assert (await session.task(id, tool="steps").result()).text == "all steps"
        assert begun == [None]
        assert trio.current_time() - began >= 200


async def test_a_store_that_fails_ends_no_server(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(TaskStore):
        """Fails where it is told to, and says where it has."""

        broken: frozenset[str] = frozenset()

        def __init__(self) -> None:
            super().__init__()
            self.failed = {name: trio.Event() for name in ("create", "save", "forget", "renew")}

        def work(self, name: str) -> None:
            if name in self.broken:
                self.failed[name].set()
                raise OSError("the disk is full")

        async def create(self, task: KeptTask) -> None:
            self.work("create")
            await super().create(task)

        async def save(self, task: KeptTask) -> bool:
            self.work("save")
            return await super().save(task)

        async def forget(self, ids: Collection[str], now: float) -> None:
            self.work("forget")
            await super().forget(ids, now)

        async def renew(self, runner: str, lease: float) -> Any:
            self.work("renew")
            return await super().renew(runner, lease)

    store = Failing()
    async with connected(make_server(store=store, lease=0.03), asking_client()) as session:
        store.broken = frozenset({"create", "forget"})
        with pytest.raises(trimcp.RemoteError, match="internal error"):
            await call(session, "count", to=1)
        await store.failed["forget"].wait()
        store.broken = frozenset({"save", "renew"})
        id = (await call(session, "count", to=1))["taskId"]
        with trio.fail_after(10):
            for event in store.failed.values():
                await event.wait()
        store.broken = frozenset()
        assert (await session.call_tool("plain")).text == "plain"
        assert (await until(session, id))["status"] == "completed"  # its result was kept as soon as it could be
        assert (await session.call_tool("count", {"to": 2})).text == "counted to 2"
    said = {record.message.partition("\n")[0] for record in caplog.records if record.name == "trimcp.server"}
    assert said == {
        "a task could not be forgotten",
        "a task could not be kept, which is tried again",
        "the leases of tasks could not be renewed",
    }
