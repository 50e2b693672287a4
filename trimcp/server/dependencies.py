"""What handlers need beside arguments: entered for a request, a session or the whole run, in order, left in reverse.

A context manager is left by the task that entered it. So a request enters what it needs in its own task, a run in the
task that runs it, and a session has a task of its own for it, from the first request that needs something of it.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Final

import attrs
import trio

from trimcp.errors import LocalError
from trimcp.schema.signature import target_of
from trimcp.server.calling import Depends, Owner, inspected, marker_of
from trimcp.session.context import Context
from trimcp.support.slotted import slotted

if TYPE_CHECKING:
    from trimcp.server.running import Running

_OWNERS: Final = ("request", "session", "server")  # each ends before the next


@slotted(frozen=True)
class Provider:
    """A function that provides a value, inspected once."""

    name: Callable[..., Any]  # the function it was declared with, under which its value is known
    call: Callable[..., Any]
    entered: bool  # `call` returns a context manager
    owner: Owner
    context_parameter: str | None
    needs: tuple[tuple[str, Provider], ...]

    def everything(self) -> list[Provider]:
        """Return what it needs, and what that needs, each before who needs it, and itself as the last."""
        return [one for _, need in self.needs for one in need.everything()] + [self]


def provider_of(marker: Depends, within: Sequence[Callable[..., Any]] = ()) -> Provider:
    """Inspect a function that provides a value for those `within`, outermost first.

    Raises TypeError if it cannot be called, with what to change.
    """
    function, owner = marker.provider, marker.scope
    if owner not in _OWNERS:
        raise TypeError(f"the scope of Depends is 'request', 'session' or 'server', not {owner!r:.60}")
    if not callable(function):
        raise TypeError(f"Depends takes a function that provides the value, not {function!r:.60}")
    signature, context_parameter, others = inspected(function, loose=True)
    name = signature.name
    if function in within:
        raise TypeError(f"{name}() needs itself")
    if required := signature.input_schema.get("required"):
        raise TypeError(
            f"{name}(): nobody fills the parameter {required[0]!r}: give it a default, or Annotated[..., Depends(...)]"
        )
    if context_parameter is not None and owner != "request":
        raise TypeError(f"{name}() belongs to the {owner}, and cannot take the Context of one request")
    needs = []
    for parameter, hint in others:
        needed = marker_of(hint, Depends)
        if needed is None:
            raise TypeError(f"{name}(): only a handler declares questions; take the Context, and ask by it")
        need = provider_of(needed, (*within, function))
        if _OWNERS.index(need.owner) < _OWNERS.index(owner):
            raise TypeError(f"{name}() belongs to the {owner}, but its parameter {parameter!r} to a {need.owner}")
        needs.append((parameter, need))
    call, entered = _callable(function)
    return Provider(function, call, entered, owner, context_parameter, tuple(needs))


def replacement_of(function: Callable[..., Any]) -> Provider:
    """Inspect a function that provides in place of another. Raises TypeError if it takes anything."""
    signature, context_parameter, others = inspected(function, loose=True)
    if context_parameter is not None or others or signature.input_schema.get("required"):
        raise TypeError(f"{signature.name}() stands for another function, and takes nothing")
    call, entered = _callable(function)
    return Provider(function, call, entered, "server", None, ())


def _callable(function: Callable[..., Any]) -> tuple[Callable[..., Any], bool]:
    """Return what to call, and whether it returns a context manager."""
    target = target_of(function)
    if inspect.isasyncgenfunction(function):
        return asynccontextmanager(function), True
    if inspect.isgeneratorfunction(function):
        return contextmanager(function), True
    return function, inspect.isasyncgenfunction(target) or inspect.isgeneratorfunction(target)


@slotted
class Provided:
    """The values of one owner. What was entered is left when `stack` is, by the task that entered it."""

    owners: tuple[Owner, ...]
    stack: AsyncExitStack
    overrides: Mapping[Callable[..., Any], Provider]
    others: Callable[[Provider], Awaitable[Any]]  # returns the value of a provider of another owner
    ctx: Context[Any] | None = None
    values: dict[Callable[..., Any], Any] = attrs.field(init=False, factory=dict)

    async def get(self, provider: Provider) -> Any:
        """Return a provider's value, entered now unless it was before. Raises what the provider raises."""
        if provider.owner not in self.owners:
            return await self.others(provider)
        name = provider.name
        if name not in self.values:
            used = self.overrides.get(name, provider)
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
async def provided(needs: Sequence[tuple[str, Provider]], ctx: Context[Any]) -> AsyncIterator[dict[str, Any]]:
    """Enter what a handler needs while the block runs, and yield it by parameter."""
    session, _ = ctx.internals
    running: Running = session.endpoint  # type: ignore[assignment]
    alone: tuple[Owner, ...] = ("request", "session")  # a session of one request ends with it
    owners = alone if session.transport.single_request else alone[:1]

    async def of_others(provider: Provider) -> Any:
        if provider.owner == "server":
            return running.provided[provider.name]
        return await _of_session(running, ctx, provider)

    async with AsyncExitStack() as stack:
        values = Provided(owners, stack, running.server.overrides, of_others, ctx)
        yield {parameter: await values.get(provider) for parameter, provider in needs}


# A session's


@slotted
class _Wanted:
    """A value that a request waits for."""

    provider: Provider
    done: trio.Event = attrs.field(init=False, factory=trio.Event)
    value: Any = attrs.field(init=False, default=None)
    failure: Exception | None = attrs.field(init=False, default=None)


async def _of_session(running: Running, ctx: Context[Any], provider: Provider) -> Any:
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


async def _provide(running: Running, session: Any, receive: trio.MemoryReceiveChannel[_Wanted]) -> None:
    """Enter what the requests of a session need, one after the other, and leave all at its end."""

    async def of_server(provider: Provider) -> Any:
        return running.provided[provider.name]

    stack = AsyncExitStack()
    values = Provided(("session",), stack, running.server.overrides, of_server)
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
async def while_running(running: Running) -> AsyncIterator[None]:
    """Enter what belongs to a run of the server, in the order in which it was declared, while the block runs."""

    async def of_nobody(provider: Provider) -> Any:
        raise AssertionError(provider)  # refused when it was declared

    async with AsyncExitStack() as stack:
        values = Provided(("server",), stack, running.server.overrides, of_nobody)
        running.provided = values.values
        for provider in list(running.server.shared.values()):
            await values.get(provider)
        yield
