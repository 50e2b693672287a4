from __future__ import annotations

import pytest

from trimcp.wire.capabilities import ClientCapabilities, ServerCapabilities, declares
from trimcp.wire.converter import converter_for
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, V2024_11_05


@pytest.mark.parametrize(
    ("declared", "path", "expected"),
    [
        ({}, "tools", False),
        ({"tools": {}}, "tools", True),
        ({"tools": {}}, "tools.listChanged", False),
        ({"tools": {"listChanged": False}}, "tools.listChanged", False),
        ({"tools": {"listChanged": True}}, "tools.listChanged", True),
        ({"resources": {"subscribe": True}}, "resources.subscribe", True),
        ({"completions": {}}, "completions", True),
        ({"tasks": {"requests": {"tools": {"call": {}}}}}, "tasks.requests.tools.call", True),
        ({"tasks": {"requests": {}}}, "tasks.requests.tools.call", False),
        ({"x-own": {"deep": {}}}, "x-own.deep", True),
        ({"x-own": True}, "x-own.deep", False),
        ({"experimental": {"mine": {}}}, "experimental.mine", True),
        ({"x-own": {}}, "extra", False),
    ],
)
def test_what_a_server_declares(declared: dict[str, object], path: str, expected: bool) -> None:
    assert declares(converter_for(LATEST_LEGACY).load(declared, ServerCapabilities), path) is expected


@pytest.mark.parametrize(
    ("declared", "form", "url"),
    [
        ({}, False, False),
        ({"elicitation": {}}, True, False),
        ({"elicitation": {"form": {}}}, True, False),
        ({"elicitation": {"url": {}}}, False, True),
        ({"elicitation": {"form": {}, "url": {}}}, True, True),
    ],
)
def test_elicitation_without_a_mode_means_forms(declared: dict[str, object], form: bool, url: bool) -> None:
    found = converter_for(LATEST).load(declared, ClientCapabilities)
    assert (declares(found, "elicitation.form"), declares(found, "elicitation.url")) == (form, url)


def test_what_nobody_defined_survives() -> None:
    declared = {"tools": {"listChanged": True, "x": 1}, "x-own": [1], "logging": {"y": {}}}
    converter = converter_for(LATEST)
    loaded = converter.load(declared, ServerCapabilities)
    assert loaded.extra == {"x-own": [1]}
    assert converter.dump(loaded) == declared


def test_a_capability_that_a_revision_lacks_is_not_smuggled_in_as_unknown() -> None:
    converter = converter_for(V2024_11_05)
    loaded = converter.load({"completions": {}, "extensions": {}}, ServerCapabilities)
    assert loaded == ServerCapabilities()
    assert converter.dump(ServerCapabilities(completions={}, extra={"tools": "mine", "x": 1})) == {"x": 1}
