"""Where the promises have to hold: every transport, on both hosts, in both eras, behind one face."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import trio
import trio.testing

from tests.fuzz.effort import PATIENCE
from tests.guarantees import program
from tests.peers.clients import ChannelPeer, DirectPeer, LinePeer, Peer, over_the_network
from tests.peers.messages import text_of
from tests.peers.processes import ChildServer, Measured, child_server, forget_peak
from tests.peers.servers import ServerPool, ServerProcess, more_than
from tests.peers.serving import ON_EACH
from tests.stopwatch import Stopwatch
from trimcp.server.running import Running
from trimcp.session.drive import direct_ends, drive
from trimcp.transports.memory import memory_channels

__all__ = [
    "ALONE",
    "LOCAL",
    "NETWORK",
    "WORLDS",
    "Home",
    "Homes",
    "Journal",
    "World",
    "left_of",
    "settled",
    "work_of",
    "worlds",
]

PROGRAM = Path(program.__file__)

# Else the C library, having seen a large block freed, keeps the next one for later use, and nothing can be told from
# what this process has resident. Programs of their own get it from their environment.
_C = ctypes.CDLL(None)
_C.mallopt(-3, 131_072)  # M_MMAP_THRESHOLD


@attrs.frozen
class World:
    """A transport, what listens there, and the era that is spoken."""

    transport: str
    host: str
    modern: bool

    @property
    def local(self) -> bool:
        """Whether the server is in this process."""
        return self.transport in ("direct", "framed")

    @property
    def own(self) -> bool:
        """Whether nobody else's software is between."""
        return self.host != "hypercorn"

    @property
    def era(self) -> str:
        return "2026" if self.modern else "2024" if self.transport == "sse" else "2025"

    @property
    def half_open(self) -> bool:
        """Whether a peer that has said its last word may still listen, so that calls under way get `eof_grace`."""
        return self.transport in ("stdio", "direct", "framed", "grpc")

    def __str__(self) -> str:
        return " ".join([self.transport, *([self.host] if self.host else []), self.era])


def _hosts(transport: str) -> tuple[str, ...]:
    return _HOSTS.get(transport, ("",))


_HOSTS = {
    "http": ON_EACH,
    "sse": ON_EACH,
    "websocket": ON_EACH,
    "grpc": ("own",),
}
WORLDS = [
    World(transport, host, modern)
    for transport in ("stdio", "direct", "framed", *_HOSTS)
    for host in _hosts(transport)
    for modern in ((False,) if transport == "sse" else (False, True))
]
ALONE = World("websocket", "alone", False)
"""A WebSocket listener without HTTP beside it, which a few tests try too."""
LOCAL = [world for world in WORLDS if world.local]
NETWORK = [world for world in WORLDS if world.host]


def worlds(*, local: bool = True, **wanted: Any) -> list[World]:
    """Those with these attributes."""
    return [
        world
        for world in WORLDS
        if (local or not world.local) and all(getattr(world, name) == value for name, value in wanted.items())
    ]


@attrs.define
class Journal:
    """What handlers went through, as they wrote it down."""

    path: Path

    def of(self, name: str, what: str) -> list[dict[str, Any]]:
        """Every line about this."""
        whole, _, _ = (self.path.read_text() if self.path.exists() else "").rpartition("\n")  # a line may be half there
        lines = whole.splitlines()
        found = [json.loads(line) for line in lines if f'"{name}"' in line and f'"{what}"' in line]
        return [line for line in found if line["name"] == name and line["what"] == what]

    def open(self, gate: str) -> None:
        """Let those go on that `watch` this gate."""
        self.path.with_name(f"{self.path.name}.{gate}").touch()

    async def until(self, what: str, *names: str, seconds: float = PATIENCE) -> list[dict[str, Any]]:
        """Wait until this was written of each name, and return a line of each."""
        found: list[dict[str, Any]] = []
        for name in names:
            until = time.monotonic() + seconds
            while not (lines := self.of(name, what)):
                assert time.monotonic() < until, f"{name} has not {what}"
                await trio.sleep(0.002)
            found.append(lines[-1])
        return found


@attrs.define(eq=False)
class Home(Measured):
    """A server somewhere, for peers by hand.

    Attributes:
        world: where it is.
        journal: what its handlers went through.
        served, target, running: the server, as a process on the network, as a child, or in this process.
    """

    world: World
    journal: Journal
    served: ServerProcess | None = None
    target: ChildServer | None = None
    running: Running[None] | None = None
    _only: Peer | None = None

    @property
    def pid(self) -> int:
        process = self.served or self.target
        return os.getpid() if process is None else process.process.pid

    def stopwatch(self) -> Stopwatch:
        """A stopwatch for what this server and a peer of it do."""
        return Stopwatch((self.pid,))

    async def kept(self) -> int:
        """Bytes resident once garbage is collected and free memory is the system's again."""
        if self.served is not None:
            return await self.served.kept()
        if self.target is not None:
            await self._counted(kept=True)
        self._tidy()
        return self.memory

    def _tidy(self) -> None:
        if self.world.local:
            gc.collect()
            _C.malloc_trim(0)

    def forget_peak(self) -> int:
        """Let the peak begin at what is resident now, and return that."""
        self._tidy()
        return forget_peak(self.pid)

    def peer(self, *, reading: bool = True) -> AbstractAsyncContextManager[Any]:
        """A client of it that has introduced itself; over stdio there is but one. One that reads little reads slowly,
        on HTTP nothing at all."""
        if self.served is not None:
            small = None if reading else 4096
            return over_the_network(self.world.transport, self.served, modern=self.world.modern, receive_buffer=small)
        return self._alone() if self.target is not None else self._beside()

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[Peer]:
        assert self.target is not None
        if self._only is None:
            self._only = LinePeer(self.world.modern, self.target)
            await self._only.meet()
        yield self._only

    @asynccontextmanager
    async def _beside(self) -> AsyncIterator[Peer]:
        assert self.running is not None
        async with trio.open_nursery() as nursery:
            session = self.running.session()
            if self.world.transport == "framed":
                ours, theirs = memory_channels(framed=True)
                nursery.start_soon(drive, session, ours)
                framed = ChannelPeer(self.world.modern, theirs)
                async with theirs:
                    await framed.meet()
                    yield framed
            else:
                end, other = direct_ends()
                nursery.start_soon(drive, session, end)
                direct = DirectPeer(self.world.modern, other)
                await trio.testing.wait_all_tasks_blocked()
                await direct.meet()
                yield direct
                direct.read_on()
                other.close()
                direct.forget()

    async def counts(self) -> dict[str, int]:
        """What it counts of itself, after a garbage collection."""
        return await self._counted() if self.served is None else await self.served.counts()

    async def _counted(self, **options: bool) -> dict[str, int]:
        async with self.peer() as peer:
            await peer.say(peer.call("statistics", "statistics", **options))
            while (answer := await peer.hear())["id"] != "statistics":
                pass
            counts: dict[str, int] = json.loads(text_of(answer))
            return counts

    async def back_to(self, base: dict[str, int]) -> None:
        """Wait until it counts of itself nothing more than it did before."""
        until = time.monotonic() + PATIENCE / 2
        while more_than(base, counts := await self.counts()):
            assert time.monotonic() < until, f"not {counts} but {base}"
            await trio.sleep(0.01)

    async def warm(self) -> None:
        """Let it do a little of everything once, so that what it grows by later is the test's."""
        if self.served is not None:
            await self.served.warm()
            return
        async with self.peer() as peer:
            for n in range(200):
                await peer.ask(f"warm{n}", "echo", text="x" * 1000)
            await peer.ask("stream", "stream", count=20)
            peer.heard.clear()


@attrs.define
class Homes:
    """Opens servers in every world; those on the network are shared, and have to be left as they were found."""

    pool: ServerPool
    journal: Journal

    @asynccontextmanager
    async def __call__(self, world: World, **options: Any) -> AsyncIterator[Home]:
        if world.host:
            more = {"alone": True} if world == ALONE else {}
            async with self.pool("own" if world == ALONE else world.host, **more, **options) as served:
                yield Home(world, self.journal, served=served)
        elif world.transport == "stdio":
            environment = {"MALLOC_MMAP_THRESHOLD_": "131072"}
            more = {"serve": "stdio", "journal": str(self.journal.path), **options}
            async with child_server(environment, program=PROGRAM, **more) as child:
                yield Home(world, self.journal, target=child)
                assert child.process.returncode is not None or await child.end() == 0
            assert b"Traceback" not in child.errors, child.errors.decode()
        else:
            async with program.make_server(self.journal.path).running() as running:
                yield Home(world, self.journal, running=running)


async def settled(pid: int) -> None:
    """Wait until a process has done all that it can: it wanted no time of the processor for a while."""
    before = ""
    while before != (before := work_of(pid)) or before.startswith("R"):  # noqa: ASYNC110  # it is another process
        await trio.sleep(0.3)


async def left_of(server: ServerProcess, base: int, most: float) -> int:
    """Bytes more than `base` that a server keeps after five seconds, or once it has nothing to do and keeps `most`."""
    with trio.move_on_after(5):
        await settled(server.pid)
        while server.memory - base > most:  # noqa: ASYNC110  # it is another process
            await trio.sleep(0.1)
    return server.memory - base


def work_of(pid: int) -> str:
    """The state of a process, R while it works or waits for a processor, and what it had of one, in ticks (proc(5)).

    Of this process it is "": who asks is at work.
    """
    if pid == os.getpid():
        return ""
    state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return f"{state} {rest[10]} {rest[11]}"


def interpreter(*words: str) -> list[str]:
    """A command that runs the program."""
    return [sys.executable, str(PROGRAM), *words]
