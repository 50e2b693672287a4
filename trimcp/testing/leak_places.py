"""Where something was made: the stack at that moment, taken cheaply and told as the lines a person would look at."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from collections.abc import Iterable
from itertools import takewhile
from types import FrameType
from typing import Final, TypeAlias

__all__ = ["Place", "here", "place_of", "told"]

Place: TypeAlias = tuple[tuple[str, int, str], ...]
"""File, line and function of each frame, innermost first."""

_DEEPEST: Final = 80
_SHOWN: Final = 3
_LOOP: Final = "unrolled_run"
_PATHS: Final = sysconfig.get_paths()
_MACHINERY: Final = (
    *(_PATHS[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,  # ours
    "<",
)
_PYTEST: Final = tuple(_PATHS[name] + os.sep + "_pytest" + os.sep for name in ("purelib", "platlib"))


def here(started: Place | None = None) -> Place:
    """Return the stack of who calls the function that calls this one.

    Args:
        started: where the task that this is in was started: told after the task's own frames, in place of Trio's loop.
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
    """Return frames as a place; `lines` where they differ from where the frames are now."""
    frames = list(frames)
    numbers = [frame.f_lineno for frame in frames] if lines is None else lines
    return tuple(
        (frame.f_code.co_filename, number, frame.f_code.co_qualname)
        for frame, number in zip(frames, numbers, strict=True)
    )


def told(place: Place, *, most: int = _SHOWN) -> list[str]:
    """Return the innermost lines of the user's own code; the innermost of all if there are none."""
    place = tuple(takewhile(lambda step: not step[0].startswith(_PYTEST), place))  # further out is whoever ran it
    own = [step for step in place if not step[0].startswith(_MACHINERY)]
    return [_line(*step) for step in own[:most] or place[:1]]


def _line(file: str, number: int, function: str) -> str:
    source = linecache.getline(file, number).strip()
    near = os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file
    function = function.rpartition("<locals>.")[2]
    return f"{near}:{number} in {function}" + (f": {source}" if source else "")
