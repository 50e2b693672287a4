"""How an upstream is supervised, and what is known of it: values, no tasks."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from random import Random

import attrs

from trimcp.bounds import checked
from trimcp.values import valued

__all__ = ["Breaker", "Health", "Restarts", "UpstreamState", "UpstreamStatistics", "one_line"]

_LONGEST_LINE = 500  # characters


@attrs.frozen(field_transformer=checked(zero=("first_pause", "longest_pause", "lasting")))
@valued
class Restarts:
    """When a lost connection is opened again, and when no more. Times are seconds of Trio's clock.

    The pause before an attempt is drawn between 0 and a ceiling that doubles with each connection in a row that failed
    or did not last ("full jitter": those who lost the same server do not come back at the same moment).

    Attributes:
        most, within: so many restarts in so many seconds, and it is given up.
        first_pause: the ceiling after a connection that had lasted.
        longest_pause: the ceiling at most.
        lasting: a connection that lived this long counts as one that lasted.
        connect_timeout: how long an attempt may take, from starting the server to its first answers. The default suits
            programs that are downloaded when they are started.
    """

    most: int = 30
    within: float = 600.0
    first_pause: float = 0.5
    longest_pause: float = 60.0
    lasting: float = 10.0
    connect_timeout: float = 60.0

    def pause(self, in_a_row: int, random: Random) -> float:
        """Return how long to wait after so many connections in a row that failed or did not last."""
        doubled = self.first_pause * 2.0 ** min(in_a_row, 64)
        return random.uniform(0, min(doubled, self.longest_pause))


@attrs.frozen(field_transformer=checked())
@valued
class Breaker:
    """When an upstream is left alone for a while (the circuit is open): calls fail at once meanwhile.

    Then there is one probe, a new connection or a ping over the one there is. If it is answered calls go through again,
    but the first of them that fails opens the circuit once more.

    Attributes:
        failures: connections in a row that failed or did not last, or calls in a row that got no answer. An error is an
            answer, and a call its caller gave up is neither.
        open_for: seconds until the probe; connections come after a further pause of `Restarts`.
    """

    failures: int = 5
    open_for: float = 30.0


@attrs.frozen(field_transformer=checked())
@valued
class Health:
    """When an upstream is asked whether it still lives: while it talks, never. Times are seconds of Trio's clock.

    Any message counts as a sign of life, an error and another call's progress too. An upstream that is silent is asked
    at the latest after twice the time named here; one of whose calls failed without an answer, at once.

    Attributes:
        owing: silence of an upstream that owes answers. Subscriptions are none.
        idle: silence of one that owes nothing.
        patience: how long it may be silent after it was asked; then the connection is given up.
    """

    owing: float = 15.0
    idle: float = 60.0
    patience: float = 10.0


class UpstreamState(Enum):
    """What a supervised upstream is doing."""

    CONNECTING = "connecting"
    """A connection is being opened."""

    UP = "up"
    """Calls go through."""

    WAITING = "waiting"
    """The connection is lost; the next attempt comes after a pause."""

    OPEN = "open"
    """The circuit is open: it failed too often in a row and is left alone for a while; calls fail at once."""

    PROBING = "probing"
    """The circuit is half open: one probe shows whether calls may go through again."""

    GIVEN_UP = "given up"
    """It was restarted too often; nothing is tried any more before `restart`."""

    ENDED = "ended"
    """Its block was left."""


@attrs.frozen
@valued
class UpstreamStatistics:
    """A snapshot of one supervised upstream. Times are on Trio's clock.

    Attributes:
        state: what it is doing, since `since`.
        since: when that began.
        next_attempt: when it is tried again, or None if that is not being waited for.
        connections: connections that came to stand.
        restarts: attempts to open one after the first.
        failed_attempts: attempts that failed.
        losses: connections that were lost.
        unanswered_calls: calls that ended without an answer while the connection stood.
        repeated_calls: calls made a second time.
        refused_calls: calls that failed at once, since it was down.
        pings: how often it was asked whether it lives.
        reasons: what went wrong with the last ten connections, the newest last. May quote the server: untrusted text.
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
        """What went wrong last, or None if nothing ever did."""
        return self.reasons[-1] if self.reasons else None


def one_line(text: str) -> str:
    """Return a reason, which may quote a server, as one bounded line without control characters."""
    line = " ".join(text.split())[:_LONGEST_LINE]
    return "".join(character if character.isprintable() else "?" for character in line)
