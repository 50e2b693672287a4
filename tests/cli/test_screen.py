"""What a person sees while a call runs, on a terminal and where nothing can be redrawn."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from trimcp.cli.screen import Screen
from trimcp.cli.text import number_text
from trimcp.wire.lifecycle import ProgressParams


def a_screen(*, terminal: bool) -> tuple[Screen, io.StringIO]:
    written = io.StringIO()
    screen = Screen(listening=True)
    screen.err = Console(
        file=written, force_terminal=terminal, width=100, markup=False, highlight=False, soft_wrap=True
    )
    return screen, written


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *((0, "0"), (7.0, "7"), (958_464, "958,464"), (1e6, "1,000,000"), (0.5, "0.5"), (12.345678, "12.35")),
        *((-3, "-3"), (1e15, "1,000,000,000,000,000"), (1e300, "1e+300")),
    ],
)
def test_numbers_are_written_as_people_write_them(value: float, shown: str) -> None:
    assert number_text(value) == shown


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_counts_in_whole_numbers(terminal: bool) -> None:
    screen, written = a_screen(terminal=terminal)
    screen.progress(ProgressParams(progress_token=1, progress=958_464, total=1_000_000, message="a\nfile"))
    screen.end_progress()
    assert "958,464/1,000,000" in written.getvalue()
    assert "a file" in written.getvalue()
    screen.progress(ProgressParams(progress_token=1, progress=0.25, total=None))
    screen.end_progress()
    assert "0.25" in written.getvalue()


def test_what_a_server_writes_keeps_its_indentation() -> None:
    screen, written = a_screen(terminal=False)
    for line in (
        "Traceback (most recent call last):",
        '  File "x.py", line 1, in <module>\r',
        "    1 / 0\x1b[2J",
        "y" * 9_000,
    ):
        screen.server_says(line)
    *lines, long = written.getvalue().splitlines()
    assert lines == [
        "server: Traceback (most recent call last):",
        'server:   File "x.py", line 1, in <module>',
        "server:     1 / 0\\x1b[2J",
    ]
    assert len(long) < 2_100
