"""Parses HTTP/1.1 requests (RFC 9112) strictly: input that two parsers might read differently is refused.

`httptools` reads heads, one at a time. This module finds where a head ends. So no limit depends on the buffers of a
parser, and every byte after a head is known to be body, next request or WebSocket. This module also reads bodies,
because `httptools` does not report where a body ends. Sans I/O:

    parser.feed(data)
    parser.next_head()      an H1Request once its head is complete; then
    parser.next_data()      pieces of its body, b"" at its end; then the next head

Refused here but accepted by `httptools`: versions other than 1.0 and 1.1, the methods of RTSP and ICE, a missing or
repeated Host, Transfer-Encoding in HTTP/1.0, codings other than `chunked`, heads without end.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import unquote_to_bytes

import attrs
import httptools

from trimcp.budget import MemoryAccount
from trimcp.support.bounds import TOKEN
from trimcp.transports.http.h1.replies import LONGEST_KNOWN, lower
from trimcp.transports.http.interfaces import Head
from trimcp.transports.http.settings import HttpLimits

METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"})

_REQUEST_LINE: Final = re.compile(rf"({TOKEN}) ([!-~]+) HTTP/([0-9])\.([0-9])\r\n".encode())
_HTTP2: Final = b"PRI * HTTP/2.0\r\n"
_BARE_LF: Final = re.compile(rb"(?<!\r)\n")
_BARE_LF_REASON: Final = "a line does not end in CR LF"
_ABSOLUTE: Final = re.compile(r"https?://([^/?]+)(.*)", re.IGNORECASE)
# No comma, although a name may have one: two Host lines are joined with a comma.
_HOST: Final = re.compile(r"(?:[!$&'()*+;=._~%A-Za-z0-9-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]*)?")
_BAD_ESCAPE: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")

# bytes of a head: each connection keeps its last head, because parsing takes a quarter of a request's time
_REMEMBERED: Final = 1_024
_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)\r\n", re.IGNORECASE)
MAX_LENGTH_DIGITS: Final = 15  # a petabyte; the size limits refuse smaller numbers with a 413

_SIZE_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})([ \t]*;[\t -~\x80-\xff]*)?\r\n")
_TRAILER: Final = re.compile(rb"[!-9;-~]+:[\t -~\x80-\xff]*\r\n")

_MAX_SIZE_LINE: Final = 256
_MAX_EXTENSIONS: Final = 16 * 1024  # of all chunks of a body together, as in Node since CVE-2024-22019
_MAX_TRAILERS: Final = 8 * 1024
_LINES: Final = 64  # chunk lines per call: ten thousand chunks of one byte must not keep other connections waiting


class RequestRefused(Exception):
    """No request that is accepted. Respond with the status and close; the input after it is meaningless."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(status, reason)
        self.status = status  # the HTTP status
        self.reason = reason  # one line that may be sent to the client; it contains no text of the client's


class Http2Begins(RequestRefused):
    """The connection begins with the preface of HTTP/2 (RFC 9113 section 3.4), which is still in the parser."""

    def __init__(self) -> None:
        super().__init__(505, "HTTP/2 is spoken from a connection's first byte on, or not at all")


@attrs.define(eq=False)
class H1Request:
    """A request whose head is complete."""

    head: Head
    length: int | None  # bytes of its body; None if it is chunked
    http10: bool  # HTTP/1.0, which has no chunked coding
    keep_alive: bool  # whether the client wants to keep the connection
    expects: bool  # whether it waits for "100 Continue" before it sends the body


@attrs.define(eq=False)
class _Known:
    """A head that was parsed, where the number in its Content-Length stands in it, and what it says."""

    raw: bytes
    start: int
    end: int  # that of the head, as is the start, if there is no Content-Length
    request: H1Request


@attrs.define(eq=False)
class RequestParser:
    """Parses the requests of one connection.

    `peer`, `loopback`, `secure` and `holding` are copied into every `Head`.
    """

    _limits: HttpLimits = attrs.field(alias="limits")  # bounds of heads. The caller bounds bodies.
    _peer: str = attrs.field(default="", alias="peer")
    _loopback: bool = attrs.field(default=True, alias="loopback")
    _secure: bool = attrs.field(default=False, alias="secure")
    _holding: MemoryAccount | None = attrs.field(default=None, alias="holding")
    _buffer: bytes = attrs.field(init=False, default=b"")
    _empty_line_skipped: bool = attrs.field(
        init=False, default=False
    )  # whether an empty line before the request was skipped
    _scanned: int = attrs.field(init=False, default=0)  # bytes of the buffer that were searched for the end of a head
    _line_seen: bool = attrs.field(init=False, default=False)  # whether the request line is complete and valid
    _left: int = attrs.field(init=False, default=0)  # bytes of the body still expected
    _chunks: ChunkDecoder | None = attrs.field(init=False, default=None)
    _remembered: int = attrs.field(init=False)  # bytes of the largest head that is kept
    _known: _Known | None = attrs.field(init=False, default=None)  # the last head

    def __attrs_post_init__(self) -> None:
        self._remembered = min(_REMEMBERED, self._limits.max_head - MAX_LENGTH_DIGITS)

    @property
    def buffered(self) -> int:
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data

    def rest(self) -> bytes:
        """Return and forget the bytes that were fed but not parsed, for another protocol."""
        rest, self._buffer = self._buffer, b""
        return rest

    def next_head(self) -> H1Request | None:
        """Return the next request, or None if more input is needed. The previous body must have been read to its end.

        Raises RequestRefused: the input is no request that is accepted. How it was split into pieces makes no
        difference.
        """
        buffer = self._buffer
        if not buffer:
            return None
        if buffer[:2] == b"\r\n" and not self._empty_line_skipped:
            self._empty_line_skipped = True  # one empty line before a request, not two (RFC 9112 section 2.2)
            buffer = self._buffer = buffer[2:]
            self._scanned = 0
        end = buffer.find(b"\r\n\r\n", max(0, self._scanned - 3))
        if not 0 <= end < self._limits.max_request_line - 4:
            self._check_so_far(buffer, end)
            if end < 0:
                self._scanned = len(buffer)
                return None
        request = self._read_head(buffer[: end + 4])
        self._buffer = buffer[end + 4 :]
        self._empty_line_skipped = self._line_seen = False
        self._scanned = 0
        self._left = request.length or 0
        self._chunks = ChunkDecoder() if request.length is None else None
        return request

    def next_whole(self, data: bytes) -> tuple[H1Request, bytes] | None:
        """Return a request and its body if `data` is both and no more, with a head like the one before.

        Else nothing has happened, and `data` is to be fed. The request and its head may be the objects that were
        returned for the request before.
        """
        known = self._known
        if known is None or self._buffer or self._left or self._chunks is not None:
            return None  # it belongs to what is incomplete, or to the body before
        if not data.startswith(known.raw) and not _differs_in_length(known, data):
            return None
        request, start = known.request, len(known.raw)
        if len(data) - start != request.length:
            return None
        self._empty_line_skipped = False
        return request, data[start:]

    def next_data(self) -> bytes | None:
        """Return the next bytes of the body, b"" at its end, or None if more input is needed.

        Raises RequestRefused: the body is invalid.
        """
        buffer = self._buffer
        if self._chunks is not None:
            data, used = self._chunks.take(buffer)
            self._buffer = buffer[used:]
            if self._chunks.done and not data:
                self._chunks = None
                return b""
            return data or None
        if not self._left:
            return b""
        data = buffer[: self._left]
        self._buffer = buffer[self._left :]
        self._left -= len(data)
        return data or None

    def _check_so_far(self, buffer: bytes, end: int) -> None:
        """Refuse an incomplete head that is too large, or already invalid.

        The checks go by position in the head. So the same fault is reported however the input was split into pieces.
        """
        limits = self._limits
        if not self._line_seen:
            line_end = buffer.find(b"\n", 0, limits.max_request_line)
            if line_end >= 0:
                _read_request_line(buffer)
                self._line_seen = True
            elif len(buffer) >= limits.max_request_line:
                raise RequestRefused(414, "the request line is too long")
        size = len(buffer) if end < 0 else end + 4
        if _BARE_LF.search(buffer, self._scanned, min(size, limits.max_head)):
            raise RequestRefused(400, _BARE_LF_REASON)
        if size > limits.max_head:
            raise RequestRefused(431, "the request head is too large")

    def _read_head(self, raw: bytes) -> H1Request:
        """Parse a head, unless it is like the previous one: most requests of a connection are."""
        known = self._known
        if known is not None and (raw == known.raw or (_differs_in_length(known, raw) and raw == known.raw)):
            request = known.request
            known.request = _with_head(request, _renewed(request.head), request.length)
            return known.request
        request = self._parse(raw)
        self._known = None
        if len(raw) <= self._remembered:
            found = _LENGTH.search(raw)
            start, end = (len(raw), len(raw)) if found is None else found.span(1)
            self._known = _Known(raw, start, end, request)
        return request

    def _parse(self, raw: bytes) -> H1Request:
        method, target, http10 = _read_request_line(raw)
        lines = raw.count(b"\n")
        if lines != raw.count(b"\r\n"):
            raise RequestRefused(400, _BARE_LF_REASON)
        if lines > self._limits.max_headers + 2:
            raise RequestRefused(431, "the request head has too many lines")
        fields = _Fields()
        try:
            httptools.HttpRequestParser(fields).feed_data(raw)
        except httptools.HttpParserUpgrade:
            pass  # the application decides about upgrades
        except httptools.HttpParserError as error:
            raise RequestRefused(400, f"the request head is malformed: {error}") from None
        if not fields.complete:
            raise RequestRefused(400, "the request head is malformed")
        headers = fields.headers
        if not _HOST.fullmatch(headers.get("host", "" if http10 else ",")):
            raise RequestRefused(400, "a request needs exactly one Host")
        path, query = read_target(method, target, headers)
        expects = _read_expectation(headers) and not http10
        length = _read_length(headers, http10)
        connection = headers.get("connection")
        keep_alive, websocket = not http10, False
        if connection is not None:
            options = {option.strip(" \t") for option in connection.lower().split(",")}
            keep_alive = "close" not in options and (not http10 or "keep-alive" in options)
            if "upgrade" in options and method == "GET" and not http10:
                websocket = "websocket" in headers.get("upgrade", "").lower()
        head = Head(
            *(method, path, query, headers, self._peer, self._loopback, self._secure),
            websocket=websocket,
            holding=self._holding,
        )
        return H1Request(head, length, http10, keep_alive, expects)


def _differs_in_length(known: _Known, data: bytes) -> bool:
    """Return whether the data begin with a known head but for its length. Then that becomes the length it has."""
    raw, start, end = known.raw, known.start, known.end
    after = raw[end:]
    if not after or not data.startswith(raw[:start]):
        return False
    stop = data.find(after, start, start + MAX_LENGTH_DIGITS + len(after))
    digits = data[start:stop]
    if stop < 0 or not digits.isdigit():
        return False
    request = known.request
    head = _renewed(request.head, {**request.head.headers, "content-length": digits.decode()})
    head.reply_headers, head.again = request.head.reply_headers, request.head.again
    known.raw, known.end = data[: stop + len(after)], stop
    known.request = _with_head(request, head, int(digits))
    return True


def _with_head(request: H1Request, head: Head, length: int | None) -> H1Request:
    return H1Request(head, length, request.http10, request.keep_alive, request.expects)


def _renewed(head: Head, headers: Mapping[str, str] | None = None) -> Head:
    """Return a head that says the same, before it was judged."""
    return Head(
        *(head.method, head.path, head.query, head.headers if headers is None else headers),
        *(head.peer, head.loopback, head.secure, head.certificate),
        websocket=head.websocket,
        holding=head.holding,
    )


class _Fields:
    """The header lines of one head, as `httptools` reports them."""

    __slots__ = ("complete", "headers")

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.complete = False

    def on_header(self, raw_name: bytes, raw_value: bytes) -> None:
        name = lower(raw_name) if len(raw_name) <= LONGEST_KNOWN else raw_name.decode("latin-1").lower()
        value = raw_value.decode("latin-1").strip(" \t")
        headers = self.headers
        headers[name] = f"{headers[name]}, {value}" if name in headers else value

    def on_headers_complete(self) -> None:
        self.complete = True


def _read_request_line(head: bytes) -> tuple[str, str, bool]:
    """Return the method, the target, and whether the version is HTTP/1.1."""
    found = _REQUEST_LINE.match(head)
    if found is None:
        raise RequestRefused(400, "the request line is malformed")
    raw_method, raw_target, major, minor = found.groups()
    if major != b"1" or minor not in b"01":
        if head.startswith(_HTTP2):
            raise Http2Begins
        raise RequestRefused(505, "this server speaks HTTP/1.1 and HTTP/2")
    method = raw_method.decode()
    if method not in METHODS:
        raise RequestRefused(501, "this server knows no such method")
    return method, raw_target.decode(), minor == b"0"


def read_target(method: str, target: str, headers: dict[str, str]) -> tuple[str, str]:
    """Return the decoded path and the query; an absolute target replaces Host in `headers` (RFC 9112 section 3.2)."""
    if target[0] != "/":
        absolute = _ABSOLUTE.fullmatch(target)
        if absolute is not None and _HOST.fullmatch(absolute[1]):
            headers["host"] = absolute[1]
            target = absolute[2] if absolute[2].startswith("/") else "/" + absolute[2]
        elif target != "*" or method != "OPTIONS":
            raise RequestRefused(400, "the request target is malformed")
    if "#" in target:
        raise RequestRefused(400, "the request target is malformed")
    path, _, query = target.partition("?")
    if "%" in path:
        if _BAD_ESCAPE.search(path):
            raise RequestRefused(400, "the request target is malformed")
        try:
            path = unquote_to_bytes(path).decode()
        except UnicodeDecodeError:
            raise RequestRefused(400, "the request target is not UTF-8") from None
    return path, query


def _read_expectation(headers: dict[str, str]) -> bool:
    """Return whether the client waits for "100 Continue"."""
    expected = headers.get("expect")
    if expected is None:
        return False
    if expected.lower() != "100-continue":
        raise RequestRefused(417, "this server cannot do what is expected")
    return True


def _read_length(headers: dict[str, str], http10: bool) -> int | None:
    """Return the length of the body, None if it is chunked."""
    length = headers.get("content-length")
    coding = headers.get("transfer-encoding")
    if coding is not None:
        if http10 or length is not None or coding.lower() != "chunked":
            raise RequestRefused(400, "the body is delimited in no way that everybody reads alike")
        return None
    if length is None:
        return 0
    # `httptools` has checked it. "5, 5" is refused here even if a later version accepts it.
    if not length.isdecimal() or len(length) > MAX_LENGTH_DIGITS:
        raise RequestRefused(400, "the Content-Length is malformed")
    return int(length)


class _ChunkPart(enum.Enum):
    """The element that the next byte belongs to."""

    SIZE = enum.auto()
    DATA = enum.auto()
    DATA_END = enum.auto()
    TRAILER = enum.auto()
    NOTHING = enum.auto()


@attrs.define(eq=False)
class ChunkDecoder:
    """Reads one chunked body (RFC 9112 section 7.1) strictly. Extensions and trailers are bounded and ignored."""

    _next: _ChunkPart = attrs.field(init=False, default=_ChunkPart.SIZE)
    _left: int = attrs.field(init=False, default=0)  # bytes of the chunk still expected
    _spent: int = attrs.field(init=False, default=0)  # bytes of extensions, then of trailers

    @property
    def done(self) -> bool:
        return self._next is _ChunkPart.NOTHING

    def take(self, buffer: bytes) -> tuple[bytes, int]:
        """Return the joined data of the chunks in `buffer`, and how many bytes of the buffer were used.

        Many small chunks are read in several calls. Raises RequestRefused: the next bytes are no chunk. Data before
        them is returned first.
        """
        pieces: list[bytes] = []
        at = lines = 0
        try:
            while self._next is not _ChunkPart.NOTHING and (lines < _LINES or not pieces):
                if self._next is _ChunkPart.DATA:
                    piece = buffer[at : at + self._left]
                    pieces.append(piece)
                    at += len(piece)
                    self._left -= len(piece)
                    if self._left:
                        break
                    self._next = _ChunkPart.DATA_END
                else:
                    line = self._find_line(buffer, at)
                    if not line:
                        break
                    self._take_line(line)
                    at += len(line)
                    lines += 1
        except RequestRefused:
            if not pieces:
                raise
            # Raise in the next call: the bad line was not used up.
        return b"".join(pieces), at

    def _find_line(self, buffer: bytes, at: int) -> bytes:
        longest = _MAX_TRAILERS if self._next is _ChunkPart.TRAILER else _MAX_SIZE_LINE
        end = buffer.find(b"\n", at, at + longest)
        if end < 0 and len(buffer) - at >= longest:
            raise RequestRefused(400, "a line in a chunked body is too long")
        return buffer[at : end + 1]

    def _take_line(self, line: bytes) -> None:
        if self._next is _ChunkPart.SIZE:
            found = _SIZE_LINE.fullmatch(line)
            if found is None:
                raise RequestRefused(400, "the size of a chunk is malformed")
            self._spend(len(found[2] or b""), _MAX_EXTENSIONS)
            self._left = int(found[1], 16)
            self._next = _ChunkPart.DATA
            if not self._left:
                self._next = _ChunkPart.TRAILER
                self._spent = 0
        elif line == b"\r\n":
            self._next = _ChunkPart.SIZE if self._next is _ChunkPart.DATA_END else _ChunkPart.NOTHING
        elif self._next is _ChunkPart.DATA_END:
            raise RequestRefused(400, "a chunk does not end where its size says")
        else:
            if _TRAILER.fullmatch(line) is None:
                raise RequestRefused(400, "a trailer is malformed")
            self._spend(len(line), _MAX_TRAILERS)

    def _spend(self, size: int, most: int) -> None:
        if self._spent + size > most:
            raise RequestRefused(400, "a chunked body has too much beside its data")
        self._spent += size
