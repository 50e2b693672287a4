"""What `trimcp bench` shows: the final tables, of one server or of two compared, and before them what it measures.

Tables are lines of text with a style, and are not printed here; `MeasurementView` shows one measurement after another.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, TypeAlias

import attrs
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trimcp.bench.plan import Plan
from trimcp.bench.report import FORMAT, Failures, Histogram, Replica, Report, Slice, Snapshot, merged_failures
from trimcp.cli.exits import Failure
from trimcp.cli.screen import Screen
from trimcp.cli.text import Line, count_of, theirs

_TRANSPORTS: Final = {
    "stdio": "stdio",
    "http": "Streamable HTTP",
    "sse": "HTTP+SSE",
    "websocket": "WebSocket",
    "grpc": "gRPC",
    "agents_http": "HTTP",
    "agents_websocket": "WebSocket",
    "agents_grpc": "gRPC",
}
_REPLIES: Final = {"json": ", JSON replies", "sse": ", SSE replies", "mixed": ", JSON and SSE replies"}
_NAMES: Final = 12
_REQUESTS: Final = 20
_COLUMN: Final = 9
_EXAMPLE: Final = 160
_ENOUGH: Final = 12  # calls, one after the other, that leave no doubt that the rate is no estimate
_MEBI: Final = 1024 * 1024


def describe_report(report: Report) -> Iterator[Line]:
    """Yield all results: number of calls, rate and latency, cost."""
    yield headline(report), "bold"
    yield f"  {setting(report)}", "dim"
    yield "", ""
    later = f" in time and {report.after:,} later" if report.rough else ""
    yield row("calls", f"{report.calls:,} answered rightly{later}, {three(report.per_second)} per second"), ""
    if report.rough:
        yield row("", f"ROUGH: {rough(report)}"), "yellow"
    yield from _errors(report)
    if report.cancelled or report.timed_out:
        yield row("given up", f"{report.cancelled:,} cancelled, {report.timed_out:,} timed out"), ""
    if report.uncut:
        yield row("not cut", f"{report.uncut:,} calls were answered before an event with an id had come"), "yellow"
    if report.plan.paced:
        yield from _punctuality(report)
    yield "", ""
    yield from _latencies(report)
    yield "", ""
    yield from _replicas(report)
    if report.plan.progress or report.progress:
        rate = three(report.progress_per_second)
        yield row("progress", f"{report.progress:,} notifications, {rate} per second"), ""
    if report.bytes_out:  # an ordinary client does not count them
        yield row("data", f"{_bytes(report.bytes_out, report)} sent, {_bytes(report.bytes_in, report)} received"), ""
    yield _cost(report)
    yield from _generator(report)


def headline(report: Report, *, calls: bool = True) -> str:
    """Return a short description of the measurement: calls (optional), server, transport, revision."""
    server = report.target
    if report.server_name is not None:
        server = f"{report.server_name} {report.server_version or ''}".strip()
    transport = _TRANSPORTS[report.transport] + _REPLIES.get(report.reply or "", "")
    parts = [what(report.plan)] if calls else []
    return " · ".join([*parts, theirs(server, 60), transport, report.revision])


def what(plan: Plan) -> str:
    """Return a description of the calls."""
    names = list(dict.fromkeys(theirs(request.label, 40) for request in plan.mix))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def setting(report: Report) -> str:
    """Return the conditions of the measurement."""
    plan = report.plan
    varied = plan.stages is not None and not plan.paced
    parts = [f"sessions {plan.stages}" if varied else count_of(plan.sessions, "session")]
    if plan.session_calls is not None:
        parts.append(f"a new one after {count_of(plan.session_calls, 'call')}")
    if plan.rate is None and plan.paced:
        parts.append(f"calls begun per second {plan.stages} ({plan.spacing})")
    elif plan.rate is None:
        each = " each" if plan.sessions > 1 or varied else ""
        parts.append(f"{count_of(plan.places, 'call')} under way{each}")
    else:
        parts.append(f"{three(plan.rate)} calls begun per second ({plan.spacing})")
    if plan.think:
        parts.append(f"{milliseconds(plan.think)} to think")
    warm_up = f" after {plan.warm_up:g} s of warm-up" if plan.warm_up else ""
    if plan.warm_up_count:
        warm_up = f" after {count_of(plan.warm_up_count, 'call')} of warm-up"
    parts.append(f"{three(report.seconds)} s{warm_up}")
    if report.interrupted:
        parts.append("interrupted")
    return ", ".join(parts)


def rough(report: Report) -> str:
    """Return why the rate is an estimate, and how to know it better."""
    took, measured = milliseconds(report.latency.mean), milliseconds(report.seconds)
    enough = math.ceil(_ENOUGH * (report.latency.mean or 0.0))
    return f"a call takes {took} of the {measured}; better: --seconds {enough}"


def what_times_are(plan: Plan, rounds: int = 1) -> str:
    """Return the definition of a call's time and of the percentiles, for the table and the plot."""
    text = "from sending to answer, not corrected for coordinated omission"
    if plan.paced:
        text = "from due time to answer, corrected for coordinated omission"
    return text + (f"; median of {rounds} rounds" if rounds > 1 else "")


def _errors(report: Report) -> Iterator[Line]:
    if not report.errors:
        yield row("errors", "none" if report.right else "none, but no answer either"), "" if report.right else "red"
        return
    share = 100 * report.failures / (report.failures + report.calls)
    yield row("errors", f"{report.failures:,}, {share:.{0 if share >= 10 else 2}f} % of the calls"), "bold red"
    for kind, failures in by_count(report.errors):
        example = theirs(failures.example, _EXAMPLE)
        yield row("", f"{failures.count:,} {theirs(kind, 40)}" + (f": {example}" if example else "")), "red"


def by_count(errors: Mapping[str, Failures]) -> list[tuple[str, Failures]]:
    """Return the kinds of errors, the most frequent first."""
    return sorted(errors.items(), key=lambda item: -item[1].count)


def _punctuality(report: Report) -> Iterator[Line]:
    wanted = report.plan.mean_rate or 0.0
    if report.late:
        yield row("late", f"{report.late:,} calls began more than 10 ms after their time, or not at all"), "yellow"
    over = report.calls + report.failures + report.cancelled + report.timed_out
    rate = over / report.seconds if report.seconds else math.inf
    if rate < 0.95 * wanted and not report.interrupted:
        text = f"only {three(rate)} of {three(wanted)} calls per second were over in time"
        yield row("", text), "yellow"


def _latencies(report: Report) -> Iterator[Line]:
    latency = report.latency
    if not latency.count:
        yield row("time", "none, for there were no right answers"), "dim"
        return
    yield row("time", "".join(name.rjust(_COLUMN) for name in latency.figures)), "dim"
    yield row("", "".join(milliseconds(value).rjust(_COLUMN) for value in latency.figures.values())), ""
    yield row("", what_times_are(report.plan)), "dim"
    if len(report.requests) > 1:
        for label, times in sorted(report.requests.items())[:_REQUESTS]:
            yield row("", f"{theirs(label, 40)}: {times.count:,}  {percentiles(times, 50, 99)}"), ""


def by_replica(report: Report) -> Iterator[tuple[str, float, Replica]]:
    """Yield each replica with its share of all answers, from 0 to 1; who answered most comes first."""
    counts = {name: each.times.count + each.errors for name, each in report.replicas.items()}
    for name in sorted(counts, key=lambda name: -counts[name]):
        yield name, counts[name] / sum(counts.values()), report.replicas[name]


def _replicas(report: Report) -> Iterator[Line]:
    for number, (name, share, each) in enumerate(itertools.islice(by_replica(report), _REQUESTS)):
        counted = f"{theirs(name, 40)}: {each.times.count:,} right, {100 * share:.0f} %"
        counted += f"  {percentiles(each.times, 50, 99)}"
        wrong = f"  {count_of(each.errors, 'error')}" if each.errors else ""
        yield row("" if number else "replicas", counted + wrong), "red" if wrong else ""


def _cost(report: Report) -> Line:
    cost = report.cost
    if cost is None:
        return row("server", "CPU and memory unknown; name its process with --pid"), "dim"
    parts = []
    if report.cpu_per_call is not None:
        parts.append(f"{milliseconds(report.cpu_per_call)} of CPU per call")
    if report.seconds:
        parts.append(f"{100 * cost.cpu_seconds / report.seconds:.0f} % of a core")
    parts.append(f"{three(cost.rss / _MEBI)} MiB, {three(cost.peak_rss / _MEBI)} at most")
    return row("server", ", ".join(parts)), ""


def _generator(report: Report) -> Iterator[Line]:
    generator = report.generator
    text = f"{100 * generator.busy:.0f} % of a core"
    if generator.busiest is not None:
        text += f" in {generator.processes} processes, {100 * generator.busiest:.0f} % in the busiest"
    if generator.ceiling is not None:
        text += f"; it could make about {three(float(f'{generator.ceiling:.2g}'))} such calls per second"
    if not generator.saturated:
        yield row("generator", text), ""
        return
    yield row("generator", text), "bold yellow"
    yield row("", "SATURATED: above 80 % these figures may show its limit and not the server's"), "bold yellow"


def row(name: str, text: str) -> str:
    """Return a row of the table; "" continues the one before."""
    return f"  {name:<{_NAMES}}{text}".rstrip()


def _bytes(count: int, report: Report) -> str:
    if not report.seconds:
        return f"{count:,} bytes"
    rate = count / report.seconds
    return f"{three(rate / 1e6)} MB/s" if rate >= 1e6 else f"{three(rate / 1e3)} kB/s"


def milliseconds(seconds: float | None) -> str:
    """Return a time with three significant digits and its unit."""
    if seconds is None:
        return "-"
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{three(seconds * factor)} {unit}"
    return f"{three(seconds)} s"


def percentiles(times: Histogram, *percents: float) -> str:
    """Return percentiles of times with their names."""
    return "  ".join(f"p{each:g} {milliseconds(times.percentile(each))}" for each in percents)


def three(value: float) -> str:
    """Return a number with three significant digits, or with all digits before the point."""
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{digits}f}"


@attrs.frozen
class Side:
    """One of the servers that are shown, or one of now and before: its name, and its measurements in order."""

    name: str
    rounds: Sequence[Report]

    @property
    def slices(self) -> list[Slice]:
        """All slices of all rounds, one round after the other."""
        found: list[Slice] = []
        start = 0.0
        for report in self.rounds:
            found += [attrs.evolve(each, start=start + each.start) for each in report.slices]
            start += report.seconds
        return found

    def median(self, of: Callable[[Report], float | None]) -> float | None:
        """Return the median of a figure over the rounds; None if it is not known."""
        known = [value for value in map(of, self.rounds) if value is not None]
        return median(known) if known else None


def sides_of(done: Iterable[Sequence[Report]]) -> list[Side]:
    """Return the servers of which there are measurements, under names that differ."""
    measured = [rounds for rounds in done if rounds]
    names = [headline(rounds[0], calls=False) for rounds in measured]
    if len(set(names)) < len(names):  # as of two versions that say the same of themselves
        names = [f"{theirs(rounds[0].target, 40)} · {name}" for name, rounds in zip(names, measured, strict=True)]
    if len(set(names)) < len(names):
        names = [f"{number}: {name}" for number, name in enumerate(names, 1)]
    return [Side(name, rounds) for name, rounds in zip(names, measured, strict=True)]


def write_result(file: str, text: str) -> None:
    """Write one of the files that were asked for. Raises Failure: it cannot be written."""
    try:
        Path(file).write_text(text, "utf-8")
    except OSError as error:
        raise Failure(f"cannot write {file}: {error.strerror}") from None


Pair: TypeAlias = tuple[Report, Report]
"""One round: the target, and what it is compared with."""


@attrs.frozen
class Figure:
    """A figure that two servers are compared by."""

    name: str  # in the JSON
    label: str  # in the table
    of: Callable[[Report], float | None]  # returns it from a report; None if unknown
    show: Callable[[float], str]  # formats it
    # `more`, `less`: the words for the first server if its figure is larger, or smaller
    more: str = "more"
    less: str = "less"


def _memory(report: Report) -> float | None:
    return None if report.cost is None else report.cost.rss


FIGURES: Final = (
    Figure("per_second", "calls/s", lambda report: report.per_second, three, "faster", "slower"),
    Figure("p50", "p50", lambda report: report.latency.percentile(50), milliseconds, "slower", "faster"),
    Figure("p99", "p99", lambda report: report.latency.percentile(99), milliseconds, "slower", "faster"),
    Figure("cpu_per_call", "CPU per call", lambda report: report.cpu_per_call, milliseconds),
    Figure("rss", "memory", _memory, lambda rss: f"{three(rss / _MEBI)} MiB"),
)


@attrs.frozen
class Ratio:
    """The ratio of a figure between the first and the second server."""

    figure: Figure
    # `first`, `second`: the median of all rounds, as text
    first: str
    second: str
    # `median`, `low`, `high`: of the ratios first / second, one per round
    median: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether the same server has the larger figure in every round."""
        return self.low > 1 or self.high < 1

    def words(self, ratio: float, width: int = 0) -> str:
        """Return a ratio in words: "43 times faster" reads better than 0.023."""
        if (factor := _factor(ratio)) == "1.00":
            return "the same"
        return f"{factor} × {self.figure.more if ratio > 1 else self.figure.less:<{width}}"

    @property
    def spread(self) -> str:
        """The range of the ratios."""
        low, high = _factor(self.low), _factor(self.high)
        if self.clear or low == high == "1.00":
            return f"{low} to {high}" if self.low >= 1 else f"{high} to {low}"
        return f"{self.words(self.low)} to {self.words(self.high)}"


def _factor(ratio: float) -> str:
    return three(max(ratio, 1 / ratio))


def ratios(pairs: Sequence[Pair]) -> list[Ratio]:
    """Return the ratios of all figures known for both servers."""
    found = []
    for figure in FIGURES:
        values = [(figure.of(first), figure.of(second)) for first, second in pairs]
        known = [(first, second) for first, second in values if first and second]
        if not known or len(known) < len(values):
            continue
        each = [first / second for first, second in known]
        ours, theirs = (figure.show(median(side)) for side in zip(*known, strict=True))
        found.append(Ratio(figure, ours, theirs, median(each), min(each), max(each)))
    return found


def describe_comparison(pairs: Sequence[Pair]) -> Iterator[Line]:
    """Yield the figures of both, and their ratios, as lines of text."""
    first, second = pairs[0]
    for number, report in enumerate((first, second), 1):
        yield f"{number}: {headline(report)}", "bold"
        yield f"   {theirs(report.target, 150)}", "dim"
        if number == 1:
            rounds = f"{len(pairs)} rounds" if len(pairs) > 1 else "1 round"
            yield f"   {rounds} of: {setting(report)}", "dim"
    yield "", ""
    rows = [("", "1", "2", "1 compared to 2", "round by round")]
    found = ratios(pairs)
    longest = max((len(word) for each in found for word in (each.figure.more, each.figure.less)), default=0)
    rows += [
        (each.figure.label, each.first, each.second, each.words(each.median, longest), each.spread) for each in found
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        unclear = number > 0 and len(pairs) > 1 and not found[number - 1].clear
        line = "  " + "   ".join(cells) + ("   no clear difference" if unclear else "")
        yield line, "dim" if number == 0 or unclear else ""
    yield f"  {what_times_are(first.plan, len(pairs))}", "dim"
    for number, each_round in enumerate(zip(*pairs, strict=True), 1):
        yield from _doubts(number, each_round)


def _doubts(number: int, rounds: Sequence[Report]) -> Iterator[Line]:
    """Yield the reasons to doubt the figures of one of the servers."""
    for kind, failures in by_count(merged_failures(report.errors for report in rounds)):
        text = f"{failures.count:,} {theirs(kind, 40)}: {theirs(failures.example, 150)}"
        yield f"  {number} answered wrongly: {text}", "red"
    if any(report.rough for report in rounds):
        yield f"  {number}: ROUGH: {rough(next(report for report in rounds if report.rough))}", "yellow"
    busy = max(report.generator.busy for report in rounds)
    if any(report.generator.saturated for report in rounds):
        text = "the generator was SATURATED: the rate may be its limit and not the server's"
        yield f"  {number}: {text} ({100 * busy:.0f} % of a core)", "bold yellow"


def comparison_json(pairs: Sequence[Pair], unpaired: Sequence[Report]) -> dict[str, Any]:
    """Return all rounds and the ratios as JSON values; `unpaired` has the reports without a complete round."""
    return {
        "format": FORMAT,
        "rounds": [{"first": first.to_json(), "second": second.to_json()} for first, second in pairs],
        "ratios": {
            each.figure.name: {"median": each.median, "low": each.low, "high": each.high} for each in ratios(pairs)
        },
        "unpaired": [report.to_json() for report in unpaired],
    }


# While it measures

_BARS: Final = "▁▂▃▄▅▆▇█"
_HISTORY: Final = 40
_BAR: Final = 30
_LINES: Final = 20
_EARLY: Final = 0.1
_BUSY: Final = 0.8


@attrs.define(eq=False)
class MeasurementView:
    """Follows measurements, one after the other."""

    screen: Screen  # the output; nothing is shown if it is quiet
    seconds: float | None = None  # the expected duration of one measurement
    _title: str = attrs.field(init=False, default="")
    _live: Live | None = attrs.field(init=False, default=None)
    _rates: deque[float] = attrs.field(init=False, factory=lambda: deque(maxlen=_HISTORY))

    @property
    def tick_length(self) -> float:
        """Seconds between two updates."""
        return 0.5 if self.screen.live else max(1.0, (self.seconds or 0.0) / _LINES)

    def begin(self, title: str) -> None:
        """Follow another measurement."""
        self._title = title
        self._rates.clear()
        if self.screen.quiet:
            return
        if not self.screen.live:
            self.screen.note(title, "bold")
            return
        self.end()
        self._live = Live(console=self.screen.err, auto_refresh=False, transient=True)
        self._live.start()
        self._live.update(Group(Text(title, style="bold"), Text("  connecting", style="dim")), refresh=True)

    def tick(self, snapshot: Snapshot) -> None:
        """Show the current state."""
        over = snapshot.share >= 1 and not snapshot.rate  # still waiting for the last answers
        if self.screen.quiet or over:
            return
        early = snapshot.elapsed < _EARLY
        if not early:
            self._rates.append(snapshot.rate)
        if self._live is not None:
            self._live.update(self._panel(snapshot), refresh=True)
        elif not early:
            self.screen.note(_line(snapshot))

    def end(self) -> None:
        """Remove the panel."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _panel(self, now: Snapshot) -> RenderableType:
        state = "warming up" if now.warming_up else f"{now.elapsed:.0f} s"
        at_work = f"{count_of(now.sessions, 'session')}, {count_of(now.under_way, 'call')} under way"
        title = Text(self._title, style="bold", no_wrap=True, overflow="ellipsis")
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            "",
            ProgressBar(total=1.0, completed=min(now.share, 1.0), width=_BAR),
            Text(f"{state}, {at_work}", style="dim"),
        )
        if now.warming_up:
            return Group(title, bar)
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", min_width=11)
        rows.add_column()
        rows.add_row("  rate", Text(f"{three(now.rate)} per second  {_sparks(self._rates)}"))
        rows.add_row("  time", percentiles(now.times, 50, 90, 99))
        rows.add_row("  calls", f"{now.calls:,} answered rightly{_given_up(now)}")
        rows.add_row("  errors", Text(_errors_so_far(now), style="red" if now.errors else ""))
        if now.progress:
            rows.add_row("  progress", f"{three(now.reported / now.seconds)} messages per second")
        busy = now.busy > _BUSY
        share = f"{100 * now.busy:.0f} % of a core" + (", SATURATED" if busy else "")
        rows.add_row("  generator", Text(share, style="bold yellow" if busy else ""))
        return Group(title, bar, rows)


def _line(now: Snapshot) -> str:
    parts = [f"{now.elapsed:6.1f} s", f"{three(now.rate)} per second", percentiles(now.times, 50, 90, 99)]
    parts.append(f"errors {_errors_so_far(now)}")
    if now.progress:
        parts.append(f"progress {three(now.reported / now.seconds)} per second")
    parts.append(f"generator {100 * now.busy:.0f} %")
    return "  ".join(parts)


def _given_up(now: Snapshot) -> str:
    counts = {"cancelled": now.cancelled, "timed out": now.timed_out, "late": now.late}
    return "".join(f", {count:,} {what}" for what, count in counts.items() if count)


def _errors_so_far(now: Snapshot) -> str:
    if not now.errors:
        return "none"
    kinds = sorted(now.errors.items(), key=lambda item: -item[1])
    return ", ".join(f"{count:,} {theirs(kind, 40)}" for kind, count in kinds)


def _sparks(rates: deque[float]) -> str:
    most = max(rates, default=0.0)
    if not most:
        return ""
    return "".join(_BARS[min(len(_BARS) - 1, int(rate / most * len(_BARS)))] for rate in rates)
