# Written by docs/stubs.py from the list in __init__.py beside it.

from trimcp.fleet.combinators import Mapped as Mapped
from trimcp.fleet.combinators import Outcome as Outcome
from trimcp.fleet.combinators import call_all as call_all
from trimcp.fleet.combinators import first_of as first_of
from trimcp.fleet.combinators import hedge as hedge
from trimcp.fleet.combinators import map_bounded as map_bounded
from trimcp.fleet.group import Group as Group
from trimcp.fleet.supervisor import Breaker as Breaker
from trimcp.fleet.supervisor import Health as Health
from trimcp.fleet.supervisor import UpstreamState as UpstreamState
from trimcp.fleet.supervisor import UpstreamStatistics as UpstreamStatistics
from trimcp.fleet.upstream import Upstream as Upstream
from trimcp.fleet.upstream import UpstreamSubscription as UpstreamSubscription
from trimcp.fleet.upstream import supervise as supervise
from trimcp.support.restarts import Restarts as Restarts

__all__ = [
    "Breaker",
    "Group",
    "Health",
    "Mapped",
    "Outcome",
    "Restarts",
    "Upstream",
    "UpstreamState",
    "UpstreamStatistics",
    "UpstreamSubscription",
    "call_all",
    "first_of",
    "hedge",
    "map_bounded",
    "supervise",
]
