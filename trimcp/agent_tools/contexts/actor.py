"""Contexts: the state that an agent keeps with a service, each an actor that alone changes it.

An actor has no task of its own while nothing happens in it. Its mailbox is the order in which its methods are called.
Here is its life: its calls and tasks, its watchers, its time and its end; and what handlers get of it. What it keeps is
in `state`, and the table of all contexts is in `table`.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, TypeAlias

import attrs
import trio

from trimcp.agent_tools.contexts.merging import StateSize
from trimcp.agent_tools.contexts.state import SERVER_MEMBERS, Applied, StoredState, refuse_server_members
from trimcp.agent_tools.messages import errors
from trimcp.agent_tools.watching import WatchChannel
from trimcp.session.agent_context import ContextEvent
from trimcp.session.scopes import guarded
from trimcp.store.contexts import KeptContext
from trimcp.support.deadlines import Deadline
from trimcp.support.nurseries import named
from trimcp.wire.jsonrpc import JSON, Unencodable, encode, parse_value

log: logging.Logger = logging.getLogger("trimcp.agent_tools")

CleanUp: TypeAlias = Callable[[], Awaitable[object] | object]

_UPDATES_PER_CHECKPOINT: Final = 64  # a checkpoint takes as long as the update itself


@attrs.define(eq=False, repr=False)
class ContextActor(StoredState):
    """One context: its life, on top of its state, as one object because there are many that are idle.

    Attributes:
        owner, id: whose it is, and its name.
        version: the number of updates so far.
        created: when it was made, in seconds since 1970.
        answers: what calls that are over were answered; None before the first that may come again.
        ended: why it has ended, or None while it lives.
        calls: the calls under way in it (`AgentCall`), by their `request_id`; changed by `begin_call` and `end_call`.
        fresh: whether nobody has used it since it was made.
        last_used: when it was used last, on Trio's clock.
    """

    calls: dict[str, Any] = attrs.field(init=False, factory=dict)
    fresh: bool = attrs.field(init=False, default=True)
    last_used: float = attrs.field(init=False, factory=trio.current_time)
    _used_elsewhere: float = attrs.field(init=False, default=-math.inf)
    _deadline: Deadline = attrs.field(init=False)
    _scopes: set[trio.CancelScope] | None = attrs.field(init=False, default=None)  # of its tasks, if there are any
    _clean_ups: tuple[CleanUp, ...] = attrs.field(init=False, default=())
    _unwound: trio.Event | None = attrs.field(init=False, default=None)
    _over: trio.Event | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self._deadline = self._shared.deadlines.new(self._time_passed)
        self._deadline.set(self.deadline - trio.current_time())

    @property
    def deadline(self) -> float:
        """When it ends unless it is used, on Trio's clock."""
        return min(self.last_used + self._shared.limits.idle, self._ends)

    @property
    def watchers(self) -> int:
        """How many channels watch it."""
        return len(self._watches)

    @property
    def tasks(self) -> int:
        """How many tasks were started for it and run."""
        return len(self._scopes or ())

    @property
    def idle(self) -> bool:
        """Whether nothing happens in it."""
        return not (self.calls or self._unsaved or self._watches or self._scopes)

    def used(self) -> None:
        """Push the idle deadline on."""
        if self.fresh:
            self.fresh = False
            self._shared.shares.use(self)
        self.last_used = trio.current_time()

    # Changing

    def apply(self, updates: Mapping[str, Any], version: int | None = None, *, of_server: bool = False) -> Applied:
        """See `StoredState.apply`. It is use of the context."""
        applied = super().apply(updates, version, of_server=of_server)
        self.used()
        return applied

    async def update(
        self, updates: Mapping[str, Any], version: int | None = None, *, of_server: bool = False
    ) -> Applied:
        """Change the state as `apply` does, and return the update with the new version once the store has it.

        Updates apply in the order of their calls. Cancelling this before it waits for the store changes nothing;
        later it does not undo the update. Raises as `apply`, and AgentToolsError if the store failed: then nothing was
        changed.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        applied = self.apply(updates, version, of_server=of_server)
        if not self._shared.durable and not self._shared.updates % _UPDATES_PER_CHECKPOINT:
            await trio.lowlevel.cancel_shielded_checkpoint()
        return await applied.stored()

    def build_on(self, kept: KeptContext, size: StateSize) -> None:
        """See `StoredState.build_on`: another process has used it."""
        super().build_on(kept, size)
        self._used_elsewhere = trio.current_time()

    # Calls

    def begin_call(self, request_id: str, call: Any) -> None:
        """Add a call, to be cancelled with the reason if the context ends. Raises RequestUnderWay, ContextGone."""
        self.check()
        if request_id in self.calls:
            raise errors.RequestUnderWay("a request with this request_id is under way in the context")
        self.calls[request_id] = call  # while it is under way, the context is in use
        if self.fresh:
            self.used()

    def end_call(self, request_id: str) -> None:
        """Remove a call that is over; no effect if it is not there."""
        self.calls.pop(request_id, None)
        if not self.calls:
            self.calls.clear()  # which gives back the table that is left after the last
        self.last_used = trio.current_time()
        self._look_unwound()

    # Watching

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[WatchChannel[ContextEvent]]:
        """Open a channel that receives the state, then each update, at last "destroyed".

        Raises TooMuch if there are `max_watchers`, and ContextGone if the context has ended.
        """
        watch = WatchChannel(self.whole)
        self.attach(watch)
        try:
            yield watch
        finally:
            self.detach(watch)

    def attach(self, watch: WatchChannel[ContextEvent]) -> None:
        """Have a channel watch it from now on. Raises as `watch`."""
        self.check()
        if self.watchers >= self._shared.limits.max_watchers:
            raise errors.TooMuch(f"the context has {self.watchers} watchers")
        self._watches += (watch,)
        self.used()

    def detach(self, watch: WatchChannel[ContextEvent]) -> None:
        """Have a channel watch it no longer; no effect if it does not."""
        if watch in self._watches:
            self._watches = tuple(each for each in self._watches if each is not watch)
            self._shared.replaced += watch.replaced

    # Work

    def start_soon(self, function: Callable[..., Awaitable[object]], *args: Any) -> None:
        """Run `await function(*args)` in a task that is cancelled when the context ends. A crash is only logged.

        Raises ContextGone if the context has ended.
        """
        self.check()
        scope = trio.CancelScope()
        self._scopes = self._scopes or set()
        self._scopes.add(scope)
        nursery = self._shared.nursery
        assert nursery is not None
        nursery.start_soon(self._work, scope, function, args, name=function)

    async def _work(
        self, scope: trio.CancelScope, function: Callable[..., Awaitable[object]], args: tuple[Any, ...]
    ) -> None:
        try:
            with scope:
                await guarded(function, args)
        finally:
            assert self._scopes is not None
            self._scopes.discard(scope)
            self._scopes = self._scopes or None
            self._look_unwound()

    def on_destroy(self, function: CleanUp) -> None:
        """Call a function, async or not, when the context has ended and its calls and tasks have unwound.

        The last one added is called first. It is cancelled after `ContextLimits.cleanup` seconds; a crash is only
        logged. It is also called when the server stops, even if a store keeps the context.

        Raises ContextGone if the context has ended.
        """
        self.check()
        self._clean_ups += (function,)

    # Ending

    async def destroy(self, reason: str = "destroyed") -> None:
        """End it, and wait until it is gone: its calls cancelled, tasks and clean-ups over, deleted in the store.

        From the start of this on nothing changes it any more. A second call waits for the first. Cancelling this stops
        only the waiting.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self.end(reason)
        await self.wait_over()

    def end(self, reason: str) -> None:
        """End it, without waiting; see `destroy`."""
        self._shared.end(self, reason)

    async def wait_over(self) -> None:
        """Wait until it is gone, once it has ended."""
        assert self._over is not None
        await self._over.wait()

    def forget(self) -> None:
        """Count no memory for it any more: it is gone."""
        self.holding.add(-self._held)
        assert self._over is not None
        self._over.set()

    def _time_passed(self) -> None:
        now, shared = trio.current_time(), self._shared
        if self.calls:
            self.last_used = now
        # Another process that uses it, or may do so, tells of that at least once in the idle time.
        times = 1 if shared.store.alone else 2
        if self.deadline > now:
            self._deadline.set(self.deadline - now)
            if shared.durable:
                shared.save(self)  # the store learns that it is in use
        elif self._ends > now and max(self.last_used, self._used_elsewhere) + times * shared.limits.idle > now:
            self._deadline.set(min(shared.limits.idle / 2, self._ends - now))
        else:
            shared.end(self, "its lifetime is over" if self._ends <= now else "it was not used for too long")

    def stop(self, reason: str, last: ContextEvent | None) -> None:
        """Take nothing more: cancel the calls and tasks, end the watchers. What follows is the table's.

        `last` is what its watchers are told; None if it goes on in the store.
        """
        self.ended: str | None = reason
        self._over, self._kept_on = trio.Event(), last is None
        self._deadline.close()
        if last is not None:
            self._fail_unsaved(self._gone)
        for call in list(self.calls.values()):
            call.cancel(reason)
        for scope in self._scopes or ():
            scope.cancel(reason=reason)
        for watch in self._watches:
            watch.finish(last)

    def _look_unwound(self) -> None:
        if self._unwound is not None and not self.calls and not self._scopes:
            self._unwound.set()

    async def unwind(self, seconds: float) -> None:
        """Wait for calls and tasks, then run the clean-ups; each for at most so many seconds. Shielded."""
        self._unwound = trio.Event()
        self._look_unwound()
        # A context ends in order also where what it belongs to is cancelled; each wait is bounded.
        with trio.move_on_after(seconds, shield=True):
            await self._unwound.wait()
        for function in reversed(self._clean_ups):
            with trio.move_on_after(seconds, shield=True) as scope:
                await guarded(_call, (function,))
            if scope.cancelled_caught:
                log.warning("the clean-up %r of a context took more than %s s", named(function), seconds)
        self._clean_ups = ()


async def _call(function: CleanUp) -> None:
    result = function()
    if inspect.isawaitable(result):
        await result


class ActorContext:
    """A context as its handlers get it (`ctx.agent_context`): what they read and write are copies."""

    __slots__ = ("_actor",)

    def __init__(self, actor: ContextActor) -> None:
        self._actor = actor

    @property
    def id(self) -> str:
        return self._actor.id

    @property
    def version(self) -> int:
        return self._actor.version

    def read(self) -> dict[str, Any]:
        state: dict[str, Any] = _copied(self._actor.snapshot())
        return state

    async def update(self, updates: Mapping[str, Any], version: int | None = None) -> int:
        try:
            copy: dict[str, Any] = _copied(dict(updates))
        except Unencodable as error:
            raise errors.MalformedMessage(str(error)) from None
        refuse_server_members(copy, SERVER_MEMBERS[1:])
        permissions = copy.get(SERVER_MEMBERS[0])
        if permissions is not None and not (
            isinstance(permissions, list) and all(isinstance(each, str) for each in permissions)
        ):
            raise errors.MalformedMessage("`permissions` is a list of texts: names of tools, and scopes")
        return (await self._actor.update(copy, version, of_server=True)).version

    def watch(self) -> AbstractAsyncContextManager[WatchChannel[ContextEvent]]:
        return self._actor.watch()

    def start_soon(self, function: Callable[..., Awaitable[object]], *args: Any) -> None:
        self._actor.start_soon(function, *args)


def _copied(value: JSON) -> Any:
    return parse_value(encode(value))
