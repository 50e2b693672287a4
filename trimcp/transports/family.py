"""Who is descended from a child process, as the system tells it, and signals that reach nobody else.

Three signs of descent: the tree of parents, the session the child was made leader of, and a random mark in
the environment (Linux), which outlives the parent's death and `setsid`. A process is known by id *and* start
time, so an id that was given to somebody else since is never signalled.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import attrs

from trimcp.values import valued

__all__ = ["MARK", "Family", "Kin"]

MARK: Final = "TRIMCP_CHILD"
"""Environment variable that marks a child's descendants; its value is random."""

_PROC: Final = Path("/proc")


@attrs.frozen
@valued
class Kin:
    """One process for as long as it lives: its id and its start time in the system's own form."""

    pid: int
    start: str


@attrs.frozen
@valued
class _Row:
    kin: Kin
    parent: int
    session: int
    alive: bool


@attrs.define(eq=False, repr=False)
class Family:
    """A child process and whoever descends from it.

    The methods read the system's process table, which takes milliseconds: call `look` in a thread.

    Args:
        pid: the child, leader of its own session, not yet waited for.
        mark: the value of `MARK` in its environment.
    """

    pid: int
    mark: str
    _start: str | None = None
    _known: set[Kin] = attrs.field(factory=set)

    def __attrs_post_init__(self) -> None:
        self._start = next((row.kin.start for row in _table([self.pid]) if row.kin.pid == self.pid), None)

    @staticmethod
    def new_mark() -> str:
        """Return a value for `MARK` that nobody else has."""
        return secrets.token_hex(16)

    def look(self) -> list[Kin]:
        """Return the descendants alive now, without the child itself; who was seen once stays known."""
        table = [row for row in _table() if row.kin.pid != os.getpid()]
        by_pid = {row.kin.pid: row for row in table}
        child = by_pid.get(self.pid)
        if child is not None and child.kin.start != self._start:
            roots: set[int] = set()  # its id has passed to somebody else, and so may have its session's
            session = None
        else:
            roots = {self.pid}
            session = self.pid
        family = {kin.pid for kin in self._known if kin.pid in by_pid and by_pid[kin.pid].kin == kin}
        family |= {row.kin.pid for row in table if row.session == session or _marked(row.kin.pid, self.mark)}
        family |= _descendants(family | roots, table)
        family.discard(self.pid)
        living = [by_pid[pid].kin for pid in sorted(family) if by_pid[pid].alive]
        self._known.update(living)
        return living

    def signal(self, kin: Iterable[Kin], number: signal.Signals) -> None:
        """Send a signal to each of these that is still the same process."""
        for each in kin:
            _signal(each, number)


def _descendants(roots: set[int], table: list[_Row]) -> set[int]:
    children: dict[int, list[int]] = {}
    for row in table:
        children.setdefault(row.parent, []).append(row.kin.pid)
    found: set[int] = set()
    todo = list(roots)
    while todo:
        for pid in children.get(todo.pop(), ()):
            if pid not in found:
                found.add(pid)
                todo.append(pid)
    return found


def _signal(kin: Kin, number: signal.Signals) -> None:
    if sys.platform == "linux":
        # A pidfd stays with its process: once opened and checked, the signal cannot go astray.
        with suppress(OSError):
            handle = os.pidfd_open(kin.pid)
            try:
                if any(row.kin == kin for row in _table([kin.pid])):
                    signal.pidfd_send_signal(handle, number)
            finally:
                os.close(handle)
    elif any(row.kin == kin for row in _table([kin.pid])):
        with suppress(OSError):
            os.kill(kin.pid, number)


def _marked(pid: int, mark: str) -> bool:
    try:
        environment = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:  # gone, another user's, or a system without /proc
        return False
    return f"{MARK}={mark}".encode() in environment.split(b"\0")


def _table(pids: list[int] | None = None) -> list[_Row]:
    """Read the process table, or the rows of some processes."""
    if sys.platform == "win32":
        return []
    if not (_PROC / "self" / "stat").exists():
        return _table_from_ps(pids)
    rows = []
    for name in map(str, pids) if pids is not None else os.listdir(_PROC):
        if name.isdecimal():
            with suppress(OSError):
                rows.append(_row_from_proc(int(name), (_PROC / name / "stat").read_text(errors="replace")))
    return rows


def _row_from_proc(pid: int, text: str) -> _Row:
    # proc(5): the name in field 2 may hold anything, a parenthesis included; field 3 follows the last one.
    fields = text.rpartition(")")[2].split()
    state, parent, session, start = fields[0], int(fields[1]), int(fields[3]), fields[19]
    return _Row(Kin(pid, start), parent, session, state not in "ZX")


def _table_from_ps(pids: list[int] | None) -> list[_Row]:
    """Systems without /proc (macOS): `ps`, and the process group for want of the session."""
    command = ["ps", "-o", "pid=,ppid=,pgid=,stat=,lstart="]
    command += ["-ax"] if pids is None else ["-p", ",".join(map(str, pids))]
    environment = {"PATH": "/bin:/usr/bin", "LC_ALL": "C"}
    try:
        text = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=2,
            check=False,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = []
    for line in text.splitlines():
        fields = line.split(None, 4)
        if len(fields) == 5:
            pid, parent, group, state, start = fields
            rows.append(_Row(Kin(int(pid), start.strip()), int(parent), int(group), not state.startswith("Z")))
    return rows
