"""Agent tools over HTTP: paths of their own, and their messages at the endpoint of MCP, on any host.

Which message has which path is in `messages.http`. Beside these, `/schemas` has the JSON Schemas of all messages,
`/agent` is a WebSocket, and the endpoint of MCP takes every message with a `type` in a POST.

A call whose client accepts `text/event-stream` by name is answered with a stream once there is progress, and in any
case if it accepts no JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final
from urllib.parse import parse_qs

import attrs

from trimcp.agent_tools.answering import failed
from trimcp.agent_tools.bindings.exchanges import AGENT_HEADER, AgentExchange, AgentPort, is_local, refusal_error
from trimcp.agent_tools.callers import AgentCaller
from trimcp.agent_tools.messages import answers, errors, messages
from trimcp.agent_tools.messages.http import FORMS, MERGE_PATCH, HttpForm
from trimcp.agent_tools.service import AgentCall
from trimcp.channel import MessageWriter
from trimcp.errors import LocalError
from trimcp.transports.http.endpoint.accept import EVENTS, JSON, accepts, is_compressed, is_json, is_websocket_key
from trimcp.transports.http.interfaces import (
    JSON_HEADERS,
    Admitted,
    ConnectedSession,
    Handler,
    Head,
    HttpReply,
    HttpResponse,
    Upgrade,
)
from trimcp.transports.http.state.streams import EventStream
from trimcp.wire.jsonrpc import Malformed, parse_value

_REGISTERING: Final = (("POST", "/tools/register"), ("POST", "/trimcp.v1.AgentTools/RegisterTool"))
_ANY_VERSION: Final = "*"


@attrs.define(eq=False)
class AgentHttp(AgentPort):
    """Agent tools on one port. A `SecondProtocol`."""

    # Called by the application

    def find(self, head: Head) -> Callable[[Head], Any] | None:
        """Return what answers the path, if it is one of the protocol's."""
        path = head.path
        if path in ("/tools", "/contexts", "/schemas", "/agent") or path.startswith(("/tools/", "/contexts/")):
            return self._admit
        return None

    def admits_anyone(self, head: Head) -> bool:
        """Return whether a request without credentials is answered: for schemas, and for registering if allowed."""
        if head.path == "/schemas":
            return True
        registers = (head.method, head.path) in _REGISTERING
        return registers and self.run.catalog.rules.anonymous_on_loopback and is_local(head)

    def take(self, head: Head, body: bytes, value: Any) -> Handler | None:
        """Return what answers a body at the endpoint of MCP: an object with a `type` and no `jsonrpc`."""
        if type(value) is dict:
            ours = "type" in value and "jsonrpc" not in value
        else:
            ours = type(value) is Malformed and b'"type"' in body and b'"jsonrpc"' not in body
        return JsonExchange(self, head, None, None, value) if ours else None

    def refused(self, status: int, why: str, headers: tuple[tuple[str, str], ...]) -> HttpResponse:
        """Return the response to a request that the identity check refuses."""
        return failure(refusal_error(status, why), status, headers)

    def grpc_services(self) -> Mapping[str, Any]:
        """See `SecondProtocol`. Without `trimcp[grpc]` each call is answered with what is missing."""
        try:
            from trimcp.agent_tools.bindings.grpc import AgentRpc
            from trimcp.agent_tools.messages import protobuf
        except LocalError as error:
            from trimcp.transports.grpc.server import MissingService

            return {"/trimcp.v1.AgentTools/": MissingService(str(error))}
        from trimcp.transports.grpc.reflection import PATHS, Reflection

        return {protobuf.SERVICE: AgentRpc(self), **dict.fromkeys(PATHS, Reflection(*protobuf.DESCRIPTORS))}

    # Responses

    async def _admit(self, head: Head) -> Admitted:
        try:
            return self._find(head)
        except errors.AgentToolsError as error:
            return failure(error)

    def _find(self, head: Head) -> Admitted:
        path, method = head.path, head.method
        if path == "/schemas":
            return self._schemas(head)
        if path == "/agent":
            return self._upgrade(head)
        forms = forms_of(path)
        form = forms.get(method)
        if form is None:
            allowed = ", ".join(forms)
            return self._refusal(405, f"{method[:20]!r} is no method of this path", ("Allow", allowed))
        if method in ("POST", "PATCH"):
            content = head.headers.get("content-type")
            if not is_json(content.replace(MERGE_PATCH, JSON, 1) if method == "PATCH" and content else content):
                return self._refusal(415, "the body must be application/json in UTF-8")
            if is_compressed(head.headers.get("content-encoding")):
                return self._refusal(415, "the body must not be compressed", ("Accept-Encoding", "identity"))
        exchange = self._exchange(form, None, head)
        if exchange is None:
            raise self.too_much(head)
        if self.shared.judged_by_head and AGENT_HEADER not in head.headers:
            head.again = partial(self._exchange, form, self.caller(head))
        return exchange

    def _exchange(self, form: HttpForm, caller: AgentCaller | None, head: Head) -> JsonExchange | None:
        """Return the handler of an admitted request, or None if too much is under way.

        The caller is given if it is known from another request with the same head.
        """
        return JsonExchange(self, head, caller, form) if self.has_room(head) else None

    def _upgrade(self, head: Head) -> Upgrade | HttpResponse:
        """Return how to serve a request for the WebSocket, or its refusal."""
        if not head.websocket:
            return self._refusal(426, "this is a WebSocket", ("Upgrade", "websocket"))
        if not is_websocket_key(head.headers.get("sec-websocket-key")):
            raise errors.MalformedMessage("the header Sec-WebSocket-Key is no 16 bytes in base64")
        if self.shared.draining:
            raise errors.draining()
        offered = [name.strip() for name in head.headers.get("sec-websocket-protocol", "").split(",")]
        agreed = messages.SUBPROTOCOL if messages.SUBPROTOCOL in offered else None
        caller, most = self.caller(head), self.shared.service.max_message

        def opened(writer: MessageWriter) -> ConnectedSession:
            from trimcp.agent_tools.bindings.websocket import AgentStream

            connection = self.run.server.open_connected(writer, head.holding, self.shared.sessions)
            connection.receiver = AgentStream(self.run, caller, connection.session)
            return connection

        show = None if self.shared.settings.trace is None else self.shared.show
        serve = partial(self.serve, head, caller)
        return Upgrade(
            serve, agreed, most, head.principal, head.headers, parse_value, open=opened, show=show, until=head.until
        )

    def _schemas(self, head: Head) -> HttpResponse:
        if head.method not in ("GET", "HEAD"):
            return self._refusal(405, "schemas are only read", ("Allow", "GET, HEAD"))
        return HttpResponse(
            200, (("Content-Type", "application/schema+json"), ("Cache-Control", "no-cache")), messages.published()
        )

    def _refusal(self, status: int, why: str, *headers: tuple[str, str]) -> HttpResponse:
        """Return the response to a request that is none of the protocol's."""
        return failure(errors.MalformedMessage(why), status, headers)


def failure(error: errors.AgentToolsError, status: int = 0, headers: tuple[tuple[str, str], ...] = ()) -> HttpResponse:
    """Return the response that consists of an error, to what is no message or was not read.

    A `status` is that of HTTP itself, with its headers; by default they are those of the error.
    """
    more = headers if status else _headers_of(error)
    return HttpResponse(
        status or error.http_status, (*JSON_HEADERS, *more), messages.encode_message(failed(None, error))
    )


def _headers_of(error: errors.AgentToolsError) -> tuple[tuple[str, str], ...]:
    # Not where a call may be half done because its provider has gone.
    if isinstance(error, errors.TooMuch | errors.Draining):
        return (("Retry-After", str(max(1, round(error.retry_after or 1)))),)
    if error.http_status == 401:
        return (("WWW-Authenticate", "Bearer"),)
    return ()


@attrs.define(eq=False)
class JsonExchange(AgentExchange):
    """A request whose messages are JSON."""

    form: HttpForm | None  # of its path; None if its body says what it is
    value: Any = None  # that of the body, if it was parsed
    _said: Any = attrs.field(init=False, default=None)  # what a malformed message says of itself
    _takes_json: bool = attrs.field(init=False, default=True)

    @staticmethod
    def response_of(error: errors.AgentToolsError) -> HttpResponse:
        return failure(error)

    # Called by the host

    def start(self, body: bytes, reply: HttpReply) -> None:
        """Begin to answer: a call at once, anything else in a task."""
        self._reply = reply
        value: dict[str, Any] = {}
        try:
            value = self._object(body)
            message = read_request(self.form, self.head, value, self.port.run.strict)
            if isinstance(message, messages.ToolRequest):
                accept = self.head.headers.get("accept", "")
                if EVENTS in accept.lower():  # by name: `*/*` is what a client sends that does not know streams
                    self._takes_json, events = accepts(accept)
                    self.progress: bool = events
                message.progress = self.progress
            left = self.receive(message, len(body))
            if left is not None:
                self.work(left)
        except errors.AgentToolsError as error:
            if self.form is None:
                self._said = value
            elif self.form.cls is messages.ToolRequest:
                self._said = {**value, "type": messages.ToolRequest.type}
            self.fail(error)

    def _object(self, body: bytes) -> dict[str, Any]:
        """Return the body as an object; what has no body is an empty one."""
        shared, value = self.port.shared, self.value
        if value is None:
            if self.head.method in ("GET", "DELETE"):
                return {}
            value = parse_value(body, shared.settings.limits) if body else {}
        else:
            self.value = None
        if shared.tracer is not None and body:
            shared.show("<--", body)
        if type(value) is Malformed:
            raise errors.MalformedMessage(value.message)
        if type(value) is not dict:
            raise errors.MalformedMessage("the body must be a JSON object")
        return value

    # Called by the call

    def new_stream(self) -> EventStream:
        return EventStream(self.port.shared.open_streams, event="tool_progress")

    def answered(self, call: AgentCall, answer: answers.CallAnswer) -> None:
        self.count_out()
        if self._reply is None:
            return
        error, data = answer.error, answer.encode(call.request)
        status = 200 if error is None else error.http_status
        stream = self._stream if self._takes_json or status != 200 else self.become_stream()
        if stream is None:
            self._respond(status, data, () if error is None else _headers_of(error))
        else:
            self._reply = None
            stream.name_events("tool_response")
            stream.end(data)

    # Called by the task that answers

    async def event(self, message: messages.AgentMessage) -> bytes:
        if self._stream is not None:
            self._stream.name_events(message.type)
        return messages.encode_message(message)

    async def send(self, answer: messages.AgentMessage) -> None:
        version = getattr(answer, "version", None)
        headers = (("ETag", f'"{version}"'),) if isinstance(version, int) else ()
        status = 201 if isinstance(self.message, messages.ContextCreate) else 200
        self._respond(status, messages.encode_message(answer), headers)

    def fail(self, error: errors.AgentToolsError) -> None:
        """Respond with an error: that of a call is its `tool_response`. A stream that has begun only ends."""
        if self._stream is not None:
            self._reply = None
            self._stream.end()
            return
        answer = failed(self.message or self._said, error)
        self._respond(error.http_status, messages.encode_message(answer), _headers_of(error))

    def _respond(self, status: int, data: bytes, headers: tuple[tuple[str, str], ...]) -> None:
        reply, self._reply = self._reply, None
        if reply is not None:
            self.port.shared.show("-->", data)
            reply.send(HttpResponse(status, (*JSON_HEADERS, *headers, *self.head.reply_headers), data))


# From requests to messages


def read_request(form: HttpForm | None, head: Head, body: dict[str, Any], strict: bool) -> messages.AgentMessage:
    """Return the message that a head and a body's object are. Raises `MalformedMessage`."""
    if form is None:
        message = messages.read_message(body, strict=strict)
        if not message.asks or isinstance(message, messages.ContextWatch | messages.ProvideTools):
            raise errors.MalformedMessage(f"`{message.type}` is no request of this path")
        return message
    if form.body == "*":
        return messages.read_as(form.cls, body, strict=strict)
    found: dict[str, Any] = {}
    if form.named:  # the rest of the path, which may have slashes of its own
        found[form.named] = head.path[len(form.path) :].removesuffix(form.after)
    if form.query:
        try:
            said = parse_qs(head.query, max_num_fields=16)
        except ValueError:
            raise errors.MalformedMessage("the query has too many members") from None
        found.update((name, said[name][-1]) for name in form.query if name in said)
    if form.body:
        found[form.body] = body
    condition = head.headers.get("if-match", _ANY_VERSION).strip()
    if form.cls is messages.ContextUpdate and condition != _ANY_VERSION:
        digits = condition.removeprefix("W/").strip('"')
        if not digits.isascii() or not digits.isdecimal() or len(digits) > 18:
            raise errors.MalformedMessage('If-Match has the context\'s version: "3"')
        found["version"] = int(digits)
    return messages.read_as(form.cls, found, strict=strict)


def _forms(path: str, *, named: bool = False, after: str = "") -> Mapping[str, HttpForm]:
    """Return the forms of a path by method; of `named` ones it is the beginning."""
    return {form.method: form for form in FORMS if (form.path, bool(form.named), form.after) == (path, named, after)}


_PATHS: Final = {form.path: _forms(form.path) for form in FORMS if not form.named}
_ONE_TOOL: Final = _forms("/tools/", named=True)
_ONE_CONTEXT: Final = _forms("/contexts/", named=True)
_EVENTS: Final = _forms("/contexts/", named=True, after="/events")


def forms_of(path: str) -> Mapping[str, HttpForm]:
    """Return the forms of a path by method. Raises NothingHere if it has none."""
    if (forms := _PATHS.get(path)) is not None:
        return forms
    kind, _, name = path[1:].partition("/")
    if name in ("", "/events"):
        raise errors.NothingHere("there is nothing here; check the path of the URL")
    return _ONE_TOOL if kind == "tools" else _EVENTS if name.endswith("/events") else _ONE_CONTEXT
