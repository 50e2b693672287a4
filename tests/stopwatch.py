"""How long something takes, without the time in which the machine had no processor for it.

On a busy machine a process that could go on waits for a processor, for as long as others want. The kernel counts this
(proc(5), schedstat: nanoseconds on the processor, and nanoseconds of waiting for one), so it can be taken off, and a
bound in seconds holds there, too. On a quiet machine there is nothing to take off.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import attrs

__all__ = ["Stopwatch", "waited"]


def waited(pid: int) -> float:
    """Seconds that the main thread of a process has waited for a processor; 0.0 if there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


@attrs.define
class Stopwatch:
    """Measures from now on what these processes and this one take together.

    Attributes:
        began: when, by the clock of `time.monotonic`, which all processes share.
    """

    pids: tuple[int, ...] = attrs.field(converter=lambda pids: (os.getpid(), *pids))
    began: float = attrs.field(factory=time.monotonic, init=False)
    _before: dict[int, float] = attrs.field(init=False)
    _lost: dict[int, float] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self._before = {pid: waited(pid) for pid in self.pids}

    def look(self) -> None:
        """Note how long they have waited; of a process that ends, this is what is known in the end."""
        for pid, before in self._before.items():
            self._lost[pid] = max(self._lost.get(pid, 0.0), waited(pid) - before)

    @property
    def lost(self) -> float:
        """Seconds they have waited for a processor."""
        self.look()
        return sum(self._lost.values())

    def took(self, until: float | None = None) -> float:
        """Seconds until now, or until then, less those lost up to now."""
        until = time.monotonic() if until is None else until
        return max(0.0, until - self.began - self.lost)
