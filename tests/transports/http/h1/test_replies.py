"""Replies from bytes: framing, what is skipped and refused, bounds, and what makes a connection unusable."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimcp.transports.http.h1.replies import MAX_HEAD, MAX_HEADERS, ReplyParser, UnreadableReply, portions

OK = b"HTTP/1.1 200 OK\r\n"


def fed(*data: bytes) -> ReplyParser:
    reply = ReplyParser()
    for each in data:
        reply.feed(each)
    return reply


EVENTS = (
    OK + b"content-type: Text/Event-Stream; x=y\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
)


@given(st.lists(st.integers(1, 40), min_size=1))
def test_a_chunked_reply_is_the_same_however_it_comes(sizes: list[int]) -> None:
    reply, turn, rest = ReplyParser(), 0, EVENTS
    while rest:
        size = sizes[turn % len(sizes)]
        reply.feed(rest[:size])
        rest, turn = rest[size:], turn + 1
    assert (reply.status, reply.complete, reply.keeps) == (200, True, True)
    assert (reply.content_type, b"".join(reply.pieces)) == ("text/event-stream", b"abcde")


@pytest.mark.parametrize("size", [1, 7, 1_000])
def test_a_reply_may_arrive_in_any_pieces(size: int) -> None:
    data = OK + b"Content-Type: a/b\r\nX: 1\r\nx: 2\r\nContent-Length: 4\r\n\r\nbody"
    reply = fed(*[data[start : start + size] for start in range(0, len(data), size)])
    assert (reply.status, b"".join(reply.pieces), reply.size) == (200, b"body", 4)
    assert reply.headers == {"content-type": "a/b", "x": "1, 2", "content-length": "4"}
    assert reply.complete
    assert reply.keeps


@pytest.mark.parametrize(
    ("head", "keeps"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", True),
        (b"HTTP/1.1 304 Not Modified\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\nConnection: keep-alive\r\n\r\n", True),
    ],
)
def test_a_connection_is_kept_if_the_reply_allows_it(head: bytes, keeps: bool) -> None:
    reply = fed(head)
    assert reply.complete
    assert reply.keeps == keeps


def test_a_reply_after_another_begins_anew() -> None:
    reply = fed(OK + b"X: 1\r\nSet-Cookie: a=b\r\nContent-Length: 1\r\n\r\na")
    assert reply.cookies == ["a=b"]
    reply.reset()
    assert not reply.begun
    reply.feed(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
    assert (reply.status, reply.headers, reply.cookies, reply.pieces) == (404, {"content-length": "0"}, [], [])


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    for coding in (b"", b"Transfer-Encoding: identity\r\n"):
        reply = fed(OK + coding + b"\r\nall of it")
        assert not reply.complete
        assert reply.end()
        assert reply.complete
        assert not reply.keeps


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nX: 1\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        OK + b"Content-Length: 5\r\n\r\n1234",
        OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n",
    ],
)
def test_a_reply_that_is_cut_short_is_not_complete(data: bytes) -> None:
    reply = fed(data) if data else ReplyParser()
    assert reply.begun == bool(data)
    assert not reply.end()


def test_interim_replies_are_skipped() -> None:
    interim = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\nSet-Cookie: a=b\r\n\r\n"
    reply = fed(b"HTTP/1.1 100 Continue\r\n\r\n" + interim, OK + b"Content-Length: 1\r\n\r\nx")
    assert (reply.status, reply.headers, reply.cookies) == (200, {"content-length": "1"}, [])
    assert reply.keeps


def test_so_many_interim_replies_are_refused() -> None:
    reply = ReplyParser()
    with pytest.raises(UnreadableReply, match="in its head"):
        for _ in range(MAX_HEAD):
            reply.feed(b"HTTP/1.1 100 Continue\r\n\r\n")


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"\x16\x03\x01\x02",
        OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
        OK + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
        OK + b"Content-Length: -1\r\n\r\n",
        OK + b"Content-Length: 99999999999999999999999\r\n\r\n",
        OK + b"X y: 1\r\n\r\n",
        OK + b"X: a\0b\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: xchunked\r\n\r\n",
        b"HTTP/1.1 099 X\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_and_not_quoted(data: bytes) -> None:
    with pytest.raises(UnreadableReply) as caught:
        fed(data)
    assert str(caught.value).isprintable()
    assert "SSH" not in str(caught.value)


def test_a_head_and_its_lines_are_bounded() -> None:
    fed(OK + b"x: y\r\n" * (MAX_HEADERS - 1) + b"Content-Length: 0\r\n\r\n")
    with pytest.raises(UnreadableReply, match="more than 1,000 headers"):
        fed(OK + b"x: y\r\n" * MAX_HEADERS + b"Content-Length: 0\r\n\r\n")
    reply = fed(OK)
    with pytest.raises(UnreadableReply, match="in its head"):
        for _ in range(MAX_HEAD):
            reply.feed(b"x" * 1_000)


def test_so_is_what_stands_beside_the_data_of_chunks() -> None:
    reply = fed(OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nTrailer: ")
    with pytest.raises(UnreadableReply, match="beside its body"):
        for _ in range(MAX_HEAD):
            reply.feed(b"x" * 1_000)


def test_a_trailer_is_no_header() -> None:
    reply = fed(OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nContent-Type: evil\r\n\r\n")
    assert reply.complete
    assert "content-type" not in reply.headers


@pytest.mark.parametrize("more", [b"x", OK + b"Content-Length: 1\r\n\r\ny", b"HTTP/1.1 500 No\r\n\r\n"])
@pytest.mark.parametrize("apart", [True, False])
def test_more_than_the_reply_makes_the_connection_unusable(more: bytes, apart: bool) -> None:
    first = OK + b"X: 1\r\nContent-Length: 1\r\n\r\na"
    reply = fed(first, more) if apart else fed(first + more)
    assert (reply.status, reply.headers["x"], reply.pieces, reply.complete) == (200, "1", [b"a"], True)
    assert not reply.keeps


def test_tiny_chunks_are_fed_in_parts_and_nothing_else_is() -> None:
    tiny = b"1\r\nx\r\n" * 5_000
    parts = portions(tiny)
    assert parts is not None
    taken = list(parts)
    assert b"".join(taken) == tiny
    assert len(taken) >= 5_000 / 16 - 1
    event = b"96\r\ndata: " + b'{"jsonrpc":"2.0","method":"notifications/progress"}'.ljust(142) + b"\n\n\r\n"
    for whole in (b"short\r\n" * 10, b"x" * 60_000, event * 400, b'{\n"a": 1\n}\n' * 5_000):
        assert portions(whole) is None
