"""What several processes keep together, so that any of them serves any request: sessions, their events, and letters.

A session is **held** by one process at a time: that one runs its calls and writes its state and its events. Each other
one hands its requests to the holder by letters. A process has a **lease** on what it holds, which it renews; when that
is over, another process may take a session, and each write of the former holder is refused from then on, because its
`fence` is that of the past.

Only bytes are kept here: what they mean, their size and their number are the caller's business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final, TypeAlias

import attrs

LEASE: Final = 8.0
"""Seconds after which a process that has not renewed its lease counts as gone.

Others look every two seconds, so what waits for it ends within ten.
"""

MOST_LETTERS: Final = 10_000
"""Letters that may wait for one process; more are refused."""

MOST_MARKS: Final = 50_000
"""Uses of one owner that are remembered at once."""


# Writes are mutable only because making a frozen value takes attrs three times as long. Do not change them.
@attrs.define(unsafe_hash=True)
class SaveSession:
    """Keep the state of a session for `ttl` seconds from now; its events are kept as long.

    `fence` is that with which the session was taken, or 1 for a `new` one, which this process holds then. With
    `release` nobody holds it afterwards: whoever wants it may take it at once.
    """

    session: str
    fence: int
    data: bytes
    ttl: float
    new: bool = False
    release: bool = False


@attrs.define(unsafe_hash=True)
class EndSession:
    """Forget a session and all its events."""

    session: str
    fence: int


@attrs.define(unsafe_hash=True)
class AppendEvent:
    """Keep an event of a stream of a session, under a number that is larger than those before it."""

    session: str
    fence: int
    stream: int
    seq: int
    data: bytes


@attrs.define(unsafe_hash=True)
class DropEvents:
    """Forget all events of a stream, or those `before` one, of which some of the last may be forgotten later."""

    session: str
    fence: int
    stream: int
    before: int | None = None


@attrs.define(unsafe_hash=True)
class Letter:
    """Bytes for another process, by its name, or for each other process (None)."""

    to: str | None
    data: bytes


Write: TypeAlias = SaveSession | EndSession | AppendEvent | DropEvents | Letter


@attrs.frozen
class SharedTurn:
    """A turn under a quota that all processes share, or a place in its queue.

    Attributes:
        quota: the name of the quota.
        id: of this turn, as no other one has it.
        whose: whose it is: those with turns to wait for alternate.
        running, per_second, burst, waiting: the bounds of the quota, as in `Quota`.
    """

    quota: str
    id: str
    whose: str
    running: int | None
    per_second: float | None
    burst: float
    waiting: int


@attrs.frozen
class TurnAnswer:
    """What came of turns that were asked for.

    Attributes:
        after: for each turn that was asked for the seconds until its time, as far as they are known: 0 if it has come;
            None if too many wait.
        come: all turns whose time has come by this, each with the name of the process that asked for it.
    """

    after: Sequence[float | None]
    come: Sequence[tuple[str, str]]


@attrs.frozen
class RecordChange:
    """Bytes that take the place of what is `known` under a name; None is nothing."""

    name: str
    known: bytes | None
    data: bytes | None


@attrs.frozen
class KeptSession:
    """A session as it is kept.

    Attributes:
        holder: the name of the process that holds it, "" if it was released.
        fence: how often it was taken, and 1.
        data: its state, as last saved.
        gone: whether its holder is gone, as far as that is known without asking it.
        streams: the numbers of the streams of which there are events. Only `take` returns them.
    """

    holder: str
    fence: int
    data: bytes
    gone: bool = False
    streams: Collection[int] = ()


class SharedStore(ABC):
    """One process's share in what several keep together. What a store in a file, Redis or a database implements.

    Its methods may be called by several tasks at once, except `commit` and `receive`, which one task calls at a time.
    Each raises OSError if the store cannot be reached. A `commit` that raised may or may not have been carried out, and
    may be tried again: what is done a second time changes nothing, except that a letter may come twice.

    Attributes:
        lease: seconds after which this process counts as gone if it has not renewed its lease.
        name: of this process, as letters and `KeptSession.holder` name it: new each time that the store is opened.
    """

    name: str
    lease: float = LEASE

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Keep the store open while the block runs, with a lease. At its end the lease is given up."""
        yield

    # What is kept

    @abstractmethod
    async def commit(self, writes: Sequence[Write]) -> Collection[Write]:
        """Carry out all writes, in their order and at once or not at all, and return those that were refused.

        A write to a session is refused if this process does not hold it with that fence any more, or has lost its
        lease. A letter is refused if its receiver is gone, or has too many letters to read.
        """

    @abstractmethod
    async def load(self, session: str) -> KeptSession | None:
        """Return a session, or None if there is none."""

    @abstractmethod
    async def take(self, session: str, fence: int) -> KeptSession | None:
        """Become the holder of a session whose holder is gone or this process, and return it with its new fence.

        `fence` is the one known of it. None if it is another one now, there is no session, or its holder is not gone.
        What else its former holder writes, under its name of then, is refused from now on.
        """

    @abstractmethod
    async def after(self, session: str, stream: int, seq: int) -> Sequence[tuple[int, bytes]]:
        """Return the number and the data of each kept event of a stream after number `seq`, in order."""

    @abstractmethod
    async def agree(self, name: str, data: bytes) -> bytes:
        """Return what is kept under a name: what the first process to ask for it proposed as `data`. Kept for ever."""

    # What all use up together

    @abstractmethod
    async def turns(self, ended: Sequence[SharedTurn], asked: Sequence[SharedTurn]) -> TurnAnswer:
        """End turns, or give up waiting for them; then ask for others.

        A turn whose time has come counts until it is ended, and for the time of a lease at most: asking for it again
        prolongs that. So does it for one that waits. What is done a second time changes nothing.
        """

    @abstractmethod
    async def first_use(self, owner: str, mark: str, seconds: float) -> bool:
        """Note the use of something that is good for one use, and return whether it is the first.

        It is remembered for `seconds`, and of each owner `MOST_MARKS`: with more it is no first use.
        """

    # What all know

    @abstractmethod
    async def records(self, kind: str) -> Mapping[str, bytes]:
        """Return what is kept of a kind, by name."""

    @abstractmethod
    async def change_records(self, kind: str, changes: Sequence[RecordChange], seconds: float) -> bool:
        """Change what is kept of a kind, and keep it for `seconds` from now: all of it, or nothing (False).

        It is changed if each is as it is known, or as it becomes. Then processes are told by a letter of the caller's.
        """

    # Between processes

    @abstractmethod
    async def receive(self) -> Sequence[bytes]:
        """Wait for letters to this process, and return them, each once, in the order in which they were committed."""

    @abstractmethod
    async def renew(self) -> bool:
        """Renew the lease. False if it was over, and somebody may have taken what this process held.

        Then this name is dead for ever: nothing more is written under it. Open the store anew.
        """

    @abstractmethod
    async def retire(self) -> bool:
        """Give up the lease, unless there are letters to read: then False, and `receive` has them.

        So who is about to end has read every letter that was not refused.
        """

    @abstractmethod
    async def gone(self, name: str) -> bool:
        """Return whether the lease of the process of this name is over, or there never was one."""
