"""JSON values as google.protobuf.Struct, Value and ListValue, on the wire, and back.

protobuf's own classes would make an object for each member before anybody can count them. Here members are counted, and
depth is checked, while the bytes become JSON values. Both directions are generators: they stop now and then, so that a
large value can be converted in turns (`in_turns`).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from struct import Struct
from typing import Any, Final, TypeAlias, TypeVar

import trio

from trimcp.agent_tools.messages.errors import MalformedMessage
from trimcp.framing.grpc import read_varint, varint
from trimcp.wire.jsonrpc import DEFAULT_LIMITS, ParseLimits

ResultT = TypeVar("ResultT")

Steps: TypeAlias = Generator[None, None, ResultT]
"""A conversion that stops after each `_TURN` members, and returns its result."""

MEMBER: Final = 64
"""Bytes of memory that a member takes, approximately, beside those on the wire."""

_TURN: Final = 512
_EXACT: Final = float(2**53)  # up to here every integer is a double
_DOUBLE: Final = Struct("<d")
_NUMBER_AT: Final = _DOUBLE.unpack_from

# Tags: the number of a field, and how it is written.
_FIRST, _SECOND = 0x0A, 0x12  # of an entry: its name and its value; of a list or an object: each member
_NULL, _NUMBER, _STRING, _BOOL, _STRUCT, _LIST = 0x08, 0x11, 0x1A, 0x20, 0x2A, 0x32


def at_once(steps: Steps[ResultT]) -> ResultT:
    """Return the result of a conversion, without a pause."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # what the generator returns


async def in_turns(steps: Steps[ResultT]) -> ResultT:
    """Return the result of a conversion; other tasks run in between."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # as above
        await trio.lowlevel.checkpoint()


# Reading


def read_object(data: bytes, limits: ParseLimits = DEFAULT_LIMITS) -> Steps[dict[str, Any]]:
    """Convert a Struct to the JSON object that it is.

    Raises:
        MalformedMessage: it is none, or beyond the limits on depth and members; a number is NaN or infinite.
    """
    found, _ = yield from read_counted(data, limits)
    return found


def read_counted(data: bytes, limits: ParseLimits = DEFAULT_LIMITS) -> Steps[tuple[dict[str, Any], int]]:
    """Convert a Struct as `read_object`, and count its members and those in it."""
    found: dict[str, Any] = {}
    members = yield from _read(data, found, limits)
    return found, members


def read_any(data: bytes, limits: ParseLimits = DEFAULT_LIMITS) -> Steps[Any]:
    """Convert a Value to the JSON value that it is. A whole number is an integer, as far as it is exact.

    Raises as `read_object`.
    """
    found: list[Any] = []
    yield from _read(b"\x0a" + varint(len(data)) + data, found, limits)
    return found[0]


def _read(data: bytes, whole: Any, limits: ParseLimits) -> Steps[int]:
    """Fill an object or a list, and those in it; return how many members all of them have."""
    into, end, at = whole, len(data), 0
    open_: list[tuple[Any, int]] = []  # those that are not complete, with their ends
    members, most, deepest = 0, limits.max_members, limits.max_depth
    try:
        while True:
            while at == end:
                if not open_:
                    return members
                into, end = open_.pop()
            members += 1
            if members > most:
                raise MalformedMessage(f"more than {most:,} members")
            if not members % _TURN:
                yield
            if data[at] != _FIRST:
                raise MalformedMessage("a value of google.protobuf has an unknown field")
            size = data[at + 1]
            at += 2
            if size > 0x7F:
                size, at = read_varint(data, at - 1)
            stop = at + size
            if size < 0 or stop > end:
                raise MalformedMessage("a value of google.protobuf is cut short")
            if isinstance(into, dict):
                name, at = _name_of(data, at, stop)
            else:
                name = None
            value, at, size = _value_of(data, at, stop)
            if size >= 0:  # a container, whose members follow
                if len(open_) + 2 > deepest:
                    raise MalformedMessage(f"nested deeper than {deepest} levels")
                open_.append((into, end))
            if isinstance(into, list):
                into.append(value)
            else:
                into[name] = value
            if size >= 0:
                into, end = value, at + size
    except (IndexError, UnicodeDecodeError):
        raise MalformedMessage("a value of google.protobuf is malformed") from None


def _name_of(data: bytes, at: int, stop: int) -> tuple[str, int]:
    """Return the name of an entry, and where its value begins; at its end if there is none."""
    if at < stop and data[at] == _FIRST:
        size, at = read_varint(data, at + 1)
        if 0 <= size <= stop - at:
            name = str(data[at : at + size], "utf-8")
            at += size
            if at == stop:
                return name, at
            if data[at] == _SECOND:
                size, at = read_varint(data, at + 1)
                if size == stop - at:
                    return name, at
    elif at < stop and data[at] == _SECOND:  # an empty name need not be written
        size, at = read_varint(data, at + 1)
        if size == stop - at:
            return "", at
    raise MalformedMessage("an entry of a google.protobuf.Struct is malformed")


def _value_of(data: bytes, at: int, stop: int) -> tuple[Any, int, int]:
    """Return the Value between two places, where what follows begins, and -1; for a container the size of its members.

    A Value of no kind is null.
    """
    if at == stop:
        return None, stop, -1
    kind = data[at]
    at += 1
    if kind == _NUMBER and stop - at == _DOUBLE.size:
        number: float = _NUMBER_AT(data, at)[0]
        if number != number or number in (float("inf"), float("-inf")):
            raise MalformedMessage("a number is NaN or infinite")
        return int(number) if number.is_integer() and abs(number) <= _EXACT else number, stop, -1
    size, at = read_varint(data, at)
    if kind in (_NULL, _BOOL):
        if at == stop and size >= 0:
            return None if kind == _NULL else size != 0, stop, -1
    elif size == stop - at:
        if kind == _STRING:
            return str(data[at:stop], "utf-8"), stop, -1
        if kind == _STRUCT:
            return {}, at, size
        if kind == _LIST:
            return [], at, size
    raise MalformedMessage("a google.protobuf.Value is malformed")


# Writing


def write_object(value: Mapping[str, Any]) -> Steps[bytes]:
    """Convert a JSON object to a Struct; an integer that no double holds is rounded."""
    parts: list[bytes] = []
    for count, (name, member) in enumerate(value.items(), 1):
        raw = name.encode()
        written = yield from write_any(member)
        entry = b"".join((b"\x0a", varint(len(raw)), raw, b"\x12", varint(len(written)), written))
        parts += (b"\x0a", varint(len(entry)), entry)
        if not count % _TURN:
            yield
    return b"".join(parts)


def write_any(value: Any) -> Steps[bytes]:
    """Convert a JSON value to a Value; an integer that no double holds is rounded."""
    kind = type(value)
    if kind is dict:
        written = yield from write_object(value)
        return b"".join((b"\x2a", varint(len(written)), written))
    if kind is list:
        parts: list[bytes] = []
        for count, member in enumerate(value, 1):
            written = yield from write_any(member)
            parts += (b"\x0a", varint(len(written)), written)
            if not count % _TURN:
                yield
        written = b"".join(parts)
        return b"".join((b"\x32", varint(len(written)), written))
    if kind is str:
        raw = value.encode()
        return b"".join((b"\x1a", varint(len(raw)), raw))
    if kind is bool:
        return b"\x20\x01" if value else b"\x20\x00"
    if kind is int or kind is float:
        return b"\x11" + _DOUBLE.pack(value)
    return b"\x08\x00"
