"""Requests of the peer that wait for a running slot: first in, first out, bounded by count and bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import attrs

from trimcp.session.job import Job

__all__ = ["Mailbox", "weight"]

_SMALL = 1024
_CONTAINER = 64


def weight(raw: Mapping[str, Any], size: int) -> int:
    """Return roughly what a request's params occupy, which took `size` bytes on the wire.

    An empty array is three bytes there and some seventy here, so those of larger requests are counted.
    """
    if size < _SMALL:
        return size
    containers = 0
    rest: list[Any] = [raw]
    while rest:
        item = rest.pop()
        containers += 1
        children = item.values() if isinstance(item, Mapping) else item
        rest += [child for child in children if type(child) is dict or type(child) is list]
    return size + _CONTAINER * containers


@attrs.define(eq=False, repr=False)
class Mailbox:
    """A bounded queue of jobs not yet started.

    It may be overfilled by what one read brought; `full` is what the reader asks before it reads again.
    """

    max_requests: int
    max_bytes: int
    bytes_queued: int = attrs.field(init=False, default=0)
    _queue: OrderedDict[Job, None] = attrs.field(init=False, factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._queue)

    def full(self, parked: int = 0) -> bool:
        """Return whether there is no room, counting `parked` jobs that wait for the peer as well."""
        return len(self._queue) + parked >= self.max_requests or self.bytes_queued >= self.max_bytes

    def put(self, job: Job) -> None:
        """Add a job at the end."""
        self._queue[job] = None
        self.bytes_queued += job.size

    def first(self) -> Job:
        """Return the oldest job, which stays."""
        return next(iter(self._queue))

    def take(self) -> Job:
        """Remove and return the oldest job."""
        job, _ = self._queue.popitem(last=False)
        self.bytes_queued -= job.size
        return job

    def remove(self, job: Job) -> bool:
        """Remove a job wherever it stands; False if it is not here."""
        if job not in self._queue:
            return False
        del self._queue[job]
        self.bytes_queued -= job.size
        return True
