"""What a shared store costs: CPU of calls in sessions with each store against memory, and bytes per session.

Run by itself: `python benchmarks/store_cost.py [--rounds N] [--calls N]`, on Linux; with Redis if there is a
redis-server. Servers run in processes of their own, at Unix sockets, with 64 calls under way in 64 sessions of
2025-11-25 or without one, in turns:

    no session  a call of 2026-07-28, which needs nothing of a store
    whole       a call that is answered in one piece
    ten events  a call with ten progress notifications, so that its answer is a stream
    elsewhere   a whole call that arrives at another process than its session's

Time is CPU of the servers' processes, the least of all rounds, and beside it that of Redis. Bytes are what 2,000 idle
sessions add to the memory of the process, and to the store.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import orjson
import trio
from check_far_end import LEGACY, MODERN, Http, check, dial, echo, opened, request

import trimcp

__all__ = ["measure"]

UNDER_WAY = 64
SESSIONS = 2_000
TICK = os.sysconf("SC_CLK_TCK")


def memory() -> int:
    """Return the bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def make_server() -> trimcp.Server[None]:
    """Return the server that is measured."""
    server = trimcp.Server[None]("cost", "1")

    @server.tool
    async def echo(text: str) -> str:
        return text

    @server.tool
    async def steps(*, ctx: trimcp.Context) -> str:
        for step in range(10):
            await ctx.report_progress(step + 1, 10)
        return "done"

    @server.tool(structured=False)
    async def used(collect: bool) -> str:
        if collect:
            gc.collect()
        return f"{time.process_time_ns()} {memory()}"

    return server


async def serve(path: str, store: str | None) -> None:
    """Serve in this process until it is ended."""
    settings = trimcp.HttpSettings(max_sessions=100_000)
    await trimcp.serve_http(make_server(), uds=path, store=store, settings=settings, grace=0)


@attrs.define(eq=False)
class Process:
    """A server in a process of its own, with its sessions on connections."""

    path: str
    child: subprocess.Popen[bytes]
    sessions: list[Http] = attrs.field(factory=list)
    modern: list[Http] = attrs.field(factory=list)

    async def begin(self) -> None:
        for _ in range(UNDER_WAY):
            self.modern.append(Http(dial(self.path), MODERN))
            self.sessions.append(await opened(Http(dial(self.path), LEGACY)))

    async def used(self, *, collect: bool = False) -> tuple[float, int]:
        """Return microseconds of CPU, and bytes of memory."""
        _, data = request(LEGACY, "tools/call", {"name": "used", "arguments": {"collect": collect}})
        _, messages = await self.sessions[0].post(data)
        cpu, size = orjson.loads(messages[-1])["result"]["content"][0]["text"].split()
        return int(cpu) / 1e3, int(size)


@contextmanager
def processes(folder: str, store: str | None, number: int) -> Iterator[list[Process]]:
    """Run servers that share a store."""
    made = []
    try:
        for place in range(number):
            path = f"{folder}/{place}"
            command = [sys.executable, __file__, "--serve", path, *([store] if store else [])]
            made.append(Process(path, subprocess.Popen(command)))
        for each in made:
            while not os.path.exists(each.path):
                assert each.child.poll() is None, "it did not start"
                time.sleep(0.01)
        yield made
    finally:
        for each in made:
            each.child.kill()
            each.child.wait()


@contextmanager
def redis(folder: str) -> Iterator[tuple[str, int]]:
    """Run a Redis, and yield its URL and its process."""
    path = f"{folder}/r.sock"
    command = ["redis-server", "--port", "0", "--unixsocket", path, "--save", "", "--dir", folder]
    child = subprocess.Popen([*command, "--appendonly", "yes"], stdout=subprocess.DEVNULL)
    try:
        while not os.path.exists(path):
            time.sleep(0.01)
        yield f"unix://{path}", child.pid
    finally:
        child.kill()
        child.wait()


def cpu_of(pid: int) -> float:
    """Return microseconds of CPU of another program."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK * 1e6


async def whole(sessions: list[Http], number: int) -> None:
    """Make so many calls, one at a time in each session, and check every reply."""

    async def caller(http: Http) -> None:
        for _ in range(number // len(sessions)):
            id, wanted, data = echo(http.revision)
            _, [reply] = await http.post(data, method="tools/call", name="echo")
            check(reply, {id: wanted})

    async with trio.open_nursery() as nursery:
        for http in sessions:
            nursery.start_soon(caller, http)


async def ten_events(sessions: list[Http], number: int) -> None:
    """Make calls that report progress, and check that ten notifications come before each reply."""

    async def caller(http: Http) -> None:
        for _ in range(number // len(sessions)):
            id, data = request(LEGACY, "tools/call", {"name": "steps", "arguments": {}}, progressToken=1)
            _, [*notes, reply] = await http.post(data)
            assert len(notes) == 10, notes
            check(reply, {id: "done"})

    async with trio.open_nursery() as nursery:
        for http in sessions:
            nursery.start_soon(caller, http)


async def measure(rounds: int, number: int) -> tuple[dict[tuple[str, str], float], dict[str, tuple[float, float]]]:
    """Return microseconds per call by what is called and the store, and bytes of memory and store per session."""
    least: dict[tuple[str, str], float] = {}
    sizes: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory(prefix="trimcp-") as folder:
        for name in ("memory", "sqlite", "redis"):
            os.mkdir(f"{folder}/{name}")
        stores: dict[str, str | None] = {"memory": None, "sqlite": f"sqlite://{folder}/sqlite/s.db"}
        if shutil.which("redis-server") is None:
            await _measure_all(folder, stores, None, rounds, number, least, sizes)
        else:
            with redis(folder) as (url, pid):
                await _measure_all(folder, {**stores, "redis": url}, pid, rounds, number, least, sizes)
    return least, sizes


async def _measure_all(
    folder: str,
    stores: dict[str, str | None],
    pid: int | None,
    rounds: int,
    number: int,
    least: dict[tuple[str, str], float],
    sizes: dict[str, tuple[float, float]],
) -> None:
    running = {name: processes(f"{folder}/{name}", url, 1 if url is None else 2) for name, url in stores.items()}
    made = {name: each.__enter__() for name, each in running.items()}
    try:
        for each in made.values():
            for one in each:
                await one.begin()
        for round in range(rounds + 1):
            for what, make in (
                ("no session", whole),
                ("whole", whole),
                ("ten events", ten_events),
                ("elsewhere", whole),
            ):
                for name, [first, *others] in made.items():
                    if what == "elsewhere" and not others:
                        continue
                    sessions = first.modern if what == "no session" else first.sessions
                    if what == "elsewhere":  # those of the first, on connections to the other
                        pairs = zip(others[0].sessions, sessions, strict=True)
                        sessions = [attrs.evolve(there, session=here.session) for there, here in pairs]
                    before = sum([(await one.used())[0] for one in (first, *others)])
                    redis_before = 0.0 if pid is None else cpu_of(pid)
                    await make(sessions, number)
                    after = sum([(await one.used())[0] for one in (first, *others)])
                    if round:  # the first calls are slow everywhere
                        key = what, name
                        least[key] = min(least.get(key, 1e9), (after - before) / number)
                        if name == "redis" and pid is not None:
                            key = what, "Redis itself"
                            least[key] = min(least.get(key, 1e9), (cpu_of(pid) - redis_before) / number)
        for name, [first, *_] in made.items():
            sizes[name] = await _sizes(first, folder, name, stores)
    finally:
        for one in running.values():
            one.__exit__(None, None, None)


async def _sizes(first: Process, folder: str, name: str, stores: dict[str, str | None]) -> tuple[float, float]:
    """Return what an idle session takes in the process and in the store."""
    (_, before), stored = await first.used(collect=True), _stored(folder, name)
    for _ in range(SESSIONS):
        await opened(attrs.evolve(first.sessions[1], session=""))
    (_, after), now = await first.used(collect=True), _stored(folder, name)
    return (after - before) / SESSIONS, (now - stored) / SESSIONS


def _stored(folder: str, name: str) -> int:
    if name == "sqlite":
        import sqlite3

        with sqlite3.connect(f"{folder}/sqlite/s.db") as file:
            [(size,)] = file.execute(
                "SELECT (page_count - freelist_count) * page_size FROM pragma_page_count, "
                "pragma_freelist_count, pragma_page_size"
            )
        return int(size)
    if name == "redis":
        command = ["redis-cli", "-s", f"{folder}/r.sock", "INFO", "memory"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return int(told.partition("used_memory:")[2].split()[0])
    return 0


def main() -> None:
    """Measure and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=4096, help="calls in a turn")
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        trio.run(partial(serve, options.serve[0], options.serve[1] if options.serve[1:] else None))
        return
    least, sizes = trio.run(measure, options.rounds, options.calls)
    names = list(dict.fromkeys(name for _, name in least))
    print(f"{'CPU per call, µs':<20}" + "".join(f"{name:>16}" for name in names))
    for what in dict.fromkeys(what for what, _ in least):
        base: Any = least.get((what, "memory"), least.get(("whole", "memory")))
        row = [least.get((what, name)) for name in names]
        print(
            f"{what:<20}" + "".join(" " * 16 if each is None else f"{each:>9.1f} {each / base:>5.2f}x" for each in row)
        )
    print(f"\n{'bytes per session':<20}" + "".join(f"{name:>16}" for name in sizes))
    for place, what in enumerate(("process", "store")):
        print(f"{what:<20}" + "".join(f"{each[place]:>16,.0f}" for each in sizes.values()))


if __name__ == "__main__":
    main()
