"""Tells a peer how many log messages it did not get, with the next one that it gets, or before the result.

Log messages sent without waiting are dropped while the peer is slow. Who reads the rest should know that it is a rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimcp.channel import Kind, Outgoing
from trimcp.session.context import severity
from trimcp.wire.logs import LoggingMessageParams

if TYPE_CHECKING:
    from trimcp.session.job import Job
    from trimcp.session.session import Session

__all__ = ["tell_dropped_logs"]


def tell_dropped_logs(session: Session, job: Job | None) -> None:
    """Send one log message at level "warning" that says how many were dropped, if the peer wants that level.

    Args:
        session: whose count it is. It begins anew.
        job: on whose road it goes and whose level counts; None for what belongs to no request.
    """
    wanted = session.engine.legacy.log_level if job is None else session.engine.log_level(job.request.admission)
    if wanted is None or severity("warning") < severity(wanted):
        return
    dropped, session.counts.untold = session.counts.untold, 0
    params = LoggingMessageParams(level="warning", data={"dropped": dropped}, logger="trimcp")
    if job is None:
        data = session.encode_notification("notifications/message", params)
        session.sink.post(Outgoing(data, Kind.NOTIFICATION))
    else:
        data = session.encode_related(job, "notifications/message", params)
        job.sink.post(Outgoing(data, Kind.NOTIFICATION, job.request.id, job.origin))
