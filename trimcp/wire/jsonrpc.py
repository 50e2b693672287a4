"""JSON-RPC 2.0 messages as plain values, parsed from bytes and encoded to bytes (MCP, "Basic Protocol").

`parse` accepts any bytes and never raises: invalid input becomes a `Malformed`, which is also a message. Other modules
decide which messages are allowed, by revision and state.
"""

from __future__ import annotations

import math
import os
from codecs import BOM_UTF8
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Any, Final, TypeAlias

import attrs
import orjson

from trimcp.errors import LocalError
from trimcp.support.bounds import checked
from trimcp.support.slotted import slotted, valued
from trimcp.wire.codes import INVALID_PARAMS, INVALID_REQUEST, PARSE_ERROR
from trimcp.wire.scanner import IdScanner as IdScanner
from trimcp.wire.scanner import RequestId as RequestId
from trimcp.wire.scanner import deeper_than, more_members_than, structure_of, unreadable_number, with_marks

JSON: TypeAlias = Any
"""Any JSON value: dict with string keys, list, str, int, float, bool or None."""


class Unencodable(LocalError):
    """A value that JSON cannot represent: NaN, an integer beyond 64 bits, a lone surrogate, an unknown type."""


# The most frequent messages are mutable only because attrs takes three times as long to create a frozen object.
@slotted
@valued
class Request:
    """A request, which must get exactly one answer (JSON-RPC 2.0 section 4)."""

    id: RequestId  # unique among the sender's requests in progress
    method: str  # the method's name
    params: dict[str, Any] | None = None  # its parameters by name, or None if there are none


@slotted
@valued
class Notification:
    """A message without an id, which gets no answer (JSON-RPC 2.0 section 4.1)."""

    method: str
    params: dict[str, Any] | None = None


@slotted
@valued
class Response:
    """The successful answer to a request (JSON-RPC 2.0 section 5). In MCP a result is always an object."""

    id: RequestId
    result: dict[str, Any]


@slotted(frozen=True)
@valued
class ErrorResponse:
    """The error that answers a request (JSON-RPC 2.0 section 5.1)."""

    # the request it answers; None if its sender could not read the id (null or absent on the wire)
    id: RequestId | None
    code: int  # an integer, see `trimcp.wire.codes`
    message: str  # one line for a person. Untrusted text.
    data: Any = None  # additional data, or None


@slotted(frozen=True)
@valued
class Lost:
    """Not a message of the peer, but a report of the transport: an answer will not arrive."""

    id: RequestId | None  # the request of ours that gets no answer; None if the peer has lost our subscriptions
    message: str  # the reason, as one line for a person
    # if no access token could be obtained, the authorization server's error code or ""; else None
    authorization: str | None = None
    nothing_sent: bool = False  # nothing of the request was sent


@slotted(frozen=True)
class Marked:
    """A JSON value that has a text, `mark`, in place of each integer beyond 64 bits."""

    value: Any
    mark: str

    def marks(self, part: Any) -> bool:
        """Return whether a part of the value has such a place."""
        rest = [part]
        while rest:
            item = rest.pop()
            if type(item) is dict:
                rest += item.values()
            elif type(item) is list:
                rest += item
            elif item == self.mark:
                return True
        return False


@slotted(frozen=True)
@valued
class Malformed:
    """Input that is not a valid message, with the error that answers it."""

    code: int  # the error code for the answer
    message: str  # the error's message: one line for a person, without the invalid text
    id: RequestId | None  # the id, if it could be read anyway, or None
    # a short name for programs: "json", "utf8", "number", "depth", "members", "size", "id", "shape", "params" or
    # "batch"
    reason: str
    is_response: bool = False  # it was meant as a response. It gets no answer; the call with its id has failed.
    is_notification: bool = False  # it was a notification with invalid parameters. It gets no answer.
    # it has a method and no outcome, so `id` is that of a request whose sender waits for an answer
    is_request: bool = False
    request_id: str | None = None  # see `IdScanner`
    # what could be read of a response or a batch, of which only integers are wrong
    marked: Marked | None = attrs.field(default=None, eq=False)

    @property
    def answerable(self) -> bool:
        """Whether JSON-RPC requires an error as the answer. A client nevertheless answers only requests."""
        return not (self.is_response or self.is_notification)


@slotted(frozen=True)
@valued
class Batch:
    """A JSON array of messages (JSON-RPC 2.0 section 6), not empty and not nested.

    The engine decides whether the revision allows it.
    """

    members: tuple[Request | Notification | Response | ErrorResponse | Malformed, ...]


Message: TypeAlias = Request | Notification | Response | ErrorResponse | Lost | Malformed | Batch
"""Everything that may be received."""

_Member: TypeAlias = Request | Notification | Response | ErrorResponse | Malformed


@attrs.frozen(field_transformer=checked())
@valued
class ParseLimits:
    """Bounds on one message, beside its size in bytes."""

    max_depth: int = 128  # levels of nested arrays and objects
    # array elements, object members and containers in a message over 256 KiB; a smaller one cannot contain enough of
    # them to matter
    max_members: int = 200_000
    max_batch: int = 100  # messages in a batch


DEFAULT_LIMITS: Final = ParseLimits()

PATIENCE: Final = 16
"""A message of this many times its limit ends the connection; a smaller one is discarded while it is received."""

_COUNT_OVER: Final = 256 * 1024
_DIGITS: Final = bytes.maketrans(b"123456789", b"000000000")
_LONG_DIGITS: Final = b"0" * 19  # the shortest integers beyond 64 bits have 19 digits
_NEWLINE: Final = 10
_SEARCHED: Final = 4 * 1024  # bytes up to which a whole text is searched: anything cleverer would cost more
_EACH_DIGIT: Final = 512  # bytes that are searched in the time in which one candidate is checked
_PIECE: Final = 1 << 18  # bytes searched at once: they are copied
_ABSENT: Final[Any] = object()
_NEAR: Final = 64  # so far into a text, its first character other than white space is looked for
_EXACT: Final = 1 << 53  # beyond it doubles leave integers out
_RESPONSE_MEMBERS: Final = 3  # jsonrpc, id and result: an answer as it usually is
_loads: Final[Callable[[bytes], Any]] = orjson.loads
_dumps: Final[Callable[[Any, None, int], bytes]] = orjson.dumps


def parse(data: bytes, limits: ParseLimits = DEFAULT_LIMITS) -> Message:
    """Return one message from one JSON text in UTF-8. Never raises.

    Nothing is rounded or replaced: integers beyond 64 bits, numbers beyond a double, NaN, Infinity, invalid
    UTF-8 and lone surrogates are refused. A byte order mark is skipped. The caller has checked the size.
    """
    value = parse_value(data, limits)
    return _member(value) if type(value) is dict else as_message(value, limits)


def as_message(value: Any, limits: ParseLimits = DEFAULT_LIMITS) -> Message:
    """Return the message that a JSON value is; `parse_value` returned it. Never raises."""
    kind = type(value)
    if kind is dict:
        return _member(value)
    if kind is Malformed:
        refused: Malformed = value
        marked = refused.marked
        if marked is not None and type(marked.value) is list:
            return _batch(marked.value, limits, lambda member: _marked_member(member, refused, marked.mark))
        return refused
    return _batch(value, limits) if kind is list else _member(value)


def parse_value(data: bytes, limits: ParseLimits = DEFAULT_LIMITS) -> Any:
    """Return any JSON value from one text, with the checks of `parse`, or a `Malformed`. Never raises."""
    size = len(data)
    structure = size
    if size > _COUNT_OVER:
        structure = structure_of(data)
        if structure > limits.max_members and more_members_than(limits.max_members, data):
            return _refused(data, INVALID_REQUEST, "members", f"more than {limits.max_members:,} members")
    try:
        value = _loads(data)
    except ValueError as error:
        if data[:3] == BOM_UTF8 and data[3:6] != BOM_UTF8:
            return parse_value(data[3:], limits)  # some programs write one
        return _unparsable(data, str(error), limits)
    # Each level needs two brackets, so a short valid text cannot be too deep.
    if size > 2 * limits.max_depth and structure > limits.max_depth and deeper_than(limits.max_depth, data):
        return _refused(data, INVALID_REQUEST, "depth", f"nested deeper than {limits.max_depth} levels")
    if data.translate(_DIGITS).find(_LONG_DIGITS) >= 0 if size <= _SEARCHED else _has_long_digits(data):
        problem = unreadable_number(data)
        if problem is not None:
            return _refused_number(data, problem, limits)
    return value


def _has_long_digits(data: bytes) -> bool:
    """Return whether the text has a very long number. Searches in pieces, to avoid copying a large message."""
    length = len(_LONG_DIGITS)
    more = length - 1
    # So many digits in a row include one at a multiple of nineteen, so most of a text need not be read.
    sample = data[more::length].translate(_DIGITS)
    if sample.count(b"0") * _EACH_DIGIT <= len(data):
        at = sample.find(b"0")
        while at >= 0:
            middle = at * length + more
            if _LONG_DIGITS in data[middle - more : middle + length].translate(_DIGITS):
                return True
            at = sample.find(b"0", at + 1)
        return False
    starts = range(0, len(data), _PIECE)
    return any(_LONG_DIGITS in data[start : start + _PIECE + more].translate(_DIGITS) for start in starts)


def own_id(id: RequestId) -> RequestId:
    """Return the id of a request of ours, which is a number, from an answer that may have it as text."""
    return int(id) if type(id) is str and id.isascii() and id.isdigit() and len(id) < len(_LONG_DIGITS) else id


def scan_id(data: bytes) -> RequestId | None:
    """Return the top-level id of text that cannot be parsed, at any position; None unless there is exactly one."""
    return _scan(data).id


def oversize(scanner: IdScanner, max_size: int) -> Malformed:
    """Return the `Malformed` for a message over `max_size` bytes that was fed to `scanner` and discarded."""
    text = f"message larger than {max_size:,} bytes"
    return _scanned(scanner, INVALID_REQUEST, "size", text)


def too_large(data: bytes, max_size: int) -> Malformed:
    """Return the `Malformed` for a message over `max_size` bytes that is in memory, as inside one process."""
    return oversize(_scan(data), max_size)


def parse_within(data: bytes, max_size: int) -> Message:
    """Return one message from one JSON text that is in memory, as `parse`; `too_large` beyond `max_size` bytes."""
    return parse(data) if len(data) <= max_size else too_large(data, max_size)


def _scan(data: bytes) -> IdScanner:
    scanner = IdScanner()
    scanner.feed(data)
    return scanner


def _refused(data: bytes, code: int, reason: str, message: str) -> Malformed:
    return _scanned(_scan(data), code, reason, message)


def _scanned(scanner: IdScanner, code: int, reason: str, message: str, marked: Marked | None = None) -> Malformed:
    asks = scanner.saw_method and not scanner.saw_outcome and scanner.id is not None
    said, answers = scanner.request_id, scanner.is_response
    return Malformed(code, message, scanner.id, reason, answers, is_request=asks, request_id=said, marked=marked)


def _refused_number(data: bytes, problem: str, limits: ParseLimits) -> Malformed:
    """Refuse a number, but keep what else a response or a batch says: its members may be of use without each other."""
    scanner = _scan(data)
    marked = None
    if scanner.is_response or data[:_NEAR].lstrip()[:1] == b"[":
        mark = os.urandom(16).hex()  # no peer can have written it
        text = with_marks(data, mark.encode())
        if text is not None and not deeper_than(limits.max_depth, text):
            with suppress(ValueError):  # there is more that cannot be read
                marked = Marked(_loads(text), mark)
    return _scanned(scanner, INVALID_REQUEST, "number", problem, marked)


def _unparsable(data: bytes, complaint: str, limits: ParseLimits) -> Malformed:
    """Return a `Malformed` with our own text for the parser's error."""
    if "infinity" in complaint:
        return _refused_number(data, "a number is too large to be read", limits)
    if "depth" in complaint or "ecursion" in complaint:
        return _refused(data, INVALID_REQUEST, "depth", "nested too deep")
    if "BOM" in complaint:
        return _refused(data, PARSE_ERROR, "utf8", "text begins with a byte order mark")
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return _refused(data, PARSE_ERROR, "utf8", f"not valid UTF-8 at byte {error.start}")
    if "surrogate" in complaint:
        return _refused(data, PARSE_ERROR, "utf8", f"a surrogate stands alone: {complaint}")
    return _refused(data, PARSE_ERROR, "json", f"not valid JSON: {complaint}")


def _invalid(
    message: str, id: RequestId | None, reason: str = "shape", *, response: bool = False, request: bool = False
) -> Malformed:
    return Malformed(INVALID_REQUEST, message, id, reason, response, is_request=request and id is not None)


def _batch(values: list[Any], limits: ParseLimits, read: Callable[[Any], _Member] | None = None) -> Batch | Malformed:
    if not values:
        return _invalid("a batch must not be empty", None, "batch")
    if len(values) > limits.max_batch:
        return _invalid(f"a batch of more than {limits.max_batch} messages", None, "batch")
    return Batch(tuple(map(read or _member, values)))


def _marked_member(value: Any, batch: Malformed, mark: str) -> _Member:
    """Return one message of a batch of which `batch` says what is wrong with integers: only those that hold one are."""
    message, marked = _member(value), Marked(value, mark)
    if type(message) is Malformed or not marked.marks(value):
        return message
    kind, id = type(message), _readable(value.get("id"))
    known = None if id == mark else id
    return Malformed(
        batch.code,
        batch.message,
        known,
        batch.reason,
        kind is Response or kind is ErrorResponse,
        is_notification=kind is Notification,
        is_request=kind is Request and known is not None,
        marked=marked,
    )


def _member(value: Any) -> _Member:
    """Return one message from a parsed JSON value."""
    if type(value) is not dict:
        return _invalid("a message must be an object", None)
    id = value.get("id", _ABSENT)
    method = value.get("method", _ABSENT)
    if method is _ABSENT and len(value) == _RESPONSE_MEMBERS and value.get("jsonrpc") == "2.0":
        result = value.get("result")
        if type(result) is dict and (type(id) is int or type(id) is str):
            return Response(id, result)
    if type(method) is not str or value.get("jsonrpc") != "2.0" or "result" in value or "error" in value:
        return _response(value, id, method)
    params = value.get("params")
    # null counts as none, as for every optional member: some write it so
    if params is not None and type(params) is not dict:
        # JSON-RPC allows arrays and MCP does not, so they are invalid parameters of a valid request.
        code = INVALID_PARAMS if type(params) is list else INVALID_REQUEST
        known, text = _readable(id), "params must be an object"
        return Malformed(code, text, known, "params", is_notification=id is _ABSENT, is_request=known is not None)
    if type(id) is int or type(id) is str:
        return Request(id, method, params)
    if id is _ABSENT:
        return Notification(method, params)
    return _invalid("a request's id must be a string or an integer", None, "id")


def _readable(id: Any) -> RequestId | None:
    return id if type(id) is int or type(id) is str else None


def _response(value: dict[str, Any], id: Any, method: Any) -> _Member:
    """Return a response, or a `Malformed` for an object that is neither a request nor a response.

    Serializers of many languages write every member of a class, so one that is null is absent.
    """
    has_result, has_error = "result" in value, "error" in value
    if has_result and has_error:
        has_error = value["error"] is not None
        has_result = value["result"] is not None or not has_error
    if type(method) is str and (has_result or has_error) and value.get("result") is value.get("error") is None:
        return _member({name: each for name, each in value.items() if name not in ("result", "error")})
    if method is None and (has_result or has_error):
        method = _ABSENT
    known = _readable(id)
    if type(id) is float and id.is_integer() and abs(id) < _EXACT and method is _ABSENT:
        known = int(id)  # an answer to our own, by a peer that reads every number as a double
    response = method is _ABSENT and (has_result or has_error)
    request = method is not _ABSENT and not (has_result or has_error)
    if value.get("jsonrpc") != "2.0":
        return _invalid('jsonrpc must be "2.0"', known, response=response, request=request)
    if method is not _ABSENT:
        what = "method must be a string" if type(method) is not str else "a request has no result and no error"
        return _invalid(what, known, request=request)
    if not response:
        return _invalid("a message has a method, a result or an error", known)
    if has_result and has_error:
        return _invalid("a response has either a result or an error", known, response=True)
    if known is None and not (has_error and (id is None or id is _ABSENT)):
        return _invalid("a response's id must be a string or an integer", None, "id", response=True)
    if has_error:
        return _error(value["error"], known)
    result = value["result"]
    if known is None or type(result) is not dict:
        return _invalid("a result must be an object", known, response=True)
    return Response(known, result)


def _error(error: Any, id: RequestId | None) -> ErrorResponse | Malformed:
    if type(error) is not dict:
        return _invalid("an error must be an object", id, response=True)
    code, message = error.get("code"), error.get("message")
    if type(code) is not int or type(message) is not str:
        return _invalid("an error has an integer code and a message", id, response=True)
    return ErrorResponse(id, code, message, error.get("data"))


def sendable(value: Any) -> Any:
    """Return a JSON value whose texts have "\\ud800" in place of a lone surrogate, which UTF-8 cannot carry."""
    if type(value) is str:
        return value.encode("utf-8", "backslashreplace").decode()
    if type(value) is dict:
        return {sendable(key): sendable(each) for key, each in value.items()}
    return [sendable(each) for each in value] if type(value) in (list, tuple) else value


# Plain JSON values only: orjson could write other types, which would be different when read back.
_OPTIONS: Final = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
_FINITE: Final = frozenset((str, int, bool, type(None)))
_OWN_PAGES: Final = 4 * 1024 * 1024
"""Bytes of a text whose buffer is always in pages of its own, where unused room costs nothing: it is over 32 MiB large.
Smaller ones the C library puts where others were before, and all that was written there once stays in memory."""


def encode(value: JSON) -> bytes:
    """Return JSON text in UTF-8 on one line. An `orjson.Fragment` anywhere inside is inserted unchanged.

    Raises Unencodable: for NaN and Infinity, integers beyond 64 bits, lone surrogates, keys that are no strings, types
    that JSON does not have, and more than 254 levels.
    """
    try:
        data = _dumps(value, None, _OPTIONS)
    except TypeError as error:
        raise Unencodable(f"JSON cannot carry this value: {error}") from None
    # orjson writes NaN and Infinity as null, so only text with a null in it can contain one.
    # `in` with bytes first tries them as a number, and the exception costs more than the search. From the end a large
    # text is searched in a third of the time, or less: `find` prepares for the worst that a text can be.
    if data.rfind(b"null") >= 0 and _has_nonfinite(value, data):
        raise Unencodable("JSON cannot carry this value: NaN and Infinity are not numbers in JSON")
    if _NEWLINE in data:  # from a Fragment, as white space between tokens; it would end the message
        data = data.replace(b"\n", b" ")
    # orjson returns its whole buffer, eight times a text and at least 1 KiB, truncated. What is kept is a copy.
    return b"%b" % data if len(data) < _OWN_PAGES else data


def _has_nonfinite(value: Any, data: bytes) -> bool:
    if len(data) <= _PIECE:
        with suppress(ValueError):  # a Fragment may hold anything
            if _loads(data) == value:
                return False
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, Enum):
            item = item.value
        if isinstance(item, float):
            if not math.isfinite(item):
                return True
        elif isinstance(item, dict):
            rest += [child for child in item.values() if type(child) not in _FINITE]
        elif isinstance(item, (list, tuple)):
            rest += [child for child in item if type(child) not in _FINITE]
    return False


def encode_request(id: RequestId, method: str, params: JSON = None) -> bytes:
    """Return a request's text; without a `params` member if it is None. Raises `Unencodable` as `encode` does."""
    if params is None:
        return encode({"jsonrpc": "2.0", "id": id, "method": method})
    return encode({"jsonrpc": "2.0", "id": id, "method": method, "params": params})


def encode_notification(method: str, params: JSON = None) -> bytes:
    """Return a notification's text; without a `params` member if it is None. Raises `Unencodable` as `encode` does."""
    if params is None:
        return encode({"jsonrpc": "2.0", "method": method})
    return encode({"jsonrpc": "2.0", "method": method, "params": params})


def encode_result(id: RequestId, result: JSON) -> bytes:
    """Return a successful answer's text. Raises `Unencodable` as `encode` does."""
    return encode({"jsonrpc": "2.0", "id": id, "result": result})


def encode_error(id: RequestId | None, code: int, message: str, data: JSON = None, *, null_id: bool = False) -> bytes:
    """Return an error answer's text; without a `data` member if it is None. Raises as `encode` does.

    `id` is None if that of the request could not be read: with `null_id` it is then written as null, as in JSON-RPC,
    else omitted, as in MCP from 2025-11-25 on.
    """
    error = {"code": code, "message": message} if data is None else {"code": code, "message": message, "data": data}
    if id is None and not null_id:
        return encode({"jsonrpc": "2.0", "error": error})
    return encode({"jsonrpc": "2.0", "id": id, "error": error})
