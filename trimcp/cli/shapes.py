"""JSON Schema as text for people: what each property may be, with its bounds, and the fields inside it.

Schemas are a server's text: all of it is made harmless, and there is an end to how deep and how long it gets.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

from trimcp.cli.text import number_text, one_line
from trimcp.cli.values import alternatives

__all__ = ["describe_properties"]

_DEEPEST: Final = 4
_LONGEST: Final = 200  # lines for one schema
_STEP: Final = "    "
_NUMBERS: Final = frozenset({"integer", "number"})

_Shape = Mapping[str, Any]


def describe_properties(schema: _Shape, indent: str = "") -> Iterator[str]:
    """Yield a line for each property of an object, and below it those of the objects it holds."""
    lines = _properties(schema, schema, indent, ())
    yield from islice(lines, _LONGEST)
    if next(lines, None) is not None:
        yield f"{indent}and more; --json shows all"


def _properties(schema: _Shape, root: _Shape, indent: str, above: tuple[_Shape, ...]) -> Iterator[str]:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping):
        return
    for name, found in properties.items():
        shapes = alternatives(found, root)
        notes = [_one_of(shapes, root), _default(found)]
        if isinstance(required, list) and name in required:
            notes[1] = "required"
        described = [shape for shape in (found, *shapes) if isinstance(shape, Mapping)]
        abouts = [about for shape in described if isinstance(about := shape.get("description"), str)]
        about = f": {one_line(abouts[0])}" if abouts else ""
        yield f"{indent}{one_line(name)} ({', '.join(note for note in notes if note)}){about}"
        for inner in _objects(shapes, root):
            if len(above) < _DEEPEST and not any(inner is each for each in above):  # it may hold itself
                yield from _properties(inner, root, indent + _STEP, (*above, inner))


def _objects(shapes: list[_Shape], root: _Shape) -> Iterator[_Shape]:
    """Yield the schemas of the objects that a value is, or is a list of."""
    for shape in shapes:
        inside = alternatives(shape["items"], root) if "items" in shape else []
        yield from (each for each in (shape, *inside) if "properties" in each)


def _one_of(shapes: list[_Shape], root: _Shape) -> str:
    return " or ".join(dict.fromkeys(_kind(shape, root) for shape in shapes[:10]))


def _kind(shape: _Shape, root: _Shape) -> str:
    choices = shape.get("enum", [shape["const"]] if "const" in shape else None)
    if isinstance(choices, list):
        return one_line(" | ".join(map(_value, choices)), 100)
    kinds = shape.get("type")
    kinds = [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)]
    inner = {"array": ("list", "items"), "object": ("object", "additionalProperties")}
    names = [_with_inner(shape, root, *inner[kind]) if kind in inner else one_line(kind, 40) for kind in kinds]
    return ", ".join([" or ".join(names) or "anything", *_bounds(shape, kinds)])


def _with_inner(shape: _Shape, root: _Shape, name: str, keyword: str) -> str:
    inside = shape.get(keyword)
    return f"{name} of {_one_of(alternatives(inside, root), root)}" if isinstance(inside, Mapping) and inside else name


def _bounds(shape: _Shape, kinds: list[str]) -> Iterator[str]:
    if _NUMBERS & set(kinds):
        yield from _range(shape)
    if "string" in kinds:
        yield from _size(shape, "Length", "character")
        for keyword, text in (("format", "{}"), ("pattern", "matching {}")):
            if isinstance(value := shape.get(keyword), str):
                yield text.format(one_line(value, 60))
    if "array" in kinds:
        yield from _size(shape, "Items", "item")
        if shape.get("uniqueItems") is True:
            yield "no two alike"


def _range(shape: _Shape) -> Iterator[str]:
    low, high = _number(shape, "minimum"), _number(shape, "maximum")
    if low is not None and high is not None:
        yield f"from {low} to {high}"
    else:
        yield from (f"at least {low}" for _ in [low] if low is not None)
        yield from (f"at most {high}" for _ in [high] if high is not None)
    for keyword, text in (("exclusiveMinimum", "above"), ("exclusiveMaximum", "below"), ("multipleOf", "in steps of")):
        if (value := _number(shape, keyword)) is not None:
            yield f"{text} {value}"


def _size(shape: _Shape, what: str, noun: str) -> Iterator[str]:
    low, high = _number(shape, f"min{what}"), _number(shape, f"max{what}")
    if low == "0":
        low = None
    if low is not None and high is not None:
        amount = low if low == high else f"{low} to {high}"
    elif low is not None or high is not None:
        amount = f"at least {low}" if high is None else f"at most {high}"
    else:
        return
    yield f"{amount} {noun}{'' if amount.endswith(' 1') or amount == '1' else 's'}"


def _number(shape: _Shape, keyword: str) -> str | None:
    value = shape.get(keyword)
    return number_text(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _default(shape: Any) -> str:
    if not isinstance(shape, Mapping) or "default" not in shape:
        return ""
    return one_line(f"default {_value(shape['default'])}", 60)


def _value(value: Any) -> str:
    """Return a value as it is typed on the command line."""
    return value if isinstance(value, str) and value else json.dumps(value)
