"""A recording shows what a terminal showed, and when."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

_RECORDING: dict[str, Any] = runpy.run_path(
    str(Path(__file__).parents[2] / "docs" / "recording.py"), run_name="recording"
)
_TEXT = "{http://www.w3.org/2000/svg}text"
_PROGRAM = """
import sys, time
print("\\x1b[1mheading\\x1b[0m", flush=True)
sys.stdout.write("10 %")
sys.stdout.flush()
time.sleep(0.5)
print("\\r<done>\\x1b[K")
"""


def _texts(picture: str) -> list[str]:
    return ["".join(text.itertext()) for text in ElementTree.fromstring(picture).iter(_TEXT)]


@pytest.mark.slow
def test_what_was_overwritten_is_shown_until_then_and_the_end_stays(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_PROGRAM, "utf-8")
    shown = _RECORDING["record"](f"{sys.executable} program.py", tmp_path)
    told = {run.text: one for one in shown for run in one.runs}
    assert told["heading"].runs[0].bold
    assert told["10 %"].end < told["heading"].end
    assert told["<done>"].begin == told["10 %"].end
    assert told["<done>"].end == told["heading"].end


@pytest.mark.slow
def test_a_command_that_fails_is_not_recorded(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="did not end well: 3"):
        _RECORDING["record"](f"{sys.executable} -c 'raise SystemExit(3)'", tmp_path)


def test_a_picture_is_an_svg_with_each_text_in_its_row_and_time() -> None:
    shown, run = _RECORDING["Shown"], _RECORDING["Run"]
    picture = _RECORDING["draw"](
        [
            shown(0, 0.0, 10.0, (run(0, "$ trimcp", "default", True),)),
            shown(1, 1.0, 4.0, (run(2, "<1 %>", "red", False),)),
            shown(1, 4.0, 10.0, (run(2, "100 %", "a1b2c3", False),)),
        ],
        "A & B",
    )
    assert _texts(picture) == ["$ trimcp", "<1 %>", "100 %"]
    assert "A &amp; B" in picture
    assert "0%{opacity:0}10.00%{opacity:1}40.00%{opacity:0}" in picture
    assert "0%{opacity:0}40.00%{opacity:1}}" in picture
    assert 'fill="#f2777a"' in picture
    assert 'fill="#a1b2c3"' in picture


def test_a_recording_begins_with_its_fullest_picture() -> None:
    shown, run = _RECORDING["Shown"], _RECORDING["Run"]

    def row(number: int, begin: float, end: float, text: str) -> Any:
        return shown(number, begin, end, (run(0, text, "default", False),))

    recorded = [row(0, 0.0, 9.0, "$ trimcp"), row(1, 1.0, 4.0, "most of all there is"), row(1, 4.0, 9.0, "end")]
    opening = _RECORDING["OPENING"]
    assert _RECORDING["opened"](recorded) == [
        row(0, 0.0, opening, "$ trimcp"),
        row(1, 0.0, opening, "most of all there is"),
        row(0, opening, opening + 9.0, "$ trimcp"),
        row(1, opening + 1.0, opening + 4.0, "most of all there is"),
        row(1, opening + 4.0, opening + 9.0, "end"),
    ]


def test_the_recordings_in_the_documentation_are_of_the_commands_it_names() -> None:
    docs = Path(__file__).parents[2] / "docs"
    for name, one in _RECORDING["RECORDINGS"].items():
        picture = (docs / name).read_text("utf-8")
        assert f"$ {one.typed}" in _texts(picture)
        assert re.search(rf"\]\({Path(name).name}\)", (docs / one.page).read_text("utf-8"))
