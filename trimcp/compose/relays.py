"""The connections to one upstream: a supervised one for each client, opened when it is first needed.

A client has a connection of its own, because an upstream may keep state for it and may ask it questions. It is the
session's and ends with it. Clients whose requests have no session (2026-07-28 over HTTP) are told apart by who they are
and what they declare; their connection ends when it is not used. One that may ask questions between two requests of
such a client serves one request at a time: so every question has one request that it can belong to.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final

import attrs
import trio

from trimcp.budget import owner_of
from trimcp.client.client import Client, Connectable
from trimcp.client.session import ClientSession
from trimcp.compose.calls import HeldCall, RelayedCall
from trimcp.errors import CannotAsk, ErrorReply, LocalError, McpError, RemoteError, UpstreamDown
from trimcp.fleet.combinators import first_of
from trimcp.fleet.supervisor import UpstreamState
from trimcp.fleet.upstream import Upstream, supervise
from trimcp.protocol.events import Admission, Notified
from trimcp.session.context import Context
from trimcp.session.facts import Beside
from trimcp.session.session import Session
from trimcp.support.cleaning import log_crash
from trimcp.support.nurseries import open_service_nursery
from trimcp.support.restarts import Restarts
from trimcp.support.shares import Shares
from trimcp.watch.picture import link_of
from trimcp.wire.capabilities import ClientCapabilities, ServerCapabilities, declares
from trimcp.wire.codes import INVALID_REQUEST, OVERLOADED
from trimcp.wire.common import Implementation, LoggingLevel
from trimcp.wire.converter import converter_for
from trimcp.wire.input_requests import ListRootsResult
from trimcp.wire.jsonrpc import encode
from trimcp.wire.lifecycle import LoggingMessageParams
from trimcp.wire.methods import METHODS, TASK_NOTICE
from trimcp.wire.revisions import LATEST, Revision

log: logging.Logger = logging.getLogger("trimcp.compose")

_TRIED: Final = tuple(state for state in UpstreamState if state is not UpstreamState.CONNECTING)
_MOST_TOLD: Final = 100  # notifications of one client that wait for the connection,
_MOST_TOLD_BYTES: Final = 1024 * 1024  # and their bytes
QUESTIONS: Final = ("roots/list", "sampling/createMessage", "elicitation/create")
COMPLETE: Final = "notifications/elicitation/complete"


@attrs.frozen(eq=False)
class Learned:
    """What an upstream says about itself."""

    revision: Revision
    info: Implementation | None
    capabilities: ServerCapabilities
    instructions: str | None


@attrs.define(eq=False, repr=False)
class Relays:
    """One upstream, and the connections to it."""

    target: Connectable
    name: str  # in errors and logs
    revision: Revision | str | None = None  # to speak with it; None for the newest that both know
    patient: bool = True  # whether calls wait for a connection that was lost; else they fail at once
    shared: bool = False  # whether all clients share one connection, over which nobody is asked
    most: int = 100  # how many connections there may be
    idle: float = 300.0  # seconds after which a connection that belongs to no session ends unless it is used
    connect_timeout: float = 60.0
    methods: tuple[str, ...] = ()  # of extensions, that are passed on
    notifications: tuple[str, ...] = ()  # the same
    # tells a session that is told unasked of what changes at the upstream
    tell_lists: Callable[[Session, Relay], object] = attrs.field(init=False, default=lambda session, relay: None)
    learned: Learned | None = attrs.field(init=False, default=None)  # what it says about itself, once connected
    nursery: trio.Nursery = attrs.field(init=False)
    held: dict[str, HeldCall] = attrs.field(init=False, factory=dict)  # calls that may wait for answers, by id
    _open: list[Relay] = attrs.field(init=False, factory=list)
    _shares: Shares[Relay] = attrs.field(init=False, factory=lambda: Shares(2))
    # what sessions said before their first request, which says who they are
    _early: list[tuple[Session, str, Any, int]] = attrs.field(init=False, factory=list)  # with its bytes
    _changed: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Open connections while the block runs; close them all at its end."""
        async with open_service_nursery() as self.nursery:
            try:
                yield
            finally:
                for relay in self._open:
                    relay.closing.set()
                for held in self.held.values():
                    held.scope.cancel(reason="the proxy ends")
                while self._open:
                    await self._changed.park()

    async def learn(self) -> None:
        """Connect once, to learn what the upstream offers.

        Raises LocalError: it cannot be reached.
        """
        client = _client_of(None, None)
        client.connect_timeout = self.connect_timeout
        try:
            async with client.connect(self.target, revision=self.revision) as session:
                self.note(session)
        except (McpError, OSError, trio.TooSlowError) as error:
            raise LocalError(f"the upstream {self.name!r} cannot be reached: {error}") from error

    def note(self, session: ClientSession) -> None:
        """Note what the upstream says about itself."""
        about = session.server_info, session.server_capabilities, session.instructions
        self.learned = Learned(session.revision, *about)

    # Who gets which connection

    @asynccontextmanager
    async def lease(self, ctx: Context[Any]) -> AsyncIterator[Relay]:
        """Yield the connection of the client that sent a request, while the block runs.

        Raises ErrorReply: there are too many connections.
        """
        relay = self._of(ctx)
        relay.users += 1
        if relay.owner is not None:
            self._shares.use(relay)
        try:
            yield relay
        finally:
            relay.users -= 1
            relay.used = trio.current_time()

    def _of(self, ctx: Context[Any]) -> Relay:
        session, job = ctx.internals
        own = None if self.shared or session.transport.single_request else session
        key = self.key_of(ctx)
        alone = own is None and not self.shared and self.asks_apart and can_be_asked(ctx.capabilities)
        for relay in self._living():
            if relay.key == key and not (alone and relay.users):
                return relay
        told = (None, None) if self.shared else (ctx.peer, ctx.capabilities)
        return self.open(key, own, *told, owner=None if self.shared else owner_of(ctx.principal, job.client))

    def key_of(self, ctx: Context[Any]) -> Hashable:
        """Return a key for the client that sent a request: all requests with it may use the same connection."""
        session, job = ctx.internals
        if self.shared:
            return None
        if not session.transport.single_request:
            return session
        declared = encode(converter_for(LATEST).dump(ctx.capabilities))
        return owner_of(ctx.principal, job.client), declared, None if ctx.peer is None else ctx.peer.name

    @property
    def asks_apart(self) -> bool:
        """Whether the upstream asks its questions in requests that name no request of ours."""
        return self.learned is None or self.learned.revision.server_may_call

    def _make_room(self, owner: str) -> None:
        """End a connection, if there are too many, for one of `owner`. Raises ErrorReply: none of them has to go."""
        kept = self._living()
        if len(kept) < self.most:
            return
        other: Relay | None = None
        if len(self._open) < 2 * self.most:  # as many again may be closing, no more
            unused = [relay for relay in kept if relay.own is None and relay.owner is not None and relay.idle]
            other = min(unused, key=lambda relay: relay.used, default=None)
            other = other or self._shares.make_room(owner, "connection to an upstream")
        if other is None:
            text = f"there are too many connections to the upstream {self.name!r}; try again later"
            raise ErrorReply(OVERLOADED, text, {"reason": "overloaded", "retryAfter": 1})
        other.closing.set()

    def open(
        self,
        key: Hashable,
        own: Session | None,
        peer: Implementation | None,
        declared: ClientCapabilities | None,
        *,
        owner: str | None = None,
    ) -> Relay:
        """Open a connection, in a task of its own. Raises ErrorReply: there are too many for another of this owner.

        `owner`: None for one that serves all clients, which may be one too many.
        """
        if owner is not None:
            self._make_room(owner)
        relay = Relay(self, key, own, owner)
        relay.client = _client_of(peer, declared)
        relay.client.foreign.update(self.methods)
        relay.listen_to_client()
        self._open.append(relay)
        if owner is not None:
            self._shares.add(relay)
        early, self._early = self._early, [said for said in self._early if said[0] is not own]
        for session, method, params, _ in early:
            if session is own:
                relay.pass_on(session, method, params)
        self.nursery.start_soon(relay.run, name=f"connection to {self.name}")
        if own is not None and own.revision is not None and own.revision.server_may_call:
            self.tell_lists(own, relay)
        return relay

    def forget(self, relay: Relay) -> None:
        """Forget a connection that was closed."""
        self._open.remove(relay)
        if relay.owner is not None:
            self._shares.remove(relay)
        self._changed.unpark_all()

    def begin_session(self, session: Session, admission: Admission) -> None:
        """Open the connection of a session that has begun. Raises ErrorReply: there are too many."""
        if self.shared:
            self.tell_lists(session, next(iter(self._living()), None) or self.open(None, None, None, None))
        elif self.find(session) is None:
            link = link_of(session, session.sink)
            owner = owner_of(admission.principal, None if link is None else link.address)
            declared = admission.capabilities
            assert isinstance(declared, ClientCapabilities)
            self.open(session, session, admission.peer, declared, owner=owner)

    def keep(self, session: Session, name: str, params: Any) -> None:
        """Keep what a session says before its first request. What is too much is dropped and counted."""
        self._early = [said for said in self._early if not said[0].closed.is_set()]
        size = _size(params)
        if len(self._early) >= _MOST_TOLD or size + sum(said[3] for said in self._early) > _MOST_TOLD_BYTES:
            session.counts.drop("others")
        else:
            self._early.append((session, name, params, size))

    def of_nobody(self, principal: str | None) -> Relay:
        """Return the connection for what a client says outside of its requests, where it has no session.

        Raises ErrorReply: there are too many.
        """
        key = ("notices", principal)
        found = (relay for relay in self._living() if relay.key == key)
        return next(found, None) or self.open(key, None, None, None, owner=owner_of(principal, None))

    def beside(self) -> Iterator[Beside]:
        """Say how each connection is, for people who look."""
        for relay in self._open:
            if relay.upstream is not None:
                stats = relay.upstream.statistics()
                told = f"{stats.state.value}, {relay.users} calls, {stats.losses} lost"
                yield Beside("upstream", self.name, told, trio.current_time() - stats.since)

    def find(self, session: Session) -> Relay | None:
        """Return the connection of a session, if it has one."""
        return next((relay for relay in self._living() if relay.own is session), None)

    def _living(self) -> list[Relay]:
        return [relay for relay in self._open if not relay.closing.is_set()]


@attrs.define(eq=False, repr=False)
class Relay:
    """One client's connection to an upstream."""

    relays: Relays
    key: Hashable
    own: Session | None  # the client's session, if the connection belongs to one
    owner: str | None  # whose share of the connections it is; None if it serves all clients
    client: Client = attrs.field(init=False)
    upstream: Upstream | None = attrs.field(init=False, default=None)
    calls: list[RelayedCall] = attrs.field(init=False, factory=list)  # under way, the latest last
    users: int = attrs.field(init=False, default=0)
    used: float = attrs.field(init=False, factory=trio.current_time)
    level: LoggingLevel | None = attrs.field(init=False, default=None)  # of the logs that the upstream was asked for
    watched: dict[tuple[Session, str], trio.CancelScope] = attrs.field(init=False, factory=dict)  # resources, by URI
    closing: trio.Event = attrs.field(init=False, factory=trio.Event)
    _telling: int = attrs.field(init=False, default=0)
    _telling_bytes: int = attrs.field(init=False, default=0)
    _opened: trio.Event = attrs.field(init=False, factory=trio.Event)
    _failure: Exception | None = attrs.field(init=False, default=None)

    @property
    def idle(self) -> bool:
        """Whether nothing is lost but what the upstream knows of the client: it is opened again when it is needed."""
        return not self.users and not self.watched

    async def run(self) -> None:
        """Keep the connection until it is no longer needed."""
        relays = self.relays
        lasting = Restarts(connect_timeout=relays.connect_timeout)
        try:
            supervising = supervise(
                self.client,
                relays.target,
                name=relays.name,
                revision=relays.revision,
                when_down="wait" if relays.patient else "fail",
                restarts=lasting,
            )
            async with supervising as self.upstream:
                self._opened.set()
                until = self._unused if self.own is None else self.own.closed.wait
                await first_of(self.closing.wait, until)
                self.closing.set()
        except Exception as error:
            log_crash(log, error, "the connection to the upstream %r failed", relays.name)
            self._failure = error
        finally:
            self.closing.set()
            self._opened.set()
            relays.forget(self)

    async def _unused(self) -> None:
        while True:
            left = math.inf if self.users else self.used + self.relays.idle - trio.current_time()
            if left <= 0:
                return
            with trio.move_on_after(min(left, self.relays.idle)):
                await trio.sleep_forever()

    async def connected(self, *, tried: bool = False) -> Upstream:
        """Return the upstream, for calls. Raises UpstreamDown: the connection was closed, or the first attempt failed.

        `tried`: wait until the first attempt to connect has ended, and raise if it failed.
        """
        await self._opened.wait()
        if self.upstream is not None and (tried or not self.relays.patient):
            state = await self.upstream.wait_state(*_TRIED)
            if tried and state is not UpstreamState.UP:
                raise UpstreamDown(self.upstream.statistics().last_reason or "it is not there")
        if self.upstream is None or self._failure is not None:
            raise UpstreamDown(f"the connection to the upstream {self.relays.name!r} was closed")
        return self.upstream

    async def ask_for_logs(self, session: ClientSession, ctx: Context[Any]) -> None:
        """Ask an upstream of the legacy era for the log messages that the client of a request wants."""
        level = ctx.internals[0].engine.log_level(ctx.admission)
        if level is None or level == self.level or session.revision.logs_on_request:
            return
        self.level = level
        if declares(session.server_capabilities, "logging"):
            with suppress(RemoteError):
                await session.set_log_level(level)

    def pass_on(self, session: Session, name: str, params: Any) -> None:
        """Tell the upstream what a client tells it. Never blocks; what is too much is dropped and counted."""
        size = _size(params)
        if self._telling >= _MOST_TOLD or self._telling_bytes + size > _MOST_TOLD_BYTES:
            session.counts.drop("others")
            return
        self._telling += 1
        self._telling_bytes += size
        self.relays.nursery.start_soon(self._pass_on, name, params, size)

    async def _pass_on(self, name: str, params: Any, size: int) -> None:
        try:
            with suppress(McpError):
                async with (await self.connected()).session() as session:
                    if name == "notifications/roots/list_changed":
                        session.roots_changed()
                    else:
                        await session.notify(name, params)
        finally:
            self._telling -= 1
            self._telling_bytes -= size
            self.used = trio.current_time()

    # What the upstream says unasked

    def listen_to_client(self) -> None:
        """Pass on what the upstream asks and says, as far as the client can take it."""
        client = self.client
        client.on_logging = self._say
        client.on_session = self._began
        for name in (COMPLETE, *self.relays.notifications):
            client.notification_handlers.setdefault(name, [])
            client.in_log_order.add(name)
        client.notification_handlers.setdefault(TASK_NOTICE, [])  # subscriptions get it
        for name in QUESTIONS:
            if getattr(client.capabilities, name.partition("/")[0], None) is not None:
                client.served[name] = self._roots if name == "roots/list" else partial(self.ask, name)

    def _began(self, session: Session, begins: bool) -> None:
        if not begins:
            return
        self.level = self.client.log_level
        self.relays.note(next(each for each in self.client.sessions if each.session is session))

    async def _say(self, said: LoggingMessageParams | Notified) -> None:
        """Pass on a log message or another notification, for the latest request that is under way."""
        call = self.calls[-1] if self.calls else None
        with suppress(LocalError):  # the client's revision has no such notification
            if isinstance(said, LoggingMessageParams):
                if call is not None:
                    await call.ctx.log(said.level, said.data, logger=said.logger)
            elif call is None:
                if self.own is not None and self.own.lost is None:
                    await self.own.notify(said.method.name, said.params)
            elif said.method.name in METHODS:
                await call.ctx.elicitation_complete(said.params.elicitation_id)
            else:
                await call.ctx.notify(said.method.name, said.params)

    async def _roots(self) -> Any:
        answer: ListRootsResult = await self.ask("roots/list", None)
        return answer.roots

    async def ask(self, name: str, params: Any) -> Any:
        """Ask the client what the upstream wants to know. Raises ErrorReply: the client refused, or cannot be asked."""
        asked = [call for call in self.calls if call.may_ask]
        try:
            if asked:
                return await asked[-1].ask(name, params)
            if self.own is None or self.own.revision is None or not self.own.revision.server_may_call:
                raise CannotAsk("no request is under way in which the client could be asked")
            return await self.own.call(name, params)
        except RemoteError as error:  # also what a person refused
            raise ErrorReply(error.code, error.message, error.data) from None
        except LocalError as error:
            raise ErrorReply(INVALID_REQUEST, str(error)) from None


def _size(params: Any) -> int:
    """Return the bytes of a notification's params; those of the protocol itself have none that count."""
    return len(encode(params)) if isinstance(params, dict) else 0


def can_be_asked(declared: ClientCapabilities) -> bool:
    """Return whether a client declared that it answers any questions."""
    return any(getattr(declared, name.partition("/")[0]) is not None for name in QUESTIONS)


def _client_of(peer: Implementation | None, declared: ClientCapabilities | None) -> Client:
    """Return a client that introduces itself and declares as another one did."""
    client = Client("trimcp proxy", validate_output=False)
    if peer is not None:
        client.profile.info = peer
    if declared is not None:
        own: Any = declared
        client.profile.capabilities = attrs.evolve(own, tasks=None)
    return client
