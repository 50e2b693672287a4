"""Two hundred connections that try to fill a server's memory, run as a program of their own.

Its arguments are the port, and `http2` where that is served. Each tries one thing over and over, as fast as it is let,
until standard input ends or two minutes have passed. A line is written once all have begun, and at the end one with
what came of it: `{"introductions 400": 17, ...}`.
"""

from __future__ import annotations

import collections
import itertools
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import attrs
import trio

from tests.peers.http1 import BOTH, HttpWire, http_request, post
from tests.peers.http2 import FramePeer, grpc_call
from tests.peers.messages import initialize, modern_request, notification, request
from tests.peers.processes import MIB
from tests.peers.serving import Place
from tests.peers.websockets import message, upgrade
from trimcp.framing.grpc import json_rpc_header
from trimcp.transports.grpc.channel import EXCHANGE
from trimcp.transports.http.h2.frames import DATA, MAX_FRAME, Setting, frame

LARGE = 4 * MIB - 100_000
BETWEEN = 0.2  # seconds between the calls of one connection
PAUSE = 1.0  # seconds before another try: what is tried is to hold memory, not to use up the processor

Attack = Callable[["Attackers"], Awaitable[None]]


@attrs.define(eq=False)
class Attackers(Place):
    """What they have in common."""

    port: int
    came: collections.Counter[str] = attrs.field(factory=collections.Counter)
    begun: int = 0
    ids: itertools.count[int] = attrs.field(factory=itertools.count)

    async def connect(self, *, receive_buffer: int | None = 4096) -> HttpWire:
        sock = trio.socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, receive_buffer)
        await sock.connect(("127.0.0.1", self.port))
        return HttpWire(trio.SocketStream(sock))

    async def try_on(self, name: str, attack: Attack) -> None:
        """Try it for ever."""
        self.begun += 1
        while True:
            try:
                await attack(self)
            except (OSError, trio.BrokenResourceError, trio.ClosedResourceError, EOFError, AssertionError) as error:
                self.came[f"{name} {type(error).__name__}"] += 1
            await trio.sleep(PAUSE)


@asynccontextmanager
async def held_open(wire: HttpWire) -> AsyncIterator[None]:
    """Read nothing, until the server has had enough."""
    try:
        yield
        await trio.sleep(60)
    finally:
        await trio.aclose_forcefully(wire.stream)


async def introductions(them: Attackers) -> None:
    """A name of 4 MB, which is kept as long as the session."""
    async with them.wire(receive_buffer=None) as wire:
        said = initialize("2025-11-25").replace(b'"attacker"', b'"%b"' % (b"n" * LARGE))
        accept = ("Content-Type: application/json", "Accept: application/json, text/event-stream")
        answer = await wire.ask(http_request("POST", "/mcp", *accept, body=said))
        them.came[f"introductions {answer.status}"] += 1


async def sessions(them: Attackers) -> None:
    """Sessions in which nothing ever happens, as many as will go."""
    async with them.wire(receive_buffer=None) as wire:
        accept = ("Content-Type: application/json", "Accept: application/json, text/event-stream")
        for _ in range(100):
            answer = await wire.ask(http_request("POST", "/mcp", *accept, body=initialize("2025-11-25")))
            them.came[f"sessions {answer.status}"] += 1


async def bodies(them: Attackers) -> None:
    """A body of which the end does not come."""
    text = modern_request(1, "tools/call", name="echo", arguments={"text": "b" * LARGE})
    wire = await them.connect()
    async with held_open(wire):
        await wire.send(post(text)[: -MIB // 2])


async def fragments(them: Attackers) -> None:
    """A WebSocket message that is never whole."""
    wire = await them.connect()
    async with held_open(wire):
        raw = await upgrade(wire)
        await raw.say(b"\x01\xff" + LARGE.to_bytes(8, "big") + bytes(4) + b"f" * LARGE)
        for _ in range(60):
            await trio.sleep(1)
            await raw.say(b"\x00\x81" + bytes(4) + b"f")


async def arguments(them: Attackers) -> None:
    """Calls with large arguments that stay under way."""
    text = modern_request(next(them.ids), "tools/call", name="keep", arguments={"text": "a" * LARGE})
    wire = await them.connect()
    async with held_open(wire):
        await wire.send(post(text))


async def results(them: Attackers) -> None:
    """Large results that nobody reads, one to a connection."""
    text = modern_request(next(them.ids), "tools/call", name="big", arguments={"size": LARGE})
    wire = await them.connect()
    async with held_open(wire):
        await wire.send(post(text))


async def stream_results(them: Attackers) -> None:
    """Many large results over HTTP+SSE, none of them read."""
    wire = await them.connect()
    async with held_open(wire), them.wire(receive_buffer=None) as posts:
        await wire.send(http_request("GET", "/sse", "Accept: text/event-stream"))
        assert (await wire.head()).status == 200
        path = (await wire.chunk()).partition(b"data: ")[2].split()[0].decode()
        for text in (initialize("2024-11-05"), notification("notifications/initialized")):
            assert (await posts.ask(post(text, path=path))).status == 202
        for n in range(50):
            text = request(n, "tools/call", name="big", arguments={"size": LARGE})
            them.came[f"stream results {(await posts.ask(post(text, path=path))).status}"] += 1


async def socket_results(them: Attackers) -> None:
    """Many large results over a WebSocket, none of them read."""
    wire = await them.connect()
    async with held_open(wire):
        raw = await upgrade(wire)
        await raw.say(message(initialize("2025-11-25")), message(notification("notifications/initialized")))
        for n in range(50):
            await raw.say(message(request(n, "tools/call", name="big", arguments={"size": LARGE})))


async def http2_bodies(them: Attackers) -> None:
    """Bodies of which the end does not come, many over one connection of HTTP/2."""
    wire = await them.connect()
    async with held_open(wire):
        peer = FramePeer(wire.stream)
        await peer.start()
        for _ in range(16):
            id = await peer.ask("/mcp", None, headers=_posting("echo"), authority="localhost")
            await wire.send(frame(DATA, 0, id, b"b" * MAX_FRAME) * 3)


async def http2_results(them: Attackers) -> None:
    """Many large results over HTTP/2, none of which the windows let through."""
    wire = await them.connect()
    async with held_open(wire):
        peer = FramePeer(wire.stream)
        await peer.start({Setting.INITIAL_WINDOW_SIZE: 0})
        for n in range(10):
            text = modern_request(n, "tools/call", name="big", arguments={"size": LARGE})
            await peer.ask("/mcp", text, headers=_posting("big"), authority="localhost")
            await trio.sleep(BETWEEN)


async def grpc_results(them: Attackers) -> None:
    """Many large results of MCP through gRPC, none of them read."""
    texts = [initialize("2025-11-25"), notification("notifications/initialized")]
    wire = await them.connect()
    async with held_open(wire):
        await wire.send(grpc_call(EXCHANGE, *(json_rpc_header(len(text)) + text for text in texts)))
        for n in range(10):
            text = request(n, "tools/call", name="big", arguments={"size": LARGE})
            await wire.send(frame(DATA, 0, 1, json_rpc_header(len(text)) + text))
            await trio.sleep(BETWEEN)


async def grpc_fragments(them: Attackers) -> None:
    """A message through gRPC that is never whole."""
    wire = await them.connect()
    async with held_open(wire):
        await wire.send(grpc_call(EXCHANGE, json_rpc_header(LARGE) + b"f" * (MAX_FRAME // 2)))
        await wire.send(frame(DATA, 0, 1, b"f" * MAX_FRAME) * 3)


def _posting(tool: str) -> list[tuple[str, str]]:
    """The headers of a call over HTTP/2."""
    accepts = [("content-type", "application/json"), ("accept", BOTH), ("mcp-protocol-version", "2026-07-28")]
    return [*accepts, ("mcp-method", "tools/call"), ("mcp-name", tool)]


async def pongs(them: Attackers) -> None:
    """Pongs, as fast as they are taken."""
    wire = await them.connect()
    try:
        raw = await upgrade(wire)
        for _ in range(100_000):
            await raw.say((b"\x8a\x80" + bytes(4)) * 5_000)
    finally:
        await trio.aclose_forcefully(wire.stream)


async def chunks(them: Attackers) -> None:
    """A body in chunks of one byte, as fast as they are taken."""
    async with them.wire() as wire:
        accept = ("Content-Type: application/json", "Accept: application/json, text/event-stream")
        await wire.send(http_request("POST", "/mcp", *accept, "Transfer-Encoding: chunked"))
        for _ in range(100_000):
            await wire.send(b"1\r\nx\r\n" * 5_000)


ATTACKS: dict[Attack, int] = {
    introductions: 30,
    sessions: 4,
    bodies: 40,
    fragments: 30,
    arguments: 52,
    results: 30,
    stream_results: 5,
    socket_results: 5,
    pongs: 2,
    chunks: 2,
}
"""How many connections try what: 200 in all."""
OVER_HTTP2: dict[Attack, int] = {
    results: 20,
    http2_bodies: 4,
    http2_results: 1,
    grpc_results: 1,
    grpc_fragments: 4,
}
"""What is tried besides, or by fewer, where HTTP/2 and gRPC are served: 200 again, and as many results."""


async def main(port: int, http2: bool) -> None:
    them = Attackers(port)
    async with trio.open_nursery() as nursery:
        nursery.cancel_scope.deadline = trio.current_time() + 120
        for attack, number in (ATTACKS | (OVER_HTTP2 if http2 else {})).items():
            for _ in range(number):
                nursery.start_soon(them.try_on, attack.__name__.replace("_", " "), attack)
                await trio.sleep(0.002)
        print("begun", flush=True)
        async with trio.lowlevel.FdStream(0) as commands:
            while await commands.receive_some():
                pass
        nursery.cancel_scope.cancel()
    print(json.dumps(them.came), flush=True)


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]), "http2" in sys.argv)
