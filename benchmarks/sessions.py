"""What sessions with open streams cost every peer: `python sessions.py [--quick]`, or `nox -s bench-sessions`.

In each round every server opens as many sessions, each with its stream, answers one call in each, and closes them all.
The rounds of the servers alternate; all live all the time. Memory, CPU and descriptors are those of the server's
process as the kernel counts them; a tool of its own collects garbage first.
"""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import attrs
import trio
from environments import Peer
from http_sessions import Connection, Session, SseSession, StreamableSession, WebSocketSession, call, each, echo
from processes import LOAD_CORE, SERVER_CORE, descriptors, kept_on, listening, on_core
from rows import Rows, command_line

from trimcp.bench.cost import cpu_seconds, memory_of

__all__ = ["CELLS", "Cell", "measure", "open_files"]

UNDER_WAY = 32
WARM = 5
PHASE_LIMIT = 240.0
KINDS = {"http": StreamableSession, "sse": SseSession, "websocket": WebSocketSession}
SETTLE_LIMIT, QUICK_SETTLE_LIMIT = 12.0, 2.0  # some things are kept for a while, such as a connection's deadline


@attrs.frozen
class Cell:
    """So many sessions of a kind: over Streamable HTTP ("http"), HTTP+SSE ("sse"), or WebSocket."""

    mode: str
    sessions: int

    def session(self, url: str) -> Session:
        """Return a session that is not open yet."""
        # The address is that of the upgrade, which is a request of HTTP.
        return KINDS[self.mode](Connection(f"http{url.removeprefix('ws')}" if url.startswith("ws") else url))


CELLS = {
    "sessions-1000": Cell("http", 1_000),
    "sessions-5000": Cell("http", 5_000),
    "sessions-sse-1000": Cell("sse", 1_000),
    "sessions-websocket-1000": Cell("websocket", 1_000),
}


@attrs.frozen
class Counts:
    """What a server's process has at one moment, after a collection of garbage.

    Attributes:
        resident: bytes of memory.
        peak: the most it ever was.
        blocks: pieces of memory its interpreter has handed out; exact, where `resident` is what allocators hold. Of
            Node, bytes of its heap.
        objects: those of them the collector of garbage knows.
        tasks: of its event loop.
        descriptors: files and sockets.
    """

    resident: int
    peak: int
    blocks: int
    objects: int
    tasks: int
    descriptors: int


@attrs.frozen
class Spent:
    """CPU seconds of the server and seconds of wall-clock time."""

    cpu: float
    wall: float


@attrs.frozen
class Round:
    """One round: before it, what was spent on each phase, with all sessions open, and after their end."""

    before: Counts
    opening: Spent
    open: Counts
    calling: Spent
    closing: Spent
    after: Counts


@attrs.define(eq=False)
class Under:
    """A server under measurement."""

    cell: Cell
    url: str
    process: int
    settle_limit: float

    async def counts(self) -> Counts:
        """Return what it has now."""
        # In a session of its own, since servers close connections on which nothing happens.
        found: list[Counts] = []

        async def ask(session: Session, connection: Connection) -> None:
            await session.open(connection)
            blocks, objects, tasks = map(int, (await call(session, connection, "counts", {})).split())
            resident, peak = memory_of(self.process)
            found.append(Counts(resident, peak, blocks, objects, tasks, descriptors(self.process)))
            await session.close(connection)

        await each([self.cell.session(self.url)], ask, 1)
        return found[0]

    async def settled(self, base: Counts, blocks: float) -> Counts:
        """Return the counts once no task, no descriptor and few blocks are left, or after a while as they are."""
        deadline = trio.current_time() + self.settle_limit
        while True:
            now = await self.counts()
            back = now.descriptors <= base.descriptors and now.tasks <= base.tasks
            if (back and now.blocks <= base.blocks + blocks) or trio.current_time() > deadline:
                return now
            await trio.sleep(0.1)

    async def round(self, sessions: int, base: Counts | None = None) -> Round:
        """Open, call and close so many sessions; with a base, wait in the end until there is little more than then."""
        before = await self.counts()
        opened = [self.cell.session(self.url) for _ in range(sessions)]
        opening = await self._spend(partial(each, opened, _open, UNDER_WAY))
        while_open = await self.counts()
        calling = await self._spend(partial(each, opened, echo, UNDER_WAY))
        closing = await self._spend(partial(self._close, opened))
        after = await (self.settled(before, math.inf) if base is None else self.settled(base, few(sessions)))
        return Round(before, opening, while_open, calling, closing, after)

    async def _close(self, opened: list[Session]) -> None:
        there = descriptors(self.process) - len(opened)
        await each(opened, _close, UNDER_WAY)
        # Where a session is closed by hanging up, the server has yet to see it. Another process cannot tell us.
        deadline = trio.current_time() + self.settle_limit
        while descriptors(self.process) > there and trio.current_time() < deadline:  # noqa: ASYNC110 -- another process
            await trio.sleep(0.005)

    async def _spend(self, work: Callable[[], Awaitable[None]]) -> Spent:
        cpu, wall = cpu_seconds(self.process), time.perf_counter()
        with trio.fail_after(PHASE_LIMIT):
            await work()
        return Spent(cpu_seconds(self.process) - cpu, time.perf_counter() - wall)


async def _open(session: Session, connection: Connection) -> None:
    await session.open(connection)


async def _close(session: Session, connection: Connection) -> None:
    await session.close(connection)


@asynccontextmanager
async def serving(peer: Peer, cell: Cell, settle_limit: float) -> AsyncIterator[Under]:
    """Start a server on a port of the system's choice, and stop it in the end."""
    environment = {**os.environ, **peer.environment, "BENCH_COUNTS": "1"}
    command = [*on_core(SERVER_CORE), *peer.counting(cell.mode)]
    async with listening(command, environment) as (url, pid):
        yield Under(cell, url, pid, settle_limit)


async def rounds_of(peers: Sequence[Peer], cell: Cell, rounds: int, settle_limit: float) -> dict[str, list[Round]]:
    """Return the rounds of each peer."""
    found: dict[str, list[Round]] = {peer.name: [] for peer in peers}
    async with AsyncExitStack() as stack:
        servers = {peer.name: await stack.enter_async_context(serving(peer, cell, settle_limit)) for peer in peers}
        for server in servers.values():
            await server.round(WARM)
        for number in range(1, rounds + 1):
            for name, server in servers.items():
                # What is left is a question for the end.
                base = found[name][0].before if 1 < number == rounds else None
                found[name].append(await server.round(cell.sessions, base))
    return found


def few(sessions: int) -> float:
    """Return how many blocks of memory more or less are no leak after so many sessions."""
    return 500 + sessions / 10


# What it comes to


def measure(
    peers: Sequence[Peer], *, rounds: int, quick: bool, cells: Collection[str] | None = None
) -> list[dict[str, Any]]:
    """Return what a session costs each peer.

    Args:
        peers: who takes part, where it can.
        rounds: in each, every peer has its turn; from the second on, memory is what earlier ones have left.
        quick: do not wait long for what goes away after a while.
        cells: only these; without it all but the largest.
    """
    rows = Rows()
    for name, cell in CELLS.items():
        if name not in (cells if cells is not None else set(CELLS) - {"sessions-5000"}):
            continue
        able = [peer for peer in peers if peer.can(cell.mode)]
        with kept_on(LOAD_CORE), open_files(cell.sessions + 500):
            limit = QUICK_SETTLE_LIMIT if quick else SETTLE_LIMIT
            found = trio.run(rounds_of, able, cell, rounds, limit)
        for peer, results in found.items():
            _add(rows, name, peer, results, cell.sessions)
    return rows.data


def _add(rows: Rows, cell: str, peer: str, rounds: list[Round], sessions: int) -> None:
    first, last = rounds[0], rounds[-1]
    for phase in ("opening", "calling", "closing"):
        for each_round in rounds:
            spent: Spent = getattr(each_round, phase)
            rows.add(cell, phase, peer, "ms", spent.cpu / sessions * 1e3)
            rows.add(cell, f"{phase}-wall", peer, "ms", spent.wall / sessions * 1e3)
    kib = 1024 * sessions
    # Of a process that has not held as many before: what it got then, it mostly keeps.
    rows.add(cell, "memory", peer, "KiB", (first.open.resident - first.before.resident) / kib)
    rows.add(cell, "blocks", peer, "each", (first.open.blocks - first.before.blocks) / sessions)
    rows.add(cell, "tasks", peer, "each", (first.open.tasks - first.before.tasks) / sessions)
    rows.add(cell, "kept", peer, "KiB", (first.after.resident - first.before.resident) / kib)
    if len(rounds) > 1:
        # Resident memory goes up and down by megabytes; the most it ever was grows only where there is a leak.
        rows.add(cell, "growth", peer, "KiB", (last.after.peak - last.before.peak) / kib)
        for what in ("blocks", "tasks", "descriptors"):
            rows.add(cell, f"left-{what}", peer, what, getattr(last.after, what) - getattr(first.before, what))


@contextmanager
def open_files(wanted: int) -> Iterator[None]:
    """Let this process, and the servers that inherit it, have so many files open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise OSError(f"only {hard} files may be open at once; {wanted} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


if __name__ == "__main__":
    command_line("What sessions with open streams cost.", measure, rounds=4)
