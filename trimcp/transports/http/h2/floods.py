"""How many frames that cost work and are nobody's use a peer may send, by kind.

At most so many at once, so many for each useful frame, and so many a second.
"""

from __future__ import annotations

from typing import Final

from trimcp.support.rates import TokenBucket
from trimcp.transports.http.h2.frames import Code, Http2Error

_AT_ONCE: Final = 1_000.0
_FOR_EACH: Final = 8.0
_PER_SECOND: Final = 100.0
_RESETS_PER_SECOND: Final = 33.0
RESETS: Final = "resets"
"""Requests that are begun and given up cost much (CVE-2023-44487): there may be as many as were answered, and a few."""


class Allowance:
    """Frames of each kind that the peer may send beside the useful ones."""

    __slots__ = ("_buckets", "_seen", "answered", "now", "useful")

    def __init__(self) -> None:
        self.useful: int = 0  # useful frames so far: with data, and requests
        self.answered: int = 0  # requests that were answered to their end
        self.now: float = 0.0  # the time, in seconds
        self._buckets: dict[str, TokenBucket] = {}
        self._seen: dict[str, int] = {}

    def spend(self, kind: str) -> None:
        """Count a frame. Raises Http2Error if there are too many of its kind."""
        bucket = self._buckets.get(kind)
        if bucket is not None and bucket.tokens >= 1:
            bucket.tokens -= 1
            return
        useful, each, rate = self.useful, _FOR_EACH, _PER_SECOND
        if kind is RESETS:
            useful, each, rate = self.answered, 1.0, _RESETS_PER_SECOND
        if bucket is None:
            bucket = self._buckets[kind] = TokenBucket(rate, _AT_ONCE, self.now)
        else:
            bucket.refill(self.now)
            bucket.tokens = min(bucket.burst, bucket.tokens + each * (useful - self._seen[kind]))
        self._seen[kind] = useful
        if not bucket.take(self.now):
            raise Http2Error(Code.ENHANCE_YOUR_CALM, f"too many {kind}")
