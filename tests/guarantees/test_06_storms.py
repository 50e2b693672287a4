"""Promise 6: clients that come and go by the hundred, at any moment and without a word, leave nothing."""

from __future__ import annotations

import base64
import random
import socket
import struct
import sys

import pytest
import trio

from tests.fuzz.effort import PATIENCE
from tests.guarantees.places import Places, alive, calls, serving
from tests.peers.clients import on
from tests.peers.http1 import http_request, post
from tests.peers.messages import initialize, modern_request, request
from tests.peers.processes import MIB
from tests.peers.servers import ServerPool, ServerProcess
from tests.peers.serving import ON_EACH, SOFTWARE
from tests.peers.websockets import close, message, upgrade

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the server is looked into by way of /proc"),
]
OnBoth = pytest.mark.parametrize("host", SOFTWARE)
OnEach = pytest.mark.parametrize("host", ON_EACH)

_EVENTS = "Accept: text/event-stream"
_UPGRADE = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
_RESET = struct.pack("ii", 1, 0)


@Places
async def test_peers_that_stop_reading_and_vanish_leave_nothing(servers: ServerPool, place: str) -> None:
    rng = random.Random(300)

    async def one(server: ServerProcess, most: trio.Semaphore) -> None:
        async with most:
            wire = await server.connect(receive_buffer=4096)
            try:
                peer = await upgrade(wire)
                with trio.move_on_after(rng.random() * 0.1):
                    await peer.say(message(initialize("2025-11-25")), calls(1, tool="big", size=500_000))
                    await peer.say(calls(2, tool="stream", count=1_000, size=1_000), calls(3, 4, 5, tool="hang"))
                    await peer.say(calls(*range(6, 40)))
                    await trio.sleep_forever()
                kind = rng.randrange(4)
                with trio.move_on_after(0.05):
                    if kind == 0:
                        await peer.say(close(1000))
                    elif kind == 1:
                        await peer.say(close(1000), calls(*range(40, 60)))
                    elif kind == 2:
                        await wire.stream.send_eof()
                if kind == 3:
                    wire.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
            finally:
                await trio.aclose_forcefully(wire.stream)

    async with serving(servers, place, limits={"stall_timeout": 1.0}) as server:
        most = trio.Semaphore(30)
        async with trio.open_nursery() as nursery:
            for _ in range(200):
                nursery.start_soon(one, server, most)
        assert await alive(server)


def _arrivals(rng: random.Random, session: str, n: int) -> bytes:
    """What a client says before it leaves; not always all of it."""
    kind = rng.randrange(6)
    arguments = {"hang": {}, "stream": {"count": 1_000, "size": 1_000}, "big": {"size": 300_000}, "echo": {}}
    tool = rng.choice(list(arguments))
    named = {"name": tool, "arguments": arguments[tool], "_meta": {"progressToken": n}}
    if kind < 2:
        said = post(modern_request(n, "tools/call", **named))
        return said if kind else said[: rng.randrange(len(said))]
    if kind == 2:
        tool = rng.choice(["echo", "stream"])
        call = request(n, "tools/call", name=tool, arguments=arguments[tool], _meta={"progressToken": n})
        return post(call, session=session)
    if kind == 3:
        return http_request("GET", "/sse", _EVENTS)
    if kind == 4:
        return http_request("GET", "/mcp", _EVENTS, f"Mcp-Session-Id: {session}")
    key = f"Sec-WebSocket-Key: {base64.b64encode(bytes(16)).decode()}"
    calls = [message(request(id, "tools/call", name="hang", arguments={})) for id in range(3)]
    return http_request("GET", "/ws", *_UPGRADE, key) + message(initialize("2025-11-25")) + b"".join(calls)


async def _come_and_go(server: ServerProcess, said: bytes, stay: float, reset: bool, most: trio.Semaphore) -> None:
    async with most:
        wire = await server.connect()
        try:
            with trio.move_on_after(stay):
                await wire.send(said)
                await trio.sleep_forever()
        except trio.BrokenResourceError:
            pass
        finally:
            if reset:
                wire.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            await trio.aclose_forcefully(wire.stream)


@OnEach
async def test_who_leaves_at_a_bad_moment_leaves_nothing(servers: ServerPool, host: str) -> None:
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
            with trio.fail_after(PATIENCE):
                while (await server.counts())["running"]:  # noqa: ASYNC110  # it is another process
                    await trio.sleep(0.05)
            print(f"{host}: {(server.memory - base) / MIB:.1f} MiB for what a storm left in a session")


@OnBoth
async def test_who_leaves_with_more_behind_a_request_is_noticed_at_once(servers: ServerPool, host: str) -> None:
    """Whether any of it is read before the answer has ended, or not."""
    call = post(modern_request(1, "tools/call", name="hang", arguments={}))
    async with servers(host, silence=0.02) as server:
        for said in (http_request("GET", "/sse", _EVENTS), call):
            for behind in (b"", b"x", call, b"x" * 100_000):
                async with server.wire() as wire:
                    await wire.send(said, behind)
                    await wire.head()
                    if said is not call:
                        await wire.chunk()  # with nothing left to read the client's end is no reset
                    assert await server.counts() != server.base
                await server.at_rest(seconds=5)  # before a stream that is silent could be written to
