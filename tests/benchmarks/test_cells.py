"""What is measured."""

from __future__ import annotations

from cells import CELLS, SECTIONS, WINDOWS, cell
from names import ORDER, OURS


def test_names_are_unique() -> None:
    assert len({one.name for one in CELLS}) == len(CELLS)


def test_every_cell_is_shown_somewhere_and_every_section_has_some() -> None:
    assert {one.section for one in CELLS} == {section.name for section in SECTIONS}


def test_we_take_part_everywhere() -> None:
    for one in CELLS:
        assert OURS in one.peers
        assert set(one.peers) <= set(ORDER)


def test_every_window_is_measured_on_every_road() -> None:
    for road in ("stdio", "http", "websocket"):
        assert [cell(f"window-{road}-{window}").under_way for window in WINDOWS] == list(WINDOWS)


def test_a_server_is_told_to_answer_as_it_has_to() -> None:
    for one in CELLS:
        assert one.reply is None or one.serve == one.reply


def test_the_quick_form_takes_less() -> None:
    assert all(one.turn(quick=True) < one.turn(quick=False) for one in CELLS)
