"""How a payload class is written and read: `@wire` for the class, `field(...)` for a member that some revisions lack.

A payload's members are JSON primitives, open JSON, `Literal`s, lists, dicts, payloads and unions of those. How they
are loaded and dumped is the converter's business.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from enum import Enum
from threading import RLock
from typing import Any, Final, Literal, NoReturn, TypeVar, Union, dataclass_transform, get_args, get_origin, overload

import attrs

from trimcp.values import valued
from trimcp.wire.revisions import OLDEST, Revision

T = TypeVar("T")


class Absent(Enum):
    """The type of `ABSENT`, for annotations: `title: str | Absent`."""

    ABSENT = ...  # a value no JSON encoder accepts: one that slipped through must fail, not become a string

    def __bool__(self) -> Literal[False]:
        return False

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = Absent.ABSENT
"""The member is not there, as opposed to being null. False in conditions; compare it with `is`."""


@attrs.frozen
@valued
class _Span:
    since: Revision = OLDEST
    until: Revision | None = None

    def exists_at(self, revision: Revision) -> bool:
        return self.since <= revision and (self.until is None or revision < self.until)


@attrs.frozen
@valued
class FieldFacts(_Span):
    """The arguments of `field()` that say when and how one member exists."""

    required_from: Revision | None = None
    name: str | None = None
    narrow_until: Revision | None = None
    narrow: Callable[[Any], Any] | None = None

    def required_at(self, revision: Revision) -> bool:
        return self.required_from is not None and self.required_from <= revision

    def narrowed_at(self, revision: Revision) -> bool:
        return self.narrow_until is not None and revision < self.narrow_until


@attrs.frozen
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
    """One member of a payload that needs more than a name and a type.

    A member that some revision lacks must have a default; one without is required in every revision.

    Args:
        default: the value when nobody gives one; `ABSENT` for a member that may be missing.
        factory: makes that value, where it is mutable.
        kw_only: only by keyword.
        since: the first revision that has it.
        until: the first revision that no longer has it.
        required: it has a default for us who write it, but a peer must send it, in every revision.
        required_from: the same, from that revision on.
        name: its name on the wire, where camelCase of ours is not it.
        narrow_until: the first revision in which every value is allowed ...
        narrow: ... and what an older peer gets instead: the value itself where it was allowed before, or another,
            or `ABSENT` to leave it out. From an older peer, only what passes unchanged is accepted.
    """
    metadata: dict[str, FieldFacts] = {}
    given = (since, until, OLDEST if required else required_from, name, narrow_until, narrow)
    if given != _DEFAULTS:
        metadata[_KEY] = FieldFacts(*given)
    if factory is not None:
        return attrs.field(factory=factory, kw_only=kw_only, metadata=metadata)
    return attrs.field(default=default, kw_only=kw_only, metadata=metadata)


def facts_of(attribute: attrs.Attribute[Any]) -> FieldFacts:
    """The facts that `field()` recorded for this attribute, or the defaults."""
    facts: FieldFacts = attribute.metadata.get(_KEY, _PLAIN)
    return facts


def wire_name(attribute: attrs.Attribute[Any]) -> str:
    """The member's name on the wire: as given, `_meta` for `meta`, camelCase otherwise."""
    given = facts_of(attribute).name
    if given is not None:
        return given
    if attribute.name == "meta":
        return "_meta"
    head, *rest = attribute.name.split("_")
    return head + "".join(part.capitalize() for part in rest)


def _repr(self: Any) -> str:
    members = [(attribute.name, getattr(self, attribute.name)) for attribute in self.__attrs_attrs__]
    shown = ", ".join(f"{name}={member!r}" for name, member in members if member is not ABSENT)
    return f"{type(self).__name__}({shown})"


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
    """Make a class a payload: a frozen attrs value that the converter knows how to load and dump.

    attrs gets to see the class at its first use, see `_Raw`.

    Args:
        since: the first revision that has it; older peers never see it.
        until: the first revision that no longer has it.
        instead: makes what an older peer gets in its place, which its revision has; None where it gets nothing.
    """

    def decorate(cls: type[T]) -> type[T]:
        valued(cls)
        cls.__repr__ = _repr  # type: ignore[method-assign]  # before attrs makes the class, so it keeps it
        cls.__wire__ = WireFacts(since, until, instead)  # type: ignore[attr-defined]  # the mark of a payload
        _Raw(cls)
        return cls

    return decorate if cls is None else decorate(cls)


class _Raw:
    """A payload class that attrs has not seen yet.

    There are more than a hundred, attrs needs half a millisecond for each, and a program meets a few of them. So
    whoever first makes an object or asks for the attributes has the class finished. It stays the same class, which is
    why it has no slots: those would take another one.
    """

    __slots__ = ("_cls",)
    _lock: Final = RLock()  # a handler's thread may be the first

    def __init__(self, cls: Any) -> None:
        self._cls: Any = cls
        raw = self

        def __init__(self: Any, *args: Any, **members: Any) -> None:  # noqa: N807 - it stands for attrs' own
            raw._finish()
            cls.__init__(self, *args, **members)

        cls.__init__ = __init__
        cls.__attrs_attrs__ = raw

    def __get__(self, payload: Any, _: type) -> Any:
        self._finish()
        return self._cls.__attrs_attrs__

    def _finish(self) -> None:
        with self._lock:
            if vars(self._cls)["__attrs_attrs__"] is self:
                attrs.frozen(self._cls, init=True, slots=False)


CHOOSERS: Final[dict[frozenset[Any], Callable[[dict[str, Any]], Any]]] = {}


def chooses(*members: Any) -> Callable[[Callable[[dict[str, Any]], Any]], Callable[[dict[str, Any]], Any]]:
    """Register a function that finds out which of these classes a JSON object is, where the schema gives them no tag.

    The function gets the object and returns one of the classes, or None if it is none of them.
    """

    def register(choose: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
        CHOOSERS[frozenset(members)] = choose
        return choose

    return register


# What the annotations mean

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


class Problem(Exception):
    """One problem; its place is added by those who load or dump what is around it."""


class Unsupported(Problem):
    """Something that the revision does not have."""


class TooNew(Unsupported):
    """A kind of content that the revision lacks, which a list may leave out."""


def wrong_type(wanted: str, value: Any) -> NoReturn:
    """Report a value of the wrong JSON type."""
    raise Problem(f"must be {wanted}, not {JSON_NAMES.get(type(value), type(value).__name__)}")


def too_new(cls: type, revision: Revision) -> Callable[..., NoReturn]:
    """A hook for a class that the revision lacks."""

    def refuse(*_: Any) -> NoReturn:
        raise TooNew(f"{cls.__name__} does not exist in revision {revision}")

    return refuse


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


def attributes(cls: Any) -> tuple[attrs.Attribute[Any], ...]:
    """The attributes of a payload class, their annotations resolved."""
    attrs.resolve_types(cls)
    found: tuple[attrs.Attribute[Any], ...] = attrs.fields(cls)
    return found


def known_names(cls: Any) -> frozenset[str]:
    """The names on the wire that the class declares, whatever revision has them."""
    return frozenset(wire_name(attribute) for attribute in attrs.fields(cls) if attribute.name != EXTRA)
