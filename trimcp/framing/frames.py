"""WebSocket frames as they are received (RFC 6455, section 5), checked by their headers before the payload is kept.

The gate keeps messages, and passes control frames on to a WebSocket library:

- a message over the limit is discarded while it is received; an empty text replaces it, and the error to report is in
  `oversized`;
- a message in fragments becomes one text, so a million fragments take no more memory than that;
- an invalid frame ends the stream of frames, and `fault` has the close code;
- of many tiny frames that arrive together, a few are read at a time.

In the other direction `text_frame` makes a frame of a message, without copying it when a server sends it.
"""

from __future__ import annotations

import os
from enum import Enum, auto
from typing import Final

import attrs

from trimcp.framing.gathering import Gathered
from trimcp.wire.jsonrpc import PATIENCE, IdScanner, Malformed, oversize

_FIN: Final = 0x80
_RESERVED: Final = 0x70
_CONTINUATION, _TEXT, _BINARY, _CLOSE, _PONG = 0x0, 0x1, 0x2, 0x8, 0xA
_MASKED: Final = 0x80
_MAX_SHORT: Final = 125  # bytes of the longest payload without extended length; control frames may have no more
_NO_KEY: Final = b"\0\0\0\0"

_EACH: Final = 64  # bytes counted for a message beside its payload

TURN: Final = 16
"""Frames processed at once. What a frame costs does not depend on its size: one read can contain ten thousand empty
ones, which would block other tasks for a tenth of a second."""


@attrs.frozen
class FrameFault:
    """Why a connection must be closed."""

    code: int  # the close code (RFC 6455, section 7.4.1)
    reason: str  # one line that may be sent to the peer


class _FrameKind(Enum):
    """Kinds of frames. Those of control are passed on unchanged."""

    CONTROL = auto()
    CLOSE = auto()
    WHOLE = auto()
    """A message in one frame, not too large."""
    PART = auto()
    """Part of a message in fragments or pieces, or of one that is discarded."""


@attrs.define(eq=False, repr=False)
class FrameGate:
    """Checks the frames of one direction of one connection, and keeps the messages in them, decoded.

    It has more than 20 fields because each is a bound, or a count that one of them is held against, of one pass
    over the bytes.
    """

    max_message: int  # the most bytes of one message. It may be changed.
    # whether frames must be masked (what clients send) or must not be
    _masked: bool = attrs.field(kw_only=True, alias="masked")
    # why nothing more is passed on; None if there is no error
    fault: FrameFault | None = attrs.field(init=False, default=None)
    closing: bool = attrs.field(init=False, default=False)  # a Close frame was passed on; nothing follows it
    # received data is not processed yet: call `feed` with no data after other tasks have run
    behind: bool = attrs.field(init=False, default=False)
    # the errors to report for discarded messages, in order
    oversized: list[Malformed] = attrs.field(init=False, factory=list)
    # number of complete messages and control frames: a few bytes do not prove that the peer is alive
    signs: int = attrs.field(init=False, default=0)
    rounds: int = attrs.field(init=False, default=0)  # how often everything that had begun was complete
    # the messages that have arrived, as bytes that are valid UTF-8. An empty one stands for each `oversized`.
    texts: list[bytes] = attrs.field(init=False, factory=list)
    weight: int = attrs.field(init=False, default=0)  # bytes of those messages, with a little for each
    _rest: bytes = attrs.field(init=False, default=b"")  # an incomplete header, or all data not processed yet
    _out: bytearray = attrs.field(init=False, factory=bytearray)  # of control frames
    # The present frame; its kind is None between two frames:
    _kind: _FrameKind | None = attrs.field(init=False, default=None)
    _left: int = attrs.field(init=False, default=0)  # bytes of payload not received yet
    _key: bytes = attrs.field(init=False, default=_NO_KEY)  # rotated to match the next byte
    _final: bool = attrs.field(init=False, default=False)
    # The present message, if it did not come whole in one frame: its text so far, or the scanner for its id.
    _message: Gathered | IdScanner | None = attrs.field(init=False, default=None)
    _size: int = attrs.field(init=False, default=0)  # of the present message

    def feed(self, data: bytes) -> None:
        """Process received bytes. Data after a fault or a Close frame is dropped."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        begin = at = 0  # what is between them is passed on
        end = len(data)
        left = TURN
        self.behind = False
        while at < end and self.fault is None and not self.closing:
            if self._kind is None:
                if not left:
                    self._rest, self.behind = data[at:], True
                    break
                left -= 1
                header = _read_header(data, at)
                if header is None:
                    self._rest = data[at:]
                    break
                first, self._left, key, length = header
                found = self._judge(first, key, length)
                if isinstance(found, FrameFault):
                    self.fault, self._message = found, None
                    break
                self._kind = found
                if found is _FrameKind.PART or found is _FrameKind.WHOLE:
                    if begin < at:
                        self._out += data[begin:at]
                    begin = at + length
                at += length
            there = min(self._left, end - at)
            if self._kind is _FrameKind.WHOLE:
                if there == self._size:
                    self._keep(_masked(data[at : at + there], self._key) if self._masked else data[at : at + there])
                    begin = at + there
                else:
                    self._kind, self._message = _FrameKind.PART, Gathered()
            if self._kind is _FrameKind.PART:
                self._absorb(data[at : at + there])
                begin = at + there
            at += there
            self._left -= there
            if not self._left:
                self._finish()
        if begin < at:
            self._out += data[begin:at]

    @property
    def unfinished(self) -> bool:
        """Whether a message or a frame has begun and is not complete."""
        return self._kind is not None or self._message is not None or bool(self._rest)

    @property
    def begun(self) -> int:
        """Bytes kept of an incomplete message."""
        return 0 if self._message is None or isinstance(self._message, IdScanner) else self._message.size

    @property
    def empty(self) -> bool:
        """Whether everything was passed on."""
        return not self._out

    def take(self, max_bytes: int) -> bytes:
        """Return at most `max_bytes` that may be passed on now; b"" if there are none yet."""
        piece = bytes(self._out[:max_bytes])
        del self._out[:max_bytes]
        return piece

    def take_texts(self, most: int | None = None) -> list[bytes]:
        """Return the messages that have arrived, or so many of them, and forget them."""
        texts = self.texts[:most]
        del self.texts[:most]
        self.weight = sum(map(len, self.texts)) + _EACH * len(self.texts) if self.texts else 0
        return texts

    def _keep(self, text: bytes) -> None:
        """Keep a whole message."""
        try:
            text.decode()
        except UnicodeDecodeError:
            self.fault = FrameFault(1007, "text is UTF-8")
        else:
            self.texts.append(text)
            self.weight += len(text) + _EACH

    def _judge(self, first: int, key: bytes | None, length: int) -> _FrameKind | FrameFault:
        """Return the kind of a frame from its header, whose size is `length`, or a fault."""
        opcode = first & 0x0F
        self._final = bool(first & _FIN)
        if (key is not None) is not self._masked:
            return FrameFault(1002, "clients mask their frames, servers do not")
        more = length - (2 if key is None else 6)  # bytes that the payload's length has beside the first
        if more and self._left < (126 if more == 2 else 65536):
            return FrameFault(1002, "a length is written in as few bytes as it needs")
        if first & _RESERVED:
            return FrameFault(1002, "no extension was agreed to")
        if opcode >= _CLOSE:
            if opcode > _PONG or not self._final or self._left > _MAX_SHORT:
                return FrameFault(1002, "no such control frame")
            return _FrameKind.CLOSE if opcode == _CLOSE else _FrameKind.CONTROL
        if opcode == _BINARY:
            return FrameFault(1003, "messages are text")
        if opcode > _BINARY:
            return FrameFault(1002, "no such frame")
        if (opcode == _CONTINUATION) is (self._message is None):
            return FrameFault(1002, "fragments out of order")
        self._key = key or _NO_KEY
        return self._judge_data(opcode)

    def _judge_data(self, opcode: int) -> _FrameKind | FrameFault:
        if opcode == _TEXT:
            self._size = 0
        self._size += self._left
        if self._size > PATIENCE * self.max_message:
            return FrameFault(1009, f"a message may have {self.max_message:,} bytes")
        if opcode == _TEXT and self._final and self._size <= self.max_message:
            return _FrameKind.WHOLE
        if self._message is None:
            self._message = Gathered()
        if self._size > self.max_message and isinstance(self._message, Gathered):
            self._message = self._message.scan()
        return _FrameKind.PART

    def _absorb(self, payload: bytes) -> None:
        """Keep a piece of a message in fragments, or feed a piece of a too large one to the scanner."""
        if not payload:
            return
        if self._masked:
            payload = _masked(payload, self._key)
            turn = len(payload) % 4
            self._key = self._key[turn:] + self._key[:turn]
        if isinstance(self._message, Gathered):
            self._message.add(payload)
        elif self._message is not None:
            self._message.feed(payload)

    def _finish(self) -> None:
        """Process the end of the present frame."""
        kind, self._kind = self._kind, None
        if kind is _FrameKind.CLOSE:
            self.closing = True
            self._message = None
        elif kind is _FrameKind.PART and self._final:
            message, self._message = self._message, None
            if isinstance(message, Gathered):
                self._keep(message.take())
            elif message is not None:
                self.oversized.append(oversize(message, self.max_message))
                self._keep(b"")
        if self._message is None:
            self.rounds += 1
            self.signs += 1
        elif kind is _FrameKind.CONTROL:
            self.signs += 1


def text_frame(text: bytes, *, masked: bool) -> tuple[bytes, bytes]:
    """Return header and payload of a message in one frame; without a mask the payload is `text` itself."""
    if not masked:
        return _text_header(len(text)), text
    key = os.urandom(4)  # unpredictable, so that no one can choose the bytes on the wire (RFC 6455, section 5.3)
    return _text_header(len(text), key), _masked(text, key)


def _text_header(size: int, key: bytes | None = None) -> bytes:
    mask, key = (0, b"") if key is None else (_MASKED, key)
    if size <= _MAX_SHORT:
        return bytes((_FIN | _TEXT, mask | size)) + key
    if size < 65536:
        return bytes((_FIN | _TEXT, mask | 126)) + size.to_bytes(2, "big") + key
    return bytes((_FIN | _TEXT, mask | 127)) + size.to_bytes(8, "big") + key


def _read_header(data: bytes, at: int) -> tuple[int, int, bytes | None, int] | None:
    """Return a frame's first byte, payload length, masking key and header length; None if it is incomplete."""
    there = len(data) - at
    if there < 2:
        return None
    size = data[at + 1] & 0x7F
    length = 2
    if size > _MAX_SHORT:
        length = 4 if size == 126 else 10
        if there < length:
            return None
        size = int.from_bytes(data[at + 2 : at + length], "big")
    key = None
    if data[at + 1] & _MASKED:
        length += 4
        if there < length:
            return None
        key = data[at + length - 4 : at + length]
    return data[at], size, key, length


def _masked(payload: bytes, key: bytes) -> bytes:
    """Apply or remove a mask."""
    size = len(payload)
    keys = (key * (size // 4 + 1))[:size]
    return (int.from_bytes(payload, "big") ^ int.from_bytes(keys, "big")).to_bytes(size, "big")
