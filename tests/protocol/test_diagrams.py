"""The diagrams in the documentation are those of the tables, and of the imports."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from trimcp.protocol.states import HANDSHAKE, INBOUND

_DIAGRAMS: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "diagrams.py"))


def test_the_committed_page_is_what_the_tables_say() -> None:
    page: Path = _DIAGRAMS["PAGE"]
    assert page.read_text(encoding="utf-8") == _DIAGRAMS["page"](), "run: python docs/diagrams.py"


def test_the_committed_floors_are_those_of_the_imports() -> None:
    picture: Path = _DIAGRAMS["FLOORS"]
    assert picture.read_text(encoding="utf-8") == _DIAGRAMS["floors"](), "run: python docs/diagrams.py"


def test_a_line_that_follows_from_others_is_left_out() -> None:
    graph: dict[str, set[str]] = {"cli": {"server", "wire"}, "server": {"wire"}, "wire": set()}
    assert list(_DIAGRAMS["_direct"](graph)) == [("cli", "server"), ("server", "wire")]


@pytest.mark.parametrize("table", [HANDSHAKE, INBOUND])
def test_every_transition_is_drawn_once(table: Any) -> None:
    drawn = _DIAGRAMS["draw"](table).splitlines()
    for state, steps in table.items():
        for step, target in steps.items():
            words = step.name.lower().replace("_", " ")
            assert drawn.count(f"    {state.name} --> {target.name}: {words}") == 1
    arrows = [line for line in drawn if "-->" in line and "[*]" not in line]
    assert len(arrows) == sum(len(steps) for steps in table.values())


def test_a_machine_begins_at_its_first_state_and_ends_where_nothing_leads_on() -> None:
    drawn = _DIAGRAMS["draw"](INBOUND)
    assert "[*] --> UNDER_WAY" in drawn
    assert "ANSWERED --> [*]" in drawn
    assert "CLOSED --> [*]" in _DIAGRAMS["draw"](HANDSHAKE)
