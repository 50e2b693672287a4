"""Finds what a test leaks, and where it was created: tasks, sockets, descriptors, threads, child processes, sessions.

It compares the states before and after the test. `plugin` calls it from pytest.
"""

from __future__ import annotations

import gc
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from trimcp.session.session import Session
from trimcp.testing.leak_hooks import Hooks, Place, Run, parent_of, place_of, user_lines

KINDS: Final = ("task", "socket", "descriptor", "thread", "process", "session")
"""The kinds of leaks."""

_GRACE: Final = 1.0  # seconds of real time for ending threads and processes
_TURNS: Final = 30  # turns of the event loop for ending tasks
_DESCRIPTORS: Final = next((path for path in ("/proc/self/fd", "/dev/fd") if os.path.isdir(path)), None)
_CHILDREN: Final = Path("/proc/self/task")


@attrs.frozen
class Leak:
    """One leaked object.

    Attributes:
        kind: one of `KINDS`.
        name: the name to allow it by: a thread's or task's name, a file's path, a command.
        state: a description of its state.
        place: the stack where it was created, innermost first; empty if unknown.
    """

    kind: str
    name: str
    state: str
    place: Place = attrs.field(repr=False)

    def __str__(self) -> str:
        text = f"{self.kind} {self.name!r}" + (f", {self.state}" if self.state else "")
        first, *others = user_lines(self.place) or ["an unknown place: in C, or before the test began"]
        return "\n".join((text, f"    made at {first}", *(f"       from {other}" for other in others)))


@attrs.frozen
class _Stock:
    """The descriptors, threads and child processes at one moment."""

    descriptors: dict[int, object]
    threads: frozenset[threading.Thread]
    processes: frozenset[int]


def _descriptors() -> dict[int, object]:
    """Return the identity of each open descriptor's file; the numbers alone are reused."""
    numbers = range(3, 1024) if _DESCRIPTORS is None else map(int, os.listdir(_DESCRIPTORS))
    found: dict[int, object] = {}
    for number in numbers:
        try:
            status = os.fstat(number)
        except OSError:
            continue  # the descriptor used for listing
        found[number] = status.st_dev, status.st_ino, stat.S_IFMT(status.st_mode)
    return found


def _children() -> frozenset[int] | None:
    """Return our child processes, including zombies; None if the system does not list them."""
    found: set[int] = set()
    try:
        for task in os.listdir(_CHILDREN):
            try:
                found.update(map(int, (_CHILDREN / task / "children").read_text().split()))
            except FileNotFoundError:
                if not (_CHILDREN / str(os.getpid()) / "children").exists():
                    return None
    except OSError:
        return None
    return frozenset(found)


@attrs.define(eq=False)
class LeakWatch:
    """Watches one test: the fixture `trimcp_leaks`.

    Args:
        allowed: leaks to ignore: kinds (`"thread"`), names (`"logger-*"`, with wildcards), or both
            (`"thread:logger-*"`).
    """

    allowed: list[str] = attrs.field(factory=list, converter=list)
    _hooks: Hooks = attrs.field(init=False)
    _before: _Stock = attrs.field(init=False)
    _seen: list[Leak] = attrs.field(init=False, factory=list)

    def __attrs_post_init__(self) -> None:
        self._hooks = Hooks(self._run_ended)

    def allow(self, *kinds_or_names: str) -> None:
        """Ignore more leaks; see `allowed`."""
        self.allowed.extend(kinds_or_names)

    def found(self) -> list[Leak]:
        """Return the leaks so far that are not allowed.

        If there seem to be any, garbage is collected first, and ending threads and processes get a second to end.
        """
        if not (found := self._look()):
            return found
        gc.collect()
        give_up = time.monotonic() + _GRACE
        while (found := self._look()) and time.monotonic() < give_up:
            if not {"thread", "process"} & {leak.kind for leak in found}:
                break
            time.sleep(0.01)
        return found

    # For the plugin

    def begin(self) -> None:
        """Note the current state, and from now on where objects are created."""
        self._before = self._stock()
        self._hooks.install()

    def end(self) -> None:
        """Remove the hooks."""
        self._hooks.remove()

    @contextmanager
    def excused(self) -> Iterator[None]:
        """Allow everything that the block creates: it is shared by several tests."""
        before = self._stock()
        try:
            yield
        finally:
            after, ours = self._stock(), self._before
            new = {number: what for number, what in after.descriptors.items() if before.descriptors.get(number) != what}
            self._before = _Stock(
                {**ours.descriptors, **new},
                ours.threads | (after.threads - before.threads),
                ours.processes | (after.processes - before.processes),
            )

    async def body_ended(self) -> None:
        """Note the tasks that an async test leaves in outer nurseries, before they are cancelled."""
        body = trio.lowlevel.current_task()
        run = self._hooks.run_of(body)
        if run is None:
            return
        for _ in range(_TURNS):
            if not run.below(body):
                return
            await trio.lowlevel.checkpoint()
        self._see_tasks(run, run.below(body))
        self._see_sessions(lambda maker: maker is not None and _is_below(maker, body))

    # The current state

    def _stock(self) -> _Stock:
        children = _children()
        if children is None:
            children = frozenset(pid for pid in self._hooks.processes if _state_of(pid) is not None)
        return _Stock(_descriptors(), frozenset(threading.enumerate()), children)

    def _look(self) -> list[Leak]:
        now = self._stock()
        found = [*self._seen, *self._sessions()]
        found += [*self._threads(now), *self._processes(now), *self._new_descriptors(now)]
        return [leak for leak in found if not any(_covers(each, leak) for each in self.allowed)]

    def _new_descriptors(self, now: _Stock) -> Iterator[Leak]:
        for number, what in now.descriptors.items():
            if self._before.descriptors.get(number) != what and number > 2:
                kind, name, state = _describe_descriptor(number)
                yield Leak(kind, name, state, self._hooks.descriptors.get(number, ()))

    def _threads(self, now: _Stock) -> Iterator[Leak]:
        frames = sys._current_frames()
        for thread in now.threads:
            frame = None if thread.ident is None else frames.get(thread.ident)
            place = self._hooks.threads.get(thread, ())
            if frame is not None and _is_cached(thread):
                if frame.f_code.co_name == "_work" or thread.ident not in self._hooks.jobs:
                    continue  # idle, or its job began before the test
                place = self._hooks.jobs[thread.ident]
            elif thread in self._before.threads:
                continue
            yield Leak("thread", thread.name, _now_at(_stack(frame)), place)

    def _processes(self, now: _Stock) -> Iterator[Leak]:
        for pid in sorted(now.processes - self._before.processes):
            state = _state_of(pid)
            if state is None:
                continue
            place, command = self._hooks.processes.get(pid, ((), f"process {pid}"))
            yield Leak("process", command, f"process {pid}, {state}", place)

    def _sessions(self) -> Iterator[Leak]:
        if any(leak.kind == "session" for leak in self._seen):
            return  # already reported
        for session, (place, _) in list(self._hooks.sessions.items()):
            if _is_open(session):
                yield _session_leak(session, place)

    # What exists only during a run

    def _run_ended(self, run: Run) -> None:
        self._see_tasks(run, [task for task in run.tasks if parent_of(task) not in run.tasks])
        self._see_sessions(lambda maker: maker in run.tasks)

    def _see_tasks(self, run: Run, tasks: Iterable[trio.lowlevel.Task]) -> None:
        for task in tasks:
            self._seen.append(Leak("task", task.name, _now_at(_task_stack(task)), run.tasks[task]))

    def _see_sessions(self, wanted: Callable[[trio.lowlevel.Task | None], bool]) -> None:
        self._seen += [
            _session_leak(session, place)
            for session, (place, maker) in list(self._hooks.sessions.items())
            if _is_open(session) and wanted(maker)
        ]


def spell(leaks: Iterable[Leak]) -> str:
    """Return the error text for a test with leaks."""
    leaks = list(leaks)
    some = "something" if len(leaks) == 1 else f"{len(leaks)} things"
    return "\n".join((f"the test left {some} behind:", *(f"  {leak}" for leak in leaks)))


def _covers(allowed: str, leak: Leak) -> bool:
    kind, colon, name = allowed.partition(":")
    if kind in KINDS:
        return kind == leak.kind and (not colon or fnmatchcase(leak.name, name))
    return fnmatchcase(leak.name, allowed)


def _is_below(task: trio.lowlevel.Task, ancestor: trio.lowlevel.Task) -> bool:
    step: trio.lowlevel.Task | None = task
    while step is not None and step is not ancestor:
        step = parent_of(step)
    return step is not None


def _is_cached(thread: threading.Thread) -> bool:
    target: Any = getattr(thread, "_target", None)
    return getattr(target, "__module__", None) == "trio._core._thread_cache"


def _is_open(session: Session) -> bool:
    """Return whether a session was driven and has not ended; one that was never driven holds nothing."""
    return session.driven and not session.closed.is_set()


def _session_leak(session: Session, place: Place) -> Leak:
    revision = session.revision
    state = f"open, {len(session.jobs)} requests under way, {len(session.pending)} calls pending"
    name = f"{session.engine.role.value} session"
    return Leak("session", name, state + (f", {revision.name}" if revision else ""), place)


def _describe_descriptor(number: int) -> tuple[str, str, str]:
    """Return kind, name and state of an open descriptor."""
    try:
        target = os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        target = f"descriptor {number}"
    if not stat.S_ISSOCK(os.fstat(number).st_mode):
        return "descriptor", target, f"descriptor {number}"
    name, state = target, f"descriptor {number}"
    with socket.socket(fileno=os.dup(number)) as copy:
        try:
            name = _address(copy.getsockname()) or target
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                state += ", listening"
            else:
                state += f", connected to {_address(copy.getpeername()) or 'its other end'}"
        except OSError:
            pass  # no addresses, or not connected
    return "socket", name, state


def _address(address: Any) -> str:
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else os.fsdecode(address)


def _state_of(pid: int) -> str | None:
    """Return the state of a child process, without reaping it; None if it does not exist."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except (ChildProcessError, AttributeError):
        return None
    return "running" if ended is None else "ended, but nobody has waited for it"


def _now_at(place: Place) -> str:
    lines = user_lines(place, most=1)
    return f"now at {lines[0]}" if lines else ""


def _stack(frame: Any) -> Place:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return place_of(frames)


def _task_stack(task: trio.lowlevel.Task) -> Place:
    steps = list(task.iter_await_frames())[::-1]
    own = [step for step in steps if not (step[0].f_globals.get("__name__") or "").startswith("trio.")]
    return place_of([frame for frame, _ in own], [line for _, line in own])
