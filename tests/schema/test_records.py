"""Tests of `trimcp.schema.hints`: reading hints apart."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Final, NamedTuple, NewType, Required, Self, TypedDict, TypeVar

import attrs
import pytest
from typing_extensions import TypeAliasType

from trimcp.schema.hints import ABSENT_DEFAULT, Field, alias_value, fields_of, is_record, split, substitute

T = TypeVar("T")
Meters = NewType("Meters", Annotated[float, "a length"])  # type: ignore[valid-newtype]
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
        (Annotated[Final[Annotated[int, 1]], 2], int, [1, 2]),  # type: ignore[valid-type]
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
        (A, [Field("x", int, True), Field("y", list[A], False)]),
        (D, [Field("x", int, True, description="across"), Field("y", int, False, 2, "down")]),
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
