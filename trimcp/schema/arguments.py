"""Descriptions and bounds of one argument in its `Annotated`: our own `Arg`, and like objects of other packages, such
as `annotated-types`. It knows JSON Schema keywords, and nothing of functions or conversion.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import attrs

from trimcp.bounds import is_token
from trimcp.schema.records import UnreadableHint, belongs_to_pydantic, is_field_info
from trimcp.values import valued

__all__ = ["Arg", "apply_metadata", "describes", "readable"]


@attrs.frozen
@valued
class Arg:
    """Describes and bounds an argument: `days: Annotated[int, Arg("How many days", ge=1, le=14)]`.

    All of it is in the JSON Schema and checked before the function is called. Objects of `annotated-types`, Pydantic's
    `Field` and `typing.Doc` work too, and a plain string is a description. Anything else is an error where the function
    is defined.

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
_KNOWN: Final = frozenset(
    {*_NUMBERS, "min_length", "max_length", "pattern", "description", "documentation", "title", "examples"}
)
_NUMERIC: Final = frozenset({"integer", "number"})


def readable(extras: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Split the extras of an `Annotated` into those we read and those that only Pydantic does: (ours, theirs).

    Groups are given as their members, and a Pydantic `Field` as its texts and bounds. Raises UnreadableHint for one
    that neither reads, because what it says would never be checked.
    """
    ours: list[Any] = []
    theirs: list[Any] = []
    for extra in _single(extras):
        known = _is_known(extra)
        # A bound that is no number, such as a date, is for Pydantic.
        if belongs_to_pydantic(extra) and not (known and _has_only_numbers(extra)):
            theirs.append(extra)
        elif known:
            ours.append(extra)
        else:
            raise UnreadableHint(
                f"{_shown(extra)} in its Annotated is nothing that can be read; use trimcp.Arg, annotated_types,"
                " Pydantic's Field, typing.Doc or a string"
            )
    return ours, theirs


def _single(extras: Sequence[Any]) -> Iterator[Any]:
    for extra in extras:
        if extra is None:
            continue
        if is_field_info(extra):
            from trimcp.schema.pydantic_types import parts_of_field

            words, members, rest = parts_of_field(extra)
            yield Arg(**words)
            yield from _single(members)
            if rest is not None:
                yield rest
        elif getattr(extra, "__is_annotated_types_grouped_metadata__", False) and not isinstance(extra, type):
            yield from _single(list(extra))
        else:
            yield extra


def _is_known(extra: Any) -> bool:
    if isinstance(extra, str | Arg | re.Pattern) or isinstance(getattr(extra, "documentation", None), str):
        return True
    if isinstance(extra, type):
        return False
    return _said(extra).keys() <= _KNOWN and any(hasattr(extra, name) for name in _KNOWN)


def _has_only_numbers(extra: Any) -> bool:
    return all(_is_number(getattr(extra, name)) for name in _NUMBERS if getattr(extra, name, None) is not None)


def _said(extra: Any) -> dict[str, Any]:
    """The members of another package's object that are set; of one that cannot list them, those we know."""
    if dataclasses.is_dataclass(extra):
        names = [field.name for field in dataclasses.fields(extra)]
    elif attrs.has(type(extra)):
        names = [attribute.name for attribute in attrs.fields(type(extra))]
    else:
        names = [name for name in getattr(extra, "__dict__", _KNOWN) if not name.startswith("_")]
    found = {name: getattr(extra, name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _shown(extra: Any) -> str:
    text = extra.__name__ if isinstance(extra, type) else repr(extra)
    return text if len(text) <= 100 else f"{text[:100]}..."


def describes(extras: Sequence[Any]) -> bool:
    """Whether one of these extras is or has a description."""
    probe: dict[str, Any] = {}
    for extra in extras:
        _apply_words(probe, extra)
    return "description" in probe


def apply_metadata(schema: dict[str, Any], metadata: Sequence[Any]) -> None:
    """Add to `schema` what the extras of an `Annotated` say, after `readable` has read them.

    Raises TypeError for a bound that fits no alternative of the schema, such as `ge=` on a string.
    """
    for extra in metadata:
        if not isinstance(extra, str):
            _apply_bounds(schema, extra)
        _apply_words(schema, extra)
        if isinstance(extra, Arg) and extra.header is not None:
            _apply_header(schema, extra.header)


def _apply_words(schema: dict[str, Any], extra: Any) -> None:
    for name in ("documentation", "description", "title"):
        text = extra if isinstance(extra, str) else getattr(extra, name, None)
        if isinstance(text, str):
            schema["title" if name == "title" else "description"] = text
        if text is extra:
            return
    examples = getattr(extra, "examples", None)
    if isinstance(examples, list | tuple):
        schema["examples"] = list(examples)


def _apply_header(schema: dict[str, Any], header: str) -> None:
    if not is_token(header):
        raise TypeError(f"{header!r} is no name of an HTTP header (RFC 9110, 5.1)")
    if schema.get("type") not in ("boolean", "integer", "string"):
        raise TypeError("only a string, integer or boolean can be mirrored in a header")
    schema["x-mcp-header"] = header


def _apply_bounds(schema: dict[str, Any], extra: Any) -> None:
    for name, keyword in _NUMBERS.items():
        bound = getattr(extra, name, None)
        if bound is None:
            continue
        if not _is_number(bound):
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


def _is_number(bound: Any) -> bool:
    return isinstance(bound, int | float) and not isinstance(bound, bool)


def _branches(schema: dict[str, Any], types: frozenset[str], what: str) -> list[dict[str, Any]]:
    """The schema itself, or those of its alternatives, that have one of the types."""
    candidates = [schema, *schema.get("anyOf", ())]
    found = [each for each in candidates if each.get("type") in types]
    if not found:
        raise TypeError(f"{what} does not apply to this type; it needs {' or '.join(sorted(types))}")
    return found
