"""From nothing to the first answer over stdio, and what is installed for it: `python cold_start.py [--quick]`.

Compiled bytecode is there, as after every ordinary installation. The tools of `peers/` are registered, nothing more.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import attrs
from environments import Peer
from installed import MODULES, installed
from processes import LOAD_CORE, SERVER_CORE, kept_on
from rows import Rows, command_line

from trimcp.bench.cost import cpu_seconds, memory_of

__all__ = ["CELL", "measure"]

CELL = "cold-start"
REVISION = "2025-11-25"
LIMIT = 60.0
_PYTHON = "import time; before = time.process_time(); {statement}; print(time.process_time() - before)"
_NODE = """
const require = (await import("node:module")).createRequire(process.env.BENCH_NODE_MODULES + "/");
const before = process.cpuUsage();
{statement};
const {{ user, system }} = process.cpuUsage(before);
console.log((user + system) / 1e6);
"""


@attrs.frozen
class Start:
    """What it took a server to answer `initialize`: seconds of CPU and on the clock, and the bytes it holds then."""

    cpu: float
    wall: float
    resident: int


def measure(
    peers: Sequence[Peer], *, rounds: int, quick: bool, cells: Collection[str] | None = None
) -> list[dict[str, Any]]:
    """Return what imports, a start and an installation cost each peer.

    Args:
        peers: who takes part; those that do not serve over stdio are left out.
        rounds: in each, every peer has its turn.
        quick: makes no difference; a start is a start.
        cells: without `CELL` among them there is nothing to do.
    """
    rows = Rows()
    if cells is not None and CELL not in cells:
        return rows.data
    peers = [peer for peer in peers if peer.can("stdio")]
    for peer in peers:
        start(peer)  # so that all of it was read from the disk once
    for _ in range(rounds):
        for peer in peers:
            for figure, statement in (("import", peer.needed), ("import-package", peer.package)):
                if statement is not None:
                    rows.add(CELL, figure, peer.name, "ms", import_cpu(peer, statement) * 1e3)
            started = start(peer)
            rows.add(CELL, "first-answer", peer.name, "ms", started.cpu * 1e3)
            rows.add(CELL, "first-answer-wall", peer.name, "ms", started.wall * 1e3)
            rows.add(CELL, "memory", peer.name, "MiB", started.resident / 2**20)
    for peer in peers:
        if peer.distribution is not None and peer.home is not None:
            there = installed(peer.distribution, peer.home)
            rows.add(CELL, "distributions", peer.name, "packages", there.distributions)
            rows.add(CELL, "installed", peer.name, "MiB", there.size / 2**20)
    return rows.data


def import_cpu(peer: Peer, statement: str) -> float:
    """Return the CPU seconds of a statement in a fresh interpreter, itself not counted."""
    if peer.home is not None and peer.home.name == MODULES:
        words = ["--input-type=module", "--eval", _NODE.format(statement=statement)]
    else:
        words = ["-c", _PYTHON.format(statement=statement)]
    # Elsewhere than in this tree, where Python would find our package's source before the installed one.
    folder = Path(peer.program[0]).parent
    with kept_on(SERVER_CORE):
        done = subprocess.run(
            [peer.program[0], *words],
            cwd=folder,
            env=os.environ | peer.environment,
            stdout=subprocess.PIPE,
            check=True,
            timeout=LIMIT,
        )
    return float(done.stdout)


def start(peer: Peer) -> Start:
    """Start a peer's server, and see its answer to `initialize`."""
    params = {"protocolVersion": REVISION, "capabilities": {}, "clientInfo": {"name": "bench", "version": "1.0"}}
    request = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}
    # A child inherits the core; a command that sets it would be counted with the server.
    with kept_on(SERVER_CORE):
        began = time.perf_counter()
        process = subprocess.Popen(
            peer.command("stdio"),
            env=os.environ | peer.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with kept_on(LOAD_CORE):
            process.stdin.write(json.dumps(request).encode() + b"\n")
            answer = json.loads(_line(process))
            taken = time.perf_counter() - began
        if answer["id"] != 1 or answer["result"]["protocolVersion"] != REVISION:
            raise AssertionError(f"{peer.name} answered {answer}")
        return Start(cpu_seconds(process.pid), taken, memory_of(process.pid)[0])
    finally:
        process.stdin.close()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], LIMIT)
        data = os.read(process.stdout.fileno(), 1 << 16) if ready else b""
        if not data:
            raise AssertionError(f"a server {'ended' if ready else 'said nothing'} instead of an answer")
        line += data
    return line


if __name__ == "__main__":
    command_line("From nothing to the first answer.", measure, rounds=5)
