"""Gathers the replies to a batch into one array (JSON-RPC 2.0 section 6; in MCP only revision 2025-03-26).

Knows request ids and encoded replies. The way in needs nothing: `jsonrpc.parse` gives a `Batch`.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from trimcp.wire.jsonrpc import RequestId

__all__ = ["Gather"]


@attrs.define(eq=False, repr=False)
class _Open:
    """One batch whose replies are not all there."""

    waiting: set[RequestId]
    replies: list[bytes]

    @property
    def size(self) -> int:
        return sum(map(len, self.replies))


class Gather:
    """The batches of one connection that still wait for replies.

    Replies are held until the last request of their batch is answered or dropped. `id in gather` says whether
    a reply belongs here or goes out by itself.
    """

    __slots__ = ("_by_id", "_held")

    def __init__(self) -> None:
        self._by_id: dict[RequestId, _Open] = {}
        self._held = 0

    def __contains__(self, id: RequestId) -> bool:
        return id in self._by_id

    @property
    def held(self) -> int:
        """Bytes of replies that wait for others of their batch."""
        return self._held

    def open(self, ids: Iterable[RequestId], replies: Iterable[bytes] = ()) -> bytes | None:
        """Begin a batch once each of its members was looked at.

        Args:
            ids: the requests of it that are now under way.
            replies: what is already known: errors for members that are malformed, duplicates or refused at
                once.

        Returns:
            The array to send, if nothing is left to wait for and there is anything to say; else None. A batch
            of notifications is never answered.

        Raises:
            ValueError: an id is under way in another batch; the caller refuses such requests.
        """
        batch = _Open(set(ids), list(replies))
        taken = batch.waiting & self._by_id.keys()
        if taken:
            raise ValueError(f"{len(taken)} of these requests wait in another batch")
        for id in batch.waiting:
            self._by_id[id] = batch
        self._held += batch.size
        return self._array(batch)

    def add(self, id: RequestId, reply: bytes) -> bytes | None:
        """Hand in the reply to a request; returns the array to send if none is awaited now.

        Raises:
            KeyError: no batch waits for this request.
        """
        batch = self._by_id.pop(id)
        batch.waiting.discard(id)
        batch.replies.append(reply)
        self._held += len(reply)
        return self._array(batch)

    def drop(self, id: RequestId) -> bytes | None:
        """Stop waiting for a request its peer cancelled; returns the array if only it was awaited.

        None for a request that no batch waits for, and where nothing was answered: nothing is sent.
        """
        batch = self._by_id.pop(id, None)
        if batch is None:
            return None
        batch.waiting.discard(id)
        return self._array(batch)

    def _array(self, batch: _Open) -> bytes | None:
        if batch.waiting or not batch.replies:
            return None
        self._held -= batch.size
        return b"[" + b",".join(batch.replies) + b"]"
