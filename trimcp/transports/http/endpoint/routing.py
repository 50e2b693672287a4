"""Which session a POST belongs to, or why it is refused, decided from its head and message alone.

Since 2026-07-28 the body of a request contains its client and revision, and its headers must agree with that. Before,
`initialize` makes the session, and `Mcp-Session-Id` names it. The order of the checks is the specification's: message,
envelope, headers against body; later checks are the engine's. This is one of the three modules that may ask about an
era.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final, Literal, TypeAlias

import attrs

from trimcp.framing.headers import check_request
from trimcp.security import security_event
from trimcp.transports.http.interfaces import Head, HttpResponse, refusal
from trimcp.wire.codes import ERRORS, HEADER_MISMATCH, UNSUPPORTED_VERSION
from trimcp.wire.common import META_CLIENT_CAPABILITIES, META_PROTOCOL_VERSION
from trimcp.wire.jsonrpc import Batch, Malformed, Message, Notification, Request, RequestId
from trimcp.wire.methods import LISTEN, NAMED
from trimcp.wire.revisions import UNNAMED, Revision, find

_NO_SESSION: Final = "send initialize first, and its Mcp-Session-Id with everything after"

Place: TypeAlias = Literal["single", "assumed", "new", "known"]
"""The session of a POST.

- "single": one for this request alone (since 2026-07-28).
- "assumed": one for this request alone, as if after a legacy handshake (stateless).
- "new": a new one (`initialize`).
- "known": the one that its `Mcp-Session-Id` names.
"""


@attrs.frozen
class PostPlan:
    """How a POST is handled."""

    place: Place  # the kind of its session
    awaited: int = 0  # the number of requests in the body
    statuses: bool = False  # whether errors have the HTTP status of the specification's table
    always_streams: bool = False  # whether the response is always a stream (`subscriptions/listen`)
    revision: Revision | None = None  # the revision of an assumed handshake; None if the message has one


_plan = lru_cache(maxsize=64)(PostPlan)  # there are few different plans
_ALONE: Final = PostPlan("single", 1, statuses=True)
_LISTENING: Final = PostPlan("single", 1, statuses=True, always_streams=True)
_NEW: Final = PostPlan("new", awaited=1)
_KNOWN: Final = PostPlan("known", awaited=1)


@attrs.frozen
class Routing:
    """Decides how each POST of one application is handled."""

    modern: frozenset[Revision]  # the served revisions without sessions
    legacy: frozenset[Revision]  # the served revisions with sessions
    stateless: bool  # whether legacy clients get no session
    modern_names: frozenset[str]
    legacy_names: frozenset[str]

    @classmethod
    def of(cls, revisions: Iterable[Revision], *, stateless: bool) -> Routing:
        revisions = frozenset(revisions)
        modern = frozenset(revision for revision in revisions if revision.modern)
        names, both = frozenset(revision.name for revision in modern), frozenset(each.name for each in revisions)
        return cls(modern, revisions - modern, stateless, names, both - names)

    @property
    def keeps_sessions(self) -> bool:
        """Whether clients may have sessions here."""
        return bool(self.legacy) and not self.stateless

    def route(self, head: Head, message: Message, *, events: bool) -> PostPlan | HttpResponse:
        """Return the plan of a POST, or the response that refuses it; `events`: the client accepts a stream of them."""
        headers = head.headers
        version, id = headers.get("mcp-protocol-version"), headers.get("mcp-session-id")
        if self._is_modern(message, version, id):
            return self._alone(head, message, version, events)
        if version is not None and version not in self.legacy_names:
            return self._unsupported(message, version)
        kind = type(message)
        if self.stateless:
            if type(message) is Malformed:
                return _malformed(message, version, modern=False)
            revision = None
            if type(message) is not Request or message.method != "initialize":
                named = UNNAMED if version is None else find(version)
                revision = named if named in self.legacy else min(self.legacy)
            return _plan("assumed", _requests(message), kind is Batch, revision=revision)
        if id is not None:
            if kind is Request:
                return _KNOWN
            return _plan("known", _requests(message), kind is Malformed or kind is Batch)
        if type(message) is Request and message.method == "initialize":
            return _NEW
        if type(message) is Malformed:
            return _malformed(message, version, modern=False)
        return refusal(400, _NO_SESSION, id=id_of(message))

    def _is_modern(self, message: Message, version: str | None, id: str | None) -> bool:
        if not self.modern_names or not self.legacy_names:
            return bool(self.modern_names)
        if type(message) is Request:
            params = message.params
            meta = params and params.get("_meta")
            if type(meta) is dict and (META_PROTOCOL_VERSION in meta or META_CLIENT_CAPABILITIES in meta):
                return True
            if message.method == "server/discover":
                return True
        if version is None:
            return False
        return version in self.modern_names or (id is None and find(version) is None)

    def _alone(self, head: Head, message: Message, version: str | None, events: bool) -> PostPlan | HttpResponse:
        if type(message) is Request:
            wrong = _mismatch(head, message)
            if wrong is not None:
                security_event("header_mismatch", why=wrong, peer=head.peer, principal=head.principal)
                return refusal(400, wrong, id=message.id, code=HEADER_MISMATCH)
            listens = message.method == LISTEN
            if listens and not events:
                return refusal(406, "a subscription is answered with text/event-stream", id=message.id)
            return _LISTENING if listens else _ALONE
        if type(message) is Malformed:
            return _malformed(message, version, modern=True)
        if type(message) is not Notification:
            return refusal(400, "a POST carries one request or one notification")
        return _plan("single", 0, True)

    def _unsupported(self, message: Message, version: str) -> HttpResponse:
        supported = [revision.name for revision in sorted(self.modern | self.legacy, reverse=True)]
        text, id = f"unsupported protocol version; this speaks {', '.join(supported)}", id_of(message)
        if not self.modern:
            return refusal(400, text, id=id)  # -32022 would say that this is a modern server
        data = {"supported": supported, "requested": version[:64]}
        return refusal(400, text, id=id, code=UNSUPPORTED_VERSION, data=data)


def _malformed(message: Malformed, version: str | None, *, modern: bool) -> HttpResponse:
    """Return the refusal of a malformed message, with its id if that can be read."""
    revision = None if version is None else find(version)
    null_id = not modern and (revision is None or not revision.error_without_id)
    id = message.id if message.answerable else None
    security_event("garbage", why=message.message, id=message.id)
    status, data = ERRORS[message.code].http_status, {"reason": message.reason}
    return refusal(status, message.message, id=id, code=message.code, data=data, null_id=null_id)


def _mismatch(head: Head, message: Request) -> str | None:
    """Return how headers and body differ, or None. A body without its envelope is not compared."""
    params = message.params
    meta = params and params.get("_meta")
    if params is None or type(meta) is not dict or META_CLIENT_CAPABILITIES not in meta:
        return None
    version = meta.get(META_PROTOCOL_VERSION)
    if type(version) is not str:
        return None
    return check_request(head.headers, message.method, params, named=NAMED.get(message.method), version=version)


def _requests(message: Message) -> int:
    if type(message) is Batch:
        return sum(type(member) is Request for member in message.members)
    return int(type(message) is Request)


def id_of(message: Message) -> RequestId | None:
    """Return the id for the answer to a message that is refused."""
    return message.id if type(message) is Request or type(message) is Malformed else None
