"""Servers under measurement, each started on a core of its own and asked by `trimcp bench` from another.

The load generator is a process by itself, started anew for each turn. It checks every reply; whatever it finds wrong
makes the turn a failure, and no figure.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
from cells import Cell
from environments import Peer, Way
from names import FLOOR
from processes import CORES, LOAD_CORE, SERVER_CORE, on_core

from trimcp.bench.cost import cpu_seconds, memory_of

__all__ = ["Failed", "Program", "Serving", "ask", "check", "command_of", "floor", "serving", "words_for"]

HERE = Path(__file__).parent
START_LIMIT = 30.0
# Beside the seconds that a turn takes: starting both, connecting, the last replies.
SLACK = 45.0


class Failed(Exception):
    """A turn that came to nothing; the text says why."""


def floor(ours: Peer) -> Peer:
    """Return the minimal server, on the interpreter that ours has."""
    ways = (
        *(Way("stdio", revision) for revision in ("2025-11-25", "2026-07-28")),
        *(Way("http", revision, "json") for revision in ("2025-11-25", "2026-07-28")),
    )
    program = (ours.program[0], str(HERE / "floor" / "minimal.py"))
    return Peer(FLOOR, program, ways, memory=False)


# Servers that live longer than a turn


@attrs.frozen
class Serving:
    """A server that listens."""

    url: str
    pid: int
    collecting: Path | None = None

    @property
    def collected(self) -> float | None:
        """CPU seconds that it has spent collecting garbage, if that is noted (`hooks/sitecustomize.py`)."""
        noted = self.collecting.read_bytes() if self.collecting is not None else b""
        return struct.unpack("d", noted)[0] if noted else None

    @property
    def cpu(self) -> float:
        """CPU seconds so far."""
        return cpu_seconds(self.pid)

    @property
    def resident(self) -> int:
        """Bytes of memory."""
        return memory_of(self.pid)[0]


@contextmanager
def serving(peer: Peer, cell: Cell) -> Iterator[Serving]:
    """Start a peer's server for a cell, wait for its URL, and end it with the block.

    Raises:
        Failed: it ended, or said nothing, before it listened.
    """
    words = ["--workers", str(cell.workers)] if cell.workers else []
    command = [*_core(cell, SERVER_CORE), *peer.command(cell.road, reply=cell.serve), *words]
    environment = {**peer.environment, **cell.environment}
    with tempfile.TemporaryDirectory() as folder:
        collecting = Path(folder, "collected") if cell.collected else None
        if collecting is not None:
            collecting.touch()
            environment |= {"BENCH_COLLECTED": str(collecting), "PYTHONPATH": str(HERE / "hooks")}
        with Program.started(command, environment) as program:
            url = program.line("before it listened").removeprefix("listening on ")
            yield Serving(url, program.pid, collecting)


def _core(cell: Cell, core: int) -> list[str]:
    return on_core(*range(min(cell.workers, len(CORES)))) if cell.workers else on_core(core)


@attrs.frozen
class Program:
    """A process that says what it has to say in lines of its standard output."""

    process: subprocess.Popen[bytes]
    errors: Any

    @classmethod
    @contextmanager
    def started(cls, command: Sequence[str], environment: Mapping[str, str]) -> Iterator[Program]:
        """Start a command with these variables beside ours, and end it with the block."""
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env={**os.environ, **environment}
            )
            try:
                yield cls(process, errors)
            finally:
                process.terminate()
                try:
                    process.wait(timeout=3)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                for pipe in (process.stdin, process.stdout):
                    assert pipe is not None
                    pipe.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def tell(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self.process.stdin is not None
        os.write(self.process.stdin.fileno(), line.encode() + b"\n")

    def line(self, before: str, limit: float = START_LIMIT) -> str:
        """Return the next line it writes.

        Raises:
            Failed: it ended, or said nothing, "before ...".
        """
        assert self.process.stdout is not None
        deadline = time.monotonic() + limit
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self.process.stdout], [], [], max(deadline - time.monotonic(), 0))
            data = os.read(self.process.stdout.fileno(), 4096) if ready else b""
            if not data:
                self.errors.seek(0)
                why = self.errors.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
                raise Failed(f"{'ended' if ready else 'said nothing'} {before}: {why or 'without a word'}"[:300])
            line += data
        return line.decode().split("\n", 1)[0].strip()


# Turns


def ask(python: str, peer: Peer, cell: Cell, server: Serving | None, *, seconds: float, warm_up: str) -> dict[str, Any]:
    """Let `trimcp bench` ask a server for so long, and return its report.

    Args:
        python: the interpreter that has trimcp.
        peer: whose server it is.
        cell: what is asked for.
        server: where it listens; None for a server over stdio, which the generator starts.
        seconds: measured.
        warm_up: before that, not measured: seconds, or calls as `100x`.

    Raises:
        Failed: replies were wrong or did not come.
    """
    with tempfile.TemporaryDirectory() as folder:
        report, script = Path(folder, "report.json"), Path(folder, "script.json")
        if cell.payload:
            text = "x" * cell.payload
            script.write_text(json.dumps([{"tool": "echo", "arguments": {"text": text}, "expect": text}]))
        target = [shlex.join(command_of(peer, cell))] if server is None else [server.url, "--pid", str(server.pid)]
        words = words_for(cell, target, script, seconds=seconds, warm_up=warm_up)
        # -P: of what is installed, not of a tree that somebody may be working in.
        command = [*_core(cell, LOAD_CORE), python, "-P", "-m", "trimcp.cli", "bench", *words, "--save", str(report)]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds + SLACK
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"no end {SLACK:.0f} seconds after the time was over") from None
        try:
            found = json.loads(report.read_text("utf-8"))
        except (OSError, ValueError):
            raise Failed(f"exit code {done.returncode}: {_last_words(done.stderr)}") from None
    check(found, done.returncode, cell)
    return found


def words_for(cell: Cell, target: Sequence[str], script: Path, *, seconds: float, warm_up: str) -> list[str]:
    """Return what `trimcp bench` is told."""
    reached = ["--transport", cell.road] if cell.road in ("http", "sse") else []
    return [
        *target,
        *(["--script", str(script)] if cell.payload else cell.words),
        *("--sessions", str(cell.connections), "--under-way", str(cell.under_way)),
        *("--seconds", f"{seconds:g}", "--warm-up", warm_up),
        *("--revision", cell.revision),
        *reached,
        *(["--reply", cell.reply] if cell.reply else []),
        "--quiet",
    ]


def command_of(peer: Peer, cell: Cell) -> list[str]:
    """Return what starts a peer's server over stdio, for a client that hands only a few harmless variables on."""
    variables = [f"{name}={value}" for name, value in {**peer.environment, **cell.environment}.items()]
    return ["env", *variables, *on_core(SERVER_CORE), *peer.command("stdio")]


def check(found: Mapping[str, Any], code: int, cell: Cell) -> None:
    errors = "; ".join(f"{one['count']} x {kind}: {one['example']}" for kind, one in found["errors"].items())
    if code != 0 or errors:
        raise Failed(f"exit code {code}: {errors or 'no reason given'}"[:300])
    calls = found["calls"]
    if not calls:
        raise Failed("not one call was answered in time")
    if found["revision"] != cell.revision:
        raise Failed(f"the server speaks {found['revision']}")
    # Calls begin before the time that is measured, and are under way at its end.
    whole = calls - cell.under_way * cell.connections
    if whole > 0 and found["bytes_in"] / whole < cell.least_bytes:
        raise Failed(f"{found['bytes_in'] / whole:.0f} bytes are no reply to that")
    if cell.reports:
        told, edge = found["progress"]["count"], cell.under_way * cell.reports
        if abs(told - calls * cell.reports) > edge:
            raise Failed(f"{told} notifications for {calls} calls of {cell.reports}")
    if found["cost"] is None:
        raise Failed("what it cost is not known")


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:250] if lines else "without a word"
