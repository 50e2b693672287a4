"""From JSON values that fit their schema to Python values, and back."""

from __future__ import annotations

import base64
import binascii
import collections.abc as abc
import dataclasses
import datetime
import decimal
import enum
import functools
import math
import pathlib
import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Final, Literal, get_args, get_origin

import attrs
import cattrs
from cattrs.cols import is_namedtuple, namedtuple_dict_structure_factory

from trimcp.schema.hints import alias_value, is_alias, is_model, is_union, readable, split
from trimcp.schema.validator import Validator, validator_for

Convert = Callable[[Any], Any]

_MAX_DEPTH: Final = 100
_MOST_PROBLEMS: Final = 10
_Path = tuple[str | int, ...]


class ConversionError(ValueError):
    """A value fits its schema but cannot be converted, such as the date 2026-02-30.

    Attributes:
        problems: texts as from `Validator.problems`, without the value.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


_ROOT: Final = re.compile(r"@ \$(?:\.|(?=\[))")


def without_root(problems: Iterable[str]) -> list[str]:
    """Return texts of `Validator.problems` with paths as users write them: `@ to.street` for `@ $.to.street`."""
    return [_ROOT.sub("@ ", problem).removesuffix(" @ $") for problem in problems]


# --- JSON to Python ---


def converter_for(hint: Any, schema_of: Callable[[Any], dict[str, Any]]) -> Convert | None:
    """Return a function that converts a validated JSON value to `hint`, or None if no conversion is needed.

    The function raises ConversionError. `schema_of` returns the schema of a type, which selects the alternative of a
    union for a value.
    """
    if is_plain(hint):
        return None
    converter = _make_converter(schema_of)
    structure = converter.get_structure_hook(hint)

    def convert(value: Any) -> Any:
        try:
            return structure(value, hint)
        except Exception as error:  # a class of the author may raise anything
            raise ConversionError(_problems(error)) from error

    return convert


LISTS: Final = (list, abc.Sequence, abc.MutableSequence, abc.Iterable, abc.Collection)
MAPPINGS: Final = (dict, abc.Mapping, abc.MutableMapping)
_PLAIN: Final = (str, float, bool, type(None), None, Any, object, *LISTS, *MAPPINGS)


def is_plain(hint: Any) -> bool:
    """Return whether a JSON value that fits the schema of `hint` needs no conversion."""
    if is_alias(hint) or _is_pydantic(hint):  # an alias may be recursive
        return False
    hint, _ = split(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return not any(isinstance(value, enum.Enum | bytes) for value in arguments)
    if is_union(hint):
        return all(map(is_plain, arguments)) or set(arguments) <= {int, float, str, bool, type(None)} >= {float}
    if origin in LISTS:
        return is_plain(arguments[0])
    if origin in MAPPINGS:
        return arguments[0] in (str, Any) and is_plain(arguments[1])
    return any(hint is each for each in _PLAIN)


def _is_pydantic(hint: Any) -> bool:
    """Return whether Pydantic converts its values: it is a Pydantic type or has an extra that only Pydantic reads."""
    bare, extras = split(hint)
    return is_model(bare) or bool(extras and readable(extras)[1])


def _pydantic(hint: Any) -> Callable[[Any, Any], Any]:
    from trimcp.schema.pydantic_types import loader, with_extras

    bare, extras = split(hint)
    load = loader(with_extras(bare, readable(extras)[1]))
    return lambda value, _: load(value)


@functools.cache
def _make_converter(schema_of: Callable[[Any], dict[str, Any]]) -> cattrs.Converter:
    converter = cattrs.Converter(use_alias=True, detailed_validation=True)
    for kind, load in _LOADERS.items():
        converter.register_structure_hook(kind, _hook(load))
    converter.register_structure_hook(enum.Enum, lambda value, kind: _enumeration(kind)(value))
    converter.register_structure_hook_func(lambda kind: kind is object, lambda value, _: value)
    converter.register_structure_hook_factory(is_namedtuple, namedtuple_dict_structure_factory)
    converter.register_structure_hook_factory(is_union, lambda kind: _union(kind, converter, schema_of))
    converter.register_structure_hook_factory(is_alias, lambda kind: _alias(kind, converter))
    converter.register_structure_hook_factory(_is_pydantic, _pydantic)
    return converter


def _hook(load: Convert) -> Callable[[Any, Any], Any]:
    def structure(value: Any, kind: Any) -> Any:
        # Hooks also apply to subclasses, such as an enumeration of numbers.
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return _enumeration(kind)(value)
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


@functools.cache
def _enumeration(kind: type[enum.Enum]) -> Convert:
    if issubclass(kind, enum.Flag):
        return _checked(kind, f"a combination of {kind.__name__}")
    by_value = {(type(json), repr(json)): member for member in kind for json in (to_json(member),)}

    by_any = _checked(kind, "one of its values")

    def load(value: Any) -> Any:
        try:
            return by_value[type(value), repr(value)]
        except KeyError:
            return by_any(value)  # handles the class's `_missing_`, and 1.0 for 1

    return load


def _checked(kind: Callable[[Any], Any], name: str) -> Convert:
    def load(value: Any) -> Any:
        try:
            return kind(value)
        except (ValueError, ArithmeticError, binascii.Error):
            raise ValueError(f"must be {name}") from None

    return load


def _whole_number(value: Any) -> Any:
    # JSON Schema counts 3.0 as an integer and JSON parsers read it as a float; the keys of an object are text.
    return value if type(value) is int else int(value)


_LOADERS: Final[dict[Any, Convert]] = {
    str: lambda value: value,
    int: _whole_number,
    float: lambda value: value,
    bool: lambda value: value,
    bytes: _checked(lambda text: base64.b64decode(text, validate=True), "valid base64 text"),
    datetime.date: _checked(datetime.date.fromisoformat, "a valid date"),
    datetime.datetime: _checked(datetime.datetime.fromisoformat, "a valid date-time"),
    datetime.time: _checked(datetime.time.fromisoformat, "a valid time"),
    datetime.timedelta: _checked(lambda seconds: datetime.timedelta(seconds=seconds), "a valid duration"),
    decimal.Decimal: _checked(lambda value: decimal.Decimal(str(value)), "a valid decimal number"),
    pathlib.Path: pathlib.Path,
    pathlib.PurePath: pathlib.PurePath,
    uuid.UUID: _checked(uuid.UUID, "a valid uuid"),
}


def _problems(error: Exception) -> list[str]:
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


# --- Python to JSON ---


def to_json(value: Any) -> Any:
    """Convert a value of supported types to plain JSON values.

    Enumerations become their values; dates ISO 8601 (a datetime without a zone is local time, as in Python); durations
    seconds; bytes base64; UUIDs, decimals and paths text; sets and tuples arrays; attrs classes, dataclasses and
    NamedTuples objects. A subclass of a JSON type becomes that type. Pydantic serializes its models itself, under their
    aliases.

    Raises:
        ConversionError: the value contains another type, NaN or Infinity, or is nested too deeply (perhaps a loop).
    """
    try:
        return _dump(value, _MAX_DEPTH)
    except _Undumpable as error:
        raise ConversionError([str(error)]) from None


class _Undumpable(Exception):
    """Why a value has no JSON form."""


def _dump(value: Any, room: int) -> Any:
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return value
    if kind is float:
        if not math.isfinite(value):
            raise _Undumpable(f"{value} has no JSON form")
        return value
    if not room:
        raise _Undumpable("a value is nested too deeply, or holds itself")
    if kind is list or kind is tuple:
        return [_dump(each, room - 1) for each in value]
    if kind is dict:
        return {_key(key): _dump(each, room - 1) for key, each in value.items()}
    return _dump_special(value, room - 1)


def _dump_special(value: Any, room: int) -> Any:
    if isinstance(value, enum.Enum):
        return _dump(value.value, room)
    if is_model(type(value)):
        return _dump_pydantic(value, room)
    for kind, dump in _DUMPERS:
        if isinstance(value, kind):
            return dump(value)
    if attrs.has(type(value)):
        fields = ((a.alias or a.name, a.name) for a in attrs.fields(type(value)) if a.init)
        return {alias: _dump(getattr(value, name), room) for alias, name in fields}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _dump(getattr(value, f.name), room) for f in dataclasses.fields(value) if f.init}
    if isinstance(value, tuple) and (names := getattr(value, "_fields", None)) is not None:
        return {name: _dump(each, room) for name, each in zip(names, value, strict=True)}
    if isinstance(value, abc.Mapping):
        return {_key(key): _dump(each, room) for key, each in value.items()}
    if isinstance(value, abc.Set):
        return _sorted([_dump(each, room) for each in value])
    if isinstance(value, abc.Sequence):
        return [_dump(each, room) for each in value]
    raise _Undumpable(f"{type(value).__name__} has no JSON form")


def _dump_pydantic(value: Any, room: int) -> Any:
    from trimcp.schema.pydantic_types import dump

    try:
        plain = dump(value)
    except Exception as error:  # a serializer of the author may raise anything
        raise _Undumpable(f"{type(value).__name__} cannot be serialized: {type(error).__name__}") from error
    return _dump(plain, room)


def _local_time(value: datetime.datetime) -> str:
    # The format "date-time" is RFC 3339, which requires an offset.
    return (value if value.tzinfo is not None else value.astimezone()).isoformat()


def _text(data: bytes | bytearray | memoryview) -> str:
    return base64.b64encode(data).decode("ascii")


_DUMPERS: Final[list[tuple[Any, Callable[[Any], Any]]]] = [
    (datetime.datetime, _local_time),  # before date, of which it is a subclass
    ((datetime.date, datetime.time), lambda value: value.isoformat()),
    (datetime.timedelta, lambda value: value.total_seconds()),
    ((bytes, bytearray, memoryview), _text),
    ((uuid.UUID, decimal.Decimal, pathlib.PurePath), str),
    (str, str.__str__),
    (int, int),
    (float, lambda value: _dump(float(value), 1)),
]


def _key(key: Any) -> str:
    if type(key) is str:
        return key
    if isinstance(key, enum.Enum):
        return _key(key.value)
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, int | uuid.UUID) and not isinstance(key, bool):
        return str(int(key) if isinstance(key, int) else key)
    raise _Undumpable(f"an object's key must be a string, not {type(key).__name__}")


def _sorted(values: list[Any]) -> list[Any]:
    """Return the members of a set in a stable order, so that equal results are equal bytes."""
    return sorted(values, key=lambda value: (type(value).__name__, repr(value)))
