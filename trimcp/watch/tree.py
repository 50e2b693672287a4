"""The work of a process as lines of text: sessions, their requests with their age, and where each one waits.

It is read from Trio's tasks on demand, so it costs nothing until it is used. It is safe for terminals and logs: text
from peers is escaped and cut.
"""

from __future__ import annotations

import linecache
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import attrs
import trio

from trimcp.session.incoming.job import Job
from trimcp.session.session import Session
from trimcp.support.cleaning import in_quotes

log: logging.Logger = logging.getLogger("trimcp.session")

_STEP: Final = "  "
_MOST_LINES: Final = 500
_MOST_LINES_EACH: Final = 100
_MOST_CALLS: Final = 5
_LONGEST: Final = 100
_OURS: Final = tuple(f"{folder}{os.sep}" for folder in (Path(trio.__file__).parent, Path(__file__).parents[1]))
_PROCESS: Final = "worker_process"  # the name of the local variable in `server.remote` that holds the call's process
_QUEUE: Final = "Turns._queue"  # the function in which a call waits for a turn of a quota, in `session.turns`
_THREAD: Final = "sync_fn"  # the local variable of `trio.to_thread.run_sync` for the function, in task and thread


@attrs.define(eq=False, repr=False)
class Overdue:
    """Logs, once, the requests still running in these sessions when the grace period ends. Each session calls it."""

    sessions: Iterable[Session]
    grace: float
    _told: bool = attrs.field(init=False, default=False)

    def __call__(self) -> None:
        if not self._told:
            self._told = True
            text = "\n".join(work_tree(self.sessions))
            log.warning("still at work after %g seconds and stopped now:\n%s", self.grace, text)


def work_tree(sessions: Iterable[Session], now: float | None = None) -> list[str]:
    """Return lines with every running request of these sessions, and the calls it waits in.

    Only calls outside trimcp and Trio are shown, the innermost five, with their source lines; for a sync handler they
    are those of its thread. The oldest requests are first; a session without running requests has no line. After 500
    lines only the number of remaining requests is given.

    `now`: the time on Trio's clock; required when called from another thread.
    """
    now = trio.current_time() if now is None else now
    lines: list[str] = []
    left = 0
    for session in sorted(sessions, key=lambda session: min((job.since for job in session.jobs), default=0.0)):
        jobs = list(session.jobs)
        if len(lines) >= _MOST_LINES:
            left += len(jobs)
        elif jobs:
            told = list(_describe_session(session, jobs, _MOST_LINES - len(lines), now))
            left += len(jobs) - len(told)
            lines.append(_describe_client(jobs[0]))
            lines += [_STEP + line for request in told for line in request]
    if left:
        lines.append(f"and {left} more requests")
    return lines


def _describe_client(job: Job) -> str:
    admission = job.request.admission
    peer, principal = admission.peer, admission.principal
    who = "a client" if peer is None else f"{in_quotes(peer.name)} {in_quotes(peer.version)}"
    return f"{who}{'' if principal is None else f', as {in_quotes(principal)}'}, in revision {admission.revision.name}"


def _describe_session(session: Session, jobs: list[Job], room: int, now: float) -> Iterator[list[str]]:
    """Yield the lines of each request, at most `room` lines."""
    places = waiting_places(session, jobs[:room], _MOST_LINES_EACH - 1)
    for job in jobs:
        if room <= 0:
            return
        lines = [_describe_job(job, now), *(_STEP + line for line in places[id(job)])]
        room -= len(lines)
        yield lines


def waiting_places(session: Session, jobs: Iterable[Job], most: int) -> dict[int, list[str]]:
    """Return where the requests of a session wait, at most so many lines each, by the identity of the job."""
    jobs = list(jobs)
    tasks = _tasks_of_work(session, jobs)
    return {id(job): list(islice(_describe_tasks(job, tasks), most)) for job in jobs}


def _describe_tasks(job: Job, tasks: Mapping[int, trio.lowlevel.Task]) -> Iterator[str]:
    work = None if job.extras is None else job.extras.work
    for task in (job.task, tasks.get(id(work))):
        if task is not None:
            yield from _describe_task(task)


def _tasks_of_work(session: Session, jobs: Iterable[Job]) -> dict[int, trio.lowlevel.Task]:
    """Return the tasks that requests of a session started, by the identity of their `Work`."""
    found: dict[int, trio.lowlevel.Task] = {}
    if all(job.extras is None or job.extras.work is None for job in jobs):  # the nursery may be that of all sessions
        return found
    for task in session.nursery.child_tasks if session.driven else ():
        frame = getattr(task.coro, "cr_frame", None)
        if frame is not None:
            found[id(frame.f_locals.get("self"))] = task
    return found


def _describe_job(job: Job, now: float) -> str:
    request = job.request
    about = "" if job.target is None else f" {in_quotes(job.target)}"
    age = f"for {now - job.since:.1f} s" if job.started else "waiting to be started"
    asking = ", waiting for the client to answer" if job.extras is not None and job.extras.parked else ""
    cancelled = "" if job.reason is None else f", being cancelled ({job.reason.value})"
    return f"{request.method.name}{about}, request {in_quotes(request.id)}, {age}{asking}{cancelled}"


def _describe_task(task: trio.lowlevel.Task, depth: int = 0) -> Iterator[str]:
    """Yield the calls that a task waits in, and below them those of its child tasks."""
    calls: list[tuple[FrameType, int]] = []
    thread: object = None
    process: Any = None
    turns: Any = None
    for frame, line in task.iter_await_frames():
        calls.append((frame, line))
        if _tells_more(frame.f_code):
            thread = frame.f_locals.get(_THREAD, thread)
            process = frame.f_locals.get(_PROCESS, process)
            turns = frame.f_locals.get("self") if frame.f_code.co_qualname == _QUEUE else turns
    told = list(_describe_calls(calls))
    if turns is not None:
        told.append(f"waits for a turn of {in_quotes(turns.name)}: {turns.running} running, {turns.waiting} waiting")
    if process is not None:
        told.append(f"in the worker process {process.process.pid}")
    if thread is not None:
        inside = list(_describe_calls(_calls_in_thread(thread)))
        told += [f"in a thread: {line}" for line in inside] or ["in a thread"]
    yield from told
    if depth == _MOST_CALLS:
        return
    for nursery in task.child_nurseries:
        for child in nursery.child_tasks:
            below = list(_describe_task(child, depth + 1))
            if below:  # a task without calls of the user's is internal
                yield f"task {child.name}"
                for text in below:
                    yield _STEP + text


@lru_cache(maxsize=4096)
def _tells_more(code: CodeType) -> bool:
    """Return whether a function knows for what its task waits, beyond its line."""
    return _THREAD in code.co_varnames + code.co_cellvars or _PROCESS in code.co_varnames or code.co_qualname == _QUEUE


def _calls_in_thread(function: object) -> list[tuple[FrameType, int]]:
    """Return the stack of the thread that runs a function, outermost first; empty if it has ended."""
    for innermost in sys._current_frames().values():
        calls: list[tuple[FrameType, int]] = []
        frame: FrameType | None = innermost
        while frame is not None:
            if _THREAD in frame.f_code.co_freevars and frame.f_locals.get(_THREAD) is function:
                return calls[::-1]
            calls.append((frame, frame.f_lineno))
            frame = frame.f_back
    return []


def _describe_calls(calls: Iterable[tuple[FrameType, int]]) -> list[str]:
    theirs = [(frame.f_code, line) for frame, line in calls if not frame.f_code.co_filename.startswith(_OURS)]
    return [_describe_call(code.co_filename, line, code.co_name) for code, line in theirs[-_MOST_CALLS:]]


def _describe_call(file: str, line: int, function: str) -> str:
    source = linecache.getline(file, line).strip()
    try:
        file = _shown_path(file, os.getcwd())
    except OSError:  # the directory was deleted
        pass
    return f"{file}:{line} in {function}{f': {source[:_LONGEST]}' if source else ''}"


@lru_cache(maxsize=1024)
def _shown_path(file: str, folder: str) -> str:
    path = Path(file)
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else file
