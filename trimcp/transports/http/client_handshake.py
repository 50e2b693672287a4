"""What a legacy handshake over Streamable HTTP agreed on, and how it is made again when the server forgot it.

The session passes its `initialize` and `notifications/initialized` through here and knows nothing of session ids: those
belong to the transport (2025-11-25 basic/transports, "Session Management"). In the modern era nothing here is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import attrs
import orjson
import trio

from trimcp.channel import Outgoing
from trimcp.framing.sse import Event
from trimcp.transports.http.client_events import Cursor, message_in, read_events
from trimcp.transports.http.client_http import EVENT_STREAM, JSON_TEXT, Cut, Http, Reply, TooLarge
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
    _failure: str | None = attrs.field(init=False, default=None)
    _renewals: int = attrs.field(init=False, default=0)
    _lock: trio.Lock = attrs.field(init=False, factory=trio.Lock)

    def headers(self) -> dict[str, str]:
        """Return what every request after the handshake carries."""
        headers = {}
        if self.revision is not None and self.revision.version_header:
            headers[VERSION] = self.revision.name
        if self.session_id is not None:
            headers[SESSION] = self.session_id
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

    async def renew(self, stale: str) -> str | None:
        """Begin a new session in place of `stale`, which the server has forgotten, unless another task just did.

        However many requests meet the loss, one handshake follows. Where the new session is forgotten as well before
        anything has been answered in it, that is all.

        Returns:
            Why there is no new session, or None if there is one.
        """
        async with self._lock:
            if self.session_id != stale:
                return None if self.session_id is not None else "the session has ended"
            if self._tried_at is not None and trio.current_time() - self._tried_at < _TOO_SOON:
                return self._failure or "the server forgot the session again, right after it was begun anew"
            try:
                with trio.fail_after(self._patience):
                    await self._shake_hands()
            except (Cut, TooLarge, _Refused, trio.TooSlowError) as error:
                why = str(error) or "it took too long"
                self._failure = f"the server forgot the session, and a new one could not be begun: {why}"
            else:
                self._failure = None
                _log.debug("the server forgot the session; a new one was begun")
                self._forgotten()
            self._tried_at = trio.current_time()
            return self._failure

    async def _shake_hands(self) -> None:
        self._renewals += 1
        id = f"again-{self._renewals}"  # the session's own ids are integers
        offer = encode({**orjson.loads(self._offer), "id": id})
        async with self._http.open("POST", ACCEPT, offer) as reply:
            if reply.status >= 300:
                raise _Refused(self._http.refusal(reply))
            answer = await self._answer(reply, id)
            session_id = _checked(reply.header(SESSION))
        if not isinstance(answer, Response):
            raise _Refused("initialize was not answered")
        assert self.revision is not None
        if answer.result.get("protocolVersion") != self.revision.name:
            raise _Refused(f"the server no longer speaks {self.revision.name}")
        self.session_id = session_id
        async with self._http.open("POST", {**ACCEPT, **self.headers()}, self._confirmation) as reply:
            if reply.status >= 300:
                raise _Refused(self._http.refusal(reply))

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


def method_of(data: bytes) -> str:
    """Return the method of an encoded message of ours, or "" if it has none."""
    message: dict[str, Any] = orjson.loads(data)
    method = message.get("method", "")
    return method if isinstance(method, str) else ""


def _checked(session_id: str) -> str | None:
    """Return the id if it is one (visible ASCII), else None: nothing else may go into a header of ours."""
    visible = session_id.isascii() and session_id.isprintable() and " " not in session_id
    return session_id if session_id and visible and len(session_id) <= _LONGEST_SESSION_ID else None
