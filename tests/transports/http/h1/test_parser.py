"""The request parser: what it reads, what it refuses, and that no split of the bytes changes either."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimcp.transports.http.h1.parser import H1Request, RequestParser, RequestRefused
from trimcp.transports.http.settings import HttpLimits

LIMITS = HttpLimits()
Event: TypeAlias = tuple[object, ...]


def events_of(pieces: list[bytes], limits: HttpLimits = LIMITS) -> list[Event]:
    """Everything a connection would learn from these bytes: heads, whole bodies, the refusal."""
    parser = RequestParser(limits, peer="peer")
    events: list[Event] = []
    body: bytearray | None = None
    try:
        for piece in pieces:
            parser.feed(piece)
            while True:
                if body is None:
                    request = parser.next_head()
                    if request is None:
                        break
                    events.append(as_event(request))
                    body = bytearray()
                data = parser.next_data()
                if data is None:
                    break
                if data:
                    body += data
                else:
                    events.append(("body", bytes(body)))
                    body = None
    except RequestRefused as refusal:
        events.append(("refused", refusal.status))
    return events


def events_of_whole(pieces: list[bytes], limits: HttpLimits = LIMITS) -> list[Event]:
    """The same for pieces that are whole requests, as far as a connection need not look for their end."""
    parser = RequestParser(limits, peer="peer")
    events: list[Event] = []
    try:
        for piece in pieces:
            found = None if parser.buffered else parser.next_whole(piece)
            if found is not None:
                events += [as_event(found[0]), *([("body", found[1])])]
                continue
            parser.feed(piece)
            while (request := parser.next_head()) is not None:
                body = b""
                while data := parser.next_data():
                    body += data
                if data is None:  # it goes on in the next piece, which is not tried here
                    return [*events, as_event(request), "cut"]
                events += [as_event(request), ("body", body)]
    except RequestRefused as refusal:
        events.append(("refused", refusal.status))
    return events


def as_event(request: H1Request) -> Event:
    head = request.head
    rest = (request.length, request.http10, request.keep_alive, request.expects, head.websocket)
    return ("head", head.method, head.path, head.query, dict(head.headers), *rest)


def refusal_of(data: bytes, limits: HttpLimits = LIMITS) -> int | None:
    """The status with which these bytes are refused at their first request, also when they come one by one."""
    whole = events_of([data], limits)
    assert events_of([data[n : n + 1] for n in range(len(data))], limits) == whole
    last = whole[-1] if whole else ("nothing",)
    return last[1] if last[0] == "refused" else None


def one(data: bytes) -> H1Request:
    parser = RequestParser(LIMITS, peer="10.0.0.7:5", loopback=False, secure=True)
    parser.feed(data)
    request = parser.next_head()
    assert request is not None
    return request


def head(*lines: bytes, start: bytes = b"POST /mcp HTTP/1.1") -> bytes:
    return b"\r\n".join([start, b"Host: h", *lines, b"", b""])


def test_a_request_with_a_body() -> None:
    request = one(
        head(b"Content-Type:  application/json \t", b"X-A: 1", b"Content-Length: 2", b"x-a:2", b"Empty:") + b"{}"
    )
    assert request.head.method == "POST"
    assert request.head.path == "/mcp"
    assert request.head.headers == {
        "host": "h",
        "content-type": "application/json",
        "x-a": "1, 2",
        "content-length": "2",
        "empty": "",
    }
    assert (request.head.peer, request.head.loopback, request.head.secure) == ("10.0.0.7:5", False, True)
    assert (request.length, request.http10, request.keep_alive, request.expects) == (2, False, True, False)


def test_a_head_that_is_repeated_is_a_head_of_its_own() -> None:
    parser = RequestParser(LIMITS, peer="p", loopback=False, secure=True)
    samples = [
        head(b"Content-Length: 2") + b"{}",
        head(b"Connection: upgrade", b"Upgrade: websocket", start=b"GET /a%20b?c HTTP/1.1"),
        head(b"Expect: 100-continue", b"Content-Length: 3", b"Connection: close") + b"abc",
        head(b"Connection: keep-alive", start=b"GET / HTTP/1.0"),
        head(b"Transfer-Encoding: chunked") + b"1\r\na\r\n0\r\n\r\n",
        head(b"X: " + b"x" * 2_000),
    ]
    for sample in samples:
        seen = []
        for _ in range(3):
            parser.feed(sample)
            request = parser.next_head()
            assert request is not None
            while parser.next_data():
                pass
            seen.append(request)
        assert len({id(request.head) for request in seen}) == 3
        assert len({repr(request) for request in seen}) == 1


def test_requests_follow_each_other_and_what_follows_an_upgrade_is_left() -> None:
    parser = RequestParser(LIMITS)
    chunks = b"3;x=y\r\nabc\r\n0A\r\n0123456789\r\n0\r\nTrailer: ignored\r\n\r\n"
    upgrade = head(b"Connection: keep-alive, Upgrade", b"Upgrade: WebSocket", start=b"GET /ws HTTP/1.1")
    parser.feed(head(b"Transfer-Encoding: Chunked") + chunks + b"\r\n" + upgrade + b"\x81\x00")
    first = parser.next_head()
    assert first is not None
    assert first.length is None
    assert parser.next_data() == b"abc0123456789"
    assert parser.next_data() == b""
    second = parser.next_head()
    assert second is not None
    assert second.head.websocket
    assert "trailer" not in second.head.headers
    assert parser.next_data() == b""
    assert parser.buffered == 2
    assert parser.rest() == b"\x81\x00"
    assert parser.buffered == 0


@pytest.mark.parametrize(
    ("target", "path", "query", "host"),
    [
        (b"/", "/", "", "h"),
        (b"/a/b?x=%41&y", "/a/b", "x=%41&y", "h"),
        (b"/%7euser/%C3%A9%2f", "/~user/é/", "", "h"),
        (b"/a??", "/a", "?", "h"),
        (b"//other/x", "//other/x", "", "h"),
        (b"http://Other:81/a?b", "/a", "b", "Other:81"),
        (b"HTTPS://other", "/", "", "other"),
        (b"http://other?q", "/", "q", "other"),
        (b"http://[::1]:80/", "/", "", "[::1]:80"),
    ],
)
def test_targets(target: bytes, path: str, query: str, host: str) -> None:
    found = one(head(start=b"GET " + target + b" HTTP/1.1")).head
    assert (found.path, found.query, found.headers["host"]) == (path, query, host)


def test_options_for_the_server_as_a_whole() -> None:
    assert one(head(start=b"OPTIONS * HTTP/1.1")).head.path == "*"


@pytest.mark.parametrize(
    ("start", "lines", "keep_alive"),
    [
        (b"GET / HTTP/1.1", [], True),
        (b"GET / HTTP/1.1", [b"Connection: close"], False),
        (b"GET / HTTP/1.1", [b"Connection: x", b"Connection: Close"], False),
        (b"GET / HTTP/1.0", [], False),
        (b"GET / HTTP/1.0", [b"Connection: x,\tKeep-Alive"], True),
        (b"GET / HTTP/1.0", [b"Connection: keep-alive, close"], False),
    ],
)
def test_who_wants_to_go_on(start: bytes, lines: list[bytes], keep_alive: bool) -> None:
    request = one(head(*lines, start=start))
    assert request.keep_alive is keep_alive
    assert request.http10 is start.endswith(b"0")


def test_expectations() -> None:
    expects = b"Expect: 100-Continue"
    assert one(head(expects, b"Content-Length: 1")).expects
    assert not one(head(expects, b"Content-Length: 1", start=b"POST / HTTP/1.0")).expects
    assert refusal_of(head(b"Expect: more")) == 417


@pytest.mark.parametrize(
    ("start", "lines"),
    [
        (b"GET / HTTP/1.1", [b"Connection: upgrade", b"Upgrade: h2c"]),
        (b"GET / HTTP/1.1", [b"Upgrade: websocket"]),
        (b"POST / HTTP/1.1", [b"Connection: upgrade", b"Upgrade: websocket"]),
        (b"GET / HTTP/1.0", [b"Connection: upgrade", b"Upgrade: websocket"]),
    ],
)
def test_what_asks_for_no_websocket(start: bytes, lines: list[bytes]) -> None:
    request = one(head(*lines, b"Content-Length: 3", start=start))
    assert not request.head.websocket
    assert request.length == 3


HOSTILE_LINES = [
    # Two lengths, or none that everybody reads alike.
    [b"Content-Length: 5", b"Transfer-Encoding: chunked"],
    [b"Transfer-Encoding: chunked", b"Content-Length: 5"],
    [b"Content-Length: 5", b"Content-Length: 5"],
    [b"Content-Length: 5", b"Content-Length: 6"],
    [b"Content-Length: 5, 5"],
    [b"Content-Length: +5"],
    [b"Content-Length: -5"],
    [b"Content-Length: 0x5"],
    [b"Content-Length: 5 5"],
    [b"Content-Length: 5_0"],
    [b"Content-Length: 5.0"],
    [b"Content-Length:"],
    [b"Content-Length: \xb2"],
    [b"Content-Length: 1000000000000000"],
    [b"Content-Length: 99999999999999999999999999"],
    [b"Content-Length : 5"],
    [b"Content-Length\t: 5"],
    [b"Content-Length\x00: 5"],
    [b"Content-Length: 5\x00"],
    # Transfer codings.
    [b"Transfer-Encoding: identity"],
    [b"Transfer-Encoding: identity, chunked"],
    [b"Transfer-Encoding: chunked, identity"],
    [b"Transfer-Encoding: gzip, chunked"],
    [b"Transfer-Encoding: chunked, chunked"],
    [b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"],
    [b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity"],
    [b"Transfer-Encoding: xchunked"],
    [b"Transfer-Encoding: chunked;q=1"],
    [b'Transfer-Encoding: "chunked"'],
    [b"Transfer-Encoding:"],
    [b"Transfer-Encoding: \x0bchunked"],
    [b"Transfer-Encoding: chunked\x0c"],
    [b"Transfer-Encoding : chunked"],
    [b" Transfer-Encoding: chunked"],
    [b"X: y", b" Transfer-Encoding: chunked"],
    [b"X: y\rTransfer-Encoding: chunked"],
    [b"X: y\nTransfer-Encoding: chunked"],
    [b"X: y\r\r\nTransfer-Encoding: chunked"],
    [b"X:\nTransfer-Encoding: chunked"],
    [b"X\nTransfer-Encoding: chunked"],
    [b"Transfer-Encoding:\n chunked"],
    # Lines that are none.
    [b"X: a", b" folded"],
    [b"X: a", b"\tfolded"],
    [b"X"],
    [b": x"],
    [b"X y: z"],
    [b"X(): z"],
    [b"X\xe9: z"],
    [b"X: \x00"],
    [b"X: \x07"],
    [b"X: \x7f"],
    # Hosts.
    [b"Host: h"],
    [b"Host: other"],
    [b"hOST:"],
]


@pytest.mark.parametrize("lines", HOSTILE_LINES)
def test_lines_that_are_refused(lines: list[bytes]) -> None:
    assert refusal_of(head(*lines)) == 400


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a,b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: u@h\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h/x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: [::1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h:8x\r\n\r\n", 400),
        (b"GET http://other/ HTTP/1.1\r\n\r\n", 400),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (head(b"Transfer-Encoding: chunked", start=b"POST / HTTP/1.0"), 400),
        (b"GET /\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"/ HTTP/1.1\r\n", 400),
        (b"GET / HTTP/1.1\n\n", 400),
        (b"GET / HTTP/1.1\nHost: h\n\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\n", 400),
        (b"\r\n\r\nGET / HTTP/1.1\r\nHost: h\r\n\r\n", 400),
        (b"\nGET / HTTP/1.1\r\nHost: h\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n", 400),  # the beginning of TLS
        (head(start=b"GET  / HTTP/1.1"), 400),
        (head(start=b"GET\t/ HTTP/1.1"), 400),
        (head(start=b"GET /a b HTTP/1.1"), 400),
        (head(start=b"GET / HTTP/1.1 "), 400),
        (head(start=b" GET / HTTP/1.1"), 400),
        (head(start=b"GET / http/1.1"), 400),
        (head(start=b"GET / HTTP/1.10"), 400),
        (head(start=b"GET / HTTP/1.\xb2"), 400),
        (head(start=b"GET /\xc3\xa9 HTTP/1.1"), 400),
        (head(start=b"GET /\x00 HTTP/1.1"), 400),
        (head(start=b"GET /a#b HTTP/1.1"), 400),
        (head(start=b"GET /%zz HTTP/1.1"), 400),
        (head(start=b"GET /%2 HTTP/1.1"), 400),
        (head(start=b"GET /%ff HTTP/1.1"), 400),
        (head(start=b"GET * HTTP/1.1"), 400),
        (head(start=b"GET mcp HTTP/1.1"), 400),
        (head(start=b"GET h:80 HTTP/1.1"), 400),
        (head(start=b"GET ftp://h/ HTTP/1.1"), 400),
        (head(start=b"GET http:/// HTTP/1.1"), 400),
        (head(start=b"GET http://u@h/ HTTP/1.1"), 400),
        (head(start=b"GET http://h#x/ HTTP/1.1"), 400),
        (head(start=b"CONNECT h:80 HTTP/1.1"), 501),
        (head(start=b"get / HTTP/1.1"), 501),
        (head(start=b"SOURCE / HTTP/1.1"), 501),
        (head(start=b"SOURCE / ICE/1.0"), 400),
        (head(start=b"DESCRIBE rtsp://h RTSP/1.0"), 400),
        (head(start=b"GET / HTTP/0.9"), 505),
        (head(start=b"GET / HTTP/1.2"), 505),
        (head(start=b"GET / HTTP/2.0"), 505),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    ],
)
def test_requests_that_are_refused(data: bytes, status: int) -> None:
    assert refusal_of(data) == status


def test_limits_of_a_head() -> None:
    limits = HttpLimits(max_request_line=100, max_head=300, max_headers=3)
    longest = b"GET /" + b"a" * (100 - len(b"GET / HTTP/1.1\r\n")) + b" HTTP/1.1"
    assert refusal_of(head(start=longest), limits) is None
    assert refusal_of(head(start=longest.replace(b"/a", b"/aa")), limits) == 414
    assert refusal_of(b"G" * 100, limits) == 414
    assert refusal_of(b"G" * 99, limits) is None

    largest = head(b"A: " + b"a" * (300 - len(head(b"A: "))))
    assert len(largest) == 300
    assert refusal_of(largest, limits) is None
    assert refusal_of(largest.replace(b"A: ", b"A: a"), limits) == 431
    assert refusal_of(head(b"A: " + b"a" * 300), limits) == 431

    assert refusal_of(head(b"A: a", b"B: b"), limits) is None
    assert refusal_of(head(b"A: a", b"A: b", b"A: c"), limits) == 431


def test_every_request_is_checked_like_the_first() -> None:
    first = b"\r\n" + head()
    for split in (1, 1_000):
        whole = first * 3 + b"GET /\r\n"
        found = events_of([whole[n : n + split] for n in range(0, len(whole), split)])
        assert [event[0] for event in found] == ["head", "body"] * 3 + ["refused"]


def test_a_bare_line_feed_is_named_before_the_number_of_lines() -> None:
    assert refusal_of(head(b"A: a", b"B: b\nC: c", *[b"D: d"] * 120)) == 400


def test_the_limits_that_are_promised() -> None:
    assert refusal_of(b"GET /" + b"a" * 17_000) == 414
    assert events_of([head(b"A: " + b"a" * 70_000)])[-1][1] == 431
    assert events_of([head(*[b"A: a"] * 100)])[-1][1] == 431
    assert events_of([head(*[b"A: a"] * 99)])[-1] == ("body", b"")
    assert events_of([head(b"A: " + b"a" * 65_000)])[-1] == ("body", b"")


def test_a_head_without_end_is_refused_before_it_is_kept() -> None:
    parser = RequestParser(LIMITS)
    with pytest.raises(RequestRefused) as caught:
        for _ in range(64 * 1024 * 1024 // 1024):
            parser.feed(b"x" * 1024)
            parser.next_head()
    assert caught.value.status == 414
    assert parser.buffered <= 17 * 1024


def test_nothing_is_kept_of_a_strangers_names() -> None:
    for n in range(3):  # what the parser itself keeps for the next time
        one(head(b"X-%d: y" % n))
    tracemalloc.start()
    try:
        for n in range(300):
            assert one(head(b"X-%d-%b: y" % (n, b"Name" * 10_000))).head.headers[f"x-{n}-{'name' * 10_000}"] == "y"
        assert tracemalloc.get_traced_memory()[0] < 200_000
    finally:
        tracemalloc.stop()


def test_a_refusal_repeats_nothing_of_the_client() -> None:
    for lines in HOSTILE_LINES:
        with pytest.raises(RequestRefused) as caught:
            one(head(b"X-Secret: hunter2", *lines))
        assert "hunter2" not in caught.value.reason
        assert caught.value.reason.isprintable()


SAMPLES = [
    head(),
    head(b"Content-Length: 5") + b"hello",
    b"\r\n" + head(b"Content-Length: 0"),
    head(b"Transfer-Encoding: chunked") + b"5\r\nhello\r\n1;a=b\r\n!\r\n0\r\nA: b\r\n\r\n",
    head(start=b"GET /a%20b?c HTTP/1.0"),
    head(b"Connection: upgrade", b"Upgrade: websocket", start=b"GET /ws HTTP/1.1"),
    head(b"Expect: 100-continue", b"Content-Length: 3") + b"abc",
    *(head(*lines) + b"GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n" for lines in HOSTILE_LINES),
    head(b"Transfer-Encoding: chunked") + b"2\r\na\r\n0\r\n\r\n",
    b"\r\n\r\n",
    b"GET /\n",
    head(b"A: " + b"a" * 70, b"B: b\nC: c"),
    b"GET /" + b"a" * 90,
]
SMALL = HttpLimits(max_request_line=80, max_head=200, max_headers=6)


@settings(max_examples=400, deadline=None)
@given(
    samples=st.lists(st.sampled_from(SAMPLES), min_size=1, max_size=4),
    noise=st.lists(
        st.tuples(st.integers(0, 600), st.sampled_from([b"\r", b"\n", b"\0", b" ", b":", b"0", b"\r\n"])), max_size=2
    ),
    cuts=st.lists(st.integers(0, 800), max_size=12),
    limits=st.sampled_from([LIMITS, SMALL]),
)
def test_no_split_changes_anything(
    samples: list[bytes], noise: list[tuple[int, bytes]], cuts: list[int], limits: HttpLimits
) -> None:
    data = b"".join(samples)
    for place, byte in noise:
        data = data[:place] + byte + data[place:]
    places = sorted({0, *(cut for cut in cuts if cut < len(data)), len(data)})
    pieces = [data[start:end] for start, end in pairwise(places)]
    assert events_of(pieces, limits) == events_of([data], limits)


KNOWN = [
    head(b"Content-Length: 5", b"A: b"),
    head(b"A: b", b"content-length:5"),
    head(b"A: b"),
    head(b"Expect: 100-continue", b"Content-Length: 5"),
    head(b"Transfer-Encoding: chunked"),
]
NUMBERS = [
    b"5",
    b"0",
    b"05",
    b"12",
    b"5 ",
    b" 5",
    b"+5",
    b"",
    b"1" * 16,
    b"5\r\nContent-Length: 6",
    b"5\r\n\r\n",
    b"12\r\n",
]


@settings(max_examples=400, deadline=None)
@given(
    known=st.sampled_from(KNOWN),
    numbers=st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=4),
    bodies=st.lists(st.sampled_from([b"", b"hello", b"hello, world", b"\r\n"]), min_size=4, max_size=4),
    limits=st.sampled_from([LIMITS, HttpLimits(max_head=60)]),
)
def test_a_head_that_is_known_says_what_it_says_to_a_new_parser(
    known: bytes, numbers: list[bytes], bodies: list[bytes], limits: HttpLimits
) -> None:
    heads = [known, *(known.replace(b"5", number) for number in numbers)]
    pieces = [data + body for data, body in zip(heads, [b"hello", *bodies], strict=False)]
    whole = events_of_whole(pieces, limits)
    assert whole[-1] == "cut" or whole == events_of([b"".join(pieces)], limits)


@pytest.mark.parametrize("kind", [b"Content-Length: 80", b"Transfer-Encoding: chunked"])
def test_what_belongs_to_a_body_is_no_request(kind: bytes) -> None:
    parser = RequestParser(LIMITS)
    for first in (head(b"A: b"), head(kind)):
        parser.feed(first)
        assert parser.next_head() is not None
        assert parser.next_whole(head(b"A: b")) is None or kind not in first
    assert parser.next_whole(head(kind)) is None


@pytest.mark.parametrize("said", [b"123", b"123\r", b"123\r\n", b"123\r\nA: ", b"1" * 16 + b"\r\nA: b\r\n\r\n", b""])
def test_half_a_head_is_not_taken_for_one_that_is_known(said: bytes) -> None:
    parser = RequestParser(LIMITS)
    known = head(b"Content-Length: 12", b"A: b")
    parser.feed(known + b"hello, world")
    assert parser.next_head() is not None
    assert parser.next_data() == b"hello, world"
    assert parser.next_whole(known.partition(b"12")[0] + said) is None
    found = parser.next_whole(known + b"hello, world")
    assert found is not None
    assert (found[0].head.headers["content-length"], found[1]) == ("12", b"hello, world")
