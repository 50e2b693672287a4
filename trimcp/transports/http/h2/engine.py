"""One side of an HTTP/2 connection without I/O: frames in, frames out, streams and their windows (RFC 9113).

    engine.feed(data)
    engine.advance(64)          looks at so many frames, and calls the streams with what they bring
    bytes(engine.out)           what is to be written; whoever writes it clears it

It knows no HTTP: a stream is told of heads, bytes and its end, and sends them. Priorities are ignored (section 5.3.2).
What costs this side work and the peer nothing is counted by kind: it may not outgrow the useful frames (`Allowance`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from trimcp.transports.http.h2 import frames as h2
from trimcp.transports.http.h2.frames import RESETS, Allowance, Code, Http2Error, Setting
from trimcp.transports.http.h2.heads import BlockReader
from trimcp.transports.http.h2.interface import EngineUser, Http2Stream

CONNECTION_WINDOW: Final = 1024 * 1024
"""Bytes of all streams together that the peer may send before it is heard. It is opened at once: streams hold back."""

_MAX_BLOCK: Final = 64 * 1024  # bytes of a compressed head
LARGE_BLOCK: Final = 8 * 1024
"""Bytes of a compressed head from which on reading it takes a millisecond or more."""
_MAX_PIECES: Final = 64  # frames of one head
_REMEMBERED: Final = 256  # streams that have ended, of which it is known how
_STREAM_BITS: Final = 0x7FFF_FFFF


class Engine:
    """One side of one connection.

    It has more than 300 lines because there is one method for each kind of frame (RFC 9113, section 6). `settings` are
    this side's, `max_streams` the requests that the peer may have under way (servers).
    """

    __slots__ = (
        *("_allowance", "_block", "_block_flags", "_block_stream", "_client", "_closed", "_data", "_initial", "_max"),
        *("_owed", "_pieces", "_reader", "_receive_window", "_started", "_user", "_window", "gone_away"),
        *("has_settings", "large", "last", "out", "peer_connects", "peer_streams", "send_window", "streams"),
    )

    def __init__(
        self,
        user: EngineUser,
        reader: BlockReader[Any],
        *,
        client: bool,
        settings: dict[Setting, int],
        max_streams: int = 0,
    ) -> None:
        self._user = user
        self._reader = reader
        self._client = client
        self._max = max_streams
        self._window = settings.get(Setting.INITIAL_WINDOW_SIZE, h2.DEFAULT_WINDOW)
        self.out: bytearray = bytearray()  # bytes to be written
        self.streams: dict[int, Http2Stream] = {}  # those that are open, by number
        self.send_window: int = h2.DEFAULT_WINDOW  # bytes that may be sent over all streams
        # how many streams the peer lets us open (clients)
        self.peer_streams: int = 100 if client else 0  # until it says (section 3.4: settings may come late)
        self.peer_connects: bool = False  # whether the peer takes WebSockets (RFC 8441)
        self.last: int = 0  # the highest number of a stream that the peer has opened, or of ours for a client
        # bytes of the compressed head that `advance` has stopped before, because it is large; 0 if there is none
        self.large: int = 0
        self.gone_away: bool = False  # whether this side has said that it serves no more
        self._initial = h2.DEFAULT_WINDOW  # of the peer's streams
        self._receive_window = CONNECTION_WINDOW
        self._owed = 0
        self._data = b""
        self._started = client  # whether the preface was read
        self.has_settings: bool = False  # whether the peer's first settings were
        self._block: list[bytes] | None = None  # pieces of a head that is not complete
        self._block_stream = self._block_flags = self._pieces = 0
        self._closed: dict[int, bool] = {}  # the last streams that have ended, and whether this side has reset them
        self._allowance = Allowance()
        if client:
            self.out += h2.PREFACE
        self.out += h2.settings_frame(settings)
        self.out += h2.window_update(0, CONNECTION_WINDOW - h2.DEFAULT_WINDOW)

    # Receiving

    @property
    def in_head(self) -> bool:
        """Whether a head has begun and is not complete."""
        return self._block is not None

    def feed(self, data: bytes, now: float) -> None:
        """Add received bytes, at this time in seconds."""
        self._data = self._data + data if self._data else data
        self._allowance.now = now

    def advance(self, most: int) -> bool:
        """Look at so many frames at most; return whether there are more, or a large head (`large`) waits.

        A fault of one stream resets that stream. Raises Http2Error: the connection cannot go on; see `fail`.
        """
        if not self._started and not self._start():
            return False
        data, at, end = self._data, 0, len(self._data)
        unpack, header, most_bytes = h2.HEADER.unpack_from, h2.HEADER_SIZE, h2.MAX_FRAME
        data_kind, head_kind = h2.DATA, h2.HEADERS
        try:
            while most > 0:
                if (begins := at + header) > end:
                    return False
                high, low, kind, flags, id = unpack(data, at)
                size = high << 8 | low
                if size > most_bytes:
                    raise Http2Error(Code.FRAME_SIZE_ERROR, "a frame is too large")
                stop = begins + size
                if stop > end:
                    return False
                id &= _STREAM_BITS
                if self._block is not None or not self.has_settings:
                    self._check_order(kind, id)
                payload = data[begins:stop]
                try:
                    if kind == data_kind:
                        self._take_data(flags, id, payload)
                    elif kind == head_kind and flags & _WHOLE == h2.END_HEADERS and size < LARGE_BLOCK and id:
                        self._take_block(flags, id, payload)
                    else:
                        if self._is_large(kind, flags, size):
                            return True
                        self._take_frame(kind, flags, id, payload)
                except Http2Error as error:
                    if not error.stream:
                        raise
                    self._reset_for(error)
                at = stop
                most -= 1
            return end - at >= header
        finally:
            self._data = data[at:] if at else data

    def _start(self) -> bool:
        """Read the client's preface; return whether it is complete."""
        data = self._data
        if not h2.PREFACE.startswith(data[: len(h2.PREFACE)]):
            raise Http2Error(Code.PROTOCOL_ERROR, "the connection does not begin as HTTP/2")
        if len(data) < len(h2.PREFACE):
            return False
        self._data = data[len(h2.PREFACE) :]
        self._started = True
        return True

    def _check_order(self, kind: int, id: int) -> None:
        if self._block is not None:
            if kind != h2.CONTINUATION or id != self._block_stream:
                raise Http2Error(Code.PROTOCOL_ERROR, "a head is interrupted")
        elif kind != h2.SETTINGS:
            raise Http2Error(Code.PROTOCOL_ERROR, "the connection does not begin with settings")

    def _is_large(self, kind: int, flags: int, size: int) -> bool:
        """Whether the h2.frame completes a large head, which its connection has not agreed to read now."""
        if kind not in (h2.HEADERS, h2.CONTINUATION) or not flags & h2.END_HEADERS:
            return False
        if kind == h2.CONTINUATION and self._block is not None:
            size += sum(map(len, self._block))
        if size < LARGE_BLOCK:
            return False
        if self.large:  # it has
            self.large = 0
            return False
        self.large = size
        return True

    def _take_data(self, flags: int, id: int, payload: bytes) -> None:
        size = len(payload)
        stream = self.streams.get(id)
        self._receive_window -= size
        if self._receive_window < 0:
            raise Http2Error(Code.FLOW_CONTROL_ERROR, "more data than the connection's window")
        self._owed += size
        if self._owed >= CONNECTION_WINDOW // 2:
            self._receive_window += self._owed
            self.out += h2.window_update(0, self._owed)
            self._owed = 0
        if stream is None:
            self._unless_ended(id, "data on")
            if not self._closed.get(id, False):
                raise Http2Error(Code.STREAM_CLOSED, "data on a stream that has ended")
            return
        if flags & h2.PADDED:
            payload = h2.unpadded(payload)
        if not stream.receives:
            raise Http2Error(Code.STREAM_CLOSED, "data after the end of a stream", id)
        stream.receive_window -= size
        if stream.receive_window < 0:
            raise Http2Error(Code.FLOW_CONTROL_ERROR, "more data than the stream's window", id)
        if padding := size - len(payload):
            self.credit(stream, padding)
        ended = flags & h2.END_STREAM
        if payload:
            self._allowance.useful += 1
            if stream.left is not None:
                stream.left -= len(payload)
                if stream.left < 0:
                    raise Http2Error(Code.PROTOCOL_ERROR, "a body is longer than its head said", id)
            if ended:  # first, so that whoever takes the data knows
                stream.receives = False
            stream.arrived(payload)
        elif not ended:
            self._allowance.spend("frames without data")
        if ended:
            self._ended(stream)

    def _ended(self, stream: Http2Stream) -> None:
        """Note that the peer has ended its side."""
        if stream.left:
            raise Http2Error(Code.PROTOCOL_ERROR, "a body is shorter than its head said", stream.id)
        stream.receives = False
        stream.peer_ended()
        if not stream.sends:
            self._forget(stream)

    def _take_frame(self, kind: int, flags: int, id: int, payload: bytes) -> None:
        if kind == h2.HEADERS:
            self._take_headers(flags, id, payload)
        elif kind == h2.CONTINUATION:
            self._take_continuation(flags, payload)
        elif kind == h2.WINDOW_UPDATE:
            self._take_window_update(id, payload)
        elif kind < len(_OTHERS):
            _OTHERS[kind](self, flags, id, payload)
        else:
            self._allowance.spend("frames of unknown kinds")

    # Heads

    def _take_headers(self, flags: int, id: int, payload: bytes) -> None:
        if not id:
            raise Http2Error(Code.PROTOCOL_ERROR, "a head on no stream")
        if flags & h2.PADDED:
            payload = h2.unpadded(payload)
        if flags & h2.PRIORITIZED:
            if len(payload) < 5:
                raise Http2Error(Code.FRAME_SIZE_ERROR, "a head is too short")
            depends, payload = h2.word_at(payload, 0) & _STREAM_BITS, payload[5:]
            if depends == id:
                flags |= _ON_ITSELF
        if flags & h2.END_HEADERS:
            self._take_block(flags, id, payload)
        else:
            self._block, self._block_stream, self._block_flags, self._pieces = [payload], id, flags, 1

    def _take_continuation(self, flags: int, payload: bytes) -> None:
        block = self._block
        if block is None:
            raise Http2Error(Code.PROTOCOL_ERROR, "a continuation of no head")
        block.append(payload)
        self._pieces += 1
        if self._pieces > _MAX_PIECES or sum(map(len, block)) > _MAX_BLOCK:
            raise Http2Error(Code.ENHANCE_YOUR_CALM, "a head is too large")
        if flags & h2.END_HEADERS:
            self._block = None
            self._take_block(self._block_flags, self._block_stream, b"".join(block))

    def _take_block(self, flags: int, id: int, block: bytes) -> None:
        stream, ended = self.streams.get(id), bool(flags & h2.END_STREAM)
        if flags & _ON_ITSELF:
            self._reader.skip(block)
            self.last = max(self.last, id) if not self._client else self.last
            raise Http2Error(Code.PROTOCOL_ERROR, "a stream depends on itself", id)
        if stream is None:
            if self._client or id <= self.last:
                self._late_head(id, block)
            else:
                self._open(id, block, ended)
        elif not stream.receives:
            self._reader.skip(block)
            raise Http2Error(Code.STREAM_CLOSED, "a head after the end of a stream", id)
        elif self._client and stream.left == _NO_HEAD:
            head = self._read(block, id)
            stream.left = None
            if stream.response(head):
                if ended:
                    raise Http2Error(Code.PROTOCOL_ERROR, "an interim head that is the last one", id)
                self._allowance.spend("interim heads")
                stream.left = _NO_HEAD
            elif ended:
                self._ended(stream)
        else:
            trailers = self._reader.trailers(block)
            if not ended:
                raise Http2Error(Code.PROTOCOL_ERROR, "a second head within a stream", id)
            stream.trailers(trailers)
            self._ended(stream)

    def _read(self, block: bytes, id: int) -> Any:
        try:
            return self._reader.head(block)
        except Http2Error as error:
            if error.code is Code.PROTOCOL_ERROR:  # it was decompressed, and means nothing: others go on
                error.stream = id
            raise

    def _late_head(self, id: int, block: bytes) -> None:
        self._reader.skip(block)
        if self._client and self._is_idle(id):
            raise Http2Error(Code.PROTOCOL_ERROR, "a head on a stream that was never opened")
        reset = self._closed.get(id)
        if reset is None:
            raise Http2Error(Code.PROTOCOL_ERROR, "a stream with a number below that of another")
        if not reset:
            raise Http2Error(Code.STREAM_CLOSED, "a head on a stream that has ended")
        self._allowance.spend("frames on streams that have ended")

    def _open(self, id: int, block: bytes, ended: bool) -> None:
        if not id & 1:
            raise Http2Error(Code.PROTOCOL_ERROR, "a client opens streams with odd numbers")
        self.last = id
        if len(self.streams) >= self._max or self.gone_away:
            self._reader.skip(block)
            raise Http2Error(Code.REFUSED_STREAM, "there are too many streams", id)
        head = self._read(block, id)
        stream = self._user.request(id, head, ended)
        if stream is None:
            raise Http2Error(Code.REFUSED_STREAM, "there are too many streams", id)
        self._allowance.useful += 1
        stream.id = id
        stream.send_window = self._initial
        stream.receive_window = self._window
        stream.receives = not ended
        self.streams[id] = stream
        if ended and stream.left:
            raise Http2Error(Code.PROTOCOL_ERROR, "a body is shorter than its head said", id)
        self._user.began(stream, ended)

    # Other frames

    def _take_window_update(self, id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Http2Error(Code.FRAME_SIZE_ERROR, "the size of a window's growth has four bytes")
        size = h2.word_at(payload, 0) & h2.MAX_WINDOW
        if not id:
            before, self.send_window = self.send_window, h2.grown(self.send_window, size, id)
            if before <= 0:
                self._user.windows_opened()
            else:
                self._allowance.spend("growing windows")
            return
        stream = self._unless_ended(id, "WINDOW_UPDATE on")
        if stream is None:
            return
        before, stream.send_window = stream.send_window, h2.grown(stream.send_window, size, id)
        self._allowance.spend("growing windows")
        if before <= 0:
            stream.window_opened()

    def _take_priority(self, flags: int, id: int, payload: bytes) -> None:
        if not id:
            raise Http2Error(Code.PROTOCOL_ERROR, "a PRIORITY on no stream")
        if len(payload) != 5:
            raise Http2Error(Code.FRAME_SIZE_ERROR, "a PRIORITY has five bytes", id)
        if h2.word_at(payload, 0) & _STREAM_BITS == id:
            raise Http2Error(Code.PROTOCOL_ERROR, "a stream depends on itself", id)
        self._allowance.spend("priorities")

    def _take_reset(self, flags: int, id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Http2Error(Code.FRAME_SIZE_ERROR, "a RST_STREAM has four bytes")
        stream = self._unless_ended(id, "RST_STREAM on")
        if stream is None:
            return
        if not self._client:
            self._allowance.spend(RESETS)
        self._forget(stream)
        stream.was_reset(h2.word_at(payload, 0), "the peer has reset the stream")

    def _take_settings(self, flags: int, id: int, payload: bytes) -> None:
        if id:
            raise Http2Error(Code.PROTOCOL_ERROR, "SETTINGS on a stream")
        if flags & h2.ACK:
            if payload:
                raise Http2Error(Code.FRAME_SIZE_ERROR, "an acknowledgement of SETTINGS with a payload")
            self._allowance.spend("settings")
            return
        if len(payload) % 6:
            raise Http2Error(Code.FRAME_SIZE_ERROR, "settings have six bytes each")
        opened = False
        for setting, value in h2.settings_in(payload):
            self._allowance.spend("settings")
            opened |= self._set(setting, value)
        self._allowance.spend("settings")
        self.has_settings = True
        self.out += _SETTINGS_ACK
        self._user.settings_came()
        if opened:
            self._user.windows_opened()

    def _set(self, setting: int, value: int) -> bool:
        """Note a setting of the peer's; return whether windows have grown."""
        if setting == Setting.INITIAL_WINDOW_SIZE:
            if value > h2.MAX_WINDOW:
                raise Http2Error(Code.FLOW_CONTROL_ERROR, "the first window is too large")
            change, self._initial = value - self._initial, value
            for stream in self.streams.values():
                stream.send_window += change
                if stream.send_window > h2.MAX_WINDOW:
                    raise Http2Error(Code.FLOW_CONTROL_ERROR, "a stream's window is too large")
            return change > 0
        if setting == Setting.MAX_FRAME_SIZE:
            if not h2.MAX_FRAME <= value < 1 << 24:
                raise Http2Error(Code.PROTOCOL_ERROR, "SETTINGS_MAX_FRAME_SIZE is out of range")
        elif setting == Setting.ENABLE_PUSH:
            if value > (0 if self._client else 1):
                raise Http2Error(Code.PROTOCOL_ERROR, "pushing is 0 or 1")
        elif setting == Setting.ENABLE_CONNECT_PROTOCOL:
            if value > 1:
                raise Http2Error(Code.PROTOCOL_ERROR, "the extended CONNECT is 0 or 1")
            self.peer_connects = bool(value)
        elif setting == Setting.MAX_CONCURRENT_STREAMS:
            self.peer_streams = value
        return False

    def _take_push(self, flags: int, id: int, payload: bytes) -> None:
        raise Http2Error(Code.PROTOCOL_ERROR, "a peer that asked for no push pushes")

    def _take_ping(self, flags: int, id: int, payload: bytes) -> None:
        if id:
            raise Http2Error(Code.PROTOCOL_ERROR, "a PING on a stream")
        if len(payload) != 8:
            raise Http2Error(Code.FRAME_SIZE_ERROR, "a PING has eight bytes")
        self._allowance.spend("pings")
        if not flags & h2.ACK:
            self.out += h2.frame(h2.PING, h2.ACK, 0, payload)

    def _take_goaway(self, flags: int, id: int, payload: bytes) -> None:
        if id:
            raise Http2Error(Code.PROTOCOL_ERROR, "a GOAWAY on a stream")
        if len(payload) < 8:
            raise Http2Error(Code.FRAME_SIZE_ERROR, "a GOAWAY has at least eight bytes")
        self._allowance.spend("GOAWAY frames")
        self._user.went_away(h2.word_at(payload, 0) & _STREAM_BITS, h2.word_at(payload, 4))

    def _unless_ended(self, id: int, what: str) -> Http2Stream | None:
        """Return a stream; None if it has ended, which is counted. Raises Http2Error: it was never opened."""
        stream = self.streams.get(id)
        if stream is None:
            if self._is_idle(id):
                raise Http2Error(Code.PROTOCOL_ERROR, f"{what} a stream that was never opened")
            self._allowance.spend("frames on streams that have ended")
        return stream

    def _is_idle(self, id: int) -> bool:
        """Whether a stream was never opened."""
        return not id or id > self.last or not id & 1

    # Sending

    def open(self, stream: Http2Stream, block: bytes, *, end: bool) -> None:
        """Open a stream with the head of a request (clients)."""
        self.last = stream.id = self.last + 2 if self.last else 1
        stream.send_window = self._initial
        stream.receive_window = self._window
        stream.left = _NO_HEAD
        self.streams[stream.id] = stream
        self.send_head(stream, block, end=end)

    def send_head(self, stream: Http2Stream, block: bytes, *, end: bool) -> None:
        """Send a head, the first or the last; with `end` nothing follows."""
        size = len(block)
        if size <= h2.MAX_FRAME:  # nearly always
            flags = h2.END_HEADERS | h2.END_STREAM if end else h2.END_HEADERS
            self.out += h2.HEADER.pack(size >> 8, size & 0xFF, h2.HEADERS, flags, stream.id)
            self.out += block
        else:
            self.out += h2.header_frames(stream.id, block, end=end)
        if end:
            self._sent_all(stream)

    def send_data(self, stream: Http2Stream, data: bytes | memoryview, *, end: bool) -> int:
        """Send as much as the windows let, and return how much that was; `end`: it is the last, once all is sent."""
        size, window = len(data), stream.send_window
        out, id, at = self.out, stream.id, 0
        if 0 < size <= h2.MAX_FRAME and size <= window and size <= self.send_window:  # nearly always
            out += h2.HEADER.pack(size >> 8, size & 0xFF, h2.DATA, h2.END_STREAM if end else 0, id)
            out += data
            stream.send_window = window - size
            self.send_window -= size
            self._allowance.useful += 1
            if end:
                self._sent_all(stream)
            return size
        allowed = min(size, window, self.send_window)
        while at < allowed or (end and at == size):
            piece = min(allowed - at, h2.MAX_FRAME)
            last = end and at + piece == size
            out += h2.HEADER.pack(piece >> 8, piece & 0xFF, h2.DATA, h2.END_STREAM if last else 0, id)
            out += data[at : at + piece]
            at += piece
            if last:
                break
        at = max(at, 0)
        stream.send_window -= at
        self.send_window -= at
        self._allowance.useful += 1
        if end and at == size:
            self._sent_all(stream)
        return at

    def credit(self, stream: Http2Stream, size: int) -> None:
        """Let the peer send so many bytes again on a stream; told in portions of half a window."""
        stream.owed += size
        if stream.owed >= self._window // 2 and stream.receives and stream.id in self.streams:
            stream.receive_window += stream.owed
            self.out += h2.window_update(stream.id, stream.owed)
            stream.owed = 0

    def reset(self, stream: Http2Stream, code: Code) -> None:
        """End a stream at once; no effect if it has ended."""
        if self.streams.get(stream.id) is stream:
            self.out += h2.rst_stream(stream.id, code)
            self._forget(stream, reset=True)

    def forget(self) -> None:
        """Break the references between the engine and its user."""
        self._user = _NOBODY
        self._data = b""
        self.out.clear()

    def ping(self) -> None:
        self.out += h2.frame(h2.PING, 0, 0, b"trimcp\0\0")

    def go_away(self, code: Code = Code.NO_ERROR, reason: str = "") -> None:
        """Say that no more streams are served."""
        self.gone_away = True
        self.out += h2.goaway(0 if self._client else self.last, code, reason.encode("ascii", "replace"))

    def _sent_all(self, stream: Http2Stream) -> None:
        stream.sends = False
        if not self._client:
            self._allowance.answered += 1
        if not stream.receives:
            self._forget(stream)

    def _reset_for(self, error: Http2Error) -> None:
        """Reset the stream that an error belongs to."""
        id = error.stream
        stream = self.streams.get(id)
        self.out += h2.rst_stream(id, error.code)
        if stream is not None:
            self._forget(stream, reset=True)
            stream.was_reset(error.code, error.reason)
        else:
            self._remember(id, reset=True)
        self._allowance.spend("faults")

    def _forget(self, stream: Http2Stream, *, reset: bool = False) -> None:
        stream.sends = stream.receives = False
        if self.streams.pop(stream.id, None) is not None:
            self._remember(stream.id, reset)

    def _remember(self, id: int, reset: bool) -> None:
        closed = self._closed
        closed[id] = reset
        if len(closed) > _REMEMBERED:
            del closed[next(iter(closed))]


_NOBODY: Final[Any] = None
_NO_HEAD: Final = -1  # in place of `left`: the response has not begun
_ON_ITSELF: Final = 0x100  # a flag of ours: the stream depends on itself
_WHOLE: Final = h2.END_HEADERS | h2.PADDED | h2.PRIORITIZED  # the flags that say of what a frame of a head consists
_SETTINGS_ACK: Final = h2.frame(h2.SETTINGS, h2.ACK, 0)

_Take = Callable[[Engine, int, int, bytes], None]
_OTHERS: Final[tuple[_Take, ...]] = (
    Engine._take_push,  # never: data, and heads
    Engine._take_push,
    Engine._take_priority,
    Engine._take_reset,
    Engine._take_settings,
    Engine._take_push,
    Engine._take_ping,
    Engine._take_goaway,
)
