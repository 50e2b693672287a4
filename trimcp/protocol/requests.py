"""Requests under way, in both directions, as the engine keeps them."""

from __future__ import annotations

import attrs

from trimcp.protocol.events import Admission
from trimcp.protocol.states import Inbound, Outbound
from trimcp.protocol.vocabulary import Verb
from trimcp.wire.jsonrpc import RequestId

__all__ = ["Encoded", "InboundRequest", "OutboundRequest"]


@attrs.frozen(eq=False, repr=False)
class Encoded:
    """A result encoded already: the JSON text of the result object in UTF-8, complete for its revision."""

    data: bytes


@attrs.define(eq=False, repr=False)
class InboundRequest:
    """A request of the peer's that is under way here."""

    id: RequestId
    verb: Verb
    admission: Admission
    state: Inbound = Inbound.UNDER_WAY


@attrs.define(eq=False, repr=False)
class OutboundRequest:
    """A request of ours that is under way there."""

    id: RequestId
    verb: Verb
    wants_progress: bool
    state: Outbound = Outbound.PENDING
