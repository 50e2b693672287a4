"""What a message's admission says of who sent it, in the same words wherever handlers meet a message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimcp.protocol.events import Admission
from trimcp.wire.capabilities import ClientCapabilities, ServerCapabilities
from trimcp.wire.common import META_TRACE, Implementation
from trimcp.wire.revisions import Revision

__all__ = ["Admitted"]


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
    def capabilities(self) -> ClientCapabilities | ServerCapabilities:
        """What the sender declared it can do."""
        return self.admission.capabilities

    @property
    def principal(self) -> str | None:
        """Who the transport says the sender is; None where nobody authenticates."""
        return self.admission.principal

    @property
    def meta(self) -> Mapping[str, Any]:
        """Its `_meta` as it came: trace context (`traceparent`, ...) and keys of your own."""
        return self.admission.meta or {}

    @property
    def trace(self) -> Mapping[str, str]:
        """Its W3C trace context (`traceparent`, `tracestate`, `baggage`), as far as it came."""
        meta = self.meta
        return {key: meta[key] for key in META_TRACE if isinstance(meta.get(key), str)}
