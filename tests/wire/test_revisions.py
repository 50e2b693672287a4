from __future__ import annotations

import operator
from typing import Any

import pytest

from trimcp.wire.revisions import (
    LATEST,
    LATEST_LEGACY,
    OLDEST,
    REVISIONS,
    V2024_11_05,
    V2025_03_26,
    V2025_06_18,
    V2025_11_25,
    V2026_07_28,
    Era,
    Revision,
    find,
)


def having(switch: str) -> list[Revision]:
    return [revision for revision in REVISIONS if getattr(revision, switch)]


def test_they_are_ordered_by_age() -> None:
    assert list(REVISIONS) == sorted(REVISIONS)
    assert (OLDEST, LATEST_LEGACY, LATEST) == (V2024_11_05, V2025_11_25, V2026_07_28)
    assert V2025_03_26 < V2025_06_18 <= V2025_06_18 < V2025_11_25
    assert len({*REVISIONS, Revision("2024-11-05")}) == 5


@pytest.mark.parametrize("compare", [operator.lt, operator.le, operator.gt, operator.ge])
def test_a_name_compares_as_its_revision_and_nothing_else_does(compare: Any) -> None:
    assert V2025_03_26 == "2025-03-26"
    assert compare(V2025_03_26, "2025-06-18") is compare(V2025_03_26, V2025_06_18)
    with pytest.raises(TypeError, match="a revision is compared with a revision or a date"):
        compare(V2025_03_26, "newest")


def test_names_find_them() -> None:
    assert [find(str(revision)) for revision in REVISIONS] == list(REVISIONS)
    assert find("2025-03-27") is None
    assert repr(V2026_07_28) == "<Revision 2026-07-28>"


def test_only_the_newest_is_modern() -> None:
    assert having("modern") == [V2026_07_28]
    assert {revision.era for revision in REVISIONS[:-1]} == {Era.LEGACY}


@pytest.mark.parametrize(
    ("switch", "revisions"),
    [
        # Key changes of 2025-03-26 and 2025-06-18: batching added, then removed.
        ("batching", [V2025_03_26]),
        # basic/transports: Streamable HTTP with sessions and resumable streams until SEP-2567 and SEP-2575.
        ("sessions", [V2025_03_26, V2025_06_18, V2025_11_25]),
        ("resumable", [V2025_03_26, V2025_06_18, V2025_11_25]),
        ("priming_event", [V2025_11_25]),  # SEP-1699
        ("version_header", [V2025_06_18, V2025_11_25, V2026_07_28]),
        ("method_headers", [V2026_07_28]),  # SEP-2243
        ("disconnect_cancels", [V2024_11_05, V2026_07_28]),
        ("server_may_call", [V2024_11_05, V2025_03_26, V2025_06_18, V2025_11_25]),  # SEP-2322
        ("error_without_id", [V2025_11_25, V2026_07_28]),
        ("invalid_arguments_are_tool_errors", [V2025_11_25, V2026_07_28]),  # SEP-1303
        ("logs_on_request", [V2026_07_28]),  # SEP-2575
        ("url_elicitation_error", [V2025_11_25]),
    ],
)
def test_what_differs_in_conduct(switch: str, revisions: list[Revision]) -> None:
    assert having(switch) == revisions


def test_the_code_of_a_missing_resource_changed() -> None:
    assert {revision.resource_missing_code for revision in REVISIONS[:-1]} == {-32002}
    assert V2026_07_28.resource_missing_code == -32602
