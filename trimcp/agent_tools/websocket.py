"""Agent tools over a WebSocket, `/agent`: one JSON message per text message, both ways.

The connection is a session like any other, so its limits, its pauses, its outbox and its end are those of MCP.
`AgentChannel` stands between the two: it carries out what is read, and hands the session calls only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
import trio

from trimcp.agent_tools.answers import CallAnswer
from trimcp.agent_tools.callers import AgentCaller
from trimcp.agent_tools.errors import AgentToolsError, MalformedMessage, TooMuch
from trimcp.agent_tools.messages import (
    AgentMessage,
    ContextDestroy,
    ContextUnwatch,
    ContextWatch,
    ErrorMessage,
    ProvideTools,
    RegisterTool,
    ToolCancel,
    ToolProgress,
    ToolRequest,
    ToolResponse,
    ToolsRegistered,
    encode_message,
    read_message,
)
from trimcp.agent_tools.providers import StreamProvider
from trimcp.agent_tools.service import AgentCall, AgentRun
from trimcp.channel import Incoming, Kind, MessageChannel, Outgoing
from trimcp.session.drive import drive
from trimcp.session.scopes import guarded
from trimcp.session.session import Session
from trimcp.transports.wrapped import WrappedChannel
from trimcp.wire.jsonrpc import Malformed

if TYPE_CHECKING:
    pass

SUBPROTOCOL: Final = "agent-tools"

_MAX_WATCHES: Final = 1_000  # contexts that one connection watches
_MAX_TASKS: Final = 64  # messages of one connection that are carried out beside others

_LONG: Final = (ContextDestroy, RegisterTool, ProvideTools)
"""Messages that may take long, so that those behind them do not wait."""


async def serve_agent(run: AgentRun, caller: AgentCaller, channel: MessageChannel, via: object = None) -> None:
    """Serve one connection until the peer closes it; then close the channel.

    Args:
        run: the agent tools.
        caller: who is connected.
        channel: its messages are JSON values, or `Malformed`.
        via: the part of the program whose `drain` ends the connection.
    """
    session = run.server.session()
    session.engine.modern.required = True
    session.via = via
    wrapped = AgentChannel(channel, run, caller, session)
    try:
        await drive(session, wrapped)
    finally:
        wrapped.lost("the connection has ended")


@attrs.define(eq=False)
class AgentChannel(WrappedChannel):
    """Carries out the messages of one connection, and delivers its calls to the session."""

    run: AgentRun
    caller: AgentCaller
    session: Session
    _calls: set[AgentCall] = attrs.field(init=False, factory=set)
    _watches: dict[str, trio.CancelScope] = attrs.field(init=False, factory=dict)
    _tasks: int = attrs.field(init=False, default=0)
    _provider: StreamProvider | None = attrs.field(init=False, default=None)

    # The channel

    async def receive(self) -> Sequence[Incoming]:
        """Carry out the next messages. The session gets its calls at once, so nothing is returned."""
        try:
            batch = await self.channel.receive()
        except (trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError):
            self.lost(self.channel.close_reason() or "the connection was lost")
            raise
        for incoming in batch:
            await self._take(incoming)
        return ()

    def lost(self, why: str) -> None:
        """Note that the peer is gone: the tools that it provided vanish, and calls of them fail now."""
        provider, self._provider = self._provider, None
        if provider is not None:
            provider.lose(why)
        for scope in list(self._watches.values()):
            scope.cancel(reason=why)

    # Messages

    async def _take(self, incoming: Incoming) -> None:
        value: Any = incoming.message
        request_id: str | None = None
        try:
            if type(value) is Malformed:
                raise MalformedMessage(value.message)
            said = value.get("request_id") if type(value) is dict else None
            request_id = said if type(said) is str else None
            message = read_message(value, strict=self.run.strict)
            await self._carry_out(message, incoming)
        except AgentToolsError as error:
            self._fail(value, request_id, error)

    async def _carry_out(self, message: AgentMessage, incoming: Incoming) -> None:
        if isinstance(message, ToolRequest):
            context = self.run.context_now(self.caller, message.context_id)
            if context is None and message.context_id is not None:
                context = await self.run.context(self.caller, message.context_id)
            self._begin(message, context, incoming)
        elif isinstance(message, ToolCancel):
            call = self.run.call_of(self.caller, message.context_id, message.request_id, self.session)
            if call is not None:
                call.cancel(message.reason or "cancelled by the agent")
        elif isinstance(message, ToolResponse | ToolProgress):
            if self._provider is not None:
                self._provider.take(message)
        elif isinstance(message, ContextWatch):
            self._watch(message)
        elif isinstance(message, ContextUnwatch):
            scope = self._watches.pop(message.context_id, None)  # so that the next message may watch it again
            if scope is not None:
                scope.cancel(reason="the agent watches no longer")
        elif not message.asks:
            raise MalformedMessage(f"`{message.type}` is sent by services only")
        elif isinstance(message, _LONG) and self._tasks < _MAX_TASKS:
            self._tasks += 1
            self.session.background.start_soon(guarded, self._answer_beside, (message,))
        else:
            await self._answer(message)

    def _begin(self, request: ToolRequest, context: Any, incoming: Incoming) -> None:
        call = self.run.begin(
            request,
            self.caller,
            context,
            self.session.sink,
            self._answered,
            session=self.session,
            headers=incoming.headers,
            size=incoming.size,
            progress=request.progress is True,
            transport="websocket",
        )
        if not call.over:
            self._calls.add(call)

    def _answered(self, call: AgentCall, answer: CallAnswer) -> None:
        self._calls.discard(call)
        self._post(answer.encode(call.request), Kind.REPLY)

    async def _answer_beside(self, message: AgentMessage) -> None:
        try:
            await self._answer(message)
        finally:
            self._tasks -= 1

    async def _answer(self, message: AgentMessage) -> None:
        try:
            if isinstance(message, ProvideTools):
                answer: AgentMessage = await self._provide(message)
                answer.request_id = message.request_id
            else:
                answer = await self.run.answer(message, self.caller)
        except AgentToolsError as error:
            answer = ErrorMessage(request_id=message.request_id, error=error.body())
        self._post(encode_message(answer), Kind.REPLY)

    async def _provide(self, message: ProvideTools) -> ToolsRegistered:
        if self._provider is None:
            self._provider = StreamProvider(self.run.catalog, self.caller, self)
        return await self._provider.offer(message.tools)

    # The way down to the provider

    @property
    def full(self) -> bool:
        return self.session.sink.full

    async def room(self) -> None:
        await self.session.sink.room()

    def post(self, message: AgentMessage) -> None:
        self._post(encode_message(message), Kind.NOTIFICATION)

    # Watching

    def _watch(self, message: ContextWatch) -> None:
        if message.context_id in self._watches:
            raise MalformedMessage("this connection watches the context already")
        if len(self._watches) >= _MAX_WATCHES:
            raise TooMuch(f"a connection watches at most {_MAX_WATCHES} contexts")
        scope = self._watches[message.context_id] = trio.CancelScope()
        self.session.background.start_soon(guarded, self._send_events, (message, scope))

    async def _send_events(self, message: ContextWatch, scope: trio.CancelScope) -> None:
        sink = self.session.sink
        try:
            with scope:
                async with self.run.watch(message.context_id, self.caller) as events:
                    async for event in events:
                        event.request_id = message.request_id
                        if sink.full:
                            await sink.room()
                        self._post(encode_message(event), Kind.NOTIFICATION)
        except AgentToolsError as error:
            self._fail(None, message.request_id, error)
        finally:
            if self._watches.get(message.context_id) is scope:
                del self._watches[message.context_id]

    def _fail(self, value: Any, request_id: str | None, error: AgentToolsError) -> None:
        """CallAnswer with an error: a call that names itself gets its `tool_response`."""
        if type(value) is dict and value.get("type") == ToolRequest.type and request_id is not None:
            extended = value.get("statuses") == "extended"
            status = error.extended_status if extended else "error"
            answer: AgentMessage = ToolResponse(request_id=request_id[:256], status=status, error=error.body())
        else:
            answer = ErrorMessage(request_id=request_id and request_id[:256], error=error.body())
        self._post(encode_message(answer), Kind.REPLY)

    def _post(self, data: bytes, kind: Kind) -> None:
        self.session.sink.post(Outgoing(data, kind))
