"""One request of an agent and its response, over HTTP or gRPC: a call begins at once, anything else in a task.

What the messages are, and how they are read and written, is what differs: `http.JsonExchange`, `grpc.RpcExchange`.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import attrs
import trio

from trimcp.agent_tools.answering import Found, Later, message_of
from trimcp.agent_tools.callers import AgentCaller
from trimcp.agent_tools.contexts.actor import ContextActor
from trimcp.agent_tools.messages import errors, messages
from trimcp.agent_tools.service import AgentBinding, AgentCall, AgentRun
from trimcp.budget import MemoryCharge, owner_of
from trimcp.channel import Kind, Link, MessageChannel, Outgoing
from trimcp.security import security_event
from trimcp.session.push import Pushed
from trimcp.session.session import Session
from trimcp.support.addresses import is_loopback_address
from trimcp.support.nurseries import server_ends
from trimcp.transports.http.interfaces import Handler, Head, HttpReply, HttpResponse, token_expired
from trimcp.transports.http.state.sessions import Shared
from trimcp.transports.http.state.streams import EventStream, StreamSink
from trimcp.transports.trace import traced

AGENT_HEADER: Final = "agent-id"
"""The header that may repeat the agent's id."""

_PROXIED: Final = frozenset(("forwarded", "x-forwarded-for", "x-real-ip", "via"))
"""Headers of a request that came through a proxy, so that its client may be anywhere."""
_IDLE: Final = 52 * 1024
"""Bytes of memory that a connection with tasks of its own takes, approximately, while nothing is said over it."""


@attrs.define(eq=False)
class AgentPort:
    """What the requests of one port share."""

    run: AgentRun
    shared: Shared
    open: set[AgentExchange] = attrs.field(init=False, factory=set)  # requests that tasks answer

    def has_room(self, head: Head) -> bool:
        """Return whether another request may begin."""
        shared = self.shared
        if shared.exchanges < shared.settings.max_exchanges:
            return True
        # A call that gives way to this caller makes room for its request too, unless it came another way.
        self.run.calls.make_room(owner_of(head.principal, head.peer))
        return shared.exchanges < shared.settings.max_exchanges

    def too_much(self, head: Head) -> errors.TooMuch:
        """Note that a request was refused because there is no room, and return the error."""
        security_event("flood_refused", what="exchanges", peer=head.peer, most=self.shared.settings.max_exchanges)
        return errors.too_much()

    def caller(self, head: Head) -> AgentCaller:
        """Return who sends a request. Raises `NotAllowed` if its header names another agent than its token."""
        said = head.headers.get(AGENT_HEADER)
        return self.run.caller(head.principal, head.address or None, said, loopback=is_local(head))

    async def serve(self, head: Head, caller: AgentCaller, channel: MessageChannel) -> None:
        """Serve a connection whose two directions go their own ways, until it ends or its caller's token expires."""
        from trimcp.agent_tools.bindings.websocket import AgentStream

        channel.holding, channel.link, write = head.holding, head.link, self.shared.settings.trace
        channel = channel if write is None else traced(channel, write)
        idle = MemoryCharge(head.holding)
        idle.set(_IDLE)
        try:
            with trio.CancelScope(deadline=trio.current_time() + max(0.0, head.until - time.time())) as scope:
                await self.run.server.serve(channel, self.shared.sessions, partial(AgentStream, self.run, caller))
        finally:
            idle.set(0)
        if scope.cancelled_caught:
            token_expired(head.principal)

    def end(self) -> None:
        """End every stream and every request that is still answered."""
        for exchange in list(self.open):
            exchange.end()


def is_local(head: Head) -> bool:
    """Return whether a request was sent from this machine, as far as its head and its connection tell."""
    here = head.peer == "unix" or is_loopback_address(head.address) is True
    return here and head.loopback and _PROXIED.isdisjoint(head.headers)


def refusal_error(status: int, why: str) -> errors.AgentToolsError:
    """Return the error for what is refused with this HTTP status before anybody looks at its message."""
    return errors.ERRORS_BY_HTTP_STATUS.get(status, errors.AgentToolsError)(why)


@attrs.define(eq=False)
class AgentExchange(Handler, StreamSink, AgentBinding):
    """One request and its response: the `Handler`, and the `Sink` of the progress of its call."""

    transport = "http"

    port: AgentPort  # that it came to
    head: Head  # of the request
    caller: AgentCaller | None  # who sends it, if that is known already
    progress: bool = attrs.field(init=False, default=False)  # whether the progress of its call is sent
    deadline: float = attrs.field(init=False, default=math.inf)  # when its caller's time is over, on Trio's clock
    message: messages.AgentMessage | None = attrs.field(init=False, default=None)  # what was asked, once it was read
    _reply: HttpReply | None = attrs.field(init=False, default=None)
    _stream: EventStream | None = attrs.field(init=False, default=None)
    _call: AgentCall | None = attrs.field(init=False, default=None)  # while it is under way
    _scope: trio.CancelScope | None = attrs.field(init=False, default=None)  # of the task that answers

    @property
    def link(self) -> Link:
        return self.head.link

    @property
    def out(self) -> AgentExchange:
        return self

    def open_session(self) -> tuple[Session, Pushed]:
        own = self.port.run.server.open_for_one(self.head.holding, self.port.shared.sessions)
        return own.session, own

    # What differs

    @abstractmethod
    def new_stream(self) -> EventStream:
        """Return the stream that the response becomes."""

    @abstractmethod
    async def event(self, message: messages.AgentMessage) -> bytes:
        """Return what is sent of an event of a watched context."""

    @abstractmethod
    async def send(self, answer: messages.AgentMessage) -> None:
        """Respond with the answer to what is no call."""

    @staticmethod
    @abstractmethod
    def response_of(error: errors.AgentToolsError) -> HttpResponse:
        """Return the whole response that an error is."""

    @abstractmethod
    def fail(self, error: errors.AgentToolsError) -> None:
        """Respond with an error."""

    # Called by the host

    @property
    def max_body(self) -> int:
        return self.port.shared.service.max_message

    @property
    def at_rest(self) -> bool:
        """Whether no handler of a tool is running for it."""
        return self._call is None or self._call.at_rest

    def too_large(self, beginning: bytes) -> HttpResponse:
        most = self.port.shared.service.max_message
        security_event("oversize", most=most, peer=self.head.peer, principal=self.head.principal)
        return self.response_of(errors.TooLargeMessage(f"a message may have {most} bytes"))

    def disconnected(self, slow: str | None = None) -> None:
        """Cancel what is answered: nobody reads it."""
        if self._stream is not None:
            self._stream.detach()
        self._cancel(slow or "the client closed its request", slow=slow is not None)

    def end(self) -> None:
        """End what a task answers, because the port is closed or the caller's token has expired."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.end()
        else:
            self.fail(errors.draining())
        self._cancel(errors.ENDS)

    def _cancel(self, why: str, *, slow: bool = False) -> None:
        self._reply = None
        call = self._call
        if call is not None:
            self.count_out()
            call.disconnected(why, slow=slow, ending=server_ends())
        if self._scope is not None:
            self._scope.cancel(reason=why)

    def timed_out(self) -> None:
        """Become a stream, because nothing was sent for the time `silence`."""
        if self._call is not None:
            self.become_stream()

    # Called by the call

    def post(self, outgoing: Outgoing) -> None:
        stream = self._stream or self.become_stream()
        if stream is not None:
            stream.post(outgoing)

    def post_latest(self, key: Any, outgoing: Outgoing) -> None:
        stream = self.become_stream()
        if stream is not None:
            stream.post_latest(key, outgoing)

    def become_stream(self) -> EventStream | None:
        """Return the stream that the response is from now on; None if it cannot be one."""
        if self._stream is None and self._reply is not None and self.progress:
            stream = self._stream = self.new_stream()
            stream.open(self._reply, self.head.reply_headers)
        return self._stream

    # From a message to its answer

    def receive(self, message: messages.AgentMessage, size: int) -> Callable[[], Awaitable[None]] | None:
        """Carry a message out as far as possible now, and return what is left to do in a task; None if it is a call."""
        port, self.message = self.port, message
        if port.shared.draining:
            raise errors.draining(started=False)
        caller = self.caller = self.caller or port.caller(self.head)
        found = port.run.receive(message, caller, self, size)
        if found is None:
            return None

        async def finish() -> None:
            answer = await found.answer() if isinstance(found, Later) else found
            if answer is not None:
                await self.send(answer)

        return finish

    def work(self, function: Callable[[], Awaitable[None]]) -> None:
        """Do what is left in a task of the server's run, which is cancelled with the request."""
        self._scope = scope = trio.CancelScope(deadline=self.deadline)
        self.port.open.add(self)
        self.port.shared.exchanges += 1
        self.port.run.server.nursery.start_soon(self._work, function, scope)

    async def _work(self, function: Callable[[], Awaitable[None]], scope: trio.CancelScope) -> None:
        try:
            with scope:
                await function()
            if scope.cancelled_caught and trio.current_time() >= self.deadline:
                self.fail(errors.DeadlinePassed("the time of the call is over"))
        except Exception as error:  # a handler's, or ours: this exchange's answer, and nobody else's
            self.fail(error if isinstance(error, errors.AgentToolsError) else errors.crashed(error, self.message))
        finally:
            self.port.open.discard(self)
            self.port.shared.exchanges -= 1

    def call(self, request: messages.ToolRequest, size: int, context: ContextActor | None) -> Found:
        """Start a call, unless its client has left. Raises AgentToolsError if it was not started."""
        if self._reply is None:
            return None
        caller, port = self.caller, self.port
        assert caller is not None
        port.shared.exchanges += 1
        if self.progress:
            port.shared.silent.add(self)
        try:
            call = port.run.start_call(request, caller, context, self, self.head.headers, size)
        except errors.AgentToolsError:
            self.count_out()
            raise
        if not call.over:
            self._call = call
        return None

    def count_out(self) -> None:
        """Note that the call is over, or was not started. Leaves no cycle of references."""
        self._call, shared = None, self.port.shared
        shared.exchanges -= 1
        if self.progress:
            shared.silent.remove(self)

    def watch(self, message: messages.ContextWatch, size: int, context: ContextActor) -> Found:
        return Later(message, partial(self._watch, context))

    async def _watch(self, context: ContextActor) -> None:
        async with context.watch() as events:
            reply = self._reply
            if reply is None:
                return
            stream = self._stream = self.new_stream()
            stream.until, stream.on_lapse = self.head.until, self.end
            stream.open(reply, self.head.reply_headers)
            async for event in events:
                await stream.room()
                stream.post(Outgoing(await self.event(message_of(event)), Kind.NOTIFICATION))
            stream.end()
