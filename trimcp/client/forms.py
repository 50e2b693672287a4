"""Help for elicitation handlers: what a form says by itself."""

from __future__ import annotations

from trimcp.wire.elicitation import ElicitAnswer, FormSchema
from trimcp.wire.fields import ABSENT

__all__ = ["fill_defaults"]


def fill_defaults(schema: FormSchema, filled_in: dict[str, ElicitAnswer] | None = None) -> dict[str, ElicitAnswer]:
    """Return what was filled in, with the form's own defaults where nothing was (client/elicitation, "Defaults").

    Args:
        schema: `params.requested_schema` of the question.
        filled_in: values by name, as far as the user gave any.
    """
    values = dict(filled_in or {})
    for name, question in schema.properties.items():
        if name not in values and question.default is not ABSENT:
            values[name] = question.default
    return values
