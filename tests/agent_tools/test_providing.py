"""Tools that another program provides, against the service, and what becomes of them when either side goes."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import unquote

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import trimcp
from tests.fuzz.effort import PATIENCE
from tests.peers.serving import served
from tests.peers.states import until
from trimcp import agent_tools
from trimcp.agent_tools.catalog.entries import Implemented
from trimcp.agent_tools.client import supervised
from trimcp.agent_tools.client.connection import opened_wire
from trimcp.agent_tools.client.wire import AgentTarget, Begin, Registered
from trimcp.agent_tools.messages.messages import ProvideTools, ToolCancel, ToolRequest, ToolsRegistered, as_json
from trimcp.channel import Incoming, Outgoing, Sink
from trimcp.errors import ConnectionLost, LocalError
from trimcp.support.restarts import Restarts

TRANSPORTS = ("websocket", "websocket on hypercorn", "grpc")
QUICK = Restarts(first_pause=0.01, longest_pause=0.05)


# Against the service


@attrs.define(eq=False)
class Provided:
    """Functions that are provided, and what became of their calls."""

    began: trio.Event = attrs.field(factory=trio.Event)
    ended: trio.Event = attrs.field(factory=trio.Event)
    reasons: list[str | None] = attrs.field(factory=list)

    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    async def count(self, number: int, ctx: trimcp.Context) -> int:
        """Count with progress."""
        for reached in range(1, number + 1):
            await ctx.report_progress(reached, number)
        return number

    async def wait(self) -> None:
        """Wait for ever."""
        self.began.set()
        try:
            await trio.sleep_forever()
        except trio.Cancelled as cancelled:
            self.reasons.append(cancelled.reason)
            raise
        finally:
            self.ended.set()

    async def fail(self) -> None:
        """Report an error."""
        raise trimcp.ToolError("it is broken")

    async def crash(self) -> None:
        """Crash."""
        raise KeyError("secret")

    @property
    def tools(self) -> list[Any]:
        return [self.add, self.count, self.wait, Implemented(self.fail, description="It fails."), self.crash]


@asynccontextmanager
async def service(transport: str, port: int = 0, **more: Any) -> AsyncIterator[tuple[str, Any]]:
    server = trimcp.Server("service")
    tools = agent_tools.AgentTools(server, authenticate=trimcp.bearer_tokens({"agent": "agent-7", "provider": "calc"}))
    options: dict[str, Any] = {**more, **({} if "unix" in transport else {"port": port})}
    async with served(server, transport.replace("websocket", "http"), agent_tools=tools, **options) as place:
        url = place.url.removesuffix("/mcp")
        with trio.fail_after(PATIENCE):
            yield url.replace("http", "ws", 1) if transport.startswith("websocket") else url, place


@asynccontextmanager
async def providing_to(url: str, tools: Any, **options: Any) -> AsyncIterator[list[dict[str, Any]]]:
    async with trio.open_nursery() as nursery:

        async def provide(task_status: trio.TaskStatus[list[dict[str, Any]]]) -> None:
            await agent_tools.provide(url, tools, token="provider", restarts=QUICK, task_status=task_status, **options)

        yield await nursery.start(provide)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_trace_shows_what_is_said_with_a_provider(transport: str) -> None:
    lines: list[str] = []
    async with service(transport, settings=trimcp.HttpSettings(trace=lines.append)) as (url, _):
        async with providing_to(url, []):
            said = [line for line in lines if "tools_registered" in line or "provide_tools" in line]
        assert [line.split()[1] for line in said] == ["<--", "-->"]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_provided_tools_are_called(transport: str) -> None:
    seen: list[float] = []
    provided = Provided()
    async with service(transport) as (url, _), agent_tools.connect(url, token="agent") as agent:
        async with providing_to(url, provided.tools) as registered:
            names = [tool["name"] for tool in registered]
            assert names == ["calc.add", "calc.count", "calc.wait", "calc.fail", "calc.crash"]
            assert {tool["status"] for tool in registered} == {"registered"}
            assert await agent.call("calc.add", {"a": 1, "b": 2}) == 3
            count = agent.call("calc.count", {"number": 3}, on_progress=lambda each: seen.append(each.progress))
            assert await count == 3
            assert seen[-1] == 3
            with pytest.raises(agent_tools.ToolFailed, match="broken"):
                await agent.call("calc.fail")
            with pytest.raises(agent_tools.AgentToolsError) as crashed:
                await agent.call("calc.crash")
            assert "secret" not in str(crashed.value)
            with pytest.raises(agent_tools.InvalidArguments):
                await agent.call("calc.add", {"a": 1, "b": "two"})
            (manifest,) = await agent.tools("calc.fail")
            assert manifest["description"] == "It fails."
        with pytest.raises(agent_tools.UnknownTool):
            while True:  # the service has not noticed yet
                await agent.call("calc.add", {"a": 1, "b": 2})


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_cancelling_a_call_cancels_the_function(transport: str) -> None:
    provided = Provided()
    async with (
        service(transport) as (url, _),
        agent_tools.connect(url, token="agent") as agent,
        providing_to(url, provided.tools),
    ):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(agent.call, "calc.wait")
            await provided.began.wait()
            nursery.cancel_scope.cancel(reason="enough")
        await provided.ended.wait()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_calls_fail_when_the_provider_goes(transport: str) -> None:
    provided = Provided()
    async with service(transport) as (url, _), agent_tools.connect(url, token="agent") as agent:
        async with trio.open_nursery() as nursery:

            async def call() -> None:
                with pytest.raises(agent_tools.AgentToolsError, match="disconnected"):
                    await agent.call("calc.wait")

            async with providing_to(url, provided.tools):
                nursery.start_soon(call)
                await provided.began.wait()
        assert provided.ended.is_set()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_service_that_comes_back_gets_the_tools_again(transport: str) -> None:
    provided, offers = Provided(), trio.open_memory_channel[Any](10)
    async with trio.open_nursery() as nursery:
        async with service(transport) as (url, place):

            async def provide(task_status: trio.TaskStatus[Any]) -> None:
                await agent_tools.provide(
                    url,
                    provided.tools,
                    token="provider",
                    restarts=QUICK,
                    on_registered=offers[0].send_nowait,
                    task_status=task_status,
                )

            await nursery.start(provide)
            await offers[1].receive()
            async with agent_tools.connect(url, token="agent") as agent, trio.open_nursery() as calls:

                async def call() -> None:
                    with pytest.raises((ConnectionLost, agent_tools.AgentToolsError)):
                        await agent.call("calc.wait")

                calls.start_soon(call)
                await provided.began.wait()
                place.scope.cancel()
                await provided.ended.wait()
        port = int(url.rpartition(":")[2])
        async with service(transport, port) as (again, _), agent_tools.connect(again, token="agent") as agent:
            await offers[1].receive()
            assert await agent.call("calc.add", {"a": 1, "b": 2}) == 3
        nursery.cancel_scope.cancel()


async def test_a_service_is_reached_through_a_unix_socket() -> None:
    async with service("http over unix") as (url, _):
        over_websocket = url.replace("http", "ws", 1)
        async with providing_to(over_websocket, Provided().tools):
            for address in (url, over_websocket):
                async with agent_tools.connect(address, token="agent") as agent:
                    assert await agent.call("calc.add", {"a": 1, "b": 2}) == 3
            path = unquote(url.partition("//")[2].partition("/")[0])
            async with agent_tools.connect("http://elsewhere.test", token="agent", uds=path) as agent:
                assert await agent.call("calc.add", {"a": 1, "b": 2}) == 3


async def test_a_refused_provider_is_told() -> None:
    async with service("websocket") as (url, _):
        for token, error in (("wrong", agent_tools.Unauthenticated), (None, agent_tools.Unauthenticated)):
            with pytest.raises(error):
                await agent_tools.provide(url, [], token=token)
        with pytest.raises(LocalError, match="ws://"):
            await agent_tools.provide(url.replace("ws", "http"), [])
        with pytest.raises(LocalError, match="AgentTarget"):
            await agent_tools.provide(AgentTarget(url), [], token="x")
        with pytest.raises(LocalError, match="max_calls"):
            await agent_tools.provide(url, trimcp.Server("x"), max_calls=3)
        with pytest.raises(ValueError, match="max_calls"):
            await agent_tools.provide(url, [], max_calls=0)


@pytest.mark.parametrize("transport", ["websocket", "grpc"])
async def test_an_offer_over_a_connection_that_is_lost_already_may_be_made_over_the_next(transport: str) -> None:
    async with service(transport) as (url, _), opened_wire(AgentTarget(url, "provider")) as wire:
        lost: Any = wire
        if transport == "grpc":
            lost._connection._lose("the network is gone")
        else:
            lost.lose("the network is gone")
        sinks: list[Sink] = []

        def begin(out: Sink) -> Any:
            sinks.append(out)

        with pytest.raises(ConnectionLost, match="the network is gone"):
            await wire.provide(ProvideTools(tools=[]), begin, print)


# Against a stream that does what a test says


class FakeStream(Sink):
    def __init__(self, begin: Begin) -> None:
        self.posted: list[bytes] = []
        self.lost = trio.Event()
        self._receive = begin(self)

    def post(self, outgoing: Outgoing) -> None:
        self.posted.append(outgoing.data)

    def say(self, message: ToolRequest | ToolCancel) -> None:
        self.say_object(as_json(message))

    def say_object(self, value: Any) -> None:
        self._receive(Incoming(value, 100))

    def answers(self) -> list[bytes]:
        answers, self.posted = self.posted, []
        return answers


@attrs.define(eq=False)
class FakeService:
    """Opens a stream for each connection, or fails with the next error."""

    errors: list[Exception] = attrs.field(factory=list)
    opened: list[float] = attrs.field(factory=list)
    streams: list[FakeStream] = attrs.field(factory=list)
    offers: list[ProvideTools] = attrs.field(factory=list)
    changed: trio.Event = attrs.field(factory=trio.Event)

    @asynccontextmanager
    async def open(self, target: AgentTarget) -> AsyncIterator[FakeService]:
        self.opened.append(trio.current_time())
        await trio.lowlevel.checkpoint()
        if self.errors:
            error = self.errors.pop(0)
            if isinstance(error, TimeoutError):
                await trio.sleep_forever()
            raise error
        yield self

    async def provide(self, offer: ProvideTools, begin: Begin, registered: Registered) -> None:
        self.offers.append(offer)
        stream = FakeStream(begin)
        self.streams.append(stream)
        registered(ToolsRegistered(tools=[{"name": "p.x", "status": "registered"}]))
        self.changed.set()
        await stream.lost.wait()
        raise ConnectionLost("the service has closed the connection")

    async def wait_for(self, connections: int) -> None:
        while len(self.streams) < connections:
            self.changed = trio.Event()
            await self.changed.wait()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeService:
    found = FakeService()
    monkeypatch.setattr(supervised, "opened_wire", found.open)
    return found


def request(name: str, id: str, **arguments: Any) -> ToolRequest:
    return ToolRequest(tool_name=name, arguments=arguments, request_id=id, version="1", statuses="extended")


async def test_calls_run_side_by_side_and_are_answered(fake: FakeService) -> None:
    provided = Provided()
    async with trio.open_nursery() as nursery:
        await nursery.start(lambda task_status: agent_tools.provide("ws://x", provided.tools, task_status=task_status))
        (stream,) = fake.streams
        assert [tool["name"] for tool in fake.offers[0].tools] == ["add", "count", "wait", "fail", "crash"]
        stream.say(request("wait", "1"))
        await provided.began.wait()
        stream.say(request("add", "2", a=1, b=2))
        stream.say(request("add", "3", a=1))
        stream.say(request("none", "4"))
        stream.say(request("wait", "1"))
        with trio.fail_after(PATIENCE):
            await until(lambda: len(stream.posted) >= 4)
        answers = b"".join(sorted(stream.answers()))
        for text in (b'"2","status":"success","result":3', b"invalid_arguments", b"unknown_tool", b"duplicate_request"):
            assert text in answers
        stream.say(ToolCancel(request_id="none"))
        stream.say(ToolCancel(request_id="1", reason="enough"))
        await provided.ended.wait()
        await wait_all_tasks_blocked()
        (answer,) = stream.answers()
        assert b'"cancelled"' in answer
        assert b"enough" in answer
        nursery.cancel_scope.cancel()


async def test_requests_of_a_faulty_service_are_refused_and_reach_nothing_of_the_provider(fake: FakeService) -> None:
    """It makes no contexts there, asks no questions, and what cannot be read is answered."""
    async with trio.open_nursery() as nursery:
        provided = Provided()
        await nursery.start(lambda task_status: agent_tools.provide("ws://x", provided.tools, task_status=task_status))
        (stream,) = fake.streams
        for wrong in ({"tool_name": 7}, {"arguments": []}, {"timeout": -1}, {"request_id": 7}):
            stream.say_object({**as_json(request("add", "bad", a=1, b=2)), **wrong})
        answers = [json.loads(answer) for answer in stream.answers()]
        assert [(each["error"]["code"], each.get("request_id")) for each in answers] == [
            *[("malformed", "bad")] * 3,
            ("malformed", None),
        ]
        stream.say_object({**as_json(request("add", "1", a=1, b=2)), "context_id": "theirs", "version": "1"})
        with trio.fail_after(PATIENCE):
            await until(lambda: bool(stream.posted))
        assert json.loads(stream.answers()[0])["result"] == 3
        stream.say_object({"type": "tool_cancel", "request_id": "1", "context_id": "theirs"})
        await wait_all_tasks_blocked()
        assert stream.answers() == []
        nursery.cancel_scope.cancel()


async def test_more_calls_than_allowed_wait_and_then_are_refused(fake: FakeService) -> None:
    provided = Provided()
    async with trio.open_nursery() as nursery:
        await nursery.start(
            lambda task_status: agent_tools.provide("ws://x", [provided.wait], max_calls=2, task_status=task_status)
        )
        (stream,) = fake.streams
        for id in range(6):
            stream.say(request("wait", str(id)))
        await wait_all_tasks_blocked()
        refused = stream.answers()
        assert len(refused) == 2
        assert all(b"too_much" in answer for answer in refused)
        nursery.cancel_scope.cancel()
    assert len(provided.reasons) == 2  # the others never began


async def test_calls_under_way_end_with_the_connection(fake: FakeService, autojump_clock: MockClock) -> None:
    provided = Provided()
    async with trio.open_nursery() as nursery:
        await nursery.start(lambda task_status: agent_tools.provide("ws://x", provided.tools, task_status=task_status))
        (stream,) = fake.streams
        stream.say(request("wait", "1"))
        await provided.began.wait()
        stream.lost.set()
        await provided.ended.wait()
        assert provided.reasons == ["disconnected"]
        await fake.wait_for(2)
        nursery.cancel_scope.cancel()


async def test_pauses_grow_while_the_service_is_away(
    fake: FakeService, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trimcp.agent_tools")
    fake.errors = [
        ConnectionLost("away"),
        agent_tools.Draining("ends"),
        agent_tools.TooMuch("m", retry_after=40),
        agent_tools.TooMuch("m", retry_after=-40),
        TimeoutError(),
    ]
    async with trio.open_nursery() as nursery:
        await nursery.start(lambda task_status: agent_tools.provide("ws://x", [], task_status=task_status))
        pauses = [after - before for before, after in zip(fake.opened, fake.opened[1:], strict=False)]
        assert pauses[2] >= 40
        assert pauses[4] >= 60  # connecting took too long
        nursery.cancel_scope.cancel()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 5 + ["INFO"]


async def test_it_gives_up_after_too_many_failures(fake: FakeService, autojump_clock: MockClock) -> None:
    fake.errors = [ConnectionLost(f"away {n}") for n in range(10)]
    with pytest.raises(ConnectionLost, match="away 3"):
        await agent_tools.provide("ws://x", [], restarts=Restarts(most=3, within=1_000))


async def test_a_name_that_is_taken_is_awaited_only_after_a_connection(
    fake: FakeService, autojump_clock: MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(lambda task_status: agent_tools.provide("ws://x", [], task_status=task_status))
        fake.errors = [agent_tools.NameTaken("the old connection has it")]
        fake.streams[0].lost.set()
        await fake.wait_for(2)
        nursery.cancel_scope.cancel()
    fake.errors = [agent_tools.NameTaken("somebody else has it")]
    with pytest.raises(agent_tools.NameTaken):
        await agent_tools.provide("ws://x", [])


async def test_a_server_provides_its_tools_within_its_lifespan(fake: FakeService) -> None:
    steps: list[str] = []

    @asynccontextmanager
    async def lifespan(server: trimcp.Server[str]) -> AsyncIterator[str]:
        steps.append("begin")
        try:
            yield "state"
        finally:
            steps.append("end")

    server = trimcp.Server("calc", lifespan=lifespan)

    @server.tool
    async def state(ctx: trimcp.Context[str]) -> str:
        """Return the state."""
        return ctx.state

    async with trio.open_nursery() as nursery:
        await nursery.start(lambda task_status: agent_tools.provide("ws://x", server, task_status=task_status))
        (stream,) = fake.streams
        stream.say(request("state", "1"))
        await wait_all_tasks_blocked()
        assert b'"result":"state"' in stream.answers()[0]
        assert steps == ["begin"]
        nursery.cancel_scope.cancel()
    assert steps == ["begin", "end"]
