"""Agents' WebSockets as both hosts serve them: the handshake, a call, a provider, the end."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import attrs
import orjson
import pytest
import trio

import trimcp
from tests.agent_tools.streams import MANIFEST
from tests.fuzz.effort import PATIENCE
from tests.peers.http1 import HttpWire, http_request
from tests.peers.serving import SOFTWARE, Place, connect
from tests.peers.states import until
from tests.peers.websockets import BINARY, FIN, HANDSHAKE, TEXT, RawWebSocket, frame, message, upgrade
from trimcp import agent_tools
from trimcp.agent_tools import AgentTools
from trimcp.agent_tools.bindings.websocket import AgentStream
from trimcp.principal import Principal
from trimcp.session.session import Session
from trimcp.transports.http.interfaces import Head
from trimcp.transports.http.peers.identity import Refused
from trimcp.transports.websocket.served import ServedWebSocket

OnBoth = pytest.mark.parametrize("host", SOFTWARE)


@attrs.define(eq=False)
class Listening(Place):
    """A server that listens."""

    url: str
    tools: AgentTools
    stop: trio.Event


@attrs.define(eq=False)
class Socket:
    """A WebSocket that carries JSON values."""

    raw: RawWebSocket

    async def say(self, *values: Any) -> None:
        await self.raw.say(*(message(orjson.dumps(value)) for value in values))

    async def hear(self) -> dict[str, Any]:
        first, payload = await self.raw.hear()
        assert first == FIN | TEXT, (first, payload)
        value: dict[str, Any] = orjson.loads(payload)
        return value

    async def ask(self, **value: Any) -> dict[str, Any]:
        await self.say(value)
        return await self.hear()


def identify(head: Head) -> Principal | Refused:
    """Ada, for as long as the header says."""
    seconds = head.headers.get("authorization", "").removeprefix("Bearer ")
    if not seconds:
        return Refused(401, (), "a token is required")
    return Principal("ada", scopes={"tools:register"}, expires_at=time.time() + float(seconds))


@asynccontextmanager
async def listening(host: Any, server: trimcp.Server[Any] | None = None, **options: Any) -> AsyncIterator[Listening]:
    server = server or trimcp.Server("s")

    @server.tool
    async def add(a: int, b: int) -> int:
        return a + b

    tools = AgentTools(server, authenticate=identify, **options)
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        serve = partial(trimcp.serve_http, server, port=0, agent_tools=tools, software=host, stop=stop, grace=2)
        (url,) = await nursery.start(serve)
        yield Listening(url, tools, stop)
        stop.set()


@asynccontextmanager
async def socket(at: Listening, lasts: float = 60.0) -> AsyncIterator[Socket]:
    stream = await connect(at.port)
    try:
        yield Socket(await upgrade(HttpWire(stream), f"Authorization: Bearer {lasts}", path="/agent"))
    finally:
        await trio.aclose_forcefully(stream)


@OnBoth
async def test_the_handshake(host: str) -> None:
    async with listening(host) as at:
        ours = [f"{name}: {value}" for name, value in HANDSHAKE.items() if name != "sec-websocket-protocol"]
        token, shake = "Authorization: Bearer 60", ("Connection: Upgrade", "Upgrade: websocket", *ours)
        async with at.wire() as wire:
            refused = await wire.ask(http_request("GET", "/agent", *shake))
            assert refused.status == 401
        async with at.wire() as wire:
            plain = await wire.ask(http_request("GET", "/agent", token))
            assert plain.status == 426
        async with at.wire() as wire:
            other = await wire.ask(http_request("GET", "/agent", *shake, token, "Agent-Id: somebody-else"))
            assert other.status == 403
        async with at.wire() as wire:
            foreign = await wire.ask(http_request("GET", "/agent", *shake, token, "Origin: https://evil.test"))
            assert foreign.status == 403
        for offered in ("agent-tools", "other, agent-tools"):
            async with at.wire() as wire:
                await wire.send(http_request("GET", "/agent", *shake, token, f"Sec-WebSocket-Protocol: {offered}"))
                head = await wire.head()
                assert (head.status, head.headers.get("sec-websocket-protocol")) == (101, "agent-tools")


@OnBoth
async def test_a_call_a_context_and_a_watch(host: str) -> None:
    async with listening(host) as at, socket(at) as agent:
        answer = await agent.ask(type="tool_request", tool_name="add", arguments={"a": 1, "b": 2}, request_id="1")
        assert answer == {"type": "tool_response", "request_id": "1", "status": "success", "result": 3}
        update = {"type": "context_update", "context_id": "c", "updates": {"a": 1}}
        assert (await agent.ask(**update))["version"] == 1
        assert (await agent.ask(type="context_watch", context_id="c", request_id="w"))["state"]["a"] == 1
        await agent.say(*(update | {"request_id": str(number)} for number in range(100)))
        heard = [await agent.hear() for _ in range(200)]
        assert [each["version"] for each in heard if each["request_id"] == "w"] == list(range(2, 102))
        assert [each["request_id"] for each in heard if each["request_id"] != "w"] == [str(n) for n in range(100)]


@OnBoth
async def test_a_provider_on_one_connection_serves_calls_of_others(host: str) -> None:
    async with listening(host) as at, socket(at) as provider, socket(at) as agent:
        registered = await provider.ask(type="provide_tools", tools=[MANIFEST])
        name = registered["tools"][0]["name"]
        answer: dict[str, Any] = {}
        for leave in (False, True):
            request = {"type": "tool_request", "tool_name": name, "arguments": {"text": "a"}, "request_id": "1"}
            await agent.say(request)
            asked = await provider.hear()
            if leave:
                await trio.aclose_forcefully(provider.raw.stream)
            else:
                await provider.say(
                    {"type": "tool_response", "request_id": asked["request_id"], "status": "success", "result": "A"}
                )
            with trio.fail_after(5):
                answer = await agent.hear()
            assert answer.get("result") == "A" or leave
        assert answer["error"]["code"] == "provider_gone"
        assert (await agent.ask(type="list_tools", name=name))["error"]["code"] == "unknown_tool"
        async with at.wire() as wire:  # over HTTP it is the same
            value = orjson.dumps({"tool_name": name, "arguments": {"text": "a"}, "request_id": "1"})
            lines = ("Content-Type: application/json", "Authorization: Bearer 60")
            assert (await wire.ask(http_request("POST", "/tools/call", *lines, body=value))).status == 404


async def test_nothing_is_left_of_a_connection() -> None:
    """What has arrived of a message would stay in memory until the next collection."""

    def left() -> int:
        return sum(type(each) in (ServedWebSocket, AgentStream, Session) for each in gc.get_objects())

    async with listening("own") as at:
        gc.collect()
        gc.disable()
        before = left()  # of other tests
        try:
            async with socket(at) as agent:
                await agent.ask(type="tool_request", tool_name="add", arguments={"a": 1, "b": 2}, request_id="1")
                await agent.raw.say(frame(TEXT, b"x" * 1_000))
                assert left() == before + 3
            with trio.fail_after(PATIENCE):
                await until(lambda: left() <= before)
        finally:
            gc.enable()


@OnBoth
async def test_what_no_message_can_be_ends_the_connection_with_a_code(host: str) -> None:
    async with listening(host) as at:
        async with socket(at) as agent:
            await agent.raw.say(frame(FIN | BINARY, b"{}"))
            assert await agent.raw.close_code() == 1003
        async with socket(at) as agent:
            answer = await agent.ask(type="unheard", request_id="1")
            assert answer["error"]["code"] == "malformed"
            assert (await agent.ask(type="list_tools"))["type"] == "tools"


@OnBoth
async def test_who_asks_and_does_not_read_is_paused_and_then_gets_every_answer(host: str) -> None:
    many = 400
    async with listening(host) as at, socket(at) as agent:
        await agent.ask(type="context_update", context_id="c", updates={"big": "x" * 50_000})
        (run,) = at.tools._runs.values()
        (session,) = run.server.sessions
        async with trio.open_nursery() as nursery:
            reads = ({"type": "context_read", "context_id": "c", "request_id": str(number)} for number in range(many))
            nursery.start_soon(agent.say, *reads)
            with trio.fail_after(20):
                await until(lambda: session.paused)
            await trio.sleep(0.2)
            assert session.paused
            assert sum(len(each.data) for each in session.sink.waiting()[0]) < 512 * 1024
            with trio.fail_after(30):
                assert [(await agent.hear())["request_id"] for _ in range(many)] == [str(n) for n in range(many)]


@OnBoth
async def test_a_server_that_stops_answers_what_is_under_way_and_closes(host: str) -> None:
    server = trimcp.Server("s")
    began, go_on = trio.Event(), trio.Event()

    @server.tool
    async def slow() -> str:
        began.set()
        await go_on.wait()
        return "done"

    async with listening(host, server) as at, socket(at) as agent:
        await agent.say({"type": "tool_request", "tool_name": "slow", "request_id": "1"})
        await began.wait()
        at.stop.set()
        while True:
            refused = await agent.ask(type="tool_request", tool_name="add", arguments={"a": 1, "b": 2}, request_id="2")
            if "error" in refused:
                break
        assert refused["error"]["code"] == "draining"
        go_on.set()
        assert (await agent.hear())["result"] == "done"
        assert await agent.raw.close_code() in (1000, 1001)


@OnBoth
async def test_a_token_that_expires_ends_the_connection_and_what_it_provides(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trimcp")
    async with listening(host) as at, socket(at) as agent, socket(at, 1.0) as provider:
        assert (await provider.ask(type="provide_tools", tools=[MANIFEST]))["type"] == "tools_registered"
        await agent.say(
            {"type": "tool_request", "tool_name": "ada.shout", "arguments": {"text": "a"}, "request_id": "1"}
        )
        assert (await provider.hear())["type"] == "tool_request"
        with trio.fail_after(10):
            answer = await agent.hear()
            assert answer["error"]["code"] == "provider_gone"
            await provider.raw.close_code()
        assert at.tools.catalog._table.families == {}
    assert "the access token has expired" in caplog.text


async def test_a_call_with_a_message_that_is_too_large_fails_at_once_and_alone() -> None:
    async with listening("own") as at:
        url = at.url.replace("http", "ws", 1).removesuffix("/mcp")
        async with agent_tools.connect(url, token="60") as agent:
            with trio.fail_after(20), pytest.raises(agent_tools.TooLargeMessage):
                await agent.call("add", {"a": 1, "b": 2, "more": "x" * 5_000_000})
            assert await agent.call("add", {"a": 1, "b": 2}) == 3


async def test_connections_with_tasks_of_their_own_are_their_owners_memory() -> None:
    """On Hypercorn each has six. There is so little memory for all that they are counted from the first one."""
    server: trimcp.Server[Any] = trimcp.Server("s", limits=trimcp.Limits(max_message=64 * 1024), memory=1024 * 1024)
    async with listening("hypercorn", server) as at, AsyncExitStack() as stack:
        with trio.fail_after(PATIENCE):
            agents = [await stack.enter_async_context(socket(at)) for _ in range(8)]
            for agent in agents:
                await agent.ask(type="list_tools")
            (owner, held), *_ = server.budget.owners()
            assert owner == "principal ada"
            assert 8 * 50 * 1024 < held < 8 * 64 * 1024
            await stack.aclose()
            await until(lambda: server.budget.held == 0)
