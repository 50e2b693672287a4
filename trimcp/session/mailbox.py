"""Requests of the peer that wait for a running slot: first in, first out, bounded by count and bytes."""

from __future__ import annotations

from collections import deque

import attrs

from trimcp.session.job import Job

__all__ = ["Mailbox"]


@attrs.define(eq=False)
class Mailbox:
    """A bounded queue of jobs not yet started.

    It may be overfilled by what one read brought; `full` is what the reader asks before it reads again.
    """

    max_requests: int
    max_bytes: int
    bytes_queued: int = attrs.field(init=False, default=0)
    _queue: deque[Job] = attrs.field(init=False, factory=deque)

    def __len__(self) -> int:
        return len(self._queue)

    def full(self, parked: int = 0) -> bool:
        """Return whether there is no room, counting `parked` jobs that wait for the peer as well."""
        return len(self._queue) + parked >= self.max_requests or self.bytes_queued >= self.max_bytes

    def put(self, job: Job) -> None:
        """Add a job at the end."""
        self._queue.append(job)
        self.bytes_queued += job.size

    def take(self) -> Job:
        """Remove and return the oldest job."""
        job = self._queue.popleft()
        self.bytes_queued -= job.size
        return job

    def remove(self, job: Job) -> bool:
        """Remove a job wherever it stands; False if it is not here."""
        try:
            self._queue.remove(job)
        except ValueError:
            return False
        self.bytes_queued -= job.size
        return True
