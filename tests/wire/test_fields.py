from __future__ import annotations

import copy
import pickle
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import orjson
import pytest

from trimcp.wire.converter import converter_for
from trimcp.wire.fields import ABSENT, facts_of, field, wire, wire_name
from trimcp.wire.revisions import REVISIONS, V2025_03_26, V2025_06_18, V2025_11_25


@wire(since=V2025_03_26)
class Thing:
    """A payload for these tests."""

    snake_case_name: str
    meta: dict[str, object] | None = field(default=None)
    given: int | None = field(default=None, since=V2025_06_18, until=V2025_11_25, name="$given")
    required: bool = field(default=False, required_from=V2025_06_18)


def attribute(name: str) -> attrs.Attribute[object]:
    return attrs.fields_dict(Thing)[name]


def test_absent_is_false_one_and_only() -> None:
    assert not ABSENT
    assert repr(ABSENT) == "ABSENT"
    assert copy.deepcopy(ABSENT) is ABSENT
    assert pickle.loads(pickle.dumps(ABSENT)) is ABSENT
    assert ABSENT is not None
    assert ABSENT != None  # noqa: E711 - that it is not even equal is the point


def test_an_absent_that_slips_into_json_fails_loudly() -> None:
    with pytest.raises(TypeError):
        orjson.dumps({"title": ABSENT})


@pytest.mark.parametrize(
    ("name", "expected"),
    [("snake_case_name", "snakeCaseName"), ("meta", "_meta"), ("given", "$given"), ("required", "required")],
)
def test_names_on_the_wire(name: str, expected: str) -> None:
    assert wire_name(attribute(name)) == expected


def test_a_field_exists_from_since_to_before_until() -> None:
    said = facts_of(attribute("given"))
    assert [said.exists_at(revision) for revision in REVISIONS] == [False, False, True, False, False]
    assert not said.required_at(REVISIONS[-1])


def test_required_from_a_revision_on() -> None:
    said = facts_of(attribute("required"))
    assert [said.required_at(revision) for revision in REVISIONS] == [False, False, True, True, True]


def test_payloads_are_frozen_values() -> None:
    thing = Thing("a")
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        thing.snake_case_name = "b"
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        thing.unknown = "b"
    with pytest.raises(TypeError):
        Thing("a", unknown=1)
    assert thing == Thing("a") != Thing("b")
    assert thing != "a"
    assert {thing, Thing("a"), Thing("b")} == {Thing("b"), thing}
    assert attrs.evolve(thing, required=True).required


def test_plain_members_have_nothing_said_about_them() -> None:
    assert [bool(attribute("meta").metadata), bool(attribute("given").metadata)] == [False, True]


def make_raw() -> Any:
    """A payload class that nobody has used yet."""

    @wire
    class Raw:
        text: str
        count: int = field(default=7, since=V2025_06_18)

    return Raw


def is_raw(cls: Any) -> bool:
    return not isinstance(vars(cls)["__attrs_attrs__"], tuple)


@pytest.mark.parametrize(
    "use",
    [
        lambda cls: cls("x"),
        attrs.fields,
        attrs.has,
        attrs.resolve_types,
        lambda cls: converter_for(REVISIONS[-1]).load({"text": "x"}, cls),
        lambda cls: type("Heir", (cls,), {})("x"),
        lambda cls: attrs.frozen(type("Heir", (cls,), {"__annotations__": {"more": int}, "more": 0}))("x", 1, 2),
    ],
    ids=["made", "listed", "recognised", "resolved", "loaded", "inherited", "extended"],
)
def test_a_payload_class_is_finished_at_its_first_use(use: Callable[[Any], Any]) -> None:
    cls = make_raw()
    assert is_raw(cls)
    use(cls)
    assert not is_raw(cls)
    assert [a.name for a in attrs.fields(cls)] == ["text", "count"]
    assert repr(cls("x")) == "Raw(text='x', count=7)"
    assert cls("x", 8) == cls("x", count=8) != cls("x")


def test_many_threads_may_be_the_first_to_use_a_payload_class() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            cls = make_raw()
            start = threading.Barrier(8)

            def use(cls: Any = cls, start: threading.Barrier = start) -> str:
                start.wait()
                return repr(cls("x"))

            with ThreadPoolExecutor(8) as pool:
                assert {future.result() for future in [pool.submit(use) for _ in range(8)]} == {
                    "Raw(text='x', count=7)"
                }
    finally:
        sys.setswitchinterval(interval)


def test_repr_leaves_out_what_is_absent() -> None:
    assert repr(Thing("a", given=1)) == "Thing(snake_case_name='a', given=1, required=False)"
