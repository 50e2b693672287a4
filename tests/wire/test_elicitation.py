"""Tests of `trimcp.wire.input_requests`: what the fields of a form tell of themselves, whichever kind they are."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from trimcp.wire.input_requests import (
    BooleanSchema,
    EnumOption,
    LegacyTitledEnumSchema,
    NumberSchema,
    PrimitiveSchema,
    StringSchema,
    TitledItems,
    TitledMultiSelectEnumSchema,
    TitledSingleSelectEnumSchema,
    UntitledItems,
    UntitledMultiSelectEnumSchema,
    UntitledSingleSelectEnumSchema,
)

OPTIONS = [EnumOption("r", "Red"), EnumOption("g", "Green")]
TITLED = [("r", "Red"), ("g", "Green")]
UNTITLED = [("r", "r"), ("g", "g")]
FIELDS: list[tuple[PrimitiveSchema, Any, Any]] = [
    (StringSchema(), [], (None, None)),
    (StringSchema(min_length=1, max_length=0), [], (1, 0)),
    (NumberSchema(minimum=0), [], (0, None)),
    (BooleanSchema(), [], (None, None)),
    (UntitledSingleSelectEnumSchema(["r", "g"]), UNTITLED, (None, None)),
    (LegacyTitledEnumSchema(["r", "g"], ["Red"]), [("r", "Red"), ("g", "g")], (None, None)),
    (LegacyTitledEnumSchema(["r", "g"]), UNTITLED, (None, None)),
    (TitledSingleSelectEnumSchema(OPTIONS), TITLED, (None, None)),
    (UntitledMultiSelectEnumSchema(UntitledItems(["r", "g"]), max_items=1), UNTITLED, (None, 1)),
    (TitledMultiSelectEnumSchema(TitledItems(OPTIONS), min_items=1, max_items=2), TITLED, (1, 2)),
]


@pytest.mark.parametrize(("field", "choices", "bounds"), FIELDS)
def test_every_field_tells_its_choices_and_bounds(field: PrimitiveSchema, choices: Any, bounds: Any) -> None:
    assert field.choices == choices
    assert field.bounds == bounds


def test_none_is_missing() -> None:
    assert {type(field) for field, _, _ in FIELDS} == {*get_args(PrimitiveSchema)}
