"""Agent tools over HTTP: paths of their own, and their messages at the endpoint of MCP, on any host.

| path | method | message |
| --- | --- | --- |
| /mcp | POST | any with a `type` |
| /tools/call | POST | `tool_request` |
| /tools, /tools/NAME | GET | `list_tools` |
| /tools/register | POST | `register_tool`, its manifest |
| /tools/NAME | DELETE | `remove_tool` |
| /contexts | POST | `context_create` |
| /contexts/ID | GET, PATCH, DELETE | `context_read`, `context_update` (the merge patch), `context_destroy` |
| /contexts/ID/events | GET | `context_watch`: a stream of events |
| /schemas | GET | the JSON Schemas of all messages |
| /agent | GET | a WebSocket |

A call whose client accepts `text/event-stream` by name is answered with a stream once there is progress.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import parse_qs

import attrs
import trio

from trimcp.agent_tools.answers import CallAnswer
from trimcp.agent_tools.callers import AgentCaller
from trimcp.agent_tools.errors import (
    AgentToolsError,
    Draining,
    MalformedMessage,
    NotAllowed,
    NothingHere,
    TooLargeMessage,
    TooMuch,
    Unauthenticated,
)
from trimcp.agent_tools.messages import (
    AgentMessage,
    ContextCreate,
    ContextDestroy,
    ContextRead,
    ContextUpdate,
    ContextWatch,
    ErrorMessage,
    ListTools,
    ProvideTools,
    RegisterTool,
    RemoveTool,
    ToolRequest,
    encode_message,
    read_as,
    read_message,
    read_object,
)
from trimcp.agent_tools.service import AgentCall, AgentRun
from trimcp.channel import Kind, MessageChannel, Outgoing
from trimcp.security import security_event
from trimcp.session.scopes import log_crash
from trimcp.transports.http.accept import EVENTS, is_compressed, is_json
from trimcp.transports.http.seams import JSON_HEADERS, Admitted, Handler, Head, HttpReply, HttpResponse, Upgrade
from trimcp.transports.http.sessions import Shared
from trimcp.transports.http.streams import EventStream, StreamSink
from trimcp.wire.jsonrpc import parse_value

if TYPE_CHECKING:
    pass

log: logging.Logger = logging.getLogger("trimcp.agent_tools")

AGENT_HEADER: Final = "agent-id"
"""The header that may repeat the agent's id."""

_SUBPROTOCOL: Final = "agent-tools"
_REGISTERING: Final = (("POST", "/tools/register"), ("POST", "/trimcp.v1.AgentTools/RegisterTool"))
_PATCH: Final = "application/merge-patch+json"
_ANY_VERSION: Final = "*"

Reader: TypeAlias = Callable[[Head, bytes, bool], AgentMessage]
"""Returns the message that a head and a body are, perhaps in strict mode. Raises `MalformedMessage`."""


@attrs.define(eq=False)
class AgentHttp:
    """Agent tools on one port. A `CompanionFace`."""

    run: AgentRun
    shared: Shared
    _open: set[AgentExchange] = attrs.field(init=False, factory=set)  # requests that tasks answer

    # Called by the face

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
        rules = self.run.catalog.rules
        return rules.anonymous_on_loopback and head.loopback and (head.method, head.path) in _REGISTERING

    def take(self, head: Head, body: bytes) -> Handler | HttpResponse | None:
        """Return what answers a body at the endpoint of MCP: an object with a `type`."""
        if b'"type"' not in body:
            return None
        return AgentExchange(self, head, _read_typed)

    def refused(self, status: int, why: str, headers: tuple[tuple[str, str], ...]) -> HttpResponse:
        """Return the response to a request that the identity check refuses."""
        kinds: dict[int, type[AgentToolsError]] = {400: MalformedMessage, 401: Unauthenticated, 403: NotAllowed}
        response = self.failure(kinds.get(status, AgentToolsError)(why))
        response.status, response.headers = status, (*JSON_HEADERS, *headers)
        return response

    def grpc_services(self) -> Mapping[str, Any]:
        """Return the services of gRPC, by the beginning of their paths. Raises LocalError without `trimcp[grpc]`."""
        from trimcp.agent_tools.rpc import AgentRpc
        from trimcp.agent_tools.rpc_messages import SERVICE

        return {SERVICE: AgentRpc(self.run, self.shared, self.caller)}

    def end(self) -> None:
        """End every stream and every request that is still answered."""
        for exchange in list(self._open):
            exchange.end()

    def caller(self, head: Head) -> AgentCaller:
        """Return who sends a request. Raises `NotAllowed` if its header names another agent than its token."""
        said = head.headers.get(AGENT_HEADER)
        return self.run.caller(head.principal, head.peer.rpartition(":")[0] or None, said, loopback=head.loopback)

    # Responses

    def failure(self, error: AgentToolsError, request_id: str | None = None) -> HttpResponse:
        """Return the response that consists of an error."""
        body = encode_message(ErrorMessage(request_id=request_id, error=error.body()))
        return HttpResponse(error.http_status, (*JSON_HEADERS, *_headers_of(error)), body)

    async def _admit(self, head: Head) -> Admitted:
        try:
            return self._find(head)
        except AgentToolsError as error:
            return self.failure(error)

    def _find(self, head: Head) -> Admitted:
        path, method = head.path, head.method
        if path == "/schemas":
            return self._schemas(head)
        if path == "/agent":
            return self._upgrade(head)
        rest = path.split("/", 3)[2:]
        if path.startswith("/tools"):
            readers = _TOOL_PATHS.get(path) or (_ONE_TOOL if rest and rest[0] else {})
        elif len(rest) == 2 and rest[1] == "events":
            readers = _EVENTS
        else:
            readers = _CONTEXTS if not rest else _ONE_CONTEXT if len(rest) == 1 and rest[0] else {}
        if not readers:
            raise NothingHere("there is nothing here; check the path of the URL")
        reader = readers.get(method)
        if reader is None:
            allowed = ", ".join(readers)
            error = MalformedMessage(f"{method[:20]!r} is no method of this path")
            return attrs.evolve(self.failure(error), status=405, headers=(*JSON_HEADERS, ("Allow", allowed)))
        if method in ("POST", "PATCH"):
            content = head.headers.get("content-type")
            if not is_json(content) and not (method == "PATCH" and content == _PATCH):
                return attrs.evolve(self.failure(MalformedMessage("the body must be application/json")), status=415)
            if is_compressed(head.headers.get("content-encoding")):
                return attrs.evolve(self.failure(MalformedMessage("the body must not be compressed")), status=415)
        if self.shared.exchanges >= self.shared.settings.max_exchanges:
            security_event("flood_refused", what="exchanges", peer=head.peer, most=self.shared.settings.max_exchanges)
            raise TooMuch("too much is under way; try again later", retry_after=1)
        return AgentExchange(self, head, reader)

    def _upgrade(self, head: Head) -> Upgrade | HttpResponse:
        """Return how to serve a request for the WebSocket, or its refusal."""
        if not head.websocket:
            response = self.failure(MalformedMessage("this is a WebSocket"))
            response.status, response.headers = 426, (*response.headers, ("Upgrade", "websocket"))
            return response
        if self.shared.draining:
            raise Draining("the server is shutting down")
        offered = [name.strip() for name in head.headers.get("sec-websocket-protocol", "").split(",")]
        agreed = _SUBPROTOCOL if _SUBPROTOCOL in offered else None
        serve, most = partial(self._serve, head, self.caller(head)), self.shared.service.max_message
        return Upgrade(serve, agreed, most, head.principal, head.headers, parse_value)

    async def _serve(self, head: Head, caller: AgentCaller, channel: MessageChannel) -> None:
        from trimcp.agent_tools.websocket import serve_agent

        channel.holding = head.holding
        with trio.CancelScope(deadline=trio.current_time() + max(0.0, head.until - time.time())):
            await serve_agent(self.run, caller, channel, self.shared.sessions)

    def _schemas(self, head: Head) -> HttpResponse:
        from trimcp.agent_tools.schemas import published

        if head.method not in ("GET", "HEAD"):
            return attrs.evolve(self.failure(MalformedMessage("schemas are only read")), status=405)
        return HttpResponse(
            200, (("Content-Type", "application/schema+json"), ("Cache-Control", "no-cache")), published()
        )

    def opened(self, exchange: AgentExchange) -> None:
        self._open.add(exchange)

    def closed(self, exchange: AgentExchange) -> None:
        self._open.discard(exchange)


def _headers_of(error: AgentToolsError) -> tuple[tuple[str, str], ...]:
    if error.http_status in (429, 503):
        return (("Retry-After", str(max(1, round(error.retry_after or 1)))),)
    if error.http_status == 401:
        return (("WWW-Authenticate", "Bearer"),)
    return ()


@attrs.define(eq=False)
class AgentExchange(Handler, StreamSink):
    """One request and its response: the `Handler`, and the `Sink` of the progress of its call."""

    http: AgentHttp
    head: Head
    reader: Reader
    _reply: HttpReply | None = attrs.field(init=False, default=None)
    _stream: EventStream | None = attrs.field(init=False, default=None)
    _call: AgentCall | None = attrs.field(init=False, default=None)
    _scope: trio.CancelScope | None = attrs.field(init=False, default=None)  # of the task that answers
    _request: ToolRequest | None = attrs.field(init=False, default=None)
    _request_id: str | None = attrs.field(init=False, default=None)
    _wants_events: bool = attrs.field(init=False, default=False)

    # Called by the host

    @property
    def max_body(self) -> int:
        return self.http.shared.service.max_message

    @property
    def at_rest(self) -> bool:
        """Whether no handler of a tool is running for it."""
        return self._call is None or self._call.at_rest

    def start(self, body: bytes, reply: HttpReply) -> None:
        """Begin to answer: a call at once, anything else in a task."""
        self._reply = reply
        head, http = self.head, self.http
        try:
            message = self.reader(head, body, http.run.strict)
            self._request_id = message.request_id
            if http.shared.draining:
                raise Draining("the server is shutting down")
            caller = http.caller(head)
            if isinstance(message, ToolRequest):
                self._request = message
                context = http.run.context_now(caller, message.context_id)
                if context is not None or message.context_id is None:
                    self._begin(message, caller, context, len(body))
                    return
        except AgentToolsError as error:
            self._fail(error)
            return
        self._scope = trio.CancelScope()
        http.opened(self)
        http.run.server.nursery.start_soon(self._answer, message, caller, len(body), self._scope)

    def too_large(self, beginning: bytes) -> HttpResponse:
        most = self.max_body
        security_event("oversize", most=most, peer=self.head.peer, principal=self.head.principal)
        return self.http.failure(TooLargeMessage(f"a message may have {most} bytes"))

    def disconnected(self, slow: str | None = None) -> None:
        """Cancel what is answered: nobody reads it."""
        if self._stream is not None:
            self._stream.detach()
        self._cancel(slow or "the client closed its request", slow=slow is not None)

    def end(self) -> None:
        """End it because the port is closed."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.end()
        self._cancel("the server is shutting down")

    def _cancel(self, why: str, *, slow: bool = False) -> None:
        self._reply = None
        if self._call is not None and not self._call.over:
            self._count_out()
            self._call.disconnected(why, slow=slow)
        if self._scope is not None:
            self._scope.cancel(reason=why)

    def timed_out(self) -> None:
        """Become a stream, because nothing was sent for the time `silence`."""
        if self._call is not None and not self._call.over:
            self._become_stream()

    # Called by the call

    def post(self, outgoing: Outgoing) -> None:
        stream = self._become_stream()
        if stream is not None:
            stream.post(outgoing)

    def post_latest(self, key: Hashable, outgoing: Outgoing) -> None:
        stream = self._become_stream()
        if stream is not None:
            stream.post_latest(key, outgoing)

    def _become_stream(self) -> EventStream | None:
        if self._stream is None and self._reply is not None and self._wants_events:
            stream = self._stream = EventStream(self.http.shared.open_streams, event="tool_progress")
            stream.open(self._reply, self.head.reply_headers)
        return self._stream

    def _answered(self, call: AgentCall, answer: CallAnswer) -> None:
        shared, reply, stream = self.http.shared, self._reply, self._stream
        self._count_out()
        self._reply = None
        if reply is None:
            return
        data = answer.encode(call.request)
        shared.show("-->", data)
        error = answer.error
        if stream is not None:
            stream.event = "tool_response"
            stream.end(data)
            return
        status = 200 if error is None else error.http_status
        extra = () if error is None else _headers_of(error)
        reply.send(HttpResponse(status, (*JSON_HEADERS, *extra, *self.head.reply_headers), data))

    # Private

    def _begin(self, request: ToolRequest, caller: AgentCaller, context: Any, size: int) -> None:
        http, head = self.http, self.head
        shared = http.shared
        self._wants_events = EVENTS in head.headers.get("accept", "")
        shared.exchanges += 1
        if self._wants_events:
            shared.silent.add(self)
        try:
            call = http.run.begin(
                request,
                caller,
                context,
                self,
                self._answered,
                headers=head.headers,
                size=size,
                holding=head.holding,
                via=shared.sessions,
                progress=self._wants_events,
            )
        except AgentToolsError:
            self._count_out()
            raise
        if not call.over:
            self._call = call

    def _count_out(self) -> None:
        """Note that the call is over, or was not started."""
        shared = self.http.shared
        shared.exchanges -= 1
        shared.silent.remove(self)

    async def _answer(self, message: AgentMessage, caller: AgentCaller, size: int, scope: trio.CancelScope) -> None:
        """CallAnswer a message that may have to wait. A task of the server's run."""
        http = self.http
        try:
            with scope:
                if isinstance(message, ToolRequest):
                    assert message.context_id is not None
                    context = await http.run.context(caller, message.context_id)
                    if self._reply is not None:
                        self._begin(message, caller, context, size)
                elif isinstance(message, ContextWatch):
                    await self._watch(message, caller)
                else:
                    answer = await http.run.answer(message, caller)
                    self._send(message, answer)
        except AgentToolsError as error:
            self._fail(error)
        except Exception as error:
            log_crash(log, error, "answering %s crashed", message.type)
            self._fail(AgentToolsError("internal error"))
        finally:
            http.closed(self)

    async def _watch(self, message: ContextWatch, caller: AgentCaller) -> None:
        async with self.http.run.watch(message.context_id, caller) as events:
            reply = self._reply
            if reply is None:
                return
            stream = self._stream = EventStream(self.http.shared.open_streams)
            stream.until, stream.on_lapse = self.head.until, self.end
            stream.open(reply, self.head.reply_headers)
            async for event in events:
                await stream.room()
                stream.event = event.type
                stream.post(Outgoing(encode_message(event), Kind.NOTIFICATION))
            stream.end()

    def _send(self, asked: AgentMessage, answer: AgentMessage) -> None:
        reply, self._reply = self._reply, None
        if reply is None:
            return
        headers = (*JSON_HEADERS, *self.head.reply_headers)
        version = getattr(answer, "version", None)
        if isinstance(version, int):
            headers = (*headers, ("ETag", f'"{version}"'))
        status = 201 if isinstance(asked, ContextCreate) else 200
        data = encode_message(answer)
        self.http.shared.show("-->", data)
        reply.send(HttpResponse(status, headers, data))

    def _fail(self, error: AgentToolsError) -> None:
        """Respond with an error: that of a call is its `tool_response`."""
        reply, self._reply = self._reply, None
        if reply is None:
            return
        response = self.http.failure(error, self._request_id)
        if self._request is not None:
            response.body = CallAnswer(error=error).encode(self._request)
        response.headers = (*response.headers, *self.head.reply_headers)
        self.http.shared.show("-->", response.body)
        reply.send(response)


# From requests to messages


def _read_typed(head: Head, body: bytes, strict: bool) -> AgentMessage:
    message = read_message(read_object(body), strict=strict)
    if not message.asks or isinstance(message, ContextWatch | ProvideTools):
        raise MalformedMessage(f"`{message.type}` is no request of this path")
    return message


def _read_call(head: Head, body: bytes, strict: bool) -> AgentMessage:
    return read_as(ToolRequest, read_object(body), strict=strict)


def _read_list(head: Head, body: bytes, strict: bool) -> AgentMessage:
    query = _query(head)
    name = _tool(head) if head.path != "/tools" else query.get("name")
    return read_as(ListTools, _given({"name": name, "version": query.get("version")}))


def _read_registration(head: Head, body: bytes, strict: bool) -> AgentMessage:
    return RegisterTool(tool=read_object(body))


def _read_removal(head: Head, body: bytes, strict: bool) -> AgentMessage:
    return read_as(RemoveTool, _given({"name": _tool(head), "version": _query(head).get("version")}))


def _read_creation(head: Head, body: bytes, strict: bool) -> AgentMessage:
    return read_as(ContextCreate, read_object(body), strict=strict)


def _read_read(head: Head, body: bytes, strict: bool) -> AgentMessage:
    return read_as(ContextRead, {"context_id": _last(head)})


def _read_update(head: Head, body: bytes, strict: bool) -> AgentMessage:
    version = None
    condition = head.headers.get("if-match", _ANY_VERSION).strip()
    if condition != _ANY_VERSION:
        digits = condition.removeprefix("W/").strip('"')
        if not digits.isascii() or not digits.isdecimal() or len(digits) > 18:
            raise MalformedMessage('If-Match has the context\'s version: "3"')
        version = int(digits)
    return read_as(ContextUpdate, _given({"context_id": _last(head), "updates": read_object(body), "version": version}))


def _read_end(head: Head, body: bytes, strict: bool) -> AgentMessage:
    return read_as(ContextDestroy, _given({"context_id": _last(head), "reason": _query(head).get("reason")}))


def _read_watch(head: Head, body: bytes, strict: bool) -> AgentMessage:
    return read_as(ContextWatch, {"context_id": head.path.split("/")[2]})


def _tool(head: Head) -> str:
    return head.path.removeprefix("/tools/")  # it may have slashes of its own


def _last(head: Head) -> str:
    return head.path.rpartition("/")[2]


def _query(head: Head) -> dict[str, str]:
    try:
        return {name: values[-1] for name, values in parse_qs(head.query, max_num_fields=16).items()}
    except ValueError:
        raise MalformedMessage("the query has too many members") from None


def _given(members: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in members.items() if value is not None}


_Readers: TypeAlias = Mapping[str, Reader]

_TOOL_PATHS: Final[dict[str, _Readers]] = {
    "/tools": {"GET": _read_list},
    "/tools/call": {"POST": _read_call},
    "/tools/register": {"POST": _read_registration},
}
_ONE_TOOL: Final[_Readers] = {"GET": _read_list, "DELETE": _read_removal}
_CONTEXTS: Final[_Readers] = {"POST": _read_creation}
_ONE_CONTEXT: Final[_Readers] = {"GET": _read_read, "PATCH": _read_update, "DELETE": _read_end}
_EVENTS: Final[_Readers] = {"GET": _read_watch}
