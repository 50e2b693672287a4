"""Promise 15: what all peers make a server keep together counts into one budget, and who holds little is served."""

from __future__ import annotations

from contextlib import AsyncExitStack, suppress
from typing import Any

import orjson
import pytest
import trio

from tests.guarantees.report import figure
from tests.guarantees.worlds import WORLDS, Homes, World, left_of, settled, worlds
from tests.peers.clients import on
from tests.peers.http1 import HttpWire, post
from tests.peers.http2 import grpc_call
from tests.peers.messages import initialize, modern_request, request
from tests.peers.processes import KIB, MIB
from tests.peers.servers import ServerPool, ServerProcess
from tests.peers.serving import HTTP2, ON_EACH, SOFTWARE
from tests.peers.websockets import message, upgrade
from trimcp.budget import DEFAULT_MEMORY
from trimcp.framing.grpc import json_rpc_header
from trimcp.session.limits import Limits
from trimcp.transports.grpc.channel import EXCHANGE

pytestmark = pytest.mark.slow

MANY = 200
LARGE = 4 * MIB - 10_000

_READ_AHEAD = 128 * KIB  # by Hypercorn on each connection, which nobody tells us of

STREAMS = [world for world in WORLDS if world.transport in ("stdio", "sse", "websocket") and not world.modern]
POSTS = worlds(transport="http", modern=True)
OnBoth = pytest.mark.parametrize("world", POSTS, ids=str)


async def unread(server: ServerProcess, stack: AsyncExitStack) -> HttpWire:
    """A connection that takes little unless it is read, until `stack` closes it."""
    wire = await server.connect(receive_buffer=4096)
    stack.push_async_callback(trio.aclose_forcefully, wire.stream)
    return wire


def agent_call(tool: str, *, id: str = "1", **arguments: Any) -> bytes:
    """A call by the protocol of agent tools."""
    return orjson.dumps({"type": "tool_request", "tool_name": tool, "request_id": id, "arguments": arguments})


def large_results(path: str, many: int, size: int) -> list[bytes]:
    """What asks for so many results of a size over a WebSocket, by the protocol of its path."""
    if path == "/agent":
        return [message(agent_call("big", size=size, id=str(id))) for id in range(many)]
    calls = (request(id, "tools/call", name="big", arguments={"size": size}) for id in range(1, many + 1))
    return [message(initialize()), *map(message, calls)]


@pytest.mark.parametrize("world", STREAMS, ids=str)
async def test_results_that_one_session_does_not_read_are_bounded(homes: Homes, world: World) -> None:
    async with homes(world) as home:
        await home.warm()
        base = home.forget_peak()
        async with home.peer(reading=False) as peer:
            await peer.pour([peer.call(id, "big", size=LARGE) for id in range(MANY)])
            await settled(home.pid)
            spent = home.peak - base
            if home.target is not None:  # there is but one, which now wants to be read
                home.target.process.kill()
                await home.target.process.wait()
    most = 2 * Limits().running_bytes + 4 * MIB
    what = f"memory for {MANY} results of 4 MB that one session does not read"
    figure(15, what, spent / MIB, most / MIB, "MiB", str(world))
    assert spent <= most


@OnBoth
async def test_arguments_of_calls_under_way_take_half_the_budget_of_one_address(homes: Homes, world: World) -> None:
    asked = post(modern_request(1, "tools/call", name="watch", arguments={"gate": "never", "filling": "y" * 3_900_000}))
    lost = refused = 0

    async def call(server: ServerProcess) -> None:
        nonlocal refused
        async with server.wire() as wire:
            try:
                assert (await wire.ask(asked)).status == 503
            except (EOFError, trio.BrokenResourceError):
                pass  # what it still sent destroyed the answer
            refused += 1

    async with homes(world) as home:
        assert home.served is not None
        await home.warm()
        base = home.forget_peak()
        async with trio.open_nursery() as nursery:
            for _ in range(MANY):
                nursery.start_soon(call, home.served)
            while (await home.counts())["exchanges"] + refused < MANY:  # noqa: ASYNC110  # it is another process
                await trio.sleep(0.1)
            async with home.peer() as peer:
                for id in range(50):
                    lost += "result" not in await peer.ask(id, "echo", text="x" * 1_000)
            spent = home.peak - base
            nursery.cancel_scope.cancel()
    most = DEFAULT_MEMORY / 2 + 64 * MIB + (0 if world.own else MANY * _READ_AHEAD)
    figure(15, f"memory for {MANY} calls of 3.9 MB under way", spent / MIB, most / MIB, "MiB", str(world))
    figure(15, "small calls of the same address beside them that failed, of 50", lost, 0, "calls", str(world))
    assert spent <= most
    assert not lost


@pytest.mark.parametrize("path", ["/ws", "/agent"])
@pytest.mark.parametrize("host", SOFTWARE)
async def test_arguments_of_calls_under_way_take_half_the_budget_over_websockets(
    servers: ServerPool, host: str, path: str
) -> None:
    """Who has sent a whole call still has its memory: it is not the turn of the next one of its address."""
    filling = {"text": "y" * 3_900_000}
    asked = [message(agent_call("keep", **filling))]
    if path == "/ws":
        asked = [message(initialize()), message(request(1, "tools/call", name="keep", arguments=filling))]
    async with servers(host, fresh=True, agent_tools={}) as server:
        await server.warm()
        base = server.forget_peak()

        async def call() -> None:
            async with server.wire() as wire:
                socket = await upgrade(wire, path=path)
                with suppress(trio.BrokenResourceError):  # Hypercorn refuses what there is no room for
                    await socket.say(*asked)
                    await trio.sleep_forever()

        async with trio.open_nursery() as nursery:
            for _ in range(MANY):
                nursery.start_soon(call)
            await settled(server.pid)
            async with on(server, "modern") as peer:
                lost = sum([("result" not in await peer.ask(id, "echo", text="x" * 1_000)) for id in range(50)])
            spent = server.peak - base
            nursery.cancel_scope.cancel()
        left = await left_of(server, base, 32 * MIB)
    half = DEFAULT_MEMORY / 2 + 64 * MIB if host == "own" else DEFAULT_MEMORY + 128 * MIB  # as much as each turn brings
    where = f"{path} {host}"
    figure(15, f"memory for {MANY} calls of 3.9 MB over as many WebSockets", spent / MIB, half / MIB, "MiB", where)
    figure(15, "memory of these 5 s after they were closed", left / MIB, 32, "MiB", where)
    assert spent <= half
    assert left <= 32 * MIB
    assert not lost


@OnBoth
async def test_results_that_nobody_reads_are_bounded_over_all_connections(homes: Homes, world: World) -> None:
    """They are larger here, because the system takes some megabytes of each into its own buffers."""
    size = 6 * MIB
    asked = post(modern_request(1, "tools/call", name="big", arguments={"size": size}))
    # Over HTTP/2 one connection holds much of it, and has to wait with more.
    answers = (200, 503) if world.host == HTTP2 else (200,)
    async with homes(world) as home:
        assert home.served is not None
        await home.warm()
        base = home.forget_peak()
        async with AsyncExitStack() as stack:
            for _ in range(MANY):
                wire = await unread(home.served, stack)
                await wire.send(asked)
                with suppress(trio.BrokenResourceError):  # it had to give way, as whoever holds most, before it looked
                    assert (await wire.head()).status in answers
            await settled(home.pid)
            spent = home.peak - base
    most = DEFAULT_MEMORY + 64 * MIB
    what = f"memory for {MANY} results of 6 MiB that as many connections do not read"
    figure(15, what, spent / MIB, most / MIB, "MiB", str(world))
    assert spent <= most


@pytest.mark.parametrize("path", ["/ws", "/agent"])
@pytest.mark.parametrize("host", SOFTWARE)
async def test_results_that_nobody_reads_are_bounded_over_all_websockets(
    servers: ServerPool, host: str, path: str
) -> None:
    """One result on each, of which no other message of its peer tells anybody."""
    size = 6 * MIB
    asked = large_results(path, 1, size)
    async with servers(host, fresh=True, agent_tools={}) as server:
        await server.warm()
        base = server.forget_peak()
        async with AsyncExitStack() as stack:
            for _ in range(MANY):
                wire = await unread(server, stack)
                socket = await upgrade(wire, path=path)
                with suppress(trio.BrokenResourceError):  # it had to give way before it looked
                    await socket.say(*asked)
                    await wire.stream.receive_some(1)
            await settled(server.pid)
            spent = server.peak - base
    most = DEFAULT_MEMORY + 64 * MIB + (0 if host == "own" else MANY * _READ_AHEAD)
    what = f"memory for {MANY} results of 6 MiB that as many WebSockets do not read"
    figure(15, what, spent / MIB, most / MIB, "MiB", f"{path} {host}")
    assert spent <= most


@pytest.mark.parametrize("path", ["/ws", "/agent"])
async def test_many_results_on_each_of_many_websockets_that_nobody_reads_are_bounded(
    servers: ServerPool, path: str
) -> None:
    """Whoever gives way leaves its turn to the next, whose results must not all be made before others gave way."""
    many, each, size = 60, 40, 3_900_000
    asked = large_results(path, each, size)
    async with servers("own", fresh=True, agent_tools={}) as server:
        await server.warm()
        base = server.forget_peak()
        async with AsyncExitStack() as stack:
            for _ in range(many):
                wire = await unread(server, stack)
                socket = await upgrade(wire, path=path)
                with suppress(trio.BrokenResourceError):  # it had to give way before it looked
                    await socket.say(*asked)
            await settled(server.pid)
            spent = server.peak - base
    most = DEFAULT_MEMORY + 64 * MIB
    figure(
        15, f"memory for {each} results of 3.9 MB on each of {many} WebSockets", spent / MIB, most / MIB, "MiB", path
    )
    assert spent <= most


async def test_results_that_are_made_in_the_same_turn_are_bounded(servers: ServerPool) -> None:
    """All handlers wait for the same event, and make their results before anybody gives way."""
    many, each, size = 30, 20, 3_900_000
    called = {"name": "late", "arguments": {"size": size, "gate": "together"}}
    asked = [message(initialize()), *(message(request(id, "tools/call", **called)) for id in range(1, each + 1))]
    async with servers("own", fresh=True) as server:
        await server.warm()
        base = server.forget_peak()
        async with AsyncExitStack() as stack:
            for _ in range(many):
                wire = await unread(server, stack)
                await (await upgrade(wire)).say(*asked)
            await settled(server.pid)
            async with on(server, "modern") as peer:
                await peer.ask(1, "open", gate="together")
                assert "result" in await peer.ask(2, "echo", text="beside")
            await settled(server.pid)
            spent = server.peak - base
    most = DEFAULT_MEMORY + 64 * MIB
    figure(15, f"memory for {many * each} results of 3.9 MB made in one turn", spent / MIB, most / MIB, "MiB", "own")
    assert spent <= most


async def test_results_that_nobody_reads_are_bounded_over_all_calls_of_grpc(servers: ServerPool) -> None:
    """Whoever gives way lets go of its message at once, although a server sends it that cannot be hurried."""
    asked = [initialize(), request(1, "tools/call", name="big", arguments={"size": 6 * MIB})]
    call = grpc_call(EXCHANGE, *(json_rpc_header(len(data)) + data for data in asked))
    async with servers("grpc", fresh=True) as server:
        await server.warm()
        base = server.forget_peak()
        async with AsyncExitStack() as stack:
            for _ in range(MANY):
                wire = await unread(server, stack)
                await wire.send(call)
                await wire.stream.receive_some(1)
            await settled(server.pid)
            spent = server.peak - base
    most = DEFAULT_MEMORY + 64 * MIB + MANY * _READ_AHEAD
    what = f"memory for {MANY} results of 6 MiB that nobody reads by MCP through gRPC"
    figure(15, what, spent / MIB, most / MIB, "MiB", "grpc")
    assert spent <= most


@pytest.mark.parametrize("host", ON_EACH)
async def test_bodies_that_do_not_come_hold_bounded_memory_and_nobody_else(servers: ServerPool, host: str) -> None:
    refused = 0

    async def begin(server: ServerProcess) -> None:
        nonlocal refused
        async with server.wire() as wire:
            status = (await wire.ask(post(b"x" * 3 * MIB)[:-MIB])).status
            refused += status == 503

    async with servers(host, fresh=True, limits={"linger_timeout": 0.1}, server={"memory": 16 * MIB}) as server:
        await server.warm()
        base = server.forget_peak()
        async with trio.open_nursery() as nursery:
            for _ in range(12):
                nursery.start_soon(begin, server)
            while refused < 8:  # noqa: ASYNC110  # sockets are between
                await trio.sleep(0.01)
            await trio.sleep(0.5)  # who else is refused, is refused meanwhile; the others go on waiting
            async with on(server, "modern") as lane:
                assert (await lane.ask(1, "echo", text="beside"))["id"] == 1
            nursery.cancel_scope.cancel()
        print(f"{host}: {refused} of 12 refused, {(server.peak - base) / MIB:.1f} MiB")
        assert 8 <= refused < 12
        assert server.peak - base <= 24 * MIB
