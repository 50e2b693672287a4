"""What other processes cost, as the kernel counts it (Linux)."""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ["cpu_seconds", "descriptors", "pin", "resident_bytes"]


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
