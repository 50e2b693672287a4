"""A supervised connection to a service: it comes back after a restart, and what was asked meanwhile waits for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import trimcp
from tests.fuzz.effort import PATIENCE
from trimcp import agent_tools
from trimcp.agent_tools import AgentTools, client_supervised
from trimcp.agent_tools.client_wire import NotSent
from trimcp.agent_tools.messages import AgentMessage, ContextState, ToolList, ToolRequest, ToolResponse
from trimcp.errors import ConnectionLost
from trimcp.restarts import Restarts

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

    monkeypatch.setattr(client_supervised, "opened_wire", opened)
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
