"""Lists: their order, their pages, and when what was encoded is made anew."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import pytest

from trimcp.errors import ErrorReply, LocalError
from trimcp.protocol.connection import Encoded
from trimcp.server.registry import Bus, Change, Registry
from trimcp.wire.codes import INVALID_PARAMS
from trimcp.wire.revisions import LATEST, LATEST_LEGACY

KEY = (LATEST, None, True)


@pytest.fixture
def registry() -> Registry[str]:
    registry: Registry[str] = Registry("tool", Bus(), Change.TOOLS)
    for name in "cabd":
        registry.add(name, name.upper(), live=False)
    return registry


def encoder() -> tuple[list[Any], Callable[[list[str], Any], Encoded]]:
    """A page's encoder, and a list of what it was given."""
    made: list[Any] = []

    def encode(entries: list[str], cursor: Any) -> Encoded:
        made.append((entries, cursor))
        return Encoded("".join(entries).encode())

    return made, encode


def pages(registry: Registry[str], size: int | None, cursor: Any = None) -> list[bytes]:
    found = []
    while True:
        made, encode = encoder()
        registry._pages.clear()
        found.append(registry.page(cursor, size, KEY, encode).data)
        [(_, cursor)] = made
        if cursor is None:
            return found


def test_entries_stay_in_the_order_they_were_added(registry: Registry[str]) -> None:
    assert list(registry) == ["C", "A", "B", "D"]
    registry.remove("a", live=False)
    registry.add("a", "A", live=False)
    assert list(registry) == ["C", "B", "D", "A"]
    assert (len(registry), "a" in registry, "x" in registry) == (4, True, False)
    assert (registry.get("a"), registry.get("x")) == ("A", None)


def test_a_name_is_taken_once(registry: Registry[str]) -> None:
    with pytest.raises(LocalError, match="a tool named 'a' already; remove it first"):
        registry.add("a", "other", live=True)
    assert registry.get("a") == "A"
    with pytest.raises(KeyError, match="no tool named 'x'"):
        registry.remove("x", live=True)
    assert not registry.touched


@pytest.mark.parametrize(
    ("size", "expected"),
    [(None, [b"CABD"]), (1, [b"C", b"A", b"B", b"D"]), (3, [b"CAB", b"D"]), (4, [b"CABD"]), (9, [b"CABD"])],
)
def test_pages_hold_everything_once(registry: Registry[str], size: int | None, expected: list[bytes]) -> None:
    assert pages(registry, size) == expected


def test_an_empty_list_is_one_empty_page() -> None:
    assert pages(Registry("tool", Bus(), Change.TOOLS), 3) == [b""]


def test_a_cursor_survives_changes_elsewhere_and_fails_where_its_place_is_gone(registry: Registry[str]) -> None:
    made, encode = encoder()
    registry.page(None, 2, KEY, encode)
    [(_, cursor)] = made  # after a
    registry.remove("c", live=True)
    registry.add("e", "E", live=True)
    assert pages(registry, 2, cursor) == [b"BD", b"E"]
    registry.remove("a", live=True)
    with pytest.raises(ErrorReply, match="list again") as gone:
        registry.page(cursor, 2, KEY, encode)
    assert gone.value.code == INVALID_PARAMS


@pytest.mark.parametrize(
    "cursor",
    [
        "",
        "x",
        "====",
        "YQ",
        "\0",
        "a" * 10_000,
        "é",
        base64.b64encode(b"\xff").decode(),
        base64.b64encode(b"x").decode(),
    ],
    ids=range(9),
)
def test_a_cursor_of_somebody_elses_is_refused(registry: Registry[str], cursor: str) -> None:
    _, encode = encoder()
    registry.page(None, 2, KEY, encode)
    with pytest.raises(ErrorReply) as refused:
        registry.page(cursor, 2, KEY, encode)
    assert refused.value.code == INVALID_PARAMS


def test_pages_are_encoded_once_until_the_list_changes(registry: Registry[str]) -> None:
    made, encode = encoder()
    first = registry.page(None, 2, KEY, encode)
    assert registry.page(None, 2, KEY, encode) is first
    assert len(made) == 1
    registry.page(None, 2, (LATEST_LEGACY, None), encode)
    registry.page(None, 2, (LATEST, "ada"), encode)
    assert len(made) == 3, "each revision and each principal has its own"
    registry.add("e", "E", live=False)
    assert registry.page(None, 9, KEY, encode).data == b"CABDE"
    registry.remove("c", live=False)
    assert registry.page(None, 9, KEY, encode).data == b"ABDE"
    assert len(made) == 5


def test_what_is_kept_is_bounded(registry: Registry[str]) -> None:
    _, encode = encoder()
    for number in range(1_000):
        registry.page(None, 2, (LATEST, f"principal {number}"), encode)
    assert len(registry._pages) <= 64


def test_only_changes_that_clients_may_have_missed_are_told() -> None:
    bus = Bus()
    told: list[Change | str] = []
    bus.attach(told.append)
    registry: Registry[str] = Registry("prompt", bus, Change.PROMPTS)
    registry.add("a", "A", live=False)
    assert (told, registry.touched) == ([], False)
    registry.add("b", "B", live=True)
    registry.remove("a", live=True)
    assert (told, registry.touched) == ([Change.PROMPTS] * 2, True)


def test_an_unlisted_entry_is_found_and_not_listed(registry: Registry[str]) -> None:
    told: list[Any] = []
    registry.bus.attach(told.append)
    registry.add("a@1", "old", live=True, listed=False)
    assert (registry.get("a@1"), "a@1" in registry, len(registry)) == ("old", True, 4)
    assert list(registry) == ["C", "A", "B", "D"]
    assert pages(registry, 3) == [b"CAB", b"D"]
    registry.add("a@1", "older", live=True, replace=True)
    assert registry.get("a@1") == "older"
    assert pages(registry, None) == [b"CABD"]
    registry.remove("a@1", live=True)
    assert "a@1" not in registry
    assert told == []
    assert not registry.touched
    registry.add("a@1", "new", live=True)  # nothing is left of its having been unlisted
    assert list(registry)[-1] == "new"
    assert told == [Change.TOOLS]


def test_an_entry_is_replaced_in_its_place(registry: Registry[str]) -> None:
    told: list[Any] = []
    registry.bus.attach(told.append)
    pages(registry, None)
    registry.add("a", "X", live=True, replace=True, scopes=frozenset({"read"}))
    assert list(registry) == ["C", "X", "B", "D"]
    assert told == [Change.TOOLS]
    made, encode = encoder()
    registry.page(None, None, (LATEST, frozenset()), encode)
    assert made == [(["C", "B", "D"], None)]
    registry.add("a", "Y", live=True, replace=True)  # without scopes everybody sees it again
    made, encode = encoder()
    registry.page(None, None, (LATEST, frozenset()), encode)
    assert made == [(["C", "Y", "B", "D"], None)]
    registry.add("x", "Z", live=True, replace=True)  # in nobody's place
    assert list(registry) == ["C", "Y", "B", "D", "Z"]


def test_changes_together_are_told_once(registry: Registry[str]) -> None:
    told: list[Any] = []
    registry.bus.attach(told.append)
    with registry.together():
        registry.remove("a", live=True)
        with registry.together():
            registry.add("e", "E", live=True)
        assert told == []
    assert told == [Change.TOOLS]
    with registry.together():
        pass
    assert told == [Change.TOOLS]
    with pytest.raises(LocalError), registry.together():
        registry.remove("b", live=True)
        registry.add("c", "C", live=True)
    assert told == [Change.TOOLS] * 2
    registry.remove("c", live=True)
    assert told == [Change.TOOLS] * 3
