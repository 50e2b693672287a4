"""From type hints to JSON Schema 2020-12, compact and in a stable order."""

from __future__ import annotations

import collections.abc as abc
import copy
import datetime
import enum
import functools
import pathlib
import typing
import uuid
from typing import Any, Final, Literal, get_args, get_origin

import attrs

from trimcp.schema.convert import LISTS, MAPPINGS, ConversionError, to_json
from trimcp.schema.docstrings import parse
from trimcp.schema.hints import (
    ABSENT_DEFAULT,
    Field,
    UnreadableHint,
    alias_value,
    apply_metadata,
    fields_of,
    is_alias,
    is_field_info,
    is_model,
    is_record,
    is_union,
    readable,
    split,
)

_JSON_TYPES: Final = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_TIME: Final = r"^\d{2}:\d{2}(:\d{2}(\.\d+)?)?(Z|[+-]\d{2}:\d{2})?$"
_LEAVES: Final[dict[Any, dict[str, Any]]] = {
    **{python: {"type": name} for python, name in _JSON_TYPES.items()},
    None: {"type": "null"},
    Any: {},
    object: {},
}
# Keywords of JSON Schema whose content is never a schema.
_VALUES: Final = frozenset({"default", "const", "enum", "examples", "required"})
_SETS: Final = (set, frozenset, abc.Set, abc.MutableSet)


@functools.cache
def _other_leaves() -> dict[Any, dict[str, Any]]:
    import decimal  # loaded with the first type that JSON has no form of its own for

    return {
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


def _without_text(bare: Any, schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a decimal with a bound for numbers only: a bound would not apply to one given as text."""
    from decimal import Decimal

    if bare is not Decimal or len(schema["anyOf"][0]) == 1:
        return schema
    (number, _), rest = schema.pop("anyOf"), schema
    return {**number, **rest}


def schema_of(hint: Any) -> dict[str, Any]:
    """Return the JSON Schema of a type's values as input. Raises TypeError if it has none."""
    builder = SchemaBuilder()
    return builder.finish(builder.build(hint))


class SchemaBuilder:
    """Builds the schemas of one document; records that are used twice or are recursive go to `$defs`.

    With `output` the schemas describe results: fields with defaults are always present, and defaults are left out.
    """

    def __init__(self, *, output: bool = False) -> None:
        self._output = output
        self._names: dict[Any, str] = {}
        self._definitions: dict[str, dict[str, Any]] = {}
        self._references: dict[str, list[dict[str, Any]]] = {}

    def build(self, hint: Any, description: str | None = None) -> dict[str, Any]:
        """Return the schema of one type, which is complete only after `finish`.

        Raises TypeError for a type without a JSON Schema, with what to use instead; UnreadableHint as `readable`.

        Args:
            hint: the type, with the extras of `Annotated`.
            description: used where the extras have none.
        """
        bare, ours = hint, list[Any]()
        if is_alias(hint):
            schema = self._reference(hint, hint.__name__, lambda: self.build(alias_value(hint)))
        else:
            bare, extras = split(hint)
            ours, theirs = readable(extras)
            if theirs and self._output:
                raise UnreadableHint(f"{theirs[0]!r} would convert a result; only a Pydantic model can hold it there")
            schema = self._pydantic(bare, theirs) if theirs or is_model(bare) else self._build_bare(bare)
        if description:
            schema["description"] = description
        apply_metadata(schema, ours)
        return _without_text(bare, schema) if ours and "anyOf" in schema and not self._output else schema

    def finish(self, root: dict[str, Any]) -> dict[str, Any]:
        """Return `root` with the definitions it needs; those used once and not recursive are inlined."""
        kept = {}
        for name, definition in self._definitions.items():
            references = self._references[name]
            if len(references) > 1 or name in self._reached_from(name):
                kept[name] = definition
                continue
            (place,) = references
            described = {key: value for key, value in place.items() if key != "$ref"}
            place.clear()
            place.update(definition | described)
        if kept:
            root["$defs"] = kept
        return root

    def is_object(self, schema: dict[str, Any]) -> bool:
        """Return whether a schema built here accepts only objects."""
        while "$ref" in schema:
            schema = self._definitions[schema["$ref"].removeprefix("#/$defs/")]
        return schema.get("type") == "object"

    def _pydantic(self, bare: Any, extras: list[Any]) -> dict[str, Any]:
        from trimcp.schema.pydantic_types import json_schema, with_extras

        root = json_schema(with_extras(bare, extras), output=self._output)
        definitions = root.pop("$defs", {})
        if is_model(bare) and not extras and "$ref" not in root:
            # As a definition: other models may refer to it.
            name = root.get("title", (get_origin(bare) or bare).__name__)
            definitions[name] = root
            root = {"$ref": f"#/$defs/{name}"}
        adopted: dict[str, Any] = self._adopted(root, definitions)
        return adopted

    def _adopted(self, schema: Any, definitions: dict[str, Any]) -> Any:
        """Return a copy of a Pydantic schema with references to our definitions, without titles that repeat a name."""
        if isinstance(schema, list):
            return [self._adopted(each, definitions) for each in schema]
        if not isinstance(schema, dict):
            return schema
        name = schema.get("$ref")
        if isinstance(name, str):
            name = name.removeprefix("#/$defs/")
            definition = definitions[name]
            place = self._reference(
                ("pydantic", name, repr(definition)),
                name,
                lambda: self._adopted(_untitled(definition, name), definitions),
            )
            place.update({key: value for key, value in schema.items() if key != "$ref"})
            return place
        found = {}
        for key, value in schema.items():
            if key == "properties":
                value = {each: _untitled(field, each.replace("_", " ").title()) for each, field in value.items()}
            found[key] = value if key in _VALUES else self._adopted(value, definitions)
        return found

    def _build_bare(self, bare: Any) -> dict[str, Any]:
        try:
            leaf = _LEAVES.get(bare)
        except TypeError:  # an unhashable type
            leaf = None
        if leaf is not None:
            return copy.deepcopy(leaf)
        origin, arguments = get_origin(bare), get_args(bare)
        if origin is Literal:
            return _choices([to_json(value) for value in arguments])
        if is_union(bare):
            return self._union(arguments)
        container = origin or bare
        if is_record(bare):
            return self._reference(bare, container.__name__, lambda: self._record(bare))
        if isinstance(bare, type) and issubclass(bare, enum.Enum):
            return self._enumeration(bare)
        if container is tuple:
            return self._tuple(arguments, bare)
        if container in (*LISTS, *_SETS):
            items = self.build(arguments[0]) if arguments else {}
            schema: dict[str, Any] = {"type": "array", "items": items} if items else {"type": "array"}
            return schema | {"uniqueItems": True} if container in _SETS else schema
        if container in MAPPINGS:
            return self._mapping(arguments)
        if isinstance(bare, type) and bare in _other_leaves():
            return copy.deepcopy(_other_leaves()[bare])
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
            # Flatten nested alternatives.
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
            try:
                _check_field_infos(field)
                properties[field.name] = self.property(field)
            except TypeError as error:
                kind = UnreadableHint if isinstance(error, UnreadableHint) else TypeError
                raise kind(f"{cls.__name__}.{field.name}: {error}") from None
            if field.required or (self._output and not typing.is_typeddict(cls)):
                required.append(field.name)
        schema["properties"] = properties
        if required:
            schema["required"] = required
        return schema

    def property(self, field: Field) -> dict[str, Any]:
        """Return the schema of one field or parameter, with its description and default. Raises as `build`."""
        schema = self.build(field.hint, field.description)
        if field.default is None and not _takes_null(schema):
            return schema  # `x: int = None` means "left out", which no caller can send
        if field.default is not ABSENT_DEFAULT and not self._output:
            try:
                schema["default"] = to_json(field.default)
            except ConversionError:
                pass  # a default without a JSON form: only the function uses it
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

    def _reached_from(self, name: str) -> set[str]:
        """Return the definitions that a definition refers to, directly or indirectly."""
        found: set[str] = set()
        left = [name]
        while left:
            left += (new := {*_references_in(self._definitions[left.pop()])} - found)
            found |= new
        return found


def _check_field_infos(field: Field) -> None:
    """Raise TypeError for parts of a Pydantic `Field` that work only in Pydantic models."""
    if is_field_info(field.default):
        raise UnreadableHint("Pydantic's Field as its default is for Pydantic's models and dataclasses; use Annotated")
    if any(map(is_field_info, split(field.hint)[1])):
        from trimcp.schema.pydantic_types import resolve_field

        resolved, fill = resolve_field(attrs.evolve(field, default=ABSENT_DEFAULT))
        if resolved.name != field.name or fill is not None:
            raise UnreadableHint("an alias or a default in Pydantic's Field is for Pydantic's models and dataclasses")


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
    """Return an enumeration, with the type if all values have the same: some clients need it."""
    kinds = {_JSON_TYPES.get(type(value)) for value in values}
    kind = kinds.pop() if len(kinds) == 1 else None
    return {"type": kind, "enum": values} if kind else {"enum": values}


def _own_summary(cls: Any) -> str:
    """Return the first paragraph of a class's docstring, unless dataclass or NamedTuple generated it."""
    text = cls.__dict__.get("__doc__") or ""
    if text.startswith(f"{cls.__name__}("):
        return ""
    return " ".join(parse(text).description.partition("\n\n")[0].split())


def _untitled(schema: dict[str, Any], title: str) -> dict[str, Any]:
    """Return a schema without the title, if Pydantic derived it from a name."""
    return {key: value for key, value in schema.items() if key != "title" or value != title}
