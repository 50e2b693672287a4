from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.yardsticks import assert_costs
from trimcp.framing.lines import LINES, LineDecoder, encode_lines
from trimcp.wire.codes import INVALID_REQUEST, PARSE_ERROR
from trimcp.wire.jsonrpc import (
    Batch,
    Malformed,
    Message,
    Notification,
    ParseLimits,
    Request,
    encode_notification,
    encode_request,
)

MIB = 1 << 20
PING = b'{"jsonrpc":"2.0","id":1,"method":"ping"}'


def decode(data: bytes, size: int, max_size: int = 4 * MIB) -> list[tuple[Message, int]]:
    decoder = LineDecoder(max_size)
    found = []
    for start in range(0, len(data), size):
        found += feed(decoder, data[start : start + size])
    return found + decoder.eof()


def feed(decoder: LineDecoder, data: bytes) -> list[tuple[Message, int]]:
    """What a decoder makes of data, turn by turn."""
    found = decoder.feed(data)
    while decoder.behind:
        found += decoder.feed(b"")
    return found


def test_a_chunk_of_many_lines() -> None:
    data = encode_lines([encode_request(i, "ping") for i in range(1000)])
    found = feed(LineDecoder(MIB), data)
    assert [message for message, _ in found] == [Request(i, "ping") for i in range(1000)]
    assert sum(size for _, size in found) == len(data) - 1000


@pytest.mark.parametrize("line", [b"", b"x", b" ", PING, b"[%b]" % b",".join([PING] * 100)])
def test_of_many_lines_a_few_are_looked_at_at_a_time(line: bytes) -> None:
    decoder = LineDecoder(MIB, at_once=LINES)
    found, turns = decoder.feed((line + b"\n") * 1_000 + b"tail"), 1
    while decoder.behind:
        more = decoder.feed(b"")
        assert len(more) <= LINES
        assert sum(len(message.members) for message, _ in more if isinstance(message, Batch)) <= 100
        found, turns = found + more, turns + 1
    assert len(found) == (1_000 if line.strip() else 0)
    assert turns >= 1_000 / LINES
    assert decoder.held == 4


def test_a_line_in_many_chunks() -> None:
    decoder = LineDecoder(MIB)
    for byte in PING:
        assert decoder.feed(bytes([byte])) == []
    assert decoder.held == len(PING)
    assert decoder.feed(b"\n") == [(Request(1, "ping"), len(PING))]
    assert decoder.held == 0


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_line_endings_and_blank_lines(size: int) -> None:
    data = b"\n\r\n" + PING + b"\r\n  \t\n\n" + PING + b"\n\r\n"
    assert [message for message, _ in decode(data, size)] == [Request(1, "ping")] * 2


def test_the_last_line_needs_no_ending() -> None:
    decoder = LineDecoder(MIB)
    assert decoder.feed(PING) == []
    assert decoder.eof() == [(Request(1, "ping"), len(PING))]
    assert decoder.eof() == []


def test_a_last_line_cut_short_is_malformed_with_its_id() -> None:
    decoder = LineDecoder(MIB)
    decoder.feed(b'{"jsonrpc":"2.0","id":5,"method":"x","par')
    ((message, _),) = decoder.eof()
    assert isinstance(message, Malformed)
    assert (message.code, message.id) == (PARSE_ERROR, 5)


def test_garbage_is_a_message_and_the_stream_goes_on() -> None:
    found = LineDecoder(MIB).feed(b"hello there\n\xff\xfe\n" + PING + b"\n")
    reasons = [message.reason for message, _ in found if isinstance(message, Malformed)]
    assert reasons == ["json", "utf8"]
    assert found[2][0] == Request(1, "ping")


def test_line_separators_of_unicode_end_no_line() -> None:
    text = '{"jsonrpc":"2.0","method":"a\u2028\u2029\u0085b"}'.encode()
    assert LineDecoder(MIB).feed(text + b"\n") == [(Notification("a\u2028\u2029\u0085b"), len(text))]


def test_the_limits_of_a_message_apply() -> None:
    data = b'{"jsonrpc":"2.0","method":"x","params":' + b'{"a":' * 40 + b"1" + b"}" * 41 + b"\n"
    assert isinstance(LineDecoder(MIB).feed(data)[0][0], Notification)
    refused = LineDecoder(MIB, ParseLimits(max_depth=10)).feed(data)[0][0]
    assert isinstance(refused, Malformed)
    assert refused.reason == "depth"


# Beyond the limit


@pytest.mark.parametrize("ending", [b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_exactly_the_limit_is_allowed_and_one_more_is_not(size: int, ending: bytes) -> None:
    longer = PING.replace(b"ping", b"pong!")
    found = decode(PING + ending + longer + ending + PING + ending, size, len(PING))
    assert found[0][0] == Request(1, "ping")
    assert found[2][0] == Request(1, "ping")
    assert found[1][0] == Malformed(
        INVALID_REQUEST, f"message larger than {len(PING)} bytes", 1, "size", is_request=True
    )


@pytest.mark.parametrize("size", [10, 64, 10_000])
def test_an_oversize_line_becomes_one_error_with_its_id(size: int) -> None:
    big = b'{"jsonrpc":"2.0","method":"x","params":{"id":8,"d":"' + b"x" * 1_000 + b'"},"id":"last"}'
    answer = b'{"jsonrpc":"2.0","result":{"d":"' + b"x" * 1_000 + b'"},"id":4}'
    found = decode(b"\n".join([PING, big, PING, answer, PING, b"x" * 1_000, PING]), size, 100)
    assert [message for message, _ in found if not isinstance(message, Malformed)] == [Request(1, "ping")] * 4
    errors = [message for message, _ in found if isinstance(message, Malformed)]
    assert [(e.id, e.reason, e.is_response) for e in errors] == [
        ("last", "size", False),
        (4, "size", True),
        (None, "size", False),
    ]
    assert 100 < found[1][1] <= len(big)


def test_end_of_stream_within_an_oversize_line() -> None:
    decoder = LineDecoder(100)
    assert decoder.feed(b'{"method":"' + b"x" * 500) == []
    ((message, size),) = decoder.eof()
    assert isinstance(message, Malformed)
    assert (message.id, message.reason, size) == (None, "size", 511)
    assert decoder.eof() == []


def test_an_oversize_line_is_told_of_as_soon_as_its_id_is_known() -> None:
    decoder = LineDecoder(100)
    assert decoder.feed(b'{"method":"x","id":3,"params":"' + b"x" * 50) == []
    ((message, _),) = decoder.feed(b"x" * 50)
    assert message == Malformed(INVALID_REQUEST, "message larger than 100 bytes", 3, "size", is_request=True)
    assert decoder.feed(b"x" * 50) == []
    assert decoder.feed(b'"}\n' + PING + b"\n") == [(Request(1, "ping"), len(PING))]
    assert decoder.feed(b'{"params":"' + b"x" * 200) == []
    assert decoder.feed(b'","id":4') == []  # a number may go on
    ((message, _),) = decoder.feed(b",")
    assert isinstance(message, Malformed)
    assert message.id == 4
    assert decoder.eof() == []
    assert not decoder.endless


@pytest.mark.parametrize(("begin", "id"), [(b'{"id":3,"method":"', 3), (b'{"method":"', None), (b"", None)])
def test_a_line_without_end_ends_all(begin: bytes, id: int | None) -> None:
    decoder = LineDecoder(1_000)
    found = decoder.feed(begin)
    for _ in range(16):
        found += decoder.feed(b"x" * (1_000 - len(begin) // 16 - 1))
        assert not decoder.endless
    found += decoder.feed(b"x" * 100)
    assert decoder.endless
    ((message, _),) = found
    assert isinstance(message, Malformed)
    assert (message.id, message.reason) == (id, "size")


@pytest.mark.parametrize("piece", [b"x" * 65536, b"[{" * 32768, b'{"a":"' * 10_000, b'\\"' * 32768])
def test_an_endless_line_costs_no_more_than_the_limit(piece: bytes) -> None:
    decoder = LineDecoder(MIB)
    tracemalloc.start()
    try:
        decoder.feed(b'{"id":1,"params":["')
        told = [message for _ in range(240) for message, _ in decoder.feed(piece)]
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * MIB + MIB // 2
    assert held < MIB // 4
    assert decoder.held == 0
    [message] = told
    assert isinstance(message, Malformed)
    assert (message.id, message.reason) == (1, "size")
    ((after, _),) = decoder.feed(b"\n" + PING + b"\n")
    assert after == Request(1, "ping")


def test_a_line_that_is_a_byte_too_long_is_not_copied() -> None:
    decoder = LineDecoder(MIB)
    line = b'{"id":7,"x":"' + b"x" * MIB
    tracemalloc.start()
    try:
        assert decoder.feed(line[: MIB + 1]) == []
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        [(message, size)] = decoder.feed(b"\n")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(message, Malformed)
    assert (message.reason, message.id, size) == ("size", 7, MIB + 1)
    assert peak - held < MIB // 4


@pytest.mark.parametrize("chunk", [64, 4096])
def test_a_long_line_in_small_chunks_takes_linear_time(chunk: int) -> None:
    def read(total: int) -> None:
        data = b'{"jsonrpc":"2.0","method":"x","params":{"d":"' + b"y" * total + b'"}}\n'
        assert isinstance(decode(data, chunk, 64 * MIB)[0][0], Notification)

    # Four times the bytes; copying the tail for each chunk would take sixteen times as long.
    assert_costs(lambda: read(4096 * chunk), at_most=10, times=lambda: read(1024 * chunk))


# Any stream in any chunks

ANY_LINE = st.one_of(
    st.builds(encode_request, st.integers(0, 99) | st.text(max_size=5), st.text(max_size=5)),
    st.builds(encode_notification, st.text(max_size=5), st.dictionaries(st.text(max_size=3), st.text())),
    st.binary(max_size=80),
    st.sampled_from([b"", b"\r", b" ", b'{"id":1,"x":"' + b"y" * 200, b"[[[", PING + b"\r"]),
)


@given(st.lists(ANY_LINE, max_size=8), st.booleans(), st.integers(0, 2**32))
@settings(deadline=None, max_examples=200)
def test_chunks_change_nothing(lines: list[bytes], ended: bool, seed: int) -> None:
    data = b"\n".join(lines) + (b"\n" if ended else b"")
    rng = random.Random(seed)
    decoder, found, pos = LineDecoder(100), [], 0
    while pos < len(data):
        step = rng.choice([1, 2, 5, 40, 300])
        found += feed(decoder, data[pos : pos + step])
        pos += step
    found += decoder.eof()
    # What is too large is told of early, so that how much of it was seen by then depends on the chunks.
    assert [shown(*each) for each in found] == [shown(*each) for each in decode(data, len(data) or 1, 100)]


def shown(message: Message, size: int) -> object:
    return "too large" if isinstance(message, Malformed) and message.reason == "size" else (message, size)


@given(st.lists(st.builds(encode_notification, st.text(), st.dictionaries(st.text(), st.text())), max_size=8))
@settings(deadline=None, max_examples=50)
def test_lines_come_back(messages: list[bytes]) -> None:
    data = encode_lines(messages)
    assert data.count(b"\n") == len(messages)
    found = feed(LineDecoder(MIB), data)
    assert [size for _, size in found] == [len(message) for message in messages]
    assert all(isinstance(message, Notification) for message, _ in found)


def test_no_messages_are_no_bytes() -> None:
    assert encode_lines([]) == b""
    assert encode_lines([b"1", b"2"]) == b"1\n2\n"
