"""Shared `__eq__`, `__hash__` and `__repr__` for many classes, instead of a set that attrs compiles for each.

Compiling these methods takes attrs longer than everything else it does for a class, and adds to the start of every
program. attrs keeps methods that a class already has, so these decorators go below it: `@attrs.frozen` above
`@valued`, `@attrs.define` above `@shown`. A class that is compared by identity uses neither (`eq=False, repr=False`).
"""

from __future__ import annotations

from reprlib import recursive_repr
from typing import Any, TypeVar

T = TypeVar("T")


def valued(cls: type[T]) -> type[T]:
    """Make a class that attrs will freeze a value: equality, hash and repr follow from its fields."""
    cls.__eq__ = _eq  # type: ignore[method-assign]  # set before attrs processes the class, so that it keeps these
    cls.__hash__ = _hash  # type: ignore[method-assign]  # as above
    return shown(cls)


def shown(cls: type[T]) -> type[T]:
    """Make the repr of a class show its fields, except those declared with `repr=False`."""
    cls.__repr__ = _repr  # type: ignore[method-assign]  # as above
    return cls


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
