"""Terminal output: results on standard output, everything else on standard error, at most one progress bar.

All text is escaped here and never interpreted as rich markup. What peers said went through `text.theirs` before.
"""

from __future__ import annotations

import sys
import time
from typing import Final

import attrs
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from trimcp.cli.text import as_json, number_text, theirs
from trimcp.support.cleaning import clean
from trimcp.wire.lifecycle import LoggingMessageParams, ProgressParams

_SECONDS_PER_LINE: Final = 1.0
_LONGEST_LINE: Final = 2_000
_STYLES: Final = {"debug": "dim", "info": "cyan", "notice": "cyan", "warning": "yellow"}


def _console(*, stderr: bool) -> Console:
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, soft_wrap=True)


@attrs.define(eq=False)
class Screen:
    """Standard output and standard error of the command."""

    quiet: bool = False  # show results and errors only
    # show what the server writes to its standard error; before it is connected its last words are part of the error
    # instead
    listening: bool = False
    out: Console = attrs.field(init=False, factory=lambda: _console(stderr=False))
    err: Console = attrs.field(init=False, factory=lambda: _console(stderr=True))
    _bar: Progress | None = attrs.field(init=False, default=None)
    _task: TaskID | None = attrs.field(init=False, default=None)
    _next_line: float = attrs.field(init=False, default=0.0)

    @property
    def live(self) -> bool:
        """Whether standard error is a terminal that can redraw a line."""
        return self.err.is_terminal and not self.err.is_dumb_terminal

    def show(self, text: str, style: str = "") -> None:
        """Print text to standard output, with what could control the terminal escaped."""
        self.out.print(Text(clean(text), style=style))

    def note(self, text: str, style: str = "") -> None:
        """Print text to standard error, above the progress bar if it is shown, with the same escaped."""
        if not self.quiet:
            self.complain(text, style)

    def complain(self, text: str, style: str = "") -> None:
        """Print text to standard error also where it is quiet, with the same escaped."""
        self.err.print(Text(clean(text), style=style))

    def prompt(self, text: str) -> None:
        """Print text to standard error, with the same escaped, and stay where it ends."""
        sys.stderr.write(clean(text))  # rich would end the line
        sys.stderr.flush()

    def server_says(self, line: str) -> None:
        """Print a line the server wrote to its standard error."""
        if self.listening:
            # Keep the indentation, which matters in tracebacks.
            self.note(f"server: {theirs(line.rstrip()[:_LONGEST_LINE], None)}", "dim")

    def log(self, params: LoggingMessageParams) -> None:
        """Print a log message."""
        data = theirs(params.data if isinstance(params.data, str) else as_json(params.data), None)
        source = f" {theirs(params.logger, 200)}" if params.logger else ""
        self.note(f"[{params.level}{source}] {data}", _STYLES.get(params.level, "red"))

    def trace(self, line: str) -> None:
        """Print a line of the trace."""
        self.complain(line.rstrip("\n"), "dim")

    # Progress

    def progress(self, step: ProgressParams) -> None:
        """Show the progress of a call: in the bar, or without a live terminal in one line per second."""
        if self.quiet:
            return
        total = step.total or None
        message = theirs(step.message, 60) if step.message else ""
        count = number_text(step.progress) + ("" if total is None else f"/{number_text(total)}")
        if not self.live:
            now = time.monotonic()
            done = total is not None and step.progress >= total
            if now >= self._next_line or done:
                self._next_line = now + _SECONDS_PER_LINE
                self.note(f"  {count} {message}".rstrip())
            return
        if self._bar is None:
            self._bar = self._make_bar()
            self._task = self._bar.add_task("", total=total, count=count)
            self._bar.start()
        assert self._task is not None
        self._bar.update(self._task, completed=step.progress, total=total, description=message, count=count)

    def _make_bar(self) -> Progress:
        return Progress(
            BarColumn(bar_width=30),
            TextColumn("{task.fields[count]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=self.err,
            transient=True,
        )

    def end_progress(self) -> None:
        """Remove the bar; the next progress shows it again."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None
        self._next_line = 0.0

    def give_back(self) -> None:
        """Restore the terminal before the process ends at once."""
        if self.live:
            sys.stderr.write("\x1b[?25h\n")
            sys.stderr.flush()
