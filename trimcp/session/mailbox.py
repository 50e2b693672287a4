"""Requests of the peer that wait for a running slot: first in, first out, bounded by count and weight."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

import attrs

from trimcp.session.job import Job

__all__ = ["EACH", "Mailbox", "weight"]

# What a request takes beside its text while it waits: its params as objects, its record with the engine, its places in
# tables and queues. Measured as resident memory of 4,500 to 6,000 calls on CPython 3.11: 1,420 to 1,650 bytes in the
# session era, 1,730 to 1,820 with the envelope of 2026-07-28, and up to 2,090 with texts of 500 to 600 bytes, which
# leave holes in the heap. Not weighed, a window of 16 MiB held up to 32 MiB of small requests.
EACH: Final = 2100
_HEADER: Final = 100  # what a header takes beside its text
_SMALL: Final = 1024
_CONTAINER: Final = 64


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

    Attributes:
        bytes_queued: what waits here, as memory and not as text: each job weighs something by itself.
    """

    max_requests: int
    max_bytes: int
    bytes_queued: int = attrs.field(init=False, default=0)
    _queue: OrderedDict[Job, int] = attrs.field(init=False, factory=OrderedDict)  # with their weights

    def __len__(self) -> int:
        return len(self._queue)

    def full(self, parked: int = 0) -> bool:
        """Return whether there is no room, counting `parked` jobs that wait for the peer as well."""
        return len(self._queue) + parked >= self.max_requests or self.bytes_queued >= self.max_bytes

    def leave_room(self, requests: int, size: int) -> None:
        """Be full so much earlier that these still fit, with so many bytes of text; but not before it is half full.

        They are what arrives with the last read, and what lies unread in the channel meanwhile.
        """
        self.max_bytes -= min(size + EACH * requests, self.max_bytes // 2)

    def put(self, job: Job) -> None:
        """Add a job at the end."""
        weight = job.size + EACH
        headers = job.headers
        if headers is not None and not self._shared(headers):
            weight += _HEADER * len(headers) + sum(map(len, headers.values()))
        self._queue[job] = weight
        self.bytes_queued += weight

    def _shared(self, headers: Mapping[str, str]) -> bool:
        """Return whether the newest job has the same ones, as on a WebSocket, and from a client that repeats itself."""
        return bool(self._queue) and next(reversed(self._queue)).headers is headers

    def first(self) -> Job:
        """Return the oldest job, which stays."""
        return next(iter(self._queue))

    def take(self) -> Job:
        """Remove and return the oldest job."""
        job, weight = self._queue.popitem(last=False)
        self.bytes_queued -= weight
        return job

    def remove(self, job: Job) -> bool:
        """Remove a job wherever it stands; False if it is not here."""
        weight = self._queue.pop(job, None)
        if weight is None:
            return False
        self.bytes_queued -= weight
        return True
