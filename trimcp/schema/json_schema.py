"""From type hints to JSON Schema 2020-12, compact and in a stable order."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable
from typing import Any, Final, get_origin

from trimcp.schema.convert import ConversionError, key_text, leaf_of, to_json
from trimcp.schema.docstrings import parse
from trimcp.schema.hints import ABSENT_DEFAULT, Field, apply_metadata, is_model, is_typed_dict
from trimcp.schema.resolved import ResolvedType, TypeResolver, in_field, literals_of
from trimcp.wire.fields import JSON_NAMES
from trimcp.wire.jsonrpc import Unencodable, encode

_NUMBER: Final = r"^-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?$"
# Formats of Pydantic that are wider than those of JSON Schema, which are checked: of values that come, and that go.
_LOOSE: Final = frozenset({"regex", "duration"})
_LOOSE_RESULTS: Final = _LOOSE | {"date-time", "uri", "email", "ipv6"}
# The rule of an object's keys for the type of which they are the JSON text.
_KEYS: Final[dict[Any, dict[str, Any]]] = {
    "integer": {"pattern": r"^-?\d+$"},
    "number": {"pattern": _NUMBER},
    "boolean": {"enum": ["true", "false"]},
    "null": {"enum": ["null"]},
}
_SCALARS: Final = {"type": ["string", "number", "boolean", "null"]}
_SAID: Final = frozenset({"default", "examples"})  # words that a schema can be without
_MOST_WRITTEN_OUT: Final = 100_000  # characters of a schema whose definitions are written where they are used
# Keywords of JSON Schema whose content is never a schema.
_VALUES: Final = frozenset({"default", "const", "enum", "examples", "required"})


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
    """Builds the schemas of one document. Records that are recursive go to `$defs`; the others are written out.

    With `output` the schemas describe results: fields with defaults are always present, and defaults are left out.
    """

    def __init__(self, *, output: bool = False) -> None:
        self.types: TypeResolver = TypeResolver(output=output)
        self._output = output
        self._names: dict[Any, str] = {}
        self._definitions: dict[str, dict[str, Any]] = {}
        self._uses: dict[str, list[str]] = {"": []}  # what each definition refers to, "" for the document
        self._at = ""

    def build(self, hint: Any, description: str | None = None) -> dict[str, Any]:
        """Return the schema of one type, which is complete only after `finish`.

        `hint` has the extras of `Annotated`, or is what it was resolved to; `description` is used where they have none.
        Raises TypeError for a type without a JSON Schema, with what to use instead; UnreadableHint as `readable`.
        """
        node = self.resolve(hint)
        schema = self._build_bare(node)
        if description:
            schema["description"] = description
        if not node.extras:
            return schema
        apply_metadata(schema, node.extras)
        schema = _sendable(schema)
        return _without_text(node.bare, schema) if "anyOf" in schema and not self._output else schema

    def resolve(self, hint: Any) -> ResolvedType:
        """As `TypeResolver.resolve`, for a whole annotation."""
        try:
            return self.types.resolve(hint)
        except RecursionError:
            raise TypeError("a class in it holds itself with other parameters each time, without an end") from None

    def finish(self, root: dict[str, Any]) -> dict[str, Any]:
        """Return `root` with the definitions it needs.

        Those that are not recursive are written out: some clients drop their strict mode for a `$ref`. Where a document
        would become large by that, those that are used more than once stay definitions. Raises TypeError for what no
        message can carry.
        """
        kept = {name for name in self._definitions if name in self._reached_from(name)}
        every = [name for names in self._uses.values() for name in names]
        if len(every) > len(self._definitions) and self._size("", kept, {}) > _MOST_WRITTEN_OUT:
            kept |= {name for name in self._definitions if every.count(name) > 1}
        definitions = {name: self._written(each, kept) for name, each in self._definitions.items() if name in kept}
        written: dict[str, Any] = self._written(root, kept) if self._definitions else root
        document = {**written, "$defs": definitions} if kept else written
        if why := _obstacle(document):  # it would hide all others of its list
            raise TypeError(f"its schema cannot be sent: {why}")
        return document

    def _written(self, schema: Any, kept: set[str]) -> Any:
        """Return a copy of a schema in which only references to the definitions `kept` are left."""
        name = _referred(schema)
        while name and name not in kept:
            schema = self._definitions[name] | {key: value for key, value in schema.items() if key != "$ref"}
            name = _referred(schema)
        return _mapped(schema, lambda part: self._written(part, kept))

    def _size(self, name: str, kept: set[str], known: dict[str, int]) -> int:
        """Return about how many characters a definition has when all but those `kept` are written out in it."""
        if name not in known:
            inner = sum(self._size(each, kept, known) for each in self._uses[name] if each not in kept)
            known[name] = len(repr(self._definitions.get(name))) + inner
        return known[name]

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        while name := _referred(schema):
            schema = self._definitions[name]
        return schema

    def is_object(self, schema: dict[str, Any]) -> bool:
        """Return whether a schema built here accepts only objects."""
        return self._resolved(schema).get("type") == "object"

    def _pydantic(self, bare: Any) -> dict[str, Any]:
        from trimcp.schema.pydantic_types import json_schema

        root = json_schema(bare, output=self._output)
        definitions = root.pop("$defs", {})
        if is_model(bare) and "$ref" not in root:
            # As a definition: other models may refer to it.
            name = root.get("title", (get_origin(bare) or bare).__name__)
            definitions[name] = root
            root = {"$ref": f"#/$defs/{name}"}
        adopted: dict[str, Any] = self._adopted(root, definitions)
        return adopted

    def _adopted(self, schema: Any, definitions: dict[str, Any]) -> Any:
        """Return a copy of a Pydantic schema with references to our definitions, without titles that repeat a name."""
        if name := _referred(schema):
            definition = definitions[name]
            place = self._reference(
                ("pydantic", name, repr(definition)),
                name,
                lambda: self._adopted(_without("title", definition, name), definitions),
            )
            place.update({key: value for key, value in schema.items() if key != "$ref"})
            return place
        if isinstance(schema, dict):
            schema = _sendable(_without("format", schema, *(_LOOSE_RESULTS if self._output else _LOOSE)))
        return _mapped(schema, lambda part: self._adopted(part, definitions))

    def _build_bare(self, node: ResolvedType) -> dict[str, Any]:
        match node.kind:
            case "leaf":
                leaf = leaf_of(node.bare)
                assert leaf is not None
                schema = (self._output and leaf.results) or leaf.schema
                return copy.deepcopy(schema) if "anyOf" in schema else dict(schema)
            case "enum" if issubclass(node.bare, enum.Flag):
                strict = getattr(node.bare, "_boundary_", None) is enum.STRICT  # else any number is one
                return {"type": "integer", "minimum": 0} | (
                    {"maximum": sum(each.value for each in node.bare)} if strict else {}
                )
            case "enum" | "literal":
                return _choices([json for _, json in literals_of(node)])
            case "union":
                return self._union(node.members)
            case "list" | "set" | "tuple":
                return self._array(node)
            case "mapping":
                return self._mapping(node)
            case "record":
                return self._reference(id(node.fields), node.container.__name__, lambda: self._record(node))
            case "alias":
                name = node.container.__name__
                return self._reference(id(node.members), name, lambda: self.build(node.members[0]))
            case "model":
                return self._pydantic(node.bare)
        return {}

    def _union(self, members: list[ResolvedType]) -> dict[str, Any]:
        branches: list[dict[str, Any]] = []
        for member in members:
            branch = self.build(member)
            if not branch:
                return {}
            # Flatten nested alternatives.
            flat = branch["anyOf"] if branch.keys() == {"anyOf"} else [branch]
            branches += [each for each in flat if each not in branches]
        return branches[0] if len(branches) == 1 else {"anyOf": branches}

    def _array(self, node: ResolvedType) -> dict[str, Any]:
        if node.kind == "tuple" and not node.variadic:
            size = len(node.members)
            prefix = {"prefixItems": [self.build(each) for each in node.members]} if size else {}
            return {"type": "array", **prefix, "minItems": size, "maxItems": size}
        items = self.build(node.members[0]) if node.members else {}
        if node.kind == "set":
            return {"type": "array", "items": items or _SCALARS, "uniqueItems": True}
        return {"type": "array", "items": items} if items else {"type": "array"}

    def _mapping(self, node: ResolvedType) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "object"}
        if node.members:
            key, value = node.members
            if names := self._names_of(key):
                schema["propertyNames"] = names
            if content := self.build(value):
                schema["additionalProperties"] = content
        return schema

    def _names_of(self, key: ResolvedType) -> dict[str, Any]:
        """Return the schema of an object's keys, which are always text."""
        if key.kind in ("union", "alias"):
            rules = [self._names_of(member) for member in key.members]
            return ({"anyOf": rules} if len(rules) > 1 else rules[0]) if all(rules) else {}
        schema = self._resolved(self.build(key))
        if "enum" in schema:
            return {"enum": [key_text(each) for each in schema["enum"]]}
        if not takes_text(schema):
            rule = _KEYS.get(schema.get("type"), {})
            if not rule and not self._output:
                raise TypeError("the keys of a JSON object are strings; use str, int, UUID, or an enumeration")
            return rule
        if "anyOf" in schema:
            (schema,) = (branch for branch in schema["anyOf"] if branch.get("type") == "string")
        return {name: rule for name, rule in schema.items() if name != "type"}

    def _record(self, node: ResolvedType) -> dict[str, Any]:
        cls = node.container
        schema: dict[str, Any] = {"type": "object"}
        if summary := _own_summary(cls):
            schema["description"] = summary
        properties: dict[str, Any] = {}
        required = []
        for field, kind in node.fields:
            if not (field.kept if self._output else field.given):
                continue
            try:
                properties[field.name] = self.property(field, kind)
            except TypeError as error:
                raise in_field(node, field, error) from None
            always = field.given or field.default is not ABSENT_DEFAULT  # another may lack until it is set
            if (field.required and field.given) or (self._output and always and not is_typed_dict(cls)):
                required.append(field.name)
        schema["properties"] = properties
        if required:
            schema["required"] = required
        return schema

    def property(self, field: Field, kind: ResolvedType | None = None) -> dict[str, Any]:
        """Return the schema of one field or parameter, with its description and default. Raises as `build`."""
        schema = self.build(kind or field.hint, field.description)
        if field.default is None and not takes_null(schema):
            return schema  # `x: int = None` means "left out", which no caller can send
        if field.default is not ABSENT_DEFAULT and not self._output:
            try:
                schema.update(_sendable({"default": to_json(field.default)}))
            except ConversionError:
                pass  # a default without a JSON form: only the function uses it
        return schema

    def _reference(self, key: Any, name: str, build: Any) -> dict[str, Any]:
        if key not in self._names:
            unique, number = name, 2
            while unique in self._definitions:
                unique, number = f"{name}{number}", number + 1
            self._names[key] = unique
            self._definitions[unique], self._uses[unique] = {}, []
            outer, self._at = self._at, unique
            self._definitions[unique].update(build())
            self._at = outer
        self._uses[self._at].append(self._names[key])
        return {"$ref": f"#/$defs/{self._names[key]}"}

    def _reached_from(self, name: str) -> set[str]:
        """Return the definitions that a definition refers to, directly or indirectly."""
        found: set[str] = set()
        left = [name]
        while left:
            left += (new := {*self._uses[left.pop()]} - found)
            found |= new
        return found


def _sendable(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without a default or examples that no message can carry."""
    return {word: value for word, value in schema.items() if word not in _SAID or not _obstacle(value)}


def _obstacle(value: Any) -> str:
    """Return why no message can carry a value; empty if one can."""
    try:
        encode(value)
    except Unencodable as error:
        return str(error)
    return ""


def takes_text(schema: dict[str, Any]) -> bool:
    """Return whether a schema admits texts."""
    return any(not each or each.get("type") == "string" for each in schema.get("anyOf", [schema]))


def takes_null(schema: dict[str, Any]) -> bool:
    """Return whether a schema admits null, or may admit it."""
    branches = schema.get("anyOf", [schema])
    return any(not b or b.get("type") == "null" or None in b.get("enum", ()) or "$ref" in b for b in branches)


def _referred(schema: Any) -> str | None:
    """Return the name of the definition that a schema refers to, if it does."""
    name = schema.get("$ref") if isinstance(schema, dict) else None
    return name.removeprefix("#/$defs/") if isinstance(name, str) else None


def _mapped(schema: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of a schema with its parts changed; the values in it, such as a default, stay."""
    if isinstance(schema, list):
        return [change(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for key, value in schema.items():
        if key == "properties" and isinstance(value, dict):  # a property may have any name
            made[key] = {name: change(each) for name, each in value.items()}
        elif isinstance(value, dict | list) and key not in _VALUES:
            made[key] = change(value)
    return made


def _choices(values: list[Any]) -> dict[str, Any]:
    """Return an enumeration, with the type if all values have the same: some clients need it."""
    kinds = {JSON_NAMES[type(value)].split()[-1] for value in values}
    return {"type": kinds.pop(), "enum": values} if len(kinds) == 1 else {"enum": values}


def _own_summary(cls: Any) -> str:
    """Return the first paragraph of a class's docstring, unless dataclass or NamedTuple generated it."""
    text = cls.__dict__.get("__doc__") or ""
    if text.startswith(f"{cls.__name__}("):
        return ""
    return " ".join(parse(text).description.partition("\n\n")[0].split())


def _without(word: str, schema: dict[str, Any], *values: str) -> dict[str, Any]:
    """Return a schema without one of its words, if it has one of these values."""
    return {key: value for key, value in schema.items() if key != word or value not in values}
