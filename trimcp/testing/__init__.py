"""For tests of servers and clients: both sides in one process, in virtual time, in any revision."""

from __future__ import annotations

from trimcp.testing.check_channel import check_channel
from trimcp.testing.connect import connected, every_revision
from trimcp.testing.faults import CutStream, FaultyChannel, SlowChannel
from trimcp.testing.transcript import Transcript, replay

__all__ = [
    "CutStream",
    "FaultyChannel",
    "SlowChannel",
    "Transcript",
    "check_channel",
    "connected",
    "every_revision",
    "replay",
]
