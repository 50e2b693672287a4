"""What a call costs beside the official SDKs, in one run on one machine: `nox -s bench`.

Every figure is the median of several rounds with its range. In a round every peer has its turn, so that a machine
that is slower for a while is slower for all of them; the ratios are of medians. What is measured is in `README.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
from installed import installed
from load import LEGACY, MODERN, Under
from processes import pin

PEERS = Path(__file__).parent / "peers"
OURS = "trimcp"
OFFICIAL = "mcp MCPServer"
UNDER_WAY = 64
STDIO_CALLS = "stdio, 64 under way, {}: CPU µs per call"
STDIO_PROGRESS = "stdio, {}: CPU µs per progress notification"
STDIO_PROGRESS_RATE = "stdio, {}: progress notifications per second"
MEMORY = "in memory, {} under way: calls per second of CPU, both sides"
IMPORT = "import of the package: CPU ms"
SERVER_IMPORT = "import of what a server needs: CPU ms"
ANSWER_CPU = "spawn to first answer: CPU ms"
ANSWER_WALL = "spawn to first answer: wall-clock ms"
RESIDENT = "memory after the first answer: MiB"
DISTRIBUTIONS = "installed distributions"
SIZE = "installed size: MiB"


@attrs.frozen
class Peer:
    """One implementation under measurement.

    Attributes:
        name: what the table calls it.
        command: what starts it; the mode follows.
        module: the package, and `server_import` what the shortest server imports; None where that makes no sense.
        distribution: what is installed, or None.
        environment: variables it is started with.
        weight: how many times fewer operations a round has, so that slow peers do not take all of it.
        in_memory: whether its client and server are measured inside one process, too.
    """

    name: str
    command: tuple[str, ...]
    module: str | None = None
    server_import: str | None = None
    distribution: str | None = None
    environment: dict[str, str] = attrs.field(factory=dict)
    weight: int = 1
    in_memory: bool = True


def python_peers() -> list[Peer]:
    """Return the peers written in Python."""
    return [
        Peer(
            OURS,
            (sys.executable, str(PEERS / "ours.py")),
            module="trimcp",
            server_import="from trimcp import Server, run_stdio",
            distribution="trimcp",
        ),
        Peer(
            OFFICIAL,
            (sys.executable, str(PEERS / "official.py")),
            module="mcp",
            server_import="from mcp.server.mcpserver import MCPServer",
            distribution="mcp",
            weight=10,
        ),
        Peer("mcp low level", (sys.executable, str(PEERS / "official_low_level.py")), weight=10),
    ]


def node_peer(modules: Path) -> Peer:
    """Return the TypeScript SDK, installed in a `node_modules` folder."""
    node = shutil.which("node")
    if node is None or not (modules / "@modelcontextprotocol" / "server").is_dir():
        sys.exit(f"no node, or no @modelcontextprotocol/server in {modules}; see benchmarks/README.md")
    command = (node, str(PEERS / "typescript.mjs"))
    return Peer("TypeScript SDK", command, environment={"BENCH_NODE_MODULES": str(modules.resolve())}, in_memory=False)


class Results:
    """Every sample by figure and peer, in the order of the first round."""

    def __init__(self) -> None:
        self.samples: dict[str, dict[str, list[float]]] = {}

    def add(self, figure: str, peer: str, value: float) -> None:
        """Note one sample."""
        self.samples.setdefault(figure, {}).setdefault(peer, []).append(value)

    def table(self, peers: Sequence[Peer]) -> str:
        """Return all of it as Markdown: median (range), and ours over the best other."""
        names = [peer.name for peer in peers]
        lines = [
            f"| | {' | '.join(names)} | trimcp / best peer | trimcp / {OFFICIAL} |",
            "| --- " * (len(names) + 3) + "|",
        ]
        for figure, by_peer in self.samples.items():
            cells = [_cell(by_peer.get(name, [])) for name in names]
            lines.append(f"| {figure} | {' | '.join(cells)} | {_ratio(figure, by_peer)} |")
        return "\n".join(lines)


def _cell(samples: list[float]) -> str:
    if not samples:
        return ""
    low, middle, high = min(samples), statistics.median(samples), max(samples)
    return _number(middle) if low == high else f"{_number(middle)} ({_number(low)}-{_number(high)})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}".removesuffix(".0")


def _ratio(figure: str, by_peer: dict[str, list[float]]) -> str:
    medians = {name: statistics.median(samples) for name, samples in by_peer.items()}
    ours = medians.pop(OURS, None)
    if ours is None or not medians:
        return " | "
    best = max(medians.values()) if "per second" in figure else min(medians.values())
    return f"{ours / best:.3g} | {ours / medians[OFFICIAL]:.3g}"


# One round of each kind


def round_of_stdio(peer: Peer, revision: str, calls: int, results: Results) -> None:
    """Start the peer's server, warm it, and measure calls and progress."""
    count = max(calls // peer.weight, 4 * UNDER_WAY)
    with Under([*peer.command, "stdio"], revision, environment=peer.environment) as server:
        # A compiler that works while the program runs needs a few thousand calls to get there.
        warm = max(count // 4, 4096 // peer.weight)
        server.calls(warm, UNDER_WAY)
        server.progress(warm)
        spent = server.calls(count, UNDER_WAY)
        results.add(STDIO_CALLS.format(revision), peer.name, spent.cpu_us)
        spent = server.progress(count)
        results.add(STDIO_PROGRESS.format(revision), peer.name, spent.cpu_us)
        results.add(STDIO_PROGRESS_RATE.format(revision), peer.name, spent.per_second)


def round_in_memory(peer: Peer, under_way: int, calls: int, results: Results) -> None:
    """Let the peer's client call its server inside one process, on one core."""
    count = max(calls // 4, 8 * UNDER_WAY)
    command = [*peer.command, "memory", str(count), str(under_way)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, check=True, text=True, preexec_fn=lambda: pin(os.getpid(), 0)
    )
    _, cpu = map(float, done.stdout.split())
    # Of CPU, since one process is all there is to it and other programs on the machine must not count.
    results.add(MEMORY.format(under_way), peer.name, count / cpu)


def round_of_start(peer: Peer, results: Results) -> None:
    """Import the peer's package, and start its server until it has answered `initialize`."""
    if peer.module is not None and peer.server_import is not None:
        results.add(IMPORT, peer.name, _cpu_of_importing(f"import {peer.module}") * 1000)
        results.add(SERVER_IMPORT, peer.name, _cpu_of_importing(peer.server_import) * 1000)
    with Under([*peer.command, "stdio"], LEGACY, environment=peer.environment) as server:
        results.add(ANSWER_WALL, peer.name, (time.perf_counter() - server.started) * 1000)
        results.add(ANSWER_CPU, peer.name, server.cpu * 1000)
        results.add(RESIDENT, peer.name, server.resident / 2**20)


def _cpu_of_importing(statement: str) -> float:
    program = f"import time; before = time.process_time(); {statement}; print(time.process_time() - before)"
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True)
    return float(done.stdout)


def main() -> None:
    """Measure as the command line says, and print the table."""
    parser = argparse.ArgumentParser(description="What a call costs beside the official SDKs.")
    parser.add_argument("--quick", action="store_true", help="fewer calls and rounds: under a minute")
    parser.add_argument("--node-modules", type=Path, help="a folder with @modelcontextprotocol/server and zod")
    parser.add_argument("--rounds", type=int, help="how often each peer has its turn")
    parser.add_argument("--json", type=Path, help="also write every sample to this file")
    options = parser.parse_args()
    peers = python_peers()
    if options.node_modules is not None:
        peers.append(node_peer(options.node_modules))
    rounds = options.rounds or (2 if options.quick else 7)
    calls = 2_560 if options.quick else 20_480
    pin(os.getpid(), 1)
    results = Results()
    work: list[Callable[[Peer], None]] = [
        lambda peer: round_of_stdio(peer, LEGACY, calls, results),
        lambda peer: round_of_stdio(peer, MODERN, calls, results),
        lambda peer: round_in_memory(peer, UNDER_WAY, calls, results) if peer.in_memory else None,
        lambda peer: round_in_memory(peer, 1, calls, results) if peer.in_memory else None,
        lambda peer: round_of_start(peer, results),
    ]
    for measure in work:
        for _ in range(rounds):
            for peer in peers:
                measure(peer)
    for peer in peers:
        if peer.distribution is not None:
            there = installed(peer.distribution)
            results.add(DISTRIBUTIONS, peer.name, there.distributions)
            results.add(SIZE, peer.name, there.size / 2**20)
    print(results.table(peers))
    if options.json is not None:
        options.json.write_text(json.dumps(results.samples, indent=1))


if __name__ == "__main__":
    main()
