"""CPU time and memory of the server's processes, as the kernel counts them (Linux only); how fast the machine was."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from trimcp.bench.report import Cost
from trimcp.bench.tally import Tally
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

    def memory(self) -> tuple[int, int]:
        """Return the bytes of resident memory that all of them hold now, and the sum of their peaks."""
        held = peak = 0
        for pid in self._known:
            with suppress(OSError):
                now, most = memory_of(pid)
                held, peak = held + now, peak + most
        return held, peak


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


_FIND_EVERY: Final = 2.0  # seconds between searches for new descendants
_WORK: Final = tuple(range(2_000))


@attrs.define(eq=False)
class Cutter:
    """Cuts a measurement into slices, each with what it cost; it begins when it is made."""

    _tally: Tally
    _processes: ProcessTree
    cost: Cost | None = attrs.field(init=False, default=None)  # of the server so far; None if it is not known
    own_cpu: float = attrs.field(init=False, default=0.0)  # CPU seconds of this process so far
    _cpu: dict[int, float] = attrs.field(init=False)  # the CPU seconds of the server's processes at the last cut
    _own: float = attrs.field(init=False, factory=time.process_time)
    _at: float = attrs.field(init=False, factory=trio.current_time)
    _found: float = attrs.field(init=False, factory=trio.current_time)

    def __attrs_post_init__(self) -> None:
        self._cpu = self._processes.cpu()

    async def run(self) -> None:
        """Cut until cancelled."""
        due = trio.current_time()
        while True:
            due += self._tally.slice_length
            await trio.sleep_until(due)
            now = trio.current_time()
            if now - self._found > _FIND_EVERY:
                self._found = now
                self._processes.find()
            self.cut(now, now - due)

    def cut(self, now: float, lag: float = 0.0) -> None:
        """End the slice that lasts. A process that was not there before began in it: all of its time counts."""
        cpu, own = self._processes.cpu(), time.process_time()
        spent = sum(max(seconds - self._cpu.get(pid, 0.0), 0.0) for pid, seconds in cpu.items())
        rss, peak = self._processes.memory()
        if cpu:
            before = self.cost or Cost(0.0, 0, 0)
            self.cost = Cost(before.cpu_seconds + spent, rss, max(before.peak_rss, peak))
        began, began_cpu = time.perf_counter(), time.thread_time()
        sum(_WORK)
        work_cpu, work = time.thread_time() - began_cpu, time.perf_counter() - began
        self._tally.cut(
            now,
            cpu=spent if cpu else None,
            rss=rss if cpu else None,
            busy=(own - self._own) / max(now - self._at, 1e-9),
            lag=lag,
            work_cpu=work_cpu,
            work=work,
        )
        self.own_cpu += own - self._own
        self._cpu, self._own, self._at = cpu, own, now


def environment() -> dict[str, Any]:
    """Return what a reader needs to know of this machine, and when it is."""
    try:
        own = version("trimcp")
    except PackageNotFoundError:
        own = "unknown"
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "trimcp": own,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }
