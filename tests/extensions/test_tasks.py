"""What both sides read of a task, also from peers that err."""

from __future__ import annotations

from typing import Any

import pytest

from trimcp.extensions.tasks import read_state, status_text

WORKING: dict[str, Any] = {"taskId": "a", "status": "working", "createdAt": "x", "lastUpdatedAt": "y", "ttlMs": None}


def test_a_state_is_read_with_what_its_status_has() -> None:
    state = read_state({**WORKING, "ttlMs": 5, "pollIntervalMs": 2.5, "statusMessage": "half"})
    assert (state.id, state.status, state.message, state.ttl_ms, state.poll_interval_ms) == (
        "a",
        "working",
        "half",
        5,
        2.5,
    )
    assert not state.ended
    assert read_state({**WORKING, "status": "completed", "result": {}}).ended
    assert read_state({**WORKING, "status": "cancelled"}).ended
    assert read_state({**WORKING, "status": "completed", "resultType": "task"}).ended  # as it is created


@pytest.mark.parametrize(
    "raw",
    [
        None,
        {**WORKING, "taskId": 1},
        {**WORKING, "taskId": "a" * 2_000},
        {**WORKING, "status": "paused"},
        {**WORKING, "status": ["working"]},
        {**WORKING, "status": "completed"},
        {**WORKING, "status": "failed", "error": "no"},
        {**WORKING, "status": "input_required", "inputRequests": []},
    ],
)
def test_what_is_no_state_is_refused(raw: Any) -> None:
    with pytest.raises(ValueError, match="it"):
        read_state(raw)


@pytest.mark.parametrize(
    "odd", [{"ttlMs": "5"}, {"ttlMs": -1}, {"pollIntervalMs": True}, {"statusMessage": 7}, {"_meta": None}]
)
def test_what_is_odd_beside_it_is_left_out(odd: dict[str, Any]) -> None:
    state = read_state({**WORKING, **odd})
    assert (state.ttl_ms, state.message, state.progress) == (None, None, None)


@pytest.mark.parametrize(
    ("meta", "progress"), [({"progress": 1}, {"progress": 1}), ({"progress": "1"}, None), (7, None)]
)
def test_progress_is_read_if_it_is_a_number(meta: Any, progress: Any) -> None:
    assert read_state({**WORKING, "_meta": {"trimcp/progress": meta}}).progress == progress


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        ({"progress": 1}, "1"),
        ({"progress": 1, "total": 4}, "1 of 4"),
        ({"progress": 1.5, "total": 4, "message": "half"}, "half (1.5 of 4)"),
        ({"progress": 1, "message": "half"}, "half"),
    ],
)
def test_progress_as_text(progress: dict[str, Any], text: str) -> None:
    assert status_text(progress) == text
