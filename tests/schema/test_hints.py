"""Tests of `trimcp.schema.hints`: reading hints apart, and markers of ours and of others."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Any, Final, NamedTuple, NewType, Required, Self, TypedDict, TypeVar

import annotated_types
import attrs
import pytest
from typing_extensions import TypeAliasType

from trimcp.schema.hints import (
    ABSENT_DEFAULT,
    Arg,
    Field,
    UnreadableHint,
    alias_value,
    apply_metadata,
    fields_of,
    is_record,
    readable,
    split,
    substitute,
)

T = TypeVar("T")
Meters = NewType("Meters", Annotated[float, "a length"])
Names = TypeAliasType("Names", "list[Meters]")


@attrs.frozen
class A:
    _x: int
    y: list[A] = attrs.field(factory=list)


@dataclasses.dataclass
class D:
    """D.

    Attributes:
        x: across
    """

    x: int
    y: int = dataclasses.field(default=2, metadata={"description": "down"})
    z: int = dataclasses.field(default=3, init=False)


class N(NamedTuple):
    x: int
    y: int = 2


class M(TypedDict):
    x: Required[int]


@pytest.mark.parametrize(
    ("hint", "bare", "extras"),
    [
        (int, int, []),
        (Annotated[int, 1, 2], int, [1, 2]),
        (Annotated[Final[Annotated[int, 1]], 2], int, [1, 2]),
        (Meters, float, ["a length"]),
        (Annotated[Meters, "mine"], float, ["a length", "mine"]),
        (Names, list[Meters], []),
        (Required[int], int, []),
    ],
)
def test_wrappers_come_off_from_the_inside_out(hint: Any, bare: Any, extras: Any) -> None:
    assert split(hint) == (bare, extras)


def test_an_alias_finds_names_in_quotes() -> None:
    assert alias_value(Names) == list[Meters]


@pytest.mark.parametrize(
    ("hint", "expected"), [(A, True), (D, True), (N, True), (M, True), (int, False), (list[A], False)]
)
def test_records(hint: Any, expected: bool) -> None:
    assert is_record(hint) is expected


@pytest.mark.parametrize(
    ("record", "fields"),
    [
        (A, [Field("x", int, True, attribute="_x"), Field("y", list[A], False, attribute="y")]),
        (
            D,
            [
                Field("x", int, True, description="across"),
                Field("y", int, False, 2, "down"),
                Field("z", int, False, 3, given=False),
            ],
        ),
        (N, [Field("x", int, True), Field("y", int, False, 2)]),
        (M, [Field("x", Required[int], True)]),
    ],
)
def test_fields(record: Any, fields: list[Field]) -> None:
    assert fields_of(record) == fields
    assert all(field.default is not ABSENT_DEFAULT or field.required or record is A for field in fields)


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (T, int),
        (list[T], list[int]),
        (dict[str, list[T]], dict[str, list[int]]),
        (T | None, int | None),
        (list[T] | None, list[int] | None),
        (Annotated[T, "x"], Annotated[int, "x"]),
        (tuple[T, ...], tuple[int, ...]),
        (Self, A),
        (list[Self], list[A]),
        (str, str),
    ],
)
def test_type_variables_and_self_are_replaced(hint: Any, expected: Any) -> None:
    assert substitute(hint, {T: int}, A) == expected


# --- the extras of an `Annotated` ---


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
    apply_metadata(schema, readable(metadata)[0])
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


@pytest.mark.parametrize("extra", [object(), int, Unit("m"), {"unit": "m"}, 7])
def test_what_says_nothing_known_is_left_out(extra: Any) -> None:
    assert readable(["words", extra]) == ([Arg("words")], [])


def test_what_is_read_in_part_is_refused_by_name() -> None:
    with pytest.raises(UnreadableHint, match=r"Strange\(ge=1, odd=True\) in its Annotated can be read in part only"):
        readable(["words", Strange()])


def test_what_says_nothing_is_left_out_and_groups_come_as_their_members() -> None:
    assert readable([None, Doc("words"), annotated_types.Len(1, 3)]) == (
        [Arg("words"), Arg(min_length=1), Arg(max_length=3)],
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
        applied(schema, extra)
