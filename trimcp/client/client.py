"""A client program that connects: it opens a target, agrees with the server on a revision, and yields a session.

`protocol.negotiation` decides what to send next; this module sends it. A server that ends because of the probe is
started once more and sent `initialize`. A target known to be of the legacy era is not probed. The client's handlers are
in `client.handlers`.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, runtime_checkable

import attrs
import trio

from trimcp.channel import MessageChannel, require_trio
from trimcp.client.endpoint import ClientEndpoint
from trimcp.client.handlers import ClientProgram
from trimcp.client.session import ClientSession
from trimcp.errors import ConnectionLost, InvalidReply, McpError, RemoteError
from trimcp.protocol.bound_methods import BoundMethod, methods_of
from trimcp.protocol.connection import Connection
from trimcp.protocol.negotiation import Decision, Met, Next, ProbeResult, decide, decide_again, opening
from trimcp.protocol.profile import Role
from trimcp.session.clock import WorkClock
from trimcp.session.drive import AnyChannel, DirectEnd, driving
from trimcp.session.outgoing.pending import Pending
from trimcp.session.scopes import guarded
from trimcp.session.session import Session, mirrored
from trimcp.wire.common import META_SERVER_INFO, Implementation
from trimcp.wire.converter import WireError, converter_for
from trimcp.wire.lifecycle import DiscoverResult
from trimcp.wire.revisions import Revision, revision_named

if TYPE_CHECKING:
    from trimcp.transports.grpc.client import GrpcServer
    from trimcp.transports.http.client.target import HttpServer
    from trimcp.transports.websocket.client import WebSocketServer

log: logging.Logger = logging.getLogger("trimcp.client")

_SILENCE: Final = 2.5  # seconds; what starts slowly answers the probe later, and is then heard too
_LONGEST_PROBE: Final = 30.0  # over HTTP, where a late answer to one of two requests at once would be ambiguous
URL: Final = re.compile(r"(https?|wss?|grpcs?|(http|ws|grpc)\+unix)://", re.IGNORECASE)
"""How a URL of a server begins."""


@runtime_checkable
class Connectable(Protocol):
    """A target that can be opened any number of times, such as a command that starts a server."""

    def connect(self) -> AbstractAsyncContextManager[AnyChannel]:
        """Return a context manager that opens a new connection and yields its channel."""
        ...


Opener: TypeAlias = AnyChannel | AbstractAsyncContextManager[AnyChannel] | Connectable
"""What `opened` can open. A plain channel or context manager can be opened once."""

Target: TypeAlias = str | Opener
"""What a client can connect to: a URL or another target. A plain channel or context manager can be used once."""


class Client(ClientProgram):
    """A client program.

    Handlers may be sync or async; a sync one must return at once. Each may take the asking session as a keyword
    `session`. They run in tasks of their connection.

    Args:
        name, version, title, description, website_url, icons: sent to servers.
        revisions: the revisions it may use, or their names.
        roots: see `set_roots`.
        tasks: declare that servers may answer calls with tasks (2026-07-28): `call_tool` waits for their results, and
            `start_task` does not.
        extensions: settings by extension id, declared to servers (since 2025-06-18).
        experimental: settings of non-standard abilities, declared to servers.
        request_timeout: seconds a server may work on a request without reporting progress; the clock stops while a
            person answers its questions. None: no limit but the caller's own scopes.
        max_request_time: seconds after which a request fails in any case; None for no limit.
        send_deadlines: tell servers how long a request's caller waits (its own scopes, `max_request_time`), in
            `_meta["trimcp/timeout"]` as the seconds left; a server of trimcp then stops when they are over.
        asks_per_minute: how many questions one server may ask per minute; more are refused.
        connect_timeout: seconds that connecting may take in all, from opening the target to the first answers;
            `math.inf` for as long as the caller's own scopes let it. Give more to programs that are downloaded when
            they are started.
        probe_timeout: seconds of these in which a server may leave the first message unanswered before it is sent
            `initialize` too, as a legacy one needs; a late answer to the first still counts. None: half of them, and at
            most 2.5. Over HTTP, which drops the late answer, at most 30.
        validate_output: check structured results against the output schemas of listed tools.
        strict: refuse a whole list or result if one of its members cannot be read. Otherwise the member is left out,
            with a warning, and the list or result has it in its `rejected`.
        max_rounds: how often the server may answer one call with questions instead of a result.
        max_pages: how many pages a list may have.
        log_level: the lowest level of log message that servers are asked for, if there is a handler: with each request
            in 2026-07-28, once after the handshake before.
        limits: every other bound.

    Attributes:
        sessions: the connections there are now.

    Timeouts and bounds can be read as attributes of the same names. Other public attributes, such as `served`, are for
    internal use and may change; register handlers with the methods.
    """

    sessions: set[ClientSession]

    def connect(
        self, target: Target, *, revision: Revision | str | None = None
    ) -> AbstractAsyncContextManager[ClientSession]:
        """Connect to a server, agree with it on a revision, and yield the session.

        The body's exceptions are raised unchanged. Leaving the block ends the connection (and its child process); so
        does cancelling it. If the server is lost the body goes on: its calls raise `ConnectionLost`.

        Args:
            target: a URL (http, https, ws, wss, grpc, grpcs, or a Unix socket's, "http+unix://%2Frun%2Fserver.sock/mcp",
                ws+unix, grpc+unix), what `trimcp.stdio`, `trimcp.http` and so on return, a `trimcp.Server` in this
                process, a `MessageChannel`, or an async context manager that yields one.
            revision: use exactly this one; by default the newest that both sides support.

        Raises:
            TypeError: the target is none of these.
            LocalError: the target cannot be opened, or there is no such revision.
            ConnectionLost: the server ended before it was ready; the text has the last lines it wrote.
            RemoteError, InvalidReply: it refused, or there is no common revision.
            trio.TooSlowError: that took longer than `connect_timeout`.
        """
        return connecting(self, named(target), revision, self.connect_timeout)


def at_url(url: str, headers: Mapping[str, str] | None = None) -> HttpServer | WebSocketServer | GrpcServer:
    """Return the server at a URL as a target, with the defaults of `trimcp.http`, `trimcp.websocket`, `trimcp.grpc`.

    Raises LocalError: the URL names no server, or a header cannot be sent.
    """
    from trimcp.transports.trace import trace_from_environment

    trace = trace_from_environment()
    if url[:2].lower() == "ws":
        from trimcp.transports.websocket.client import WebSocketServer

        return WebSocketServer(url, headers, trace=trace)
    if url[:4].lower() == "grpc":
        from trimcp.transports.grpc.client import GrpcServer

        return GrpcServer(url, headers, trace=trace)
    from trimcp.transports.http.client.target import HttpServer

    return HttpServer(url, headers, trace=trace)


def named(target: Target) -> Opener:
    """Return the target that can be opened; of a URL, the same as `trimcp.http` and so on return.

    Raises LocalError: the URL names no server. Raises TypeError: it is no target; the text quotes nothing of it.
    """
    given: object = target  # at run time it may be anything
    if isinstance(given, str):
        if URL.match(given):
            return at_url(given)
        what = "a str that is no URL with http://, https://, ws://, wss://, grpc:// or grpcs://"
    elif isinstance(given, DirectEnd | MessageChannel | Connectable | AbstractAsyncContextManager):
        return given
    else:
        what = type(given).__name__
    raise TypeError(
        f"cannot connect to {what}; pass a URL, what trimcp.stdio(command, ...), trimcp.http(url), "
        "trimcp.websocket(url) or trimcp.in_process(server) returns, or a MessageChannel"
    )


@asynccontextmanager
async def connecting(
    client: ClientProgram, target: Opener, revision: Revision | str | None, timeout: float
) -> AsyncIterator[ClientSession]:
    """Connect within `timeout` seconds and yield the session; see `Client.connect`."""
    require_trio()
    offered = client.profile.revisions if revision is None else (revision_named(revision),)
    # A pinned revision does not show what the server prefers, so nothing is stored about it.
    key = _key(target) if revision is None else None
    move = opening(offered)
    first = getattr(target, "revision", None)
    if first is not None and revision is None:
        move = opening([each for each in offered if each == revision_named(first)] or offered)
    elif move.next is Next.DISCOVER and key is not None and key in client.legacy_targets:
        move = decide(ProbeResult(Met.SILENCE), offered)
        client.legacy_targets.discard(key)  # until it proves again to be one
    waited_for, known = "the connection was not opened", None
    limit = WorkClock(timeout, math.inf)  # pauses while a person logs in
    with limit.scope:
        for attempt in range(2):
            session = _make(client, offered)
            async with opened(target) as channel, driving(session.session, channel):
                if isinstance(channel, MessageChannel):
                    channel.set_user_interaction(session.clocks.person)
                started = getattr(target, "command", None) is not None
                negotiation = _Negotiation(session, offered, _probe_timeout(client, session, timeout), channel, started)
                try:
                    with session.clocks.including(limit):
                        move = await negotiation.run(move)
                except trio.Cancelled:
                    # Read it now: later the reason could be that we ended the child process.
                    waited_for, known = f"the server did not answer {negotiation.asked}", channel.close_reason()
                    raise
                if move.next is Next.RESPAWN and attempt == 0 and isinstance(target, Connectable):
                    log.debug("%s; opening it again and sending it initialize", move.why)
                    move = Decision(Next.INITIALIZE, move.revision, move.why)
                    continue
                if move.next is Next.RESPAWN:
                    raise negotiation.failure or ConnectionLost(negotiation.close_reason(negotiation.asked))
                if key is not None and not session.revision.modern:
                    client.legacy_targets.add(key)
                limit.stop()  # the body has no deadline of ours
                if limit.scope.cancel_called:
                    await trio.lowlevel.checkpoint()
                client.sessions.add(session)
                if client.on_session is not None:
                    client.on_session(session.session, True)
                actor, logs = session.session, session.logs
                if logs is not None:
                    actor.nursery.start_soon(guarded, logs.run, (session,), name="logging handler")
                yield session
                if logs is not None:
                    with trio.move_on_after(actor.limits.drain_timeout):
                        await logs.drained()
                return
    text = f"{waited_for} within {timeout:g} seconds (connect_timeout)"
    raise trio.TooSlowError(text if known is None else f"{text}; {known}")


def _key(target: Target) -> object:
    """Return a key that identifies the same server in later connections, or None."""
    key, command = getattr(target, "key", None), getattr(target, "command", None)
    if key is None and command is not None:
        key = (tuple(command), str(getattr(target, "cwd", None)))
    return key


def _probe_timeout(client: ClientProgram, session: ClientSession, timeout: float) -> float:
    if not session.session.engine.profile.legacy:
        return math.inf  # there is nothing to fall back to
    if client.probe_timeout is not None:
        return client.probe_timeout
    return min(_LONGEST_PROBE if session.session.transport.mirrors_headers else _SILENCE, timeout / 2)


def opened(target: Opener) -> AbstractAsyncContextManager[AnyChannel]:
    """Return a context manager that opens a target and yields its channel."""
    if isinstance(target, DirectEnd):
        return nullcontext(target)
    if isinstance(target, MessageChannel):
        return target
    if isinstance(target, Connectable):
        return target.connect()
    return target


def _make(client: ClientProgram, offered: tuple[Revision, ...]) -> ClientSession:
    profile = client.profile
    if offered != profile.revisions:
        profile = attrs.evolve(profile, revisions=offered)
    endpoint = ClientEndpoint(client)
    engine = Connection(
        Role.CLIENT, profile, client.served, client.foreign, client.notification_handlers, strict=client.strict
    )
    return ClientSession(client, Session(engine, endpoint, client.limits), endpoint)


@attrs.define(eq=False)
class _Negotiation:
    """Agrees with the server on a revision, on one connection."""

    session: ClientSession
    offered: tuple[Revision, ...]
    probe_timeout: float
    channel: AnyChannel
    started: bool  # whether the server is a child process that was started for this connection
    asked: str = attrs.field(init=False, default="")  # the method of the request sent last
    # the error that led to RESPAWN, if it was one of the server's
    failure: RemoteError | None = attrs.field(init=False, default=None)
    probed: int = attrs.field(init=False, default=0)
    _met: Met | None = attrs.field(init=False, default=None)  # of the last probe; None before it
    _late: Pending | None = attrs.field(init=False, default=None)  # a probe whose answer may still come
    _refused: list[Revision] = attrs.field(init=False, factory=list)  # in which `initialize` was refused

    @property
    def actor(self) -> Session:
        return self.session.session

    async def run(self, move: Decision) -> Decision:
        """Carry out moves until the session can be used (USE) or the channel has to be opened again (RESPAWN)."""
        while move.next in (Next.DISCOVER, Next.INITIALIZE):
            log.debug("%s (%s)", move.why, move.revision)
            assert move.revision is not None
            step = self._discover if move.next is Next.DISCOVER else self._initialize
            move = await step(move.revision)
        if move.next is Next.FAIL:
            if self._met is Met.DIED:
                raise ConnectionLost(self.close_reason("server/discover"))
            if self._met is Met.UNANSWERED:
                raise ConnectionLost(move.why)
            raise InvalidReply(f"cannot connect: {move.why}")
        return move

    async def _discover(self, revision: Revision) -> Decision:
        self.probed += 1
        self.actor.engine.modern.revision = revision
        limit = WorkClock(self.probe_timeout if self.probed == 1 else math.inf, math.inf)
        outcome, raw = ProbeResult(Met.SILENCE), dict[str, Any]()
        with self.session.clocks.including(limit), limit.scope:
            outcome, raw = await self._probe(methods_of(revision)["server/discover"])
        if self._late is not None and (outcome.met is not Met.SILENCE or self.actor.transport.mirrors_headers):
            self.actor.abandon(self._late, "no answer in time")
            self._late = None
        return self._take(outcome, raw)

    def _take(self, outcome: ProbeResult, raw: dict[str, Any]) -> Decision:
        """Return what follows from a probe. Before USE, note what the server said about itself."""
        engine = self.actor.engine
        self._met = outcome.met
        move = decide(outcome, self.offered, probed=self.probed)
        engine.modern.revision = None if move.next is not Next.USE else move.revision
        if move.next is Next.USE:
            engine.profile.weigh_server(raw)
            result = engine.load_result(engine.method("server/discover"), raw)
            assert isinstance(result, DiscoverResult)
            self.session.server_capabilities = result.capabilities
            self.session.instructions = result.instructions or None
            self.session.server_info = _server_info(raw, engine.modern.revision)
        return move

    async def _probe(self, method: BoundMethod, late: Pending | None = None) -> tuple[ProbeResult, dict[str, Any]]:
        """Send the probe, unless it is the `late` one, and return its result."""
        try:
            if late is None:
                late = self._late = await self._send(method, None)
            raw = await late.raw()
            versions = raw.get("supportedVersions")
            if isinstance(versions, list):
                return ProbeResult(Met.DISCOVERED, versions), raw
            return ProbeResult(Met.NONSENSE, why="the result has no list of supportedVersions"), raw
        except RemoteError as error:
            return ProbeResult(Met.ERROR, code=error.code, data=error.data, why=str(error)), {}
        except InvalidReply as error:
            return ProbeResult(Met.NONSENSE, why=str(error)), {}
        except ConnectionLost as error:
            met = Met.UNANSWERED if self.actor.lost is None else Met.DIED
            return ProbeResult(met, why=str(error)), {}

    async def _initialize(self, revision: Revision) -> Decision:
        actor = self.actor
        legacy = actor.engine.legacy
        try:
            pending = await self._send(methods_of(revision)["initialize"], legacy.offer(revision))
            discovered = await self._discovered_late(pending)
            if discovered is not None:
                return discovered
            result = legacy.accept(await pending.raw())
            await actor.notify("notifications/initialized")
        except ConnectionLost:
            if self._late is not None or (self.probed and actor.lost is not None):
                return Decision(Next.RESPAWN, revision, "the server died after the probe")
            raise ConnectionLost(self.close_reason("initialize")) from None
        except RemoteError as error:
            legacy.refused()
            self._refused.append(revision)
            move = decide_again(error.code, error.data, self._refused, self.offered, probed=self.probed)
            if move.next is not Next.FAIL:
                return move
            error.add_note(f"The server refused initialize in revision {revision.name}.")
            if self.probed and not actor.transport.mirrors_headers:
                self.failure = error
                return Decision(Next.RESPAWN, revision, "the server refused initialize after the probe")
            raise
        if self._late is not None:
            actor.abandon(self._late, "the server was initialized")
        self.session.server_info = result.server_info
        self.session.server_capabilities = result.capabilities
        self.session.instructions = legacy.instructions
        self.asked = "logging/setLevel"
        await self.session.ask_for_logs()
        return Decision(Next.USE, legacy.revision, "the server was initialized")

    async def _discovered_late(self, pending: Pending) -> Decision | None:
        """Wait for the answer to `initialize`; return what follows instead from a late DiscoverResult, or None."""
        late = self._late
        while late is not None and pending.reply is None and late.reply is None:
            came = trio.Event()
            pending.on_reply = late.on_reply = lambda reply, came=came: came.set()
            await came.wait()
        if late is None or late.reply is None or isinstance(late.reply.error, ConnectionLost):
            return None
        outcome, raw = await self._probe(late.method, late)
        self._late = None
        if outcome.met is not Met.DISCOVERED or decide(outcome, self.offered).next is not Next.USE:
            return None
        self.actor.abandon(pending, "the server was discovered")
        self.actor.engine.legacy.refused()
        return self._take(outcome, raw)

    async def _send(self, method: BoundMethod, params: Any) -> Pending:
        """Send a request before a revision is agreed on."""
        actor = self.actor
        engine = actor.engine
        id = engine.new_id()
        self.asked = method.name
        data = engine.encode_request(id, method, params)
        headers = mirrored(engine.revision, method, params) if actor.transport.mirrors_headers else None
        return await actor.send_request(Pending(engine, id, method), data, headers)

    def close_reason(self, method: str) -> str:
        """Return why the server is gone, if its channel knows it, and what to do."""
        text = f"the connection ended before the server answered {method}"
        known = self.channel.close_reason()
        if known is not None and not self.started:
            return f"{method} was not answered: {known}"  # over HTTP there may have been no connection
        if known is not None:
            text += f": {known}"
        if self.started:
            text += "\nRun the command by hand to see whether it is a server that speaks MCP over this transport."
        return text


def _server_info(raw: dict[str, Any], revision: Revision | None) -> Implementation | None:
    """Return the server's name and version from a result's `_meta`; None if they are missing or invalid."""
    found = (raw.get("_meta") or {}).get(META_SERVER_INFO)
    if found is None or revision is None:
        return None
    try:
        return converter_for(revision).load(found, Implementation)
    except (WireError, McpError):
        return None
