"""Agent tools over a WebSocket, `/agent`: one JSON message per text message, both ways.

The connection is a session like any other, so its limits, its pauses, its outbox and its end are those of MCP.
`AgentStream` receives in its place: it carries out what is read, and hands the session calls only.

Messages are carried out in the order of their arrival, most of them at once. One that has to wait has a task, and
reading pauses until it has ended. Three kinds keep the others waiting no longer than they must: updates that a store
has yet to keep, which are written together; ending a context; and registering tools where somebody has to approve them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import attrs
import trio

from trimcp.agent_tools.answering import Later, failed, message_of
from trimcp.agent_tools.callers import AgentCaller
from trimcp.agent_tools.catalog.providers import StreamProvider
from trimcp.agent_tools.contexts.actor import ContextActor
from trimcp.agent_tools.messages import answers, errors, messages
from trimcp.agent_tools.service import AgentBinding, AgentCall, AgentRun
from trimcp.agent_tools.watching import WatchChannel
from trimcp.budget import MemoryCharge
from trimcp.channel import Incoming, Kind, Outgoing, Sink
from trimcp.errors import ConnectionLost
from trimcp.session.agent_context import ContextEvent
from trimcp.session.queues import EACH, SMALL, weight
from trimcp.session.scopes import guarded
from trimcp.session.session import Session
from trimcp.support.cleaning import log_crash
from trimcp.wire.jsonrpc import Malformed

log: logging.Logger = logging.getLogger("trimcp.agent_tools")

_MAX_WATCHES: Final = 1_000
_MAX_KEPT: Final = 64  # late watches that keep the updates they missed; each may take 64 KiB


@attrs.define(eq=False, repr=False)
class _StreamWatch(WatchChannel[ContextEvent]):
    """One context that a connection watches."""

    context: ContextActor = attrs.field(kw_only=True)
    request_id: str | None = attrs.field(kw_only=True)  # repeated in each event
    _watches: StreamWatches = attrs.field(kw_only=True, alias="watches")

    def _wake(self) -> None:
        self._watches.tell(self)


@attrs.define(eq=False, repr=False)
class StreamWatches:
    """All watches of one connection. Their events are sent in the order in which each context had them."""

    _session: Session
    open: dict[str, _StreamWatch] = attrs.field(init=False, factory=dict)
    _late: dict[_StreamWatch, None] = attrs.field(init=False, factory=dict)
    _waiting: bool = attrs.field(init=False, default=False)  # whether a task waits for room

    def begin(self, context: ContextActor, request_id: str | None) -> None:
        """Send the context's state now, then each update, at last that it has ended. Raises AgentToolsError."""
        if context.id in self.open:
            raise errors.MalformedMessage("this connection watches the context already")
        if len(self.open) >= _MAX_WATCHES:
            raise errors.TooMuch(f"a connection watches at most {_MAX_WATCHES} contexts")
        watch = _StreamWatch(context.whole, context=context, request_id=request_id, watches=self)
        context.attach(watch)
        self.open[context.id] = watch
        self.tell(watch)

    def close(self, context_id: str) -> None:
        """Send nothing more of a context; no effect if it is not watched."""
        watch = self.open.pop(context_id, None)
        if watch is not None:
            self._late.pop(watch, None)
            watch.context.detach(watch)

    def tell(self, watch: _StreamWatch) -> None:
        """Send what waits of a watch, as far as there is room. Never waits or raises: contexts call it."""
        if watch in self._late:
            if len(self._late) > _MAX_KEPT:
                watch.fall_behind()
        elif self._late or not self._send(watch):
            self._late[watch] = None
            if not (self._waiting or self._session.closed.is_set()):
                self._waiting = True
                self._session.background.start_soon(guarded, self._send_late, ())

    def _send(self, watch: _StreamWatch) -> bool:
        """Send what waits of a watch, as far as there is room; return whether nothing is left."""
        sink = self._session.sink
        try:
            while not sink.full:
                event = watch.next_now()
                if event is None:
                    if watch.over:
                        self.close(watch.context.id)
                    return True
                message = message_of(event)
                message.request_id = watch.request_id
                sink.post(Outgoing(messages.encode_message(message), Kind.NOTIFICATION))
        except Exception as error:  # what JSON does not have; that must not fail the update of somebody else
            log_crash(log, error, "telling a watcher of a context crashed")
            self.close(watch.context.id)
            return True
        return False

    async def _send_late(self) -> None:
        """Send the events of late watches, in turn, until none is late."""
        try:
            while self._late:
                if self._session.sink.full:
                    self._session.weigh()  # what the peer does not read is its memory
                await self._session.sink.room()
                watch = next(iter(self._late), None)
                if watch is not None:
                    del self._late[watch]
                    if not self._send(watch):
                        self._late[watch] = None
                await trio.lowlevel.checkpoint()
        finally:
            self._waiting = False


_MAX_UNSAVED: Final = 256  # updates of one connection that wait for a store, and their bytes
_MAX_UNSAVED_BYTES: Final = 256 * 1024
_MAX_BESIDE: Final = 64  # registrations of one connection that wait for approval


@attrs.define(eq=False)
class AgentStream(AgentBinding):
    """Receives the messages of one connection in place of its session, to which it delivers the calls."""

    run: AgentRun
    caller: AgentCaller
    session: Session
    transport: str = "websocket"  # its name in records
    _unread: deque[Incoming] = attrs.field(init=False, factory=deque)
    _weighed: int = attrs.field(init=False, default=0)  # messages that were unread when they were last weighed,
    _weight: int = attrs.field(init=False, default=0)  # and their memory
    _amount: MemoryCharge = attrs.field(init=False, factory=MemoryCharge)  # counts that memory
    _busy: bool = attrs.field(init=False, default=False)  # a message is carried out for which those behind it wait
    _watches: StreamWatches = attrs.field(init=False)
    _unsaved: deque[tuple[Later, int]] = attrs.field(init=False, factory=deque)
    _unsaved_bytes: int = attrs.field(init=False, default=0)
    _held: bool = attrs.field(init=False, default=False)  # whether the next message waits for them
    _beside: set[Later] = attrs.field(init=False, factory=set)  # registrations that wait for approval
    _provider: StreamProvider | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        session = self.session
        self._watches = StreamWatches(session)
        session.engine.modern.required = True
        session.watchers.add(self.lost)

    # Called by the driver, as a session's

    @property
    def paused(self) -> bool:
        return (self._busy or bool(self._unread) or self.session.paused) and not self.session.closed.is_set()

    async def readable(self) -> None:
        """Wait until everything that was read is carried out, and more may be read."""
        session = self.session
        while self.paused:
            if self._busy:
                await session.readers.park()
            elif session.paused:
                await session.readable()
            else:
                self._carry_out()

    def deliver(self, batch: Sequence[Incoming]) -> None:
        """Carry out the messages that have arrived, until reading has to pause; the session gets its calls at once."""
        self._unread.extend(batch)
        self._carry_out()

    def _carry_out(self) -> None:
        unread, session = self._unread, self.session
        while unread and not (self._busy or session.paused or session.closed.is_set()):
            self.receive(unread.popleft())
        if unread or self._weighed or session.paused:
            self._count_unread()

    def _count_unread(self) -> None:
        """Count what was read and not carried out as memory of the peer, together with what it does not read."""
        left = len(self._unread)
        if not left:
            self._weighed = self._weight = 0
        elif not self._weighed:
            self._weighed, self._weight = left, sum(map(_memory_of, self._unread))
        self._amount.holding = self.session.memory.holding
        self._amount.set(self._weight * left // self._weighed if left else 0)
        self.session.weigh()

    def lost(self, why: ConnectionLost) -> None:
        """Note that the peer is gone: the tools that it provided vanish, and calls of them fail now."""
        self.session.watchers.discard(self.lost)
        self._amount.set(0)
        provider, self._provider = self._provider, None
        if provider is not None:
            provider.lose(str(why))
        for id in list(self._watches.open):
            self._watches.close(id)

    # Messages

    def receive(self, incoming: Incoming) -> None:
        """Carry out a message, or begin to. Never raises because of what a peer sent."""
        value: Any = incoming.message
        try:
            if type(value) is Malformed:
                raise (errors.TooLargeMessage if value.reason == "size" else errors.MalformedMessage)(value.message)
            message = messages.read_message(value, strict=self.run.strict)
            if self._unsaved and self._waits_for_updates(message):
                self._unread.appendleft(incoming)
                self._held = self._busy = True  # until they are kept
                return
            of_stream = _OF_STREAM.get(type(message))
            if of_stream is None and not message.asks:
                raise errors.MalformedMessage(f"`{message.type}` is sent by services only")
            if message.asks and self.session.draining.is_set() and type(message) is not messages.ContextUnwatch:
                raise errors.draining(started=False)
            if of_stream is None:
                found = self.run.receive(message, self.caller, self, incoming)
            else:
                found = of_stream(self, message)
            if isinstance(found, Later):
                self._wait(found, incoming.size)
            elif found is not None:
                self._post(messages.encode_message(found))
        except Exception as error:  # one message must not end the connection
            self._fail(value, error)

    @property
    def out(self) -> Sink:
        return self.session.sink

    def open_session(self) -> tuple[Session, None]:
        return self.session, None

    def call(self, request: messages.ToolRequest, received: Incoming, context: ContextActor | None) -> None:
        """Start a call, unless nobody would end it or read its answer."""
        if self.session.lost is None:
            self.run.start_call(request, self.caller, context, self, received.headers, received.size)

    def watch(self, message: messages.ContextWatch, received: Incoming, context: ContextActor) -> None:
        self._watches.begin(context, message.request_id)

    def answered(self, call: AgentCall, answer: answers.CallAnswer) -> None:
        self._post(answer.encode(call.request))

    # Messages of a stream

    def _cancel(self, message: messages.ToolCancel) -> None:
        call = self.run.call_of(self.caller, message.context_id, message.request_id, self.session)
        if call is not None:
            call.cancel(message.reason or "cancelled by the agent")

    def _unwatch(self, message: messages.ContextUnwatch) -> None:
        self._watches.close(message.context_id)

    def _provide(self, message: messages.ProvideTools) -> Later:
        waits = self.run.catalog.may_wait(message.tools)
        return Later(message, partial(self._offer, message), "approvals" if waits else "nothing")

    async def _offer(self, message: messages.ProvideTools) -> messages.AgentMessage:
        session = self.session
        if session.lost is not None:
            raise errors.ProviderGone(str(session.lost))
        if self._provider is None:
            # Until its calls are answered, reading goes on.
            provider = StreamProvider(self.run.catalog, self.caller, session.sink, session.readers.unpark_all)
            self._provider, session.transport.owed = provider, provider.calls
        return await self._provider.offer(message.tools)

    def _of_call_down(self, message: messages.ToolResponse | messages.ToolProgress) -> None:
        if self._provider is not None:
            self._provider.receive(message)

    # Messages that take time

    def _waits_for_updates(self, message: messages.AgentMessage) -> bool:
        """Return whether a message is carried out only once the store has the updates before it."""
        if type(message) is messages.ContextUpdate:
            return len(self._unsaved) >= _MAX_UNSAVED or self._unsaved_bytes >= _MAX_UNSAVED_BYTES
        return type(message) not in (messages.ToolCancel, messages.ToolResponse, messages.ToolProgress)

    def _wait(self, later: Later, size: int) -> None:
        """Answer a message in a task, and let those behind it overtake as far as they may."""
        start_soon, meanwhile = self.session.background.start_soon, later.while_waiting
        if meanwhile == "updates":
            self._unsaved.append((later, size))
            self._unsaved_bytes += size
            if len(self._unsaved) == 1:
                start_soon(self._answer_unsaved)
        elif meanwhile == "everything":
            start_soon(self._answer, later)
        elif meanwhile == "approvals":
            if len(self._beside) >= _MAX_BESIDE:
                raise errors.TooMuch(f"{_MAX_BESIDE} registrations of this connection wait for approval")
            self._beside.add(later)
            start_soon(self._answer, later, partial(self._beside.discard, later))
        else:
            self._busy = True
            start_soon(self._answer, later, self._go_on)

    async def _answer_unsaved(self) -> None:
        """Answer updates in their order, each once the store has it. Then what waits for them goes on."""
        while self._unsaved:
            later, size = self._unsaved[0]
            await self._answer(later)
            self._unsaved.popleft()
            self._unsaved_bytes -= size
        if self._held:
            self._held = False
            self._go_on()

    def _go_on(self) -> None:
        self._busy = False
        self.session.readers.unpark_all()

    async def _answer(self, later: Later, then: Callable[[], object] = lambda: None) -> None:
        try:
            answer = await later.answer()
            if answer is not None:
                self._post(messages.encode_message(answer))
        except Exception as error:  # a handler's, or ours: this message's answer
            self._fail(later.message, error)
        finally:
            then()

    # Answers

    def _fail(self, value: Any, error: Exception) -> None:
        """Answer a message with an error."""
        if not isinstance(error, errors.AgentToolsError):
            error = errors.crashed(error, value)
        if type(value) is Malformed:
            value = {"request_id": value.request_id}
        self._post(messages.encode_message(failed(value, error)))

    def _post(self, data: bytes) -> None:
        self.session.sink.post(Outgoing(data, Kind.REPLY))


def _memory_of(incoming: Incoming) -> int:
    """Return about how much memory a message takes that was read."""
    value: Any = incoming.message
    return EACH + (weight(value, incoming.size) if type(value) is dict and incoming.size > SMALL else incoming.size)


_OF_STREAM: Final[Mapping[type[messages.AgentMessage], Callable[[AgentStream, Any], Later | None]]] = {
    messages.ToolCancel: AgentStream._cancel,
    messages.ToolResponse: AgentStream._of_call_down,
    messages.ToolProgress: AgentStream._of_call_down,
    messages.ContextUnwatch: AgentStream._unwatch,
    messages.ProvideTools: AgentStream._provide,
}
"""What belongs to a connection. Other messages are answered by `AgentRun`, or come from services only."""
