"""Forms for elicitation from Python types: flat fields only, as the specification wants them."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import attrs

from trimcp.errors import LocalError
from trimcp.server.convert import ConversionError, converter_for
from trimcp.server.json_schema import is_record
from trimcp.server.schema import schema_of
from trimcp.validation import Validator
from trimcp.wire.converter import WireError
from trimcp.wire.converter import converter_for as wire_converter_for
from trimcp.wire.elicitation import FormSchema
from trimcp.wire.revisions import LATEST

__all__ = ["Form", "form", "form_for"]

T = TypeVar("T")


@attrs.frozen(eq=False)
class Form(Generic[T]):
    """A form and how to read it: `await ctx.elicit("Where to?", form)`, then `form.load(result.content)`.

    Attributes:
        schema: the JSON Schema the client gets.
    """

    schema: dict[str, Any]
    _hint: Any
    _field: str | None
    _validator: Validator

    def load(self, content: Any) -> T:
        """Return what the user filled in as the form's type.

        Raises:
            LocalError: the client's answer does not fit the form.
        """
        problems = self._validator.problems(content)
        if problems:
            raise LocalError(f"the client's answer does not fit the form: {'; '.join(problems)}")
        value = content if self._field is None else content.get(self._field)
        convert = converter_for(self._hint, schema_of)
        try:
            loaded: T = value if convert is None else convert(value)
        except ConversionError as error:
            raise LocalError(f"the client's answer does not fit the form: {error}") from None
        return loaded


def form(kind: type[T]) -> Form[T]:
    """Return a form of several fields from an attrs class, dataclass or TypedDict.

    Raises:
        TypeError: a field is something a form cannot hold: forms are flat.
    """
    return form_for(kind, name=getattr(kind, "__name__", "form"))


def form_for(hint: Any, *, name: str) -> Form[Any]:
    """Return a form for a type: its fields where it has some, else one field called `name`."""
    whole = schema_of(hint)
    if is_record(hint):
        schema, field = {**whole}, None
    else:
        schema, field = {"type": "object", "properties": {name: whole}, "required": [name]}, name
    schema.pop("additionalProperties", None)
    try:
        flat = wire_converter_for(LATEST).load(schema, FormSchema)
    except WireError as error:
        raise TypeError(f"{name}: a form can only ask for flat values (text, numbers, choices): {error}") from None
    return Form(wire_converter_for(LATEST).dump(flat), hint, field, Validator(schema))
