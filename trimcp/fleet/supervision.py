"""Settings of a supervised upstream, and its state and statistics: plain values, no tasks."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import attrs

from trimcp.support.bounds import checked
from trimcp.support.values import valued


@attrs.frozen(field_transformer=checked())
@valued
class Breaker:
    """When the circuit opens: for some time nothing is sent to the upstream, and calls fail at once.

    Then it is probed once, with a new connection or a ping over the present one. If that succeeds calls are sent again,
    but the first of them that fails opens the circuit again.

    Attributes:
        failures: consecutive connections that failed or did not last, or consecutive calls that got no answer. An
            error is an answer; a cancelled call does not count.
        open_for: seconds until the probe; a new connection is made after a further pause of `Restarts`.
    """

    failures: int = 5
    open_for: float = 30.0


@attrs.frozen(field_transformer=checked())
@valued
class Health:
    """When an upstream that sends nothing is pinged. Times are seconds of Trio's clock.

    Any message counts, including errors and progress of other calls. The ping is sent at the latest after twice the
    given time; after a call that got no answer, at once.

    Attributes:
        owing: seconds without a message while requests are in progress; subscriptions do not count.
        idle: seconds without a message while none are.
        patience: seconds to wait for a message after the ping; then the connection is closed.
    """

    owing: float = 15.0
    idle: float = 60.0
    patience: float = 10.0


class UpstreamState(Enum):
    """The state of a supervised upstream."""

    CONNECTING = "connecting"
    """A connection is being opened."""

    UP = "up"
    """There is a connection; calls can be made."""

    WAITING = "waiting"
    """The connection is lost, or its server shuts down; the next attempt is made after a pause."""

    OPEN = "open"
    """The circuit is open after too many failures in a row; calls fail at once."""

    PROBING = "probing"
    """The circuit is half open: one probe shows whether calls can be made again."""

    GIVEN_UP = "given up"
    """It was restarted too often; there is no further attempt until `restart`."""

    ENDED = "ended"
    """Its block was left."""


@attrs.frozen
@valued
class UpstreamStatistics:
    """A snapshot of one supervised upstream. Times are on Trio's clock.

    Attributes:
        state: its state.
        since: when it entered that state.
        next_attempt: when it reconnects or is probed, or None if no time is set.
        connections: connections that were opened.
        restarts: attempts to open one after the first.
        failed_attempts: attempts that failed.
        losses: connections that were lost.
        unanswered_calls: calls that ended without an answer although the connection was not lost.
        repeated_calls: calls made a second time.
        refused_calls: calls that failed at once, since it was down.
        pings: pings that were sent.
        reasons: why the last ten connections failed or were lost, the newest last. May quote the server: untrusted
            text.
    """

    state: UpstreamState
    since: float
    next_attempt: float | None = None
    connections: int = 0
    restarts: int = 0
    failed_attempts: int = 0
    losses: int = 0
    unanswered_calls: int = 0
    repeated_calls: int = 0
    refused_calls: int = 0
    pings: int = 0
    reasons: Sequence[str] = ()

    @property
    def last_reason(self) -> str | None:
        """The last of `reasons`, or None if there are none."""
        return self.reasons[-1] if self.reasons else None
