"""JSON merge patches (RFC 7396) with bounds, and the sizes of JSON values. No I/O, no time.

Nothing is changed in place: a merged value is a new one that shares what the patch left alone. So a reader may keep an
old state for as long as it likes, and a patch that is refused has changed nothing.

Sizes are computed from the values, since a state is rarely text: bytes of the JSON text without escapes, with one
separator after each member. They add up, so a state's size is kept up to date at the cost of the patch alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import attrs

from trimcp.agent_tools.messages.errors import MalformedMessage, TooLargeMessage
from trimcp.support.bounds import check_number, checked
from trimcp.support.slotted import valued

_BRACKETS: Final = 2
_OF_KEY: Final = 4  # two quotes, a colon and a comma
_WORDS: Final = 5  # null, true, false
_SMALLEST: Final = -(1 << 63)
_LARGEST: Final = 1 << 64

_ABSENT: Final[Any] = object()


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
    measure = _Measure(bounds)
    size = measure.size_of(value, 1)
    if size > bounds.size:
        raise too_large("size", bounds.size)
    return StateSize(size, measure.members)


def patched(state: Mapping[str, Any], kept: StateSize, patch: Mapping[str, Any], bounds: StateBounds) -> Patched:
    """Return what a merge patch, an object, makes of a state whose size is `kept`, with the new size.

    It takes time for the patch, for the values that it replaces, and for a shallow copy of each object that it changes.
    The bounds are those of the new state; its size and depth bound the patch, too. Raises as `size_of`.
    """
    merge = _Merge(bounds)
    value = merge.into(state, patch, 1)
    size, members = kept.size + merge.size, kept.members + merge.members
    if size > bounds.size or merge.patch > bounds.size:
        raise too_large("size", bounds.size)
    if members > bounds.members:
        raise too_large("members", bounds.members)
    return Patched(value, StateSize(size, members), StateSize(merge.patch, merge.seen))


def too_large(what: str, most: int) -> TooLargeMessage:
    """Return the error for a state or patch beyond one of the bounds: "size", "depth" or "members"."""
    unit = {"size": "bytes", "depth": "levels"}.get(what, what)
    return TooLargeMessage(f"the context's state may have {most:,} {unit}", {"bound": what, "most": most})


class _Measure:
    """Adds up the size of one value."""

    __slots__ = ("_depth", "_most", "members")

    def __init__(self, bounds: StateBounds) -> None:
        self.members: int = 0
        self._most: int = bounds.members
        self._depth: int = bounds.depth

    def size_of(self, value: Any, depth: int) -> int:
        """Return the bytes of a value on this level; `members` grows by its members."""
        kind = type(value)
        if kind is str:
            return _BRACKETS + (len(value) if value.isascii() else _encoded_size(value))
        if kind is bool or value is None:
            return _WORDS
        if kind is int:
            if -10 < value < 100:
                return 2
            if _SMALLEST <= value < _LARGEST:
                return len(str(value))
            raise MalformedMessage("the updates hold an integer beyond 64 bits")
        if kind is float:
            if not math.isfinite(value):
                raise MalformedMessage("the updates hold NaN or Infinity, which are no numbers in JSON")
            return len(repr(value))
        if kind is not dict and kind is not list:
            raise MalformedMessage(f"the updates hold a {kind.__name__}, which is no JSON value")
        if depth > self._depth:
            raise too_large("depth", self._depth)
        self.members += len(value)
        if self.members > self._most:
            raise too_large("members", self._most)
        size = _BRACKETS + len(value)
        if kind is list:
            for element in value:
                size += self.size_of(element, depth + 1)
        else:
            for key, member in value.items():
                size += _key_size(key) - 1 + self.size_of(member, depth + 1)
        return size


class _Merge:
    """Merges one patch, and adds up how the state's size changes."""

    __slots__ = ("_bounds", "members", "patch", "seen", "size")

    def __init__(self, bounds: StateBounds) -> None:
        self._bounds: StateBounds = bounds
        self.size: int = 0  # what the state grows by; negative if it shrinks
        self.members: int = 0
        self.patch: int = 0  # bytes and members of the patch
        self.seen: int = 0

    def into(self, target: Mapping[str, Any], patch: Mapping[str, Any], depth: int) -> dict[str, Any]:
        """Return the merged object."""
        bounds = self._bounds
        if depth > bounds.depth:
            raise too_large("depth", bounds.depth)
        self.seen += len(patch)
        if self.seen > bounds.members:
            raise too_large("members", bounds.members)
        result = dict(target)
        size = members = written = 0
        for key, value in patch.items():
            of_key = _key_size(key)
            old = result.get(key, _ABSENT)
            if value is None:
                written += of_key + _WORDS
                if old is not _ABSENT:
                    gone = self._known(old)
                    del result[key]
                    size -= of_key + gone.size
                    members -= 1 + gone.members
                continue
            if type(value) is dict:
                self.patch += of_key
                if type(old) is dict:
                    result[key] = self.into(old, value, depth + 1)
                    continue
                # Merged into an empty object rather than kept: members that are null are not part of the result.
                result[key] = self.into({}, value, depth + 1)
                new = EMPTY_OBJECT
            else:
                measure = _Measure(bounds)
                new = StateSize(measure.size_of(value, depth + 1), measure.members)
                self.seen += new.members
                result[key] = value
                written += of_key + new.size
            if old is _ABSENT:
                size += of_key + new.size
                members += 1 + new.members
            else:
                gone = self._known(old)
                size += new.size - gone.size
                members += new.members - gone.members
        self.size += size
        self.members += members
        self.patch += written
        return result

    def _known(self, value: Any) -> StateSize:
        """Return the size of a value of the state, which is within the bounds."""
        measure = _Measure(self._bounds)
        return StateSize(measure.size_of(value, 1), measure.members)


def _encoded_size(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise MalformedMessage("the updates hold a lone surrogate, which is no text") from None


def _key_size(key: Any) -> int:
    if type(key) is not str:
        raise MalformedMessage(f"the updates have a key that is a {type(key).__name__}, not a text")
    return _OF_KEY + (len(key) if key.isascii() else _encoded_size(key))
