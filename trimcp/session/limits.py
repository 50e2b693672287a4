"""Every bound and grace period of a session in one record, with the reason for each default beside it."""

from __future__ import annotations

import attrs

from trimcp.values import valued

__all__ = ["Limits"]


@attrs.frozen
@valued
class Limits:
    """How much one session may hold, and how long it waits. Sizes are bytes, times are seconds.

    Attributes:
        max_running: requests of the peer worked on at once. One that waits for the peer's answer does not count.
        backlog_requests: requests that may wait behind them, together with those that wait for the peer.
        backlog_bytes: what the waiting ones may weigh. With a full backlog reading pauses, so this is the window of
            a peer that pipelines without reading.
        running_bytes: what the requests under way may weigh, those that wait for the peer counted; the next one waits.
        outbox_messages, outbox_bytes: what may wait for a peer that reads slowly; senders wait for room. Twice as much
            again may be in the writer's hands: a slow reader costs less than 2 MiB.
        progress_kept: progress messages a call keeps for its reader; then the oldest give way and are counted.
        logs_kept: log messages kept for a client's handler; then the oldest give way and are counted.
        kept_bytes: what each of these may weigh before fewer are kept.
        eof_grace: how long requests already received may still run after the peer closed its side of a half-closed
            channel (a pipe). Longer suits piped one-shot use.
        drain_timeout: how long the writer may take to get rid of what is queued when a session ends.
    """

    max_running: int = 1_000
    backlog_requests: int = 10_000
    backlog_bytes: int = 16 * 1024 * 1024
    running_bytes: int = 32 * 1024 * 1024
    outbox_messages: int = 1_024
    outbox_bytes: int = 256 * 1024
    progress_kept: int = 1_024
    logs_kept: int = 1_000
    kept_bytes: int = 4 * 1024 * 1024
    eof_grace: float = 0.5
    drain_timeout: float = 2.0

    def kept_of(self, most: int, size: int) -> int:
        """Return how many messages of `size` bytes may be kept for a slow reader where at most `most` are."""
        return max(1, min(most, self.kept_bytes // max(size, 1)))
