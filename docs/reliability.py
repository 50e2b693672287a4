"""Writes the table of docs/reliability.md, and all figures behind it, as `nox -s guarantees -- --page` measured them.

`python docs/reliability.py FIGURES` keeps those in docs/reliability/figures.json and writes both pages; without an
argument it writes them anew from what is kept. A test fails while the pages are not what the figures say.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, Final

_HERE: Final = Path(__file__).parent
PAGE: Final = _HERE / "reliability.md"
TESTS: Final = _HERE.parent / "tests" / "guarantees"
KEPT: Final = _HERE / "reliability" / "figures.json"
TABLES: Final = _HERE / "reliability" / "figures.md"

# What is promised, as short as it can be said; the page says the rest.
PROMISES: Final = {
    1: ("One reply", "10,000 of 10,000 pipelined requests, none wrong, doubled or crossed"),
    2: ("Duplicate ids", "refused at once; the call under way and its reply are untouched"),
    3: ("Message limits", "4 MiB into a server, 64 into a client; too large costs 8 MiB, and the session lives on"),
    4: ("Slow readers", "2 MiB each, others at most 50 ms later; a large result costs 3 times its size"),
    5: ("Pipelining without reading", "reading stops at 16 MiB a session, within the budget of 15; nothing is lost"),
    6: ("Work stops with its owner", "every clean-up within 100 ms; tasks, sockets and files as before"),
    7: ("Shutdown", "answers within 5 s, exit code 0; idle 0.5 s; input closed or parent dead 1 s"),
    8: ("Time and numbers", "head 10 s, body 30 s; idle sessions 30 min, 20 KiB, no task; all is capped, by shares"),
    9: ("Blocking tools", "an echo within 50 ms beside 200 blocked threads, or a process that computes"),
    10: ("Cross-origin", "no stranger's Origin on any bind, no stranger's Host on loopback: 403"),
    11: ("Ownership", "sessions, events, streams and sealed state are good for their owner alone; shares go by owner"),
    12: ("Hostile volume", "20,000 mutations: at most 2 MiB; at most 40 bytes for a call that is over"),
    13: ("Client", "bounded; 10,000 faults: 2 MiB; no schema hangs it; a child's death 1 s; a stubborn one's kin 5 s"),
    14: ("Quiet logs", "who leaves is one line at DEBUG; a crash is one ERROR, its reply says nothing"),
    15: ("All strangers together", "what peers make a server keep: 256 MiB, shared by principal, else by address"),
    16: ("No handler ends a server", "whatever it raises is its request's error; no other call is lost"),
    17: ("Agent tools", "all of the above; contexts are their owner's alone, 8 KiB idle; tools go with their provider"),
    18: ("Rights and logins", "a token, proof or login file of any shape lets nobody in; no login is lost; two pages"),
    19: ("Code we run for somebody", "a worker sends what its tool declared and nothing else; its output is bounded"),
    20: ("Many processes as one", "any is killed: no event lost or doubled, no session; a restart fails no call"),
}  # fmt: skip

_PART: Final = re.compile(r"(<!-- made: (\w+) -->\n).*?(\n<!-- end -->)", re.DOTALL)

Figure = dict[str, Any]


def said(value: float) -> str:
    """A figure as people read it."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def share(figure: Figure) -> float:
    """How much of its bound a figure takes."""
    value, bound = figure["value"], figure["bound"]
    if bound is None:
        return -1.0
    return value / bound if bound else float("inf") if value > 0 else 0.0


def with_unit(value: float, unit: str) -> str:
    return f"{said(value)} {unit}".rstrip()


def kinds(figures: list[Figure]) -> list[list[Figure]]:
    """The figures by what was measured, those nearest to their bound first."""
    by_kind = sorted(figures, key=lambda each: each["what"])
    groups = [sorted(group, key=share, reverse=True) for _, group in groupby(by_kind, key=lambda each: each["what"])]
    return sorted(groups, key=lambda group: -share(group[0]))


def verdict(figures: list[Figure]) -> str:
    over = [each for each in figures if share(each) > 1]
    return "met" if not over else f"**{len(over)} of {len(figures)} figures over**"


def summary(figures: list[Figure]) -> str:
    """The table of all promises."""
    lines = [
        "| | promise | promised | measured, nearest to its bound | | tested in |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for number, (name, promised) in PROMISES.items():
        mine = [each for each in figures if each["promise"] == number]
        measured, how = "not in this run", ""
        if mine:
            name = f"[{name}](reliability/figures.md#figures-{number})"
            nearest = kinds(mine)[0][0]
            measured = f"{nearest['what']}: {with_unit(nearest['value'], nearest['unit'])}"
            measured += "" if nearest["bound"] is None else f" of {with_unit(nearest['bound'], nearest['unit'])}"
            how = verdict(mine)
        files = ", ".join(f"`{file.name}`" for file in sorted(TESTS.glob(f"test_{number:02}_*.py")))
        lines.append(f"| {number} | {name} | {promised} | {measured} | {how} | {files} |")
    return "\n".join(lines)


def details(figures: list[Figure]) -> str:
    """A table for each promise, of the worst of each kind."""
    parts = []
    for number, (name, _) in PROMISES.items():
        mine = [each for each in figures if each["promise"] == number]
        if not mine:
            continue
        parts += [f"## {number}. {name} {{: #figures-{number}}}", ""]
        parts += ["| what | at worst | at most | where that was | places |", "| --- | --- | --- | --- | --- |"]
        for group in kinds(mine):
            worst = max(group, key=lambda each: (share(each), each["value"]))
            bound = "" if worst["bound"] is None else with_unit(worst["bound"], worst["unit"])
            row = [worst["what"], with_unit(worst["value"], worst["unit"]), bound, worst["on"], str(len(group))]
            parts.append(f"| {' | '.join(row)} |")
        parts.append("")
    return "\n".join(parts).rstrip()


def circumstances(kept: dict[str, Any]) -> str:
    figures = kept["figures"]
    over = sum(share(each) > 1 for each in figures)
    met = "all of them within their bounds" if not over else f"{over} of them over their bounds"
    return (
        f"The figures are of {kept['when']}: {len(figures):,} of them, {met}. The machine had {kept['processors']} "
        f"processors and ran {kept['system']} with Python {kept['python']}; at the end its load "
        f"average was {kept['load']}."
    )


def page(text: str, kept: dict[str, Any]) -> str:
    """Return the page with its tables drawn from these figures."""
    made = {"circumstances": circumstances(kept), "summary": summary(kept["figures"])}
    return _PART.sub(lambda part: f"{part[1]}\n{made[part[2]]}\n{part[3]}", text)


def tables(kept: dict[str, Any]) -> str:
    """Return the page of all figures."""
    return (
        "# Reliability: all figures\n\nThe worst of each kind of figure behind [the promises](../reliability.md), those"
        " nearest to their bounds first.\n*Places* counts transports, hosts, eras and variants."
        f"\n\n{circumstances(kept)}\n\n{details(kept['figures'])}\n"
    )


def main(source: Path | None) -> None:
    """Keep new figures, if there are any, and write the page."""
    if source is not None:
        kept = {
            "when": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            "system": platform.system(),
            "python": platform.python_version(),
            "processors": os.cpu_count(),
            "load": f"{os.getloadavg()[0]:.1f}",
            "figures": json.loads(source.read_text("utf-8")),
        }
        KEPT.parent.mkdir(exist_ok=True)
        KEPT.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    kept = json.loads(KEPT.read_text("utf-8"))
    PAGE.write_text(page(PAGE.read_text("utf-8"), kept), "utf-8")
    TABLES.write_text(tables(kept), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
