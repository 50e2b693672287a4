"""Promise 12: input with a little wrong in it does no harm: no crash, no hang, nothing told, nothing kept.

Twenty thousand mutations over stdio and some thousands on each transport; twenty thousand of each under `nox -s fuzz`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import orjson
import pytest
import trio

from tests.fuzz.effort import FULL, PATIENCE, count
from tests.guarantees.report import figure
from tests.guarantees.worlds import LOCAL, Homes, World
from tests.hostile.mutations import of_frames, of_http2, of_messages, of_requests
from tests.peers.clients import EventsPeer, Peer, on, open_session
from tests.peers.http1 import HttpWire
from tests.peers.messages import call, modern_request, notification, request
from tests.peers.processes import MIB, ChildServer, child_server
from tests.peers.servers import ServerPool, ServerProcess
from tests.peers.serving import SOFTWARE
from tests.peers.websockets import upgrade

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
]
OnBoth = pytest.mark.parametrize("host", SOFTWARE)

_SECRETS = (b"Traceback", b"secret of the handler", b"site-packages", b'File "')
_PATIENCE = 30.0  # seconds
_PULSE = 10  # after so many wrong things the first of those that say them asks whether all is well
# How long a server waits for what does not come. In a long run the machine has to be given time to say it all.
_SOON = 0.5 if FULL else 0.2
_MOMENT = 0.25 if FULL else 0.05  # for an answer of those that need not answer
_HASTY: dict[str, Any] = {
    "silence": 0.02,
    "session_idle": 1.0,
    "max_sessions": 50,
    "limits": {"head_timeout": _SOON, "body_timeout": _SOON, "linger_timeout": 0.02, "stall_timeout": 0.5},
}
# Where what is wrong leaves nothing to wait for, a busy machine must not make a server cut who is just slow.
_CALM: dict[str, Any] = {**_HASTY, "limits": {"linger_timeout": 0.02}}


async def _say_all(
    server: ServerProcess, make: Callable[[], bytes], count: int, *, websocket: bool = False, patience: float = 10
) -> int:
    """Say so many wrong things on a connection each; return how many were answered."""
    answered = closed = 0

    async def some(count: int, *, first: bool) -> None:
        nonlocal answered, closed
        for n in range(count):
            if first and n % _PULSE == _PULSE - 1:
                await _alive(server, "websocket" if websocket else "modern")
            said = make()
            async with server.wire() as wire:
                try:
                    heard = await _hear(wire, said, websocket, patience)
                except EOFError:
                    heard = b""
                    closed += 1  # before it became a WebSocket
            assert not any(secret in heard for secret in _SECRETS), (said, heard)
            assert not heard.startswith(b"HTTP/1.1 500"), said
            answered += bool(heard)

    async with trio.open_nursery() as nursery:
        for n in range(50):
            nursery.start_soon(partial(some, count // 50, first=n == 0))
    assert closed <= count // 100, "on a busy machine a few may be cut before their handshake is read"
    return answered


async def _alive(server: ServerProcess, road: str = "modern") -> None:
    """What is right is answered rightly, whatever is going on beside it."""
    with trio.fail_after(_PATIENCE):
        while True:
            try:
                async with on(server, road) as lane:
                    heard = await lane.ask(1, "echo", text="alive")
                break
            except (trio.BrokenResourceError, EOFError):
                # On a busy machine we may take longer to ask than these servers wait.
                await trio.sleep(0.1)
    assert heard["result"]["content"][0]["text"] == "alive"


async def _hear(wire: HttpWire, said: bytes, websocket: bool, patience: float) -> bytes:
    """Say something and return the beginning of what is said to it; b"" if the server just closes."""
    heard = b""
    try:
        if websocket:
            await upgrade(wire)
        await wire.send(said)
        with trio.move_on_after(patience) as scope:
            heard = bytes(await wire.stream.receive_some())
        assert patience < 1 or not scope.cancelled_caught, f"neither an answer nor an end to {said!r}"
    except trio.BrokenResourceError:
        pass
    return heard


async def _survives(
    server: ServerProcess, what: str, warm: int, many: int, say: Callable[[int], Awaitable[int]]
) -> int:
    """Say so many wrong things, see what is kept, and return how many were answered.

    A leak grows by each turn. What a busy machine lets pile up at one time grows by the first of them, so there are
    more turns for as long as the bound does not hold.
    """
    await say(warm)
    answered = grown = 0
    for _ in range(3):
        await server.at_rest()
        base = await server.kept()
        answered = await say(many)
        with trio.fail_after(PATIENCE):
            while (await server.counts())["sessions"]:  # noqa: ASYNC110  # it is another process
                await trio.sleep(0.1)
        await server.at_rest()
        grown = await server.kept() - base
        if grown <= 2 * MIB:
            break
    on = f"{what}, {server.software}"
    print(f"{on}: {answered} of {many} answered")
    figure(12, f"kept after {many:,} mutations", grown / MIB, 2, "MiB", on)
    assert grown <= 2 * MIB
    await _alive(server)
    if what == "websocket":
        await _alive(server, "websocket")
    return answered


@OnBoth
async def test_mutations_of_requests_do_no_harm(servers: ServerPool, host: str) -> None:
    many = count(5_000 if host == "own" else 500)
    async with servers(host, **_HASTY) as server:
        await server.warm()
        make = of_requests(random.Random(20_000), await open_session(server))
        await _survives(server, "http", min(many // 5, 1_000), many, partial(_say_all, server, make))


@OnBoth
async def test_mutations_of_messages_over_http_sse_do_no_harm(servers: ServerPool, host: str) -> None:
    many = count(1_000 if host == "own" else 300)
    async with servers(host, **{**_CALM, "silence": 5.0}) as server:
        await server.warm()
        make = of_messages(random.Random(20_000))
        await _survives(server, "http+sse", min(many // 5, 1_000), many, partial(_post_all, server, make))


async def _post_all(server: ServerProcess, make: Callable[[], bytes], count: int) -> int:
    """Post so many wrong messages to streams of HTTP+SSE, ten beside each other; return how many were taken."""
    taken = 0

    async def some(count: int) -> None:
        nonlocal taken
        while count:
            async with on(server, "sse") as lane, trio.open_nursery() as nursery:
                nursery.start_soon(_read_all, lane)
                for _ in range(min(count, 5 * _PULSE)):
                    count -= 1
                    said = make()
                    with trio.fail_after(PATIENCE):
                        answer = await lane.exchanged(said)
                    assert answer.status in (202, 400, 413), (said, answer)
                    assert not any(secret in answer.body for secret in _SECRETS), (said, answer)
                    taken += answer.status == 202
                nursery.cancel_scope.cancel()
            await _alive(server)

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(some, count // 10)
    return taken


async def _read_all(lane: EventsPeer) -> None:
    try:
        while chunk := await lane.stream.chunk():
            assert not any(secret in chunk for secret in _SECRETS), chunk
    except (EOFError, trio.BrokenResourceError):
        pass  # what was posted may end a session, such as garbage before its handshake


@OnBoth
async def test_mutations_of_websocket_frames_do_no_harm(servers: ServerPool, host: str) -> None:
    many = count(1_500 if host == "own" else 300)
    async with servers(host, limits={"stall_timeout": 0.5}) as server:
        await server.warm()
        make = of_frames(random.Random(20_000))
        say = partial(_say_all, server, make, websocket=True, patience=_MOMENT)
        await _survives(server, "websocket", min(many // 2, 1_000), many, say)


async def test_mutations_of_http_2_do_no_harm(servers: ServerPool) -> None:
    many = count(500)
    async with servers("hypercorn", **_CALM) as server:
        await server.warm()
        make = of_http2(random.Random(20_000))
        answered = await _survives(server, "http/2", min(many, 1_000), many, partial(_say_all, server, make))
        assert answered == many, "the beginning is right, and is answered at once"


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
        base, before = server.memory, await _at_rest(server)
        await _mutate(server, rng, 20_000)
        kept = server.memory - base
        figure(12, "kept after 20,000 mutations", kept / MIB, 2, "MiB", f"stdio, {revision or '2026-07-28'}")
        assert kept <= 2 * MIB
        assert await _at_rest(server) == before
        assert await server.end() == 0
    assert server.errors.count(b"Traceback") == server.errors.count(b"the handler of tools/call crashed")


async def _at_rest(server: ChildServer) -> dict[str, int]:
    """What it counts of itself. The last of what was given up may still be ending when the first answer is made."""
    counts = await server.statistics()
    while (again := await server.statistics()) != counts:
        counts = again
    return counts


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
