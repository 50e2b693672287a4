"""Optional guards of a server: filters of results, confirmation by the user, permissions, and an audit of calls."""

from trimcp.support.lazy import lazy_names as _lazy_names

# The one list of names; the stub for type checkers is written from it: `python docs/stubs.py`.
_NAMES = {
    "trimcp.guard.audit": "Audit",
    "trimcp.guard.permission": "ASK Allow AccessRequest Decision Denied Visible",
    "trimcp.guard.filters": "HiddenTextFilter PatternFilter SecretsFilter SizeFilter",
}

__getattr__, __dir__, __all__ = _lazy_names(__name__, _NAMES)
