"""Chunked bodies: whole however they are split, and refused wherever two readers might disagree."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimcp.transports.http.h1.parser import ChunkDecoder, RequestRefused


def decode(pieces: list[bytes]) -> tuple[bytes, bytes]:
    """The data of one body, and what follows it."""
    decoder = ChunkDecoder()
    buffer, data = b"", b""
    for piece in pieces:
        buffer += piece
        used = 1
        while used and not decoder.done:
            taken, used = decoder.take(buffer)  # which raises in the end if what is left is malformed
            data += taken
            buffer = buffer[used:]
    assert decoder.done
    return data, buffer


@pytest.mark.parametrize(
    "body",
    [
        b"x\r\n",
        b"\r\n",
        b"-1\r\n",
        b"+1\r\n",
        b"0x1\r\n",
        b"1_0\r\n",
        b" 1\r\n",
        b"1 \r\n",
        b"1\n",
        b"1\r\r\n",
        b"1;a\x00\r\n",
        b"1;a\rb\r\n",
        b"1;a\n",
        b"1 a\r\n",
        b"1000000000000000\r\n",
        b"1\r\nab\r\n",
        b"1\r\na\n",
        b"1\r\na\r\r\n",
        b"1\r\na0\r\n\r\n",
        b"2\r\na\r\n0\r\n\r\n",
        b"0\r\nX\r\n",
        b"0\r\nX: a\n\r\n",
        b"0\r\nX: a\x00\r\n\r\n",
        b"0\r\nX: a\rb\r\n\r\n",
        b"0\r\n: a\r\n\r\n",
        b"0\r\n X: a\r\n\r\n",
        b"0\r\nX : a\r\n\r\n",
        b"0\r\nGET / HTTP/1.1\r\n\r\n",
        b"1;" + b"x" * 300,
        b"1" * 300,
        b"".join(b"1;%s\r\na\r\n" % (b"x" * 250) for _ in range(70)),
        b"0\r\n" + b"X: y\r\n" * 1_400,
        b"0\r\nX:" + b"y" * 9_000,
    ],
)
def test_chunks_that_are_refused(body: bytes) -> None:
    with pytest.raises(RequestRefused) as caught:
        decode([body])
    assert caught.value.status == 400
    with pytest.raises(RequestRefused):
        decode([body[n : n + 1] for n in range(len(body))])


def test_extensions_are_bounded_in_all_and_ignored() -> None:
    body = b"".join(b"1;%s\r\na\r\n" % (b"x" * 249) for _ in range(60)) + b"0\r\n\r\n"
    assert decode([body]) == (b"a" * 60, b"")


def test_what_came_before_a_malformed_chunk_is_not_lost() -> None:
    decoder = ChunkDecoder()
    assert decoder.take(b"3\r\nabc\r\nzz\r\n") == (b"abc", 8)
    with pytest.raises(RequestRefused):
        decoder.take(b"zz\r\n")


def test_of_many_chunks_a_few_are_taken_at_a_time() -> None:
    decoder = ChunkDecoder()
    data, turns = b"1\r\nx\r\n" * 10_000 + b"0\r\n\r\n", 0
    while not decoder.done:
        taken, used = decoder.take(data)
        assert used or decoder.done
        assert len(taken) <= 33
        data, turns = data[used:], turns + 1
    assert (data, turns) == (b"", 313)


def test_of_large_chunks_all_are_taken_at_once() -> None:
    decoder = ChunkDecoder()
    data = b"1000\r\n" + b"x" * 4_096 + b"\r\n"
    assert decoder.take(data * 16) == (b"x" * 65_536, 16 * len(data))


def test_a_chunk_in_many_pieces_is_not_kept() -> None:
    decoder = ChunkDecoder()
    assert decoder.take(b"fffffff\r\n") == (b"", 9)
    for _ in range(10):
        assert decoder.take(b"x" * 1_000) == (b"x" * 1_000, 1_000)
    assert not decoder.done


@settings(max_examples=300, deadline=None)
@given(
    body=st.binary(max_size=300),
    sizes=st.lists(st.integers(1, 40), max_size=20),
    cuts=st.lists(st.integers(0, 500), max_size=12),
)
def test_a_body_arrives_whole_however_it_is_split(body: bytes, sizes: list[int], cuts: list[int]) -> None:
    encoded, at = bytearray(), 0
    for size in [*sizes, 300]:
        if piece := body[at : at + size]:
            encoded += b"%x\r\n%s\r\n" % (len(piece), piece)
            at += size
    stream = bytes(encoded) + b"0\r\nTrailer: ignored\r\n\r\n"
    assert decode([stream + b"GET"]) == (body, b"GET")
    places = sorted({0, *(cut for cut in cuts if cut < len(stream)), len(stream)})
    assert decode([stream[start:end] for start, end in pairwise(places)]) == (body, b"")
