"""What objects are compared, hashed and shown by, where attrs writes none of it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import attrs
import pytest

from trimcp.channel import Incoming
from trimcp.support.slotted import shown, valued
from trimcp.wire.jsonrpc import ErrorResponse, Request


@attrs.frozen
@valued
class Point:
    """A value for these tests."""

    x: int
    y: Any = 0
    hidden: str = attrs.field(default="hush", repr=False)


@attrs.frozen
@valued
class Place:
    """Another with the same members."""

    x: int
    y: Any = 0
    hidden: str = attrs.field(default="hush", repr=False)


@attrs.define(eq=False)
@shown
class Node:
    """An object that may hold itself."""

    name: str
    next: Any = None


def test_values_are_equal_by_class_and_members() -> None:
    assert Point(1, 2) == Point(1, 2)
    assert Point(1, 2) != Point(1, 3)
    assert Point(1, hidden="a") != Point(1, hidden="b")
    others: list[object] = [Place(1), 1]
    assert Point(1) not in others


def test_equal_values_have_equal_hashes() -> None:
    assert {Point(1, 2), Point(1, 2), Point(2, 1)} == {Point(2, 1), Point(1, 2)}
    assert hash(Point(1)) != hash(Place(1))


def test_a_value_shows_its_members_but_not_what_is_to_be_hidden() -> None:
    assert repr(Point(1, "a")) == "Point(x=1, y='a')"


def test_a_value_is_still_frozen_slotted_and_copied() -> None:
    point = Point(1, [2])
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        point.x = 2
    assert not hasattr(point, "__dict__")
    assert copy.deepcopy(point) == pickle.loads(pickle.dumps(point)) == attrs.evolve(point)


def test_what_is_only_shown_is_equal_to_itself_alone() -> None:
    node = Node("a")
    assert node == node
    assert node != Node("a")
    assert len({node, Node("a")}) == 2


def test_an_object_that_holds_itself_can_be_shown() -> None:
    node = Node("a")
    node.next = Node("b", node)
    assert repr(node) == "Node(name='a', next=Node(name='b', next=...))"


def test_attrs_writes_none_of_it_for_our_own_classes() -> None:
    for cls in (Point, ErrorResponse):
        assert cls.__eq__ is Place.__eq__
        assert cls.__hash__ is Place.__hash__
    for either in (Point, ErrorResponse, Incoming, Node):
        assert either.__repr__ is Place.__repr__
    assert repr(Incoming(Request(1, "ping"), 9)).startswith("Incoming(message=Request(id=1, method='ping'")
