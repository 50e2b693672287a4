"""The messages of one session while somebody looks at it, the latest of them: methods, sizes and how long answers took.

A session that is looked at is of a subclass, and its sinks are behind others that see what is posted. So a session
at which nobody looks does nothing for it, not even a comparison.
"""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from itertools import islice
from typing import Any, Final
from weakref import WeakValueDictionary

import attrs
import orjson
import trio

from trimcp.channel import Incoming, Kind, Outgoing, Sink
from trimcp.errors import ConnectionLost
from trimcp.session.session import Session
from trimcp.support.cleaning import mask
from trimcp.support.slotted import forwarding
from trimcp.transports import trace
from trimcp.wire.jsonrpc import Batch, ErrorResponse, Malformed, RequestId

_KEPT: Final = 500  # messages
_KEPT_TEXT: Final = 1024 * 1024  # characters of their texts together
_LONGEST: Final = 8 * 1024  # characters of a text that are kept
_LONGEST_NAME: Final = 200  # characters of anything else
_LARGEST: Final = 256 * 1024  # bytes of a message whose text is made: it has to be parsed and masked for that
_WAITING: Final = 1_000  # requests whose answers are timed
_PATIENCE: Final = 10.0  # seconds after which somebody who asks no more looks no more
_METHOD: Final = re.compile(rb'"method":"([^"\\]+)"')
_METHOD_WITHIN: Final = 200  # first bytes of a message of ours that contain its method: we write it before the params


@attrs.define(eq=False)
class MessageLog:
    """The latest messages, and what else is told with them: the oldest go where there are too many."""

    kept: deque[Mapping[str, Any]] = attrs.field(init=False, factory=lambda: deque(maxlen=_KEPT))
    count: int = attrs.field(init=False, default=0)
    """How many there were in all."""
    _text: int = attrs.field(init=False, default=0)  # characters that are kept
    _began: dict[tuple[bool, str], float] = attrs.field(init=False, factory=dict)

    def add(self, kind: str, text: str, **members: Any) -> None:
        """Add something.

        Of its text, and of every other one, so much is kept: peers say methods, ids and names of loggers too.
        """
        self.count += 1
        event: dict[str, Any] = {"n": self.count, "kind": kind, "at": time.time()}
        event |= {"text": text[:_LONGEST], "cut": len(text) > _LONGEST}
        for name, value in members.items():
            event[name] = value[:_LONGEST_NAME] if isinstance(value, str) else value
        if len(self.kept) == _KEPT:
            self._drop()
        self.kept.append(event)
        self._text += len(event["text"])
        while self._text > _KEPT_TEXT:
            self._drop()

    def _drop(self) -> None:
        self._text -= len(self.kept.popleft()["text"])

    def message(
        self, ours: bool, id: RequestId | None, method: str | None, size: int, text: str, **members: Any
    ) -> None:
        """Add a message: a request has an id and a method, an answer the id alone. Answers are timed."""
        took = None
        if method is None:
            began = self._began.pop((not ours, repr(id)), None)
            took = None if began is None else trio.current_time() - began
        elif id is not None:
            self.began(ours, id, trio.current_time())
        self.add("message", text, ours=ours, id=id, method=method, size=size, took=took, **members)

    def began(self, ours: bool, id: RequestId, at: float) -> None:
        """Note when a request was sent or came, on Trio's clock."""
        if len(self._began) < _WAITING:
            self._began[ours, repr(id)] = at

    def since(self, seen: int) -> tuple[list[Mapping[str, Any]], int]:
        """Return what was added after so many, as far as it is kept, and how many of it are not."""
        oldest = self.count - len(self.kept)
        return list(islice(self.kept, max(0, seen - oldest), None)), max(0, oldest - seen)


def masked_text(value: Any) -> str:
    """Return a message, as a JSON value, as text without its secrets."""
    return orjson.dumps(mask(value), default=repr).decode()


def _masked_text(value: Any) -> str:
    try:
        return masked_text(value)
    except (ValueError, TypeError, RecursionError):  # half a surrogate pair, or too many arrays in one another
        return ""


_TAPS: Final[dict[Session, Tap]] = {}  # of sessions at which somebody looks


@attrs.define(eq=False)
class Tap:
    """What is said in one session, while anybody looks at it. Made by `look_at`."""

    session: Session
    wire: MessageLog = attrs.field(init=False, factory=MessageLog)
    ended: str | None = attrs.field(init=False, default=None)
    """Why the session has ended."""
    _looking: dict[object, tuple[float, bool]] = attrs.field(init=False, factory=dict)
    _sinks: WeakValueDictionary[int, _TappedSink] = attrs.field(init=False, factory=WeakValueDictionary)

    @property
    def over(self) -> bool:
        """Whether nobody looks any more, although the session goes on."""
        return self.ended is None and _TAPS.get(self.session) is not self

    def latest(self, viewer: object, seen: int, *, text: bool) -> dict[str, Any]:
        """Return what was said after so many messages; `text` says whether this viewer wants what is in them.

        What is in a message is kept from the first time that somebody wants it.
        """
        self._looking[viewer] = trio.current_time() + _PATIENCE, text
        events, missed = self.wire.since(seen)
        if not text:
            events = [{**event, "text": "", "cut": False} for event in events]
        return {"events": events, "missed": missed, "count": self.wire.count, "ended": self.ended}

    def wants(self, viewer: object) -> bool:
        """Return whether this viewer wanted what is in messages the last time."""
        return self._looking.get(viewer, (0.0, False))[1]

    def leave(self, viewer: object) -> None:
        """Note that somebody looks no more; with the last one nothing more is added."""
        self._looking.pop(viewer, None)
        if not self._looking:
            self._close()

    def _open(self) -> None:
        session = self.session
        _TAPS[session] = self
        session.__class__ = _TappedSession
        session.watchers.add(self._lost)  # which keeps it from serving another request, too
        session.sink = self.seen(session.sink)
        for job in session.jobs:
            job.sink = self.seen(job.sink)
            if job.arrived < math.inf:
                self.wire.began(False, job.request.id, job.arrived)

    def _close(self) -> None:
        session = self.session
        if _TAPS.pop(session, None) is not self:
            return
        session.__class__ = Session
        session.watchers.discard(self._lost)
        session.sink = _below(session.sink)
        for job in session.jobs:
            job.sink = _below(job.sink)

    def _lost(self, why: ConnectionLost) -> None:
        self.ended = str(why)
        self._close()

    def _texts(self) -> bool:
        """Return whether anybody wants what is in messages. Who did not ask for long looks no more."""
        now = trio.current_time()
        for viewer in [viewer for viewer, (until, _) in self._looking.items() if until < now]:
            self.leave(viewer)
        return any(text for _, text in self._looking.values())

    def seen(self, sink: Sink) -> _TappedSink:
        """Return what sees what is posted to a sink, always the same."""
        if isinstance(sink, _TappedSink):
            return sink
        found = self._sinks.get(id(sink))
        if found is None:
            found = self._sinks[id(sink)] = _TappedSink(sink, self)
        return found

    def received(self, batch: Sequence[Incoming]) -> None:
        """Add what the session is given."""
        texts = self._texts()
        for incoming in batch:
            message: Any = incoming.message
            id, method = getattr(message, "id", None), getattr(message, "method", None)
            if isinstance(message, Malformed | Batch):
                method = f"malformed: {message.reason}" if isinstance(message, Malformed) else "an array"
            error = message.code if isinstance(message, ErrorResponse) else None
            text = _masked_text(trace.as_json(message)) if texts and incoming.size <= _LARGEST else ""
            self.wire.message(False, id, method, incoming.size, text, error=error)

    def posted(self, outgoing: Outgoing) -> None:
        """Add what the session sends."""
        data, method = outgoing.data, None
        if outgoing.kind is not Kind.REPLY:
            found = _METHOD.search(data, 0, _METHOD_WITHIN)
            method = "a message" if found is None else found[1].decode(errors="replace")
        id = outgoing.request_id if outgoing.kind in (Kind.REPLY, Kind.REQUEST) else None
        text = _masked_text(orjson.loads(data)) if self._texts() and len(data) <= _LARGEST else ""
        self.wire.message(True, id, method, len(data), text, error=outgoing.error)


def look_at(session: Session) -> Tap:
    """Return what is said in a session from now on, for whoever then asks with `Tap.latest`."""
    tap = _TAPS.get(session)
    if tap is None:
        tap = Tap(session)
        tap._open()
    return tap


class _TappedSession(Session):
    """A session at which somebody looks."""

    __slots__ = ()

    def deliver(self, batch: Sequence[Incoming]) -> None:
        if (tap := _TAPS.get(self)) is not None:
            tap.received(batch)
        Session.deliver(self, batch)  # no `super()`: with that nobody may look any more

    def sink_of(self, origin: Any) -> Sink:
        sink, tap = Session.sink_of(self, origin), _TAPS.get(self)
        return sink if tap is None else tap.seen(sink)


def _below(sink: Sink) -> Sink:
    return sink.below if isinstance(sink, _TappedSink) else sink


@attrs.define(eq=False)
@forwarding("below", Sink)
class _TappedSink(Sink):
    """Shows a tap what is posted to another sink."""

    below: Sink
    tap: Tap

    def post(self, outgoing: Outgoing) -> None:
        self.tap.posted(outgoing)
        self.below.post(outgoing)

    def post_alone(self, outgoing: Outgoing) -> None:
        self.tap.posted(outgoing)
        self.below.post_alone(outgoing)

    def post_latest(self, key: Hashable, outgoing: Outgoing) -> None:
        self.tap.posted(outgoing)
        self.below.post_latest(key, outgoing)
