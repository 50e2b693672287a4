"""The engine of HTTP/2 against itself, against the library h2, and against frames that no honest peer sends."""

from __future__ import annotations

import random
from typing import Any

import h2.config
import h2.connection
import h2.events
import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.peers.http2 import request_fields
from trimcp.transports.http.h2 import frames
from trimcp.transports.http.h2.engine import CONNECTION_WINDOW, Engine
from trimcp.transports.http.h2.frames import Code, Http2Error, Setting, frame
from trimcp.transports.http.h2.heads import BlockReader, read_request, read_response, write_block
from trimcp.transports.http.h2.interface import EngineUser, Http2Stream


class Stream(Http2Stream):
    """Keeps what it is told, and grants what it got."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self.head: Any = None
        self.body = b""
        self.last: dict[str, str] | None = None
        self.ended = False
        self.reset: int | None = None
        self.unsent = b""
        self.ends = False

    def response(self, head: Any) -> bool:
        self.head = head
        return bool(head.status < 200)

    def trailers(self, headers: dict[str, str]) -> None:
        self.last = headers

    def arrived(self, data: bytes) -> None:
        self.body += data
        self.engine.credit(self, len(data))

    def peer_ended(self) -> None:
        self.ended = True

    def was_reset(self, code: int, reason: str) -> None:
        self.reset = code

    def window_opened(self) -> None:
        self.send()

    def send(self) -> None:
        if self.unsent or self.ends:
            taken = self.engine.send_data(self, self.unsent, end=self.ends)
            self.unsent = self.unsent[taken:]
            if not self.unsent and self.ends:
                self.ends = False


class User(EngineUser):
    """Keeps what happens to a connection."""

    def __init__(self, *, client: bool = False, window: int = frames.DEFAULT_WINDOW) -> None:
        self.requests: list[Stream] = []
        self.refuses = False
        self.away: tuple[int, int] | None = None
        reader: BlockReader[Any] = BlockReader(64 * 1024, read_response if client else read_request)
        values = {Setting.INITIAL_WINDOW_SIZE: window, **({Setting.ENABLE_PUSH: 0} if client else {})}
        self.engine = Engine(self, reader, client=client, settings=values, max_streams=100)

    def request(self, id: int, head: Any, ended: bool) -> Stream | None:
        if self.refuses:
            return None
        stream = Stream(self.engine)
        stream.head, stream.left = head, head.length
        self.requests.append(stream)
        return stream

    def began(self, stream: Http2Stream, ended: bool) -> None:
        assert isinstance(stream, Stream)
        stream.ended = ended

    def windows_opened(self) -> None:
        for stream in list(self.engine.streams.values()):
            assert isinstance(stream, Stream)
            stream.send()

    def went_away(self, last: int, code: int) -> None:
        self.away = (last, code)

    def receive(self, data: bytes, most: int = 1_000_000) -> None:
        self.engine.feed(data, 0.0)
        while self.engine.advance(most):
            pass

    def take(self) -> bytes:
        data = bytes(self.engine.out)
        self.engine.out.clear()
        return data


def open_request(user: User, path: str = "/", body: bytes = b"") -> Stream:
    stream = Stream(user.engine)
    user.engine.open(stream, write_block(request_fields(path)), end=not body)
    if body:
        stream.unsent, stream.ends = body, True
        stream.send()
    return stream


def exchange(client: User, server: User, chance: random.Random | None = None) -> None:
    """Pass bytes until both are silent, in pieces if there is a chance."""
    while True:
        there, back = client.take(), server.take()
        if not there and not back:
            return
        for user, data in ((server, there), (client, back)):
            while data:
                size = len(data) if chance is None else chance.choice((1, 3, 9, 10, 100, 20_000))
                user.receive(data[:size], 1_000_000 if chance is None else chance.randint(1, 5))
                data = data[size:]


@given(
    bodies=st.lists(st.tuples(st.integers(0, 200_000), st.integers(0, 200_000)), min_size=1, max_size=6),
    windows=st.tuples(st.sampled_from([1, 100, 65_535, 1_000_000]), st.sampled_from([1, 100, 65_535, 1_000_000])),
    seed=st.integers(0, 1 << 32),
)
@settings(max_examples=40, deadline=None)
def test_two_of_them_carry_everything_however_it_is_cut(
    bodies: list[tuple[int, int]], windows: tuple[int, int], seed: int
) -> None:
    if min(windows) == 1:  # a frame for each byte
        bodies = [(there % 50, back % 50) for there, back in bodies]
    client, server = User(client=True, window=windows[0]), User(window=windows[1])
    chance = random.Random(seed)
    exchange(client, server, chance)
    streams = [open_request(client, f"/{n}", b"a" * there) for n, (there, _) in enumerate(bodies)]
    exchange(client, server, chance)
    for stream, (there, back) in zip(server.requests, bodies, strict=True):
        assert (len(stream.body), stream.ended) == (there, True)
        server.engine.send_head(stream, write_block([(":status", "200")]), end=False)
        stream.unsent, stream.ends = b"b" * back, True
        stream.send()
    exchange(client, server, chance)
    assert [(len(stream.body), stream.ended, stream.reset) for stream in streams] == [
        (back, True, None) for _, back in bodies
    ]
    assert not client.engine.streams
    assert not server.engine.streams


@pytest.mark.parametrize("window", [1_000, 65_535, 1 << 20])
def test_a_client_of_the_library_h2_gets_and_sends_everything(window: int) -> None:
    server = User()
    peer = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    peer.initiate_connection()
    peer.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
    body, answer = bytes(range(256)) * 1_000, b"z" * 300_000
    peer.send_headers(1, request_fields("/a", headers=[("x-a", "ä".encode().decode("latin-1"))]))
    left, received, over, begun = body, b"", False, False
    while not over:
        while left and (size := min(peer.local_flow_control_window(1), peer.max_outbound_frame_size, len(left))):
            peer.send_data(1, left[:size], end_stream=size == len(left))
            left = left[size:]
        server.receive(peer.data_to_send())
        [stream] = server.requests
        if stream.ended and not begun:
            begun = True
            server.engine.send_head(stream, write_block([(":status", "200"), ("x-b", "1")]), end=False)
            stream.unsent = answer
            stream.send()
        for event in peer.receive_data(server.take()):
            if isinstance(event, h2.events.DataReceived):
                received += event.data
                peer.acknowledge_received_data(event.flow_controlled_length, 1)
            elif isinstance(event, h2.events.StreamEnded):
                over = True
        if begun and not stream.unsent and stream.sends:
            server.engine.send_head(stream, write_block([("x-sum", "2")]), end=True)
    assert (server.requests[0].body, received) == (body, answer)


def settled() -> User:
    """A server whose client has begun, with stream 1 open, 3 complete and answered, and 5 reset by the server."""
    server = User()
    data = frames.PREFACE + frames.settings_frame({})
    for id, ends in ((1, False), (3, True), (5, False)):
        data += frames.header_frames(id, write_block(request_fields("/")), end=ends)
    server.receive(data)
    server.engine.send_head(server.requests[1], write_block([(":status", "200")]), end=True)
    server.engine.reset(server.requests[2], Code.CANCEL)
    server.take()
    return server


BLOCK = hpack.Encoder().encode(request_fields("/"), huffman=False)
FAULTS: dict[str, tuple[bytes, Code, int]] = {
    "a frame that is too large": (frame(frames.DATA, 0, 1, bytes(20_000)), Code.FRAME_SIZE_ERROR, 0),
    "data on no stream": (frame(frames.DATA, 0, 0, b"a"), Code.PROTOCOL_ERROR, 0),
    "data on a stream that was never opened": (frame(frames.DATA, 0, 99, b"a"), Code.PROTOCOL_ERROR, 0),
    "data on a stream that has ended": (frame(frames.DATA, 0, 3, b"a"), Code.STREAM_CLOSED, 0),
    "too much padding": (frame(frames.DATA, frames.PADDED, 1, b"\x05abc"), Code.PROTOCOL_ERROR, 0),
    "a head on no stream": (frame(frames.HEADERS, frames.END_HEADERS, 0, BLOCK), Code.PROTOCOL_ERROR, 0),
    "a head on an even stream": (frame(frames.HEADERS, frames.END_HEADERS, 2, BLOCK), Code.PROTOCOL_ERROR, 0),
    "a head on a stream that has ended": (frame(frames.HEADERS, frames.END_HEADERS, 3, BLOCK), Code.STREAM_CLOSED, 0),
    "a second head": (frame(frames.HEADERS, frames.END_HEADERS, 1, b"\0\x01a\x01b"), Code.PROTOCOL_ERROR, 1),
    "a head with a broken block": (frame(frames.HEADERS, frames.END_HEADERS, 7, b"\xff"), Code.COMPRESSION_ERROR, 0),
    "a head without meaning": (frame(frames.HEADERS, frames.END_HEADERS, 7, b"\x82"), Code.PROTOCOL_ERROR, 7),
    "a head that depends on itself": (
        frame(frames.HEADERS, frames.END_HEADERS | frames.PRIORITIZED, 7, b"\0\0\0\x07\x01" + BLOCK),
        Code.PROTOCOL_ERROR,
        7,
    ),
    "a head that is interrupted": (
        frame(frames.HEADERS, 0, 7, BLOCK) + frame(frames.PING, 0, 0, bytes(8)),
        Code.PROTOCOL_ERROR,
        0,
    ),
    "a continuation of nothing": (frame(frames.CONTINUATION, 4, 1, BLOCK), Code.PROTOCOL_ERROR, 0),
    "a priority of four bytes": (frame(frames.PRIORITY, 0, 1, bytes(4)), Code.FRAME_SIZE_ERROR, 1),
    "a reset of no stream": (frames.rst_stream(0, 0), Code.PROTOCOL_ERROR, 0),
    "a reset of a stream that was never opened": (frames.rst_stream(99, 0), Code.PROTOCOL_ERROR, 0),
    "a reset of three bytes": (frame(frames.RST_STREAM, 0, 1, bytes(3)), Code.FRAME_SIZE_ERROR, 0),
    "SETTINGS on a stream": (frame(frames.SETTINGS, 0, 1), Code.PROTOCOL_ERROR, 0),
    "settings of five bytes": (frame(frames.SETTINGS, 0, 0, bytes(5)), Code.FRAME_SIZE_ERROR, 0),
    "an acknowledgement of SETTINGS with a payload": (frame(frames.SETTINGS, 1, 0, bytes(6)), Code.FRAME_SIZE_ERROR, 0),
    "a window of settings": (frames.settings_frame({Setting.INITIAL_WINDOW_SIZE: 1 << 31}), Code.FLOW_CONTROL_ERROR, 0),
    "frames of settings": (frames.settings_frame({Setting.MAX_FRAME_SIZE: 100}), Code.PROTOCOL_ERROR, 0),
    "a push of settings": (frames.settings_frame({Setting.ENABLE_PUSH: 2}), Code.PROTOCOL_ERROR, 0),
    "a push": (frame(frames.PUSH_PROMISE, 4, 1, bytes(4) + BLOCK), Code.PROTOCOL_ERROR, 0),
    "a PING on a stream": (frame(frames.PING, 0, 1, bytes(8)), Code.PROTOCOL_ERROR, 0),
    "a ping of seven bytes": (frame(frames.PING, 0, 0, bytes(7)), Code.FRAME_SIZE_ERROR, 0),
    "a GOAWAY on a stream": (frame(frames.GOAWAY, 0, 1, bytes(8)), Code.PROTOCOL_ERROR, 0),
    "a window that grows by nothing": (frames.window_update(0, 0), Code.PROTOCOL_ERROR, 0),
    "a stream's window that grows by nothing": (frames.window_update(1, 0), Code.PROTOCOL_ERROR, 1),
    "a window that is too large": (frames.window_update(0, frames.MAX_WINDOW), Code.FLOW_CONTROL_ERROR, 0),
    "a stream's window that is too large": (frames.window_update(1, frames.MAX_WINDOW), Code.FLOW_CONTROL_ERROR, 1),
    "a window of a stream that was never opened": (frames.window_update(99, 1), Code.PROTOCOL_ERROR, 0),
    "more than the stream's window": (
        b"".join(frame(frames.DATA, 0, 1, bytes(16_000)) for _ in range(5)),
        Code.FLOW_CONTROL_ERROR,
        1,
    ),
}


@pytest.mark.parametrize("what", FAULTS)
def test_faults_end_the_stream_or_the_connection(what: str) -> None:
    data, code, stream = FAULTS[what]
    server = settled()
    if "than the stream's window" in what:
        server.requests[0].arrived = lambda data: None
    if stream:
        server.receive(data)
        assert frames.rst_stream(stream, code) in server.take()
        assert stream not in server.engine.streams
        server.receive(frame(frames.PING, 0, 0, b"goes on!"))
        assert frame(frames.PING, frames.ACK, 0, b"goes on!") in server.take()
    else:
        with pytest.raises(Http2Error) as caught:
            server.receive(data)
        assert (caught.value.code, caught.value.stream) == (code, 0)


@pytest.mark.parametrize(
    "data",
    [
        frame(frames.DATA, 0, 5, b"late"),
        frames.header_frames(5, write_block([("a", "b")]), end=True),
        frames.rst_stream(5, 0),
        frames.rst_stream(3, 0),
        frames.window_update(5, 1),
        frames.window_update(3, 1),
        frame(frames.PRIORITY, 0, 99, bytes(5)),
        frame(0x42, 0xFF, 77, b"whatever"),
        frame(frames.GOAWAY, 0, 0, bytes(8)),
    ],
)
def test_what_may_come_late_or_is_nobodys_business_is_ignored(data: bytes) -> None:
    server = settled()
    server.receive(data)
    assert server.take() == b""
    assert list(server.engine.streams) == [1]


@pytest.mark.parametrize(("said", "sent"), [(5, 4), (5, 6), (0, 1)])
def test_a_body_has_to_have_the_length_that_its_head_says(said: int, sent: int) -> None:
    server = settled()
    head = write_block(request_fields("/", headers=[("content-length", str(said))]))
    server.receive(frames.header_frames(7, head, end=False) + frame(frames.DATA, 1, 7, bytes(sent)))
    assert frames.rst_stream(7, Code.PROTOCOL_ERROR) in server.take()
    assert server.requests[-1].reset == Code.PROTOCOL_ERROR


def test_streams_beyond_the_number_are_refused() -> None:
    server = settled()
    server.refuses = True
    server.receive(frames.header_frames(7, write_block(request_fields("/")), end=True))
    assert server.take() == frames.rst_stream(7, Code.REFUSED_STREAM)


def test_the_window_of_the_connection_is_opened_whatever_streams_do() -> None:
    server = settled()
    granted = 0
    for n in range(60):
        id = 7 + 2 * n
        server.receive(frames.header_frames(id, write_block(request_fields("/")), end=False))
        server.requests[-1].arrived = lambda data: None
        server.receive(b"".join(frame(frames.DATA, 0, id, bytes(16_000)) for _ in range(4)))
        said = server.take()
        while said:
            _, size, kind, _, stream = frames.HEADER.unpack_from(said)
            assert (kind, stream) == (frames.WINDOW_UPDATE, 0)
            granted += frames.word_at(said, frames.HEADER_SIZE)
            said = said[frames.HEADER_SIZE + size :]
    assert 60 * 64_000 - CONNECTION_WINDOW < granted <= 60 * 64_000


@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, 255), st.integers(0, 12), st.binary(max_size=40)), max_size=40
    )
)
@settings(max_examples=300, deadline=None)
def test_any_frames_end_in_an_answer_or_an_error_of_the_protocol(
    sent: list[tuple[int, int, int, bytes]],
) -> None:
    server = settled()
    try:
        for kind, flags, id, payload in sent:
            server.receive(frame(kind, flags, id, payload))
    except Http2Error:
        pass
    assert len(server.engine.out) < 100_000


@given(st.binary(max_size=2_000))
def test_any_bytes_do_too(data: bytes) -> None:
    for user in (User(), settled(), User(client=True)):
        try:
            user.receive(data)
        except Http2Error:
            pass


def test_a_client_is_told_what_becomes_of_its_requests() -> None:
    client = User(client=True)
    first, second, third = (open_request(client) for _ in range(3))
    block = write_block
    client.receive(
        frames.settings_frame({Setting.MAX_CONCURRENT_STREAMS: 7, Setting.ENABLE_CONNECT_PROTOCOL: 1})
        + frames.header_frames(1, block([(":status", "103")]), end=False)
        + frames.header_frames(1, block([(":status", "200"), ("a", "b")]), end=False)
        + frame(frames.DATA, 0, 1, b"body")
        + frames.header_frames(1, block([("grpc-status", "0")]), end=True)
        + frames.header_frames(3, block([(":status", "404")]), end=True)
        + frames.rst_stream(5, Code.REFUSED_STREAM)
        + frames.goaway(5, Code.NO_ERROR)
    )
    assert (first.head.status, first.head.headers, first.body, first.last, first.ended) == (
        *(200, {"a": "b"}, b"body", {"grpc-status": "0"}),
        True,
    )
    assert (second.head.status, second.ended, third.reset) == (404, True, Code.REFUSED_STREAM)
    assert (client.engine.peer_streams, client.engine.peer_connects, client.away) == (7, True, (5, 0))
    assert not client.engine.streams


@pytest.mark.parametrize(
    "data",
    [
        frame(frames.DATA, 0, 1, b"before the head"),
        frames.header_frames(1, write_block([(":status", "100")]), end=True),
        frames.header_frames(2, write_block([(":status", "200")]), end=True),
        frames.header_frames(99, write_block([(":status", "200")]), end=True),
    ],
)
def test_servers_that_break_the_protocol(data: bytes) -> None:
    client = User(client=True)
    stream = open_request(client)
    try:
        client.receive(frames.settings_frame({}) + data)
    except Http2Error:
        return
    assert stream.reset is not None


def test_a_large_head_waits_until_it_may_be_read() -> None:
    server = settled()
    block = write_block(request_fields("/", headers=[("x-large", "a" * 40_000)]))
    server.engine.feed(frames.header_frames(7, block, end=True), 0.0)
    assert server.engine.advance(100)
    assert server.engine.large > 40_000
    assert len(server.requests) == 3
    assert not server.engine.advance(100)
    assert server.requests[-1].head.headers["x-large"] == "a" * 40_000
