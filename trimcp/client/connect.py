"""From a target to a session: open the channel, find out which era and revision the server speaks, agree with it.

What to do next is decided by `protocol.negotiation`; here is only its doing. A server that dies on the probe is
started once more and met with `initialize`, and a target of the legacy era is not probed a second time.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import attrs
import trio

from trimcp.channel import MessageChannel
from trimcp.client.endpoint import ClientEndpoint
from trimcp.client.facade import ClientSession
from trimcp.errors import ConnectionLost, InvalidReply, LocalError, McpError, RemoteError
from trimcp.protocol.connection import Connection
from trimcp.protocol.negotiation import Decision, Met, Next, Outcome, decide, opening
from trimcp.protocol.profile import Role
from trimcp.protocol.vocabulary import Verb, vocabulary
from trimcp.session.direct import DirectEnd
from trimcp.session.drive import Road, driving
from trimcp.session.mirroring import mirrored
from trimcp.session.pending import Pending, cancellation_text
from trimcp.session.scopes import guarded
from trimcp.session.session import Session
from trimcp.wire.common import META_SERVER_INFO, Implementation
from trimcp.wire.converter import WireError, converter_for
from trimcp.wire.lifecycle import DiscoverResult
from trimcp.wire.revisions import REVISIONS, Revision, find

if TYPE_CHECKING:
    from trimcp.client.client import Client

__all__ = ["Connectable", "Target", "connecting", "pinned"]

log: logging.Logger = logging.getLogger("trimcp.client")


@runtime_checkable
class Connectable(Protocol):
    """A target that can be opened any number of times, such as a command that starts a server."""

    def connect(self) -> AbstractAsyncContextManager[Road]:
        """Return a context manager that opens the connection anew and yields its channel."""
        ...


Target: TypeAlias = Road | AbstractAsyncContextManager[Road] | Connectable
"""What a client can connect to. A plain channel or context manager is good for one connection."""


@asynccontextmanager
async def connecting(client: Client, target: Target, revision: Revision | str | None) -> AsyncIterator[ClientSession]:
    """Connect and yield the session; see `Client.connect`."""
    offered = client.profile.revisions if revision is None else (pinned(revision),)
    # What a pinned revision meets says nothing of what the server prefers, so nothing is remembered of it.
    key = _key(target) if revision is None else None
    move = opening(offered)
    if move.next is Next.DISCOVER and key is not None and key in client.legacy_targets:
        move = decide(Outcome(Met.SILENCE), offered)
        client.legacy_targets.discard(key)  # until it has shown again that it is one
    for attempt in range(2):
        async with AsyncExitStack() as stack:
            channel = await stack.enter_async_context(_opened(target))
            facade = _make(client, offered)
            await stack.enter_async_context(driving(facade.session, channel))
            started = getattr(target, "command", None) is not None
            negotiation = _Negotiation(facade, offered, client.probe_timeout, channel, started)
            move = await negotiation.run(move)
            if move.next is Next.RESPAWN and attempt == 0 and isinstance(target, Connectable):
                move = Decision(Next.INITIALIZE, move.revision, move.why)
                log.debug("the server died on the probe; starting it again and meeting it with initialize")
                continue
            if move.next is Next.RESPAWN:
                raise ConnectionLost(negotiation.epitaph("server/discover"))
            if key is not None and not facade.revision.modern:
                client.legacy_targets.add(key)
            async with _used(facade):
                yield facade
            return


@asynccontextmanager
async def _used(facade: ClientSession) -> AsyncIterator[None]:
    """Let the session be used: count it among its client's, and run what it needs meanwhile."""
    session, logs = facade.session, facade.logs
    facade.client.sessions.add(facade)
    if logs is not None:
        assert session.runner is not None
        session.runner.nursery.start_soon(guarded, logs.run, (facade,), name="logging handler")
    yield
    if logs is not None:
        with trio.move_on_after(session.limits.drain_timeout):
            await logs.drained()


def pinned(revision: Revision | str) -> Revision:
    """Return the revision of that name.

    Raises:
        LocalError: there is none.
    """
    if isinstance(revision, Revision):
        return revision
    found = find(revision)
    if found is None:
        raise LocalError(f"there is no revision {revision!r}; trimcp speaks {', '.join(r.name for r in REVISIONS)}")
    return found


def _key(target: Target) -> object:
    """Return what tells the same command next time, or None."""
    key, command = getattr(target, "key", None), getattr(target, "command", None)
    if key is None and command is not None:
        key = (tuple(command), str(getattr(target, "cwd", None)))
    return key


def _opened(target: Target) -> AbstractAsyncContextManager[Road]:
    if isinstance(target, DirectEnd):
        return nullcontext(target)
    if isinstance(target, MessageChannel):
        return target
    if isinstance(target, Connectable):
        return target.connect()
    if isinstance(target, AbstractAsyncContextManager):
        return target
    raise LocalError(
        f"cannot connect to {type(target).__name__}; pass what trimcp.stdio(...), trimcp.http(url), "
        "trimcp.websocket(url) or trimcp.in_process(server) returns, or a MessageChannel"
    )


def _make(client: Client, offered: tuple[Revision, ...]) -> ClientSession:
    profile = client.profile
    if offered != profile.revisions:
        profile = attrs.evolve(profile, revisions=offered)
    endpoint = ClientEndpoint(client)
    session = Session(Connection(Role.CLIENT, profile, client.served, client.foreign), endpoint, client.limits)
    return ClientSession(client, session, endpoint)


@attrs.define(eq=False)
class _Negotiation:
    """The first exchange on one connection."""

    facade: ClientSession
    offered: tuple[Revision, ...]
    patience: float
    channel: Road
    started: bool
    probed: int = attrs.field(init=False, default=0)

    @property
    def session(self) -> Session:
        return self.facade.session

    async def run(self, move: Decision) -> Decision:
        """Carry out moves until the session can be used (USE) or the channel has to be opened again (RESPAWN)."""
        while move.next is Next.DISCOVER:
            assert move.revision is not None
            move = await self._discover(move.revision)
        log.debug("%s (%s)", move.why, move.revision)
        if move.next is Next.INITIALIZE:
            assert move.revision is not None
            await self._initialize(move.revision)
        elif move.next is Next.FAIL:
            raise InvalidReply(f"cannot connect: {move.why}")
        return move

    async def _discover(self, revision: Revision) -> Decision:
        self.probed += 1
        engine = self.session.engine
        engine.modern.revision = revision
        outcome, raw = await self._probe(vocabulary(revision)["server/discover"])
        move = decide(outcome, self.offered, probed=self.probed)
        if move.next is not Next.USE:
            engine.modern.revision = None
            return move
        engine.modern.revision = move.revision
        result = engine.load_result(engine.verb("server/discover"), raw)
        assert isinstance(result, DiscoverResult)
        self.facade.server_capabilities = result.capabilities
        self.facade.instructions = result.instructions or None
        self.facade.server_info = _server_info(raw, engine.modern.revision)
        return move

    async def _probe(self, verb: Verb) -> tuple[Outcome, dict[str, Any]]:
        """Ask once, and say what came of it. A late answer finds nothing that waits for it."""
        try:
            with trio.move_on_after(self.patience):
                raw = await self._exchange(verb, None)
                versions = raw.get("supportedVersions")
                if isinstance(versions, list):
                    return Outcome(Met.DISCOVERED, versions), raw
                return Outcome(Met.ERROR), raw
        except RemoteError as error:
            return Outcome(Met.ERROR, code=error.code, data=error.data), {}
        except InvalidReply:
            return Outcome(Met.ERROR), {}
        except ConnectionLost:
            return Outcome(Met.DIED), {}
        return Outcome(Met.SILENCE), {}

    async def _initialize(self, revision: Revision) -> None:
        session = self.session
        legacy = session.engine.legacy
        verb = vocabulary(revision)["initialize"]
        try:
            with trio.move_on_after(self.patience) as scope:
                result = legacy.accept(await self._exchange(verb, legacy.offer(revision)))
                await session.notify("notifications/initialized")
            if scope.cancelled_caught:
                raise trio.TooSlowError(f"the server did not answer initialize within {self.patience:g} seconds")
        except ConnectionLost:
            raise ConnectionLost(self.epitaph("initialize")) from None
        except RemoteError as error:
            legacy.refused()
            error.add_note(f"The server refused initialize in revision {revision.name}.")
            raise
        self.facade.server_info = result.server_info
        self.facade.server_capabilities = result.capabilities
        self.facade.instructions = legacy.instructions

    async def _exchange(self, verb: Verb, params: Any) -> dict[str, Any]:
        """Send a request before anything is agreed on, and return the result as it came."""
        session = self.session
        engine = session.engine
        id = engine.new_id()
        data = engine.encode_request(id, verb, params)
        headers = mirrored(engine.revision, verb, params) if session.mirrors_headers else None
        pending = await session.send_request(Pending(session, id, verb), data, headers=headers)
        try:
            return await pending.raw()
        except trio.Cancelled as cancelled:
            session.abandon(pending, cancellation_text(cancelled))
            raise

    def epitaph(self, method: str) -> str:
        """Say that the server is gone, with what its channel knows of its end, and what to do."""
        text = f"the connection ended before the server answered {method}"
        obituary = self.channel.obituary()
        if obituary is not None and not self.started:
            return f"{method} was not answered: {obituary}"  # over HTTP there may have been no connection
        if obituary is not None:
            text += f": {obituary}"
        if self.started:
            text += "\nRun the command by hand to see whether it is a server that speaks MCP over this transport."
        return text


def _server_info(raw: dict[str, Any], revision: Revision | None) -> Implementation | None:
    """Return who answered, as its result's `_meta` says; a wrong one is no reason to fail."""
    found = (raw.get("_meta") or {}).get(META_SERVER_INFO)
    if found is None or revision is None:
        return None
    try:
        return converter_for(revision).load(found, Implementation)
    except (WireError, McpError):
        return None
