"""Classes that attrs completes at their first use: like attrs' own, only later."""

from __future__ import annotations

import abc
import copy
import inspect
import pickle
import subprocess
import sys
import weakref
from typing import Any, ClassVar, Generic, TypeVar

import attrs
import pytest

from trimcp.support.slotted import slotted, valued
from trimcp.wire.jsonrpc import ErrorResponse, Request

T = TypeVar("T")


class Base(abc.ABC, Generic[T]):
    __slots__ = ("__weakref__",)

    @abc.abstractmethod
    def name(self) -> str:
        return "base"


@slotted
class Actor(Base[int]):
    kind: ClassVar = "actor"
    size: int
    items: list[int] = attrs.field(factory=list)
    _seen: int = attrs.field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self._seen = self.size

    def name(self) -> str:
        return f"{super().name()} {self._seen}"

    @property
    def above(self) -> str:
        return super().name()

    @classmethod
    def made(cls) -> Any:
        return super().__new__(cls)


@slotted(kw_only=True)
class Larger(Actor):
    size: int
    more: str = "x"


@slotted(frozen=True)
@valued
class Value:
    a: int
    b: str = "b"


def is_complete(cls: type) -> bool:
    return isinstance(vars(cls).get("__attrs_attrs__"), tuple)


def test_a_class_is_completed_by_its_first_object() -> None:
    @slotted
    class Fresh:
        a: int

    before: type = Fresh
    assert not is_complete(Fresh)
    assert Fresh(1).a == 1
    assert is_complete(Fresh)
    assert Fresh is before
    assert type(Fresh(2)) is before


@pytest.mark.parametrize("ask", [attrs.fields, inspect.signature, lambda cls: cls.__match_args__])
def test_a_class_is_completed_by_who_asks_for_its_fields(ask: Any) -> None:
    @slotted(frozen=True)
    class Fresh:
        a: int
        b: str = "b"

    found = ask(Fresh)
    assert is_complete(Fresh)
    names = list(found.parameters) if isinstance(found, inspect.Signature) else [getattr(f, "name", f) for f in found]
    assert names == ["a", "b"]
    assert ask(Fresh) == found


def test_it_has_slots_defaults_and_methods() -> None:
    actor = Actor(3)
    assert not hasattr(actor, "__dict__")
    assert weakref.ref(actor)() is actor
    assert actor.items == []
    assert actor.items is not Actor(3).items
    assert actor.kind == "actor"
    assert (actor.name(), actor.above) == ("base 3", "base")
    assert type(Actor.made()) is Actor
    with pytest.raises(AttributeError):
        actor.other = 1
    with pytest.raises(TypeError, match="size"):
        Actor()
    assert not inspect.isabstract(Actor)


def test_a_subclass_adds_to_it() -> None:
    larger = Larger(size=1, more="y")
    assert (larger.size, larger.items, larger.more, larger.name()) == (1, [], "y", "base 1")
    assert not hasattr(larger, "__dict__")
    assert Larger.__slots__ == ("more",)  # written at run time
    assert [field.name for field in attrs.fields(Larger)] == ["items", "_seen", "size", "more"]


@slotted(frozen=True)
@valued
class Three(Value):
    c: int = 0


def test_a_frozen_one_is_a_value() -> None:
    value = Value(1)
    assert value == Value(1, "b") != Value(2)
    assert len({value, Value(1)}) == 1
    assert repr(value) == "Value(a=1, b='b')"
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        value.a = 2
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        del value.a
    assert copy.deepcopy(value) == value
    assert Three(1, "b", 2).c == 2
    assert attrs.evolve(value, a=3) == Value(3)
    match value:
        case Value(a, b):
            assert (a, b) == (1, "b")


def test_a_value_is_unpickled_where_its_class_was_never_used() -> None:
    pickled = pickle.dumps([ErrorResponse(1, -32603, "x"), Request(1, "ping")])
    program = f"import pickle; print(pickle.loads({pickled!r}))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (run.stdout.strip(), run.stderr) == (str(pickle.loads(pickled)), "")


def test_what_changes_is_no_key() -> None:
    assert Request(1, "ping") == Request(1, "ping")
    with pytest.raises(TypeError, match="unhashable"):
        hash(Request(1, "ping"))


def test_an_init_of_its_own_stays() -> None:
    @slotted
    class Own:
        a: int

        def __init__(self) -> None:
            self.a = 5

    assert Own().a == 5
    assert [field.name for field in attrs.fields(Own)] == ["a"]
    assert Own().a == 5


def test_the_first_value_may_be_made_by_fields_of_any_name() -> None:
    @slotted
    class Held:
        value: int
        fields: str

    held: Any = Held(value=1, fields="x")
    assert (held.value, held.fields) == (1, "x")
