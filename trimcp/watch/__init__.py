"""Observing a running program: statistics, a watchdog, the task tree."""

from trimcp.support.lazy import lazy_names as _lazy_names

# The one list of names; the stub for type checkers is written from it: `python docs/stubs.py`.
_NAMES = {
    "trimcp.session.statistics": "Lane Lanes Statistics",
    "trimcp.session.incoming.turns": "TurnStatistics",
    "trimcp.watch.admin": "serve_admin",
    "trimcp.watch.log_ids": "RequestIds",
    "trimcp.watch.metrics": "Metrics",
    "trimcp.watch.network": "NetworkAdmin",
    "trimcp.watch.observing": "Observation",
    "trimcp.watch.picture": "EndedRequest Picture RequestPicture SessionPicture",
    "trimcp.watch.statistics": "MemoryStatistics ServerStatistics",
    "trimcp.watch.telemetry": "instrument_client instrument_server",
    "trimcp.workers.pool": "ProcessStatistics",
}

__getattr__, __dir__, __all__ = _lazy_names(__name__, _NAMES)
