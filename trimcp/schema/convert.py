"""From JSON values that fit their schema to simple Python values, and from all values back."""

from __future__ import annotations

import base64
import binascii
import collections.abc as abc
import dataclasses
import datetime
import enum
import functools
import math
import pathlib
import re
import uuid
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal, get_args, get_origin

import attrs

from trimcp.schema.hints import is_alias, is_model, is_union, readable, split
from trimcp.wire.fields import is_payload

Convert = Callable[[Any], Any]

_MAX_DEPTH: Final = 100


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


LISTS: Final = (list, abc.Sequence, abc.MutableSequence, abc.Iterable, abc.Collection)
MAPPINGS: Final = (dict, abc.Mapping, abc.MutableMapping)
_PLAIN: Final = (str, float, bool, type(None), None, Any, object, *LISTS, *MAPPINGS)


def is_plain(hint: Any) -> bool:
    """Return whether a JSON value that fits the schema of `hint` needs no conversion."""
    if is_alias(hint) or is_pydantic(hint):  # an alias may be recursive
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


def is_pydantic(hint: Any) -> bool:
    """Return whether Pydantic converts its values: it is a Pydantic type or has an extra that only Pydantic reads."""
    bare, extras = split(hint)
    return is_model(bare) or bool(extras and readable(extras)[1])


@functools.cache
def enumeration(kind: type[enum.Enum]) -> Convert:
    """Return a function that converts a JSON value to a member of this enumeration."""
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


_JSON_LOADERS: Final[dict[Any, Convert]] = {
    str: lambda value: value,
    int: _whole_number,
    float: lambda value: value,
    bool: lambda value: value,
}


@functools.cache
def loaders() -> dict[Any, Convert]:
    """Return what converts values of each type that has no members."""
    import decimal  # loaded with the first type that JSON has no form of its own for

    return {
        **_JSON_LOADERS,
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


def loader_of(hint: Any) -> Convert | None:
    """Return what converts values of a type that has no members, or None for any other type."""
    return _JSON_LOADERS.get(hint) or loaders().get(hint)


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
    if is_payload(type(value)):
        raise _Undumpable("content blocks are no plain values: annotate what returns them, as by -> list[Text | Audio]")
    if isinstance(value, enum.Enum):
        return _dump(value.value, room)
    if is_model(type(value)):
        return _dump_pydantic(value, room)
    for kind, dump in _dumpers():
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


@functools.cache
def _dumpers() -> list[tuple[Any, Callable[[Any], Any]]]:
    import decimal

    return [
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
