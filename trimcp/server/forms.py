"""Flat forms for a person, made from types. It knows what elicitation lets a form say; who asks, it must not know."""

from __future__ import annotations

import types
from typing import Any, Final, Union, get_args, get_origin

import attrs

from trimcp.server.convert import ConversionError, Convert, converter_for
from trimcp.server.json_schema import SchemaBuilder, schema_of
from trimcp.server.records import Field, fields_of, is_record, split
from trimcp.validation import Judge, validator_for

__all__ = ["Form", "form_for"]


# What "client/elicitation, Requested Schema" lets a field say.
_FORM_WORDS: Final = frozenset(
    {"type", "title", "description", "default", "enum", "items"}
    | {"minLength", "maxLength", "minimum", "maximum", "minItems", "maxItems", "format"}
)
_FORM_FORMATS: Final = frozenset({"date", "date-time", "email", "uri"})


@attrs.frozen(eq=False, repr=False)
class Form:
    """A flat form for a person, and how its answers become Python values.

    Attributes:
        schema: the subset of JSON Schema that elicitation allows.
    """

    schema: dict[str, Any]
    _validator: Judge
    _convert: Convert | None
    _field: str | None

    def load(self, content: Any) -> Any:
        """The value of the type the form was made for, from the client's answer, which is checked first.

        Raises:
            ConversionError: the answer does not fit, or has no Python value.
        """
        if problems := self._validator.problems(content):
            raise ConversionError(problems)
        if self._field is not None:
            content = content.get(self._field)
        return content if self._convert is None else self._convert(content)


def form_for(hint: Any, *, name: str = "value") -> Form:
    """A form of one field, or for an attrs class, dataclass, TypedDict or NamedTuple one field for each of its own.

    Args:
        hint: a text, number, boolean, date, enumeration of texts, a list or set of such an enumeration, one of these
            or None, or a class of such fields.
        name: the name of a single field.

    Raises:
        TypeError: the type is no such thing; forms are flat (specification, client/elicitation).
    """
    bare, _ = split(hint)
    whole = is_record(bare)
    fields = fields_of(bare) if whole else [Field(name, hint, required=not _takes_none(bare))]
    builder = SchemaBuilder()
    exact = {field.name: builder.property(field) for field in fields}
    required = [field.name for field in fields if field.required and not _takes_none(split(field.hint)[0])]
    shown = {key: _form_field(key, schema) for key, schema in exact.items()}
    root = {"type": "object", "properties": shown} | ({"required": required} if required else {})
    checked = builder.finish({"type": "object", "properties": exact, "required": required})
    return Form(root, validator_for(checked), converter_for(hint, schema_of), None if whole else name)


def _takes_none(bare: Any) -> bool:
    return get_origin(bare) in (Union, types.UnionType) and type(None) in get_args(bare)


def _form_field(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    branches = [branch for branch in schema.get("anyOf", [schema]) if branch.get("type") != "null"]
    field = {**branches[0], **{key: schema[key] for key in ("title", "description", "default") if key in schema}}
    kind = field.get("type")
    if kind == "array":
        fits = field.get("items", {}).get("type") == "string" and "enum" in field["items"]
    else:
        fits = kind == "string" or (kind in ("integer", "number", "boolean") and "enum" not in field)
    if len(branches) != 1 or not fits:
        raise TypeError(
            f"the form field {name!r} must be a text, number, boolean, date or enumeration of texts: forms are flat"
        )
    if field.get("default", 0) is None:
        del field["default"]
    if field.get("format") not in _FORM_FORMATS:
        field.pop("format", None)
    return {key: value for key, value in field.items() if key in _FORM_WORDS}
