"""Clients that do not read, or not enough: what they cost, what others notice, and when they are given up."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import trio

from tests.hostile.network import HOSTS, ROADS, Pool, Served, Socket, Stream, http, initialize, on, post
from tests.hostile.peers import MIB, enveloped, request
from tests.transports.http.hypercorn_support import H2Client
from tests.transports.websocket_support import message

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
]
OnBoth = pytest.mark.parametrize("host", HOSTS)
Everywhere = pytest.mark.parametrize(("host", "road"), [(host, road) for road in ROADS for host in HOSTS])


@asynccontextmanager
async def unread(server: Served, road: str, tool: str, **arguments: Any) -> AsyncIterator[None]:
    """Call a tool and read nothing of what comes of it, as long as the block runs."""
    async with on(server, road, receive_buffer=4096) as lane:
        call = lane.call("slow", tool, **arguments)
        if isinstance(lane, Stream):
            assert (await lane.send(call)).status == 202
            yield
        elif isinstance(lane, Socket):
            await lane.raw.say(message(call))
            yield
        else:
            async with server.wire(receive_buffer=4096) as wire:
                await wire.say(post(call, session=lane.session))
                yield


async def slow_echo(server: Served) -> float:
    """The seconds that 98 of 100 echoes of somebody else take at most."""
    took: list[float] = []
    async with on(server, "modern") as lane:
        for n in range(100):
            began = trio.current_time()
            assert (await lane.ask(n, "echo"))["id"] == n
            took.append(trio.current_time() - began)
    return sorted(took)[-2]


@Everywhere
async def test_an_unread_stream_costs_two_mebibytes_and_nobody_notices(servers: Pool, host: str, road: str) -> None:
    async with servers(host) as server:
        await server.warm()
        control = await slow_echo(server)
        base = server.forget_peak()
        async with unread(server, road, "stream", count=1_000_000, size=1_000):
            echo = await slow_echo(server)
            await trio.sleep(0.2)
            spent = server.peak - base
        print(f"{host}, {road}: {spent / MIB:.2f} MiB; echo {echo * 1_000:.1f} ms, alone {control * 1_000:.1f} ms")
        assert spent <= 2 * MIB
        assert echo <= 4 * max(0.05, control)


@Everywhere
async def test_an_unread_result_costs_three_times_its_size_and_is_let_go(servers: Pool, host: str, road: str) -> None:
    size = 20 * MIB
    async with servers(host) as server:
        await server.warm()
        control = await slow_echo(server)
        base = server.forget_peak()
        async with unread(server, road, "big", size=size):
            while server.memory - base < size / 2:  # noqa: ASYNC110  # it is another process
                await trio.sleep(0.01)
            echo = await slow_echo(server)
            spent, held = server.peak - base, server.memory - base
        await server.at_rest()
        print(
            f"{host}, {road}: {spent / size:.2f} times its size at most, {held / size:.2f} while it waits; "
            f"echo {echo * 1_000:.1f} ms, alone {control * 1_000:.1f} ms"
        )
        assert spent <= 3 * size
        assert echo <= 4 * max(0.05, control)
        assert server.memory - base <= 2 * MIB


@Everywhere
async def test_pipelining_without_reading_is_bounded(servers: Pool, host: str, road: str) -> None:
    async with servers(host) as server:
        await server.warm()
        base = server.forget_peak()
        sent = 0
        async with (
            on(server, road, receive_buffer=4096) as lane,
            server.wire(receive_buffer=4096) as wire,
        ):
            with trio.move_on_after(0.5):
                while True:
                    texts = [lane.call(sent + n, "echo", text=f"number {sent + n}") for n in range(100)]
                    if isinstance(lane, Socket):
                        await lane.raw.say(*map(message, texts))
                    elif isinstance(lane, Stream):
                        await wire.say(*(post(text, path=lane.path) for text in texts))
                    else:
                        await wire.say(*(post(text, session=lane.session) for text in texts))
                    sent += 100
            spent = server.peak - base
            print(f"{host}, {road}: {sent} requests cost {spent / MIB:.2f} MiB")
            assert spent <= 16 * MIB
            assert (await slow_echo(server)) <= 4 * 0.05


@OnBoth
async def test_who_reads_nothing_is_given_up(servers: Pool, host: str) -> None:
    """Over WebSocket our own listener asks for signs of life instead: a busy client answers pings."""
    calls = [("big", {"size": 20 * MIB}), ("stream", {"count": 1_000_000, "size": 1_000})]
    async with servers(host, limits={"stall_timeout": 0.5}) as server, AsyncExitStack() as stack:
        await server.warm()
        session = await initialize(server)
        for tool, arguments in calls:
            for make, owner in ((enveloped, None), (request, session)):
                wire = await stack.enter_async_context(server.wire(receive_buffer=4096))
                meta = {"progressToken": tool}
                text = make(tool, "tools/call", name=tool, arguments=arguments, _meta=meta)[:-1]
                await wire.say(post(text, session=owner))
            for road in ("sse", "websocket") if host == "hypercorn" else ("sse",):
                await stack.enter_async_context(unread(server, road, tool, **arguments))
        began, counts = trio.current_time(), await server.counts()
        kept = server.base["files"] + 2  # two of HTTP+SSE, over which there were POSTs
        while counts["files"] > kept and trio.current_time() - began < 4 * 3:
            await trio.sleep(0.05)
            counts = await server.counts()
        print(f"{host}: given up after {trio.current_time() - began:.1f} s, then {counts}")
        assert counts["files"] <= kept
        assert (counts["streams"], counts["sessions"]) == (0, 1)
        async with server.wire() as wire:
            # A call of a session goes on, and its result waits for a client that comes back.
            assert (await wire.ask(http("DELETE", "/mcp", f"Mcp-Session-Id: {session}"))).status == 200


@OnBoth
async def test_bodies_that_do_not_come_hold_bounded_memory_and_nobody_else(servers: Pool, host: str) -> None:
    refused = 0

    async def begin(server: Served) -> None:
        nonlocal refused
        async with server.wire() as wire:
            status = (await wire.ask(post(b"x" * 3 * MIB)[:-MIB])).status
            refused += status == 503

    async with servers(host, fresh=True, limits={"max_bodies": 8 * MIB, "linger_timeout": 0.1}) as server:
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


async def test_a_client_of_http_2_that_grants_no_window_is_bounded_and_given_up(servers: Pool) -> None:
    head = [(b"content-type", b"application/json"), (b"mcp-protocol-version", b"2026-07-28")]
    head += [(b"accept", b"application/json, text/event-stream"), (b"mcp-method", b"tools/call")]
    async with servers("hypercorn", limits={"stall_timeout": 1.0}) as server:
        await server.warm()
        base = server.forget_peak()
        async with server.wire() as wire:
            client = H2Client(wire.stream, window=0)
            for n in range(50):
                tool = "big" if n % 2 else "stream"
                arguments = {"size": 200_000} if n % 2 else {"count": 1_000_000, "size": 1_000}
                call = enveloped(n, "tools/call", name=tool, arguments=arguments, _meta={"progressToken": n})
                extra = [*head, (b"mcp-name", tool.encode())]
                await client.request(b"/mcp", body=call[:-1], extra=extra)
            while (await server.counts())["exchanges"] < 25:  # noqa: ASYNC110  # it is another process
                await trio.sleep(0.01)
            assert await slow_echo(server) <= 4 * 0.05
            spent = server.peak - base
            print(f"50 streams without a window cost {spent / MIB:.1f} MiB")
            # What was asked for, and what waits for a reader of each stream until its handler does.
            assert spent <= 25 * 0.2 * 3 * MIB + 25 * MIB
            with trio.fail_after(4 * 3):
                while (await server.counts())["exchanges"]:  # noqa: ASYNC110
                    await trio.sleep(0.05)
