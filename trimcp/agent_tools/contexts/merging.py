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

import attrs
import orjson

from trimcp.agent_tools.messages.errors import MalformedMessage, TooLargeMessage
from trimcp.support.bounds import check_number, checked
from trimcp.support.slotted import valued

_BRACKETS: Final = 2
_SEPARATORS: Final = 2  # a colon and a comma
_SCALARS: Final = frozenset((str, int, float, bool, type(None)))
_ABSENT: Final[Any] = object()

_dumps: Final[Callable[[Any], bytes]] = orjson.dumps

MAX_DEPTH: Final = 128
"""The largest bound on depth: as deep as messages are read. The functions below call themselves for each level."""


def _check_depth(instance: object, attribute: object, value: object) -> None:
    check_number("StateBounds.depth", value, whole=True)
    if isinstance(value, int) and value > MAX_DEPTH:
        raise ValueError(f"StateBounds.depth is at most {MAX_DEPTH}, not {value}")


@attrs.frozen(field_transformer=checked())
@valued
class StateBounds:
    """How large a state, and a patch of it, may be."""

    size: int = 256 * 1024  # bytes of its JSON text
    # levels of nested objects and arrays; a flat object has one
    depth: int = attrs.field(default=32, validator=_check_depth)
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


def size_of(value: Any, bounds: StateBounds, level: int = 1) -> StateSize:
    """Return the size of a JSON value on this level. One with too many members is not read to its end.

    Raises TooLargeMessage beyond the bounds, and MalformedMessage if something in it is no JSON value.
    """
    kind = type(value)
    if kind in _SCALARS:
        if kind is float and not math.isfinite(value):
            raise MalformedMessage("the updates hold NaN or Infinity, which are no numbers in JSON")
        size, members = _text_size(value), 0
    elif kind is dict or kind is list:
        if level > bounds.depth:
            raise too_large("depth", bounds.depth)
        size, members = _BRACKETS, len(value)
        for key, member in value.items() if kind is dict else enumerate(value):
            if members > bounds.members:
                break
            below = size_of(member, bounds, level + 1)
            size += below.size + (_key_size(key) if kind is dict else 1)
            members += below.members
        if members > bounds.members:
            raise too_large("members", bounds.members)
    else:
        raise MalformedMessage(f"the updates hold a {kind.__name__}, which is no JSON value")
    if size > bounds.size:
        raise too_large("size", bounds.size)
    return StateSize(size, members)


def patched(state: Mapping[str, Any], kept: StateSize, patch: Mapping[str, Any], bounds: StateBounds) -> Patched:
    """Return what a merge patch, an object, makes of a state whose size is `kept`, with the new size.

    It takes time for the patch, for the values that it replaces, and for a shallow copy of each object that it changes.
    The bounds are those of the new state; its size and depth bound the patch, too. Raises as `size_of`.
    """
    value, (size, members), of_patch = _merged(state, kept, patch, bounds, 1)
    if size > bounds.size or of_patch.size > bounds.size:
        raise too_large("size", bounds.size)
    if members > bounds.members:
        raise too_large("members", bounds.members)
    return Patched(value, StateSize(size, members), of_patch)


def too_large(what: str, most: int) -> TooLargeMessage:
    """Return the error for a state or patch beyond one of the bounds: "size", "depth" or "members"."""
    unit = {"size": "bytes", "depth": "levels"}.get(what, what)
    return TooLargeMessage(f"the context's state may have {most:,} {unit}", {"bound": what, "most": most})


def _merged(
    target: Mapping[str, Any], kept: StateSize, patch: Mapping[str, Any], bounds: StateBounds, level: int
) -> Patched:
    """Merge a patch on this level; `kept` is the size of the target, or of more that it is a part of."""
    if level > bounds.depth:
        raise too_large("depth", bounds.depth)
    result = dict(target)
    size, members = kept
    written, seen = _BRACKETS, len(patch)
    for key, value in patch.items():
        if seen > bounds.members:
            break
        of_key, old = _key_size(key), result.get(key, _ABSENT)
        into_object = type(value) is dict and type(old) is dict
        if old is not _ABSENT and not into_object:
            gone = size_of(old, ANY_SIZE)
            size -= of_key + gone.size
            members -= 1 + gone.members
        if type(value) is dict:
            # Merged into an empty object rather than kept: members that are null are not part of the result.
            inner, before = (old, StateSize()) if into_object else ({}, EMPTY_OBJECT)
            result[key], new, of_value = _merged(inner, before, value, bounds, level + 1)
        else:
            new = of_value = size_of(value, bounds, level + 1)
            result[key] = value
        written += of_key + of_value.size
        seen += of_value.members
        if value is None:
            del result[key]
        elif into_object:
            size, members = size + new.size, members + new.members
        else:
            size, members = size + of_key + new.size, members + 1 + new.members
    if seen > bounds.members:
        raise too_large("members", bounds.members)
    return Patched(result, StateSize(size, members), StateSize(written, seen))


def _key_size(key: Any) -> int:
    if type(key) is not str:
        raise MalformedMessage(f"the updates have a key that is a {type(key).__name__}, not a text")
    return _SEPARATORS + _text_size(key)


def _text_size(value: Any) -> int:
    try:
        return len(_dumps(value))
    except TypeError as error:  # an integer beyond 64 bits, a lone surrogate
        raise MalformedMessage(f"the updates hold what JSON cannot say: {error}") from None
