"""What a trace, an audit and a security event may show of a stranger's text."""

from __future__ import annotations

import time
from typing import Any

import pytest

from trimcp.masking import digest, harmless, mask, shapes


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        ("four", "string(4)"),
        ([1, 2], "array(2)"),
        ({"a": {}}, "object(1)"),
        (True, "boolean"),
        (1, "number"),
        (1.5, "number"),
        (None, "null"),
    ],
)
def test_a_shape_says_kind_and_size_and_no_more(value: Any, shape: str) -> None:
    assert shapes({"it": value}) == {"it": shape}


def test_names_of_arguments_are_bounded_and_harmless() -> None:
    found = shapes({f"a{n}\n\x1b[31m": n for n in range(1_000)})
    assert len(found) == 33
    assert found["..."] == "968 more"
    assert all(name.isprintable() for name in found)


def test_what_is_harmless_stays_and_everything_else_is_escaped() -> None:
    assert harmless("plain text, 1=2") == "plain text, 1=2"
    assert harmless('a"\n\x1b\u202e') == "a\\x22\\n\\x1b\\u202e"
    assert harmless("x" * 1_000) == "x" * 200 + "..."


def test_a_digest_tells_apart_and_gives_nothing_away() -> None:
    assert digest("a") != digest("b")
    assert len(digest("secret" * 100)) == 12
    assert digest("\ud800") == digest("\ud800")  # whatever a header held


@pytest.mark.parametrize("bait", ["?" + "a" * 50_000, "bearer " * 10_000, "&key" * 20_000, "?" * 50_000])
def test_masking_takes_no_time_whatever_the_text(bait: str) -> None:
    started = time.perf_counter()
    mask(bait)
    assert time.perf_counter() - started < 0.5
