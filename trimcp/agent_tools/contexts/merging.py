"""JSON merge patches (RFC 7396) with bounds, and the sizes of JSON values. No I/O, no time.

Nothing is changed in place: a merged value is a new one that shares what the patch left alone. So a reader may keep an
old state for as long as it likes, and a patch that is refused has changed nothing.

Sizes are computed from the values, since a state is rarely text: bytes of the JSON text, with one separator after each
member. They add up, so a state's size is kept up to date at the cost of the patch alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import orjson

from trimcp.agent_tools.messages.errors import MalformedMessage, TooLargeMessage

_BRACKETS: Final = 2
_SEPARATORS: Final = 2  # a colon and a comma
_NULL: Final = 4
_SCALARS: Final = frozenset((str, int, float, bool, type(None)))
_ABSENT: Final[Any] = object()

_dumps: Final[Callable[[Any], bytes]] = orjson.dumps

MAX_DEPTH: Final = 128
"""The largest bound on depth: as deep as messages are read. The functions below call themselves for each level."""


class StateBounds(NamedTuple):
    """How large a state, and a patch of it, may be."""

    size: int = 256 * 1024  # bytes of its JSON text
    depth: int = 32  # levels of nested objects and arrays; a flat object has one
    members: int = 10_000  # members of objects and elements of arrays, on all levels together


ANY_SIZE: Final = StateBounds(1 << 62, MAX_DEPTH, 1 << 62)
"""Of what is in a state: its bounds may have been larger once. It is kept, and may only shrink."""


class StateSize(NamedTuple):
    """The size of a JSON value."""

    size: int = 0  # bytes of its JSON text, about
    members: int = 0  # members and elements, on all levels together


EMPTY_OBJECT: Final = StateSize(_BRACKETS, 0)
"""The size of `{}`."""


class Patched(NamedTuple):
    """What a patch leads to."""

    value: dict[str, Any]  # the new state
    size: StateSize  # its size
    patch: StateSize  # the size of the patch


def size_of(value: Any, bounds: StateBounds) -> StateSize:
    """Return the size of a JSON value. One with too many members is not read to its end.

    Raises TooLargeMessage beyond the bounds, and MalformedMessage if something in it is no JSON value.
    """
    size, members = _measured(value, bounds, 1)
    if size > bounds.size:
        raise too_large("size", bounds.size)
    return StateSize(size, members)


def patched(state: Mapping[str, Any], kept: StateSize, patch: Mapping[str, Any], bounds: StateBounds) -> Patched:
    """Return what a merge patch, an object, makes of a state whose size is `kept`, with the new size.

    It takes time for the patch, for the values that it replaces, and for a shallow copy of each object that it changes.
    The bounds are those of the new state; its size and depth bound the patch, too. Raises as `size_of`.
    """
    value, size, members, written, seen = _merged(state, patch, bounds, 1)
    size, members = size + kept.size, members + kept.members
    if size > bounds.size or written > bounds.size:
        raise too_large("size", bounds.size)
    if members > bounds.members:
        raise too_large("members", bounds.members)
    return Patched(value, StateSize(size, members), StateSize(written, seen))


def too_large(what: str, most: int) -> TooLargeMessage:
    """Return the error for a state or patch beyond one of the bounds: "size", "depth" or "members"."""
    unit = {"size": "bytes", "depth": "levels"}.get(what, what)
    return TooLargeMessage(f"the context's state may have {most:,} {unit}", {"bound": what, "most": most})


def _merged(
    target: Mapping[str, Any], patch: Mapping[str, Any], bounds: StateBounds, level: int
) -> tuple[dict[str, Any], int, int, int, int]:
    """Merge a patch on this level: return the object, by what it grows in bytes and members, and those of the patch."""
    if level > bounds.depth:
        raise too_large("depth", bounds.depth)
    result = dict(target)
    size = members = 0
    written, seen = _BRACKETS, len(patch)
    for key, value in patch.items():
        if seen > bounds.members:
            break
        of_key, old = _key_size(key), result.get(key, _ABSENT)
        into_object = type(value) is dict and type(old) is dict
        if old is not _ABSENT and not into_object:
            gone, fewer = _measured(old, ANY_SIZE, 1)
            size -= of_key + gone
            members -= 1 + fewer
        if type(value) is dict:
            # Merged into an empty object rather than kept: members that are null are not part of the result.
            result[key], more, below, of_value, within = _merged(old if into_object else {}, value, bounds, level + 1)
            if not into_object:
                more, below = more + _BRACKETS + of_key, below + 1
        elif value is None:
            result.pop(key, None)
            more, below, of_value, within = 0, 0, _NULL, 0
        else:
            of_value, within = _measured(value, bounds, level + 1)
            result[key] = value
            more, below = of_key + of_value, 1 + within
        size, members = size + more, members + below
        written, seen = written + of_key + of_value, seen + within
    if seen > bounds.members:
        raise too_large("members", bounds.members)
    return result, size, members, written, seen


def _measured(value: Any, bounds: StateBounds, level: int) -> tuple[int, int]:
    """Return the bytes and the members of a JSON value on this level."""
    if type(value) is str or type(value) is int:  # most are
        return _text_size(value), 0
    layer: list[Any] = [[value]]
    level, members, separators = level - 1, 0, 0
    while layer:
        if level > bounds.depth:
            raise too_large("depth", bounds.depth)
        below = []
        for container in layer:
            for each in container.values() if type(container) is dict else container:
                kind = type(each)
                if kind is dict or kind is list:
                    members += len(each)
                    separators += bool(each)  # it has one more than its text
                    if members > bounds.members:
                        raise too_large("members", bounds.members)
                    below.append(each)
                elif kind not in _SCALARS:
                    raise MalformedMessage(f"the updates hold a {kind.__name__}, which is no JSON value")
                elif kind is float and not math.isfinite(each):
                    raise MalformedMessage("the updates hold NaN or Infinity, which are no numbers in JSON")
        layer, level = below, level + 1
    return _text_size(value) + separators, members


def _key_size(key: Any) -> int:
    if type(key) is not str:
        raise MalformedMessage(f"the updates have a key that is a {type(key).__name__}, not a text")
    return _SEPARATORS + _text_size(key)


def _text_size(value: Any) -> int:
    try:
        return len(_dumps(value))
    except TypeError as error:  # an integer beyond 64 bits, a lone surrogate, a key that is no text
        raise MalformedMessage(f"the updates hold what JSON cannot say: {error}") from None
