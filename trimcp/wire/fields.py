"""Declares payload classes: `@wire` for the class, `field(...)` for a member that some revisions lack.

A payload's members are JSON primitives, open JSON, `Literal`s, lists, dicts, payloads and unions of those. The
converter loads and dumps them.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from enum import Enum
from typing import Any, Final, Literal, NoReturn, TypeVar, Union, dataclass_transform, get_args, get_origin, overload

import attrs

from trimcp.support.slotted import CompletedLater, OnAsking, slotted, valued
from trimcp.wire.revisions import OLDEST, Revision

T = TypeVar("T")


class Absent(Enum):
    """The type of `ABSENT`."""

    ABSENT = ...  # a value no JSON encoder accepts: dumped by mistake, it must fail and not become a string

    def __bool__(self) -> Literal[False]:
        return False

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = Absent.ABSENT
"""Structured content is missing, as opposed to null. False in conditions; compare it with `is`.

Every other member that is missing is None: for it, null means the same.
"""


@slotted(frozen=True)
@valued
class _Span:
    since: Revision = OLDEST
    until: Revision | None = None

    def exists_at(self, revision: Revision) -> bool:
        return self.since <= revision and (self.until is None or revision < self.until)


@slotted(frozen=True)
@valued
class FieldFacts(_Span):
    """The arguments of `field()`: the name of one member, and the revisions that have it."""

    required_from: Revision | None = None
    name: str | None = None
    narrow_until: Revision | None = None
    narrow: Callable[[Any], Any] | None = None

    def required_at(self, revision: Revision) -> bool:
        return self.required_from is not None and self.required_from <= revision

    def narrowed_at(self, revision: Revision) -> bool:
        return self.narrow_until is not None and revision < self.narrow_until


@slotted(frozen=True)
@valued
class WireFacts(_Span):
    """The arguments of `@wire` for one class: the revisions that have it."""

    instead: Callable[[Any], Any] | None = None


_PLAIN: Final = FieldFacts()
_DEFAULTS: Final = (OLDEST, None, None, None, None, None)
_KEY: Final = "trimcp.wire"


def field(
    *,
    default: Any = attrs.NOTHING,
    factory: Callable[[], Any] | None = None,
    kw_only: bool = False,
    since: Revision = OLDEST,
    until: Revision | None = None,
    required: bool = False,
    required_from: Revision | None = None,
    name: str | None = None,
    narrow_until: Revision | None = None,
    narrow: Callable[[Any], Any] | None = None,
) -> Any:
    """Declare a member of a payload that needs more than a name and a type.

    A member that some revision lacks must have a default. A member without a default is required in every revision.

    Args:
        factory: returns the default value, if it is mutable.
        since: the first revision that has it.
        until: the first revision that no longer has it.
        required: it has a default when we create it, but a peer must send it, in every revision.
        required_from: the same, from that revision on.
        name: its name on the wire, if that is not the camelCase of ours.
        narrow_until: the first revision in which every value is allowed ...
        narrow: ... and a function that returns the value for an older peer: the same one if it was allowed before, or
            another one, or `ABSENT` to omit it. From an older peer, only values that it does not change are accepted.
    """
    metadata: dict[str, FieldFacts] = {}
    given = (since, until, OLDEST if required else required_from, name, narrow_until, narrow)
    if given != _DEFAULTS:
        metadata[_KEY] = FieldFacts(*given)
    if factory is not None:
        return attrs.field(factory=factory, kw_only=kw_only, metadata=metadata)
    return attrs.field(default=default, kw_only=kw_only, metadata=metadata)


def facts_of(attribute: attrs.Attribute[Any]) -> FieldFacts:
    """Return the facts that `field()` recorded for this attribute, or the defaults."""
    facts: FieldFacts = attribute.metadata.get(_KEY, _PLAIN)
    return facts


def wire_name(attribute: attrs.Attribute[Any]) -> str:
    """Return the member's name on the wire: the declared one, `_meta` for `meta`, camelCase otherwise."""
    given = facts_of(attribute).name
    if given is not None:
        return given
    if attribute.name == "meta":
        return "_meta"
    head, *rest = attribute.name.split("_")
    return head + "".join(part.capitalize() for part in rest)


def _repr(self: Any) -> str:
    members = [(attribute, getattr(self, attribute.name)) for attribute in self.__attrs_attrs__]
    missing = (None, ABSENT)
    shown = [f"{a.name}={v!r}" for a, v in members if not (v is a.default and any(v is each for each in missing))]
    return f"{type(self).__name__}({', '.join(shown)})"


@overload
@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def wire(cls: type[T], /) -> type[T]: ...
@overload
@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def wire(
    *, since: Revision = ..., until: Revision | None = ..., instead: Callable[[Any], Any] | None = ...
) -> Callable[[type[T]], type[T]]: ...
def wire(
    cls: type[T] | None = None,
    /,
    *,
    since: Revision = OLDEST,
    until: Revision | None = None,
    instead: Callable[[Any], Any] | None = None,
) -> Any:
    """Make a class a payload: a frozen attrs class that the converter can load and dump.

    attrs processes the class at its first use, see `_Raw`.

    Args:
        since: the first revision that has it; it is not sent to older peers.
        until: the first revision that no longer has it.
        instead: returns a substitute for an older peer, which its revision has, or None to send nothing.
    """

    def decorate(cls: type[T]) -> type[T]:
        valued(cls)
        cls.__repr__ = _repr  # type: ignore[method-assign]  # before attrs makes the class, so it keeps it
        cls.__wire__ = WireFacts(since, until, instead)  # type: ignore[attr-defined]  # marks a payload class
        _Raw(cls)
        return cls

    return decorate if cls is None else decorate(cls)


class _Raw(CompletedLater):
    """A payload class that attrs has not processed yet.

    There are more than a hundred, attrs needs half a millisecond for each, and a program uses few of them. So a class
    is completed when the first object is created or its attributes are read. It stays the same class object, so it
    cannot have slots: for those, attrs creates a new class.
    """

    __slots__ = ()

    def __init__(self, cls: Any) -> None:
        self.cls = cls
        cls.__init__ = self.first_init()
        cls.__attrs_attrs__ = OnAsking("__attrs_attrs__", self)
        cls.__signature__ = OnAsking("__signature__", self)

    def complete(self) -> None:
        with self.lock:
            if type(vars(self.cls)["__attrs_attrs__"]) is OnAsking:
                attrs.frozen(self.cls, init=True, slots=False)
                del self.cls.__signature__  # that of its `__init__` is read instead


CHOOSERS: Final[dict[frozenset[Any], Callable[[dict[str, Any]], Any]]] = {}


def chooses(*members: Any) -> Callable[[Callable[[dict[str, Any]], Any]], Callable[[dict[str, Any]], Any]]:
    """Register a function that chooses between these classes for a JSON object, if the schema gives them no tag.

    The function gets the object and returns one of the classes, or None if it is none of them.
    """

    def register(choose: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
        CHOOSERS[frozenset(members)] = choose
        return choose

    return register


# Reading the annotations

EXTRA: Final = "extra"
"""The attribute for undeclared members, if the schema is open."""

JSON_NAMES: Final[dict[type, str]] = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    type(None): "null",
}


class Problem(Exception):
    """One problem. The code that loads or dumps the enclosing value adds its place."""


class Unsupported(Problem):
    """Something that the revision does not have."""


class TooNew(Unsupported):
    """A content type that the revision lacks, which may be omitted from a list."""


def wrong_type(wanted: str, value: Any) -> NoReturn:
    """Raise for a value of the wrong JSON type."""
    raise Problem(f"must be {wanted}, not {JSON_NAMES.get(type(value), type(value).__name__)}")


def too_new(cls: type, revision: Revision) -> Callable[..., NoReturn]:
    """Return a hook for a class that the revision lacks."""

    def refuse(*_: Any) -> NoReturn:
        raise TooNew(f"{cls.__name__} does not exist in revision {revision}")

    return refuse


def is_payload(tp: Any) -> bool:
    """Return whether it is a class made with `@wire`."""
    return isinstance(tp, type) and hasattr(tp, "__wire__")


def is_of_payloads(tp: Any) -> bool:
    """Return whether it is a payload class or a list of one, so that its hooks are worth making at first use only."""
    return is_payload(tp) or (get_origin(tp) is list and is_payload(get_args(tp)[0]))


def is_union(tp: Any) -> bool:
    """Return whether it is `A | B`, in any notation."""
    return get_origin(tp) in (Union, types.UnionType)


def members(tp: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    return get_args(tp) if is_union(tp) else (tp,)


def member_types(attribute: attrs.Attribute[Any]) -> tuple[Any, ...]:
    """Return the types that an attribute's member has on the wire: without None, if that says that it is missing."""
    found = members(attribute.type)
    return tuple(kind for kind in found if kind is not type(None)) if attribute.default is None else found


def attributes(cls: Any) -> tuple[attrs.Attribute[Any], ...]:
    """Return the attributes of a payload class, with resolved annotations."""
    attrs.resolve_types(cls)
    found: tuple[attrs.Attribute[Any], ...] = attrs.fields(cls)
    return found


def known_names(cls: Any) -> frozenset[str]:
    """Return the wire names of all members that the class declares, in any revision."""
    return frozenset(wire_name(attribute) for attribute in attrs.fields(cls) if attribute.name != EXTRA)
