"""What no agent should send through gRPC is refused with a status; slow and half-hearted callers are let go."""

from __future__ import annotations

import random
from typing import Any

import h2.config
import h2.connection
import pytest
import trio

import trimcp
from tests.agent_tools.rpc_support import PB, SERVICE, serving
from tests.fuzz.effort import PATIENCE, count
from tests.peers.serving import ServedHere, connect
from trimcp.agent_tools import AgentTools
from trimcp.agent_tools import connect as connect_agent
from trimcp.framing.grpc import GrpcStatus, message_frame
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
                while "peer_stalled" not in caplog.text:  # noqa: ASYNC110  # a network is between
                    await trio.sleep(0.01)

    await served_with(trimcp.HttpLimits(stall_timeout=0.2), use)
