"""What a legacy handshake over Streamable HTTP agreed on, and how it is made again when the server forgot it.

The session passes its `initialize` and `notifications/initialized` through here and knows nothing of session ids: those
belong to the transport (2025-11-25 basic/transports, "Session Management"). In the modern era nothing here is used.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Final

import attrs
import orjson
import trio

from trimcp.channel import Outgoing
from trimcp.framing.sse import Event
from trimcp.transports.http.client_events import Cursor, message_in, read_events
from trimcp.transports.http.client_http import EVENT_STREAM, JSON_TEXT, Cut, Http, Reply, TooLarge
from trimcp.transports.http.client_policy import PASSING, Trouble, seconds_to_wait
from trimcp.wire.jsonrpc import ErrorResponse, Message, Response, encode, parse
from trimcp.wire.revisions import Revision, find

__all__ = ["ACCEPT", "LISTEN", "SESSION", "VERSION", "Handshake", "method_of"]

SESSION: Final = "mcp-session-id"
VERSION: Final = "mcp-protocol-version"
ACCEPT: Final = {"accept": f"{JSON_TEXT}, {EVENT_STREAM}", "content-type": JSON_TEXT}
"""The headers of every POST."""

LISTEN: Final = {"accept": EVENT_STREAM, "accept-encoding": "identity"}
"""The headers of every GET: what compresses a stream tends to hold its events back."""

_LONGEST_SESSION_ID: Final = 1024
_TOO_SOON: Final = 5.0

_log = logging.getLogger("trimcp.http")


@attrs.define(eq=False)
class Handshake:
    """The state of one client's legacy session, if there is one.

    Args:
        http: where to shake hands again.
        max_message: bytes of the largest reply taken.
        patience: seconds a new handshake may take.
        forgotten: called when a new session has taken the place of one the server forgot.

    Attributes:
        revision: what was agreed on, None before.
        session_id: the session's id, None without one.
        confirming: set once the server has taken `notifications/initialized`; None before that was sent.
    """

    _http: Http
    _max_message: int
    _patience: float
    _forgotten: Callable[[], object]
    revision: Revision | None = attrs.field(init=False, default=None)
    session_id: str | None = attrs.field(init=False, default=None, repr=False)
    confirming: trio.Event | None = attrs.field(init=False, default=None)
    _offer: bytes = attrs.field(init=False, default=b"", repr=False)
    _confirmation: bytes = attrs.field(init=False, default=b"", repr=False)
    _tried_at: float | None = attrs.field(init=False, default=None)
    _failure: Trouble | None = attrs.field(init=False, default=None)
    _renewals: int = attrs.field(init=False, default=0)
    _tried: int = attrs.field(init=False, default=0)
    _lock: trio.Lock = attrs.field(init=False, factory=trio.Lock)

    def headers(self) -> dict[str, str]:
        """Return what every request after the handshake carries."""
        return self._headers(self.session_id)

    def _headers(self, session_id: str | None) -> dict[str, str]:
        headers = {}
        if self.revision is not None and self.revision.version_header:
            headers[VERSION] = self.revision.name
        if session_id is not None:
            headers[SESSION] = session_id
        return headers

    def offered(self, offer: bytes) -> None:
        """Note the `initialize` that is being sent; nothing agreed on before counts."""
        self.revision = self.session_id = self.confirming = None
        self._offer = offer

    def agreed(self, answer: Message, session_id: str) -> None:
        """Note the server's answer to `initialize`, and the session id in the head of its reply."""
        if not isinstance(answer, Response):
            return
        version = answer.result.get("protocolVersion")
        self.revision = find(version) if isinstance(version, str) else None
        self.session_id = _checked(session_id)

    def is_confirmation(self, outgoing: Outgoing) -> bool:
        """Whether this notification is `notifications/initialized`; then it is remembered."""
        if self.revision is None or self.confirming is not None:
            return False
        if method_of(outgoing.data) != "notifications/initialized":
            return False
        self._confirmation = outgoing.data
        self.confirming = trio.Event()
        return True

    async def confirmed(self) -> None:
        """Wait while `notifications/initialized` is on its way: what came before it would be refused."""
        if self.confirming is not None:
            await self.confirming.wait()

    def alive(self) -> None:
        """Note that the server knows the session."""
        self._tried_at = None

    async def renew(self, stale: str) -> Trouble | None:
        """Begin a new session in place of `stale`, which the server has forgotten, unless another task just did.

        However many requests meet the loss, one handshake follows. Where the new session is forgotten as well before
        anything has been answered in it, that is all. A server that is away for a moment, as while it is restarted, may
        be asked again.

        Returns:
            Why there is no new session, or None if there is one.
        """
        tried = self._tried
        async with self._lock:
            if self.session_id != stale:
                return None if self.session_id is not None else Trouble("the session has ended")
            if self._failure is not None and self._tried != tried:
                return self._failure  # somebody has tried while we waited for our turn
            if self._tried_at is not None and trio.current_time() - self._tried_at < _TOO_SOON:
                return self._failure or Trouble("the server forgot the session again, right after it was begun anew")
            self._failure = await self._try()
            self._tried += 1
            # Who was told to come back later, or met nobody, need not wait to try again.
            self._tried_at = None if self._failure is not None and self._failure.passing else trio.current_time()
            if self._failure is None:
                _log.debug("the server forgot the session; a new one was begun")
                self._forgotten()
            return self._failure

    async def _try(self) -> Trouble | None:
        """Shake hands, and say why it came to nothing if it did."""
        failure = "the server forgot the session, and a new one could not be begun"
        try:
            with trio.fail_after(self._patience):
                await self._shake_hands()
        except Cut as cut:
            return Trouble(f"{failure}: {cut}", untouched=cut.nothing_sent, passing=cut.nothing_sent)
        except _Refused as refused:
            later = refused.status in PASSING
            return Trouble(f"{failure}: {refused}", untouched=later, passing=later, after=refused.after)
        except TooLarge:
            return Trouble(f"{failure}: the server's answer is too large")
        except trio.TooSlowError:
            return Trouble(f"{failure}: it took too long")
        return None

    async def _shake_hands(self) -> None:
        self._renewals += 1
        id = f"again-{self._renewals}"  # the session's own ids are integers
        offer = encode({**orjson.loads(self._offer), "id": id})
        async with self._http.open("POST", ACCEPT, offer) as reply:
            if reply.status >= 300:
                raise self._refused(reply)
            answer = await self._answer(reply, id)
            session_id = _checked(reply.header(SESSION))
        if not isinstance(answer, Response):
            raise _Refused("initialize was not answered")
        assert self.revision is not None
        if answer.result.get("protocolVersion") != self.revision.name:
            raise _Refused(f"the server no longer speaks {self.revision.name}")
        async with self._http.open("POST", {**ACCEPT, **self._headers(session_id)}, self._confirmation) as reply:
            if reply.status >= 300:
                raise self._refused(reply)
        self.session_id = session_id

    def _refused(self, reply: Reply) -> _Refused:
        after = seconds_to_wait(reply.header("retry-after") or None, time.time)
        return _Refused(self._http.refusal(reply), reply.status, after)

    async def _answer(self, reply: Reply, id: str) -> Message | None:
        """Return the answer to `initialize`, as JSON or as the first answer of a stream; the rest is of no interest."""
        if reply.content_type != EVENT_STREAM:
            return parse(await reply.body(self._max_message))
        found: list[Message] = []
        scope = trio.CancelScope()

        async def take(event: Event) -> None:
            message = message_in(event)
            if isinstance(message, Response | ErrorResponse) and message.id == id:
                found.append(message)
                scope.cancel(reason="the answer is there")

        with scope:
            await read_events(reply, Cursor(), self._max_message, take)
        return found[0] if found else None


class _Refused(Exception):
    """The server would not shake hands."""

    def __init__(self, why: str, status: int = 0, after: float | None = None) -> None:
        super().__init__(why)
        self.status = status
        self.after = after


def method_of(data: bytes) -> str:
    """Return the method of an encoded message of ours, or "" if it has none."""
    message: dict[str, Any] = orjson.loads(data)
    method = message.get("method", "")
    return method if isinstance(method, str) else ""


def _checked(session_id: str) -> str | None:
    """Return the id if it is one (visible ASCII), else None: nothing else may go into a header of ours."""
    visible = session_id.isascii() and session_id.isprintable() and " " not in session_id
    return session_id if session_id and visible and len(session_id) <= _LONGEST_SESSION_ID else None
