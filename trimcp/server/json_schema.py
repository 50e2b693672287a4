"""From type hints to JSON Schema 2020-12, compact and in a stable order. Knows types; nothing of functions or MCP."""

from __future__ import annotations

import collections.abc as abc
import datetime
import decimal
import enum
import pathlib
import types
import typing
import uuid
from typing import Any, Final, Literal, Union, get_args, get_origin

from trimcp.server.arguments import apply_metadata
from trimcp.server.convert import ConversionError, to_json
from trimcp.server.docstrings import parse
from trimcp.server.records import ABSENT_DEFAULT, Field, alias_value, fields_of, is_record, split

__all__ = ["SchemaBuilder", "schema_of"]

_JSON_TYPES: Final = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_TIME: Final = r"^\d{2}:\d{2}(:\d{2}(\.\d+)?)?(Z|[+-]\d{2}:\d{2})?$"
_LEAVES: Final[dict[Any, dict[str, Any]]] = {
    **{python: {"type": name} for python, name in _JSON_TYPES.items()},
    None: {"type": "null"},
    Any: {},
    object: {},
    bytes: {"type": "string", "contentEncoding": "base64"},
    datetime.date: {"type": "string", "format": "date"},
    datetime.datetime: {"type": "string", "format": "date-time"},
    datetime.time: {"type": "string", "pattern": _TIME},
    datetime.timedelta: {"type": "number", "description": "a duration in seconds"},
    decimal.Decimal: {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^-?\d+(\.\d+)?$"}]},
    pathlib.Path: {"type": "string"},
    pathlib.PurePath: {"type": "string"},
    uuid.UUID: {"type": "string", "format": "uuid"},
}
_SETS: Final = (set, frozenset, abc.Set, abc.MutableSet)
_ARRAYS: Final = (list, abc.Sequence, abc.MutableSequence, abc.Collection, abc.Iterable, *_SETS)
_OBJECTS: Final = (dict, abc.Mapping, abc.MutableMapping)


def schema_of(hint: Any) -> dict[str, Any]:
    """The JSON Schema of the values a type takes.

    Raises:
        TypeError: it has none.
    """
    builder = SchemaBuilder()
    return builder.finish(builder.build(hint))


class SchemaBuilder:
    """Builds the schemas of one document, whose records are shared in `$defs` where they repeat or recur.

    Args:
        output: describe what leaves us: fields with defaults are always there, and defaults say nothing.
    """

    def __init__(self, *, output: bool = False) -> None:
        self._output = output
        self._names: dict[Any, str] = {}
        self._definitions: dict[str, dict[str, Any]] = {}
        self._references: dict[str, list[dict[str, Any]]] = {}

    def build(self, hint: Any) -> dict[str, Any]:
        """The schema of one type. It is complete only after `finish`.

        Raises:
            TypeError: JSON Schema cannot say it. The text names the type, and what to use instead.
        """
        bare, extras = split(hint)
        if type(hint).__name__ == "TypeAliasType":
            schema = self._reference(hint, hint.__name__, lambda: self.build(alias_value(hint)))
        else:
            schema = self._build_bare(bare)
        apply_metadata(schema, extras)
        return schema

    def finish(self, root: dict[str, Any]) -> dict[str, Any]:
        """`root`, with the definitions it needs; those used once and not recursive are put in their place."""
        kept = {}
        for name, definition in self._definitions.items():
            references = self._references[name]
            if len(references) > 1 or self._reaches(name, name, set()):
                kept[name] = definition
                continue
            (place,) = references
            described = {key: value for key, value in place.items() if key != "$ref"}
            place.clear()
            place.update(definition | described)
        if kept:
            root["$defs"] = kept
        return root

    def _build_bare(self, bare: Any) -> dict[str, Any]:
        leaf = _LEAVES.get(bare) if _hashable(bare) else None
        if leaf is not None:
            return {key: [*map(dict, v)] if isinstance(v, list) else v for key, v in leaf.items()}
        origin, arguments = get_origin(bare), get_args(bare)
        if origin is Literal:
            return _choices([to_json(value) for value in arguments])
        if origin in (Union, types.UnionType):
            return self._union(arguments)
        if is_record(bare):
            cls = origin or bare
            return self._reference(bare, cls.__name__, lambda: self._record(bare))
        container = origin or bare
        if isinstance(bare, type) and issubclass(bare, enum.Enum):
            return self._enumeration(bare)
        if container is tuple:
            return self._tuple(arguments, bare)
        if container in _ARRAYS:
            items = self.build(arguments[0]) if arguments else {}
            schema: dict[str, Any] = {"type": "array", "items": items} if items else {"type": "array"}
            return schema | {"uniqueItems": True} if container in _SETS else schema
        if container in _OBJECTS:
            return self._mapping(arguments)
        raise TypeError(
            f"{getattr(bare, '__name__', bare)} has no JSON form; use builtins, a dataclass, an attrs class,"
            " a TypedDict, an Enum, or give the schema by hand"
        )

    def _union(self, members: tuple[Any, ...]) -> dict[str, Any]:
        branches: list[dict[str, Any]] = []
        for member in members:
            branch = self.build(member)
            if not branch:
                return {}
            # What holds alternatives and nothing else needs no level of its own.
            flat = branch["anyOf"] if branch.keys() == {"anyOf"} else [branch]
            branches += [each for each in flat if each not in branches]
        return branches[0] if len(branches) == 1 else {"anyOf": branches}

    def _enumeration(self, cls: type[enum.Enum]) -> dict[str, Any]:
        if issubclass(cls, enum.Flag):
            return {"type": "integer", "minimum": 0}
        try:
            return _choices([to_json(member) for member in cls])
        except ConversionError as error:
            raise TypeError(f"the enumeration {cls.__name__} has values JSON cannot carry: {error}") from None

    def _tuple(self, arguments: tuple[Any, ...], bare: Any) -> dict[str, Any]:
        if bare is tuple or bare is typing.Tuple:  # noqa: UP006 - what an author may have written
            return {"type": "array"}
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return {"type": "array", "items": self.build(arguments[0])}
        size = len(arguments)
        prefix = {"prefixItems": [self.build(each) for each in arguments]} if size else {}
        return {"type": "array", **prefix, "minItems": size, "maxItems": size}

    def _mapping(self, arguments: tuple[Any, ...]) -> dict[str, Any]:
        if not arguments:
            return {"type": "object"}
        key, value = self.build(arguments[0]), self.build(arguments[1])
        schema: dict[str, Any] = {"type": "object"}
        if key.get("type") == "integer":
            schema["propertyNames"] = {"pattern": r"^-?\d+$"}
        elif key and key.get("type") != "string":
            raise TypeError("the keys of a JSON object are strings; use str, int, UUID, or an enumeration of strings")
        elif len(key) > 1:
            schema["propertyNames"] = {name: rule for name, rule in key.items() if name != "type"}
        if value:
            schema["additionalProperties"] = value
        return schema

    def _record(self, bare: Any) -> dict[str, Any]:
        cls = get_origin(bare) or bare
        schema: dict[str, Any] = {"type": "object"}
        if summary := _own_summary(cls):
            schema["description"] = summary
        properties: dict[str, Any] = {}
        required = []
        for field in fields_of(bare):
            properties[field.name] = self.property(field)
            if field.required or (self._output and not typing.is_typeddict(cls)):
                required.append(field.name)
        schema["properties"] = properties
        if required:
            schema["required"] = required
        return schema

    def property(self, field: Field) -> dict[str, Any]:
        """The schema of one field or parameter, with its description and default.

        Raises:
            TypeError: as `build`.
        """
        schema = self.build(field.hint)
        if field.description and not _extras_describe(field.hint):
            schema["description"] = field.description
        if field.default is None and not _takes_null(schema):
            return schema  # `x: int = None` means "left out", which is no value a caller could give
        if field.default is not ABSENT_DEFAULT and not self._output:
            try:
                schema["default"] = to_json(field.default)
            except ConversionError:
                pass  # a default JSON cannot carry is nobody's business but the function's
        return schema

    def _reference(self, key: Any, name: str, build: Any) -> dict[str, Any]:
        if key not in self._names:
            unique, number = name, 2
            while unique in self._definitions:
                unique, number = f"{name}{number}", number + 1
            self._names[key] = unique
            self._definitions[unique] = {}
            self._references[unique] = []
            self._definitions[unique].update(build())
        known = self._names[key]
        place = {"$ref": f"#/$defs/{known}"}
        self._references[known].append(place)
        return place

    def _reaches(self, name: str, goal: str, seen: set[str]) -> bool:
        for target in _references_in(self._definitions[name]):
            if target == goal:
                return True
            if target not in seen:
                seen.add(target)
                if self._reaches(target, goal, seen):
                    return True
        return False


def _takes_null(schema: dict[str, Any]) -> bool:
    branches = schema.get("anyOf", [schema])
    return any(not b or b.get("type") == "null" or None in b.get("enum", ()) or "$ref" in b for b in branches)


def _references_in(schema: Any) -> typing.Iterator[str]:
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key == "$ref":
                yield value.removeprefix("#/$defs/")
            else:
                yield from _references_in(value)
    elif isinstance(schema, list):
        for each in schema:
            yield from _references_in(each)


def _choices(values: list[Any]) -> dict[str, Any]:
    """An enumeration, with its type where all values share one: some clients need it."""
    kinds = {_JSON_TYPES.get(type(value)) for value in values}
    kind = kinds.pop() if len(kinds) == 1 else None
    return {"type": kind, "enum": values} if kind else {"enum": values}


def _own_summary(cls: Any) -> str:
    """The first paragraph of a class's own docstring; dataclasses and NamedTuples make one up, which says nothing."""
    text = cls.__dict__.get("__doc__") or ""
    if text.startswith(f"{cls.__name__}("):
        return ""
    return " ".join(parse(text).description.partition("\n\n")[0].split())


def _extras_describe(hint: Any) -> bool:
    probe: dict[str, Any] = {}
    described = [
        e for e in split(hint)[1] if isinstance(e, str) or hasattr(e, "documentation") or hasattr(e, "description")
    ]
    apply_metadata(probe, [d if isinstance(d, str) else _Words(d) for d in described])
    return "description" in probe


class _Words:
    """Only what an extra says in words, without its bounds."""

    def __init__(self, extra: Any) -> None:
        self.documentation = getattr(extra, "documentation", None) or getattr(extra, "description", None)


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
