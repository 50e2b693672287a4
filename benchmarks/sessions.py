"""What Streamable HTTP sessions with open streams cost beside the official SDK: `nox -s bench-sessions`.

In each round every server opens as many sessions (2025-11-25), each with its GET stream, answers one call in each, and
closes them all. The rounds of the servers alternate; both live all the time. Measured from outside: memory, CPU and
descriptors of the server's process as the kernel counts them. What is measured is in `README.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import attrs
import trio
from http_sessions import Connection, Session, each
from processes import cpu_seconds, descriptors, pin, resident_bytes

PEERS = Path(__file__).parent / "peers"
OURS = "trimcp"
OFFICIAL = "mcp MCPServer"
COMMANDS = {OURS: PEERS / "ours.py", OFFICIAL: PEERS / "official.py"}
MOST_SESSIONS = 5_000
WARM = 5
START_LIMIT = 30.0
PHASE_LIMIT = 120.0
SETTLE_LIMIT = 20.0  # some things are kept for a while, such as a deadline that was set for a connection


@attrs.frozen
class Counts:
    """What a server's process has at one moment, after a collection of garbage.

    Attributes:
        resident: bytes of memory.
        peak: the most it ever was.
        blocks: pieces of memory its interpreter has handed out; exact, where `resident` is what allocators hold.
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
    """A server under measurement, with a session in which it is asked for its counts."""

    process: int
    control: Session

    async def counts(self) -> Counts:
        """Return what it has now."""
        # A connection of its own, since servers close those on which nothing happens.
        connection = Connection(self.control.stream.port)
        try:
            blocks, objects, tasks = map(int, (await self.control.call(connection, "counts")).split())
            resident, peak = resident_bytes(self.process), resident_bytes(self.process, most=True)
            return Counts(resident, peak, blocks, objects, tasks, descriptors(self.process))
        finally:
            connection.close()

    async def settled(self, base: Counts, blocks: float) -> Counts:
        """Return the counts once they are back at the base but for so many blocks, or after a while as they are."""
        deadline = trio.current_time() + SETTLE_LIMIT
        while True:
            now = await self.counts()
            back = now.descriptors <= base.descriptors and now.tasks <= base.tasks
            if (back and now.blocks <= base.blocks + blocks) or trio.current_time() > deadline:
                return now
            await trio.sleep(0.1)

    async def round(self, sessions: int, under_way: int) -> Round:
        """Open, call and close so many sessions."""
        before = await self.counts()
        opened = [Session(Connection(self.control.stream.port)) for _ in range(sessions)]
        opening = await self._spend(partial(each, opened, Session.open, under_way))
        while_open = await self.counts()
        calling = await self._spend(partial(each, opened, Session.call, under_way))
        closing = await self._spend(partial(each, opened, Session.close, under_way))
        return Round(before, opening, while_open, calling, closing, await self.settled(before, few(sessions)))

    async def _spend(self, work: Callable[[], Awaitable[None]]) -> Spent:
        cpu, wall = cpu_seconds(self.process), time.perf_counter()
        with trio.fail_after(PHASE_LIMIT):
            await work()
        return Spent(cpu_seconds(self.process) - cpu, time.perf_counter() - wall)


@asynccontextmanager
async def serving(command: Path) -> AsyncIterator[Under]:
    """Start a server on a port of the system's choice, greet it, and stop it in the end."""
    process = await trio.lowlevel.open_process([sys.executable, str(command), "http"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        pin(process.pid, 0)
        line = b""
        with trio.fail_after(START_LIMIT):
            while not line.endswith(b"\n"):
                data = await process.stdout.receive_some()
                if not data:
                    raise AssertionError(f"{command.name} ended before it said its port")
                line += data
        control = Session(Connection(int(line)))
        await each([control], Session.open, 1)
        yield Under(process.pid, control)
        await each([control], Session.close, 1)
    finally:
        process.terminate()
        with trio.move_on_after(5, shield=True):
            await process.wait()
        process.kill()
        await process.stdout.aclose()


async def measure(peers: list[str], sessions: int, rounds: int, under_way: int) -> dict[str, list[Round]]:
    """Return the rounds of each peer."""
    found: dict[str, list[Round]] = {peer: [] for peer in peers}
    servers: dict[str, Under] = {}

    async def with_servers(left: list[str]) -> None:
        if left:
            async with serving(COMMANDS[left[0]]) as servers[left[0]]:
                await with_servers(left[1:])
            return
        for server in servers.values():
            await server.round(WARM, under_way)
        for _ in range(rounds):
            for peer, server in servers.items():
                found[peer].append(await server.round(sessions, under_way))

    await with_servers(peers)
    return found


def few(sessions: int) -> float:
    """Return how many blocks of memory more or less are no leak after so many sessions."""
    return 500 + sessions / 10


# What it comes to


def spent(rounds: list[Round], phase: str, of: str, sessions: int) -> float:
    """Return the milliseconds that a phase took for each session, in the median round."""
    return statistics.median(getattr(getattr(round, phase), of) for round in rounds) / sessions * 1e3


def held(rounds: list[Round], of: str, sessions: int) -> float:
    """Return what an open session held in the first round."""
    return float(getattr(rounds[0].open, of) - getattr(rounds[0].before, of)) / sessions


def grown(rounds: list[Round], of: str) -> int:
    """Return how much more there was after the last of these rounds than before it."""
    found: int = getattr(rounds[-1].after, of) - getattr(rounds[-1].before, of)
    return found


def left(rounds: list[Round], of: str) -> int:
    """Return how much more there was after the last round than before the first."""
    found: int = getattr(rounds[-1].after, of) - getattr(rounds[0].before, of)
    return found


def figures(rounds: list[Round], sessions: int) -> dict[str, float]:
    """Return what a server's rounds come to, by name; of all of it less is better."""
    kib = 1024 * sessions
    return {
        "a session with an open stream: KiB": held(rounds, "resident", kib),
        "the same: blocks of memory": held(rounds, "blocks", sessions),
        "the same: objects the collector knows": held(rounds, "objects", sessions),
        "the same: tasks": held(rounds, "tasks", sessions),
        "opening one: CPU ms": spent(rounds, "opening", "cpu", sessions),
        "opening one: wall-clock ms": spent(rounds, "opening", "wall", sessions),
        "a call in each: CPU ms": spent(rounds, "calling", "cpu", sessions),
        "closing one: CPU ms": spent(rounds, "closing", "cpu", sessions),
        "closing one: wall-clock ms": spent(rounds, "closing", "wall", sessions),
        "kept of each after round 1: KiB": grown(rounds[:1], "resident") / kib,
        f"added to the peak by each in round {len(rounds)}: KiB": grown(rounds, "peak") / kib,
        "blocks of memory left in the end": left(rounds, "blocks"),
        "tasks left in the end": left(rounds, "tasks"),
        "descriptors left in the end": left(rounds, "descriptors"),
    }


def table(found: dict[str, list[Round]], sessions: int) -> str:
    """Return the figures as Markdown, with ours over the official SDK's."""
    rows = {peer: figures(rounds, sessions) for peer, rounds in found.items()}
    lines = [f"| {sessions:,} sessions | {' | '.join(rows)} | trimcp / {OFFICIAL} |", "| --- " * (len(rows) + 2) + "|"]
    for name in next(iter(rows.values())):
        values = {peer: row[name] for peer, row in rows.items()}
        # What is left or added is a small number of either sign; a ratio of two such says nothing.
        comparable = len(values) > 1 and "left" not in name and "added" not in name
        ratio = f"{values[OURS] / values[OFFICIAL]:.2f}" if comparable else ""
        lines.append(f"| {name} | {' | '.join(f'{value:,.2f}' for value in values.values())} | {ratio} |")
    return "\n".join(lines)


def misses(found: dict[str, list[Round]], sessions: int) -> list[str]:
    """Return each promise that ours did not keep."""
    ours = found[OURS]
    promises = {
        f"round {len(ours)} added more than 0.5 KiB for each session": grown(ours, "peak") <= 512 * sessions,
        "tasks are left": left(ours, "tasks") <= 0,
        "descriptors are left": left(ours, "descriptors") <= 0,
        "memory is left": left(ours, "blocks") <= few(sessions),
    }
    if OFFICIAL in found:
        theirs = held(found[OFFICIAL], "resident", sessions)
        promises[f"a session costs more than half of one of {OFFICIAL}"] = (
            held(ours, "resident", sessions) <= theirs / 2
        )
    return [name for name, kept in promises.items() if not kept]


def main() -> None:
    """Measure as the command line says, and print the table."""
    parser = argparse.ArgumentParser(description="What sessions with open streams cost beside the official SDK.")
    parser.add_argument("--sessions", type=int, default=1_000, help=f"open at once in a round (1,000; {MOST_SESSIONS})")
    parser.add_argument("--rounds", type=int, default=4, help="how often each server has its turn (4)")
    parser.add_argument("--under-way", type=int, default=32, help="how many are opened at a time (32)")
    parser.add_argument("--only", choices=COMMANDS, help="measure one server alone")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    parser.add_argument("--check", action="store_true", help="fail if ours keeps something or costs more than half")
    options = parser.parse_args()
    if not (1 <= options.sessions <= MOST_SESSIONS and 1 <= options.rounds <= 20 and 1 <= options.under_way <= 256):
        parser.error(f"1 to {MOST_SESSIONS} sessions, 1 to 20 rounds, 1 to 256 under way")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < options.sessions + 500:
        parser.error(f"only {most} files may be open at once; fewer --sessions")
    # Of this process and of the servers, which inherit it.
    resource.setrlimit(resource.RLIMIT_NOFILE, (options.sessions + 500, most))
    pin(os.getpid(), 1)
    peers = [options.only] if options.only else list(COMMANDS)
    found = trio.run(measure, peers, options.sessions, options.rounds, options.under_way)
    print(table(found, options.sessions))
    if options.json is not None:
        options.json.write_text(
            json.dumps({peer: [attrs.asdict(round) for round in rounds] for peer, rounds in found.items()}, indent=1)
        )
    if options.check and OURS in found and (told := misses(found, options.sessions)):
        sys.exit("; ".join(told))


if __name__ == "__main__":
    main()
