"""A snapshot of one session, for tests, dashboards and whoever wonders what it is doing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trimcp.session.outbox import Outbox
from trimcp.values import valued

if TYPE_CHECKING:
    from trimcp.session.session import Session

__all__ = ["Statistics", "snapshot"]


@attrs.frozen
@valued
class Statistics:
    """A snapshot of one session.

    Attributes:
        running: handlers at work, those that wait for the peer not counted.
        parked: handlers that wait for the peer's answer to a question.
        waiting: requests waiting for a running slot, and their bytes in `waiting_bytes`.
        pending: calls of ours the peer has not answered.
        outbox, outbox_bytes: messages waiting for the writer.
        merged: messages that gave way to a later one of their kind.
        dropped: progress and log messages dropped because their reader was slow.
        abandoned_threads: threads whose call is over but which cannot be stopped.
    """

    running: int
    parked: int
    waiting: int
    waiting_bytes: int
    pending: int
    outbox: int
    outbox_bytes: int
    merged: int
    dropped: int
    abandoned_threads: int


def snapshot(session: Session) -> Statistics:
    """Return what is under way in a session now."""
    outbox = session.sink if isinstance(session.sink, Outbox) else None
    return Statistics(
        running=session.runner.running if session.runner is not None else 0,
        parked=session.parked,
        waiting=len(session.mailbox),
        waiting_bytes=session.mailbox.bytes_queued,
        pending=len(session.pending),
        outbox=len(outbox) if outbox is not None else 0,
        outbox_bytes=outbox.bytes_queued if outbox is not None else 0,
        merged=outbox.merged if outbox is not None else 0,
        dropped=session.dropped,
        abandoned_threads=session.abandoned_threads,
    )
