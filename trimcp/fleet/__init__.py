"""Many servers as one: connections that are made again, groups of them, and calls over several."""

from trimcp.lazy import lazy_names as _lazy_names

# The one list of names; the stub for type checkers is written from it: `python docs/stubs.py`.
_NAMES = {
    "trimcp.fleet.combinators": "Mapped Outcome call_all first_of hedge map_bounded",
    "trimcp.fleet.group": "Group",
    "trimcp.fleet.supervision": "Breaker Health Restarts UpstreamState UpstreamStatistics",
    "trimcp.fleet.upstream": "Upstream UpstreamSubscription supervise",
}

__getattr__, __dir__, __all__ = _lazy_names(__name__, _NAMES)
