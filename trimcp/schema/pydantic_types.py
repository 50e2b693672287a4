"""Pydantic models and types: their schemas, and conversion in both directions by Pydantic itself.

Imported when a program first uses such a type; Pydantic is then already imported.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Annotated, Any

import attrs

from trimcp.schema.hints import ABSENT_DEFAULT, TIME, Field, field_infos, hashes, is_field_info, is_model
from trimcp.schema.validator import Problems
from trimcp.wire.jsonrpc import encode


def _adapter(hint: Any) -> Any:
    return _known_adapter(hint) if hashes(hint) else _known_adapter.__wrapped__(hint)


@functools.lru_cache(maxsize=1024)
def _known_adapter(hint: Any) -> Any:
    pydantic: Any = sys.modules["pydantic"]
    try:
        return pydantic.TypeAdapter(hint)
    except Exception as error:  # a mistake in the model, a type that Pydantic does not know, a missing package
        raise TypeError(_first_line(error)) from None


def _first_line(error: Exception) -> str:
    return f"Pydantic says: {str(error).partition(chr(10))[0]}"


def json_schema(hint: Any, *, output: bool) -> dict[str, Any]:
    """Return Pydantic's JSON Schema of a type, with its `$defs`. Raises TypeError if it has none."""
    adapter = _adapter(hint)
    try:
        schema: dict[str, Any] = adapter.json_schema(
            mode="serialization" if output else "validation",
            # An object of a dataclass does not know aliases, and `to_json` names its members.
            by_alias=not output or is_model(hint) or not dataclasses.is_dataclass(hint),
            schema_generator=_schemas(),
        )
    except Exception as error:  # as above, and whatever a hook of the author raises
        raise TypeError(_first_line(error)) from None
    return schema


@functools.cache
def _schemas() -> Any:
    """Return Pydantic's generator of schemas, but for times without a zone: the formats of JSON Schema require one."""
    base: Any = sys.modules["pydantic"].json_schema.GenerateJsonSchema

    class Schemas(base):  # type: ignore[misc]
        def time_schema(self, schema: Any) -> dict[str, Any]:
            return {"type": "string", "pattern": TIME}

        def field_title_should_be_set(self, schema: Any) -> bool:
            return False  # it would only repeat the name

        def tagged_union_schema(self, schema: Any) -> dict[str, Any]:
            found: dict[str, Any] = super().tagged_union_schema(schema)
            found.pop("discriminator", None)  # of OpenAPI: it points to definitions that are written out
            return found

        def datetime_schema(self, schema: Any) -> dict[str, Any]:
            return {"type": "string"} if schema.get("tz_constraint") == "naive" else super().datetime_schema(schema)

    return Schemas


def loader(hint: Any) -> Callable[[Any], Any]:
    """Return a function that converts a JSON value to a Pydantic type. It raises `Problems`."""
    adapter = _adapter(hint)
    refused: Any = sys.modules["pydantic"].ValidationError

    def load(value: Any) -> Any:
        # From JSON, not from Python values: strict models accept a date as text only from JSON.
        try:
            return adapter.validate_json(encode(value))
        except refused as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)
            texts = (each["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ") for each in found)
            raise Problems([(each["loc"], text) for each, text in zip(found, texts, strict=True)]) from None

    return load


def dump(value: Any, hint: Any = None) -> Any:
    """Return a value of a Pydantic type as JSON values, under its aliases. Its serializers may raise anything.

    `hint`: the type, by default the value's class.
    """
    kind: Any = type(value)
    return _adapter(kind if hint is None else hint).dump_python(
        value, mode="json", by_alias=True, warnings=hint is None
    )


def resolve_field(field: Field) -> Field:
    """Return a parameter with the name and default of its Pydantic `Field`s.

    Of several `Field`s, as default or in `Annotated`, the last counts. It has no `fill` if it is required or the
    function itself has the default. Raises TypeError if an alias is not a plain name, or a default needs the other
    arguments.
    """
    name, hint, default = field.name, field.hint, field.default
    if is_field_info(default):
        hint, default = Annotated[hint, default], ABSENT_DEFAULT
    fill: Callable[[], Any] | None = None
    shown = default
    for info in field_infos(field):
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
    changed = {"name": name, "hint": hint, "required": required, "default": shown, "fill": fill}
    return attrs.evolve(field, **changed, attribute=field.name)
