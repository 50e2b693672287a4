"""Merge patches: what RFC 7396 says, sizes that are kept up to date, and bounds that leave nothing half done."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimcp.agent_tools.contexts.merging import (
    EMPTY_OBJECT,
    MAX_DEPTH,
    StateBounds,
    patched,
    size_of,
)
from trimcp.agent_tools.contexts.state import ContextLimits
from trimcp.agent_tools.messages.errors import MalformedMessage, TooLargeMessage
from trimcp.wire.jsonrpc import encode

WIDE = StateBounds(1 << 30, MAX_DEPTH, 1 << 20)

TEXTS = st.text("abz \u00e9\u4e2d\U0001f600", max_size=5)
SCALARS = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False) | TEXTS
FINITE = SCALARS.filter(lambda value: not isinstance(value, float) or value - value == 0)
VALUES = st.recursive(
    FINITE, lambda below: st.lists(below, max_size=4) | st.dictionaries(TEXTS, below, max_size=4), max_leaves=12
)
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=5)


def merge_patch(target: Any, patch: Any) -> Any:
    """Return what a merge patch makes of a JSON value (RFC 7396, section 2), without bounds. Changes neither."""
    if not isinstance(patch, Mapping):
        return patch
    result = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge_patch(result.get(key), value)
    return result


def without_nulls(patch: dict[str, Any]) -> dict[str, Any]:
    """A state as patches make it, whose objects have no members that are null."""
    state: dict[str, Any] = merge_patch({}, patch)
    return state


@pytest.mark.parametrize(
    ("target", "patch", "result"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"a": "b"}, ["c"], ["c"]),
        ({"a": "foo"}, None, None),
        ({"a": "foo"}, "bar", "bar"),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_the_examples_of_the_rfc(target: Any, patch: Any, result: Any) -> None:
    before = copy.deepcopy((target, patch))
    assert merge_patch(target, patch) == result
    assert (target, patch) == before
    if isinstance(target, dict) and isinstance(patch, dict):
        assert patched(target, size_of(target, WIDE), patch, WIDE).value == result


@given(OBJECTS, OBJECTS)
def test_a_patch_with_bounds_does_what_one_without_does(first: dict[str, Any], patch: dict[str, Any]) -> None:
    state = without_nulls(first)
    before = copy.deepcopy((state, patch))
    assert patched(state, size_of(state, WIDE), patch, WIDE).value == merge_patch(state, patch)
    assert (state, patch) == before, "something was changed in place"


@given(st.lists(OBJECTS, max_size=6))
def test_the_size_is_kept_up_to_date(patches: list[dict[str, Any]]) -> None:
    state: dict[str, Any] = {}
    size = EMPTY_OBJECT
    for patch in patches:
        result = patched(state, size, patch, WIDE)
        state, size = result.value, result.size
        assert size == size_of(state, WIDE)


def test_what_is_removed_or_replaced_counts_no_more() -> None:
    state = {"a": {"b": [1, [2, 3]], "c": {"d": "text"}}, "e": 1}
    for patch in ({"a": None}, {"a": {"b": None}}, {"a": {"c": 1}}, {"a": [1]}, {"a": 1}, {"e": {"f": {"g": None}}}):
        result = patched(state, size_of(state, WIDE), patch, WIDE)
        assert result.size == size_of(result.value, WIDE), patch


@given(OBJECTS)
def test_a_size_is_about_that_of_the_text(value: dict[str, Any]) -> None:
    size, members = size_of(value, WIDE)
    text = len(encode(value))
    # One comma too many in each container, one byte too many for true and null, and floats in fewer letters.
    assert text - 4 * members <= size <= text + 3 * members + 2


@given(OBJECTS)
def test_a_patch_to_an_empty_state_is_as_large_as_the_state(value: dict[str, Any]) -> None:
    state = without_nulls(value)
    result = patched({}, EMPTY_OBJECT, state, WIDE)
    assert result.patch.size <= result.size.size
    assert result.size.members == size_of(state, WIDE).members


def nested(levels: int, of: str) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value} if of == "objects" else [value]
    return value


@pytest.mark.parametrize("of", ["objects", "arrays"])
def test_depth_is_bounded(of: str) -> None:
    bounds = StateBounds(depth=5)
    assert patched({}, EMPTY_OBJECT, {"a": nested(4, of)}, bounds).value == {"a": nested(4, of)}
    with pytest.raises(TooLargeMessage, match="5 levels") as refused:
        patched({}, EMPTY_OBJECT, {"a": nested(5, of)}, bounds)
    assert refused.value.data == {"bound": "depth", "most": 5}


def test_a_patch_that_only_removes_is_bounded_in_depth_too() -> None:
    patch: Any = None
    for _ in range(2_000):
        patch = {"a": patch}
    with pytest.raises(TooLargeMessage):
        patched({}, EMPTY_OBJECT, patch, StateBounds())


@pytest.mark.parametrize("value", [[1] * 8, {str(n): 1 for n in range(8)}, [[1, 1, 1], [1, 1, 1]]])
def test_members_are_bounded(value: Any) -> None:
    bounds = StateBounds(members=9)
    state = patched({}, EMPTY_OBJECT, {"a": value}, bounds)
    assert state.size.members == 9
    with pytest.raises(TooLargeMessage, match="9 members"):
        patched(state.value, state.size, {"b": 1}, bounds)
    # In place of another one it fits.
    assert patched(state.value, state.size, {"a": 1, "b": 1}, bounds).size.members == 2


def test_a_value_with_too_many_members_is_not_read_to_its_end() -> None:
    class Watched(dict[str, Any]):
        pass

    with pytest.raises(TooLargeMessage, match="members"):  # and not MalformedMessage for what comes later
        patched({}, EMPTY_OBJECT, {"a": [[0] * 20, object()]}, StateBounds(members=10))
    with pytest.raises(MalformedMessage, match="Watched"):
        patched({}, EMPTY_OBJECT, {"a": Watched()}, StateBounds())


def test_bytes_are_bounded() -> None:
    bounds = StateBounds(size=100)
    state = patched({}, EMPTY_OBJECT, {"a": "x" * 91}, bounds)  # 2 for the object, 5 for the key, 2 quotes
    assert state.size.size == 100
    with pytest.raises(TooLargeMessage, match="100 bytes"):
        patched({}, EMPTY_OBJECT, {"a": "x" * 92}, bounds)
    with pytest.raises(TooLargeMessage, match="100 bytes"):
        patched(state.value, state.size, {"b": 1}, bounds)
    assert patched(state.value, state.size, {"a": "y", "b": 1}, bounds).size.size < 100


def test_a_patch_is_bounded_even_if_it_adds_nothing() -> None:
    bounds = StateBounds(size=100)
    with pytest.raises(TooLargeMessage):
        patched({}, EMPTY_OBJECT, {"x" * 200: None}, bounds)
    state = {"k" * 80: {"b": 1}}
    with pytest.raises(TooLargeMessage):
        patched(state, size_of(state, bounds), {"k" * 80: {"z" * 30: None}}, bounds)
    with pytest.raises(TooLargeMessage):
        patched({}, EMPTY_OBJECT, {f"{n}": None for n in range(20)}, StateBounds(members=10))


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), 1 << 64, -(1 << 63) - 1, "\ud800", {"\ud800": 1}, {1: 2}, (1,), b"x", object()],
)
def test_what_json_cannot_say_is_refused(value: Any) -> None:
    for inside in (value, [value], {"b": value}, [{"b": [value]}]):
        with pytest.raises(MalformedMessage):
            patched({}, EMPTY_OBJECT, {"a": inside}, WIDE)


def test_a_state_shares_what_a_patch_left_alone() -> None:
    state = {"kept": {"x": [1]}, "changed": {"y": {"z": 1}, "left": {}}}
    value = patched(state, size_of(state, WIDE), {"changed": {"y": {"z": 2}}}, WIDE).value
    assert value["kept"] is state["kept"]
    assert value["changed"]["left"] is state["changed"]["left"]
    assert state["changed"]["y"] == {"z": 1}


@pytest.mark.parametrize("depth", [0, MAX_DEPTH + 1, 1.5, True])
def test_bounds_are_checked(depth: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"ContextLimits\.max_depth is"):
        ContextLimits(max_depth=depth)
    with pytest.raises(ValueError, match="max_state"):
        ContextLimits(max_state=0)


def test_the_deepest_state_that_a_bound_allows_is_merged_and_written() -> None:
    patch = nested(MAX_DEPTH, "objects")
    bounds = StateBounds(depth=MAX_DEPTH)
    state = patched({}, EMPTY_OBJECT, patch, bounds)
    again = patched(state.value, state.size, patch, bounds)
    assert again.value == patch
    assert encode(again.value)
