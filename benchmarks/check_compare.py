"""Compares what calls cost now with what they cost before, and says it in words. No measuring, no files.

A *record* is what is kept of one cell: figures per operation, and by function where they come from, as plain JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, Final, TypeAlias

import attrs

__all__ = ["BOUND", "Change", "Record", "compare", "record_of", "table", "tell", "versions_changed"]

Record: TypeAlias = Mapping[str, Any]
"""`figures`: name to number per operation. `functions`: name to what counts towards it, by "package/file:function"."""

BOUND: Final = 0.1
"""The share by which a figure may grow."""

_BOUND_TEXT: Final = f"{BOUND * 100:.0f} %"

OURS: Final = "trimcp"
BYTECODES: Final = "bytecodes"
CALLS: Final = "calls into C"
PEAK: Final = "peak bytes"
GARBAGE: Final = "garbage objects"
KEPT: Final = "kept blocks"
MODULES: Final = "modules"

_RECORDED: Final = {BYTECODES: 0.004, CALLS: 0.006}  # functions below this share of a cell are not recorded
_SMALL_SHARE: Final = 0.03  # a package's growth counts from this share of the whole cell on
_SHOWN: Final = 10


@attrs.frozen
class Change:
    """A figure of a cell that is another now.

    Attributes:
        cell: the name of the cell.
        figure: the name of the figure.
        before, after: per operation.
        functions: what grew, most first: name and by how much.
        package: of whose code the figure tells, or None for everybody's.
    """

    cell: str
    figure: str
    before: float
    after: float
    functions: tuple[tuple[str, float], ...] = ()
    package: str | None = None

    @property
    def grew(self) -> bool:
        """Whether it is more than before."""
        return self.after > self.before

    def __str__(self) -> str:
        share = f"{(self.after / self.before - 1) * 100:+.1f} %" if self.before else "from nothing"
        per = "" if self.figure in (PEAK, MODULES) else " per operation"
        return f"{self.cell}: {self.figure}{per}: {self.before:,.1f} -> {self.after:,.1f} ({share})"


def record_of(count: int, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a cell.

    Args:
        count: how many operations were measured.
        measured: `functions`, by what was counted, package and function; `memory` with `peak` (of all operations
            together, as they may be under way at once), `garbage`, `kept` and `places`; perhaps `modules`.
    """
    figures: dict[str, float] = {}
    functions: dict[str, dict[str, float]] = {}
    for what in (BYTECODES, CALLS):
        packages = measured["functions"][what]
        each = {package: sum(found.values()) / count for package, found in packages.items()}
        total = sum(each.values())
        figures[what] = round(total, 2)
        for package, number in sorted(each.items()):
            if what == BYTECODES or package == OURS:
                figures[f"{what} in {package}"] = round(number, 2)
        functions[what] = {
            _named(package, name): round(number / count, 2)
            for package, found in sorted(packages.items())
            for name, number in sorted(found.items())
            if number / count >= _RECORDED[what] * total
        }
    memory = measured["memory"]
    figures[PEAK] = memory["peak"]
    figures[GARBAGE] = round(memory["garbage"] / count, 2)
    figures[KEPT] = round(max(0, memory["kept"]) / count, 2)
    functions[KEPT] = {place: round(blocks / count, 2) for place, blocks in memory["places"]}
    if "modules" in measured:
        figures[MODULES] = len(measured["modules"])
        functions[MODULES] = dict.fromkeys(measured["modules"], 1)
    return {"count": count, "figures": figures, "functions": functions}


def _named(package: str, name: str) -> str:
    return name if name.startswith(f"{package}/") else f"{package}/{name}"


def compare(cell: str, before: Record, after: Record) -> Iterator[Change]:
    """Yield the figures of a cell that grew or shrank by more than `BOUND`.

    The work of each package counts by itself, so that a little more of ours cannot hide behind much of Trio's.
    """
    old, new = before["figures"], after["figures"]
    for figure in sorted({*old, *new}):
        was, now = old.get(figure, 0), new.get(figure, 0)
        if abs(now - was) <= max(BOUND * was, _slack(figure, before)):
            continue
        what, _, package = figure.partition(" in ")
        grown = _grown(before, after, what, package) if now > was else ()
        yield Change(cell, figure, was, now, grown, package or None)


def _slack(figure: str, before: Record) -> float:
    """Return by how much a small figure may change, whatever share of it that is."""
    what, _, package = figure.partition(" in ")
    if what == BYTECODES and package and package != OURS:
        return _SMALL_SHARE * float(before["figures"][BYTECODES])
    few: float = 8 / before["count"]  # what caches and free lists take now and then
    few_more: dict[str, float] = {CALLS: 1.5, PEAK: 4096, GARBAGE: max(0.5, few), KEPT: max(0.25, few), MODULES: 2}
    return few_more.get(what, 0.25)


def _grown(before: Record, after: Record, what: str, package: str) -> tuple[tuple[str, float], ...]:
    """Return the functions in which the most of a growth is, and how much. Small ones were not recorded before."""
    old, new = before["functions"].get(what, {}), after["functions"].get(what, {})
    least = _RECORDED[what] * before["figures"][what] if what in _RECORDED else 0
    growth = {name: number - old.get(name, least) for name, number in new.items()}
    of_package = [item for item in growth.items() if item[0].startswith(f"{package}/") or not package]
    most = sorted(of_package, key=lambda item: -item[1])[:_SHOWN]
    return tuple((name, round(number, 2)) for name, number in most if number > 0.05)


def versions_changed(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """Return what is installed in another version than before: name to "0.35.0 -> 0.36.0"."""
    return {
        name: f"{before.get(name, 'none')} -> {after.get(name, 'none')}"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    }


# Words


def tell(changes: Iterable[Change], versions: Mapping[str, str], *, accept: str) -> Iterator[str]:
    """Yield lines that say what changed, where, and what to do about it.

    Args:
        changes: what `compare` found.
        versions: what `versions_changed` found.
        accept: the command that makes what is now the baseline.
    """
    changes = list(changes)
    grown = [change for change in changes if change.grew]
    shrunk = [change for change in changes if not change.grew]
    if versions:
        others = ", ".join(f"{name} {how}" for name, how in versions.items())
        yield f"Measured with other versions than the baseline: {others}."
    told = {change.cell for change in grown if change.package}
    for change in grown:
        yield ""
        yield f"GREW  {change}"
        for name, number in () if change.figure == BYTECODES and change.cell in told else change.functions:
            yield f"      {number:+12,.1f}  {name}"
        if theirs := _theirs(change, versions):
            yield f"      {theirs} is not the version of the baseline: this may be its doing and not ours."
    if shrunk:
        yield ""
        for cell, figures in groupby(shrunk, key=lambda change: change.cell):
            shares = (f"{change.figure} {change.after / change.before * 100 - 100:.0f} %" for change in figures)
            yield f"less  {cell}: {', '.join(shares)}"
    if grown:
        yield ""
        yield f"{_figures(len(grown))} grew by more than {_BOUND_TEXT}. Is it worth that? Then accept it: {accept}"
        yield "and commit benchmarks/baseline.json with a message that says why."
    elif shrunk:
        yield ""
        yield f"{_figures(len(shrunk))} shrank by more than {_BOUND_TEXT}. Accept the gain, to keep it: {accept}"


def _theirs(change: Change, versions: Mapping[str, str]) -> str:
    """Return the changed dependencies in which something grew."""
    where = {name.partition("/")[0] for name, _ in change.functions} | {change.package}
    modules = {"attrs": "attr", "trio-websocket": "trio_websocket", "python": "stdlib"}
    found = [name for name in versions if modules.get(name, name.replace("-", "_")) in where]
    return " and ".join(found)


def _figures(number: int) -> str:
    return f"{number} figure" + ("s" if number > 1 else "")


def table(records: Mapping[str, Record], baseline: Mapping[str, Record] | None) -> Iterator[str]:
    """Yield the lines of a table: what an operation of each cell costs, and how that compares with the baseline."""
    width = max(map(len, records), default=0)
    heads = ("trimcp", "", "elsewhere", "", "into C", "", "peak KiB", "", "garbage", "kept")
    yield f"{'':{width}}  " + " ".join(f"{head:>{9 if head else 7}}" for head in heads)
    for name, record in records.items():
        figures = record["figures"]
        old = (baseline or {}).get(name, {}).get("figures", {})
        ours = f"{BYTECODES} in {OURS}"
        numbers = [
            (figures[ours], old.get(ours)),
            (figures[BYTECODES] - figures[ours], old[BYTECODES] - old[ours] if old else None),
            (figures[CALLS], old.get(CALLS)),
            (figures[PEAK] / 1024, old[PEAK] / 1024 if old else None),
        ]
        cells = [f"{number:9,.1f} {_share(number, was)}" for number, was in numbers]
        yield f"{name:{width}}  " + " ".join(cells) + f" {figures[GARBAGE]:9,.1f} {figures[KEPT]:9,.1f}"
    yield "Per operation: bytecodes in trimcp and elsewhere, calls into C. The memory is a whole cell's at its worst."


def _share(number: float, before: float | None) -> str:
    if not before or abs(number / before - 1) < 0.0005:
        return " " * 7
    return f"{(number / before - 1) * 100:+5.1f} %"
