"""What waits to be written to a store that several processes share: one task commits together all that waits.

What follows from a write, such as bytes for a client, waits here too, until the write is kept. So no client knows of
an event that the store does not have.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, Protocol, TypeAlias

import attrs
import trio

from trimcp.store.events import OVERHEAD, BoundedEvents, Entry
from trimcp.store.shared import AppendEvent, DropEvents, EndSession, Letter, SaveSession, SharedStore, Write
from trimcp.support.cleaning import log_crash

log: logging.Logger = logging.getLogger("trimcp.http")

_MOST: Final = 64 * 1024 * 1024  # bytes that may wait
_AT_ONCE: Final = 1_000  # writes in one commit
_EVICTED: Final = 64  # evicted events of a stream that the store may still have
_PAUSES: Final = (0.05, 0.2, 0.5, 1.0, 2.0)  # seconds between the attempts of one commit

Rows: TypeAlias = Sequence[tuple[int, bytes]]


@attrs.define(eq=False)
class _Read:
    """Events to be read once all that was put before is kept."""

    stream: int
    seq: int
    then: Callable[[Rows], object]
    session: str


class QueueGate(Protocol):
    """What has something to do once items of a queue are done."""

    def go_on(self, done: int, /) -> bool:
        """Do what waits for items up to this number, and return whether something waits for others."""
        ...


@attrs.define(eq=False)
class WriteQueue:
    """What waits for a store, in its order. What has been put for one session follows only upon that.

    Items have numbers. What follows from one is done after the commit with it, for all of a gate together.

    Args:
        store: where it is written.
        refused: called with each write that was refused, or could not be written within some seconds.
    """

    store: SharedStore
    refused: Callable[[Write], object]
    done: int = attrs.field(init=False, default=0)  # the number of the last item that was written, or refused
    before_answers: int = attrs.field(init=False, default=0)  # of the last item that answers wait for; 0: for none
    _items: deque[Write | _Read] = attrs.field(init=False, factory=deque)
    _number: int = attrs.field(init=False, default=0)  # of the last item
    _waiting: dict[str, int] = attrs.field(init=False, factory=dict)  # the number of the last item of each session
    _gates: dict[QueueGate, None] = attrs.field(init=False, factory=dict)
    _reads: int = attrs.field(init=False, default=0)  # of the items
    _size: int = attrs.field(init=False, default=0)  # of the items, in bytes
    _come: trio.Event | None = attrs.field(init=False, default=None)  # while the writer waits
    _warned: bool = attrs.field(init=False, default=False)
    _failing: bool = attrs.field(init=False, default=False)  # whether the last attempt of a commit has failed
    # sessions, with their fences, of which something could not be written while more waits, which would hide its loss
    _lost: set[tuple[str, int]] = attrs.field(init=False, factory=set)
    _lost_until: int = attrs.field(init=False, default=0)  # the number of the last of those others

    def put(self, write: Write) -> bool:
        """Write this, in its turn. False if too much waits: then it never will be."""
        if type(write) is AppendEvent:  # nearly always
            session, size = write.session, self._size + len(write.data) + OVERHEAD
        else:
            session, size = "" if isinstance(write, Letter) else write.session, self._size + _size_of(write)
        if size > _MOST:
            return False
        self._size = size
        self._items.append(write)
        self._number = self._waiting[session] = self._number + 1
        if self._come is not None:
            self._wake()
        return True

    def has(self, session: str) -> bool:
        """Return whether anything waits that was put for this session."""
        return session in self._waiting

    def last(self, session: str) -> int:
        """Return the number of the last item that was put for this session and is not done; 0 if there is none."""
        return self._waiting.get(session, 0)

    def wait(self, gate: QueueGate) -> None:
        """Have a gate go on whenever items are done, until nothing of it waits."""
        self._gates[gate] = None

    def read(self, session: str, stream: int, seq: int, then: Callable[[Rows], object]) -> None:
        """Call `then` with the events of a stream after a number, in the turn of what is put for this session."""
        self._items.append(_Read(stream, seq, then, session))
        self._reads += 1
        self._number = self._waiting[session] = self._number + 1
        self._wake()

    def _wake(self) -> None:
        """Have the writer look, if it waits; once is enough."""
        come, self._come = self._come, None
        if come is not None:
            come.set()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            if not self._items:
                self._come = come = trio.Event()
                try:
                    await come.wait()
                finally:
                    self._come = None
            await self._work()

    async def flush(self) -> None:
        """Write all that waits, after `run` was cancelled."""
        while self._items:
            await self._work()

    async def _work(self) -> None:
        """Carry out what waits: all until the first read, or that."""
        items, batch = self._items, list[Any]()
        if not self._reads and len(items) <= _AT_ONCE:
            batch.extend(items)
            items.clear()
        while items and len(batch) < _AT_ONCE and type(items[0]) is not _Read:
            batch.append(items.popleft())
        if batch:
            size = sum(map(_size_of, batch)) if items else self._size
            try:
                refused = await self._commit(_without_repetitions(batch))
            except BaseException:  # cancelled: `flush` does it, perhaps for a second time
                items.extendleft(reversed(batch))
                raise
            for write in refused:
                self.refused(write)
            self._finish(len(batch), size)
            if self._lost and self.done >= self._lost_until:
                self._lost.clear()
            return
        read = items[0]
        assert isinstance(read, _Read)
        rows = await self._rows(read)
        items.popleft()
        self._reads -= 1
        read.then(rows)
        self._finish(1, 0)

    def _finish(self, items: int, size: int) -> None:
        """Note that so many more are done, and do what waits for them."""
        self._size -= size
        self.done = done = self.done + items
        if done < self._number:
            for session in [session for session, last in self._waiting.items() if last <= done]:
                del self._waiting[session]
        else:
            self._waiting.clear()
        self._go_on()

    def _go_on(self) -> None:
        for gate in list(self._gates):
            if not gate.go_on(self.done):
                del self._gates[gate]

    def hold_answers(self) -> None:
        """Have answers wait for the letters that were put, as long as the store keeps what it is given."""
        if not self._failing:
            self.before_answers = self.last("")

    def let_answers_go(self) -> None:
        """Have answers wait for nothing, because the store cannot be reached."""
        self.before_answers = 0
        self._go_on()

    async def _commit(self, writes: Sequence[Write]) -> Collection[Write]:
        behind = [write for write in writes if _follows(write, self._lost)] if self._lost else []
        if behind:
            writes = [write for write in writes if not _follows(write, self._lost)]
        for pause in _PAUSES:
            try:
                refused = await self.store.commit(writes)
            except OSError as error:
                self._failing = True
                self.let_answers_go()
                self._warn(error)
            else:
                self._failing = False
                return [*behind, *refused]
            await trio.sleep(pause)
        self._lost_until = self._number
        self._lost.update((each.session, each.fence) for each in writes if isinstance(each, AppendEvent | SaveSession))
        return [*behind, *writes]

    async def _rows(self, read: _Read) -> Rows:
        try:
            return await self.store.after(read.session, read.stream, read.seq)
        except OSError as error:
            self._warn(error)
            return ()

    def _warn(self, error: Exception) -> None:
        # Logged once: what a full disk fails is all there is, and the log is often on the same disk.
        if not self._warned:
            self._warned = True
            log_crash(log, error, "the shared store fails; sessions with work under way may be lost")


def _size_of(write: Write) -> int:
    """Return the bytes that a write takes while it waits."""
    return (len(write.data) if isinstance(write, AppendEvent | Letter | SaveSession) else 0) + OVERHEAD


def _follows(write: Write, lost: Collection[tuple[str, int]]) -> bool:
    """Return whether a write is an event or a state of one of these sessions, with their fences."""
    return isinstance(write, AppendEvent | SaveSession) and (write.session, write.fence) in lost


def _without_repetitions(writes: list[Write]) -> list[Write]:
    """Leave out states of a session that another one of the same commit replaces."""
    last: dict[str, int] = {}
    gone: set[int] = set()
    for at, write in enumerate(writes):
        if type(write) is SaveSession:
            before = last.get(write.session)
            if before is not None:
                earlier = writes[before]
                assert isinstance(earlier, SaveSession)
                if not (earlier.new or earlier.release) and earlier.fence == write.fence:
                    gone.add(before)
            last[write.session] = at
    return [write for at, write in enumerate(writes) if at not in gone] if gone else writes


@attrs.define(eq=False)
class StoredEvents(BoundedEvents[None]):
    """Events in a store that several processes share. The bounds are kept here, by the holder of each session."""

    queue: WriteQueue
    fences: dict[str, int] = attrs.field(init=False, factory=dict)  # of the sessions that this process holds
    # how many events of each stream were evicted and are still in the store, by session
    _evicted: dict[str, dict[int, int]] = attrs.field(init=False, factory=dict)

    def append(self, session: str, stream: int, seq: int, data: bytes, *, reply: bool) -> None:
        fence = self.fences.get(session)
        if fence is None:
            return
        entry = Entry(stream, seq, len(data) + OVERHEAD, reply, None)
        if evicted := self._add(session, entry):
            for gone in evicted:
                if gone is not entry:
                    self._drop_evicted(session, fence, gone.stream)
            if entry in evicted:
                return
        if not self.queue.put(AppendEvent(session, fence, stream, seq, data)):
            self._forget(session, entry)

    def _drop_evicted(self, session: str, fence: int, stream: int) -> None:
        """Have the store forget what was evicted of a stream: many events at once, since the oldest go first."""
        held = self._sessions.get(session)
        left = None if held is None else held.streams.get(stream)
        evicted = self._evicted.setdefault(session, {})
        number = evicted.pop(stream, 0) + 1
        if not left:
            self.queue.put(DropEvents(session, fence, stream))
        elif number < _EVICTED:
            evicted[stream] = number
        else:
            self.queue.put(DropEvents(session, fence, stream, before=min(left)))

    def after(self, session: str, stream: int, seq: int) -> list[tuple[int, bytes]]:
        """Not asked: events are read in their turn, by `WriteQueue.read`."""
        raise NotImplementedError

    def drop_stream(self, session: str, stream: int) -> None:
        super().drop_stream(session, stream)
        if session in self._evicted:
            self._evicted[session].pop(stream, None)
        if session in self.fences:
            self.queue.put(DropEvents(session, self.fences[session], stream))

    def drop_session(self, session: str) -> None:
        """Count its events no more. The store keeps them: it is told otherwise when the session has ended."""
        super().drop_session(session)
        self.fences.pop(session, None)
        self._evicted.pop(session, None)

    def end_session(self, session: str) -> None:
        """Forget a session and its events."""
        fence = self.fences.pop(session, None)
        if fence is not None:
            self.queue.put(EndSession(session, fence))
