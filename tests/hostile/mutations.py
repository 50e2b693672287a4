"""Valid input with a little wrong in it, by the thousand and from a seed: messages, requests and frames."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Final

import h2.config
import h2.connection
import h2.settings

from tests.peers.http1 import http_request, post
from tests.peers.messages import initialize, modern_request, notification, request
from tests.peers.websockets import CONTINUATION, FIN, PING, PONG, TEXT, close, frame, handshake, message
from trimcp.framing.grpc import PREFIX, json_rpc_header
from trimcp.transports.grpc.channel import EXCHANGE

__all__ = [
    "changed",
    "from_a_server",
    "of_agent_frames",
    "of_agent_requests",
    "of_exchanges",
    "of_frames",
    "of_grpc",
    "of_http2",
    "of_messages",
    "of_requests",
]

_EVENTS: Final = "Accept: text/event-stream"

_MESSAGES: Final = [
    modern_request(1, "tools/call", name="echo", arguments={"text": "hi"}),
    modern_request(2, "tools/call", name="crash", arguments={}),
    modern_request(3, "tools/call", name="stream", arguments={"count": 3}, _meta={"progressToken": 1}),
    modern_request(4, "server/discover"),
    modern_request(5, "prompts/get", name="review", arguments={"path": "p"}),
    modern_request(6, "subscriptions/listen", notifications={"toolsListChanged": True}),
    modern_request(7, "resources/read", uri="note://x"),
    request(8, "tools/call", name="echo", arguments={"text": "x"}),
    request(9, "tools/call", name="stream", arguments={"count": 3}, _meta={"progressToken": 1}),
    request(10, "resources/subscribe", uri="note://x"),
    request(11, "completion/complete", ref={"type": "ref/prompt", "name": "review"}, argument={"name": "path"}),
    initialize("2025-06-18"),
    notification("notifications/cancelled", requestId=1, reason="x"),
    b"[" + request(12, "ping") + b"]",
]

_AGENT_MESSAGES: Final = [
    b'{"type":"tool_request","tool_name":"echo","arguments":{"text":"hi"},"request_id":"1","context_id":"a"}',
    b'{"type":"tool_request","tool_name":"crash","arguments":{},"request_id":"2","statuses":"extended"}',
    b'{"type":"tool_request","tool_name":"stream","arguments":{"count":3},"request_id":"3","progress":true}',
    b'{"type":"tool_request","tool_name":"echo","version":"1","request_id":"4","timeout":0.5,"context_id":"b"}',
    b'{"type":"tool_cancel","request_id":"1","context_id":"a","reason":"x"}',
    b'{"type":"context_update","context_id":"a","updates":{"k":{"l":[1,null]},"m":null},"version":1}',
    b'{"type":"context_create","context_id":"c","state":{"k":1},"ttl":1.5,"request_id":"5"}',
    b'{"type":"context_read","context_id":"a"}',
    b'{"type":"context_destroy","context_id":"a","reason":"x"}',
    b'{"type":"list_tools","name":"echo"}',
    b'{"type":"register_tool","tool":{"name":"weather","parameters":{"type":"object","properties":{"city":{"type":'
    b'"string"}},"required":["city"]},"version":"1"}}',
    b'{"type":"remove_tool","name":"weather","version":"1"}',
]

_STREAMED: Final = [
    *_AGENT_MESSAGES,
    b'{"type":"context_watch","context_id":"a","request_id":"6"}',
    b'{"type":"context_unwatch","context_id":"a"}',
    b'{"type":"provide_tools","request_id":"7","tools":[{"name":"far","parameters":{"type":"object"}}]}',
    b'{"type":"tool_request","tool_name":"anonymous.far","arguments":{},"request_id":"8","timeout":0.2}',
    b'{"type":"tool_response","request_id":"call-1","status":"success","result":{"x":1}}',
    b'{"type":"tool_progress","request_id":"call-1","progress":1,"total":3}',
]

_WORDS: Final = [
    *(b"\r\n", b"\n", b"\r\n\r\n", b"\0", b"\xff", b":", b" ", b"%", b"%zz", b"..", b"?", b";", b",", b'"', b"\\"),
    *(b"null", b"[]", b"{}", b"1e999", b'"\\ud800"', b"-1", b"99999999999999999999", b"*/*", b"=?base64?x?="),
    *(b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Host: x\r\n", b"0\r\n\r\n", b"HTTP/1.0"),
    *(b"Expect: 100-continue\r\n", b"Upgrade: websocket\r\nConnection: upgrade\r\n", b"Content-Encoding: gzip\r\n"),
    *(b"\x81\x80\0\0\0\0", b"\x89\x80\0\0\0\0", b"\x88\x80\0\0\0\0", b"\x81\xff\0\0\0\1\0\0\0\0\0\0\0\0"),
]


def changed(rng: random.Random, data: bytes, within: int | None = None) -> bytes:
    """The data with one to three changes, in its first `within` bytes more often than elsewhere."""
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        end = len(changed) if within is None or rng.random() < 0.4 else min(within, len(changed))
        place, kind = rng.randrange(end + 1), rng.randrange(4)
        if kind == 0:
            changed[place : place + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del changed[place : place + rng.randrange(1, 12)]
        elif kind == 2:
            changed[place:place] = rng.choice(_WORDS)
        else:
            changed[place:place] = changed[rng.randrange(len(changed) + 1) :][:30]
    return bytes(changed)


def of_requests(rng: random.Random, session: str) -> Callable[[], bytes]:
    """Return what makes a wrong HTTP request for each right one: in its head more often than in its body."""
    mine = f"Mcp-Session-Id: {session}"
    chunked = post(b"{}").replace(b"Content-Length: 2", b"Transfer-Encoding: chunked").removesuffix(b"{}")
    right = [
        *(post(text) for text in _MESSAGES),
        *(post(text, session=session) for text in _MESSAGES),
        chunked + b"2;x=y\r\n{}\r\n0\r\nA: b\r\n\r\n",
        http_request("GET", "/mcp", _EVENTS, mine),
        http_request("GET", "/mcp", _EVENTS, mine, "Last-Event-ID: 1-1"),
        http_request("GET", "/sse", _EVENTS),
        handshake(),
        http_request("GET", "/healthz"),
        http_request("POST", "/messages?session_id=abc", "Content-Type: application/json", body=b"{}"),
        http_request("OPTIONS", "/mcp", "Origin: http://localhost", "Access-Control-Request-Method: POST"),
        http_request("DELETE", "/mcp", "Mcp-Session-Id: abc"),
    ]

    def make() -> bytes:
        data = rng.choice(right)
        return changed(rng, data, data.find(b"\r\n\r\n") + 4)

    return make


def of_agent_requests(rng: random.Random) -> Callable[[], bytes]:
    """Return what makes a wrong HTTP request of the agent-tools protocol for each right one."""
    json_body, events = "Content-Type: application/json", "Accept: text/event-stream"
    patch = "Content-Type: application/merge-patch+json"
    manifest = b'{"name":"weather","description":"x","parameters":{"type":"object"},"version":"2"}'
    right = [
        *(http_request("POST", "/mcp", json_body, body=text) for text in _AGENT_MESSAGES),
        *(http_request("POST", "/tools/call", json_body, body=text) for text in _AGENT_MESSAGES[:4]),
        *(http_request("POST", "/tools/call", json_body, events, body=text) for text in _AGENT_MESSAGES[:4]),
        http_request("POST", "/tools/register", json_body, body=manifest),
        http_request("GET", "/tools"),
        http_request("GET", "/tools/echo?version=1"),
        http_request("DELETE", "/tools/weather?version=1"),
        http_request("POST", "/contexts", json_body, body=b'{"context_id":"a","state":{"k":1},"ttl":1}'),
        http_request("GET", "/contexts/a"),
        http_request("PATCH", "/contexts/a", patch, 'If-Match: "1"', body=b'{"k":{"l":null}}'),
        http_request("DELETE", "/contexts/a?reason=x"),
        http_request("GET", "/schemas"),
        handshake(path="/agent"),
    ]

    def make() -> bytes:
        data = rng.choice(right)
        return changed(rng, data, len(data) if rng.random() < 0.5 else data.find(b"\r\n\r\n") + 4)

    return make


def of_agent_frames(rng: random.Random) -> Callable[[], bytes]:
    """Return what makes wrong WebSocket messages of the agent-tools protocol, a few of a conversation at a time."""

    def make() -> bytes:
        texts = [rng.choice(_STREAMED) for _ in range(rng.randrange(1, 6))]
        said = [message(text if rng.random() < 0.3 else changed(rng, text)) for text in texts]
        if rng.random() < 0.3:
            said.append(close(1000))
        joined = b"".join(said)
        return joined if rng.random() < 0.7 else changed(rng, joined, 600)

    return make


def of_messages(rng: random.Random) -> Callable[[], bytes]:
    """Return what makes wrong messages out of right ones."""
    return lambda: changed(rng, rng.choice(_MESSAGES))


def of_frames(rng: random.Random) -> Callable[[], bytes]:
    """Return what makes wrong WebSocket frames: some of a conversation, cut, repeated, interleaved."""

    def make() -> bytes:
        said = [message(initialize("2025-11-25")), message(notification("notifications/initialized"))]
        for _ in range(rng.randrange(1, 8)):
            kind, text = rng.randrange(8), rng.choice(_MESSAGES)
            if kind < 4:
                said.append(message(text))
            elif kind == 4:
                cut = rng.randrange(len(text))
                said += [frame(TEXT, text[:cut]), frame(FIN | PING, b"x"), frame(FIN | CONTINUATION, text[cut:])]
            elif kind == 5:
                said.append(frame(FIN | rng.choice([PING, PONG]), b"p" * rng.randrange(126)))
            elif kind == 6:
                said.append(message(changed(rng, text)))
            else:
                said.append(message(b"x" * rng.randrange(70_000)))
        if rng.random() < 0.3:
            said.append(close(1000))
        return changed(rng, b"".join(said), 600)

    return make


def of_http2(rng: random.Random) -> Callable[[], bytes]:
    """Return what makes wrong HTTP/2 connections: frames lost, repeated, out of order, broken."""

    def make() -> bytes:
        frames = list(_http2(rng))
        place = rng.randrange(1, len(frames))
        kind = rng.randrange(4)
        if kind == 0:
            frames.insert(rng.randrange(1, len(frames)), frames[place])
        elif kind == 1:
            del frames[place]
        else:
            frames[place] = changed(rng, frames[place], 9)
        return b"".join(frames)

    return make


def _http2(rng: random.Random) -> Iterator[bytes]:
    config = h2.config.H2Configuration(True, None, validate_outbound_headers=False, normalize_outbound_headers=False)
    connection = h2.connection.H2Connection(config)
    connection.initiate_connection()
    yield connection.data_to_send()
    for _ in range(rng.randrange(1, 5)):
        stream, text = connection.get_next_available_stream_id(), rng.choice(_MESSAGES)
        method = rng.choice([b"POST", b"POST", b"GET", b"CONNECT", b"OPTIONS"])
        path = rng.choice([b"/mcp", b"/mcp", b"/sse", b"/healthz", b"/ws", b"/messages?session_id=x"])
        head = [(b":method", method), (b":scheme", b"http"), (b":authority", b"localhost"), (b":path", path)]
        head += [(b"content-type", b"application/json"), (b"mcp-protocol-version", b"2026-07-28")]
        head += [(b":protocol", b"websocket"), (b"sec-websocket-version", b"13")] if method == b"CONNECT" else []
        connection.send_headers(stream, head, end_stream=method in (b"GET", b"OPTIONS"))
        yield connection.data_to_send()
        if method not in (b"GET", b"OPTIONS"):
            for part in (text[:50], text[50:]):
                connection.send_data(stream, part)
                yield connection.data_to_send()
            if rng.random() < 0.8:
                connection.end_stream(stream)
        if rng.random() < 0.3:
            connection.reset_stream(stream)
        if rng.random() < 0.2:
            connection.ping(b"12345678")
        if rng.random() < 0.2:
            connection.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: rng.randrange(100_000)})
        yield connection.data_to_send()


def of_grpc(rng: random.Random) -> Callable[[], bytes]:
    """Return what makes calls of agent tools through gRPC with something wrong, see `_of_calls`."""
    messages = import_module("trimcp.agent_tools.proto.agent_tools_pb2")
    call = messages.ToolRequest(
        tool_name="echo", arguments_json=b'{"text":"hi"}', request_id="1", context_id="a", timeout=1
    )
    crash = messages.ToolRequest(tool_name="crash", request_id="2", statuses="extended")
    stream = messages.ToolRequest(tool_name="stream", arguments_json=b'{"count":3}', request_id="3")
    offered = messages.ProvideTools(request_id="7", tools=[messages.Manifest(name="far")])
    right = [
        (b"Call", call),
        (b"Call", crash),
        (b"CallStream", stream),
        (b"ListTools", messages.ListToolsRequest()),
        (b"CreateContext", messages.ContextCreate(context_id="a", ttl=1)),
        (b"ReadContext", messages.ContextRead(context_id="a")),
        (b"UpdateContext", messages.ContextUpdate(context_id="a", updates_json=b'{"k":{"l":null}}')),
        (b"WatchContext", messages.ContextWatch(context_id="a")),
        (b"DestroyContext", messages.ContextDestroy(context_id="a")),
        (b"Provide", messages.FromProvider(provide_tools=offered)),
    ]
    calls = [(b"/trimcp.v1.AgentTools/" + method, message.SerializeToString()) for method, message in right]
    return _of_calls(rng, calls)


def of_exchanges(rng: random.Random) -> Callable[[], bytes]:
    """Return what makes calls that carry MCP through gRPC with something wrong, see `_of_calls`."""
    return _of_calls(rng, [(EXCHANGE.encode(), json_rpc_header(len(text))[PREFIX:] + text) for text in _MESSAGES])


def _of_calls(rng: random.Random, right: list[tuple[bytes, bytes]]) -> Callable[[], bytes]:
    """Return what makes calls of gRPC with something wrong: in a message, in its frame, or in the HTTP/2 around it.

    Args:
        right: the path of each call, and the message that it begins with.
    """

    def make() -> bytes:
        config = h2.config.H2Configuration(
            True, None, validate_outbound_headers=False, normalize_outbound_headers=False
        )
        connection = h2.connection.H2Connection(config)
        connection.initiate_connection()
        frames = [connection.data_to_send()]
        for _ in range(rng.randrange(1, 4)):
            number, (path, payload) = connection.get_next_available_stream_id(), rng.choice(right)
            head = [(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"localhost")]
            head += [(b":path", path), (b"te", b"trailers")]
            head += [
                (b"content-type", b"application/grpc"),
                (b"grpc-timeout", rng.choice([b"1S", b"200m", b"x", b"-1S"])),
            ]
            connection.send_headers(number, head)
            frames.append(connection.data_to_send())
            if rng.random() < 0.6:
                payload = changed(rng, payload)
            data = b"\0" + len(payload).to_bytes(4, "big") + payload
            if rng.random() < 0.3:
                data = changed(rng, data, 5)
            connection.send_data(number, data, end_stream=rng.random() < 0.8)
            frames.append(connection.data_to_send())
        if rng.random() < 0.2:
            place = rng.randrange(1, len(frames))
            frames[place] = changed(rng, frames[place], 9)
        return b"".join(frames)

    return make


def from_a_server(token: Any, count: int) -> Iterator[bytes]:
    """Wrong messages of a server to its client, as many as are wanted."""
    rng = random.Random(count)
    seeds: list[dict[str, Any]] = [
        {"id": "q", "method": "roots/list"},
        {"id": "p", "method": "ping"},
        {"id": 10**6, "result": {"content": []}},
        {"id": 10**6, "error": {"code": -32600, "message": "x", "data": {}}},
        {"method": "notifications/progress", "params": {"progressToken": token, "progress": 1}},
        {"method": "notifications/message", "params": {"level": "info", "data": {"a": [1]}}},
        {"method": "notifications/tools/list_changed"},
        {"method": "notifications/cancelled", "params": {"requestId": "q"}},
    ]
    for _ in range(count):
        text = json.dumps({"jsonrpc": "2.0", **rng.choice(seeds)}).encode()
        yield changed(rng, text).replace(b"\n", b" ").replace(b"\r", b" ")
