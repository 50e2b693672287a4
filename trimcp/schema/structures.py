"""From JSON values to classes, unions and containers of them, by cattrs. Loaded with the first type that needs it."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final, get_args

import cattrs
from cattrs.cols import is_namedtuple, namedtuple_dict_structure_factory

from trimcp.schema.convert import ConversionError, Convert, enumeration, is_plain, is_pydantic, loaders
from trimcp.schema.hints import alias_value, is_alias, is_union, readable, split
from trimcp.schema.validator import Validator, validator_for

_MOST_PROBLEMS: Final = 10
_Path = tuple[str | int, ...]


def structure_for(hint: Any, schema_of: Callable[[Any], dict[str, Any]]) -> Convert:
    """Return a function that converts a validated JSON value to `hint`, or raises ConversionError."""
    converter = _make_converter(schema_of)
    structure = converter.get_structure_hook(hint)

    def convert(value: Any) -> Any:
        try:
            return structure(value, hint)
        except Exception as error:  # a class of the author may raise anything
            raise ConversionError(problems_of(error)) from error

    return convert


def _pydantic(hint: Any) -> Callable[[Any, Any], Any]:
    from trimcp.schema.pydantic_types import loader, with_extras

    bare, extras = split(hint)
    load = loader(with_extras(bare, readable(extras)[1]))
    return lambda value, _: load(value)


@functools.cache
def _make_converter(schema_of: Callable[[Any], dict[str, Any]]) -> cattrs.Converter:
    converter = cattrs.Converter(use_alias=True, detailed_validation=True)
    for kind, load in loaders().items():
        converter.register_structure_hook(kind, _hook(load))
    converter.register_structure_hook(enum.Enum, lambda value, kind: enumeration(kind)(value))
    converter.register_structure_hook_func(lambda kind: kind is object, lambda value, _: value)
    converter.register_structure_hook_factory(is_namedtuple, namedtuple_dict_structure_factory)
    converter.register_structure_hook_factory(is_union, lambda kind: _union(kind, converter, schema_of))
    converter.register_structure_hook_factory(is_alias, lambda kind: _alias(kind, converter))
    converter.register_structure_hook_factory(is_pydantic, _pydantic)
    return converter


def _hook(load: Convert) -> Callable[[Any, Any], Any]:
    def structure(value: Any, kind: Any) -> Any:
        # Hooks also apply to subclasses, such as an enumeration of numbers.
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return enumeration(kind)(value)
        return load(value)

    return structure


def _alias(hint: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    def convert(value: Any, _: Any) -> Any:  # looked up at the call: an alias may be recursive
        target = alias_value(hint)
        return value if is_plain(target) else converter.structure(value, target)

    return convert


def _union(
    hint: Any, converter: cattrs.Converter, schema_of: Callable[[Any], dict[str, Any]]
) -> Callable[[Any, Any], Any]:
    """Return a converter to the first alternative whose schema the value satisfies and whose conversion succeeds."""
    if is_plain(hint):
        return lambda value, _: value
    branches: list[tuple[Any, Validator, Callable[[Any, Any], Any] | None]] = []

    def convert(value: Any, _: Any) -> Any:
        if not branches:  # built at the first call: the type may be recursive
            for member in get_args(hint):
                hook = None if is_plain(member) else converter.get_structure_hook(member)
                branches.append((member, validator_for(schema_of(member)), hook))
        failure: Exception | None = None
        for member, validator, hook in branches:
            if validator.is_valid(value):
                try:
                    return value if hook is None else hook(value, member)
                except Exception as error:  # anything, as above; another alternative may succeed
                    failure = failure or error
        raise failure or ValueError("matches no alternative")

    return convert


def problems_of(error: Exception) -> list[str]:
    """Return the errors of a conversion as texts with paths. Messages of authors' own checks are kept, shortened."""
    from trimcp.schema.problems import path_text  # only needed for errors

    found = islice(_places(error, (), None), _MOST_PROBLEMS)
    return [f"{text} @ {path_text(path)}" for path, text in found]


def _places(error: BaseException, path: _Path, kind: Any) -> Iterator[tuple[_Path, str]]:
    if isinstance(error, cattrs.ClassValidationError | cattrs.IterableValidationError):
        noted, bare = error.group_exceptions()
        for inner, note in noted:
            step = note.name if isinstance(note, cattrs.AttributeValidationNote) else note.index
            yield from _places(inner, (*path, step), note.type)
        for inner in bare:
            yield from _places(inner, path, kind)
        return
    found: list[tuple[_Path, str]] | None = getattr(error, "found", None)  # from Pydantic, several at once
    if found is not None:
        yield from (((*path, *place), text) for place, text in found)
    elif isinstance(error, ValueError | TypeError) and str(error):
        yield path, str(error)[:200]
    else:
        yield path, f"cannot be made into {getattr(kind, '__name__', 'its type')}"
