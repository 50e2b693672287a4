"""Agent tools through gRPC: each method is one of the protocol's messages.

A request is answered as over HTTP (`exchanges`); here are its formats. The values of a call are converted once its tool
and its context are known; large ones in turns with everybody else. `Provide`, whose two directions go their own ways,
is served like a WebSocket, on the channel of MCP's tunnel.
"""

from __future__ import annotations

import base64
import math
import secrets
from collections.abc import Mapping
from functools import partial
from struct import Struct
from typing import Any, Final, TypeAlias

import attrs
import orjson
import trio

from trimcp.agent_tools.answering import Found, Later
from trimcp.agent_tools.bindings.exchanges import AgentExchange, AgentPort, refusal_error
from trimcp.agent_tools.callers import AgentCaller
from trimcp.agent_tools.catalog.entries import shown
from trimcp.agent_tools.contexts.actor import ContextActor
from trimcp.agent_tools.messages import answers, errors, messages, protobuf, steps
from trimcp.agent_tools.service import AgentCall
from trimcp.channel import Outgoing
from trimcp.framing import grpc
from trimcp.transports.grpc import server
from trimcp.transports.http.interfaces import Admitted, Head, HttpReply, HttpResponse
from trimcp.transports.http.state.streams import EventStream
from trimcp.wire.jsonrpc import encode

_SOON: Final = 1_024  # bytes of a request from which on nothing of it is converted for somebody who is refused
_LONGEST_ERROR: Final = 4 * 1024  # characters: the trailers that clients accept are bounded

_Method: TypeAlias = tuple[type[messages.AgentMessage], Any, Any]

_METHODS: Final[Mapping[str, _Method]] = {
    **{cls.method: (cls, *protobuf.METHODS[cls.method]) for cls in messages.MESSAGES.values() if cls.method},
    "CallStream": (messages.ToolRequest, *protobuf.METHODS["CallStream"]),
}
"""The message that each method is, with the classes of its request and its answer."""

_NUMBER: Final = Struct("<d").pack
_SHORT: Final = Struct(">BLBB").pack  # what stands before a progress: the frame's prefix, a tag and a length
_loads: Final = orjson.loads


def error_trailers(error: errors.AgentToolsError) -> tuple[tuple[str, str], ...]:
    """Return the trailers of a call that ends with an error: its status, and its JSON text, if need be without data."""
    body = error.body()
    text = base64.b64encode(encode(body)).rstrip(b"=")
    if len(text) > _LONGEST_ERROR:
        text = base64.b64encode(encode({**body, "data": None})).rstrip(b"=")
    status = grpc.GrpcStatus[error.grpc_status]
    return (*grpc.status_trailers(status, error.message), (protobuf.ERROR_TRAILER, text.decode("ascii")))


def error_response(error: errors.AgentToolsError, *headers: tuple[str, str]) -> HttpResponse:
    """Return the answer to a call that consists of an error."""
    return HttpResponse(200, (*grpc.GRPC_HEADERS, *headers, *error_trailers(error)))


@attrs.frozen(eq=False)
class AgentRpc:
    """The service `trimcp.v1.AgentTools` of one port."""

    port: AgentPort

    def admit(self, routes: server.GrpcRoutes, head: Head) -> Admitted:
        """Admit a call by its head: a `GrpcService`."""
        name = head.path[len(protobuf.SERVICE) :]
        method, port = _METHODS.get(name), self.port
        if method is None and name != "Provide":
            return server.status_response(grpc.GrpcStatus.UNIMPLEMENTED, "there is no such method")
        try:
            caller = port.caller(head)
        except errors.AgentToolsError as error:
            return error_response(error)
        if method is None:
            return self._provide(routes, head, caller)
        if not port.has_room(head):
            return error_response(port.too_much(head))
        if port.shared.judged_by_head:
            head.again = partial(_again, port, method, caller)
        return RpcExchange(port, head, caller, method)

    def refused(self, refused: HttpResponse) -> HttpResponse:
        """Return the answer to a call that would be refused with this response over HTTP: a `GrpcService`."""
        return error_response(
            refusal_error(refused.status, server.refusal_text(refused)), *server.kept_headers(refused)
        )

    def _provide(self, routes: server.GrpcRoutes, head: Head, caller: AgentCaller) -> Admitted:
        """Return how to serve a provider, or the refusal."""
        found = routes.upgrade(head)
        if isinstance(found, HttpResponse):
            return self.refused(found)
        found = attrs.evolve(found, serve=partial(self.port.serve, head, caller))
        read = partial(protobuf.tagged_in, protobuf.PB.FromProvider)
        write = partial(protobuf.tagged_frame, protobuf.PB.ToProvider, both=True)
        return routes.tunnel(head, found, read=read, write=write)


def _again(port: AgentPort, method: _Method, caller: AgentCaller, head: Head) -> RpcExchange | None:
    return RpcExchange(port, head, caller, method) if port.has_room(head) and not server.has_bad_timeout(head) else None


@attrs.define(eq=False)
class RpcExchange(AgentExchange):
    """A request that is a message of protobuf."""

    transport = "grpc"

    caller: AgentCaller
    _method: _Method
    _said: bytes = attrs.field(init=False, default=b"")  # the `request_id`, as a field
    _asked: Any = attrs.field(init=False, default=None)  # the request, while its values are not converted
    _both: bool = attrs.field(init=False, default=True)  # whether it wants JSON values in both forms

    # Called by the host

    @property
    def max_body(self) -> int:
        return self.port.shared.service.max_message + grpc.PREFIX

    def start(self, body: bytes, reply: HttpReply) -> None:
        """Begin to answer: a call at once, anything else in a task."""
        self._reply, head = reply, self.head
        headers = head.headers
        payload = grpc.whole_message(body, self.port.shared.service.max_message, headers.get("grpc-encoding"))
        if isinstance(payload, grpc.GrpcFault):
            self._reply = None
            reply.send(server.fault_response(payload))
            return
        cls, asked, _ = self._method
        try:
            message = self._asked = protobuf.decode(asked, payload)
            timeout = server.timeout_of(head) if "grpc-timeout" in headers else math.inf
            if cls is messages.ToolRequest:
                self._receive_call(message, len(payload), timeout)
            else:
                self._both = protobuf.wants_both(message)
                self.deadline: float = trio.current_time() + timeout
                self.work(partial(self._convert_and_receive, len(payload)))
        except errors.AgentToolsError as error:
            self.fail(error)

    async def _convert_and_receive(self, size: int) -> None:
        message, self._asked = self._asked, None
        count = protobuf.MemberCount(self.port.shared.settings.limits)
        members = await steps.in_turns(protobuf.members_of(message, count))
        left = self.receive(messages.read_as(self._method[0], members), size)
        if left is not None:
            await left()

    @staticmethod
    def response_of(error: errors.AgentToolsError) -> HttpResponse:
        return error_response(error)

    def _receive_call(self, message: Any, size: int, timeout: float) -> None:
        """Begin a call. Its values are converted only if there is such a tool, in such a context, for this caller."""
        members = {"tool_name": "", **protobuf.plain_members(message)}
        if "request_id" not in members:
            members["request_id"] = f"rpc-{secrets.token_hex(8)}"
        if timeout < math.inf:
            members["timeout"] = min(members.get("timeout", math.inf), max(timeout, 0.001))
        request = messages.read_as(messages.ToolRequest, members)
        self.progress: bool = self._method[2] is protobuf.PB.CallEvent
        request.progress = self.progress
        self._both = not protobuf.in_text(message)
        if size >= _SOON:  # smaller ones cost less than to ask twice
            _, entry = self.port.run.catalog.find(request.tool_name, request.version, self.caller)
            if not shown(entry, self.caller.principal):
                self._asked = None  # the session refuses the call
        left = self.receive(request, size)
        if left is not None:
            self.work(left)

    def call(self, request: messages.ToolRequest, size: int, context: ContextActor | None) -> Found:
        message = self._asked
        if message is not None:
            if len(message.arguments) >= protobuf.SOON:
                return Later(request, partial(self._convert_and_call, request, size, context))
            self._asked = None
            if (text := message.arguments_json) and not message.input_responses_json:  # nearly always
                request.arguments = _object(messages.read_value(text, self.port.shared.settings.limits), "arguments")
            else:
                size += steps.at_once(self._convert(message, request))
        return super().call(request, size, context)

    async def _convert_and_call(self, request: messages.ToolRequest, size: int, context: ContextActor | None) -> Found:
        message, self._asked = self._asked, None
        return self.call(request, size + await steps.in_turns(self._convert(message, request)), context)

    def refused(self, response: HttpResponse) -> HttpResponse:
        return error_response(refusal_error(response.status, server.refusal_text(response)))

    def end(self) -> None:
        """End what a task answers, because the port is closed or the caller's token has expired."""
        if isinstance(self._stream, MessageStream):
            self._stream.trailers = grpc.status_trailers(grpc.GrpcStatus.UNAVAILABLE, errors.ENDS)
        super().end()

    # From messages to values

    def _convert(self, message: Any, request: messages.ToolRequest) -> steps.Steps[int]:
        """Set a call's values; return the memory that they take beside their bytes. Raises MalformedMessage."""
        if message.arguments_json:
            message.ClearField("arguments")  # where both are present, the text counts
        count = protobuf.MemberCount(self.port.shared.settings.limits)
        members = yield from protobuf.members_of(message, count)
        for name in ("arguments", "input_responses"):
            if name in members:
                setattr(request, name, _object(members[name], name))
        return 0 if message.arguments_json else protobuf.MEMBER * count.members  # a text is weighed by its bytes

    # Answers

    def new_stream(self) -> EventStream:
        return MessageStream(self.port.shared.open_streams)

    def translate(self, data: bytes, request_id: str) -> bytes:
        """Return a progress notification as the frame of a `CallEvent`."""
        params = _loads(data)["params"]
        said = self._said
        if not said:
            said = self._said = grpc.text_field(1, request_id.encode())
        progress = b"%b\x11%b" % (said, _NUMBER(params["progress"]))
        if "total" in params:
            progress += b"\x19" + _NUMBER(params["total"])
        if "message" in params:
            progress += grpc.text_field(4, params["message"].encode())
        size = len(progress)
        if size < 0x80:  # nearly always
            return _SHORT(0, size + 2, 0x0A, size) + progress
        return grpc.message_frame(grpc.text_field(1, progress))

    def answered(self, call: AgentCall, answer: answers.CallAnswer) -> None:
        self.count_out()
        if self._reply is None:
            return
        error, request = answer.error, call.request
        if error is None:
            result, status = answer.result or b"null", answer.status(extended=True)
            if self._both and len(result) >= protobuf.SOON:
                self.work(partial(self._answer_both, request, status, result))
                return
            value = steps.at_once(protobuf.write_any(_loads(result), protobuf.MemberCount())) if self._both else None
            self._respond(protobuf.response_bytes(request.request_id, status, result, value))
        elif isinstance(error, errors.ToolFailed):
            members = {"request_id": request.request_id, "status": answer.status(extended=True), "error": error.body()}
            response = steps.at_once(protobuf.fill(protobuf.PB.ToolResponse(), members, both=self._both))
            self._respond(response.SerializeToString())
        else:
            self.fail(error)

    async def _answer_both(self, request: messages.ToolRequest, status: str, result: bytes) -> None:
        """Respond with a large result in both forms."""
        value = await steps.in_turns(protobuf.write_any(_loads(result), protobuf.MemberCount()))
        if self._reply is not None:
            self._respond(protobuf.response_bytes(request.request_id, status, result, value))

    async def event(self, message: messages.AgentMessage) -> bytes:
        members = messages.as_json(message)
        return await steps.in_turns(protobuf.framed_in(protobuf.PB.ContextEvent, members, both=self._both))

    async def send(self, answer: messages.AgentMessage) -> None:
        message = await steps.in_turns(protobuf.fill(self._method[2](), messages.as_json(answer), both=self._both))
        self._respond(message.SerializeToString())

    def _respond(self, payload: bytes) -> None:
        """Respond with the last, or only, message."""
        reply, self._reply = self._reply, None
        if self.progress:
            payload = grpc.text_field(2, payload)
        if self._stream is not None:
            self._stream.end(grpc.message_frame(payload))
        elif reply is not None:
            reply.send(HttpResponse(200, grpc.GRPC_HEADERS, grpc.message_frame(payload), grpc.OK_TRAILERS))

    def fail(self, error: errors.AgentToolsError) -> None:
        """Respond with an error, as the status of the call."""
        reply, self._reply = self._reply, None
        if isinstance(self._stream, MessageStream):
            self._stream.trailers = error_trailers(error)
            self._stream.end()
        elif reply is not None:
            reply.send(error_response(error))


def _object(value: Any, name: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise errors.MalformedMessage(f"tool_request: `{name}` must be an object")
    return value


class MessageStream(EventStream):
    """Messages of gRPC in place of events: what is posted are frames."""

    trailers: tuple[tuple[str, str], ...] = grpc.OK_TRAILERS  # with which the response ends

    def open(self, reply: HttpReply, headers: tuple[tuple[str, str], ...], first: bytes = b"") -> None:
        self.reply: HttpReply | None = reply
        if self.until < math.inf:
            self.open_streams.add(self)
        reply.start(HttpResponse(200, grpc.GRPC_HEADERS, first))
        self.writable()

    def keep_alive(self) -> None:
        return  # the connection is pinged

    def lapse(self) -> None:
        self.trailers = grpc.status_trailers(grpc.GrpcStatus.UNAUTHENTICATED, "the access token has expired")
        self._leave()
        if self.on_lapse is not None:
            self.on_lapse()

    def take(self, data: bytes, *, reply: bool = False) -> bytes:
        return data

    def post(self, outgoing: Outgoing) -> None:
        reply = self.reply
        if reply is not None and not self.ended:
            reply.write(outgoing.data)

    def _leave(self, data: bytes = b"") -> None:
        reply = self.reply
        if reply is not None:
            self.detach()
            reply.finish(data, self.trailers)
