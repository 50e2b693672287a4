"""Every state machine of the protocol as a table; the lookup that misses *is* the protocol error.

There are two small machines, and this file does not know which side we are on.

* The *handshake* of the legacy era, one per connection: from NEW through the exchange of `initialize` and
  `notifications/initialized` to READY. A connection that only ever speaks the modern era stays NEW, because there a
  request carries everything itself and no state is remembered (2026-07-28, "Statelessness").
* An *inbound request*, one per id the peer has under way with us: exactly one reply leaves, or none once the peer
  cancelled it (2025-11-25 basic/utilities/cancellation; 2026-07-28 basic/patterns/cancellation).

A request of ours has no states: it is in `Connection.outbound` until it is answered, given up or lost, so a late reply
finds nothing and is ignored, as both cancellation pages ask.

Not tabular are which revision was agreed on (`Connection.revision`) and that `initialize` cannot be cancelled.
The diagrams in the documentation are drawn from these tables by `docs/diagrams.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import TypeVar

from trimcp.errors import LocalError


class Handshake(Enum):
    """How far the legacy handshake of one connection is."""

    NEW = auto()
    OFFERED = auto()
    AGREED = auto()
    READY = auto()
    CLOSED = auto()


class HandshakeStep(Enum):
    """What moves the handshake."""

    INITIALIZE = auto()
    RESULT = auto()
    REFUSED = auto()
    INITIALIZED = auto()
    CLOSE = auto()


HANDSHAKE: Mapping[Handshake, Mapping[HandshakeStep, Handshake]] = {
    Handshake.NEW: {HandshakeStep.INITIALIZE: Handshake.OFFERED, HandshakeStep.CLOSE: Handshake.CLOSED},
    Handshake.OFFERED: {
        HandshakeStep.RESULT: Handshake.AGREED,
        HandshakeStep.REFUSED: Handshake.NEW,
        HandshakeStep.CLOSE: Handshake.CLOSED,
    },
    Handshake.AGREED: {HandshakeStep.INITIALIZED: Handshake.READY, HandshakeStep.CLOSE: Handshake.CLOSED},
    Handshake.READY: {HandshakeStep.CLOSE: Handshake.CLOSED},
    Handshake.CLOSED: {HandshakeStep.CLOSE: Handshake.CLOSED},
}


class Inbound(Enum):
    """A request of the peer's, as we see it."""

    UNDER_WAY = auto()
    CANCELLED = auto()
    ANSWERED = auto()


class InboundStep(Enum):
    """What happens to a request of the peer's."""

    CANCEL = auto()
    ANSWER = auto()
    DROP = auto()


INBOUND: Mapping[Inbound, Mapping[InboundStep, Inbound]] = {
    Inbound.UNDER_WAY: {InboundStep.CANCEL: Inbound.CANCELLED, InboundStep.ANSWER: Inbound.ANSWERED},
    Inbound.CANCELLED: {InboundStep.CANCEL: Inbound.CANCELLED, InboundStep.DROP: Inbound.ANSWERED},
    Inbound.ANSWERED: {},
}


_State = TypeVar("_State", bound=Enum)
_Step = TypeVar("_Step", bound=Enum)


def fire(table: Mapping[_State, Mapping[_Step, _State]], state: _State, step: _Step) -> _State:
    """Return the state that follows, or raise.

    Raises:
        LocalError: the table has no such transition; whoever fired it asked for something the protocol forbids.
    """
    try:
        return table[state][step]
    except KeyError:
        raise LocalError(f"{step.name.lower()} is not possible in state {state.name.lower()}") from None
