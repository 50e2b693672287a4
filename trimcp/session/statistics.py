"""A snapshot of one session, for tests, dashboards and whoever wonders what it is doing."""

from __future__ import annotations

import attrs

__all__ = ["Statistics"]


@attrs.frozen
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
