"""What other processes cost, as the kernel counts it (Linux), and on which core they run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = [
    "CORES",
    "LOAD_CORE",
    "SERVER_CORE",
    "cpu_seconds",
    "descriptors",
    "kept_on",
    "on_core",
    "pin",
    "resident_bytes",
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


def cpu_seconds(process: int) -> float:
    """CPU seconds of a process so far, all its threads together."""
    # The clock of another process (Linux, `clock_getcpuclockid(3)`); `/proc/PID/stat` counts in hundredths only.
    return time.clock_gettime((~process << 3) | 2)


def resident_bytes(process: int, *, most: bool = False) -> int:
    """Bytes of memory a process holds, or the most it ever held."""
    name = "VmHWM:" if most else "VmRSS:"
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {name}")


def descriptors(process: int) -> int:
    """How many files and sockets a process has open."""
    return len(os.listdir(f"/proc/{process}/fd"))
