"""Tests of `trimcp.schema.hints`: markers of ours and of others."""

from __future__ import annotations

import re
from typing import Any

import annotated_types
import attrs
import pytest

from trimcp.schema.hints import Arg, UnreadableHint, apply_metadata, readable


@attrs.frozen
class Ge:
    """As in the annotated-types package."""

    ge: Any


@attrs.frozen
class Length:
    min_length: int
    max_length: int | None


@attrs.frozen
class Doc:
    """As typing.Doc."""

    documentation: str


def applied(schema: dict[str, Any], *metadata: Any) -> dict[str, Any]:
    apply_metadata(schema, metadata)
    return schema


@pytest.mark.parametrize(
    ("schema", "extra", "added"),
    [
        ({"type": "integer"}, Arg(ge=1, le=3), {"minimum": 1, "maximum": 3}),
        ({"type": "number"}, Arg(gt=0, lt=0.5), {"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}),
        ({"type": "integer"}, Arg(multiple_of=5), {"multipleOf": 5}),
        (
            {"type": "string"},
            Arg(min_length=1, max_length=2, pattern="^a"),
            {"minLength": 1, "maxLength": 2, "pattern": "^a"},
        ),
        ({"type": "array"}, Arg(min_length=1, max_length=2), {"minItems": 1, "maxItems": 2}),
        ({"type": "object"}, Arg(min_length=1, max_length=2), {"minProperties": 1, "maxProperties": 2}),
        ({}, Arg("What", title="T", examples=("a",)), {"description": "What", "title": "T", "examples": ["a"]}),
        ({"type": "boolean"}, Arg(header="X-Y"), {"x-mcp-header": "X-Y"}),
        ({"type": "integer"}, Ge(0), {"minimum": 0}),
        ({"type": "string"}, Length(0, 5), {"maxLength": 5}),
        ({}, "words", {"description": "words"}),
        ({}, Doc("words"), {"description": "words"}),
        ({"type": "string"}, re.compile("^a"), {"pattern": "^a"}),
    ],
)
def test_what_a_marker_adds(schema: dict[str, Any], extra: Any, added: dict[str, Any]) -> None:
    assert applied(dict(schema), extra) == {**schema, **added}


@attrs.frozen
class Unit:
    """Of annotated-types, which says nothing that we could check."""

    unit: str
    ge: int | None = None


@attrs.frozen
class Strange:
    """Says something that we know, and something that we do not."""

    ge: int = 1
    odd: bool = True


@pytest.mark.parametrize("extra", [object(), int, Unit("m"), Strange()])
def test_what_is_not_read_is_refused_by_name(extra: Any) -> None:
    name = extra.__name__ if isinstance(extra, type) else re.escape(repr(extra)[:20])
    with pytest.raises(UnreadableHint, match=f"{name}.* in its Annotated is nothing that can be read"):
        readable(["words", extra])


def test_what_says_nothing_is_left_out_and_groups_come_as_their_members() -> None:
    assert readable([None, Doc("words"), annotated_types.Len(1, 3)]) == (
        [Doc("words"), annotated_types.MinLen(1), annotated_types.MaxLen(3)],
        [],
    )


def test_bounds_find_the_alternative_they_fit() -> None:
    schema = applied({"anyOf": [{"type": "integer"}, {"type": "null"}]}, Arg("n", ge=1))
    assert schema == {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}], "description": "n"}


def test_the_last_word_counts() -> None:
    assert applied({}, "one", Arg("two"), "three") == {"description": "three"}


@pytest.mark.parametrize(
    ("schema", "extra", "text"),
    [
        ({"type": "string"}, Arg(ge=1), "ge= does not apply"),
        ({"type": "integer"}, Arg(max_length=1), "max_length= does not apply"),
        ({"type": "integer"}, Arg(pattern="a"), "pattern= does not apply"),
        ({"type": "integer"}, Ge("2026-01-01"), "no number"),
        ({"type": "string"}, Arg(header=""), "no name of an HTTP header"),
        ({"type": "string"}, Arg(header="a\n"), "no name of an HTTP header"),
        ({"anyOf": []}, Arg(header="a"), "only a string"),
    ],
)
def test_what_fits_nothing_is_refused(schema: dict[str, Any], extra: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        apply_metadata(schema, [extra])
