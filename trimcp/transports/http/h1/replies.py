"""Replies of HTTP/1.1 from bytes, strictly and within bounds: status, headers, the body's pieces, and what follows.

Sans-IO: whoever reads the connection feeds a `ReplyParser` and then looks at it. `httptools` does the parsing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Final

import httptools

MAX_HEAD: Final = 100 * 1024
"""Bytes of a head, and of what may stand beside the data of a chunked body."""
MAX_HEADERS: Final = 1_000
"""Header lines in one head."""

LONGEST_KNOWN: Final = 64
"""Characters of the longest name of a header that is cached."""

_LARGE: Final = 1_024  # bytes of a read, from which on its lines are counted
_MANY: Final = 32  # line ends per turn of the event loop: sixteen chunks
_SHORT: Final = 64  # bytes between two line ends, below which they are taken for those of tiny chunks


class UnreadableReply(Exception):
    """What the server sent is no HTTP/1.1, or too large. The text quotes nothing that the server wrote."""

    def __init__(self, text: str, data: bytes = b"") -> None:
        super().__init__(text)
        self.data: bytes = data  # what was being read, for programs that may show it


class ReplyParser:
    """One reply after another on one connection, as far as it was received; `reset` before each."""

    __slots__ = (
        "_beside",
        "_framed",
        "_lines",
        "_parser",
        "complete",
        "cookies",
        "headers",
        "keeps",
        "pieces",
        "size",
        "status",
    )

    def __init__(self) -> None:
        self._parser: httptools.HttpResponseParser = httptools.HttpResponseParser(self)
        self.reset()

    def reset(self) -> None:
        """Prepare for the next reply."""
        self.status: int = 0  # 0 before the head is complete; interim replies (1xx) are skipped
        self.headers: dict[str, str] = {}  # by lower-case name; the values of a repeated one are joined with ", "
        self.cookies: list[str] = []  # the values of Set-Cookie, which cannot be joined
        self.pieces: list[bytes] = []  # of the body, as received; whoever takes them clears the list
        self.size: int = 0  # bytes of the body so far
        self.complete: bool = False
        self.keeps: bool = False  # whether the connection can be used again; known when complete
        self._framed = False  # it has a length or is chunked; otherwise it ends with the connection
        self._lines = 0
        self._beside = 0  # bytes since the head began, or since the last piece of the body

    @property
    def content_type(self) -> str:
        """The media type without parameters, in lower case; "" if there is none."""
        return media_type(self.headers)

    @property
    def begun(self) -> bool:
        """Whether a byte of it was received."""
        return self._beside > 0 or self.status > 0

    def feed(self, data: bytes) -> None:
        """Parse received bytes. Bytes beyond the end of the reply make the connection unusable.

        Raises UnreadableReply: they are no HTTP/1.1, or too many.
        """
        self._beside += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            text = "the server switches to another protocol, which was not asked for"
            raise UnreadableReply(text, data) from None
        except httptools.HttpParserError as error:
            if not self.complete:
                objection = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else None
                raise UnreadableReply(f"the reply is no HTTP ({objection or error})", data) from None
            self.keeps = False  # the reply is whole; what follows was asked by nobody
        if self._lines > MAX_HEADERS:
            raise UnreadableReply(f"the reply has more than {MAX_HEADERS:,} headers", data)
        if self._beside > MAX_HEAD and not self.complete:
            what = "beside its body" if self.status else "in its head"
            raise UnreadableReply(f"the reply has more than {MAX_HEAD:,} bytes {what}", data)

    def end(self) -> bool:
        """Note that the server has closed the connection; return whether the reply is complete with that."""
        if self.status and not self._framed:
            self.complete = True
        return self.complete

    # Called by httptools

    def on_message_begin(self) -> None:
        """A reply begins."""
        if self.complete:
            raise UnreadableReply("a second reply")  # ends the parsing; see `feed`

    def on_header(self, raw_name: bytes, raw_value: bytes) -> None:
        """A header line was read, of the head or after the last chunk."""
        self._lines += 1
        if self.status or self._lines > MAX_HEADERS:
            return
        name = lower(raw_name) if len(raw_name) <= LONGEST_KNOWN else raw_name.decode("latin-1").lower()
        value = raw_value.decode("latin-1")
        if name == "set-cookie":
            self.cookies.append(value)
        headers = self.headers
        headers[name] = f"{headers[name]}, {value}" if name in headers else value

    def on_headers_complete(self) -> None:
        """The head is complete."""
        status = self._parser.get_status_code()
        if status >= 200:
            self.status = status
            self._beside = 0
            coding = self.headers.get("transfer-encoding")
            if coding is None:
                self._framed = "content-length" in self.headers
            elif coding.lower() == "chunked":
                self._framed = True
            elif coding.lower() != "identity":  # what it does to the body nobody would undo
                raise UnreadableReply("Unknown Transfer-Encoding")
        elif status < 100:
            raise UnreadableReply("Invalid status code")  # no interim reply, for whose successor to wait

    def on_body(self, piece: bytes) -> None:
        """A piece of the body was read."""
        self._beside = 0
        self.size += len(piece)
        self.pieces.append(piece)

    def on_message_complete(self) -> None:
        """The reply is complete, unless it was an interim one."""
        if self.status:
            self.complete = True
            self.keeps = bool(self._parser.should_keep_alive())  # not known any more after this call
        else:
            self.headers.clear()
            self.cookies.clear()


def media_type(headers: Mapping[str, str]) -> str:
    """Return the media type in headers without parameters, in lower case; "" if there is none."""
    return _media_type(headers.get("content-type", ""))


@lru_cache(maxsize=64)
def _media_type(value: str) -> str:
    return value.partition(";")[0].strip().lower()  # cached: a server's replies have the same two


@lru_cache(maxsize=256)
def lower(raw_name: bytes) -> str:
    """Return the name of a header in lower case. Cached, because every request and every reply has the same few."""
    return raw_name.decode("latin-1").lower()


def portions(data: bytes) -> Iterator[bytes] | None:
    """Return the parts in which to feed one read, each in a turn of the event loop; None if it is fed whole.

    The cost of parsing grows with the number of chunks and header lines, and 64 KiB can hold ten thousand.
    """
    if len(data) < _LARGE:
        return None
    ends = data.count(b"\r\n")
    if ends <= _MANY or len(data) > ends * _SHORT:
        return None
    size = max(1, len(data) * _MANY // ends)
    return (data[start : start + size] for start in range(0, len(data), size))
