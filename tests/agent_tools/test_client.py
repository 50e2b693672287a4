"""Calls and contexts of the agent-tools client, over a wire that does what a test says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from trimcp import agent_tools
from trimcp.agent_tools.client import connection as client
from trimcp.agent_tools.client.wire import AgentTarget, Begin, ExchangeWire, Progressed, Registered
from trimcp.agent_tools.messages.messages import (
    AgentMessage,
    ContextCreate,
    ContextDestroy,
    ContextDestroyed,
    ContextState,
    ListTools,
    ProvideTools,
    ToolProgress,
    ToolRequest,
    ToolResponse,
    ToolsRegistered,
)
from trimcp.errors import ConnectionLost, InvalidReply, LocalError
from trimcp.session.scopes import cancellation_text

Calls = Callable[[ToolRequest, Progressed | None], Awaitable[ToolResponse]]


@attrs.define(eq=False)
class FakeWire:
    """Does `calls` with each call, and notes everything else."""

    calls: Calls
    requests: list[ToolRequest] = attrs.field(factory=list)
    asked: list[AgentMessage] = attrs.field(factory=list)
    reasons: list[str] = attrs.field(factory=list)
    destroyed: Callable[[], Awaitable[object]] = trio.lowlevel.checkpoint

    async def call(self, request: ToolRequest, progressed: Progressed | None) -> ToolResponse:
        self.requests.append(request)
        try:
            return await self.calls(request, progressed)
        except trio.Cancelled as cancelled:
            self.reasons.append(cancellation_text(cancelled))
            raise

    async def ask(self, message: AgentMessage) -> AgentMessage:
        self.asked.append(message)
        if isinstance(message, ContextDestroy):
            await self.destroyed()
            return ContextDestroyed(context_id=message.context_id)
        if isinstance(message, ContextCreate):
            await trio.lowlevel.checkpoint()
            return ContextState(context_id=message.context_id or "ctx_1", version=0, state=message.state or {})
        await trio.lowlevel.checkpoint()
        return ToolsRegistered(tools=[])

    def watching(self, context_id: str) -> AbstractAsyncContextManager[trio.abc.ReceiveChannel[AgentMessage]]:
        raise NotImplementedError

    async def provide(self, offer: ProvideTools, begin: Begin, registered: Registered) -> None:
        raise NotImplementedError

    async def wait_lost(self) -> None:
        await trio.sleep_forever()


@asynccontextmanager
async def agent_with(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> AsyncIterator[tuple[agent_tools.AgentConnection, FakeWire]]:
    wire = FakeWire(calls)

    @asynccontextmanager
    async def opened(target: AgentTarget) -> AsyncIterator[FakeWire]:
        yield wire

    monkeypatch.setattr(client, "opened_wire", opened)
    async with agent_tools.connect("http://service.test", **options) as agent:
        yield agent, wire


def success(result: Any = None) -> ToolResponse:
    return ToolResponse(status="success", result=result)


async def forever(request: ToolRequest, progressed: Progressed | None) -> ToolResponse:
    await trio.sleep_forever()
    raise AssertionError


async def test_each_call_has_an_id_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async def echo(request: ToolRequest, progressed: Progressed | None) -> ToolResponse:
        await trio.lowlevel.checkpoint()
        return success(request.request_id)

    async with agent_with(echo, monkeypatch) as (agent, _):
        ids = [await agent.call("x") for _ in range(3)]
        assert len(set(ids)) == 3
        assert await agent.call("x", request_id="mine") == "mine"
    async with agent_with(echo, monkeypatch) as (agent, _):
        assert await agent.call("x") not in ids  # another process may use the same context


@pytest.mark.parametrize(
    ("leave", "reason"),
    [
        ("deadline", "deadline exceeded"),
        ("cancel", "enough"),
        ("error", "the caller left before the result was there"),
        ("left", "the caller left before the result was there"),
    ],
)
@pytest.mark.parametrize("calling", [True, False])
async def test_leaving_a_call_cancels_it_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock, leave: str, reason: str, calling: bool
) -> None:
    async with agent_with(forever, monkeypatch) as (agent, wire):

        async def use() -> None:
            if not calling:
                await agent.call("x")
                return
            async with agent.calling("x") as call:
                await wait_all_tasks_blocked()
                if leave == "error":
                    raise KeyError
                if leave == "left":
                    return
                await call.result()

        if leave == "deadline":
            with trio.move_on_after(3):
                await use()
        elif leave == "cancel":
            async with trio.open_nursery() as nursery:
                nursery.start_soon(use)
                await wait_all_tasks_blocked()
                nursery.cancel_scope.cancel(reason="enough")
        elif not calling:
            return
        elif leave == "error":
            with pytest.raises(KeyError):
                await use()
        else:
            await use()
        assert wire.reasons == [reason]


async def test_progress_may_be_iterated(monkeypatch: pytest.MonkeyPatch) -> None:
    async def report(request: ToolRequest, progressed: Progressed | None) -> ToolResponse:
        assert progressed is not None
        for step in range(3):
            progressed(ToolProgress(request_id=request.request_id, progress=step))
            await trio.lowlevel.checkpoint()
        return success("done")

    async with agent_with(report, monkeypatch) as (agent, _), agent.calling("x", request_id="r") as call:
        assert call.request_id == "r"
        assert [each.progress async for each in call.progress] == [0, 1, 2]
        assert await call.result() == "done"
        assert await call.result() == "done"


async def test_a_slow_reader_of_progress_loses_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    async def report(request: ToolRequest, progressed: Progressed | None) -> ToolResponse:
        assert progressed is not None
        for step in range(2_000):
            progressed(ToolProgress(request_id=request.request_id, progress=step))
        await trio.lowlevel.checkpoint()
        return success()

    async with agent_with(report, monkeypatch) as (agent, _):
        async with agent.calling("x") as call:
            assert await call.result() is None
            seen = [each.progress async for each in call.progress]
            assert seen == list(range(2_000 - 1_024, 2_000))
            assert agent.dropped == 2_000 - 1_024
        async with agent.calling("x") as call:
            await call.progress.aclose()
            assert await call.result() is None


async def test_what_a_progress_callback_raises_cancels_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def report(request: ToolRequest, progressed: Progressed | None) -> ToolResponse:
        assert progressed is not None
        progressed(ToolProgress(request_id=request.request_id, progress=1))
        return await forever(request, progressed)

    def fail(progress: ToolProgress) -> None:
        raise KeyError(progress.progress)

    async with agent_with(report, monkeypatch) as (agent, wire):
        with pytest.raises(KeyError):
            await agent.call("x", on_progress=fail)
        assert wire.reasons == ["the caller left before the result was there"]


async def test_a_service_that_misses_the_deadline_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with agent_with(forever, monkeypatch) as (agent, wire):
        with pytest.raises(agent_tools.DeadlinePassed, match="3 seconds"):
            await agent.call("x", timeout=3)
        assert trio.current_time() == 5
        assert wire.reasons == ["deadline exceeded"]
        with pytest.raises(ValueError, match="timeout"):
            await agent.call("x", timeout=0)


async def ask_twice(request: ToolRequest, progressed: Progressed | None) -> ToolResponse:
    await trio.lowlevel.checkpoint()
    answers = request.input_responses or {}
    if "b" in answers:
        return success([request.request_state, answers])
    key = "b" if "a" in answers else "a"
    result = {"input_requests": {key: {"message": f"{key}?"}}, "request_state": f"state {key}"}
    return ToolResponse(status="input_required", result=result)


async def test_questions_without_a_hook_are_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    async with agent_with(ask_twice, monkeypatch) as (agent, _):
        with pytest.raises(agent_tools.InputRequired) as first:
            await agent.call("x")
        assert (first.value.questions, first.value.request_state) == ({"a": {"message": "a?"}}, "state a")
        assert await agent.call("x", input_responses={"b": 1}, request_state=first.value.request_state) == [
            "state a",
            {"b": 1},
        ]


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_a_hook_answers_questions(monkeypatch: pytest.MonkeyPatch, asynchronous: bool) -> None:
    async def answer(questions: dict[str, Any]) -> dict[str, Any]:
        await trio.lowlevel.checkpoint()
        return dict.fromkeys(questions, 1)

    def answer_now(questions: dict[str, Any]) -> dict[str, Any]:
        return dict.fromkeys(questions, 1)

    hook = answer if asynchronous else answer_now
    async with agent_with(ask_twice, monkeypatch, on_input=hook) as (agent, wire):
        assert await agent.call("x") == ["state b", {"b": 1}]
        assert len({request.request_id for request in wire.requests}) == 3
        assert await agent.call("x", on_input=lambda questions: {"b": 2}) == ["state a", {"b": 2}]
    async with agent_with(ask_twice, monkeypatch, on_input=hook, max_rounds=1) as (agent, _):
        with pytest.raises(InvalidReply, match="keeps asking"):
            await agent.call("x")


@pytest.mark.parametrize(
    "result", [None, {}, {"input_requests": []}, {"request_state": 1}, {"input_requests": {}, "request_state": None}]
)
async def test_questions_that_are_none_are_refused(monkeypatch: pytest.MonkeyPatch, result: Any) -> None:
    async def ask(request: ToolRequest, progressed: Progressed | None) -> ToolResponse:
        await trio.lowlevel.checkpoint()
        return ToolResponse(status="input_required", result=result)

    async with agent_with(ask, monkeypatch) as (agent, _):
        with pytest.raises(InvalidReply):
            await agent.call("x")


async def test_a_context_is_destroyed_at_the_end(monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock) -> None:
    async with agent_with(forever, monkeypatch) as (agent, wire):
        async with agent.context(state={"a": 1}, ttl=5) as context:
            assert context.id == "ctx_1"
            with trio.move_on_after(1):
                await context.call("x")
            assert wire.requests[0].context_id == "ctx_1"
        with pytest.raises(KeyError):
            async with agent.context("named"):
                raise KeyError
        with trio.move_on_after(1):
            async with agent.context("named"):
                await trio.sleep_forever()
        ends = [message for message in wire.asked if isinstance(message, ContextDestroy)]
        assert [(end.context_id, end.reason) for end in ends] == [
            ("ctx_1", "its block was left"),
            ("named", "its block raised KeyError"),
            ("named", "its block was cancelled"),
        ]


@pytest.mark.parametrize("failure", [agent_tools.ContextGone("m"), ConnectionLost("m"), None])
async def test_a_context_that_cannot_be_destroyed_is_left(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock, failure: Exception | None
) -> None:
    async def fail() -> None:
        if failure is None:
            await trio.sleep_forever()
        else:
            await trio.lowlevel.checkpoint()
            raise failure

    async with agent_with(forever, monkeypatch) as (agent, wire):
        wire.destroyed = fail
        with trio.CancelScope() as scope:
            async with agent.context():
                scope.cancel()
        assert trio.current_time() == (2 if failure is None else 0)


async def test_an_answer_about_another_number_of_tools_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with agent_with(forever, monkeypatch) as (agent, _):
        with pytest.raises(InvalidReply):
            await agent.register({"name": "a"})


async def test_options_are_checked() -> None:
    for target in ("ftp://host", "http://", "host"):
        with pytest.raises(LocalError, match="URL"):
            AgentTarget(target)
    with pytest.raises(LocalError, match="not both"):
        AgentTarget("http://host", "token", headers={"Authorization": "x"})
    with pytest.raises(LocalError, match="header"):
        AgentTarget("http://host", "line\nbreak")
    with pytest.raises(LocalError, match="AgentTarget"):
        async with agent_tools.connect(AgentTarget("http://host"), token="x"):
            raise AssertionError
    assert "secret" not in repr(AgentTarget("http://user:secret@host/secret", "secret", headers={"a": "secret"}))


def test_the_endpoint_that_a_server_prints_is_its_url() -> None:
    assert AgentTarget("http://localhost:8080/mcp").url == "http://localhost:8080"
    assert AgentTarget("https://host/below/mcp").url == "https://host/below"
    assert AgentTarget("ws://localhost:8080/agent").url == "ws://localhost:8080/agent"


class EndsEarly(ExchangeWire):
    """A wire whose service ends every exchange before the last message."""

    async def exchange(self, message: AgentMessage, read: object, *, stream: bool = False) -> None:
        await trio.lowlevel.checkpoint()


async def test_what_ends_without_an_answer_is_a_lost_connection_over_every_wire() -> None:
    wire = EndsEarly()
    request = ToolRequest(tool_name="x", request_id="r")
    asks: list[Callable[[], Awaitable[object]]] = [lambda: wire.call(request, None), lambda: wire.ask(ListTools())]
    for ask in asks:
        with pytest.raises(ConnectionLost, match="without an answer"):
            await ask()
    async with wire.watching("c") as events:
        end = await events.receive()
        assert isinstance(end, ConnectionLost)
        assert "ended the watch" in str(end)
