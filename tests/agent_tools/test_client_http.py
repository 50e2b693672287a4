"""The agent-tools client over HTTP, against a server that says what a test wants."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.transports.http.scripted import Exchange, Handler, Scripted, listening, scripted
from trimcp import agent_tools
from trimcp.agent_tools.client.wire import AgentTarget
from trimcp.agent_tools.messages.messages import ToolProgress
from trimcp.errors import ConnectionLost, InvalidReply, LocalError
from trimcp.framing.sse import encode_event

URL = "http://service.test/base"


@asynccontextmanager
async def agent_of(
    handler: Handler, url: str = URL, **settings: Any
) -> AsyncIterator[tuple[agent_tools.AgentConnection, Scripted]]:
    async with scripted(handler) as server:
        target = AgentTarget(url, client=server.client(), **settings)
        async with agent_tools.connect(target) as agent:
            yield agent, server


def event(value: dict[str, Any]) -> bytes:
    return encode_event(orjson.dumps(value), event=value["type"])


def answer(exchange: Exchange, status: str = "success", **members: Any) -> dict[str, Any]:
    return {"type": "tool_response", "request_id": exchange.message["request_id"], "status": status, **members}


async def test_a_call_is_a_post_and_its_result_the_answer() -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.json(answer(exchange, result={"city": "Beijing"}))

    async with agent_of(handle, token="secret") as (agent, server):
        assert await agent.call("get_weather", {"city": "Beijing"}, context="c", timeout=3, version="2") == {
            "city": "Beijing"
        }
        (asked,) = server.asked
        assert (asked.method, asked.target) == ("POST", "/base/tools/call")
        assert asked.headers["authorization"] == "Bearer secret"
        assert (asked.headers["content-type"], asked.headers["accept"]) == ("application/json", "application/json")
        message = asked.message
        assert message.pop("request_id")
        assert message == {
            "type": "tool_request",
            "tool_name": "get_weather",
            "arguments": {"city": "Beijing"},
            "context_id": "c",
            "version": "2",
            "timeout": 3,
            "statuses": "extended",
        }


@pytest.mark.parametrize(
    ("status", "body", "expected", "text"),
    [
        (404, {"type": "error", "error": {"code": "unknown_tool", "message": "no x"}}, agent_tools.UnknownTool, "no x"),
        (
            200,
            {"type": "tool_response", "status": "error", "error": {"code": "tool_error", "message": "broken"}},
            agent_tools.ToolFailed,
            "broken",
        ),
        (
            403,
            {"type": "tool_response", "status": "denied", "error": {"code": "forbidden", "message": "no"}},
            agent_tools.NotAllowed,
            "no",
        ),
        (504, {"type": "tool_response", "status": "timeout"}, agent_tools.DeadlinePassed, "does not say"),
        (499, {"type": "tool_response", "status": "cancelled"}, agent_tools.RequestCancelled, "does not say"),
        (
            200,
            {"type": "tool_response", "status": "odd", "error": {"code": "odd", "message": "m"}},
            agent_tools.AgentToolsError,
            "m",
        ),
        (200, {"type": "tool_response", "status": "odd"}, InvalidReply, "odd"),
        (200, {"type": "tools", "tools": []}, InvalidReply, "not the one"),
        (200, [], InvalidReply, "none of the protocol's"),
        (200, {"type": "tool_response", "request_id": 1, "status": "success"}, InvalidReply, "malformed"),
        (200, {"type": "error"}, agent_tools.AgentToolsError, "without saying which"),
        (200, b"{", InvalidReply, "cannot be read"),
        (200, b'{"type": "' + b"x" * 2000, InvalidReply, "more than 1000 bytes"),
        (503, b"<html>", agent_tools.Draining, "503"),
        (401, b"", agent_tools.Unauthenticated, "401"),
        (404, {"detail": "nothing"}, agent_tools.NothingHere, "404"),
        (418, b"teapot", InvalidReply, "418"),
    ],
)
async def test_errors_are_exceptions_of_their_class(
    status: int, body: Any, expected: type[Exception], text: str
) -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.json(body, status)

    async with agent_of(handle, max_message=1000) as (agent, server):
        with pytest.raises(expected, match=text) as caught:
            await agent.call("x")
        assert caught.type is expected
        assert len(server.asked) == 1


async def test_a_refusal_says_when_to_try_again() -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.json({"type": "error", "error": {"code": "too_much", "message": "m"}}, 429, retry_after="40")

    async with agent_of(handle) as (agent, _):
        with pytest.raises(agent_tools.TooMuch) as caught:
            await agent.tools()
        assert caught.value.retry_after == 40


async def test_progress_comes_in_a_stream_before_the_result() -> None:
    seen: list[float] = []

    async def handle(exchange: Exchange) -> None:
        assert "text/event-stream" in exchange.headers["accept"]
        id = exchange.message["request_id"]
        await exchange.events(event({"type": "tool_progress", "request_id": id, "progress": 1, "total": 2}))
        await exchange.write(b": alive\n\n")
        await exchange.write(event({"type": "tool_progress", "request_id": id, "progress": 2, "message": "done"}))
        await exchange.write(event(answer(exchange, result=7)))
        await exchange.finish()

    async def note(progress: ToolProgress) -> None:
        await trio.lowlevel.checkpoint()
        seen.append(progress.progress)

    async with agent_of(handle) as (agent, server):
        assert await agent.call("x", on_progress=note) == 7
        assert await agent.call("x", on_progress=lambda progress: seen.append(-progress.progress)) == 7
        assert server.connections == 1
    assert seen == [1, 2, -1, -2]


async def test_a_stream_that_does_not_end_after_the_answer_is_closed(autojump_clock: trio.testing.MockClock) -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.events(event(answer(exchange, result=7)))
        await exchange.gone.wait()

    async with agent_of(handle) as (agent, _):
        async with agent.calling("x") as call:
            assert await call.result() == 7
        assert trio.current_time() < 5


async def test_a_stream_without_an_answer_is_a_lost_connection() -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.events(b": nothing\n\n")
        await exchange.finish()

    async with agent_of(handle) as (agent, server):
        async with agent.calling("x") as call:
            with pytest.raises(ConnectionLost, match="without an answer"):
                await call.result()
        assert len(server.asked) == 1


@pytest.mark.parametrize("bad", [b"{", b'{"type": "tools"}', b'{"x": "' + b"x" * 2000 + b'"}'])
async def test_an_event_that_is_no_answer_fails_the_call(bad: bytes) -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.events(encode_event(bad, event="tool_response"))
        await exchange.finish()

    async with agent_of(handle, max_message=1000) as (agent, _), agent.calling("x") as call:
        with pytest.raises(InvalidReply):
            await call.result()


@pytest.mark.parametrize("progress", [True, False])
async def test_cancelling_a_call_closes_its_request(progress: bool) -> None:
    async def handle(exchange: Exchange) -> None:
        if progress:
            await exchange.events(b":\n\n")
            await exchange.gone.wait()

    async with agent_of(handle) as (agent, server), trio.open_nursery() as nursery:
        nursery.start_soon(lambda: agent.call("x", on_progress=print if progress else None))
        asked = await server.wait_for("reply")
        await wait_all_tasks_blocked()
        assert not asked.gone.is_set()
        nursery.cancel_scope.cancel()
    await asked.gone.wait()


async def test_a_service_that_cannot_be_reached_is_a_lost_connection(autojump_clock: trio.testing.MockClock) -> None:
    async with agent_of(Exchange.respond) as (agent, server):  # never called
        server.refuse = True
        with pytest.raises(ConnectionLost, match="cannot connect"):
            await agent.call("x")
        assert trio.current_time() > 0  # it tried again


async def test_a_request_that_only_reads_is_sent_again(autojump_clock: trio.testing.MockClock) -> None:
    async def handle(exchange: Exchange) -> None:
        if len(server.asked) < 3:
            await exchange.respond(503)
        else:
            await exchange.json({"type": "tools", "tools": [{"name": "x"}]})

    async with agent_of(handle) as (agent, server):
        assert await agent.tools() == [{"name": "x"}]
        server.asked.clear()
        with pytest.raises(agent_tools.Draining):
            await agent.call("x")


async def test_each_message_is_its_request() -> None:
    replies: dict[tuple[str, str], dict[str, Any]] = {
        ("GET", "/base/tools"): {"type": "tools", "tools": []},
        ("GET", "/base/tools/a%2Fb?version=1"): {"type": "tools", "tools": []},
        ("POST", "/base/tools/register"): {"type": "tools_registered", "tools": [{"name": "a", "status": "pending"}]},
        ("DELETE", "/base/tools/a?version=2"): {"type": "tool_removed", "name": "a"},
        ("POST", "/base/contexts"): {"type": "context_state", "context_id": "c 1", "version": 0, "state": {}},
        ("GET", "/base/contexts/c%201"): {
            "type": "context_state",
            "context_id": "c 1",
            "version": 3,
            "state": {"a": 1},
        },
        ("PATCH", "/base/contexts/c%201"): {
            "type": "context_update",
            "context_id": "c 1",
            "version": 4,
            "updates": {"a": 2},
        },
        ("DELETE", "/base/contexts/c%201?reason=its+block+was+left"): {
            "type": "context_destroyed",
            "context_id": "c 1",
        },
    }

    async def handle(exchange: Exchange) -> None:
        await exchange.json(replies[exchange.method, exchange.target])

    async with agent_of(handle) as (agent, server):
        assert await agent.tools() == []
        assert await agent.tools("a/b", "1") == []
        assert await agent.register({"name": "a"}) == {"name": "a", "status": "pending"}
        await agent.remove("a", "2")
        async with agent.context("c 1", state={"a": 1}, ttl=60) as context:
            state = await context.read()
            assert (state.version, state.state) == (3, {"a": 1})
            assert (await context.update({"a": 2}, 3)).version == 4
            assert (await context.update({"a": 2})).updates == {"a": 2}
        create = server.asked[4]
        assert create.message == {"context_id": "c 1", "state": {"a": 1}, "ttl": 60}
        conditional, plain = server.asked[6:8]
        assert conditional.headers["if-match"] == '"3"'
        assert conditional.headers["content-type"] == "application/merge-patch+json"
        assert conditional.message == {"a": 2}
        assert "if-match" not in plain.headers
    with pytest.raises(LocalError, match="block"):
        await agent.tools()


@pytest.mark.parametrize("id", [".", ".."])
async def test_an_id_that_a_path_cannot_have_is_not_sent(id: str) -> None:
    async with agent_of(Exchange.respond) as (agent, server):  # never called
        with pytest.raises(LocalError, match="path"):
            await agent.existing_context(id).read()
        assert server.asked == []


async def test_a_watch_is_a_stream_that_ends_with_the_context() -> None:
    async def handle(exchange: Exchange) -> None:
        assert (exchange.method, exchange.target) == ("GET", "/base/contexts/c/events")
        await exchange.events(
            event({"type": "context_state", "context_id": "c", "version": 1, "state": {"a": 1}}),
            event({"type": "context_update", "context_id": "c", "version": 2, "updates": {"a": 2}}),
        )
        await exchange.write(event({"type": "context_destroyed", "context_id": "c", "reason": "over"}))
        await exchange.finish()

    async with agent_of(handle) as (agent, _), agent.existing_context("c").watch() as events:
        seen = [each async for each in events]
    assert [(each.kind, each.version, each.content, each.reason) for each in seen] == [
        ("state", 1, {"a": 1}, None),
        ("update", 2, {"a": 2}, None),
        ("destroyed", 2, None, "over"),
    ]


async def test_a_slow_watcher_makes_the_service_wait() -> None:
    written = 0

    async def handle(exchange: Exchange) -> None:
        nonlocal written
        await exchange.events()
        for version in range(100):
            updates = {"a": "x" * 500_000}
            await exchange.write(
                event({"type": "context_update", "context_id": "c", "version": version, "updates": updates})
            )
            written += 1
        await exchange.gone.wait()

    async with (
        listening(handle) as (_, port),
        agent_tools.connect(f"http://127.0.0.1:{port}") as agent,
        agent.existing_context("c").watch() as events,
    ):
        await events.receive()
        await wait_all_tasks_blocked(0.05)
        assert written < 50
        with trio.move_on_after(0) as scope:  # cancelling loses nothing
            await events.receive()
        assert scope.cancelled_caught
        for version in range(1, 100):
            assert (await events.receive()).version == version
        assert written == 100


async def test_a_watch_that_breaks_or_is_refused_says_so() -> None:
    async def handle(exchange: Exchange) -> None:
        if exchange.target.endswith("/gone/events"):
            await exchange.json({"type": "error", "error": {"code": "context_gone", "message": "m"}}, 410)
        else:
            await exchange.events(
                event({"type": "context_state", "context_id": "c", "version": 1, "state": {}}),
            )
            await exchange.finish()

    async with agent_of(handle) as (agent, server):
        with pytest.raises(agent_tools.ContextGone):
            async with agent.existing_context("gone").watch():
                raise AssertionError
        async with agent.existing_context("c").watch() as events:
            await events.receive()
            with pytest.raises(ConnectionLost, match="ended the watch"):
                await events.receive()
        assert len(server.asked) == 2


async def test_leaving_a_watch_closes_its_stream() -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.events(event({"type": "context_state", "context_id": "c", "version": 1, "state": {}}))
        await exchange.gone.wait()

    async with agent_of(handle) as (agent, server):
        async with agent.existing_context("c").watch() as events:
            await events.receive()
        await server.asked[0].gone.wait()


async def test_tools_are_not_provided_over_http() -> None:
    from trimcp.agent_tools.client.connection import opened_wire
    from trimcp.agent_tools.messages.messages import ProvideTools

    async with opened_wire(AgentTarget(URL)) as wire:
        with pytest.raises(LocalError, match="ws://"):
            await wire.provide(ProvideTools(tools=[]), lambda out: print, print)
