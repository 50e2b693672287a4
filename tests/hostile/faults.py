"""A server whose connections fail in every way that HTTP/1.1 knows, and what a client may make of each.

It runs beside the test, over real sockets. A call of the tool `harm` names the fault; any other call is answered with
its own argument, so that a reply that reaches the wrong call is noticed.
"""

from __future__ import annotations

import gzip
import random
import re
import socket
import ssl
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import quote

import attrs
import orjson
import trio

from tests.hostile.mutations import changed
from tests.peers.http1 import HttpWire
from trimcp.wire.revisions import LATEST, Revision

__all__ = [
    "AFTER_THE_REPLY",
    "ANSWERED",
    "CHEAP",
    "FAMILIES",
    "FAULTS",
    "HANGS",
    "INVALID",
    "LARGE",
    "LOST",
    "SECRET",
    "Asked",
    "Fault",
    "FaultServer",
    "faulty",
]

ANSWERED, LOST, INVALID, HANGS = "answered", "lost", "invalid", "hangs"
"""What a call may come to: its result, `ConnectionLost`, `InvalidReply`, or nothing until its time is over."""

LARGE: Final = 256 * 1024
"""Bytes of a request from which on a fault may reply before it has read the request."""

SECRET: Final = "token-that-nobody-may-read"
"""What the client authorizes itself with."""

JSON = "Content-Type: application/json"
EVENTS = "Content-Type: text/event-stream"
CHUNKED = "Transfer-Encoding: chunked"
INFO = {"name": "faulty", "version": "1"}
_MOMENT = 0.02  # seconds


class Closed(Exception):
    """The connection is to be closed."""


@attrs.define(eq=False)
class Asked:
    """One request, and ways to answer it."""

    server: FaultServer
    wire: HttpWire
    message: dict[str, Any]

    @property
    def arguments(self) -> dict[str, Any]:
        found: dict[str, Any] = self.message["params"].get("arguments") or {}
        return found

    def answer(self, text: str | None = None, id: Any = None) -> bytes:
        """The right answer, or one with another text, or to another request."""
        content = [{"type": "text", "text": str(self.arguments.get("text")) if text is None else text}]
        return self.result({"content": content}, id)

    def result(self, result: dict[str, Any], id: Any = None) -> bytes:
        if self.server.revision is LATEST:
            result = {**result, "resultType": "complete"}
        return orjson.dumps({"jsonrpc": "2.0", "id": self.message["id"] if id is None else id, "result": result})

    def wrong(self, id: int) -> bytes:
        """An answer that is none."""
        return orjson.dumps({"jsonrpc": "2.0", "id": id, "result": {}, "error": {}})

    async def write(self, *pieces: bytes) -> None:
        for piece in pieces:
            await self.wire.stream.send_all(piece)

    async def forever(self, piece: bytes) -> None:
        while True:
            await self.write(piece)

    async def gone(self) -> None:
        """Wait until the client has closed, whatever it says before."""
        while await self.wire.stream.receive_some(65_536):
            pass
        raise Closed

    def reset(self) -> None:
        """Make the end of the connection a reset."""
        hang_up(self.wire, reset=True)
        raise Closed


def hang_up(wire: HttpWire, *, reset: bool) -> None:
    """Close a connection at once, without a word of TLS."""
    under = wire.stream.transport_stream if isinstance(wire.stream, trio.SSLStream) else wire.stream
    if reset:
        under.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    under.socket.close()


Do: TypeAlias = Callable[[Asked], Awaitable[None]]


@attrs.frozen
class Fault:
    """What is done to a call, and what the call may come to.

    Attributes:
        do: does it; returning keeps the connection for the next request, raising closes it.
        outcomes: any of the words above. Where the standard leaves a client the choice there are several.
        early: it is done before the request is read.
    """

    name: str
    do: Do
    outcomes: tuple[str, ...]
    early: bool = False

    @property
    def hangs(self) -> bool:
        """Whether the call may have to be given up."""
        return HANGS in self.outcomes


FAULTS: dict[str, Fault] = {}
FAMILIES: dict[str, list[Fault]] = {}
"""The faults that do not need a large request, by what they are about."""


def family(name: str) -> None:
    """Begin a family: the faults that follow belong to it."""
    FAMILIES[name] = []


def _register(fault: Fault) -> None:
    assert fault.name not in FAULTS, fault.name
    FAULTS[fault.name] = fault
    if not fault.early and fault.name not in ("waits", "says_below_tls", "at_random"):
        FAMILIES[next(reversed(FAMILIES))].append(fault)


def fault(*outcomes: str, early: bool = False) -> Callable[[Do], Do]:
    """Register a fault under the name of its function."""

    def register(do: Do) -> Do:
        name = do.__name__
        _register(Fault(name, do, outcomes, early))
        return do

    return register


def says(name: str, make: Callable[[Asked], bytes], *outcomes: str, then: str = "keep") -> None:
    """Register a fault that says these bytes, and then keeps the connection, closes or resets it, or stops."""

    async def do(asked: Asked) -> None:
        await asked.write(make(asked))
        if then == "close":
            raise Closed
        if then == "reset":
            asked.reset()
        if then == "stop":
            await asked.gone()

    _register(Fault(name, do, outcomes))


def head(*lines: str, status: str = "200 OK", version: str = "HTTP/1.1") -> bytes:
    return "\r\n".join([f"{version} {status}", *lines, "", ""]).encode("latin-1")


def whole(body: bytes, *lines: str, status: str = "200 OK", version: str = "HTTP/1.1") -> bytes:
    return head(*(lines or (JSON,)), f"Content-Length: {len(body)}", status=status, version=version) + body


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%b\r\n%b\r\n" % (len(data), extension, data)


def chunked(body: bytes, size: int = 0, *lines: str, end: bytes = b"0\r\n\r\n") -> bytes:
    size = size or len(body)
    pieces = (chunk(body[at : at + size]) for at in range(0, len(body), size))
    return head(*(lines or (JSON,)), CHUNKED) + b"".join(pieces) + end


def event(data: bytes) -> bytes:
    return b"data: %b\n\n" % data


# The connection ends

family("ends")

for _then, _what in (("close", "cut"), ("reset", "reset")):
    says(f"{_what}_before_the_reply", lambda a: b"", LOST, then=_then)
    says(f"{_what}_in_the_status_line", lambda a: b"HTTP/1.1 20", LOST, then=_then)
    says(f"{_what}_in_the_head", lambda a: b"HTTP/1.1 200 OK\r\nContent-Ty", LOST, then=_then)
    says(f"{_what}_after_the_head", lambda a: whole(a.answer())[: -len(a.answer())], LOST, then=_then)
    says(f"{_what}_in_the_body", lambda a: whole(a.answer())[:-10], LOST, then=_then)
    says(f"{_what}_in_a_chunk_size", lambda a: head(JSON, CHUNKED) + b"5", LOST, then=_then)
    says(f"{_what}_in_a_chunk", lambda a: chunked(a.answer())[:-20], LOST, then=_then)
    says(f"{_what}_before_the_last_chunk", lambda a: chunked(a.answer(), 7, end=b""), LOST, INVALID, then=_then)
    says(f"{_what}_in_the_trailers", lambda a: chunked(a.answer(), 7, end=b"0\r\nX-A: "), LOST, ANSWERED, then=_then)
    says(
        f"{_what}_in_an_event",
        lambda a: head(EVENTS, CHUNKED) + chunk(event(a.answer())[:-9]),
        LOST,
        then=_then,
    )
    says(
        f"{_what}_after_the_answers_event",
        lambda a: head(EVENTS, CHUNKED) + chunk(event(a.answer())),
        ANSWERED,
        *([LOST] if _then == "reset" else []),  # a reset may overtake what was sent before
        then=_then,
    )
    says(
        f"{_what}_after_an_answer_without_a_length",
        lambda a: head(JSON) + a.answer(),
        ANSWERED,  # the answer shows that it is whole
        *([LOST] if _then == "reset" else []),
        then=_then,
    )
    says(
        f"{_what}_right_after_the_answer",
        lambda a: whole(a.answer()),
        ANSWERED,
        *([LOST] if _then == "reset" else []),
        then=_then,
    )
says("ends_before_the_answers_event", lambda a: chunked(event(b'{"jsonrpc":"2.0","method":"x"}'), 0, EVENTS), LOST)
says("ends_an_event_without_its_end", lambda a: chunked(event(a.answer())[:-2], 0, EVENTS), LOST)


# Half dead

family("half dead")


@fault(HANGS)
async def never_answers(asked: Asked) -> None:
    await asked.gone()


@fault(HANGS)
async def drips_the_head(asked: Asked) -> None:
    """A byte at a time, as slowly as a client bears it."""
    await asked.write(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        await asked.write(b"x")
        await trio.sleep(_MOMENT)


@fault(HANGS)
async def drips_the_body(asked: Asked) -> None:
    await asked.write(head(JSON, "Content-Length: 100000"))
    while True:
        await asked.write(b" ")
        await trio.sleep(_MOMENT)


@fault(HANGS)
async def drips_comments(asked: Asked) -> None:
    await asked.write(head(EVENTS, CHUNKED))
    while True:
        await asked.write(chunk(b": not yet\n\n"))
        await trio.sleep(_MOMENT)


@fault(ANSWERED)
async def waits(asked: Asked) -> None:
    asked.server.waiting = asked.message["id"]
    await asked.server.release.wait()
    await asked.write(whole(asked.answer()))


says("stops_in_the_status_line", lambda a: b"HTTP", HANGS, then="stop")
says("stops_in_the_head", lambda a: b"HTTP/1.1 200 OK\r\nContent-Type: appl", HANGS, then="stop")
says("stops_in_the_body", lambda a: whole(a.answer())[:-10], HANGS, then="stop")
says("stops_in_a_chunk", lambda a: chunked(a.answer())[:-20], HANGS, then="stop")
says("stops_before_the_last_chunk", lambda a: chunked(a.answer(), 5, end=b""), HANGS, then="stop")
says("stops_in_an_event", lambda a: head(EVENTS, CHUNKED) + chunk(event(a.answer())[:-9]), HANGS, then="stop")
says("stops_in_gzip", lambda a: whole(gzip.compress(a.answer()), JSON, "Content-Encoding: gzip")[:-9], HANGS)


# More than one reply

family("more than one reply")


def poison(asked: Asked) -> bytes:
    """A reply to the request that comes next, as far as a server can guess it."""
    return whole(asked.answer("poison", asked.message["id"] + 1))


says("two_replies_at_once", lambda a: whole(a.answer()) * 2, ANSWERED)
says("a_reply_to_the_next_request_too", lambda a: whole(a.answer()) + poison(a), ANSWERED)
says("a_reply_to_the_next_request_after_chunks", lambda a: chunked(a.answer()) + poison(a), ANSWERED)
says("bytes_after_the_reply", lambda a: whole(a.answer()) + b"\0\xff garbage", ANSWERED)
says("a_line_after_the_reply", lambda a: whole(a.answer()) + b"\r\n", ANSWERED)
says("no_content_with_content", lambda a: head(status="204 No Content") + poison(a), INVALID, LOST)
says("no_content_with_a_length", lambda a: whole(a.answer(), status="204 No Content"), INVALID, LOST)
says("not_modified_with_content", lambda a: whole(poison(a), status="304 Not Modified"), LOST)
says("reset_content_with_content", lambda a: whole(a.answer(), status="205 Reset Content"), ANSWERED, INVALID, LOST)
says("accepted_and_nothing", lambda a: whole(b"", status="202 Accepted"), INVALID)
says("a_length_too_small", lambda a: head(JSON, "Content-Length: 10") + a.answer(), INVALID)
says("a_length_too_large", lambda a: head(JSON, "Content-Length: 1000") + a.answer(), HANGS)
says("two_answers_in_events", lambda a: chunked(event(a.answer()) + event(a.answer("x")), 0, EVENTS), ANSWERED)
says("an_answer_to_another", lambda a: whole(a.answer("poison", 987_654)), INVALID)
says("the_answer_of_another_call", lambda a: whole(a.answer("poison", a.server.waiting)), INVALID)
says("a_broken_answer_of_another_call", lambda a: whole(a.wrong(a.server.waiting)), INVALID)
says(
    "the_answer_of_another_call_before_its_own",
    lambda a: chunked(event(a.answer("poison", a.server.waiting)) + event(a.answer()), 0, EVENTS),
    ANSWERED,
)


@fault(ANSWERED)
async def a_reply_to_nobody(asked: Asked) -> None:
    """The right answer, and another one on the idle connection, in writes of their own."""
    await asked.write(whole(asked.answer()))
    await trio.lowlevel.checkpoint()
    await asked.write(poison(asked))


AFTER_THE_REPLY: Final = tuple(each.name for each in FAMILIES["more than one reply"])
"""Where bytes follow a reply that is complete, so that they could be taken for the next request's."""


# Heads

family("heads")

says("many_headers", lambda a: head(*(f"X-{n}: {'v' * 20}" for n in range(10_000))), LOST)
says("a_header_of_a_megabyte", lambda a: whole(a.answer(), JSON, f"X: {'x' * 1024 * 1024}"), LOST)
says("a_header_name_of_a_megabyte", lambda a: whole(a.answer(), JSON, f"{'x' * 1024 * 1024}: x"), LOST)
says("a_status_line_of_a_megabyte", lambda a: whole(a.answer(), status=f"200 {'O' * 1024 * 1024}"), LOST)
says("a_folded_header", lambda a: whole(a.answer(), JSON, "X-A: a\r\n b"), ANSWERED, LOST)
says("a_nul_in_a_header", lambda a: whole(a.answer(), JSON, "X-A: a\0b"), ANSWERED, LOST)
says("a_cr_in_a_header", lambda a: whole(a.answer(), JSON, "X-A: a\rX-B: b"), ANSWERED, LOST)
says("lines_that_end_with_lf", lambda a: whole(a.answer()).replace(b"\r\n", b"\n"), ANSWERED, LOST)
says("a_header_without_a_colon", lambda a: whole(a.answer(), JSON, "nonsense"), ANSWERED, LOST)
says("a_header_without_a_name", lambda a: whole(a.answer(), JSON, ": value"), ANSWERED, LOST)
says("a_space_before_a_colon", lambda a: whole(a.answer(), JSON, "X-A : a"), ANSWERED, LOST)
says("latin_in_a_header", lambda a: whole(a.answer(), JSON, "X-A: \xe9\xff"), ANSWERED, LOST)
says("a_line_before_the_reply", lambda a: b"\r\n" + whole(a.answer()), ANSWERED, LOST)
says("garbage", lambda a: b"\x1b[31m \xff nonsense\r\n\r\n" * 100, LOST, then="close")
says("no_head", lambda a: a.answer(), LOST, then="close")
says("a_request", lambda a: b"POST /mcp HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n", LOST)
says("http_2", lambda a: b"\0\0\x06\x04\0\0\0\0\0\0\x03\0\0\0\x64", LOST, HANGS)
says("http_2_preface", lambda a: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", LOST)
says("version_2", lambda a: whole(a.answer(), version="HTTP/2.0"), LOST, ANSWERED)
says("version_of_letters", lambda a: whole(a.answer(), version="HTTP/a.b"), LOST)
says("another_protocol", lambda a: whole(a.answer(), version="RTSP/1.0"), LOST, ANSWERED)
says("tls", lambda a: b"\x15\x03\x01\x00\x02\x02\x46", LOST, HANGS)
for _status in ("099 X", "000 X", "1000 X", "20 OK", "2OO OK", "-1 X"):
    says(f"status_{_status.split()[0]}", lambda a, status=_status: whole(a.answer(), status=status), LOST)
for _status in ("999 X", "600 X"):
    says(f"status_{_status.split()[0]}", lambda a, status=_status: whole(a.answer(), status=status), LOST)
says("no_reason", lambda a: whole(a.answer()).replace(b" OK", b"", 1), ANSWERED)
says("an_upgrade", lambda a: head("Upgrade: x", "Connection: Upgrade", status="101 S") + b"\0\1", LOST, INVALID)
says(
    "few_interim_replies",
    lambda a: head(status="100 C") + head("Link: x", status="103 E") + whole(a.answer()),
    ANSWERED,
)
says("only_an_interim_reply", lambda a: head(status="100 Continue"), HANGS)
says("cut_after_an_interim_reply", lambda a: head(status="103 Early"), LOST, then="close")
says("http_1_0", lambda a: whole(a.answer(), version="HTTP/1.0"), ANSWERED, then="close")
says("http_1_0_that_stays_open", lambda a: whole(a.answer(), version="HTTP/1.0"), ANSWERED)
says("http_1_0_kept", lambda a: whole(a.answer(), JSON, "Connection: keep-alive", version="HTTP/1.0"), ANSWERED)
says("http_1_0_without_a_length", lambda a: head(JSON, version="HTTP/1.0") + a.answer(), ANSWERED, then="close")
says("http_1_0_cut", lambda a: whole(a.answer(), version="HTTP/1.0")[:-5], LOST, then="close")
says("without_a_length_and_kept", lambda a: head(JSON) + a.answer(), HANGS)
says("connection_close", lambda a: whole(a.answer(), JSON, "Connection: close"), ANSWERED, then="close")
says("connection_close_and_kept", lambda a: whole(a.answer(), JSON, "Connection: close") + poison(a), ANSWERED)


@fault(LOST, HANGS)
async def endless_interim_replies(asked: Asked) -> None:
    await asked.forever(head(status="100 Continue") * 1000)


@fault(LOST)
async def an_endless_head(asked: Asked) -> None:
    await asked.write(b"HTTP/1.1 200 OK\r\n")
    await asked.forever(b"X: " + b"y" * 60_000 + b"\r\n")


# Lengths

family("lengths")

says("a_length_twice", lambda a: whole(a.answer(), JSON, f"Content-Length: {len(a.answer())}"), ANSWERED, LOST)
says("two_lengths", lambda a: whole(a.answer(), JSON, "Content-Length: 5"), LOST)
says("two_lengths_in_one", lambda a: head(JSON, f"Content-Length: 5, {len(a.answer())}") + a.answer(), LOST)
for _length in ("-1", "+5", "0x10", "5a", "", "1 0", "9" * 30, "1_0", "²"):
    says(f"length_{_length}", lambda a, n=_length: head(JSON, f"Content-Length: {n}") + a.answer(), LOST, INVALID)
says(
    "chunks_and_a_length",
    lambda a: head(JSON, CHUNKED, "Content-Length: 5") + chunk(a.answer()) + b"0\r\n\r\n",
    ANSWERED,
    LOST,
)
for _coding in ("gzip, chunked", "chunked, chunked", "xchunked", "identity", "chunked, identity", "\x0bchunked"):
    says(
        f"coded_{_coding.strip()}",
        lambda a, coding=_coding: head(JSON, f"Transfer-Encoding: {coding}") + chunk(a.answer()) + b"0\r\n\r\n",
        LOST,
        INVALID,
        HANGS,  # without a length that it knows, the body ends with the connection
        *([ANSWERED] if _coding.strip() == "chunked" else []),
    )


# Chunks

family("chunks")

says("small_chunks", lambda a: chunked(a.answer(), 1), ANSWERED)
says("small_chunks_of_events", lambda a: chunked(event(a.answer()), 1, EVENTS), ANSWERED)
says("extensions", lambda a: head(JSON, CHUNKED) + chunk(a.answer(), b';a=b;c="d"') + b"0;x\r\n\r\n", ANSWERED)
says("trailers", lambda a: chunked(a.answer(), 9, end=b"0\r\nX-A: a\r\nX-B: b\r\n\r\n"), ANSWERED)
says("trailers_that_are_heads", lambda a: chunked(a.answer(), 9, end=b"0\r\nContent-Length: 5\r\n\r\n"), ANSWERED, LOST)
says("leading_zeros", lambda a: head(JSON, CHUNKED) + b"000" + chunk(a.answer()) + b"000\r\n\r\n", ANSWERED, LOST)
for _size in ("zz", "-5", "+5", "0x5", "", " ", "5 5", "f" * 17, "1" * 100, "5\n", "\0", "5,", "٥"):
    says(
        f"chunk_size_{_size!r:.12}",
        lambda a, size=_size: head(JSON, CHUNKED) + size.encode() + b"\r\n" + a.answer() + b"\r\n0\r\n\r\n",
        LOST,
        INVALID,
        *([HANGS] if _size == "f" * 17 else []),  # a number all the same, of which the end never comes
    )
says("a_chunk_without_its_end", lambda a: chunked(a.answer()).replace(b"\r\n0\r\n\r\n", b"0\r\n\r\n"), LOST)
says("a_chunk_too_long", lambda a: head(JSON, CHUNKED) + b"3\r\n" + a.answer() + b"\r\n0\r\n\r\n", LOST, INVALID)


@fault(LOST, HANGS)
async def an_endless_extension(asked: Asked) -> None:
    await asked.write(head(JSON, CHUNKED), b"5;")
    await asked.forever(b"x" * 65_536)


@fault(LOST, HANGS)
async def endless_extensions(asked: Asked) -> None:
    await asked.write(head(JSON, CHUNKED))
    await asked.forever(chunk(b" ", b";" + b"x" * 1000) * 10)


@fault(LOST)
async def an_endless_chunk_size(asked: Asked) -> None:
    await asked.write(head(JSON, CHUNKED))
    await asked.forever(b"0" * 65_536)


@fault(LOST, ANSWERED)
async def endless_trailers(asked: Asked) -> None:
    await asked.write(chunked(asked.answer(), end=b"0\r\n"))
    await asked.forever(b"X: " + b"y" * 60_000 + b"\r\n")


@fault(INVALID)
async def an_endless_body(asked: Asked) -> None:
    await asked.write(head(JSON, CHUNKED))
    await asked.forever(chunk(b" " * 60_000))


# Contents

family("contents")

GZIP = "Content-Encoding: gzip"
says("gzip", lambda a: whole(gzip.compress(a.answer()), JSON, GZIP), ANSWERED)
says("gzip_of_events", lambda a: chunked(gzip.compress(event(a.answer())), 3, EVENTS, GZIP), ANSWERED)
says("gzip_that_is_none", lambda a: whole(a.answer(), JSON, GZIP), LOST)
says("gzip_that_is_broken", lambda a: whole(gzip.compress(a.answer())[:20] + b"\xff" * 40, JSON, GZIP), LOST, INVALID)
says("gzip_that_is_cut", lambda a: whole(gzip.compress(a.answer())[:-20], JSON, GZIP), LOST, INVALID)
says("gzip_with_more_behind", lambda a: whole(gzip.compress(a.answer()) + b"more", JSON, GZIP), ANSWERED, LOST)
says("gzip_of_nothing", lambda a: whole(b"", JSON, GZIP), INVALID)
says(
    "gzip_twice", lambda a: whole(gzip.compress(gzip.compress(a.answer())), JSON, "Content-Encoding: gzip, gzip"), LOST
)
says("a_bomb", lambda a: whole(_bomb(), JSON, GZIP), INVALID)
says("a_bomb_of_events", lambda a: whole(_bomb(b"data: "), EVENTS, GZIP), LOST)
says("br", lambda a: whole(a.answer(), JSON, "Content-Encoding: br"), LOST)
says("html", lambda a: whole(b"<html>" * 10_000, "Content-Type: text/html"), INVALID)
says("no_type", lambda a: whole(a.answer(), "X: y"), ANSWERED)
says("types", lambda a: whole(a.answer(), JSON, "Content-Type: text/html"), ANSWERED, INVALID)
says("strange_type", lambda a: whole(a.answer(), "Content-Type: ;;;\x80"), INVALID, ANSWERED)
says("no_json", lambda a: whole(a.answer()[:-3]), INVALID)
says("no_utf_8", lambda a: whole(a.answer().replace(b"text", b"\xff\xfe")), INVALID)
says("events_that_are_json", lambda a: whole(a.answer(), EVENTS), LOST)
says("json_that_is_events", lambda a: whole(event(a.answer())), INVALID)
for _status in ("429 Slow", "503 No"):  # which say that nothing was done
    says(f"status_{_status[:3]}", lambda a, status=_status: whole(b"<html>", "X: y", status=status), INVALID)
for _status in ("407 Proxy Authentication Required", "413 Too Large", "500 \x1b[31m", "502 Bad"):
    says(f"status_{_status[:3]}", lambda a, status=_status: whole(b"<html>", "X: y", status=status), LOST)
says("an_endless_page", lambda a: head("Content-Length: 999999999999", status="502 Bad") + b"x" * 100_000, LOST, HANGS)


def _bomb(begins: bytes = b"") -> bytes:
    return gzip.compress(begins + b" " * (16 * 1024 * 1024), 1)


# Before the request was read


@fault(ANSWERED, LOST, early=True)
async def an_early_reply(asked: Asked) -> None:
    """The answer, and then the request is read all the same."""
    await asked.write(whole(asked.answer()))


@fault(LOST, early=True)
async def an_early_refusal(asked: Asked) -> None:
    await asked.write(whole(b"", status="413 Content Too Large"))


@fault(LOST, early=True)
async def an_early_refusal_and_the_end(asked: Asked) -> None:
    await asked.write(whole(b"", "Connection: close", status="413 Content Too Large"))
    raise Closed


@fault(LOST, early=True)
async def an_early_refusal_that_reads_nothing(asked: Asked) -> None:
    await asked.write(whole(b"", "Connection: close", status="413 Content Too Large"))
    await asked.server.release.wait()
    raise Closed


@fault(LOST, early=True)
async def an_early_cut(asked: Asked) -> None:
    raise Closed


@fault(LOST, early=True)
async def an_early_reset(asked: Asked) -> None:
    asked.reset()


@fault(LOST, early=True)
async def reads_nothing(asked: Asked) -> None:
    await asked.server.release.wait()
    raise Closed


@fault(LOST)
async def says_below_tls(asked: Asked) -> None:
    """Bytes in the middle of a reply, as they are, where records of TLS should be."""
    stream = asked.wire.stream
    await asked.write(head(JSON, "Content-Length: 1000"))
    await stream.transport_stream.send_all(bytes(asked.arguments["junk"]))
    await asked.gone()


# Any of them

_LEFT_OUT = {each.name for each in FAMILIES["more than one reply"]}  # what they do to others is shown by themselves
_COSTLY = ("megabyte", "endless", "bomb", "html", "many", "waits", "tls")
CHEAP: Final = tuple(
    each.name
    for each in FAULTS.values()
    if not (each.early or each.hangs or each.name in _LEFT_OUT or any(word in each.name for word in _COSTLY))
)
"""Faults that take neither time nor much to write."""


@fault(ANSWERED, LOST, INVALID, HANGS)
async def at_random(asked: Asked) -> None:
    """One of the cheap faults, or a right reply with something wrong in its bytes, in their pieces, or at its end.

    Nothing follows it on its connection if it is the last that is asked there.
    """
    rng = random.Random(asked.arguments["seed"])
    if rng.random() < 0.4:
        await FAULTS[rng.choice(CHEAP)].do(asked)
    else:
        await _changed_reply(asked, rng)
    if asked.arguments["last"]:
        raise Closed


async def _changed_reply(asked: Asked, rng: random.Random) -> None:
    answer = asked.answer()
    data = rng.choice(
        [
            whole(answer),
            chunked(answer, rng.randrange(1, 50)),
            chunked(event(answer), rng.randrange(1, 50), EVENTS),
            whole(gzip.compress(answer), JSON, GZIP),
            whole(event(b"") + event(answer), EVENTS),
        ]
    )
    size = rng.choice([1 << 20, 1 << 20, 100, 7])
    if rng.random() < 0.6:
        data = changed(rng, data, len(data)).replace(b"Location", b"L")
        size = len(data) or 1  # what follows a reply in a read of its own is the next one's, as far as anybody can tell
    cut = rng.random() < 0.4
    if cut:
        data = data[: rng.randrange(len(data))]
    for at in range(0, len(data), size):
        await asked.write(data[at : at + size])
    end = rng.random()
    if end < (0.6 if cut else 0.3):
        raise Closed
    if end < (0.95 if cut else 0.5):
        asked.reset()


# The server


@attrs.define(eq=False)
class FaultServer:
    """The server.

    Attributes:
        url: where it is.
        early: the early fault that befalls large requests.
        notices: the fault that befalls messages without an answer.
        open: connections that no side has closed.
        connections: how many there were.
        heard: how often it has read the call with this text to its end.
        hangs_up: whether it closes the next connection on which a request begins.
        deaf: whether it never answers on new connections.
        release: set it to let calls be answered that wait.
        faults: how often each befell a call.
        wires: the open connections, the newest last.
        busy: those of them on which a request has begun that has no whole reply.
        last_id: of the last call.
        waiting: the id of the call that was told last to wait.
    """

    revision: Revision
    url: str = ""
    early: Fault | None = None
    notices: Fault | None = None
    connections: int = 0
    heard: Counter[str] = attrs.field(factory=Counter)
    hangs_up: bool = False
    deaf: bool = False
    release: trio.Event = attrs.field(factory=trio.Event)
    faults: Counter[str] = attrs.field(factory=Counter)
    wires: list[HttpWire] = attrs.field(factory=list)
    busy: set[HttpWire] = attrs.field(factory=set)
    last_id: int = 0
    waiting: int = 0
    _changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    @property
    def open(self) -> int:
        return len(self.wires)

    async def wait_for(self, holds: Callable[[], bool]) -> None:
        """Wait until a connection's begin, end or request has made this true."""
        while not holds():
            await self._changed.park()

    def hang_up(self, *, reset: bool = False, idle: bool = False) -> None:
        """Close all connections, or the idle ones, without a word."""
        for wire in self.wires:
            if not idle or wire not in self.busy:
                hang_up(wire, reset=reset)

    async def say_unasked(self) -> None:
        """Say a reply to the next call on every idle connection."""
        for wire in self.wires:
            if wire not in self.busy:
                await wire.send(poison(Asked(self, wire, {"id": self.last_id, "params": {}})))

    async def listen(
        self,
        tls: ssl.SSLContext | None = None,
        uds: Path | None = None,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept connections on a port, or on a Unix socket, until cancelled."""
        sock = trio.socket.socket(socket.AF_INET if uds is None else socket.AF_UNIX)
        await sock.bind(("127.0.0.1", 0) if uds is None else str(uds))
        sock.listen(100)
        if uds is not None:
            self.url = f"http+unix://{quote(str(uds), safe='')}/mcp"
        else:
            port = sock.getsockname()[1]
            self.url = f"http://127.0.0.1:{port}/mcp" if tls is None else f"https://localhost:{port}/mcp"

        task_status.started()

        async def serve(stream: trio.SocketStream) -> None:
            await self.serve(stream if tls is None else trio.SSLStream(stream, tls, server_side=True))

        await trio.serve_listeners(serve, [trio.SocketListener(sock)])

    async def serve(self, stream: trio.abc.Stream) -> None:
        """Serve one connection."""
        wire = HttpWire(stream)
        self.connections += 1
        self.wires.append(wire)
        self._changed.unpark_all()
        try:
            if self.deaf:
                await Asked(self, wire, {}).gone()
            while True:
                await self._exchange(wire)
        except (Closed, EOFError, OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            self.wires.remove(wire)
            self.busy.discard(wire)
            await trio.aclose_forcefully(stream)
            self._changed.unpark_all()

    async def _exchange(self, wire: HttpWire) -> None:
        top = (await wire.until(b"\r\n\r\n")).decode("latin-1")
        if self.hangs_up:
            self.hangs_up = False
            raise Closed
        self.busy.add(wire)
        method = top.partition(" ")[0]
        size = int(top.lower().partition("content-length:")[2].partition("\r\n")[0] or 0)
        if self.early is not None and size >= LARGE:
            await self._reply_early(wire, size)
            return
        body = await wire.exactly(size)
        asked = Asked(self, wire, orjson.loads(body) if body else {})
        await self._answer(method, asked)
        self.busy.discard(wire)
        self._changed.unpark_all()

    async def _reply_early(self, wire: HttpWire, size: int) -> None:
        """Do a fault to a call of which no more was read than whose it is."""
        assert self.early is not None
        begun = await wire.until(b'"method"')
        [id] = re.findall(rb'"id":(\d+)', begun)
        self.faults[self.early.name] += 1
        self._changed.unpark_all()
        await self.early.do(Asked(self, wire, {"id": int(id), "params": {"arguments": {"text": "early"}}}))
        await wire.exactly(size - len(begun))

    async def _answer(self, method: str, asked: Asked) -> None:
        said = asked.message.get("method")
        if method != "POST":
            await asked.write(whole(b"", status="200 OK" if method == "DELETE" else "405 No"))
        elif said is not None and "id" not in asked.message and self.notices is not None:
            self.faults[self.notices.name] += 1
            await self.notices.do(asked)
        elif said is None or "id" not in asked.message:
            await asked.write(whole(b"", status="202 Accepted"))
        elif said == "initialize":
            hello = {"protocolVersion": self.revision.name, "capabilities": {"tools": {}}, "serverInfo": INFO}
            await asked.write(whole(asked.result(hello), JSON, f"Mcp-Session-Id: {SECRET}"))
        elif said == "server/discover":
            offers = {"supportedVersions": [self.revision.name], "capabilities": {"tools": {}}, "serverInfo": INFO}
            await asked.write(whole(asked.result({**offers, "ttlMs": 0, "cacheScope": "private"})))
        else:
            self.last_id = asked.message["id"]
            self.heard[str(asked.arguments.get("text"))] += 1
            name = asked.arguments.get("fault")
            self.faults[name or ""] += 1
            self._changed.unpark_all()
            if name is None:
                await asked.write(whole(asked.answer()))
            else:
                await FAULTS[name].do(asked)


@asynccontextmanager
async def faulty(
    revision: Revision, *, tls: ssl.SSLContext | None = None, uds: Path | None = None
) -> AsyncIterator[FaultServer]:
    """Run a server while the block runs; leaving it ends its connections."""
    server = FaultServer(revision)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.listen, tls, uds)
        yield server
        nursery.cancel_scope.cancel()
