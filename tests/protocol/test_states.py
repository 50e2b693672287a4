"""The tables: every transition there is, and every one there is not."""

from __future__ import annotations

from enum import Enum
from itertools import product
from typing import Any

import pytest

from trimcp.errors import LocalError
from trimcp.protocol.states import (
    HANDSHAKE,
    INBOUND,
    Handshake,
    HandshakeStep,
    Inbound,
    InboundStep,
    fire,
)

H, HS, I, IS = Handshake, HandshakeStep, Inbound, InboundStep  # noqa: E741  # of a table, which is narrow

_LAWS: dict[str, tuple[Any, type[Enum], type[Enum], dict[tuple[Enum, Enum], Enum]]] = {
    "handshake": (
        HANDSHAKE,
        H,
        HS,
        {
            (H.NEW, HS.INITIALIZE): H.OFFERED,
            (H.OFFERED, HS.RESULT): H.AGREED,
            (H.OFFERED, HS.REFUSED): H.NEW,
            (H.AGREED, HS.INITIALIZED): H.READY,
            **{(state, HS.CLOSE): H.CLOSED for state in H},
        },
    ),
    "inbound": (
        INBOUND,
        I,
        IS,
        {
            (I.UNDER_WAY, IS.ANSWER): I.ANSWERED,
            (I.UNDER_WAY, IS.CANCEL): I.CANCELLED,
            (I.CANCELLED, IS.CANCEL): I.CANCELLED,
            (I.CANCELLED, IS.DROP): I.ANSWERED,
        },
    ),
}
_CASES = [
    pytest.param(table, state, step, allowed.get((state, step)), id=f"{name}-{state.name}-{step.name}")
    for name, (table, states, steps, allowed) in _LAWS.items()
    for state, step in product(states, steps)
]


@pytest.mark.parametrize(("table", "state", "step", "expected"), _CASES)
def test_every_transition_is_as_the_law_says(table: Any, state: Any, step: Any, expected: Any) -> None:
    if expected is None:
        with pytest.raises(LocalError, match=state.name.lower()):
            fire(table, state, step)
    else:
        assert fire(table, state, step) is expected


@pytest.mark.parametrize("name", _LAWS)
def test_a_table_knows_all_its_states_and_reaches_them(name: str) -> None:
    table, states, _steps, _allowed = _LAWS[name]
    assert set(table) == set(states)
    reached = {next(iter(states))}
    for _ in states:
        reached |= {target for state in reached for target in table[state].values()}
    assert reached == set(states)
