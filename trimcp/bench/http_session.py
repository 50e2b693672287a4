"""One session over Streamable HTTP as its places see it: its handshake, what every request says, what is said besides.

Source: basic/transports (2025-11-25). The modern era has no sessions; there this is what the places have in common.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

import attrs
import orjson
import trio

from trimcp.bench.h1 import LoadConnection, Site, UnreadableReply
from trimcp.bench.load import INITIALIZED, Load
from trimcp.errors import ConnectionLost, McpError
from trimcp.framing.sse import EventDecoder

__all__ = ["LoadSession"]

_ACCEPT: Final = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
_CLOSE_TIME: Final = 1.0  # seconds that the last request, which ends the session, may take
_MOST_NOTICES: Final = 1_000


@attrs.define(eq=False)
class LoadSession:
    """What the places of one session share.

    Attributes:
        head: of each POST of a call, without its last lines.
        id: of the last request.
        nursery: where notifications are sent.
    """

    load: Load
    _site: Site
    _max_message: int
    head: bytes = attrs.field(init=False, default=b"")
    id: int = attrs.field(init=False, default=0)
    nursery: trio.Nursery = attrs.field(init=False)
    _session_id: str | None = attrs.field(init=False, default=None)
    _side: LoadConnection = attrs.field(init=False)
    _turn: trio.Lock = attrs.field(init=False, factory=trio.Lock)
    _renewals: int = attrs.field(init=False, default=0)
    _notices: int = attrs.field(init=False, default=0)
    _idle: list[trio.Event] = attrs.field(init=False, factory=list)
    _is_waiting: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self._side = self.connection()

    def connection(self) -> LoadConnection:
        """Return a connection of its own."""
        load = self.load
        return LoadConnection(self._site, load.plan.opening, load.tally, self._max_message, load.ssl_context)

    @property
    def has_id(self) -> bool:
        """Whether the server has named the session."""
        return self._session_id is not None

    # The session at the server

    async def open(self) -> None:
        """Shake hands, where the revision has a handshake.

        Raises:
            McpError: the server does not.
        """
        self._head_from({})
        if self.load.revision.modern:
            return
        patience = self.load.plan.opening
        try:
            with trio.fail_after(patience):
                status, body = await self._post(self.load.greeting())
                message = _message_in(body, self._side.reply.content_type)
                if status != 200 or not isinstance(message.get("result"), dict):
                    raise ConnectionLost(f"initialize was answered with HTTP {status} {body[:200]!r}")
                self._session_id = self._side.reply.session_id
                self._head_from(self._named())
                status, body = await self._post(INITIALIZED)
                if status >= 300:
                    raise ConnectionLost(f"notifications/initialized was answered with HTTP {status} {body[:200]!r}")
        except trio.TooSlowError:
            self._side.close()
            raise ConnectionLost(f"initialize was not answered within {patience:g} seconds") from None
        except (trio.BrokenResourceError, UnreadableReply) as error:
            self._side.close()
            raise ConnectionLost(str(error)) from None

    async def renew(self, head: bytes) -> None:
        """Shake hands again, once for all places that found with this head that the server has forgotten the session.

        Raises:
            McpError: the server does not, or it was done too often.
        """
        async with self._turn:
            if head != self.head:
                return
            self._renewals += 1
            if self._renewals > self.load.plan.reopen:
                raise ConnectionLost("the server forgets one session after the other")
            await self.open()

    async def close(self) -> None:
        """End the session at the server, where there is one; a second has to do, cancelled or not."""
        # Shielded, because a measurement ends by being cancelled, and a server should not keep the sessions of one.
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _CLOSE_TIME):
            if self._session_id is not None:
                with suppress(McpError, trio.BrokenResourceError, UnreadableReply):
                    await self._side.request(self._site.head(b"DELETE", self._named()) + b"\r\n")
                    await self._side.body()
        self._side.close()

    def _named(self) -> dict[str, str]:
        named = {} if self._session_id is None else {"mcp-session-id": self._session_id}
        if self.load.revision.version_header:
            named["mcp-protocol-version"] = self.load.revision.name
        return named

    def _head_from(self, named: dict[str, str]) -> None:
        self.head = self._site.head(b"POST", {**_ACCEPT, **named})

    # What is said besides calls

    def notify(self, message: bytes) -> None:
        """Send a notification or an answer, without waiting for it."""
        if self._notices < _MOST_NOTICES:
            self._notices += 1
            self.nursery.start_soon(self._notify, message)

    async def _notify(self, message: bytes) -> None:
        patience = self.load.plan.patience
        try:
            async with self._turn:
                with trio.fail_after(patience):
                    status, body = await self._post(message)
            if status >= 300:
                self.load.tally.wrong("notification refused", f"HTTP {status} {body[:200]!r}", trio.current_time())
        except (McpError, trio.BrokenResourceError, UnreadableReply, trio.TooSlowError) as error:
            self._side.close()
            why = str(error) or f"no answer within {patience:g} seconds"
            self.load.tally.wrong("notification lost", why, trio.current_time())
        finally:
            self._notices -= 1

    async def _post(self, message: bytes) -> tuple[int, bytes]:
        await self._side.request(b"%bcontent-length: %d\r\n\r\n%b" % (self.head, len(message), message))
        body = await self._side.body()
        return self._side.reply.status, body

    # Places without a call

    async def parked(self) -> None:
        """Wait until there may be a call, or all is over."""
        event = trio.Event()
        self._idle.append(event)
        self._wait()
        await event.wait()

    def _wait(self) -> None:
        if not self._is_waiting and self._idle:
            self._is_waiting = True
            self.load.supply.wait(self._woken)

    def _woken(self) -> None:
        self._is_waiting = False
        if self.load.plan.rate is None or self.load.supply.over:
            idle, self._idle = self._idle, []
            for event in idle:
                event.set()
        elif self._idle:
            self._idle.pop().set()  # the place that was used last has the warmest connection
            self._wait()


def _message_in(body: bytes, content_type: bytes) -> dict[str, Any]:
    """Return the first answer in the body of a reply, {} where there is none."""
    texts = [body]
    if content_type == b"text/event-stream":
        texts = [event.data for event in EventDecoder().feed(body)]
    for text in texts:
        with suppress(orjson.JSONDecodeError):
            message = orjson.loads(text)
            if isinstance(message, dict) and message.get("id") == 0 and "method" not in message:
                return message
    return {}
