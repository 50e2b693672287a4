"""The client for programs that run asyncio: the methods of a session, to be awaited there.

`asyncio.pyi` beside it is what type checkers see.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import CancelledError, Future
from contextlib import asynccontextmanager, suppress
from typing import Any, ClassVar

import trio

from trimcp.client.client import Target
from trimcp.client.handlers import ClientProgram
from trimcp.client.session import ClientSession
from trimcp.errors import McpError
from trimcp.portal.methods import CallStandIn, StandIn, SubscriptionStandIn, connection, standing_for
from trimcp.portal.thread import Lease, PortalBlock, PortalOutcome, PortalWork
from trimcp.wire.revisions import Revision


async def _finished(work: PortalWork, begin: Callable[[], object], outcome: PortalOutcome) -> Any:
    """Begin something, wait for its outcome and return its value. Cancelled, cancel the work and wait for its end."""
    try:
        begin()
        await _there(outcome)
    except BaseException:
        if not work.outcome.done:
            with suppress(McpError):  # it cannot have begun
                work.cancel()
                await _there(work.outcome)
        raise
    return outcome.result()


async def _there(outcome: PortalOutcome) -> None:
    """Wait until an outcome is there."""
    there, loop = asyncio.Event(), asyncio.get_running_loop()

    def tell() -> None:
        with suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(there.set)

    outcome.tell(tell)
    await there.wait()


class _AsyncioStandIn(StandIn):
    async def wait(self, function: Callable[[], Any]) -> Any:
        work = PortalWork(self.block.portal, self.block, function)
        return await _finished(work, work.begin, work.outcome)

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[Any]:
        block = self.block
        try:
            self.origin = await _finished(block, block.begin, block.entered)
            yield self
        except BaseException:
            with suppress(Exception):  # that of the body tells more
                await self._leave()
            raise
        await self._leave()

    async def _leave(self) -> None:
        if not self.block.portal.lost:  # else the process that made it leaves it
            await _finished(self.block, self.block.leave, self.block.outcome)


class AsyncioCall(CallStandIn, _AsyncioStandIn):
    """A call in progress: `trimcp.Call`."""


class AsyncioSubscription(SubscriptionStandIn, _AsyncioStandIn):
    """Changes in the order of arrival: `trimcp.Subscription`."""


@standing_for(ClientSession)
class AsyncioSession(_AsyncioStandIn):
    """One connection to one server: the methods of `trimcp.ClientSession`, to be awaited in asyncio."""

    opened: ClassVar[dict[str, type[StandIn]]] = {"calling": AsyncioCall, "listen": AsyncioSubscription}


def _host_in(loop: asyncio.AbstractEventLoop) -> Callable[[Callable[[], Any]], Awaitable[Any]]:
    """Return what runs a handler in a loop of asyncio, and waits for it in Trio."""

    async def host(handler: Callable[[], Any]) -> Any:
        async def run() -> Any:
            value = handler()
            return await value if inspect.isawaitable(value) else value

        done, token = trio.Event(), trio.lowlevel.current_trio_token()

        def finish(future: Future[Any]) -> None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(done.set)

        future = asyncio.run_coroutine_threadsafe(run(), loop)
        future.add_done_callback(finish)
        try:
            await done.wait()
        except trio.Cancelled:
            future.cancel()
            raise
        try:
            return future.result()
        except CancelledError:
            raise RuntimeError("the handler was cancelled") from None

    return host


@asynccontextmanager
async def connect(
    target: Target, *, client: ClientProgram | None = None, revision: Revision | str | None = None
) -> AsyncIterator[AsyncioSession]:
    """Connect to a server as `Client.connect` does, and yield the session.

    Args:
        target: as for `Client.connect`.
        client: the program that connects, with its handlers, which run in the loop of the caller.
        revision: as for `Client.connect`.
    """
    lease = Lease()
    try:
        portal = lease.take()
        session, host = AsyncioSession(), _host_in(asyncio.get_running_loop())
        session.block = PortalBlock(portal, None, manager=connection(session, target, client, revision, host))
        async with session.enter():
            yield session
    finally:
        lease.give_back()
