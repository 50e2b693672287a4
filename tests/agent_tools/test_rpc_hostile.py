"""What no agent should send through gRPC is refused with a status; slow and half-hearted callers are let go."""

from __future__ import annotations

import gzip
import random
import zlib
from functools import partial
from typing import Any

import h2.config
import h2.connection
import pytest
import trio

import trimcp
from tests.agent_tools.rpc_support import PB, SERVICE, serving
from tests.fuzz.effort import PATIENCE, count
from tests.peers.serving import ServedHere, connect
from tests.peers.states import until
from tests.yardsticks import another_task
from trimcp.agent_tools import AgentTools
from trimcp.agent_tools import connect as connect_agent
from trimcp.agent_tools.messages import protobuf, steps
from trimcp.agent_tools.messages.errors import MalformedMessage
from trimcp.framing.grpc import GrpcDecoder, GrpcStatus, message_frame, varint
from trimcp.transports.grpc.calls import CallFailed
from trimcp.transports.grpc.client import GrpcServer
from trimcp.transports.grpc.http2 import Http2Client

HEAD = [
    (":method", "POST"),
    (":scheme", "http"),
    (":authority", "127.0.0.1"),
    (":path", f"{SERVICE}Call"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]


def messages() -> dict[str, bytes]:
    """A good message for each method."""
    call = PB.ToolRequest(tool_name="add", arguments_json=b'{"a":1,"b":2}', request_id="r", context_id="c")
    call.arguments.update({"a": 1, "list": [1, {"x": None}]})
    found = {
        "Call": call,
        "CallStream": call,
        "ListTools": PB.ListToolsRequest(name="add", version="1"),
        "RegisterTool": PB.RegisterToolRequest(tool=PB.Manifest(name="x", parameters_json=b'{"type":"object"}')),
        "RemoveTool": PB.RemoveToolRequest(name="x"),
        "CreateContext": PB.ContextCreate(state_json=b'{"a":[1,2]}', ttl=5),
        "ReadContext": PB.ContextRead(context_id="ctx_1"),
        "UpdateContext": PB.ContextUpdate(context_id="c", updates_json=b'{"a":null}', version=3),
        "DestroyContext": PB.ContextDestroy(context_id="c", reason="r"),
    }
    return {name: message.SerializeToString() for name, message in found.items()}


async def status_with(connection: Http2Client, name: str, message: bytes) -> GrpcStatus:
    """How a call with this message ends."""
    try:
        with trio.fail_after(PATIENCE):
            await connection.unary(SERVICE + name, message)
    except CallFailed as failure:
        return failure.status
    return GrpcStatus.OK


@pytest.mark.slow
async def test_mutated_messages_get_a_status(caplog: pytest.LogCaptureFixture) -> None:
    lots, good = random.Random(14), messages()
    seen: list[GrpcStatus] = []
    async with serving() as place, GrpcServer(place.url).open() as connection:
        for _ in range(count(300)):
            name = lots.choice(list(good))
            message = bytearray(good[name])
            for _ in range(lots.randrange(1, 4)):
                at = lots.randrange(len(message) + 1)
                message[at : at + lots.randrange(2)] = bytes((lots.randrange(256),)) * lots.randrange(3)
            seen.append(await status_with(connection, name, bytes(message)))
        assert place.server.statistics().running == 0
    assert not {GrpcStatus.UNKNOWN, GrpcStatus.UNAVAILABLE} & set(seen)
    assert {GrpcStatus.OK, GrpcStatus.INVALID_ARGUMENT} <= set(seen)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_message_over_the_limit() -> None:
    async with serving() as place, GrpcServer(place.url).open() as connection:
        big = PB.ToolRequest(tool_name="add", arguments_json=b'{"a":"%b"}' % (b"x" * 5_000_000))
        with pytest.raises(CallFailed) as caught:
            await connection.unary(f"{SERVICE}Call", big.SerializeToString())
        assert caught.value.status is GrpcStatus.RESOURCE_EXHAUSTED
        fits = PB.ToolRequest(tool_name="add", arguments_json=b'{"a":1,"b":2}')
        assert PB.ToolResponse.FromString(await connection.unary(f"{SERVICE}Call", fits.SerializeToString()))


def beginning(**settings: int) -> h2.connection.H2Connection:
    frames = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    frames.initiate_connection()
    if settings:
        frames.update_settings({4: settings["window"]})
    return frames


async def status_of(stream: trio.SocketStream, frames: h2.connection.H2Connection) -> Any:
    """The status that ends the call."""
    with trio.fail_after(PATIENCE):
        while True:
            for event in frames.receive_data(bytes(await stream.receive_some(65536))):
                headers = dict(getattr(event, "headers", None) or [])
                if b"grpc-status" in headers:
                    return GrpcStatus(int(headers[b"grpc-status"]))
            await stream.send_all(frames.data_to_send())


async def served_with(limits: trimcp.HttpLimits, use: Any) -> None:
    from tests.agent_tools.rpc_support import make_server
    from tests.peers.serving import served

    server = make_server()
    async with served(server, "grpc", limits=limits, agent_tools=AgentTools(server)) as place:
        await use(place)
        async with connect_agent(place.url) as agent:
            assert await agent.call("add", {"a": 1, "b": 2}) == 3


async def test_half_a_message_is_not_waited_for_for_ever() -> None:
    async def use(place: ServedHere) -> None:
        frames = beginning()
        frames.send_headers(1, HEAD)
        frames.send_data(1, message_frame(b"x" * 100)[:50])
        async with await connect(place.port) as stream:
            await stream.send_all(frames.data_to_send())
            assert await status_of(stream, frames) is GrpcStatus.DEADLINE_EXCEEDED

    await served_with(trimcp.HttpLimits(body_timeout=0.2), use)


async def test_a_caller_that_takes_nothing_is_let_go(caplog: pytest.LogCaptureFixture) -> None:
    async def use(place: ServedHere) -> None:
        frames = beginning(window=0)
        head = [pair for pair in HEAD if pair[0] != ":path"]
        frames.send_headers(1, [*head[:3], (":path", f"{SERVICE}ListTools"), *head[3:]])
        frames.send_data(1, message_frame(b""), end_stream=True)
        async with await connect(place.port) as stream:
            await stream.send_all(frames.data_to_send())
            with trio.fail_after(PATIENCE):
                await until(lambda: "peer_stalled" in caplog.text)

    await served_with(trimcp.HttpLimits(stall_timeout=0.2), use)


# Values of google.protobuf, which are small on the wire


def nulls(number: int) -> bytes:
    """A Struct that is a list of so many nulls."""
    members = b"\x0a\x02\x08\x00" * number
    value = b"\x32" + varint(len(members)) + members
    entry = b"\x0a\x01a\x12" + varint(len(value)) + value
    return b"\x0a" + varint(len(entry)) + entry


def asking(tool: str, arguments: bytes, **members: Any) -> bytes:
    """A ToolRequest with these arguments, which nobody makes objects of on the way."""
    head: bytes = PB.ToolRequest(tool_name=tool, **members).SerializeToString()
    return head + b"\x12" + varint(len(arguments)) + arguments


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many members each conversion of a Struct has read."""
    seen: list[int] = []
    convert = protobuf._READ[protobuf._OBJECT]

    def counting(data: bytes, count: protobuf.MemberCount) -> Any:
        found = yield from convert(data, count)
        seen.append(count.members)
        return found

    monkeypatch.setitem(protobuf._READ, protobuf._OBJECT, counting)
    return seen


async def test_too_many_members_are_refused_before_they_are_objects(converted: list[int]) -> None:
    async with serving() as place, GrpcServer(place.url).open() as connection:
        with pytest.raises(CallFailed, match="more than 200,000 members") as caught:
            await connection.unary(f"{SERVICE}Call", asking("add", nulls(1_000_000)))
        assert caught.value.status is GrpcStatus.INVALID_ARGUMENT
        created = PB.ContextCreate().SerializeToString() + b"\x12" + varint(len(nulls(300_000))) + nulls(300_000)
        with pytest.raises(CallFailed, match="more than 200,000 members"):
            await connection.unary(f"{SERVICE}CreateContext", created)
        assert converted == []


async def test_what_is_refused_is_not_converted(converted: list[int]) -> None:
    """An unknown tool, a context that has ended, a tool that needs a scope."""
    tokens = trimcp.bearer_tokens({"a-token-of-ada": "ada"})

    def authenticate(head: Any) -> Any:
        found = tokens(head)
        return trimcp.Principal("ada", scopes=["some"]) if found == "ada" else found

    settings = trimcp.HttpSettings(authenticate=authenticate)
    metadata = [("authorization", "Bearer a-token-of-ada")]
    many = nulls(150_000)
    async with serving(settings=settings) as place, GrpcServer(place.url).open() as connection:

        async def status(request: bytes, headers: Any = metadata) -> GrpcStatus:
            with pytest.raises(CallFailed) as caught:
                await connection.unary(f"{SERVICE}Call", request, headers)
            return caught.value.status

        place.server.add_tool(lambda a: a, name="scoped", scopes=["more"])
        assert await status(asking("nothing", many)) is GrpcStatus.NOT_FOUND
        assert await status(asking("add", many), []) is GrpcStatus.UNAUTHENTICATED
        assert await status(asking("scoped", many)) is GrpcStatus.PERMISSION_DENIED
        made = await connection.unary(f"{SERVICE}CreateContext", b"", metadata)
        id = PB.ContextState.FromString(made).context_id
        destroy = PB.ContextDestroy(context_id=id).SerializeToString()
        await connection.unary(f"{SERVICE}DestroyContext", destroy, metadata)
        assert await status(asking("add", many, context_id=id)) is GrpcStatus.FAILED_PRECONDITION
        assert converted == []
        assert await status(asking("add", many)) is GrpcStatus.INVALID_ARGUMENT
        assert converted == [150_001]


async def test_values_are_weighed_by_what_they_become() -> None:
    async with serving() as place, GrpcServer(place.url).open() as connection, trio.open_nursery() as nursery:
        many, budget = nulls(50_000), place.server.budget
        place.server.add_tool(stays, name="stays")
        nursery.start_soon(connection.unary, f"{SERVICE}Call", asking("stays", many))
        with trio.fail_after(PATIENCE):
            await until(lambda: budget.held >= len(many) + 50_000 * protobuf.MEMBER)
        nursery.cancel_scope.cancel()


async def stays(a: list[None]) -> str:
    await trio.sleep_forever()
    raise AssertionError


async def test_large_values_are_converted_in_turns() -> None:
    async with another_task() as other:
        found = await steps.in_turns(protobuf.read_object(nulls(100_000), protobuf.MemberCount()))
        assert other.turns >= 190
        before = other.turns
        assert await steps.in_turns(protobuf.write_object(found, protobuf.MemberCount())) == nulls(100_000)
        assert other.turns - before >= 190


async def test_of_many_conversions_one_is_at_work_in_each_turn() -> None:
    """However many callers there are, others wait for one part of one conversion."""
    parts = 0

    def conversion() -> steps.Steps[None]:
        nonlocal parts
        for _ in range(100):
            parts += 1
            yield

    async with another_task() as other, trio.open_nursery() as callers:
        for _ in range(20):
            callers.start_soon(steps.in_turns, conversion())
    assert parts == 2_000
    assert other.turns >= parts


async def test_few_conversions_are_in_memory_by_halves_and_short_ones_wait_for_no_long_one() -> None:
    """Of many answers that are converted in both forms, each kept what it had so far: 1 GB that nobody counted."""
    progress = [0] * 10
    halfway = 0

    def conversion(at: int) -> steps.Steps[None]:
        nonlocal halfway
        for _ in range(100):
            progress[at] += 1
            halfway = max(halfway, sum(20 < each < 100 for each in progress))
            yield

    async with trio.open_nursery() as nursery:
        for at in range(10):
            nursery.start_soon(steps.in_turns, conversion(at))
        while not any(each > 20 for each in progress):
            await trio.lowlevel.checkpoint()
        await steps.in_turns(conversion_of_one_part())
        assert sum(progress) < 500
    assert (sum(progress), halfway) == (1_000, 1)


def conversion_of_one_part() -> steps.Steps[None]:
    yield


def stops_of(conversion: steps.Steps[Any]) -> int:
    """How often a conversion stops for others."""
    return sum(1 for _ in conversion)


def offering(tools: int, **members: bytes) -> Any:
    """A message with so many tools, and a number of members in each that is nothing by itself."""
    message = PB.ProvideTools()
    for n in range(tools):
        manifest = message.tools.add(name=f"t{n}")
        for name, value in members.items():
            (manifest.parameters.ParseFromString if name == "parameters" else partial(setattr, manifest, name))(value)
    return protobuf.decode(protobuf.PB.ProvideTools, message.SerializeToString())


def test_the_values_of_a_message_are_converted_in_turns_together() -> None:
    offered = offering(500, parameters=nulls(300))
    assert stops_of(protobuf.members_of(offered, protobuf.MemberCount())) >= 280
    assert stops_of(protobuf.members_of(offering(5_000), protobuf.MemberCount())) >= 70
    text = b'{"enum":[%b]}' % b",".join([b"null"] * 300)
    assert stops_of(protobuf.members_of(offering(500, parameters_json=text), protobuf.MemberCount())) >= 250
    members = steps.at_once(protobuf.members_of(offered, protobuf.MemberCount()))
    assert stops_of(protobuf.fill(protobuf.PB.ProvideTools(), members, both=True)) >= 280
    assert stops_of(protobuf.write_any([[None] * 300] * 500, protobuf.MemberCount())) >= 280
    state = {"context_id": "c", "state": {"text": "x" * 250_000}}
    assert stops_of(protobuf.fill(protobuf.PB.ContextState(), state, both=True)) >= 2


def test_messages_that_arrive_together_are_converted_in_turns_together() -> None:
    response = PB.FromProvider()
    response.tool_response.request_id = "r"
    response.tool_response.result.list_value.extend([None] * 400)
    assert stops_of(protobuf.tagged_steps(protobuf.PB.FromProvider, [response.SerializeToString()] * 128)) >= 90
    assert stops_of(protobuf.tagged_steps(protobuf.PB.FromProvider, [PB.FromProvider().SerializeToString()] * 128)) >= 1


def test_the_members_of_all_values_of_a_message_are_bounded() -> None:
    lists = b",".join([b"[]"] * 45_000)  # whose brackets count as well as their commas
    for members in ({"parameters": nulls(90_000)}, {"parameters_json": b'{"enum":[%b]}' % lists}):
        steps.at_once(protobuf.members_of(offering(2, **members), protobuf.MemberCount()))
        with pytest.raises(MalformedMessage, match="more than 200,000 members"):
            steps.at_once(protobuf.members_of(offering(3, **members), protobuf.MemberCount()))
    commas = b'{"description":"%b"}' % (b"," * 90_000)  # no members
    steps.at_once(protobuf.members_of(offering(3, parameters_json=commas), protobuf.MemberCount()))


async def test_the_bound_is_of_each_message() -> None:
    response = PB.FromProvider()
    response.tool_response.result.list_value.extend([None] * 150_000)
    payload = response.SerializeToString()
    found = steps.at_once(protobuf.tagged_steps(protobuf.PB.FromProvider, [payload, payload]))
    assert [each["type"] for each in found] == ["tool_response"] * 2


# Compression


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_compressed_messages_are_read(encoding: str) -> None:
    packed: Any = {"gzip": gzip.compress, "deflate": zlib.compress}[encoding]
    body = PB.ToolRequest(tool_name="add", arguments_json=b'{"a":1,"b":2}').SerializeToString()
    data = packed(body)
    async with (
        serving() as place,
        GrpcServer(place.url).open() as connection,
        connection.call(f"{SERVICE}Call", [("grpc-encoding", encoding)]) as call,
    ):
        await call.send(b"\x01" + len(data).to_bytes(4, "big") + data, end=True)
        answer = await call.next_message(GrpcDecoder(1_000))
        assert PB.ToolResponse.FromString(answer).result_json == b"3"


@pytest.mark.parametrize(
    ("encoding", "data", "status"),
    [
        ("gzip", gzip.compress(bytes(50_000_000)), GrpcStatus.RESOURCE_EXHAUSTED),
        ("deflate", zlib.compress(bytes(50_000_000)), GrpcStatus.RESOURCE_EXHAUSTED),
        ("gzip", gzip.compress(bytes(1_000))[:-9], GrpcStatus.INVALID_ARGUMENT),
        ("gzip", b"no gzip at all", GrpcStatus.INVALID_ARGUMENT),
        ("snappy", b"x", GrpcStatus.UNIMPLEMENTED),
        (None, b"x", GrpcStatus.INTERNAL),
        ("identity", b"x", GrpcStatus.INTERNAL),
    ],
    ids=["bomb", "deflated bomb", "cut", "garbage", "unknown", "not said", "identity"],
)
async def test_compression_is_bounded_and_known(encoding: str | None, data: bytes, status: GrpcStatus) -> None:
    frame = b"\x01" + len(data).to_bytes(4, "big") + data
    async with serving() as place, GrpcServer(place.url).open() as connection:
        for path in (f"{SERVICE}Call", f"{SERVICE}CreateContext", "/trimcp.v1.Mcp/Exchange"):
            metadata = [] if encoding is None else [("grpc-encoding", encoding)]
            async with connection.call(path, metadata) as call:
                await call.send(frame, end=True)
                with pytest.raises(CallFailed) as caught:
                    await call.next_message(GrpcDecoder(1_000))
                assert caught.value.status is status, path
                if status is GrpcStatus.UNIMPLEMENTED and path != "/trimcp.v1.Mcp/Exchange":
                    assert (call.headers or {})["grpc-accept-encoding"] == "identity,gzip,deflate"


async def test_a_timeout_that_is_none_is_refused() -> None:
    async with serving() as place, GrpcServer(place.url).open() as connection:
        await connection.unary(f"{SERVICE}ListTools", b"")  # so that the head without it is known
        for value in ("5", "m", "-5S", "123456789S", "5.5S", "5x"):
            with pytest.raises(CallFailed, match="grpc-timeout") as caught:
                await connection.unary(f"{SERVICE}ListTools", b"", [("grpc-timeout", value)])
            assert caught.value.status is GrpcStatus.INVALID_ARGUMENT


async def test_a_request_that_is_no_single_message() -> None:
    async with serving() as place, GrpcServer(place.url).open() as connection:
        for body in (b"", message_frame(b"")[:3], message_frame(b"") * 2, message_frame(b"x")[:-1]):
            async with connection.call(f"{SERVICE}ListTools") as call:
                await call.send(body, end=True)
                with pytest.raises(CallFailed, match="exactly one message"):
                    await call.next_message(GrpcDecoder(1_000))
