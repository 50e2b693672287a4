"""CPU time and memory of the server's processes, as the kernel counts them (Linux only)."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import attrs

from trimcp.bench.report import Cost
from trimcp.support.descendants import with_descendants

_PROC: Final = Path("/proc")


@attrs.define(eq=False)
class ProcessTree:
    """Some processes and their descendants.

    Finding descendants takes milliseconds, reading clocks takes microseconds, so these are two methods.
    """

    _roots: Sequence[Collection[int]]  # process ids, in collections that may grow
    _known: set[int] = attrs.field(init=False, factory=set)

    def __attrs_post_init__(self) -> None:
        self.find()

    def find(self) -> None:
        """Find new descendants."""
        roots = {pid for some in self._roots for pid in some}
        if sys.platform == "linux" and roots:
            self._known |= with_descendants(roots)

    def cpu(self) -> dict[int, float]:
        """Return the CPU seconds by process id, over all threads; processes that have exited are left out."""
        found = {}
        for pid in self._known:
            with suppress(OSError):
                found[pid] = cpu_seconds(pid)
        return found

    def cost(self, before: Mapping[int, float], after: Mapping[int, float]) -> Cost | None:
        """Return the CPU time between two results of `cpu`, and the memory held now; None without processes.

        A process that is not in the first result began in between: all of its time counts.
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


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process so far, over all threads."""
    # The clock of another process (`clock_getcpuclockid(3)`); `/proc/PID/stat` counts only hundredths of a second.
    return time.clock_gettime((~pid << 3) | 2)


def memory_of(pid: int) -> tuple[int, int]:
    """Return the current and the peak resident memory of a process in bytes; zeros if it has exited."""
    found = {}
    for line in (_PROC / str(pid) / "status").read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM"):
            found[name] = int(value.split()[0]) * 1024
    return found.get("VmRSS", 0), found.get("VmHWM", 0)
