# Written by docs/stubs.py from the list in __init__.py beside it.

from trimcp.session.statistics import Lane as Lane
from trimcp.session.statistics import Lanes as Lanes
from trimcp.session.statistics import Statistics as Statistics
from trimcp.session.turns import TurnStatistics as TurnStatistics
from trimcp.watch.statistics import MemoryStatistics as MemoryStatistics
from trimcp.watch.statistics import ServerStatistics as ServerStatistics
from trimcp.workers.pool import ProcessStatistics as ProcessStatistics

__all__ = [
    "Lane",
    "Lanes",
    "MemoryStatistics",
    "ProcessStatistics",
    "ServerStatistics",
    "Statistics",
    "TurnStatistics",
]
