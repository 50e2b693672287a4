"""Flat forms for the user, built from types, within the limits of elicitation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, Generic, Literal, TypeVar, overload

import attrs

from trimcp.errors import ToolError
from trimcp.schema.convert import ConversionError, Convert, without_root
from trimcp.schema.converters import converter_for
from trimcp.schema.hints import Field, is_model, is_record, split
from trimcp.schema.json_schema import SchemaBuilder, takes_null
from trimcp.schema.validator import Validator, validator_for
from trimcp.support.slotted import valued
from trimcp.wire.input_requests import ElicitResult

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


# The keywords allowed in a field: "client/elicitation, Requested Schema".
_FORM_WORDS: Final = frozenset(
    {"type", "title", "description", "default", "enum", "items"}
    | {"minLength", "maxLength", "minimum", "maximum", "minItems", "maxItems", "format"}
)
_FORM_FORMATS: Final = frozenset({"date", "date-time", "email", "uri"})


@attrs.frozen
@valued
class Answer(Generic[T_co]):
    """The user's response to a form built from a class.

    Attributes:
        action: "accept", "decline" or "cancel".
        value: the content as an instance of the class; None unless the user accepted.
    """

    action: Literal["accept", "decline", "cancel"]
    value: T_co | None = None


@attrs.frozen(eq=False, repr=False)
class Form(Generic[T_co]):
    """A flat form for the user, and the conversion of its content to Python values.

    Attributes:
        schema: the subset of JSON Schema that elicitation allows.
    """

    schema: dict[str, Any]
    _validator: Validator
    _convert: Convert | None
    _field: str | None
    _nullable: Sequence[str]

    def load(self, content: Any) -> T_co:
        """Validate the content and convert it to the form's type. Raises ConversionError if it does not fit."""
        if problems := self._validator.problems(content):
            raise ConversionError(problems)
        content = {**dict.fromkeys(self._nullable), **content}
        if self._field is not None:
            content = content[self._field]
        value: T_co = content if self._convert is None else self._convert(content)
        return value

    def read(self, message: str, result: ElicitResult) -> Answer[T_co]:
        """Return the user's response from the client's result; `message` is the question's text.

        Raises ToolError if the user accepted but the content does not fit the form.
        """
        if result.action != "accept":
            return Answer(result.action)
        try:
            return Answer("accept", self.load({} if result.content is None else result.content))
        except ConversionError as error:
            problems = "; ".join(without_root(error.problems))
            raise ToolError(f"the answer to {message!r} does not fit: {problems}") from None


@overload
def form_for(hint: type[T], *, name: str = ...) -> Form[T]: ...
@overload
def form_for(hint: Any, *, name: str = ...) -> Form[Any]: ...
def form_for(hint: Any, *, name: str = "value") -> Form[Any]:
    """Return a form for a type: one field, or for a class one for each of its fields.

    Args:
        hint: a text, number, boolean, date, enumeration of texts, a list or set of such an enumeration, or one of these
            or None; or an attrs class, dataclass, TypedDict, NamedTuple or Pydantic model of such fields.
        name: the name of a single field.

    Raises:
        TypeError: another type; forms are flat (specification, client/elicitation). The text names the field.
    """
    bare, _ = split(hint)
    builder = SchemaBuilder()
    schema = builder.property(Field(name, hint, required=True))
    whole = builder.is_object(schema) and (is_record(bare) or is_model(bare))
    if not whole:
        schema = {"type": "object", "properties": {name: schema}, "required": [name]}
    root = builder.finish(schema)  # whatever is not recursive is written out
    fields = root.get("properties", {name: root})
    nullable = [key for key in root.get("required", ()) if takes_null(fields[key])]
    required = [key for key in root.get("required", ()) if key not in nullable]
    shown = {"type": "object", "properties": {key: _form_field(key, field) for key, field in fields.items()}}
    if required:
        shown["required"] = required
    validator = validator_for({**root, "required": required})
    return Form(shown, validator, converter_for(hint), None if whole else name, nullable)


known_form: Final[Callable[[Any], Form[Any]]] = lru_cache(maxsize=256)(form_for)
"""As `form_for`, cached for each type."""


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
