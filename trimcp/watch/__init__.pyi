# Written by docs/stubs.py from the list in __init__.py beside it.

from trimcp.session.incoming.turns import TurnStatistics as TurnStatistics
from trimcp.session.statistics import Lane as Lane
from trimcp.session.statistics import Lanes as Lanes
from trimcp.session.statistics import Statistics as Statistics
from trimcp.watch.admin import serve_admin as serve_admin
from trimcp.watch.log_ids import RequestIds as RequestIds
from trimcp.watch.metrics import Metrics as Metrics
from trimcp.watch.network import NetworkAdmin as NetworkAdmin
from trimcp.watch.observing import Observation as Observation
from trimcp.watch.picture import EndedRequest as EndedRequest
from trimcp.watch.picture import Picture as Picture
from trimcp.watch.picture import RequestPicture as RequestPicture
from trimcp.watch.picture import SessionPicture as SessionPicture
from trimcp.watch.statistics import MemoryStatistics as MemoryStatistics
from trimcp.watch.statistics import ServerStatistics as ServerStatistics
from trimcp.watch.telemetry import instrument_client as instrument_client
from trimcp.watch.telemetry import instrument_server as instrument_server
from trimcp.workers.pool import ProcessStatistics as ProcessStatistics

__all__ = [
    "EndedRequest",
    "Lane",
    "Lanes",
    "MemoryStatistics",
    "Metrics",
    "NetworkAdmin",
    "Observation",
    "Picture",
    "ProcessStatistics",
    "RequestIds",
    "RequestPicture",
    "ServerStatistics",
    "SessionPicture",
    "Statistics",
    "TurnStatistics",
    "instrument_client",
    "instrument_server",
    "serve_admin",
]
