"""One response of HTTP/1.1 (RFC 9112): its head, how its body is delimited, and what is written when."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Final, Protocol

from trimcp.transports.http.h1.parser import H1Request
from trimcp.transports.http.h1.writer import H1Writer
from trimcp.transports.http.seams import Handler, HttpResponse

__all__ = ["H1Reply", "ReplyOwner", "encode_head"]

log: logging.Logger = logging.getLogger("trimcp.http")

_STATUS_LINES: Final = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}
_BODILESS: Final = frozenset({204, 304})
_GATHERED: Final = 64 * 1024  # what is larger is not copied to be sent in one write


class ReplyOwner(Protocol):
    """The connection a response goes out on."""

    writer: H1Writer

    def will_close(self, request: H1Request) -> bool:
        """Decide, for good, whether this response is the last."""
        ...

    def finished(self) -> None:
        """Note that the response was written to its end, if it was not all taken yet."""


class H1Reply:
    """Sends the response to one request; see `trimcp.transports.http.seams.HttpReply`.

    Args:
        owner: forgotten by `detach`.
        request: what is answered.
        handler: what answers it, or None if the host does.

    Attributes:
        status: of the response, 0 before it began.
        sent: bytes of its body that were written.
        ended: whether it was written to its end.
        aborted: whether the connection shall be cut.
    """

    __slots__ = ("_bodiless", "_chunked", "_owner", "aborted", "ended", "handler", "request", "sent", "status")

    def __init__(self, owner: ReplyOwner, request: H1Request, handler: Handler | None) -> None:
        self._owner: ReplyOwner | None = owner
        self.request: H1Request = request
        self.handler: Handler | None = handler
        self.status: int = 0
        self.sent: int = 0
        self.ended: bool = False
        self.aborted: bool = False
        self._chunked = False
        self._bodiless = False

    def send(self, response: HttpResponse) -> None:
        """Send a whole response."""
        owner = self._owner
        if owner is None or self.status:
            return
        length = len(response.body)
        head = self._begin(owner, response, "" if response.status in _BODILESS else f"Content-Length: {length}\r\n")
        self.ended = True
        self.sent = 0 if self._bodiless else length
        for piece in _gathered(head, b"" if self._bodiless else response.body, b""):
            owner.writer.write(piece)
        owner.finished()

    def start(self, response: HttpResponse) -> None:
        """Send the head of a response of unknown length, with the beginning of its body in the same write."""
        owner = self._owner
        if owner is None or self.status:
            return
        self._chunked = not self.request.http10 and response.status not in _BODILESS
        head = self._begin(owner, response, "Transfer-Encoding: chunked\r\n" if self._chunked else "")
        for piece in self._framed(head, response.body, b""):
            owner.writer.gather(piece)

    def write(self, data: bytes) -> None:
        """Send more of the body: at once, or with what else comes in this turn of Trio's loop."""
        owner = self._owner
        if owner is None or not self.status or self.ended or self._bodiless or not data:
            return
        if self._chunked and len(data) <= _GATHERED:  # nearly always: an event
            self.sent += len(data)
            owner.writer.gather(b"%x\r\n%b\r\n" % (len(data), data))
            return
        for piece in self._framed(b"", data, b""):
            owner.writer.gather(piece)

    def finish(self, data: bytes = b"") -> None:
        """Send the rest of the body and end the response."""
        owner = self._owner
        if owner is None or not self.status or self.ended:
            return
        self.ended = True
        end = b"0\r\n\r\n" if self._chunked and not self._bodiless else b""
        for piece in self._framed(b"", data, end):
            owner.writer.write(piece)
        owner.finished()

    def abort(self) -> None:
        """Cut the connection."""
        if self._owner is not None and not self.ended:
            self.aborted = True
            self._owner.writer.give_up()

    @property
    def waiting(self) -> int:
        """Bytes that the operating system has not taken yet."""
        return 0 if self._owner is None else self._owner.writer.waiting

    @property
    def gone(self) -> bool:
        """Whether the client has left, or the response is finished."""
        return self.ended or self._owner is None or self._owner.writer.broken

    async def room(self) -> None:
        """Wait until so few bytes wait that more are welcome, or the client is gone."""
        if self._owner is not None:
            await self._owner.writer.room()

    def detach(self) -> None:
        """Let what is written from now on go nowhere."""
        self._owner = None
        self.handler = None

    def _begin(self, owner: ReplyOwner, response: HttpResponse, framing: str) -> bytes:
        request = self.request
        self.status = response.status
        self._bodiless = request.head.method == "HEAD" or response.status in _BODILESS
        if not framing and not self._bodiless:
            request.keep_alive = False  # only the end of the connection tells where the body ends
        if owner.will_close(request):
            framing += "Connection: close\r\n"
        elif request.http10:
            framing += "Connection: keep-alive\r\n"
        try:
            return encode_head(response.status, response.headers, framing)
        except ValueError:
            # A header with a line break could split the response in two. The body is sent without those headers.
            log.exception("the headers of a response with status %d cannot be sent", response.status)
            return encode_head(response.status, (), framing)

    def _framed(self, before: bytes, data: bytes, after: bytes) -> Sequence[bytes]:
        """Return what is written for a piece of a body whose length was not known, and what stands around it."""
        if self._bodiless or not data:
            return _gathered(before, b"", after)
        self.sent += len(data)
        if self._chunked:
            before, after = b"%b%x\r\n" % (before, len(data)), b"\r\n" + after
        return _gathered(before, data, after)


def encode_head(status: int, headers: Iterable[tuple[str, str]], framing: str) -> bytes:
    """Return the head of a response.

    Args:
        status: its status.
        headers: names and values, as the application gives them.
        framing: whole lines about the body and the connection.

    Raises:
        ValueError: a name or a value contains what cannot stand in a line.
    """
    return _head(int(time.time()), status, tuple(headers), framing)


@lru_cache(maxsize=64)  # within one second most responses begin alike, up to the length of their bodies
def _head(now: int, status: int, headers: tuple[tuple[str, str], ...], framing: str) -> bytes:
    lines = [f"{name}: {value}\r\n" for name, value in headers]
    text = "".join(lines)
    if text.count("\n") != len(lines) or text.count("\r") != len(lines) or "\0" in text:
        raise ValueError("a header of a response contains a line break")
    status_line = _STATUS_LINES.get(status) or f"HTTP/1.1 {status} \r\n"
    return f"{status_line}{_date(now)}{text}{framing}\r\n".encode("latin-1")


@lru_cache(maxsize=1)
def _date(now: int) -> str:
    return f"Date: {formatdate(now, usegmt=True)}\r\n"


def _gathered(before: bytes, data: bytes, after: bytes) -> Sequence[bytes]:
    """Return them as one piece, or in three where joining would copy much."""
    if len(data) <= _GATHERED:
        return (b"%b%b%b" % (before, data, after),)
    return (before, data, after)
