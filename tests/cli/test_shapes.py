"""Schemas as a person reads them: types, bounds and what is inside, with an end to each of them."""

from __future__ import annotations

from typing import Any

import pytest

from trimcp.cli.schemas import describe_properties


def shown(shape: Any, **root: Any) -> str:
    """What is told of a property of this shape."""
    (line,) = describe_properties({"properties": {"x": shape}, **root})
    return line.removeprefix("x (").removesuffix(")")


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        ({"type": "integer", "minimum": 1, "maximum": 14}, "integer, from 1 to 14"),
        ({"type": "number", "minimum": 0.5}, "number, at least 0.5"),
        ({"type": "number", "maximum": 1e6}, "number, at most 1,000,000"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "number, at most 1, above 0"),
        ({"type": "integer", "multipleOf": 5, "exclusiveMaximum": 50}, "integer, below 50, in steps of 5"),
        ({"type": "string", "minLength": 3, "maxLength": 20}, "string, 3 to 20 characters"),
        ({"type": "string", "minLength": 2, "maxLength": 2}, "string, 2 characters"),
        ({"type": "string", "minLength": 1}, "string, at least 1 character"),
        ({"type": "string", "minLength": 0, "maxLength": 9}, "string, at most 9 characters"),
        ({"type": "string", "format": "email", "pattern": "^a\x1b"}, "string, email, matching ^a\\x1b"),
        ({"type": "array", "items": {"type": "string"}, "maxItems": 5}, "list of string, at most 5 items"),
        ({"type": "array", "uniqueItems": True}, "list, no two alike"),
        ({"type": "object", "additionalProperties": {"type": "number"}}, "object of number"),
        ({"type": ["integer", "null"], "default": None}, "integer or null, default null"),
        ({"enum": ["a", 1, None]}, "a | 1 | null"),
        ({"const": True}, "true"),
        ({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 1}]}, "string or integer, at least 1"),
        ({"$ref": "#/$defs/Size", "default": "s"}, "s | l, default s"),
        ({"type": "integer", "minimum": "none", "maximum": True}, "integer"),
        (True, "anything"),
        ({"type": 5, "enum": "no"}, "anything"),
    ],
)
def test_a_property_is_told_with_its_bounds(shape: Any, told: str) -> None:
    assert shown(shape, **{"$defs": {"Size": {"enum": ["s", "l"]}}}) == told


def test_what_an_object_holds_stands_below_it() -> None:
    place = {"type": "object", "properties": {"north": {"type": "number"}}, "required": ["north"]}
    schema = {
        "$defs": {"Place": place},
        "properties": {
            "start": {"$ref": "#/$defs/Place", "description": "Where\nit begins"},
            "stops": {"type": "array", "items": {"$ref": "#/$defs/Place"}},
            "end": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
        },
        "required": ["start"],
    }
    assert list(describe_properties(schema, "  ")) == [
        "  start (object, required): Where it begins",
        "      north (number, required)",
        "  stops (list of object)",
        "      north (number, required)",
        "  end (object or null)",
        "      north (number, required)",
    ]


def test_a_schema_that_holds_itself_has_an_end() -> None:
    node: dict[str, Any] = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}
    assert list(describe_properties({"$defs": {"Node": node}, **node})) == ["next (object)", "    next (object)"]
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(100):
        deep = {"type": "object", "properties": {"x": deep}}
    assert len(list(describe_properties(deep))) == 5
    wide = {"properties": {f"p{number}": {} for number in range(1_000)}}
    lines = list(describe_properties(wide))
    assert (len(lines), lines[-1]) == (201, "and more; --json shows all")
