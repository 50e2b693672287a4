"""Tests of `trimcp.schema.problems`: one text for each kind of error."""

from __future__ import annotations

from typing import Any

import pytest

from trimcp.schema.problems import path_text
from trimcp.schema.validator import Validator


@pytest.mark.parametrize(
    ("schema", "value", "problem"),
    [
        ({"const": None}, 1, "must be null @ $"),
        ({"const": {}}, 1, "must be a structure @ $"),
        ({"exclusiveMinimum": 1}, 1, "must be greater than 1 @ $"),
        ({"exclusiveMaximum": 1}, 1, "must be less than 1 @ $"),
        ({"multipleOf": 5}, 1, "must be a multiple of 5 @ $"),
        ({"maxLength": 1}, "ab", "must have at most 1 characters @ $"),
        ({"minItems": 1}, [], "must have at least 1 items @ $"),
        ({"pattern": "^b"}, "a", "must match the pattern ^b @ $"),
        ({"format": "date"}, "2026-13-45", "must be a valid date @ $"),
        ({"format": "date-time"}, "2026-13-45T00:00:00", "must be a valid date-time @ $"),
        ({"format": "date-time"}, "2026-11-22", "must be a valid date-time @ $"),
        (
            {"format": "date-time"},
            "2026-11-22T10:00:00",
            "must have a time zone, such as Z or +02:00, behind the time @ $",
        ),
        ({"uniqueItems": True}, [1, 1], "has non-unique elements @ $"),
        ({"additionalProperties": False}, {"x": 1}, "has unknown properties: 'x' @ $"),
        ({"unevaluatedProperties": False}, {"x": 1}, "has unknown properties: 'x' @ $"),
        (False, 1, "is not allowed here @ $"),
        ({"properties": {"a": False}}, {"a": 1}, "is not allowed here @ $.a"),
        ({"type": ["null", "integer"]}, "x", "must be null or an integer, not a string @ $"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "x", "must be an integer or null, not a string @ $"),
        (
            {"anyOf": [{"type": "null"}, {"type": "object", "required": ["a"]}]},
            {},
            "matches no alternative: lacks the required property 'a' @ $",
        ),
        (
            {"oneOf": [{"properties": {"a": {"type": "null"}}}, {"type": "null"}]},
            {"a": 1},
            "matches no alternative: must be null, not an integer (@ $.a) @ $",
        ),
        ({"oneOf": [{}, {}]}, 1, "matches more than one alternative where exactly one is wanted @ $"),
        (
            {"properties": {"a b": {"items": {"type": "null"}}}},
            {"a b": [1.5]},
            "must be null, not a number @ $['a b'][0]",
        ),
    ],
)
def test_each_keyword_is_explained(schema: Any, value: Any, problem: str) -> None:
    assert Validator(schema).problems(value) == [problem]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ([], "$"),
        (["a", 0, "b_c"], "$.a[0].b_c"),
        (["a b", "", "it's"], """$['a b']['']["it's"]"""),
        (["k" * 100], "$['" + "k" * 39 + "...]"),
    ],
)
def test_paths(path: list[str | int], text: str) -> None:
    assert path_text(path) == text


def test_long_paths_are_cut() -> None:
    assert len(path_text(["abc"] * 1_000)) < 210
