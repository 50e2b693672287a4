"""Arguments as they are typed, `name=value`, made into what a tool's schema wants. Knows JSON Schema's types only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

__all__ = ["ValueProblem", "alternatives", "parse_arguments"]

_NAMES: Final = {
    "array": "a list in JSON, or the key several times",
    "boolean": "true or false",
    "integer": "a whole number",
    "null": "null",
    "number": "a number",
    "object": "an object in JSON",
}
_MOST_REFERENCES: Final = 20


class ValueProblem(ValueError):
    """A word is no argument; the text says what would be."""


def parse_arguments(words: Sequence[str], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that `words` of the form `name=value` stand for.

    Text stays text where the schema wants text; numbers, booleans, lists and objects are read as JSON. A key given
    several times makes a list. What the schema does not know is read as JSON if it is, else as text.

    Raises:
        ValueProblem: a word has no "=", or its value cannot be of any type the schema allows.
    """
    properties = schema.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    given: dict[str, list[str]] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ValueProblem(f"{word!r} is no argument; write name=value, or all of them with --arguments '{{...}}'")
        given.setdefault(key, []).append(value)
    return {key: _parse_all(key, values, known.get(key, True), schema) for key, values in given.items()}


def _parse_all(key: str, values: list[str], schema: Any, root: Mapping[str, Any]) -> Any:
    shapes = alternatives(schema, root)
    lists = [shape for shape in shapes if "array" in _types(shape)]
    if len(values) == 1 and not (lists and not _is_json(values[0], list) and not _takes_text(shapes)):
        return _parse(key, values[0], shapes)
    if not lists and not any(not _types(shape) for shape in shapes):
        raise ValueProblem(f"{key} is given {len(values)} times, but it is no list")
    items = next((shape.get("items", True) for shape in lists), True)
    return [_parse(key, value, alternatives(items, root)) for value in values]


def _parse(key: str, text: str, shapes: list[Mapping[str, Any]]) -> Any:
    for shape in shapes:
        for choice in shape.get("enum", [shape["const"]] if "const" in shape else []):
            if text == choice or text == json.dumps(choice):
                return choice
    types = [kind for shape in shapes for kind in _types(shape)]
    value = _json(text)
    if value is not _NO_JSON and (not types or any(_is_of(value, kind) for kind in types if kind != "string")):
        return value
    if not types or "string" in types:
        return text
    wanted = " or ".join(dict.fromkeys(_NAMES.get(kind, kind) for kind in types))
    raise ValueProblem(f"{key} must be {wanted}, not {text!r}")


_NO_JSON: Final = object()


def _json(text: str) -> Any:
    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return _NO_JSON


def _is_json(text: str, kind: type) -> bool:
    return isinstance(_json(text), kind)


def _is_of(value: Any, kind: str) -> bool:
    match kind:
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return not isinstance(value, bool) and (isinstance(value, int) or (_is_float(value) and value % 1 == 0))
        case "number":
            return not isinstance(value, bool) and isinstance(value, int | float)
        case "null":
            return value is None
        case "array":
            return isinstance(value, list)
        case "object":
            return isinstance(value, dict)
    return False


def _is_float(value: Any) -> bool:
    return isinstance(value, float)


def _takes_text(shapes: list[Mapping[str, Any]]) -> bool:
    return any("string" in _types(shape) or not _types(shape) for shape in shapes)


def _types(shape: Mapping[str, Any]) -> list[str]:
    kinds = shape.get("type")
    if isinstance(kinds, str):
        return [kinds]
    return [kind for kind in kinds if isinstance(kind, str)] if isinstance(kinds, list) else []


def alternatives(schema: Any, root: Mapping[str, Any], left: int = _MOST_REFERENCES) -> list[Mapping[str, Any]]:
    """Return the schema, or what it chooses from, with references inside the document followed."""
    if not isinstance(schema, Mapping) or left == 0:
        return [{}]
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return alternatives(_find(reference, root), root, left - 1)
    for keyword in ("anyOf", "oneOf"):
        branches = schema.get(keyword)
        if isinstance(branches, list):
            return [shape for branch in branches for shape in alternatives(branch, root, left - 1)][:100]
    return [schema]


def _find(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found
