"""A client's channel to one server over HTTP: where each message goes, how many are under way, and the orderly end.

Over Streamable HTTP there is no connection that could end: each request is an exchange of its own, and one that fails
fails alone. With HTTP+SSE (2024-11-05), to which a channel may turn while it shakes hands, the stream is the
connection.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import asynccontextmanager
from typing import Final

import attrs
import trio

from trimcp.channel import Incoming, Kind, MessageChannel, Outgoing
from trimcp.transports.http.client import HttpServer
from trimcp.transports.http.client_handshake import Handshake
from trimcp.transports.http.client_http import Cut, Http, opened_http
from trimcp.transports.http.client_inbox import Inbox
from trimcp.transports.http.client_listen import Listener
from trimcp.transports.http.client_notices import Notices
from trimcp.transports.http.client_policy import Patience, Trouble
from trimcp.transports.http.client_post import Post
from trimcp.transports.http.client_sse2024 import EventRoad
from trimcp.wire.codes import OVERLOADED
from trimcp.wire.jsonrpc import ErrorResponse, Lost, RequestId

__all__ = ["HttpChannel", "opened"]

_OLDER: Final = (400, 404, 405)  # 2026-07-28 "Backward Compatibility": what a server of HTTP+SSE says to a POST
_WAITING: Final = 20_000
_WAITING_BYTES: Final = 64 * 1024 * 1024

_log = logging.getLogger("trimcp.http")


@asynccontextmanager
async def opened(server: HttpServer) -> AsyncIterator[HttpChannel]:
    """Yield a channel to a server and the place where its tasks live; see `HttpServer.connect`."""
    failure: BaseException | None = None
    async with opened_http(server) as http, trio.open_nursery() as nursery:
        # The channel ends its tasks when it is closed, and whoever closes it is not one of them.
        channel = HttpChannel(server, http, await nursery.start(_house))
        try:
            yield channel
        except BaseException as exc:
            failure = exc  # kept out of the nursery, which would put it into a group
        try:
            await channel.aclose()
        except trio.Cancelled as exc:
            failure = exc if failure is None else failure
        finally:
            nursery.cancel_scope.cancel(reason="the channel was closed")
    channel._let_go()
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # it refers to this frame, which would refer to it


async def _house(task_status: trio.TaskStatus[trio.Nursery]) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        task_status.started(nursery)


@attrs.define(eq=False)
class Posts:
    """The requests under way, and those that wait for their turn.

    What waits costs no task. It is not refused before it weighs 64 MiB or there are 20,000: whoever sends must never
    wait here, since what comes next may be the cancellation or the answer that gives the turn.
    """

    _nursery: trio.Nursery
    _most: int
    _running: dict[RequestId, Post] = attrs.field(init=False, factory=dict)
    _waiting: dict[RequestId, Post] = attrs.field(init=False, factory=dict)
    _waiting_bytes: int = attrs.field(init=False, default=0)
    _long: int = attrs.field(init=False, default=0)

    def submit(self, post: Post) -> bool:
        """Run a request now or in its turn; False if too many wait already."""
        id = post.outgoing.request_id
        assert id is not None
        if (post.outgoing.headers or {}).get("mcp-method") == "subscriptions/listen":
            self._long += 1  # as long as somebody listens, so it must not take the turn of others
            self._start(id, post)
        elif len(self._running) - self._long < self._most:
            self._start(id, post)
        elif len(self._waiting) < _WAITING and self._waiting_bytes < _WAITING_BYTES:
            self._waiting[id] = post
            self._waiting_bytes += len(post.outgoing.data)
        else:
            return False
        return True

    def _start(self, id: RequestId, post: Post) -> None:
        self._running[id] = post
        self._nursery.start_soon(self._run, id, post)

    async def _run(self, id: RequestId, post: Post) -> None:
        try:
            await post.run()
        finally:
            self._running.pop(id, None)  # a request that is sent twice has one id
            if (post.outgoing.headers or {}).get("mcp-method") == "subscriptions/listen":
                self._long -= 1
            elif self._waiting:
                following = next(iter(self._waiting))
                self._start(following, self._take(following))

    def _take(self, id: RequestId) -> Post:
        post = self._waiting.pop(id)
        self._waiting_bytes -= len(post.outgoing.data)
        return post

    def withdraw(self, id: RequestId) -> Post | None:
        """Drop a request that has not had its turn, or return it if it is under way; None in any other case."""
        if id in self._waiting:
            self._take(id)
            return None
        return self._running.get(id)

    def close(self) -> None:
        """Give up everything."""
        self._waiting.clear()
        for post in self._running.values():
            post.scope.cancel(reason="the channel was closed")


@attrs.define(eq=False)
class HttpChannel(MessageChannel):
    """The channel to one server over HTTP.

    A request that gets no answer arrives as `Lost` by its id. What a server forgot of us arrives as `Lost` without id.
    """

    mirrors_headers = True
    half_open = False  # with its stream the connection has ended: no answer of ours would be taken any more

    server: HttpServer
    http: Http
    _nursery: trio.Nursery
    inbox: Inbox = attrs.field(init=False, factory=Inbox)
    handshake: Handshake = attrs.field(init=False)
    patience: Patience = attrs.field(init=False)
    max_message: int = attrs.field(init=False)
    retry_calls: bool = attrs.field(init=False)
    unreachable: bool = attrs.field(init=False, default=False)
    _posts: Posts = attrs.field(init=False)
    _notices: Notices = attrs.field(init=False)
    _listener: Listener | None = attrs.field(init=False, default=None)
    _events: EventRoad | None = attrs.field(init=False, default=None)
    _said: str | None = attrs.field(init=False, default=None)
    _sending: bool = attrs.field(init=False, default=False)
    _closed: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        server = self.server
        self.max_message, self.retry_calls = server.max_message, server.retry_calls
        self.patience = Patience(server.retries, server.random)
        self.handshake = Handshake(self.http, server.max_message, server.timeouts.notice, self._forgotten)
        self._posts = Posts(self._nursery, server.max_posts)
        self._notices = Notices(self, self._nursery, server.timeouts.notice, self._listen)
        if server.mode == "sse":
            self._events = EventRoad(self, self._nursery, server.timeouts.endpoint)
            self._nursery.start_soon(self._read_events, self._events)

    @property
    def speaks_sse(self) -> bool:
        """Whether it was told, or has turned, to the HTTP+SSE of 2024-11-05."""
        return self._events is not None

    # The channel

    async def send(self, batch: Sequence[Outgoing]) -> None:
        """Begin to send every message of the batch; see `MessageChannel.send`.

        Requests never wait here: they have a queue of their own, and one that finds it full is answered at once with
        an error. The order of what is sent without an answer in between is the server's to choose, except over
        HTTP+SSE. A message that does not reach the server breaks nothing else.
        """
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this channel")
        self._sending = True
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            self._check_open()
            for outgoing in batch:
                await self._send(outgoing)
                self._check_open()
            await trio.lowlevel.cancel_shielded_checkpoint()
        finally:
            self._sending = False

    async def _send(self, outgoing: Outgoing) -> None:
        if self._events is not None:
            await self._events.send(outgoing)
        elif outgoing.kind is Kind.REQUEST:
            if not self._posts.submit(Post(outgoing, self)):
                refused = ErrorResponse(outgoing.request_id, OVERLOADED, "too many requests wait; nothing was sent")
                self.inbox.post(Incoming(refused))
        elif outgoing.kind is Kind.CANCEL:
            assert outgoing.request_id is not None
            post = self._posts.withdraw(outgoing.request_id)
            if post is not None and post.ends_with_its_stream:
                post.scope.cancel(reason="the request was cancelled")
            elif post is not None:
                self._notices.cancel(outgoing, post)
        else:
            await self._notices.send(outgoing)

    async def receive(self) -> Sequence[Incoming]:
        """Return what has arrived on all streams; see `MessageChannel.receive`."""
        return await self.inbox.receive()

    async def aclose(self) -> None:
        """Give up what is under way and end the session at the server; see `MessageChannel.aclose`.

        Last words (cancellations above all) and the end of the session get `timeouts.close` seconds, cancelled or not:
        a session that nobody ends costs the server, and work in it goes on.
        """
        if not self._closed:
            self._closed = True
            self.inbox.close()
            # The bounded last close: see above what it is for.
            with trio.CancelScope(shield=True, deadline=trio.current_time() + self.server.timeouts.close):
                await self._notices.idle()
                if self._listener is not None:
                    self._listener.scope.cancel(reason="the channel was closed")
                self._posts.close()
                await self._end_session()
            self._nursery.cancel_scope.cancel(reason="the channel was closed")
        await trio.lowlevel.checkpoint()

    async def hung_up(self) -> None:
        """Wait until the server has ended the stream of HTTP+SSE; see `MessageChannel.hung_up`."""
        if self._events is None:
            await trio.sleep_forever()
        else:
            await self._events.hung_up()
            self._said = self._events.why or "the server ended its event stream"

    def taken(self) -> Hashable:
        """Return something new: each request has time limits of its own (`Timeouts.write`, `Timeouts.notice`)."""
        return object()

    def obituary(self) -> str | None:
        """Say what the server last had to say, as far as it matters for an error; None if nothing is known."""
        if self._said is not None or self.http.last_status is None:
            return self._said
        return f"the server last answered {self.http.last_status}"

    def _check_open(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this channel was closed")

    def _let_go(self) -> None:
        """Break the cycles between this and its parts, so that nothing of it waits for a garbage collection."""
        del self._posts, self._notices, self.handshake
        self._listener = self._events = None

    # What requests and streams report

    def failed(self, why: str) -> None:
        """Note why a request got no answer, for `obituary`."""
        self._said = why

    def _forgotten(self) -> None:
        """Note that a new session took the place of an old one, with whatever the server had in it."""
        self.inbox.post(Incoming(Lost(None, "the server forgot the session; a new one was begun")))
        self._start_listener()

    async def _listen(self) -> None:
        """Listen from now on for what the server says unasked, before requests go on."""
        listener = self._start_listener()
        with trio.move_on_after(self.server.timeouts.connect):
            await listener.written.wait()

    def _start_listener(self) -> Listener:
        if self._listener is not None:
            self._listener.scope.cancel(reason="another session has taken the place of this one")
        self._listener = Listener(self)
        self._nursery.start_soon(self._listener.run)
        return self._listener

    async def _end_session(self) -> None:
        if self.handshake.session_id is None:
            return
        try:
            async with self.http.open("DELETE", self.handshake.headers()) as reply:
                _log.debug("the session was ended (status %d)", reply.status)
        except Cut as cut:
            _log.debug("the session could not be ended: %s", cut.why)

    # HTTP+SSE

    async def fall_back(self, trouble: Trouble, offer: Outgoing) -> Trouble | None:
        """Try `initialize` by the older transport after it met `trouble`; None if that has taken over."""
        if self.server.mode != "auto" or trouble.status not in _OLDER:
            return trouble
        if trouble.answer is not None and trouble.status != 405:  # an endpoint without POST, whatever it says besides
            return trouble
        events = EventRoad(self, self._nursery, self.server.timeouts.endpoint)
        self._nursery.start_soon(self._read_events, events)
        await events.known.wait()
        if not events.open:
            return attrs.evolve(trouble, why=f"{trouble.why}, and does not speak HTTP+SSE either: {events.why}")
        self._events = events
        try:
            await events.send(offer)
        except trio.BrokenResourceError as error:
            return attrs.evolve(trouble, why=str(error))
        return None

    async def _read_events(self, events: EventRoad) -> None:
        await events.run()
        if events is self._events:
            self._said = events.why  # the session tells the log
            self.inbox.end()
