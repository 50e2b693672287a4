"""Servers that listen in processes of their own, which count what they hold, and a pool of them."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any

import attrs
import trio

from tests.fuzz.effort import PATIENCE
from tests.hostile import server_over_network
from tests.peers.clients import ROADS, on
from tests.peers.http1 import http_request
from tests.peers.http2_relay import translated
from tests.peers.processes import ENVIRONMENT, Measured
from tests.peers.serving import HTTP2, At, Place

__all__ = ["ServerPool", "ServerProcess", "more_than", "start_server", "stop_server"]

PROGRAM = Path(server_over_network.__file__)


def more_than(base: dict[str, int], counts: dict[str, int]) -> bool:
    """Whether there is more of anything than there was; what came before may have ended only after it was counted."""
    return any(counts[name] > number for name, number in base.items())


@attrs.define(eq=False)
class ServerProcess(Place, Measured):
    """A server in a process of its own, which tells what it holds at `/statistics`.

    Attributes:
        process: the process.
        url: where it is reached: where it is served, or a proxy before that.
        log: what it wrote to its standard error.
        software: what listens, or `HTTP2`.
        base: what it counts of itself when nothing is under way.
        warmed: whether it has done a little of everything.
        lines: headers by which it knows whoever looks after it.
        roads: where it is reached, of ROADS.
        itself: where it is served.
    """

    process: subprocess.Popen[str]
    url: str
    log: IO[bytes]
    software: str
    base: dict[str, int] = attrs.field(factory=dict)
    warmed: bool = False
    lines: tuple[str, ...] = ()
    roads: tuple[str, ...] = ROADS
    itself: At = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.itself = At(self.url)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def errors(self) -> bytes:
        """What it wrote to its standard error."""
        self.log.seek(0)
        return self.log.read()

    @asynccontextmanager
    async def by_http2(self) -> AsyncIterator[None]:
        """Let it be reached through a proxy that speaks HTTP/2 to it, as long as the block runs."""
        software, url = self.software, self.url
        async with translated(self.port) as port:
            self.software, self.url = HTTP2, url.replace(f":{self.port}/", f":{port}/")
            try:
                yield
            finally:
                self.software, self.url = software, url

    async def counts(self) -> dict[str, int]:
        """What it counts of itself, after a garbage collection."""
        async with self.itself.wire() as wire:
            answer = await wire.ask(http_request("GET", "/statistics", "Connection: close", *self.lines))
            counts: dict[str, int] = answer.reply
            return counts

    async def objects(self) -> int:
        """How many objects its garbage collector knows."""
        async with self.itself.wire() as wire:
            [count] = (
                await wire.ask(http_request("GET", "/statistics?objects", "Connection: close", *self.lines))
            ).reply
            return int(count)

    async def kept(self) -> int:
        """Bytes it has resident once garbage is collected and free memory is the system's again."""
        async with self.itself.wire() as wire:
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
            async with on(self, road, *self.lines) as peer:
                for n in range(times // len(self.roads)):
                    assert (await peer.ask(n, "echo", text="x" * 1000))["id"] == n
                await peer.ask("s", "stream", count=20)
        await self.at_rest()

    async def settle(self) -> None:
        """Make a few calls, until it counts the same after each, and note that as what it holds at rest."""
        self.base = await self.counts()
        same = 0
        while same < 3:
            before = self.base
            for road in self.roads:  # after the first call of a server over HTTP one task stays, to run the next
                async with on(self, road, *self.lines) as peer:
                    await peer.ask(0, "echo")
            await trio.sleep(0.05)
            self.base = await self.counts()
            same = same + 1 if self.base == before else 0


@attrs.define(eq=False)
class ServerPool:
    """Servers that tests share as long as they do no harm, reached as they are or by `HTTP2`.

    Attributes:
        program: what is run; it gets the options as JSON.
        more: options of every one of them.
    """

    program: Path = PROGRAM
    more: dict[str, Any] = attrs.field(factory=dict)
    _servers: dict[str, ServerProcess] = attrs.field(factory=dict)

    @asynccontextmanager
    async def __call__(
        self, software: str = "own", *, fresh: bool = False, **options: Any
    ) -> AsyncIterator[ServerProcess]:
        """Yield a server. In the end it has to be as it was, with nothing in its log."""
        lines: tuple[str, ...] = ()
        if "tokens" in options:
            options["tokens"] = {**options["tokens"], "keeper-token": "keeper"}
            lines = ("Authorization: Bearer keeper-token",)
        listens = "own" if software == HTTP2 else software
        key = json.dumps({"software": listens, **self.more, **options})
        server = None if fresh else self._servers.pop(key, None)
        if server is None:
            server = await trio.to_thread.run_sync(start_server, self._command(key), listens)
            server.lines = lines
            server.roads = ROADS[-1:] if options.get("alone") else ROADS
        kept = False
        try:
            with trio.fail_after(PATIENCE):
                if not server.base:
                    await server.settle()
                if software == HTTP2:
                    async with server.by_http2():
                        yield server
                else:
                    yield server
                await server.at_rest()
                assert server.errors == b"", server.errors[-3000:].decode()
            kept = not fresh
        finally:
            if kept:
                self._servers[key] = server
            else:
                stop_server(server)

    def _command(self, options: str) -> list[str]:
        return [sys.executable, "-W", "default", str(self.program), options]

    def close(self) -> None:
        """End every server; each has to end with status 0 and an empty log."""
        for server in self._servers.values():
            assert server.process.stdin is not None
            server.process.stdin.close()
        ended = {key: _end(server) for key, server in self._servers.items()}
        assert not any(ended.values()), ended


def start_server(command: Sequence[str], software: str = "own", **environment: str) -> ServerProcess:
    """Start a program that prints where it serves, and wait for that; blocks."""
    log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the server
    # Else the C library, having seen a large block freed, keeps the next one for later use, and nothing can be told
    # from what a process has resident.
    environment = {**ENVIRONMENT, "MALLOC_MMAP_THRESHOLD_": "131072", **environment}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
    process = subprocess.Popen(command, env=environment, text=True, **pipes)
    assert process.stdout is not None
    server = ServerProcess(process, process.stdout.readline().strip(), log, software)
    assert server.url, server.errors
    return server


def _end(server: ServerProcess) -> bytes:
    try:
        server.process.wait(10)
        return server.errors if server.process.returncode == 0 else b"%d" % server.process.returncode + server.errors
    except subprocess.TimeoutExpired:
        return b"it did not end"
    finally:
        stop_server(server)


def stop_server(server: ServerProcess) -> None:
    """Kill it, unless it has ended, and close its pipes."""
    for pipe in (server.process.stdin, server.process.stdout, server.log):
        assert pipe is not None
        pipe.close()
    server.process.kill()
    server.process.wait()
