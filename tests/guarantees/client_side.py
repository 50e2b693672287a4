"""Servers by hand, for what our client promises: a child, an end in memory, a WebSocket, and those of HTTP."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import orjson
import trio

import trimcp
from tests.guarantees.client_posts import ASKING, INFO, REPLYING, posted_to_by_hand
from tests.peers.clients import DirectPeer
from tests.peers.websockets import FIN, TEXT, RawWebSocket, message
from tests.peers.websockets import accept as accept_websocket
from trimcp.session.drive import direct_ends
from trimcp.transports.memory import memory_channels
from trimcp.transports.stream import StreamChannel
from trimcp.transports.websocket.client import WebSocketServer
from trimcp.wire.revisions import LATEST, V2025_11_25, Revision

__all__ = ["EVERY_ROAD", "QUESTIONED", "ROADS", "ByHand", "asked_by_hand", "served_by_hand"]

ROADS = ("stdio", "framed", "websocket")

EVERY_ROAD = (*ROADS, "direct", *ASKING)
"""Where a server may ask whenever it likes."""

QUESTIONED = (*(f"{road} 2026" for road in (*ROADS, "direct")), *REPLYING)
"""Where it asks with its replies."""

# A child that is nothing but a pipe to whoever listens there.
_PIPE = """
import os, socket, sys, threading
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
def out():
    while data := sock.recv(1 << 16):
        while data:
            data = data[os.write(1, data):]
    os._exit(0)
threading.Thread(target=out, daemon=True).start()
while data := os.read(0, 1 << 16):
    sock.sendall(data)
"""


@attrs.define(eq=False)
class Called:
    """A call that was made of a server by hand."""

    message: Any


@attrs.define(eq=False)
class ByHand:
    """A server by hand: it says lines or frames as they are, and hears what the client says."""

    stream: trio.abc.Stream | None
    raw: RawWebSocket | None = None
    direct: DirectPeer | None = None
    _data: bytearray = attrs.field(factory=bytearray)

    async def say(self, *texts: bytes) -> None:
        """Say messages."""
        if self.raw is not None:
            await self.raw.say(*(message(text, masked=False) for text in texts))
            return
        if self.direct is not None:
            await self.direct.say(*texts)
            return
        for text in texts:
            await self.pour(text, b"\n")

    async def pour(self, *pieces: bytes) -> None:
        """Write bytes as they are."""
        assert self.stream is not None
        for piece in pieces:
            await self.stream.send_all(piece)

    async def hear(self) -> Any:
        """The next message."""
        if self.raw is not None:
            first, payload = await self.raw.hear()
            assert first == FIN | TEXT, (first, payload)
            return orjson.loads(payload)
        if self.direct is not None:
            return await self.direct.hear_any()
        assert self.stream is not None
        while (end := self._data.find(b"\n")) < 0:
            chunk = await self.stream.receive_some(1 << 16)
            assert chunk, "the client has left"
            self._data += chunk
        line = bytes(self._data[:end])
        del self._data[: end + 1]
        return orjson.loads(line)

    async def called(self) -> Called:
        """The next call."""
        return Called(await self.hear())

    async def result(self, call: Called, **result: Any) -> None:
        """Answer a call with a result."""
        await self.say(orjson.dumps({"jsonrpc": "2.0", "id": call.message["id"], "result": result}))

    async def reply(self, call: Called, *pieces: bytes) -> None:
        """Answer a call with a message of many pieces."""
        await self.say(b"".join(pieces))

    async def greet(self, revision: Revision) -> None:
        """Do a server's part of the handshake."""
        hello = await self.called()
        offers = {"capabilities": {"tools": {}}, "serverInfo": INFO}
        if revision.modern:
            assert hello.message["method"] == "server/discover"
            more = {"supportedVersions": [revision.name], "resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
            await self.result(hello, **offers, **more)
        else:
            assert hello.message["method"] == "initialize"
            await self.result(hello, **offers, protocolVersion=revision.name)
            assert (await self.hear())["method"] == "notifications/initialized"

    def stop_reading(self) -> None:
        """Take nothing that the client says, before `read_on`: nothing else reads than `hear`."""

    def read_on(self) -> None:
        """Take it again."""

    async def leave(self) -> None:
        """Be gone without a word."""
        if self.direct is not None:
            self.direct.end.close()
        elif self.stream is not None:
            await trio.aclose_forcefully(self.stream)


@asynccontextmanager
async def served_by_hand(
    road: str, client: trimcp.Client, folder: Path, revision: Revision = V2025_11_25
) -> AsyncIterator[tuple[trimcp.ClientSession, ByHand]]:
    """Yield a client's session, and what it is connected to."""
    async with trio.open_nursery() as nursery:
        hands: tuple[Any, Any] = trio.open_memory_channel[ByHand](1)
        if road == "stdio":
            listener = trio.socket.socket(trio.socket.AF_UNIX)
            await listener.bind(str(folder / "by-hand"))
            listener.listen(1)
            target: Any = trimcp.stdio(sys.executable, "-c", _PIPE, str(folder / "by-hand"))

            async def accept() -> None:
                with listener:
                    sock, _ = await listener.accept()
                hands[0].send_nowait(ByHand(trio.SocketStream(sock)))

            nursery.start_soon(accept)
        elif road == "framed":
            end, target = memory_channels(framed=True)
            assert isinstance(end, StreamChannel)
            hands[0].send_nowait(ByHand(trio.StapledStream(end._sender, end._receiver)))
        elif road == "direct":
            ours, target = direct_ends()
            hands[0].send_nowait(ByHand(None, direct=DirectPeer(revision.modern, ours)))
        else:
            listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
            target = WebSocketServer(f"ws://127.0.0.1:{listeners[0].socket.getsockname()[1]}/ws")

            async def handshake(stream: trio.SocketStream) -> None:
                await hands[0].send(ByHand(stream, await accept_websocket(stream)))
                await trio.sleep_forever()

            nursery.start_soon(trio.serve_listeners, handshake, listeners)
        greeted = trio.Event()
        found: list[ByHand] = []

        async def greet() -> None:
            hand = await hands[1].receive()
            await hand.greet(revision)
            found.append(hand)
            greeted.set()

        nursery.start_soon(greet)
        async with client.connect(target, revision=revision) as session:
            await greeted.wait()
            try:
                yield session, found[0]
            finally:
                if road != "framed":
                    await found[0].leave()
        nursery.cancel_scope.cancel()


def asked_by_hand(
    road: str, client: trimcp.Client, folder: Path
) -> AbstractAsyncContextManager[tuple[trimcp.ClientSession, Any]]:
    """The same on EVERY_ROAD and where one is QUESTIONED."""
    if road.startswith("http"):
        return posted_to_by_hand(road, client)
    return served_by_hand(road.removesuffix(" 2026"), client, folder, LATEST if "2026" in road else V2025_11_25)
