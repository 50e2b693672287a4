"""The final table of `trimcp bench`, as lines of text with their style. Does not print."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from trimcp.bench.plan import Plan
from trimcp.bench.report import Report
from trimcp.cli.text import Line, theirs

PERCENTILES: Final = (50.0, 90.0, 99.0, 99.9)

_TRANSPORTS: Final = {"stdio": "stdio", "http": "Streamable HTTP", "sse": "HTTP+SSE", "websocket": "WebSocket"}
_REPLIES: Final = {"json": ", JSON replies", "sse": ", SSE replies", "mixed": ", JSON and SSE replies"}
_NAMES: Final = 12
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
    yield _row("calls", f"{report.calls:,} answered rightly{later}, {three(report.per_second)} per second"), ""
    if report.rough:
        yield _row("", f"ROUGH: {rough(report)}"), "yellow"
    yield from _errors(report)
    if report.cancelled or report.timed_out:
        yield _row("given up", f"{report.cancelled:,} cancelled, {report.timed_out:,} timed out"), ""
    if report.plan.rate is not None:
        yield from _punctuality(report)
    yield "", ""
    yield from _latencies(report)
    yield "", ""
    if report.plan.progress or report.progress:
        rate = three(report.progress_per_second)
        yield _row("progress", f"{report.progress:,} notifications, {rate} per second"), ""
    yield _row("data", f"{_bytes(report.bytes_out, report)} sent, {_bytes(report.bytes_in, report)} received"), ""
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
    parts = [count_of(plan.sessions, "session")]
    if plan.rate is None:
        each = " each" if plan.sessions > 1 else ""
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
    if plan.rate is not None:
        text = "from due time to answer, corrected for coordinated omission"
    return text + (f"; median of {rounds} rounds" if rounds > 1 else "")


def _errors(report: Report) -> Iterator[Line]:
    if not report.errors:
        yield _row("errors", "none" if report.right else "none, but no answer either"), "" if report.right else "red"
        return
    share = 100 * report.failures / (report.failures + report.calls)
    yield _row("errors", f"{report.failures:,}, {share:.{0 if share >= 10 else 2}f} % of the calls"), "bold red"
    for kind, failures in sorted(report.errors.items(), key=lambda item: -item[1].count):
        example = theirs(failures.example, _EXAMPLE)
        yield _row("", f"{failures.count:,} {theirs(kind, 40)}" + (f": {example}" if example else "")), "red"


def _punctuality(report: Report) -> Iterator[Line]:
    assert report.plan.rate is not None
    if report.late:
        yield _row("late", f"{report.late:,} calls began more than 10 ms after their time, or not at all"), "yellow"
    over = report.calls + report.failures + report.cancelled + report.timed_out
    rate = over / report.seconds if report.seconds else math.inf
    if rate < 0.95 * report.plan.rate and not report.interrupted:
        text = f"only {three(rate)} of {three(report.plan.rate)} calls per second were over in time"
        yield _row("", text), "yellow"


def _latencies(report: Report) -> Iterator[Line]:
    latency = report.latency
    if not latency.count:
        yield _row("time", "none, for there were no right answers"), "dim"
        return
    values: dict[str, float | None] = {"min": latency.least, "mean": latency.mean}
    values |= {f"p{percent:g}": latency.percentile(percent) for percent in PERCENTILES}
    values["max"] = latency.most
    yield _row("time", "".join(name.rjust(_COLUMN) for name in values)), "dim"
    yield _row("", "".join(milliseconds(value).rjust(_COLUMN) for value in values.values())), ""
    yield _row("", what_times_are(report.plan)), "dim"


def _cost(report: Report) -> Line:
    cost = report.cost
    if cost is None:
        return _row("server", "CPU and memory unknown; name its process with --pid"), "dim"
    parts = []
    if report.cpu_per_call is not None:
        parts.append(f"{milliseconds(report.cpu_per_call)} of CPU per call")
    if report.seconds:
        parts.append(f"{100 * cost.cpu_seconds / report.seconds:.0f} % of a core")
    parts.append(f"{three(cost.rss / _MEBI)} MiB, {three(cost.peak_rss / _MEBI)} at most")
    return _row("server", ", ".join(parts)), ""


def _generator(report: Report) -> Iterator[Line]:
    generator = report.generator
    text = f"{100 * generator.busy:.0f} % of a core"
    if generator.ceiling is not None:
        text += f"; it could make about {three(float(f'{generator.ceiling:.2g}'))} such calls per second"
    if not generator.saturated:
        yield _row("generator", text), ""
        return
    yield _row("generator", text), "bold yellow"
    yield _row("", "SATURATED: above 80 % these figures may show its limit and not the server's"), "bold yellow"


def _row(name: str, text: str) -> str:
    return f"  {name:<{_NAMES}}{text}".rstrip()


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


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


def three(value: float) -> str:
    """Return a number with three significant digits, or with all digits before the point."""
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{digits}f}"
