"""The client for scripts, notebooks and threads: the methods of a session, each of which waits.

`blocking.pyi` beside it is what type checkers see.
"""

from __future__ import annotations

import contextvars
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Final

import trio

from trimcp.client.client import Target
from trimcp.client.handlers import ClientProgram
from trimcp.client.session import ClientSession
from trimcp.errors import McpError
from trimcp.portal.methods import CallStandIn, StandIn, SubscriptionStandIn, connection, standing_for
from trimcp.portal.thread import Lease, PortalBlock, PortalOutcome, PortalWork
from trimcp.wire.revisions import Revision

_until: Final[contextvars.ContextVar[float | None]] = contextvars.ContextVar("until", default=None)


@contextmanager
def timeout(seconds: float) -> Iterator[None]:
    """Let calls in the block raise TimeoutError once so many seconds have passed since it began.

    The call that waits then is cancelled, and the server is told. The session goes on.
    """
    until, outer = time.monotonic() + seconds, _until.get()
    token = _until.set(until if outer is None else min(until, outer))
    try:
        yield
    finally:
        _until.reset(token)


def _finished(work: PortalWork, begin: Callable[[], object], outcome: PortalOutcome) -> Any:
    """Begin something, wait for its outcome and return its value.

    Interrupted, or when the time is over, the work is cancelled, and its end awaited.
    """
    try:
        begin()
        until = _until.get()
        outcome.wait(None if until is None else max(0.0, until - time.monotonic()))
    except BaseException:
        if not work.outcome.done:
            with suppress(McpError):  # it cannot have begun
                work.cancel()
                work.outcome.wait()
        raise
    return outcome.result()


class _BlockingStandIn(StandIn):
    def wait(self, function: Callable[[], Any]) -> Any:
        work = PortalWork(self.block.portal, self.block, function)
        return _finished(work, work.begin, work.outcome)

    @contextmanager
    def enter(self) -> Iterator[Any]:
        block = self.block
        try:
            self.origin = _finished(block, block.begin, block.entered)
            yield self
        except BaseException:
            with suppress(Exception):  # that of the body tells more
                self._leave()
            raise
        self._leave()

    def _leave(self) -> None:
        if not self.block.portal.lost:  # else the process that made it leaves it
            _finished(self.block, self.block.leave, self.block.outcome)


class BlockingCall(CallStandIn, _BlockingStandIn):
    """A call in progress: `trimcp.Call`."""


class BlockingSubscription(SubscriptionStandIn, _BlockingStandIn):
    """Changes in the order of arrival: `trimcp.Subscription`."""


@standing_for(ClientSession)
class BlockingSession(_BlockingStandIn):
    """One connection to one server: the methods of `trimcp.ClientSession`, each of which waits."""

    opened: ClassVar[dict[str, type[StandIn]]] = {"calling": BlockingCall, "listen": BlockingSubscription}


async def _host(handler: Callable[[], Any]) -> Any:
    # In a list, for Trio takes no coroutine from a thread.
    (value,) = await trio.to_thread.run_sync(lambda: [handler()], abandon_on_cancel=True)
    return await value if inspect.isawaitable(value) else value


@contextmanager
def connect(
    target: Target, *, client: ClientProgram | None = None, revision: Revision | str | None = None
) -> Iterator[BlockingSession]:
    """Connect to a server as `Client.connect` does, and yield the session.

    Args:
        target: as for `Client.connect`.
        client: the program that connects, with its handlers, which run in threads.
        revision: as for `Client.connect`.
    """
    lease = Lease()
    try:
        portal = lease.take()
        session = BlockingSession()
        session.block = PortalBlock(portal, None, manager=connection(session, target, client, revision, _host))
        with session.enter():
            yield session
    finally:
        lease.give_back()
