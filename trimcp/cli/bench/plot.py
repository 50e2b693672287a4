"""The plot of `trimcp bench --plot`: the distribution of latencies, and rate and latency over time."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from trimcp.bench.report import PERCENTILES, Histogram
from trimcp.cli.bench.table import Side, milliseconds, what_times_are
from trimcp.cli.exits import Failure
from trimcp.cli.text import theirs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.text import Text

_FORMATS: Final = (".svg", ".png")
_COLOURS: Final = ("#2b5c8a", "#c4622d")
_LEFT: Final = 0.1
_RIGHT: Final = 0.975
_WRONG: Final = "#b3261e"
_INK: Final = "#2f3437"
_FAINT: Final = "#8a9196"
_GRID: Final = "#e3e6e8"
_BARS: Final = 90
_LEAST_GAP: Final = 0.118  # of the axis' width, between the middles of two labels: eight of them fit
_GAP: Final = 0.02  # of the figure's width, between title and note
_LEAST_SECOND: Final = 0.25  # of the last one, to be drawn as a rate
_UNDATED: Final = {".svg": {"Date": None}, ".png": {"Software": None}}
# Any: newer versions of matplotlib type the names as literals, older ones do not.
_STYLE: Final[Any] = {
    "svg.fonttype": "none",  # text stays text: searchable, and readable by screen readers
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial", "sans-serif"],
    "font.size": 9,
    "text.parse_math": False,  # a $ in a command line begins no formula
    "text.color": _INK,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "legend.frameon": False,
}


def check_plot(file: str) -> None:
    """Check before the measurement that a plot can be drawn."""
    path = Path(file)
    if path.suffix.lower() not in _FORMATS:
        raise Failure(f"--plot draws {' or '.join(_FORMATS)} files; {file!r:.200} has another ending")
    if not path.absolute().parent.is_dir():
        raise Failure(f"--plot cannot write {file}: there is no folder {path.parent}")
    try:
        import matplotlib as _  # noqa: F401 - whether it is there
    except ModuleNotFoundError:
        raise Failure('--plot needs matplotlib, which is not installed: pip install "trimcp[plot]"') from None


def draw(file: str, title: str, curves: Sequence[Side], note: str = "") -> None:
    """Write a plot of one or two servers to a file, whose ending says the format.

    `note`: under which conditions, where the names of the curves do not say.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # what the font lacks is drawn as a box
        figure = Figure(figsize=(8.2, 6.0), layout=None)
        wide, left, right = _panels(figure)
        whole = _RIGHT - _LEFT
        told = figure.text(_RIGHT, 0.957, theirs(note, 90), fontsize=8, color=_FAINT, ha="right")
        room = whole - _fit(figure, told, whole / 2) - (_GAP if note else 0)
        _fit(figure, figure.text(_LEFT, 0.965, theirs(title, 90), fontsize=13, fontweight="bold"), room)
        for row, (curve, colour) in enumerate(zip(curves, _COLOURS, strict=False)):
            shade = colour if len(curves) > 1 else _FAINT
            named = figure.text(_LEFT, 0.92 - 0.033 * row, theirs(curve.name, 130), fontsize=9, color=shade)
            _fit(figure, named, whole)
        _draw_latencies(wide, curves)
        if len(curves) > 1:
            _draw_rounds(left, right, curves)
        else:
            _draw_course(left, right, curves[0])
        try:
            figure.savefig(file, dpi=160, facecolor="white", metadata=_UNDATED[Path(file).suffix.lower()])
        except OSError as error:
            raise Failure(f"cannot write {file}: {error.strerror}") from None


def _fit(figure: Figure, line: Text, width: float) -> float:
    """Make a line small enough for a width, a share of the figure's; return the width that it has then."""
    line.set_verticalalignment("top")
    needed = line.get_window_extent().width / figure.bbox.width
    if needed > width:
        line.set_fontsize(line.get_fontproperties().get_size_in_points() * width / needed)
    return min(needed, width)


def _panels(figure: Figure) -> tuple[Axes, Axes, Axes]:
    upper = figure.add_gridspec(1, 1, left=_LEFT, right=_RIGHT, bottom=0.53, top=0.795)
    lower = figure.add_gridspec(1, 2, left=_LEFT, right=_RIGHT, bottom=0.085, top=0.375, wspace=0.22)
    return figure.add_subplot(upper[0]), figure.add_subplot(lower[0]), figure.add_subplot(lower[1])


# How long calls took


def _draw_latencies(axes: Axes, curves: Sequence[Side]) -> None:
    histograms = [Histogram.merged(report.latency for report in curve.rounds) for curve in curves]
    edges, shares = Histogram.bars(histograms, _BARS)
    edges = [1e3 * edge for edge in edges]
    first = curves[0].rounds
    axes.set_xlabel(f"ms (logarithmic) {what_times_are(first[0].plan, len(first))}", fontsize=8)
    axes.set_ylabel("share of calls (%)")
    axes.grid(visible=False)
    if not edges:
        axes.text(0.5, 0.5, "no call was answered", transform=axes.transAxes, ha="center", color=_FAINT)
        return
    axes.set_xscale("log")
    axes.set_xlim(edges[0], edges[-1])
    _number_log(axes.xaxis)
    for heights, colour in zip(shares, _COLOURS, strict=False):
        axes.stairs(heights, edges, fill=True, color=colour, alpha=0.25, linewidth=0)
        axes.stairs(heights, edges, color=colour, linewidth=1.1)
    _mark(axes, curves)
    axes.set_ylim(bottom=0)


def _number_log(axis: Axis) -> None:
    """Write plain numbers along a logarithmic axis, also where it spans less than a power of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    steps = (1.0,) if high > 2_000 * low else (1.0, 2.0, 5.0) if high > 8 * low else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    axis.set_major_locator(LogLocator(subs=steps, numticks=20))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())


def _mark(axes: Axes, curves: Sequence[Side]) -> None:
    """Draw a line for each percentile, with its value above the axes.

    All labels are in one row, in the order of their lines, with leader lines below them, so that nothing crosses.
    """
    low, high = (math.log(limit) for limit in axes.get_xlim())
    marks = []
    for curve, colour in zip(curves, _COLOURS, strict=False):
        for each in PERCENTILES:
            values = [report.latency.percentile(each) for report in curve.rounds]
            known = [value for value in values if value is not None]
            if known:  # the median, as in the table
                marks.append((1e3 * median(known), f"p{each:g}", colour))
    marks.sort(key=lambda mark: mark[0])
    places = _apart([(math.log(value) - low) / (high - low) for value, _, _ in marks], _LEAST_GAP)
    for (value, name, colour), place in zip(marks, places, strict=True):
        axes.axvline(value, color=colour, linewidth=0.9, linestyle=(0, (4, 2)), alpha=0.8)
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "alpha": 0.6, "shrinkA": 1, "shrinkB": 0}
        axes.annotate(
            f"{name} {milliseconds(value / 1e3)}",
            xy=(value, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(place, 1.1),
            textcoords="axes fraction",
            ha="center",
            va="bottom",
            fontsize=7.5,
            color=colour,
            arrowprops={**line, "relpos": (0.5, 0.0)},
        )


def _apart(spots: Sequence[float], gap: float) -> list[float]:
    """Return positions of labels near `spots`: in the same order, between 0 and 1, at least `gap` apart."""
    places: list[float] = []
    for spot in spots:
        places.append(max(spot, places[-1] + gap if places else gap / 2))
    limit = 1 - gap / 2
    for index in reversed(range(len(places))):
        places[index] = min(places[index], limit)
        limit = places[index] - gap
    return places


# Over time


def _draw_course(rates: Axes, times: Axes, curve: Side) -> None:
    """Draw one measurement second by second."""
    from matplotlib.ticker import MaxNLocator

    report = curve.rounds[0]
    seconds = [each for each in report.over_time if report.seconds - each.second >= _LEAST_SECOND]
    whole = [min(1.0, report.seconds - each.second) for each in seconds]
    middles = [each.second + length / 2 for each, length in zip(seconds, whole, strict=True)]
    marker = "o" if len(seconds) < 6 else ""
    style: dict[str, Any] = {"linewidth": 1.5, "marker": marker, "markersize": 4}
    answered = [each.calls / length for each, length in zip(seconds, whole, strict=True)]
    rates.plot(middles, answered, color=_COLOURS[0], **style)
    wrong = [(middle, each) for middle, each in zip(middles, seconds, strict=True) if each.errors]
    if wrong:
        at = [middle for middle, _ in wrong]
        rates.plot(at, [0] * len(at), "x", color=_WRONG, markersize=6, clip_on=False, label="with errors")
        rates.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.1, handlelength=1)
    drawn: list[float] = []
    for name, shade in (("p99", _COLOURS[1]), ("p50", _COLOURS[0])):
        values = [_ms(getattr(each, name)) for each in seconds]
        times.plot(middles, values, color=shade, label=name, **style)
        drawn += values
    for axes in (rates, times):
        axes.set_xlabel("seconds since the start")
        axes.set_xlim(0, max(report.seconds, 0.1))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=report.seconds > 3))
    _finish_panels(rates, times, drawn, "in each second")


def _ms(seconds: float | None) -> float:
    return math.nan if seconds is None else 1e3 * seconds


def _draw_rounds(rates: Axes, times: Axes, curves: Sequence[Side]) -> None:
    """Draw the alternating measurements, round by round."""
    drawn: list[float] = []
    for curve, colour in zip(curves, _COLOURS, strict=False):
        numbers = range(1, len(curve.rounds) + 1)
        rates.plot(numbers, [each.per_second for each in curve.rounds], "-o", color=colour, linewidth=1.2, markersize=4)
        for percent, line in ((50, "-"), (99, ":")):
            values = [_ms(each.latency.percentile(percent)) for each in curve.rounds]
            drawn += values
            times.plot(numbers, values, f"{line}o", color=colour, linewidth=1.2, markersize=4)
    for percent, line in ((50, "-"), (99, ":")):
        times.plot([], [], line, color=_INK, linewidth=1.2, label=f"p{percent}")
    for axes in (rates, times):
        axes.set_xlabel("round")
        axes.set_xticks(range(1, max(len(curve.rounds) for curve in curves) + 1))
    _finish_panels(rates, times, drawn, "in each round")


def _finish_panels(rates: Axes, times: Axes, drawn: Sequence[float], each: str) -> None:
    rates.set_title("calls answered per second", loc="left", fontsize=9, fontweight="bold")
    rates.set_ylabel("calls/s")
    highest = rates.dataLim.ymax
    rates.set_ylim(0, 1.1 * highest if math.isfinite(highest) and highest > 0 else None)  # room for the highest mark
    rates.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 10 or not value else f"{value:g}")
    times.set_title(f"time {each}", loc="left", fontsize=9, fontweight="bold")
    times.set_ylabel("ms (logarithmic)")
    drawn = [value for value in drawn if value > 0]  # excludes NaN
    if drawn:
        times.set_yscale("log")
        times.set_ylim(min(*drawn, max(drawn) / 4) / 1.3, max(drawn) * 1.3)
        _number_log(times.yaxis)
    times.legend(loc="lower right", ncols=2, bbox_to_anchor=(1.0, 1.0), borderaxespad=0.1, handlelength=1.4)
