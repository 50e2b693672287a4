"""The events that the engine makes of received messages: plain values, exactly one for each message.

Both eras produce the same `Admission` for a received request. Code above the engine does not depend on an era:
everything that a handler may know about the sender is in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from trimcp.principal import Principal
from trimcp.protocol.bound_methods import BoundMethod
from trimcp.protocol.states import Inbound
from trimcp.support.slotted import shown, slotted
from trimcp.wire.capabilities import ClientCapabilities, ServerCapabilities
from trimcp.wire.common import META_TRACE, Implementation, LoggingLevel
from trimcp.wire.jsonrpc import RequestId
from trimcp.wire.lifecycle import ProgressParams
from trimcp.wire.revisions import Revision


@slotted
@shown
class Admission:
    """Who sent a message, in which revision, and what may be sent to them.

    Attributes:
        revision: the revision of this request.
        peer: the sender's name and version, as sent (not verified), or None.
        capabilities: what the sender declared.
        log_level: the lowest level of log messages wanted for this request, or None for none.
        progress_token: the token for progress messages, or None if none are wanted.
        meta: the request's `_meta` as received, or None.
        principal: the sender according to the transport; None if nobody authenticates. It is the key of all stored
            data.
    """

    revision: Revision
    peer: Implementation | None
    capabilities: ClientCapabilities | ServerCapabilities
    log_level: LoggingLevel | None = None
    progress_token: RequestId | None = None
    meta: Mapping[str, Any] | None = None
    principal: Principal | None = None


class Admitted:
    """Base class of objects with an `admission`: a request (in a task, a thread or a process), a notification."""

    __slots__ = ()

    @property
    def admission(self) -> Admission:
        """Everything known about the sender of the message."""
        raise NotImplementedError

    @property
    def revision(self) -> Revision:
        """The revision of the message."""
        return self.admission.revision

    @property
    def peer(self) -> Implementation | None:
        """The sender's name and version, as sent (not verified), or None."""
        return self.admission.peer

    @property
    def capabilities(self) -> ClientCapabilities:
        """What the client that sent it declared."""
        capabilities = self.admission.capabilities
        assert isinstance(capabilities, ClientCapabilities)
        return capabilities

    @property
    def principal(self) -> Principal | None:
        """The sender according to the transport; None if nobody authenticates."""
        return self.admission.principal

    @property
    def progress_wanted(self) -> bool:
        """Whether the sender asked for progress. If not, progress reports are dropped."""
        return self.admission.progress_token is not None

    @property
    def meta(self) -> Mapping[str, Any]:
        """Its `_meta` as received: trace context (`traceparent`, ...) and keys of your own."""
        return self.admission.meta or {}

    @property
    def trace(self) -> Mapping[str, str]:
        """Its W3C trace context (`traceparent`, `tracestate`, `baggage`): the members that were sent."""
        meta = self.meta
        return {key: meta[key] for key in META_TRACE if isinstance(meta.get(key), str)}


@slotted
@shown
class RequestReceived:
    """The peer sent a request that was admitted; the session must send exactly one answer to `id`.

    It is also the engine's record of the request until then.
    """

    id: RequestId
    method: BoundMethod
    params: Any  # its payload in its revision; `raw` is the JSON object received
    raw: Mapping[str, Any]
    admission: Admission
    state: Inbound = Inbound.UNDER_WAY  # changed by the engine alone


@slotted
@shown
class AnsweredByEngine:
    """The engine answered a request by itself (`initialize`, `ping`, ...): `reply` is to be sent unchanged."""

    id: RequestId
    method: str
    reply: bytes


@slotted
@shown
class Rejected:
    """A message was refused. `reply` is the error to send, or None if none may be sent; `error` is its code."""

    why: str
    reply: bytes | None = None
    id: RequestId | None = None
    error: int | None = None


@slotted
@shown
class Cancelled:
    """The peer cancelled its request `id`, which is in progress: stop it, and send nothing for it."""

    id: RequestId
    reason: str | None = None


@slotted
@shown
class Replied:
    """Our request `id` was answered: exactly one of `result` (raw JSON object) and `error` is set."""

    id: RequestId
    result: dict[str, Any] | None = None
    error: Exception | None = None


@slotted
@shown
class Progressed:
    """Our request `id` made progress."""

    id: RequestId
    params: ProgressParams


@slotted
@shown
class Notified:
    """A notification that does not refer to a request of ours by id."""

    method: BoundMethod
    params: Any
    admission: Admission


@slotted
@shown
class Ignored:
    """A message that needs no action, such as a reply to a request cancelled long ago."""

    why: str


@slotted
@shown
class Forgotten:
    """The peer has lost our subscriptions; requests in progress are not affected."""

    why: str


@slotted
@shown
class BatchReceived:
    """A 2025-03-26 array: its members' events in order; the replies to its requests are sent together as one array."""

    events: tuple[Event, ...]


Event: TypeAlias = (
    RequestReceived
    | AnsweredByEngine
    | Rejected
    | Cancelled
    | Replied
    | Progressed
    | Notified
    | Ignored
    | Forgotten
    | BatchReceived
)
