"""A subscription to an upstream's changes that outlives its connections."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import attrs
import trio

from trimcp.client.session import ClientSession
from trimcp.errors import ConnectionLost, McpError
from trimcp.fleet.supervisor import Supervisor
from trimcp.session.listening import (
    Change,
    PromptsChanged,
    ResourcesChanged,
    ResourceUpdated,
    ToolsChanged,
)
from trimcp.session.queues import Changes
from trimcp.session.scopes import open_service_nursery
from trimcp.wire.lifecycle import SubscriptionFilter

__all__ = ["UpstreamSubscription", "Wanted", "relistening"]

log: logging.Logger = logging.getLogger("trimcp.client")


@attrs.frozen
class Wanted:
    """What a subscriber wants to hear of, as `ClientSession.listen` takes it."""

    tools: bool
    prompts: bool
    resources_list: bool
    resources: tuple[str, ...]

    def possible(self) -> Iterable[Change]:
        """Yield every change there may have been while nobody listened."""
        if self.tools:
            yield ToolsChanged()
        if self.prompts:
            yield PromptsChanged()
        if self.resources_list:
            yield ResourcesChanged()
        yield from map(ResourceUpdated, self.resources)


@asynccontextmanager
async def relistening(supervisor: Supervisor, wanted: Wanted, wait: bool) -> AsyncIterator[UpstreamSubscription]:
    """Subscribe, and again over each new connection; see `Upstream.listen`."""
    subscription = UpstreamSubscription(supervisor, wanted, wait)
    async with open_service_nursery() as nursery:
        nursery.start_soon(subscription._run)
        await subscription._opened.wait()
        if subscription._changes.end is not None:
            raise subscription._changes.end
        yield subscription


@attrs.define(eq=False, repr=False)
class UpstreamSubscription:
    """Changes as they come, over however many connections; iterate over it, or `receive` them one by one.

    Attributes:
        acknowledged: what the server agreed to tell when it was subscribed to last.
        restarts: how often it had to be subscribed to again.
    """

    _supervisor: Supervisor
    _wanted: Wanted
    _wait: bool
    acknowledged: SubscriptionFilter = attrs.field(init=False, factory=SubscriptionFilter)
    restarts: int = attrs.field(init=False, default=0)
    _changes: Changes[Change] = attrs.field(init=False, factory=Changes)
    _opened: trio.Event = attrs.field(init=False, factory=trio.Event)
    _since: float = attrs.field(init=False, default=0.0)

    async def receive(self) -> Change:
        """Wait for the next change. Of equal changes not received yet only one is kept. Cancelling it loses nothing.

        Raises:
            UpstreamDown: the upstream was given up, or left.
            RemoteError, LocalError: the server, come back, refuses the subscription.
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
        """Subscribe as often as there is a connection, until the upstream is given up or refuses."""
        in_a_row = 0
        supervisor, restarts = self._supervisor, self._supervisor.restarts
        try:
            session = await supervisor.usable(self._wait)
            while True:
                try:
                    await self._listen(session)
                except ConnectionLost as error:
                    log.debug("the subscription to %r is lost: %s", supervisor.name, error)
                    supervisor.suspect(session)
                if session.session.lost is None:
                    # The server ended it, or it alone was cut. One that does so at once is not asked again and again.
                    lasted = trio.current_time() - self._since >= restarts.lasting
                    in_a_row = 0 if lasted else in_a_row + 1
                    await trio.sleep(restarts.pause(in_a_row, supervisor.random))
                session = await supervisor.connected()
        except McpError as error:
            self._changes.finish(error)
            self._opened.set()

    async def _listen(self, session: ClientSession) -> None:
        """Listen over one connection until it, or the subscription, ends."""
        wanted = self._wanted
        self._since = trio.current_time()
        async with session.listen(
            tools=wanted.tools,
            prompts=wanted.prompts,
            resources_list=wanted.resources_list,
            resources=wanted.resources,
        ) as changes:
            self.acknowledged = changes.acknowledged
            if self._opened.is_set():
                # Anything may have changed while nobody told; who is told so reads it anew.
                self.restarts += 1
                self._add(wanted.possible(), session)
            self._opened.set()
            async for change in changes:
                self._add((change,), session)
