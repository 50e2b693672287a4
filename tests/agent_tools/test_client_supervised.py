"""A supervised connection to a service: it comes back after a restart, and what was asked meanwhile waits for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import trimcp
from tests.fuzz.effort import PATIENCE
from trimcp import agent_tools
from trimcp.agent_tools import AgentTools
from trimcp.agent_tools.client import supervised as module
from trimcp.agent_tools.client.grpc import GrpcWire
from trimcp.agent_tools.client.wire import NotSent
from trimcp.agent_tools.messages.messages import (
    AgentMessage,
    ContextState,
    ContextUpdate,
    ToolList,
    ToolRequest,
    ToolResponse,
)
from trimcp.errors import ConnectionLost
from trimcp.framing.grpc import GrpcStatus
from trimcp.support.restarts import Restarts
from trimcp.transports.grpc.calls import CallFailed

QUICK = Restarts(first_pause=0.01, longest_pause=0.05, most=1_000)


class Wire:
    """A connection that does what a test says: it fails with `errors`, one for each request, and then answers."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.lost = trio.Event()
        self.asked: list[AgentMessage] = []

    async def _do(self, message: AgentMessage) -> None:
        await trio.lowlevel.checkpoint()
        self.asked.append(message)
        if self.errors:
            raise self.errors.pop(0)

    async def call(self, request: ToolRequest, progressed: Any) -> ToolResponse:
        await self._do(request)
        return ToolResponse(request_id=request.request_id, status="success", result=len(self.asked))

    async def ask(self, message: AgentMessage) -> AgentMessage:
        await self._do(message)
        if message.type == "list_tools":
            return ToolList(tools=[])
        if message.type == "context_update":
            return ContextUpdate(context_id="c", version=1, updates={})
        return ContextState(context_id="c", version=1, state={})

    async def wait_lost(self) -> None:
        await self.lost.wait()


@pytest.fixture
def wires(monkeypatch: pytest.MonkeyPatch) -> list[Wire | Exception]:
    """What is opened, in order; an exception where opening fails."""
    found: list[Wire | Exception] = []

    @asynccontextmanager
    async def opened(target: Any) -> AsyncIterator[Wire]:
        await trio.lowlevel.checkpoint()
        one = found.pop(0)
        if isinstance(one, Exception):
            raise one
        yield one

    monkeypatch.setattr(module, "opened_wire", opened)
    return found


def supervised(**restarts: Any) -> Any:
    return agent_tools.supervise("ws://service.test", restarts=Restarts(**restarts), random=Random(1))


async def test_what_was_not_sent_waits_for_the_next_connection(
    wires: list[Any], autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = Wire(NotSent("gone")), Wire()
    wires[:] = [ConnectionLost("not up yet"), first, ConnectionLost("not yet"), second]
    async with supervised() as agent:
        async with trio.open_nursery() as nursery:
            results = []

            async def call() -> None:
                results.append(await agent.call("echo"))

            nursery.start_soon(call)
            await trio.sleep(100)
            assert (len(first.asked), results) == (1, [])
            first.lost.set()
        assert results == [1]
        assert await agent.call("echo") == 2
    assert caplog.text.count("the service is tried again in") == 3


async def test_calls_under_way_fail_and_reads_are_asked_again(wires: list[Any], autojump_clock: MockClock) -> None:
    lost = ConnectionLost("it was restarted")
    first, second = Wire(lost, lost, lost, agent_tools.Draining("it ends")), Wire()
    wires[:] = [first, second]
    async with supervised() as agent:
        with pytest.raises(ConnectionLost, match="restarted"):
            await agent.call("pay")
        context = agent.existing_context("c")
        with pytest.raises(ConnectionLost, match="restarted"):
            await context.update({"a": 1})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(context.read)
            nursery.start_soon(agent.tools)
            await wait_all_tasks_blocked()
            assert not second.asked
            first.lost.set()
        assert sorted(message.type for message in second.asked) == ["context_read", "list_tools"]


async def test_it_is_given_up_after_too_many_and_then_says_why(
    wires: list[Any], autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    wires[:] = [ConnectionLost(f"refused {n}") for n in range(9)]
    async with supervised(most=3) as agent:
        with pytest.raises(ConnectionLost, match="refused 3"):
            await agent.call("echo")
        await agent.wait_lost()
        with pytest.raises(ConnectionLost, match="refused 3"):
            await agent.tools()
    assert "the service is given up: refused 3" in caplog.text


async def test_a_token_that_is_refused_ends_it_at_once(wires: list[Any], autojump_clock: MockClock) -> None:
    wires[:] = [agent_tools.Unauthenticated("the token is not valid")]
    async with supervised() as agent:
        with pytest.raises(agent_tools.Unauthenticated, match="not valid"):
            await agent.call("echo")


async def test_leaving_ends_it_while_it_waits(wires: list[Any], autojump_clock: MockClock) -> None:
    wires[:] = [ConnectionLost("not up")] * 40
    async with supervised(first_pause=1e3, longest_pause=1e3) as agent:
        with trio.move_on_after(5):
            await agent.call("echo")
    with pytest.raises(trimcp.LocalError):
        await agent.call("echo")


async def test_what_a_service_that_ends_did_not_begin_is_asked_again_and_what_it_may_have_begun_is_not(
    wires: list[Any], autojump_clock: MockClock
) -> None:
    not_begun = agent_tools.Draining("it ends", {"reason": "drain", "started": False})
    stopped = agent_tools.Draining("it was stopped", {"reason": "drain", "started": True})
    first, second = Wire(not_begun, not_begun, stopped, agent_tools.Draining("who knows")), Wire()
    wires[:] = [first, second]
    async with supervised() as agent, trio.open_nursery() as nursery:
        nursery.start_soon(agent.call, "echo")
        nursery.start_soon(agent.existing_context("c").update, {"a": 1})
        await wait_all_tasks_blocked()
        for said in ("stopped", "who knows"):
            with pytest.raises(agent_tools.Draining, match=said):
                await agent.call("pay")
        assert not second.asked
        first.lost.set()
    assert sorted(message.type for message in second.asked) == ["context_update", "tool_request"]


@pytest.mark.parametrize(
    "failure",
    [
        agent_tools.Draining("it ends", {"started": False}),
        agent_tools.Draining("it ends"),
        NotSent("nobody is there"),
        ConnectionLost("it broke"),
    ],
    ids=lambda failure: f"{type(failure).__name__}-{failure}",
)
@pytest.mark.parametrize("asks", ["call", "tools", "update", "read"])
async def test_over_http_there_is_no_other_connection_to_wait_for(
    failure: Exception, asks: str, wires: list[Any], autojump_clock: MockClock
) -> None:
    wires[:] = [Wire(failure)]
    async with agent_tools.supervise("http://service.test") as agent:
        context = agent.existing_context("c")
        ask = {
            "call": partial(agent.call, "echo"),
            "tools": agent.tools,
            "update": partial(context.update, {"a": 1}),
            "read": context.read,
        }[asks]
        with pytest.raises(type(failure)), trio.fail_after(5):
            await ask()


@pytest.mark.parametrize(
    ("lost", "begun", "kind"),
    [(None, False, NotSent), ("gone", False, NotSent), ("gone", True, ConnectionLost)],
)
def test_a_call_through_grpc_that_was_not_begun_was_not_sent(lost: str | None, begun: bool, kind: type) -> None:
    connection: Any = SimpleNamespace(lost=lost)
    failure = CallFailed(GrpcStatus.UNAVAILABLE, "no more calls", begun=begun)
    assert type(GrpcWire(connection, (), 1_000).error(failure)) is kind


@pytest.mark.parametrize("transport", ["websocket", "grpc"])
async def test_a_call_during_a_drain_waits_for_the_next_service_while_another_is_answered(transport: str) -> None:
    scheme, start = ("grpc", trimcp.serve_grpc) if transport == "grpc" else ("ws", trimcp.serve_http)
    began, go_on, stop, ended = trio.Event(), trio.Event(), trio.Event(), trio.Event()
    runs: list[int] = []

    async def serve(number: int, port: int, task_status: trio.TaskStatus[int]) -> None:
        server = trimcp.Server("service")

        @server.tool
        async def slow() -> int:
            began.set()
            await go_on.wait()
            return number

        @server.tool
        async def which() -> int:
            runs.append(number)
            return number

        async with trio.open_nursery() as nursery:
            run = partial(start, server, agent_tools=AgentTools(server), port=port, grace=PATIENCE)
            if number == 0:
                run = partial(run, stop=stop)
            (url, *_) = await nursery.start(run)
            task_status.started(int(url.removesuffix("/mcp").rstrip("/").rpartition(":")[2]))
        ended.set()

    async def note(ask: Callable[[], Awaitable[Any]], into: list[Any]) -> None:
        into.append(await ask())

    answered: list[Any] = []
    waited: list[Any] = []
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            port = await nursery.start(serve, 0, 0)
            async with agent_tools.supervise(f"{scheme}://127.0.0.1:{port}", restarts=QUICK) as agent:
                async with trio.open_nursery() as calls:
                    calls.start_soon(note, partial(agent.call, "slow"), answered)
                    await began.wait()
                    stop.set()
                    await wait_all_tasks_blocked(0.05)
                    calls.start_soon(note, partial(agent.call, "which"), waited)
                    await wait_all_tasks_blocked(0.05)
                    assert (answered, waited, runs) == ([], [], [])
                    go_on.set()
                    await ended.wait()
                    await nursery.start(serve, 1, port)
                assert (answered, waited, runs) == ([0], [1], [1])
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("transport", ["websocket", "grpc"])
async def test_it_comes_back_after_a_restart(transport: str) -> None:
    """Over a network: the service ends, and another one begins at the same address."""
    scheme, start = ("grpc", trimcp.serve_grpc) if transport == "grpc" else ("ws", trimcp.serve_http)
    ports: list[int] = []
    ended = trio.Event()

    async def serve(task_status: trio.TaskStatus[trio.CancelScope]) -> None:
        server, number = trimcp.Server("service"), len(ports)

        @server.tool
        async def which() -> int:
            return number

        tools = AgentTools(server, authenticate=trimcp.bearer_tokens({"token": "ada"}))
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                (url, *_) = await nursery.start(
                    partial(start, server, agent_tools=tools, port=ports[0] if ports else 0)
                )
                ports.append(int(url.removesuffix("/mcp").rstrip("/").rpartition(":")[2]))
                task_status.started(scope)
        ended.set()

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            first = await nursery.start(serve)
            at = f"{scheme}://127.0.0.1:{ports[0]}"
            async with agent_tools.supervise(at, token="token", restarts=QUICK) as agent:
                assert await agent.call("which") == 0
                first.cancel()
                await ended.wait()
                second = await nursery.start(serve)
                assert [tool["name"] for tool in await agent.tools()] == ["which"]
                assert await agent.call("which") == 1
                second.cancel()
