"""Tests of `trimcp.schema.forms`: what elicitation may show, and what comes back."""

from __future__ import annotations

import datetime
import enum
from typing import Annotated, Any

import attrs
import pytest

from trimcp.schema.convert import ConversionError
from trimcp.schema.forms import form_for
from trimcp.schema.hints import Arg


class Unit(enum.StrEnum):
    CELSIUS = "C"
    FAHRENHEIT = "F"


@attrs.frozen
class Nested:
    children: list[Nested]


@attrs.frozen
class Booking:
    name: Annotated[str, Arg("Your name", min_length=1)]
    day: datetime.date
    guests: Annotated[int, Arg(ge=1)] = 2
    unit: Unit = Unit.CELSIUS
    note: str | None = None
    likes: list[Unit] = attrs.field(factory=list)


def test_a_form_of_one_field() -> None:
    form = form_for(Annotated[int, Arg("How many?", ge=1)], name="count")
    assert form.schema == {
        "type": "object",
        "properties": {"count": {"type": "integer", "description": "How many?", "minimum": 1}},
        "required": ["count"],
    }
    assert form.load({"count": 3}) == 3
    for wrong, text in [
        ({"count": 0}, "at least 1 @ $.count"),
        ({}, "lacks"),
        ({"count": "3"}, "an integer"),
        ([], "obj"),
    ]:
        with pytest.raises(ConversionError) as caught:
            form.load(wrong)
        assert text in caught.value.problems[0]


def test_a_form_of_several_fields() -> None:
    form = form_for(Booking)
    assert form.schema == {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "description": "Your name"},
            "day": {"type": "string", "format": "date"},
            "guests": {"type": "integer", "minimum": 1, "default": 2},
            "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
            "note": {"type": "string"},
            "likes": {"type": "array", "items": {"type": "string", "enum": ["C", "F"]}},
        },
        "required": ["name", "day"],
    }
    assert form.load({"name": "Ada", "day": "2026-01-02", "likes": ["F"]}) == Booking(
        "Ada", datetime.date(2026, 1, 2), likes=[Unit.FAHRENHEIT]
    )


def test_an_optional_field_may_be_left_empty() -> None:
    form = form_for(datetime.date | None, name="day")
    assert form.schema == {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}}
    assert form.load({}) is None
    assert form.load({"day": "2026-01-02"}) == datetime.date(2026, 1, 2)


def test_words_forms_lack_are_checked_all_the_same() -> None:
    form = form_for(Annotated[str, Arg(pattern="^x")], name="x")
    assert form.schema["properties"] == {"x": {"type": "string"}}
    with pytest.raises(ConversionError, match="pattern"):
        form.load({"x": "y"})


@pytest.mark.parametrize("hint", [list[str], Nested, dict[str, str], int | str, list[Nested], enum.IntEnum("N", "A B")])
def test_forms_are_flat(hint: Any) -> None:
    with pytest.raises(TypeError, match="forms are flat"):
        form_for(hint)
