"""Twenty thousand requests and frames with a little wrong in them: no crash, no hang, nothing told, nothing kept."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import trio

from tests.hostile.mutations import of_frames, of_http2, of_requests
from tests.hostile.network import HOSTS, Pool, Served, Wire, initialize, on, upgrade
from tests.hostile.peers import MIB

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
]
OnBoth = pytest.mark.parametrize("host", HOSTS)

_SECRETS = (b"Traceback", b"secret of the handler", b"site-packages", b'File "')
_HASTY: dict[str, Any] = {
    "silence": 0.02,
    "session_idle": 1.0,
    "max_sessions": 50,
    "limits": {"head_timeout": 0.1, "body_timeout": 0.1, "linger_timeout": 0.02, "stall_timeout": 0.5},
}


async def _say_all(
    server: Served, make: Callable[[], bytes], count: int, *, websocket: bool = False, patience: float = 10
) -> int:
    """Say so many wrong things on a connection each; return how many were answered."""
    answered = 0

    async def some(count: int) -> None:
        nonlocal answered
        for _ in range(count):
            said = make()
            async with server.wire() as wire:
                heard = await _hear(wire, said, websocket, patience)
            assert not any(secret in heard for secret in _SECRETS), (said, heard)
            assert not heard.startswith(b"HTTP/1.1 500"), said
            answered += bool(heard)

    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(some, count // 50)
    return answered


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
    grown = server.memory - base
    print(f"{server.software}: {answered} of {count} {what} answered, {grown / MIB:.2f} MiB kept")
    assert grown <= 2 * MIB
    async with on(server, "modern") as lane:
        assert (await lane.ask(1, "echo", text="alive"))["id"] == 1


@OnBoth
async def test_mutations_of_requests_do_no_harm(servers: Pool, host: str) -> None:
    count = 5_000 if host == "own" else 500
    async with servers(host, **_HASTY) as server:
        await server.warm()
        make = of_requests(random.Random(20_000), await initialize(server))
        await _say_all(server, make, count // 5)
        await server.counts()
        base = server.memory
        answered = await _say_all(server, make, count)
        await _survived(server, base, "requests", count, answered)


@OnBoth
async def test_mutations_of_websocket_frames_do_no_harm(servers: Pool, host: str) -> None:
    count = 1_500 if host == "own" else 300
    async with servers(host, limits={"stall_timeout": 0.5}) as server:
        await server.warm()
        make = of_frames(random.Random(20_000))
        await _say_all(server, make, count // 2, websocket=True, patience=0.02)
        await server.at_rest()
        base = server.memory
        answered = await _say_all(server, make, count, websocket=True, patience=0.02)
        await _survived(server, base, "conversations over WebSocket", count, answered)


async def test_mutations_of_http_2_do_no_harm(servers: Pool) -> None:
    async with servers("hypercorn", **_HASTY) as server:
        await server.warm()
        make = of_http2(random.Random(20_000))
        await _say_all(server, make, 500, patience=0.5)
        await server.at_rest()
        base = server.memory
        answered = await _say_all(server, make, 500, patience=0.5)
        assert answered >= 250
        await _survived(server, base, "connections of HTTP/2", 500, answered)
