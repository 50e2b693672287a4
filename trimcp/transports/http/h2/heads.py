"""Headers of HTTP/2: compressed blocks (HPACK, RFC 7541), and the requests and responses that they are (RFC 9113, 8).

The library hpack reads blocks. Clients repeat themselves, so blocks that change nothing in the table of the compression
are remembered with what they say. Our own are written without that table: then a head that was written once is bytes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, Final, Generic, TypeAlias, TypeVar

import attrs
import hpack
from hpack.table import HeaderTable

from trimcp.support.bounds import TOKEN
from trimcp.transports.http.h1.parser import MAX_LENGTH_DIGITS
from trimcp.transports.http.h2.frames import Code, Http2Error

Fields: TypeAlias = Sequence[tuple[bytes, bytes]]
"""Names and values, in their order, as they were sent."""

HeadT = TypeVar("HeadT")

_NAME: Final = re.compile(TOKEN.replace("A-Z", "").encode())
_VALUE: Final = re.compile(rb"(?:[^\0\r\n\t ](?:[^\0\r\n]*[^\0\r\n\t ])?)?", re.DOTALL)
# They say how HTTP/1.1 delimits messages, and would be taken for that behind a translation (section 8.2.2).
_FORBIDDEN: Final = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade", b"http2-settings")
)
_REMEMBERED: Final = 6 * 1024  # bytes of fields whose meaning a connection remembers, of each kind
_LONGEST: Final = 4 * 1024  # of one head
_WEIGHT: Final = 3  # bytes of memory for each of them: as fields, as texts by name, and in their block
TIME_LIMIT: Final = b"grpc-timeout"
"""The header with the time that a call of gRPC may take."""
_LIMIT: Final = bytes((0, len(TIME_LIMIT))) + TIME_LIMIT  # how it begins where it is written as `write_field` does
_LONGEST_LIMIT: Final = len(_LIMIT) + 1 + 9
_PLENTY: Final = 2  # times the largest head that is answered; what is larger ends the connection


_reading: ContextVar[bool] = ContextVar("_reading", default=False)  # whether hpack reads a block for us now


class _QuietHeaders(logging.Filter):
    """Drops what hpack logs about our headers: tokens are among them. Others in this process may want theirs."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not _reading.get()


for _name in ("hpack.hpack", "hpack.table"):
    logging.getLogger(_name).addFilter(_QuietHeaders())


class _CountedTable(HeaderTable):
    """The table of a peer's compression, which counts its changes."""

    changes: int = 0

    def add(self, name: bytes, value: bytes) -> None:
        self.changes += 1
        super().add(name, value)


class _Meanings(dict[Any, Any]):
    """What blocks or fields mean, for so many bytes of fields; then it begins anew."""

    size: int = 0

    def add(self, key: object, meaning: object, size: int) -> None:
        """Remember a meaning of fields of this size, if that is not too large."""
        if size <= _LONGEST:
            if self.size + size > _REMEMBERED:
                self.clear()
            self.size += size
            self[key] = meaning

    def clear(self) -> None:
        super().clear()
        self.size = 0


@attrs.define(eq=False)
class BlockReader(Generic[HeadT]):
    """Reads the blocks of one peer, in the order in which they were sent.

    What a block means is remembered by its bytes, until the table changes, and by its fields. The time limit of a call
    of gRPC is another one each time, so heads are remembered without it.
    """

    max_head: int  # bytes that names and values may take, with 32 for each (section 6.5.2)
    remembered: int = attrs.field(init=False, default=0)  # memory that what is remembered takes, in bytes
    # returns what the fields of a first head of a stream mean. It may raise `Http2Error`.
    _read: Callable[[Fields, int], HeadT]
    # returns what a head means with a time limit; None where that is a header like others
    _limited: Callable[[HeadT, bytes], HeadT] | None = None
    _decoder: hpack.Decoder = attrs.field(init=False)
    _table: _CountedTable = attrs.field(init=False, factory=_CountedTable)
    _heads: _Meanings = attrs.field(init=False, factory=_Meanings)  # by block
    _trailers: _Meanings = attrs.field(init=False, factory=_Meanings)  # by block
    _at: int = attrs.field(init=False, default=0)  # changes of the table for which blocks are known
    _meant: _Meanings = attrs.field(init=False, factory=_Meanings)  # heads by fields

    def __attrs_post_init__(self) -> None:
        self._decoder = hpack.Decoder(_PLENTY * self.max_head)
        self._decoder.header_table = self._table

    def head(self, block: bytes) -> HeadT:
        """Return the meaning of a first head. Equal blocks may be the same object.

        Raises Http2Error: it cannot be read, or has no meaning.
        """
        limited, found = self._limited, None
        if self._at == self._table.changes:
            found = self._heads.get(block)
            if found is None and limited is not None and (at := block.find(_LIMIT, -_LONGEST_LIMIT)) > 0:
                found, limit = self._heads.get(block[:at]), block[at + len(_LIMIT) + 1 :]
                if found is not None:  # then another field begins here
                    same = block[at + len(_LIMIT)] == len(limit) and _VALUE.fullmatch(limit)
                    found = limited(found, limit) if same else None
        return self._new_head(block) if found is None else found

    def _new_head(self, block: bytes) -> HeadT:
        """Return the meaning of a first head that is not known."""
        limit: bytes | None = None
        fields, same = self._fields(block)
        if self._limited is not None:
            fields, limit = _without_limit(fields)
        size = _size(fields)
        head = self._meant.get(fields)
        if head is None:
            head = self._read(fields, size)
            self._meant.add(fields, head, size)
        if limit is not None and self._limited is not None:
            begins = block.removesuffix(_LIMIT + _length(len(limit)) + limit)
            if same and len(begins) < len(block):
                self._heads.add(begins, head, size)
                same = False
            head = self._limited(head, limit)
        if same:
            self._heads.add(block, head, size)
        self._weigh()
        return head

    def trailers(self, block: bytes) -> dict[str, str]:
        """Return the fields of a last head, which equal blocks share. Raises as `head`."""
        headers: dict[str, str] | None = self._trailers.get(block) if self._at == self._table.changes else None
        if headers is not None:
            return headers
        headers = {}
        fields, same = self._fields(block)
        for name, value in fields:
            if name[:1] == b":":
                raise Http2Error(Code.PROTOCOL_ERROR, "a pseudo-header among the trailers")
            add_field(headers, name, value)
        if same:
            self._trailers.add(block, headers, _size(fields))
            self._weigh()
        return headers

    def _weigh(self) -> None:
        self.remembered = _WEIGHT * (self._heads.size + self._trailers.size + self._meant.size)

    def skip(self, block: bytes) -> None:
        """Read the block of a stream that nobody listens to any more: it may change the table. Raises as `head`."""
        self._fields(block)

    def _fields(self, block: bytes) -> tuple[Fields, bool]:
        """Return the fields, and whether the table is the same as before."""
        before = self._table.changes
        if block[:1] and block[0] & 0xE0 == 0x20:  # the table gets another size
            self._table.changes += 1
        ours = _reading.set(True)
        try:
            fields: Any = self._decoder.decode(block, raw=True)
        except hpack.OversizedHeaderListError:
            raise Http2Error(Code.ENHANCE_YOUR_CALM, "the headers are too large") from None
        except (hpack.HPACKError, IndexError, ValueError):
            raise Http2Error(Code.COMPRESSION_ERROR, "the headers cannot be decompressed") from None
        finally:
            _reading.reset(ours)
        same = self._table.changes == before
        if self._at != self._table.changes:
            self._heads.clear()
            self._trailers.clear()
            self._at = self._table.changes
        return tuple(fields), same


def _size(fields: Fields) -> int:
    return sum(len(name) + len(value) + 32 for name, value in fields)


def _without_limit(fields: Fields) -> tuple[Fields, bytes | None]:
    """Return the fields of a request without the time limit of a call, and that, if there is one that can be sent."""
    found = [at for at, field in enumerate(fields) if field[0] == TIME_LIMIT]
    if len(found) != 1:
        return fields, None
    at = found[0]
    before, limit, after = fields[:at], fields[at][1], fields[at + 1 :]
    if not _VALUE.fullmatch(limit) or any(name[:1] == b":" for name, _ in after):
        return fields, None
    return (*before, *after), limit


def add_field(headers: dict[str, str], name: bytes, value: bytes) -> None:
    """Add a field to headers by name. Raises Http2Error if it is malformed (section 8.2)."""
    if not (_NAME.fullmatch(name) and _VALUE.fullmatch(value)):
        raise Http2Error(Code.PROTOCOL_ERROR, "a header is malformed")
    if name in _FORBIDDEN or (name == b"te" and value.lower() != b"trailers"):
        raise Http2Error(Code.PROTOCOL_ERROR, "a header belongs to HTTP/1.1")
    key, text = name.decode("ascii"), value.decode("latin-1")
    if key not in headers:
        headers[key] = text
    else:  # a cookie may be sent in crumbs (section 8.2.3)
        headers[key] = f"{headers[key]}{'; ' if key == 'cookie' else ', '}{text}"


def read_length(headers: dict[str, str]) -> int | None:
    """Return the length of the body, if its headers say it. Raises Http2Error if they say it wrongly."""
    length = headers.get("content-length")
    if length is None:
        return None
    if not (length.isascii() and length.isdecimal() and len(length) <= MAX_LENGTH_DIGITS):
        raise Http2Error(Code.PROTOCOL_ERROR, "the Content-Length is malformed")
    return int(length)


@attrs.define(eq=False)
class RequestFields:
    """What a request's first head says. Shared by requests with equal heads."""

    # `method`, `scheme`, `path`: as sent; the path with its query
    method: str
    scheme: str
    path: str
    headers: dict[str, str]  # by name; Host is the authority
    length: int | None  # bytes of the body; None if they are not said
    protocol: str | None  # what is to be spoken on the stream (RFC 8441), or None
    size: int  # bytes of the fields, as they are counted (section 6.5.2)
    number: int  # of fields
    shared: RequestFields | None = None  # the same without its time limit, if it has one
    kept: Any = None  # for its user


def read_request(fields: Fields, size: int) -> RequestFields:
    """Return what the fields of a request mean (section 8.3.1). Raises Http2Error if they are none."""
    pseudo: dict[bytes, bytes] = {}
    headers: dict[str, str] = {}
    for name, value in fields:
        if name[:1] != b":":
            add_field(headers, name, value)
        elif headers or name in pseudo or name not in _OF_REQUEST or not _VALUE.fullmatch(value):
            raise Http2Error(Code.PROTOCOL_ERROR, "a pseudo-header is malformed")
        else:
            pseudo[name] = value
    method, path, scheme = pseudo.get(b":method", b""), pseudo.get(b":path", b""), pseudo.get(b":scheme", b"")
    protocol = pseudo.get(b":protocol")
    if not method.isascii() or not method or (protocol is not None and method != b"CONNECT"):
        raise Http2Error(Code.PROTOCOL_ERROR, "the method is malformed")
    if method == b"CONNECT" and protocol is None:
        if path or scheme:
            raise Http2Error(Code.PROTOCOL_ERROR, "a CONNECT has no path and no scheme")
    elif not path or not scheme or not path.isascii() or b" " in path:
        raise Http2Error(Code.PROTOCOL_ERROR, "the path or the scheme is missing or malformed")
    authority = pseudo.get(b":authority")
    if authority is not None:
        text = authority.decode("latin-1")
        if headers.get("host", text) != text:
            raise Http2Error(Code.PROTOCOL_ERROR, "the Host is not the authority")
        headers["host"] = text
    return RequestFields(
        *(method.decode("ascii"), scheme.decode("latin-1"), path.decode("ascii"), headers, read_length(headers)),
        None if protocol is None else protocol.decode("latin-1"),
        size,
        len(fields),
    )


def limited_request(head: RequestFields, limit: bytes) -> RequestFields:
    """Return what a request's head means with a time limit."""
    headers = head.headers.copy()
    add_field(headers, TIME_LIMIT, limit)
    size, number = head.size + _size(((TIME_LIMIT, limit),)), head.number + 1
    shared = head.shared or head
    return RequestFields(head.method, head.scheme, head.path, headers, head.length, head.protocol, size, number, shared)


_OF_REQUEST: Final = frozenset((b":method", b":path", b":scheme", b":authority", b":protocol"))


@attrs.define(eq=False)
class ResponseFields:
    """What a response's first head says. Shared by responses with equal heads."""

    status: int
    headers: dict[str, str]


def read_response(fields: Fields, size: int) -> ResponseFields:
    """Return what the fields of a response mean (section 8.3.2). Raises Http2Error if they are none."""
    status: bytes | None = None
    headers: dict[str, str] = {}
    for name, value in fields:
        if name[:1] != b":":
            add_field(headers, name, value)
        elif headers or status is not None or name != b":status":
            raise Http2Error(Code.PROTOCOL_ERROR, "a pseudo-header is malformed")
        else:
            status = value
    if status is None or len(status) != 3 or not status.isdigit():
        raise Http2Error(Code.PROTOCOL_ERROR, "the status is malformed")
    return ResponseFields(int(status), headers)


# Writing


def write_block(fields: Iterable[tuple[str, str]]) -> bytes:
    """Return the block of these fields, whose names are lower-case. It uses no table and changes none.

    Raises ValueError: a field contains what a header cannot have, such as a line break.
    """
    return _write_block(tuple(fields))


@lru_cache(maxsize=256)  # within a second most heads are alike, except for a length
def _write_block(fields: tuple[tuple[str, str], ...]) -> bytes:
    return b"".join([write_field(name, value) for name, value in fields])


def write_field(name: str, value: str) -> bytes:
    """Return the part of a block that is one field: a literal that is not indexed (RFC 7541 section 6.2.2)."""
    raw = value.encode("latin-1")
    if not _VALUE.fullmatch(raw):
        raise ValueError("a header contains a line break, or white space around its value")
    return _write_name(name) + _length(len(raw)) + raw


@lru_cache(maxsize=256)
def _write_name(name: str) -> bytes:
    raw = name.encode("ascii")
    if not _NAME.fullmatch(raw[1:] if raw[:1] == b":" else raw):
        raise ValueError("a header's name is malformed")
    return b"\0" + _length(len(raw)) + raw


def _length(size: int) -> bytes:
    """Return the length of a text that is not compressed (RFC 7541 sections 5.1, 5.2)."""
    if size < 0x7F:
        return bytes((size,))
    encoded, left = bytearray((0x7F,)), size - 0x7F
    while left >= 0x80:
        encoded.append(left & 0x7F | 0x80)
        left >>= 7
    encoded.append(left)
    return bytes(encoded)
