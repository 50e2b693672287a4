"""Rate limiting with a token bucket."""

from __future__ import annotations

from typing import Final

_ROUNDING: Final = 1e-9  # of a token: who waited as long as told might lack so much of it


class TokenBucket:
    """Allows `rate` events per second on average, and at most `burst` at once. It starts full.

    Times are in seconds of any one clock, passed by the caller.
    """

    __slots__ = ("_at", "burst", "rate", "tokens")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate: float = rate  # tokens per second
        self.burst: float = burst  # the most tokens it holds
        self.tokens: float = burst  # the tokens it held when it was last refilled
        self._at = now

    def refill(self, now: float) -> float:
        """Add the tokens of the time since the last refill, and return how many there are."""
        if self.tokens < self.burst:
            self.tokens = min(self.burst, self.tokens + (now - self._at) * self.rate)
        self._at = now
        return self.tokens

    def has(self, tokens: float, now: float) -> bool:
        """Return whether there are that many tokens."""
        return self.refill(now) >= tokens - _ROUNDING

    def take(self, now: float) -> bool:
        """Take one token if available; return whether it was."""
        if not self.has(1, now):
            return False
        self.tokens -= 1
        return True

    def wait(self, tokens: float = 1) -> float:
        """Return the seconds, from the last refill, until that many tokens are available."""
        return max(0.0, tokens - self.tokens) / self.rate
