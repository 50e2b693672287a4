"""A supervised upstream for its callers: the methods of a session, over the present connection.

`client.session` documents what each method sends and returns. This module chooses the connection, and whether a call
is repeated. `UpstreamSubscription` does the same for subscriptions.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from random import Random
from typing import Final, Literal, TypeAlias, TypedDict, TypeVar

import attrs
import trio

from trimcp.channel import require_trio
from trimcp.client.client import Client, Connectable, Target, named
from trimcp.client.session import ClientSession
from trimcp.errors import ConnectionLost, LocalError, McpError, NotStarted, UpstreamDown
from trimcp.fleet.supervisor import Breaker, Health, Supervisor, UpstreamState, UpstreamStatistics
from trimcp.session.outgoing.calls import Call
from trimcp.session.outgoing.listening import Change, ResourceUpdated, changes_wanted, possible_changes
from trimcp.session.queues import Changes
from trimcp.support.cleaning import one_line
from trimcp.support.nurseries import closing_with, open_service_nursery
from trimcp.support.restarts import Restarts
from trimcp.wire.jsonrpc import JSON
from trimcp.wire.lifecycle import SubscriptionFilter
from trimcp.wire.prompts import Completion, GetPromptResult, Prompt, Reference
from trimcp.wire.resources import ReadResourceResult, Resource, ResourceTemplate
from trimcp.wire.revisions import Revision, revision_named
from trimcp.wire.tools import CallToolResult, Tool, ToolAnnotations

log: logging.Logger = logging.getLogger("trimcp.client")

T = TypeVar("T")

_RESTARTS: Final = Restarts()
_BREAKER: Final = Breaker()
_HEALTH: Final = Health()

WhenDown: TypeAlias = Literal["wait", "fail"]
"""What calls do while there is no connection."""


class Supervising(TypedDict, total=False):
    """The options of `supervise` except the name, for functions that pass them on."""

    revision: Revision | str | None
    when_down: WhenDown
    repeat_safe_tools: bool
    restarts: Restarts
    breaker: Breaker | None
    health: Health | None
    random: Random | None


def supervise(
    client: Client,
    target: Target,
    *,
    name: str | None = None,
    revision: Revision | str | None = None,
    when_down: WhenDown = "wait",
    repeat_safe_tools: bool = False,
    restarts: Restarts = _RESTARTS,
    breaker: Breaker | None = _BREAKER,
    health: Health | None = _HEALTH,
    random: Random | None = None,
) -> AbstractAsyncContextManager[Upstream]:
    """Connect to a server, reconnect whenever the connection is lost, and yield it as an `Upstream`.

    The block is entered at once, even if the server cannot be reached; `Upstream.wait_up` waits for it. Leaving the
    block closes the connection (and ends its child process). The body's exceptions are raised unchanged. Losing or
    giving up the upstream does not end the body.

    Args:
        client: the client that connects; its handlers serve the upstream.
        target: what `trimcp.stdio`, `trimcp.http`, `trimcp.websocket` or `trimcp.in_process` returns, or any other
            target that can be connected to repeatedly.
        name: used in logs and errors; by default the target's class.
        revision: as for `Client.connect`.
        when_down: whether calls wait for a connection, until their own scopes are cancelled, or fail at once.
        repeat_safe_tools: call a tool once more if the connection is lost meanwhile and the tool's annotations say that
            it only reads or is idempotent. Annotations come from the server and are not verified.
        restarts: the pauses between attempts, and the number of attempts after which it is given up.
        breaker: when the circuit opens and for how long; None for never.
        health: when a silent server is pinged; None for never.
        random: draws the pauses, for tests.

    Raises:
        TypeError: the target is not valid.
        LocalError: the target can be connected to only once, or there is no such revision.
    """
    given = named(target)
    if not isinstance(given, Connectable):
        raise LocalError(
            f"a {type(given).__name__} is good for one connection; supervise what trimcp.stdio(...), "
            "trimcp.http(url), trimcp.websocket(url) or trimcp.in_process(server) returns"
        )
    spoken = None if revision is None else revision_named(revision)
    if when_down not in ("wait", "fail"):
        raise LocalError(f'when_down is "wait" or "fail", not {when_down!r}')
    called = type(given).__name__ if name is None else name

    @asynccontextmanager
    async def supervising() -> AsyncIterator[Upstream]:
        require_trio()
        supervisor = Supervisor(client, given, called, spoken, restarts, breaker, health, random or Random())

        async def end() -> None:
            supervisor.leave()
            await supervisor.wait_state((UpstreamState.ENDED,))

        async with open_service_nursery() as nursery, closing_with(end):
            nursery.start_soon(supervisor.run, name=f"upstream {called}")
            yield Upstream(supervisor, when_down, repeat_safe_tools)

    return supervising()


@attrs.define(eq=False, repr=False)
class Upstream:
    """A server that is reconnected when it is lost. Any task may use it, until its block is left.

    Its methods are those of `ClientSession`, over the current connection. Cancelling any of them tells the server,
    which stops its handler. While there is no connection they wait for one or fail at once with `UpstreamDown`,
    depending on `when_down`; while the circuit is open, or once it was given up, they always fail at once. When the
    connection is lost, calls in progress fail at once with `ConnectionLost`, which has the reason.

    Calls that only read (lists, resources, prompts, completion) are then made once more, over the next connection. A
    tool is not called twice, unless `idempotent=True` is passed, or `repeat_safe_tools` was given and the server lists
    the tool as safe to repeat.

    A server that shuts down answers what is under way, so its connection stays until then. What it refuses
    (`NotStarted`), or what cannot be sent, was not begun: it waits for the next connection, whatever it is.
    """

    _supervisor: Supervisor
    when_down: WhenDown
    repeat_safe_tools: bool

    # Facts

    @property
    def name(self) -> str:
        """Its name in logs and errors."""
        return self._supervisor.name

    @property
    def state(self) -> UpstreamState:
        """Its present state."""
        return self._supervisor.state

    def statistics(self) -> UpstreamStatistics:
        """Return a snapshot of its state and counts."""
        return self._supervisor.statistics

    async def wait_state(self, *states: UpstreamState) -> UpstreamState:
        """Wait until it is in one of these states, and return which; one that passes within a moment may be missed.

        Cancelling it changes nothing.
        """
        return await self._supervisor.wait_state(states)

    async def wait_up(self) -> None:
        """Wait until there is a connection, through open circuits too.

        Raises:
            UpstreamDown: it was given up, or its block was left.
        """
        await trio.lowlevel.checkpoint()
        await self._supervisor.connected()

    def restart(self) -> None:
        """Close the current connection, forget earlier failures, and open a new one now; also after giving up.

        Raises:
            UpstreamDown: its block was left.
        """
        self._supervisor.restart()

    # Over the current connection

    @asynccontextmanager
    async def session(self) -> AsyncIterator[ClientSession]:
        """Yield the present connection, for several calls over the same one and for methods that only it has.

        It is not reopened inside the block: when it is lost, its calls fail with `ConnectionLost`. No call is repeated.

        Raises:
            UpstreamDown: there is none.
        """
        session = await self._usable()
        try:
            yield session
        except (ConnectionLost, trio.TooSlowError):
            self._supervisor.suspect(session)
            raise
        finally:
            self._supervisor.released(session)

    async def use(self, ask: Callable[[ClientSession], Awaitable[T]], *, idempotent: bool = False) -> T:
        """Make any call of a session: `await upstream.use(lambda session: session.ping())`.

        Args:
            ask: makes the call and returns its answer.
            idempotent: make it once more if the connection is lost meanwhile.
        """
        return await self._ask(ask, lambda session: idempotent)

    async def _usable(self) -> ClientSession:
        return await self._supervisor.usable(wait=self.when_down == "wait")

    async def _ask(
        self, ask: Callable[[ClientSession], Awaitable[T]], repeatable: Callable[[ClientSession], bool]
    ) -> T:
        session, repeated = await self._usable(), False
        while True:
            try:
                return await self._supervisor.call(ask, session)
            except (ConnectionLost, NotStarted) as error:
                undone = isinstance(error, NotStarted) or error.nothing_sent
                if not undone and (repeated or not repeatable(session)):
                    raise
                lost: ConnectionLost | NotStarted = error
            try:
                await self._supervisor.wait_checked(session)
                following = await self._usable()
                if undone and following is session and repeated:
                    raise lost
            except UpstreamDown:
                raise lost from None
            finally:
                del lost  # a frame and the exception raised in it would keep each other alive
            # What was not begun may be tried over any number of connections, and once more over the same.
            repeated = repeated or not undone or following is session
            session = following
            self._supervisor.count("repeated_calls")

    # Tools

    async def list_tools(self, *, fresh: bool = False) -> list[Tool]:
        """Return all tools; see `ClientSession.list_tools`. Each connection has a cache of its own."""
        return await self.use(lambda session: session.list_tools(fresh=fresh), idempotent=True)

    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, JSON] | None = None,
        *,
        meta: Mapping[str, JSON] | None = None,
        idempotent: bool = False,
    ) -> CallToolResult:
        """Call a tool; see `ClientSession.call_tool`.

        Args:
            meta: what to add to the request's `_meta`.
            idempotent: call it once more if the connection is lost meanwhile, although it may be carried out twice.

        Raises:
            UpstreamDown: there is no connection; nothing was sent.
            ConnectionLost: the connection was lost; the tool may have been carried out.
        """

        def repeatable(session: ClientSession) -> bool:
            return idempotent or (self.repeat_safe_tools and _is_safe(session.outputs.tool(name)))

        return await self._ask(lambda session: session.call_tool(name, arguments, meta=meta), repeatable)

    @asynccontextmanager
    async def calling(
        self, name: str, arguments: Mapping[str, JSON] | None = None, *, meta: Mapping[str, JSON] | None = None
    ) -> AsyncIterator[Call[CallToolResult]]:
        """Call a tool and yield the call, to follow its progress; see `ClientSession.calling`. Never repeated."""
        async with self.session() as session, session.calling(name, arguments, meta=meta) as call:
            yield call

    # Resources

    async def list_resources(self, *, fresh: bool = False) -> list[Resource]:
        """Return all resources; see `ClientSession.list_resources`."""
        return await self.use(lambda session: session.list_resources(fresh=fresh), idempotent=True)

    async def list_resource_templates(self, *, fresh: bool = False) -> list[ResourceTemplate]:
        """Return all resource templates; see `ClientSession.list_resource_templates`."""
        return await self.use(lambda session: session.list_resource_templates(fresh=fresh), idempotent=True)

    async def read_resource(
        self, uri: str, *, meta: Mapping[str, JSON] | None = None, fresh: bool = False
    ) -> ReadResourceResult:
        """Return the contents of a resource; see `ClientSession.read_resource`."""
        return await self.use(lambda session: session.read_resource(uri, meta=meta, fresh=fresh), idempotent=True)

    # Prompts and completion

    async def list_prompts(self, *, fresh: bool = False) -> list[Prompt]:
        """Return all prompts; see `ClientSession.list_prompts`."""
        return await self.use(lambda session: session.list_prompts(fresh=fresh), idempotent=True)

    async def get_prompt(
        self, name: str, arguments: Mapping[str, str] | None = None, *, meta: Mapping[str, JSON] | None = None
    ) -> GetPromptResult:
        """Return the messages of a prompt; see `ClientSession.get_prompt`."""
        return await self.use(lambda session: session.get_prompt(name, arguments, meta=meta), idempotent=True)

    async def complete(
        self, ref: Reference, name: str, value: str, context: Mapping[str, str] | None = None
    ) -> Completion:
        """Return suggestions for the value of an argument; see `ClientSession.complete`."""
        return await self.use(lambda session: session.complete(ref, name, value, context), idempotent=True)

    # Changes

    @asynccontextmanager
    async def listen(
        self,
        *,
        tools: bool = False,
        prompts: bool = False,
        resources_list: bool = False,
        resources: Iterable[str] = (),
    ) -> AsyncIterator[UpstreamSubscription]:
        """Subscribe to changes, over this connection and the following ones; arguments as for `ClientSession.listen`.

        After each new subscription everything in it is reported as changed, once, since it may have changed meanwhile.
        A subscription that the server ends is made again.

        Raises:
            UpstreamDown: there is no connection.
            RemoteError, LocalError: the server offers no such subscription.
        """
        wanted = changes_wanted(tools, prompts, resources_list, resources)
        subscription = UpstreamSubscription(self._supervisor, wanted, self.when_down == "wait")
        async with open_service_nursery() as nursery:
            nursery.start_soon(subscription._run)
            await subscription._opened.wait()
            if subscription._changes.end is not None:
                raise subscription._changes.end
            yield subscription


def _is_safe(tool: Tool | None) -> bool:
    """Whether the tool's annotations say that it only reads or is idempotent."""
    hints = None if tool is None else tool.annotations
    return isinstance(hints, ToolAnnotations) and (hints.read_only_hint is True or hints.idempotent_hint is True)


@attrs.define(eq=False, repr=False)
class UpstreamSubscription:
    """Changes over one connection after another; iterate over it, or `receive` them one by one.

    Attributes:
        acknowledged: what the server agreed to report in the last subscription.
        restarts: how often the subscription was made again.
    """

    _supervisor: Supervisor
    _wanted: SubscriptionFilter
    _wait: bool
    acknowledged: SubscriptionFilter = attrs.field(init=False, factory=SubscriptionFilter)
    restarts: int = attrs.field(init=False, default=0)
    _changes: Changes[Change] = attrs.field(init=False, factory=Changes)
    _opened: trio.Event = attrs.field(init=False, factory=trio.Event)
    _since: float = attrs.field(init=False, default=0.0)

    async def receive(self) -> Change:
        """Wait for the next change. Equal changes not received yet are merged. Cancelling this loses nothing.

        Raises:
            UpstreamDown: the upstream was given up, or its block was left.
            RemoteError, LocalError: the server refuses the subscription after a reconnect.
        """
        return await self._changes.receive()

    def __aiter__(self) -> UpstreamSubscription:
        return self

    async def __anext__(self) -> Change:
        return await self.receive()

    def _add(self, changes: Iterable[Change], session: ClientSession) -> None:
        for change in changes:
            size = len(change.uri) if isinstance(change, ResourceUpdated) else 0
            self._changes.keep(change, size, session.session.limits, session.session.counts)

    # Its task

    async def _run(self) -> None:
        """Subscribe whenever there is a connection, until the upstream is given up or refuses."""
        in_a_row = 0
        supervisor, restarts = self._supervisor, self._supervisor.restarts
        try:
            session = await supervisor.usable(self._wait)
            while True:
                try:
                    await self._listen(session)
                except ConnectionLost as error:
                    log.debug("the subscription to %r is lost: %s", supervisor.name, one_line(str(error)))
                    supervisor.suspect(session)
                if session.session.lost is None:
                    # The server ended it, or only the subscription was lost. If that happens at once, pause longer.
                    lasted = trio.current_time() - self._since >= restarts.lasting
                    in_a_row = 0 if lasted else in_a_row + 1
                    await trio.sleep(restarts.pause(in_a_row, supervisor.random))
                session = await supervisor.connected()
        except McpError as error:
            self._changes.finish(error)
            self._opened.set()

    async def _listen(self, session: ClientSession) -> None:
        """Listen over one connection until it, or the subscription, ends."""
        self._since = trio.current_time()
        async with session.subscriptions.listening(self._wanted) as changes:
            self.acknowledged = changes.acknowledged
            if self._opened.is_set():
                # Anything may have changed while there was no subscription.
                self.restarts += 1
                self._add(possible_changes(self._wanted), session)
            self._opened.set()
            async for change in changes:
                self._add((change,), session)
