"""On which core processes run, and what they have open (Linux)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "CORES",
    "LOAD_CORE",
    "SERVER_CORE",
    "descriptors",
    "kept_on",
    "on_core",
    "pin",
]

# Before anybody keeps this process, too, on one of them.
CORES = sorted(os.sched_getaffinity(0))
SERVER_CORE, LOAD_CORE = 0, 1


def on_core(core: int) -> list[str]:
    """Return what keeps a command on one core, where there are two to choose from."""
    return ["taskset", "-c", str(CORES[core])] if len(CORES) > 1 else []


@contextmanager
def kept_on(core: int) -> Iterator[None]:
    """Keep this process on one core, where there are two to choose from, as long as the block runs."""
    if len(CORES) > 1:
        os.sched_setaffinity(0, {CORES[core]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, CORES)


def pin(process: int, core: int) -> None:
    """Keep a process on one core, where there are two to choose from."""
    cores = sorted(os.sched_getaffinity(os.getppid()))
    if len(cores) > 1:
        os.sched_setaffinity(process, {cores[core % len(cores)]})


def descriptors(process: int) -> int:
    """How many files and sockets a process has open."""
    return len(os.listdir(f"/proc/{process}/fd"))
