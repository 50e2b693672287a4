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

from trimcp.support.slotted import _FEW, slotted, valued
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


def test_a_class_is_completed_when_it_has_more_than_a_few_objects() -> None:
    @slotted
    class Fresh:
        a: int

    before: type = Fresh
    assert [Fresh(number).a for number in range(_FEW)] == [*range(_FEW)]
    assert not is_complete(Fresh)
    assert Fresh(99).a == 99
    assert is_complete(Fresh)
    assert Fresh is before
    assert type(Fresh(2)) is before


def test_a_class_is_completed_by_its_first_object_if_fields_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where attrs keeps what `attrs.field` was given is its own affair: a version may keep it elsewhere."""
    monkeypatch.setattr("trimcp.support.slotted._READABLE", False)

    @slotted
    class Fresh:
        a: int = attrs.field(default=3)

    assert Fresh().a == 3
    assert is_complete(Fresh)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_first_objects_are_like_the_later_ones(frozen: bool) -> None:
    def doubled(value: Any) -> Any:
        return value * 2

    @slotted(frozen=frozen)
    class Base:
        first: int
        _second: str = "b"
        moved: int = 0

    @slotted(frozen=frozen)
    class Fresh(Base):
        moved: int = 5
        third: list[int] = attrs.field(factory=list)
        renamed: int = attrs.field(default=4, alias="called", kw_only=True)
        fourth: int = attrs.field(default=6, converter=doubled)
        fifth: int = attrs.field(init=False, default=attrs.Factory(lambda value: value.first + 1, takes_self=True))
        unset: int = attrs.field(init=False)

    calls: list[tuple[Any, Any]] = [
        ((1,), {}),
        ((1, "x", 7, [8], 9), {"called": 10}),
        ((), {"first": 1, "second": "y", "fourth": 3}),
    ]

    def made() -> list[list[Any]]:
        names = ("first", "_second", "moved", "third", "renamed", "fourth", "fifth")
        values = [Fresh(*args, **given) for args, given in calls]
        return [[getattr(value, name) for name in names] for value in values]

    before = made()
    assert not is_complete(Fresh)
    assert not is_complete(Base)
    attrs.fields(Fresh)
    assert is_complete(Fresh)
    assert made() == before
    assert before[1] == [1, "x", 7, [8], 10, 18, 2]
    assert not hasattr(Fresh(1), "unset")


@pytest.mark.parametrize("args", [(), (1, 2, 3), (1, {"a": 2}), (1, {"c": 2}), ({"_b": 2},)])
def test_wrong_arguments_are_refused_by_attrs(args: tuple[Any, ...]) -> None:
    @slotted
    class Fresh:
        a: int
        _b: int = 2

    given = args[-1] if args and isinstance(args[-1], dict) else {}
    with pytest.raises(TypeError, match=r"__init__\(\)"):
        Fresh(*args[: len(args) - bool(given)], **given)


def test_a_field_with_a_validator_is_for_attrs_from_the_first_object_on() -> None:
    @slotted
    class Fresh:
        a: int = attrs.field(validator=attrs.validators.instance_of(int))

    with pytest.raises(TypeError, match="must be <class 'int'>"):
        Fresh("x")  # type: ignore[arg-type]  # on purpose


def test_the_fields_of_every_class_are_read_as_attrs_reads_them() -> None:
    run = subprocess.run([sys.executable, "-c", _COMPARING], capture_output=True, text=True, check=False)
    assert (run.stdout.strip(), run.stderr) == ("all alike", "")


_COMPARING = """
import importlib, pkgutil, attrs, trimcp
pending = {}
for module in pkgutil.walk_packages(trimcp.__path__, "trimcp."):
    if not module.name.endswith("__main__"):
        for cls in vars(importlib.import_module(module.name)).values():
            later = getattr(vars(cls).get("__attrs_attrs__"), "later", None) if isinstance(cls, type) else None
            if hasattr(later, "fields"):
                pending[cls] = later
members = ("name", "alias", "init", "kw_only", "converter", "validator", "default")
def told(fields):
    return [[getattr(field, member) for member in members] for field in fields]
found = {cls: later.fields() for cls, later in pending.items()}
found = {cls: told(fields) for cls, fields in found.items() if fields is not None}
assert len(found) > 50, len(found)
for cls, fields in found.items():
    if fields != told(attrs.fields(cls)):
        print(cls, fields)
print("all alike")
"""


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
