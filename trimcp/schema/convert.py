"""From JSON values that fit their schema to simple Python values, and from all values back."""

from __future__ import annotations

import base64
import collections.abc as abc
import datetime
import enum
import functools
import math
import operator
import os
import pathlib
import re
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from trimcp.schema.hints import TIME, is_model, is_record, members_of
from trimcp.wire.fields import is_payload
from trimcp.wire.jsonrpc import encode

Convert = Callable[[Any], Any]

_MAX_DEPTH: Final = 100


class ConversionError(ValueError):
    """A value fits its schema but cannot be converted, such as the date 2026-02-30."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems  # texts as from `Validator.problems`, without the value


_ROOT: Final = re.compile(r"@ \$(?:\.|(?=\[))")


def without_root(problems: Iterable[str]) -> list[str]:
    """Return texts of `Validator.problems` with paths as users write them: `@ to.street` for `@ $.to.street`."""
    return [_ROOT.sub("@ ", problem).removesuffix(" @ $") for problem in problems]


# --- JSON to Python ---


@functools.cache
def enumeration(kind: type[enum.Enum]) -> Convert:
    """Return a function that converts a JSON value to a member of this enumeration."""
    if issubclass(kind, enum.Flag):
        return _checked(kind, f"a combination of {kind.__name__}")
    # The class handles its `_missing_`, and 1.0 for 1.
    return choice([(member, to_json(member)) for member in kind], _checked(kind, "one of its values"))


def choice(values: Iterable[tuple[Any, Any]], otherwise: Convert) -> Convert:
    """Return a function that converts each JSON value to the Python value given with it."""
    by_value = {(type(json), repr(json)): value for value, json in values}

    def load(value: Any) -> Any:
        try:
            return by_value[type(value), repr(value)]
        except KeyError:
            return otherwise(value)

    return load


def _checked(kind: Callable[[Any], Any], name: str) -> Convert:
    def load(value: Any) -> Any:
        try:
            return kind(value)
        except (ValueError, ArithmeticError, LookupError, OSError, re.error):
            raise ValueError(f"must be {name}") from None

    return load


def _of_base64(kind: Callable[[bytes], Any]) -> Convert:
    return _checked(lambda text: kind(base64.b64decode(text, validate=True)), "valid base64 text")


def _whole_number(value: Any) -> Any:
    # JSON Schema counts 3.0 as an integer and JSON parsers read it as a float; the keys of an object are text.
    return value if type(value) is int else int(value)


def _text(data: bytes | bytearray | memoryview) -> str:
    return base64.b64encode(data).decode("ascii")


def _local_time(value: datetime.datetime) -> str:
    # The format "date-time" is RFC 3339, which requires an offset, of whole minutes.
    try:
        local = value if value.tzinfo is not None else value.astimezone()
        if (local.utcoffset() or datetime.timedelta()) % datetime.timedelta(minutes=1):
            local = local.astimezone(datetime.UTC)
    except (ValueError, OverflowError):  # at the ends of the calendar
        local = value.replace(tzinfo=datetime.UTC)
    return local.isoformat()


class Leaf(NamedTuple):
    """A type whose values have no members: its schema, what converts JSON that fits it, if anything does, and back."""

    schema: dict[str, Any]
    load: Convert | None = None
    dump: Convert = str
    results: dict[str, Any] | None = None  # the schema of what `dump` makes, if it is another


_REAL: Final = r"\d+(\.\d+)?([eE][+-]?\d+)?"
_COMPLEX: Final = rf"^[+-]?{_REAL}(j|[+-]{_REAL}j)?$"
_JSON_LEAVES: Final[dict[Any, Leaf]] = {
    str: Leaf({"type": "string"}, dump=str.__str__),
    int: Leaf({"type": "integer"}, _whole_number, int),
    float: Leaf({"type": "number"}, float, lambda value: _dump(float(value), 1)),
    bool: Leaf({"type": "boolean"}),
    type(None): Leaf({"type": "null"}),
}
# Classes that are made of a text and give it back, by module and name: an author who uses one has imported it.
_TEXTS: Final[dict[tuple[str, str], dict[str, Any]]] = {
    ("uuid", "UUID"): {"format": "uuid"},
    ("zoneinfo", "ZoneInfo"): {},
    ("fractions", "Fraction"): {"pattern": r"^-?\d+(/0*[1-9]\d*|\.\d+)?$"},
    ("ipaddress", "IPv4Address"): {"format": "ipv4"},
    ("ipaddress", "IPv6Address"): {"format": "ipv6"},
    **{("ipaddress", f"IPv{number}{kind}"): {} for number in (4, 6) for kind in ("Network", "Interface")},
}


@functools.cache
def _other_leaves() -> dict[Any, Leaf]:
    import decimal  # loaded with the first type that JSON has no form of its own for

    text = {"type": "string"}
    number_or_text = {"anyOf": [{"type": "number"}, {**text, "pattern": r"^-?\d+(\.\d+)?$"}]}
    base64_text = {**text, "contentEncoding": "base64"}
    duration = {"type": "number", "description": "a duration in seconds"}
    iso, date, time, moment = operator.methodcaller("isoformat"), datetime.date, datetime.time, datetime.datetime
    return {
        **{kind: Leaf(base64_text, _of_base64(kind), _text) for kind in (bytes, bytearray, memoryview)},
        date: Leaf({**text, "format": "date"}, _checked(date.fromisoformat, "a valid date"), iso),
        moment: Leaf({**text, "format": "date-time"}, _checked(moment.fromisoformat, "a valid date-time"), _local_time),
        time: Leaf({**text, "pattern": TIME}, _checked(time.fromisoformat, "a valid time"), iso),
        datetime.timedelta: Leaf(
            duration,
            _checked(lambda seconds: datetime.timedelta(seconds=seconds), "a valid duration"),
            datetime.timedelta.total_seconds,
        ),
        decimal.Decimal: Leaf(
            number_or_text,
            _checked(lambda value: decimal.Decimal(str(value)), "a valid decimal number"),
            lambda value: f"{value:f}",  # its schema has no exponents
            {"anyOf": [{"type": "number"}, text]},  # also NaN
        ),
        complex: Leaf({**text, "pattern": _COMPLEX}, complex, lambda value: str(value).strip("()")),
        re.Pattern: Leaf(text, _checked(re.compile, "a regular expression"), operator.attrgetter("pattern")),
        os.PathLike: Leaf(text, pathlib.PurePath, os.fspath),
    }


def leaf_of(hint: Any) -> Leaf | None:
    """Return what a type without members is in JSON, or None for any other type. It must be hashable."""
    if found := _JSON_LEAVES.get(hint):
        return found
    if not isinstance(hint, type):
        return None
    text = _TEXTS.get((hint.__module__, hint.__name__))
    if text is not None or issubclass(hint, pathlib.PurePath):
        shown = "path" if text is None else text.get("format", hint.__name__)
        results = {"type": "string"} if shown == "ipv6" else None  # the format knows no zone, as in fe80::1%eth0
        return Leaf({"type": "string", **(text or {})}, _checked(hint, f"a valid {shown}"), results=results)
    return _other_leaves().get(hint)


# --- Python to JSON ---


def to_json(value: Any, hint: Any = None) -> Any:
    """Convert a value of supported types to plain JSON values.

    Enumerations become their values; dates ISO 8601 (a datetime without a zone is local time, as in Python); durations
    seconds; bytes base64; UUIDs, decimals and paths text; sets and tuples arrays; attrs classes, dataclasses and
    NamedTuples objects. A subclass of a JSON type becomes that type. Pydantic serializes its models itself, under their
    aliases.

    `hint`: its type, if Pydantic converts it by that. Raises ConversionError: the value contains another type, NaN or
    Infinity, or is nested too deeply (perhaps a loop).
    """
    return _dump(value, _MAX_DEPTH) if hint is None else _dump_pydantic(value, _MAX_DEPTH, hint)


def _dump(value: Any, room: int) -> Any:
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return value
    if kind is float:
        if not math.isfinite(value):
            raise ConversionError([f"{value} has no JSON form"])
        return value
    if not room:
        raise ConversionError(["a value is nested too deeply, or holds itself"])
    if kind is list or kind is tuple:
        return [_dump(each, room - 1) for each in value]
    if kind is dict:
        return {key_text(key): _dump(each, room - 1) for key, each in value.items()}
    return _dump_special(value, room - 1)


def _dump_special(value: Any, room: int) -> Any:
    cls: Any = type(value)
    if is_payload(cls):
        raise ConversionError(
            ["content blocks are no plain values: annotate what returns them, as by -> list[Text | Audio]"]
        )
    if isinstance(value, enum.Enum):
        return _dump(value.value, room)
    if is_model(cls):
        return _dump_pydantic(value, room)
    for kind in cls.__mro__:
        if leaf := leaf_of(kind):
            return leaf.dump(value)
    if is_record(cls):
        members = ((name, at) for name, at, sure in members_of(cls) if sure or hasattr(value, at))
        return {name: _dump(getattr(value, at), room) for name, at in members}
    if isinstance(value, abc.Mapping):
        return {key_text(key): _dump(each, room) for key, each in value.items()}
    if isinstance(value, abc.Set):
        # In a stable order, so that equal results are equal bytes.
        return sorted((_dump(each, room) for each in value), key=lambda each: (type(each).__name__, repr(each)))
    if isinstance(value, abc.Collection | abc.Iterator):
        return [_dump(each, room) for each in value]
    raise ConversionError([f"{type(value).__name__} has no JSON form"])


def _dump_pydantic(value: Any, room: int, hint: Any = None) -> Any:
    from trimcp.schema.pydantic_types import dump

    try:
        plain = dump(value, hint)
    except Exception as error:  # a serializer of the author may raise anything
        raise ConversionError([f"{type(value).__name__} cannot be serialized: {type(error).__name__}"]) from error
    return _dump(plain, room)


def key_text(key: Any) -> str:
    """Return the key of a JSON object for a key in Python: what is no text in JSON is written as its JSON."""
    plain = key if type(key) is str else _dump(key, _MAX_DEPTH)
    return plain if type(plain) is str else encode(plain).decode()
