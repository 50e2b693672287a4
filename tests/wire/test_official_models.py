"""The official Python models as a second opinion: they accept what we dump, and know the methods we know."""

from __future__ import annotations

from typing import Any, get_args

import attrs
import mcp_types.methods as official
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.wire.payload_strategies import values
from trimcp.wire.converter import converter_for
from trimcp.wire.input_requests import InputRequest, InputRequiredResult
from trimcp.wire.methods import METHODS, Direction, Method
from trimcp.wire.revisions import REVISIONS, V2025_11_25, V2026_07_28, Revision

JUDGED = [
    pytest.param(revision, row, id=f"{revision.name}-{row.name}")
    for revision in (V2025_11_25, V2026_07_28)
    for row in METHODS.values()
    if row.available(revision) and "tasks/" not in row.name
]
FOR_EACH = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))


def draw_dump(data: st.DataObject, tp: Any, revision: Revision) -> Any:
    payload = data.draw(values(tp, revision))
    return converter_for(revision).dump(payload)


@pytest.mark.parametrize(("revision", "row"), JUDGED)
@FOR_EACH
@given(data=st.data())
def test_they_accept_our_params(revision: Revision, row: Method, data: st.DataObject) -> None:
    params = draw_dump(data, row.params, revision)
    from_client = Direction.CLIENT_TO_SERVER in row.direction_at(revision)
    if row.is_notification:
        parse = official.parse_client_notification if from_client else official.parse_server_notification
    else:
        parse = official.parse_client_request if from_client else official.parse_server_request
    parse(row.name, revision.name, params)


@pytest.mark.parametrize(("revision", "row"), JUDGED)
@FOR_EACH
@given(data=st.data())
def test_they_accept_our_results(revision: Revision, row: Method, data: st.DataObject) -> None:
    if row.is_notification:
        return
    result = draw_dump(data, row.result, revision)
    from_server = Direction.CLIENT_TO_SERVER in row.direction_at(revision)
    parse = official.parse_server_result if from_server else official.parse_client_result
    parse(row.name, revision.name, result)


@FOR_EACH
@given(data=st.data())
def test_they_accept_our_questions(data: st.DataObject) -> None:
    result = draw_dump(data, InputRequiredResult, V2026_07_28)
    official.parse_server_result("tools/call", V2026_07_28.name, result)


@pytest.mark.parametrize("revision", REVISIONS, ids=str)
def test_they_know_the_same_methods(revision: Revision) -> None:
    tables = [
        (Direction.CLIENT_TO_SERVER, official.CLIENT_REQUESTS, official.CLIENT_NOTIFICATIONS),
        (Direction.SERVER_TO_CLIENT, official.SERVER_REQUESTS, official.SERVER_NOTIFICATIONS),
    ]
    for direction, *theirs in tables:
        known = {name for table in theirs for name, version in table if version == revision.name}
        ours = {
            name
            for name, row in METHODS.items()
            if row.available(revision) and direction in row.direction_at(revision) and "tasks/" not in name
        }
        assert ours == {name for name in known if "tasks/" not in name}, direction


def test_questions_have_the_same_names() -> None:
    ours = {attrs.fields(cls).method.default for cls in get_args(InputRequest)}
    assert ours == {name for name, _ in official.SERVER_REQUESTS} - {"ping"}
