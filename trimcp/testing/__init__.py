"""For tests of servers and clients: both sides in one process, in virtual time, in any revision."""

from __future__ import annotations

import importlib
import typing

if typing.TYPE_CHECKING:
    from trimcp.testing.connect import connected, every_revision
    from trimcp.testing.contract import check_channel
    from trimcp.testing.fault_streams import CutStream, FaultyStream
    from trimcp.testing.faults import Fault, Faults, FaultyChannel, SlowChannel, faulty
    from trimcp.testing.leaks import Leak, LeakWatch
    from trimcp.testing.transcript import Transcript, replay
else:
    # pytest imports this package in every project where trimcp is installed, for the plugin in it. So a name is looked
    # up at its first use. Type checkers read the imports above; a test holds the two lists together.
    _MODULES = {
        "connect": "connected every_revision",
        "contract": "check_channel",
        "fault_streams": "CutStream FaultyStream",
        "faults": "Fault Faults FaultyChannel SlowChannel faulty",
        "leaks": "Leak LeakWatch",
        "transcript": "Transcript replay",
    }
    _HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(f"trimcp.testing.{_HOMES[name]}"), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "CutStream",
    "Fault",
    "Faults",
    "FaultyChannel",
    "FaultyStream",
    "Leak",
    "LeakWatch",
    "SlowChannel",
    "Transcript",
    "check_channel",
    "connected",
    "every_revision",
    "faulty",
    "replay",
]
