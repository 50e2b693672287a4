"""From JSON values to Python arguments and back. Its input has passed a JSON Schema, so it need not be strict."""

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
import types
import uuid
from collections.abc import Callable
from typing import Any, Final, Literal, Union, get_args, get_origin

import attrs
import cattrs
from cattrs.cols import is_namedtuple, namedtuple_dict_structure_factory

from trimcp.server.records import alias_value, split
from trimcp.validation import Judge, validator_for

__all__ = ["ConversionError", "Convert", "converter_for", "is_plain", "to_json"]

Convert = Callable[[Any], Any]

_MAX_DEPTH: Final = 100


class ConversionError(ValueError):
    """A value fits its schema and still cannot be converted, such as the date 2026-02-30.

    Attributes:
        problems: texts in the manner of `trimcp.validation.Validator.problems`; they do not echo the value.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


# --- JSON to Python ---


def converter_for(hint: Any, schema_of: Callable[[Any], dict[str, Any]]) -> Convert | None:
    """A function that makes a checked JSON value into `hint`, or None where the value is right as it is.

    Args:
        hint: a type that `schema_of` accepts.
        schema_of: the complete schema of a type; it decides which alternative of a union a value belongs to.

    The function raises ConversionError.
    """
    if is_plain(hint):
        return None
    converter = _make_converter(schema_of)
    structure = converter.get_structure_hook(hint)

    def convert(value: Any) -> Any:
        try:
            return structure(value, hint)
        except Exception as error:  # a class of the author's may refuse with any
            raise ConversionError(_problems(error)) from error

    return convert


_PLAIN: Final = (str, float, bool, type(None), None, Any, object, dict, list)
_PLAIN_CONTAINERS: Final = (list, abc.Sequence, abc.MutableSequence, abc.Iterable, abc.Collection)
_PLAIN_MAPPINGS: Final = (dict, abc.Mapping, abc.MutableMapping)


def is_plain(hint: Any) -> bool:
    """Whether every JSON value its schema admits already is one of its values."""
    if _is_alias(hint):  # maybe recursive
        return False
    hint, _ = split(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return not any(isinstance(value, enum.Enum | bytes) for value in arguments)
    if origin in (Union, types.UnionType):
        return all(map(is_plain, arguments)) or set(arguments) <= {int, float, str, bool, type(None)} >= {float}
    if origin in _PLAIN_CONTAINERS:
        return is_plain(arguments[0])
    if origin in _PLAIN_MAPPINGS:
        return arguments[0] in (str, Any) and is_plain(arguments[1])
    return any(hint is each for each in (*_PLAIN, *_PLAIN_CONTAINERS, *_PLAIN_MAPPINGS))


@functools.cache
def _make_converter(schema_of: Callable[[Any], dict[str, Any]]) -> cattrs.Converter:
    converter = cattrs.Converter(use_alias=True, detailed_validation=True)
    for kind, load in _LOADERS.items():
        converter.register_structure_hook(kind, _hook(load))
    converter.register_structure_hook(enum.Enum, lambda value, kind: _enumeration(kind)(value))
    converter.register_structure_hook_func(lambda kind: kind is object, lambda value, _: value)
    converter.register_structure_hook_factory(is_namedtuple, namedtuple_dict_structure_factory)
    converter.register_structure_hook_factory(_is_union, lambda kind: _union(kind, converter, schema_of))
    converter.register_structure_hook_factory(_is_alias, lambda kind: _alias(kind, converter))
    return converter


def _hook(load: Convert) -> Callable[[Any, Any], Any]:
    def structure(value: Any, kind: Any) -> Any:
        # Hooks hold for subclasses, and an enumeration of numbers is a number, too.
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return _enumeration(kind)(value)
        return load(value)

    return structure


def _is_alias(hint: Any) -> bool:
    return type(hint).__name__ == "TypeAliasType"


def _alias(hint: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    def convert(value: Any, _: Any) -> Any:  # looks up late, since an alias may hold itself
        target = alias_value(hint)
        return value if is_plain(target) else converter.structure(value, target)

    return convert


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _union(
    hint: Any, converter: cattrs.Converter, schema_of: Callable[[Any], dict[str, Any]]
) -> Callable[[Any, Any], Any]:
    """The first alternative whose schema the value satisfies and whose conversion works."""
    if is_plain(hint):
        return lambda value, _: value
    branches: list[tuple[Any, Judge, Callable[[Any, Any], Any] | None]] = []

    def convert(value: Any, _: Any) -> Any:
        if not branches:  # now, and not before: a recursive type would never be done
            for member in get_args(hint):
                hook = None if is_plain(member) else converter.get_structure_hook(member)
                branches.append((member, validator_for(schema_of(member)), hook))
        failure: Exception | None = None
        for member, validator, hook in branches:
            if validator.is_valid(value):
                try:
                    return value if hook is None else hook(value, member)
                except Exception as error:  # any, as above; another member may still take it
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
            return by_any(value)  # its own `_missing_`, or 1.0 for 1

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
    """cattrs's exception group as texts with places. The texts of authors' own checks are kept, cut."""

    def describe(cause: BaseException, kind: type[Any] | None) -> str:
        if isinstance(cause, ValueError | TypeError) and str(cause):
            return str(cause)[:200]
        return f"cannot be made into {getattr(kind, '__name__', 'its type')}"

    return cattrs.transform_error(error, path="$", format_exception=describe)[:10]


# --- Python to JSON ---


def to_json(value: Any) -> Any:
    """Any value made of what trimcp can describe, as plain JSON values.

    Enumerations become their values, dates ISO 8601 (a datetime without a zone is local time, as Python has it),
    durations seconds, bytes base64, UUIDs, decimals and paths text, sets and tuples arrays, and attrs classes,
    dataclasses and NamedTuples objects. A subclass of a JSON type becomes that type.

    Raises:
        ConversionError: the value holds something else, is nested too deeply (a loop, maybe), or has NaN or Infinity.
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


def _local_time(value: datetime.datetime) -> str:
    # RFC 3339, which the "date-time" format is, wants an offset.
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
    """A stable order for what has none, so that equal results are equal bytes."""
    return sorted(values, key=lambda value: (type(value).__name__, repr(value)))
