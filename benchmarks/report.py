"""Makes docs/performance.md, its tables and plots out of the results of a run, and the same tables for a terminal.

    python benchmarks/report.py [RESULTS.json]

No run is needed for that, so a better sentence or plot does not cost half an hour. The words stand in `page.md`
and `tables.md`.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from bars import NOT_THERE, Verdict, verdicts
from cells import CELLS, SECTIONS, Cell, Figure, Section
from names import BEFORE, FLOOR, HYPERCORN, MCP, ONLY_THERE, ORDER, OURS, TYPESCRIPT
from results import BUSY, Results, Spread, paired_ratio

__all__ = ["full_tables", "number", "page", "tables", "write"]

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
RESULTS = "results.json"
MARK = "†"
NOT_PEERS = (OURS, BEFORE, HYPERCORN, FLOOR)
# What the page begins with: what is told, and where its figure and those of the others are.
IN_SHORT = (
    ("A call over standard input and output costs the server", "µs of CPU", "stdio-2025", "cpu", (MCP, TYPESCRIPT)),
    ("Over Streamable HTTP it costs", "µs", "http-2025-json", "cpu", (MCP, TYPESCRIPT)),
    ("A progress notification there costs", "µs", "progress-http-2025", "cpu", (MCP, TYPESCRIPT)),
    ("A session with an open stream takes", "KiB of memory", "sessions-1000", "memory", (MCP, TYPESCRIPT)),
    ("A list of 1,000 tools, asked for again, costs", "µs of CPU", "list-1000", "cpu", (MCP, TYPESCRIPT)),
)


def number(value: float) -> str:
    """Return a value with three digits that mean something, or all that stand before the point."""
    if value == 0:
        return "0"
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 else 3
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def spread(found: Spread) -> str:
    """Return a median and its range."""
    low, middle, high = number(found.low), number(found.median), number(found.high)
    return middle if low == high else f"{middle} ({low} to {high})"


def ratio(found: Spread) -> str:
    """Return a ratio and its range; of a large one the decimals say nothing, and of a small one two say too little."""
    low, middle, high = (
        f"{one:.3f}" if one < 0.1 else f"{one:.2f}" if one < 10 else f"{one:,.0f}"
        for one in (found.low, found.median, found.high)
    )
    return middle if low == high else f"{middle} ({low} to {high})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


# What was promised


def in_short(results: Results) -> str:
    """Return a sentence for each figure that the page begins with."""
    sentences = []
    for what, unit, cell, figure, peers in IN_SHORT:
        ours = results.values(cell, figure, OURS)
        if not ours:
            continue
        others = [
            f"{ratio(Spread.of([found.median]))} times as much with {peer}"
            for peer in peers
            if (found := paired_ratio(results.values(cell, figure, peer), ours)) is not None
        ]
        sentences.append(f"- {what} {number(Spread.of(ours).median)} {unit}, {' and '.join(others)}.")
    return "\n".join(sentences)


def bars_table(results: Results) -> str:
    """Return every bar with what became of it; of a part of a run, those that it is about."""
    whole = results.made.get("whole", False)
    rows = [_bar_row(verdict) for verdict in verdicts(results) if whole or verdict.reason != NOT_THERE]
    return table(["what", "against", "ratio", "bar", ""], rows)


def _bar_row(verdict: Verdict) -> list[str]:
    bar = verdict.bar
    limit = f"{'at least' if bar.more else 'at most'} {f'{bar.limit:g}' if bar.alone else _limit(bar.limit)}"
    if verdict.ratio is None:
        return [bar.what, "", "", limit, f"not measured: {_plain(verdict.reason)}"]
    mark = f" {MARK}" if verdict.saturated else ""
    said = f"**missed** by {-verdict.spare:.0%}" if verdict.said == "missed" else f"met, {verdict.spare:.0%} to spare"
    # The range may reach over the bar while the median does not.
    said += "" if verdict.steady else ", not in every round"
    return [bar.what, verdict.against or "itself", ratio(verdict.ratio) + mark, limit, said]


def _limit(limit: float) -> str:
    return f"1/{round(1 / limit)}" if limit < 0.6 and abs(1 / limit - round(1 / limit)) < 1e-9 else f"{limit:g}"


def summary(results: Results) -> str:
    """Return how many bars were met."""
    said = [verdict.said for verdict in verdicts(results)]
    counts = [f"{said.count(kind)} {kind}" for kind in ("met", "missed", "not measured") if kind in said]
    return f"{len(said)} bars: {', '.join(counts)}"


# What was found


def section_text(section: Section, results: Results, *, plots: bool) -> str:
    """Return a section's tables, one for each figure, with its plots; nothing if nothing was measured."""
    cells = [cell for cell in CELLS if cell.section == section.name]
    parts = []
    for figure in section.figures:
        text = figure_table(figure, cells, results)
        if text and plots and figure.name in section.plots:
            parts.append(_plot(*section.plots[figure.name]))
        parts += [text] * bool(text)
    return "\n\n".join([f"## {section.title}", section.text, *parts]) if parts else ""


def _plot(name: str, shown: str, folder: str = "") -> str:
    return f"![{shown}]({folder}{name}.svg)\n[as PNG]({folder}{name}.png)"


def plots(results: Results) -> str:
    """Return the plots of all that was measured, but for those that the page begins with."""
    found = []
    for section in SECTIONS:
        if section.name in ("progress", "sessions"):
            continue
        cells = [cell for cell in CELLS if cell.section == section.name]
        there = [figure for figure in section.figures if figure.name in section.plots]
        found += [
            f"### {section.title}\n\n" * (figure is there[0]) + _plot(*section.plots[figure.name], "performance/")
            for figure in there
            if figure_table(figure, cells, results)
        ]
    return "\n\n".join(found)


def figure_table(figure: Figure, cells: Sequence[Cell], results: Results) -> str:
    """Return one figure of all cells, with a column for each implementation that has any."""
    there = {peer for cell in cells for peer in results.peers(cell.name, figure.name)}
    tried = {one.peer for one in results.failures if one.cell in {cell.name for cell in cells}} if there else set()
    peers = [peer for peer in (*ORDER, *ONLY_THERE) if peer in there | tried]
    if not there:
        return ""
    compared = figure.compared and OURS in peers and any(peer not in NOT_PEERS for peer in peers)
    rows = []
    for cell in cells:
        values = [_value(cell, figure, peer, results) for peer in peers]
        if any(values):
            rows.append([cell.title, *values, *([_against_best(cell, figure, results)] if compared else [])])
    head = [figure.title, *peers, *([f"{OURS} / best peer"] if compared else [])]
    return table(head, rows)


def _value(cell: Cell, figure: Figure, peer: str, results: Results) -> str:
    values = results.values(cell.name, figure.name, peer)
    if values:
        mark = f" {MARK}" if results.saturated(cell.name, peer) else ""
        return spread(Spread.of(values)) + mark
    return "failed" if any((one.cell, one.peer) == (cell.name, peer) for one in results.failures) else ""


def _against_best(cell: Cell, figure: Figure, results: Results) -> str:
    peers = [peer for peer in results.peers(cell.name, figure.name) if peer not in NOT_PEERS]
    best = results.best(cell.name, figure.name, peers, more=figure.more)
    if best is None:
        return ""
    found = paired_ratio(results.values(cell.name, figure.name, OURS), results.values(cell.name, figure.name, best))
    return ratio(found) if found is not None else ""


def failures(results: Results) -> str:
    """Return what did not work, and why."""
    if not results.failures:
        return "Nothing: every implementation did everything it was asked to do."
    rows = [[one.cell, one.peer, _plain(one.reason)] for one in results.failures]
    return table(["cell", "who", "why"], rows)


def _plain(text: str) -> str:
    """Return text that cannot break a table or be taken for markup."""
    line = " ".join(text.split())
    for sign in "\\`*_[]<>|{}":
        line = line.replace(sign, f"\\{sign}" if sign not in "<>" else {"<": "&lt;", ">": "&gt;"}[sign])
    return line


# How far to believe it


def noise(results: Results) -> str:
    """Return how much rounds differed, and what a piece of fixed work took during the run."""
    ranges = [one.spread.noise for one in results.series if one.figure == "cpu" and len(one.values) > 1]
    lines = []
    if len(ranges) > 1:
        tenths = statistics.quantiles(ranges, n=10)
        lines.append(
            f"CPU time of the same work differed between rounds by {statistics.median(ranges):.0%} of its median"
            f" or more in half of the {len(ranges)} series, and by more than {tenths[-1]:.0%} in a tenth of them."
        )
    pulse = results.made.get("pulse_ms", [])
    if pulse:
        found = Spread.of(pulse)
        lines.append(
            f"A fixed piece of work, repeated before each cell, took {number(found.median)} ms of CPU,"
            f" {number(found.low)} at best and {number(found.high)} at worst."
        )
    loads = results.made.get("load_average", [])
    if loads:
        lines.append(
            f"The load average was {number(loads[0])} before the run and {number(loads[-1])} after it (the run itself"
            " is good for 1 to 2)."
        )
    if "stolen" in results.made:
        lines.append(f"The host took {results.made['stolen']:.1%} of the time of this machine's cores for others.")
    return " ".join(lines)


def generator(results: Results) -> str:
    """Return where the load generator was at its limit."""
    marked: dict[str, list[str]] = {}
    for one in results.series:
        if one.figure == BUSY and results.saturated(one.cell, one.peer):
            marked.setdefault(one.peer, []).append(one.cell)
    if not marked:
        return "That was nowhere the case in this run."
    told = [f"{peer} ({', '.join(marked[peer])})" for peer in ORDER if peer in marked]
    return f"In this run that was so for {'; '.join(told)}."


def facts(results: Results) -> str:
    """Return machine and versions."""
    rows = [[name, _plain(str(value))] for name, value in {**results.machine, **results.versions}.items()]
    return table(["", ""], rows)


# All of it


def tables(results: Results) -> str:
    """Return all tables, as they are printed at the end of a run."""
    parts = [section_text(section, results, plots=False) for section in SECTIONS]
    ends = ["## What failed", failures(results)] if results.failures else []
    last = ["## Noise", noise(results), "## Bars", bars_table(results), summary(results)]
    return "\n\n".join(part for part in (*parts, *ends, *last) if part)


def page(results: Results) -> str:
    """Return docs/performance.md."""
    made = results.made
    minutes, whole = made.get("seconds", 0) / 60, made.get("whole", False)
    return _filled(
        "page.md",
        when=str(made.get("date", "")),
        command=str(made.get("command", "")),
        minutes=f"{minutes:.0f}",
        # It should not be taken for more than it is.
        parts=parts(results),
        part=" **Only a part was measured, or for a short time: these figures are preliminary.**" * (not whole),
        sentences=in_short(results),
        first=_plot("in-short", "CPU time per call, beside the other implementations", "performance/"),
        second=_plot("progress", "CPU time per progress notification", "performance/"),
        third=_plot("sessions", "Memory of a session with an open stream", "performance/"),
        bars=bars_table(results),
        picture=_plot("bars", "How far from its bar each figure is", "performance/"),
        summary=summary(results),
        plots=plots(results),
    )


def parts(results: Results) -> str:
    """Return what was measured in runs of its own, a paragraph for each."""
    lines = []
    for part in results.made.get("parts", []):
        rows = ", ".join(f"`{name}`" for name in part["cells"])
        loads = [number(one) for one in part.get("load_average", [])]
        load = f", at a load average of {loads[0]} before and {loads[-1]} after" if loads else ""
        lines.append(f"\n\nOf a run of their own, `{part['command']}` on {part['date']}{load}: {rows}.")
    return "".join(lines)


def full_tables(results: Results) -> str:
    """Return docs/performance/tables.md."""
    return _filled(
        "tables.md",
        sections="\n\n".join(filter(None, (section_text(one, results, plots=True) for one in SECTIONS))),
        failures=failures(results),
        noise=noise(results),
        generator=generator(results),
        facts=facts(results),
    )


def _filled(template: str, **told: str) -> str:
    text = (HERE / template).read_text("utf-8")
    for name, value in told.items():
        text = text.replace(f"<!-- {name} -->", value)
    return text.replace("\n\n\n", "\n\n")


def write(results: Results, folder: Path) -> list[Path]:
    """Write the page, and beside it a folder with the tables, the results and the plots; return what was written."""
    from plots import draw_all

    beside = folder / "performance"
    beside.mkdir(parents=True, exist_ok=True)
    files = [folder / "performance.md", beside / "tables.md", beside / RESULTS]
    for file, text in zip(files, (page(results), full_tables(results), results.to_json()), strict=True):
        file.write_text(text, "utf-8")
    return [*files, *draw_all(results, beside)]


def main() -> None:
    """Make the page again."""
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "performance" / RESULTS
    for written in write(Results.read(file), DOCS):
        print(written)


if __name__ == "__main__":
    main()
