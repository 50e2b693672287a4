"""Draws what a run has found: one plain style, labelled units, and everywhere the same colour for an implementation.

Bars begin at zero on linear axes, since their lengths are what is compared; where values span powers of ten there are
lines and dots on logarithmic axes instead. Thin lines are the range over the rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from bars import Bar, verdicts
from cells import CELLS, WINDOWS, Cell
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from names import (
    BEFORE,
    FASTMCP,
    FLOOR,
    GO_SDK,
    GRPC_GO,
    GRPCIO,
    HTTP1,
    HYPERCORN,
    LOW_LEVEL,
    MCP,
    MCP_1,
    ONLY_THERE,
    ORDER,
    OURS,
    RMCP,
    TYPESCRIPT,
)
from PIL import Image
from results import Results, Spread

__all__ = ["COLOURS", "draw_all"]

COLOURS = {
    OURS: "#3949ab",
    HYPERCORN: "#9fa8da",
    MCP: "#d9772b",
    LOW_LEVEL: "#eeb583",
    FASTMCP: "#6a994e",
    MCP_1: "#a4664a",
    TYPESCRIPT: "#2a9d9d",
    GO_SDK: "#00758f",
    RMCP: "#7f4f24",
    FLOOR: "#b0b0b0",
    GRPCIO: "#8e6bbf",
    GRPC_GO: "#5dade2",
    HTTP1: "#c5cae9",
}
# An earlier trimcp is in the tables, for whoever works on it.
SHOWN = tuple(peer for peer in (*ORDER, *ONLY_THERE) if peer != BEFORE)
IN_SHORT = ("stdio-2025", "http-2025-json")
WIDTH = 10.0
MOST = 10.0
STYLE = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 8.8,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#333333",
    "axes.axisbelow": True,
    "xtick.color": "#555555",
    "ytick.color": "#333333",
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "trimcp",
    "figure.facecolor": "white",
}


def draw_all(results: Results, folder: Path) -> list[Path]:
    """Draw each plot there are values for, as SVG and PNG; return the files."""
    written = []
    with plt.rc_context(STYLE):
        for name, draw in DRAWINGS.items():
            figure = draw(results)
            if figure is None:
                continue
            for suffix in ("svg", "png"):
                file = folder / f"{name}.{suffix}"
                # No date: the same results make the same file.
                metadata = {"Date": None} if suffix == "svg" else {"Software": None}
                figure.savefig(file, dpi=110, metadata=metadata)
                written.append(file)
            with Image.open(file) as image:
                # There are few colours in it, and the files are kept in the repository.
                small = image.convert("RGB").quantize(64)
            small.save(file, optimize=True)
            plt.close(figure)
    return written


def _short(value: float) -> str:
    """Return a number for an axis or a bar's end."""
    if value >= 10_000:
        return f"{value / 1000:,.0f}k"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _title(cell: Cell) -> str:
    return _plainly(cell.title).replace(" reply", "").replace("server of the TypeScript SDK", "TypeScript server")


def _plainly(text: str) -> str:
    return text.replace("Streamable HTTP", "HTTP").replace("-25 session", "-25")


def _panels(count: int, columns: int, heights: Sequence[float]) -> tuple[Any, list[Any]]:
    """Return a figure with so many panels and no empty ones, the rows as high as they say, in inches."""
    rows = -(-count // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(WIDTH, sum(heights)), layout="constrained", squeeze=False, height_ratios=heights
    )
    figure.get_layout_engine().set(hspace=0.06, wspace=0.04)
    flat = list(axes.flat)
    for spare in flat[count:]:
        spare.set_visible(False)
    return figure, flat


def _legend(figure: Any, peers: Sequence[str]) -> None:
    marks = [plt.Line2D([], [], color=COLOURS[peer], marker="o", linewidth=2, label=peer) for peer in peers]
    figure.legend(handles=marks, loc="outside lower center", ncols=min(len(marks), 5))


# Bars


def _bars(axes: Any, cell: Cell, figure: str, room: int, results: Results) -> None:
    peers = [peer for peer in SHOWN if results.values(cell.name, figure, peer)]
    spreads = [Spread.of(results.values(cell.name, figure, peer)) for peer in peers]
    most = max(one.high for one in spreads)
    for place, (peer, found) in enumerate(zip(peers, spreads, strict=True)):
        axes.barh(place, found.median, color=COLOURS[peer], height=0.72)
        axes.plot([found.low, found.high], [place, place], color="#222222", linewidth=0.9)
        strong = "bold" if peer == OURS else "normal"
        axes.text(found.high + most * 0.02, place, _short(found.median), va="center", fontsize=8.5, fontweight=strong)
    axes.set_yticks(range(len(peers)), peers)
    for label in axes.get_yticklabels():
        label.set_fontweight("bold" if label.get_text() == OURS else "normal")
    axes.set_ylim(room - 0.5, -0.5)  # the first on top, and as much room for each as in the panel beside it
    axes.set_xlim(0, most * 1.17)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value) if value else "0"))
    axes.locator_params(axis="x", nbins=4)
    axes.grid(axis="x")
    axes.set_title(_title(cell))


def _bar_panels(section: str, figure: str, label: str, *, columns: int) -> Callable[[Results], Any]:
    def draw(results: Results) -> Any:
        # Where nobody else takes part there is nothing to see.
        there = [one for one in CELLS if one.section == section and len(one.peers) > 1]
        cells = [one for one in there if results.peers(one.name, figure)]
        if not cells:
            return None
        counts = [sum(peer in SHOWN for peer in results.peers(one.name, figure)) for one in cells]
        rooms = [max(counts[start : start + columns]) for start in range(0, len(cells), columns)]
        drawing, panels = _panels(len(cells), columns, [0.75 + 0.22 * room for room in rooms])
        for place, (axes, cell) in enumerate(zip(panels, cells, strict=False)):
            _bars(axes, cell, figure, rooms[place // columns], results)
            if place + columns >= len(cells):
                axes.set_xlabel(label)
        return drawing

    return draw


def _in_short(results: Results) -> Any:
    """One call, on the two ways that everybody offers."""
    cells = [one for one in CELLS if one.name in IN_SHORT and results.values(one.name, "cpu", OURS)]
    if not cells:
        return None
    drawing, panels = _panels(len(cells), len(cells), [2.7])
    room = max(sum(peer in SHOWN for peer in results.peers(one.name, "cpu")) for one in cells)
    for axes, cell in zip(panels, cells, strict=True):
        _bars(axes, cell, "cpu", room, results)
        axes.set_xlabel("CPU µs of the server per call")
    return drawing


def _workers(results: Results) -> Any:
    rates = {
        cell.title: Spread.of(values)
        for cell in CELLS
        if cell.section == "workers" and (values := results.values(cell.name, "rate", OURS))
    }
    if len(rates) < 2:
        return None
    figure, (axes,) = _panels(1, 1, [0.9 + 0.3 * len(rates)])
    first = next(iter(rates.values())).median
    for place, (_, found) in enumerate(rates.items()):
        axes.barh(place, found.median, color=COLOURS[OURS], height=0.62)
        axes.plot([found.low, found.high], [place, place], color="#222222", linewidth=0.9)
        text = f"{_short(found.median)}, {found.median / first:.2f} of one" if place else _short(found.median)
        axes.text(found.high + first * 0.03, place, text, va="center", fontsize=8.5)
    axes.axvline(2 * first, color="#888888", linewidth=0.9, linestyle=":")
    axes.text(2 * first, -0.62, "twice as many", ha="center", fontsize=8, color="#555555")
    axes.set_yticks(range(len(rates)), list(rates))
    axes.set_ylim(len(rates) - 0.5, -0.5)
    axes.set_xlim(0, max(2 * first, *(found.high for found in rates.values())) * 1.17)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value) if value else "0"))
    axes.grid(axis="x")
    axes.set_xlabel("calls per second, the load on the same cores")
    return figure


def _bars_kept(results: Results) -> Any:
    """How many times better than its bar each figure is: to the left of the line it is missed."""
    known = [one for one in verdicts(results) if one.ratio is not None]
    if not known:
        return None
    figure, (axes,) = _panels(1, 1, [1.0 + 0.21 * len(known)])
    for place, one in enumerate(known):
        assert one.ratio is not None
        ends = [_times_better(one.bar, value) for value in (one.ratio.low, one.ratio.high)]
        middle = _times_better(one.bar, one.ratio.median)
        colour, mark = (COLOURS[OURS], "o") if one.said == "met" else ("#c0392b", "X")
        axes.plot(ends, [place, place], color=colour, linewidth=1.2)
        axes.plot(middle, place, color=colour, marker=mark, markersize=6)
    axes.axvline(1, color="#222222", linewidth=1)
    names = [f"{one.bar.what} ({one.against or 'itself'})" for one in known]
    axes.set_yticks(range(len(known)), [_plainly(name) for name in names], fontsize=8)
    axes.set_ylim(len(known) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="both")
    axes.set_xlabel(f"times better than the bar (left of the line: missed; {MOST:g} or more is at {MOST:g})")
    return figure


def _times_better(bar: Bar, value: float) -> float:
    if not value:
        return 1 / MOST if bar.more else MOST
    return min(value / bar.limit if bar.more else bar.limit / value, MOST)


# Lines


def _windows(results: Results) -> Any:
    roads = {
        "stdio": "stdio: calls on one pipe",
        "http": "HTTP, 2025-11-25, JSON: connections",
        "connections": "WebSocket: connections",
    }
    there = [road for road in roads if any(results.peers(f"window-{road}-{window}", "rate") for window in WINDOWS)]
    if not there:
        return None
    figure, panels = _panels(len(there), len(there), [3.9])
    seen: list[str] = []
    for axes, road in zip(panels, there, strict=True):
        for peer in SHOWN:
            found = {
                window: Spread.of(values)
                for window in WINDOWS
                if (values := results.values(f"window-{road}-{window}", "rate", peer))
            }
            if found:
                seen.append(peer)
                _line(axes, list(found), list(found.values()), peer)
        axes.set_xscale("log", base=2)
        axes.set_xticks(WINDOWS, [f"{window:,}" for window in WINDOWS])
        axes.xaxis.set_minor_locator(NullLocator())
        _logarithmic(axes)
        axes.set_xlabel("at a time")
        axes.set_title(roads[road])
    panels[0].set_ylabel("calls per second")
    _legend(figure, [peer for peer in SHOWN if peer in seen])
    return figure


def _latency(results: Results) -> Any:
    figures = {"p50": "p50", "p99": "p99", "p99.9": "p99.9"}
    cells = [one for one in CELLS if one.section == "calls" and results.peers(one.name, "p50")]
    if not cells:
        return None
    columns = 3
    figure, panels = _panels(len(cells), columns, [2.5] * -(-len(cells) // columns))
    seen: list[str] = []
    for place, (axes, cell) in enumerate(zip(panels, cells, strict=False)):
        for peer in SHOWN:
            values = [results.values(cell.name, name, peer) for name in figures]
            if all(values):
                seen.append(peer)
                _line(axes, [0, 1, 2], [Spread.of(one) for one in values], peer)
        axes.set_xticks([0, 1, 2], list(figures.values()))
        axes.set_xlim(-0.25, 2.25)
        _logarithmic(axes)
        axes.set_title(_title(cell))
        if place % columns == 0:
            axes.set_ylabel("milliseconds")
    _legend(figure, [peer for peer in SHOWN if peer in seen])
    return figure


def _line(axes: Any, places: Sequence[float], found: Sequence[Spread], peer: str) -> None:
    strong = peer == OURS
    colour, order = COLOURS[peer], 3 if strong else 2
    medians = [one.median for one in found]
    width = 2.2 if strong else 1.3
    axes.plot(places, medians, color=colour, marker="o", markersize=4.5, linewidth=width, zorder=order)
    axes.vlines(places, [one.low for one in found], [one.high for one in found], color=colour, linewidth=1)


def _logarithmic(axes: Any) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axes.grid(axis="y")


DRAWINGS: dict[str, Callable[[Results], Any]] = {
    "in-short": _in_short,
    "bars": _bars_kept,
    "client-cpu": _bar_panels("clients", "cpu", "CPU µs of the client per call", columns=2),
    "in-memory": _bar_panels("in memory", "rate", "calls per second of CPU", columns=2),
    "workers": _workers,
    "cpu-per-call": _bar_panels("calls", "cpu", "CPU µs of the server per call", columns=2),
    "windows": _windows,
    "latency": _latency,
    "progress": _bar_panels("progress", "cpu", "CPU µs per notification", columns=3),
    "sessions": _bar_panels("sessions", "memory", "KiB per session", columns=2),
}
