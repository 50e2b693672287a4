"""What an author says about one argument inside `Annotated`: our own `Arg`, and objects of other packages that look
like it. Knows JSON Schema keywords; nothing of functions, conversion or MCP messages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import attrs

from trimcp.values import valued

__all__ = ["Arg", "apply_metadata"]


@attrs.frozen
@valued
class Arg:
    """Describes and bounds an argument: `days: Annotated[int, Arg("How many days", ge=1, le=14)]`.

    Everything here appears in the JSON Schema and is checked before the function is called. Objects of the
    `annotated-types` package and `typing.Doc` are understood too, and a plain string is a description.

    Attributes:
        description: for the model: what the argument means.
        ge, gt, le, lt, multiple_of: bounds of a number.
        min_length, max_length: bounds of a text, list or dict.
        pattern: a regular expression some part of the text must match (JSON Schema "pattern": not anchored).
        examples: JSON values to show.
        title: a name for people.
        header: mirror the argument in the HTTP header `Mcp-Param-{header}`, so that proxies can route by it
            (specification, server/tools, "x-mcp-header").
    """

    description: str | None = None
    ge: float | None = attrs.field(default=None, kw_only=True)
    gt: float | None = attrs.field(default=None, kw_only=True)
    le: float | None = attrs.field(default=None, kw_only=True)
    lt: float | None = attrs.field(default=None, kw_only=True)
    multiple_of: float | None = attrs.field(default=None, kw_only=True)
    min_length: int | None = attrs.field(default=None, kw_only=True)
    max_length: int | None = attrs.field(default=None, kw_only=True)
    pattern: str | None = attrs.field(default=None, kw_only=True)
    examples: Sequence[Any] | None = attrs.field(default=None, kw_only=True)
    title: str | None = attrs.field(default=None, kw_only=True)
    header: str | None = attrs.field(default=None, kw_only=True)


# Attribute of the marker -> keyword in a schema of numbers.
_NUMBERS: Final = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
}
_LENGTHS: Final = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
_NUMERIC: Final = frozenset({"integer", "number"})


def apply_metadata(schema: dict[str, Any], metadata: Sequence[Any]) -> None:
    """Add to `schema` what the extras of an `Annotated` say; extras we do not understand are left alone.

    Raises:
        TypeError: a bound that fits no alternative of the schema, such as `ge=` on a string.
    """
    for extra in metadata:
        if isinstance(extra, str):
            schema["description"] = extra
        elif isinstance(documentation := getattr(extra, "documentation", None), str):
            schema["description"] = documentation
        elif not isinstance(extra, type):
            _apply_bounds(schema, extra)
        if isinstance(extra, Arg):
            _apply_words(schema, extra)


def _apply_words(schema: dict[str, Any], arg: Arg) -> None:
    if arg.title is not None:
        schema["title"] = arg.title
    if arg.description is not None:
        schema["description"] = arg.description
    if arg.examples is not None:
        schema["examples"] = list(arg.examples)
    if arg.header is not None:
        if not _TOKEN.match(arg.header):
            raise TypeError(f"{arg.header!r} is no name of an HTTP header (RFC 9110, 5.1)")
        if schema.get("type") not in ("boolean", "integer", "string"):
            raise TypeError("only a string, integer or boolean can be mirrored in a header")
        schema["x-mcp-header"] = arg.header


def _apply_bounds(schema: dict[str, Any], extra: Any) -> None:
    for name, keyword in _NUMBERS.items():
        bound = getattr(extra, name, None)
        if bound is None:
            continue
        if isinstance(bound, bool) or not isinstance(bound, (int, float)):
            raise TypeError(f"the bound {name}={bound!r} is no number")
        for branch in _branches(schema, _NUMERIC, f"{name}="):
            branch[keyword] = bound
    for index, name in enumerate(("min_length", "max_length")):
        bound = getattr(extra, name, None)
        if not isinstance(bound, int) or (name == "min_length" and bound == 0):
            continue
        for branch in _branches(schema, frozenset(_LENGTHS), f"{name}="):
            branch[_LENGTHS[branch["type"]][index]] = bound
    pattern = getattr(extra, "pattern", None)
    if isinstance(pattern, re.Pattern):
        pattern = pattern.pattern
    if isinstance(pattern, str):
        for branch in _branches(schema, frozenset({"string"}), "pattern="):
            branch["pattern"] = pattern


def _branches(schema: dict[str, Any], types: frozenset[str], what: str) -> list[dict[str, Any]]:
    """The schema itself, or those of its alternatives, that have one of the types."""
    candidates = [schema, *schema.get("anyOf", ())]
    found = [each for each in candidates if each.get("type") in types]
    if not found:
        raise TypeError(f"{what} does not apply to this type; it needs {' or '.join(sorted(types))}")
    return found
