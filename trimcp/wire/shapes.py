"""What the annotations of payload classes mean, for the two modules that read them.

A payload's members are JSON primitives, open JSON, `Literal`s, lists, dicts, payloads and unions of those.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Final, Literal, NoReturn, Union, get_args, get_origin

import attrs

from trimcp.wire.fields import Absent, wire_name
from trimcp.wire.revisions import Revision

__all__ = [
    "EXTRA",
    "JSON_NAMES",
    "TooNew",
    "Unsayable",
    "Wrong",
    "attributes",
    "is_payload",
    "is_union",
    "known_names",
    "members",
    "must",
    "nothing_left",
    "present",
    "say",
    "tag_of",
    "too_new",
]

EXTRA: Final = "extra"
"""The attribute that holds the members nobody declared, where the schema is open."""

JSON_NAMES: Final[dict[type, str]] = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    type(None): "null",
}


class Wrong(Exception):
    """One problem, whose place is added while it travels up."""


class Unsayable(Wrong):
    """Something for which the revision has no words."""


class TooNew(Unsayable):
    """A kind of content that the revision lacks, which a list may leave out."""


def say(problem: str) -> NoReturn:
    """Report a problem here."""
    raise Wrong(problem)


def must(wanted: str, value: Any) -> NoReturn:
    """Report a value of the wrong JSON type."""
    raise Wrong(f"must be {wanted}, not {JSON_NAMES.get(type(value), type(value).__name__)}")


def too_new(cls: type, revision: Revision) -> Callable[..., NoReturn]:
    """A hook for a class that the revision lacks."""

    def refuse(*_: Any) -> NoReturn:
        raise TooNew(f"{cls.__name__} does not exist in revision {revision}")

    return refuse


def nothing_left(revision: Revision) -> NoReturn:
    """Report a list of content of which this revision could carry nothing."""
    raise Unsayable(f"holds only kinds of content that revision {revision} does not have")


def is_payload(tp: Any) -> bool:
    """Whether it is a class made with `@wire`."""
    return isinstance(tp, type) and hasattr(tp, "__wire__")


def is_union(tp: Any) -> bool:
    """Whether it is `A | B`, however spelt."""
    return get_origin(tp) in (Union, types.UnionType)


def members(tp: Any) -> tuple[Any, ...]:
    """The members of a union without `Absent`, or the type alone."""
    found = get_args(tp) if is_union(tp) else (tp,)
    return tuple(member for member in found if member is not Absent)


def present(tp: Any) -> Any:
    """The type of a value that is there."""
    found = members(tp)
    return found[0] if len(found) == 1 else Union[found]  # noqa: UP007 - a tuple of members


def attributes(cls: Any) -> tuple[attrs.Attribute[Any], ...]:
    """The attributes of a payload class, their annotations resolved."""
    attrs.resolve_types(cls)
    found: tuple[attrs.Attribute[Any], ...] = attrs.fields(cls)
    return found


def known_names(cls: Any) -> frozenset[str]:
    """The names on the wire that the class declares, whatever revision has them."""
    return frozenset(wire_name(attribute) for attribute in attrs.fields(cls) if attribute.name != EXTRA)


def tag_of(cls: type) -> tuple[str, str] | None:
    """The member that tells this class from others, and its value."""
    for attribute in attributes(cls):
        values = get_args(attribute.type) if get_origin(attribute.type) is Literal else ()
        if len(values) == 1:
            return wire_name(attribute), values[0]
    return None
