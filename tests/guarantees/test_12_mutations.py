"""Promise 12: input with a little wrong in it does no harm: no crash, no hang, nothing told, nothing kept.

Twenty thousand mutations over stdio and some thousands on each transport; twenty thousand of each under `nox -s fuzz`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import orjson
import pytest
import trio

from tests.fuzz.effort import PATIENCE, count
from tests.guarantees.mutating import CALM, HASTY, MOMENT, PULSE, SECRETS, alive, say_all, survives
from tests.guarantees.report import figure
from tests.guarantees.worlds import LOCAL, Homes, World
from tests.hostile.mutations import of_exchanges, of_frames, of_http2, of_messages, of_requests
from tests.peers.clients import EventsPeer, Peer, on, open_session
from tests.peers.messages import call, modern_request, notification, request
from tests.peers.processes import MIB, ChildServer, child_server
from tests.peers.servers import ServerPool, ServerProcess
from tests.peers.serving import ON_EACH, SOFTWARE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
]
OnBoth = pytest.mark.parametrize("host", SOFTWARE)
OnEach = pytest.mark.parametrize("host", ON_EACH)


@OnBoth
async def test_mutations_of_requests_do_no_harm(servers: ServerPool, host: str) -> None:
    many = count(5_000 if host == "own" else 500)
    async with servers(host, **HASTY) as server:
        await server.warm()
        make = of_requests(random.Random(20_000), await open_session(server))
        await survives(server, "http", min(many // 5, 1_000), many, partial(say_all, server, make))


@OnEach
async def test_mutations_of_messages_over_http_sse_do_no_harm(servers: ServerPool, host: str) -> None:
    many = count(1_000 if host == "own" else 300)
    async with servers(host, **{**CALM, "silence": 5.0}) as server:
        await server.warm()
        make = of_messages(random.Random(20_000))
        await survives(server, "http+sse", min(many // 5, 1_000), many, partial(_post_all, server, make))


async def _post_all(server: ServerProcess, make: Callable[[], bytes], count: int) -> int:
    """Post so many wrong messages to streams of HTTP+SSE, ten beside each other; return how many were taken."""
    taken = 0

    async def some(count: int) -> None:
        nonlocal taken
        while count:
            async with on(server, "sse") as lane, trio.open_nursery() as nursery:
                nursery.start_soon(_read_all, lane)
                for _ in range(min(count, 5 * PULSE)):
                    count -= 1
                    said = make()
                    with trio.fail_after(PATIENCE):
                        answer = await lane.exchanged(said)
                    assert answer.status in (202, 400, 413), (said, answer)
                    assert not any(secret in answer.body for secret in SECRETS), (said, answer)
                    taken += answer.status == 202
                nursery.cancel_scope.cancel()
            await alive(server)

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(some, count // 10)
    return taken


async def _read_all(lane: EventsPeer) -> None:
    try:
        while chunk := await lane.stream.chunk():
            assert not any(secret in chunk for secret in SECRETS), chunk
    except (EOFError, trio.BrokenResourceError):
        pass  # what was posted may end a session, such as garbage before its handshake


@OnEach
async def test_mutations_of_websocket_frames_do_no_harm(servers: ServerPool, host: str) -> None:
    many = count(1_500 if host == "own" else 300)
    async with servers(host, limits={"stall_timeout": 0.5}) as server:
        await server.warm()
        make = of_frames(random.Random(20_000))
        say = partial(say_all, server, make, websocket="/ws", patience=MOMENT)
        await survives(server, "websocket", min(many // 2, 1_000), many, say)


@pytest.mark.parametrize(("what", "make"), [("http/2", of_http2), ("grpc", of_exchanges)])
async def test_mutations_of_http_2_do_no_harm(
    servers: ServerPool, what: str, make: Callable[[random.Random], Callable[[], bytes]]
) -> None:
    many = count(500)
    async with servers("own", **CALM) as server:
        await server.warm()
        say = partial(say_all, server, make(random.Random(20_000)))
        assert await survives(server, what, min(many, 1_000), many, say) == many, (
            "the beginning is right, and is answered at once"
        )


# Over stdio, and in this process

MANY = 2_000

_SEEDS = [
    call(1, "echo", text="hi"),
    call(2, "crash"),
    modern_request(3, "tools/call", name="echo", arguments={"text": "x"}),
    modern_request(4, "server/discover"),
    modern_request(5, "prompts/get", name="review", arguments={"path": "p"}),
    modern_request(6, "subscriptions/listen", notifications={"toolsListChanged": True}),
    request(7, "tools/list"),
    request(8, "resources/subscribe", uri="note://x"),
    request(9, "completion/complete", ref={"type": "ref/prompt", "name": "review"}, argument={"name": "path"}),
    request(10, "initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo={"name": "a", "version": "1"}),
    request(11, "logging/setLevel", level="info"),
    notification("notifications/cancelled", requestId=1, reason="x"),
    b"[" + request(12, "ping") + b"]",
]


_WORDS = [b"null", b"[]", b"{}", b"1e999", b'"\\ud800"', b"-1", b"99999999999999999999", b"true", b",", b"\xff"]


def mutated(rng: random.Random, line: bytes) -> bytes:
    data = bytearray(line)
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(data) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            data[place : place + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del data[place : place + rng.randrange(1, 8)]
        elif kind == 2:
            data[place:place] = rng.choice(_WORDS)
        else:
            data[place:place] = data[rng.randrange(len(data) + 1) :][:20]
    return bytes(data).replace(b"\n", b" ")


@pytest.mark.parametrize("revision", ["2025-03-26", "2025-11-25", None], ids=str)
async def test_mutations_over_stdio_do_no_harm(revision: str | None) -> None:
    rng = random.Random(20_000)
    async with child_server() as server:
        if revision is not None:
            await server.meet(revision)
        await _mutate(server, rng, 4_000)
        base, before = server.memory, await server.at_rest()
        await _mutate(server, rng, 20_000)
        kept = server.memory - base
        figure(12, "kept after 20,000 mutations", kept / MIB, 2, "MiB", f"stdio, {revision or '2026-07-28'}")
        assert kept <= 2 * MIB
        assert await server.at_rest() == before
        assert await server.end() == 0
    assert server.errors.count(b"Traceback") == server.errors.count(b"the handler of tools/call crashed")


async def _mutate(server: ChildServer, rng: random.Random, count: int) -> None:
    for first in range(0, count, 100):
        mark = f"mark {first}"
        lines = [mutated(rng, rng.choice(_SEEDS)) for _ in range(100)]
        await server.say(*lines, modern_request(mark, "tools/call", name="echo", arguments={}))
        found: Any = None
        while not isinstance(found, dict) or found.get("id") != mark:
            line = await server.line()
            assert b"Traceback" not in line
            assert b"secret of the handler" not in line
            found = orjson.loads(line)
            if isinstance(found, dict) and found.get("method") == "notifications/subscriptions/acknowledged":
                # What was subscribed to by chance is given up, so that in the end nothing is under way.
                subscription = found["params"]["_meta"]["io.modelcontextprotocol/subscriptionId"]
                await server.say(notification("notifications/cancelled", requestId=subscription))


@pytest.mark.parametrize("world", LOCAL, ids=str)
async def test_mutations_in_this_process_do_no_harm(homes: Homes, world: World) -> None:
    rng = random.Random(12)
    async with homes(world) as home, home.peer() as peer:
        await _mutate_here(peer, rng, MANY)
        base, tasks = await home.kept(), trio.lowlevel.current_statistics().tasks_living
        await _mutate_here(peer, rng, MANY)
        kept = await home.kept() - base
        figure(12, f"kept after {MANY:,} mutations", kept / MIB, 2, "MiB", str(world))
        assert kept <= 2 * MIB
        assert trio.lowlevel.current_statistics().tasks_living <= tasks


async def _mutate_here(peer: Peer, rng: random.Random, count: int) -> None:
    for n in range(count):
        await peer.say(mutated(rng, rng.choice(_SEEDS)))
        if n % 100 == 99:
            await peer.say(peer.call(f"mark {n}", "echo"))
            with trio.fail_after(PATIENCE):
                while (heard := await peer.hear()).get("id") != f"mark {n}":
                    assert "Traceback" not in str(heard)
                    assert "secret of the handler" not in str(heard)
            peer.heard.clear()
