"""Tests of `trimcp.schema.engine`: what is refused, and what a tamed schema looks like."""

from __future__ import annotations

from typing import Any

import pytest

from trimcp.schema.engine import PEERS, SchemaError, tame
from trimcp.schema.problems import NO_ALTERNATIVE, VISIT, shorten


def tamed(schema: Any, *, max_depth: int = PEERS.depth, terse: bool = False) -> Any:
    return tame(schema, PEERS._replace(depth=max_depth), terse=terse).schema


def gate(keyword: str, target: str) -> dict[str, Any]:
    return {"if": {VISIT: True}, "then": {keyword: target}, "else": {VISIT: True}}


def test_without_references_nothing_changes() -> None:
    schema = {"properties": {"a": {"type": "integer"}}, "default": {"$ref": "#/nowhere"}, "enum": [{"$ref": "x"}]}
    assert tamed(schema) == schema
    assert tamed(schema) is not schema
    assert tamed(True) is True


def test_references_are_counted_behind_what_was_there() -> None:
    schema = {
        "$ref": "#/$defs/a",
        "minLength": 1,
        "allOf": [{}],
        "$defs": {"a": {"$anchor": "a"}, "b": {"$dynamicRef": "#a"}},
    }
    assert tamed(schema) == {
        "minLength": 1,
        "allOf": [{}, gate("$ref", "#/$defs/a")],
        "$defs": {"a": {"$anchor": "a"}, "b": {"allOf": [gate("$dynamicRef", "#a")]}},
    }
    assert schema["$ref"] == "#/$defs/a"


def test_terse_copies_judge_alternatives_without_errors() -> None:
    schema = {"anyOf": [{"oneOf": [{}, {"$ref": "#/$defs/a"}]}], "$defs": {"a": {}}}
    inner = {"allOf": [{"if": {"oneOf": [{}, {"allOf": [gate("$ref", "#/$defs/a")]}]}, "else": NO_ALTERNATIVE}]}
    outer = {"if": {"anyOf": [inner]}, "else": NO_ALTERNATIVE}
    assert tamed(schema, terse=True) == {"$defs": {"a": {}}, "allOf": [outer]}


def test_subschemas_are_counted() -> None:
    schema = {"properties": {"a": {}, "b": {"items": {}}}, "x": {"y": {}}, "not": {"$ref": "#/x/y"}}
    assert tame(schema, PEERS._replace(depth=9, subschemas=9)).errors == 6
    required = {"required": ["a", "b"], "dependentRequired": {"a": ["c", "d"]}, "dependencies": {"a": ["e"], "b": {}}}
    assert tame(required, PEERS).errors == 2 + 5


def test_old_references_lose_what_they_hide() -> None:
    old = {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"a": {}}}
    schema = {**old, "$ref": "#/definitions/a", "minLength": 1}
    assert tamed(schema) == {**old, "allOf": [gate("$ref", "#/definitions/a")]}


def test_references_out_of_the_schema_are_refused() -> None:
    for reference in ("http://example.com/a", "file:///a", "a.json#/b", "urn:x"):
        with pytest.raises(SchemaError, match="never fetched"):
            tamed({"properties": {"a": {"$ref": reference}}})


def test_a_property_may_be_called_like_a_keyword() -> None:
    schema = {"properties": {"$ref": {"type": "string"}, "$id": {"type": "string"}}}
    assert tamed(schema) == schema


def test_loops_that_go_deeper_are_fine() -> None:
    for keyword in ("properties", "patternProperties"):
        tamed({keyword: {"a": {"$ref": "#"}}})
    tamed({"items": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}})


def test_texts_are_cut() -> None:
    assert shorten("abc", 3) == "abc"
    assert shorten("abcd", 3) == "abc..."


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"$ref": "#"}, "leads back to itself"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}, "leads back to itself"),
        ({"$ref": "#a", "$defs": {"a": {"$anchor": "a", "not": {"$dynamicRef": "#a"}}}}, "leads back to itself"),
        ({"$ref": "#/x/y~1z", "x": {"y/z": {"$ref": "#"}}}, "leads back to itself"),
        (
            {"$ref": "#/$defs/d0", "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(60)} | {"d60": {}}},
            "in a chain",
        ),
        ({"$defs": {"a": {"$id": "https://example.com/a"}}}, "embedded resource"),
        ({"properties": {str(i): {} for i in range(5_000)}}, "more than 5000 subschemas"),
        ({"properties": {str(i): {"$ref": "#"} for i in range(2_001)}}, "more than 2000 references"),
        ({"enum": list(range(40_000))}, "more than 40000 members"),
        ({"pattern": "a" * 131_073}, "more than 131072 characters"),
        ({"patternProperties": {"a" * 70_000: {}}, "$ref": "#/" + "b" * 70_000}, "more than 131072 characters"),
    ],
)
def test_entangled_and_oversized_schemas_are_refused(schema: Any, text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        tamed(schema)


def test_depth_is_bounded() -> None:
    def deep(levels: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "integer"}
        for _ in range(levels):
            schema = {"properties": {"a": schema}}
        return schema

    assert tamed(deep(63)) == deep(63)
    with pytest.raises(SchemaError, match="nested"):
        tamed(deep(64))
    with pytest.raises(SchemaError, match="nested"):
        tamed(deep(10_000))
    assert tamed(deep(3), max_depth=4) == deep(3)
    with pytest.raises(SchemaError, match="nested"):
        tamed(deep(4), max_depth=4)


def test_unevaluated_chains_are_bounded() -> None:
    schema: dict[str, Any] = {}
    for _ in range(7):
        schema = {"allOf": [schema], "unevaluatedProperties": False}
    with pytest.raises(SchemaError, match="unevaluated"):
        tamed(schema)
