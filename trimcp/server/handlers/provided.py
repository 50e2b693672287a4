"""What handlers need: entered for a request, a session or the whole run, in order, and left in reverse.

A context manager is left by the task that entered it. So a request enters what it needs in its own task, a run in the
task that runs it, and a session has a task of its own for it, from the first request that needs something of it.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import attrs
import trio

from trimcp.errors import LocalError
from trimcp.server.handlers.needs import Need, Owner
from trimcp.session.context import Context
from trimcp.support.slotted import slotted


@slotted
class Provided:
    """The values of one owner. What was entered is left when `stack` is, by the task that entered it."""

    owners: tuple[Owner, ...]
    stack: AsyncExitStack
    running: Any
    ctx: Context[Any] | None = None  # of a request; those that need what ends before them were refused
    values: dict[Callable[..., Any], Any] = attrs.field(init=False, factory=dict)

    async def get(self, provider: Need) -> Any:
        """Return a provider's value, entered now unless it was before. Raises what the provider raises."""
        name = provider.name
        if provider.owner not in self.owners:
            if provider.owner == "server":
                return self.running.provided[name]
            assert self.ctx is not None
            return await _of_session(self.running, self.ctx, provider)
        if name not in self.values:
            used = self.running.server.needs.overrides.get(name, provider)
            keywords = {parameter: await self.get(need) for parameter, need in used.needs}
            if used.context_parameter is not None:
                keywords[used.context_parameter] = self.ctx
            value = used.call(**keywords)
            if inspect.isawaitable(value):
                value = await value
            if used.entered:
                entered: Any = value
                by_await = hasattr(entered, "__aenter__")
                value = await self.stack.enter_async_context(entered) if by_await else self.stack.enter_context(entered)
            self.values[name] = value
        return self.values[name]


@asynccontextmanager
async def provided(needs: Sequence[tuple[str, Need]], ctx: Context[Any]) -> AsyncIterator[dict[str, Any]]:
    """Enter what a handler needs while the block runs, and yield it by parameter."""
    session, _ = ctx.internals
    alone: tuple[Owner, ...] = ("request", "session")  # a session of one request ends with it
    owners = alone if session.transport.single_request else alone[:1]
    async with AsyncExitStack() as stack:
        values = Provided(owners, stack, ctx.running, ctx)
        yield {parameter: await values.get(provider) for parameter, provider in needs}


# A session's


@slotted
class _Wanted:
    """A value that a request waits for."""

    provider: Need
    done: trio.Event = attrs.field(init=False, factory=trio.Event)
    value: Any = attrs.field(init=False, default=None)
    failure: Exception | None = attrs.field(init=False, default=None)


async def _of_session(running: Any, ctx: Context[Any], provider: Need) -> Any:
    """Have the task of the session enter what a request needs, and return its value."""
    session, _ = ctx.internals
    send = running.providing.get(session)
    if send is None:
        send, receive = trio.open_memory_channel[_Wanted](0)
        running.providing[session] = send
        ctx.session.start_soon(_provide, running, session, receive)
    wanted = _Wanted(provider)
    try:
        await send.send(wanted)
    except trio.BrokenResourceError:
        raise LocalError("the session has ended") from None
    await wanted.done.wait()
    if wanted.failure is not None:
        raise wanted.failure
    return wanted.value


async def _provide(running: Any, session: Any, receive: trio.MemoryReceiveChannel[_Wanted]) -> None:
    """Enter what the requests of a session need, one after the other, and leave all at its end."""
    stack = AsyncExitStack()
    values = Provided(("session",), stack, running)
    try:
        with receive:
            async for wanted in receive:
                try:
                    wanted.value = await values.get(wanted.provider)
                except Exception as error:  # the request's that needs it; another one tries again
                    wanted.failure = error
                finally:
                    wanted.done.set()
    finally:
        running.providing.pop(session, None)
        # The session's task is cancelled by its end. What closes by awaiting has as long as its last messages have.
        with trio.CancelScope(deadline=trio.current_time() + session.limits.drain_timeout, shield=True):
            await stack.aclose()


# A run's


@asynccontextmanager
async def while_running(running: Any) -> AsyncIterator[None]:
    """Enter what belongs to a run of the server, in the order in which it was declared, while the block runs."""
    async with AsyncExitStack() as stack:
        values = Provided(("server",), stack, running)
        running.provided = values.values
        for provider in list(running.server.needs.shared.values()):
            await values.get(provider)
        yield
