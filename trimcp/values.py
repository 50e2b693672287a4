"""How objects are compared, hashed and shown: three functions that serve every class that wants them.

attrs would write and compile its own for each class, which takes longer than all the rest it does, and whoever
starts a program waits for every class it loads. It leaves alone what a class has already, so these go below it:
`@attrs.frozen` above `@valued`, `@attrs.define` above `@shown`. An actor wants neither (`eq=False, repr=False`).
"""

from __future__ import annotations

from reprlib import recursive_repr
from typing import Any, TypeVar

T = TypeVar("T")


def valued(cls: type[T]) -> type[T]:
    """Make a class that attrs will freeze one of values: they are equal, hash alike and look alike by their members."""
    cls.__eq__ = _eq  # type: ignore[method-assign]  # before attrs freezes the class, so it keeps these
    cls.__hash__ = _hash  # type: ignore[method-assign]  # as above
    return shown(cls)


def shown(cls: type[T]) -> type[T]:
    """Let objects of a class show their members, except those that attrs was told not to (`repr=False`)."""
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
