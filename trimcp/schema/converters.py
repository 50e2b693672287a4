"""From JSON values that fit their schema to Python values: `converter_for(hint)`."""

from __future__ import annotations

import collections
import enum
import functools
from collections.abc import Callable, Iterable
from typing import Any, Final, cast

from trimcp.schema.convert import ConversionError, Convert, choice, enumeration, key_text, leaf_of
from trimcp.schema.hints import is_typed_dict
from trimcp.schema.json_schema import schema_of, takes_text
from trimcp.schema.resolved import ResolvedType, TypeResolver, literals_of
from trimcp.schema.validator import Problems, Validator, validator_for
from trimcp.wire.jsonrpc import Malformed, parse_value

_MOST_PROBLEMS: Final = 10
_EMPTY: Final = (str, int, float, bool)  # types whose empty value a defaultdict makes, beside containers


def converter_for(hint: Any) -> Convert | None:
    """Return a function that converts a validated JSON value to `hint`, or None if no conversion is needed.

    The function raises ConversionError. Messages of authors' own checks are kept, shortened.
    """
    loaders = _Loaders()
    load = loaders.loader(TypeResolver().resolve(hint))
    if load is None:
        return None

    def convert(value: Any) -> Any:
        try:
            return load(value)
        except Exception as error:  # a class of the author may raise anything
            from trimcp.schema.problems import path_text, shorten  # only needed for errors

            found = _problems(error)[:_MOST_PROBLEMS]
            raise ConversionError([f"{shorten(text)} @ {path_text(path)}" for path, text in found]) from error
        finally:
            loaders.failures.clear()

    return convert


def number_of(node: ResolvedType) -> type[int] | type[float] | None:
    """Return int or float if all that a value of this type may need is to become this number."""
    members = node.members if node.kind == "union" else [node]
    numbers = {int, float} & {member.bare for member in members if member.kind == "leaf"}
    if len(numbers) != 1 or not all(each.bare in numbers or _Loaders().loader(each) is None for each in members):
        return None
    return numbers.pop()


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
    return [((), text)]


class _Loaders:
    """Makes the functions that convert values of the types in one tree. They raise Problems, or what a class raises."""

    def __init__(self) -> None:
        self.failures: dict[tuple[int, int], Exception] = {}  # of unions in one conversion: never tried twice
        self._known: dict[int, Convert | None] = {}  # by the lists that nodes of one record or alias share

    def loader(self, node: ResolvedType) -> Convert | None:
        """Return what converts a value, or None where it stays as it is."""
        match node.kind:
            case "leaf":
                leaf = leaf_of(node.bare)
                return None if leaf is None else leaf.load
            case "literal":
                values = literals_of(node)
                plain = all(type(value) is type(json) for value, json in values)
                return None if plain else choice(values, lambda value: value)
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
                from trimcp.schema.pydantic_types import loader

                return loader(node.bare)
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
        make = node.maker
        item = self.loader(node.members[0]) if node.members else None
        if item is None:
            return None if make is list else cast("Convert", make)
        return lambda value: make(_converted((index, item, each) for index, each in enumerate(value)))

    def _fixed(self, node: ResolvedType) -> Convert:
        loads = [*map(self.loader, node.members)]
        return lambda value: tuple(_converted(zip(range(len(loads)), loads, value, strict=True)))

    def _mapping(self, node: ResolvedType) -> Convert | None:
        make = node.maker
        if make is collections.defaultdict:
            made = [each.maker or each.bare for each in node.members]
            make = functools.partial(make, made[1] if made and (node.members[1].maker or made[1] in _EMPTY) else None)
        key, item = (self._key(node.members[0]), self.loader(node.members[1])) if node.members else (None, None)
        if key is None and item is None:
            return None if make is dict else cast("Convert", make)

        def load(value: Any) -> Any:
            names = _converted((name, key, name) for name in value)
            found = dict(zip(names, _converted((name, item, each) for name, each in value.items()), strict=True))
            return found if make is dict else make(found)

        return load

    def _key(self, node: ResolvedType) -> Convert | None:
        """Return what converts the keys of objects, which are text, whatever their type is."""
        if node.kind == "literal" or (node.kind == "enum" and not issubclass(node.bare, enum.Flag)):
            by_text = {key_text(json): value for value, json in literals_of(node)}
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
        load = self.loader(node)
        return load if node.kind == "any" or takes_text(schema_of(node)) else lambda text: _read(text, load)

    def _record(self, node: ResolvedType) -> Convert | None:
        make, whole = node.container, node.container is dict or is_typed_dict(node.container)
        loads = {field.name: self.loader(kind) for field, kind in node.fields if field.given}
        others = self.loader(node.members[0]) if node.members else None
        if whole and others is None and not any(loads.values()):
            return None

        def load(value: Any) -> Any:
            given = [(name, convert, value[name]) for name, convert in loads.items() if name in value]
            if others is not None:
                given += [(name, others, each) for name, each in value.items() if name not in loads]
            found = dict(zip((name for name, _, _ in given), _converted(given), strict=True))
            return {**value, **found} if whole else make(**found)

        return load

    def _union(self, node: ResolvedType) -> Convert | None:
        """Return a converter to the alternative that knows most members of the value, or the first of several.

        Of those whose schema the value fits, and whose conversion succeeds.
        """
        numbers = {int, float} <= {each.bare for each in node.members if each.kind == "leaf"}  # each stays what it is
        loads = [None if numbers and each.bare in (int, float) else self.loader(each) for each in node.members]
        if not any(loads):
            return None
        branches: list[tuple[Validator, Convert | None]] = []

        def load(value: Any) -> Any:
            if not branches:  # built at the first call: the type may be recursive
                schemas = [validator_for(schema_of(each)) for each in node.members]
                branches.extend(zip(schemas, loads, strict=True))
            failure = self.failures.get((id(branches), id(value)))
            if failure is None:
                fitting = [branch for branch in branches if branch[0].is_valid(value)]
                if len(fitting) > 1 and isinstance(value, dict | list):
                    fitting.sort(key=lambda branch: -_count_known(branch[0].schema, value, {}, branch[0].schema))
                for _, convert in fitting:
                    try:
                        return value if convert is None else convert(value)
                    except Exception as error:  # anything, as above; another alternative may succeed
                        failure = failure or error
                failure = failure or ValueError("matches no alternative")
                self.failures[id(branches), id(value)] = failure
            raise failure

        return load


def _read(text: str, load: Convert | None) -> Any:
    """Return the key of an object whose type is no text: it is the text of its JSON."""
    value = parse_value(text.encode())
    if type(value) is Malformed:
        raise ValueError(value.message)
    return value if load is None else load(value)


def _count_known(schema: Any, value: Any, known: dict[tuple[int, int], int], root: Any) -> int:
    """Return how many members of a value, at any depth, a schema names: what the others hold is lost."""
    key = (id(schema), id(value))
    if key in known or not isinstance(schema, dict):
        return known.get(key, 0)
    found = known[key] = 0  # while it is counted, for what refers to itself
    for word in ("anyOf", "oneOf"):
        found += max((_count_known(branch, value, known, root) for branch in schema.get(word, ())), default=0)
    if isinstance(schema.get("$ref"), str):
        found += _count_known(root.get("$defs", {}).get(schema["$ref"].removeprefix("#/$defs/")), value, known, root)
    if isinstance(value, dict):
        named = schema.get("properties", {})
        others = schema.get("additionalProperties", "properties" not in schema and schema.get("type") == "object")
        for name, member in value.items():
            if name in named or others:
                found += 1 + _count_known(named.get(name, others), member, known, root)
    elif isinstance(value, list):
        first = schema.get("prefixItems", ())
        for index, member in enumerate(value):
            found += _count_known(first[index] if index < len(first) else schema.get("items"), member, known, root)
    known[key] = found
    return found
