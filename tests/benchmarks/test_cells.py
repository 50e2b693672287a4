"""What is measured."""

from __future__ import annotations

from cells import CELLS, SECTIONS, WINDOWS, cell
from names import BEFORE, FASTMCP, FLOOR, ONLY_THERE, ORDER, OURS, TYPESCRIPT


def test_names_are_unique() -> None:
    assert len({one.name for one in CELLS}) == len(CELLS)


def test_every_cell_is_shown_somewhere_and_every_section_has_some() -> None:
    assert {one.section for one in CELLS} == {section.name for section in SECTIONS}


def test_we_take_part_everywhere() -> None:
    for one in CELLS:
        assert OURS in one.peers
        assert set(one.peers) <= {*ORDER, *ONLY_THERE}
        assert BEFORE not in one.peers
        assert {OURS, BEFORE} <= set(one.beside_before().peers)
        assert one.beside_before().rounds_of(BEFORE, 5) == 5


def test_every_window_is_measured_on_every_road() -> None:
    for road in ("stdio", "http", "connections"):
        cells = [cell(f"window-{road}-{window}") for window in WINDOWS]
        assert [one.under_way * one.connections for one in cells] == list(WINDOWS)


def test_what_is_compared_takes_its_turns_in_the_same_rounds() -> None:
    for name in {one.beside for one in CELLS if one.beside}:
        together = [one for one in CELLS if one.beside == name]
        assert len(together) == 2
        assert len({(one.kind, one.road, one.rounds, one.quick) for one in together}) == 1


def test_those_no_bar_is_about_have_fewer_rounds() -> None:
    one = cell("http-2025-json")
    assert (one.rounds_of(OURS, 5), one.rounds_of(TYPESCRIPT, 5), one.rounds_of(FASTMCP, 5)) == (5, 5, 2)
    assert (one.rounds_of(OURS, 1), one.rounds_of(FASTMCP, 1)) == (1, 1)


def test_every_client_calls_a_server_that_can_be_called() -> None:
    for one in CELLS:
        if one.kind == "client":
            assert one.server in (FLOOR, OURS, TYPESCRIPT)


def test_a_server_is_told_to_answer_as_it_has_to() -> None:
    for one in CELLS:
        assert one.reply is None or one.serve == one.reply


def test_the_quick_form_takes_less() -> None:
    assert all(one.turn(quick=True) < one.turn(quick=False) for one in CELLS)
