"""The display while `trimcp bench` measures: a live panel, or a line at intervals."""

from __future__ import annotations

from collections import deque
from typing import Final

import attrs
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trimcp.bench.report import Snapshot
from trimcp.cli.bench_table import count_of, milliseconds, three
from trimcp.cli.screen import Screen
from trimcp.cli.text import theirs

_BARS: Final = "▁▂▃▄▅▆▇█"
_HISTORY: Final = 40
_BAR: Final = 30
_LINES: Final = 20
_EARLY: Final = 0.1
_BUSY: Final = 0.8


@attrs.define(eq=False)
class View:
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
        rows.add_row("  time", _percentiles(now))
        rows.add_row("  calls", f"{now.calls:,} answered rightly{_given_up(now)}")
        rows.add_row("  errors", Text(_errors(now), style="red" if now.errors else ""))
        if now.progress:
            rows.add_row("  progress", f"{three(now.reported / now.seconds)} messages per second")
        busy = now.busy > _BUSY
        share = f"{100 * now.busy:.0f} % of a core" + (", SATURATED" if busy else "")
        rows.add_row("  generator", Text(share, style="bold yellow" if busy else ""))
        return Group(title, bar, rows)


def _line(now: Snapshot) -> str:
    parts = [f"{now.elapsed:6.1f} s", f"{three(now.rate)} per second", _percentiles(now)]
    parts.append(f"errors {_errors(now)}")
    if now.progress:
        parts.append(f"progress {three(now.reported / now.seconds)} per second")
    parts.append(f"generator {100 * now.busy:.0f} %")
    return "  ".join(parts)


def _percentiles(now: Snapshot) -> str:
    return "  ".join(f"p{each} {milliseconds(now.times.percentile(each))}" for each in (50, 90, 99))


def _given_up(now: Snapshot) -> str:
    counts = {"cancelled": now.cancelled, "timed out": now.timed_out, "late": now.late}
    return "".join(f", {count:,} {what}" for what, count in counts.items() if count)


def _errors(now: Snapshot) -> str:
    if not now.errors:
        return "none"
    kinds = sorted(now.errors.items(), key=lambda item: -item[1])
    return ", ".join(f"{count:,} {theirs(kind, 40)}" for kind, count in kinds)


def _sparks(rates: deque[float]) -> str:
    most = max(rates, default=0.0)
    if not most:
        return ""
    return "".join(_BARS[min(len(_BARS) - 1, int(rate / most * len(_BARS)))] for rate in rates)
