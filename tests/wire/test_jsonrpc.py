from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import random
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimcp.errors import LocalError
from trimcp.wire.codes import INVALID_PARAMS, INVALID_REQUEST, PARSE_ERROR
from trimcp.wire.jsonrpc import (
    Batch,
    ErrorResponse,
    IdScanner,
    Malformed,
    Notification,
    ParseLimits,
    Request,
    Response,
    Unencodable,
    encode,
    encode_error,
    encode_notification,
    encode_request,
    encode_result,
    oversize,
    parse,
    scan_id,
)

CALL = b'{"jsonrpc":"2.0","id":12,"method":"tools/call","params":{"name":"echo","arguments":{"text":"hi"}}}'

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
PARAMS = st.dictionaries(st.text(), JSON_VALUES, max_size=5)
IDS = st.text() | st.integers(-(2**63), 2**64 - 1)


def malformed(data: bytes) -> Malformed:
    message = parse(data)
    assert isinstance(message, Malformed)
    return message


# What is a message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            CALL,
            Request(12, "tools/call", {"name": "echo", "arguments": {"text": "hi"}}),
        ),
        (b'{"jsonrpc":"2.0","id":"a","method":"ping"}', Request("a", "ping", None)),
        (b'{"jsonrpc":"2.0","id":0,"method":"ping","params":{}}', Request(0, "ping", {})),
        (b'{"jsonrpc":"2.0","id":"","method":"ping"}', Request("", "ping", None)),
        (b'{"jsonrpc":"2.0","id":18446744073709551615,"method":"x"}', Request(2**64 - 1, "x", None)),
        (
            b'{"jsonrpc":"2.0","method":"notifications/initialized"}',
            Notification("notifications/initialized"),
        ),
        (b'{"jsonrpc":"2.0","method":"n","params":{"a":null}}', Notification("n", {"a": None})),
        (b'{"jsonrpc":"2.0","id":1,"method":"ping","params":null}', Request(1, "ping")),
        (b'{"jsonrpc":"2.0","method":"n","params":null}', Notification("n")),
        (b'{"jsonrpc":"2.0","id":1,"result":{"a":1}}', Response(1, {"a": 1})),
        (b'{"jsonrpc":"2.0","id":1,"error":{"code":-1,"message":"no"}}', ErrorResponse(1, -1, "no")),
        (
            b'{"jsonrpc":"2.0","id":null,"error":{"code":-1,"message":"no","data":[1]}}',
            ErrorResponse(None, -1, "no", [1]),
        ),
        (b'{"jsonrpc":"2.0","error":{"code":-1,"message":"no"}}', ErrorResponse(None, -1, "no")),
        (b' {"x":1,"method":"ping","id":1,"jsonrpc":"2.0"}\r', Request(1, "ping")),
        ('{"jsonrpc":"2.0","id":"\u2028","method":"x"}'.encode(), Request("\u2028", "x")),
    ],
)
def test_messages(text: bytes, expected: object) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'{"jsonrpc":"2.0","id":1,"result":{},"error":null}', Response(1, {})),
        (b'{"jsonrpc":"2.0","id":1,"result":null,"error":{"code":1,"message":"no"}}', ErrorResponse(1, 1, "no")),
        (b'{"jsonrpc":"2.0","id":1,"method":null,"params":null,"result":{},"error":null}', Response(1, {})),
        (b'{"jsonrpc":"2.0","id":1,"method":"ping","params":null,"result":null,"error":null}', Request(1, "ping")),
        (b'{"jsonrpc":"2.0","method":"x","result":null}', Notification("x")),
    ],
)
def test_a_member_that_is_null_is_none(text: bytes, expected: object) -> None:
    """Serializers of many languages write every member of a class."""
    assert parse(text) == expected


@pytest.mark.parametrize("id", [b"7.0", b"7e0", b"70e-1"])
def test_an_answer_to_a_number_is_known_however_the_number_is_written(id: bytes) -> None:
    """Some read every number as a double, and write it so."""
    assert parse(b'{"jsonrpc":"2.0","id":%b,"result":{}}' % id) == Response(7, {})
    assert parse(b'{"jsonrpc":"2.0","id":%b,"error":{"code":1,"message":""}}' % id) == ErrorResponse(7, 1, "")


# What is none: shape and id


@pytest.mark.parametrize("id", ["null", "1.0", "1.5", "1e3", "true", "false", "{}", "[]", "[1]", '{"id":1}'])
def test_an_id_that_is_neither_string_nor_integer_is_refused(id: str) -> None:
    found = malformed(f'{{"jsonrpc":"2.0","id":{id},"method":"ping"}}'.encode())
    assert (found.code, found.id, found.reason, found.answerable) == (INVALID_REQUEST, None, "id", True)


@pytest.mark.parametrize(
    ("text", "code", "id", "reason"),
    [
        (b'{"id":1,"method":"x"}', INVALID_REQUEST, 1, "shape"),
        (b'{"jsonrpc":2.0,"id":1,"method":"x"}', INVALID_REQUEST, 1, "shape"),
        (b'{"jsonrpc":"2.00","id":1,"method":"x"}', INVALID_REQUEST, 1, "shape"),
        (b'{"jsonrpc":"1.0","id":"a","method":"x"}', INVALID_REQUEST, "a", "shape"),
        (b'{"jsonrpc":"2.0","id":1,"method":5}', INVALID_REQUEST, 1, "shape"),
        (b'{"jsonrpc":"2.0","id":1,"method":null}', INVALID_REQUEST, 1, "shape"),
        (b'{"jsonrpc":"2.0","id":1}', INVALID_REQUEST, 1, "shape"),
        (b'{"jsonrpc":"2.0","id":1,"method":"x","result":{}}', INVALID_REQUEST, 1, "shape"),
        (
            b'{"jsonrpc":"2.0","id":1,"method":"x","error":{"code":1,"message":""}}',
            INVALID_REQUEST,
            1,
            "shape",
        ),
        (b'{"jsonrpc":"2.0","id":1,"method":"x","params":[1]}', INVALID_PARAMS, 1, "params"),
        (b'{"jsonrpc":"2.0","id":1,"method":"x","params":"a"}', INVALID_REQUEST, 1, "params"),
        (b'{"jsonrpc":"2.0","id":[],"method":"x","params":"a"}', INVALID_REQUEST, None, "params"),
        (b"{}", INVALID_REQUEST, None, "shape"),
        (b"1", INVALID_REQUEST, None, "shape"),
        (b'"x"', INVALID_REQUEST, None, "shape"),
        (b"null", INVALID_REQUEST, None, "shape"),
    ],
)
def test_what_is_no_request(text: bytes, code: int, id: str | int | None, reason: str) -> None:
    found = malformed(text)
    assert (found.code, found.id, found.reason) == (code, id, reason)
    assert found.answerable
    assert not found.is_response


@pytest.mark.parametrize(
    ("text", "id"),
    [
        (b'{"id":1,"result":{}}', 1),
        (b'{"jsonrpc":"2.0","id":1,"result":{},"error":{"code":1,"message":""}}', 1),
        (b'{"jsonrpc":"2.0","id":1,"result":null}', 1),
        (b'{"jsonrpc":"2.0","id":1,"result":[]}', 1),
        (b'{"jsonrpc":"2.0","id":null,"result":{}}', None),
        (b'{"jsonrpc":"2.0","result":{}}', None),
        (b'{"jsonrpc":"2.0","id":1.5,"result":{}}', None),
        (b'{"jsonrpc":"2.0","id":1e99,"result":{}}', None),
        (b'{"jsonrpc":"2.0","id":1,"result":null,"error":null}', 1),
        (b'{"jsonrpc":"2.0","id":true,"error":{"code":1,"message":""}}', None),
        (b'{"jsonrpc":"2.0","id":1,"error":null}', 1),
        (b'{"jsonrpc":"2.0","id":1,"error":{"message":""}}', 1),
        (b'{"jsonrpc":"2.0","id":1,"error":{"code":1.0,"message":""}}', 1),
        (b'{"jsonrpc":"2.0","id":1,"error":{"code":true,"message":""}}', 1),
        (b'{"jsonrpc":"2.0","id":1,"error":{"code":"1","message":""}}', 1),
        (b'{"jsonrpc":"2.0","id":"b","error":{"code":1}}', "b"),
        (b'{"jsonrpc":"2.0","id":1,"error":{"code":1,"message":null}}', 1),
        (b'{"jsonrpc":"2.0","id":1,"result":{"a":NaN}}', 1),
        (b'{"jsonrpc":"2.0","result":{"a":"\\udc00"},"id":1}', 1),
    ],
)
def test_a_broken_response_names_its_call_and_is_never_answered(text: bytes, id: str | int | None) -> None:
    found = malformed(text)
    assert found.id == id
    assert found.is_response
    assert not found.answerable


@pytest.mark.parametrize(("params", "code"), [(b"[]", INVALID_PARAMS), (b"1", INVALID_REQUEST)])
def test_a_notification_with_wrong_params_is_never_answered(params: bytes, code: int) -> None:
    found = malformed(b'{"jsonrpc":"2.0","method":"n","params":' + params + b"}")
    assert (found.code, found.is_notification, found.answerable) == (code, True, False)


# What is none: text


@pytest.mark.parametrize(
    ("text", "code", "reason"),
    [
        (b"", PARSE_ERROR, "json"),
        (b"   ", PARSE_ERROR, "json"),
        (b"{", PARSE_ERROR, "json"),
        (CALL[:-1], PARSE_ERROR, "json"),
        (CALL + b"x", PARSE_ERROR, "json"),
        (CALL.replace(b'"hi"', b"NaN"), PARSE_ERROR, "json"),
        (CALL.replace(b'"hi"', b"Infinity"), PARSE_ERROR, "json"),
        (CALL.replace(b'"hi"', b"-Infinity"), PARSE_ERROR, "json"),
        (CALL.replace(b'"hi"', b"'hi'"), PARSE_ERROR, "json"),
        (CALL.replace(b"hi", b"h\ti"), PARSE_ERROR, "json"),
        (CALL.replace(b"hi", b"h\x00i"), PARSE_ERROR, "json"),
        (CALL.replace(b'"hi"', b"01"), PARSE_ERROR, "json"),
        (CALL.replace(b"hi", b"\xff"), PARSE_ERROR, "utf8"),
        (CALL.replace(b"hi", b"\xed\xa0\x80"), PARSE_ERROR, "utf8"),
        (CALL.replace(b"hi", b"\xc0\xaf"), PARSE_ERROR, "utf8"),
        (CALL.replace(b"hi", b"\\ud800"), PARSE_ERROR, "utf8"),
        (CALL.replace(b"hi", b"\\udc00"), PARSE_ERROR, "utf8"),
        (CALL.replace(b"hi", b"\\ud800\\ud800"), PARSE_ERROR, "utf8"),
        (CALL.replace(b"hi", b"\\ud800x"), PARSE_ERROR, "utf8"),
        (b"\xef\xbb\xbf\xef\xbb\xbf" + CALL, PARSE_ERROR, "utf8"),
        (CALL.replace(b'"hi"', b"18446744073709551616"), INVALID_REQUEST, "number"),
        (CALL.replace(b'"hi"', b"-9223372036854775809"), INVALID_REQUEST, "number"),
        (CALL.replace(b'"hi"', b"1" * 5000), INVALID_REQUEST, "number"),
        (CALL.replace(b'"hi"', b"0." + b"1" * 5000), INVALID_REQUEST, "number"),
        (CALL.replace(b'"hi"', b"1e999"), INVALID_REQUEST, "number"),
        (CALL.replace(b'"hi"', b"-1e999"), INVALID_REQUEST, "number"),
        (CALL.replace(b'"hi"', b"[" * 126 + b"]" * 126), INVALID_REQUEST, "depth"),
        (CALL.replace(b'"hi"', b"[" * 900 + b"]" * 900), INVALID_REQUEST, "depth"),
        (CALL.replace(b'"hi"', b"[" * 5000 + b"]" * 5000), INVALID_REQUEST, "depth"),
        (CALL.replace(b'"hi"', b'{"a":' * 900 + b"1" + b"}" * 900), INVALID_REQUEST, "depth"),
        (CALL.replace(b'"hi"', b"[" + b"[]," * 150_000 + b"1]"), INVALID_REQUEST, "members"),
    ],
)
def test_refused_text_keeps_its_id(text: bytes, code: int, reason: str) -> None:
    found = malformed(text)
    assert (found.code, found.reason) == (code, reason)
    assert found.id == (12 if b'"id":12' in text else None)
    assert found.answerable
    assert len(found.message) < 200


@pytest.mark.parametrize(
    "value",
    [
        b"18446744073709551615",
        b"-9223372036854775808",
        b'"18446744073709551616"',
        b'"' + b"1" * 5000 + b'"',
        b"1.5e300",
        b"1e-999",
        b"[" * 125 + b"]" * 125,
        b'"' + b"[" * 500 + b'"',
        b'"\\ud83d\\ude00"',
        b'"\\u0000"',
        b'"' + b"," * 300_000 + b'"',
        b"[" + b"1," * 150_000 + b"1]",
    ],
)
def test_what_lies_within_the_limits_is_read_exactly(value: bytes) -> None:
    message = parse(CALL.replace(b'"hi"', value))
    assert isinstance(message, Request)
    assert message.params is not None
    assert message.params["arguments"]["text"] == json.loads(value)


def test_the_id_counts_wherever_it_stands() -> None:
    text = b'{"params":{"id":5,"x":"\\"id\\":6"},"method":"x","bad":"\\ud800","jsonrpc":"2.0","id":"last"}'
    assert malformed(text).id == "last"
    assert scan_id(text) == "last"


def test_a_huge_number_as_id_is_no_id() -> None:
    found = malformed(b'{"jsonrpc":"2.0","id":18446744073709551616,"method":"x"}')
    assert (found.code, found.id, found.reason) == (INVALID_REQUEST, None, "number")


def test_limits_are_settings() -> None:
    deep = b'{"jsonrpc":"2.0","method":"x","params":' + b'{"a":' * 200 + b"1" + b"}" * 201
    assert isinstance(parse(deep), Malformed)
    assert isinstance(parse(deep, ParseLimits(max_depth=201)), Notification)
    assert isinstance(parse(deep, ParseLimits(max_depth=200)), Malformed)
    wide = b'{"jsonrpc":"2.0","method":"x","params":{"a":[' + b"1," * 250_000 + b"1]}}"
    assert isinstance(parse(wide), Malformed)
    assert isinstance(parse(wide, ParseLimits(max_members=300_000)), Notification)


@pytest.mark.parametrize(
    ("text", "is_request"),
    [
        (b'{"jsonrpc":"2.0","id":7,"method":"ping","params":{"a":"\\ud800"}}', True),
        (b'{"jsonrpc":"2.0","method":"ping","params":{"a":"\xff"},"id":"x"}', True),
        (b'{"jsonrpc":"2.0","id":7,"method":"ping","params":{"a":1e999}}', True),
        (b'{"jsonrpc":"2.0","id":7,"method":"ping","params":[]}', True),
        (b'{"jsonrpc":"2.0","id":7,"method":"ping","params":1}', True),
        (b'{"jsonrpc":"1.0","id":7,"method":"ping"}', True),
        (b'{"jsonrpc":"2.0","id":7,"method":5}', True),
        (b'{"jsonrpc":"2.0","id":7,"method":"ping","result":{}}', False),
        (b'{"jsonrpc":"2.0","id":7,"method":"ping","result":{"a":"\xff"}}', False),
        (b'{"jsonrpc":"2.0","id":null,"method":"ping"}', False),
        (b'{"jsonrpc":"2.0","id":null,"method":"ping","params":{"a":"\xff"}}', False),
        (b'{"jsonrpc":"2.0","method":"ping","params":[]}', False),
        (b'{"jsonrpc":"2.0","id":7}', False),
        (b'{"jsonrpc":"1.0","id":7,"result":{}}', False),
        (b'{"jsonrpc":"2.0","id":7,"result":{"a":"\xff"}}', False),
        (b"7", False),
        (b"Listening on port 80", False),
    ],
)
def test_what_is_no_message_may_be_a_request_all_the_same(text: bytes, is_request: bool) -> None:
    """So that who sent it can be answered, also where nothing else that is garbage is."""
    message = parse(text)
    assert isinstance(message, Malformed)
    assert message.is_request is is_request


def test_oversize_names_the_limit_and_the_id() -> None:
    scanner = IdScanner()
    scanner.feed(CALL)
    told = "message larger than 4,096 bytes"
    assert oversize(scanner, 4096) == Malformed(INVALID_REQUEST, told, 12, "size", is_request=True)
    scanner = IdScanner()
    scanner.feed(b'{"id":3,"result":{"a":"')
    assert oversize(scanner, 10).is_response


# Batches, with the examples of JSON-RPC 2.0 section 7


def test_batch_keeps_order_and_broken_members() -> None:
    message = parse(b'[{"jsonrpc":"2.0","id":1,"method":"a"},1,{"jsonrpc":"2.0","method":"b"},[],{"foo":"boo"}]')
    assert isinstance(message, Batch)
    assert message.members[0] == Request(1, "a")
    assert message.members[2] == Notification("b")
    broken = [message.members[i] for i in (1, 3, 4)]
    assert all(isinstance(m, Malformed) and (m.code, m.id) == (INVALID_REQUEST, None) for m in broken)


@pytest.mark.parametrize("count", [1, 100])
def test_batch_of_allowed_size(count: int) -> None:
    message = parse(b"[" + b",".join([b'{"jsonrpc":"2.0","method":"b"}'] * count) + b"]")
    assert isinstance(message, Batch)
    assert len(message.members) == count


@pytest.mark.parametrize("text", [b"[]", b"[" + b",".join([b'{"jsonrpc":"2.0","method":"b"}'] * 101) + b"]"])
def test_batch_of_forbidden_size(text: bytes) -> None:
    found = malformed(text)
    assert (found.code, found.id, found.reason) == (INVALID_REQUEST, None, "batch")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b'{"jsonrpc": "2.0", "method": "foobar, "params": "bar", "baz]', PARSE_ERROR),
        (b'{"jsonrpc": "2.0", "method": 1, "params": "bar"}', INVALID_REQUEST),
        (
            b'[{"jsonrpc": "2.0", "method": "sum", "params": {}, "id": "1"},{"jsonrpc": "2.0", "method"]',
            PARSE_ERROR,
        ),
        (b"[]", INVALID_REQUEST),
    ],
)
def test_examples_of_json_rpc(text: bytes, code: int) -> None:
    found = malformed(text)
    assert (found.code, found.id, found.answerable) == (code, None, True)


# Never raises


def test_twenty_thousand_mutations() -> None:
    rng = random.Random(20260728)
    seeds = [
        CALL,
        b'{"jsonrpc":"2.0","id":"a\\u0041\\ud83d\\ude00","method":"x","params":{"n":[-1.5e3,null,{"id":2}]}}',
        b'{"jsonrpc":"2.0","id":3,"error":{"code":-32602,"message":"no","data":{"k":[true,false]}}}',
        b'{"jsonrpc":"2.0","id":4,"result":{"content":[{"type":"text","text":"id"}]}}',
        b'[{"jsonrpc":"2.0","id":4,"result":{}},{"jsonrpc":"2.0","method":"y"}]',
        b'{"jsonrpc":"2.0","id":9223372036854775807,"method":"x","params":{"n":18446744073709551615}}',
    ]
    kinds = set()
    for _ in range(20_000):
        text = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(text))
            action = rng.randrange(4)
            if action == 0:
                text[at] = rng.randrange(256)
            elif action == 1:
                del text[at : at + rng.randint(1, 5)]
            elif action == 2:
                text[at:at] = rng.choice([b'"', b"\\", b"{", b"]", b",", b"0" * 20, b"\xff", b"null", b"1e999"])
            else:
                other = rng.choice(seeds)
                text[at:at] = other[rng.randrange(len(other)) :][:20]
            if not text:
                text = bytearray(b" ")
        message = parse(bytes(text))
        kinds.add(type(message))
        if not isinstance(message, (Malformed, Batch)):
            value = json.loads(bytes(text))
            assert message.id == value.get("id") if not isinstance(message, Notification) else "id" not in value
    assert kinds == {Request, Notification, Response, ErrorResponse, Malformed, Batch}


@given(st.binary() | st.text().map(lambda text: text.encode("utf-8", "surrogatepass")))
@settings(deadline=None, max_examples=300)
def test_any_bytes_give_a_message(data: bytes) -> None:
    assert isinstance(parse(data), (Request, Notification, Response, ErrorResponse, Malformed, Batch))


@given(JSON_VALUES)
@settings(deadline=None, max_examples=200)
def test_any_json_gives_a_message_without_touching_the_text(value: Any) -> None:
    message = parse(encode_notification("n", {"v": value}))
    assert message == Notification("n", {"v": value})
    assert isinstance(parse(encode(value)), (Request, Notification, Response, ErrorResponse, Malformed, Batch))


# Encoding


@given(IDS, st.text(), PARAMS)
@settings(deadline=None, max_examples=100)
def test_round_trips(id: str | int, method: str, params: dict[str, Any]) -> None:
    assert parse(encode_request(id, method, params)) == Request(id, method, params)
    assert parse(encode_request(id, method)) == Request(id, method, None)
    assert parse(encode_notification(method, params)) == Notification(method, params)
    assert parse(encode_notification(method)) == Notification(method, None)
    assert parse(encode_result(id, params)) == Response(id, params)
    assert parse(encode_error(id, -32000, method, params)) == ErrorResponse(id, -32000, method, params)
    assert b"\n" not in encode_result(id, params)


def test_text_of_messages() -> None:
    assert encode_request(1, "m", {"a": 1}) == b'{"jsonrpc":"2.0","id":1,"method":"m","params":{"a":1}}'
    assert encode_request("1", "m") == b'{"jsonrpc":"2.0","id":"1","method":"m"}'
    assert encode_notification("m") == b'{"jsonrpc":"2.0","method":"m"}'
    assert encode_result(1, {}) == b'{"jsonrpc":"2.0","id":1,"result":{}}'
    assert encode_error(1, -1, "no") == b'{"jsonrpc":"2.0","id":1,"error":{"code":-1,"message":"no"}}'
    assert encode_error(1, -1, "no", [2]).endswith(b'"message":"no","data":[2]}}')


def test_an_error_without_id_says_null_or_nothing() -> None:
    assert encode_error(None, -1, "no") == b'{"jsonrpc":"2.0","error":{"code":-1,"message":"no"}}'
    assert encode_error(None, -1, "no", null_id=True).startswith(b'{"jsonrpc":"2.0","id":null,')
    assert encode_error(1, -1, "no", null_id=True).startswith(b'{"jsonrpc":"2.0","id":1,')


class Color(enum.Enum):
    NAN = float("nan")


@dataclasses.dataclass
class Point:
    x: int


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
        -float("inf"),
        {"a": [1, (2, float("nan"))]},
        {"a": None, "b": {"c": float("inf")}},
        Color.NAN,
        2**64,
        -(2**63) - 1,
        "\ud800",
        {"\udfff": 1},
        {1: 2},
        {1, 2},
        b"bytes",
        object(),
        Point(1),
        datetime.datetime(2026, 1, 1),
    ],
)
def test_what_json_cannot_carry_is_refused(value: Any) -> None:
    with pytest.raises(Unencodable) as caught:
        encode_result(1, {"value": value})
    assert isinstance(caught.value, LocalError)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), Color.NAN, [1.5, float("nan")], {"a": [float("nan")]}])
@pytest.mark.parametrize("beside", [0, 1_000])
def test_what_json_cannot_carry_is_refused_beside_a_large_text(value: Any, beside: int) -> None:
    text = "a null " * 10_000
    around: dict[str, Any] = {"text": text, "more": [None] * beside, "value": None}
    assert orjson.loads(encode(around)) == around
    with pytest.raises(Unencodable):
        encode({**around, "value": value})


def test_too_deep_or_circular_is_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(Unencodable):
        encode(circle)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": None, "b": "null"}, b'{"a":null,"b":"null"}'),
        (2**64 - 1, b"18446744073709551615"),
        (-(2**63), b"-9223372036854775808"),
        ((1, [2.5]), b"[1,[2.5]]"),
        ({"a": orjson.Fragment(b'{"b":null}')}, b'{"a":{"b":null}}'),
        ([orjson.Fragment(b'{\n  "b": 1\n}')], b'[{   "b": 1 }]'),
        ("\u2028\n", '"\u2028\\n"'.encode()),
    ],
)
def test_what_json_can_carry(value: Any, text: bytes) -> None:
    assert encode(value) == text


# Large messages are looked through in pieces


@pytest.mark.parametrize("place", [*range((1 << 18) - 22, (1 << 18) + 3, 4), 700_000])
def test_a_number_that_does_not_fit_is_found_wherever_pieces_meet(place: int) -> None:
    head = b'{"jsonrpc":"2.0","id":1,"method":"m","params":{"a":"'
    text = (
        head
        + b"x" * (place - len(head) - 6)
        + b'","n":1'
        + b"8446744073709551616"
        + b',"b":"'
        + b"x" * 300_000
        + b'"}}'
    )
    assert text.index(b"18446744073709551616") == place
    refused = parse(text)
    assert isinstance(refused, Malformed)
    assert (refused.id, refused.reason) == (1, "number")
    assert isinstance(parse(text.replace(b"18446744073709551616", b"18446744073709551615")), Request)


@pytest.mark.parametrize("filler", [b"a", b"1a", b"12345 ", b"a" * 300 + b"1234567890123456789"])
@pytest.mark.parametrize("at", [0, 1, 17, 18, 19, 4_003, 100_003, 299_980])
@pytest.mark.parametrize("size", [4_500, 300_000])
def test_a_number_beyond_64_bits_is_found_wherever_it_stands_in_a_large_message(
    at: int, filler: bytes, size: int
) -> None:
    text = (filler * size)[:size]
    before, behind = text[:at], text[at:]
    good = b'{"jsonrpc":"2.0","method":"x","params":{"a":"%b","n":%d,"b":"%b"}}'
    assert isinstance(parse(good % (before, 2**63 - 1, behind)), Notification)
    message = parse(good % (before, 2**64, behind))
    assert isinstance(message, Malformed)
    assert message.reason == "number"


def test_a_byte_order_mark_is_skipped() -> None:
    assert parse(b"\xef\xbb\xbf" + CALL) == parse(CALL)
