"""Finds the subschemas of a JSON Schema: those of 2020-12, and those of older drafts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

SINGLE: Final = frozenset(
    {
        "additionalItems",
        "additionalProperties",
        "contains",
        "contentSchema",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
LISTS: Final = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
NAMED: Final = frozenset(
    {"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"}
)


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (keyword, name, subschema) for each direct subschema that is an object.

    The name is "" except under keywords that name their subschemas, such as `properties`. Values of other keywords,
    such as `default`, are data.
    """
    for keyword, value in schema.items():
        if isinstance(value, dict):
            if keyword in NAMED:
                yield from ((keyword, name, each) for name, each in value.items() if isinstance(each, dict))
            elif keyword in SINGLE:
                yield keyword, "", value
        elif keyword in LISTS and isinstance(value, list):
            yield from ((keyword, "", each) for each in value if isinstance(each, dict))
