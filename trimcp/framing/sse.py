"""Server-sent events, in which both HTTP transports stream their messages (WHATWG HTML, "Server-sent events").

It encodes events and decodes chunks of bytes. An event beyond the limit takes no more memory than the limit, and the
stream goes on. The data of events are not interpreted here.
"""

from __future__ import annotations

from typing import Final

import attrs

from trimcp.framing.gathering import Gathered
from trimcp.wire.jsonrpc import IdScanner, Malformed, oversize

COMMENT: Final = b":\n\n"
"""A comment, which keeps a silent stream open; readers ignore it."""

DEFAULT_MAX_EVENT: Final = 64 * 1024 * 1024
"""Default limit, in bytes, on the data of one event that a client receives."""

_BOM: Final = b"\xef\xbb\xbf"
_MAX_FIELD: Final = 8192  # bytes of any line but data: the usual limit for a header (nginx, Apache, h11: 8 to 64 KiB)
_MAX_DIGITS: Final = 15  # of `retry`, in milliseconds, which is 30,000 years


@attrs.define
class Event:
    """One event of a stream."""

    data: bytes  # its data lines joined by line feeds, unchanged: the reader checks that they are UTF-8
    event: str = "message"  # its type, "message" by default
    id: str | None = None  # its own id, or None; "" clears the last event id
    retry: int | None = None  # milliseconds to wait before reconnecting, or None
    # if its data were beyond the limit and discarded (`data` is empty), the `Malformed` for the message in them, with
    # the id that could be read. Else None.
    oversize: Malformed | None = None


def in_one_line(data: bytes) -> bytes:
    """Return a JSON text without the line ends that only some readers of events know, which split there.

    These are U+0085, U+2028 and U+2029 (as for the official Java SDK 1.x). They stand in strings only, where an escape
    means the same.
    """
    if b"\xe2\x80" in data:
        data = data.replace("\u2028".encode(), b"\\u2028").replace("\u2029".encode(), b"\\u2029")
    return data.replace(b"\xc2\x85", b"\\u0085")


def encode_event(data: bytes, *, id: str | None = None, event: str | None = None, retry: int | None = None) -> bytes:
    """Return the bytes of one event, with one line of data. `retry`: milliseconds to wait before reconnecting.

    A line break in a JSON text can only be white space between tokens, so it becomes a space; see also `in_one_line`.
    Raises ValueError: `id` or `event` has a line break or another character that is not printable.
    """
    if 10 in data or 13 in data:  # a line end; faster than a search for bytes
        data = data.replace(b"\n", b" ").replace(b"\r", b" ")
    if not data.isascii():
        data = in_one_line(data)
    head = ""
    if id is not None:
        head = f"id: {_printable(id)}\n"
    if event is not None:
        head += f"event: {_printable(event)}\n"
    if retry is not None:
        head += f"retry: {retry}\n"
    # Joining is faster than formatting, which copies a large message several times as it grows.
    return b"".join((head.encode(), b"data: ", data, b"\n\n"))


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"{text!r:.100} cannot stand in an event")
    return text


@attrs.define(eq=False, repr=False)
class EventDecoder:
    """Splits the stream of one response into events.

    Lines end with CR, LF or both. Comments, unknown fields, an id with a NUL, a retry that is not a number, and lines
    other than data over 8 KiB are ignored. Only a blank line completes an event, so an event cut off by the end of the
    stream is never returned.
    """

    max_event: int = DEFAULT_MAX_EVENT  # the most bytes of data of one event. It may be changed.
    # the last id of a complete event, with or without data; None before the first
    last_event_id: str | None = attrs.field(default=None, kw_only=True)
    # the last time to wait before reconnecting, in milliseconds, or None
    retry: int | None = attrs.field(init=False, default=None)
    # Until it is known whether the stream begins with a byte order mark.
    _opening: bytes | None = attrs.field(init=False, default=b"")
    # A line feed would belong to the carriage return at the end of the last chunk.
    _after_cr: bool = attrs.field(init=False, default=False)
    # The incomplete line.
    _tail: Gathered = attrs.field(init=False, factory=Gathered)
    _skipping: bool = attrs.field(init=False, default=False)  # the rest of the line is ignored
    # The line is data of an event beyond the limit: its rest is fed to the scanner.
    _in_data: bool = attrs.field(init=False, default=False)
    # The incomplete event.
    _data: bytes | bytearray | None = attrs.field(init=False, default=None)
    _scanner: IdScanner | None = attrs.field(init=False, default=None)  # set while the event is beyond the limit
    _type: str = attrs.field(init=False, default="")
    _id: str | None = attrs.field(init=False, default=None)
    _retry: int | None = attrs.field(init=False, default=None)

    @property
    def held(self) -> int:
        """Bytes of incomplete data and an incomplete line in memory: at most `max_event` and 8 KiB."""
        return self._tail.size + len(self._data or b"")

    def feed(self, chunk: bytes) -> list[Event]:
        """Return the events that these bytes complete, in order."""
        if self._opening is not None:
            chunk = self._opening + chunk
            if len(chunk) < len(_BOM) and _BOM.startswith(chunk):
                self._opening = chunk
                return []
            self._opening = None
            chunk = chunk.removeprefix(_BOM)
        if self._after_cr and chunk:
            self._after_cr = False
            chunk = chunk.removeprefix(b"\n")
        if not chunk:
            return []
        lines = chunk.splitlines()  # for bytes: only at CR, LF and CRLF
        rest = b""
        if chunk.endswith(b"\r"):
            self._after_cr = True
        elif not chunk.endswith(b"\n"):
            rest = lines.pop()
        events: list[Event] = []
        if lines and (self._tail.size or self._skipping or self._in_data):
            self._finish(lines[0])
            del lines[0]
        for line in lines:
            if line:
                self._line(line)
            else:
                self._dispatch(events)
        if rest:
            self._begin(rest)
        return events

    # The incomplete line

    def _begin(self, piece: bytes) -> None:
        """Keep a piece of an incomplete line, or the part of it that is needed."""
        if self._skipping:
            return
        if self._in_data:
            self._count(piece)
            return
        self._tail.add(piece)
        if self._tail.beginning(5) != b"data:":
            if self._tail.size > _MAX_FIELD:
                self._skipping = True
                self._tail = Gathered()
        elif self._tail.size > 5:
            start = 6 if self._tail.beginning(6) == b"data: " else 5
            if self._scanner is None and not self._over(self._tail.size - start):
                return
            self._in_data = True
            for block in self._tail.drain():
                del block[:start]
                start = 0
                self._count(block)

    def _finish(self, piece: bytes) -> None:
        """Process the last piece of the present line. A line that it takes beyond a limit is not joined first."""
        self._begin(piece)
        if self._skipping:
            self._skipping = False
        elif self._in_data:
            self._count(b"\n")
            self._in_data = False
        else:
            self._line(self._tail.take())

    def _line(self, line: bytes) -> None:
        """Process a complete line that is not blank."""
        if line.startswith(b"data:"):
            self._add(_value(line))
        elif line == b"data":
            self._add(b"")
        elif len(line) <= _MAX_FIELD and not line.startswith(b":"):
            name, _, value = line.partition(b":")
            self._field(name, value.removeprefix(b" "))

    def _field(self, name: bytes, value: bytes) -> None:
        if name == b"event":
            self._type = value.decode(errors="replace")
        elif name == b"id":
            if b"\0" not in value:
                self._id = value.decode(errors="replace")
        elif name == b"retry" and value.isdigit() and len(value) <= _MAX_DIGITS:
            self.retry = self._retry = int(value)

    # The incomplete event

    def _over(self, more: int) -> bool:
        """Return whether one more line with so many bytes takes the event's data beyond the limit."""
        return more + (0 if self._data is None else len(self._data) + 1) > self.max_event

    def _add(self, value: bytes) -> None:
        if self._scanner is not None or self._over(len(value)):
            self._count(value)
            self._count(b"\n")
        elif self._data is None:
            self._data = value
        else:
            # One buffer instead of a list, in which each tiny line would take many times its size.
            if type(self._data) is bytes:
                self._data = bytearray(self._data)
            self._data += b"\n"
            self._data += value

    def _count(self, piece: bytes | bytearray) -> None:
        """Feed data beyond the limit to the scanner, which keeps only an id."""
        if self._scanner is None:
            self._scanner = IdScanner()
            if self._data is not None:
                self._scanner.feed(self._data)
                self._scanner.feed(b"\n")
                self._data = None
        self._scanner.feed(piece)

    def _dispatch(self, events: list[Event]) -> None:
        """End the event. Without data no event is returned, but its id is kept."""
        if self._id is not None:
            self.last_event_id = self._id
        data, scanner = self._data, self._scanner
        if scanner is not None:
            refused = oversize(scanner, self.max_event)
            events.append(Event(b"", self._type or "message", self._id, self._retry, refused))
        elif data is not None:
            events.append(Event(bytes(data), self._type or "message", self._id, self._retry))
        self._data = self._scanner = self._id = self._retry = None
        self._type = ""


def _value(line: bytes) -> bytes:
    """Return the value of a data line."""
    return line[6 if line.startswith(b"data: ") else 5 :]
