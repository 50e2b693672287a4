# Written by docs/stubs.py from the list in __init__.py beside it.

from trimcp.testing.connect import connected as connected
from trimcp.testing.connect import every_revision as every_revision
from trimcp.testing.contract import check_channel as check_channel
from trimcp.testing.faults import CutStream as CutStream
from trimcp.testing.faults import Fault as Fault
from trimcp.testing.faults import Faults as Faults
from trimcp.testing.faults import FaultyChannel as FaultyChannel
from trimcp.testing.faults import FaultyStream as FaultyStream
from trimcp.testing.faults import SlowChannel as SlowChannel
from trimcp.testing.faults import faulty as faulty
from trimcp.testing.issuer import ToyIssuer as ToyIssuer
from trimcp.testing.issuer import toy_issuer as toy_issuer
from trimcp.testing.leaks import Leak as Leak
from trimcp.testing.leaks import LeakWatch as LeakWatch
from trimcp.testing.transcript import Transcript as Transcript
from trimcp.testing.transcript import replay as replay

__all__ = [
    "CutStream",
    "Fault",
    "Faults",
    "FaultyChannel",
    "FaultyStream",
    "Leak",
    "LeakWatch",
    "SlowChannel",
    "ToyIssuer",
    "Transcript",
    "check_channel",
    "connected",
    "every_revision",
    "faulty",
    "replay",
    "toy_issuer",
]
