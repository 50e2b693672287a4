"""An OpenAPI document: read within bounds, its references resolved in it and in documents that were given beside it.

Nothing is ever fetched. A document may come from a stranger, so its size, its depth, the number of its operations and
what one operation refers to are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import attrs
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from trimcp.extensions.yaml_values import read_yaml
from trimcp.wire.jsonrpc import Malformed, parse_value
from trimcp.wire.subschemas import LISTS, NAMED, SINGLE

MOST_BYTES: Final = 16 * 1024 * 1024
_MOST_NODES: Final = 500_000  # of a document in YAML
_DEEPEST: Final = 100
_MOST_SCHEMAS: Final = 2_000  # that one operation refers to
_MOST_LINKS: Final = 16  # of one reference that leads to another
_BASE: Final = "https://document.invalid/"  # what names of documents are relative to
_DROPPED: Final = frozenset(
    {"example", "examples", "xml", "externalDocs", "discriminator", "nullable", "$id", "$schema", "$comment"}
)
_UNSUPPORTED: Final = frozenset({"$dynamicRef", "$recursiveRef"})


class UnfitOperation(ValueError):
    """An operation cannot be a tool, or the document is not what it has to be; the text says why."""


class Place(NamedTuple):
    """A value of a document, with what resolves the references in it."""

    value: Any
    resolver: Any

    def of(self, value: Any) -> Place:
        """Return another value of the same document, with its reference followed."""
        place = Place(value, self.resolver)
        for _ in range(_MOST_LINKS):
            if not isinstance(place.value, dict) or not isinstance(place.value.get("$ref"), str):
                return place
            place = place.target(place.value["$ref"])
        raise UnfitOperation("a reference leads to another, and so on for ever")

    def target(self, reference: str) -> Place:
        """Return what a reference refers to. Raises UnfitOperation: it is not in the documents that were given."""
        try:
            found = self.resolver.lookup(reference)
        except (Unresolvable, ValueError, LookupError, TypeError):
            raise UnfitOperation(
                f"nothing here is {reference[:100]!r}; what is in other files is given by documents="
            ) from None
        return Place(found.contents, found.resolver)

    def member(self, name: str, kind: type, default: Any) -> Any:
        """Return a member of an object, or the default if it has none or one of another kind."""
        value = self.value.get(name) if isinstance(self.value, dict) else None
        return value if isinstance(value, kind) else default


def read_document(given: Any, what: str) -> dict[str, Any]:
    """Return a document: a dict as it is, or what a file or a text has in JSON or YAML.

    Raises ValueError: it is too large, or neither. OSError: the file cannot be read. LocalError: it is in YAML, and no
    reader of YAML is installed.
    """
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(given, Path):
        with given.open("rb") as file:
            given = file.read(MOST_BYTES + 1)
    if isinstance(given, str):
        given = given.encode()
    if not isinstance(given, bytes):
        raise TypeError(f"{what} is a dict, a Path, or the text of a document, not {given!r:.60}")
    if len(given) > MOST_BYTES:
        raise ValueError(f"{what} is larger than {MOST_BYTES:,} bytes")
    value: Any = None
    if given.lstrip()[:1] == b"{":
        value = parse_value(given)
    if not isinstance(value, dict):
        try:
            text = given.decode()
        except UnicodeDecodeError:
            raise ValueError(f"{what} is not UTF-8") from None
        if isinstance(value, Malformed):
            raise ValueError(f"{what} is not valid JSON: {value.message}")
        value = read_yaml(text, what, kind="documents", most_nodes=_MOST_NODES, deepest=_DEEPEST)
    if not isinstance(value, dict):
        raise ValueError(f"{what} is no object")
    return value


def open_document(spec: Any, documents: Mapping[str, Any]) -> Place:
    """Return the root of a document, by which all in it is found.

    Raises as `read_document` does; ValueError too if it is no OpenAPI 3.0 or 3.1.
    """
    root = read_document(spec, "the document")
    version = root.get("openapi")
    if not isinstance(version, str) or re.match(r"3\.[01](\.|$)", version) is None:
        raise ValueError(f"the document is not of OpenAPI 3.0 or 3.1: its member openapi is {version!r:.40}")
    found = {"": root, **{name: read_document(given, name) for name, given in documents.items()}}
    resources = [(_BASE + name, DRAFT202012.create_resource(value)) for name, value in found.items()]
    registry: Registry[Any] = Registry().with_resources(resources)
    return Place(root, registry.resolver(_BASE))


@attrs.define(eq=False)
class SchemaReader:
    """Makes JSON Schemas 2020-12 of those of one operation. What they refer to is in `definitions`."""

    old: bool  # it is of OpenAPI 3.0, whose schemas have `nullable` and bounds that are true
    definitions: dict[str, Any] = attrs.field(factory=dict)
    _names: dict[int, str] = attrs.field(factory=dict)  # of definitions, by what they are made of
    _count: int = 0

    def read(self, place: Place, deep: int = 0) -> Any:
        """Return a schema in the form of 2020-12. Raises UnfitOperation: it is too much, or none."""
        schema = place.value
        self._count += 1
        if self._count > _MOST_SCHEMAS or deep > _DEEPEST:
            raise UnfitOperation(f"its schemas are more than {_MOST_SCHEMAS}, or {_DEEPEST} inside each other")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict) or not _UNSUPPORTED.isdisjoint(schema):
            raise UnfitOperation("it has a schema that is no object, or a reference that changes with its place")
        reference = schema.get("$ref")
        made: dict[str, Any] = {}
        if isinstance(reference, str):
            made["$ref"] = f"#/$defs/{self._definition(reference, place, deep)}"
            if self.old:
                return made
        for keyword, value in schema.items():
            if keyword not in _DROPPED and keyword != "$ref" and not keyword.startswith("x-"):
                made[keyword] = self._keyword(keyword, value, place, deep + 1)
        self._without_read_only(made, schema, place)
        return _modern(made, nullable=schema.get("nullable") is True) if self.old else made

    def _keyword(self, keyword: str, value: Any, place: Place, deep: int) -> Any:
        if keyword in NAMED and isinstance(value, dict):
            return {name: self.read(Place(each, place.resolver), deep) for name, each in value.items()}
        if keyword in LISTS and isinstance(value, list):
            return [self.read(Place(each, place.resolver), deep) for each in value]
        if keyword in SINGLE:
            return self.read(Place(value, place.resolver), deep)
        return value

    def _definition(self, reference: str, place: Place, deep: int) -> str:
        target = place.target(reference)
        known = self._names.get(id(target.value))
        if known is not None:
            return known
        base = re.sub(r"[^A-Za-z0-9_.-]", "_", reference.rpartition("/")[2])[:60] or "schema"
        name, number = base, 1
        while name in self.definitions:
            number += 1
            name = f"{base}_{number}"
        self._names[id(target.value)] = name
        self.definitions[name] = True  # its place, for what refers to it from inside
        self.definitions[name] = self.read(target, deep + 1)
        return name

    @staticmethod
    def _without_read_only(made: dict[str, Any], schema: dict[str, Any], place: Place) -> None:
        """Leave out the members that only the API itself sets."""
        members = schema.get("properties")
        if not isinstance(members, dict) or not isinstance(made.get("properties"), dict):
            return
        hidden = {name for name, each in members.items() if place.of(each).member("readOnly", bool, False)}
        for name in hidden:
            del made["properties"][name]
        if hidden and isinstance(made.get("required"), list):
            made["required"] = [name for name in made["required"] if not (isinstance(name, str) and name in hidden)]


def _modern(schema: dict[str, Any], *, nullable: bool) -> dict[str, Any]:
    """Return a schema of OpenAPI 3.0 with the keywords of today."""
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if schema.get(exclusive) is True and bound in schema:
            schema[exclusive] = schema.pop(bound)
        elif isinstance(schema.get(exclusive), bool):
            del schema[exclusive]
    if nullable and isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], "null"]
        if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
            schema["enum"] = [*schema["enum"], None]
    return schema
