"""Tests of `trimcp.schema.convert`: there and back again."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import pathlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, NewType, TypedDict

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import TypeAliasType

from trimcp.schema.convert import ConversionError, to_json
from trimcp.schema.converters import converter_for
from trimcp.schema.json_schema import schema_of
from trimcp.schema.validator import Validator
from trimcp.wire.content import TextContent

Json = TypeAliasType("Json", "dict[str, Json] | list[Json] | datetime.date | int | None")


class Color(enum.Enum):
    RED = "red"
    BLUE = ("b", "l")


class Level(enum.IntEnum):
    LOW = 1


class Access(enum.IntFlag):
    READ = 1
    WRITE = 2


@attrs.frozen
class Cat:
    name: str
    _lives: int = 9
    born: datetime.date | None = None


@dataclasses.dataclass(frozen=True)
class Dog:
    tag: uuid.UUID
    friends: tuple[Cat, ...] = ()


class Pair(NamedTuple):
    left: datetime.date
    right: Color = Color.RED


class Options(TypedDict, total=False):
    day: datetime.date


@attrs.frozen
class Tree:
    value: decimal.Decimal
    children: list[Tree] = attrs.field(factory=list)


@attrs.frozen
class Positive:
    n: int = attrs.field(validator=attrs.validators.gt(0))


TAG = uuid.UUID("12345678-1234-5678-1234-567812345678")
DAY = datetime.date(2026, 2, 28)
Day = NewType("Day", datetime.date)


@pytest.mark.parametrize(
    "hint",
    [
        *(str, bool, None, Any, object, list, dict, list[str], dict[str, Any], dict[str, list[str]]),
        *(str | None, Sequence[str], Mapping[str, bool], Literal["a", 1], int | float, int | float | None),
    ],
)
def test_what_json_already_says_needs_no_conversion(hint: Any) -> None:
    assert converter_for(hint) is None


@pytest.mark.parametrize(
    ("hint", "value", "json"),
    [
        (int, 3, 3),
        (Color, Color.RED, "red"),
        (Color, Color.BLUE, ["b", "l"]),
        (Level, Level.LOW, 1),
        (Access, Access.READ | Access.WRITE, 3),
        (Literal[Color.RED, "x"], Color.RED, "red"),
        (bytes, b"\x00\xff", "AP8="),
        (datetime.date, DAY, "2026-02-28"),
        (Day, DAY, "2026-02-28"),
        (
            datetime.datetime,
            datetime.datetime(2026, 2, 28, 12, tzinfo=datetime.UTC),
            "2026-02-28T12:00:00+00:00",
        ),
        (datetime.time, datetime.time(9, 30), "09:30:00"),
        (datetime.timedelta, datetime.timedelta(minutes=1.5), 90.0),
        (decimal.Decimal, decimal.Decimal("0.10"), "0.10"),
        (uuid.UUID, TAG, str(TAG)),
        (pathlib.Path, pathlib.Path("a/b"), "a/b"),
        (set[int], {1, 2}, [1, 2]),
        (frozenset[datetime.date], frozenset({DAY}), ["2026-02-28"]),
        (tuple[int, datetime.date], (1, DAY), [1, "2026-02-28"]),
        (tuple[int, ...], (1, 2), [1, 2]),
        (dict[int, datetime.date], {3: DAY}, {"3": "2026-02-28"}),
        (dict[uuid.UUID, int], {TAG: 1}, {str(TAG): 1}),
        (Cat, Cat("Tom", 7, DAY), {"name": "Tom", "lives": 7, "born": "2026-02-28"}),
        (Dog, Dog(TAG, (Cat("Tom"),)), {"tag": str(TAG), "friends": [{"name": "Tom", "lives": 9, "born": None}]}),
        (Pair, Pair(DAY), {"left": "2026-02-28", "right": "red"}),
        (Options, {"day": DAY}, {"day": "2026-02-28"}),
        (Cat | Dog, Dog(TAG), {"tag": str(TAG), "friends": []}),
        (list[Cat | Dog | int], [Cat("T"), 1], [{"name": "T", "lives": 9, "born": None}, 1]),
        (datetime.date | str, DAY, "2026-02-28"),
        (datetime.date | str, "soon", "soon"),
        (Tree, Tree(decimal.Decimal(1), [Tree(decimal.Decimal(2))]), None),
        (Json, {"a": [DAY, 1, None, {}]}, {"a": ["2026-02-28", 1, None, {}]}),
    ],
)
def test_there_and_back(hint: Any, value: Any, json: Any) -> None:
    dumped = to_json(value)
    if json is not None:
        assert dumped == json
    assert Validator(schema_of(hint)).problems(dumped) == []
    convert = converter_for(hint)
    assert convert is not None
    assert convert(dumped) == value
    assert type(convert(dumped)) is type(value)


def test_numbers_become_what_was_asked_for() -> None:
    convert = converter_for(list[int])
    assert convert is not None
    assert [type(n) for n in convert([1.0, 2])] == [int, int]
    convert = converter_for(decimal.Decimal)
    assert convert is not None
    assert convert(0.1) == decimal.Decimal("0.1")


@pytest.mark.parametrize(
    ("hint", "value", "problem"),
    [
        (datetime.date, "2026-13-45", "must be a valid date @ $"),
        (datetime.datetime, "secret", "must be a valid date-time @ $"),
        (bytes, "%%", "must be valid base64 text @ $"),
        (uuid.UUID, "secret", "must be a valid uuid @ $"),
        (datetime.timedelta, 1e300, "must be a valid duration @ $"),
        (decimal.Decimal, "secret", "must be a valid decimal number @ $"),
        (list[datetime.date], ["2026-01-01", "2026-02-30"], "must be a valid date @ $[1]"),
        (
            list[Cat],
            [{"name": "Tom"}, {"name": "Tim", "born": "x"}],
            "no alternative @ $[1].born",
        ),
        (dict[str, Dog], {"a": {"tag": "secret"}}, "must be a valid uuid @ $.a.tag"),
        (Positive, {"n": 0}, "@ $"),
        (Color, "secret", "must be one of its values @ $"),
    ],
)
def test_failures_have_a_place_and_keep_the_value_to_themselves(hint: Any, value: Any, problem: str) -> None:
    convert = converter_for(hint)
    assert convert is not None
    with pytest.raises(ConversionError) as caught:
        convert(value)
    (text,) = caught.value.problems
    assert text.endswith(problem)
    assert "secret" not in text


def test_problems_are_few_and_short() -> None:
    convert = converter_for(list[datetime.date])
    assert convert is not None
    with pytest.raises(ConversionError) as caught:
        convert(["x" * 100_000] * 100)
    assert len(caught.value.problems) == 10
    assert len(str(caught.value)) < 1_000


class Text(str):
    pass


class Number(int):
    pass


@pytest.mark.parametrize(
    ("value", "json"),
    [
        ((1, [2]), [1, [2]]),
        ({"b", "a"}, ["a", "b"]),
        (Text("t"), "t"),
        (Number(3), 3),
        ({Text("k"): 1, Number(2): 2}, {"k": 1, "2": 2}),
        (bytearray(b"hi"), "aGk="),
        (range(3), [0, 1, 2]),
        (attrs.asdict(Cat("x"))["name"], "x"),
    ],
)
def test_results_of_all_kinds(value: Any, json: Any) -> None:
    dumped = to_json(value)
    assert dumped == json
    assert type(dumped) is type(json)


def test_a_datetime_without_a_zone_is_local_time() -> None:
    text = to_json(datetime.datetime(2026, 1, 1, 12))
    assert datetime.datetime.fromisoformat(text).timestamp() == datetime.datetime(2026, 1, 1, 12).timestamp()
    assert Validator({"format": "date-time"}).is_valid(text)


def test_an_odd_datetime_is_a_date_time_too() -> None:
    odd = datetime.datetime(1880, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(minutes=53, seconds=28)))
    assert to_json(odd) == "1879-12-31T23:06:32+00:00"
    for ends in (datetime.datetime.min, datetime.datetime.max, datetime.datetime.min.replace(tzinfo=odd.tzinfo)):
        assert Validator({"format": "date-time"}).is_valid(to_json(ends)), to_json(ends)


@pytest.mark.parametrize(
    "value", [object(), float("nan"), [float("inf")], {float("nan"): 1}, {object(): 1}, Cat, lambda: 1]
)
def test_what_json_cannot_carry(value: Any) -> None:
    with pytest.raises(ConversionError):
        to_json(value)


def test_content_among_values_is_told_from_what_has_no_json_form() -> None:
    with pytest.raises(ConversionError, match=r"content blocks are no plain values: .* -> list\[Text \| Audio\]"):
        to_json(["a text", TextContent("a block")])


def test_loops_are_noticed() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ConversionError, match="nested too deeply"):
        to_json(loop)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=10,
)


@given(json_values)
def test_plain_json_stays_itself(value: Any) -> None:
    assert to_json(value) == value


@given(
    st.recursive(
        st.builds(Tree, st.decimals(allow_nan=False, allow_infinity=False)),
        lambda c: st.builds(
            Tree, st.decimals(allow_nan=False, allow_infinity=False, places=3), st.lists(c, max_size=3)
        ),
        max_leaves=5,
    )
)
def test_trees_survive(tree: Tree) -> None:
    convert = converter_for(Tree)
    assert convert is not None
    assert convert(to_json(tree)) == tree
