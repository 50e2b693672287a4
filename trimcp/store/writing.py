"""What waits to be written to a store that several processes share: one task commits together all that waits.

What follows from a write, such as bytes for a client, waits here too, until the write is kept. So no client knows of
an event that the store does not have.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Final, TypeAlias

import attrs
import trio

from trimcp.store.events import OVERHEAD, BoundedEvents, Entry
from trimcp.store.shared import AppendEvent, DropEvents, EndSession, Letter, SaveSession, SharedStore, Write
from trimcp.support.cleaning import log_crash

log: logging.Logger = logging.getLogger("trimcp.http")

_MOST: Final = 64 * 1024 * 1024  # bytes that may wait
_AT_ONCE: Final = 1_000  # writes in one commit
_PAUSES: Final = (0.05, 0.2, 0.5, 1.0, 2.0)  # seconds between the attempts of one commit

Then: TypeAlias = Callable[[], object]
Rows: TypeAlias = Sequence[tuple[int, bytes]]


@attrs.define(eq=False)
class _Read:
    """Events to be read once all that was put before is kept."""

    stream: int
    seq: int
    then: Callable[[Rows], object]


@attrs.define(eq=False)
class WriteQueue:
    """What waits for a store, in its order. What has been put for one session follows only upon that.

    Args:
        store: where it is written.
        refused: called with each write that was refused, or could not be written within some seconds.
    """

    store: SharedStore
    refused: Callable[[Write], object]
    _items: deque[tuple[str, Write | _Read | Then]] = attrs.field(init=False, factory=deque)
    _waiting: dict[str, int] = attrs.field(init=False, factory=dict)  # how many items a session has here
    _size: int = attrs.field(init=False, default=0)
    _come: trio.Event = attrs.field(init=False, factory=trio.Event)
    _warned: bool = attrs.field(init=False, default=False)

    def put(self, write: Write) -> bool:
        """Write this, in its turn. False if too much waits: then it never will be."""
        size = _size(write)
        if self._size + size > _MOST:
            return False
        self._size += size
        self._add("" if isinstance(write, Letter) else write.session, write)
        return True

    def has(self, session: str) -> bool:
        """Return whether anything waits that was put for this session."""
        return session in self._waiting

    def call(self, session: str, function: Then) -> None:
        """Call a function once all that was put for this session is kept or refused: at once if that is so now."""
        if session in self._waiting:
            self._add(session, function)
        else:
            function()

    def read(self, session: str, stream: int, seq: int, then: Callable[[Rows], object]) -> None:
        """Call `then` with the events of a stream after a number, in the turn of what is put for this session."""
        self._add(session, _Read(stream, seq, then))

    def _add(self, session: str, item: Write | _Read | Then) -> None:
        self._items.append((session, item))
        self._waiting[session] = self._waiting.get(session, 0) + 1
        self._come.set()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            if not self._items:
                self._come = trio.Event()
                await self._come.wait()
            await self._work()

    async def flush(self) -> None:
        """Write all that waits, after `run` was cancelled."""
        while self._items:
            await self._work()

    async def _work(self) -> None:
        """Carry out what waits: all until the first read, or that."""
        items, batch = self._items, list[tuple[str, Write | _Read | Then]]()
        while items and len(batch) < _AT_ONCE and not isinstance(items[0][1], _Read):
            batch.append(items.popleft())
        writes: list[Write] = [item for _, item in batch if not (isinstance(item, _Read) or callable(item))]
        if writes:
            try:
                refused = await self._commit(writes)
            except BaseException:  # cancelled: `flush` does it, perhaps for a second time
                items.extendleft(reversed(batch))
                raise
            self._size -= sum(map(_size, writes))
            for write in refused:
                self.refused(write)
        elif not batch:
            batch.append(items.popleft())
        for session, item in batch:
            rows = await self._rows(session, item) if isinstance(item, _Read) else ()
            left = self._waiting[session] - 1
            if left:
                self._waiting[session] = left
            else:
                del self._waiting[session]
            if isinstance(item, _Read):
                item.then(rows)
            elif callable(item):
                item()

    async def _commit(self, writes: Sequence[Write]) -> Collection[Write]:
        for pause in _PAUSES:
            try:
                return await self.store.commit(writes)
            except OSError as error:
                self._warn(error)
            await trio.sleep(pause)
        return writes

    async def _rows(self, session: str, read: _Read) -> Rows:
        try:
            return await self.store.after(session, read.stream, read.seq)
        except OSError as error:
            self._warn(error)
            return ()

    def _warn(self, error: Exception) -> None:
        # Logged once: what a full disk fails is all there is, and the log is often on the same disk.
        if not self._warned:
            self._warned = True
            log_crash(log, error, "the shared store fails; sessions with work under way may be lost")


def _size(write: Write) -> int:
    data = write.data if isinstance(write, SaveSession | AppendEvent | Letter) else b""
    return len(data) + OVERHEAD


@attrs.define(eq=False)
class StoredEvents(BoundedEvents[None]):
    """Events in a store that several processes share. The bounds are kept here, by the holder of each session."""

    queue: WriteQueue
    fences: dict[str, int] = attrs.field(init=False, factory=dict)  # of the sessions that this process holds

    def append(self, session: str, stream: int, seq: int, data: bytes, *, reply: bool) -> None:
        fence = self.fences.get(session)
        if fence is None:
            return
        entry = Entry(stream, seq, len(data) + OVERHEAD, reply, None)
        evicted = self._add(session, entry)
        for gone in evicted:
            if gone is not entry:
                self.queue.put(DropEvents(session, fence, gone.stream, gone.seq))
        if entry not in evicted and not self.queue.put(AppendEvent(session, fence, stream, seq, data)):
            self._forget(session, entry)

    def after(self, session: str, stream: int, seq: int) -> list[tuple[int, bytes]]:
        """Not asked: events are read in their turn, by `WriteQueue.read`."""
        raise NotImplementedError

    def drop_stream(self, session: str, stream: int) -> None:
        super().drop_stream(session, stream)
        if session in self.fences:
            self.queue.put(DropEvents(session, self.fences[session], stream))

    def drop_session(self, session: str) -> None:
        """Count its events no more. The store keeps them: it is told otherwise when the session has ended."""
        super().drop_session(session)
        self.fences.pop(session, None)

    def end_session(self, session: str) -> None:
        """Forget a session and its events."""
        fence = self.fences.pop(session, None)
        if fence is not None:
            self.queue.put(EndSession(session, fence))
