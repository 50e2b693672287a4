"""Says wrong things to a server by the thousand, and sees that it lives on, tells nothing and keeps nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import trio

from tests.fuzz.effort import FULL, PATIENCE
from tests.guarantees.report import figure
from tests.peers.clients import on
from tests.peers.http1 import HttpWire
from tests.peers.processes import MIB
from tests.peers.servers import ServerProcess
from tests.peers.websockets import upgrade

__all__ = ["CALM", "HASTY", "MOMENT", "PULSE", "SECRETS", "alive", "say_all", "survives"]

SECRETS = (b"Traceback", b"secret of the handler", b"site-packages", b'File "')
_PATIENCE = 30.0  # seconds
PULSE = 10  # after so many wrong things the first of those that say them asks whether all is well
# How long a server waits for what does not come. In a long run the machine has to be given time to say it all.
_SOON = 0.5 if FULL else 0.2
MOMENT = 0.25 if FULL else 0.05  # for an answer of those that need not answer
HASTY: dict[str, Any] = {
    "silence": 0.02,
    "session_idle": 1.0,
    "max_sessions": 50,
    "limits": {"head_timeout": _SOON, "body_timeout": _SOON, "linger_timeout": 0.02, "stall_timeout": 0.5},
}
# Where what is wrong leaves nothing to wait for, a busy machine must not make a server cut who is just slow.
CALM: dict[str, Any] = {**HASTY, "limits": {"linger_timeout": 0.02}}


async def say_all(
    server: ServerProcess, make: Callable[[], bytes], count: int, *, websocket: str | None = None, patience: float = 10
) -> int:
    """Say so many wrong things on a connection each; return how many were answered."""
    answered = closed = 0

    async def some(count: int, *, first: bool) -> None:
        nonlocal answered, closed
        for n in range(count):
            if first and n % PULSE == PULSE - 1:
                await alive(server, "websocket" if websocket == "/ws" else "modern")
            said = make()
            async with server.wire() as wire:
                try:
                    heard = await _hear(wire, said, websocket, patience)
                except EOFError:
                    heard = b""
                    closed += 1  # before it became a WebSocket
            assert not any(secret in heard for secret in SECRETS), (said, heard)
            # The tool that crashes does so; in the agent-tools protocol that is a status of its own.
            assert not heard.startswith(b"HTTP/1.1 500") or b"crash" in said, said
            answered += bool(heard)

    async with trio.open_nursery() as nursery:
        for n in range(50):
            nursery.start_soon(partial(some, count // 50, first=n == 0))
    assert closed <= count // 100, "on a busy machine a few may be cut before their handshake is read"
    return answered


async def alive(server: ServerProcess, road: str = "modern") -> None:
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


async def _hear(wire: HttpWire, said: bytes, websocket: str | None, patience: float) -> bytes:
    """Say something and return the beginning of what is said to it; b"" if the server just closes."""
    heard = b""
    try:
        if websocket is not None:
            await upgrade(wire, path=websocket)
        await wire.send(said)
        with trio.move_on_after(patience) as scope:
            heard = bytes(await wire.stream.receive_some())
        assert patience < 1 or not scope.cancelled_caught, f"neither an answer nor an end to {said!r}"
    except trio.BrokenResourceError:
        pass
    return heard


async def survives(
    server: ServerProcess, what: str, warm: int, many: int, say: Callable[[int], Awaitable[int]], *, promise: int = 12
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
    figure(promise, f"kept after {many:,} mutations", grown / MIB, 2, "MiB", on)
    assert grown <= 2 * MIB
    await alive(server)
    if what == "websocket":
        await alive(server, "websocket")
    return answered
