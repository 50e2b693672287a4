"""An application that shares its sessions with those of other processes: any of them answers any request.

A session runs in the process that holds it. A request that arrives elsewhere is handed to the holder in a letter, and
what is answered comes back in letters. If the holder is gone, whoever is asked takes the session over, and goes on from
what the store has of it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count
from typing import Any, Final

import attrs
import trio

from trimcp.store.keeping import SharedCounts
from trimcp.store.letters import PostBox
from trimcp.store.shared import KeptSession, Letter, SharedStore, Write
from trimcp.store.writing import StoredEvents, WriteQueue
from trimcp.support.cleaning import log_crash
from trimcp.support.nurseries import open_service_nursery
from trimcp.transports.http.endpoint.exchange import Exchange, SessionGet
from trimcp.transports.http.endpoint.shared_exchange import (
    WINDOW,
    RemoteReply,
    SharedExchange,
    SharedGet,
    ToldExchange,
    answer,
    is_said_once,
    later,
    read_head,
    rest_of,
    unread,
    written,
)
from trimcp.transports.http.interfaces import (
    JSON_HEADERS,
    Admitted,
    Handler,
    Head,
    HttpReply,
    HttpResponse,
    refusal,
)
from trimcp.transports.http.state.held import HeldSession, Holding, lost_call, principal_of, read_state
from trimcp.transports.http.state.sessions import HttpSession, Shared
from trimcp.wire.codes import OVERLOADED
from trimcp.wire.jsonrpc import Request, parse

log: logging.Logger = logging.getLogger("trimcp.http")

_MOST_ASKED: Final = 64 * 1024 * 1024  # bytes of requests that were handed over and are not answered yet
_MOST_HOLDERS: Final = 10_000  # sessions elsewhere of which is known who holds them
_ATTEMPTS: Final = 3  # to find who has a session
_LAST: Final = 2.0  # seconds for the last writes of a process that ends
_PAUSE: Final = 0.5  # seconds before a store that failed is tried again
_PATIENCE: Final = 5.0  # seconds that a request waits for a lease
_KEY: Final = "requestState"
_ANYTHING: Final = ""  # may have changed


@attrs.define(eq=False)
class Forwarded(Handler):
    """A request whose session another process holds: it is handed over, and what comes back is sent on.

    Of an answer, or a notification, a client that was told to try later says nothing again, and the call that asked for
    it would wait for ever. So it is handed over as soon as that goes, even if its client was refused or has left.
    """

    sharing: SessionSharing
    head: Head
    holder: str  # "": nobody knows yet
    number: int = attrs.field(init=False, default=0)
    letter: Letter | None = attrs.field(init=False, default=None)  # with the request,
    place: int = attrs.field(init=False, default=0)  # and its number in the queue of what is written
    begun: bool = attrs.field(init=False, default=False)  # whether the response has
    size: int = attrs.field(init=False, default=0)  # of the body
    _resting: bool = attrs.field(init=False, default=False)  # until it is tried again,
    _pause: float = attrs.field(init=False, default=_PAUSE)  # after so many seconds
    _reply: HttpReply | None = attrs.field(init=False, default=None)
    _body: bytes = attrs.field(init=False, default=b"")
    _attempts: int = attrs.field(init=False, default=0)
    _taken: int = attrs.field(init=False, default=0)  # bytes since the holder was told

    @property
    def max_body(self) -> int:
        return self.sharing.shared.service.max_message if self.head.method == "POST" else 0

    @property
    def at_rest(self) -> bool:
        return self._reply is None

    def start(self, body: bytes, reply: HttpReply) -> None:
        self._body, self._reply, self.size = body, reply, len(body)
        self._begin(reply)

    def _begin(self, reply: HttpReply) -> None:
        if self.holder and self.sharing.has_lease:
            self._ask()
        else:
            self._refuse(reply)

    def _ask(self) -> None:
        self._attempts += 1
        self.number = self.sharing.ask(self)
        self.letter = self.sharing.letters.say(self.holder, "ask", self._body, n=self.number, head=written(self.head))
        self.place = self.sharing.queue.last("")
        if self.letter is None:
            self.fail()

    def too_large(self, beginning: bytes) -> HttpResponse:
        return self.sharing.shared.too_large(self.head, beginning)

    def disconnected(self, slow: str | None = None) -> None:
        if not self.begun and self._is_said_once:
            self._reply = unread(self.sharing.letters)
            return
        self._reply = None
        self.sharing.forget(self)
        self.sharing.letters.say(self.holder, "left", n=self.number, slow=slow)

    def writable(self) -> None:
        """Let the holder send more."""
        if self._taken:
            self.sharing.letters.say(self.holder, "taken", n=self.number, size=self._taken)
            self._taken = 0

    def take(self, kind: str, said: Mapping[str, Any], data: bytes) -> None:
        """Send on a part of the response."""
        reply = self._reply
        if reply is None:
            return
        if kind == "abort":
            self.fail()
            return
        self.begun, self._body, self.letter = True, b"", None
        if kind in ("send", "finish"):
            self._reply = None
            self.sharing.forget(self)
        match kind:
            case "send":
                reply.send(self._response(said, data))
            case "start":
                reply.start(self._response(said, data))
            case "write":
                reply.write(data)
            case "finish":
                reply.finish(data)
            case _:
                raise ValueError("no such part of a response")
        self._taken += len(data)
        if self._reply is not None and self._taken >= WINDOW // 2 and not reply.waiting:
            self.writable()

    def _response(self, said: Mapping[str, Any], data: bytes) -> HttpResponse:
        headers = tuple((str(name), str(value)) for name, value in said["headers"])
        return HttpResponse(int(said["status"]), (*headers, *self.head.reply_headers), data)

    def release(self, retry: int) -> None:
        """End the stream of a GET; its client goes on with it elsewhere, after `retry` milliseconds."""
        reply = self._reply
        if reply is not None and self.begun and self.head.method == "GET":
            self.disconnected()
            reply.finish(b"retry: %d\n\n" % retry)

    async def again(self) -> None:
        """Find anew who has the session: the holder has got nothing of this request, or has the session no more."""
        self.sharing.forget_holder(self.head)
        exhausted = self._attempts >= _ATTEMPTS
        found = None if exhausted or self._reply is None else await self.sharing.find(self.head)
        if (reply := self._reply) is None:  # the client has left
            return
        if exhausted:
            self._refuse(reply)
        elif isinstance(found, Forwarded):
            self.holder = found.holder
            self._begin(reply)
        else:
            body, self._reply, self._body = self._body, None, b""
            if found is None and "mcp-session-id" in self.head.headers:
                found = self.sharing.admit(self.head)
            answer(found or self._later, body, reply)

    @property
    def _is_said_once(self) -> bool:
        return self.head.method == "POST" and is_said_once(self._body)

    @property
    def _later(self) -> HttpResponse:
        return later(None, *self.head.reply_headers, ending=self.sharing.shared.draining)

    def _refuse(self, reply: HttpReply) -> None:
        """Have the client try later."""
        self._reply = None
        self.sharing.forget(self)
        reply.send(self._later)
        if self._is_said_once and self.sharing.has_room:
            self._reply, self._resting, self.number = unread(self.sharing.letters), True, self.sharing.ask(self)
            self.sharing.nursery.start_soon(self._insist)

    async def _insist(self) -> None:
        """Try again what the client will not."""
        await trio.sleep(self._pause)
        self._resting, self._attempts, self._pause = False, 0, min(2 * self._pause, self.sharing.store.lease / 2)
        self.sharing.forget(self)
        if "mcp-session-id" in self.head.headers:
            await self.again()
        elif self._reply is not None:  # of HTTP+SSE, where no other process ever has the session
            self._begin(self._reply)

    def fail(self) -> None:
        """End the request with an error, because the holder is gone, or is told no more; ask the next one for a GET."""
        reply = self._reply
        if reply is None or self._resting:
            return
        if self.head.method == "GET" and not (self.begun or self.sharing.shared.draining):
            self.sharing.ask_again(self)  # that does nothing twice
            return
        self._reply = None
        self.sharing.forget(self)
        if self.begun:
            # What was answered is kept: a client that knows how reads the rest, with the error, from the next holder.
            reply.finish()
            return
        message = parse(self._body, self.sharing.shared.settings.limits)
        if isinstance(message, Request):
            headers = (*JSON_HEADERS, *self.head.reply_headers)
            reply.send(HttpResponse(200, headers, lost_call(message.id)))
        else:
            self._refuse(reply)


@attrs.define(eq=False)
class SessionSharing:
    """One application's part in what several processes share.

    It has more than 300 lines because each letter may concern any part of what it keeps.
    """

    shared: Shared
    store: SharedStore
    admit: Callable[[Head], Admitted]  # returns what answers a request of a session that is here
    queue: WriteQueue = attrs.field(init=False)
    letters: PostBox = attrs.field(init=False)
    failing: bool = attrs.field(init=False, default=False)
    replies: dict[tuple[str, int], RemoteReply] = attrs.field(init=False, factory=dict)
    _asked: dict[int, Forwarded] = attrs.field(init=False, factory=dict)
    _holders: dict[str, str] = attrs.field(init=False, factory=dict)  # of sessions elsewhere, as far as is known
    _asking: int = attrs.field(init=False, default=0)  # bytes of their bodies that may be needed again
    _answered: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    # requests to sessions that are handed over as soon as their calls have ended, by whom and with which number
    _put_off: dict[str, list[tuple[str, int]]] = attrs.field(init=False, factory=dict)
    _numbers: count[int] = attrs.field(init=False, factory=lambda: count(1))
    _holding: Holding = attrs.field(init=False)
    _counts: SharedCounts = attrs.field(init=False)
    _taking: trio.Lock = attrs.field(init=False, factory=trio.Lock)
    nursery: trio.Nursery = attrs.field(init=False)
    _publishing: bool = attrs.field(init=False, default=False)
    _untold: bool = attrs.field(init=False, default=False)  # whether others have missed a change
    _ready: bool = attrs.field(init=False, default=False)
    # set while there is a lease: otherwise nobody could answer, since the name that others know is that of before
    _leased: trio.Event = attrs.field(init=False, factory=trio.Event)

    def __attrs_post_init__(self) -> None:
        shared = self.shared
        keeper = shared.service.keeper()
        self.queue = queue = WriteQueue(self.store, self._refused)
        events = StoredEvents(queue, max_total_bytes=shared.budget.bound)
        shared.events = events if shared.settings.resumable else None
        self._holding = Holding(queue, events, keeper, 2 * shared.settings.session_idle, self._released)
        self.letters = letters = PostBox(queue)
        self._counts = counts = keeper.share_turns(self.store, lambda to, id: letters.say(to, "turn", id=id))
        letters.readers |= {
            **dict.fromkeys(_PARTS_OF_ANSWERS, self._take_part),
            "moved": self._move,
            "ask": self._serve,
            "left": self._leave,
            "taken": self._note_taken,
            "change": lambda sender, said, data: self._publish(said["changed"], said["list"]),
            "turn": lambda sender, said, data: counts.come(str(said["id"])),
            "gone": self._take_loss,
        }
        shared.make_session, shared.letters = partial(HeldSession, common=self._holding), letters
        shared.forward = self.forward

    # Its life

    @asynccontextmanager
    async def running(self, end: Callable[[], object]) -> AsyncIterator[None]:
        """Share while the block runs. `end` ends all sessions, after it. Raises OSError: the store cannot be opened."""
        async with open_service_nursery() as nursery:
            self.nursery = nursery
            await nursery.start(self._run)
            try:
                with self._holding.keeper.listening(self._changed):
                    yield
            finally:
                end()
                nursery.cancel_scope.cancel()

    async def _run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Share under one name after another: a new one whenever the lease was lost."""
        while True:
            try:
                async with self.store.opened():
                    await self._share(task_status)
            except OSError as error:
                if not self._ready:
                    raise
                log_crash(log, error, "the shared store cannot be opened")
                await trio.sleep(_PAUSE)
            self._lose_all()
            self._publish(_ANYTHING, False)  # letters of others did not arrive

    def _lose_all(self) -> None:
        self.queue.let_answers_go()
        for session in self.shared.sessions:
            if isinstance(session, HeldSession):
                session.lose("another process may have taken the session over: this one stood still")
        for asked in list(self._asked.values()):
            asked.fail()  # the answer was sent to a name that nobody has any more
        for reply in list(self.replies.values()):
            reply.leave(None)

    async def _share(self, task_status: trio.TaskStatus[None]) -> None:
        keeper = self._holding.keeper
        if keeper.lacks_state_key:
            keeper.use_state_key(await self.store.agree(_KEY, os.urandom(32)))
        if (auth := self.shared.settings.auth) is not None:
            await auth.share(self.store)
        self._leased.set()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.queue.run)
                nursery.start_soon(self.letters.run)
                nursery.start_soon(self._counts.run)
                for part in self.shared.parts:
                    await nursery.start(part)
                if not self._ready:
                    self._ready = True
                    task_status.started()
                await self._keep_lease()
                nursery.cancel_scope.cancel()
        finally:
            self._leased = trio.Event()
            with trio.move_on_after(_LAST, shield=True):
                await self.queue.flush()
                await self._counts.flush()
                with suppress(OSError):  # else the lease ends by itself
                    await self.letters.retire()

    async def _keep_lease(self) -> None:
        """Renew the lease until it is lost, and notice which other processes are gone."""
        renewed = trio.current_time()
        while True:
            await trio.sleep(self.store.lease / 4)
            try:
                if not await self.store.renew():
                    return
                renewed, self.failing = trio.current_time(), False
                if self._untold:
                    self._untold = False
                    self._changed(_ANYTHING, False)
                for name in {asked.holder for asked in self._asked.values()} | {to for to, _ in self.replies}:
                    if await self.store.gone(name):
                        self._lose(name)
            except OSError as error:
                self.failing = True
                log.warning("the lease was not renewed: %s", error)
                if trio.current_time() - renewed > self.store.lease:
                    return

    # Who has a session

    async def find(self, head: Head) -> Admitted | None:
        """Return what answers a request of a session that another process has; None if that is for this one to say."""
        id = head.headers.get("mcp-session-id")
        shared = self.shared
        if id is None or not shared.routing.keeps_sessions or shared.sessions.has(id):
            return None
        if not self.has_lease and not shared.draining:
            with trio.move_on_after(_PATIENCE):
                await self._leased.wait()
        if not self.has_lease:
            return Forwarded(self, head, "")
        resumed = head.headers.get("last-event-id") if head.method == "GET" else None
        known = self._holders.get(id)  # who has lost it says so, and its letters are refused if it ended
        if known is not None and not resumed:
            return self.forward(head, known)
        try:
            for _ in range(_ATTEMPTS):
                kept = await self.store.load(id)
                if kept is None:
                    return None
                if kept.holder != self.store.name and not kept.gone:
                    if resumed and (rest := await rest_of(self.store, kept, head, resumed)) is not None:
                        return rest
                    self._holders[id] = kept.holder
                    if len(self._holders) > _MOST_HOLDERS:
                        del self._holders[next(iter(self._holders))]
                    return self.forward(head, kept.holder)
                if shared.draining:
                    break
                if await self._take(id, kept, head) or shared.sessions.has(id):
                    return None
        except OSError as error:
            if not self.failing:
                log.warning("a session was not found: %s", error)
            self.failing = True
        return Forwarded(self, head, "")

    async def _take(self, id: str, kept: KeptSession, head: Head) -> bool:
        """Hold a session whose holder is gone; False if somebody else was first. A stranger takes nothing."""
        async with self._taking:
            if self.shared.sessions.has(id):
                return True
            state = read_state(kept.data)
            principal = principal_of(state)
            if principal != head.principal:
                return True  # and it is not found
            owner = str(state["owner"])
            taken = await self.store.take(id, kept.fence) if self.shared.sessions.has_room(owner) else None
            if taken is None:
                return False
            make = self.shared.make_session
            session = make(self.shared, principal, owner, head.link, kept=taken, named=id)
            assert isinstance(session, HeldSession)
            try:
                session.restore(read_state(taken.data))
            except Exception as error:
                log_crash(log, error, "a session that another process kept cannot be read")
                session.end("it cannot be read")
                return True
            self.shared.add(session)
            self.shared.sessions.use(session)
            return True

    def forward(self, head: Head, holder: str) -> Admitted:
        if not self.has_room:
            return refusal(503, "too much is under way; try again later", code=OVERLOADED)
        return Forwarded(self, head, holder)

    @property
    def has_lease(self) -> bool:
        """Whether others know this process by its name."""
        return self._leased.is_set()

    @property
    def has_room(self) -> bool:
        """Whether one more request may be handed over."""
        return len(self._asked) < self.shared.settings.max_exchanges and self._asking <= _MOST_ASKED

    def exchange(self, head: Head) -> type[Exchange]:
        """Return the class of the exchange that answers a POST."""
        id, named = head.headers.get("mcp-session-id"), self.shared.routing.modern_names
        if head.headers.get("mcp-protocol-version") in named or (id is not None and not self.shared.sessions.has(id)):
            return ToldExchange
        return SharedExchange

    def get(self, session: HttpSession, head: Head) -> SessionGet:
        return SharedGet(session, head)

    async def hand_over(self, grace: float) -> None:
        """Hand over all sessions in which nothing runs, because this process is about to end.

        Streams of sessions that others have end, too. Requests that others answer have `grace` seconds for that.
        """
        for session in self.shared.sessions:
            if isinstance(session, HeldSession) and session.at_rest:
                session.end("the server is shutting down", ending=True)
        for asked in list(self._asked.values()):
            asked.release(self.shared.settings.retry)
        with trio.move_on_after(grace):
            while self._asked:
                await self._answered.park()
        for asked in list(self._asked.values()):
            asked.fail()

    def forget_holder(self, head: Head) -> None:
        """Note that a session is not where it was."""
        self._holders.pop(head.headers.get("mcp-session-id", ""), None)

    # Letters

    def ask(self, asked: Forwarded) -> int:
        """Return a number for a request that is handed over."""
        number = next(self._numbers)
        self._asked[number] = asked
        self._asking += asked.size
        return number

    def forget(self, asked: Forwarded) -> None:
        if self._asked.pop(asked.number, None) is not None:
            self._asking -= asked.size
            if not self._asked:
                self._answered.unpark_all()

    def _leave(self, sender: str, said: Mapping[str, Any], data: bytes) -> None:
        if (reply := self.replies.get((sender, int(said["n"])))) is not None:
            reply.leave(said["slow"])

    def _note_taken(self, sender: str, said: Mapping[str, Any], data: bytes) -> None:
        if (reply := self.replies.get((sender, int(said["n"])))) is not None:
            reply.taken(int(said["size"]))

    def _move(self, sender: str, said: Mapping[str, Any], data: bytes) -> None:
        if (asked := self._asked_of(sender, said)) is not None:
            self.ask_again(asked)

    def ask_again(self, asked: Forwarded) -> None:
        """Hand a request to whoever has its session now."""
        self.forget(asked)
        self.nursery.start_soon(asked.again)

    def _take_part(self, sender: str, said: Mapping[str, Any], data: bytes) -> None:
        if (asked := self._asked_of(sender, said)) is not None:
            asked.take(said["kind"], said, data)

    def _asked_of(self, sender: str, said: Mapping[str, Any]) -> Forwarded | None:
        asked = self._asked.get(int(said["n"]))
        return asked if asked is not None and asked.holder == sender else None

    def _serve(self, sender: str, said: Mapping[str, Any], body: bytes) -> None:
        """Answer a request that came to another process."""
        number, head = int(said["n"]), read_head(said["head"])
        id = head.headers.get("mcp-session-id")
        if head.path == self.shared.settings.path and not (id and self.shared.sessions.has(id)):
            self.letters.say(sender, "moved", n=number)
            return
        if id and self.shared.draining and not is_said_once(body):  # what is new is for its next holder
            self._put_off.setdefault(id, []).append((sender, number))
            return
        reply = self.replies[sender, number] = RemoteReply(self.letters, self.replies, sender, number)
        answer(self.admit(head), body, reply)

    def _released(self, id: str) -> None:
        for sender, number in self._put_off.pop(id, ()):
            self.letters.say(sender, "moved", n=number)

    def _refused(self, write: Write) -> None:
        """Take back what followed from a write that was refused."""
        if isinstance(write, Letter):
            for asked in list(self._asked.values()):
                if asked.letter == write and asked.holder == write.to:
                    self.ask_again(asked)
                    return
            if write.to is None:
                self._untold = True
            elif write.to != self.store.name:
                self._lose(write.to)
            return
        for session in self.shared.sessions:
            if session.id == write.session and isinstance(session, HeldSession) and session.fence == write.fence:
                session.lose("another process has taken the session over")

    def _lose(self, name: str) -> None:
        """Have `_lost` called once all letters are read that a process which is gone has sent."""
        for id in [id for id, holder in self._holders.items() if holder == name]:
            del self._holders[id]
        if self.letters.say(self.store.name, "gone", process=name) is None:
            self._lost(name)

    def _take_loss(self, sender: str, said: Mapping[str, Any], data: bytes) -> None:
        if sender == self.store.name:
            self._lost(said["process"])

    def _lost(self, name: str) -> None:
        """Give up what was under way with a process that is gone; what it was not asked yet will be refused instead."""
        for lose in self.letters.on_lost:
            lose(name)
        done = self.queue.done
        for asked in [asked for asked in self._asked.values() if asked.holder == name and asked.place <= done]:
            asked.fail()
        for reply in [reply for (to, _), reply in self.replies.items() if to == name]:
            reply.leave(None)

    # Changes

    def _changed(self, changed: str, is_list: bool) -> None:
        if not self._publishing:
            if self.letters.say(None, "change", changed=changed, list=is_list) is None:
                self._untold = True
            elif self.has_lease:
                self.queue.hold_answers()

    def _publish(self, changed: str, is_list: bool) -> None:
        self._publishing = True
        try:
            self._holding.keeper.publish(changed, is_list)
        finally:
            self._publishing = False


_PARTS_OF_ANSWERS: Final = ("send", "start", "write", "finish", "abort")
