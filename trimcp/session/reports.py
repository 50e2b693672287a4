"""What one request has reported of its progress, over all runs of its handler."""

from __future__ import annotations

import logging
import math
from typing import Final

import orjson

from trimcp.support.slotted import slotted

log: logging.Logger = logging.getLogger("trimcp.session")

NUMBERS: Final = (int, float)  # no bool, and no number of another library


@slotted
class Reports:
    """What one request has reported of its progress."""

    last: float = -math.inf  # the last value
    count: int = 0  # how many reports waited for room
    head: bytes | None = None  # a report's text up to its first number, the same for all; None before the first
    # `total`, `tail`: the total of the last report, and the text that follows the first number
    total: float | None = None
    tail: bytes = b"}}"
    latest_queued: bool = False  # whether one of which only the latest counts may wait in the sink
    # Total and message of the last report that was no plain numbers, or was sent to nobody
    told: tuple[float | None, str | None] = (None, None)

    def drop(self, progress: float) -> None:
        """Say that a report is not sent because its value did not increase (basic/utilities/progress)."""
        log.debug("progress %r after %r is not sent: it must increase", progress, self.last)

    @property
    def kept(self) -> float | None:
        """The last value, for the next run of the handler; None if there is none that JSON has."""
        last = self.last
        return last if type(last) in NUMBERS and -math.inf < last < math.inf and abs(last) < 2**63 else None

    def text(self, progress: float, total: float | None) -> bytes | None:
        """Return a report of which only the numbers are new; None if JSON cannot carry one of them."""
        assert self.head is not None
        try:
            if total is not self.total:
                self.tail = b"}}" if total is None else b',"total":%b}}' % orjson.dumps(total)
                self.total = total
            data = b"".join((self.head, orjson.dumps(progress), self.tail))
        except TypeError:  # an integer beyond 64 bits
            return None
        return data if data.find(b":null") < 0 else None  # of NaN and Infinity
