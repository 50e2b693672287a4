"""Rates: how often something may happen, as a token bucket."""

from __future__ import annotations


class TokenBucket:
    """Lets `rate` a second through on average, and at most `burst` at once. It begins full.

    Times are seconds of any one clock, handed in by the caller.

    Attributes:
        rate: tokens a second.
        burst: tokens it holds at most.
        tokens: those it held when it was last refilled.
    """

    __slots__ = ("_at", "burst", "rate", "tokens")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate: float = rate
        self.burst: float = burst
        self.tokens: float = burst
        self._at = now

    def refill(self, now: float) -> float:
        """Add what has come since the last time, and return how many tokens there are."""
        if self.tokens < self.burst:
            # Rounding must not leave a waiter that woke up on time a hair short of its token.
            self.tokens = min(self.burst, self.tokens + (now - self._at) * self.rate + 1e-9)
        self._at = now
        return self.tokens

    def take(self, now: float) -> bool:
        """Take a token if there is one, and return whether there was."""
        if self.refill(now) < 1:
            return False
        self.tokens -= 1
        return True

    def wait(self, tokens: float = 1) -> float:
        """Return the seconds until there are so many tokens, counted from the last refill."""
        return max(0.0, tokens - self.tokens) / self.rate
