"""Agent tools through gRPC: every method with gRPC's own client, and the table of errors."""

from __future__ import annotations

import json
import queue
import sys
import time
from typing import Any

import grpc
import pytest
import trio
from google.protobuf import descriptor_pool

import trimcp
from tests.agent_tools.rpc_support import PB, serving, stub
from tests.fuzz.effort import PATIENCE
from tests.peers.states import until
from tests.transports.grpc_support import foreign
from trimcp.agent_tools import RegistrationRules
from trimcp.agent_tools.messages import protobuf
from trimcp.agent_tools.messages.steps import Steps
from trimcp.framing.grpc import texts_of


def asked(tool: str, **members: Any) -> Any:
    arguments = members.pop("arguments", None)
    request = PB.ToolRequest(tool_name=tool, **members)
    if arguments is not None:
        request.arguments.update(arguments)
    return request


def failed(call: Any, request: Any, **options: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=options.pop("timeout", PATIENCE), **options)
    return caught.value


def error_of(error: Any) -> Any:
    """The error's JSON object, which is in the trailers."""
    return json.loads(dict(error.trailing_metadata())["trimcp-error-bin"])


async def test_a_call_is_answered_in_the_form_in_which_it_was_asked() -> None:
    def use(channel: grpc.Channel) -> None:
        call = stub(channel, "Call")
        answer = call(asked("add", arguments={"a": 1, "b": 2}, request_id="r-1"), timeout=PATIENCE)
        assert (answer.request_id, answer.status) == ("r-1", "success")
        assert (answer.result.number_value, answer.result_json) == (3, b"3")
        answer = call(asked("add", arguments_json=b'{"a":9007199254740993,"b":2}'), timeout=PATIENCE)
        assert answer.result_json == b"9007199254740995"  # beyond 2^53, where doubles are even
        assert not answer.HasField("result")
        # Where both are there, the text counts.
        answer = call(asked("add", arguments={"a": 5, "b": 5}, arguments_json=b'{"a":1,"b":1}'), timeout=PATIENCE)
        assert (answer.result.number_value, answer.result_json) == (2, b"2")

    async with serving() as place:
        await foreign(place.url, use)


async def test_progress_comes_before_the_answer() -> None:
    def use(channel: grpc.Channel) -> None:
        *progress, last = stub(channel, "CallStream")(asked("steps", request_id="r"), timeout=PATIENCE)
        told = [(event.progress.progress, event.progress.total, event.progress.message) for event in progress]
        assert told == [(0, 3, "step 0"), (1, 3, "step 1"), (2, 3, "step 2")]
        assert {event.progress.request_id for event in progress} == {"r"}
        assert last.response.result_json == b'"done"'

    async with serving() as place:
        await foreign(place.url, use)


async def test_the_table_of_errors() -> None:
    def use(channel: grpc.Channel) -> None:
        call = stub(channel, "Call")
        for request, status, code in (
            (asked("nothing"), "NOT_FOUND", "unknown_tool"),
            (asked("add", version="7"), "NOT_FOUND", "unknown_tool"),
            (asked("add"), "INVALID_ARGUMENT", "invalid_arguments"),
            (asked("add", arguments_json=b"{"), "INVALID_ARGUMENT", "malformed"),
            (asked("add", arguments_json=b"[]"), "INVALID_ARGUMENT", "malformed"),
            (asked("add", arguments={"a": float("nan")}), "INVALID_ARGUMENT", "malformed"),
            (asked("add", timeout=-1), "INVALID_ARGUMENT", "malformed"),
            (asked("crash"), "INTERNAL", "crashed"),
            (asked("wait", timeout=0.05), "DEADLINE_EXCEEDED", "deadline_exceeded"),
        ):
            error: Any = failed(call, request)
            assert error.code().name == status, request
            assert error_of(error)["code"] == code or status == "DEADLINE_EXCEEDED", request
        assert "incident" in error_of(failed(call, asked("crash")))["data"]
        # A tool's own error is an answer.
        answer = call(asked("fail"), timeout=PATIENCE)
        assert (answer.status, answer.error.code, answer.error.message) == ("error", "tool_error", "no luck")

    async with serving() as place:
        await foreign(place.url, use)


async def test_who_may_call() -> None:
    def use(channel: grpc.Channel) -> None:
        call = stub(channel, "Call")
        error: Any = failed(call, asked("add", arguments={"a": 1, "b": 2}))
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = [("authorization", "Bearer a-token")]
        assert call(asked("add", arguments={"a": 1, "b": 2}), metadata=metadata, timeout=PATIENCE).result_json == b"3"
        error = failed(call, asked("add"), metadata=[*metadata, ("agent-id", "somebody-else")])
        assert error.code() is grpc.StatusCode.PERMISSION_DENIED

    settings = trimcp.HttpSettings(authenticate=trimcp.bearer_tokens({"a-token": "ada"}))
    async with serving(settings=settings) as place:
        await foreign(place.url, use)


@pytest.mark.parametrize("way", ["cancel", "deadline", "stream", "stream deadline"])
async def test_the_tool_stops_with_its_call(way: str) -> None:
    ended: list[str] = []

    def use(channel: grpc.Channel) -> None:
        if way.startswith("stream"):
            events = stub(channel, "CallStream")(asked("wait"), timeout=0.3 if "deadline" in way else PATIENCE)
            next(events)
            if way == "stream":
                events.cancel()
            with pytest.raises(grpc.RpcError) as caught:
                next(events)
        elif way == "cancel":
            future = stub(channel, "Call").future(asked("wait"), timeout=PATIENCE)
            time.sleep(0.2)
            future.cancel()
            return
        else:
            with pytest.raises(grpc.RpcError) as caught:
                stub(channel, "Call")(asked("wait"), timeout=0.3)
        error: Any = caught.value
        assert error.code().name == ("DEADLINE_EXCEEDED" if "deadline" in way else "CANCELLED")

    async with serving(ended) as place:
        await foreign(place.url, use)
        with trio.fail_after(PATIENCE):
            await until(lambda: ended)
        assert place.server.statistics().running == 0


async def test_the_same_request_twice_in_one_context() -> None:
    def use(channel: grpc.Channel) -> None:
        call = stub(channel, "Call")
        first = call.future(asked("wait", request_id="same", context_id="c"), timeout=PATIENCE)
        time.sleep(0.2)
        error: Any = failed(call, asked("wait", request_id="same", context_id="c"))
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        first.cancel()

    async with serving() as place:
        await foreign(place.url, use)


async def test_a_context_from_its_beginning_to_its_end() -> None:
    def use(channel: grpc.Channel) -> None:
        made = stub(channel, "CreateContext")(PB.ContextCreate(state_json=b'{"a":1}'), timeout=PATIENCE)
        id = made.context_id
        events = stub(channel, "WatchContext")(PB.ContextWatch(context_id=id), timeout=PATIENCE)
        assert json.loads(next(events).state.state_json)["a"] == 1
        update = stub(channel, "UpdateContext")
        applied = update(PB.ContextUpdate(context_id=id, updates_json=b'{"big":9007199254740993}'), timeout=PATIENCE)
        assert applied.version == made.version + 1
        assert next(events).update.updates_json == b'{"big":9007199254740993}'
        error: Any = failed(update, PB.ContextUpdate(context_id=id, updates_json=b"{}", version=made.version))
        assert error.code() is grpc.StatusCode.ABORTED
        error = failed(update, PB.ContextUpdate(context_id=id, updates_json=b'{"permissions":[]}'))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        state = stub(channel, "ReadContext")(PB.ContextRead(context_id=id), timeout=PATIENCE)
        assert json.loads(state.state_json)["big"] == 9007199254740993
        assert state.state.fields["a"].number_value == 1
        stub(channel, "DestroyContext")(PB.ContextDestroy(context_id=id, reason="over"), timeout=PATIENCE)
        assert [event.destroyed.reason for event in events] == ["over"]
        error = failed(stub(channel, "ReadContext"), PB.ContextRead(context_id=id))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        error = failed(stub(channel, "ReadContext"), PB.ContextRead(context_id="ctx_never"))
        assert error.code() is grpc.StatusCode.NOT_FOUND

    async with serving() as place:
        await foreign(place.url, use)


async def test_tools_are_registered_listed_and_removed() -> None:
    async def weather(city: str) -> dict[str, Any]:
        return {"city": city, "temperature": 5}

    def use(channel: grpc.Channel) -> None:
        manifest = PB.Manifest(name="get_weather", description="Weather")
        manifest.parameters.update({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})
        registered = stub(channel, "RegisterTool")(PB.RegisterToolRequest(tool=manifest), timeout=PATIENCE)
        assert [(tool.name, tool.version, tool.status) for tool in registered.tools] == [
            ("get_weather", "1", "registered")
        ]
        listed = stub(channel, "ListTools")(PB.ListToolsRequest(name="get_weather"), timeout=PATIENCE).tools
        assert json.loads(listed[0].parameters_json)["required"] == ["city"]
        answer = stub(channel, "Call")(asked("get_weather", arguments={"city": "Beijing"}), timeout=PATIENCE)
        assert json.loads(answer.result_json) == {"city": "Beijing", "temperature": 5}
        assert answer.result.struct_value.fields["city"].string_value == "Beijing"
        stub(channel, "RemoveTool")(PB.RemoveToolRequest(name="get_weather"), timeout=PATIENCE)
        error: Any = failed(stub(channel, "Call"), asked("get_weather"))
        assert error.code() is grpc.StatusCode.NOT_FOUND

    rules = RegistrationRules(anonymous_on_loopback=True)
    async with serving(implementations={"get_weather": weather}, registration=rules) as place:
        await foreign(place.url, use)


async def test_a_providers_tools_live_as_long_as_its_stream() -> None:
    def use(channel: grpc.Channel) -> None:
        outgoing: queue.Queue[Any] = queue.Queue()
        down = stub(channel, "Provide")(iter(outgoing.get, None), timeout=PATIENCE)
        offer = PB.FromProvider()
        offer.provide_tools.request_id = "offer"
        tool = offer.provide_tools.tools.add(name="double", description="Double a number")
        tool.parameters.update({"type": "object", "properties": {"n": {"type": "integer"}}})
        outgoing.put(offer)
        registered = next(down).tools_registered.tools
        name = registered[0].name
        answer = stub(channel, "Call").future(asked(name, arguments={"n": 21}), timeout=PATIENCE)
        request = next(down).tool_request
        assert json.loads(request.arguments_json) == {"n": 21}
        reply = PB.FromProvider()
        reply.tool_response.request_id, reply.tool_response.status = request.request_id, "success"
        reply.tool_response.result_json = b"42"
        outgoing.put(reply)
        assert answer.result().result_json == b"42"
        waiting = stub(channel, "Call").future(asked(name, arguments={"n": 1}), timeout=PATIENCE)
        next(down)
        down.cancel()
        with pytest.raises(grpc.RpcError):
            waiting.result()
        outgoing.put(None)
        error: Any = failed(stub(channel, "Call"), asked(name))
        assert error.code() is grpc.StatusCode.NOT_FOUND

    async with serving(registration=RegistrationRules(anonymous_on_loopback=True)) as place:
        await foreign(place.url, use)


async def test_a_large_result_of_a_provider_is_converted_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: dict[str, int] = {}

    async def in_turns(steps: Steps[Any]) -> Any:
        name = steps.__name__
        turns[name] = 0
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value
            turns[name] += 1

    def use(channel: grpc.Channel) -> None:
        outgoing: queue.Queue[Any] = queue.Queue()
        down = stub(channel, "Provide")(iter(outgoing.get, None), timeout=PATIENCE)
        offer = PB.FromProvider()
        offer.provide_tools.request_id = "offer"
        offer.provide_tools.tools.add(name="many", parameters_json=b'{"type":"object"}')
        outgoing.put(offer)
        answer = stub(channel, "Call").future(asked(next(down).tools_registered.tools[0].name), timeout=PATIENCE)
        reply = PB.FromProvider()
        reply.tool_response.request_id, reply.tool_response.status = next(down).tool_request.request_id, "success"
        reply.tool_response.result.list_value.extend([None] * 50_000)
        monkeypatch.setattr(protobuf, "in_turns", in_turns)
        outgoing.put(reply)
        assert json.loads(answer.result().result_json) == [None] * 50_000
        assert turns["tagged_steps"] >= 50_000 // 1_024
        outgoing.put(None)

    async with serving(registration=RegistrationRules(anonymous_on_loopback=True)) as place:
        await foreign(place.url, use)


async def test_an_offer_that_cannot_be_taken_is_refused_on_the_stream() -> None:
    def use(channel: grpc.Channel) -> None:
        outgoing: queue.Queue[Any] = queue.Queue()
        down = stub(channel, "Provide")(iter(outgoing.get, None), timeout=PATIENCE)
        offer = PB.FromProvider()
        offer.provide_tools.tools.add(name="no name of a tool!")
        outgoing.put(offer)
        assert next(down).refused.error.code == "invalid_manifest"
        outgoing.put(PB.FromProvider())
        assert next(down).refused.error.code == "malformed"
        outgoing.put(None)
        assert list(down) == []

    async with serving(registration=RegistrationRules(anonymous_on_loopback=True)) as place:
        await foreign(place.url, use)


async def test_while_the_server_ends_nothing_begins() -> None:
    ended: list[str] = []

    def use(channel: grpc.Channel) -> Any:
        call = stub(channel, "Call")
        running = call.future(asked("wait"), timeout=PATIENCE)
        time.sleep(0.2)
        loop.run_sync_soon(place.stop.set)
        time.sleep(0.2)
        error: Any = failed(call, asked("add", arguments={"a": 1, "b": 2}))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.RpcError) as caught:
            running.result()
        return caught.value

    async with serving(ended) as place:
        loop = trio.lowlevel.current_trio_token()
        error = await foreign(place.url, use)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert ended


async def test_reflection_tells_what_there_is() -> None:
    """What grpcurl does: list the services, then get the files of one, and build its messages from them."""

    def use(channel: grpc.Channel) -> None:
        info = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
        symbol = b"trimcp.v1.AgentTools.Call"
        asked = [b"\x3a\x00", b"\x22" + bytes((len(symbol),)) + symbol, b"\x22\x01x", b"\x2a\x00"]
        listed, files, unknown, other = info(iter(asked), timeout=PATIENCE)
        assert b"trimcp.v1.AgentTools" in listed
        assert b"trimcp.v1.Mcp" in listed
        pool = descriptor_pool.DescriptorPool()
        found = dict(texts_of(files) or [])[4]
        for _, file in reversed(texts_of(found) or []):
            pool.AddSerializedFile(file)
        method = pool.FindMethodByName("trimcp.v1.AgentTools.Call")
        assert method.input_type.fields_by_name["arguments"].message_type.full_name == "google.protobuf.Struct"
        assert b"no such" in unknown
        assert b"not answered" in other

    async with serving() as place:
        await foreign(place.url, use)


async def test_without_protobuf_a_call_says_what_is_missing() -> None:
    """MCP and health need nothing."""
    program = """
import sys
sys.modules["google.protobuf"] = None
from functools import partial
import trimcp, trio
from trimcp.agent_tools import AgentTools
from trimcp.transports.grpc.calls import CallFailed
from trimcp.transports.grpc.client import GrpcServer

server = trimcp.Server("s", version="1")
server.tool(name="hi")(lambda: "hi")

async def main():
    async with trio.open_nursery() as nursery:
        urls = await nursery.start(partial(trimcp.serve_grpc, server, port=0, agent_tools=AgentTools(server)))
        async with GrpcServer(urls[0]).open() as connection:
            try:
                await connection.unary("/trimcp.v1.AgentTools/Call", b"")
            except CallFailed as failure:
                print(failure)
            print(await connection.unary("/grpc.health.v1.Health/Check", b""))
        async with trimcp.Client("c").connect(urls[0]) as session:
            print((await session.call_tool("hi")).text)
        nursery.cancel_scope.cancel()

trio.run(main)
"""
    done = await trio.run_process([sys.executable, "-c", program], capture_stdout=True, capture_stderr=True)
    failed, health, called = done.stdout.decode().splitlines()
    assert failed.startswith("UNIMPLEMENTED: ")
    assert "pip install 'trimcp[grpc]'" in failed
    assert health == str(b"\x08\x01")
    assert called == "hi"


async def test_a_large_result_in_both_forms_and_a_deadline_on_a_watch() -> None:
    async def rows(number: int) -> list[dict[str, int]]:
        return [{"n": each} for each in range(number)]

    def use(channel: grpc.Channel) -> None:
        answer = stub(channel, "Call")(asked("rows", arguments={"number": 10_000}), timeout=PATIENCE)
        assert len(answer.result.list_value.values) == 10_000
        assert answer.result.list_value.values[9_999].struct_value.fields["n"].number_value == 9_999
        assert json.loads(answer.result_json)[9_999] == {"n": 9_999}
        made = stub(channel, "CreateContext")(PB.ContextCreate(), timeout=PATIENCE)
        events = stub(channel, "WatchContext")(PB.ContextWatch(context_id=made.context_id), timeout=0.5)
        with pytest.raises(grpc.RpcError) as caught:
            list(events)
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    async with serving() as place:
        place.server.add_tool(rows)
        await foreign(place.url, use)
