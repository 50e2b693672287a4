from __future__ import annotations

import enum
import tracemalloc
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.yardsticks import assert_costs
from trimcp.errors import LocalError
from trimcp.framing.headers import (
    Mirror,
    check_params,
    check_request,
    decode_value,
    encode_value,
    find_mirrors,
    param_headers,
    request_headers,
)
from trimcp.wire.jsonrpc import Unencodable

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
safe_integers = st.integers(-(2**53) + 1, 2**53 - 1)


# Values


@pytest.mark.parametrize(
    ("value", "text"),
    [
        # The examples of the specification and of SEP-2243.
        ("us-west1", "us-west1"),
        ("Hello, 世界", "=?base64?SGVsbG8sIOS4lueVjA==?="),
        (" padded ", "=?base64?IHBhZGRlZCA=?="),
        ("line1\nline2", "=?base64?bGluZTEKbGluZTI=?="),
        ("=?base64?literal?=", "=?base64?PT9iYXNlNjQ/bGl0ZXJhbD89?="),
        (" us-west1", "=?base64?IHVzLXdlc3Qx?="),
        ("us-west1 ", "=?base64?dXMtd2VzdDEg?="),
        ("us west 1", "us west 1"),
        ("\tindented", "=?base64?CWluZGVudGVk?="),
        ("日本語", "=?base64?5pel5pys6Kqe?="),
        ("", ""),
        (True, "true"),
        (False, "false"),
        (42, "42"),
        (-7, "-7"),
        (0, "0"),
        # Corners.
        ("a\tb", "=?base64?YQli?="),
        ("\x7f", "=?base64?fw==?="),
        ("~!", "~!"),
        ("=?base64?=", "=?base64?PT9iYXNlNjQ/PQ==?="),
        ("=?base64??=", "=?base64?PT9iYXNlNjQ/Pz0=?="),
        ("=?base64?x", "=?base64?x"),
        ("=?BASE64?eA==?=", "=?BASE64?eA==?="),
        (2**53 - 1, "9007199254740991"),
        (-(2**53) + 1, "-9007199254740991"),
        (3.0, "3"),
        (2.5, "2.5"),
    ],
)
def test_a_value_and_its_header(value: Any, text: str) -> None:
    assert encode_value(value) == text
    if isinstance(value, str):
        assert decode_value(text) == value


@given(texts)
@example("=?base64?YQ==?=")
@example("\u2028")
def test_any_text_survives_a_header(text: str) -> None:
    header = encode_value(text)
    assert header.isascii()
    assert header.isprintable()
    assert header == header.strip()
    assert decode_value(header) == text


@pytest.mark.parametrize("value", [2**53, -(2**53), 10**3000, 1e300])
def test_an_integer_that_would_be_rounded_is_refused(value: float) -> None:
    with pytest.raises(LocalError, match="beyond 53 bits"):
        encode_value(value)


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(Unencodable):
        encode_value("a\ud800")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("=?base64?SGVsbG8?=", "not valid base64"),  # padding left out
        ("=?base64?SGVsbG8==?=", "not valid base64"),
        ("=?base64?SGVs!!!bG8=?=", "not valid base64"),
        ("=?base64?SGVs bG8=?=", "not valid base64"),
        ("=?base64?_-8=?=", "not valid base64"),  # the alphabet of URLs
        ("=?base64?YR==?=", "not valid base64"),  # spare bits that are not zero
        ("=?base64?=?=", "not valid base64"),
        ("=?base64?YQ==YQ==?=", "not valid base64"),
        ("=?base64?/w==?=", "not UTF-8"),
        ("=?base64?7aCA?=", "not UTF-8"),  # a surrogate
        ("caf\xe9", "characters"),
        ("a\x00b", "characters"),
        ("a\x7f", "characters"),
        ("a\nb", "characters"),
        ("a\n", "characters"),
        ("世界", "characters"),
    ],
)
def test_a_malformed_header_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        decode_value(text)


@pytest.mark.parametrize("text", ["SGVsbG8=", "=?base64?SGVsbG8=", "SGVsbG8=?=", "=?BASE64?SGVsbG8=?=", "=?base64?="])
def test_without_both_marks_it_is_a_literal(text: str) -> None:
    assert decode_value(text) == text


@given(st.text(max_size=60) | st.binary(max_size=40).map(lambda data: f"=?base64?{data.decode('latin-1')}?="))
def test_decoding_refuses_or_returns_what_is_encoded_alike(text: str) -> None:
    try:
        value = decode_value(text)
    except ValueError:
        return
    assert decode_value(encode_value(value)) == value


# Requests


def test_the_headers_of_a_request() -> None:
    assert request_headers("R", "ping") == {"mcp-protocol-version": "R", "mcp-method": "ping"}
    headers = request_headers("R", "resources/read", "file:///ü")
    assert headers["mcp-name"] == "=?base64?ZmlsZTovLy/DvA==?="
    assert check_request(headers, "resources/read", {"uri": "file:///ü"}, named="uri", version="R") is None


@given(texts, texts)
def test_only_its_own_name_passes(name: str, other: str) -> None:
    headers = request_headers("R", "tools/call", name)
    wrong = check_request(headers, "tools/call", {"name": other}, named="name", version="R")
    assert (wrong is None) == (name == other)


GOOD = {"mcp-protocol-version": "R", "mcp-method": "tools/call", "mcp-name": "foo"}


@pytest.mark.parametrize(
    ("change", "params", "complaint"),
    [
        ({"mcp-method": None}, {"name": "foo"}, "the Mcp-Method header is missing"),
        ({"mcp-method": "TOOLS/CALL"}, {"name": "foo"}, "'TOOLS/CALL' does not match body value 'tools/call'"),
        ({"mcp-method": "=?base64?dG9vbHMvY2FsbA==?="}, {"name": "foo"}, "Mcp-Method header value"),
        ({"mcp-protocol-version": None}, {"name": "foo"}, "the MCP-Protocol-Version header is missing"),
        ({"mcp-protocol-version": "S"}, {"name": "foo"}, "MCP-Protocol-Version header value 'S' .* body value 'R'"),
        ({"mcp-name": None}, {"name": "foo"}, "the Mcp-Name header is missing"),
        ({}, {"name": "bar"}, "Mcp-Name header value 'foo' does not match body value 'bar'"),
        ({"mcp-name": "Foo"}, {"name": "foo"}, "Mcp-Name header value"),
        ({"mcp-name": "=?base64?Zm9v?=", "x": "y"}, {"name": "=?base64?Zm9v?="}, "Mcp-Name header value"),
        ({"mcp-name": "=?base64?Zm9v"}, {"name": "foo"}, "Mcp-Name header value"),
        ({"mcp-name": "=?base64?Zm9?="}, {"name": "foo"}, "Mcp-Name header is malformed: it is not valid base64"),
        ({"mcp-name": "caf\xe9"}, {"name": "caf\xe9"}, "Mcp-Name header is malformed"),
        ({}, {}, "the body has no name"),
        ({}, {"name": 3}, "the body has no name"),
        ({}, None, "the body has no name"),
    ],
)
def test_headers_at_odds_with_the_body(change: dict[str, Any], params: Any, complaint: str) -> None:
    headers = {name: value for name, value in {**GOOD, **change}.items() if value is not None}
    found = check_request(headers, "tools/call", params, named="name", version="R")
    assert found is not None
    with pytest.raises(AssertionError, match=f"^Header mismatch: .*{complaint}"):
        raise AssertionError(found)


@pytest.mark.parametrize(
    ("headers", "params"),
    [
        (GOOD, {"name": "foo"}),
        ({**GOOD, "mcp-name": "=?base64?Zm9v?="}, {"name": "foo"}),
        ({**GOOD, "mcp-name": ""}, {"name": ""}),
        ({**GOOD, "mcp-param-x": "whatever", "accept": "*/*"}, {"name": "foo"}),
        # Wrong, but the body by itself: whoever reads the parameters says so.
        ({name: value for name, value in GOOD.items() if name != "mcp-name"}, {"name": None}),
    ],
)
def test_headers_that_say_what_the_body_says(headers: dict[str, str], params: Any) -> None:
    assert check_request(headers, "tools/call", params, named="name", version="R") is None


def test_a_name_nobody_asked_for_is_ignored() -> None:
    assert check_request({**GOOD, "mcp-method": "m"}, "m", None, named=None, version="R") is None


def test_what_a_stranger_sent_is_quoted_briefly_and_escaped() -> None:
    headers = {**GOOD, "mcp-name": "a" * 5000}
    found = check_request(headers, "tools/call", {"name": "\x1b[31m\n" * 1000}, named="name", version="R")
    assert found is not None
    assert found.isprintable()
    assert len(found) < 300


# What a schema wants repeated


def properties(**schemas: Any) -> dict[str, Any]:
    return {"type": "object", "properties": schemas}


def marked(name: Any, type: Any = "string", **more: Any) -> dict[str, Any]:
    return {"type": type, "x-mcp-header": name, **more}


def test_the_annotations_of_a_schema() -> None:
    schema = properties(
        region=marked("Region"),
        plain={"type": "string"},
        count=marked("X-Count", "integer"),
        inner=properties(deeper=properties(flag=marked("flag", "boolean"))),
        method=marked("Method"),
        odd=marked("!#$%&'*+-.^_`|~9"),
        yes=True,
    )
    mirrors = find_mirrors(schema)
    assert {mirror.header: mirror.path for mirror in mirrors} == {
        "Mcp-Param-Region": ("region",),
        "Mcp-Param-X-Count": ("count",),
        "Mcp-Param-flag": ("inner", "deeper", "flag"),
        "Mcp-Param-Method": ("method",),
        "Mcp-Param-!#$%&'*+-.^_`|~9": ("odd",),
    }
    assert mirrors[0] == Mirror("Mcp-Param-Region", ("region",))
    assert mirrors[0].key == "mcp-param-region"


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        properties(),
        # Data that looks like an annotation, and a property of that name.
        {"default": marked("a b"), "examples": [marked("a b")], "const": marked(""), "enum": [marked(1)]},
        properties(**{"x-mcp-header": {"type": "string"}}),
        {"$defs": {"x-mcp-header": {"type": "array"}}, "required": ["x-mcp-header"], "x-other": marked("")},
        {"properties": []},
        {"allOf": {"x-mcp-header": 1}},
    ],
)
def test_schemas_without_an_annotation(schema: Any) -> None:
    assert find_mirrors(schema) == ()


@pytest.mark.parametrize(
    ("schema", "complaint"),
    [
        (properties(a=marked("")), "x-mcp-header of 'a' is no name of an HTTP header"),
        (properties(a=marked("My Region")), "no name"),
        (properties(a=marked("Region:Primary")), "no name"),
        (properties(a=marked("Région")), "no name"),
        (properties(a=marked("Region\t1")), "no name"),
        (properties(a=marked("Region\n")), "no name"),
        (properties(a=marked("Region\r\nX: y")), "no name"),
        (properties(a=marked(None)), "no name"),
        (properties(a=marked(10**5000)), "no name"),
        (properties(a=marked(["Region"])), "no name"),
        (properties(a=marked("Region"), b=marked("Region")), "'Region' is there twice"),
        (properties(a=marked("MyField"), b=properties(c=marked("myfield"))), "'myfield' is there twice"),
        (properties(a=marked("A", "number")), "of 'a': only a string, integer or boolean"),
        (properties(a=marked("A", "object")), "only a string"),
        (properties(a=marked("A", "array")), "only a string"),
        (properties(a=marked("A", "null")), "only a string"),
        (properties(a=marked("A", ["string", "null"])), "only a string"),
        (properties(a=marked("A", {})), "only a string"),
        (properties(a={"x-mcp-header": "A"}), "only a string"),
        (properties(a={"x-mcp-header": "A", "anyOf": [{"type": "string"}]}), "only a string"),
        (properties(a=properties(b=marked("A", "number"))), "of 'a.b': only"),
        ({"type": "object", "x-mcp-header": "A"}, "not `properties` alone"),
        *(
            ({keyword: place}, "not `properties` alone")
            for keyword, place in [
                ("items", marked("A")),
                ("items", [marked("A")]),
                ("prefixItems", [True, marked("A")]),
                ("contains", properties(a=marked("A"))),
                ("additionalItems", marked("A")),
                ("additionalProperties", marked("A")),
                ("unevaluatedProperties", marked("A")),
                ("unevaluatedItems", marked("A")),
                ("patternProperties", {".*": marked("A")}),
                ("propertyNames", marked("A")),
                ("dependentSchemas", {"a": properties(a=marked("A"))}),
                ("dependencies", {"a": properties(a=marked("A")), "b": ["a"]}),
                ("oneOf", [properties(a=marked("A"))]),
                ("anyOf", [properties(a=marked("A"))]),
                ("allOf", [properties(a=marked("A"))]),
                ("not", properties(a=marked("A"))),
                ("if", properties(a=marked("A"))),
                ("then", properties(a=marked("A"))),
                ("else", properties(a=marked("A"))),
                ("contentSchema", marked("A")),
                ("$defs", {"x": marked("A")}),
                ("definitions", {"x": properties(a=marked("A"))}),
            ]
        ),
        (properties(a={"type": "array", "items": properties(b=marked("A"))}), "not `properties` alone"),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": marked("A")}}, "not `properties` alone"),
    ],
)
def test_an_invalid_annotation_makes_the_tool_invalid(schema: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        find_mirrors(schema)
    assert str(caught.value).isprintable()


def test_reasons_are_brief_whatever_the_schema() -> None:
    long = "\x1b" * 5000
    for schema in (properties(**{long: marked("")}), properties(a=marked("a" * 5000), b=marked("A" * 5000))):
        with pytest.raises(ValueError, match="x-mcp-header") as caught:
            find_mirrors(schema)
        assert len(str(caught.value)) < 300


def test_a_large_schema_takes_linear_time() -> None:
    small = properties(**{f"p{i}": properties(a=marked(f"H{i}")) for i in range(2_000)})
    large = properties(**{f"p{i}": properties(a=marked(f"H{i}")) for i in range(16_000)})
    assert_costs(lambda: find_mirrors(large), at_most=32, times=lambda: find_mirrors(small))


def test_a_deep_and_wide_schema_costs_little() -> None:
    schema: Any = marked("Leaf")
    for _ in range(2_000):
        schema = properties(a=schema)
    (mirror,) = find_mirrors(schema)
    assert len(mirror.path) == 2_000
    wide = properties(**{f"p{i}": {} for i in range(50_000)})
    for _ in range(100):
        wide = properties(a=wide)
    tracemalloc.start()
    try:
        assert find_mirrors(wide) == ()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200_000


# What a call repeats

MIRRORS = find_mirrors(
    properties(
        region=marked("Region"),
        count=marked("Count", "integer"),
        flag=marked("Flag", "boolean"),
        inner=properties(leaf=marked("Leaf")),
    )
)


class Colour(enum.Enum):
    RED = "réd"


def test_the_headers_of_a_call() -> None:
    arguments = {"region": "ü", "count": 42, "flag": False, "inner": {"leaf": ""}, "query": "x"}
    assert param_headers(MIRRORS, arguments) == {
        "mcp-param-region": "=?base64?w7w=?=",
        "mcp-param-count": "42",
        "mcp-param-flag": "false",
        "mcp-param-leaf": "",
    }
    assert param_headers(MIRRORS, {"region": Colour.RED}) == {"mcp-param-region": "=?base64?csOpZA==?="}


@pytest.mark.parametrize("inner", [None, "text", [1], {}, {"leaf": None}, {"leaf": {}}, {"leaf": [1]}])
def test_what_is_absent_or_null_is_not_repeated(inner: Any) -> None:
    assert param_headers(MIRRORS, {"region": None, "inner": inner}) == {}
    assert check_params(MIRRORS, {"region": None, "inner": inner}, {}) is None
    found = check_params(MIRRORS, {"region": None, "inner": inner}, {"mcp-param-leaf": ""})
    assert found == "Header mismatch: Mcp-Param-Leaf is sent, but the body has no value for it"


values = st.fixed_dictionaries(
    {},
    optional={
        "region": texts | st.none(),
        "count": safe_integers,
        "flag": st.booleans() | st.none(),
        "inner": st.fixed_dictionaries({}, optional={"leaf": texts}),
    },
)


@given(values, values)
def test_only_its_own_arguments_pass(arguments: dict[str, Any], others: dict[str, Any]) -> None:
    headers = param_headers(MIRRORS, arguments)
    assert check_params(MIRRORS, arguments, headers) is None
    differ = param_headers(MIRRORS, others) != headers
    assert (check_params(MIRRORS, others, headers) is not None) == differ


@pytest.mark.parametrize(
    ("value", "text", "same"),
    [
        (42, "42", True),
        (42, "42.0", True),
        (42.0, "42", True),
        (42.0, "42.000", True),
        (42, "4.2e1", True),
        (-7, "-7", True),
        (0, "-0", True),
        (42, "43", False),
        (42, "42.5", False),
        (42, "042", False),
        (42, "+42", False),
        (42, " 42", False),
        (42, "٤٢", False),
        (42, "0x2a", False),
        (42, "4_2", False),
        (42, "NaN", False),
        (42, "Infinity", False),
        (42, "1e9999", False),
        (42, "1e99999999999", False),
        (42, "", False),
        (42, "4" * 65, False),
        (1.5, "1.5", True),
        (1.5, "1.25", False),
        (0.1, "0.1", True),
        (0.1, "0.10", True),
        (42, "42." + "0" * 61, True),
        (42, "42." + "0" * 62, False),
        (2**53 + 1, "9007199254740993", True),
        (2**53 + 1, "9007199254740992", False),
        (1, "true", False),
        (True, "1", False),
        (True, "true", True),
        (True, "True", False),
        (False, "false", True),
        ("42", "42.0", False),
        ("true", "true", True),
        ("Hello", "=?base64?SGVsbG8=?=", True),
        ("Hello", "=?base64?SGVsbG8?=", False),
        ("Hello", "=?base64?SGVs!!!bG8=?=", False),
        ("SGVsbG8=", "SGVsbG8=", True),
        ("=?base64?SGVsbG8=?=", "=?base64?SGVsbG8=?=", False),
        ("us", "us\x00", False),
        ("é", "é", False),
    ],
)
def test_a_header_against_an_argument(value: Any, text: str, same: bool) -> None:
    found = check_params(MIRRORS, {"count": value}, {"mcp-param-count": text})
    assert (found is None) == same
    assert found is None or found.startswith("Header mismatch: Mcp-Param-Count header ")


def test_a_header_that_is_missing() -> None:
    found = check_params(MIRRORS, {"region": ""}, {"mcp-param-other": "x"})
    assert found == "Header mismatch: the Mcp-Param-Region header is missing"


def test_arguments_that_are_no_object_have_no_values() -> None:
    assert check_params(MIRRORS, [1], {}) is None
    assert check_params(MIRRORS, {"count": 5}, {"mcp-param-count": "5", "mcp-param-unknown": "\x00"}) is None
