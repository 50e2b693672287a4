"""The course of a load that changes: levels, and the times between which it goes from one to the next.

Sans-I/O. A level is calls per second, or a number of sessions.
"""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Final

import attrs

from trimcp.errors import LocalError

_STAGE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)(ms|s|m|h)?:(\d+(?:\.\d+)?)\s*")
_UNITS: Final = {None: 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_EXAMPLE: Final = "0:10,30s:200,2m:200,10s:0"


@attrs.frozen
class Stages:
    """Levels over time, in straight lines from one to the next."""

    points: tuple[tuple[float, float], ...]  # (seconds from the beginning, level), the times ascending

    @staticmethod
    def read(text: str) -> Stages:
        """Return the stages of a text such as `0:10,30s:200,2m:200,10s:0`: times to get to a level, and the levels.

        The level before the first is 0; a time of 0 is a jump. Raises LocalError: it is not valid; the text says why.
        """
        at, points = 0.0, [(0.0, 0.0)]
        for part in text.split(","):
            found = _STAGE.fullmatch(part)
            if found is None:
                raise LocalError(f"{part.strip()!r:.60} is no stage; write them as in {_EXAMPLE}")
            at += float(found[1]) * _UNITS[found[2]]
            points.append((at, float(found[3])))
        made = Stages(tuple(points))
        if not made.total(at):
            raise LocalError("the stages take no time, or all their levels are 0")
        return made

    @staticmethod
    def constant(level: float) -> Stages:
        """Return one level without end."""
        return Stages(((0.0, level), (math.inf, level)))

    @property
    def seconds(self) -> float:
        """How long all stages take."""
        return self.points[-1][0]

    def level(self, seconds: float) -> float:
        """Return the level at a time; at a jump, the later one; after the end, 0."""
        for (start, before), (end, after) in pairwise(self.points):
            if start <= seconds < end:
                return before if end == math.inf else before + (after - before) * (seconds - start) / (end - start)
        return 0.0

    def total(self, seconds: float) -> float:
        """Return the sum of the levels until a time: how many calls are to begin until then."""
        whole = 0.0
        for (start, before), (end, after) in pairwise(self.points):
            if seconds <= start or end == start:
                continue
            part = min(seconds, end) - start
            grown = 0.0 if end == math.inf else (after - before) * part / (end - start)
            whole += (before + grown / 2) * part
        return whole

    def after(self, total: float) -> float:
        """Return the time at which `total` is reached, or infinity if it never is: when this call has to begin."""
        left = total
        for (start, before), (end, after) in pairwise(self.points):
            if end == math.inf:
                return start + left / before
            length = end - start
            area = (before + after) / 2 * length
            if not area or left > area:
                left -= area
                continue
            slope = (after - before) / length
            # left = before * t + slope / 2 * t**2, solved so that a slope of zero is no special case
            return start + min(2 * left / (before + math.sqrt(max(before**2 + 2 * slope * left, 0.0)) or 1.0), length)
        return math.inf
