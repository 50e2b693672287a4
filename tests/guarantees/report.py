"""What the promises came to in this run: each measured figure beside its bound, printed and kept for the docs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import attrs

__all__ = ["Figure", "figure", "figures", "table", "write"]


@attrs.frozen
class Figure:
    """One measured figure.

    Attributes:
        promise: the promise it belongs to, 1 to 18.
        what: what was measured.
        value: the figure, and `bound`, which it may not pass; None where there is nothing to compare it with.
        unit: of both.
        on: the transport, and what else tells this measurement from its kin.
    """

    promise: int
    what: str
    value: float
    bound: float | None
    unit: str
    on: str


figures: list[Figure] = []


def figure(promise: int, what: str, value: float, bound: float | None, unit: str, on: str) -> float:
    """Record a figure, print it exactly, and return it. Whether it is good enough is the test's own assertion."""
    figures.append(Figure(promise, what, value, bound, unit, on))
    against = "" if bound is None else f" (at most {bound:g})"
    print(f"promise {promise}: {what} on {on}: {value:g} {unit}{against}")
    return value


def table() -> list[str]:
    """Return the figures as lines of text, by promise."""
    lines = []
    for each in sorted(figures, key=lambda each: (each.promise, each.what, each.on)):
        bound = "" if each.bound is None else f"{each.bound:g}"
        lines.append(f"{each.promise:>3}  {each.what:<58} {each.on:<28} {each.value:>12.4g} {bound:>10} {each.unit}")
    return lines


def write() -> None:
    """Write the figures where TRIMCP_FIGURES says, if it does; behind those of the tests that did not run alone."""
    target = os.environ.get("TRIMCP_FIGURES", "")
    if target and figures:
        path = Path(target)
        kept = json.loads(path.read_text("utf-8")) if os.environ.get("TRIMCP_ALONE") == "only" and path.exists() else []
        kept += [attrs.asdict(each) for each in figures]
        path.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
