"""Requests and frames with a little wrong in them: no crash, no hang, nothing told, nothing kept.

A few thousand in the plain suite, twenty thousand on each transport under `nox -s fuzz`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import trio

from tests.fuzz.effort import FULL, count
from tests.guarantees.report import figure
from tests.hostile.mutations import of_frames, of_http2, of_messages, of_requests
from tests.hostile.network import HOSTS, Pool, Served, Stream, Wire, initialize, on, upgrade
from tests.hostile.peers import MIB

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
]
OnBoth = pytest.mark.parametrize("host", HOSTS)

_SECRETS = (b"Traceback", b"secret of the handler", b"site-packages", b'File "')
_PATIENCE = 30.0  # seconds
_PULSE = 10  # after so many wrong things the first of those that say them asks whether all is well
# How long a server waits for what does not come. In a long run the machine has to be given time to say it all.
_SOON = 0.5 if FULL else 0.2
_MOMENT = 0.25 if FULL else 0.1  # for an answer of those that need not answer
_HASTY: dict[str, Any] = {
    "silence": 0.02,
    "session_idle": 1.0,
    "max_sessions": 50,
    "limits": {"head_timeout": _SOON, "body_timeout": _SOON, "linger_timeout": 0.02, "stall_timeout": 0.5},
}
# Where what is wrong leaves nothing to wait for, a busy machine must not make a server cut who is just slow.
_CALM: dict[str, Any] = {**_HASTY, "limits": {"linger_timeout": 0.02}}


async def _say_all(
    server: Served, make: Callable[[], bytes], count: int, *, websocket: bool = False, patience: float = 10
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


async def _alive(server: Served, road: str = "modern") -> None:
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


async def _hear(wire: Wire, said: bytes, websocket: bool, patience: float) -> bytes:
    """Say something and return the beginning of what is said to it; b"" if the server just closes."""
    heard = b""
    try:
        if websocket:
            await upgrade(wire)
        await wire.say(said)
        with trio.move_on_after(patience) as scope:
            heard = bytes(await wire.stream.receive_some())
        assert patience < 1 or not scope.cancelled_caught, f"neither an answer nor an end to {said!r}"
    except trio.BrokenResourceError:
        pass
    return heard


async def _survived(server: Served, base: int, what: str, count: int, answered: int) -> None:
    with trio.fail_after(20):
        while (await server.counts())["sessions"]:  # noqa: ASYNC110  # it is another process
            await trio.sleep(0.1)
    await server.at_rest()
    grown = await server.kept() - base
    print(f"{server.software}: {answered} of {count} {what} answered")
    figure(12, f"kept after {count:,} mutations", round(grown / MIB, 3), 2, "MiB", f"{what}, {server.software}")
    assert grown <= 2 * MIB
    await _alive(server)
    if "WebSocket" in what:
        await _alive(server, "websocket")


@OnBoth
async def test_mutations_of_requests_do_no_harm(servers: Pool, host: str) -> None:
    many = count(5_000 if host == "own" else 500)
    async with servers(host, **_HASTY) as server:
        await server.warm()
        make = of_requests(random.Random(20_000), await initialize(server))
        await _say_all(server, make, min(many // 5, 1_000))
        base = await server.kept()
        answered = await _say_all(server, make, many)
        await _survived(server, base, "requests", many, answered)


@OnBoth
async def test_mutations_of_messages_over_http_sse_do_no_harm(servers: Pool, host: str) -> None:
    many = count(1_000 if host == "own" else 300)
    async with servers(host, **{**_CALM, "silence": 5.0}) as server:
        await server.warm()
        make = of_messages(random.Random(20_000))
        await _post_all(server, make, min(many // 5, 1_000))
        await server.at_rest()
        base = await server.kept()
        answered = await _post_all(server, make, many)
        await _survived(server, base, "messages over HTTP+SSE", many, answered)


async def _post_all(server: Served, make: Callable[[], bytes], count: int) -> int:
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
                    with trio.fail_after(10):
                        answer = await lane.send(said)
                    assert answer.status in (202, 400, 413), (said, answer)
                    assert not any(secret in answer.body for secret in _SECRETS), (said, answer)
                    taken += answer.status == 202
                nursery.cancel_scope.cancel()
            await _alive(server)

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(some, count // 10)
    return taken


async def _read_all(lane: Stream) -> None:
    try:
        while chunk := await lane.stream.chunk():
            assert not any(secret in chunk for secret in _SECRETS), chunk
    except (EOFError, trio.BrokenResourceError):
        pass  # what was posted may end a session, such as garbage before its handshake


@OnBoth
async def test_mutations_of_websocket_frames_do_no_harm(servers: Pool, host: str) -> None:
    many = count(1_500 if host == "own" else 300)
    async with servers(host, limits={"stall_timeout": 0.5}) as server:
        await server.warm()
        make = of_frames(random.Random(20_000))
        await _say_all(server, make, min(many // 2, 1_000), websocket=True, patience=_MOMENT)
        await server.at_rest()
        base = await server.kept()
        answered = await _say_all(server, make, many, websocket=True, patience=_MOMENT)
        await _survived(server, base, "conversations over WebSocket", many, answered)


async def test_mutations_of_http_2_do_no_harm(servers: Pool) -> None:
    many = count(500)
    async with servers("hypercorn", **_CALM) as server:
        await server.warm()
        make = of_http2(random.Random(20_000))
        await _say_all(server, make, min(many, 1_000))
        await server.at_rest()
        base = await server.kept()
        answered = await _say_all(server, make, many)
        assert answered == many, "the beginning is right, and is answered at once"
        await _survived(server, base, "connections of HTTP/2", many, answered)
