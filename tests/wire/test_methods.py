from __future__ import annotations

from typing import get_args

import attrs
import pytest

from trimcp.wire.capabilities import ClientCapabilities, ServerCapabilities
from trimcp.wire.converter import converter_for
from trimcp.wire.input_requests import InputRequest, InputResponse
from trimcp.wire.methods import METHODS, Direction
from trimcp.wire.revisions import LATEST_LEGACY, REVISIONS, V2024_11_05, V2025_11_25, V2026_07_28, Revision

C2S, S2C, BOTH = Direction.CLIENT_TO_SERVER, Direction.SERVER_TO_CLIENT, Direction.BOTH


@pytest.mark.parametrize("revision", REVISIONS, ids=str)
def test_every_row_can_be_loaded_and_dumped_where_it_is_available(revision: Revision) -> None:
    converter = converter_for(revision)
    for row in METHODS.values():
        if row.available(revision):
            for tp in (row.params, row.result):
                if tp is not None:
                    assert callable(converter.loader(tp))
                    assert callable(converter.dumper(tp))


def test_rows_are_found_by_name_and_notifications_have_no_result() -> None:
    for name, row in METHODS.items():
        assert row.name == name
        assert row.is_notification == name.startswith("notifications/")


@pytest.mark.parametrize(
    ("name", "there", "gone"),
    [
        ("initialize", LATEST_LEGACY, V2026_07_28),
        ("ping", LATEST_LEGACY, V2026_07_28),
        ("sampling/createMessage", V2024_11_05, V2026_07_28),
        ("tasks/get", V2025_11_25, V2026_07_28),
        ("subscriptions/listen", V2026_07_28, V2025_11_25),
        ("server/discover", V2026_07_28, V2025_11_25),
        ("elicitation/create", V2025_11_25, V2024_11_05),
    ],
)
def test_a_method_is_available_in_some_revisions_only(name: str, there: Revision, gone: Revision) -> None:
    assert METHODS[name].available(there)
    assert not METHODS[name].available(gone)


def test_who_may_send_it() -> None:
    assert METHODS["ping"].direction_at(V2024_11_05) == BOTH
    assert METHODS["tools/call"].direction_at(V2026_07_28) == C2S
    assert METHODS["notifications/cancelled"].direction_at(V2026_07_28) == BOTH
    assert METHODS["notifications/progress"].direction_at(V2025_11_25) == BOTH
    assert METHODS["notifications/progress"].direction_at(V2026_07_28) == S2C
    assert C2S in BOTH
    assert C2S not in S2C


def test_what_an_input_required_result_may_ask_and_what_it_may_answer() -> None:
    asked = {attrs.fields(request).method.default for request in get_args(InputRequest)}
    assert asked == {"sampling/createMessage", "elicitation/create", "roots/list"}
    assert {METHODS[name].result for name in asked} == set(get_args(InputResponse))
    asking = {name: row.may_ask_from for name, row in METHODS.items() if row.may_ask_from is not None}
    assert asking == dict.fromkeys(("tools/call", "prompts/get", "resources/read"), V2026_07_28)


def test_cacheable_results_are_those_with_cache_hints() -> None:
    cacheable = {name for name, row in METHODS.items() if row.cacheable}
    hinted = {name for name, row in METHODS.items() if row.result and "ttl_ms" in attrs.fields_dict(row.result)}
    assert (
        cacheable
        == hinted
        == {n for n in METHODS if n.endswith("/list")} - {"roots/list", "tasks/list"}
        | {*("resources/read", "server/discover")}
    )


def test_capabilities_are_spelt_as_the_capability_classes_spell_them() -> None:
    converter = converter_for(LATEST_LEGACY)
    for row in METHODS.values():
        if row.capability is None:
            continue
        declared: dict[str, object] = {}
        steps = row.capability.split(".")
        here = declared
        for step in steps[:-1]:
            here[step] = here = {}
        here[steps[-1]] = steps[-1] in ("subscribe", "listChanged") or {}
        cls = ClientCapabilities if steps[0] in ("roots", "sampling", "elicitation") else ServerCapabilities
        assert converter.load(declared, cls).extra == {}, row.capability
        assert converter.dump(converter.load(declared, cls)) == declared, row.capability
