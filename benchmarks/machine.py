"""What a run ran on: facts that are no secrets, and how steady the machine was."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

__all__ = ["Stolen", "load_average", "machine", "pulse_ms"]


def machine() -> dict[str, str]:
    """Return processor, cores, memory, system and interpreter."""
    return {
        "processor": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{int((_field('/proc/meminfo', 'MemTotal') or '0').split()[0]) / 2**20:.1f} GiB",
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
    }


def load_average() -> float:
    """Return how many processes wanted to run, over the last minute."""
    return round(os.getloadavg()[0], 2)


def pulse_ms() -> float:
    """Return the CPU milliseconds of a fixed piece of work, which only the machine's speed can change."""
    before = time.process_time()
    found: dict[int, str] = {}
    for number in range(300_000):
        found[number % 997] = str(number * 31)
    return round((time.process_time() - before) * 1000, 2)


class Stolen:
    """Which share of the time of all cores the host has given to others since this was made."""

    def __init__(self) -> None:
        self._before = _ticks()

    def share(self) -> float:
        """Return it as a number from 0 to 1."""
        spent = [now - then for now, then in zip(_ticks(), self._before, strict=True)]
        return round(spent[7] / sum(spent), 4) if sum(spent) else 0.0


def _ticks() -> list[int]:
    # user, nice, system, idle, iowait, irq, softirq, steal; guest time is in user already (proc_stat(5))
    return [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]


def _field(file: str, name: str) -> str:
    for line in Path(file).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
