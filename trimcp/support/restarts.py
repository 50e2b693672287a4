"""When a connection that failed or was lost is opened again, with pauses that grow, and when it is given up."""

from __future__ import annotations

from collections import deque
from random import Random

import attrs

from trimcp.support.bounds import checked
from trimcp.support.slotted import valued


@attrs.frozen(field_transformer=checked(zero=("first_pause", "longest_pause", "lasting")))
@valued
class Restarts:
    """When a lost connection is reopened, and when it is given up. Times are seconds of Trio's clock.

    The pause before an attempt is drawn between 0 and a limit that doubles with each connection in a row that failed
    or did not last ("full jitter": clients that lost the same server do not all reconnect at the same moment).

    Attributes:
        most, within: it is given up after `most` restarts within `within` seconds.
        first_pause: the limit after a connection that lasted.
        longest_pause: the largest limit.
        lasting: a connection of this age has lasted.
        connect_timeout: how long an attempt may take, from starting the server to its first answers. The default is
            long enough for programs that are downloaded when they are started.
    """

    most: int = 30
    within: float = 600.0
    first_pause: float = 0.5
    longest_pause: float = 60.0
    lasting: float = 10.0
    connect_timeout: float = 60.0

    def pause(self, in_a_row: int, random: Random) -> float:
        """Return how long to wait after `in_a_row` consecutive connections that failed or did not last."""
        doubled = self.first_pause * 2.0 ** min(in_a_row, 64)
        return random.uniform(0, min(doubled, self.longest_pause))


@attrs.define(eq=False)
class RestartCount:
    """Counts the restarts of one connection. The caller has the clock."""

    restarts: Restarts
    _random: Random = attrs.field(factory=Random)
    in_a_row: int = attrs.field(init=False, default=0)  # how many connections in a row failed or did not last
    _recent: deque[float] = attrs.field(init=False, factory=deque)

    def ended(self, now: float, since: float | None) -> None:
        """Note that a connection was lost that had been open since this time, or failed if that is None."""
        if since is not None and now - since >= self.restarts.lasting:
            self.in_a_row = 0
        else:
            self.in_a_row += 1

    def next_pause(self, now: float, longer: float = 0.0) -> float | None:
        """Count a restart, and return the seconds to wait before it, `longer` included; None if there were too many."""
        while self._recent and self._recent[0] <= now - self.restarts.within:
            self._recent.popleft()
        if len(self._recent) >= self.restarts.most:
            return None
        pause = self.restarts.pause(self.in_a_row, self._random) + longer
        self._recent.append(now + pause)
        return pause

    def forget(self) -> None:
        """Begin to count anew."""
        self._recent.clear()
        self.in_a_row = 0
