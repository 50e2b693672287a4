"""Reads the id, depth and number of members of JSON text that cannot, or must not, be parsed.

Every function here takes linear time for any text, and a bounded amount of memory. It knows strings, brackets and the
names of JSON-RPC's top-level members, but not messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum, auto
from functools import cache
from itertools import accumulate
from typing import Final, TypeAlias

import attrs
import orjson

from trimcp.support.slotted import slotted

RequestId: TypeAlias = str | int
"""The id of a request: a string or an integer, never null (MCP specification, "Requests")."""

_WINDOW: Final = 65536
_PIECE: Final = 1 << 18  # bytes counted at once: they are copied
_OTHER_ID: Final = "request_id"
_MAX_TOKEN: Final = 4096  # an id or a top-level key longer than this is not read
_MAX_DEPTH: Final = 65536  # deeper nesting ends the scan
_MAX_TOP_MEMBERS: Final = 1024  # a JSON-RPC message has at most five
_MAX_NUMBER: Final = 1000  # characters; the digits of a double take 25
_MOST_MARKS: Final = 10_000
_INT_MIN: Final = -(2**63)
_INT_MAX: Final = 2**64 - 1

# All quantifiers are possessive: without backtracking, the time is linear for any text. Each repeated group can also
# match nothing: before Python 3.11.5, one that failed within an iteration kept a partial match.
_REST = rb'[^"\\]*+(?:\\.[^"\\]*+|)*+'
_STRING = rb'"' + _REST + rb'"'
_FLAT = rb'[^"\[\]{}]++|' + _STRING
_BLANK: Final = rb"[ \t\r\n]*+"
_SCALAR: Final = rb'[^ \t\r\n,:\[\]{}"]*+'
_INTEGER: Final = rb"-?(?:0|[1-9][0-9]*)"
_LONG_NUMBER: Final = (
    rb'(?:[^"0-9-]++|' + _STRING + rb"|-?[0-9][0-9.eE+-]{0,17}+(?![0-9.eE+-])|)*+(-?[0-9][0-9.eE+-]{18,}+)"
)
_QUOTE, _BACKSLASH = b'"\\'
_OPENERS: Final = {ord("["): ord("]"), ord("{"): ord("}")}
_NOT_STRUCTURE: Final = bytes(set(range(256)) - set(b",[{"))
_NOT_OPENERS: Final = bytes(set(range(256)) - set(b"[{"))
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_STEPS: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")


@cache
def _pattern(text: bytes) -> re.Pattern[bytes]:
    """Compile a pattern at its first use: most programs never refuse a text."""
    return re.compile(text, re.DOTALL)


@cache
def _nested_values() -> re.Pattern[bytes]:
    """Return a pattern for whole values nested up to three levels; Python handles only the brackets of deeper ones."""
    values = _FLAT
    for _ in range(3):
        values = _FLAT + rb"|\[(?:" + values + rb"|)*+\]|\{(?:" + values + rb"|)*+\}"
    return _pattern(rb"(?:" + values + rb"|)*+")


class _Expect(Enum):
    """What may follow at the top level."""

    OBJECT = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    SCALAR = auto()
    COMMA = auto()
    NOTHING = auto()


@slotted
class IdScanner:
    """Finds the top-level `id` of a message, at any position, in chunks of its text.

    It reads on as long as the structure of the text is valid. Invalid numbers, invalid Unicode, too deep nesting and a
    missing end do not hide an id. Ids inside nested values and inside strings are ignored. It keeps at most about
    70 KiB. It is for refused text only: a parsed message needs no scanner.
    """

    # the text has a top-level `method`, so it was meant as a request or notification
    saw_method: bool = attrs.field(init=False, default=False)
    # the text has a top-level `result` or `error`, so it was meant as a response
    saw_outcome: bool = attrs.field(init=False, default=False)
    # the top-level text of this name, by which another protocol tells its messages apart, or None
    request_id: str | None = attrs.field(init=False, default=None)
    _id: RequestId | None = attrs.field(init=False, default=None)
    _ambiguous: bool = attrs.field(init=False, default=False)
    _stopped: bool = attrs.field(init=False, default=False)
    _closers: bytearray = attrs.field(init=False, factory=bytearray)  # the missing closing brackets, outermost first
    _expect: _Expect = attrs.field(init=False, default=_Expect.OBJECT)
    _in_string: bool = attrs.field(init=False, default=False)
    _escaped: bool = attrs.field(init=False, default=False)
    # The top-level key or id being read; None if it is not kept.
    _token: bytearray | None = attrs.field(init=False, default=None)
    _key: str | None = attrs.field(init=False, default=None)
    _members: int = attrs.field(init=False, default=0)

    @property
    def id(self) -> RequestId | None:
        """The id, if the text so far has exactly one readable id at its top level, else None."""
        return None if self._ambiguous else self._id

    @property
    def is_response(self) -> bool:
        """Whether the text was meant as a response, which gets no answer."""
        return self.saw_outcome and not self.saw_method

    def feed(self, data: bytes | bytearray) -> None:
        """Read one more chunk. Never raises. Once the structure is invalid it returns at once."""
        for start in range(0, len(data), _WINDOW):
            if self._stopped:
                return
            self._feed(bytes(data[start : start + _WINDOW]))

    def _feed(self, data: bytes) -> None:
        pos, end = 0, len(data)
        while pos < end and not self._stopped:
            if self._in_string:
                pos = self._string(data, pos)
            elif len(self._closers) > 1:
                pos = self._nested(data, pos)
            elif self._expect is _Expect.SCALAR:
                pos = self._scalar(data, pos)
            else:
                pos = self._top(data, pos)

    def _keep(self, piece: bytes) -> None:
        if self._token is not None:
            self._token += piece[: _MAX_TOKEN + 1]
            del self._token[_MAX_TOKEN + 1 :]

    def _string(self, data: bytes, pos: int) -> int:
        """Skip to the end of a string that began earlier."""
        if self._escaped:
            self._escaped = False
            self._keep(data[pos : pos + 1])
            pos += 1
        stop = _pattern(_REST).match(data, pos).end()  # type: ignore[union-attr]  # it matches the empty string
        if self._token is not None:
            self._keep(data[pos:stop])
        if stop == len(data):
            return stop
        if data[stop] == _BACKSLASH:  # the last byte of this chunk; the escaped character is in the next one
            self._escaped = True
            self._keep(b"\\")
            return stop + 1
        self._in_string = False
        if len(self._closers) == 1:
            self._end_string()
        return stop + 1

    def _end_string(self) -> None:
        """Process a complete key or string value of the top level."""
        token, self._token = self._token, None
        if self._expect is _Expect.KEY:
            self._expect = _Expect.COLON
            self._key = _decode(token)
            self.saw_method = self.saw_method or self._key == "method"
            self.saw_outcome = self.saw_outcome or self._key in ("result", "error")
            return
        self._expect = _Expect.COMMA
        if self._key == "id":
            self._found(_decode(token))
        elif self._key == _OTHER_ID:
            self.request_id = _decode(token)

    def _found(self, value: RequestId | None) -> None:
        if value is None or (self._id is not None and (type(value), value) != (type(self._id), self._id)):
            self._ambiguous = True
        self._id = value

    def _nested(self, data: bytes, pos: int) -> int:
        """Skip nested values until the top level or the end of the data."""
        closers, end, skip = self._closers, len(data), _nested_values().match
        while len(closers) > 1:
            pos = skip(data, pos).end()  # type: ignore[union-attr]  # it matches the empty string
            if pos == end:
                break
            byte = data[pos]
            pos += 1
            if byte == _QUOTE:
                self._in_string = True
                break
            if byte in _OPENERS:
                closers.append(_OPENERS[byte])
                if len(closers) > _MAX_DEPTH:
                    self._stopped = True
                    break
            elif closers.pop() != byte:
                self._stopped = True
                break
        return pos

    def _scalar(self, data: bytes, pos: int) -> int:
        """Read a number, or other text in its place, up to the end of the data."""
        stop = _pattern(_SCALAR).match(data, pos).end()  # type: ignore[union-attr]  # it matches the empty string
        self._keep(data[pos:stop])
        if stop < len(data):
            token, self._token = self._token, None
            self._expect = _Expect.COMMA
            if self._key == "id":
                self._found(_integer(token))
        return stop

    def _top(self, data: bytes, pos: int) -> int:
        """Read one character of the top level's punctuation."""
        if self._expect is _Expect.OBJECT:
            return self._begin(data, pos)
        pos = _pattern(_BLANK).match(data, pos).end()  # type: ignore[union-attr]  # it matches the empty string
        if pos == len(data):
            return pos
        byte, expect = data[pos], self._expect
        if expect is _Expect.VALUE:
            return self._value(byte, pos)
        if expect is _Expect.KEY and byte == _QUOTE:
            self._members += 1
            self._stopped = self._members > _MAX_TOP_MEMBERS
            self._in_string, self._token = True, bytearray()
        elif expect is _Expect.COLON and byte == ord(":"):
            self._expect = _Expect.VALUE
        elif expect is _Expect.COMMA and byte == ord(","):
            self._expect = _Expect.KEY
        elif byte == ord("}") and (expect is _Expect.COMMA or (expect is _Expect.KEY and not self._members)):
            self._expect = _Expect.NOTHING
        else:
            # After the end only a second object matters: then the id is ambiguous.
            self._ambiguous = self._ambiguous or (expect is _Expect.NOTHING and b"{" in data[pos:])
            self._stopped = expect is not _Expect.NOTHING or self._ambiguous
            return len(data)
        return pos + 1

    def _begin(self, data: bytes, pos: int) -> int:
        text = data[pos:].lstrip(b" \t\r\n\xef\xbb\xbf")  # the id is read even after a byte order mark
        if not text:
            return len(data)
        if not text.startswith(b"{"):
            self._stopped = True
        self._closers += b"}"
        self._expect = _Expect.KEY
        return len(data) - len(text) + 1

    def _value(self, byte: int, pos: int) -> int:
        is_id = self._key == "id"
        self._token = bytearray() if is_id or self._key == _OTHER_ID else None
        if byte == _QUOTE:
            self._in_string = True
        elif byte in _OPENERS:
            self._closers.append(_OPENERS[byte])
            self._expect = _Expect.COMMA
            self._ambiguous = self._ambiguous or is_id
        elif byte in b",:]}":
            self._stopped = True
        else:
            self._expect = _Expect.SCALAR
            return pos
        return pos + 1


def _decode(token: bytearray | None) -> str | None:
    """Return the string between two quotes, or None if it is too long or not a JSON string."""
    if token is None or len(token) > _MAX_TOKEN:
        return None
    try:
        text = orjson.loads(b'"' + token + b'"')
    except orjson.JSONDecodeError:
        return None
    return text if isinstance(text, str) else None


def _integer(token: bytearray | None) -> int | None:
    if token is None or len(token) > 20 or not _pattern(_INTEGER).fullmatch(token):
        return None
    value = int(token)
    return value if _INT_MIN <= value <= _INT_MAX else None


def _outside_strings(data: bytes) -> Iterator[bytes]:
    """Yield JSON text without its strings, in pieces; a piece may end within a number.

    Invalid JSON is correct up to its first error, which is as far as a parser reads.
    """
    pos = inside = 0
    while pos < len(data):
        piece = data[pos : pos + _WINDOW]
        if len(piece) > 1 and (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = piece[:-1]  # the character after the last backslash is in the next piece
        pos += len(piece)
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        yield b"".join(parts[inside::2])
        inside = (inside + len(parts) - 1) % 2


def _without(others: bytes, data: bytes) -> int:
    """Count the bytes that are not in `others`, in pieces, to avoid copying a large message."""
    if len(data) <= _PIECE:
        return len(data.translate(None, others))
    return sum(len(data[start : start + _PIECE].translate(None, others)) for start in range(0, len(data), _PIECE))


def structure_of(data: bytes) -> int:
    """Count the bytes that may begin an array, an object or a member: an upper bound on the number of these."""
    return _without(_NOT_STRUCTURE, data)


def more_members_than(limit: int, data: bytes) -> bool:
    """Return whether text has more array elements, object members and containers than `limit`; it may be invalid.

    The memory for parsing depends on these and on the text's length. Stops at the limit.
    """
    return _without(_NOT_STRUCTURE, data) > limit and members_in(data, limit) > limit


def members_in(data: bytes, limit: int) -> int:
    """Count what `more_members_than` counts; beyond the limit not all of it."""
    members = 0
    for piece in _outside_strings(data):
        members += len(piece.translate(None, _NOT_STRUCTURE))
        if members > limit:
            break
    return members


def deeper_than(limit: int, data: bytes) -> bool:
    """Return whether valid JSON text nests arrays and objects deeper than `limit`."""
    if len(data) <= _PIECE:
        # A few brackets are removed, twice, in a fraction of the time in which all other bytes are.
        rest = len(data.replace(b"[", b"", limit + 1)) + len(data.replace(b"{", b"", limit + 1))
        openers = 2 * len(data) - rest
    else:
        openers = _without(_NOT_OPENERS, data)
    if openers <= limit:
        return False
    depth = 0
    for piece in _outside_strings(data):
        steps = memoryview(piece.translate(_STEPS, _NOT_BRACKETS)).cast("b")
        levels = list(accumulate(steps, initial=depth))
        if max(levels) > limit:
            return True
        depth = levels[-1]
    return False


def unreadable_number(data: bytes) -> str | None:
    """Return what is wrong with a number in valid JSON text, or None.

    Parsers turn integers beyond 64 bits into doubles without an error; this finds them.
    """
    pos = 0
    pattern = _pattern(_LONG_NUMBER)
    while match := pattern.match(data, pos):  # matched, not searched: a search would enter strings
        token, pos = match[1], match.end()
        if token.lstrip(b"-").isdigit():
            if _integer(bytearray(token)) is None:
                return "an integer does not fit in 64 bits"
        elif len(token) > _MAX_NUMBER:
            return f"a number is longer than {_MAX_NUMBER:,} characters"
    return None


def with_marks(data: bytes, mark: bytes) -> bytes | None:
    """Return JSON text with the text `mark` in place of each integer beyond 64 bits.

    None if there are more than ten thousand, or other numbers that are too long.
    """
    parts: list[bytes] = []
    pos = marks = 0
    pattern, whole = _pattern(_LONG_NUMBER), _pattern(_INTEGER)
    while match := pattern.match(data, pos):
        token, end = match[1], match.end()
        if whole.fullmatch(token) and _integer(bytearray(token)) is None:
            parts += (data[pos : match.start(1)], b'"', mark, b'"')
            marks += 1
        elif marks > _MOST_MARKS or len(token) > _MAX_NUMBER:
            return None
        else:
            parts.append(data[pos:end])
        pos = end
    return b"".join((*parts, data[pos:])) if marks <= _MOST_MARKS else None
