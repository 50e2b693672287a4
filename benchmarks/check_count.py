"""Counts what Python code does, exactly: bytecodes executed and calls into C, by function and by package.

For `check.py`. Imports nothing that an interpreter has not loaded anyway, because a program's imports are counted too.
Tracing costs fifty times the work and changes none of these numbers.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType
    from typing import Any

__all__ = ["BYTECODES", "CALLS", "OURS", "Counter", "place_of"]

OURS = "trimcp"
BYTECODES = "bytecodes"
CALLS = "calls into C"

_HERE = os.path.dirname(os.path.abspath(__file__)) + "/"
_STDLIB = os.path.dirname(os.__file__) + "/"
_INSTALLED = ("/site-packages/", "/dist-packages/")


def place_of(file: str) -> tuple[str, str] | None:
    """Return the package a code object's file belongs to, and a name for the file that is the same on every machine.

    None for what is not counted: the driver's own code and the import system, whose work depends on where things are
    installed. Methods written by attrs and cattrs belong to the class they are for.
    """
    if file.startswith("<"):
        return None if "importlib" in file else (_written_for(file), file)
    if file.startswith(_HERE):
        return None
    for folder in _INSTALLED:
        if folder in file:
            name = file.rpartition(folder)[2]
            return name.partition("/")[0].removesuffix(".py"), name
    if file.startswith(_STDLIB):
        return "stdlib", file.removeprefix(_STDLIB)
    at = file.rfind(f"/{OURS}/")
    return ("other", file.rpartition("/")[2]) if at < 0 else (OURS, file[at + 1 :])


def _written_for(file: str) -> str:
    """Return whose class a method was written for: `<attrs generated methods trimcp.channel.Incoming>`."""
    if " generated " not in file:
        return "stdlib"
    return file.rpartition(" ")[2].partition(".")[0]


class Counter:
    """Counts one thing while it is on: `counter.start()`, the work, `counter.stop()`.

    Frames that are entered or resumed meanwhile are counted; the one that starts it is not. Python 3.13 begins with the
    second time that a function is entered, so there it knows little of imports.

    Args:
        what: BYTECODES or CALLS.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._counts: dict[CodeType, list[int]] = {}
        self._tracers: dict[CodeType, Callable[..., Any] | None] = {}

    def start(self) -> None:
        """Count from here on, in this thread."""
        if self._what == CALLS:
            sys.setprofile(self._on_profile)
        else:
            sys._getframe().f_trace_opcodes = True  # 3.12 looks for a frame that wants it when tracing is set
            sys.settrace(self._on_call)

    def stop(self) -> None:
        """Count no more."""
        if self._what == CALLS:
            sys.setprofile(None)
        else:
            sys.settrace(None)

    def functions(self) -> dict[str, dict[str, int]]:
        """Return the counts by package, then by `file:function`."""
        found: dict[str, dict[str, int]] = {}
        for code, (count,) in self._counts.items():
            place = place_of(code.co_filename)
            if place is not None and count:
                package, file = place
                functions = found.setdefault(package, {})
                name = f"{file}:{code.co_qualname}"
                functions[name] = functions.get(name, 0) + count
        return found

    def _on_call(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        code = frame.f_code
        if code not in self._tracers:
            self._tracers[code] = self._tracer(code)
        tracer = self._tracers[code]
        if tracer is not None:
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
        return tracer

    def _tracer(self, code: CodeType) -> Callable[..., Any] | None:
        if place_of(code.co_filename) is None:
            return None
        count = self._counts[code] = [0]

        def trace(frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
            if event == "opcode":
                count[0] += 1
            return trace

        return trace

    def _on_profile(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "c_call":
            count = self._counts.get(frame.f_code)
            if count is None:
                count = self._counts[frame.f_code] = [0]
            count[0] += 1
