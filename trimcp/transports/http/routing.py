"""Which session a POST belongs to: one of its own, a legacy one, a new one, or none.

Since 2026-07-28 a request says in its body who asks and in which revision, and its headers have to say the same.
Before, the session was made by `initialize` and is named by `Mcp-Session-Id`. The order of the checks is the
specification's: message, envelope, headers against body; what comes after is the engine's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from trimcp.channel import NOWHERE
from trimcp.framing.headers import check_request
from trimcp.security import security_event
from trimcp.transports.http.exchange import JSON_HEADERS, Exchange
from trimcp.transports.http.model import Response
from trimcp.transports.http.settings import Settings
from trimcp.wire.codes import ERRORS, HEADER_MISMATCH, INVALID_REQUEST, OVERLOADED, UNSUPPORTED_VERSION
from trimcp.wire.common import META_CLIENT_CAPABILITIES, META_PROTOCOL_VERSION
from trimcp.wire.jsonrpc import Batch, Malformed, Message, Notification, Request, encode_error
from trimcp.wire.methods import METHODS
from trimcp.wire.revisions import UNNAMED, Revision, find

if TYPE_CHECKING:
    from trimcp.transports.http.service import PushedSession, Service
    from trimcp.transports.http.sessions import SessionTable

__all__ = ["Routing"]

_LISTEN: Final = "subscriptions/listen"
_NO_SESSION: Final = "send initialize first, and its Mcp-Session-Id with everything after"


@attrs.define(eq=False)
class Routing:
    """Finds the session of each POST of one face."""

    service: Service
    settings: Settings
    sessions: SessionTable
    _modern: frozenset[Revision] = attrs.field(init=False)
    _legacy: frozenset[Revision] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._modern = frozenset(revision for revision in self.service.revisions if revision.modern)
        self._legacy = frozenset(self.service.revisions) - self._modern

    @property
    def keeps_sessions(self) -> bool:
        """Whether clients may have sessions here."""
        return bool(self._legacy) and not self.settings.stateless

    def route(self, exchange: Exchange, message: Message) -> PushedSession | None:
        """Return the session that is to take the message, or None if the exchange was answered here."""
        try:
            return self._find(exchange, message)
        except _Refused as refused:
            headers = (*JSON_HEADERS, *exchange.headers)
            if refused.status == 503:
                headers = (*headers, ("Retry-After", "1"))
            exchange.refuse(Response(refused.status, headers, refused.body))
            return None

    def _find(self, exchange: Exchange, message: Message) -> PushedSession:
        headers = exchange.head.headers
        version, id = headers.get("mcp-protocol-version"), headers.get("mcp-session-id")
        if self._is_modern(message, version, id):
            return self._alone(exchange, message, version)
        if version is not None and find(version) not in self._legacy:
            raise self._unsupported(message, version)
        if self.settings.stateless:
            return self._without_session(exchange, message, version)
        if id is None and type(message) is Request and message.method == "initialize":
            return self._new(exchange, message)
        return self._known(exchange, message, id)

    def delivered(self, exchange: Exchange, message: Message) -> None:
        """End an exchange whose message asked for nothing, now that its session has it."""
        if exchange.answered or exchange.awaited > 0:
            return
        if type(message) is Malformed:
            error = encode_error(None, message.code, message.message, {"reason": message.reason})
            exchange.refuse(Response(400, (*JSON_HEADERS, *exchange.headers), error))
            return
        own, exchange.own = exchange.own, None
        exchange.accepted()
        if own is not None:
            own.leave()

    # One exchange, one session

    def _is_modern(self, message: Message, version: str | None, id: str | None) -> bool:
        if not self._modern or not self._legacy:
            return bool(self._modern)
        if type(message) is Request:
            meta = message.params and message.params.get("_meta")
            if type(meta) is dict and (META_PROTOCOL_VERSION in meta or META_CLIENT_CAPABILITIES in meta):
                return True
            if message.method == "server/discover":
                return True
        if version is None:
            return False
        revision = find(version)
        return revision in self._modern or (revision is None and id is None)

    def _alone(self, exchange: Exchange, message: Message, version: str | None) -> PushedSession:
        exchange.statuses = True
        if type(message) is Request:
            wrong = _mismatch(exchange, message)
            if wrong is not None:
                security_event("header_mismatch", why=wrong, peer=exchange.head.peer, principal=exchange.principal)
                raise _Refused(400, encode_error(message.id, HEADER_MISMATCH, wrong))
            exchange.awaited = 1
            exchange.always_streams = message.method == _LISTEN
            if exchange.always_streams and not exchange.sse:
                why = "a subscription is answered with text/event-stream"
                raise _Refused(406, encode_error(message.id, INVALID_REQUEST, why))
        elif type(message) is Malformed:
            raise _malformed(message, version, modern=exchange.statuses)
        elif type(message) is not Notification:
            raise _Refused(400, encode_error(None, INVALID_REQUEST, "a POST carries one request or one notification"))
        exchange.own = session = self.service.open_brief()
        return session

    def _without_session(self, exchange: Exchange, message: Message, version: str | None) -> PushedSession:
        """Serve a legacy client that gets no session: as if its handshake had been here."""
        if type(message) is Malformed:
            raise _malformed(message, version, modern=exchange.statuses)
        exchange.malformed = type(message) is Batch
        exchange.awaited = _requests(message)
        exchange.own = session = self.service.open(NOWHERE)
        if type(message) is not Request or message.method != "initialize":
            revision = UNNAMED if version is None else find(version)
            session.assume(revision if revision in self._legacy else min(self._legacy))
        return session

    # Legacy sessions

    def _new(self, exchange: Exchange, message: Request) -> PushedSession:
        if self.sessions.full or exchange.face.draining:
            if not exchange.face.draining:
                security_event("flood_refused", what="sessions", peer=exchange.head.peer)
            raise _Refused(503, encode_error(message.id, OVERLOADED, "no more sessions now; try again later"))
        session = self.sessions.make(self.service, exchange.principal)
        session.exchange_began(exchange)
        exchange.opening = True
        exchange.awaited = 1
        return session.pushed

    def _known(self, exchange: Exchange, message: Message, id: str | None) -> PushedSession:
        request = message.id if type(message) is Request or type(message) is Malformed else None
        if id is None:
            if type(message) is Malformed:
                raise _malformed(message, exchange.head.headers.get("mcp-protocol-version"), modern=False)
            raise _Refused(400, encode_error(request, INVALID_REQUEST, _NO_SESSION))
        session = self.sessions.find(id, exchange.principal)
        if session is None:
            raise _Refused(404, encode_error(request, INVALID_REQUEST, "there is no such session; initialize anew"))
        session.exchange_began(exchange)
        exchange.malformed = type(message) is Malformed or type(message) is Batch
        exchange.awaited = _requests(message)
        return session.pushed

    def _unsupported(self, message: Message, version: str) -> _Refused:
        supported = [revision.name for revision in sorted(self.service.revisions, reverse=True)]
        data = {"supported": supported, "requested": version[:64]}
        id = message.id if type(message) is Request else None
        return _Refused(400, encode_error(id, UNSUPPORTED_VERSION, "unsupported protocol version", data))


class _Refused(Exception):
    """The exchange is answered here."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status)
        self.status = status
        self.body = body


def _malformed(message: Malformed, version: str | None, *, modern: bool) -> _Refused:
    """Return the refusal of what is no message, by its id if that can be read."""
    revision = None if version is None else find(version)
    null_id = not modern and (revision is None or not revision.error_without_id)
    id = message.id if message.answerable else None
    security_event("garbage", why=message.message, id=message.id)
    body = encode_error(id, message.code, message.message, {"reason": message.reason}, null_id=null_id)
    return _Refused(ERRORS[message.code].http_status, body)


def _mismatch(exchange: Exchange, message: Request) -> str | None:
    """Say how headers and body differ. Where the body lacks its envelope there is nothing to compare with."""
    params = message.params
    meta = params and params.get("_meta")
    if params is None or type(meta) is not dict or META_CLIENT_CAPABILITIES not in meta:
        return None
    version = meta.get(META_PROTOCOL_VERSION)
    if type(version) is not str:
        return None
    method = METHODS.get(message.method)
    named = None if method is None else method.mirrored
    return check_request(exchange.head.headers, message.method, params, named=named, version=version)


def _requests(message: Message) -> int:
    if type(message) is Batch:
        return sum(type(member) is Request for member in message.members)
    return int(type(message) is Request)
