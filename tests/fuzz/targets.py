"""Whatever is fed with a peer's bytes before anything else looks at them, each as a function of any bytes at all.

A target raises nothing unless something is wrong. Each has an oracle: another implementation, the same input fed in
other pieces, the way back. They are run by hypothesis in the plain suite and by atheris under `nox -s fuzz`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import h11
import orjson

from trimcp.channel import Kind, Outgoing
from trimcp.framing import lines, sse
from trimcp.framing.frames import FrameGate
from trimcp.framing.headers import check_request, decode_value, encode_value, find_mirrors
from trimcp.protocol.events import AnsweredByEngine, BatchReceived, RequestReceived
from trimcp.schema.engine import SchemaError
from trimcp.schema.validator import Validator, peer_validator
from trimcp.server.uri_template import UriTemplate
from trimcp.session.facts import SessionMemory
from trimcp.session.queues import BatchSink, Outbox
from trimcp.transports.http.h1.parser import RequestParser, RequestRefused
from trimcp.transports.http.h1.replies import ReplyParser, UnreadableReply, portions
from trimcp.transports.http.settings import HttpLimits
from trimcp.wire import jsonrpc
from trimcp.wire.jsonrpc import IdScanner, Malformed, parse

__all__ = ["TARGETS", "Target"]

Target: TypeAlias = Callable[[bytes], None]

_SIZES: Final = (16, 64, 300, 4096)


def _pieces(data: bytes, size: int) -> Iterator[bytes]:
    return (data[at : at + size] for at in range(0, len(data), size))


def _chosen(data: bytes) -> tuple[int, int, bytes]:
    """A limit, the size of pieces, and what is fed: the first two bytes choose."""
    head, rest = data[:2].ljust(2, b"\0"), data[2:]
    return _SIZES[head[0] % len(_SIZES)], 1 + head[1] % 17, rest


def decode_lines(data: bytes) -> None:
    """Lines: the same messages however they arrive, nothing kept beyond the limit."""
    limit, size, text = _chosen(data)
    expected = [line for line in text.split(b"\n") if line and not line.isspace()]
    for width in (len(text) or 1, 1, size):
        decoder = lines.LineDecoder(limit, at_once=lines.LINES)
        found = []
        for piece in _pieces(text, width):
            found += decoder.feed(piece)
            while decoder.behind:
                found += decoder.feed(b"")
            assert decoder.held <= limit + 1
        found += decoder.eof()
        for (message, length), line in zip(found, expected, strict=True):
            # What is too large is told of once its id is known, so that its end and what is wrong there may not be.
            told = isinstance(message, Malformed) and message.reason == "size"
            assert (limit < length <= len(line)) if told else (message, length) == (parse(line), len(line))
            assert told or len(line.removesuffix(b"\r")) <= limit


def parse_message(data: bytes) -> None:
    """JSON-RPC: never raises, agrees with orjson and with the scanner, and comes back as it was written."""
    message = parse(data)
    scanner, slow = IdScanner(), IdScanner()
    scanner.feed(data)
    for piece in _pieces(data, 1):
        slow.feed(piece)
    seen = (scanner.id, scanner.saw_method, scanner.saw_outcome)
    assert (slow.id, slow.saw_method, slow.saw_outcome) == seen
    if isinstance(message, jsonrpc.Malformed):
        _check_malformed(data, message)
    if not isinstance(message, jsonrpc.Malformed) or message.reason in ("shape", "params", "id", "batch"):
        json.loads(data, parse_int=_check_integer, parse_constant=_check_constant)
    if isinstance(message, jsonrpc.Request | jsonrpc.Response):
        assert scanner.id == message.id or _names_twice(data, "id") or len(str(message.id)) > 500
    if isinstance(message, jsonrpc.Request):
        assert parse(jsonrpc.encode_request(message.id, message.method, message.params)) == message
    elif isinstance(message, jsonrpc.Notification):
        assert parse(jsonrpc.encode_notification(message.method, message.params)) == message
    elif isinstance(message, jsonrpc.Response):
        assert parse(jsonrpc.encode_result(message.id, message.result)) == message
    elif isinstance(message, jsonrpc.Batch):
        assert 0 < len(message.members) <= 100


def _check_integer(text: str) -> int:
    """What was read was read exactly."""
    assert -(2**63) <= int(text) < 2**64
    return int(text)


def _check_constant(text: str) -> float:
    raise AssertionError(f"{text} is no JSON")


def _check_malformed(data: bytes, message: jsonrpc.Malformed) -> None:
    assert "\n" not in message.message
    try:
        value = orjson.loads(data)
    except ValueError:
        return
    if isinstance(value, dict) and message.reason in ("shape", "params"):
        id = value.get("id")
        assert message.id == (id if type(id) in (int, str) else None)


def _names_twice(data: bytes, name: str) -> bool:
    pairs: list[tuple[str, Any]] = []

    def take(found: list[tuple[str, Any]]) -> dict[str, Any]:
        pairs[:] = found  # the outermost object comes last
        return dict(found)

    json.loads(data, object_pairs_hook=take)
    return [key for key, _ in pairs].count(name) > 1


def decode_events(data: bytes) -> None:
    """Server-sent events: the same however they arrive, and what the standard says of them."""
    limit, size, text = _chosen(data)
    whole = sse.EventDecoder(limit)
    at_once = whole.feed(text)
    for width in (1, size):
        decoder = sse.EventDecoder(limit)
        found = []
        for piece in _pieces(text, width):
            found += decoder.feed(piece)
            assert decoder.held <= limit + 8192
        assert found == at_once
        assert (decoder.last_event_id, decoder.retry) == (whole.last_event_id, whole.retry)
    if len(text) < limit:
        told = [(event.data, event.event, event.id, event.retry) for event in at_once]
        assert told == list(_events(text))


def _events(text: bytes) -> Iterator[tuple[bytes, str, str | None, int | None]]:
    """WHATWG HTML, "Interpreting an event stream", word by word."""
    data: list[bytes] = []
    kind, id, retry = "", None, None
    ended = text.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")[:-1]
    for line in ended:
        if not line:
            if data:
                yield b"\n".join(data), kind or "message", id, retry
            data, kind, id, retry = [], "", None, None
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            data.append(value)
        elif name == b"event":
            kind = value.decode(errors="replace")
        elif name == b"id" and b"\0" not in value:
            id = value.decode(errors="replace")
        elif name == b"retry" and value.isdigit() and len(value) <= 15:
            retry = int(value)


def gate_frames(data: bytes) -> None:
    """WebSocket frames: what passes, what is told and the fault are the same however they arrive."""
    limit, size, text = _chosen(data)
    for masked in (True, False):
        outcomes = []
        for width in (len(text) or 1, 1, size):
            gate = FrameGate(limit, masked=masked)
            for piece in _pieces(text, width):
                gate.feed(piece)
                while gate.behind:
                    gate.feed(b"")
                assert not isinstance(gate._message, bytearray) or len(gate._message) <= limit
            passed = bytes(gate._out)
            outcomes.append((passed, gate.texts, gate.fault, gate.closing, gate.oversized, gate.weight))
        assert outcomes[1:] == outcomes[:1] * 2
        assert len(outcomes[0][0]) + sum(map(len, outcomes[0][1])) <= len(text)


_LIMITS: Final = HttpLimits(max_head=2048, max_request_line=512)


def parse_requests(data: bytes) -> None:
    """HTTP/1.1: the same requests and the same refusal however they arrive."""
    _, size, text = _chosen(data)
    at_once = _requests(text, len(text) or 1)
    assert _requests(text, 1) == at_once
    assert _requests(text, size) == at_once


def _requests(text: bytes, width: int) -> list[Any]:
    parser = RequestParser(_LIMITS)
    found: list[Any] = []
    in_body = False
    try:
        for piece in _pieces(text, width):
            parser.feed(piece)
            while True:
                if in_body:
                    body = parser.next_data()
                    if body is None:
                        break
                    in_body = body != b""
                    found[-1][-1] += body
                    continue
                request = parser.next_head()
                if request is None:
                    break
                head = request.head
                assert "host" in head.headers or request.http10
                assert not (request.length is None and "content-length" in head.headers)
                how = (request.length, request.http10, request.keep_alive, request.expects, head.websocket)
                found.append([head.method, head.path, head.query, dict(head.headers), how, b""])
                in_body = True
    except RequestRefused as refused:
        found.append((refused.status, refused.reason))
    return found


def parse_replies(data: bytes) -> None:
    """Replies of HTTP/1.1: the same however they arrive, and the same as for h11, if both find a whole one."""
    _, size, text = _chosen(data)
    at_once = _reply(text, len(text) or 1)
    assert _reply(text, 1) == at_once
    assert _reply(text, size) == at_once
    parts = portions(text)
    assert parts is None or b"".join(parts) == text
    theirs = _reply_of_h11(text)
    if at_once is not None and theirs is not None and at_once[-3]:
        assert (at_once[0], at_once[3]) == theirs


def _reply(text: bytes, width: int) -> tuple[Any, ...] | None:
    """What a client knows of a reply, and then of its end; None if it is none."""
    parser = ReplyParser()
    try:
        for piece in _pieces(text, width):
            parser.feed(piece)
    except UnreadableReply:
        return None
    body, whole = b"".join(parser.pieces), parser.complete
    assert len(body) == parser.size <= len(text)
    assert whole or not parser.keeps
    return parser.status, parser.headers, parser.cookies, body, whole, parser.keeps, parser.end()


def _reply_of_h11(text: bytes) -> tuple[int, bytes] | None:
    """The status and the body, as far as it is complete; None if h11 has objections, or misses something."""
    client = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    client.send(h11.Request(method="POST", target="/", headers=[("Host", "a")]))
    client.send(h11.EndOfMessage())
    client.receive_data(text)
    status, body = 0, b""
    try:
        while not isinstance(event := client.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += event.data
            elif not isinstance(event, h11.InformationalResponse):
                return None
    except h11.RemoteProtocolError:
        return None
    return status, body


def carry_headers(data: bytes) -> None:
    """Values in headers: every text comes back, and what is no such value is refused."""
    text = data.decode("utf-8", "replace")
    carried = encode_value(text)
    assert carried.isascii()
    assert carried.isprintable()
    assert carried == carried.strip()
    assert decode_value(carried) == text
    raw = data.decode("latin-1")
    try:
        said = decode_value(raw)
    except ValueError:
        pass
    else:
        assert decode_value(encode_value(said)) == said
        assert raw == said or encode_value(said) == raw or said.isprintable()
    headers = {"mcp-protocol-version": "v", "mcp-method": "m", "mcp-name": raw}
    wrong = check_request(headers, "m", {"name": text}, named="name", version="v")
    assert wrong is None or "\n" not in wrong


def gather_batches(data: bytes) -> None:
    """The arrays that answer arrays: each reply stands in exactly one, and nothing is held when none is awaited."""
    outbox, held = Outbox(1, 1), SessionMemory()
    waiting: list[tuple[int, BatchSink]] = []
    handed: list[int] = []
    next_id = 0
    nothing: Any = None
    for byte in data:
        kind, number = byte & 3, byte >> 2
        if kind == 0:
            ids = range(next_id, next_id + number % 5)
            early = range(1_000_000 + next_id, 1_000_000 + next_id + number % 3)
            next_id += max(len(ids), len(early), 1)
            sink = BatchSink(outbox, None, held, 1 << 30)
            waiting += [(id, sink) for id in ids]
            handed += early
            members = [RequestReceived(id, nothing, None, {}, nothing) for id in ids]
            sink.expect(BatchReceived((*members, *(AnsweredByEngine(id, "ping", b"%d" % id) for id in early))))
        elif waiting:
            id, sink = waiting.pop(number % len(waiting))
            if kind == 1:
                sink.unanswered(id)
            else:
                handed.append(id)
                sink.post(Outgoing(b"%d" % id, Kind.REPLY, id))
    for id, sink in waiting:
        sink.unanswered(id)
    messages, _ = outbox.waiting()
    told = [id for outgoing in messages for id in orjson.loads(outgoing.data)]
    assert sorted(told) == sorted(handed)
    assert held.in_arrays == 0


def match_uris(data: bytes) -> None:
    """URI templates: what is read is safe, and the guard only ever refuses."""
    template, _, uri = data.decode("utf-8", "surrogateescape").partition("\0")
    try:
        made = UriTemplate(template)
    except ValueError:
        return
    free = made.match(uri, guard=False)
    guarded = made.match(uri)
    assert guarded is None or guarded == free
    for value in (guarded or {}).values():
        for each in [value] if isinstance(value, str) else value:
            assert ".." not in each.split("/")
            assert not each.startswith("/")
            assert "\\" not in each
            assert "\0" not in each
    assert set(free or ()) <= set(made.variables)


def judge_schemas(data: bytes) -> None:
    """Schemas of a peer: refused, or bounded and of the same opinion as one that was not made harmless."""
    first, _, second = data.partition(b"\0")
    try:
        schema, value = orjson.loads(first), orjson.loads(second or b"null")
    except ValueError:
        return
    if isinstance(schema, dict):
        try:
            find_mirrors(schema)
        except ValueError as error:
            _check_line(error)
    try:
        judge = peer_validator(schema)
    except SchemaError as error:
        _check_line(error)
        return
    valid = judge.is_valid(value)
    problems = judge.problems(value)
    assert valid is (not problems)
    assert len(problems) <= 10
    assert all(len(problem) < 2000 for problem in problems)
    try:
        author = Validator(schema)
    except SchemaError:
        return
    assert author.is_valid(value) is valid


def _check_line(error: Exception) -> None:
    assert "\n" not in str(error)
    assert len(str(error)) < 1000


TARGETS: Final[dict[str, Target]] = {
    each.__name__: each
    for each in (
        decode_lines,
        parse_message,
        decode_events,
        gate_frames,
        parse_requests,
        parse_replies,
        carry_headers,
        gather_batches,
        match_uris,
        judge_schemas,
    )
}
