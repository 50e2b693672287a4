"""The agent-tools client over WebSocket, against a service written by hand, in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import orjson
import pytest
import trio
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from tests.peers.websockets import FIN, TEXT, RawWebSocket, accept, close, message
from trimcp import agent_tools
from trimcp.agent_tools.client import websocket as client_websocket
from trimcp.agent_tools.client.wire import AgentTarget, AgentWire
from trimcp.agent_tools.messages.messages import (
    AgentMessage,
    ContextDestroyed,
    ContextState,
    ContextUpdate,
    ProvideTools,
    ToolRequest,
    ToolResponse,
    encode_message,
)
from trimcp.channel import Incoming, Kind, Outgoing, Sink
from trimcp.errors import ConnectionLost, InvalidReply, LocalError


@attrs.define(eq=False)
class Service:
    """The other end, which a test plays."""

    raw: RawWebSocket
    heads: str = ""

    async def hear(self) -> dict[str, Any]:
        first, payload = await self.raw.hear()
        assert first == FIN | TEXT, first
        heard: dict[str, Any] = orjson.loads(payload)
        return heard

    async def say(self, *values: Any) -> None:
        texts = [value if isinstance(value, bytes) else orjson.dumps(value) for value in values]
        await self.raw.say(*(message(text, masked=False) for text in texts))

    async def answer(self, asked: dict[str, Any], type: str = "tool_response", **members: Any) -> None:
        await self.say({"type": type, "request_id": asked["request_id"], **members})


@asynccontextmanager
async def service(
    monkeypatch: pytest.MonkeyPatch, answer: bytes | None = None, **settings: Any
) -> AsyncIterator[tuple[AgentWire, Service]]:
    """Yield a wire with the service that it leads to."""
    ours, theirs = memory_stream_pair()
    served: list[Service] = []

    async def dial(*args: Any, **options: Any) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        return ours

    async def serve() -> None:
        lines = ["Sec-WebSocket-Protocol: agent-tools"]
        served.append(Service(await accept(theirs, lines=lines, answer=answer)))

    monkeypatch.setattr("trimcp.transports.targets.dial", dial)
    target = AgentTarget("ws://service.test", "token", **settings)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        async with client_websocket.open_websocket_wire(target) as wire:
            while not served:
                await trio.lowlevel.checkpoint()
            try:
                yield wire, served[0]
            finally:
                with trio.CancelScope(shield=True):
                    await trio.aclose_forcefully(theirs)  # so that no closing handshake is waited for
        nursery.cancel_scope.cancel()


def call(id: str = "r", **members: Any) -> ToolRequest:
    return ToolRequest(tool_name="x", arguments={}, request_id=id, **members)


async def gather(wire: AgentWire, request: ToolRequest, outcomes: list[Any], **options: Any) -> None:
    try:
        outcomes.append(await wire.call(request, options.get("progressed")))
    except Exception as error:
        outcomes.append(error)


async def test_calls_share_the_connection_and_are_answered_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[Any] = []
    seen: list[float] = []
    async with service(monkeypatch) as (wire, peer), trio.open_nursery() as nursery:
        nursery.start_soon(gather, wire, call("a"), outcomes)
        first = await peer.hear()

        async def second_call() -> None:
            await gather(wire, call("b"), outcomes, progressed=lambda progress: seen.append(progress.progress))

        nursery.start_soon(second_call)
        second = await peer.hear()
        assert first == {"type": "tool_request", "tool_name": "x", "arguments": {}, "request_id": "a"}
        assert second["progress"] is True
        await peer.say({"type": "tool_progress", "request_id": "b", "progress": 1})
        await peer.say({"type": "tool_progress", "request_id": "a", "progress": 1})  # nobody wants it
        await peer.say({"type": "tool_progress", "request_id": "none", "progress": 1})
        await peer.say({"type": "of the future", "request_id": "a"} | {"type": "error", "error": {"code": "x"}})
        await wait_all_tasks_blocked()
        await peer.answer(second, status="success", result=2)
    assert isinstance(outcomes[0], agent_tools.AgentToolsError)
    assert outcomes[1].result == 2
    assert seen == [1]


async def test_a_cancelled_call_is_cancelled_there_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async with service(monkeypatch) as (wire, peer):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wire.call, call("a", context_id="c"), None)
            asked = await peer.hear()
            nursery.cancel_scope.cancel(reason="enough")
        cancelled = {"type": "tool_cancel", "request_id": "a", "context_id": "c", "reason": "enough"}
        assert await peer.hear() == cancelled
        await peer.answer(asked, status="cancelled")  # too late; nobody waits
        with trio.CancelScope() as scope:
            scope.cancel()
            await wire.call(call("b"), None)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wire.call, call("c"), None)
            assert (await peer.hear())["request_id"] == "c"
            nursery.cancel_scope.cancel()


async def test_two_calls_under_way_cannot_have_one_id(monkeypatch: pytest.MonkeyPatch) -> None:
    async with service(monkeypatch) as (wire, peer), trio.open_nursery() as nursery:
        nursery.start_soon(wire.call, call("a"), None)
        asked = await peer.hear()
        with pytest.raises(LocalError, match="under way"):
            await wire.call(call("a"), None)
        await peer.answer(asked, status="success")


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (close(1001, "bye", masked=False), "bye"),
        (None, "closing handshake"),
        (message(b"{", masked=False), "broke the protocol"),
        (message(b"[]", masked=False), "broke the protocol"),
        (message(b'"' + b"x" * 2_000 + b'"', masked=False), "broke the protocol"),
    ],
)
async def test_a_lost_connection_fails_all_that_waits(
    monkeypatch: pytest.MonkeyPatch, end: bytes | None, why: str
) -> None:
    outcomes: list[Any] = []
    async with service(monkeypatch, max_message=1_000) as (wire, peer), trio.open_nursery() as nursery:
        nursery.start_soon(gather, wire, call("a"), outcomes)
        nursery.start_soon(gather, wire, call("b"), outcomes)
        nursery.start_soon(wire.wait_lost)
        async with watched(wire, peer) as events:
            if end is None:
                await peer.raw.stream.aclose()
            else:
                await peer.raw.say(end)
            assert isinstance(await events.receive(), ContextState)
            with pytest.raises(ConnectionLost, match=why):
                await events.receive()
        with pytest.raises(ConnectionLost, match=why):
            await wire.call(call("c"), None)
    assert [type(each) for each in outcomes] == [ConnectionLost, ConnectionLost]


@asynccontextmanager
async def watched(
    wire: AgentWire, peer: Service, *behind: dict[str, Any], version: int = 1
) -> AsyncIterator[trio.abc.ReceiveChannel[AgentMessage]]:
    """Begin a watch of the context "c", and let the service answer it, with these events in the same write."""

    async def answer() -> None:
        while (asked := await peer.hear())["type"] != "context_watch":
            pass
        id = asked["request_id"]
        await peer.say({"type": "context_update", "context_id": "c", "version": 0, "updates": {"late": 1}})
        state = {"type": "context_state", "request_id": id, "context_id": "c", "version": version, "state": {}}
        await peer.say(state, *({**event, "request_id": id} for event in behind))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer)
        async with wire.watching("c") as events:
            yield events


async def test_a_watch_gets_the_state_and_then_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    async with service(monkeypatch) as (wire, peer):
        first = {"type": "context_update", "context_id": "c", "version": 2, "updates": {"a": 2}}
        async with watched(wire, peer, first) as events:
            await peer.say({"type": "context_update", "context_id": "other", "version": 9, "updates": {"a": 9}})
            state, update = await events.receive(), await events.receive()
            assert isinstance(state, ContextState)
            assert isinstance(update, ContextUpdate)
            assert update.updates == {"a": 2}
            with trio.move_on_after(0):
                await events.receive()
        assert await peer.hear() == {"type": "context_unwatch", "context_id": "c"}
        async with watched(wire, peer) as events:
            await peer.say({"type": "context_destroyed", "context_id": "c", "reason": "over"})
            assert [type(each) async for each in events] == [ContextState, ContextDestroyed]
        async with trio.open_nursery() as nursery:  # no unwatch of what is gone
            nursery.start_soon(wire.call, call("a"), None)
            assert (await peer.hear())["type"] == "tool_request"
            nursery.cancel_scope.cancel()


async def test_a_slow_watcher_gets_a_state_in_place_of_what_it_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    def update(version: int) -> dict[str, Any]:
        return {"type": "context_update", "context_id": "c", "version": version, "updates": {"n": version}}

    async with service(monkeypatch) as (wire, peer), watched(wire, peer) as events, trio.open_nursery() as nursery:
        await peer.say(*map(update, range(2, 1_000)))
        await wait_all_tasks_blocked()
        got: list[AgentMessage] = []

        async def receive() -> None:
            got.append(await events.receive())

        with trio.move_on_after(0) as scope:
            await receive()
        assert scope.cancelled_caught
        nursery.start_soon(receive)
        asked = await peer.hear()
        assert asked["type"] == "context_read"
        await peer.say(update(1_000), update(1_001))
        await peer.answer(asked, "context_state", context_id="c", version=1_000, state={"n": 1_000})
        await wait_all_tasks_blocked()
        (state,) = got
        assert isinstance(state, ContextState)
        assert state.version == 1_000
        newer = await events.receive()
        assert isinstance(newer, ContextUpdate)
        assert newer.version == 1_001  # 1,000 is part of the state


async def test_a_slow_watcher_of_a_context_that_ends_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    big = {"type": "context_update", "context_id": "c", "version": 2, "updates": {"n": "x" * 600_000}}
    gone = {"type": "context_destroyed", "context_id": "c"}
    async with service(monkeypatch) as (wire, peer):
        async with watched(wire, peer) as events:
            await peer.say(big, big, gone)
            await wait_all_tasks_blocked()
            assert [type(each) async for each in events] == [ContextDestroyed]
        async with watched(wire, peer) as events, trio.open_nursery() as nursery:
            await peer.say(big, big)
            await wait_all_tasks_blocked()
            got: list[type] = []

            async def receive() -> None:
                got.extend([type(each) async for each in events])

            nursery.start_soon(receive)
            asked = await peer.hear()
            await peer.say(gone)
            await peer.answer(asked, "error", error={"code": "context_gone", "message": "m"})
        assert got == [ContextDestroyed]


async def test_two_watchers_share_one_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    async with service(monkeypatch) as (wire, peer):
        async with watched(wire, peer) as first:
            async with wire.watching("c") as second, trio.open_nursery() as nursery:
                nursery.start_soon(second.receive)
                asked = await peer.hear()
                assert asked["type"] == "context_read"
                await peer.answer(asked, "context_state", context_id="c", version=1, state={})
            await first.receive()
            await peer.say({"type": "context_update", "context_id": "c", "version": 2, "updates": {}})
            await first.receive()
        assert (await peer.hear())["type"] == "context_unwatch"


async def test_an_event_that_is_malformed_ends_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    async with service(monkeypatch) as (wire, peer), watched(wire, peer) as events:
        await peer.say({"type": "context_update", "context_id": "c", "version": "2"})
        await events.receive()
        with pytest.raises(InvalidReply):
            await events.receive()


async def test_what_fails_in_progress_fails_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async with service(monkeypatch) as (wire, peer):
        for value in (1, "one"):
            outcomes: list[Any] = []
            async with trio.open_nursery() as nursery:

                async def fail(outcomes: list[Any] = outcomes) -> None:
                    await gather(wire, call("a"), outcomes, progressed=lambda progress: {}[progress])

                nursery.start_soon(fail)
                await peer.hear()
                await peer.say({"type": "tool_progress", "request_id": "a", "progress": value})
            assert type(outcomes[0]) is (KeyError if value == 1 else InvalidReply)


async def test_a_provider_gets_requests_and_answers_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async with service(monkeypatch) as (wire, peer), trio.open_nursery() as nursery:

        async def register() -> None:
            asked = await peer.hear()
            assert (asked["type"], asked["tools"]) == ("provide_tools", [{"name": "x"}])
            await peer.answer(asked, "tools_registered", tools=[{"name": "p.x"}])

        asked: list[Any] = []
        tools: list[dict[str, Any]] = []
        sinks: list[Sink] = []

        def begin(out: Sink) -> Callable[[Incoming], None]:
            sinks.append(out)
            return lambda incoming: asked.append(incoming.message)

        async def provide(offered: list[dict[str, Any]]) -> None:
            await wire.provide(ProvideTools(tools=offered), begin, lambda answer: tools.extend(answer.tools))

        async def provide_until_it_is_lost() -> None:
            with pytest.raises(ConnectionLost):
                await provide([{"name": "x"}])

        # Before anything is provided, whoever asks for a tool learns that there is none.
        await peer.say({"type": "tool_request", "tool_name": "x", "request_id": "0", "arguments": {}})
        refused = await peer.hear()
        assert (refused["request_id"], refused["error"]["code"]) == ("0", "provider_gone")
        nursery.start_soon(register)
        nursery.start_soon(provide_until_it_is_lost)
        await wait_all_tasks_blocked()
        assert tools == [{"name": "p.x"}]
        with pytest.raises(LocalError, match="provides"):
            await provide([])
        await peer.say({"type": "tool_request", "tool_name": "x", "request_id": "1", "arguments": {}})
        await peer.say({"type": "tool_cancel", "request_id": "1"})
        await wait_all_tasks_blocked()
        assert [(each["type"], each["request_id"]) for each in asked] == [("tool_request", "1"), ("tool_cancel", "1")]
        sinks[0].post(Outgoing(encode_message(ToolResponse(request_id="1", status="success", result=1)), Kind.REPLY))
        assert (await peer.hear())["type"] == "tool_response"
        await peer.raw.stream.aclose()


async def test_a_service_that_asks_and_reads_nothing_is_read_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with service(monkeypatch) as (wire, peer):
        ours = wire._channel._stream
        ours.send_stream.send_all_hook = trio.sleep_forever
        bad = orjson.dumps({"type": "tool_request", "request_id": "bad"})
        await peer.say(*[bad] * 30_000)
        await wait_all_tasks_blocked()
        assert len(wire._outbox) < 2_000


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 401 No\r\n\r\n", agent_tools.Unauthenticated),
        (b"HTTP/1.1 403 No\r\n\r\n", agent_tools.NotAllowed),
        (b"HTTP/1.1 503 No\r\n\r\n", agent_tools.Draining),
        (b"HTTP/1.1 404 No\r\n\r\n", ConnectionLost),
        (b'HTTP/1.1 400 No\r\n\r\n{"type":"error","error":{"code":"not_found"}}', agent_tools.NothingHere),
        (b"nonsense\r\n\r\n", ConnectionLost),
    ],
)
async def test_a_refused_handshake_is_an_error_of_its_class(
    monkeypatch: pytest.MonkeyPatch, answer: bytes, expected: type[Exception]
) -> None:
    with pytest.RaisesGroup(expected, flatten_subgroups=True):
        async with service(monkeypatch, answer=answer):
            raise AssertionError


async def test_options_of_http_are_refused() -> None:
    with pytest.raises(LocalError, match="HTTP"):
        async with agent_tools.connect("ws://service.test", client=object()):
            raise AssertionError
