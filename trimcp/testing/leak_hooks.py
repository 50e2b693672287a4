"""Hooks that note where a test creates tasks, threads, descriptors, child processes and sessions.

They are installed for the duration of the test and affect only its run time. Objects created without them (in C, or
through a name imported before) are still found at the end, but without the place of their creation.
"""

from __future__ import annotations

import builtins
import functools
import io
import linecache
import os
import shutil  # checks at import whether `os.open` is the original
import socket
import subprocess
import sys
import sysconfig
import tempfile  # likewise
import threading
from collections.abc import Callable, Iterable
from itertools import takewhile
from types import FrameType
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

import attrs
import trio
from trio import _core as core

from trimcp.session.session import Session

Place: TypeAlias = tuple[tuple[str, int, str], ...]
"""Where an object was created: file, line and function of each frame, innermost first."""

_LOADED: Final = (shutil, tempfile)
_OPENERS: Final = ("open", "pipe", "pipe2", "dup", "dup2", "openpty", "eventfd", "memfd_create", "pidfd_open")
_FORKS: Final = ("fork", "forkpty", "posix_spawn", "posix_spawnp")
_ENTRY_QUEUE: Final = "<TrioToken.run_sync_soon task>"
_DEEPEST: Final = 80
_SHOWN: Final = 3
_LOOP: Final = "unrolled_run"
_PATHS: Final = sysconfig.get_paths()
_INSTALLED: Final = (
    *(_PATHS[name] + os.sep for name in ("purelib", "platlib")),
    os.path.dirname(os.path.dirname(trio.__file__)) + os.sep,  # perhaps in another environment
)
_LIBRARIES: Final = (
    *_INSTALLED,
    *(_PATHS[name] + os.sep for name in ("stdlib", "platstdlib")),
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,  # trimcp itself
    "<",
)
_PYTEST: Final = tuple(f"{folder}_pytest{os.sep}" for folder in _INSTALLED)


def _here(started: Place | None) -> Place:
    """Return the stack above the function that calls this one.

    `started`: where the current task was started; replaces the frames of Trio's loop.
    """
    step: FrameType | None = sys._getframe(2)
    found: list[FrameType] = []
    while step is not None and len(found) < _DEEPEST:
        if started is not None and step.f_code.co_name == _LOOP:
            return place_of(found) + started[: _DEEPEST - len(found)]
        found.append(step)
        step = step.f_back
    return place_of(found)


def place_of(frames: Iterable[FrameType], lines: Iterable[int] | None = None) -> Place:
    """Return frames as a place; `lines` overrides their current lines."""
    frames = list(frames)
    numbers = [frame.f_lineno for frame in frames] if lines is None else lines
    return tuple(
        (frame.f_code.co_filename, number, frame.f_code.co_qualname)
        for frame, number in zip(frames, numbers, strict=True)
    )


def user_lines(place: Place, *, most: int = _SHOWN) -> list[str]:
    """Return the innermost lines of the user's code as text; of any code if there are none."""
    place = tuple(takewhile(lambda step: not step[0].startswith(_PYTEST), place))  # outer frames belong to pytest
    own = [step for step in place if not step[0].startswith(_LIBRARIES)]
    return [_line(*step) for step in own[:most] or place[:1]]


def _line(file: str, number: int, function: str) -> str:
    source = linecache.getline(file, number).strip()
    near = os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file
    function = function.rpartition("<locals>.")[2]
    return f"{near}:{number} in {function}" + (f": {source}" if source else "")


@attrs.define(eq=False)
class Run(trio.abc.Instrument):
    """The running tasks of one `trio.run`."""

    ended: Callable[[Run], None]  # called when the main task ends, before the remaining tasks are cancelled
    # the tasks that have not ended, with the place of their start
    tasks: dict[trio.lowlevel.Task, Place] = attrs.field(init=False, factory=dict)
    _main: trio.lowlevel.Task | None = attrs.field(init=False, default=None)

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        """Note where a task is started."""
        if task.parent_nursery is None or task.name == _ENTRY_QUEUE:
            return  # a task of Trio itself
        if self._main is None:
            self._main = task
        self.tasks[task] = _here(self.started())

    def task_exited(self, task: trio.lowlevel.Task) -> None:
        """Remove a task; when the main one ends, report the remaining tasks."""
        self.tasks.pop(task, None)
        if task is self._main:
            self.ended(self)
            self.tasks.clear()

    def started(self) -> Place | None:
        """Return where the current task was started; None outside this run."""
        try:
            return self.tasks.get(trio.lowlevel.current_task())
        except RuntimeError:
            return None

    def below(self, parent: trio.lowlevel.Task | None) -> list[trio.lowlevel.Task]:
        """Return the direct child tasks of a task."""
        return [task for task in self.tasks if parent_of(task) is parent]


def parent_of(task: trio.lowlevel.Task) -> trio.lowlevel.Task | None:
    """Return the parent of a task."""
    nursery = task.parent_nursery
    return None if nursery is None else nursery.parent_task


@attrs.define(eq=False)
class Hooks:
    """The hooks and the places that they noted."""

    run_ended: Callable[[Run], None]  # called when the main task of a run ends
    runs: WeakSet[Run] = attrs.field(init=False, factory=WeakSet)  # the current runs of Trio
    descriptors: dict[int, Place] = attrs.field(init=False, factory=dict)  # the place where each number was last opened
    # the place where each child was started, and its command, by process id
    processes: dict[int, tuple[Place, str]] = attrs.field(init=False, factory=dict)
    # the place where each thread was started
    threads: WeakKeyDictionary[threading.Thread, Place] = attrs.field(init=False, factory=WeakKeyDictionary)
    # the place where the current job of each cached Trio thread was started, by the thread's identity
    jobs: dict[int, Place] = attrs.field(init=False, factory=dict)
    # the place where each session was created, and the task that did so
    sessions: WeakKeyDictionary[Session, tuple[Place, trio.lowlevel.Task | None]] = attrs.field(
        init=False, factory=WeakKeyDictionary
    )
    _before: list[tuple[Any, str, Any, Any]] = attrs.field(init=False, factory=list)

    def install(self) -> None:
        """Install the hooks."""
        for names, note in ((_OPENERS, self._opened), (_FORKS, self._forked)):
            for name in names:
                if hasattr(os, name):
                    self._put(os, name, self._noting(getattr(os, name), note))
        opened = self._noting(builtins.open, self._opened)
        self._put(builtins, "open", opened)
        self._put(io, "open", opened)
        self._after(socket.socket, "__init__", lambda made, place: self._opened(made.fileno(), place))
        self._after(subprocess.Popen, "__init__", self._started)
        self._after(threading.Thread, "start", self.threads.__setitem__)
        self._after(Session, "__attrs_post_init__", self._made)
        self._watch_thread_cache()
        self._watch_runs()
        os.supports_dir_fd.add(os.open)

    def remove(self) -> None:
        """Remove the hooks. A hook that was replaced or wrapped meanwhile stays; it is harmless."""
        os.supports_dir_fd.discard(os.open)
        for owner, name, ours, before in reversed(self._before):
            if getattr(owner, name) is ours:
                setattr(owner, name, before)
        self._before.clear()

    def run_of(self, task: trio.lowlevel.Task) -> Run | None:
        """Return the run of a task."""
        return next((run for run in self.runs if task in run.tasks), None)

    def _task_started(self) -> Place | None:
        return next((place for run in self.runs if (place := run.started()) is not None), None)

    def _put(self, owner: Any, name: str, ours: Any) -> None:
        self._before.append((owner, name, ours, getattr(owner, name)))
        setattr(owner, name, ours)

    def _noting(self, function: Callable[..., Any], note: Callable[[Any, Place], None]) -> object:
        """Return a function that also notes the return value of `function`."""

        @functools.wraps(function)
        def noting(*args: Any, **kwargs: Any) -> Any:
            made = function(*args, **kwargs)
            note(made, _here(self._task_started()))
            return made

        return staticmethod(noting)  # like a built-in function, it must not become a method as a class attribute

    def _after(self, owner: type, name: str, note: Callable[[Any, Place], object]) -> None:
        """Wrap a method so that it notes its object after it has returned."""
        method = getattr(owner, name)

        @functools.wraps(method)
        def noting(made: Any, *args: Any, **kwargs: Any) -> Any:
            result = method(made, *args, **kwargs)
            note(made, _here(self._task_started()))
            return result

        self._put(owner, name, noting)

    def _watch_thread_cache(self) -> None:
        cache = getattr(getattr(core, "_thread_cache", None), "ThreadCache", None)
        if cache is None:
            return
        start = cache.start_thread_soon

        def start_thread_soon(this: Any, function: Callable[[], Any], *args: Any, **kwargs: Any) -> None:
            place = _here(self._task_started())

            def job() -> Any:
                self.jobs[threading.get_ident()] = place
                return function()

            start(this, job, *args, **kwargs)

        self._put(cache, "start_thread_soon", start_thread_soon)

    def _watch_runs(self) -> None:
        """Add an instrument to every run, however `trio.run` is called; Trio has no public API for this."""
        module = getattr(core, "_run", None)
        setup = getattr(module, "setup_runner", None)
        if setup is None:
            return

        def setup_runner(clock: Any, instruments: Any, *args: Any, **kwargs: Any) -> Any:
            run = Run(self.run_ended)
            self.runs.add(run)
            return setup(clock, [*instruments, run], *args, **kwargs)

        self._put(module, "setup_runner", setup_runner)

    # Notes on created objects

    def _opened(self, made: Any, place: Place) -> None:
        if hasattr(made, "fileno"):
            made = made.fileno()
        for number in made if isinstance(made, tuple) else (made,):
            self.descriptors[number] = place

    def _forked(self, made: Any, place: Place) -> None:
        pid = made[0] if isinstance(made, tuple) else made
        if pid:  # 0 in the child
            self.processes[pid] = place, "a copy of this process"

    def _started(self, made: Any, place: Place) -> None:
        args = made.args
        words = [args] if isinstance(args, str | bytes | os.PathLike) else args
        self.processes[made.pid] = place, " ".join(map(os.fsdecode, words))

    def _made(self, made: Session, place: Place) -> None:
        try:
            task = trio.lowlevel.current_task()
        except RuntimeError:
            task = None
        self.sessions[made] = place, task
