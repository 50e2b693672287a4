"""Several servers used together: connections that reconnect, groups of servers, and calls to several at once."""

from trimcp.support.lazy import lazy_names as _lazy_names

# The only list of names; the stub for type checkers is generated from it: `python docs/stubs.py`.
_NAMES = {
    "trimcp.fleet.combinators": "Mapped Outcome call_all first_of hedge map_bounded",
    "trimcp.fleet.group": "Group",
    "trimcp.fleet.supervisor": "Breaker Health UpstreamState UpstreamStatistics",
    "trimcp.support.restarts": "Restarts",
    "trimcp.fleet.upstream": "Upstream UpstreamSubscription supervise",
}

__getattr__, __dir__, __all__ = _lazy_names(__name__, _NAMES)
