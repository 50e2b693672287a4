"""What a client does with a call that was answered with a task, also by servers that are others or err."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock

import trimcp
from trimcp.client.tasks import ClientTask
from trimcp.errors import InvalidReply, LocalError
from trimcp.protocol.connection import Encoded
from trimcp.testing import connected
from trimcp.wire.codes import CANCELLED_BY_OPERATOR, OVERLOADED

TASKS = "io.modelcontextprotocol/tasks"
SEED: dict[str, Any] = {"taskId": "t1", "status": "working", "createdAt": "a", "lastUpdatedAt": "b", "ttlMs": None}
TEXT = {"content": [{"type": "text", "text": "done"}]}


class Foreign:
    """A server whose tasks are a script: each look gives the next state, and the last one again and again."""

    def __init__(self, *states: dict[str, Any], seed: dict[str, Any] | None = None) -> None:
        self.states = [{**SEED, **state} for state in states]
        self.asked: list[tuple[str, Any]] = []
        self.server: trimcp.Server[None] = trimcp.Server("foreign", extensions={TASKS: {}})
        answer = {"resultType": "task", **SEED, **(seed or {})}

        @self.server.tool
        async def work() -> dict[str, int]:
            return {}

        @self.server.middleware
        async def task_instead(ctx: Any, params: Any, call_next: Any) -> Any:
            if ctx.method == "tools/call":
                return Encoded(json.dumps(answer).encode())
            return await call_next(ctx, params)

        self.server.foreign["tasks/get"] = self.look
        self.server.foreign["tasks/update"] = self.take("tasks/update")
        self.server.foreign["tasks/cancel"] = self.take("tasks/cancel")

    async def look(self, ctx: Any, params: Any) -> Any:
        self.asked.append(("tasks/get", params["taskId"]))
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if "raises" in state:
            raise state["raises"]
        return dict(state)

    def take(self, name: str) -> Callable[[Any, Any], Any]:
        async def take(ctx: Any, params: Any) -> Any:
            self.asked.append((name, params.get("inputResponses")))
            return {}

        return take

    def said(self, name: str) -> list[Any]:
        return [value for asked, value in self.asked if asked == name]


@asynccontextmanager
async def session_with(foreign: Foreign, client: trimcp.Client | None = None) -> AsyncIterator[trimcp.ClientSession]:
    async with connected(foreign.server, client or trimcp.Client("tasks", tasks=True)) as session:
        yield session


async def test_a_server_without_notifications_is_looked_at_as_often_as_it_wants(autojump_clock: MockClock) -> None:
    foreign = Foreign(*[{"pollIntervalMs": 2_000}] * 4, {"status": "completed", "result": TEXT})
    async with session_with(foreign) as session:
        began = trio.current_time()
        assert (await session.call_tool("work")).text == "done"
        assert 6 < trio.current_time() - began < 20
    assert 4 <= len(foreign.said("tasks/get")) <= 6
    assert foreign.said("tasks/cancel") == []


async def test_a_server_that_does_not_notify_is_asked_to_once(autojump_clock: MockClock) -> None:
    foreign = Foreign(*[{"pollIntervalMs": 2_000}] * 4, {"status": "completed", "result": TEXT})
    asked, listening = list[str](), list[int]()

    @foreign.server.middleware
    async def count(ctx: Any, params: Any, call_next: Any) -> Any:
        asked.append(ctx.method)
        listening.append(asked.count("subscriptions/listen") - asked.count("listened"))
        try:
            return await call_next(ctx, params)
        finally:
            if ctx.method == "subscriptions/listen":
                asked.append("listened")

    async with session_with(foreign) as session:
        assert (await session.call_tool("work")).text == "done"
    assert (asked.count("tasks/get"), asked.count("subscriptions/listen")) == (5, 1)
    assert listening[-1] == 0  # the subscription did not stay open beside the looks


async def test_its_messages_are_progress(autojump_clock: MockClock) -> None:
    states: list[dict[str, Any]] = [
        {"statusMessage": "one"},
        {"statusMessage": "one"},
        {"statusMessage": "two"},
        {"status": "completed", "result": TEXT},
    ]
    async with session_with(Foreign(*states)) as session, session.calling("work") as call:
        told = [progress.message async for progress in call.progress]
        assert (await call.result()).text == "done"
    assert told == ["one", "two"]


async def test_its_questions_are_answered_once(autojump_clock: MockClock) -> None:
    question = {
        "method": "elicitation/create",
        "params": {"message": "?", "requestedSchema": {"type": "object", "properties": {}}},
    }
    asks = {"status": "input_required", "inputRequests": {"q": question}}
    foreign = Foreign(asks, asks, asks, {"status": "completed", "result": TEXT})
    client = trimcp.Client("tasks", tasks=True)
    asked = []

    @client.elicitation
    def answer(params: Any) -> trimcp.ElicitResult:
        asked.append(params.message)
        return trimcp.ElicitResult("accept", {})

    async with session_with(foreign, client) as session:
        assert (await session.call_tool("work")).text == "done"
    assert asked == ["?"]
    assert foreign.said("tasks/update") == [{"q": {"action": "accept", "content": {}}}]


async def test_a_question_that_cannot_be_answered_cancels_the_task(autojump_clock: MockClock) -> None:
    question = {"method": "roots/list", "params": {}}
    foreign = Foreign({"status": "input_required", "inputRequests": {"q": question}})
    async with session_with(foreign) as session:
        with pytest.raises(LocalError, match="no handler"):
            await session.call_tool("work")
        await trio.testing.wait_all_tasks_blocked()
        assert foreign.said("tasks/cancel") == [None]
        foreign.states = [{**SEED, "status": "input_required", "inputRequests": {"q": {"method": "odd"}}}]
        with pytest.raises(InvalidReply, match="question"):
            await session.call_tool("work")


async def test_a_server_that_keeps_asking_is_left(autojump_clock: MockClock) -> None:
    question = {
        "method": "elicitation/create",
        "params": {"message": "?", "requestedSchema": {"type": "object", "properties": {}}},
    }
    foreign = Foreign({})
    count = iter(range(10_000))

    async def look(ctx: Any, params: Any) -> Any:
        return {**SEED, "status": "input_required", "inputRequests": {f"q{next(count)}": question}}

    foreign.server.foreign["tasks/get"] = look
    client = trimcp.Client("tasks", tasks=True, max_rounds=2)
    client.elicitation(lambda params: trimcp.ElicitResult("decline"))
    async with session_with(foreign, client) as session:
        with pytest.raises(InvalidReply, match="keeps asking"):
            await session.call_tool("work")
    assert len(foreign.said("tasks/update")) == 20


async def test_how_a_task_ends(autojump_clock: MockClock) -> None:
    foreign = Foreign({})
    async with session_with(foreign) as session:
        foreign.states = [{**SEED, "status": "failed", "error": {"code": 7, "message": "no", "data": [1]}}]
        with pytest.raises(trimcp.RemoteError) as info:
            await session.call_tool("work")
        assert (info.value.code, info.value.message, info.value.data) == (7, "no", [1])
        foreign.states = [{**SEED, "status": "failed", "error": {"code": "7"}}]
        with pytest.raises(trimcp.RemoteError, match="cannot be read"):
            await session.call_tool("work")
        foreign.states = [{**SEED, "status": "cancelled", "statusMessage": "too late"}]
        with pytest.raises(trimcp.RemoteError, match="cancelled: too late") as info:
            await session.call_tool("work")
        assert info.value.code == CANCELLED_BY_OPERATOR
        for result in ({"resultType": "task"}, {"content": 7}):
            foreign.states = [{**SEED, "status": "completed", "result": result}]
            with pytest.raises(InvalidReply):
                await session.call_tool("work")
        foreign.states = [{**SEED, "status": "odd"}]
        with pytest.raises(InvalidReply, match="status"):
            await session.call_tool("work")
        foreign.states = [{**SEED, "taskId": "another"}]
        with pytest.raises(InvalidReply, match="another"):
            await session.call_tool("work")


async def test_a_server_that_is_busy_is_asked_again(autojump_clock: MockClock) -> None:
    busy = {"raises": trimcp.ErrorReply(OVERLOADED, "later")}
    async with session_with(Foreign(busy, busy, busy, {"status": "completed", "result": TEXT})) as session:
        assert (await session.call_tool("work")).text == "done"


async def test_cancelling_the_call_cancels_the_task(autojump_clock: MockClock) -> None:
    foreign = Foreign({})
    async with session_with(foreign) as session:
        with trio.move_on_after(10) as scope:
            await session.call_tool("work")
        assert scope.cancelled_caught
        await trio.testing.wait_all_tasks_blocked()
        assert foreign.said("tasks/cancel") == [None]
        async with session.calling("work"):
            await trio.sleep(5)
        await trio.testing.wait_all_tasks_blocked()
        assert len(foreign.said("tasks/cancel")) == 2


async def test_a_task_that_was_started_is_left_alone_until_somebody_wants_it(autojump_clock: MockClock) -> None:
    foreign = Foreign({}, {"status": "completed", "result": TEXT})
    async with session_with(foreign) as session:
        task = await session.start_task("work")
        assert isinstance(task, ClientTask)
        assert (task.id, foreign.asked) == ("t1", [])
        id = task.id
    async with session_with(foreign) as session:
        again = session.task(id)
        assert (await again.state()).status == "working"
        told: list[Any] = []
        assert (await again.result(told.append)).text == "done"
        assert await again.result() is await again.result()  # it is asked for once
        await again.cancel()
        assert foreign.said("tasks/cancel") == [None]


async def test_a_result_is_checked_by_the_schema_of_its_tool(autojump_clock: MockClock) -> None:
    structured = {**TEXT, "structuredContent": {"result": "seven"}}
    foreign = Foreign({"status": "completed", "result": structured})
    async with session_with(foreign) as session:
        await session.list_tools()
        with pytest.raises(InvalidReply, match="output schema"):
            await session.call_tool("work")
        with pytest.raises(InvalidReply, match="output schema"):
            await session.task("t1", tool="work").result()
        assert (await session.task("t1").result()).text == "done"


async def test_a_task_that_was_not_declared_or_cannot_be_is_no_answer() -> None:
    async with session_with(Foreign({}), trimcp.Client("plain")) as session:
        with pytest.raises(InvalidReply, match="'task'"):
            await session.call_tool("work")
    async with session_with(Foreign({}, seed={"taskId": 7})) as session:
        with pytest.raises(InvalidReply, match="taskId"):
            await session.call_tool("work")
    foreign = Foreign({})

    @foreign.server.prompt
    async def asked() -> str:
        return ""

    @foreign.server.middleware
    async def prompts_too(ctx: Any, params: Any, call_next: Any) -> Any:
        if ctx.method == "prompts/get":
            return Encoded(json.dumps({"resultType": "task", **SEED}).encode())
        return await call_next(ctx, params)

    async with session_with(foreign) as session:
        with pytest.raises(InvalidReply, match="'task'"):
            await session.get_prompt("asked")
