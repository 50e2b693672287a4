"""The descendants of a child process: found, signalled, and waited for until none is left.

They are found by three signs: the tree of parents, the session that the child leads, and a random mark in the
environment (Linux). The mark survives the parent's death and `setsid`. A process is identified by id *and* start time,
so a process that reuses an id is never signalled.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import attrs
import trio

from trimcp.support.slotted import valued

_POLL: Final = 0.03

MARK: Final = "TRIMCP_CHILD"
"""Environment variable that marks a child's descendants; its value is random."""

_log = logging.getLogger("trimcp.stdio")


def signal_name(number: int) -> str:
    """Return what a person calls a signal: "SIGKILL", or "signal 99" where it has no name here."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


async def signal_until_gone(process: trio.Process, descendants: Descendants, name: str) -> None:
    """Send a child and its descendants the signal of this name; return once all have exited."""
    signalled: set[KnownProcess] = set()
    if process.returncode is None:
        _log.debug("sending %s to process %d", name, process.pid)
        if name == "SIGKILL":
            process.kill()
        else:
            process.terminate()
    while True:
        living = await look(descendants)
        if sys.platform != "win32":
            fresh = [each for each in living if each not in signalled]  # a fork may have happened after the last look
            descendants.signal(fresh, signal.Signals[name])
            signalled.update(fresh)
        if process.returncode is not None and not living:
            return
        await trio.sleep(_POLL)


async def look(descendants: Descendants) -> list[KnownProcess]:
    """Return the live descendants, found in a thread. Reading the process table takes milliseconds."""
    # An own limiter: all threads of the shared one may be blocked in calls that this shutdown is to end.
    return await trio.to_thread.run_sync(descendants.look, limiter=trio.CapacityLimiter(1))


def with_descendants(roots: Iterable[int]) -> set[int]:
    """Return these processes and what they have started, and that in turn."""
    known = set(roots)
    return known | _descendants(known, _table())


def parent_of(pid: int) -> int | None:
    """Return the process that has started another, or looks after it since; None if it is gone."""
    row = _table([pid]).get(pid)
    return None if row is None else row.parent


@attrs.frozen
@valued
class KnownProcess:
    """One process: its id and its start time in the system's own units."""

    pid: int
    start: str


@attrs.frozen
@valued
class _Row:
    known: KnownProcess
    parent: int
    session: int
    alive: bool


@attrs.define(eq=False, repr=False)
class Descendants:
    """The descendants of a child process.

    The methods read the system's process table, which takes milliseconds: call `look` in a thread.
    """

    pid: int  # the child, leader of its own session, not yet waited for
    mark: str  # the value of `MARK` in its environment
    _start: str | None = None
    _known: set[KnownProcess] = attrs.field(factory=set)

    def __attrs_post_init__(self) -> None:
        row = _table([self.pid]).get(self.pid)
        self._start = None if row is None else row.known.start

    @staticmethod
    def new_mark() -> str:
        """Return a random value for `MARK`."""
        return secrets.token_hex(16)

    def look(self) -> list[KnownProcess]:
        """Return the live descendants without the child itself. A descendant found once stays known."""
        table = _table()
        table.pop(os.getpid(), None)
        child = table.get(self.pid)
        if child is not None and child.known.start != self._start:
            roots: set[int] = set()  # the child's id now belongs to another process, and perhaps its session id too
            session = None
        else:
            roots = {self.pid}
            session = self.pid
        found = {known.pid for known in self._known if _is_in(table, known)}
        found |= {
            pid
            for pid, row in table.items()
            if row.session == session or (self._may_begin(row.known.start) and _marked(pid, self.mark))
        }
        found |= _descendants(found | roots, table)
        found.discard(self.pid)
        living = [table[pid].known for pid in sorted(found) if table[pid].alive]
        self._known.update(living)
        return living

    def _may_begin(self, start: str) -> bool:
        """Return whether a descendant may have begun then: not before the child (Linux: in ticks since the boot)."""
        ours = self._start
        return ours is None or not ours.isdecimal() or not start.isdecimal() or int(start) >= int(ours)

    def signal(self, processes: Iterable[KnownProcess], number: signal.Signals) -> None:
        """Send a signal to each of these processes, unless its id was reused."""
        for each in processes:
            with suppress(OSError):
                _signal(each, number)


def _descendants(roots: set[int], table: dict[int, _Row]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, row in table.items():
        children.setdefault(row.parent, []).append(pid)
    found: set[int] = set()
    todo = list(roots)
    while todo:
        fresh = [pid for pid in children.get(todo.pop(), ()) if pid not in found]
        found.update(fresh)
        todo += fresh
    return found


def _signal(known: KnownProcess, number: signal.Signals) -> None:
    if sys.platform == "linux":
        # A pidfd refers to one process: after the check, the signal cannot reach another one.
        handle = os.pidfd_open(known.pid)
        try:
            if _is_in(_table([known.pid]), known):
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)
    elif _is_in(_table([known.pid]), known):
        os.kill(known.pid, number)


def _is_in(table: dict[int, _Row], known: KnownProcess) -> bool:
    return known.pid in table and table[known.pid].known == known


def _marked(pid: int, mark: str) -> bool:
    try:
        environment = _read(f"/proc/{pid}/environ")
    except OSError:  # the process exited, is another user's, or the system has no /proc
        return False
    return f"{MARK}={mark}".encode() in environment.split(b"\0")


def _table(pids: list[int] | None = None) -> dict[int, _Row]:
    """Return rows of the process table by process id: all, or those of `pids`."""
    rows: list[_Row] = []
    if os.path.exists("/proc/self/stat"):
        for name in map(str, pids) if pids is not None else os.listdir("/proc"):
            if name.isdecimal():
                with suppress(OSError):
                    rows.append(_row_from_proc(int(name), _read(f"/proc/{name}/stat").decode(errors="replace")))
    elif sys.platform != "win32":
        rows = _table_from_ps(pids)
    return {row.known.pid: row for row in rows}


def _read(path: str) -> bytes:
    """Return a file of /proc, without the objects of `open`: there is one for each process."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        read = b""
        while chunk := os.read(handle, 64 * 1024):
            read += chunk
        return read
    finally:
        os.close(handle)


def _row_from_proc(pid: int, text: str) -> _Row:
    # proc(5): the name in field 2 may contain parentheses; field 3 follows the last one.
    fields = text.rpartition(")")[2].split()
    state, parent, session, start = fields[0], int(fields[1]), int(fields[3]), fields[19]
    return _Row(KnownProcess(pid, start), parent, session, state not in "ZX")


def _table_from_ps(pids: list[int] | None) -> list[_Row]:
    """Return the rows from `ps`, for systems without /proc (macOS). The process group replaces the session."""
    command = ["ps", "-o", "pid=,ppid=,pgid=,stat=,lstart="]
    command += ["-ax"] if pids is None else ["-p", ",".join(map(str, pids))]
    environment = {"PATH": "/bin:/usr/bin", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=2, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = []
    for line in done.stdout.splitlines():
        fields = line.split(None, 4)
        if len(fields) == 5:
            pid, parent, group, state, start = fields
            rows.append(_Row(KnownProcess(int(pid), start.strip()), int(parent), int(group), not state.startswith("Z")))
    return rows
