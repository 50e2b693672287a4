from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator

import attrs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.yardsticks import assert_costs
from trimcp.framing.sse import COMMENT, Event, EventDecoder, encode_event, in_one_line
from trimcp.wire.codes import INVALID_REQUEST
from trimcp.wire.jsonrpc import Malformed, Request, encode_request, parse

MIB = 1 << 20


def decode(data: bytes, size: int = 1 << 30, max_event: int = 4 * MIB) -> list[Event]:
    return list(feed(EventDecoder(max_event), data, size))


def feed(decoder: EventDecoder, data: bytes, size: int) -> Iterator[Event]:
    for start in range(0, len(data), size):
        yield from decoder.feed(data[start : start + size])


# Writing


def test_the_bytes_of_an_event() -> None:
    assert encode_event(b"{}") == b"data: {}\n\n"
    assert encode_event(b"", id="s-1") == b"id: s-1\ndata: \n\n"
    everything = encode_event(b"/m", id="", event="endpoint", retry=0)
    assert everything == b"id: \nevent: endpoint\nretry: 0\ndata: /m\n\n"


def test_white_space_in_json_breaks_no_line() -> None:
    assert encode_event(b'{\r\n"a":\n1\r}', id="1") == b'id: 1\ndata: {  "a": 1 }\n\n'
    assert encode_event(b"[\r]") == encode_event(b"[\n]") == b"data: [ ]\n\n"


def test_a_line_end_that_only_some_readers_know_is_escaped() -> None:
    text = '{"a":"\u2028 \u2029 \x85 – é"}'
    written = '{"a":"\\u2028 \\u2029 \\u0085 – é"}'.encode()
    assert in_one_line(text.encode()) == written
    assert encode_event(text.encode()) == b"data: " + written + b"\n\n"


@pytest.mark.parametrize("text", ["a\nb", "a\rb", "a\0b", "\ud800", "a\x85b"])
def test_what_would_break_a_line_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="cannot stand in an event"):
        encode_event(b"{}", id=text)
    with pytest.raises(ValueError, match="cannot stand in an event"):
        encode_event(b"{}", event=text)


def test_a_comment_is_no_event_and_harms_none() -> None:
    assert decode(COMMENT + encode_event(b"1") + COMMENT + COMMENT + encode_event(b"2")) == [Event(b"1"), Event(b"2")]


# Reading: the examples and rules of the standard


@pytest.mark.parametrize(
    ("stream", "data"),
    [
        (b"data: YHOO\ndata: +2\ndata: 10\n\n", [b"YHOO\n+2\n10"]),
        (b"data\n\ndata\ndata\n\ndata:", [b"", b"\n"]),
        (b"data:test\n\ndata: test\n\ndata:  test\n\n", [b"test", b"test", b" test"]),
        (b": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\n", [b"first event", b"second event"]),
        (b"\n\n\nevent: x\n\ndata: 1\n\n", [b"1"]),
        (b"data: 1\r\rdata: 2\r\n\r\ndata: 3\r\n\ndata: 4\n\r\n", [b"1", b"2", b"3", b"4"]),
        (b"\xef\xbb\xbfdata: 1\n\n\xef\xbb\xbfdata: 2\n\n", [b"1"]),
        (b"\xef\xbb\xbf\xef\xbb\xbfdata: 1\n\n", []),
        (b"Data: 1\n data: 2\ndata : 3\ndatax: 4\nunknown: 5\nunknown\n\n", []),
        (b"data: 1\n\ndata: 2\n", [b"1"]),
        ("data: a\u2028b\x85\x0b\x0cc\x1c\n\n".encode(), ["a\u2028b\x85\x0b\x0cc\x1c".encode()]),
        (b"data: \xff\xfe\n\n", [b"\xff\xfe"]),
        (b"", []),
        (b"\xef\xbb", []),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_the_data_of_a_stream(stream: bytes, data: list[bytes], size: int) -> None:
    assert [event.data for event in decode(stream, size)] == data


def test_a_type_lasts_for_one_event() -> None:
    events = decode(b"event: a\nevent: add\ndata: 1\n\ndata: 2\n\nevent:\ndata: 3\n\nevent: lost\n\ndata: 4\n\n")
    assert [event.event for event in events] == ["add", "message", "message", "message"]


def test_an_id_lasts_until_the_next() -> None:
    decoder = EventDecoder(last_event_id="before")
    assert decoder.last_event_id == "before"
    assert decoder.feed(b"data: 0\n\n") == [Event(b"0")]
    assert decoder.last_event_id == "before"
    assert decoder.feed(b"id: 1\ndata: 1\n\n") == [Event(b"1", id="1")]
    assert decoder.feed(b"id: 2\n") == []
    assert decoder.last_event_id == "1"
    assert decoder.feed(b"\ndata: 3\n\n") == [Event(b"3")]
    assert decoder.last_event_id == "2"
    assert decoder.feed(b"id: 4\nid: a\0b\ndata: 4\n\n") == [Event(b"4", id="4")]
    assert decoder.feed(b"id\ndata: 5\n\n") == [Event(b"5", id="")]
    assert decoder.last_event_id == ""


def test_a_priming_event_has_an_id_and_no_data() -> None:
    assert decode(encode_event(b"", id="p", retry=10)) == [Event(b"", id="p", retry=10)]


@pytest.mark.parametrize("value", ["", "-1", "1.5", "1e3", "10 ", "٣", "²", "ten", "9" * 16, "9" * 5000])
def test_a_retry_that_is_no_number_is_ignored(value: str) -> None:
    decoder = EventDecoder()
    (event,) = decoder.feed(f"retry: 70\n\nretry: {value}\ndata: 1\n\n".encode())
    assert (event.retry, decoder.retry) == (None, 70)
    assert decoder.feed(b"retry: 090\ndata: 1\n\n") == [Event(b"1", retry=90)]
    assert decoder.retry == 90


def test_a_carriage_return_ends_a_line_at_once() -> None:
    decoder = EventDecoder()
    assert decoder.feed(b"data: 1\r") == []
    assert decoder.feed(b"\r") == [Event(b"1")]
    assert decoder.feed(b"") == []
    assert decoder.feed(b"\n") == []
    assert decoder.feed(b"data: 2\r") == []
    assert decoder.feed(b"") == []
    assert decoder.feed(b"\ndata: 3\r\n\r") == [Event(b"2\n3")]


@pytest.mark.parametrize("ending", [b"\r\n", b"\n", b"\r"])
@pytest.mark.parametrize("size", range(1, 12))
def test_line_endings_may_be_cut_anywhere(ending: bytes, size: int) -> None:
    stream = b"event: e\nid: 1\ndata: 1\ndata: 2\n\n: c\ndata: 3\n\n".replace(b"\n", ending)
    assert decode(stream, size) == [Event(b"1\n2", "e", "1"), Event(b"3")]


# Reading: any stream in any pieces


def whole(stream: bytes) -> tuple[list[Event], str | None, int | None]:
    """The standard's algorithm word for word, on a whole stream."""
    text = stream.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    events = []
    last_id = retry = None
    event = Event(b"")
    for line in text.split(b"\n")[:-1]:
        if not line:
            last_id = event.id if event.id is not None else last_id
            if event.data:
                events.append(attrs.evolve(event, data=event.data[:-1], event=event.event or "message"))
            event = Event(b"")
            continue
        name, _, value = line.partition(b":")
        value = value[1:] if value[:1] == b" " else value
        if name == b"data":
            event.data += value + b"\n"
        elif name == b"event":
            event.event = value.decode(errors="replace")
        elif name == b"id" and b"\0" not in value:
            event.id = value.decode(errors="replace")
        elif name == b"retry" and value and set(value) <= set(b"0123456789"):
            event.retry = retry = int(value)
    return events, last_id, retry


_PIECES = [b"data", b":", b": ", b" ", b"\n", b"\n\n", b"\r", b"\r\n", b"id", b"event", b"retry", b"7", b"\0", b"x"]
_PIECES += [b"\xef\xbb\xbf", b"\xef", b"data: {}\n\n", b"id: 1\n", b"data:", "\u2028é".encode()]
streams = st.lists(st.sampled_from(_PIECES) | st.binary(max_size=3), max_size=60).map(b"".join)


@settings(max_examples=400)
@given(streams, st.randoms(use_true_random=False))
@example(b"\xef\xbb\xbfdata: 1\r\n\r\n", random.Random(1))
def test_any_stream_reads_the_same_in_any_pieces(stream: bytes, rng: random.Random) -> None:
    decoder = EventDecoder()
    events = []
    at = 0
    while at < len(stream):
        size = rng.choice([1, 1, 2, 5, 40])
        events += decoder.feed(stream[at : at + size])
        at += size
    assert (events, decoder.last_event_id, decoder.retry) == whole(stream)


_LINE = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20).filter(str.isprintable)


@given(
    st.lists(
        st.tuples(
            st.binary(max_size=50)
            .map(lambda data: data.replace(b"\n", b"").replace(b"\r", b""))
            .filter(lambda data: in_one_line(data) == data),  # other line ends are escaped
            st.none() | _LINE,
            st.none() | _LINE.filter(bool),
            st.none() | st.integers(0, 10**9),
        )
    ),
    st.integers(1, 50),
)
def test_what_is_written_is_read(given: list[tuple[bytes, str | None, str | None, int | None]], size: int) -> None:
    stream = b"".join(encode_event(d, id=i, event=e, retry=r) + COMMENT for d, i, e, r in given)
    assert decode(stream, size) == [Event(d, e or "message", i, r) for d, i, e, r in given]


# Beyond the limit


@pytest.mark.parametrize("form", [b"data: %b\n\n", b"data:%b\r\n\r\n", b"id: 1\nevent: message\ndata: %b\r\r"])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_exactly_the_limit_is_allowed_and_one_more_is_not(size: int, form: bytes) -> None:
    text = encode_request(5, "ping")
    longer = text.replace(b"ping", b"pong!")
    good, bad, after = decode(form % text + form % longer + form % text, size, len(text))
    assert parse(good.data) == parse(after.data) == Request(5, "ping")
    assert good.oversize is None
    assert bad.data == b""
    told = f"message larger than {len(text)} bytes"
    assert bad.oversize == Malformed(INVALID_REQUEST, told, 5, "size", is_request=True)
    assert bad.id == good.id


def test_the_line_feeds_between_data_lines_count() -> None:
    good, bad = decode(b"data: ab\ndata: cd\n\ndata: ab\ndata: cde\n\n", max_event=5)
    assert (good.data, good.oversize) == (b"ab\ncd", None)
    assert bad.oversize is not None


def test_nothing_is_kept_of_data_beyond_the_limit() -> None:
    decoder = EventDecoder(100)
    decoder.feed(b"data: " + b"x" * 90 + b"\ndata: " + b"x" * 90)
    assert decoder.held == 0
    decoder.feed(b"\ndata: " + b"x" * 90)
    assert decoder.held == 0


@pytest.mark.parametrize("size", [1, 10, 64, 100_000])
def test_an_oversize_event_is_told_and_the_stream_goes_on(size: int) -> None:
    filler = b"x" * 9000
    answer = b'event: message\nid: 3\nretry: 5\ndata: {"jsonrpc":"2.0","result":{"d":"' + filler + b'"},"id":4}\n\n'
    lines = b'data: {"id":\ndata: 9,"method":"x",\ndata: "params":{"x":\ndata\n' + b'data: "y" ,"z":1,\n' * 20
    decoder = EventDecoder(100)
    events = list(feed(decoder, b"data: 1\n\n" + answer + b"data: 2\n\n" + lines + b"\nid: 7\ndata: 3\n\n", size))
    assert [event.data for event in events] == [b"1", b"", b"2", b"", b"3"]
    first, second = events[1].oversize, events[3].oversize
    assert first is not None
    assert (first.id, first.is_response, first.reason) == (4, True, "size")
    assert (events[1].id, events[1].retry) == ("3", 5)
    assert second is not None
    assert (second.id, second.is_response) == (9, False)
    assert decoder.last_event_id == "7"
    assert decoder.held == 0


@pytest.mark.parametrize("size", [1, 4096, 100_000])
def test_a_long_line_of_anything_else_is_ignored(size: int) -> None:
    filler = b"x" * 9000
    decoder = EventDecoder()
    stream = b"".join(name + filler + b"\n" for name in [b":", b"id: ", b"event: ", b"retry: ", b"other: ", b""])
    assert list(feed(decoder, stream + b"data: 1\n\n", size)) == [Event(b"1")]
    assert decoder.last_event_id is None


@pytest.mark.parametrize(
    "piece",
    [
        b"x" * 65536,
        b"data: xy\n" * 7000,
        b"data\n" * 13_000,
        b":" * 65536,
        b":\n" * 32768,
        b"id: 1\n" * 10_000,
        b"event: " + b"x" * 8000 + b"\n",
        b'data: "a",[{\r\n' * 5000,
    ],
)
@pytest.mark.parametrize("opening", [b"", b"data: ", b": ", b"id: "])
def test_an_endless_event_costs_no_more_than_the_limit(opening: bytes, piece: bytes) -> None:
    limit = MIB // 2
    decoder = EventDecoder(limit)
    tracemalloc.start()
    try:
        decoder.feed(opening)
        for _ in range(12):
            assert decoder.feed(piece) == []
            assert decoder.held <= limit + 8192 + 6
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * limit + MIB  # a buffer that grows by copying, and the lines of one chunk
    decoder.feed(b"\n\n")
    assert decoder.held == 0
    assert decoder.feed(b"data: after\n\n") == [Event(b"after")]


@pytest.mark.parametrize("name", [b"data: ", b"data:"])
def test_an_event_that_ends_with_the_first_byte_too_many_is_not_put_together(name: bytes) -> None:
    limit = 4 * MIB
    decoder = EventDecoder(limit)
    end = b"x" * 10 + b"\n\n"
    tracemalloc.start()
    try:
        decoder.feed(name)
        for _ in range(limit // 65_536 - 1):
            decoder.feed(b"x" * 65_536)
        decoder.feed(b"x" * (65_536 - 9))
        [event] = decoder.feed(end)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert event.oversize is not None
    assert peak < limit + MIB


@pytest.mark.parametrize("size", [1, 1000, 65536])
@pytest.mark.parametrize("max_event", [1000, 64 * MIB])
@pytest.mark.parametrize("pattern", [b"x", b"data: x\n", b"data:\n", b"\r", b":\n", b'{"'])
def test_time_is_linear(pattern: bytes, max_event: int, size: int) -> None:
    length = 8_000 * min(size, 10)
    short = b"data: " + pattern * (length // len(pattern)) + b"\n\n"
    long = b"data: " + pattern * (8 * length // len(pattern)) + b"\n\n"
    # Linear is 8, quadratic 64.
    assert_costs(lambda: decode(long, size, max_event), at_most=32, times=lambda: decode(short, size, max_event))
