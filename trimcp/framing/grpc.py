"""Messages of a gRPC call as bytes: a flag, a length of four bytes, and a payload ("gRPC over HTTP2").

A `GrpcDecoder` takes the payloads out of what arrives, `whole_message` the only one of a request. Compressed ones are
decompressed, within the bound on a message ("Compression in gRPC"). The tunnel's payload is
`message JsonRpc { bytes json = 1; }`, which is read and written here, so that MCP over gRPC needs no protobuf library.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from enum import IntEnum
from typing import Final, TypeAlias
from urllib.parse import quote, unquote

import attrs

from trimcp.framing.gathering import Gathered
from trimcp.wire.jsonrpc import PATIENCE, IdScanner, Malformed, oversize

PREFIX: Final = 5
"""Bytes before each payload."""

_VARINT, _TEXT = 0, 2  # wire types
_JSON_FIELD: Final = 1 << 3 | _TEXT
_JSON_TAG: Final = bytes((_JSON_FIELD,))
_OVERHEAD: Final = 16  # bytes of a JsonRpc beside its text, with room for a field or two of a later version
_LENGTHS: Final = {1: 8, 5: 4}  # bytes of a value of a fixed length, by wire type
_MOST_VARINT: Final = 10
_LONGEST_MESSAGE: Final = 1_000  # characters of a status message that are sent
_UNRESERVED: Final = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")

_MOST_DIGITS: Final = 8
_UNITS: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}

CONTENT_TYPE: Final = "application/grpc"
GRPC_HEADERS: Final = (("content-type", CONTENT_TYPE),)
"""The headers of every answer."""

_ZLIB: Final = {"gzip": 31, "deflate": 15}  # the kinds of window, by the name of the compression

Inflate: TypeAlias = "Callable[[bytes], bytes | GrpcFault]"
"""Returns a payload that was compressed."""


class GrpcStatus(IntEnum):
    """How a call ended."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


_BY_HTTP: Final = {
    400: GrpcStatus.INTERNAL,
    401: GrpcStatus.UNAUTHENTICATED,
    403: GrpcStatus.PERMISSION_DENIED,
    404: GrpcStatus.UNIMPLEMENTED,
    429: GrpcStatus.UNAVAILABLE,
    502: GrpcStatus.UNAVAILABLE,
    503: GrpcStatus.UNAVAILABLE,
    504: GrpcStatus.UNAVAILABLE,
}


_REFUSALS: Final = {
    400: GrpcStatus.INVALID_ARGUMENT,
    408: GrpcStatus.DEADLINE_EXCEEDED,
    413: GrpcStatus.RESOURCE_EXHAUSTED,
    429: GrpcStatus.RESOURCE_EXHAUSTED,
    500: GrpcStatus.INTERNAL,
}


def status_of_http(status: int) -> GrpcStatus:
    """Return what a client makes of an HTTP status other than 200 ("HTTP to gRPC Status Code Mapping")."""
    return _BY_HTTP.get(status, GrpcStatus.UNKNOWN)


def status_of_refusal(status: int) -> GrpcStatus:
    """Return the status with which a server refuses a call that it would refuse with this one over HTTP."""
    return _REFUSALS.get(status, status_of_http(status))


def encode_text(text: str) -> str:
    """Return a status message as a header's value: percent-encoded UTF-8, of bounded length."""
    return quote(text[:_LONGEST_MESSAGE], safe=_UNRESERVED)


def decode_text(value: str) -> str:
    """Return the status message that a header's value stands for."""
    return unquote(value, errors="replace")


def encode_timeout(seconds: float) -> str:
    """Return the header `grpc-timeout` for a deadline that is so many seconds away."""
    milliseconds = max(1, round(seconds * 1000))
    if milliseconds < 10**_MOST_DIGITS:
        return f"{milliseconds}m"
    return f"{min(round(seconds), 10**_MOST_DIGITS - 1)}S"


@attrs.frozen
class GrpcFault:
    """Why nothing more is read from a call."""

    status: GrpcStatus  # the status with which a server ends it
    reason: str  # one line that may be sent to the peer


OK_TRAILERS: Final = (("grpc-status", "0"),)
"""The trailers of a call that ended well."""


def status_trailers(status: int, message: str = "") -> tuple[tuple[str, str], ...]:
    """Return the trailers of a call that ends with this status, and a text about it."""
    if not message:
        return OK_TRAILERS if status == GrpcStatus.OK else (("grpc-status", str(int(status))),)
    return ("grpc-status", str(int(status))), ("grpc-message", encode_text(message))


def decode_timeout(value: str) -> float | None:
    """Return the seconds of a header `grpc-timeout`; None if it is malformed."""
    digits, unit = value[:-1], value[-1:]
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= _MOST_DIGITS and unit in _UNITS):
        return None
    return int(digits) * _UNITS[unit]


def inflate_of(encoding: str | None, max_size: int) -> Inflate:
    """Return what decompresses the payloads of a call, of whose kind its header `grpc-encoding` says.

    `max_size`: the most bytes of a payload, after that.
    """

    def inflate(payload: bytes) -> bytes | GrpcFault:
        if encoding in (None, "identity"):
            return GrpcFault(GrpcStatus.INTERNAL, "a compressed message, and no header that says how")
        window = _ZLIB.get(encoding)
        if window is None:
            return UNKNOWN_ENCODING
        inflater = zlib.decompressobj(window)
        try:
            found = inflater.decompress(payload, max_size + 1)  # at once: each pass would copy what is left
        except zlib.error:
            return GrpcFault(GrpcStatus.INVALID_ARGUMENT, "a message cannot be decompressed")
        if len(found) > max_size:
            return GrpcFault(GrpcStatus.RESOURCE_EXHAUSTED, f"a message may have {max_size:,} bytes")
        if not inflater.eof:
            return GrpcFault(GrpcStatus.INVALID_ARGUMENT, "a compressed message is incomplete")
        return found

    return inflate


UNKNOWN_ENCODING: Final = GrpcFault(GrpcStatus.UNIMPLEMENTED, "this compression is not supported")
ACCEPTED_ENCODINGS: Final = (("grpc-accept-encoding", "identity,gzip,deflate"),)
"""Sent with `UNKNOWN_ENCODING`."""


def whole_message(body: bytes, max_size: int, encoding: str | None = None) -> bytes | GrpcFault:
    """Return the payload of a request that has to be one message; `encoding` as in `inflate_of`."""
    size = len(body) - PREFIX
    if size < 0 or int.from_bytes(body[1:PREFIX], "big") != size:
        return GrpcFault(GrpcStatus.INVALID_ARGUMENT, "the request has to be exactly one message")
    if not body[0]:
        if size > max_size:
            return GrpcFault(GrpcStatus.RESOURCE_EXHAUSTED, f"a message may have {max_size:,} bytes")
        return body[PREFIX:]
    return inflate_of(encoding, max_size)(body[PREFIX:])


def message_frame(payload: bytes) -> bytes:
    """Return a payload with its prefix."""
    return b"\0" + len(payload).to_bytes(4, "big") + payload


def json_rpc_header(size: int) -> bytes:
    """Return what stands before a JSON text of this size: the prefix, and the field of `JsonRpc`."""
    field = bytes((_JSON_FIELD,)) + varint(size)
    return b"\0" + (size + len(field)).to_bytes(4, "big") + field


def json_of(payload: bytes) -> bytes | None:
    """Return the JSON text of a `JsonRpc`; None if that is no message of protobuf. Unknown fields are skipped."""
    fields = texts_of(payload)
    return None if fields is None else dict(fields).get(1, b"")


def texts_of(payload: bytes) -> list[tuple[int, bytes]] | None:
    """Return the fields of a protobuf message that have a length, with their numbers; None if it is none."""
    found: list[tuple[int, bytes]] = []
    at, end = 0, len(payload)
    while at < end:
        kind = payload[at] & 7
        number, begins, at = next_field(payload, at)
        if not 0 < at <= end:
            return None
        if kind == _TEXT:
            found.append((number, payload[begins:at]))
    return found


def next_field(payload: bytes, at: int) -> tuple[int, int, int]:
    """Return the number of the field at this place, and where its value begins and ends; an end of 0 if it is none."""
    tag, at = read_varint(payload, at)
    kind = tag & 7
    if tag <= 0:
        return 0, 0, 0
    if kind == _TEXT:
        size, at = read_varint(payload, at)
        return (tag >> 3, at, at + size) if size >= 0 else (0, 0, 0)
    if kind == _VARINT:
        value, end = read_varint(payload, at)
        return (tag >> 3, at, end) if value >= 0 else (0, 0, 0)
    return (tag >> 3, at, at + _LENGTHS[kind]) if kind in _LENGTHS else (0, 0, 0)


def text_field(number: int, value: bytes) -> bytes:
    """Return a field of a protobuf message that has a length, with a number below 16."""
    return bytes((number << 3 | _TEXT,)) + varint(len(value)) + value


def varint(number: int) -> bytes:
    """Return a number as protobuf writes lengths."""
    if number < 0x80:
        return _SMALL[number]
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


_SMALL: Final = [bytes((number,)) for number in range(0x80)]


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at this place and where the next field begins; -1 if it is incomplete."""
    value = 0
    for shift, byte in enumerate(data[at : at + _MOST_VARINT]):
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, at + shift + 1
    return -1, len(data)


@attrs.define(eq=False, repr=False)
class GrpcDecoder:
    """Takes messages out of the bytes of one direction of a call."""

    max_size: int  # the most bytes of one message. It may be changed.
    # whether payloads are `JsonRpc`: `take` then returns JSON texts, and a `Malformed` for one over the limit, of which
    # only the id was read. Otherwise a message over the limit is a fault.
    _tunnel: bool = attrs.field(default=False, kw_only=True, alias="tunnel")
    # how payloads may be compressed: the call's header `grpc-encoding`, or None
    _encoding: str | None = attrs.field(default=None, kw_only=True, alias="encoding")
    # why nothing more is taken; None if there is no error
    fault: GrpcFault | None = attrs.field(init=False, default=None)
    # bytes that `take` has processed, with prefixes and parts of an incomplete message
    taken: int = attrs.field(init=False, default=0)
    rounds: int = attrs.field(init=False, default=0)  # how often everything that had begun was complete
    _rest: bytes = attrs.field(init=False, default=b"")
    _left: int = attrs.field(init=False, default=0)  # bytes of the present payload not taken yet
    _message: Gathered | IdScanner | None = attrs.field(init=False, default=None)  # the present payload so far
    _head: bytes | None = attrs.field(init=False, default=None)  # the beginning of one that is scanned, until its text
    _compressed: bool = attrs.field(init=False, default=False)  # whether the present payload is
    _dry: bool = attrs.field(init=False, default=False)  # whether `_rest` is not enough to go on

    def feed(self, data: bytes) -> None:
        """Add received bytes. They are kept as they are until `take`."""
        if data:
            self._rest = self._rest + data if self._rest else data
            self._dry = False

    @property
    def waiting(self) -> int:
        """Bytes not taken yet."""
        return len(self._rest)

    @property
    def behind(self) -> bool:
        """Whether `take` may find more in what has been fed already."""
        return bool(self._rest) and not self._dry and self.fault is None

    @property
    def unfinished(self) -> bool:
        """Whether a message has begun and is not complete, after everything was taken."""
        return self._message is not None or bool(self._rest)

    @property
    def held(self) -> int:
        """Bytes kept of an incomplete message."""
        return self._message.size if isinstance(self._message, Gathered) else 0

    def take(self, most: int) -> list[bytes | Malformed]:
        """Return at most so many messages."""
        found: list[bytes | Malformed] = []
        data, at, end = self._rest, 0, len(self._rest)
        self._dry = False
        while len(found) < most and self.fault is None:
            if self._message is None:
                if end - at < PREFIX:
                    self._dry = True
                    break
                size = int.from_bytes(data[at + 1 : at + PREFIX], "big")
                self._compressed = data[at] != 0
                at += PREFIX
                if size <= end - at and size <= self.max_size:
                    self._add(found, data[at : at + size])
                    at += size
                    continue
                self._begin(size, data[at : at + 1 + _MOST_VARINT])
            else:
                at = self._gather(found, data, at)
                if self._message is not None:
                    self._dry = True
                    break
        self.taken += at
        self._rest = data[at:] if at else data
        return found

    def _begin(self, size: int, head: bytes) -> None:
        """Begin a message that is not there as a whole, or may be too large, as what is there of its head may say."""
        limit = self.max_size + _OVERHEAD if self._tunnel else self.max_size
        if size > (PATIENCE * limit if self._tunnel and not self._compressed else limit):
            return self._fail(GrpcStatus.RESOURCE_EXHAUSTED, f"a message may have {self.max_size:,} bytes")
        said = read_varint(head, 1)[0] if self._tunnel and not self._compressed and head[:1] == _JSON_TAG else 0
        self._message = Gathered() if size <= limit and not self.max_size < said < size else IdScanner()
        self._left, self._head = size, b""
        return None

    def _gather(self, found: list[bytes | Malformed], data: bytes, at: int) -> int:
        """Take what is there of the present message; return where the rest of the data begins."""
        piece = data[at : at + self._left]
        self._left -= len(piece)
        message = self._message
        if isinstance(message, Gathered):
            message.add(piece)
        elif message is not None:
            self._scan(message, piece)
        if not self._left:
            self._message = None
            if isinstance(message, Gathered):
                self._add(found, message.take())
            elif message is not None:
                self.rounds += 1
                found.append(oversize(message, self.max_size))
        return at + len(piece)

    def _scan(self, scanner: IdScanner, piece: bytes) -> None:
        """Feed the text of a message that is too large to the scanner, without the field's tag and length."""
        if self._head is not None:
            piece = self._head + piece
            size, begins = read_varint(piece, 1)
            if size < 0 and len(piece) <= _MOST_VARINT:
                self._head = piece
                return
            self._head, piece = None, piece[begins:] if piece[0] == _JSON_FIELD else b""
        scanner.feed(piece)

    def _add(self, found: list[bytes | Malformed], payload: bytes) -> None:
        self.rounds += 1
        if self._compressed:
            inflated = inflate_of(self._encoding, self.max_size + (_OVERHEAD if self._tunnel else 0))(payload)
            if isinstance(inflated, GrpcFault):
                self._fail(inflated.status, inflated.reason)
                return
            payload = inflated
        if not self._tunnel:
            found.append(payload)
            return
        text = _plain_json(payload)
        if text is None:
            self._fail(GrpcStatus.INVALID_ARGUMENT, "a payload is no JsonRpc")
        elif len(text) <= self.max_size:
            found.append(text)
        else:
            scanner = IdScanner()
            scanner.feed(text)
            found.append(oversize(scanner, self.max_size))

    def _fail(self, status: GrpcStatus, reason: str) -> None:
        self.fault = GrpcFault(status, reason)
        self._message, self._rest = None, b""


def _plain_json(payload: bytes) -> bytes | None:
    """`json_of`, quickly for a payload that holds one field and nothing else."""
    size = len(payload)
    if size > 1 and payload[0] == _JSON_FIELD:
        second = payload[1]
        if second == size - 2 and second < 0x80:
            return payload[2:]
        if size > 2 and second >= 0x80 and payload[2] < 0x80 and (payload[2] << 7 | second & 0x7F) == size - 3:
            return payload[3:]
    return json_of(payload)
