"""What happens in a conversation, for pages that look at it: the latest of it, in bounded memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any, Final

import attrs
import orjson
import trio

from trimcp.channel import Incoming, Outgoing
from trimcp.cli.targets import Target
from trimcp.cli.web.site import Send
from trimcp.support.cleaning import mask
from trimcp.transports.trace import as_json
from trimcp.transports.wrapped import WrappedChannel
from trimcp.wire.jsonrpc import Malformed

_KEPT: Final = 500  # events
_LONGEST: Final = 8 * 1024  # characters of a message that are kept
_PACE: Final = 0.1  # seconds between two batches
_WAITING: Final = 1_000  # requests whose answers are timed


@attrs.define(eq=False)
class Feed:
    """The latest events, for pages that read as fast as they can: a slow one is told how many it has missed.

    Attributes:
        state: returns what is true now; a page gets it with every batch.
    """

    state: Callable[[], Mapping[str, Any]]
    _kept: deque[Mapping[str, Any]] = attrs.field(init=False, factory=lambda: deque(maxlen=_KEPT))
    _count: int = attrs.field(init=False, default=0)
    _changed: trio.Event = attrs.field(init=False, factory=trio.Event)

    def add(self, kind: str, **members: Any) -> None:
        """Add an event; the oldest goes where there are too many."""
        self._count += 1
        self._kept.append({"n": self._count, "kind": kind, "at": time.time(), **members})
        self.changed()

    def changed(self) -> None:
        """Let pages have the state anew."""
        self._changed.set()
        self._changed = trio.Event()

    async def follow(self, send: Send) -> None:
        """Send what is kept, and then what comes, until cancelled."""
        seen = 0
        while True:
            changed = self._changed
            oldest = self._count - len(self._kept)
            missed, seen = max(0, oldest - seen), max(oldest, seen)
            events = list(islice(self._kept, seen - oldest, None))
            seen = self._count
            await send({"events": events, "missed": missed, **self.state()})
            await trio.sleep(_PACE)
            await changed.wait()


@attrs.define(eq=False, repr=False)
class _WatchedChannel(WrappedChannel):
    """Tells a feed of each message: its size, its text with secrets masked, and how long an answer took."""

    _feed: Feed
    _began: dict[str, float] = attrs.field(init=False, factory=dict)

    async def send(self, batch: Sequence[Outgoing]) -> None:
        for message in batch:
            self._note(True, orjson.loads(message.data), len(message.data))
        await super().send(batch)

    async def receive(self) -> Sequence[Incoming]:
        batch = await super().receive()
        for each in batch:
            malformed = isinstance(each.message, Malformed)
            self._note(False, {"malformed": str(each.message)} if malformed else as_json(each.message), each.size)
        return batch

    def _note(self, ours: bool, value: Any, size: int) -> None:
        id, method, took = None, None, None
        if isinstance(value, Mapping):
            id, method = value.get("id"), value.get("method")
            key = f"{ours == (method is not None)} {id!r}"  # our requests, or theirs
            if method is None:
                began = self._began.pop(key, None)
                took = None if began is None else trio.current_time() - began
            elif id is not None and len(self._began) < _WAITING:
                self._began[key] = trio.current_time()
        text = orjson.dumps(mask(value), default=repr).decode()
        cut = len(text) > _LONGEST
        shown = text[:_LONGEST]
        self._feed.add("message", ours=ours, id=id, method=method, size=size, took=took, text=shown, cut=cut)


@attrs.frozen
class WatchedTarget:
    """A target whose messages a feed is told of."""

    target: Target
    feed: Feed

    @property
    def key(self) -> object:
        return getattr(self.target, "key", None)

    @property
    def command(self) -> object:
        return getattr(self.target, "command", None)

    @property
    def revision(self) -> object:
        return getattr(self.target, "revision", None)

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[_WatchedChannel]:
        """Open the target."""
        async with self.target.connect() as channel:
            yield _WatchedChannel(channel, self.feed)
