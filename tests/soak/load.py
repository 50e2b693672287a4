"""What a soaked server has to bear: clients that behave, and clients that do not, each going on until it is told.

Everything is drawn from a seed and speaks to the server byte by byte, so that what is measured is the server.
"""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, Final

import attrs
import trio

from tests.hostile.mutations import of_frames, of_messages, of_requests
from tests.peers.clients import ROADS, on, open_session
from tests.peers.http1 import http_request, post
from tests.peers.messages import call, initialize, modern_request, notification, reported_call
from tests.peers.processes import MIB, ChildServer
from tests.peers.servers import ServerProcess
from tests.peers.websockets import message, upgrade

__all__ = ["Load", "soak_lines", "soak_network"]

_RESET: Final = struct.pack("ii", 1, 0)
_PATIENCE: Final = 300.0  # seconds for all one agent does at a time, at most a few hundred calls on a busy machine
_GONE: Final = (trio.BrokenResourceError, trio.ClosedResourceError, EOFError, OSError)


@attrs.define
class Load:
    """The load on one process.

    Attributes:
        calls: requests sent.
        answers: of them, those that were answered to somebody who waited.
        done: set when it is time to leave.
    """

    rng: random.Random
    calls: int = 0
    answers: int = 0
    done: trio.Event = attrs.field(factory=trio.Event)
    kinds: dict[str, int] = attrs.field(factory=dict)

    def note(self, kind: str, calls: int = 1) -> None:
        self.calls += calls
        self.kinds[kind] = self.kinds.get(kind, 0) + 1


async def soak_network(server: ServerProcess, load: Load) -> None:
    """Every kind of client over every road to one server, side by side, until it is done."""
    agents: list[Callable[[ServerProcess, Load], Awaitable[None]]] = []
    agents += [_behaved(road) for road in ROADS for _ in range(2)]
    agents += [_rude(road) for road in ROADS]
    agents += [_slow(road) for road in ("modern", "sse", "websocket")]
    agents += [_pipelined, _wrong_requests, _wrong_frames, _wrong_messages, _oversize, _abandoned]
    async with trio.open_nursery() as nursery:
        for agent in agents:
            nursery.start_soon(_again, agent, server, load)


async def _again(agent: Callable[[ServerProcess, Load], Awaitable[None]], server: ServerProcess, load: Load) -> None:
    while not load.done.is_set():
        with trio.move_on_after(_PATIENCE) as scope:
            try:
                await agent(server, load)
            except _GONE as error:
                load.note(f"gone: {type(error).__name__}", 0)
        assert not scope.cancelled_caught, f"{agent.__qualname__} hangs"
        await trio.sleep(load.rng.random() * 0.02)


# Those that behave


def _behaved(road: str) -> Callable[[ServerProcess, Load], Awaitable[None]]:
    async def behave(server: ServerProcess, load: Load) -> None:
        async with on(server, road) as lane:
            for n in range(load.rng.randrange(10, 80)):
                tool, arguments = _drawn(load.rng)
                load.note(f"{road} {tool}")
                answer = await lane.ask(n, tool, **arguments)
                assert answer["id"] == n, answer
                load.answers += 1
                if load.done.is_set():
                    break

    return behave


def _drawn(rng: random.Random) -> tuple[str, dict[str, Any]]:
    kind = rng.random()
    if kind < 0.6:
        return "echo", {"text": "x" * rng.choice([1, 100, 5_000])}
    if kind < 0.75:
        return "stream", {"count": rng.randrange(1, 20)}
    return rng.choice(
        [
            ("big", {"size": rng.choice([50_000, 300_000])}),
            ("crash", {}),
            ("nap", {}),
            ("change", {}),
            ("chatter", {"count": 10}),
            ("no_such_tool", {}),
            ("echo", {"text": 5}),
        ]
    )


async def _pipelined(server: ServerProcess, load: Load) -> None:
    """A hundred calls at once, over a WebSocket, and their answers."""
    async with on(server, "websocket") as lane:
        for first in range(0, load.rng.randrange(1, 4) * 100, 100):
            ids = range(first, first + 100)
            load.note("a hundred at once", 100)
            await lane.raw.say(*(message(lane.call(n, "echo", text="x")) for n in ids))
            assert {(await lane.hear())["id"] for _ in ids} == set(ids)
            load.answers += 100


# Those that do not


def _rude(road: str) -> Callable[[ServerProcess, Load], Awaitable[None]]:
    """Calls under way, then a reset, an end, or nothing more."""

    async def leave(server: ServerProcess, load: Load) -> None:
        calls = [("hang", {}), ("stream", {"count": 300, "size": 500}), ("big", {"size": 500_000}), ("nap", {})]
        async with _reset(server, load.rng) as wire:
            if road == "websocket":
                raw = await upgrade(wire)
                await raw.say(message(initialize()))
                said = [message(reported_call(n, tool, **arguments)) for n, (tool, arguments) in enumerate(calls * 3)]
            elif road == "modern":
                said = [post(reported_call(1, *_one(load.rng, calls)[:1], modern=True, **_one(load.rng, calls)[1]))]
            else:
                session = await open_session(server)
                tool, arguments = _one(load.rng, calls)
                said = [post(reported_call(1, tool, **arguments), session=session)]
            load.note(f"rude {road}", len(said))
            await wire.send(*said)
            with trio.move_on_after(load.rng.random() * 0.05):
                while await wire.stream.receive_some(4096):
                    pass
        if road not in ("websocket", "modern"):
            async with server.wire() as goodbye:
                await goodbye.ask(http_request("DELETE", "/mcp", f"Mcp-Session-Id: {session}"))

    return leave


def _one(rng: random.Random, calls: list[tuple[str, dict[str, Any]]]) -> tuple[str, dict[str, Any]]:
    return rng.choice([each for each in calls if each[0] != "hang"] if rng.random() < 0.5 else calls)


@asynccontextmanager
async def _reset(server: ServerProcess, rng: random.Random, **options: Any) -> AsyncIterator[Any]:
    """A connection that ends with a reset half of the time."""
    async with server.wire(**options) as wire:
        try:
            yield wire
        finally:
            if rng.random() < 0.5:
                wire.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


def _slow(road: str) -> Callable[[ServerProcess, Load], Awaitable[None]]:
    """Asks for much and takes it by the spoonful, for a while."""

    async def read(server: ServerProcess, load: Load) -> None:
        text = reported_call(1, "stream", modern=road == "modern", count=500, size=1_000)
        load.note(f"slow {road}")
        if road == "sse":
            async with on(server, "sse", receive_buffer=4096) as stream:
                await stream.exchanged(text)
                await _sip(stream.stream, load)
            return
        async with _reset(server, load.rng, receive_buffer=4096) as wire:
            if road == "websocket":
                await upgrade(wire)
                await wire.send(message(initialize()), message(text))
            else:
                await wire.send(post(text))
            await _sip(wire, load)

    return read


async def _sip(wire: Any, load: Load) -> None:
    with trio.move_on_after(load.rng.random() * 2):
        while await wire.stream.receive_some(2_000):  # noqa: ASYNC110  # to be slow is what it is for
            await trio.sleep(0.02)


async def _say(server: ServerProcess, load: Load, said: bytes, *, websocket: bool = False) -> bytes:
    """Say something wrong on a connection of its own, and return the beginning of the answer."""
    heard = b""
    async with _reset(server, load.rng) as wire:
        if websocket:
            await upgrade(wire)
        await wire.send(said)
        with trio.move_on_after(0.2):
            heard = bytes(await wire.stream.receive_some())
    assert b"Traceback" not in heard, (said, heard)
    return heard


async def _wrong_requests(server: ServerProcess, load: Load) -> None:
    session = await open_session(server)
    make = of_requests(load.rng, session)
    for _ in range(30):
        load.note("wrong request")
        await _say(server, load, make())
    async with server.wire() as wire:
        await wire.ask(http_request("DELETE", "/mcp", f"Mcp-Session-Id: {session}"))


async def _wrong_frames(server: ServerProcess, load: Load) -> None:
    load.note("wrong frames")
    await _say(server, load, of_frames(load.rng)(), websocket=True)


async def _wrong_messages(server: ServerProcess, load: Load) -> None:
    make = of_messages(load.rng)
    async with on(server, "sse") as lane:
        for _ in range(30):
            load.note("wrong message")
            await lane.exchanged(make())


@cache
def _large() -> bytes:
    return modern_request(1, "tools/call", name="echo", arguments={"text": "x" * (5 * MIB)})


@cache
def _large_frame() -> bytes:
    return message(_large())  # it takes a while to mask


async def _oversize(server: ServerProcess, load: Load) -> None:
    """Five MiB where four are allowed."""
    load.note("oversize")
    async with _reset(server, load.rng) as wire:
        if load.rng.random() < 0.5:
            await wire.ask(post(_large()))
        else:
            await upgrade(wire)
            await wire.send(message(initialize()), _large_frame())
            with trio.move_on_after(1):
                await wire.stream.receive_some()
    await trio.sleep(2 * load.rng.random())


async def _abandoned(server: ServerProcess, load: Load) -> None:
    """Sessions nobody ends; they expire."""
    for _ in range(3):
        load.note("abandoned session")
        await open_session(server)
    await trio.sleep(load.rng.random())


# A server on standard input and output


async def soak_lines(server: ChildServer, load: Load) -> None:
    """Everything over one pair of pipes: what is right is answered, whatever stands between."""
    make = of_messages(load.rng)
    writing = (
        trio.Lock()
    )  # a subscription may be acknowledged, and so be ended, while the lines are still being written

    async def say(*texts: bytes) -> None:
        async with writing:
            await server.say(*texts)

    n = 0
    while not load.done.is_set():
        lines, waiting = [], set()
        for _ in range(load.rng.randrange(5, 60)):
            n += 1
            kind = load.rng.random()
            if kind < 0.75:
                tool, arguments = _drawn(load.rng)
                lines.append(call(f"n{n}", tool, **arguments))
                waiting.add(f"n{n}")
            elif kind < 0.85:
                lines += [
                    call(f"n{n}", "hang"),
                    notification("notifications/cancelled", requestId=f"n{n}", reason="soak"),
                ]
            else:
                lines.append(make().replace(b"\n", b" "))
        load.note("round over stdio", len(lines))
        if load.rng.random() < 0.01:
            lines.append(_large())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(say, *lines)
            with trio.fail_after(_PATIENCE):
                while waiting:
                    heard = await server.hear()
                    if not isinstance(heard, dict):
                        continue
                    if heard.get("method") == "notifications/subscriptions/acknowledged":
                        subscription = heard["params"]["_meta"]["io.modelcontextprotocol/subscriptionId"]
                        nursery.start_soon(say, notification("notifications/cancelled", requestId=subscription))
                    elif "method" not in heard and heard.get("id") in waiting:
                        waiting.discard(heard["id"])
                        load.answers += 1
