"""The page of `trimcp bench --html`: one file without scripts, fonts or pictures of others, for screen and paper."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any, Final, TypeAlias

import attrs

from trimcp.bench.report import PERCENTILES, Histogram, Report, Slice, merged_failures
from trimcp.bench.requirements import Check
from trimcp.cli.bench.table import (
    FIGURES,
    Side,
    by_count,
    by_replica,
    headline,
    milliseconds,
    setting,
    what,
    what_times_are,
)
from trimcp.cli.text import theirs

_WIDTH: Final = 640
_HEIGHT: Final = 250
_LEFT: Final = 84
_RIGHT: Final = 14
_TOP: Final = 12
_BOTTOM: Final = 44
_BARS: Final = 100
_KINDS: Final = 4  # kinds of errors that have a colour of their own
_MEBI: Final = 1024 * 1024

_STYLE: Final = """
:root{color-scheme:light dark;--ink:#1d2326;--faint:#5d666b;--line:#d9dee1;--ground:#fff;--card:#f5f7f8;
--one:#1f5f99;--two:#b4541a;--bad:#b3261e;--bad2:#7d4fa3;--bad3:#8a6d00;--bad4:#0f7a6b;--well:#1d6b38}
@media(prefers-color-scheme:dark){:root{--ink:#e6eaec;--faint:#9aa5ab;--line:#39434a;--ground:#14191c;--card:#1d2429;
--one:#6fb1ec;--two:#f0995c;--bad:#ff8a80;--bad2:#c9a3ee;--bad3:#e3c454;--bad4:#5fd0bd;--well:#7fd69b}}
@media print{:root{color-scheme:light;--ink:#000;--faint:#444;--line:#bbb;--ground:#fff;--card:#fff;--one:#1f5f99;
--two:#b4541a;--bad:#b3261e;--bad2:#7d4fa3;--bad3:#8a6d00;--bad4:#0f7a6b;--well:#1d6b38}
section,figure{break-inside:avoid}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:62rem;padding:1.25rem;background:var(--ground);color:var(--ink);
font:15px/1.45 system-ui,sans-serif}
h1{font-size:1.35rem;margin:0 0 .2rem;overflow-wrap:anywhere}h2{font-size:1rem;margin:0 0 .3rem}
p{margin:.2rem 0}.faint,figcaption,th{color:var(--faint)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.5rem,1fr));gap:.6rem;margin:1rem 0}
.cards div{background:var(--card);border:1px solid var(--line);border-radius:.4rem;padding:.5rem .7rem}
.cards b{display:block;font-size:1.2rem;white-space:nowrap}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,27rem),1fr));gap:1.2rem}
figure{margin:0;min-width:0}figure.wide{grid-column:1/-1}figcaption{font-size:.85rem}
svg{display:block;width:100%;height:auto}svg text{font:16px system-ui,sans-serif;fill:var(--faint)}
.wide svg text{font-size:9px}
.grid{stroke:var(--line);stroke-width:1}.key{display:inline-block;width:.8em;height:.8em;margin:0 .3em 0 .8em;
border-radius:2px}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;margin:.3rem 0}
th,td{text-align:right;padding:.2rem .6rem;border-bottom:1px solid var(--line);white-space:nowrap;font-weight:400}
th:first-child,td:first-child,td.text{text-align:left}td.text{white-space:normal;overflow-wrap:anywhere}
td.text:first-child{overflow-wrap:break-word}section{margin-top:1.6rem}code{overflow-wrap:anywhere}.bad{color:var(--bad)}.well{color:var(--well)}
@media(max-width:58rem){svg text,.wide svg text{font-size:11px}}
@media(max-width:34rem){body{padding:.7rem}svg text,.wide svg text{font-size:19px}.cards{grid-template-columns:1fr 1fr}}
"""
_COLOURS: Final = ("var(--one)", "var(--two)")
_WRONG: Final = ("var(--bad)", "var(--bad2)", "var(--bad3)", "var(--bad4)")


def page(sides: Sequence[Side], command: str, checks: Sequence[Check] = ()) -> str:
    """Return the page of one server, or of two beside each other."""
    first = sides[0].rounds[0]
    title = _text(headline(first) if len(sides) == 1 else f"{what(first.plan)} · {sides[0].name} and {sides[1].name}")
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>trimcp bench: {title}</title><style>{_STYLE}</style>",
        f'<h1>{title}</h1><p class="faint">{_text(setting(first))}; times {_text(what_times_are(first.plan))}</p>',
        *_checks(checks),
        *(_cards(first) if len(sides) == 1 and len(sides[0].rounds) == 1 else _beside(sides)),
        '<div class="charts">',
        *_charts(sides),
        "</div>",
    ]
    for side in sides:
        name = f" of {_text(side.name)}" if len(sides) > 1 else ""
        parts += [_requests(side, name), *_replicas(side, name), *_errors(side, name)]
    parts += [*_environment(sides, command), "</html>\n"]
    return "\n".join(parts)


def _text(text: object) -> str:
    return escape(theirs(text, 400))


# Figures


def _figures(side: Side) -> dict[str, str]:
    found = {}
    for figure in FIGURES:
        value = side.median(figure.of)
        found[figure.label] = "-" if value is None else figure.show(value)
    errors, busy = side.median(lambda report: report.error_share), side.median(lambda report: report.generator.busy)
    return {**found, "errors": f"{100 * (errors or 0.0):.2g} %", "generator, of a core": f"{100 * (busy or 0.0):.0f} %"}


def _cards(report: Report) -> Iterator[str]:
    yield '<div class="cards">'
    for name, value in _figures(Side("", [report])).items():
        yield f'<div><span class="faint">{name}</span><b>{_text(value)}</b></div>'
    yield "</div>"
    if report.generator.saturated:
        yield '<p class="bad">The generator was at its own limit: the server may be faster than these figures.</p>'
    if report.rough:
        yield '<p class="bad">Few calls fit into the time: the rate is an estimate.</p>'


def _section(title: str, rows: Iterable[str], heads: Iterable[str] = (), kind: str = "") -> str:
    """Return a table with its title; a row is its cells."""
    head = "".join(f"<th>{each}</th>" for each in heads)
    body = "".join(f"<tr>{row}</tr>" for row in (*filter(None, [head]), *rows))
    titled = f"<h2{kind}>{title}</h2>" if title else ""
    return f'<section>{titled}<div class="scroll"><table>{body}</table></div></section>'


def _cells(*texts: object) -> str:
    return "".join(f"<td>{_text(text)}</td>" for text in texts)


def _words(text: object) -> str:
    return f'<td class="text">{_text(text)}</td>'


def _beside(sides: Sequence[Side]) -> Iterator[str]:
    columns = [_figures(side) for side in sides]
    heads = (_key(colour, side.name) for side, colour in zip(sides, _COLOURS, strict=False))
    rows = (_cells(name, *(column[name] for column in columns)) for name in columns[0])
    yield _section("", rows, ("", *heads))


def _checks(checks: Sequence[Check]) -> Iterator[str]:
    if not checks:
        return
    failed = [each for each in checks if not each.passed]
    kind, said = ("bad", f"{len(failed)} of {len(checks)} checks failed") if failed else ("well", "all checks passed")
    yield f'<section><h2 class="{kind}">{said}</h2><div class="scroll"><table>'
    inside = False
    for each in sorted(checks, key=lambda check: check.passed):
        if each.passed and not inside:
            inside = True
            kept = len(checks) - len(failed)
            yield f"</table></div><details{' open' if kept < 8 else ''}><summary>{kept} kept</summary>"
            yield '<div class="scroll"><table>'
        mark = '<span class="well">kept</span>' if each.passed else '<span class="bad">BROKEN</span>'
        yield f"<tr>{_words(each.name)}<td>{mark}</td>{_words(each.text)}</tr>"
    yield "</table></div>" + ("</details>" if inside else "") + "</section>"


def _requests(side: Side, name: str) -> str:
    table = Histogram.merged_by_label(report.requests for report in side.rounds)
    rows = (_cells(label, f"{times.count:,}", *_times(times)) for label, times in sorted(table.items()))
    return _section(f"Requests{name}", rows, ("", "calls", *Histogram().figures))


def _times(times: Histogram) -> Iterable[str]:
    return map(milliseconds, times.figures.values())


def _replicas(side: Side, name: str) -> Iterator[str]:
    for report in (each for each in side.rounds if each.replicas):
        rows = (
            _words(replica)
            + _cells(f"{100 * share:.0f} %", f"{each.times.count:,}", f"{each.errors:,}", *_times(each.times))
            for replica, share, each in by_replica(report)
        )
        yield _section(f"Who answered{name}", rows, ("", "share", "rightly", "errors", *Histogram().figures))


def _errors(side: Side, name: str) -> Iterator[str]:
    found = merged_failures(report.errors for report in side.rounds)
    if found:
        rows = (_words(kind) + _cells(f"{each.count:,}") + _words(each.example) for kind, each in by_count(found))
        yield _section(f"Errors{name}", rows, kind=' class="bad"')


def _environment(sides: Sequence[Side], command: str) -> Iterator[str]:
    rows = [_cells("command") + f'<td class="text"><code>{escape(theirs(command, 2000))}</code></td>']
    for side in sides:
        report = side.rounds[-1]
        where = {"server": report.target, "transport": report.transport, "revision": report.revision}
        for name, value in {**where, **report.environment}.items():
            shown = f"{side.name}: {name}" if len(sides) > 1 else name
            rows.append(_cells(shown.replace("_", " ")) + _words(value))
    yield _section("How it was measured", rows)


# Charts

Point: TypeAlias = tuple[float, float]


@attrs.frozen
class _Axis:
    """An axis: from a value to a place in the picture."""

    low: float
    high: float
    begin: float  # the place of `low`
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            value, low, high = (math.log(max(each, 1e-12)) for each in (value, low, high))
        return self.begin + (value - low) / ((high - low) or 1.0) * (self.end - self.begin)

    @property
    def ticks(self) -> list[float]:
        """Round values to write along the axis."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1,) if self.high > 300 * self.low else (1, 3) if self.high > 20 * self.low else (1, 2, 3, 5, 7)
            ticks = [step * 10.0**power for power in powers for step in steps]
        else:
            step = _round_step((self.high - self.low) / 4)
            ticks = [step * number for number in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return [tick for tick in ticks if self.low * (1 - 1e-9) <= tick <= self.high * (1 + 1e-9)]


def _round_step(raw: float) -> float:
    power = 10.0 ** math.floor(math.log10(raw or 1.0))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= raw * 0.999)


def _across(low: float, high: float, *, log: bool = False) -> _Axis:
    return _Axis(low, high, _LEFT, _WIDTH - _RIGHT, log)


def _upwards(values: Iterable[float], *, log: bool = False) -> _Axis:
    known = [value for value in values if value > 0] or [1.0]
    low, high = (min(known) / 1.2, max(known) * 1.2) if log else (0.0, max(known) * 1.08)
    if log:  # at least a factor of 4, so that noise does not look like mountains
        low = min(low, high / 4)
    return _Axis(low, high, _HEIGHT - _BOTTOM, _TOP, log)


def _frame(x: _Axis, y: _Axis, along: str, show_x: Callable[[float], str], show_y: Callable[[float], str]) -> str:
    base = _HEIGHT - _BOTTOM
    parts = []
    for tick in y.ticks:
        at = f"{y.at(tick):.1f}"
        parts.append(f'<path class="grid" d="M{_LEFT} {at}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 7}" y="{at}" dy=".35em" text-anchor="end">{show_y(tick)}</text>')
    parts += [
        f'<text x="{x.at(tick):.1f}" y="{base + 19}" text-anchor="middle">{show_x(tick)}</text>' for tick in x.ticks
    ]
    parts.append(f'<path class="grid" d="M{_LEFT} {base}H{_WIDTH - _RIGHT}"/>')
    parts.append(f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 4}" text-anchor="middle">{along}</text>')
    return "".join(parts)


def _figure(title: str, caption: str, inner: str, *, wide: bool = False) -> str:
    kind = ' class="wide"' if wide else ""
    picture = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">{inner}</svg>'
    return f"<figure{kind}><h2>{escape(title)}</h2>{picture}<figcaption>{caption}</figcaption></figure>"


def _line(points: Iterable[Point], colour: str, *, dash: str = "") -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{dashes}/>'


def _band(upper: Sequence[Point], lower: Sequence[Point], colour: str, opacity: float) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*upper, *reversed(lower)])
    return f'<polygon points="{path}" fill="{colour}" fill-opacity="{opacity}"/>'


def _key(colour: str, text: str) -> str:
    return f'<span class="key" style="background:{colour}"></span>{_text(text)}'


def _keys(sides: Sequence[Side]) -> str:
    if len(sides) < 2:
        return ""
    return "".join(_key(colour, side.name) for side, colour in zip(sides, _COLOURS, strict=False))


def _charts(sides: Sequence[Side]) -> Iterator[str]:
    slices = [side.slices for side in sides]
    yield _histogram(sides)
    if not any(slices):
        return
    time = _across(0.0, max((each[-1].start + each[-1].seconds for each in slices if each), default=1.0))
    yield _latency(sides, slices, time)
    yield _throughput(sides, slices, time)
    yield from _costs(sides, slices, time)


def _histogram(sides: Sequence[Side]) -> str:
    whole = [Histogram.merged(report.latency for report in side.rounds) for side in sides]
    edges, shares = Histogram.bars(whole, _BARS)
    if not edges:
        return _figure("How long calls took", "No call was answered rightly.", "", wide=True)
    x, y = _across(edges[0], edges[-1], log=True), _upwards(value for side in shares for value in side)
    parts = [_frame(x, y, "time of a call, logarithmic", _time, lambda share: f"{share:g} %")]
    for heights, colour in zip(shares, _COLOURS, strict=False):
        outline = [
            (x.at(edge), y.at(height)) for bar, height in zip(pairwise(edges), heights, strict=True) for edge in bar
        ]
        ground = [(outline[0][0], y.begin), (outline[-1][0], y.begin)]
        parts += [_band(outline, ground, colour, 0.22), _line(outline, colour)]
    for histogram, colour in zip(whole, _COLOURS, strict=False):
        for percent in PERCENTILES:
            if (value := histogram.percentile(percent)) is not None:
                at = f"{x.at(value):.1f}"
                parts.append(
                    f'<path d="M{at} {y.begin}V{y.end}" stroke="{colour}" stroke-dasharray="4 3">'
                    f"<title>p{percent:g}: {milliseconds(value)}</title></path>"
                )
    marks = ", ".join(f"p{percent:g}" for percent in PERCENTILES)
    return _figure("How long calls took", f"Share of calls; dashed: {marks}.{_keys(sides)}", "".join(parts), wide=True)


def _latency(sides: Sequence[Side], slices: Sequence[Sequence[Slice]], time: _Axis) -> str:
    bands = []
    for each in slices:
        known = [(one, one.whole) for one in each]
        bands.append([(one, [times.percentile(p) or 0.0 for p in (50, 90, 99)]) for one, times in known if times.count])
    y = _upwards((value for side in bands for _, values in side for value in values), log=True)
    parts = [_frame(time, y, "seconds since the start", "{:g}".format, _time)]
    for side, colour in zip(bands, _COLOURS, strict=False):
        curves = [[(time.at(_middle(one)), y.at(values[index])) for one, values in side] for index in range(3)]
        parts += [_band(curves[2], curves[1], colour, 0.15), _band(curves[1], curves[0], colour, 0.32)]
        parts.append(_line(curves[0], colour))
        for one, values in side:
            left, right = time.at(one.start), time.at(one.start + one.seconds)
            said = ", ".join(f"p{p} {milliseconds(v)}" for p, v in zip((50, 90, 99), values, strict=True))
            parts.append(
                f'<rect x="{left:.1f}" y="{y.end}" width="{right - left:.1f}" height="{y.begin - y.end}" fill="none" '
                f'pointer-events="all"><title>{one.start:.2f} s: {said}</title></rect>'
            )
    caption = f"The line is p50, the bands reach to p90 and to p99; logarithmic.{_keys(sides)}"
    return _figure("Time of calls, over time", caption, "".join(parts), wide=True)


def _middle(one: Slice) -> float:
    return one.start + one.seconds / 2


def _throughput(sides: Sequence[Side], slices: Sequence[Sequence[Slice]], time: _Axis) -> str:
    rates = [[(_middle(one), one.whole.count / one.seconds) for one in each] for each in slices]
    totals = sum((Counter(one.errors) for each in slices for one in each), Counter[str]())
    kinds = [kind for kind, _ in totals.most_common()]
    wrong = [sum(one.errors.values()) / one.seconds for each in slices for one in each]
    y = _upwards([*(rate for side in rates for _, rate in side), *wrong])
    parts = [_frame(time, y, "seconds since the start", "{:g}".format, _plain)]
    shades = dict(zip(kinds, (*_WRONG, *_WRONG[-1:] * len(kinds)), strict=False))
    for each in slices:
        for one in each:
            ground = 0.0
            left, width = time.at(one.start), time.at(one.start + one.seconds) - time.at(one.start)
            for kind in (kind for kind in kinds if kind in one.errors):
                failed = one.errors[kind] / one.seconds
                top, bottom = y.at(ground + failed), y.at(ground)
                parts.append(
                    f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{max(bottom - top, 1.5):.1f}" '
                    f'fill="{shades[kind]}"><title>{_text(kind)}: {one.errors[kind]:,}</title></rect>'
                )
                ground += failed
    for side, colour in zip(rates, _COLOURS, strict=False):
        parts.append(_line([(time.at(at), y.at(rate)) for at, rate in side], colour))
    told = "".join(_key(shades[kind], kind) for kind in kinds[:_KINDS])
    more = f" and {len(kinds) - _KINDS} more" if len(kinds) > _KINDS else ""
    errors = f" Bars: errors.{told}{more}" if kinds else " No errors."
    caption = f"Right answers per second.{errors}{_keys(sides)}"
    return _figure("Throughput and errors", caption, "".join(parts), wide=True)


def _time(seconds: float) -> str:
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if 0 < seconds * factor < 999.5:
            return f"{seconds * factor:g} {unit}"
    return f"{seconds:g} s"


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or not value else f"{value:g}"


def _costs(sides: Sequence[Side], slices: Sequence[Sequence[Slice]], time: _Axis) -> Iterator[str]:
    def course(of: Callable[[Slice], float | None]) -> list[list[Point]]:
        every = [[(_middle(one), of(one)) for one in each] for each in slices]
        return [[(at, value) for at, value in side if value is not None] for side in every]

    def drawn(title: str, caption: str, show: Callable[[float], str], curves: Mapping[str, Any]) -> str:
        y = _upwards(value for course in curves.values() for side in course for _, value in side)
        parts = [_frame(time, y, "seconds since the start", "{:g}".format, show)]
        for dash, course in curves.items():
            for side, colour in zip(course, _COLOURS, strict=False):
                parts.append(_line([(time.at(at), y.at(value)) for at, value in side], colour, dash=dash))
        return _figure(title, caption + _keys(sides), "".join(parts))

    cpu = course(lambda one: None if one.cpu is None else 100 * one.cpu / one.seconds)
    memory = course(lambda one: None if one.rss is None else one.rss / _MEBI)
    busy = course(lambda one: 100 * one.busy)
    known = "Share of one core: the line is the server, dashed is the generator."
    if not any(cpu):
        known = "Share of one core of the generator; name the server's process with --pid to see it."
    yield drawn("CPU", known, lambda share: f"{share:g} %", {"": cpu, "5 4": busy})
    if any(memory):
        yield drawn("Memory of the server", "Resident, MiB.", _plain, {"": memory})
    lag = course(lambda one: max(one.lag, 0.0))
    caption = "How late the generator's own event loop was: what it adds to the times at most."
    yield drawn("Lag of the generator", caption, _time, {"": lag})
