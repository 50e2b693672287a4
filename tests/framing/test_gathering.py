"""Text in pieces: all of it comes out, and no piece of memory that it lay in was ever moved."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable

import pytest

from trimcp.framing import lines, sse
from trimcp.framing.frames import FrameGate
from trimcp.framing.gathering import Gathered

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize("largest", [1, 1000, 70_000, 600_000])
def test_all_of_it_comes_out(largest: int) -> None:
    rng = random.Random(largest)
    whole = rng.randbytes(min(1500 * largest, 3 * MIB))
    gathered, at = Gathered(), 0
    while at < len(whole):
        piece = whole[at : at + rng.randint(0, largest)]
        gathered.add(piece)
        at += len(piece)
        assert gathered.size == at
        if at:
            assert gathered.endswith(whole[at - 1 : at])
            assert not gathered.endswith(bytes([whole[at - 1] ^ 1]))
    assert gathered.beginning(6) == whole[:6]
    assert gathered.take() == whole
    assert (gathered.size, gathered.take(), gathered.beginning(3)) == (0, b"", b"")
    assert not gathered.endswith(b"\r")


def test_it_comes_out_block_by_block_and_each_is_let_go() -> None:
    tracemalloc.start()
    try:
        gathered = Gathered()
        for _ in range(40):
            gathered.add(b"x" * 64 * KIB)
        left, held = gathered.size, []
        assert left == 40 * 64 * KIB
        for block in gathered.drain():
            assert gathered.size == 0
            left -= len(block)
            block = bytearray()
            held.append(tracemalloc.get_traced_memory()[0] - left)
    finally:
        tracemalloc.stop()
    assert left == 0
    assert max(held) < 512 * KIB, "what is left, and little beside"


def test_nothing_is_nothing() -> None:
    gathered = Gathered()
    assert (gathered.size, gathered.beginning(9), gathered.take(), list(gathered.drain())) == (0, b"", b"", [b""])


def _line() -> Callable[[bytes], object]:
    return lines.LineDecoder(4 * MIB).feed


def _event() -> Callable[[bytes], object]:
    decoder = sse.EventDecoder(4 * MIB)
    decoder.feed(b"data: ")
    return decoder.feed


def _fragments() -> Callable[[bytes], object]:
    gate = FrameGate(4 * MIB, masked=False)
    gate.feed(b"\x01\x00")
    # Small pieces have to say how long they are in one byte.
    return lambda piece: gate.feed(
        b"\x00" + (bytes((len(piece),)) if len(piece) < 126 else b"\x7f" + len(piece).to_bytes(8, "big")) + piece
    )


@pytest.mark.parametrize("size", [100, 64 * KIB])
@pytest.mark.parametrize("begin", [_line, _event, _fragments])
def test_a_large_message_lies_in_blocks_none_of_which_is_moved(
    begin: Callable[[], Callable[[bytes], object]], size: int
) -> None:
    """One buffer of 4 MiB was moved through a fragmented heap as it grew, and all its places stayed resident."""
    feed = begin()
    tracemalloc.start()
    try:
        for _ in range(3 * MIB // size):
            feed(b"x" * size)
        held, _ = tracemalloc.get_traced_memory()
        blocks = [trace.size for trace in tracemalloc.take_snapshot().traces]
    finally:
        tracemalloc.stop()
    assert 3 * MIB - KIB < held < 3 * MIB + MIB // 2
    assert max(blocks) < 384 * KIB
