"""The frontmatter of skills: the core schema of YAML 1.2 as JSON, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimcp.extensions.skills import read_frontmatter, same_json


def read(yaml: str) -> Any:
    return read_frontmatter(f"---\n{yaml}\n---\n# Text\n".encode())


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("no", "no"),
        ("off", "off"),
        ("Yes", "Yes"),
        ("true", True),
        ("FALSE", False),
        ("~", None),
        ("", None),
        ("null", None),
        ("2026-02-28", "2026-02-28"),
        ("2026-02-28T10:00:00Z", "2026-02-28T10:00:00Z"),
        ("12:30", "12:30"),
        ("1_000", "1_000"),
        ("0b101", "0b101"),
        ("012", 12),
        ("0o17", 15),
        ("0xff", 255),
        ("-7", -7),
        ("1.50", 1.5),
        (".5", 0.5),
        ("1e3", 1000.0),
        ("1.2.3", "1.2.3"),
        ("'1'", "1"),
        ('"true"', "true"),
        ("[a, 1, {b: no}]", ["a", 1, {"b": "no"}]),
        ("|\n  one\n  two", "one\ntwo\n"),
        (">\n  one\n  two", "one two\n"),
        ("\n  <<: x", {"<<": "x"}),
        ("\n  1: x\n  true: y", {"1": "x", "true": "y"}),
    ],
)
def test_values_are_those_of_the_core_schema(written: str, value: Any) -> None:
    found = read(f"key: {written}")
    assert same_json(found, {"key": value}), found


@pytest.mark.parametrize(
    ("yaml", "why"),
    [
        ("a: &x [1]\nb: *x", "alias or an anchor"),
        ("a: *x", "alias or an anchor"),
        ("a: !!python/object:os.system x", "a tag"),
        ("a: !!str 5", "a tag"),
        ("a: 1\na: 2", "twice"),
        ("? [a]\n: b", "no text"),
        ("[a]", "no mapping"),
        ("text", "no mapping"),
        ("", "no mapping"),
        ("a: 1\n...\nb: 2", "is not YAML|more than one document"),
        ("a: [1", "is not YAML in line"),
        ("\tx: y", "is not YAML in line"),
        ("a: .inf", "JSON cannot carry"),
        ("a: -.INF", "JSON cannot carry"),
        ("a: .nan", "JSON cannot carry"),
        ("a: 9223372036854775808", "JSON cannot carry"),
        ("a: 1e400", "JSON cannot carry"),
        (f"a: {'9' * 5000}", "JSON cannot carry"),
        ("a: " + "[" * 40, "inside each other"),
        ("\n".join(f"k{number}: v" for number in range(1001)), "more than 1000 nodes"),
        ("a: \x00", "is not YAML"),
    ],
)
def test_what_is_refused_says_why(yaml: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read(yaml)


BOMB = "\n".join(["a: &a [x, x]", *(f"{two}: &{two} [*{one}, *{one}]" for one, two in pairwise("abcdefghijklm"))])


def test_a_bomb_of_aliases_is_refused_at_its_first_anchor() -> None:
    with pytest.raises(ValueError, match="alias or an anchor"):
        read(BOMB)


@pytest.mark.parametrize(
    "content",
    [b"", b"# No frontmatter", b"---\nname: x", b" ---\nname: x\n---\n", b"---\nx: " + b"y" * 17_000 + b"\n---\n"],
)
def test_without_frontmatter_at_the_beginning_there_is_no_skill(content: bytes) -> None:
    with pytest.raises(ValueError, match="does not begin with frontmatter"):
        read_frontmatter(content)


def test_lines_may_end_as_on_windows_and_the_text_below_may_be_long() -> None:
    assert read_frontmatter(b"---\r\nname: x\r\n---\r\n" + "\u00e4".encode() * 100_000) == {"name": "x"}
    assert read_frontmatter(b"---\nname: x\n---") == {"name": "x"}
    with pytest.raises(ValueError, match="not UTF-8"):
        read_frontmatter(b"---\nname: \xff\n---\n")


@settings(max_examples=150, deadline=None)
@given(st.text(st.sampled_from("ab:-[]{},&*!|>'\"%#?~0.\n \t"), max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        found = read(text)
    except ValueError:
        return
    assert isinstance(found, dict)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [(1, 1.0, True), (1, True, False), (False, None, False), ([1], [1, 2], False), ({"a": [0]}, {"a": [False]}, False)],
)
def test_values_are_compared_as_json(one: Any, other: Any, same: bool) -> None:
    assert same_json(one, other) is same
