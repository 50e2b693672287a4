"""A tool's JSON Schema at the terminal: parses arguments `name=value` by the schema, and describes it to the user.

It uses only the types of JSON Schema. Schemas are untrusted text of a server: the description is escaped, and bounded
in depth and length.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import islice
from typing import Any, Final

from trimcp.cli.exits import Failure
from trimcp.cli.text import number_text, range_text, theirs
from trimcp.wire.tools import Tool

_NAMES: Final = {
    "array": "a list in JSON, or the key several times",
    "boolean": "true or false",
    "integer": "a whole number",
    "null": "null",
    "number": "a number",
    "object": "an object in JSON",
}
_CLASSES: Final[Mapping[str, type | tuple[type, ...]]] = {
    "array": list,
    "null": type(None),
    "number": (int, float),
    "object": dict,
}
_NO_JSON: Final = object()
_MOST_REFERENCES: Final = 20
_DEEPEST: Final = 4
_LONGEST: Final = 200  # lines for one schema
_STEP: Final = "    "
_MOST_NAMES: Final = 20
_OPENING: Final = frozenset({"$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties"})
"""Keywords that may allow arguments beside those under `properties`."""
_NUMBERS: Final = frozenset({"integer", "number"})

_Shape = Mapping[str, Any]


def _alternatives(schema: Any, root: _Shape, left: int = _MOST_REFERENCES) -> list[_Shape]:
    """Return the schema or its alternatives, with references inside the document resolved."""
    if not isinstance(schema, Mapping) or left == 0:
        return [{}]
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return _alternatives(_find(reference, root), root, left - 1)
    for keyword in ("anyOf", "oneOf"):
        branches = schema.get(keyword)
        if isinstance(branches, list):
            return [shape for branch in branches for shape in _alternatives(branch, root, left - 1)][:100]
    return [schema]


def _find(reference: str, root: _Shape) -> Any:
    found: Any = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _types(shape: _Shape) -> list[str]:
    kinds = shape.get("type")
    return [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)]


def _choices(shape: _Shape) -> list[Any]:
    """Return the values that are allowed; none if they are not listed."""
    choices = shape.get("enum", [shape["const"]] if "const" in shape else None)
    return choices if isinstance(choices, list) else []


# Arguments as they are typed


class ValueProblem(ValueError):
    """An argument is not valid; the text says what would be."""


def parse_arguments(
    words: Sequence[str], schema: Mapping[str, Any], *, option: str = "", others: bool = False
) -> dict[str, Any]:
    """Return the arguments given as `words` of the form `name=value`, or `name:=JSON` whatever the schema says.

    If the schema has a string, the value is kept as text; numbers, booleans, lists and objects are parsed as JSON. A
    name given several times makes a list. Where a schema allows names that it does not have, their values are parsed as
    JSON if possible, otherwise text. Raises ValueProblem: a word has no "=", or its value cannot be of any type the
    schema allows, or the tool has no such argument.

    `option` is the one that they follow, with a space, for errors; `others` takes names that the schema does not have.
    """
    properties = schema.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    given: dict[str, list[str]] = {}
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        as_json = key.endswith(":") and key not in known
        key = key[:-1] if as_json else key
        if not equals or not key:
            raise ValueProblem(f"{word!r:.100} is no argument; write {option}NAME=VALUE or {option}NAME:=JSON")
        if not others and key not in known and _is_closed(schema):
            raise ValueProblem(_unknown(key, known))
        if key in found or (as_json and key in given):
            raise ValueProblem(f"the argument {key!r:.60} is given twice")
        if not as_json:
            given.setdefault(key, []).append(value)
        elif (parsed := _json(value)) is _NO_JSON:
            raise ValueProblem(f"{option}{key}:= is not valid JSON: {value!r:.100}")
        else:
            found[key] = parsed
    return {**{key: _parse_all(key, values, known.get(key, True), schema) for key, values in given.items()}, **found}


def _is_closed(schema: _Shape) -> bool:
    """Return whether the arguments are those that the schema lists.

    To the letter, a JSON Schema that does not forbid other names allows them. But the tools of most servers do not mean
    that by saying nothing, and a name that is mistyped would be ignored.
    """
    if not isinstance(schema.get("properties"), Mapping) or not _OPENING.isdisjoint(schema):
        return False
    return schema.get("additionalProperties", False) is False


def _unknown(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, known, n=3)
    if near:
        return f"the tool has no argument {name!r:.60}; did you mean {', '.join(map(theirs, near))}?"
    names = ", ".join(theirs(each, 60) for each in islice(known, _MOST_NAMES))
    return f"the tool has no argument {name!r:.60}; it takes {names or 'none'}"


def _parse_all(key: str, values: list[str], schema: Any, root: _Shape) -> Any:
    shapes = _alternatives(schema, root)
    lists = [shape for shape in shapes if "array" in _types(shape)]
    if len(values) == 1 and not (lists and not isinstance(_json(values[0]), list) and not _takes_text(shapes)):
        return _parse(key, values[0], shapes)
    if not lists and not any(not _types(shape) for shape in shapes):
        raise ValueProblem(f"{key} is given {len(values)} times, but it is no list")
    items = next((shape.get("items", True) for shape in lists), True)
    return [_parse(key, value, _alternatives(items, root)) for value in values]


def _parse(key: str, text: str, shapes: list[_Shape]) -> Any:
    for choice in (choice for shape in shapes for choice in _choices(shape)):
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


def _json(text: str) -> Any:
    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return _NO_JSON


def _is_of(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return isinstance(value, _CLASSES.get(kind, ()))


def _takes_text(shapes: list[_Shape]) -> bool:
    return any("string" in _types(shape) or not _types(shape) for shape in shapes)


# What arguments may be


def describe_properties(schema: _Shape, indent: str = "") -> Iterator[str]:
    """Yield a line for each property of an object, and below it those of the objects it holds."""
    lines = _properties(schema, schema, indent, ())
    yield from islice(lines, _LONGEST)
    if next(lines, None) is not None:
        yield f"{indent}and more; --json shows all"


def describe_result(schema: _Shape, indent: str = "") -> Iterator[str]:
    """Yield what a tool returns as structured content: its type, and lines for its properties as above.

    What is no object stands in the only member `result` of one, as most servers send it, and is shown alone.
    """
    properties = schema.get("properties")
    alone = isinstance(properties, Mapping) and list(properties) == ["result"]
    shapes = _alternatives(properties["result"] if isinstance(properties, Mapping) and alone else schema, schema)
    yield f"{indent}returns {_one_of(shapes, schema)}"
    for inner in _objects(shapes, schema):
        yield from islice(_properties(inner, schema, indent + _STEP, (inner,)), _LONGEST)


def _properties(schema: _Shape, root: _Shape, indent: str, above: tuple[_Shape, ...]) -> Iterator[str]:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping):
        return
    for name, found in properties.items():
        shapes = _alternatives(found, root)
        notes = [_one_of(shapes, root), _default(found)]
        if isinstance(required, list) and name in required:
            notes[1] = "required"
        described = [shape for shape in (found, *shapes) if isinstance(shape, Mapping)]
        abouts = [about for shape in described if isinstance(about := shape.get("description"), str)]
        about = f": {theirs(abouts[0])}" if abouts else ""
        yield f"{indent}{theirs(name)} ({', '.join(note for note in notes if note)}){about}"
        for inner in _objects(shapes, root):
            if len(above) < _DEEPEST and not any(inner is each for each in above):  # it may hold itself
                yield from _properties(inner, root, indent + _STEP, (*above, inner))


def _objects(shapes: list[_Shape], root: _Shape) -> Iterator[_Shape]:
    """Yield the schemas of the objects that a value is, or is a list of."""
    for shape in shapes:
        inside = _alternatives(shape["items"], root) if "items" in shape else []
        yield from (each for each in (shape, *inside) if "properties" in each)


def _one_of(shapes: list[_Shape], root: _Shape) -> str:
    return " or ".join(dict.fromkeys(_kind(shape, root) for shape in shapes[:10]))


def _kind(shape: _Shape, root: _Shape) -> str:
    choices = _choices(shape)
    if choices:
        return theirs(" | ".join(map(_value, choices)), 100)
    kinds = _types(shape)
    inner = {"array": ("list", "items"), "object": ("object", "additionalProperties")}
    names = [_with_inner(shape, root, *inner[kind]) if kind in inner else theirs(kind, 40) for kind in kinds]
    return ", ".join([" or ".join(names) or "anything", *_bounds(shape, kinds)])


def _with_inner(shape: _Shape, root: _Shape, name: str, keyword: str) -> str:
    inside = shape.get(keyword)
    return f"{name} of {_one_of(_alternatives(inside, root), root)}" if isinstance(inside, Mapping) and inside else name


def _bounds(shape: _Shape, kinds: list[str]) -> Iterator[str]:
    if _NUMBERS & set(kinds):
        yield from _range(shape)
    if "string" in kinds:
        yield from _size(shape, "Length", "character")
        for keyword, text in (("format", "{}"), ("pattern", "matching {}")):
            if isinstance(value := shape.get(keyword), str):
                yield text.format(theirs(value, 60))
    if "array" in kinds:
        yield from _size(shape, "Items", "item")
        if shape.get("uniqueItems") is True:
            yield "no two alike"


def _range(shape: _Shape) -> Iterator[str]:
    if range_ := range_text(_number(shape, "minimum"), _number(shape, "maximum")):
        yield range_
    for keyword, text in (("exclusiveMinimum", "above"), ("exclusiveMaximum", "below"), ("multipleOf", "in steps of")):
        if (value := _number(shape, keyword)) is not None:
            yield f"{text} {value}"


def _size(shape: _Shape, what: str, noun: str) -> Iterator[str]:
    low, high = _number(shape, f"min{what}"), _number(shape, f"max{what}")
    if low == "0":
        low = None
    amount = low if low == high else range_text(low, high).removeprefix("from ")
    if amount:
        yield f"{amount} {noun}{'' if amount.split()[-1] == '1' else 's'}"


def _number(shape: _Shape, keyword: str) -> str | None:
    value = shape.get(keyword)
    return number_text(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _default(shape: Any) -> str:
    if not isinstance(shape, Mapping) or "default" not in shape:
        return ""
    return theirs(f"default {_value(shape['default'])}", 60)


def _value(value: Any) -> str:
    """Return a value as it is typed on the command line."""
    return value if isinstance(value, str) and value else json.dumps(value)


def read_words(tool: Tool, words: tuple[str, ...], target: str) -> dict[str, Any]:
    """Return the arguments of a call as words of the command line have them; `Failure` says what is wrong."""
    try:
        return parse_arguments(words, tool.input_schema)
    except ValueProblem as problem:
        more = "Anything else is sent with --arguments '{...}'"
        raise Failure(f"{problem}\nWhat it takes: trimcp inspect {shlex.quote(target)}. {more}") from None


def read_json(text: str, words: tuple[str, ...]) -> dict[str, Any]:
    """Return the arguments that are given as one object, or with "-" on standard input; `Failure` as above."""
    if words:
        raise Failure("give the arguments either as NAME=VALUE or with --arguments")
    return object_of(sys.stdin.read() if text == "-" else text, "--arguments", '{"city": "Oslo"}')


def object_of(text: str, option: str, example: str) -> dict[str, Any]:
    """Return the JSON object that an option was given. Raises Failure: it is none; the text says why."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Failure(f"{option} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise Failure(f"{option} must be an object, such as '{example}'")
    return value
