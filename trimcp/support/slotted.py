"""Declares classes with slots that attrs completes once they are used often: `@slotted` instead of `@attrs.define`.

A server has a hundred classes and has met a third of them when it gives its first answer. attrs writes and compiles an
`__init__` for each, in a fifth of a millisecond: that was a tenth of the start. Most of them have one object, such as a
server's registry or its only session. So the first objects of a class are filled field by field, which takes a
hundredth of a millisecond each, and attrs sees the class when there are more. `trimcp.wire.fields.wire` leaves payloads
to attrs at their first use; they have no slots.

`__eq__`, `__hash__` and `__repr__` are shared by many classes (`@valued`, `@shown`), instead of a set that attrs
compiles for each, which takes longer than everything else it does. attrs keeps methods that a class already has, so
these decorators go below it: `@attrs.frozen` above `@valued`, `@attrs.define` above `@shown`. A class that is compared
by identity uses neither (`eq=False, repr=False`).

`@forwarding`, below those of attrs, is for a class around an object of the same kind.
"""

from __future__ import annotations

from abc import update_abstractmethods
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from reprlib import recursive_repr
from threading import RLock
from types import FunctionType
from typing import Any, Final, TypeVar, dataclass_transform, overload

import attrs
from attrs.exceptions import FrozenInstanceError

T = TypeVar("T")


@overload
@dataclass_transform(eq_default=False, field_specifiers=(attrs.field,))
def slotted(cls: type[T], /) -> type[T]: ...
@overload
@dataclass_transform(eq_default=False, field_specifiers=(attrs.field,))
def slotted(*, frozen: bool = ..., kw_only: bool = ...) -> Callable[[type[T]], type[T]]: ...
def slotted(cls: type[T] | None = None, /, *, frozen: bool = False, kw_only: bool = False) -> Any:
    """Make a class one with slots and an `__init__`, as `@attrs.define(eq=False, repr=False)` does.

    Its own comparison, hash and repr stay: `@valued` and `@shown` go below it.

    If it is `frozen` its attributes cannot be set, and its subclasses say so too.
    """

    def decorate(cls: type[T]) -> type[T]:
        made: type[T] = _Incomplete(cls, {"frozen": frozen, "kw_only": kw_only}).cls
        return made

    return decorate if cls is None else decorate(cls)


class CompletedLater:
    """A class of which attrs writes the methods at its first use."""

    __slots__ = ("cls",)
    lock: Final = RLock()  # the first use may be in a handler's thread
    cls: Any

    def complete(self) -> None:
        """Have attrs write the methods, unless it has."""

    def own_fields(self) -> list[Any] | None:
        """Return the fields that the class adds to its bases, if they can be known without attrs."""
        return None

    def first_init(self) -> Callable[..., None]:
        def __init__(value: Any, /, *args: Any, **fields: Any) -> None:  # noqa: N807 - until attrs replaces it
            self.complete()
            self.cls.__init__(value, *args, **fields)

        return __init__


class _Incomplete(CompletedLater):
    """A class that has its slots, and will be completed with what attrs writes."""

    __slots__ = ("_fields", "_filled", "_options", "_raw")

    def __init__(self, raw: Any, options: dict[str, Any]) -> None:
        self._raw: Any = raw
        self._options = options
        self._fields: list[Any] | None = None  # once the first object asked for them
        self._filled = 0
        body = dict(vars(raw))
        fields = _names_of_fields(raw)
        for name in (*fields, "__dict__", "__weakref__"):
            body.pop(name, None)
        inherited: set[str] = set()
        for base in raw.__mro__[1:]:
            inherited.update(vars(base), vars(base).get("__slots__", ()))
        body["__slots__"] = tuple(name for name in (*fields, "__weakref__") if name not in inherited)
        if options["frozen"]:
            body["__setattr__"] = body["__delattr__"] = _refuse
            body.setdefault("__setstate__", _set_state)
        elif "__eq__" in body:
            body["__hash__"] = None  # a value that changes is no key, as attrs has it
        body.update({name: OnAsking(name, self) for name in _ASKED})
        if "__init__" not in body:
            body["__init__"] = self.first_init()
        self.cls = type(raw)(raw.__name__, raw.__bases__, body)
        _rebind(body.values(), raw, self.cls)

    def first_init(self) -> Callable[..., None]:
        def __init__(value: Any, /, *args: Any, **given: Any) -> None:  # noqa: N807 - until attrs replaces it
            if not self._fill(value, args, given):
                self.complete()
                self.cls.__init__(value, *args, **given)

        return __init__

    def _fill(self, value: Any, args: tuple[Any, ...], given: dict[str, Any]) -> bool:
        """Set an object's fields as the `__init__` of attrs would, unless only that can: then return False."""
        fields = None if self._filled == _FEW else self.fields()
        members = None if fields is None else _members_given(fields, args, given)
        if fields is None or members is None:
            return False
        self._filled += 1
        for field in fields:
            if field.name in members:
                member = members[field.name]
            elif field.default is attrs.NOTHING:
                continue
            else:
                member = field.default
                if isinstance(member, attrs.Factory):  # type: ignore[arg-type]  # a class, which its stub calls a function
                    member = member.factory(value) if member.takes_self else member.factory()
            object.__setattr__(value, field.name, member if field.converter is None else field.converter(member))
        if hasattr(value, "__attrs_post_init__"):
            value.__attrs_post_init__()
        return True

    def fields(self) -> list[Any] | None:
        """Return all fields in the order of attrs, with its names for what they are. None: only attrs can set them."""
        if self._fields is None and _READABLE and (raw := self._raw) is not None:
            found: dict[str, Any] = {}
            for cls in reversed(raw.__mro__):
                own = self.own_fields() if cls is raw else _own_fields(cls)
                if own is None or not all(map(_is_plain, own)):
                    return None
                for field in own:
                    found.pop(field.name, None)  # its place is where it was declared last
                    found[field.name] = field
            self._fields = list(found.values())
        return self._fields

    def own_fields(self) -> list[Any] | None:
        raw, kw_only = self._raw, self._options["kw_only"]
        if raw is None:  # meanwhile, in another thread
            return _own_fields(self.cls)
        return [_DeclaredField(name, vars(raw).get(name, attrs.NOTHING), kw_only) for name in _names_of_fields(raw)]

    def complete(self) -> None:
        """Have attrs write its methods for a class of its own, and take them: they fit every class with these slots."""
        with self.lock:
            if self._raw is None:
                return
            # attrs would make a class anew to give it slots; its `__init__` needs to know of them in a frozen one only.
            slots = self._options["frozen"]
            written = vars(attrs.define(self._raw, eq=False, repr=False, slots=slots, **self._options))
            for name in _WRITTEN:
                if name in written:
                    setattr(self.cls, name, written[name])
            del self.cls.__signature__  # that of its `__init__` is read instead
            self._raw = self._fields = None


class _DeclaredField:
    """One field of a class that attrs has not seen yet, with the names that an attribute of attrs has."""

    __slots__ = ("alias", "converter", "default", "init", "kw_only", "name", "validator")

    def __init__(self, name: str, declared: Any, kw_only: bool) -> None:
        self.name = name
        self.default, self.init, self.kw_only = declared, True, kw_only
        self.alias = name.lstrip("_")
        self.validator = self.converter = None
        if type(declared) is _DECLARED:
            self.default, self.init = declared._default, declared.init
            self.kw_only = kw_only or bool(declared.kw_only)
            self.alias = declared.alias or self.alias
            self.validator, self.converter = declared._validator, declared.converter


def _own_fields(cls: type) -> list[Any] | None:
    declared = vars(cls).get("__attrs_attrs__", ())
    if type(declared) is OnAsking:
        return declared.later.own_fields()
    return [attribute for attribute in declared if not attribute.inherited]


def _is_plain(field: Any) -> bool:
    return field.validator is None and not isinstance(field.converter, attrs.Converter)


def _names_of_fields(raw: type) -> list[str]:
    return [name for name, hint in vars(raw).get("__annotations__", {}).items() if "ClassVar" not in str(hint)]


def _members_given(fields: list[Any], args: tuple[Any, ...], given: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments by the names of their fields. None if they do not fit: attrs says what is wrong."""
    members: dict[str, Any] = {}
    if args:
        by_position = [field.name for field in fields if field.init and not field.kw_only]
        members = dict(zip(by_position, args, strict=False))
    for field in fields:
        if field.init and field.alias in given and field.name not in members:
            members[field.name] = given[field.alias]
        elif field.init and field.default is attrs.NOTHING and field.name not in members:
            return None
    return members if len(members) == len(args) + len(given) else None


class OnAsking:
    """An attribute of a class that is not complete yet: to ask for it completes the class."""

    __slots__ = ("_name", "later")

    def __init__(self, name: str, later: CompletedLater) -> None:
        self._name = name
        self.later = later

    def __get__(self, value: Any, owner: type) -> Any:
        self.later.complete()
        return getattr(owner, self._name)


_FEW: Final = 8
"""How many objects of a class are filled before attrs sees it: as many take less than what attrs takes once."""
_DECLARED: Final = type(attrs.field())
_READABLE: Final = hasattr(_DECLARED, "_default") and hasattr(_DECLARED, "_validator")
"""Whether attrs keeps there what `attrs.field` was given, as no version of it promises."""
_ASKED: Final = ("__attrs_attrs__", "__match_args__", "__signature__")
_WRITTEN: Final = ("__init__", "__attrs_attrs__", "__match_args__", "__attrs_props__")


def _refuse(value: Any, *_: Any) -> None:
    raise FrozenInstanceError


def _set_state(value: Any, state: tuple[None, dict[str, Any]]) -> None:
    """Take what pickle and copy read from the slots. The class may be incomplete: unpickling calls no `__init__`."""
    for name, member in state[1].items():
        object.__setattr__(value, name, member)


def _rebind(members: Iterable[Any], raw: type, cls: type) -> None:
    """Let methods that say `super()` mean the class with slots, not the one that they were written in."""
    for member in members:
        function = member
        if type(function) is not FunctionType:
            function = getattr(member, "__func__", None) or getattr(member, "fget", None)
            if type(function) is not FunctionType:
                continue
        if function.__closure__ is not None:
            for cell in function.__closure__:
                if cell.cell_contents is raw:
                    cell.cell_contents = cls


def evolved(value: T, **members: Any) -> T:
    """Return a value of a class of attrs with these members in place of its own, as `attrs.evolve` does.

    For classes that a decorator of ours declares, which type checkers do not know as classes of attrs.
    """
    attributes: Any = value
    changed: T = attrs.evolve(attributes, **members)
    return changed


def valued(cls: type[T]) -> type[T]:
    """Make a class that attrs will freeze a value: equality, hash and repr follow from its fields."""
    cls.__eq__ = _eq  # type: ignore[method-assign]  # set before attrs processes the class, so that it keeps these
    cls.__hash__ = _hash  # type: ignore[method-assign]  # as above
    return shown(cls)


def shown(cls: type[T]) -> type[T]:
    """Make the repr of a class show its fields, except those declared with `repr=False`."""
    cls.__repr__ = _repr  # type: ignore[method-assign]  # as above
    return cls


def forwarding(to: str, base: type) -> Callable[[type[T]], type[T]]:
    """Return a decorator: what a class does not define of this base is that of the object in its attribute `to`."""

    def decorate(cls: type[T]) -> type[T]:
        for name in dir(base):
            if not name.startswith("_") and name not in vars(cls):
                setattr(cls, name, property(attrgetter(f"{to}.{name}"), partial(_set_there, to, name)))
        return update_abstractmethods(cls)

    return decorate


def _set_there(to: str, name: str, value: Any, member: Any) -> None:
    setattr(getattr(value, to), name, member)


def _members(self: Any) -> tuple[Any, ...]:
    return tuple([getattr(self, attribute.name) for attribute in self.__attrs_attrs__])


def _eq(self: Any, other: object) -> bool:
    return _members(self) == _members(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash((type(self), _members(self)))


@recursive_repr("...")
def _repr(self: Any) -> str:
    names = [attribute.name for attribute in self.__attrs_attrs__ if attribute.repr]
    return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"
