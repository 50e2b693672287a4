"""Finds what converts the JSON values of an argument: `converter_for(hint)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trimcp.schema.convert import ConversionError, Convert, is_plain, is_pydantic, loader_of
from trimcp.schema.hints import split


def converter_for(hint: Any, schema_of: Callable[[Any], dict[str, Any]]) -> Convert | None:
    """Return a function that converts a validated JSON value to `hint`, or None if no conversion is needed.

    The function raises ConversionError. `schema_of` returns the schema of a type, which selects the alternative of a
    union for a value.
    """
    if is_plain(hint):
        return None
    load = None if is_pydantic(hint) else loader_of(split(hint)[0])
    if load is not None:
        return _explaining(load)
    # cattrs costs a start a tenth of its time: it is loaded with the first hint that needs it.
    from trimcp.schema.structures import structure_for

    return structure_for(hint, schema_of)


def _explaining(load: Convert) -> Convert:
    def convert(value: Any) -> Any:
        try:
            return load(value)
        except Exception as error:  # whatever it is, the author is told in the words of every other type
            from trimcp.schema.structures import problems_of

            raise ConversionError(problems_of(error)) from error

    return convert
