"""What is seen meanwhile: a panel on a terminal, lines elsewhere, nothing where nothing is wanted."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tests.cli.reports import a_snapshot
from trimcp.cli.bench.table import MeasurementView
from trimcp.cli.screen import Screen


def view_on(
    *, terminal: bool, quiet: bool = False, seconds: float | None = None
) -> tuple[MeasurementView, io.StringIO]:
    written = io.StringIO()
    screen = Screen(quiet)
    screen.err = Console(
        file=written,
        force_terminal=terminal,
        width=100,
        markup=False,
        highlight=False,
        soft_wrap=True,
        _environ={"TERM": "xterm"},
    )
    return MeasurementView(screen, seconds), written


def test_where_nothing_can_be_redrawn_there_are_lines() -> None:
    view, written = view_on(terminal=False)
    view.begin("echo of library")
    view.tick(a_snapshot(elapsed=-0.5))
    for second in (0.0, 1.0, 2.0):
        view.tick(a_snapshot(elapsed=second))
    view.tick(a_snapshot(elapsed=3.5, share=1.0, rate=0.0))  # nothing but last answers
    view.end()
    title, *lines = written.getvalue().splitlines()
    assert title == "echo of library"
    assert [line.split()[0] for line in lines] == ["1.0", "2.0"]
    shown = "   1.0 s  1,234 per second  p50 1.00 ms  p90 2.00 ms  p99 3.00 ms  errors none  generator 25 %"
    assert lines[0] == shown


def test_a_long_measurement_has_about_twenty_lines() -> None:
    assert view_on(terminal=False, seconds=200.0)[0].tick_length == 10.0
    assert view_on(terminal=False, seconds=2.0)[0].tick_length == view_on(terminal=False)[0].tick_length == 1.0
    assert view_on(terminal=True, seconds=200.0)[0].tick_length == 0.5


def test_lines_show_errors_and_progress() -> None:
    view, written = view_on(terminal=False)
    view.begin("echo")
    view.tick(a_snapshot(errors={"timeout": 2, "wrong\x1b text": 7}, progress=9, reported=2))
    assert "errors 7 wrong\\x1b text, 2 timeout  progress 4.00 per second" in written.getvalue()


def test_on_a_terminal_a_panel_redraws_itself_and_is_gone_in_the_end() -> None:
    view, written = view_on(terminal=True)
    view.begin("echo of library")
    view.tick(a_snapshot(elapsed=-0.5, rate=0.0, calls=0))
    assert "warming up" in written.getvalue()
    view.tick(a_snapshot(rate=700.0))
    view.tick(a_snapshot(progress=4, reported=4, cancelled=3, errors={"timeout": 1}, busy=0.93))
    shown = written.getvalue()
    for part in [
        "1 s, 1 session, 16 calls under way",
        "700 per second  █",
        "1,234 per second  ▅█",
        "p50 1.00 ms  p90 2.00 ms  p99 3.00 ms",
        "500 answered rightly, 3 cancelled",
        "1 timeout",
        "8.00 messages per second",
        "93 % of a core, SATURATED",
    ]:
        assert part in shown
    view.end()
    assert written.getvalue().count("\x1b[?25l") == written.getvalue().count("\x1b[?25h") == 1


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_shows_nothing(terminal: bool) -> None:
    view, written = view_on(terminal=terminal, quiet=True)
    view.begin("echo of library")
    view.tick(a_snapshot())
    view.end()
    assert written.getvalue() == ""
