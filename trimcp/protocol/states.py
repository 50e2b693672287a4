"""The state machines of the protocol as tables; a transition missing from its table is a protocol error.

There are two, the same for both sides:

* The *handshake* of the legacy era, one per connection: from NEW through the exchange of `initialize` and
  `notifications/initialized` to READY. A connection that uses only the modern era stays NEW, because there each
  request is complete and no state is kept (2026-07-28, "Statelessness").
* A *received request*, one per id in progress: exactly one reply is sent, or none after the peer cancelled it
  (2025-11-25 basic/utilities/cancellation; 2026-07-28 basic/patterns/cancellation).

A request of ours has no states: it is in `Connection.outbound` until it is answered, cancelled or lost. A late reply
finds no entry and is ignored, as both cancellation pages require.

Not in tables: the revision agreed on (`Connection.revision`), and that `initialize` cannot be cancelled.
The diagrams in the documentation are drawn from these tables by `docs/diagrams.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import TYPE_CHECKING, TypeVar

from trimcp.errors import LocalError


class _Keyed(Enum):
    """An enumeration whose members are looked up by identity. `Enum` computes a hash in Python, twice for a request."""

    if not TYPE_CHECKING:  # for them it is the hash of any object
        __hash__ = object.__hash__


class Handshake(_Keyed):
    """The states of the legacy handshake of one connection."""

    NEW = auto()
    OFFERED = auto()
    AGREED = auto()
    READY = auto()
    CLOSED = auto()


class HandshakeStep(_Keyed):
    """The events of the handshake."""

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


class Inbound(_Keyed):
    """The states of a request from the peer."""

    UNDER_WAY = auto()
    CANCELLED = auto()
    ANSWERED = auto()


class InboundStep(_Keyed):
    """The events of a request from the peer."""

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
    """Return the next state.

    Raises LocalError: the table has no such transition: the caller attempted something that the protocol forbids.
    """
    try:
        return table[state][step]
    except KeyError:
        raise LocalError(f"{step.name.lower()} is not possible in state {state.name.lower()}") from None
