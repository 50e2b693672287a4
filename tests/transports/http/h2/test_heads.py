"""Blocks of headers: read with memory, refused where they mean nothing, and written as every other codec reads them."""

from __future__ import annotations

import logging

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimcp.transports.http.h2.frames import Code, Http2Error
from trimcp.transports.http.h2.heads import (
    BlockReader,
    RequestFields,
    ResponseFields,
    limited_request,
    read_request,
    read_response,
    write_block,
)

REQUEST = [(":method", "POST"), (":scheme", "https"), (":authority", "a.test"), (":path", "/mcp?x=1")]


def reader(max_head: int = 64 * 1024) -> BlockReader[RequestFields]:
    return BlockReader(max_head, read_request)


def test_a_request_is_read() -> None:
    block = hpack.Encoder().encode([*REQUEST, ("x-a", "1"), ("x-a", "2"), ("cookie", "a=1"), ("cookie", "b=2")])
    head = reader().head(block)
    assert (head.method, head.scheme, head.path, head.length, head.protocol) == (
        *("POST", "https", "/mcp?x=1", None),
        None,
    )
    assert head.headers == {"host": "a.test", "x-a": "1, 2", "cookie": "a=1; b=2"}
    assert head.number == 8


def test_blocks_that_change_nothing_are_remembered_until_something_does() -> None:
    encoder, blocks = hpack.Encoder(), reader()
    first = blocks.head(encoder.encode(REQUEST))
    again = encoder.encode(REQUEST)
    second = blocks.head(again)
    assert second.headers == first.headers
    assert blocks.head(again) is second
    assert blocks.head(encoder.encode([*REQUEST, ("x-new", "1")])).headers["x-new"] == "1"
    assert blocks.head(encoder.encode(REQUEST)) is second  # what means the same is the same, however it is written


def test_the_codec_logs_nothing_of_our_headers_and_all_of_those_of_others(caplog: pytest.LogCaptureFixture) -> None:
    block = hpack.Encoder().encode([*REQUEST, ("authorization", "Bearer 7bd1")])
    caplog.set_level(logging.DEBUG, "hpack")
    assert reader().head(block).headers["authorization"] == "Bearer 7bd1"
    with pytest.raises(Http2Error):
        reader().head(b"\xff")
    assert not caplog.records
    hpack.Decoder().decode(block)
    assert "7bd1" in caplog.text


def test_a_table_that_was_emptied_makes_old_indices_invalid() -> None:
    encoder, blocks = hpack.Encoder(), reader()
    blocks.head(encoder.encode(REQUEST))
    block = encoder.encode(REQUEST)
    blocks.head(block)
    resized = b"\x20" + hpack.Encoder().encode([(":method", "GET"), (":scheme", "http"), (":path", "/")])
    assert blocks.head(resized).method == "GET"
    with pytest.raises(Http2Error) as caught:
        blocks.head(block)
    assert caught.value.code is Code.COMPRESSION_ERROR


LIMITED = {
    "at the end": [*REQUEST, ("x-a", "1"), ("grpc-timeout", "{}")],
    "before others": [*REQUEST, ("grpc-timeout", "{}"), ("x-a", "1")],
    "next to one that is alike": [*REQUEST, ("x-a", "grpc-timeout"), ("grpc-timeout", "{}")],
}


def limited(how: str, limit: str | None) -> list[tuple[str, str]]:
    fields = [(name, value.format(limit)) for name, value in LIMITED[how]]
    return [field for field in fields if field[0] != "grpc-timeout" or limit is not None]


@pytest.mark.parametrize("how", LIMITED)
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "in the table"])
def test_heads_are_remembered_without_a_calls_time_limit(how: str, plain: bool) -> None:
    encoder = hpack.Encoder()
    blocks = BlockReader(64 * 1024, read_request, limited_request)
    shared = None
    for limit in (None, "1S", "12345678m", "1S", None, "", "23u", "\xff1m", "1" * 40):
        fields = limited(how, limit)
        found = blocks.head(write_block(fields) if plain else encoder.encode(as_raw(fields)))
        expected = reader().head(hpack.Encoder().encode(as_raw(fields)))
        assert found.headers == expected.headers
        assert (found.size, found.number, found.path) == (expected.size, expected.number, "/mcp?x=1")
        shared = shared or found.shared or found
        assert (found.shared or found) is shared


def as_raw(fields: list[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields]


LIMIT = ("grpc-timeout", "1S")


@pytest.mark.parametrize(
    "fields",
    [
        [*REQUEST[:3], LIMIT, REQUEST[3]],
        [*REQUEST, ("grpc-timeout", "1S\n")],
        [*REQUEST, ("grpc-timeout", " 1S")],
        [*REQUEST[:3], LIMIT],
    ],
)
def test_a_time_limit_that_does_not_belong_there(fields: list[tuple[str, str]]) -> None:
    blocks = BlockReader(64 * 1024, read_request, limited_request)
    for known in (REQUEST, [*REQUEST, LIMIT]):
        blocks.head(write_block(known))
    with pytest.raises(Http2Error) as caught:
        blocks.head(hpack.Encoder().encode(as_raw(fields), huffman=False))
    assert caught.value.code is Code.PROTOCOL_ERROR


def test_two_time_limits_are_one_header() -> None:
    blocks = BlockReader(64 * 1024, read_request, limited_request)
    for more in ([], [LIMIT], [LIMIT, LIMIT], [LIMIT, LIMIT]):
        head = blocks.head(write_block([*REQUEST, *more]))
    assert head.headers["grpc-timeout"] == "1S, 1S"


def test_equal_trailers_are_read_once_until_the_table_changes() -> None:
    encoder = hpack.Encoder()
    blocks: BlockReader[ResponseFields] = BlockReader(64 * 1024, read_response)
    ended = [("grpc-status", "0"), ("x-cost", "7")]
    blocks.trailers(encoder.encode(ended))
    block = encoder.encode(ended)
    found = blocks.trailers(block)
    assert found == dict(ended)
    assert blocks.trailers(block) is found
    with pytest.raises(Http2Error):
        blocks.head(block)
    for n in range(200):  # until the index means another field
        blocks.trailers(encoder.encode([("x-new", f"{n:0100}")]))
    assert set(blocks.trailers(block)) == {"x-new"}


def test_what_is_remembered_is_bounded() -> None:
    blocks = BlockReader(64 * 1024, read_request, limited_request)
    once = blocks.head(write_block(REQUEST))
    for n in range(200):
        blocks.head(write_block([*REQUEST, ("x-new", f"{n:0200}"), LIMIT]))
    assert blocks.head(write_block(REQUEST)) is not once
    large = write_block([*REQUEST, ("x-large", "a" * 8_000)])
    assert blocks.head(large) is not blocks.head(large)


@pytest.mark.parametrize(
    "block",
    [b"\xff\xff\xff\xff\xff\xff", b"\x40", b"\x3f\xff\xff\xff\x7f", b"\xbe", b"\x80", b"\x82\x3f\xe1\x1f", b"\x00\x85"],
)
def test_blocks_that_are_no_hpack(block: bytes) -> None:
    with pytest.raises(Http2Error) as caught:
        reader().head(block)
    assert caught.value.code is Code.COMPRESSION_ERROR


def test_a_block_that_inflates_ends_the_connection() -> None:
    blocks = reader(1_000)
    block = hpack.Encoder().encode([(":method", "a" * 500)], huffman=False) + b"\xbe" * 1_000
    with pytest.raises(Http2Error) as caught:
        blocks.head(block)
    assert caught.value.code is Code.ENHANCE_YOUR_CALM


BROKEN = {
    "upper case": [*REQUEST, ("X-A", "1")],
    "a space in a name": [*REQUEST, ("x a", "1")],
    "an empty name": [*REQUEST, ("", "1")],
    "a line break in a value": [*REQUEST, ("x-a", "1\r\nx-b: 2")],
    "a null": [*REQUEST, ("x-a", "1\0")],
    "white space around a value": [*REQUEST, ("x-a", " 1")],
    "connection": [*REQUEST, ("connection", "close")],
    "transfer-encoding": [*REQUEST, ("transfer-encoding", "chunked")],
    "te": [*REQUEST, ("te", "gzip")],
    "a pseudo-header behind others": [*REQUEST[:3], ("x-a", "1"), REQUEST[3]],
    "an unknown pseudo-header": [*REQUEST, (":x", "1")],
    "a response's pseudo-header": [*REQUEST, (":status", "200")],
    "a pseudo-header twice": [*REQUEST, (":path", "/")],
    "no method": REQUEST[1:],
    "no scheme": [REQUEST[0], *REQUEST[2:]],
    "no path": REQUEST[:3],
    "an empty path": [*REQUEST[:3], (":path", "")],
    "a space in a path": [*REQUEST[:3], (":path", "/a b")],
    "a path that is no ASCII": [*REQUEST[:3], (":path", "/\xff")],
    "CONNECT with a path": [(":method", "CONNECT"), *REQUEST[1:]],
    "a protocol without CONNECT": [*REQUEST, (":protocol", "websocket")],
    "another host": [*REQUEST, ("host", "b.test")],
    "a length that is none": [*REQUEST, ("content-length", "-1")],
    "two lengths": [*REQUEST, ("content-length", "1"), ("content-length", "1")],
}


@pytest.mark.parametrize("what", BROKEN)
def test_requests_that_mean_nothing(what: str) -> None:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in BROKEN[what]]
    with pytest.raises(Http2Error) as caught:
        reader().head(hpack.Encoder().encode(raw))
    assert caught.value.code is Code.PROTOCOL_ERROR


@pytest.mark.parametrize(
    "fields", [[], [(":status", "20")], [(":status", "200"), (":status", "200")], [(":path", "/")]]
)
def test_responses_that_mean_nothing(fields: list[tuple[str, str]]) -> None:
    with pytest.raises(Http2Error):
        BlockReader(1_000, read_response).head(hpack.Encoder().encode(fields))


NAMES = st.from_regex(r"[a-z0-9!#$%&'*+.^_`|~-]{1,30}", fullmatch=True)
VALUES = st.text(st.characters(min_codepoint=0x21, max_codepoint=0xFF), max_size=300)


@given(st.lists(st.tuples(NAMES, VALUES), max_size=20))
def test_what_is_written_is_what_others_read(fields: list[tuple[str, str]]) -> None:
    found = hpack.Decoder(1 << 20).decode(write_block(fields), raw=True)
    assert [(name.decode(), value.decode("latin-1")) for name, value in found] == fields


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(block: bytes) -> None:
    blocks = reader()
    for _ in range(2):
        try:
            blocks.head(block)
        except Http2Error:
            pass


@pytest.mark.parametrize("field", [("x-a", "1\n"), ("x a", "1"), ("X-A", "1"), ("x-a", " 1"), ("", "1")])
def test_fields_that_cannot_be_sent(field: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="header"):
        write_block([field])
