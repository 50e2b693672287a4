"""gRPC's framing takes bytes in any pieces, keeps little of what is too large, and stops at what cannot be read."""

from __future__ import annotations

import random
import zlib

import pytest

from tests.yardsticks import assert_costs
from trimcp.framing.grpc import (
    GrpcDecoder,
    GrpcFault,
    GrpcStatus,
    decode_text,
    encode_text,
    encode_timeout,
    json_of,
    json_rpc_header,
    message_frame,
    status_of_refusal,
    whole_message,
)
from trimcp.wire.jsonrpc import Malformed

SIZES = (0, 1, 127, 128, 129, 16_383, 16_384, 70_000)


def tunnelled(text: bytes) -> bytes:
    return json_rpc_header(len(text)) + text


@pytest.mark.parametrize("piece", [1, 7, 1000, 1_000_000])
def test_messages_come_out_whole_however_they_arrive(piece: int) -> None:
    texts = [b"x" * size for size in SIZES]
    stream = b"".join(map(tunnelled, texts))
    decoder, found = GrpcDecoder(100_000, tunnel=True), []
    for start in range(0, len(stream), piece):
        decoder.feed(stream[start : start + piece])
        found += decoder.take(3)
        while decoder.behind:
            found += decoder.take(3)
    assert found == texts
    assert decoder.taken == len(stream)
    assert decoder.rounds == len(texts)
    assert not decoder.unfinished


def test_at_most_so_many_messages_are_taken_at_once() -> None:
    decoder = GrpcDecoder(100, tunnel=True)
    decoder.feed(tunnelled(b"{}") * 5)
    assert [len(decoder.take(2)) for _ in range(4)] == [2, 2, 1, 0]


def test_bytes_count_as_taken_only_once_they_are_used() -> None:
    decoder = GrpcDecoder(100, tunnel=True)
    decoder.feed(tunnelled(b"{}") * 2)
    assert (decoder.taken, decoder.waiting) == (0, 18)
    decoder.take(1)
    assert (decoder.taken, decoder.waiting) == (9, 9)


def test_of_a_message_over_the_limit_only_the_id_is_kept() -> None:
    text = b'{"id":"q","method":"x","params":{"a":"%b"}}' % (b"x" * 1_000)
    for piece in (1, 13, 10_000):
        decoder, found = GrpcDecoder(100, tunnel=True), []
        stream = tunnelled(text) + tunnelled(b"{}")
        for start in range(0, len(stream), piece):
            decoder.feed(stream[start : start + piece])
            found += decoder.take(9)
            assert decoder.held <= 4  # of the next one
        refused, after = found
        assert isinstance(refused, Malformed)
        assert (refused.id, refused.reason, after) == ("q", "size", b"{}")


def test_the_limit_is_that_of_the_text() -> None:
    decoder = GrpcDecoder(100, tunnel=True)
    decoder.feed(tunnelled(b"y" * 100) + tunnelled(b"z" * 101))
    fits, over = decoder.take(2)
    assert fits == b"y" * 100
    assert isinstance(over, Malformed)


@pytest.mark.parametrize(
    ("stream", "status"),
    [
        (b"\x01\0\0\0\x02{}", GrpcStatus.INTERNAL),  # without a header that says how
        (b"\0\xff\xff\xff\xff", GrpcStatus.RESOURCE_EXHAUSTED),
        (message_frame(b"\x0a\x05{}"), GrpcStatus.INVALID_ARGUMENT),
        (message_frame(b"\x0b"), GrpcStatus.INVALID_ARGUMENT),
    ],
    ids=["compressed", "giant", "too short", "group"],
)
def test_what_cannot_be_read_is_a_fault(stream: bytes, status: GrpcStatus) -> None:
    decoder = GrpcDecoder(100, tunnel=True)
    decoder.feed(tunnelled(b"{}") + stream + tunnelled(b"never"))
    assert decoder.take(9) == [b"{}"]
    assert decoder.fault is not None
    assert decoder.fault.status is status
    assert decoder.take(9) == []


def test_decompressing_costs_in_proportion_to_the_size() -> None:
    raw = random.Random(1).randbytes(16 * 1024 * 1024)  # what cannot be compressed is all input
    packed = zlib.compress(raw, 1)
    frame = b"\1" + len(packed).to_bytes(4, "big") + packed

    def read() -> None:
        assert whole_message(frame, len(raw), "deflate") == raw

    assert_costs(read, at_most=8, times=lambda: zlib.decompress(packed))


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 100_000])
def test_what_is_decompressed_is_bounded(size: int) -> None:
    packed = zlib.compress(bytes(size))
    found = whole_message(b"\1" + len(packed).to_bytes(4, "big") + packed, 100, "deflate")
    if size <= 100:
        assert found == bytes(size)
    else:
        assert isinstance(found, GrpcFault)
        assert found.status is GrpcStatus.RESOURCE_EXHAUSTED


def test_without_a_tunnel_a_message_over_the_limit_is_a_fault() -> None:
    decoder = GrpcDecoder(4)
    decoder.feed(message_frame(b"four") + message_frame(b"five!"))
    assert decoder.take(9) == [b"four"]
    assert decoder.fault is not None
    assert decoder.fault.status is GrpcStatus.RESOURCE_EXHAUSTED


def test_fields_of_later_versions_are_skipped() -> None:
    before = b"\x10\x96\x01" + b"\x1a\x03abc" + b"\x25\0\0\0\0" + b"\x29\0\0\0\0\0\0\0\0"
    assert json_of(before + b"\x0a\x02{}" + before) == b"{}"
    assert json_of(b"\x0a\x01a\x0a\x01b") == b"b"  # the last one counts (protobuf, "Last One Wins")
    assert json_of(b"") == b""


def test_no_bytes_make_the_decoder_fail() -> None:
    lots = random.Random(7)
    for _ in range(3_000):
        stream = bytearray(tunnelled(b'{"id":1}') * 3)
        for _ in range(lots.randrange(1, 4)):
            stream[lots.randrange(len(stream))] = lots.randrange(256)
        decoder = GrpcDecoder(50, tunnel=True)
        for byte in stream:
            decoder.feed(bytes((byte,)))
            for message in decoder.take(9):
                assert isinstance(message, bytes | Malformed)
        assert decoder.held <= 66


@pytest.mark.parametrize("text", ["plain", "100 %", "grün\n", "x" * 5_000])
def test_status_messages_survive_a_header(text: str) -> None:
    value = encode_text(text)
    assert value.isascii()
    assert value.isprintable()
    assert decode_text(value) == text[:1_000]


@pytest.mark.parametrize(
    ("seconds", "value"),
    [(0.0001, "1m"), (0.25, "250m"), (3_600, "3600000m"), (100_000, "100000S"), (10**9, "99999999S")],
)
def test_timeouts_have_at_most_eight_digits(seconds: float, value: str) -> None:
    assert encode_timeout(seconds) == value


def test_refusals_have_the_status_of_their_meaning() -> None:
    found = {status: status_of_refusal(status).name for status in (400, 401, 403, 404, 429, 500, 503)}
    assert found == {
        400: "INVALID_ARGUMENT",
        401: "UNAUTHENTICATED",
        403: "PERMISSION_DENIED",
        404: "UNIMPLEMENTED",
        429: "RESOURCE_EXHAUSTED",
        500: "INTERNAL",
        503: "UNAVAILABLE",
    }
