"""Clients that come and go by the thousand: what they leave behind, which should be nothing."""

from __future__ import annotations

import base64
import random
import socket
import struct
import sys
from collections import Counter

import pytest
import trio

from tests.hostile.network import BOTH, HOSTS, Pool, Served, Wire, hello, http, initialize, on, post
from tests.hostile.peers import KIB, MIB, enveloped, request
from tests.transports.websocket_support import message

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
]
OnBoth = pytest.mark.parametrize("host", HOSTS)

_EVENTS = "Accept: text/event-stream"
_UPGRADE = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
_RESET = struct.pack("ii", 1, 0)


def _arrivals(rng: random.Random, session: str, n: int) -> bytes:
    """What a client says before it leaves; not always all of it."""
    kind = rng.randrange(6)
    arguments = {"hang": {}, "stream": {"count": 1_000, "size": 1_000}, "big": {"size": 300_000}, "echo": {}}
    tool = rng.choice(list(arguments))
    named = {"name": tool, "arguments": arguments[tool], "_meta": {"progressToken": n}}
    if kind < 2:
        said = post(enveloped(n, "tools/call", **named)[:-1])
        return said if kind else said[: rng.randrange(len(said))]
    if kind == 2:
        tool = rng.choice(["echo", "stream"])
        call = request(n, "tools/call", name=tool, arguments=arguments[tool], _meta={"progressToken": n})
        return post(call[:-1], session=session)
    if kind == 3:
        return http("GET", "/sse", _EVENTS)
    if kind == 4:
        return http("GET", "/mcp", _EVENTS, f"Mcp-Session-Id: {session}")
    key = f"Sec-WebSocket-Key: {base64.b64encode(bytes(16)).decode()}"
    calls = [message(request(id, "tools/call", name="hang", arguments={})[:-1]) for id in range(3)]
    return http("GET", "/ws", *_UPGRADE, key) + message(hello("2025-11-25")) + b"".join(calls)


async def _come_and_go(server: Served, said: bytes, stay: float, reset: bool, most: trio.Semaphore) -> None:
    async with most:
        wire = await server.connect()
        try:
            with trio.move_on_after(stay):
                await wire.say(said)
                await trio.sleep_forever()
        except trio.BrokenResourceError:
            pass
        finally:
            if reset:
                wire.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            await trio.aclose_forcefully(wire.stream)


@OnBoth
async def test_who_leaves_at_a_bad_moment_leaves_nothing(servers: Pool, host: str) -> None:
    rng = random.Random(1_000)
    async with servers(host, silence=0.02) as server:
        await server.warm()
        async with on(server, "session") as lane:
            base = server.memory
            most = trio.Semaphore(50)
            async with trio.open_nursery() as nursery:
                for n in range(1_000 if host == "own" else 400):
                    said = _arrivals(rng, lane.session, n)
                    nursery.start_soon(_come_and_go, server, said, rng.random() * 0.1, rng.random() < 0.5, most)
            assert (await lane.ask("a", "echo", text="alive"))["id"] == "a"
            # The calls of the session go on without their readers, to their ends.
            with trio.fail_after(20):
                while (await server.counts())["running"]:  # noqa: ASYNC110  # it is another process
                    await trio.sleep(0.05)
            print(f"{host}: {(server.memory - base) / MIB:.1f} MiB for what a storm left in a session")


@OnBoth
async def test_who_leaves_with_more_behind_a_request_is_noticed_at_once(servers: Pool, host: str) -> None:
    """Whether any of it is read before the answer has ended, or not."""
    call = post(enveloped(1, "tools/call", name="hang", arguments={})[:-1])
    async with servers(host, silence=0.02) as server:
        for said in (http("GET", "/sse", _EVENTS), call):
            for behind in (b"", b"x", call, b"x" * 100_000):
                async with server.wire() as wire:
                    await wire.say(said, behind)
                    await wire.head()
                    if said is not call:
                        await wire.chunk()  # with nothing left to read the client's end is no reset
                    assert await server.counts() != server.base
                await server.at_rest(seconds=5)  # before a stream that is silent could be written to


async def _begin_sessions(server: Served, count: int) -> Counter[int]:
    answers: Counter[int] = Counter()
    said = http("POST", "/mcp", "Content-Type: application/json", f"Accept: {BOTH}", body=hello("2025-11-25"))
    async with server.wire() as wire:
        for _ in range(0, count, 50):
            await wire.say(said * 50)
            for _ in range(50):
                answer = await wire.answer()
                assert answer.status == 200 or answer.headers["retry-after"] == "1"
                answers[answer.status] += 1
    return answers


@OnBoth
async def test_sessions_are_bounded_and_those_nobody_uses_end(servers: Pool, host: str) -> None:
    many, most = (20_000, 1_000) if host == "own" else (1_000, 300)
    async with servers(host, max_sessions=most, session_idle=1.5) as server:
        await server.warm()
        base = server.memory
        answers = await _begin_sessions(server, many)
        each = (server.memory - base) / most
        print(f"{host}: {dict(answers)}, {each / KIB:.1f} KiB each")
        assert answers[503], "those that were there had to go first"
        assert (await server.counts())["sessions"] <= most
        assert each <= 20 * KIB
        with trio.fail_after(4 * 10):
            while (await server.counts())["sessions"]:  # noqa: ASYNC110
                await trio.sleep(0.2)
        await _begin_sessions(server, 50)


async def _abandon(server: Served, count: int, *said: bytes) -> None:
    for n in range(count):
        async with server.wire() as wire:
            await wire.say(said[n % len(said)])
            if n % 2:
                await wire.head()


async def test_streams_that_are_abandoned_are_bounded(servers: Pool) -> None:
    async with servers("own", max_replays=100) as server:
        await server.warm()
        session = await initialize(server)
        call = {"name": "stream", "arguments": {"count": 3}, "_meta": {"progressToken": 1}}
        posts = [post(request(f"{n}", "tools/call", **call)[:-1], session=session) for n in range(100)]
        listen = http("GET", "/mcp", _EVENTS, f"Mcp-Session-Id: {session}")
        await _abandon(server, 500, *posts, listen)
        base = server.memory
        await _abandon(server, 2_000, *posts, listen)
        print(f"2,000 streams more: {(server.memory - base) / KIB:.0f} KiB")
        assert server.memory - base <= 0.5 * MIB
        async with server.wire() as wire:
            assert (await wire.ask(http("DELETE", "/mcp", f"Mcp-Session-Id: {session}"))).status == 200


@OnBoth
async def test_a_flood_that_nobody_reads_is_bounded_and_costs_no_result(servers: Pool, host: str) -> None:
    async with servers(host) as server:
        await server.warm()
        session = await initialize(server)
        base = server.forget_peak()
        ids: list[str] = []
        for n in range(3):
            call = {"name": "stream", "arguments": {"count": 5_000, "size": 1_000}, "_meta": {"progressToken": n}}
            async with server.wire() as wire:
                await wire.say(post(request(n, "tools/call", **call)[:-1], session=session))
                ids.append(await _first_event(wire))
        with trio.fail_after(20):
            while (await server.counts())["running"]:  # noqa: ASYNC110
                await trio.sleep(0.05)
        print(f"{host}: {(server.peak - base) / MIB:.2f} MiB for 15 MB that nobody read")
        assert server.peak - base <= 4 * MIB
        for n, id in enumerate(ids):
            async with server.wire() as wire:
                await wire.say(http("GET", "/mcp", _EVENTS, f"Mcp-Session-Id: {session}", f"Last-Event-ID: {id}"))
                assert (await wire.head()).status == 200
                while "result" not in (heard := await wire.message()):
                    pass
                assert (heard["id"], heard["result"]["content"][0]["text"]) == (n, "streamed")
        async with server.wire() as wire:
            assert (await wire.ask(http("DELETE", "/mcp", f"Mcp-Session-Id: {session}"))).status == 200


async def _first_event(wire: Wire) -> str:
    assert (await wire.head()).status == 200
    text = await wire.chunk()
    assert text.startswith(b"id: ")
    return text[4:].partition(b"\n")[0].decode()
