"""The agent-tools protocol over one channel of messages, for clients: calls, watches and provided tools share it.

One task reads and never waits for a user of the connection: what nobody takes in time is dropped by a rule that loses
nothing. One task writes.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Any, ClassVar, Final

import attrs
import trio

from trimcp.agent_tools.client import wire
from trimcp.agent_tools.messages import errors, messages
from trimcp.agent_tools.messages.pending import PendingAnswer
from trimcp.agent_tools.watching import WatchChannel
from trimcp.channel import Incoming, Kind, MessageChannel, Outgoing
from trimcp.errors import ConnectionLost, InvalidReply, LocalError, McpError
from trimcp.session.queues import Outbox
from trimcp.support.cleaning import one_line
from trimcp.support.nurseries import open_service_nursery
from trimcp.support.slotted import evolved
from trimcp.wire.jsonrpc import Malformed

_OUTBOX_MESSAGES: Final = 1_024
_OUTBOX_BYTES: Final = 1024 * 1024
_LONGEST: Final = 200

_log = logging.getLogger("trimcp.agent_tools")


@asynccontextmanager
async def open_channel_wire(channel: MessageChannel) -> AsyncIterator[ChannelWire]:
    """Yield a wire over a channel of JSON values; leaving ends it, and the channel is the caller's to close."""
    opened = ChannelWire(channel)
    async with open_service_nursery() as nursery:
        nursery.start_soon(opened.write)
        nursery.start_soon(opened.read)
        try:
            yield opened
        finally:
            opened.lose("the connection was closed here")


@attrs.define(eq=False, repr=False)
class _PendingMessage(PendingAnswer):
    """A message of ours that waits for its answer."""

    watch: WireWatch | None = None  # the watch that its answer begins, or None


@attrs.define(eq=False, repr=False)
class ChannelWire:
    """An `AgentWire` over one channel."""

    _channel: MessageChannel
    lost: str | None = attrs.field(init=False, default=None)  # why the connection is no more, or None while it is
    _ended: trio.Event = attrs.field(init=False, factory=trio.Event)
    _outbox: Outbox = attrs.field(init=False, factory=lambda: Outbox(_OUTBOX_MESSAGES, _OUTBOX_BYTES))
    _asked: dict[str, _PendingMessage] = attrs.field(init=False, factory=dict)
    _watches: dict[str, list[WireWatch]] = attrs.field(init=False, factory=dict)
    # takes requests for the tools that are provided
    _provided: Callable[[Incoming], object] | None = attrs.field(init=False, default=None)
    _numbers: count[int] = attrs.field(init=False, factory=lambda: count(1))

    # The AgentWire

    async def call(self, request: messages.ToolRequest, progressed: wire.Progressed | None) -> messages.ToolResponse:
        """See `AgentWire.call`. If cancelled, a request that was not sent yet is withdrawn."""
        request = evolved(request, progress=None if progressed is None else True)
        return wire.response_in(await self._answer(request, _PendingMessage(progressed)))

    async def ask(self, message: messages.AgentMessage) -> messages.AgentMessage:
        """See `AgentWire.ask`."""
        return wire.answer_in(await self._answer(message, _PendingMessage()), message)

    @asynccontextmanager
    async def watching(self, context_id: str) -> AsyncIterator[wire.Events]:
        """See `AgentWire.watching`. A slow reader gets a state, asked for when it reads, in place of what it missed."""
        watches = self._watches.setdefault(context_id, [])
        first = not watches
        watch = WireWatch(partial(messages.ContextRead, context_id=context_id), wire=self, begun=not first)
        watches.append(watch)
        try:
            if first:
                asked = messages.ContextWatch(context_id=context_id)
                wire.answer_in(await self._answer(asked, _PendingMessage(watch=watch)), asked)
            yield watch
        finally:
            watches.remove(watch)
            if not watches:
                self._watches.pop(context_id, None)
                if not watch.destroyed:
                    self.post(messages.ContextUnwatch(context_id=context_id))
            watch.finish(None, trio.ClosedResourceError("the block of this watch was left"))

    async def provide(self, offer: messages.ProvideTools, begin: wire.Begin, registered: wire.Registered) -> None:
        """See `AgentWire.provide`. The tools are withdrawn when the connection is closed."""
        if self._provided is not None:
            raise LocalError("this connection provides tools already")
        self._provided = begin(self._outbox)
        try:
            answer = await self.ask(offer)
            assert isinstance(answer, messages.ToolsRegistered)
            registered(answer)
            await self._ended.wait()
        finally:
            self._provided = None
        raise ConnectionLost(self.lost or "")

    async def wait_lost(self) -> None:
        """Wait until the connection is lost."""
        await self._ended.wait()

    async def _answer(self, message: messages.AgentMessage, asked: _PendingMessage) -> Any:
        """Send a message, and wait for the JSON value that answers it."""
        call = message if isinstance(message, messages.ToolRequest) else None
        if call is None:
            message.request_id = f"ask-{next(self._numbers)}"
        id = message.request_id or ""

        def cancel(why: str) -> None:
            if call is not None and not self._outbox.withdraw(id):
                self.post(messages.ToolCancel(request_id=id, context_id=call.context_id, reason=why))

        data = messages.encode_message(message)
        await trio.lowlevel.checkpoint_if_cancelled()
        await self._outbox.room()
        if self.lost is not None:
            raise wire.NotSent(self.lost)
        if id in self._asked:
            raise LocalError(f"a request with the id {id[:_LONGEST]!r} is under way over this connection")
        self._asked[id] = asked
        try:
            self._outbox.post(Outgoing(data, Kind.REQUEST, id))
            return await asked.answer(cancel)
        finally:
            del self._asked[id]

    def post(self, message: messages.AgentMessage, kind: Kind = Kind.NOTIFICATION) -> None:
        """Send a message without an answer; never waits."""
        self._outbox.post(Outgoing(messages.encode_message(message), kind))

    # Its tasks

    async def write(self) -> None:
        """Write what is queued until the connection is lost."""
        try:
            while True:
                await self._channel.send(await self._outbox.receive())
        except trio.EndOfChannel:
            pass
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.lose(self._channel.close_reason() or "the connection broke")

    async def read(self) -> None:
        """Read until the connection is lost. Never waits for users of the connection."""
        try:
            while self.lost is None:
                while self._outbox.full_of_replies():  # the service asks more than it reads answers
                    await self._outbox.room()
                for incoming in await self._channel.receive():
                    self._receive(incoming)
        except (trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError):
            self.lose(self._channel.close_reason() or "the service is gone")
        except McpError as error:
            self.lose(f"the service broke the protocol: {error}")

    def lose(self, why: str) -> None:
        """Fail all that waits, and send nothing more."""
        if self.lost is not None:
            return
        self.lost = why
        self._ended.set()
        self._outbox.abandon()
        for asked in self._asked.values():
            asked.resolve(error=ConnectionLost(why))
        for watch in [each for watches in self._watches.values() for each in watches]:
            watch.finish(None, ConnectionLost(why))

    def _receive(self, incoming: Incoming) -> None:
        """Give a message to who waits for it.

        Raises InvalidReply if it is too large to be read, or no JSON: nobody knows whose answer it is.
        """
        value: Any = incoming.message
        if type(value) is not dict:
            raise InvalidReply(value.message if isinstance(value, Malformed) else "a message is a JSON object")
        kind, id = value.get("type"), value.get("request_id")
        asked = self._asked.get(id) if type(id) is str else None
        if kind in (messages.ToolRequest.type, messages.ToolCancel.type):
            if self._provided is not None:
                self._provided(incoming)
            elif kind == messages.ToolRequest.type and type(id) is str:
                gone = errors.ProviderGone("nobody provides tools on this connection").body()
                self.post(messages.ToolResponse(request_id=id, status="error", error=gone), Kind.REPLY)
        elif kind == messages.ToolProgress.type:
            self._receive_progress(value, asked)
        elif asked is not None and not asked.resolved.is_set():
            asked.resolve(value)
            if asked.watch is not None and kind == messages.ContextState.type:
                self._receive_event(value, incoming.size, [asked.watch])
        elif kind in (messages.ContextState.type, messages.ContextUpdate.type, messages.ContextDestroyed.type):
            context = value.get("context_id")
            watches = self._watches.get(context, []) if type(context) is str else []
            self._receive_event(value, incoming.size, watches)
        elif kind == messages.ErrorMessage.type:
            _log.warning(
                "the service reports an error: %s", one_line(str(errors.error_from(value.get("error"))), _LONGEST)
            )

    def _receive_progress(self, value: dict[str, Any], asked: _PendingMessage | None) -> None:
        if asked is None or asked.progressed is None or asked.resolved.is_set():
            return
        try:
            asked.progressed(wire.event_in(value, messages.ToolProgress))
        except Exception as error:  # it is malformed, or the callback failed: the call's failure
            asked.resolve(error=error)

    def _receive_event(self, value: dict[str, Any], size: int, watches: list[WireWatch]) -> None:
        try:
            event: messages.AgentMessage = wire.event_in(value, *messages.EVENTS)
        except InvalidReply as error:
            for watch in watches:
                watch.finish(None, error)
            return
        for watch in watches:
            watch.put(event, size)


@attrs.define(eq=False, repr=False)
class WireWatch(WatchChannel[messages.AgentMessage]):
    """The events of one context.

    When 256 events or a mebibyte of them wait they are dropped. The reader, when it comes, asks for the state instead.
    """

    most: ClassVar[int] = 256
    most_bytes: ClassVar[int] = 1024 * 1024

    _wire: ChannelWire = attrs.field(kw_only=True, alias="wire")
    # whether the first state has arrived. What comes before it belongs to an earlier watch of the context.
    begun: bool = attrs.field(kw_only=True)
    destroyed: bool = attrs.field(init=False, default=False)  # whether the context was
    _known: int = attrs.field(init=False, default=-1)

    def __attrs_post_init__(self) -> None:
        self._behind: bool = self.begun

    def put(self, event: messages.AgentMessage, size: int) -> None:
        """Queue an event that arrived."""
        self.begun = self.begun or not isinstance(event, messages.ContextUpdate)
        if not self.begun:
            return
        if isinstance(event, messages.ContextDestroyed):
            self.destroyed = True
            self.finish(event)
        else:
            self.add(event, size)

    def finish(self, last: messages.AgentMessage | None, end: Exception | None = None) -> None:
        """Let the reader have what is queued, then this event and this error."""
        super().finish(last, end)
        self._behind = False  # there is no state any more that could be asked for

    async def receive(self) -> messages.AgentMessage:
        """Wait for the next event. Cancelling this loses nothing."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            event: messages.AgentMessage | None = await self._next()
            if isinstance(event, messages.ContextRead):
                event = await self._state(event)
            if isinstance(event, messages.ContextState | messages.ContextUpdate) and event.version is not None:
                if isinstance(event, messages.ContextUpdate) and event.version <= self._known:
                    continue  # a part of a state that the reader was given already
                self._known = event.version
            if event is not None:
                return event

    async def _state(self, asked: messages.ContextRead) -> messages.AgentMessage | None:
        """Ask for the state in place of what was missed; None if the context was destroyed meanwhile."""
        try:
            return await self._wire.ask(asked)
        except errors.AgentToolsError:
            if self.destroyed:
                return None
            raise
        except BaseException:  # cancelled, or the connection ended: the state is asked for again
            self._behind = self._end is None
            raise
