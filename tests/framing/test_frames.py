"""Frames that pass the gate say what was said, whatever the fragments and chunks; what must not pass does not."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wsproto.connection import Connection, ConnectionType
from wsproto.events import CloseConnection, Event, Ping, TextMessage

from tests.peers.websockets import BINARY, CLOSE, CONTINUATION, FIN, PING, PONG, TEXT, frame
from trimcp.framing.frames import FrameFault, FrameGate, text_frame
from trimcp.wire.jsonrpc import Malformed

MASK = b"\x01\x02\x03\x04"
LIMIT = 300


def fragments(pieces: list[bytes], *, masked: bool = True) -> list[bytes]:
    """A text message in as many frames as there are pieces."""
    frames = []
    for at, piece in enumerate(pieces):
        first = (FIN if at == len(pieces) - 1 else 0) | (TEXT if at == 0 else CONTINUATION)
        frames.append(frame(first, piece, masked=masked))
    return frames


def pass_through(gate: FrameGate, data: bytes, steps: list[int]) -> tuple[list[bytes], bytes]:
    """Feed the data in chunks of these sizes, again and again; return the messages and the control frames in them."""
    texts: list[bytes] = []
    passed, at, turn = b"", 0, 0
    while at < len(data):
        step = steps[turn % len(steps)]
        feed(gate, data[at : at + step])
        at, turn = at + step, turn + 1
        texts += gate.take_texts()
        while piece := gate.take(65536):
            passed += piece
    return texts, passed


def feed(gate: FrameGate, data: bytes) -> None:
    """Show data to a gate, turn by turn."""
    gate.feed(data)
    while gate.behind:
        gate.feed(b"")


def events_of(data: bytes, *, masked: bool = True) -> list[Event]:
    """What wsproto makes of frames."""
    reader = Connection(ConnectionType.SERVER if masked else ConnectionType.CLIENT)
    reader.receive_data(data)
    return list(reader.events())


def request(id: int, filling: int) -> bytes:
    return b'{"method":"x","params":"%s","id":%d}' % (b"y" * filling, id)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[list[bytes]], list[int]]:
    """Messages as the payloads of their frames, and the sizes of the chunks they arrive in."""
    said = []
    for id in range(draw(st.integers(1, 6))):
        text = request(id, draw(st.integers(0, 2 * LIMIT)))
        cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=5)))
        said.append([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])
    return said, draw(st.lists(st.integers(1, 400), min_size=1, max_size=5))


@given(conversations(), st.booleans())
def test_what_passes_is_what_was_said(said: tuple[list[list[bytes]], list[int]], masked: bool) -> None:
    messages, steps = said
    data = b""
    for pieces in messages:
        for each in fragments(pieces, masked=masked):
            data += frame(FIN | PING, b"!", masked=masked) + each
    gate = FrameGate(LIMIT, masked=masked)
    heard, controls = pass_through(gate, data, steps)
    texts = [b"".join(pieces) for pieces in messages]
    assert heard == [text if len(text) <= LIMIT else b"" for text in texts]
    pings = events_of(controls, masked=masked)
    assert [type(event) for event in pings] == [Ping] * sum(map(len, messages))
    ids = [each.id for each in gate.oversized]
    assert ids == [id for id, text in enumerate(texts) if len(text) > LIMIT]
    assert gate.fault is None
    assert gate.weight == 0


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("size", [0, 1, 125, 126, 65_535, 65_536, 200_001])
def test_a_message_becomes_one_frame(size: int, masked: bool) -> None:
    text = b"ab" * (size // 2) + b"c" * (size % 2)
    frames = [b"".join(text_frame(text, masked=masked)) for _ in range(2)]
    for each in frames:
        assert events_of(each, masked=masked) == [TextMessage(text.decode())]
    assert not size or not masked or frames[0] != frames[1], "a mask must be a new one each time"
    assert masked or text_frame(text, masked=False)[1] is text


def test_a_message_of_the_limit_passes_and_a_larger_one_does_not() -> None:
    gate = FrameGate(LIMIT, masked=True)
    whole = frame(FIN | TEXT, b"x" * LIMIT)
    assert pass_through(gate, whole, [1000]) == ([b"x" * LIMIT], b"")
    assert not gate.oversized
    assert pass_through(gate, frame(FIN | TEXT, request(7, LIMIT)), [1000]) == ([b""], b"")
    told = gate.oversized.pop(0)
    assert isinstance(told, Malformed)
    assert (told.id, told.reason) == (7, "size")


def test_a_message_is_there_although_the_next_has_begun() -> None:
    gate = FrameGate(LIMIT, masked=True)
    first, second = frame(FIN | TEXT, b"{}"), frame(FIN | TEXT, b"[]")
    gate.feed(first + second[:7])
    assert (gate.take_texts(), gate.unfinished) == ([b"{}"], True)
    gate.feed(second[7:])
    assert (gate.take_texts(), gate.unfinished) == ([b"[]"], False)
    assert gate.empty


def test_a_message_that_comes_in_drops_is_whole() -> None:
    gate = FrameGate(100_000, masked=True)
    data = frame(FIN | TEXT, b"x" * 50_000)
    for at in range(len(data)):
        assert not gate.texts
        gate.feed(data[at : at + 1])
    assert gate.take_texts() == [b"x" * 50_000]


def test_what_is_taken_is_bounded_and_the_rest_is_weighed() -> None:
    gate = FrameGate(100_000, masked=True)
    gate.feed(frame(FIN | PING, b"x" * 100) * 10)
    pieces = []
    while piece := gate.take(300):
        pieces.append(len(piece))
    assert pieces == [300, 300, 300, 160]
    gate.feed(b"".join(frame(FIN | TEXT, b"x" * size) for size in (1, 20, 300)))
    weights = [gate.weight]
    for size in (1, 20, 300):
        assert gate.take_texts(1) == [b"x" * size]
        weights.append(gate.weight)
    each = weights[2] - 300
    assert each > 0, "a message counts for more than its text"
    assert weights == [321 + 3 * each, 320 + 2 * each, 300 + each, 0]


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([(FIN | BINARY, b"x")], 1003),
        ([(BINARY, b"x")], 1003),
        ([(FIN | CONTINUATION, b"x")], 1002),
        ([(TEXT, b"x"), (FIN | TEXT, b"x")], 1002),
        ([(TEXT, b"x"), (FIN | BINARY, b"x")], 1003),
        ([(FIN | 0x40 | TEXT, b"x")], 1002),
        ([(FIN | 0x10 | PING, b"x")], 1002),
        ([(FIN | 0x3, b"x")], 1002),
        ([(FIN | 0xB, b"x")], 1002),
        ([(PING, b"x")], 1002),
        ([(FIN | PING, b"x" * 126)], 1002),
        ([(FIN | CLOSE, b"x" * 126)], 1002),
        ([(FIN | TEXT, b"x" * (16 * LIMIT + 1))], 1009),
        ([(TEXT, b"x" * 8 * LIMIT), (CONTINUATION, b"x" * 8 * LIMIT), (CONTINUATION, b"x")], 1009),
    ],
)
def test_faults(frames: list[tuple[int, bytes]], code: int, masked: bool) -> None:
    gate = FrameGate(LIMIT, masked=masked)
    good = frame(FIN | TEXT, b"{}", masked=masked)
    *before, last = [frame(first, payload, masked=masked) for first, payload in frames]
    passed = pass_through(gate, good + b"".join(before), [10_000])
    assert passed == ([b"{}"], b""), "what came before a fault counts, and half a message is none"
    assert gate.fault is None
    assert pass_through(gate, last + good, [10_000]) == ([], b"")
    assert isinstance(gate.fault, FrameFault)
    assert gate.fault.code == code


def test_masks_are_for_clients() -> None:
    for masked in (True, False):
        gate = FrameGate(LIMIT, masked=masked)
        gate.feed(frame(FIN | TEXT, b"{}", masked=not masked))
        assert gate.fault is not None
        assert gate.fault.code == 1002


def test_a_size_beyond_all_patience_is_refused_by_its_header() -> None:
    gate = FrameGate(LIMIT, masked=True)
    gate.feed(frame(FIN | TEXT, b"", size=2**63))
    assert gate.fault is not None
    assert gate.fault.code == 1009


def test_of_many_frames_a_few_pass_at_a_time() -> None:
    gate = FrameGate(LIMIT, masked=True)
    kinds = [frame(FIN | PONG), frame(FIN | TEXT, b"{}"), *fragments([b"{", b"", b"}"])]
    gate.feed(b"".join(kinds) * 1_000)
    turns = most = seen = 0
    while gate.behind or gate.texts or not gate.empty:
        passed = len(gate.take_texts()) + len(events_of(gate.take(65536)))
        most = max(most, passed)
        seen += passed
        gate.feed(b"")
        turns += 1
    assert seen == 3_000
    assert most <= 16
    assert turns >= 5_000 / 16


def test_of_frames_with_something_in_them_one_read_is_one_turn() -> None:
    gate = FrameGate(1_000_000, masked=True)
    gate.feed(frame(FIN | TEXT, b"x" * 6_000) * 10)
    assert not gate.behind
    assert len(gate.texts) == 10


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("first", [FIN | TEXT, TEXT, FIN | PING])
@pytest.mark.parametrize(("size", "extra"), [(0, 2), (125, 2), (5, 8), (65_535, 8)])
def test_a_length_takes_no_more_bytes_than_it_needs(size: int, extra: int, first: int, masked: bool) -> None:
    gate = FrameGate(1_000_000, masked=masked)
    marker = bytes((first, (0x80 if masked else 0) | (126 if extra == 2 else 127)))
    gate.feed(marker + size.to_bytes(extra, "big") + (MASK if masked else b""))
    assert gate.fault is not None
    assert gate.fault.code == 1002


def test_nothing_follows_a_close_frame() -> None:
    gate = FrameGate(LIMIT, masked=True)
    close = frame(FIN | CLOSE, b"\x03\xe8")
    assert pass_through(gate, frame(TEXT, b"begun") + close + frame(FIN | TEXT, b"{}"), [1000]) == ([], close)
    assert gate.closing
    assert gate.fault is None
    assert events_of(close) == [CloseConnection(1000, "")]


@pytest.mark.parametrize("payload", [b"", b"x"])
def test_fragments_cost_what_is_in_them(payload: bytes) -> None:
    gate = FrameGate(20_000, masked=True)
    gate.feed(frame(TEXT, b"x"))
    chunk = frame(CONTINUATION, payload) * 100
    tracemalloc.start()
    for _ in range(190):
        feed(gate, chunk)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 60_000, "a reference to each fragment alone would take 152,000"
    assert gate.fault is None
    assert gate.empty


def test_what_is_thrown_away_costs_nothing() -> None:
    gate = FrameGate(100_000, masked=True)
    chunk = frame(CONTINUATION, b"x" * 1000) * 10
    gate.feed(frame(TEXT, b'{"id":3,"params":"' + b"x" * 100_000))
    tracemalloc.start()
    for _ in range(100):
        gate.feed(chunk)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000
    gate.feed(frame(FIN | CONTINUATION, b'"}'))
    assert [each.id for each in gate.oversized] == [3]


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("step", [1, 2, 5, 13, 10_000])
def test_of_the_frames_only_those_of_control_pass(step: int, masked: bool) -> None:
    gate = FrameGate(100, masked=masked)
    whole, parts = "häß€".encode(), [b"a\xe2", b"", b"\x82\xac", b"b"]
    said = [
        frame(FIN | TEXT, whole, masked=masked),
        frame(FIN | PING, b"one", masked=masked),
        frame(FIN | TEXT, b"", masked=masked),
        frame(TEXT, parts[0], masked=masked),
        frame(FIN | PONG, b"two", masked=masked),
        *(frame(CONTINUATION, part, masked=masked) for part in parts[1:-1]),
        frame(FIN | CONTINUATION, parts[-1], masked=masked),
        frame(FIN | TEXT, b'{"id": 7, "x": "' + b"x" * 100 + b'"}', masked=masked),
        frame(FIN | CLOSE, masked=masked),
    ]
    data, texts, passed = b"".join(said), [], b""
    for start in range(0, len(data), step):
        gate.feed(data[start : start + step])
        while gate.behind:
            gate.feed(b"")
        texts += gate.take_texts()
        passed += gate.take(65536)
    assert texts == [whole, b"", "a€b".encode(), b""]
    assert [each.id for each in gate.oversized] == [7]
    assert passed == said[1] + said[4] + said[-1]
    assert gate.closing
    assert not gate.unfinished
    assert (gate.weight, gate.begun) == (0, 0)


@pytest.mark.parametrize("step", [1, 3, 10_000])
@pytest.mark.parametrize("frames", [[(FIN | TEXT, b"a\xff")], [(TEXT, b"a\xe2"), (FIN | CONTINUATION, b"b")]])
def test_no_text_is_kept_that_is_none(frames: list[tuple[int, bytes]], step: int) -> None:
    gate = FrameGate(100, masked=True)
    data = b"".join(frame(*each) for each in frames) + frame(FIN | TEXT, b"{}")
    for start in range(0, len(data), step):
        gate.feed(data[start : start + step])
    assert gate.fault == FrameFault(1007, "text is UTF-8")
    assert gate.take_texts() == []
