"""The client's choice of an era: the decision table, row by row and then all of it."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from trimcp.protocol.negotiation import Decision, Met, Next, ProbeResult, decide, decide_again, opening
from trimcp.wire.codes import (
    HEADER_MISMATCH,
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    MISSING_CAPABILITY,
    UNSUPPORTED_VERSION,
)
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, REVISIONS, V2024_11_05, V2025_06_18, V2026_07_28

MODERN_ONLY = (V2026_07_28,)
LEGACY_ONLY = tuple(r for r in REVISIONS if not r.modern)
OLD = (V2024_11_05, V2025_06_18)
UNKNOWN = "2031-01-01"


def _unsupported(*names: Any) -> ProbeResult:
    return ProbeResult(Met.ERROR, code=UNSUPPORTED_VERSION, data={"supported": list(names), "requested": "x"})


_ROWS = [
    (ProbeResult(Met.DISCOVERED, [LATEST.name]), REVISIONS, 1, Next.USE, LATEST),
    (ProbeResult(Met.DISCOVERED, [UNKNOWN, LATEST.name]), MODERN_ONLY, 1, Next.USE, LATEST),
    (ProbeResult(Met.DISCOVERED, [UNKNOWN]), REVISIONS, 1, Next.INITIALIZE, LATEST_LEGACY),
    (ProbeResult(Met.DISCOVERED, [LATEST_LEGACY.name]), REVISIONS, 1, Next.INITIALIZE, LATEST_LEGACY),
    (ProbeResult(Met.DISCOVERED, []), REVISIONS, 1, Next.INITIALIZE, LATEST_LEGACY),
    (ProbeResult(Met.DISCOVERED, [UNKNOWN]), MODERN_ONLY, 1, Next.FAIL, None),
    (_unsupported(LATEST.name), REVISIONS, 1, Next.DISCOVER, LATEST),
    (_unsupported(LATEST.name), REVISIONS, 2, Next.FAIL, None),
    (_unsupported(UNKNOWN), REVISIONS, 1, Next.FAIL, None),
    (_unsupported(LATEST_LEGACY.name), REVISIONS, 1, Next.INITIALIZE, LATEST_LEGACY),
    (_unsupported(UNKNOWN, "2024-11-05", "2025-06-18"), REVISIONS, 1, Next.INITIALIZE, V2025_06_18),
    (_unsupported(LATEST_LEGACY.name, LATEST.name), REVISIONS, 1, Next.DISCOVER, LATEST),
    (_unsupported(LATEST_LEGACY.name, LATEST.name), REVISIONS, 2, Next.INITIALIZE, LATEST_LEGACY),
    (_unsupported(LATEST_LEGACY.name), MODERN_ONLY, 1, Next.FAIL, None),
    (ProbeResult(Met.DISCOVERED, [UNKNOWN, "2025-06-18"]), REVISIONS, 1, Next.INITIALIZE, V2025_06_18),
    (_unsupported(7, None, {}), REVISIONS, 1, Next.FAIL, None),
    (ProbeResult(Met.ERROR, code=UNSUPPORTED_VERSION), REVISIONS, 1, Next.FAIL, None),
    (ProbeResult(Met.ERROR, code=UNSUPPORTED_VERSION, data=["x"]), REVISIONS, 1, Next.FAIL, None),
    (ProbeResult(Met.ERROR, code=UNSUPPORTED_VERSION, data={"supported": 3}), REVISIONS, 1, Next.FAIL, None),
    (ProbeResult(Met.ERROR, code=HEADER_MISMATCH), REVISIONS, 1, Next.FAIL, None),
    (ProbeResult(Met.ERROR, code=MISSING_CAPABILITY), REVISIONS, 1, Next.FAIL, None),
    (ProbeResult(Met.ERROR, code=METHOD_NOT_FOUND), REVISIONS, 1, Next.INITIALIZE, LATEST_LEGACY),
    (ProbeResult(Met.ERROR, code=-32600), OLD, 1, Next.INITIALIZE, V2025_06_18),
    (ProbeResult(Met.ERROR, code=0), REVISIONS, 1, Next.INITIALIZE, LATEST_LEGACY),
    (ProbeResult(Met.ERROR, code=METHOD_NOT_FOUND), MODERN_ONLY, 1, Next.FAIL, None),
    (ProbeResult(Met.NONSENSE), REVISIONS, 1, Next.INITIALIZE, LATEST_LEGACY),
    (ProbeResult(Met.NONSENSE), MODERN_ONLY, 1, Next.FAIL, None),
    (ProbeResult(Met.SILENCE), REVISIONS, 1, Next.INITIALIZE, LATEST_LEGACY),
    (ProbeResult(Met.SILENCE), MODERN_ONLY, 1, Next.FAIL, None),
    (ProbeResult(Met.UNANSWERED, why="404"), REVISIONS, 1, Next.INITIALIZE, LATEST_LEGACY),
    (ProbeResult(Met.UNANSWERED, why="404"), MODERN_ONLY, 1, Next.FAIL, None),
    (ProbeResult(Met.DIED), REVISIONS, 1, Next.RESPAWN, LATEST_LEGACY),
    (ProbeResult(Met.DIED), MODERN_ONLY, 1, Next.FAIL, None),
]


@pytest.mark.parametrize(("outcome", "offered", "probed", "move", "revision"), _ROWS)
def test_a_row_of_the_table(outcome: ProbeResult, offered: Any, probed: int, move: Next, revision: Any) -> None:
    decision = decide(outcome, offered, probed=probed)
    assert (decision.next, decision.revision) == (move, revision)
    assert decision.why


@pytest.mark.parametrize(
    ("code", "listed", "offered", "probed", "move", "revision"),
    [
        (UNSUPPORTED_VERSION, [LATEST.name], REVISIONS, 0, Next.DISCOVER, LATEST),
        (UNSUPPORTED_VERSION, [UNKNOWN], REVISIONS, 1, Next.DISCOVER, LATEST),
        (UNSUPPORTED_VERSION, None, REVISIONS, 1, Next.DISCOVER, LATEST),
        (UNSUPPORTED_VERSION, None, REVISIONS, 2, Next.FAIL, None),
        (UNSUPPORTED_VERSION, None, LEGACY_ONLY, 0, Next.FAIL, None),
        (UNSUPPORTED_VERSION, ["2025-06-18"], REVISIONS, 0, Next.INITIALIZE, V2025_06_18),
        (UNSUPPORTED_VERSION, ["2024-11-05", LATEST.name], REVISIONS, 2, Next.INITIALIZE, V2024_11_05),
        (UNSUPPORTED_VERSION, [LATEST_LEGACY.name], LEGACY_ONLY, 0, Next.FAIL, None),
        (METHOD_NOT_FOUND, [LATEST.name], REVISIONS, 0, Next.DISCOVER, LATEST),
        (METHOD_NOT_FOUND, [LATEST.name], LEGACY_ONLY, 0, Next.FAIL, None),
        (METHOD_NOT_FOUND, ["2025-06-18"], REVISIONS, 0, Next.FAIL, None),
        (INVALID_PARAMS, ["2024-11-05"], REVISIONS, 1, Next.INITIALIZE, V2024_11_05),
        (INVALID_PARAMS, [UNKNOWN], REVISIONS, 1, Next.FAIL, None),
        (INVALID_PARAMS, None, REVISIONS, 1, Next.FAIL, None),
    ],
)
def test_what_follows_a_refused_initialize(
    code: int, listed: Any, offered: Any, probed: int, move: Next, revision: Any
) -> None:
    data = None if listed is None else {"supported": listed}
    decision = decide_again(code, data, [LATEST_LEGACY], offered, probed=probed)
    assert (decision.next, decision.revision) == (move, revision)
    assert decision.why


_OUTCOMES = [
    *(ProbeResult(Met.DISCOVERED, names) for names in ([], [UNKNOWN], [LATEST.name], [r.name for r in REVISIONS])),
    *(ProbeResult(Met.ERROR, code=code) for code in (-32700, -32603, -32601, -32022, -32021, -32020, -32000, 0, 1001)),
    _unsupported(LATEST.name),
    _unsupported(),
    ProbeResult(Met.NONSENSE),
    ProbeResult(Met.SILENCE),
    ProbeResult(Met.UNANSWERED),
    ProbeResult(Met.DIED),
]


def test_a_failure_is_told_by_what_was_met_and_not_by_what_was_offered() -> None:
    assert (
        decide(ProbeResult(Met.UNANSWERED, why="refused"), MODERN_ONLY).why
        == "server/discover was not answered: refused"
    )
    assert (
        decide(ProbeResult(Met.NONSENSE, why="a page"), MODERN_ONLY).why
        == "server/discover was not answered as it has to be: a page"
    )
    for met in (Met.NONSENSE, Met.SILENCE, Met.DIED, Met.UNANSWERED):
        assert "legacy" not in decide(ProbeResult(met), MODERN_ONLY).why
    assert "of the legacy era" in decide(ProbeResult(Met.ERROR, code=METHOD_NOT_FOUND), MODERN_ONLY).why


@pytest.mark.parametrize("offered", [REVISIONS, MODERN_ONLY, LEGACY_ONLY, OLD])
@pytest.mark.parametrize(("outcome", "probed"), list(product(_OUTCOMES, (1, 2, 3))))
def test_whatever_is_met_the_move_is_one_we_can_make(outcome: ProbeResult, probed: int, offered: Any) -> None:
    decision = decide(outcome, offered, probed=probed)
    if decision.next is Next.FAIL:
        assert decision.revision is None
    else:
        assert decision.revision is not None
        assert decision.revision in offered
        assert decision.revision.modern == (decision.next in (Next.USE, Next.DISCOVER))
    if probed > 1:
        assert decision.next is not Next.DISCOVER  # it ends


@pytest.mark.parametrize(
    ("offered", "expected"),
    [
        (REVISIONS, (Next.DISCOVER, LATEST)),
        (MODERN_ONLY, (Next.DISCOVER, LATEST)),
        (LEGACY_ONLY, (Next.INITIALIZE, LATEST_LEGACY)),
        (OLD, (Next.INITIALIZE, V2025_06_18)),
    ],
)
def test_the_opening_fits_what_is_offered(offered: Any, expected: Any) -> None:
    move: Decision = opening(offered)
    assert (move.next, move.revision) == expected


def test_a_servers_long_list_stays_out_of_the_message() -> None:
    decision = decide(_unsupported(*("x" * 10_000 for _ in range(1000))), REVISIONS)
    assert len(decision.why) < 1000
