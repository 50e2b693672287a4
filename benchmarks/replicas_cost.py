"""How calls grow with replicas: calls per second, CPU and operations of the store per call with 1, 2 and 3 of them.

Run by itself: `python benchmarks/replicas_cost.py [--rounds N] [--calls N] [--store sqlite|redis]`, on Linux; with
Redis if there is a redis-server. 64 calls are under way from 64 clients, each of which sends its next request to the
next replica: a plain round robin that knows no sessions, and costs nothing. So of N replicas every Nth request comes to
the one that has its session. As in `store_cost.py` the calls are

    no session  a call of 2026-07-28
    whole       a call in a session of 2025-11-25 that is answered in one piece
    ten events  a call in such a session with ten progress notifications, so that its answer is a stream

CPU is that of all replicas together, of Redis, and of the clients here, the least of all rounds; calls per second are
the most. "busy" says how much of all processors these took at that: near 1 the machine is the limit, and not a lock or
a queue. The model of `docs/howto/scale.md` says that a call costs h where its session is held and e elsewhere. Both
follow from one and two replicas; what they make of three stands beside what three took.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from itertools import cycle
from typing import Any, Final

import attrs
import trio
from check_far_end import LEGACY, MODERN, Http, dial, opened
from store_cost import UNDER_WAY, Process, cpu_of, processes, redis, ten_events, whole

__all__ = ["measure"]

REPLICAS: Final = (1, 2, 3)
KINDS: Final[dict[str, tuple[str, Callable[[Any, int], Awaitable[None]]]]] = {
    "no session": (MODERN, whole),
    "whole": (LEGACY, whole),
    "ten events": (LEGACY, ten_events),
}
SHOWN: Final = 0.01  # operations per call; fewer are not told


@attrs.define(eq=False)
class RoundRobin:
    """A client that sends each request to the next replica. Used as an `Http`."""

    revision: str
    connections: Any  # one `Http` for each replica, again and again

    async def post(self, data: bytes, *, method: str = "", name: str = "") -> tuple[str, list[bytes]]:
        answered: tuple[str, list[bytes]] = await next(self.connections).post(data, method=method, name=name)
        return answered


@attrs.define(eq=False)
class Site:
    """Replicas that share a store."""

    replicas: list[Process]
    clients: dict[str, list[RoundRobin]] = attrs.field(factory=dict)  # by revision

    async def begin(self) -> None:
        for each in self.replicas:
            each.sessions.append(await opened(Http(dial(each.path), LEGACY)))
        for revision in (MODERN, LEGACY):
            self.clients[revision] = [await self._client(revision, place) for place in range(UNDER_WAY)]

    async def _client(self, revision: str, place: int) -> RoundRobin:
        made = [Http(dial(each.path), revision) for each in self.replicas]
        turned = [made[(place + step) % len(made)] for step in range(len(made))]
        if revision == LEGACY:
            session = (await opened(turned[0])).session
            turned = [attrs.evolve(each, session=session) for each in turned]
        return RoundRobin(revision, cycle(turned))

    async def used(self) -> float:
        """Return microseconds of CPU of all replicas."""
        return sum([(await each.used())[0] for each in self.replicas])


@attrs.define
class Figures:
    """What calls of one kind took."""

    rate: float = 0.0  # calls per second
    busy: float = 0.0  # of all processors, at that rate
    servers: float = float("inf")  # µs of CPU per call
    redis: float = float("inf")
    clients: float = float("inf")
    operations: dict[str, float] = attrs.field(factory=dict)  # of Redis per call, by command


@attrs.frozen
class Redis:
    """The Redis that is measured."""

    pid: int
    path: str

    def commands(self) -> dict[str, int]:
        """Return how often each command was carried out, in scripts too."""
        command = ["redis-cli", "-s", self.path, "INFO", "commandstats"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        lines = [line.removeprefix("cmdstat_").split(":calls=") for line in told.splitlines() if ":calls=" in line]
        return {name: int(rest.split(",")[0]) for name, rest in lines}


async def measure(
    sites: dict[int, Site], server: Redis | None, rounds: int, number: int
) -> dict[tuple[str, int], Figures]:
    """Return the figures by what is called and the number of replicas."""
    found = {(what, replicas): Figures() for what in KINDS for replicas in sites}
    for round in range(rounds + 1):
        for (what, replicas), figures in found.items():
            revision, make = KINDS[what]
            site = sites[replicas]
            commands = {} if server is None else server.commands()
            before = await site.used(), 0.0 if server is None else cpu_of(server.pid), time.process_time() * 1e6
            began = time.perf_counter()
            await make(site.clients[revision], number)
            seconds = time.perf_counter() - began
            own = time.process_time() * 1e6  # before others are asked
            after = await site.used(), 0.0 if server is None else cpu_of(server.pid), own
            if not round:  # the first calls are slow everywhere
                continue
            servers, of_redis, clients = [(now - then) / number for now, then in zip(after, before, strict=True)]
            if number / seconds > figures.rate:
                busy = (servers + of_redis + clients) * number / 1e6 / seconds / len(os.sched_getaffinity(0))
                figures.rate, figures.busy = number / seconds, busy
            figures.servers = min(figures.servers, servers)
            figures.redis = min(figures.redis, of_redis)
            figures.clients = min(figures.clients, clients)
            if server is not None:
                now = server.commands()
                grown = {name: (now[name] - commands.get(name, 0)) / number for name in now if name != "info"}
                figures.operations = {name: more for name, more in grown.items() if more >= SHOWN}
    return found


def tell(store: str, found: dict[tuple[str, int], Figures]) -> None:
    """Print what was found with one store."""
    heads = "replicas   calls/s   busy   servers µs   model   Redis µs   clients µs   operations"
    print(f"\n{f'{store}, per call':<26}{heads}")
    for (what, replicas), each in found.items():
        model = expected([found[what, number].servers for number in REPLICAS[:2]], replicas)
        shown = "" if replicas < 3 else f"{model:.1f}"
        told = ", ".join(f"{name} {number:.2f}" for name, number in sorted(each.operations.items()))
        print(
            f"{what:<26}{replicas:>8}{each.rate:>10,.0f}{each.busy:>7.2f}{each.servers:>13.1f}{shown:>8}"
            f"{each.redis:>11.1f}{each.clients:>13.1f}   {told}"
        )


def expected(known: list[float], replicas: int) -> float:
    """Return what a call takes with so many replicas by the model, from what it took with one and two."""
    here = known[0]
    elsewhere = 2 * known[1] - here
    return here / replicas + elsewhere * (replicas - 1) / replicas


async def _run(stores: list[str], rounds: int, number: int) -> None:
    for store in stores:
        with tempfile.TemporaryDirectory(prefix="trimcp-") as folder, ExitStack() as stack:
            url, server = f"sqlite://{folder}/s.db", None
            if store == "redis":
                url, pid = stack.enter_context(redis(folder))
                server = Redis(pid, f"{folder}/r.sock")
            sites = {}
            for replicas in REPLICAS:
                own = f"{folder}/{replicas}"
                os.mkdir(own)
                # Each number of replicas has what it shares for itself, as it would have alone.
                shared = url if store == "redis" else f"sqlite://{own}/s.db"
                sites[replicas] = Site(stack.enter_context(processes(own, shared, replicas)))
            for site in sites.values():
                await site.begin()
            tell(store, await measure(sites, server, rounds, number))


def main() -> None:
    """Measure, and print a table for each store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=4096, help="calls in a turn")
    parser.add_argument("--store", choices=("sqlite", "redis"), action="append", help="only this one")
    options = parser.parse_args()
    stores = options.store or ["sqlite", "redis"]
    if shutil.which("redis-server") is None:
        stores = [store for store in stores if store != "redis"]
    trio.run(_run, stores, options.rounds, options.calls)


if __name__ == "__main__":
    main()
