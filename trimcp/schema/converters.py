"""From JSON values that fit their schema to Python values: `converter_for(hint)`."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable
from typing import Any, Final, cast

from trimcp.schema.convert import ConversionError, Convert, choice, enumeration, leaf_of
from trimcp.schema.hints import is_typed_dict
from trimcp.schema.resolved import LISTS, MAPPINGS, SETS, ResolvedType, TypeResolver, literals_of
from trimcp.schema.validator import Problems, Validator, validator_for

_MOST_PROBLEMS: Final = 10
_LONGEST: Final = 200  # characters of the message of an author's own check

SchemaOf = Callable[[Any], dict[str, Any]]


def converter_for(hint: Any, schema_of: SchemaOf) -> Convert | None:
    """Return a function that converts a validated JSON value to `hint`, or None if no conversion is needed.

    The function raises ConversionError. Messages of authors' own checks are kept, shortened. `schema_of` returns the
    schema of a type, which selects the alternative of a union for a value.
    """
    node = TypeResolver().resolve(hint)
    loaders = _Loaders(schema_of)
    load = loaders.loader(node)
    if load is None:
        return None

    def convert(value: Any) -> Any:
        try:
            return load(value)
        except Exception as error:  # a class of the author may raise anything
            from trimcp.schema.problems import path_text  # only needed for errors

            found = _problems(error)[:_MOST_PROBLEMS]
            raise ConversionError([f"{text} @ {path_text(path)}" for path, text in found]) from error
        finally:
            loaders.failures.clear()

    return convert


def is_plain(node: ResolvedType) -> bool:
    """Return whether a JSON value that fits the schema of a type needs no conversion."""
    match node.kind:
        case "leaf":
            return _loaded(node) is None
        case "literal":
            return all(type(value) is type(json) for value, json in literals_of(node))
        case "union":
            kinds = {member.bare for member in node.members if member.kind == "leaf"}
            numbers = (
                len(kinds) == len(node.members) and kinds <= {int, float, str, bool, type(None)} and float in kinds
            )
            return numbers or all(map(is_plain, node.members))
        case "list":
            return LISTS[node.container] is list and all(map(is_plain, node.members))
        case "mapping":
            named = not node.members or node.members[0].bare in (str, Any)
            return MAPPINGS[node.container] is dict and named and all(map(is_plain, node.members))
    return node.kind == "any"


def _loaded(node: ResolvedType) -> Convert | None:
    leaf = leaf_of(node.bare)
    return None if leaf is None else leaf.load


def _converted(work: Iterable[tuple[Any, Convert | None, Any]]) -> list[Any]:
    """Return values converted; they come as (place, what converts it, value). Raises Problems with all that fail."""
    done: list[Any] = []
    problems: list[tuple[tuple[Any, ...], str]] = []
    for place, convert, value in work:
        try:
            done.append(value if convert is None else convert(value))
        except Exception as error:  # a class of the author may raise anything
            problems += [((place, *path), text) for path, text in _problems(error)]
            if len(problems) >= _MOST_PROBLEMS:
                break
    if problems:
        raise Problems(problems)
    return done


def _problems(error: Exception) -> list[tuple[tuple[Any, ...], str]]:
    if isinstance(error, Problems):
        return error.found
    if not isinstance(error, ValueError | TypeError) or not str(error):
        return [((), "cannot be made into its type")]
    # The validators of attrs add the attribute, which would be shown whole, and the value.
    text = error.args[0] if len(error.args) > 1 and isinstance(error.args[0], str) else str(error)
    return [((), text[:_LONGEST])]


class _Loaders:
    """Makes the functions that convert values of the types in one tree. They raise Problems, or what a class raises."""

    def __init__(self, schema_of: SchemaOf) -> None:
        self.failures: dict[tuple[int, int], Exception] = {}  # of unions in one conversion: never tried twice
        self._schema_of = schema_of
        self._known: dict[int, Convert | None] = {}  # by the lists that nodes of one record or alias share

    def loader(self, node: ResolvedType) -> Convert | None:
        """Return what converts a value, or None where it stays as it is."""
        match node.kind:
            case "leaf":
                return _loaded(node)
            case "literal" | "union" if is_plain(node):
                return None
            case "literal":
                return choice(literals_of(node), lambda value: value)
            case "enum":
                return enumeration(node.bare)
            case "union":
                return self._union(node)
            case "list" | "set":
                return self._collection(node)
            case "tuple":
                return self._collection(node) if node.variadic else self._fixed(node)
            case "mapping":
                return self._mapping(node)
            case "record":
                return self._shared(node, id(node.fields), self._record)
            case "alias":
                return self._shared(node, id(node.members), lambda node: self.loader(node.members[0]))
            case "model":
                from trimcp.schema.pydantic_types import loader, with_extras

                return loader(with_extras(node.bare, node.foreign))
        return None

    def _shared(self, node: ResolvedType, key: int, make: Callable[[ResolvedType], Convert | None]) -> Convert | None:
        if key in self._known:
            return self._known[key]

        def later(value: Any) -> Any:  # what refers to itself while it is made
            load = self._known[key]
            return value if load is None else load(value)

        self._known[key] = later
        self._known[key] = made = make(node)
        return made

    def _collection(self, node: ResolvedType) -> Convert | None:
        make = {**LISTS, **SETS, tuple: tuple}[node.container]
        item = self.loader(node.members[0]) if node.members else None
        if item is None:
            return None if make is list else cast("Convert", make)
        return lambda value: make(_converted((index, item, each) for index, each in enumerate(value)))

    def _fixed(self, node: ResolvedType) -> Convert:
        loads = [*map(self.loader, node.members)]
        return lambda value: tuple(_converted(zip(range(len(loads)), loads, value, strict=True)))

    def _mapping(self, node: ResolvedType) -> Convert | None:
        if is_plain(node):
            return None
        make = MAPPINGS[node.container]
        if make is collections.defaultdict:
            make = functools.partial(make, _factory(node.members[1]) if node.members else None)
        if not node.members:
            return cast("Convert", make)
        key, item = self._key(node.members[0]), self.loader(node.members[1])

        def load(value: Any) -> Any:
            names = _converted((name, key, name) for name in value)
            found = dict(zip(names, _converted((name, item, each) for name, each in value.items()), strict=True))
            return found if make is dict else make(found)

        return load

    def _key(self, node: ResolvedType) -> Convert | None:
        """Return what converts the keys of objects, which are text, whatever their type is."""
        if node.kind in ("literal", "enum"):
            by_text = {str(json): value for value, json in literals_of(node)}
            return by_text.__getitem__
        if node.kind in ("union", "alias"):
            keys = sorted(map(self._key, node.members), key=lambda load: load is not None)  # a text is a text first

            def first(text: Any) -> Any:
                failure: Exception | None = None
                for load in keys:
                    try:
                        return text if load is None else load(text)
                    except Exception as error:  # another alternative may take it
                        failure = failure or error
                raise failure or ValueError("matches no alternative")

            return first
        return self.loader(node)

    def _record(self, node: ResolvedType) -> Convert:
        make, whole = node.container, is_typed_dict(node.container)
        loads = [(field.name, self.loader(kind)) for field, kind in node.fields]

        def load(value: Any) -> Any:
            given = [each for each in loads if each[0] in value]
            members = _converted((name, convert, value[name]) for name, convert in given)
            found = dict(zip((name for name, _ in given), members, strict=True))
            if whole:
                return {**value, **found}
            try:
                return make(**found)
            except (ValueError, TypeError):
                raise
            except Exception as error:  # anything
                raise Problems([((), f"cannot be made into {make.__name__}")]) from error

        return load

    def _union(self, node: ResolvedType) -> Convert:
        """Return a converter to the alternative that knows most members of the value, or the first of several.

        Of those whose schema the value fits, and whose conversion succeeds.
        """
        branches: list[tuple[Validator, Convert | None]] = []

        def load(value: Any) -> Any:
            if not branches:  # built at the first call: the type may be recursive
                branches.extend((validator_for(self._schema_of(each)), self.loader(each)) for each in node.members)
            failure = self.failures.get((id(branches), id(value)))
            if failure is None:
                fitting = [branch for branch in branches if branch[0].is_valid(value)]
                if len(fitting) > 1 and isinstance(value, dict | list):
                    fitting.sort(key=lambda branch: -_count_known(branch[0].schema, value))
                for _, convert in fitting:
                    try:
                        return value if convert is None else convert(value)
                    except Exception as error:  # anything, as above; another alternative may succeed
                        failure = failure or error
                failure = failure or ValueError("matches no alternative")
                self.failures[id(branches), id(value)] = failure
            raise failure

        return load


def _factory(node: ResolvedType) -> Any:
    """Return what makes the missing values of a defaultdict."""
    made = {**LISTS, **SETS, **MAPPINGS}.get(node.container)
    return made or (node.bare if node.bare in (str, int, float, bool) else None)


def _count_known(schema: Any, value: Any) -> int:
    return _known_members(schema, value, {}, schema)


def _known_members(schema: Any, value: Any, known: dict[tuple[int, int], int], root: dict[str, Any]) -> int:
    """Return how many members of a value, at any depth, a schema names: what the others hold is lost."""
    key = (id(schema), id(value))
    if key in known or not isinstance(schema, dict):
        return known.get(key, 0)
    found = known[key] = 0  # while it is counted, for what refers to itself
    for word in ("anyOf", "oneOf"):
        found += max((_known_members(branch, value, known, root) for branch in schema.get(word, ())), default=0)
    if isinstance(schema.get("$ref"), str):
        found += _known_members(root.get("$defs", {}).get(schema["$ref"].removeprefix("#/$defs/")), value, known, root)
    if isinstance(value, dict):
        named = schema.get("properties", {})
        others = schema.get("additionalProperties", "properties" not in schema and schema.get("type") == "object")
        for name, member in value.items():
            if name in named or others:
                found += 1 + _known_members(named.get(name, others), member, known, root)
    elif isinstance(value, list):
        first = schema.get("prefixItems", ())
        for index, member in enumerate(value):
            found += _known_members(first[index] if index < len(first) else schema.get("items"), member, known, root)
    known[key] = found
    return found
