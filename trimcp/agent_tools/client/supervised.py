"""A connection to a service that is opened again when it is lost, and the pauses before that."""

from __future__ import annotations

import logging
import math
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from random import Random
from typing import Final, NoReturn, TypeVar

import attrs
import trio

from trimcp.agent_tools.client.connection import MAX_ROUNDS, AgentConnection, OnInput, opened_wire, target_of
from trimcp.agent_tools.client.wire import AgentTarget, AgentWire, Begin, Events, NotSent, Progressed, Registered
from trimcp.agent_tools.messages import errors, messages
from trimcp.errors import ConnectionLost, InvalidReply, LocalError, McpError
from trimcp.support.cleaning import one_line
from trimcp.support.nurseries import open_service_nursery
from trimcp.support.restarts import RestartCount, Restarts

T = TypeVar("T")

RESTARTS: Final = Restarts()
PASSING: Final = (ConnectionLost, InvalidReply, errors.Draining, errors.TooMuch, errors.ProviderGone)
"""What may be over when the service is asked again."""

_LONGEST_WAIT: Final = 60.0  # seconds that a service may ask us to wait
_LONGEST: Final = 500
_REPEATED: Final = (messages.ListTools, messages.ContextRead)

_log = logging.getLogger("trimcp.agent_tools")


async def keep_open(
    target: AgentTarget,
    count: RestartCount,
    use: Callable[[AgentWire, Callable[[], None]], Awaitable[None]],
    passing: Callable[[McpError], bool] = lambda error: isinstance(error, PASSING),
) -> NoReturn:
    """Open one connection after another, and have each used until it is lost, with pauses in between.

    `use` calls its second argument once the connection works, which may not take longer than `connect_timeout`. Raises
    what is not `passing`, and the failure of the last connection if there were too many.
    """
    while True:
        since: float | None = None
        failure: McpError = ConnectionLost("the service took too long to answer")
        opening = trio.CancelScope(deadline=trio.current_time() + count.restarts.connect_timeout)

        def begun(opening: trio.CancelScope = opening) -> None:
            nonlocal since
            opening.deadline, since = math.inf, trio.current_time()

        try:
            with opening:
                async with opened_wire(target) as wire:
                    await use(wire, begun)
                failure = ConnectionLost("the connection was lost")
        except McpError as error:
            if not passing(error):
                raise
            failure = error
        now = trio.current_time()
        count.ended(now, since)
        asked = (failure.retry_after or 0.0) if isinstance(failure, errors.AgentToolsError) else 0.0
        pause = count.next_pause(now, min(max(asked, 0.0), _LONGEST_WAIT))
        if pause is None:
            raise failure
        _log.warning("the service is tried again in %.3g s: %s", pause, one_line(str(failure), _LONGEST))
        await trio.sleep(pause)


@asynccontextmanager
async def supervise(
    url: str | AgentTarget,
    *,
    token: str | None = None,
    headers: Mapping[str, str] | None = None,
    on_input: OnInput | None = None,
    max_rounds: int = MAX_ROUNDS,
    uds: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
    restarts: Restarts = RESTARTS,
    random: Random | None = None,
) -> AsyncIterator[AgentConnection]:
    """Yield a connection to a service that is opened again whenever it is lost; leaving the block ends it.

    While there is none, what is asked waits for the next one: put `trio.fail_after` around it. Calls and updates that
    were under way when it was lost raise `ConnectionLost`, since nobody knows what became of them; reading a context
    and listing tools are asked again, and so is what a service that is shutting down did not begin. A watch ends with
    `ConnectionLost`: begin a new one, which tells the state. HTTP has no connection to lose, so there all is as with
    `connect`.

    Args:
        url, token, headers, uds, ssl_context, on_input, max_rounds: as for `connect`.
        restarts: the pauses, and when the service is given up: then everything raises why.
        random: varies the pauses.
    """
    target = target_of(url, max_rounds, token=token, headers=headers, uds=uds, ssl_context=ssl_context)
    wire = SupervisedWire(target, RestartCount(restarts) if random is None else RestartCount(restarts, random))
    async with open_service_nursery() as nursery:
        nursery.start_soon(wire.run)
        agent = AgentConnection(wire, on_input, max_rounds)
        try:
            yield agent
        finally:
            agent.ended = True
            nursery.cancel_scope.cancel(reason="the block of this connection was left")


@attrs.define(eq=False)
class SupervisedWire:
    """An `AgentWire` over one connection after another."""

    _target: AgentTarget
    _count: RestartCount
    _wire: AgentWire | None = attrs.field(init=False, default=None)
    _given_up: McpError | None = attrs.field(init=False, default=None)
    _changed: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)

    async def run(self) -> None:
        """Keep a connection open until the service is given up."""
        try:
            await keep_open(self._target, self._count, self._use)
        except McpError as error:
            self._given_up = error
            self._changed.unpark_all()
            _log.error("the service is given up: %s", one_line(str(error), _LONGEST))  # no traceback

    async def _use(self, wire: AgentWire, begun: Callable[[], None]) -> None:
        begun()
        self._wire = wire
        self._changed.unpark_all()
        try:
            await wire.wait_lost()
        finally:
            self._wire = None

    async def _connected(self, other_than: AgentWire | None = None) -> AgentWire:
        """Wait for a connection. Raises why the service was given up."""
        while self._wire is None or self._wire is other_than:
            if self._given_up is not None:
                raise type(self._given_up)(*self._given_up.args) from self._given_up
            await self._changed.park()
        return self._wire

    async def _asked(self, ask: Callable[[AgentWire], Awaitable[T]], *, again: bool) -> T:
        """Ask over the present connection, or the next one if nothing was begun, or if it may be asked again."""
        wire: AgentWire | None = None
        if self._target.scheme.startswith("http"):  # it never ends, so there is no next one
            return await ask(await self._connected())
        while True:
            wire = await self._connected(wire)
            try:
                return await ask(wire)
            except ConnectionLost as error:
                if not again and not isinstance(error, NotSent):
                    raise
            except errors.Draining as error:  # answered while it ends: what only reads was not carried out
                if not (again or error.not_started):
                    raise

    # The AgentWire

    async def call(self, request: messages.ToolRequest, progressed: Progressed | None) -> messages.ToolResponse:
        async def ask(wire: AgentWire) -> messages.ToolResponse:
            response = await wire.call(request, progressed)
            error = None if response.error is None else errors.error_from(response.error)
            if isinstance(error, errors.Draining) and error.not_started:
                raise error
            return response

        return await self._asked(ask, again=False)

    async def ask(self, message: messages.AgentMessage) -> messages.AgentMessage:
        return await self._asked(lambda wire: wire.ask(message), again=isinstance(message, _REPEATED))

    @asynccontextmanager
    async def watching(self, context_id: str) -> AsyncIterator[Events]:
        async with (await self._connected()).watching(context_id) as events:
            yield events

    async def provide(self, offer: messages.ProvideTools, begin: Begin, registered: Registered) -> None:
        raise LocalError("tools are provided by provide(), which opens its connection again by itself")

    async def wait_lost(self) -> None:
        """Wait until the service is given up."""
        while self._given_up is None:
            await self._changed.park()
