"""A watchdog for the event loop: a thread that detects when the loop is blocked, and logs the cause.

An instrument notes when each turn of the loop begins and ends; the thread reads that ten times a second. A long turn
caused by a tool is logged as a warning, once for each tool. A turn that does not end is logged as an error with stacks,
requests and tasks.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import attrs
import trio

from trimcp.channel import require_trio
from trimcp.session.incoming.job import Job
from trimcp.session.session import Session
from trimcp.support.bounds import check_number
from trimcp.support.cleaning import log_crash
from trimcp.watch.tree import work_tree

if TYPE_CHECKING:
    from trimcp.watch.picture import Observed

log: logging.Logger = logging.getLogger("trimcp.watchdog")

_PAUSE: Final = 0.1  # seconds between two checks
_MOST_FRAMES: Final = 30
_MOST_TASKS: Final = 200
_TRIO: Final = f"{Path(trio.__file__).parent}{os.sep}"
_BUSY: Final = 0.5  # share of the time; from here on threads compute rather than wait


@contextmanager
def watchdog(
    *servers: Observed, seconds: float = 30.0, lag: float | None = 0.25, whole_process: bool = False
) -> Iterator[None]:
    """Watch the event loop of the task that enters, from a thread, for as long as the block runs.

    A loop that is blocked for `seconds` is logged once as an error by the logger "trimcp.watchdog": the stack of the
    blocking thread, the running requests of every session, and the task tree. When it continues, a warning has the
    duration. A tool that blocks the loop for `lag` seconds is logged as a warning with advice, once for each tool.

    Args:
        servers: the servers whose sessions and tools are named.
        seconds: how long the loop may be blocked.
        lag: how long one tool may block it, with a tolerance of 0.1 s; None to ignore single tools.
        whole_process: also write all stacks to standard error when no thread of this process can run, because one holds
            the interpreter lock. It uses `faulthandler.dump_traceback_later`, which has one user per process.

    Raises:
        ValueError: a time is not positive.
    """
    require_trio()
    check_number("seconds", seconds)
    check_number("lag", lag, optional=True)
    watcher = _Watchdog(
        servers,
        seconds,
        math.inf if lag is None else lag,
        whole_process,
        clock=trio.lowlevel.current_clock(),
        root=trio.lowlevel.current_root_task(),
        held_by=threading.get_ident(),
    )
    thread = threading.Thread(target=watcher.run, name="trimcp watchdog", daemon=True)
    trio.lowlevel.add_instrument(watcher)
    thread.start()
    try:
        yield
    finally:
        trio.lowlevel.remove_instrument(watcher)
        watcher.stop()
        thread.join(_PAUSE)


@attrs.define(eq=False, repr=False)
class _Watchdog(trio.abc.Instrument):
    """The watching thread, and the instrument that notes when the current turn of the event loop began."""

    servers: tuple[Observed, ...]
    seconds: float
    lag: float
    whole_process: bool
    clock: trio.abc.Clock
    root: trio.lowlevel.Task | None
    held_by: int
    _turn_began: float | None = attrs.field(init=False, factory=time.monotonic)
    _stopped: threading.Event = attrs.field(init=False, factory=threading.Event)
    _stalled: float | None = attrs.field(init=False, default=None)
    _looked: float | None = attrs.field(init=False, default=None)
    _reported: set[str] = attrs.field(init=False, factory=set)
    _rearm: float = attrs.field(init=False, default=0.0)

    # The only cost in the event loop itself.

    def after_io_wait(self, timeout: float) -> None:
        self._turn_began = time.monotonic()

    def before_io_wait(self, timeout: float) -> None:
        self._turn_began = None

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        try:
            while not self._pause():
                self._look(time.monotonic())
        finally:
            self._disarm()

    def _pause(self) -> bool:
        """Wait `_PAUSE`, report if that took too long, and return whether to stop."""
        if self.whole_process and time.monotonic() >= self._rearm and self._stalled is None:
            # It writes from a C thread, which does not need the interpreter lock.
            faulthandler.dump_traceback_later(self.seconds + 1, exit=False)
            self._rearm = time.monotonic() + self.seconds / 4
        before, used = time.monotonic(), time.process_time()
        stopped = self._stopped.wait(_PAUSE)
        late = time.monotonic() - before - _PAUSE
        if stopped:
            return True
        if late >= self.seconds:
            log.error(
                "nothing in this process could run for %.1f s: something held the interpreter lock, or it was stopped",
                late,
            )
        elif late >= self.lag and time.process_time() - used >= _BUSY * late:
            # Like the loop, this thread waited for the interpreter lock.
            self._guarded(self._report_threads, late)
        return False

    def _disarm(self) -> None:
        if self.whole_process:
            faulthandler.cancel_dump_traceback_later()
            self._rearm = 0.0

    def _look(self, now: float) -> None:
        since = self._turn_began
        if self._stalled is not None and since != self._stalled:
            log.warning("the event loop goes on; it stood still for %.1f s", now - self._stalled)
            self._stalled = None
        if since is None:
            return
        if now - since >= self.seconds:
            if self._stalled is None:
                self._stalled = since
                self._disarm()
                self._guarded(self._report_stall, now - since)
        elif now - since >= self.lag and self._looked != since:
            self._looked = since
            self._guarded(self._report_lag, now - since)

    def _guarded(self, function: Any, *args: float) -> None:
        try:
            function(*args)
        except Exception as error:  # the inspected objects may change meanwhile; keep watching
            log_crash(log, error, "the watchdog could not say what holds the event loop")

    # Reports

    def _report_lag(self, late: float) -> None:
        frame = self._frame()
        job = _job_in(frame)
        if job is None:
            return
        if self._in_thread(job):  # the loop waits until the handler's thread has started
            self._report_threads(late)
            return
        name = _name_of(job)
        if name not in self._reported:
            self._reported.add(name)
            log.warning(
                "the event loop is late by %.2f s because of %s, at\n%s\n"
                'If it waits there, make it a sync function with run="thread"; if it computes, one with run="process"',
                late,
                name,
                _stack(frame, 3),
            )

    def _report_threads(self, late: float) -> None:
        names = sorted({_name_of(job) for job in self._jobs() if self._in_thread(job)} - self._reported)
        if names:
            self._reported.update(names)
            log.warning(
                "the event loop is late by %.2f s while this process computes in threads: %s. Python runs one thread "
                'at a time; what computes belongs in run="process"',
                late,
                ", ".join(names),
            )

    def _report_stall(self, late: float) -> None:
        frame = self._frame()
        job = _job_in(frame)
        now = self.clock.current_time()
        by = "" if job is None else f" in {_name_of(job)}"
        parts = [
            f"the event loop has stood still for {late:.1f} s",
            f"it is held{by}, at:",
            _stack(frame, _MOST_FRAMES),
            "sessions:",
            *(f"  {line}" for line in _retried(lambda: work_tree(self._sessions(), now)) or ["nothing is under way"]),
            "tasks:",
            *(f"  {line}" for line in _retried(lambda: list(_task_tree(self.root)))),
        ]
        log.error("%s", "\n".join(parts))

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self.held_by)

    def _sessions(self) -> list[Session]:
        return [session for server in self.servers for session in server.sessions()]

    def _jobs(self) -> list[Job]:
        return [job for session in self._sessions() for job in list(session.jobs) if job.started]

    def _in_thread(self, job: Job) -> bool:
        return any(server.runs_in_thread(getattr(job.request.params, "name", "")) for server in self.servers)


def _retried(look: Any) -> list[str]:
    """Return `look()`, tried up to three times: the inspected objects may change meanwhile."""
    for _ in range(3):
        try:
            found: list[str] = look()
        except RuntimeError:  # a set or dict changed its size
            continue
        return found
    return ["(it changes too fast to be shown)"]


def _job_in(frame: FrameType | None) -> Job | None:
    """Return the request whose handler runs in the thread with this innermost frame, or None."""
    while frame is not None:
        if frame.f_code is Job.attempt.__code__:
            job: Job | None = frame.f_locals.get("self")
            return job
        frame = frame.f_back
    return None


def _name_of(job: Job) -> str:
    what = getattr(job.request.params, "name", None) or getattr(job.request.params, "uri", None)
    kind = {"tools/call": "the tool", "prompts/get": "the prompt", "resources/read": "the resource"}
    method = job.request.method.name
    return f"{kind.get(method, method)} {ascii(what)[1:-1][:100]}" if isinstance(what, str) else method


def _stack(frame: FrameType | None, most: int) -> str:
    """Return the innermost calls as text, without the event loop's own."""
    calls: list[tuple[FrameType, int]] = []
    while frame is not None and not (calls and frame.f_code.co_filename.startswith(_TRIO)):
        calls.append((frame, frame.f_lineno))
        frame = frame.f_back
    shown = traceback.StackSummary.extract(iter(calls[:most][::-1]))
    return "".join(shown.format()).rstrip() or "  (its thread is gone)"


def _task_tree(task: trio.lowlevel.Task | None, depth: int = 0, room: list[int] | None = None) -> Iterator[str]:
    """Yield a line for each task with where it waits, and below it its child tasks."""
    room = [_MOST_TASKS] if room is None else room
    if task is None or room[0] < 0:
        return
    room[0] -= 1
    if room[0] < 0:
        yield "and more"
        return
    calls = [call for call in task.iter_await_frames() if not call[0].f_code.co_filename.startswith(_TRIO)]
    where = ""
    if calls:
        frame, line = calls[-1]
        where = f", at {frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
    yield f"{'  ' * depth}{task.name}{where}"
    for nursery in task.child_nurseries:
        for child in list(nursery.child_tasks):
            yield from _task_tree(child, depth + 1, room)
