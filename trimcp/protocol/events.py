"""The events that the engine makes of incoming messages. Inert values; each message yields exactly one.

`Admission` is what both eras produce for an inbound request. Nobody above the engine asks about an era: what a
handler may know of who asks, and how, stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import attrs

from trimcp.principal import Principal
from trimcp.protocol.vocabulary import Verb
from trimcp.values import shown
from trimcp.wire.capabilities import ClientCapabilities, ServerCapabilities
from trimcp.wire.common import META_TRACE, Implementation, LoggingLevel
from trimcp.wire.jsonrpc import RequestId
from trimcp.wire.lifecycle import ProgressParams
from trimcp.wire.revisions import Revision


@attrs.define(eq=False)
@shown
class Admission:
    """Who asks, in which revision, and what they may be sent.

    Attributes:
        revision: the revision this request is spoken in.
        peer: the asker's name and version as it reports them (unverified), or None.
        capabilities: what the asker declared.
        log_level: the lowest level of log message it wants for this request, or None for none.
        progress_token: the token it wants progress under, or None for no progress.
        meta: the request's `_meta` as it came, or None.
        principal: who the transport says it is; None until someone authenticates. Whatever is kept is keyed by it.
    """

    revision: Revision
    peer: Implementation | None
    capabilities: ClientCapabilities | ServerCapabilities
    log_level: LoggingLevel | None = None
    progress_token: RequestId | None = None
    meta: Mapping[str, Any] | None = None
    principal: Principal | None = None


class Admitted:
    """What has an `admission`: a request in the event loop, in a thread or in a process of its own, a notification."""

    __slots__ = ()

    @property
    def admission(self) -> Admission:
        """Everything known of the message's origin, in one record."""
        raise NotImplementedError

    @property
    def revision(self) -> Revision:
        """The revision it is spoken in."""
        return self.admission.revision

    @property
    def peer(self) -> Implementation | None:
        """The sender's name and version as it reports them (unverified), or None."""
        return self.admission.peer

    @property
    def capabilities(self) -> ClientCapabilities:
        """What the client that sent it declared it can do."""
        capabilities = self.admission.capabilities
        assert isinstance(capabilities, ClientCapabilities)
        return capabilities

    @property
    def principal(self) -> Principal | None:
        """Who the transport says the sender is; None where nobody authenticates."""
        return self.admission.principal

    @property
    def progress_wanted(self) -> bool:
        """Whether the sender asked for progress. If not, progress reports are dropped."""
        return self.admission.progress_token is not None

    @property
    def meta(self) -> Mapping[str, Any]:
        """Its `_meta` as it came: trace context (`traceparent`, ...) and keys of your own."""
        return self.admission.meta or {}

    @property
    def trace(self) -> Mapping[str, str]:
        """Its W3C trace context (`traceparent`, `tracestate`, `baggage`), as far as it came."""
        meta = self.meta
        return {key: meta[key] for key in META_TRACE if isinstance(meta.get(key), str)}


@attrs.define(eq=False)
@shown
class RequestReceived:
    """The peer asks something that was admitted; the session owes exactly one answer to `id`."""

    id: RequestId
    verb: Verb
    params: Any
    raw: Mapping[str, Any]
    admission: Admission


@attrs.define(eq=False)
@shown
class Settled:
    """The engine answered a request by itself (`initialize`, `ping`, ...): `reply` is to be sent as it is."""

    id: RequestId
    method: str
    reply: bytes


@attrs.define(eq=False)
@shown
class Rejected:
    """A message was refused. `reply` is the error to send, or None where nobody may be answered; `error` its code."""

    why: str
    reply: bytes | None = None
    id: RequestId | None = None
    error: int | None = None


@attrs.define(eq=False)
@shown
class Cancelled:
    """The peer gave up the request `id`, which is under way here: stop it, and send nothing for it."""

    id: RequestId
    reason: str | None = None


@attrs.define(eq=False)
@shown
class Replied:
    """Our request `id` was answered: exactly one of `result` (raw JSON object) and `error` is set."""

    id: RequestId
    result: dict[str, Any] | None = None
    error: Exception | None = None


@attrs.define(eq=False)
@shown
class Progressed:
    """Our request `id` made progress."""

    id: RequestId
    params: ProgressParams


@attrs.define(eq=False)
@shown
class Notified:
    """A notification that belongs to no request of ours by id."""

    verb: Verb
    params: Any
    admission: Admission


@attrs.define(eq=False)
@shown
class Ignored:
    """A message that asks for nothing and changes nothing, such as a reply to a request given up long ago."""

    why: str


@attrs.define(eq=False)
@shown
class Forgotten:
    """The peer has lost our subscriptions; requests under way are not concerned."""

    why: str


@attrs.define(eq=False)
@shown
class BatchReceived:
    """A 2025-03-26 array: its members' events in order; the replies to its requests leave together as one array."""

    events: tuple[Event, ...]


Event: TypeAlias = (
    RequestReceived
    | Settled
    | Rejected
    | Cancelled
    | Replied
    | Progressed
    | Notified
    | Ignored
    | Forgotten
    | BatchReceived
)
