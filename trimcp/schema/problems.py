"""Errors of the JSON Schema engine as texts for a user or a model, of bounded length and without values."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from datetime import datetime
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from trimcp.wire.fields import JSON_NAMES

if TYPE_CHECKING:
    import jsonschema_rs

VISIT: Final = "x-trimcp-visit"
"""The keyword placed before each reference of a peer's schema; it counts how many are followed."""

NO_ALTERNATIVE: Final = {"not": {"$comment": "x-trimcp-no-alternative"}}
"""What fails if no alternative fits, in a schema that keeps few errors. A keyword of ours would be shown a copy."""

_LONGEST_KEY: Final = 40
_MOST_REASONS: Final = 10

_TYPE_NAMES: Final = {name.split()[-1]: name for name in JSON_NAMES.values()}

# Keyword -> text, for keywords whose error needs only their argument.
_LIMIT_TEXTS: Final = {
    "minimum": "must be at least {}",
    "maximum": "must be at most {}",
    "exclusiveMinimum": "must be greater than {}",
    "exclusiveMaximum": "must be less than {}",
    "multipleOf": "must be a multiple of {}",
    "minLength": "must have at least {} characters",
    "maxLength": "must have at most {} characters",
    "minItems": "must have at least {} items",
    "maxItems": "must have at most {} items",
    "minProperties": "must have at least {} properties",
    "maxProperties": "must have at most {} properties",
    "pattern": "must match the pattern {}",
    "format": "must be a valid {}",
    "contentEncoding": "must be {} text",
}

_Explanation = tuple[list[str | int], str]


def size_of(value: Any, most: int) -> tuple[int, int]:
    """Return how many members a value has, long texts counted as several, and what a copy of it costs in such members.

    Does not recurse, and looks no further once there are more members than `most`.
    """
    total = beside = 0
    level = [value]
    while level and total <= most:
        total += len(level)
        kinds = set(map(type, level))
        if any(issubclass(kind, str) for kind in kinds):
            total += sum(len(each) >> 6 for each in level if isinstance(each, str))
        if not any(issubclass(kind, (dict, list)) for kind in kinds):
            break
        inner = [each for each in level if isinstance(each, (dict, list))]
        beside += len(inner) + 2 * sum(len(each) for each in inner if isinstance(each, dict))
        level = list(chain.from_iterable(each.values() if isinstance(each, dict) else each for each in inner))
    return total, total + beside


def texts(error: jsonschema_rs.ValidationError, value: Any) -> list[str]:
    """Return one error of the engine as texts, `text @ path`; none for a place that was not validated.

    `value`: the validated value; only its types and member names are shown.
    """
    return [f"{text} @ {path_text(path)}" for path, text in _explain(error, value)]


def _explain(error: jsonschema_rs.ValidationError, value: Any, nested: bool = False) -> list[_Explanation]:
    path = list(error.instance_path)
    kind = error.kind
    keyword = kind.name
    if keyword == VISIT:  # the budget is used up: this place was not validated
        return []
    if keyword == "not" and getattr(kind, "schema", None) == NO_ALTERNATIVE["not"]:
        return [(path, "matches no alternative")]
    if keyword in ("anyOf", "oneOf") and hasattr(kind, "context"):
        return [(path, _explain_alternatives(error, value, nested))]
    return [(path, shorten(_text(error, keyword, value)))]


def _text(error: jsonschema_rs.ValidationError, keyword: str, value: Any) -> str:
    kind: Any = error.kind
    if keyword == "type":
        return f"must be {_one_of(_TYPE_NAMES[t] for t in kind.types)}, not {_type_of(_at(value, error.instance_path))}"
    if keyword == "required":
        return f"lacks the required property {_quoted(kind.property)}"
    if keyword in ("additionalProperties", "unevaluatedProperties") and hasattr(kind, "unexpected"):
        return f"has unknown properties: {_listed(kind.unexpected)}"
    if keyword == "falseSchema" and list(error.schema_path)[-1:] == ["additionalProperties"]:
        return f"has unknown properties: {_listed(_at(value, error.instance_path))}"
    if keyword == "falseSchema":
        return "is not allowed here"
    if keyword == "enum":
        return f"must be one of {_listed(kind.options)}"
    if keyword == "const":
        return f"must be {_quoted(kind.expected_value)}"
    if keyword == "format" and kind.value == "date-time" and _is_without_zone(_at(value, error.instance_path)):
        return "must have a time zone, such as Z or +02:00, behind the time"
    if keyword in _LIMIT_TEXTS:
        return _LIMIT_TEXTS[keyword].format(shorten(str(kind.value)))
    return error.message.removeprefix("value ")


def _is_without_zone(text: str) -> bool:
    """Return whether only a time zone is missing for a date-time (RFC 3339)."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return False
    return moment.tzinfo is None and "T" in text.upper()


def _explain_alternatives(error: jsonschema_rs.ValidationError, value: Any, nested: bool) -> str:
    """Return one text for anyOf or oneOf: the expected types if only types failed, else the error of each branch."""
    kind: Any = error.kind
    if type(kind).__name__ == "OneOfMultipleValid":
        return "matches more than one alternative where exactly one is wanted"
    branches: list[list[jsonschema_rs.ValidationError]] = kind.context
    here = list(error.instance_path)
    firsts = [branch[0] for branch in branches if branch]
    if firsts and all(e.kind.name == "type" and list(e.instance_path) == here for e in firsts):
        wanted: dict[str, None] = {}
        for each in firsts:
            types: Any = each.kind
            wanted.update(dict.fromkeys(_TYPE_NAMES[t] for t in types.types))
        return shorten(f"must be {_one_of(wanted)}, not {_type_of(_at(value, here))}")
    # Leave out branches for other types, if a branch has the right type.
    firsts = [e for e in firsts if e.kind.name != VISIT]
    near = [e for e in firsts if not (e.kind.name == "type" and list(e.instance_path) == here)] or firsts
    reasons: dict[str, None] = {}
    for each in near[:_MOST_REASONS]:
        if each.kind.name in ("anyOf", "oneOf") and nested:
            continue
        for path, text in _explain(each, value, nested=True):
            reasons.setdefault(text if path == here else f"{text} (@ {path_text(path)})")
    return shorten(f"matches no alternative: {'; or '.join(reasons)}" if reasons else "matches no alternative")


def _at(value: Any, path: Iterable[str | int]) -> Any:
    return functools.reduce(operator.getitem, path, value)


def _type_of(value: Any) -> str:
    return JSON_NAMES.get(type(value), "an array")


def _one_of(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def _listed(values: Iterable[Any]) -> str:
    shown = list(values)
    text = ", ".join(_quoted(v) for v in shown[:20])
    return f"{text}, ..." if len(shown) > 20 else text


def _quoted(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return shorten(repr(value) if isinstance(value, str | int | float) else "a structure", _LONGEST_KEY)


def shorten(text: str, limit: int = 200) -> str:
    """Return the text, cut to `limit` characters with an ellipsis."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def path_text(path: Iterable[str | int]) -> str:
    """Return the JSONPath of a place, `$.a[0]["b c"]` (RFC 9535, a normalized path with short names)."""
    parts = ["$"]
    for step in path:
        if isinstance(step, int):
            parts.append(f"[{step}]")
        elif step.isidentifier() and len(step) <= _LONGEST_KEY:
            parts.append(f".{step}")
        else:
            parts.append(f"[{_quoted(step)}]")
    return shorten("".join(parts))
