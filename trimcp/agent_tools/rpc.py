"""Agent tools through gRPC and the Connect protocol: each method is one of the protocol's messages.

connectrpc has the formats: gRPC, Connect, JSON, deadlines. Where it does not fit, this module goes round it: a caller
that leaves is noticed here, because on Trio connectrpc looks for that only between two messages; and `Provide`, whose
two directions go their own ways, is served like a WebSocket, on the channel of MCP's tunnel.
"""

from __future__ import annotations

import base64
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

import attrs
import orjson
import trio

from trimcp.agent_tools.answers import CallAnswer
from trimcp.agent_tools.callers import AgentCaller
from trimcp.agent_tools.errors import (
    AgentToolsError,
    Draining,
    MalformedMessage,
    RequestCancelled,
    ToolFailed,
    TooMuch,
)
from trimcp.agent_tools.messages import (
    AgentMessage,
    ContextCreate,
    ContextDestroy,
    ContextDestroyed,
    ContextRead,
    ContextState,
    ContextUpdate,
    ListTools,
    RegisterTool,
    RemoveTool,
    ToolRequest,
    as_json,
    read_as,
)
from trimcp.agent_tools.rpc_messages import (
    ERROR_TRAILER,
    PB,
    SERVICE,
    fill,
    members_of,
    request_members,
    response_of,
    wants_both,
)
from trimcp.agent_tools.service import AgentCall, AgentRun, crashed
from trimcp.budget import Amount
from trimcp.channel import MessageChannel, Outgoing, Sink
from trimcp.errors import LocalError
from trimcp.framing.grpc import message_frame
from trimcp.security import security_event
from trimcp.session.scopes import cancellation_text
from trimcp.transports.descriptors import PIECE
from trimcp.transports.grpc.server import GrpcApp, GrpcFace
from trimcp.transports.http.asgi.request import AsgiEvent, Receive, Scope, Send
from trimcp.transports.http.seams import Head, Upgrade, stalled
from trimcp.transports.http.sessions import Shared
from trimcp.transports.http.settings import HttpLimits
from trimcp.wire.codes import INVALID_REQUEST
from trimcp.wire.jsonrpc import Malformed, encode

try:
    from connectrpc.code import Code
    from connectrpc.compat import google_protobuf_codecs
    from connectrpc.errors import ConnectError
    from connectrpc.method import IdempotencyLevel, MethodInfo, StreamType
    from connectrpc.server import ConnectASGIApplication, Endpoint
    from google.protobuf.message import DecodeError
except ImportError as _error:
    raise LocalError("agent tools through gRPC need more packages: pip install 'trimcp[grpc]'") from _error

log: logging.Logger = logging.getLogger("trimcp.agent_tools")

_PROVIDE: Final = f"{SERVICE}Provide"
_FULL: Final = 64 * 1024  # bytes of progress that wait for the reader
_COPIES: Final = 2  # of an answer while it is sent: the message, and what it is as bytes
_LEFT: Final = "the caller has left"

_head: ContextVar[Head] = ContextVar("_head")


_UNARY: Final[Mapping[str, tuple[type[AgentMessage], str, str]]] = {
    "ListTools": (ListTools, "ListToolsRequest", "ToolList"),
    "RegisterTool": (RegisterTool, "RegisterToolRequest", "ToolsRegistered"),
    "RemoveTool": (RemoveTool, "RemoveToolRequest", "ToolRemoved"),
    "CreateContext": (ContextCreate, "ContextCreate", "ContextState"),
    "ReadContext": (ContextRead, "ContextRead", "ContextState"),
    "UpdateContext": (ContextUpdate, "ContextUpdate", "ContextUpdate"),
    "DestroyContext": (ContextDestroy, "ContextDestroy", "ContextDestroyed"),
}
"""Methods that are one message and its answer, with their classes."""

_EVENTS: Final[Mapping[type[AgentMessage], str]] = {
    ContextState: "state",
    ContextUpdate: "update",
    ContextDestroyed: "destroyed",
}


class _Application(ConnectASGIApplication[Any]):
    @property
    def path(self) -> str:
        return SERVICE.rstrip("/")


@attrs.define(eq=False)
class AgentRpc:
    """The service `trimcp.v1.AgentTools` of one port: a `GrpcService`."""

    run: AgentRun
    shared: Shared
    _caller: Callable[[Head], AgentCaller]
    _app: _Application = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._app = _Application(
            service=self,
            endpoints=lambda service: _endpoints(self),
            read_max_bytes=self.shared.service.max_message,
            compressions=(),
            codecs=google_protobuf_codecs(),
        )

    async def __call__(
        self, app: GrpcApp, face: GrpcFace, head: Head, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if head.path == _PROVIDE:
            await self._provide(app, face, head, scope, receive, send)
            return
        exchange = _RpcExchange(self._app, head, app.limits, scope, receive, send)
        token = _head.set(head)
        try:
            await exchange.run()
        finally:
            _head.reset(token)
            face.done(head, exchange.status, exchange.sent)

    # Calls

    def _begin(self, message: Any, context: Any, out: Sink, done: Callable[[AgentCall, CallAnswer], object]) -> Any:
        """Return what starts a call once its context is known."""
        members = request_members(message)
        members.setdefault("request_id", f"rpc-{secrets.token_hex(8)}")
        left = context.timeout_ms
        if left is not None:
            members["timeout"] = min(members.get("timeout", math.inf), max(left / 1000, 0.001))
        request = read_as(ToolRequest, members)
        if self.shared.draining:
            raise Draining("the server is shutting down")
        if self.shared.exchanges >= self.shared.settings.max_exchanges:
            security_event("flood_refused", what="exchanges", most=self.shared.settings.max_exchanges)
            raise TooMuch("too much is under way; try again later", retry_after=1)
        head = _head.get()
        caller = self._caller(head)
        begin = partial(
            self.run.begin,
            request,
            caller,
            out=out,
            on_answer=done,
            headers=head.headers,
            size=message.ByteSize(),
            holding=head.holding,
            via=self.shared.sessions,
            transport="grpc",
        )
        return request, caller, begin

    async def _started(self, request: ToolRequest, caller: AgentCaller, begin: Any, *, progress: bool) -> AgentCall:
        context = self.run.context_now(caller, request.context_id)
        if context is None and request.context_id is not None:
            context = await self.run.context(caller, request.context_id)
        call: AgentCall = begin(context=context, progress=progress)
        return call

    async def call(self, message: Any, context: Any) -> Any:
        """Answer `Call`."""
        answers = _Answers()
        with _errors(context):
            request, caller, begin = self._begin(message, context, answers, answers.answered)
            self.shared.exchanges += 1
            try:
                call = await self._started(request, caller, begin, progress=False)
                try:
                    answer = await answers.answer()
                except trio.Cancelled as cancelled:
                    call.disconnected(cancellation_text(cancelled))
                    raise
            finally:
                self.shared.exchanges -= 1
            return _response(request, answer, wants_both(message))

    async def call_stream(self, message: Any, context: Any) -> AsyncIterator[Any]:
        """Answer `CallStream`."""
        answers = _Answers()
        with _errors(context):
            request, caller, begin = self._begin(message, context, answers, answers.answered)
            self.shared.exchanges += 1
            call: AgentCall | None = None
            try:
                call = await self._started(request, caller, begin, progress=True)
                while (data := await answers.progress()) is not None:
                    yield PB.CallEvent(progress=fill(PB.ToolProgress(), orjson.loads(data), both=True))
                answer = await answers.answer()
                yield PB.CallEvent(response=_response(request, answer, wants_both(message)))
            finally:
                self.shared.exchanges -= 1
                if call is not None and not call.over:
                    call.disconnected(_LEFT)

    # Everything else

    async def answer(self, cls: type[AgentMessage], answer: str, message: Any, context: Any) -> Any:
        """Answer a method that is one message."""
        with _errors(context):
            asked = read_as(cls, members_of(message))
            if self.shared.draining:
                raise Draining("the server is shutting down")
            found = await self.run.answer(asked, self._caller(_head.get()))
            return fill(getattr(PB, answer)(), as_json(found), both=wants_both(message))

    async def watch(self, message: Any, context: Any) -> AsyncIterator[Any]:
        """Answer `WatchContext`."""
        with _errors(context):
            head = _head.get()
            async with self.run.watch(message.context_id, self._caller(head)) as events:
                async for event in events:
                    if time.time() >= head.until:
                        raise RequestCancelled("the access token has expired")
                    field = _EVENTS[type(event)]
                    found = PB.ContextEvent()
                    getattr(found, field).SetInParent()
                    fill(getattr(found, field), as_json(event), both=True)
                    yield found

    async def _provide(
        self, app: GrpcApp, face: GrpcFace, head: Head, scope: Scope, receive: Receive, send: Send
    ) -> None:
        from trimcp.agent_tools.websocket import serve_agent

        async def serve(channel: MessageChannel) -> None:
            channel.holding = head.holding
            with trio.CancelScope(deadline=trio.current_time() + max(0.0, head.until - time.time())):
                await serve_agent(self.run, self._caller(head), channel, self.shared.sessions)

        found = face.upgrade(head)
        if isinstance(found, Upgrade):
            found = attrs.evolve(found, serve=serve, read=_from_provider)
        await app.serve_stream(face, head, scope, receive, send, found, _to_provider)


@attrs.define(eq=False)
class _RpcExchange:
    """One request under connectrpc, with what that leaves out on Trio.

    A caller that leaves, or a server that is cancelled, cancels it at once. connectrpc then still sends the status, and
    shields that for a second; nobody reads it, so it is not waited for.

    Attributes:
        status, sent: of the response: its HTTP status, and the bytes of its body.
    """

    _app: _Application
    _head: Head
    _limits: HttpLimits
    _scope: Scope
    _receive: Receive
    _send: Send
    status: int = attrs.field(init=False, default=0)
    sent: int = attrs.field(init=False, default=0)
    _gone: bool = attrs.field(init=False, default=False)
    _sending: trio.CancelScope | None = attrs.field(init=False, default=None)
    _running: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    _done: trio.Event = attrs.field(init=False, factory=trio.Event)
    _whole: bool = attrs.field(init=False, default=False)  # everything was received
    _taken: int = attrs.field(init=False, default=0)
    _amount: Amount = attrs.field(init=False, factory=Amount)
    _answering: bool = attrs.field(init=False, default=False)  # a large answer is being sent
    _leaving: AsgiEvent | None = attrs.field(init=False, default=None)  # what the pump is to send
    _pumping: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    _taken_over: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    _due: float = attrs.field(init=False)  # when it has to be

    def __attrs_post_init__(self) -> None:
        self._due = trio.current_time() + self._limits.body_timeout

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run)
            nursery.start_soon(self._pump)
            try:
                await self._done.wait()
            except trio.Cancelled:
                self._leave()
                raise
            nursery.cancel_scope.cancel(reason="everything is answered")

    async def _run(self) -> None:
        try:
            with self._running:
                await self._app(self._scope, self._received, self._passed)
        except ConnectError as error:  # nobody is left to read it
            log.debug("a call ended with %s", error)
        finally:
            self._amount.set(0)
            self._done.set()

    def _leave(self) -> None:
        self._gone = True
        if self._sending is not None:
            self._sending.cancel(reason=_LEFT)

    async def _received(self) -> AsgiEvent:
        """Receive for connectrpc, which bounds a message, but neither its time nor what all of them take together."""
        event: AsgiEvent | None = None
        with trio.move_on_at(math.inf if self._whole else self._due):
            event = await self._receive()
        if event is None:
            raise ConnectError(Code.DEADLINE_EXCEEDED, "the message took too long")
        if event["type"] == "http.disconnect":
            self._leave()
            self._running.cancel(reason=_LEFT)
            return event
        size = len(event.get("body", b""))
        self._due += size / self._limits.body_rate
        self._taken += size
        self._whole = not event.get("more_body", False)
        holding = self._head.holding
        if holding is not None:
            self._amount.holding = holding
            self._amount.set(0 if self._whole else self._taken)
            if not self._whole and not holding.fits(0):
                holding.refuse("bodies")
                raise ConnectError(Code.UNAVAILABLE, "too much is being received; try again later")
        return event

    async def _passed(self, event: AsgiEvent) -> None:
        """Send for connectrpc, in pieces, to a caller that reads."""
        self.status = event.get("status", self.status)
        body = event.get("body", b"")
        if len(body) <= PIECE:
            await self._pass_on(event)
            return
        holding = self._head.holding
        if holding is not None:
            holding.holder, self._amount.holding = self, holding
            self._amount.set(_COPIES * len(body))
        self._answering = True
        try:
            for start in range(0, len(body) - PIECE, PIECE):
                piece = body[start : start + PIECE]
                await self._pass_on({"type": "http.response.body", "body": piece, "more_body": True})
                if self._gone:
                    return
            await self._pass_on({**event, "body": body[(len(body) - 1) // PIECE * PIECE :]})
        finally:
            self._answering = False
            self._amount.set(0)

    # For the budget

    @property
    def at_rest(self) -> bool:
        return self._answering

    def give_way(self, why: str) -> None:
        self._leave()
        self._running.cancel(reason=why)

    async def _pass_on(self, event: AsgiEvent) -> None:
        if self._gone:
            return
        patience = self._limits.stall_timeout
        with trio.move_on_after(patience) as self._sending:
            while self._leaving is not None:  # one that was given up is still being sent
                await self._taken_over.park()
            self._leaving = event
            self._pumping.unpark_all()
            while self._leaving is event:
                await self._taken_over.park()
        sending, self._sending = self._sending, None
        self.sent += len(event.get("body", b""))
        if sending.cancelled_caught and not self._gone:
            self._leave()
            self._running.cancel(reason=stalled(self._head.peer, patience, len(event.get("body", b""))))

    async def _pump(self) -> None:
        """Pass events on. Servers shield this from cancellation: who waits for it can be cancelled, and lets go."""
        try:
            while True:
                while self._leaving is None:
                    await self._pumping.park()
                await self._send(self._leaving)
                self._leaving = None
                self._taken_over.unpark_all()
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            self._leave()  # some servers raise this when the caller is gone
            self._running.cancel(reason=_LEFT)


@attrs.define(eq=False)
class _Answers(Sink):
    """Takes the progress and the answer of one call, for the task that sends them."""

    _answer: CallAnswer | None = attrs.field(init=False, default=None)
    _waiting: deque[tuple[Hashable, bytes]] = attrs.field(init=False, factory=deque)
    _size: int = attrs.field(init=False, default=0)
    _news: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    _room: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)

    # Called by the call

    def answered(self, call: AgentCall, answer: CallAnswer) -> None:
        self._answer = answer
        self._news.unpark_all()
        self._room.unpark_all()

    @property
    def full(self) -> bool:
        return self._size >= _FULL and self._answer is None

    async def room(self) -> None:
        while self.full:
            await self._room.park()

    def post(self, outgoing: Outgoing) -> None:
        self._add(None, outgoing.data)

    def post_latest(self, key: Hashable, outgoing: Outgoing) -> None:
        for place, (other, data) in enumerate(self._waiting):
            if other == key:
                self._waiting[place] = (key, outgoing.data)
                self._size += len(outgoing.data) - len(data)
                return
        self._add(key, outgoing.data)

    def settle_latest(self, key: Hashable, *, keep: bool) -> None:
        for place, (other, data) in enumerate(self._waiting):
            if other == key:
                if keep:
                    self._waiting[place] = (None, data)
                else:
                    del self._waiting[place]
                    self._size -= len(data)
                return

    def _add(self, key: Hashable, data: bytes) -> None:
        self._waiting.append((key, data))
        self._size += len(data)
        self._news.unpark_all()

    # Called by the task

    async def progress(self) -> bytes | None:
        """Return the next progress message; None once only the answer is left."""
        while not self._waiting:
            if self._answer is not None:
                return None
            await self._news.park()
        _, data = self._waiting.popleft()
        self._size -= len(data)
        if not self.full:
            self._room.unpark_all()
        return data

    async def answer(self) -> CallAnswer:
        """Return the answer."""
        while self._answer is None:
            await self._news.park()
        return self._answer


def _response(request: ToolRequest, answer: CallAnswer, both: bool) -> Any:
    """Return the answer to a call. Raises its error, unless that is the tool's own."""
    status = answer.status(extended=True)
    if answer.error is None:
        return response_of(request.request_id, status, answer.result, both=both)
    if not isinstance(answer.error, ToolFailed):
        raise answer.error
    members = {"request_id": request.request_id, "status": status, "error": answer.error.body()}
    return fill(PB.ToolResponse(), members, both=both)


class _errors:  # noqa: N801  # a context manager, which raises less often than a generator would cost
    """Turn errors of the protocol raised in the block into those of connectrpc, with their JSON text in a trailer."""

    __slots__ = ("_context",)

    def __init__(self, context: Any) -> None:
        self._context = context

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None or isinstance(error, ConnectError) or not isinstance(error, Exception):
            return
        if not isinstance(error, AgentToolsError):
            error = crashed(error, {"type": self._context.method.name})
        text = base64.b64encode(encode(error.body())).rstrip(b"=").decode("ascii")
        self._context.response_trailers[ERROR_TRAILER] = text
        raise ConnectError(_CODES[error.grpc_status], error.message) from None


_CODES: Final = {code.name: code for code in Code} | {"CANCELLED": Code.CANCELED}


def _endpoints(service: AgentRpc) -> dict[str, Any]:
    """Return what answers each path; `Provide` is not among them."""
    found = {
        f"{SERVICE}Call": Endpoint.unary(method=_method("Call", "ToolRequest", "ToolResponse"), function=service.call),
        f"{SERVICE}CallStream": Endpoint.server_stream(
            method=_method("CallStream", "ToolRequest", "CallEvent", StreamType.SERVER_STREAM),
            function=service.call_stream,
        ),
        f"{SERVICE}WatchContext": Endpoint.server_stream(
            method=_method("WatchContext", "ContextWatch", "ContextEvent", StreamType.SERVER_STREAM),
            function=service.watch,
        ),
    }
    for name, (cls, asked, answer) in _UNARY.items():
        function = partial(service.answer, cls, answer)
        found[SERVICE + name] = Endpoint.unary(method=_method(name, asked, answer), function=function)
    return found


def _method(name: str, asked: str, answer: str, kind: StreamType = StreamType.UNARY) -> MethodInfo[Any, Any]:
    return MethodInfo(
        name=name,
        service_name=SERVICE.strip("/"),
        input=getattr(PB, asked),
        output=getattr(PB, answer),
        idempotency_level=IdempotencyLevel.UNKNOWN,
        stream_type=kind,
    )


# A provider's stream


def _from_provider(payload: bytes) -> Any:
    """Return the JSON message that a `FromProvider` is, or what is wrong with it."""
    try:
        message = PB.FromProvider.FromString(payload)
        name = message.WhichOneof("message")
        if name is None:
            return Malformed(INVALID_REQUEST, "an empty message", None, "shape")
        return {"type": name, **members_of(getattr(message, name))}
    except MalformedMessage as error:
        return Malformed(INVALID_REQUEST, error.message, None, "shape")
    except DecodeError:
        return Malformed(INVALID_REQUEST, "no message of protobuf", None, "shape")


def _to_provider(text: bytes) -> bytes:
    """Return the frame of the `ToProvider` that a JSON message is."""
    members = orjson.loads(text)
    name = "refused" if members["type"] == "error" else members["type"]
    message = PB.ToProvider()
    getattr(message, name).SetInParent()
    fill(getattr(message, name), members, both=True)
    return message_frame(message.SerializeToString())
