"""Promises 4 to 6 over MCP's tunnel through gRPC, spoken to frame by frame: nobody who reads little costs much."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import h2.events
import pytest
import trio

from tests.fuzz.effort import PATIENCE
from tests.guarantees.report import figure
from tests.peers.http2 import H2Client
from tests.peers.messages import modern_request
from tests.peers.processes import MIB
from tests.peers.servers import ServerPool, ServerProcess
from trimcp.framing.grpc import json_rpc_header

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
]

_EXCHANGE = b"/trimcp.v1.Mcp/Exchange"
_HEAD = [(b"content-type", b"application/grpc"), (b"te", b"trailers")]


def framed(id: Any, tool: str, **arguments: Any) -> bytes:
    """A call as a message of the tunnel, with progress."""
    text = modern_request(id, "tools/call", name=tool, arguments=arguments, _meta={"progressToken": id})
    return json_rpc_header(len(text)) + text


@asynccontextmanager
async def tunnel(server: ServerProcess, *, window: int = 65_535) -> AsyncIterator[tuple[H2Client, int]]:
    """A session whose client reads only when it is told to."""
    async with server.wire() as wire:
        client = H2Client(wire.stream, window=window)
        yield client, await client.request(_EXCHANGE, body=None, extra=_HEAD)


async def say(client: H2Client, number: int, *frames: bytes) -> None:
    for frame in frames:
        client.connection.send_data(number, frame)
    await client.flush()


async def warmed(server: ServerProcess) -> None:
    await server.warm()
    for _ in range(3):
        async with tunnel(server) as (client, number):
            await say(client, number, framed(1, "echo", text="x"))
            await client.event(h2.events.DataReceived, number)


async def echoed(server: ServerProcess) -> None:
    """Somebody else is served meanwhile."""
    async with tunnel(server) as (client, number):
        await say(client, number, framed(1, "echo", text="x"))
        with trio.fail_after(PATIENCE):
            await client.event(h2.events.DataReceived, number)


async def test_an_unread_stream_costs_two_mebibytes(servers: ServerPool) -> None:
    async with servers("grpc") as server:
        await warmed(server)
        base = server.forget_peak()
        async with tunnel(server, window=1_000) as (client, number):
            await say(client, number, framed(1, "stream", count=1_000_000, size=1_000))
            await trio.sleep(1)
            await echoed(server)
            spent = server.peak - base
    figure(4, "memory for an unread stream", spent / MIB, 2, "MiB", "grpc")
    assert spent <= 2 * MIB


async def test_an_unread_result_costs_three_times_its_size(servers: ServerPool) -> None:
    size = 20_000_000
    async with servers("grpc") as server:
        await warmed(server)
        base = server.forget_peak()
        async with tunnel(server, window=1_000) as (client, number):
            await say(client, number, framed(1, "big", size=size))
            await trio.sleep(1)
            await echoed(server)
            spent = (server.peak - base) / size
    figure(4, "memory for an unread result, at most", spent, 3, "times", "grpc")
    assert spent <= 3


async def test_who_pipelines_and_reads_nothing_is_not_read_without_end(servers: ServerPool) -> None:
    async with servers("grpc") as server:
        await warmed(server)
        base, sent = server.forget_peak(), 0
        async with tunnel(server, window=0) as (client, number):
            window, filling = client.connection, "y" * 5_000
            with trio.move_on_after(3):
                for id in range(100_000):
                    frame = framed(id, "big", size=50_000) + framed(f"f{id}", "echo", text=filling)
                    while window.local_flow_control_window(number) < len(frame):
                        await client.event(h2.events.WindowUpdated)
                    await say(client, number, frame)
                    sent += len(frame)
            await echoed(server)
            spent = server.peak - base
    figure(5, "taken of what is pipelined over gRPC", sent / MIB, 16, "MiB", "grpc")
    print(f"it cost {spent / MIB:.1f} MiB")
    assert sent <= 16 * MIB
    assert spent <= 64 * MIB


async def test_work_ends_with_the_call(servers: ServerPool) -> None:
    async with servers("grpc") as server:
        await warmed(server)
        for way in ("reset", "closed"):
            async with tunnel(server) as (client, number):
                await say(client, number, *(framed(id, "stream", count=1_000_000, size=10) for id in range(5)))
                await client.event(h2.events.DataReceived, number)
                if way == "reset":
                    client.connection.reset_stream(number, 8)
                    await client.flush()
                    await idle(server)
            await idle(server)


async def idle(server: ServerProcess) -> None:
    """Wait until no handler is at work; in the end the pool sees that no task and no socket is left."""
    with trio.fail_after(PATIENCE):
        while (await server.counts())["running"]:  # noqa: ASYNC110  # it is another process
            await trio.sleep(0.01)


async def test_tiny_frames_take_no_more_than_their_bytes(servers: ServerPool) -> None:
    """A message of which a byte or two arrive at a time, up to the window."""
    async with servers("grpc") as server:
        await warmed(server)
        base = server.forget_peak()
        async with tunnel(server) as (client, number):
            await say(client, number, json_rpc_header(1_000_000))
            piece = b"ab"
            for _ in range(40):
                while client.connection.local_flow_control_window(number) < 2_000:
                    await client.event(h2.events.WindowUpdated)
                await say(client, number, *([piece] * 1_000))
            await echoed(server)
            spent = server.peak - base
    figure(4, "memory for tiny frames of a message", spent / MIB, 2, "MiB", "grpc")
    assert spent <= 2 * MIB
