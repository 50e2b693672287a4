"""Frames of HTTP/2 as bytes: their kinds, flags, settings and errors, and how each is written (RFC 9113, 4 and 6)."""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import Final

from trimcp.support.rates import TokenBucket

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""The first bytes of every client (section 3.4)."""

HEADER: Final = Struct(">HBBBL")
"""A frame's header: its length in 16 and 8 bits, its kind, its flags, its stream."""
HEADER_SIZE: Final = 9

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITIZED: Final = 0x20

MAX_FRAME: Final = 16_384
"""Bytes of the largest frame that everybody accepts (section 4.2); we accept no larger ones."""
MAX_WINDOW: Final = 2**31 - 1
DEFAULT_WINDOW: Final = 65_535


class Code(IntEnum):
    """Why a stream or a connection ends (section 7)."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD


def name_of(code: int) -> str:
    """Return the name of an error that the peer has sent, or its number if it has none."""
    return Code(code).name if code in Code._value2member_map_ else str(code)


class Http2Error(Exception):
    """The peer broke the protocol, or does too much of what costs more than it is worth."""

    def __init__(self, code: Code, reason: str, stream: int = 0) -> None:
        super().__init__(reason)
        self.code: Code = code  # says what is wrong
        self.reason: str = reason  # one line that may be sent to the peer; it contains no text of the peer's
        self.stream: int = stream  # the stream that ends because of it; 0 for the connection


class Setting(IntEnum):
    """What the two sides tell each other about themselves (section 6.5.2; RFC 8441 section 3)."""

    HEADER_TABLE_SIZE = 0x1
    ENABLE_PUSH = 0x2
    MAX_CONCURRENT_STREAMS = 0x3
    INITIAL_WINDOW_SIZE = 0x4
    MAX_FRAME_SIZE = 0x5
    MAX_HEADER_LIST_SIZE = 0x6
    ENABLE_CONNECT_PROTOCOL = 0x8


_WORD: Final = Struct(">L")
_SETTING: Final = Struct(">HL")


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame."""
    size = len(payload)
    return HEADER.pack(size >> 8, size & 0xFF, kind, flags, stream) + payload


def settings_frame(values: dict[Setting, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(setting, value) for setting, value in values.items()))


def window_update(stream: int, size: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, _WORD.pack(size))


def rst_stream(stream: int, code: int) -> bytes:
    return frame(RST_STREAM, 0, stream, _WORD.pack(code))


def goaway(last: int, code: int, reason: bytes = b"") -> bytes:
    return frame(GOAWAY, 0, 0, _WORD.pack(last) + _WORD.pack(code) + reason)


def word_at(data: bytes, at: int) -> int:
    """Return the number of 32 bits at this place."""
    return int(_WORD.unpack_from(data, at)[0])


def settings_in(payload: bytes) -> list[tuple[int, int]]:
    """Return the numbers and values in the payload of a SETTINGS frame."""
    return list(_SETTING.iter_unpack(payload))


def header_frames(stream: int, block: bytes, *, end: bool) -> bytes:
    """Return the frames of a compressed block of headers: HEADERS, and CONTINUATION if it is too large for one."""
    flags = END_STREAM if end else 0
    if len(block) <= MAX_FRAME:
        return frame(HEADERS, flags | END_HEADERS, stream, block)
    frames = bytearray()
    for at in range(0, len(block), MAX_FRAME):
        piece, last = block[at : at + MAX_FRAME], END_HEADERS if at + MAX_FRAME >= len(block) else 0
        frames += frame(CONTINUATION, last, stream, piece) if at else frame(HEADERS, flags, stream, piece)
    return bytes(frames)


def unpadded(payload: bytes) -> bytes:
    """Return a frame's payload without its padding. Raises Http2Error if that is longer."""
    if not payload or payload[0] >= len(payload):
        raise Http2Error(Code.PROTOCOL_ERROR, "more padding than frame")
    return payload[1 : len(payload) - payload[0]]


def grown(window: int, size: int, id: int) -> int:
    """Return a window that the peer lets grow. Raises Http2Error if that is nothing, or too much."""
    if not size:
        raise Http2Error(Code.PROTOCOL_ERROR, "a window that grows by nothing", id)
    if window + size > MAX_WINDOW:
        raise Http2Error(Code.FLOW_CONTROL_ERROR, "a window is too large", id)
    return window + size


# Frames that cost this side work and are of no use, of each kind: so many at once, for each useful frame, and a second.
_AT_ONCE: Final = 1_000.0
_FOR_EACH: Final = 8.0
_PER_SECOND: Final = 100.0
_RESETS_PER_SECOND: Final = 33.0
RESETS: Final = "resets"
"""Requests that are begun and given up cost much (CVE-2023-44487): there may be as many as were answered, and a few."""


class Allowance:
    """Frames of each kind that the peer may send beside the useful ones."""

    __slots__ = ("_buckets", "_seen", "answered", "now", "useful")

    def __init__(self) -> None:
        self.useful: int = 0  # useful frames so far: with data, and requests
        self.answered: int = 0  # requests that were answered to their end
        self.now: float = 0.0  # the time, in seconds
        self._buckets: dict[str, TokenBucket] = {}
        self._seen: dict[str, int] = {}

    def spend(self, kind: str) -> None:
        """Count a frame. Raises Http2Error if there are too many of its kind."""
        bucket = self._buckets.get(kind)
        if bucket is not None and bucket.tokens >= 1:
            bucket.tokens -= 1
            return
        useful, each, rate = self.useful, _FOR_EACH, _PER_SECOND
        if kind is RESETS:
            useful, each, rate = self.answered, 1.0, _RESETS_PER_SECOND
        if bucket is None:
            bucket = self._buckets[kind] = TokenBucket(rate, _AT_ONCE, self.now)
        else:
            bucket.refill(self.now)
            bucket.tokens = min(bucket.burst, bucket.tokens + each * (useful - self._seen[kind]))
        self._seen[kind] = useful
        if not bucket.take(self.now):
            raise Http2Error(Code.ENHANCE_YOUR_CALM, f"too many {kind}")
