"""Sessions that other processes can take over: their state and their events are kept in a store that all share.

What is sent to a client waits until what came before it in its session is kept (`GatedReply`). So whatever a client has
seen, the next holder of its session knows; and a process that does not hold it any more sends nothing of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import attrs
import trio

from trimcp.budget import MemoryCharge
from trimcp.principal import Principal
from trimcp.store.keeping import SessionKeeper
from trimcp.store.shared import KeptSession, SaveSession
from trimcp.store.writing import Rows, StoredEvents, WriteQueue
from trimcp.transports.http.interfaces import Handler, HttpReply, HttpResponse
from trimcp.transports.http.state.sessions import HttpSession
from trimcp.transports.http.state.streams import EventStream, SessionEvents
from trimcp.wire.codes import ERRORS, INTERNAL_ERROR
from trimcp.wire.jsonrpc import JSON, RequestId, encode, encode_error, parse_value

_FORM: Final = 1  # of what is kept of a session; a later one is read by a later release only
_STREAMS: Final = 20  # bits of a stream's number that are the holder's own; those above are its fence
_EVENTS: Final = 40  # and of an event's number, in a stream that an earlier holder began

LOST: Final = "the process that ran this call has ended; the call may or may not have been carried out"
"""The error of a call whose process is gone."""


def lost_call(id: RequestId) -> bytes:
    """Return the answer to a call whose process is gone."""
    return encode_error(id, INTERNAL_ERROR, LOST, {"reason": ERRORS[INTERNAL_ERROR].reason, "started": True})


@attrs.define(eq=False)
class Holding:
    """What the sessions that one process holds have in common."""

    queue: WriteQueue
    events: StoredEvents
    keeper: SessionKeeper
    ttl: float  # seconds for which a session is kept after its last use
    released: Callable[[str], object]  # called with the id of a session that was handed over


@attrs.define(eq=False)
class HeldEvents(SessionEvents):
    """The events of a session that is held."""

    def replay(self, stream: EventStream, reply: HttpReply, headers: tuple[tuple[str, str], ...], after: int) -> None:
        """Send the kept events once those before are kept, too; what follows waits behind them."""
        assert isinstance(reply, GatedReply)
        reply.first = partial(self._read, stream, after)
        stream.open(reply, headers)

    def _read(self, stream: EventStream, after: int, then: Any) -> None:
        assert isinstance(self.store, StoredEvents)

        def told(rows: Rows) -> None:
            then(b"".join(stream.encode(data, seq) for seq, data in rows))

        self.store.queue.read(self.session, stream.number, after, told)


@attrs.define(eq=False)
class HeldSession(HttpSession):
    """A session that this process holds, and that another one can take over."""

    common: Holding | None = None
    kept: KeptSession | None = None  # of a session that was taken over
    named: str = ""  # its id then
    calls: dict[int, Sequence[RequestId]] = attrs.field(init=False, factory=dict)  # requests of streams under way
    beginning: Sequence[RequestId] | None = attrs.field(init=False, default=None)  # those of the next stream
    lost: bool = attrs.field(init=False, default=False)  # whether another process may hold it now
    fence: int = attrs.field(init=False, default=1)
    _listening: int | None = attrs.field(init=False, default=None)  # the number of the stream of the GET
    _saved: float | None = attrs.field(init=False, default=None)  # when it was saved last; None before
    # what is saved of it each time, as JSON that is yet to be closed, until its client changes it
    _known: bytes | None = attrs.field(init=False, default=None)
    queue: WriteQueue = attrs.field(init=False)
    _over: bool = attrs.field(init=False, default=False)  # nothing more is written

    def __attrs_post_init__(self) -> None:
        common, kept = self._holding, self.kept
        if kept is not None:
            self.id: str = self.named
            self.fresh: bool = False
            self.fence = kept.fence
        common.events.fences[self.id] = self.fence
        self.queue = common.queue
        super().__attrs_post_init__()
        if self.shared.events is not None:
            self.events: SessionEvents | None = HeldEvents(common.events, self.id, MemoryCharge(self.holding))
        self._number = self.fence << _STREAMS

    @property
    def _holding(self) -> Holding:
        assert self.common is not None
        return self.common

    # What is kept

    def save(self, *, changed: bool = False, release: bool = False) -> None:
        """Write its state down, if it has one and is held; `changed`: the client has changed what its server knows."""
        if self._over or self.lost or self.pushed.revision is None:
            return
        if changed or self._known is None:
            principal = self.principal
            state: dict[str, JSON] = {
                "form": _FORM,
                "principal": None if principal is None else dict(principal.facts()),
                "owner": self.owner,
                "state": self._holding.keeper.state_of(self.pushed),
            }
            self._known = encode(state)[:-1]
        calls = encode([[number, list(ids)] for number, ids in self.calls.items()])
        listening = b"null" if self._listening is None else b"%d" % self._listening
        data = b'%b,"calls":%b,"listening":%b}' % (self._known, calls, listening)
        new, self._saved = self._saved is None and self.kept is None, trio.current_time()
        if not self.queue.put(SaveSession(self.id, self.fence, data, self._holding.ttl, new, release)):
            self.lose("too much waits for the store")

    def restore(self, state: Any) -> None:
        """Go on where its former holder was: answer what was under way there, and keep what can still be read.

        Raises an exception if what was kept is no session.
        """
        kept = self.kept
        assert kept is not None
        tell_missed = self._holding.keeper.restore(self.pushed, state["state"], self.fence)
        first, listening = self.fence << _EVENTS, state["listening"]
        for number in sorted(kept.streams):
            if self.resumable and number != listening:
                self._keep(number, delivered=False)
        for number, ids in state["calls"]:
            for offset, id in enumerate(ids):
                self._holding.events.append(self.id, int(number), first + offset, lost_call(id), reply=True)
            self._keep(int(number), delivered=False)
        if listening is not None and self.resumable:
            self._listening = int(listening)
            self._stream = self.streams[self._listening] = self._kept_stream(self._listening)
            self._stream.go_on(first)
        self.save()
        tell_missed()

    def forget_streams(self, now: float) -> None:
        super().forget_streams(now)
        if self._saved is not None and self._saved < self.used and now - self._saved > self._holding.ttl / 4:
            self.save()  # it is used, so its time begins anew

    # Streams

    def new_stream(self) -> EventStream:
        """Return a new stream, and write down what it is for."""
        stream = super().new_stream()
        if stream.events is not None:
            ids, self.beginning = self.beginning, None
            if ids is None:
                self._listening = stream.number
            else:
                self.calls[stream.number] = ids
            self.save()
        return stream

    def stream_ended(self, stream: EventStream, *, delivered: bool) -> None:
        super().stream_ended(stream, delivered=delivered)
        if self.calls.pop(stream.number, None) is not None:
            self.save()

    # Its end

    def end(self, why: str, *, ending: bool = False) -> None:
        """End it for ever; or hand it over to whoever is asked for it next, because this process ends (`ending`)."""
        if ending:
            self.save(release=True)
            if self.can_poll:
                for stream in (*self.streams.values(), self._stream):
                    stream.release(self.shared.settings.retry)
        else:
            self._holding.events.end_session(self.id)
        self._over = True
        self._holding.events.fences.pop(self.id, None)
        super().end(why, ending=ending)
        if ending:
            self._holding.released(self.id)

    def close(self) -> None:
        if self.shared.draining and not self._over:  # its last call has ended
            self.end("the server is shutting down", ending=True)
        super().close()

    def lose(self, why: str) -> None:
        """Drop it without a word, since another process holds it, or may."""
        if not self.lost:
            self.lost = self._over = True
            self._holding.events.fences.pop(self.id, None)
            super().end(why)


def read_state(data: bytes) -> Any:
    """Return what `HeldSession.save` wrote. Raises ValueError if it is of another form."""
    state = parse_value(data)
    if type(state) is not dict or state.get("form") != _FORM:
        raise ValueError("a session of a form that this release does not know")
    return state


def principal_of(state: Any) -> Principal | None:
    """Return whose a session is, by its state."""
    facts = state["principal"]
    return None if facts is None else Principal(**facts)


@attrs.define(eq=False)
class GatedReply(HttpReply):
    """A reply that sends nothing before all that came before it in its session is kept."""

    inner: HttpReply
    session: HeldSession | None = None  # None: there is none, and nothing waits
    first: Any = None  # what reads the events that the reply begins with, for a stream that is resumed
    refusal: HttpResponse | None = None  # in place of a reply whose session could not be kept; None cuts the connection
    _held: int = attrs.field(init=False, default=0)
    # what follows upon an item of the queue: its number, a size, and what to do, or data to be written
    _pending: deque[tuple[int, int, Callable[[], object] | bytes]] = attrs.field(init=False, factory=deque)
    _room: trio.lowlevel.ParkingLot | None = attrs.field(init=False, default=None)  # of who waits for room

    @property
    def handler(self) -> Handler | None:
        return self.inner.handler

    @handler.setter
    def handler(self, handler: Handler | None) -> None:
        self.inner.handler = handler

    def send(self, response: HttpResponse) -> None:
        if self._clear:
            self.inner.send(response)
        else:
            self._after(len(response.body), partial(self.inner.send, response))

    def start(self, response: HttpResponse) -> None:
        if self.first is None or self.session is None:
            self._after(len(response.body), partial(self.inner.start, response))
            return

        def begin(events: bytes) -> None:
            self._now(partial(self.inner.start, attrs.evolve(response, body=response.body + events)))

        first, self.first = self.first, None
        first(begin)

    def write(self, data: bytes) -> None:
        session = self.session
        number = 0 if session is None else session.queue.last(session.id)
        if number and self._pending:  # nearly always
            self._held += len(data)
            self._pending.append((number, len(data), data))
        elif self._clear:
            self.inner.write(data)
        else:
            self._after(len(data), data)

    def finish(self, data: bytes = b"", trailers: tuple[tuple[str, str], ...] = ()) -> None:
        self._after(len(data), partial(self.inner.finish, data))

    def abort(self) -> None:
        self.inner.abort()

    @property
    def waiting(self) -> int:
        return self.inner.waiting + self._held

    @property
    def gone(self) -> bool:
        return self.inner.gone

    async def room(self) -> None:
        while self._held and not self.inner.gone:
            self._room = self._room or trio.lowlevel.ParkingLot()
            await self._room.park()
        await self.inner.room()

    @property
    def _clear(self) -> bool:
        """Whether nothing of the session waits, so that what is sent may leave at once."""
        session = self.session
        return session is None or not (self._pending or session.lost or session.queue.has(session.id))

    def _after(self, size: int, what: Callable[[], object] | bytes) -> None:
        session = self.session
        if session is None or self._clear:
            assert not isinstance(what, bytes)
            what()
        elif session.lost and not self._pending and not session.queue.has(session.id):
            self._now(partial(self.inner.write, what) if isinstance(what, bytes) else what)
        else:
            self._held += size
            self._pending.append((session.queue.last(session.id), size, what))
            session.queue.wait(self)

    def go_on(self, done: int) -> bool:
        """Send what follows upon items of the queue up to this number."""
        pending, data = self._pending, list[bytes]()
        while pending and pending[0][0] <= done:
            _, size, what = pending.popleft()
            if isinstance(what, bytes):
                data.append(what)
                continue
            self._write(data)
            self._held -= size
            self._now(what)
        self._write(data)
        if self._room is not None:
            self._room.unpark_all()
        return bool(pending)

    def _write(self, data: list[bytes]) -> None:
        if data:
            joined = b"".join(data)
            data.clear()
            self._held -= len(joined)
            self._now(partial(self.inner.write, joined))

    def _now(self, function: Callable[[], object]) -> None:
        refusal, self.refusal = self.refusal, None
        if self.session is not None and self.session.lost:
            if refusal is None:
                self.inner.abort()
            else:
                self.inner.send(refusal)
        elif not self.inner.gone:
            function()
