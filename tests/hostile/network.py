"""Servers in processes of their own, attacked over sockets byte by byte: HTTP, HTTP+SSE and WebSocket."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any, Protocol

import attrs
import orjson
import trio

from tests.fuzz.effort import PATIENCE
from tests.hostile import server_over_network
from tests.hostile.peers import ENVIRONMENT, forget_peak, memory_of
from tests.peers.http1 import BOTH, Answer, HttpWire, http_request, post
from tests.peers.messages import initialize, modern_request, notification, request
from tests.peers.websockets import CLOSE, FIN, PONG, TEXT, RawWebSocket, message, upgrade

__all__ = ["HOSTS", "ROADS", "Place", "Pool", "Road", "Served", "on", "open_session"]

HOSTS = ("own", "hypercorn")
ROADS = ("modern", "session", "sse", "websocket")
PROGRAM = Path(server_over_network.__file__)


class Place:
    """Where clients by hand are connected to."""

    async def connect(self, *, receive_buffer: int | None = None) -> HttpWire:
        """A connection to it."""
        raise NotImplementedError

    @asynccontextmanager
    async def wire(self, **options: Any) -> AsyncIterator[HttpWire]:
        """A connection for as long as the block runs."""
        wire = await self.connect(**options)
        try:
            yield wire
        finally:
            await trio.aclose_forcefully(wire.stream)


def more_than(base: dict[str, int], counts: dict[str, int]) -> bool:
    """Whether there is more of anything than there was; what came before may have ended only after it was counted."""
    return any(counts[name] > number for name, number in base.items())


@attrs.define(eq=False)
class Served(Place):
    """A server process under attack.

    Attributes:
        process: the process.
        url: where it is served.
        log: what it wrote to its standard error.
        software: what listens.
        base: what it counts of itself when nothing is under way.
        warmed: whether it has done a little of everything.
        lines: headers by which it knows whoever looks after it.
        roads: that lead to it.
    """

    process: subprocess.Popen[str]
    url: str
    log: IO[bytes]
    software: str
    base: dict[str, int] = attrs.field(factory=dict)
    warmed: bool = False
    lines: tuple[str, ...] = ()
    roads: tuple[str, ...] = ROADS

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2].partition("/")[0])

    @property
    def memory(self) -> int:
        return memory_of(self.process.pid)

    @property
    def peak(self) -> int:
        return memory_of(self.process.pid, peak=True)

    def forget_peak(self) -> int:
        """Let the peak begin at what is resident now, and return that."""
        return forget_peak(self.process.pid)

    @property
    def errors(self) -> bytes:
        """What it complained about."""
        self.log.seek(0)
        return self.log.read()

    async def connect(self, *, receive_buffer: int | None = None, source: str = "") -> HttpWire:
        """A connection to it; with a small buffer it takes little from the server unless it is read.

        `source` is the address that it comes from; every 127.x.y.z is this machine.
        """
        sock = trio.socket.socket()
        if source:
            await sock.bind((source, 0))
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            await sock.connect(("127.0.0.1", self.port))
        except BaseException:
            sock.close()
            raise
        return HttpWire(trio.SocketStream(sock))

    async def counts(self) -> dict[str, int]:
        """What it counts of itself, after a garbage collection."""
        async with self.wire() as wire:
            answer = await wire.ask(http_request("GET", "/statistics", "Connection: close", *self.lines))
            counts: dict[str, int] = answer.reply
            return counts

    async def objects(self) -> int:
        """How many objects its garbage collector knows."""
        async with self.wire() as wire:
            [count] = (
                await wire.ask(http_request("GET", "/statistics?objects", "Connection: close", *self.lines))
            ).reply
            return int(count)

    async def kept(self) -> int:
        """Bytes it has resident once garbage is collected and free memory is the system's again."""
        async with self.wire() as wire:
            await wire.ask(http_request("GET", "/statistics?kept", "Connection: close", *self.lines))
        return self.memory

    async def at_rest(self, *, seconds: float = PATIENCE / 2) -> None:
        """Wait until nothing is left of an attack."""
        counts: dict[str, int] = {}
        with trio.move_on_after(seconds):
            while more_than(self.base, counts := await self.counts()):  # noqa: ASYNC110  # it is another process
                await trio.sleep(0.02)
        assert not more_than(self.base, counts), f"not {counts} but {self.base}"

    async def warm(self, times: int = 300) -> None:
        """Let it do a little of everything once, so that what it grows by later is the attack's."""
        if self.warmed:
            return
        self.warmed = True
        for road in self.roads:
            async with on(self, road, *self.lines) as lane:
                for n in range(times // len(self.roads)):
                    assert (await lane.ask(n, "echo", text="x" * 1000))["id"] == n
                await lane.ask("s", "stream", count=20)
        await self.at_rest()

    async def settle(self) -> None:
        """Let it begin in earnest, and note what it counts of itself when nothing is under way."""
        self.base = await self.counts()
        same = 0
        while same < 3:
            before = self.base
            for road in self.roads:  # after the first call of a server over HTTP one task stays, to run the next
                async with on(self, road, *self.lines) as lane:
                    await lane.ask(0, "echo")
            await trio.sleep(0.05)
            self.base = await self.counts()
            same = same + 1 if self.base == before else 0


@attrs.define(eq=False)
class Pool:
    """Servers that tests share as long as they do no harm.

    Attributes:
        program: what is run; it gets the options as JSON.
        more: options of every one of them.
    """

    program: Path = PROGRAM
    more: dict[str, Any] = attrs.field(factory=dict)
    _servers: dict[str, Served] = attrs.field(factory=dict)

    @asynccontextmanager
    async def __call__(self, software: str = "own", *, fresh: bool = False, **options: Any) -> AsyncIterator[Served]:
        """Yield a server. In the end it has to be as it was, with nothing in its log."""
        lines: tuple[str, ...] = ()
        if "tokens" in options:
            options["tokens"] = {**options["tokens"], "keeper-token": "keeper"}
            lines = ("Authorization: Bearer keeper-token",)
        key = json.dumps({"software": software, **self.more, **options})
        server = None if fresh else self._servers.pop(key, None)
        if server is None:
            server = await trio.to_thread.run_sync(_start, self.program, software, key)
            server.lines = lines
            server.roads = ROADS[-1:] if options.get("alone") else ROADS
        kept = False
        try:
            with trio.fail_after(PATIENCE):
                if not server.base:
                    await server.settle()
                yield server
                await server.at_rest()
                assert server.errors == b"", server.errors[-3000:].decode()
            kept = not fresh
        finally:
            if kept:
                self._servers[key] = server
            else:
                _stop(server)

    def close(self) -> None:
        """End every server; each has to end in order."""
        for server in self._servers.values():
            assert server.process.stdin is not None
            server.process.stdin.close()
        ended = {key: _end(server) for key, server in self._servers.items()}
        assert not any(ended.values()), ended


def _start(program: Path, software: str, options: str) -> Served:
    log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the server
    process = subprocess.Popen(
        [sys.executable, "-W", "default", str(program), options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        # Else the C library, having seen a large block freed, keeps the next one for later use, and nothing can be told
        # from what a process has resident.
        env={**ENVIRONMENT, "MALLOC_MMAP_THRESHOLD_": "131072"},
        text=True,
    )
    assert process.stdout is not None
    server = Served(process, process.stdout.readline().strip(), log, software)
    assert server.url, server.errors
    return server


def _end(server: Served) -> bytes:
    try:
        server.process.wait(10)
        return server.errors if server.process.returncode == 0 else b"%d" % server.process.returncode + server.errors
    except subprocess.TimeoutExpired:
        return b"it did not end"
    finally:
        _stop(server)


def _stop(server: Served) -> None:
    for pipe in (server.process.stdin, server.process.stdout, server.log):
        assert pipe is not None
        pipe.close()
    server.process.kill()
    server.process.wait()


# Roads


class Road(Protocol):
    """A way for messages to a server and back."""

    async def put(self, text: bytes) -> tuple[int, Any]:
        """Send a message and return the status and the message it is answered with; None where there is none."""
        ...

    async def ask(self, id: Any, tool: str, **arguments: Any) -> Any:
        """Call a tool and return the answer."""
        ...

    def call(self, id: Any, tool: str, **arguments: Any) -> bytes:
        """A tool call in the revision spoken here."""
        ...


@attrs.define(eq=False)
class Lane:
    """What roads have in common."""

    server: Served
    modern: bool = False
    lines: tuple[str, ...] = ()

    def call(self, id: Any, tool: str, **arguments: Any) -> bytes:
        make = modern_request if self.modern else request
        return make(id, "tools/call", name=tool, arguments=arguments, _meta={"progressToken": 1})

    async def ask(self, id: Any, tool: str, **arguments: Any) -> Any:
        return (await self.put(self.call(id, tool, **arguments)))[1]

    async def put(self, text: bytes) -> tuple[int, Any]:
        raise NotImplementedError


@attrs.define(eq=False)
class Posts(Lane):
    """Streamable HTTP over one connection, opened again where the server has closed it."""

    session: str | None = None
    wire: HttpWire | None = None

    async def put(self, text: bytes) -> tuple[int, Any]:
        if self.wire is None:
            self.wire = await self.server.connect()
        answer = await self.wire.ask(post(text, *self.lines, session=self.session))
        if answer.headers.get("connection") == "close":
            await self.leave()
        return answer.status, answer.reply if answer.body else None

    async def leave(self) -> None:
        wire, self.wire = self.wire, None
        if wire is not None:
            await trio.aclose_forcefully(wire.stream)


@attrs.define(eq=False)
class Stream(Lane):
    """HTTP+SSE: a stream to read, and POSTs on another connection."""

    stream: HttpWire = attrs.field(kw_only=True)
    path: str = ""
    posts: HttpWire | None = None

    async def put(self, text: bytes) -> tuple[int, Any]:
        status = await self.send(text)
        return status.status, status.reply if status.body else await self.hear()

    async def send(self, text: bytes) -> Answer:
        if self.posts is None:
            self.posts = await self.server.connect()
        answer = await self.posts.ask(post(text, *self.lines, path=self.path))
        if answer.headers.get("connection") == "close":
            await trio.aclose_forcefully(self.posts.stream)
            self.posts = None
        return answer

    async def hear(self) -> Any:
        """The next answer; progress is skipped."""
        while "method" in (heard := await self.stream.message()):
            pass
        return heard


@attrs.define(eq=False)
class Socket(Lane):
    """A WebSocket."""

    raw: RawWebSocket = attrs.field(kw_only=True)

    async def put(self, text: bytes) -> tuple[int, Any]:
        await self.raw.say(message(text))
        return 0, await self.hear()

    async def hear(self) -> Any:
        """The next answer; progress is skipped."""
        while True:
            first, payload = await self.raw.hear()
            if first == FIN | PONG:
                continue
            if first in (0, FIN | CLOSE):
                raise EOFError(f"the server closed the WebSocket: {payload!r}")
            assert first == FIN | TEXT, (first, payload)
            if "method" not in (heard := orjson.loads(payload)):
                return heard


@asynccontextmanager
async def on(server: Served, road: str, *lines: str, **options: Any) -> AsyncIterator[Any]:
    """Yield a way to the server on which a client has introduced itself."""
    if road == "modern":
        lane = Posts(server, modern=True, lines=lines)
        try:
            yield lane
        finally:
            await lane.leave()
    elif road == "session":
        session = await open_session(server, *lines)
        lane = Posts(server, session=session, lines=lines)
        try:
            yield lane
        finally:
            await lane.leave()
        async with server.wire() as wire:
            await wire.ask(http_request("DELETE", "/mcp", f"Mcp-Session-Id: {session}", *lines))
    elif road == "sse":
        async with server.wire(**options) as stream:
            await stream.send(http_request("GET", "/sse", "Accept: text/event-stream", *lines))
            assert (await stream.head()).status == 200
            [path] = re.findall(rb"data: (/\S+)", await stream.chunk())
            lane = Stream(server, stream=stream, path=path.decode(), lines=lines)
            try:
                await lane.put(initialize("2024-11-05"))
                await lane.send(notification("notifications/initialized"))
                yield lane
            finally:
                if lane.posts is not None:
                    await trio.aclose_forcefully(lane.posts.stream)
    else:
        async with server.wire(**options) as wire:
            lane = Socket(server, raw=await upgrade(wire, *lines))
            await lane.put(initialize("2025-11-25"))
            await lane.raw.say(message(notification("notifications/initialized")))
            yield lane
            if not options:  # who does not read does not say goodbye either
                await lane.raw.say(b"\x88\x82\0\0\0\0\x03\xe8")
                while (heard := await lane.raw.hear())[0] not in (0, FIN | CLOSE):
                    assert heard


async def open_session(server: Served, *lines: str, revision: str = "2025-11-25", **capabilities: Any) -> str:
    """Begin a session and return its id."""
    async with server.wire() as wire:
        common = ("Content-Type: application/json", f"Accept: {BOTH}", *lines)
        answer = await wire.ask(http_request("POST", "/mcp", *common, body=initialize(revision, **capabilities)))
        assert answer.status == 200, answer
        session = answer.headers["mcp-session-id"]
        assert (await wire.ask(post(notification("notifications/initialized"), *lines, session=session))).status == 202
        return session
