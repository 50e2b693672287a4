"""Declares classes with slots that attrs completes at their first use: `@slotted` instead of `@attrs.define`.

A server has a hundred classes and has met a third of them when it gives its first answer. attrs writes and compiles an
`__init__` for each, in a fifth of a millisecond: that was a tenth of the start. `trimcp.wire.fields.wire` does the same
for payloads, which have no slots.

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

    def first_init(self) -> Callable[..., None]:
        def __init__(value: Any, /, *args: Any, **fields: Any) -> None:  # noqa: N807 - until attrs replaces it
            self.complete()
            self.cls.__init__(value, *args, **fields)

        return __init__


class _Incomplete(CompletedLater):
    """A class that has its slots, and will be completed with what attrs writes."""

    __slots__ = ("_options", "_raw")

    def __init__(self, raw: Any, options: dict[str, Any]) -> None:
        self._raw: Any = raw
        self._options = options
        body = dict(vars(raw))
        fields = [name for name, hint in body.get("__annotations__", {}).items() if "ClassVar" not in str(hint)]
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
            self._raw = None


class OnAsking:
    """An attribute of a class that is not complete yet: to ask for it completes the class."""

    __slots__ = ("_later", "_name")

    def __init__(self, name: str, later: CompletedLater) -> None:
        self._name = name
        self._later = later

    def __get__(self, value: Any, owner: type) -> Any:
        self._later.complete()
        return getattr(owner, self._name)


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
