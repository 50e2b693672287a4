from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.yardsticks import assert_costs
from trimcp.wire.scanner import IdScanner, deeper_than, more_members_than, unreadable_number, with_marks

MIB = 1 << 20

SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text()
KEYS = st.sampled_from(["id", "method", "params", "result", "jsonrpc", 'i"d', "i\\d"]) | st.text(max_size=6)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=20)
OBJECTS = st.dictionaries(KEYS, VALUES, max_size=8)
IDS = st.text(max_size=20) | st.integers(-(2**63), 2**64 - 1)


def scan(data: bytes, size: int = 1 << 30) -> IdScanner:
    scanner = IdScanner()
    for start in range(0, len(data), size):
        scanner.feed(data[start : start + size])
    return scanner


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


def members_of(value: Any) -> int:
    """Commas and opening brackets, counted on the value."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return 0
    return 1 + max(len(value) - 1, 0) + sum(map(members_of, value))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'{"id":1,"method":"x"', 1),
        (b'{"method":"x","params":{"id":5,"a":NaN},"id":7}', 7),
        (b'{"params":{"id":5},"method":"x"}', None),
        (b'{"params":[{"id":5}],"method":"x"', None),
        (b'{"a":"\\"id\\":9,","id":"x\\u0041\\n"}', "xA\n"),
        (b'{"a":"}","b":["]"],"\\u0069d":3}', 3),
        (b'{"a":"\\\\","id":3}', 3),
        (b' \r\n\t{ "id" : 4 , "x" : tru }', 4),
        (b'\xef\xbb\xbf{"id":4}', 4),
        (b'{"x":"\xff\xfe","id":4}', 4),
        (b'{"x":"\\ud800","id":4}', 4),
        (b'{"x":' + b"9" * 5000 + b',"id":4}', 4),
        (b'{"x":' + b"[" * 900 + b"]" * 900 + b',"id":4}', 4),
        (b'{"id":0}', 0),
        (b'{"id":-0}', 0),
        (b'{"id":18446744073709551615}', 2**64 - 1),
        (b'{"id":-9223372036854775808}', -(2**63)),
        (b'{"id":""}', ""),
        (b'{"id":1} and so on', 1),
        (b'{"id":1,"id":1}', 1),
        # Not one readable id:
        (b"", None),
        (b"{}", None),
        (b"[]", None),
        (b'[{"id":1}]', None),
        (b'x{"id":1}', None),
        (b'"id":1', None),
        (b'{"id":1,"id":2}', None),
        (b'{"id":1,"id":"1"}', None),
        (b'{"id":1}{"id":2}', None),
        (b'{"id":null}', None),
        (b'{"id":true}', None),
        (b'{"id":1.0}', None),
        (b'{"id":1e3}', None),
        (b'{"id":01}', None),
        (b'{"id":1x}', None),
        (b'{"id":{"id":1}}', None),
        (b'{"id":[1]}', None),
        (b'{"id":[1],"id":1}', None),
        (b'{"id":18446744073709551616}', None),
        (b'{"id":-9223372036854775809}', None),
        (b'{"id":"\\ud800"}', None),
        (b'{"id":"\xff"}', None),
        (b'{"id":"' + b"x" * 5000 + b'"}', None),
        (b'{"id":' + b"1" * 5000 + b"}", None),
        (b'{"id":12', None),
        (b'{"id":"12', None),
        (b'{"id" 12}', None),
        (b'{"id":,"x":1}', None),
        (b'{"a":{"b":],"id":5}}', None),
        (b'{"a":1 "id":5}', None),
        (b"{" + b'"a":1,' * 2000 + b'"id":5}', None),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 7, 1 << 30])
def test_id(text: bytes, expected: str | int | None, size: int) -> None:
    found = scan(text, size).id
    assert (type(found), found) == (type(expected), expected)


@pytest.mark.parametrize(
    ("text", "method", "outcome", "response"),
    [
        (b'{"id":1,"method":"x","params":{"result":1}}', True, False, False),
        (b'{"id":1,"result":{"method":1}}', False, True, True),
        (b'{"id":1,"error":{', False, True, True),
        (b'{"id":1,"method":"x","result":1}', True, True, False),
        (b'{"id":1,"x":"result"}', False, False, False),
    ],
)
def test_what_it_was_meant_as(text: bytes, method: bool, outcome: bool, response: bool) -> None:
    scanner = scan(text)
    assert (scanner.saw_method, scanner.saw_outcome, scanner.is_response) == (method, outcome, response)


@given(OBJECTS, st.none() | IDS, st.sampled_from([None, 0, 3]), st.booleans(), st.data())
@settings(deadline=None, max_examples=100)
def test_agrees_with_a_parser(
    value: dict[str, Any], id: str | int | None, indent: int | None, ascii: bool, data: st.DataObject
) -> None:
    value.pop("id", None)
    if id is not None:
        items = list(value.items())
        items.insert(data.draw(st.integers(0, len(items))), ("id", id))
        value = dict(items)
    text = json.dumps(value, indent=indent, ensure_ascii=ascii).encode("utf-8", "surrogatepass")
    scanner = scan(text, data.draw(st.integers(1, len(text))))
    assert scanner.id == id
    assert scanner.saw_method == ("method" in value)
    assert scanner.saw_outcome == ("result" in value or "error" in value)


@given(OBJECTS, IDS, st.data())
@settings(deadline=None, max_examples=100)
def test_a_truncated_message_has_its_id_or_none(value: dict[str, Any], id: str | int, data: st.DataObject) -> None:
    items = [item for item in value.items() if item[0] != "id"]
    items.insert(data.draw(st.integers(0, len(items))), ("id", id))
    text = json.dumps(dict(items)).encode("utf-8", "surrogatepass")
    assert scan(text[: data.draw(st.integers(0, len(text)))]).id in (None, id)


@given(st.binary(max_size=200) | st.text('{}[]",:\\id1 x', max_size=60).map(str.encode), st.integers(1, 50))
@settings(deadline=None, max_examples=200)
def test_chunks_change_nothing(text: bytes, size: int) -> None:
    whole, pieces = scan(text), scan(text, size)
    assert whole.id == pieces.id
    assert whole.is_response == pieces.is_response


@given(VALUES, st.sampled_from([None, 1]))
@settings(deadline=None, max_examples=100)
def test_depth_and_members_are_counted_outside_strings(value: Any, indent: int | None) -> None:
    text = json.dumps([value, "[[{{,,"], indent=indent).encode()
    depth, members = 1 + depth_of(value), 2 + members_of(value)
    assert deeper_than(depth - 1, text)
    assert not deeper_than(depth, text)
    assert more_members_than(members - 1, text)
    assert not more_members_than(members, text)


def test_long_strings_are_crossed_in_one_leap() -> None:
    text = b'["' + b"\\\\[," * 100_000 + b'",[[],"\\"' + b"[" * 200_000 + b'"]]'
    assert not deeper_than(3, text)
    assert deeper_than(2, text)
    assert not more_members_than(5, text)
    assert more_members_than(4, text)


@pytest.mark.parametrize("shift", range(4))
def test_escapes_across_windows(shift: int) -> None:
    for escape in (b"\\\\", b'\\"', b"\\n"):
        text = b'["' + b"x" * shift + escape * 50_000 + b'",{},"' + escape * 40_000 + b'[[,"]'
        assert not deeper_than(2, text)
        assert not more_members_than(4, text)
        assert more_members_than(3, text)


def test_a_large_message_is_counted_in_pieces() -> None:
    text = b'["' + b"x" * 8_000_000 + b'",[1],' + b'"y",' * 100_000 + b"1]"
    tracemalloc.start()
    try:
        assert not deeper_than(2, text)
        assert not more_members_than(100_005, text)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000, "it is not in memory once more"
    finally:
        tracemalloc.stop()
    assert deeper_than(1, text)
    assert more_members_than(100_002, text)


@pytest.mark.parametrize("text", [b'"', b'"\\', b'["' + b"," * 99, b'"a', b'",,,"[', b'["\\"'])
def test_counting_members_needs_no_valid_text(text: bytes) -> None:
    assert not more_members_than(1, text)


@pytest.mark.parametrize(
    ("number", "fine"),
    [
        (b"18446744073709551615", True),
        (b"18446744073709551616", False),
        (b"-9223372036854775808", True),
        (b"-9223372036854775809", False),
        (b"9223372036854775808", True),
        (b"-18446744073709551615", False),
        (b"1" * 30, False),
        (b"0.1000000000000000055511151231257827", True),
        (b"18446744073709551616.0", True),
        (b"1234567890123456789e3", True),
        (b"0." + b"1" * 900, True),
        (b"0." + b"1" * 5000, False),
    ],
)
def test_numbers_are_refused_rather_than_rounded(number: bytes, fine: bool) -> None:
    for text in (
        number,
        b'{"a":"' + b"1" * 40 + b'","b":[1,-2,3.5e7,' + number + b"]}",
        b'[123456789012345678,"\\"' + b"9" * 40 + b'",' + number + b" ]",
    ):
        assert (unreadable_number(text) is None) is fine


def look_through(text: bytes) -> None:
    scan(text, 65536)
    more_members_than(len(text), text)
    more_members_than(len(text) // 64, text)


HOSTILE = {
    "escaped quotes": (b'{"a":"', b'\\"'),
    "quotes": (b'{"a":[', b'"a'),
    "open quote and escapes": (b'{"a":["x', b"\\\\\\"),
    "empty strings": (b'{"a":[', b'"",'),
    "openers": (b'{"a":', b"["),
    "towers": (b'{"a":[', b'{"a":[{"b":[{}]}]},'),
    "high towers": (b'{"a":[', b"[" * 500 + b"]" * 500),
    "members": (b"{", b'"a":1,'),
    "blanks": (b"{", b" "),
    "digits": (b'{"a":', b"1"),
    "endless number as id": (b'{"id":', b"1"),
    "endless string as id": (b'{"id":"', b"x"),
    "endless key": (b'{"', b"x"),
    "text": (b'{"a":"', b"some text, [with] brackets "),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_time_is_linear(kind: str) -> None:
    head, unit = HOSTILE[kind]
    small, large = (head + unit * (size // len(unit)) for size in (MIB // 8, MIB // 2))
    # Four times the text; a quadratic scan would take sixteen times as long.
    assert_costs(lambda: look_through(large), at_most=10, times=lambda: look_through(small))


def test_time_to_check_valid_text_is_linear() -> None:
    def check(count: int) -> None:
        text = b'["' + b'\\"' * count + b'",' + b'[1,"",-2.5e7],' * count + b'"' + b"9" * count + b'"]'
        assert unreadable_number(text) is None
        assert not deeper_than(2, text)

    assert_costs(lambda: check(20_000), at_most=10, times=lambda: check(5_000))


@pytest.mark.parametrize("kind", HOSTILE)
def test_memory_is_bounded(kind: str) -> None:
    head, unit = HOSTILE[kind]
    chunk = unit * (65536 // len(unit))
    scanner = IdScanner()
    scanner.feed(head + chunk)
    tracemalloc.start()
    try:
        for start in range(0, 8 * len(chunk), 4096):
            scanner.feed(chunk[start % len(chunk) :][:4096])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MIB // 4


@given(st.lists(st.sampled_from([b"18446744073709551615", b"18446744073709551616", b"-" + b"9" * 30, b"1", b'"1\\""'])))
def test_only_integers_beyond_64_bits_are_marked(values: list[bytes]) -> None:
    found = with_marks(b"[" + b",".join(values) + b"]", b"mark")
    wanted = [b'"mark"' if value in (b"18446744073709551616", b"-" + b"9" * 30) else value for value in values]
    assert found == b"[" + b",".join(wanted) + b"]"


@pytest.mark.parametrize(
    "text", [b'"18446744073709551616"', b"00000000000000000000", b"1." + b"0" * 30, b"1e00000000000000000"]
)
def test_what_is_no_integer_is_not_marked(text: bytes) -> None:
    assert with_marks(text, b"mark") == text


def test_marks_are_bounded_and_take_linear_time() -> None:
    assert with_marks(b"[" + b",".join([b"1" * 30] * 10_001) + b"]", b"mark") is None
    assert with_marks(b"0." + b"1" * 2_000, b"mark") is None
