"""Reads single headers: the reply formats that a client accepts, the format of its body, the key of a WebSocket.

The headers come from an untrusted peer. They are read once from left to right; invalid parts are ignored. (RFC 9110,
sections 8.3, 8.4 and 12.5.1; RFC 6455.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from trimcp.support.bounds import TOKEN

JSON: Final = "application/json"
_GRPC: Final = "application/grpc"
EVENTS: Final = "text/event-stream"

# Anchored at both ends, and without ambiguity between parts: the cost of a failed match is linear.
_RANGE: Final = re.compile(rf"({TOKEN})/({TOKEN})", re.ASCII)
_PARAMETER: Final = re.compile(rf'({TOKEN})[ \t]*=[ \t]*(?:({TOKEN})|"([^"\\]*)")', re.ASCII)
_KEY: Final = re.compile(r"[+/0-9A-Za-z]{22}==")  # 16 bytes in base64 (RFC 6455, section 4.2.1)
_WEIGHT: Final = re.compile(r"0(\.[0-9]{0,3})?|1(\.0{0,3})?", re.ASCII)


def accepts(header: str | None) -> tuple[bool, bool]:
    """Return whether a client accepts JSON, and whether it accepts a stream of events, by the value of Accept.

    The most specific range decides, and `q=0` means no; of equal ranges an accepting one wins. Parameters other than
    `q` are ignored. A missing or empty header, and one without a valid range, accept every format.
    """
    if header is None:
        return True, True
    found: dict[str, bool] = {}
    for part in _split(header, ","):
        kind, _, weight = _read_range(part)
        if kind is not None:
            found[kind] = weight or found.get(kind, False)
    if not found:
        return True, True
    return _decide(found, JSON), _decide(found, EVENTS)


def _decide(found: dict[str, bool], kind: str) -> bool:
    for wanted in (kind, f"{kind.partition('/')[0]}/*", "*/*"):
        if wanted in found:
            return found[wanted]
    return False


def _read_range(part: str) -> tuple[str | None, str, bool]:
    """Return a media range in lower case (None if invalid), its charset, and whether its weight is above 0."""
    kind: str | None = None
    charset, wanted = "", True
    for number, piece in enumerate(_split(part, ";")):
        text = piece.strip(" \t")
        if number == 0:
            kind = text.lower()
            if not _RANGE.fullmatch(kind) or (kind.startswith("*/") and kind != "*/*"):
                return None, "", False
            continue
        match = _PARAMETER.fullmatch(text)
        if match is None:
            continue
        name, value = match[1].lower(), match[2] if match[3] is None else match[3]
        if name == "q" and _WEIGHT.fullmatch(value):
            wanted = float(value) > 0
        elif name == "charset":
            charset = value.lower()
    return kind, charset, wanted


def is_json(content_type: str | None) -> bool:
    """Return whether a body may be a JSON-RPC message: `application/json`, with no charset or UTF-8.

    A body without a Content-Type is refused. All requests of the specification have one. Without this check a page
    could send a message with `fetch(..., {mode: "no-cors"})`, for which the browser makes no preflight.
    `application/...+json` is refused too.
    """
    if content_type is None:
        return False
    if content_type == JSON:
        return True
    kind, charset, _ = _read_range(content_type)
    return kind == JSON and charset in ("", "utf-8", "utf8")


def is_compressed(content_encoding: str | None) -> bool:
    """Return whether a body has a coding. None is decompressed here: a small body may be huge when decompressed."""
    return content_encoding is not None and content_encoding.strip().lower() not in ("", "identity")


def is_websocket_key(key: str | None) -> bool:
    """Return whether a value of Sec-WebSocket-Key is one. None is: HTTP/2 has no key (RFC 8441, section 5).

    Over HTTP/1.1 the handshake refuses a request without one.
    """
    return key is None or _KEY.fullmatch(key) is not None


def _split(text: str, separator: str) -> Iterator[str]:
    """Yield the parts between separators; separators inside quoted strings do not count."""
    if '"' not in text:
        yield from text.split(separator)
        return
    part, quoted, escaped = 0, False, False
    for at, char in enumerate(text):
        if escaped:
            escaped = False
        elif char == '"':
            quoted = not quoted
        elif char == "\\":
            escaped = quoted
        elif char == separator and not quoted:
            yield text[part:at]
            part = at + 1
    yield text[part:]


def is_grpc(content_type: str | None) -> bool:
    """Return whether a request of this content type is a call of gRPC, with messages of protobuf."""
    if content_type is None or not content_type.startswith(_GRPC):
        return False
    return content_type.partition(";")[0].rstrip() in (_GRPC, f"{_GRPC}+proto")
