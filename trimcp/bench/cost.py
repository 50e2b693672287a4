"""What the server's processes have cost so far, as the kernel counts it (Linux; elsewhere nothing is known)."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import attrs

from trimcp.bench.report import Cost

_PROC: Final = Path("/proc")


@attrs.define(eq=False)
class ProcessTree:
    """Some processes and their descendants.

    Args:
        roots: their ids, in collections that may grow.

    Looking for descendants takes milliseconds, reading clocks takes microseconds; hence they are two methods.
    """

    _roots: Sequence[Collection[int]]
    _known: set[int] = attrs.field(init=False, factory=set)

    def __attrs_post_init__(self) -> None:
        self.find()

    def find(self) -> None:
        """Look for descendants that are new."""
        roots = {pid for some in self._roots for pid in some}
        if sys.platform == "linux" and roots:
            self._known |= _with_descendants(roots)

    def cpu(self) -> dict[int, float]:
        """Return the CPU seconds by process, of all its threads together; nothing of those that have exited."""
        found = {}
        for pid in self._known:
            with suppress(OSError):
                found[pid] = cpu_seconds(pid)
        return found

    def cost(self, before: Mapping[int, float], after: Mapping[int, float]) -> Cost | None:
        """Return what was spent between two readings of `cpu`, and the memory held now; None of no process.

        What is known by now and was not at the first reading began in between, and counts whole.
        """
        clocks = {**self.cpu(), **after}
        if not clocks:
            return None
        rss = peak = 0
        for pid in clocks:
            with suppress(OSError):
                held, most = memory_of(pid)
                rss, peak = rss + held, peak + most
        return Cost(sum(seconds - before.get(pid, 0.0) for pid, seconds in clocks.items()), rss, peak)


def _with_descendants(roots: Iterable[int]) -> set[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir(_PROC):
        if name.isdecimal():
            with suppress(OSError):
                # proc(5): the name in field 2 may hold anything, a parenthesis included.
                fields = (_PROC / name / "stat").read_text(errors="replace").rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(name))
    found: set[int] = set()
    todo = list(roots)
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo += children.get(pid, ())
    return found


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process so far, all its threads together."""
    # The clock of another process (`clock_getcpuclockid(3)`); `/proc/PID/stat` counts in hundredths only.
    return time.clock_gettime((~pid << 3) | 2)


def memory_of(pid: int) -> tuple[int, int]:
    """Return the bytes a process holds and the most it ever held; zeros of one that has exited."""
    found = {}
    for line in (_PROC / str(pid) / "status").read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM"):
            found[name] = int(value.split()[0]) * 1024
    return found.get("VmRSS", 0), found.get("VmHWM", 0)
