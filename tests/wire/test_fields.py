from __future__ import annotations

import copy
import pickle

import attrs
import orjson
import pytest

from trimcp.wire.fields import ABSENT, facts_of, field, wire, wire_name
from trimcp.wire.revisions import REVISIONS, V2025_03_26, V2025_06_18, V2025_11_25


@wire(since=V2025_03_26)
class Thing:
    """A payload for these tests."""

    snake_case_name: str
    meta: dict[str, object] = field(default=ABSENT)
    given: int = field(default=ABSENT, since=V2025_06_18, until=V2025_11_25, name="$given")
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


def test_payloads_are_frozen_slotted_values() -> None:
    thing = Thing("a")
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        thing.snake_case_name = "b"  # type: ignore[misc]
    assert not hasattr(thing, "__dict__")
    assert thing == Thing("a") != Thing("b")
    assert thing != "a"
    assert {thing, Thing("a"), Thing("b")} == {Thing("b"), thing}
    assert attrs.evolve(thing, required=True).required


def test_repr_leaves_out_what_is_absent() -> None:
    assert repr(Thing("a", given=1)) == "Thing(snake_case_name='a', given=1, required=False)"
