"""Counts what fixed work costs, and compares it with what it cost before: `nox -s bench-check`.

Counts are the same in every run, so a small growth is seen that a stopwatch would never show. What is counted, what
the bounds are and how to accept a new figure is in `README.md` and, for contributors, in `CONTRIBUTING.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from check_cells import CELLS
from check_compare import Record, compare, record_of, table, tell, versions_changed
from check_count import BYTECODES, CALLS
from check_far_end import INITIALIZED, LEGACY, initialize, request

HERE = Path(__file__).parent
BASELINE = HERE / "baseline.json"
ACCEPT = "nox -s bench-check -- --accept"
SPAWN = "spawn to first answers"
CI_PYTHON = "3.11"
"""Where there has to be a baseline. Other versions may have one."""

_FUNCTIONS = re.compile(r'(?<="functions": ){\n.*?\n {4}}', re.DOTALL)

# What runs beside ours in a cell. `nox -s bench-check` installs the versions of the baseline.
BESIDE = (
    "attrs",
    "cattrs",
    "hpack",
    "httpcore2",
    "httptools",
    "httpx2",
    "jsonschema-rs",
    "orjson",
    "outcome",
    "protobuf",
    "sniffio",
    "sortedcontainers",
    "trio",
    "trio-websocket",
    "typing-extensions",
    "wsproto",
)


def main() -> int:
    """Run as a program; returns its exit code."""
    options = arguments()
    names = [name for name in (*CELLS, SPAWN) if not options.only or any(part in name for part in options.only)]
    if not names:
        print(f"no cell has {' or '.join(options.only)} in its name; there are:", *CELLS, SPAWN, sep="\n    ")
        return 2
    if options.callgrind:
        return print_all(instructions(names))
    records = measure(names)
    python = ".".join(platform.python_version_tuple()[:2])
    versions = installed()
    baselines = json.loads(options.baseline.read_text("utf-8")) if options.baseline.exists() else {}
    baseline = baselines.get(python)
    print_all(table(records, baseline and baseline["cells"]))
    if options.accept:
        cells = {**baseline["cells"], **records} if options.only and baseline else records
        baselines[python] = {"versions": versions, "cells": cells}
        options.baseline.write_text(dumped(baselines), "utf-8")
        print(f"\n{options.baseline.name} has these figures now, for Python {python}.")
        return 0
    if baseline is None:
        return without_baseline(python)
    return judge(names, baseline, records, versions)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--accept", action="store_true", help="make what is counted now the baseline")
    parser.add_argument("--only", nargs="+", metavar="PART", default=(), help="cells with one of these in their names")
    parser.add_argument("--callgrind", action="store_true", help="print instructions instead, by valgrind: minutes")
    parser.add_argument("--baseline", type=Path, default=BASELINE, help="another file to compare with")
    parser.add_argument("--newest", action="store_true", help="(for nox) with the newest versions of dependencies")
    return parser.parse_args()


def judge(
    names: Sequence[str], baseline: Mapping[str, Any], records: Mapping[str, Record], versions: dict[str, str]
) -> int:
    """Compare, say what came of it, and return the exit code: 1 if something grew or was never counted before."""
    cells = baseline["cells"]
    changes = [change for name in names if name in cells for change in compare(name, cells[name], records[name])]
    print_all(tell(changes, versions_changed(baseline["versions"], versions), accept=ACCEPT))
    new = [name for name in names if name not in cells]
    if new:
        print(f"\nnot in the baseline yet: {'; '.join(new)}. Add them: {ACCEPT}")
    failed = bool(new) or any(change.grew for change in changes)
    if not changes and not new:
        print("\nnothing has changed by more than a tenth")
    return 1 if failed else 0


def without_baseline(python: str) -> int:
    """Say that there is nothing to compare with: an error only where the project's own checks run."""
    if python == CI_PYTHON:
        print(f"\n{BASELINE.name} says nothing of Python {python}, on which this check has to pass. Make it: {ACCEPT}")
        return 1
    print(f"\nnothing to compare with: the baseline is for Python {CI_PYTHON}, this is {python}")
    return 0


def print_all(lines: Iterable[str]) -> int:
    """Print lines as they come."""
    for line in lines:
        print(line, flush=True)
    return 0


def installed() -> dict[str, str]:
    """Return the versions of what runs beside ours."""
    found = {name: metadata.version(name) for name in BESIDE}
    return {"python": platform.python_version(), **found}


def dumped(baselines: Mapping[str, Any]) -> str:
    """Return the baselines as JSON in which every figure has a line of its own, so that differences can be read."""
    text = json.dumps(baselines, indent=1, sort_keys=True)
    return _FUNCTIONS.sub(lambda found: re.sub(r"\n *", " ", found[0]), text) + "\n"


# Measuring, in processes of their own


def measure(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the records of these cells."""
    records = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "counts.json"
        cells = [name for name in names if name != SPAWN]
        if cells:
            python(HERE / "check_measure.py", str(file), *cells)
            measured = json.loads(file.read_text("utf-8"))
            records = {name: record_of(measured[name]["count"], measured[name]) for name in cells}
        if SPAWN in names:
            records[SPAWN] = record_of(1, spawned(file))
    return records


def spawned(file: Path) -> dict[str, Any]:
    """Count the start of a server, from its first import to its first answers."""
    functions: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for what in ("", BYTECODES, CALLS, "memory"):  # the first run compiles what is not compiled yet
        list_tools = request(LEGACY, "tools/list", {})[1]
        words = b"\n".join((initialize(LEGACY)[1], INITIALIZED, list_tools, b""))
        # All of it is there, and the end too, before the server looks: then it always reads the same.
        reader, writer = os.pipe()
        os.write(writer, words)
        os.close(writer)
        answers = python(HERE / "check_spawn.py", str(file), what, stdin=reader)
        os.close(reader)
        if b'"protocolVersion"' not in answers or b'"inputSchema"' not in answers:
            raise AssertionError(f"the server answered {answers!r}")
        found = json.loads(file.read_text("utf-8"))
        functions |= found.get("functions", {})
    memory = {"peak": found["peak"], "garbage": 0, "kept": 0, "places": []}
    return {"functions": functions, "memory": memory, "modules": found["modules"]}


def instructions(names: Sequence[str]) -> Iterator[str]:
    """Yield what an operation of each cell takes of the processor's instructions, with all of the interpreter's."""
    for name in names:
        if name == SPAWN:
            continue
        once, twice = (_collected(name, repeat) for repeat in (2, 4))
        yield f"{name:40} {(twice - once) / 2 / CELLS[name].count:14,.0f} instructions per operation"


def _collected(name: str, repeat: int) -> int:
    valgrind = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
    script = str(HERE / "check_measure.py")
    command = [*valgrind, sys.executable, script, os.devnull, name, "--repeat", str(repeat)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    collected = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or collected is None:
        raise SystemExit(f"valgrind failed:\n{done.stderr}")
    return int(collected[1])


def python(script: Path, *words: str, stdin: int = subprocess.DEVNULL) -> bytes:
    """Run a script of ours, and return what it wrote."""
    return subprocess.run(
        [sys.executable, str(script), *words], stdin=stdin, stdout=subprocess.PIPE, env=environment(), check=True
    ).stdout


def environment() -> dict[str, str]:
    """Return our environment without what would change the counts."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("TRIMCP_")}
    ours.pop("PYTHONDONTWRITEBYTECODE", None)
    return {**ours, "PYTHONHASHSEED": "0"}


if __name__ == "__main__":
    sys.exit(main())
