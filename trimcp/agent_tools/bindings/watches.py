"""The contexts that one connection watches: each event goes into its outbox at once, with no task in between.

Only while the peer reads slowly a task waits for room. The watches take turns then, and a watch that is late gets the
whole state in place of the updates that it missed.
"""

from __future__ import annotations

import logging
from typing import Final

import attrs
import trio

from trimcp.agent_tools.answering import message_of
from trimcp.agent_tools.contexts.actor import ContextActor
from trimcp.agent_tools.contexts.watching import WatchChannel
from trimcp.agent_tools.messages.errors import MalformedMessage, TooMuch
from trimcp.agent_tools.messages.messages import encode_message
from trimcp.channel import Kind, Outgoing
from trimcp.session.scopes import guarded
from trimcp.session.session import Session
from trimcp.support.cleaning import log_crash

log: logging.Logger = logging.getLogger("trimcp.agent_tools")

_MAX_WATCHES: Final = 1_000
_MAX_KEPT: Final = 64  # late watches that keep the updates they missed; each may take 64 KiB


@attrs.define(eq=False, repr=False)
class _StreamWatch(WatchChannel):
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
    _open: dict[str, _StreamWatch] = attrs.field(init=False, factory=dict)
    _late: dict[_StreamWatch, None] = attrs.field(init=False, factory=dict)
    _waiting: bool = attrs.field(init=False, default=False)  # whether a task waits for room

    def __len__(self) -> int:
        return len(self._open)

    def open(self, context: ContextActor, request_id: str | None) -> None:
        """Send the context's state now, then each update, at last that it has ended.

        Raises:
            MalformedMessage: the connection watches it already.
            TooMuch: the connection, or the context, has too many watches.
            ContextGone: the context has ended.
        """
        if context.id in self._open:
            raise MalformedMessage("this connection watches the context already")
        if len(self._open) >= _MAX_WATCHES:
            raise TooMuch(f"a connection watches at most {_MAX_WATCHES} contexts")
        watch = _StreamWatch(context.whole, context=context, request_id=request_id, watches=self)
        context.attach(watch)
        self._open[context.id] = watch
        self.tell(watch)

    def close(self, context_id: str) -> None:
        """Send nothing more of a context; no effect if it is not watched."""
        watch = self._open.get(context_id)
        if watch is not None:
            self._close(watch)

    def close_all(self) -> None:
        """Send nothing more of any context."""
        for watch in list(self._open.values()):
            self._close(watch)

    def _close(self, watch: _StreamWatch) -> None:
        del self._open[watch.context.id]
        self._late.pop(watch, None)
        watch.context.detach(watch)

    def tell(self, watch: _StreamWatch) -> None:
        """Send what waits of a watch, as far as there is room. Never waits or raises: contexts call it."""
        if watch in self._late:
            if len(self._late) > _MAX_KEPT:
                watch.fall_behind()
        elif self._late or not self._send(watch):
            self._late[watch] = None
            if not self._waiting:
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
                        self._close(watch)
                    return True
                message = message_of(event)
                message.request_id = watch.request_id
                sink.post(Outgoing(encode_message(message), Kind.NOTIFICATION))
        except Exception as error:
            # Handlers may write what JSON does not have; that must not fail the update of somebody else.
            log_crash(log, error, "telling a watcher of a context crashed")
            self._close(watch)
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
