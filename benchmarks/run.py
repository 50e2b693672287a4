"""Measures every implementation in every cell, and writes the page about it: `nox -s bench`.

    python benchmarks/run.py [--quick] [--bars] [--only CELL]... [--peers NAME]... [--rounds N] [--minutes M]
        [--keep] [--out FOLDER]

In a round every implementation has its turn. Servers over a network are started once for a cell, and live through its
rounds; servers over stdio are started for each turn, as is the load generator, and so it is with clients under
measurement. `--out` is the folder of the page; without it a whole run writes into docs/, and any other into
build/bench/. With `--keep` a part is put into the page that is there, which says so.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import os
import resource
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import attrs
import clients
import report
import slow_reader
from bars import BARS
from cells import CELLS, Cell
from clients import Calling, calling
from environments import ROOT, Peer, find_before, find_peers
from machine import Stolen, load_average, machine, pulse_ms
from names import BEFORE, FLOOR, ONLY_THERE, ORDER, OURS
from results import BUSY, Results
from servers import Failed, Serving, ask, command_of, floor, serving

__all__ = ["Budget", "Run", "main"]

# Measured by modules of their own.
ELSEWHERE = (
    "memory",
    "cold start",
    "sessions",
    "come and go",
    "told",
    "agent grpc",
    "http2 cost",
)
MINUTES, QUICK_MINUTES = 29.0, 4.8
QUICK_TIME = 0.4  # of the seconds of a whole run
IDLE_SECONDS = 5.0
OPEN_FILES = 4096
FIRST_CALLS = 4_000
# Longer than that a failing turn may take only once.
PATIENCE = 15.0
BARRED = {name for bar in BARS for name in (bar.cell, bar.over)}
T = TypeVar("T")


class Budget:
    """Time: what the cells were expected to take, and what they took.

    Args:
        seconds: all there is.
        expected: seconds of each cell, by name.
        least: seconds of those that rather have a single round than that another has fewer.
        now: a clock.
    """

    def __init__(
        self,
        seconds: float,
        expected: dict[str, float],
        least: dict[str, float] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._expected = dict(expected)
        self._least = dict(least or {})
        self._now = now
        self._began = now()
        self._until = self._began + seconds
        self._done = 0.0

    @property
    def left(self) -> float:
        """Seconds until all cells will be done, judged by how long the others took."""
        return sum(self._expected.values()) * self._pace()

    @property
    def spent(self) -> float:
        """Seconds so far."""
        return self._now() - self._began

    def rounds(self, cell: str, wanted: int) -> int:
        """Return how many of the wanted rounds a cell may have if all that is left is to be done in time."""
        spared = {} if cell in self._least else self._least
        needed = sum(spared.get(name, seconds) for name, seconds in self._expected.items()) * self._pace()
        available = max(self._until - self._now(), 0.0)
        return wanted if needed <= available else max(1, int(wanted * available / needed))

    def done(self, cell: str, share: float = 1.0) -> None:
        """Note that a cell is over, or as much of it as there was time for."""
        self._done += self._expected.pop(cell) * share

    def _pace(self) -> float:
        # Of the first cells alone it would be a guess.
        return self.spent / self._done if self._done > 30 else 1.0


class Run:
    """One run.

    Args:
        peers: who takes part, the minimal server among them or not.
        cells: what is measured.
        quick: less time for each turn, fewer rounds.
        rounds: instead of the cells' own numbers.
        minutes: all there is.
        far: whose servers clients are measured with, where they do not take part.
        say: where to tell how far it is.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        cells: Sequence[Cell],
        *,
        quick: bool,
        rounds: int | None,
        minutes: float,
        far: Sequence[Peer] = (),
        say: Callable[[str], None] = print,
    ) -> None:
        self.results = Results()
        self._peers = list(peers)
        self._cells = list(cells)
        self._quick = quick
        self._rounds = rounds
        self._say = say
        self._python = next(peer.program[0] for peer in peers if peer.name == OURS)
        self._far = {peer.name: peer for peer in (*peers, *far)}
        expected = {cell.name: self._expected(cell, self._wanted(cell)) for cell in cells}
        # No bar depends on those with few rounds.
        least = {cell.name: self._expected(cell, 1) for cell in cells if cell.rounds < 3}
        self._budget = Budget(minutes * 60, expected, least)

    def run(self) -> Results:
        """Measure everything."""
        made = self.results.made
        stolen, loads, pulses, taken = Stolen(), [load_average()], [], {}
        made.update(date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), quick=self._quick)
        self.results.machine = machine()
        self.results.versions = versions(self._peers)
        self._say(f"{len(self._cells)} cells, about {_minutes(self._budget.left)}")
        number = 0
        for cells in self._together():
            pulses.append(pulse_ms())
            names, first = ", ".join(cell.name for cell in cells), cells[0]
            rounds = self._budget.rounds(first.name, self._wanted(first))
            number += len(cells)
            self._say(f"[{number}/{len(self._cells)}] {names}, {self._told(first, rounds)}")
            KINDS[first.kind](self, cells, rounds)
            for cell in cells:
                self._budget.done(cell.name, rounds / self._wanted(cell))
                self._say(self._found(cell))
            taken[names] = round(self._budget.spent - sum(taken.values()), 1)
        loads.append(load_average())
        made.update(pulse_ms=pulses, load_average=loads, stolen=stolen.share())
        made.update(seconds=round(self._budget.spent, 1), seconds_of_each_cell=taken)
        return self.results

    # Each kind of cell

    def load(self, cells: Sequence[Cell], rounds: int) -> None:
        """Let `trimcp bench` ask each server."""
        with ExitStack() as stack:

            def start(cell: Cell, peer: Peer) -> Serving | None:
                return None if cell.road == "stdio" else stack.enter_context(serving(peer, cell))

            def turn(cell: Cell, peer: Peer, server: Serving | None, first: bool) -> None:
                seconds, warm_up = self._times(cell)
                warm = f"{warm_up:g}"
                # A server that listens has done nothing yet, and compilers that work meanwhile need their calls: Node's
                # first thousand over HTTP cost twice what the fifth thousand does.
                # Not where each takes long in itself: a thousand tools listed four thousand times would take minutes.
                fresh = first and cell.road != "stdio" and not cell.payload and not cell.least_bytes
                calls = FIRST_CALLS // (cell.reports or 1) if fresh else cell.warm_calls
                if calls:
                    warm = f"{max(calls // peer.weight, cell.under_way * cell.connections)}x"
                spent, collected = (server.cpu, server.collected) if server is not None else (0.0, None)
                found = ask(self._python, peer, cell, server, seconds=seconds, warm_up=warm)
                self._note(cell, peer, figures(found, cell))
                if server is not None and server.collected is not None and collected is not None:
                    share = (server.collected - collected) / (server.cpu - spent)
                    self._note(cell, peer, {"collected": ("share of its CPU", share)})

            self._turns(self._each(cells, start), rounds, turn)

    def client(self, cells: Sequence[Cell], rounds: int) -> None:
        """Let each client call the same server; one over stdio starts its own."""
        with ExitStack() as stack:
            try:
                servers = {
                    cell.name: stack.enter_context(serving(self._far[cell.server], cell))
                    for cell in cells
                    if cell.road != "stdio"
                }
            except Failed as error:
                for cell in cells:
                    for peer in self.able(cell):
                        self._fail(cell.name, peer.name, f"its server {error}")
                return

            def target(cell: Cell) -> list[str]:
                server = servers.get(cell.name)
                return command_of(self._far[cell.server], cell) if server is None else [server.url]

            def start(cell: Cell, peer: Peer) -> Calling | None:
                return None if cell.road == "stdio" else stack.enter_context(calling(peer, cell, target(cell)))

            def turn(cell: Cell, peer: Peer, client: Calling | None, first: bool) -> None:
                server = servers.get(cell.name)
                with calling(peer, cell, target(cell)) if client is None else nullcontext(client) as connected:
                    spent = server.cpu if server is not None else 0.0
                    found = connected.turn(f"{self._times(cell)[0]:g}")
                self._note(cell, peer, clients.figures(found))
                if server is not None:
                    self._note(cell, peer, {"server": ("share of a core", (server.cpu - spent) / found["wall"])})

            self._turns(self._each(cells, start), rounds, turn)

    def slow_reader(self, cells: Sequence[Cell], rounds: int) -> None:
        """Ask each server beside somebody who does not read."""

        def turn(cell: Cell, peer: Peer, started: None, first: bool) -> None:
            seconds, warm_up = self._times(cell)
            self._note(cell, peer, slow_reader.measure(self._python, peer, cell, seconds=seconds, warm_up=warm_up))

        self._turns(self._each(cells, lambda cell, peer: None), rounds, turn)

    def idle(self, cells: Sequence[Cell], rounds: int) -> None:
        """Leave all servers alone at the same time."""
        seconds = IDLE_SECONDS * (QUICK_TIME if self._quick else 1)
        with ExitStack() as stack:

            def start(cell: Cell, peer: Peer) -> Serving:
                server = stack.enter_context(serving(peer, cell))
                stack.enter_context(slow_reader.session(server.url))
                return server

            servers = self._each(cells, start)
            time.sleep(1.0)  # what they do after a session was opened is not idleness
            for _ in range(rounds):
                before = [server.cpu for _, _, server in servers]
                time.sleep(seconds)
                for (cell, peer, server), spent in zip(servers, before, strict=True):
                    self._note(cell, peer, {"cpu": ("ms per minute", (server.cpu - spent) / seconds * 60_000)})

    def elsewhere(self, cells: Sequence[Cell], rounds: int) -> None:
        """Let a module of its own measure all peers."""
        (cell,) = cells
        module = importlib.import_module(cell.kind.replace(" ", "_"))
        peers = self.able(cell)
        times = {peer.name: cell.rounds_of(peer.name, rounds) for peer in peers}
        for number in sorted(set(times.values())):
            some = [peer for peer in peers if times[peer.name] == number]
            try:
                found = module.measure(some, rounds=number, quick=self._quick, cells=[cell.name])
            except Exception as error:
                # Whoever it was: without the others' figures there is nothing to compare.
                traceback.print_exc()
                for peer in some:
                    self._fail(cell.name, peer.name, f"{type(error).__name__}: {error}"[:300])
                continue
            for one in found:
                self.results.add(cell.name, one["figure"], one["peer"], one["unit"], one["values"])

    # Parts

    def _together(self) -> Iterator[Sequence[Cell]]:
        """Yield each cell, or all that take their turns beside each other."""
        left = list(self._cells)
        while left:
            some = [cell for cell in left if cell is left[0] or (cell.beside and cell.beside == left[0].beside)]
            yield some
            left = [cell for cell in left if cell not in some]

    def _each(self, cells: Sequence[Cell], start: Callable[[Cell, Peer], T]) -> list[tuple[Cell, Peer, T]]:
        """Start something for each peer that is able, and return those for which it could be started."""
        found = []
        for cell in cells:
            for peer in self.able(cell):
                try:
                    found.append((cell, peer, start(cell, peer)))
                except Failed as error:
                    self._fail(cell.name, peer.name, str(error))
        # One peer after the other in all cells, since these are compared.
        return sorted(found, key=lambda one: ORDER.index(one[1].name))

    def _turns(
        self,
        started: Sequence[tuple[Cell, Peer, T]],
        rounds: int,
        turn: Callable[[Cell, Peer, T, bool], None],
    ) -> None:
        given_up = set()
        for number in range(rounds):
            for place, (cell, peer, one) in enumerate(started):
                if place in given_up or number >= cell.rounds_of(peer.name, rounds):
                    continue
                began = time.monotonic()
                try:
                    turn(cell, peer, one, number == 0)
                except Failed as error:
                    self._fail(cell.name, peer.name, str(error))
                    if time.monotonic() - began > PATIENCE:
                        given_up.add(place)

    def _note(self, cell: Cell, peer: Peer, found: Mapping[str, tuple[str, float]]) -> None:
        for figure, (unit, value) in found.items():
            self.results.add(cell.name, figure, peer.name, unit, [value])

    def _fail(self, cell: str, peer: str, reason: str) -> None:
        # Where it was run is nobody's business, and would be different elsewhere.
        self.results.fail(cell, peer, reason.replace(str(ROOT), "."))

    def able(self, cell: Cell) -> list[Peer]:
        """Return who takes part and offers this."""
        wanted = cell.rivals if self._quick else cell.peers
        there = [peer for peer in self._peers if peer.name in wanted]
        if cell.kind in ELSEWHERE:
            return there
        if cell.kind == "client":
            return [peer for peer in there if peer.can_call(cell.road, cell.revision)]
        return [peer for peer in there if peer.can(cell.road, cell.revision, cell.serve)]

    def _times(self, cell: Cell) -> tuple[float, float]:
        share = QUICK_TIME if self._quick else 1.0
        return cell.seconds * share, cell.warm_up * share

    def _wanted(self, cell: Cell) -> int:
        return self._rounds or (cell.quick_rounds if self._quick else cell.rounds)

    def _expected(self, cell: Cell, rounds: int) -> float:
        turns = sum(cell.rounds_of(peer.name, rounds) for peer in self.able(cell))
        return turns * cell.turn(quick=self._quick)

    def _told(self, cell: Cell, rounds: int) -> str:
        wanted = self._wanted(cell)
        times = f"{rounds} round{'s' * (rounds != 1)}"
        cut = f" (of {wanted}, to stay in time)" if rounds < wanted else ""
        return f"{times}{cut}; {_minutes(self._budget.left)} left"

    def _found(self, cell: Cell) -> str:
        lines = []
        for peer in (*ORDER, *ONLY_THERE):
            values = [
                f"{one.figure} {report.number(one.spread.median)}"
                for one in self.results.series
                if (one.cell, one.peer) == (cell.name, peer) and one.values
            ]
            failed = [one.reason for one in self.results.failures if (one.cell, one.peer) == (cell.name, peer)]
            if values or failed:
                lines.append(f"    {peer:20} {'  '.join(values)}{''.join(f'  FAILED: {reason}' for reason in failed)}")
        return "\n".join(lines)


KINDS: dict[str, Callable[[Run, Sequence[Cell], int], None]] = {
    "load": Run.load,
    "client": Run.client,
    "slow reader": Run.slow_reader,
    "idle": Run.idle,
    **dict.fromkeys(ELSEWHERE, Run.elsewhere),
}


def figures(found: dict[str, Any], cell: Cell) -> dict[str, tuple[str, float]]:
    """Return unit and value of each figure in a report of `trimcp bench`."""
    cost, latency = found["cost"], found["latency_ms"]
    done = found["progress"]["count"] if cell.reports else found["calls"]
    rate = found["progress"]["per_second"] if cell.reports else found["per_second"]
    return {
        "cpu": ("µs", cost["cpu_seconds"] / done * 1e6),
        "rate": ("per second", rate),
        **{name: ("ms", latency[name]) for name in ("p50", "p99", "p99.9")},
        "memory": ("MiB", cost["peak_rss_mib"]),
        BUSY: ("share of a core", found["generator"]["busy"]),
    }


def versions(peers: Sequence[Peer]) -> dict[str, str]:
    """Return the version of each distribution that takes part, by the name of the peer."""
    found = {}
    for peer in peers:
        if peer.distribution is None or peer.home is None:
            continue
        if peer.home.name == "node_modules":
            package = json.loads((peer.home / peer.distribution / "package.json").read_text("utf-8"))
            found[peer.name] = f"{peer.distribution} {package['version']}"
            node = subprocess.run([peer.program[0], "--version"], capture_output=True, text=True, check=True)
            found["Node"] = node.stdout.strip()
        else:
            there = {one.metadata["Name"].lower(): one.version for one in metadata.distributions(path=[str(peer.home)])}
            found[peer.name] = f"{peer.distribution} {there[peer.distribution]}"
            for name in ("trio", "uvicorn", "hypercorn"):
                if name in there:
                    found[name] = there[name]
    return found


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"


def _open_files() -> None:
    """Let this process, and all it starts, have as many connections as the widest window."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def _means(word: str, cell: Cell) -> bool:
    """Tell whether a word of the command line means a cell: "http-2025-json", "http", "*json"."""
    return fnmatch.fnmatch(cell.name, word) or cell.name.startswith(f"{word}-")


def main() -> None:
    """Do what the command line says."""
    _open_files()
    os.environ.pop("PYTHONPATH", None)  # what is measured is installed
    parser = argparse.ArgumentParser(description="Measure every implementation in every cell.")
    parser.add_argument("--quick", action="store_true", help="fewer cells and rounds, in under five minutes")
    parser.add_argument("--bars", action="store_true", help="only what the bars are about, cells and peers")
    parser.add_argument("--only", action="append", metavar="CELL", help="cells: a name, its beginning, or a pattern")
    parser.add_argument("--peers", action="append", metavar="NAME", help=f"one of: {', '.join(ORDER)}")
    parser.add_argument("--before", metavar="COMMIT", help="trimcp as it was then, too, in the cells of --only or bars")
    parser.add_argument("--rounds", type=int, help="how often each has its turn")
    parser.add_argument("--minutes", type=float, help=f"all there is ({MINUTES:g}; {QUICK_MINUTES:g} with --quick)")
    parser.add_argument("--out", type=Path, help="where to write the page (docs, or build/bench for a part)")
    parser.add_argument("--keep", action="store_true", help="keep the page's figures of all other cells")
    parser.add_argument("--list", action="store_true", help="print the cells and end")
    options = parser.parse_args()
    cells = [
        cell
        for cell in CELLS
        if (cell.name in BARRED or not options.bars)
        and (any(_means(only, cell) for only in options.only) if options.only else cell.quick or not options.quick)
    ]
    if options.list:
        print("\n".join(f"{cell.name:22} {cell.section}: {cell.title}" for cell in cells))
        return
    cells = [attrs.evolve(cell, peers=cell.rivals) for cell in cells] if options.bars else cells
    names = [name for name in options.peers or ORDER if name != BEFORE]
    if not cells or not set(names) <= set(ORDER):
        parser.error("no such cell" if not cells else f"the peers are {', '.join(ORDER)}")
    # The generator is ours.
    needed = {*names, OURS, *(cell.server for cell in cells if cell.kind == "client")}
    installed = {peer.name: peer for peer in find_peers([name for name in ORDER if name in needed - {FLOOR}])}
    installed[FLOOR] = floor(installed[OURS])
    if options.before is not None:
        installed[BEFORE] = find_before(options.before)
        names.append(BEFORE)
        about = {bar.cell for bar in BARS if BEFORE in bar.against}
        cells = [cell.beside_before() if options.only or cell.name in about else cell for cell in cells]
    whole = not (options.quick or options.bars or options.only or options.peers or options.rounds)
    minutes = options.minutes or (QUICK_MINUTES if options.quick else MINUTES)
    peers = [installed[name] for name in ORDER if name in names and name in installed]
    far = list(installed.values())
    results = Run(peers, cells, quick=options.quick, rounds=options.rounds, minutes=minutes, far=far).run()
    results.made["whole"] = whole
    words = [word for word in sys.argv[1:] if options.out is None or word not in ("--out", str(options.out))]
    results.made["command"] = " ".join(["nox -s bench", *(["--", shlex.join(words)] if words else [])])
    out = options.out or (ROOT / "docs" if whole or options.keep else ROOT / "build" / "bench")
    print(f"\n{report.tables(results)}\n")
    if options.keep:
        results = results.put_into(Results.read(out / "performance" / report.RESULTS))
    for file in report.write(results, out):
        print(file)
    if any(one.peer == OURS for one in results.failures):
        sys.exit(f"{OURS} failed in some cells")


if __name__ == "__main__":
    main()
