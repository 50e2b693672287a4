"""Pydantic's models and types: their schemas, and conversion both ways by Pydantic itself.

Loaded once a program uses such a type, when Pydantic is loaded already.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Final

import attrs

from trimcp.schema.hints import ABSENT_DEFAULT, Field, is_field_info, split
from trimcp.wire.jsonrpc import encode

_LONGEST: Final = 200  # characters of a text that an author's own check raised


def with_extras(bare: Any, extras: Iterable[Any]) -> Any:
    """Return the type with the extras of an `Annotated` that Pydantic is to read."""
    listed = tuple(extras)
    return Annotated[(bare, *listed)] if listed else bare


@functools.lru_cache(maxsize=1024)
def _adapter(hint: Any) -> Any:
    pydantic: Any = sys.modules["pydantic"]
    try:
        return pydantic.TypeAdapter(hint)
    except pydantic.errors.PydanticUserError as error:  # the author's mistake, or a type that it does not know
        raise TypeError(_first_line(error)) from None
    except ImportError as error:  # such as the package that EmailStr needs
        raise TypeError(_first_line(error)) from None


def _first_line(error: Exception) -> str:
    return f"Pydantic says: {str(error).partition(chr(10))[0]}"


def json_schema(hint: Any, *, output: bool) -> dict[str, Any]:
    """Return the JSON Schema that Pydantic makes of a type, with its `$defs`. Raises TypeError if it has none."""
    pydantic: Any = sys.modules["pydantic"]
    adapter = _adapter(hint)
    try:
        schema: dict[str, Any] = adapter.json_schema(mode="serialization" if output else "validation")
    except pydantic.errors.PydanticUserError as error:
        raise TypeError(_first_line(error)) from None
    return schema


def loader(hint: Any) -> Callable[[Any], Any]:
    """Return a function that makes a JSON value into one of a type of Pydantic's. It raises `Problems`."""
    adapter = _adapter(hint)
    refused: Any = sys.modules["pydantic"].ValidationError

    def load(value: Any) -> Any:
        # As JSON, not as Python values: strict models accept a date as text only from JSON.
        try:
            return adapter.validate_json(encode(value))
        except refused as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)
            raise Problems([(problem["loc"], _text(problem["msg"])) for problem in found]) from None

    return load


def _text(message: str) -> str:
    return message.removeprefix("Value error, ").removeprefix("Assertion failed, ")[:_LONGEST]


class Problems(ValueError):
    """What Pydantic says is wrong with a value: (place, text) each. No text repeats the value."""

    def __init__(self, found: list[tuple[tuple[str | int, ...], str]]) -> None:
        super().__init__("; ".join(text for _, text in found))
        self.found = found


def dump(value: Any) -> Any:
    """Return a value of Pydantic's as JSON values, under its aliases. Raises whatever its own serializers raise."""
    kind: Any = type(value)
    return _adapter(kind).dump_python(value, mode="json", by_alias=True)


def resolve_field(field: Field) -> tuple[Field, Callable[[], Any] | None]:
    """Return a field under the name and with the default that Pydantic's `Field`s give it, and what makes its value.

    Of several, as default or in `Annotated`, the last counts. The second is None if the function itself makes the
    value, or it is required. Raises TypeError if an alias is no plain name, or a default needs the other arguments.
    """
    name, hint, default = field.name, field.hint, field.default
    if is_field_info(default):
        hint, default = Annotated[hint, default], ABSENT_DEFAULT
    fill: Callable[[], Any] | None = None
    shown = default
    for info in filter(is_field_info, split(hint)[1]):
        alias = info.validation_alias or info.alias
        if alias is not None:
            if not isinstance(alias, str):
                raise TypeError(f"the alias {alias!r} is no plain name")
            name = alias
        if default is not ABSENT_DEFAULT or info.is_required():
            continue
        if getattr(info, "default_factory_takes_validated_data", False):
            raise TypeError("its default_factory takes the other arguments, which only a Pydantic model can give it")
        fill = functools.partial(info.get_default, call_default_factory=True)
        shown = ABSENT_DEFAULT if info.default_factory is not None else info.default
    required = shown is ABSENT_DEFAULT and fill is None
    return attrs.evolve(field, name=name, hint=hint, required=required, default=shown), fill
