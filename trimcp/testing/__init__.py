"""Testing servers and clients: both sides in one process, in virtual time, in any revision."""

from trimcp.support.lazy import lazy_names as _lazy_names

# The one list of names; the stub for type checkers is written from it: `python docs/stubs.py`.
_NAMES = {
    "trimcp.testing.connect": "connected every_revision",
    "trimcp.testing.contract": "check_channel",
    "trimcp.testing.faults": "CutStream Fault Faults FaultyChannel FaultyStream SlowChannel faulty",
    "trimcp.testing.issuer": "ToyIssuer toy_issuer",
    "trimcp.testing.leaks": "Leak LeakWatch",
    "trimcp.testing.transcript": "Transcript replay",
}

__getattr__, __dir__, __all__ = _lazy_names(__name__, _NAMES)
