"""Accept and Content-Type, as they should be and as they come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.yardsticks import assert_costs
from trimcp.transports.http.endpoint.accept import accepts, is_compressed, is_json

JSON, SSE = "application/json", "text/event-stream"


@pytest.mark.parametrize(
    ("header", "json", "sse"),
    [
        (None, True, True),
        ("", True, True),
        (" , ,", True, True),
        (f"{JSON}, {SSE}", True, True),
        (JSON, True, False),
        (SSE, False, True),
        ("*/*", True, True),
        ("application/*", True, False),
        ("text/*", False, True),
        ("text/html", False, False),
        ("APPLICATION/Json ,Text/EVENT-stream", True, True),
        ("application/json;charset=utf-8,text/event-stream;q=0.1", True, True),
        # The most specific decides, wherever it stands.
        ("*/*, application/json;q=0", False, True),
        ("application/json;q=0, */*", False, True),
        ("text/*;q=0, */*", True, False),
        ("*/*;q=0, text/event-stream", False, True),
        ("*/*;q=0", False, False),
        ("application/json;q=0, application/json;q=0.5", True, False),
        ("application/json;q=0, application/json", True, False),
        ("application/json, application/json;q=0", True, False),
        # Weights.
        ("application/json; q=0.000, text/event-stream; Q=0.001", False, True),
        ("application/json ; q = 0 , text/event-stream", False, True),
        ('application/json;q="0", text/event-stream', False, True),
        ("application/json;x=y;q=0;z, text/event-stream", False, True),
        # What makes no sense counts for nothing.
        ("application/json;q=zero", True, False),
        ("application/json;q=0.0001", True, False),
        ("application/json;q=-0", True, False),
        ("application/json;q", True, False),
        ("garbage", True, True),
        ("garbage, application/json", True, False),
        ("application/json text/event-stream", True, True),
        ("*", True, True),
        ("*/json", True, True),
        ("*/event-stream, application/json", True, False),
        ("application/", True, True),
        ('text/html;x="a,application/json;q=1", text/event-stream', False, True),
        ('text/html;x="\\",application/json,", text/event-stream', False, True),
        ('text/html;x="never closed, application/json', False, False),
        ('"application/json", text/event-stream', False, True),
    ],
)
def test_what_a_client_takes(header: str | None, json: bool, sse: bool) -> None:
    assert accepts(header) == (json, sse)


@pytest.mark.parametrize(
    "value",
    [
        *(JSON, "Application/JSON", " application/json ", "application/json;", "application/json; charset=utf-8"),
        *('application/json;charset="UTF-8"', "application/json; charset=utf8", "application/json; v=1; charset=utf-8"),
        *("application/json; charset", 'application/json; profile="a;charset=latin-1"', "application/json;;"),
    ],
)
def test_a_body_of_json(value: str) -> None:
    assert is_json(value)


@pytest.mark.parametrize(
    "value",
    [
        *(None, "", "text/plain", "application/jsonp", "application/json-patch+json", "application/vnd.x+json"),
        *("application/json; charset=latin-1", "application/json; charset=utf-16"),
        "application/json, application/json",
        *("text/plain; application/json", "application/json text/plain", "json", "*/*", "application/*"),
        *("text/plain;x=application/json", '"application/json"'),
    ],
)
def test_a_body_of_something_else(value: str | None) -> None:
    assert not is_json(value)


pieces = st.lists(
    st.sampled_from([JSON, SSE, "*/*", "text/*", ";", ",", "q=0", "q=1", "=", '"', "\\", " ", "\t", "x", "/", "\xe9"]),
    max_size=30,
).map("".join)


@given(st.one_of(pieces, st.text(st.characters(max_codepoint=255))))
def test_nothing_a_client_writes_breaks_it(text: str) -> None:
    assert accepts(text) in [(json, sse) for json in (True, False) for sse in (True, False)]
    assert is_json(text) in (True, False)


@given(st.permutations([JSON, SSE + ";q=0", "text/*", "*/*;q=0.5"]))
def test_their_order_means_nothing(ranges: list[str]) -> None:
    assert accepts(", ".join(ranges)) == (True, False)


@pytest.mark.parametrize("piece", [",", ";", '"', "\\", '"\\', ' "', "a/b,", "a/b;", "a=", "text/*;q=0,", ";\t ", "a/"])
def test_a_long_header_costs_no_more_than_its_length(piece: str) -> None:
    def read(size: int) -> None:
        text = "application/json;" + piece * (size // len(piece))
        accepts(text)
        is_json(text)

    # Ten times the text: a hundred times the work if anything in it were quadratic.
    assert_costs(lambda: read(200_000), at_most=40, times=lambda: read(20_000))


@pytest.mark.parametrize(
    ("header", "compressed"),
    [(None, False), ("", False), ("identity", False), (" Identity ", False), ("gzip", True), ("identity, br", True)],
)
def test_a_body_comes_as_it_is(header: str | None, compressed: bool) -> None:
    assert is_compressed(header) is compressed
