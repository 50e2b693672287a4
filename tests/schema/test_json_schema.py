"""Tests of `trimcp.schema.json_schema`: every kind of type, and that what it says is what conversion does."""

from __future__ import annotations

import collections.abc as abc
import dataclasses
import datetime
import decimal
import enum
import pathlib
import uuid
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    Generic,
    Literal,
    NamedTuple,
    NewType,
    NotRequired,
    Optional,
    Required,
    Self,
    TypedDict,
    TypeVar,
    Union,
)

import annotated_types
import attrs
import pytest
from typing_extensions import TypeAliasType

from trimcp.schema.hints import Arg
from trimcp.schema.json_schema import SchemaBuilder, schema_of
from trimcp.schema.validator import check_author_schema

T = TypeVar("T")
UserId = NewType("UserId", int)
Short = NewType("Short", Annotated[str, Arg(max_length=3)])
Tags = TypeAliasType("Tags", list[str])
Json = TypeAliasType("Json", "dict[str, Json] | list[Json] | int | None")


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Access(enum.IntFlag):
    READ = 1
    WRITE = 2


class Strange(enum.Enum):
    OBJECT = object()


@attrs.frozen
class Point:
    """A point.

    Where two lines meet.
    """

    x: int
    _y: int = 0
    hidden: int = attrs.field(init=False, default=3)
    z: Annotated[int, "height"] = attrs.field(default=1, metadata={"description": "overruled"})
    w: int = attrs.field(factory=int, metadata={"description": "width"})


@dataclasses.dataclass
class Made:
    a: str
    b: list[int] = dataclasses.field(default_factory=list)
    c: ClassVar[int] = 1
    d: Color = Color.RED


class Options(TypedDict, total=False):
    """Some options.

    Attributes:
        name: who
    """

    name: Required[str]
    size: int


class More(Options):
    weight: float
    note: NotRequired[str]


class Pair(NamedTuple):
    left: int
    right: str = "r"


@attrs.frozen
class Chain:
    next: Self | None = None


@attrs.frozen
class Box(Generic[T]):
    content: T
    more: list[T] = attrs.field(factory=list)


@attrs.frozen
class Even:
    odd: Odd | None = None


@attrs.frozen
class Odd:
    even: Even


INTEGER = {"type": "integer"}
STRING = {"type": "string"}
NULL = {"type": "null"}


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (str, STRING),
        (int, INTEGER),
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (None, NULL),
        (type(None), NULL),
        (Any, {}),
        (object, {}),
        (Optional[int], {"anyOf": [INTEGER, NULL]}),  # noqa: UP045  # this spelling is what is tested
        (int | None, {"anyOf": [INTEGER, NULL]}),
        (Union[int, str, int], {"anyOf": [INTEGER, STRING]}),  # noqa: UP007  # this spelling is what is tested
        (int | Any, {}),
        (int | Annotated[str | None, "x"], {"anyOf": [INTEGER, {"anyOf": [STRING, NULL], "description": "x"}]}),
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (Literal[1, "b", None], {"enum": [1, "b", None]}),
        (Literal[Color.RED], {"type": "string", "enum": ["red"]}),
        (Color, {"type": "string", "enum": ["red", "blue"]}),
        (Level, {"type": "integer", "enum": [1, 2]}),
        (Access, {"type": "integer", "minimum": 0}),
        (Annotated[int, "words", Arg(ge=1)], {"type": "integer", "minimum": 1, "description": "words"}),
        (Annotated[int | None, Arg(ge=1)], {"anyOf": [{"type": "integer", "minimum": 1}, NULL]}),
        (list, {"type": "array"}),
        (list[int], {"type": "array", "items": INTEGER}),
        (list[Any], {"type": "array"}),
        (abc.Sequence[int], {"type": "array", "items": INTEGER}),
        (abc.Iterable[int], {"type": "array", "items": INTEGER}),
        (set[int], {"type": "array", "items": INTEGER, "uniqueItems": True}),
        (frozenset[int], {"type": "array", "items": INTEGER, "uniqueItems": True}),
        (tuple, {"type": "array"}),
        (tuple[int, ...], {"type": "array", "items": INTEGER}),
        (tuple[int, str], {"type": "array", "prefixItems": [INTEGER, STRING], "minItems": 2, "maxItems": 2}),
        (tuple[()], {"type": "array", "minItems": 0, "maxItems": 0}),
        (dict, {"type": "object"}),
        (dict[str, Any], {"type": "object"}),
        (dict[str, int], {"type": "object", "additionalProperties": INTEGER}),
        (abc.Mapping[str, int], {"type": "object", "additionalProperties": INTEGER}),
        (
            dict[Color, int],
            {"type": "object", "propertyNames": {"enum": ["red", "blue"]}, "additionalProperties": INTEGER},
        ),
        (dict[int, Any], {"type": "object", "propertyNames": {"pattern": r"^-?\d+$"}}),
        (datetime.date, {"type": "string", "format": "date"}),
        (datetime.datetime, {"type": "string", "format": "date-time"}),
        (datetime.timedelta, {"type": "number", "description": "a duration in seconds"}),
        (uuid.UUID, {"type": "string", "format": "uuid"}),
        (bytes, {"type": "string", "contentEncoding": "base64"}),
        (pathlib.Path, STRING),
        (UserId, INTEGER),
        (Short, {"type": "string", "maxLength": 3}),
        (Final[int], INTEGER),
        (T, {}),
        (TypeVar("B", bound=int), INTEGER),
        (TypeVar("C", int, str), {"anyOf": [INTEGER, STRING]}),
        (Tags, {"type": "array", "items": STRING}),
    ],
)
def test_types_have_schemas(hint: Any, expected: Any) -> None:
    assert schema_of(hint) == expected
    check_author_schema(expected)


def test_attrs_classes() -> None:
    assert schema_of(Point) == {
        "type": "object",
        "description": "A point.",
        "properties": {
            "x": INTEGER,
            "y": {"type": "integer", "default": 0},
            "z": {"type": "integer", "description": "height", "default": 1},
            "w": {"type": "integer", "description": "width"},
        },
        "required": ["x"],
    }


def test_dataclasses() -> None:
    assert schema_of(Made) == {
        "type": "object",
        "properties": {
            "a": STRING,
            "b": {"type": "array", "items": INTEGER},
            "d": {"type": "string", "enum": ["red", "blue"], "default": "red"},
        },
        "required": ["a"],
    }


def test_typed_dicts() -> None:
    assert schema_of(More) == {
        "type": "object",
        "properties": {
            "name": STRING,
            "size": INTEGER,
            "weight": {"type": "number"},
            "note": STRING,
        },
        "required": ["name", "weight"],
    }
    assert schema_of(Options)["properties"]["name"] == {"type": "string", "description": "who"}
    assert schema_of(Options)["description"] == "Some options."


def test_named_tuples_are_objects() -> None:
    assert schema_of(Pair) == {
        "type": "object",
        "properties": {"left": INTEGER, "right": {"type": "string", "default": "r"}},
        "required": ["left"],
    }


def test_generic_classes() -> None:
    assert schema_of(Box[int])["properties"] == {"content": INTEGER, "more": {"type": "array", "items": INTEGER}}
    both = schema_of(tuple[Box[int], Box[str], Box[int]])
    assert "$defs" not in both
    assert both["prefixItems"][0] == both["prefixItems"][2] == schema_of(Box[int])
    assert both["prefixItems"][1]["properties"]["content"] == STRING


def test_recursive_classes_and_aliases_stand_in_definitions() -> None:
    assert schema_of(Chain) == {
        "$ref": "#/$defs/Chain",
        "$defs": {
            "Chain": {
                "type": "object",
                "properties": {"next": {"anyOf": [{"$ref": "#/$defs/Chain"}, NULL], "default": None}},
            }
        },
    }
    assert set(schema_of(Even)["$defs"]) == {"Even", "Odd"}
    check_author_schema(schema_of(Even))
    json = schema_of(Json)
    assert json["$ref"] == "#/$defs/Json"
    assert json["$defs"]["Json"]["anyOf"][1] == {"type": "array", "items": {"$ref": "#/$defs/Json"}}


def test_what_repeats_is_written_out() -> None:
    assert "$defs" not in schema_of(list[Pair])
    twice = schema_of(dict[str, Pair] | list[Pair])
    assert "$defs" not in twice
    assert twice["anyOf"][1] == {"type": "array", "items": schema_of(Pair)}


def test_what_would_become_large_by_writing_it_out_stays_shared() -> None:
    kind: Any = Point
    for number in range(40):  # written out, the last would have a million million members
        both = {"left": attrs.field(type=kind), "right": attrs.field(type=kind)}
        kind = attrs.make_class(f"Both{number}", both)
    schema = schema_of(kind)
    assert len(schema["$defs"]) == 40
    assert schema["properties"]["left"] == schema["properties"]["right"] == {"$ref": "#/$defs/Both38"}
    check_author_schema(schema)


def test_a_description_stays_with_its_use() -> None:
    placed = schema_of(Annotated[Point, "the middle"])
    assert placed["description"] == "the middle"
    assert placed["properties"]["x"] == INTEGER


def test_two_classes_of_one_name() -> None:
    first, second = (attrs.make_class("Same", {"me": attrs.field(type=kind)}) for kind in (int, str))
    schema = schema_of(tuple[first, first, second, second])
    assert [each["properties"]["me"] for each in schema["prefixItems"]] == [INTEGER, INTEGER, STRING, STRING]
    kinds: list[Any] = [attrs.make_class("Same", {"me": attrs.field(type=list["Same"])}) for _ in range(2)]  # noqa: F821  # it is never found
    assert set(schema_of(tuple[kinds[0], kinds[1]])["$defs"]) == {"Same", "Same2"}


def test_output_names_every_field_and_no_default() -> None:
    builder = SchemaBuilder(output=True)
    schema = builder.finish(builder.build(Made))
    assert schema["required"] == ["a", "b", "d"]
    assert "default" not in schema["properties"]["d"]
    assert builder.finish(builder.build(More))["required"] == ["name", "weight"]


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        (memoryview | slice, "slice has no JSON form; use builtins"),
        (abc.Callable[[], int], "has no JSON form"),
        (Strange, "Strange has values JSON cannot carry"),
        (dict[tuple[int, str], int], "keys of a JSON object are strings"),
        (decimal.Context, "Context has no JSON form"),
        (list[slice], "slice"),
    ],
)
def test_types_without_a_schema(hint: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        schema_of(hint)


def test_an_unresolvable_class_is_named() -> None:
    @attrs.frozen
    class Broken:
        field: Nowhere  # noqa: F821  # it is never found

    with pytest.raises(TypeError, match="Broken name 'Nowhere'"):
        schema_of(Broken)


# What a person or a model is shown of what lies deeper


@attrs.frozen
class Deep:
    """How deep.

    Attributes:
        metres: below the surface
    """

    metres: Annotated[float, Arg(ge=0, le=11_000)]
    names: Annotated[list[Annotated[str, Arg("a name", max_length=9)]], Arg("called so", max_length=3)] = attrs.Factory(
        list
    )


class Dive(TypedDict):
    deep: Annotated[Deep, Arg("where to")]
    by_day: Annotated[dict[str, Annotated[int, annotated_types.Ge(1)]], Arg(min_length=1)]
    other: Annotated[int, Arg("minutes", ge=1)] | None


def test_an_alias_keeps_the_bounds_of_what_it_stands_for() -> None:
    days = TypeAliasType("days", Annotated[int, Arg(ge=1)])
    assert schema_of(days) == {"type": "integer", "minimum": 1}
    assert schema_of(Annotated[days, Arg("d")]) == {"type": "integer", "minimum": 1, "description": "d"}


def test_a_bounded_decimal_is_a_number_since_a_text_would_pass_the_bound() -> None:
    assert schema_of(Annotated[decimal.Decimal, Arg(ge=1)]) == {"type": "number", "minimum": 1}
    assert schema_of(Annotated[decimal.Decimal, "words"])["anyOf"][1]["type"] == "string"
    output = SchemaBuilder(output=True).build(Annotated[decimal.Decimal, Arg(ge=1)])
    assert [branch["type"] for branch in output["anyOf"]] == ["number", "string"]


def test_fields_further_down_keep_their_words_and_bounds() -> None:
    deep = {
        "type": "object",
        "properties": {
            "metres": {"type": "number", "minimum": 0, "maximum": 11_000, "description": "below the surface"},
            "names": {
                "type": "array",
                "items": {"type": "string", "maxLength": 9, "description": "a name"},
                "maxItems": 3,
                "description": "called so",
            },
        },
        "required": ["metres"],
    }
    dive = {
        "deep": {**deep, "description": "where to"},
        "by_day": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 1}, "minProperties": 1},
        "other": {"anyOf": [{"type": "integer", "minimum": 1, "description": "minutes"}, {"type": "null"}]},
    }
    required = ["deep", "by_day", "other"]
    assert schema_of(Dive) == {"type": "object", "properties": dive, "required": required}
    assert schema_of(list[Dive])["items"]["properties"] == dive
    shared = schema_of(tuple[Deep, Annotated[Deep, Arg("the second")]])
    assert shared["prefixItems"] == [{**deep, "description": "How deep."}, {**deep, "description": "the second"}]
