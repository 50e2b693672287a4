"""Contexts: the state that an agent keeps with a service, each an actor that alone changes it.

An actor has no task of its own while nothing happens in it. Its mailbox is the order in which its methods are called:
a change is made between two checkpoints, so none sees another half done. With a store that outlives the process, a
change is applied on top of those that are not kept yet, and becomes the state, for readers and watchers alike, once the
store has it (`saving`). What all contexts of a run share is one record; the table above them is in `table`.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol, TypeAlias

import attrs
import trio

from trimcp.agent_tools.callers import Owner
from trimcp.agent_tools.contexts.history import GivenAnswers, KeptAnswer, ToolHistory, history_entry
from trimcp.agent_tools.contexts.limits import ContextLimits, refuse_server_members
from trimcp.agent_tools.contexts.merging import Patched, StateBounds, StateSize, patched
from trimcp.agent_tools.contexts.saving import Applied, Saver, UnsavedUpdate
from trimcp.agent_tools.contexts.shares import ContextShare
from trimcp.agent_tools.contexts.stores import ContextKey, KeptContext
from trimcp.agent_tools.contexts.watching import WatchChannel
from trimcp.agent_tools.messages import errors
from trimcp.containment import named
from trimcp.errors import LocalError
from trimcp.session.agent_context import ContextEvent
from trimcp.session.scopes import guarded
from trimcp.transports.http.deadlines import Deadline, Deadlines
from trimcp.transports.http.shares import Shares

log: logging.Logger = logging.getLogger("trimcp.agent_tools")

CleanUp: TypeAlias = Callable[[], Awaitable[object] | object]

OF_MEMBER: Final = 100
"""Bytes of memory that a member of a state takes beside its text."""

_COPIES: Final = 2  # of a state's objects beside it, while updates wait for the store: as it is written, and the newest
_OF_UNSAVED: Final = 8 * 1024  # bytes that an update which waits takes beside its patch, with the request and its task

_UPDATES_PER_CHECKPOINT: Final = 64  # a checkpoint takes as long as the update itself


class CallOfContext(Protocol):
    """A call that belongs to a context."""

    def cancel(self, reason: str, /) -> object:
        """Cancel it. Must not raise or block."""


@attrs.define(eq=False, repr=False)
class ContextsShared:
    """What all contexts of one run share.

    Attributes:
        limits, bounds: their limits; the bounds are those of a state.
        durable: whether a store keeps them, so that an update has to wait for it.
        end: ends a context for a reason; the table does.
        saver: writes to the store.
        deadlines: watches their times.
        shares: how many each principal or address has, and which of them gives way to a newcomer's.
        nursery: runs their tasks, while the table runs.
        updates: how many updates were applied.
        replaced: updates that slow watchers got as part of a whole state.
    """

    limits: ContextLimits
    bounds: StateBounds
    durable: bool
    end: Callable[[ContextActor, str], object]
    saver: Saver
    deadlines: Deadlines = attrs.field(factory=Deadlines)
    shares: Shares[ContextActor] = attrs.field(factory=lambda: Shares(owner_of=lambda actor: actor.share.key[0]))
    nursery: trio.Nursery | None = attrs.field(init=False, default=None)
    updates: int = attrs.field(init=False, default=0)
    replaced: int = attrs.field(init=False, default=0)


@attrs.define(eq=False, repr=False)
class ContextActor:
    """One context.

    Attributes:
        owner, id: whose it is, and its name.
        version: the number of updates so far.
        created: when it was made, in seconds since 1970.
        share: what it counts into.
        calls: the calls under way in it, by their `request_id`; changed by `begin_call` and `end_call`.
        answers: what calls that are over were answered; None before the first that may come again.
        fresh: whether nobody has used it since it was made.
    """

    owner: Owner
    id: str
    _shared: ContextsShared
    share: ContextShare
    _state: dict[str, Any]
    _size: StateSize
    _ends: float  # when its lifetime is over, on Trio's clock
    created: float
    version: int = 0
    _history: ToolHistory | None = None
    answers: GivenAnswers | None = attrs.field(init=False, default=None)
    calls: dict[str, CallOfContext] = attrs.field(init=False, factory=dict)
    fresh: bool = attrs.field(init=False, default=True)
    _used: float = attrs.field(init=False, factory=trio.current_time)
    _held: int = attrs.field(init=False, default=0)
    _deadline: Deadline = attrs.field(init=False)
    _unsaved: deque[UnsavedUpdate] | None = attrs.field(init=False, default=None)
    _newest: dict[str, Any] | None = attrs.field(init=False, default=None)  # the state with all of these
    _waiting: int = attrs.field(init=False, default=0)  # bytes of memory counted for them
    _watches: list[WatchChannel] | None = attrs.field(init=False, default=None)
    _scopes: set[trio.CancelScope] | None = attrs.field(init=False, default=None)
    _clean_ups: list[CleanUp] | None = attrs.field(init=False, default=None)
    _ended: str | None = attrs.field(init=False, default=None)  # the reason
    _kept_on: bool = attrs.field(init=False, default=False)  # it ended here, and goes on in the store
    _unwound: trio.Event | None = attrs.field(init=False, default=None)
    _over: trio.Event | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self._deadline = self._shared.deadlines.new(self._time_passed)
        self._deadline.set(self.deadline - trio.current_time())

    # Reading

    @property
    def key(self) -> ContextKey:
        return self.owner, self.id

    @property
    def deadline(self) -> float:
        """When it ends unless it is used, on Trio's clock."""
        return min(self._used + self._shared.limits.idle, self._ends)

    @property
    def watchers(self) -> int:
        """How many channels watch it."""
        return len(self._watches or ())

    @property
    def tasks(self) -> int:
        """How many tasks were started for it and run."""
        return len(self._scopes or ())

    @property
    def ended(self) -> str | None:
        """Why it has ended, or None while it lives."""
        return self._ended

    @property
    def session(self) -> str:
        """The session that it belongs to; without one it is one of its own."""
        found: str = self._state.get("session_id", self.id)
        return found

    @property
    def permissions(self) -> list[str] | None:
        """What may be called in it, as `AgentRun` reads that; None for everything."""
        found: list[str] | None = self._state.get("permissions")
        return found

    def snapshot(self) -> dict[str, Any]:
        """Return the state: a new object, whose values are shared. Do not change them."""
        history = self._history
        return {
            "session_id": self.id,
            "permissions": [],
            "tool_history": [] if history is None else history.read(),
            "intermediate_results": {},
            **self._state,
        }

    def used(self) -> None:
        """Push the idle deadline on."""
        if self.fresh:
            self._begin_use()
        self._used = trio.current_time()

    def _begin_use(self) -> None:
        self.fresh = False
        self._shared.shares.use(self)

    @property
    def idle(self) -> bool:
        """Whether nothing happens in it."""
        return not (self.calls or self._unsaved or self._watches or self._scopes)

    # Changing

    async def update(self, updates: Mapping[str, Any], version: int | None = None) -> Applied:
        """Change the state by a JSON merge patch, and return it with the new version once the store has it.

        Updates apply in the order of their calls. Cancelling this before it waits for the store changes nothing;
        later it does not undo the update.

        Args:
            updates: the patch. It becomes part of the state: do not change it later.
            version: the version that it changes; None for any.

        Raises:
            MalformedMessage: it writes a member of `SERVER_MEMBERS`.
            VersionConflict: the context has another version.
            TooLargeMessage: the patch or the new state is beyond the limits.
            TooMuch: the server has no memory for it.
            ContextGone: the context has ended.
            AgentToolsError: the store failed; nothing was changed.
        """
        refuse_server_members(updates)
        return await self.change(updates, version)

    def update_now(self, updates: Mapping[str, Any], version: int | None = None) -> Applied:
        """As `update`, without waiting, for a table whose store is not durable."""
        refuse_server_members(updates)
        if self._shared.durable:
            raise LocalError("this context is kept in a store, which takes time: await update()")
        return self._update_now(updates, version)

    def update_soon(self, updates: Mapping[str, Any], version: int | None = None) -> UnsavedUpdate:
        """As `update`, without waiting: the store is yet to have it. For a table whose store is durable.

        Raises:
            AgentToolsError: as `update`, but for what the store does.
        """
        refuse_server_members(updates)
        return self._change_soon(updates, version)

    async def change(self, updates: Mapping[str, Any], version: int | None) -> Applied:
        """As `update`, but for code of the server: it may write every member."""
        shared = self._shared
        await trio.lowlevel.checkpoint_if_cancelled()
        if not shared.durable:
            applied = self._update_now(updates, version)
            if not shared.updates % _UPDATES_PER_CHECKPOINT:
                await trio.lowlevel.cancel_shielded_checkpoint()
            return applied
        return await self._change_soon(updates, version).kept()

    def _change_soon(self, updates: Mapping[str, Any], version: int | None) -> UnsavedUpdate:
        unsaved, before = self._unsaved or (), self._newest_size
        if len(unsaved) >= self._shared.limits.max_unsaved:
            raise errors.TooMuch(f"{len(unsaved):,} updates of the context wait for the store", retry_after=1)
        result = self._merged(self._state if self._newest is None else self._newest, before, updates, version)
        memory = _OF_UNSAVED + result.patch + OF_MEMBER * result.patch_members
        copied = _COPIES * OF_MEMBER * (result.members - (0 if self._newest is None else before.members))
        self._admit(result, before, memory + copied)
        self._waiting += memory + copied
        self._newest = result.value
        size = StateSize(result.size, result.members)
        return self._save(UnsavedUpdate(Applied(updates, self.newest_version + 1), size, result.patch, memory))

    def _update_now(self, updates: Mapping[str, Any], version: int | None) -> Applied:
        result = self._merged(self._state, self._size, updates, version)
        self._admit(result, self._size)
        self._state = result.value
        self._size = StateSize(result.size, result.members)
        return self._applied(Applied(updates, self.version + 1), result.patch)

    @property
    def newest_version(self) -> int:
        """The version with the updates that the store does not have yet."""
        return self._unsaved[-1].applied.version if self._unsaved else self.version

    @property
    def _newest_size(self) -> StateSize:
        return self._unsaved[-1].size if self._unsaved else self._size

    def _merged(
        self, state: dict[str, Any], size: StateSize, updates: Mapping[str, Any], version: int | None
    ) -> Patched:
        """Return what an update leads to, after all checks but that of memory."""
        if self._ended is not None:
            raise self._gone()
        if version is not None and version != self.newest_version:
            newest = self.newest_version
            raise errors.VersionConflict(f"the context has version {newest}", {"version": newest})
        return patched(state, size, updates, self._shared.bounds)

    def _admit(self, result: Patched, before: StateSize, more: int = 0) -> None:
        """Count the memory of an update's result in place of that of the state before, and so many bytes more."""
        growth = result.size - before.size + OF_MEMBER * (result.members - before.members) + more
        if growth > 0 and not self.share.holding.fits(growth):
            self.share.holding.refuse("context")
            raise errors.TooMuch("the server has no memory for a larger state", retry_after=self._shared.limits.idle)
        self.hold(growth)
        self.used()

    def _applied(self, applied: Applied, patch: int) -> Applied:
        """Count an update whose result is the state now, and tell the watchers."""
        self.version = version = applied.version
        self._shared.updates += 1
        if self._watches:
            event = ContextEvent("update", self.id, version, applied.updates)
            for watch in self._watches:
                watch.add(event, patch)
        return applied

    def record(self, entry: Mapping[str, Any], asked: bytes | None = None, answer: KeptAnswer | None = None) -> None:
        """Add a call to the tool history; no effect once the context has ended. The version stays.

        Args:
            entry: `{"request_id", "tool", "version", "arguments", "status", "at"}`, with the arguments as received.
            asked: what was asked, in a form that compares.
            answer: given again for the same request, or None.
        """
        limits = self._shared.limits
        if self._ended is not None:
            return
        grown = 0
        if asked is not None and answer is not None:
            if self.answers is None:
                self.answers = GivenAnswers()
            grown = self.answers.add(entry["request_id"], asked, answer, limits.answers)
        if limits.history:
            history = self._history
            if history is None:
                history = self._history = ToolHistory()
            before = history.held
            history.add(history_entry(entry, limits.history_arguments), limits.history, limits.max_history)
            grown += history.held - before
            if self._shared.durable:
                self._shared.saver.save(self)
        self.hold(grown)

    def hold(self, change: int) -> None:
        """Count so many more bytes of memory for it."""
        if change:
            self._held += change
            self.share.holding.add(change)

    # Calls

    def begin_call(self, request_id: str, call: CallOfContext) -> None:
        """Add a call, which is cancelled when the context ends. Raises RequestUnderWay, ContextGone."""
        if self._ended is not None:
            raise self._gone()
        if request_id in self.calls:
            raise errors.RequestUnderWay("a request with this request_id is under way in the context")
        self.calls[request_id] = call  # while it is under way, the context is in use
        if self.fresh:
            self._begin_use()

    def end_call(self, request_id: str) -> None:
        """Remove a call that is over; no effect if it is not there."""
        self.calls.pop(request_id, None)
        if not self.calls:
            self.calls.clear()  # which gives back the table that is left after the last
        self._used = trio.current_time()
        self._look_unwound()

    # Watching

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[WatchChannel]:
        """Open a channel that receives the state, then each update, at last "destroyed".

        Raises:
            TooMuch: it has `max_watchers`.
            ContextGone: the context has ended.
        """
        watch = WatchChannel(self)
        self.attach(watch)
        try:
            yield watch
        finally:
            self.detach(watch)

    def attach(self, watch: WatchChannel) -> None:
        """Have a channel watch it from now on. Raises as `watch`."""
        if self._ended is not None:
            raise self._gone()
        watches = self._watches
        if watches is None:
            watches = self._watches = []
        if len(watches) >= self._shared.limits.max_watchers:
            raise errors.TooMuch(f"the context has {len(watches)} watchers")
        watches.append(watch)
        if self.fresh:
            self._begin_use()

    def detach(self, watch: WatchChannel) -> None:
        """Have a channel watch it no longer; no effect if it does not."""
        watches = self._watches
        if watches is None or watch not in watches:
            return
        watches.remove(watch)
        if not watches:
            self._watches = None
        self._shared.replaced += watch.replaced

    # Work

    def start_soon(self, function: Callable[..., Awaitable[object]], *args: Any) -> None:
        """Run `await function(*args)` in a task that is cancelled when the context ends. A crash is only logged.

        Raises:
            ContextGone: the context has ended.
        """
        if self._ended is not None:
            raise self._gone()
        scope = trio.CancelScope()
        if self._scopes is None:
            self._scopes = set()
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
            if not self._scopes:
                self._scopes = None
            self._look_unwound()

    def on_destroy(self, function: CleanUp) -> None:
        """Call a function, async or not, when the context has ended and its calls and tasks have unwound.

        The last one added is called first. It is cancelled after `ContextLimits.cleanup` seconds; a crash is only
        logged. It is also called when the server stops, even if a store keeps the context.

        Raises:
            ContextGone: the context has ended.
        """
        if self._ended is not None:
            raise self._gone()
        if self._clean_ups is None:
            self._clean_ups = []
        self._clean_ups.append(function)

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
        self.hold(-self._held)
        assert self._over is not None
        self._over.set()

    def _gone(self) -> errors.AgentToolsError:
        if self._kept_on:
            return errors.Draining("the service is shutting down")
        return errors.ContextGone("the context has ended", {"reason": self._ended})

    def _time_passed(self) -> None:
        now = trio.current_time()
        if self.calls:
            self._used = now
        if self.deadline > now:
            self._deadline.set(self.deadline - now)
            if self._shared.durable:
                self._shared.saver.save(self)  # the store learns that it is in use
        else:
            self._shared.end(self, "its lifetime is over" if self._ends <= now else "it was not used for too long")

    def stop(self, reason: str, last: ContextEvent | None) -> None:
        """Take nothing more: cancel the calls and tasks, end the watchers. What follows is the table's.

        Args:
            reason: why it ends.
            last: what its watchers are told; None if it goes on in the store.
        """
        self._ended, self._over, self._kept_on = reason, trio.Event(), last is None
        self._deadline.close()
        if last is not None:
            self._fail_unsaved(self._gone)
        for call in list(self.calls.values()):
            call.cancel(reason)
        for scope in self._scopes or ():
            scope.cancel(reason=reason)
        for watch in list(self._watches or ()):
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
        for function in reversed(self._clean_ups or ()):
            with trio.move_on_after(seconds, shield=True) as scope:
                await guarded(_call, (function,))
            if scope.cancelled_caught:
                log.warning("the clean-up %r of a context took more than %s s", named(function), seconds)
        self._clean_ups = None

    # For the store

    async def save(self) -> None:
        """Wait until the store has the context as it is. Raises AgentToolsError: the store failed."""
        self._waiting += _OF_UNSAVED
        self.hold(_OF_UNSAVED)
        await self._save(UnsavedUpdate(Applied({}, self.newest_version), self._newest_size, 0, _OF_UNSAVED)).kept()

    def _save(self, mine: UnsavedUpdate) -> UnsavedUpdate:
        if self._unsaved is None:
            self._unsaved = deque()
        self._unsaved.append(mine)
        self._shared.saver.save(self)
        return mine

    @property
    def text_size(self) -> int:
        return self._newest_size.size + (0 if self._history is None else self._history.held)

    def to_keep(self) -> KeptContext:
        """Return its newest state, for the store."""
        limits, state = self._shared.limits, self._state if self._newest is None else self._newest
        now, trio_now = time.time(), trio.current_time()
        ends = now + self._ends - trio_now
        # It is saved again before half of that is over: `_time_passed` comes after `idle` seconds at the latest.
        until = min(ends, now + 2 * limits.idle)
        history = () if self._history is None else tuple(self._history.entries)
        return KeptContext(self.owner, self.id, self.newest_version, state, history, self.created, ends, until)

    def kept(self, one: KeptContext) -> None:
        """Make the updates up to this version the state: the store has them."""
        unsaved = self._unsaved
        if not unsaved:
            return
        if one.version > self.version:
            state: Any = one.state  # as `to_keep` returned it
            self._state = state
        while unsaved and unsaved[0].applied.version <= one.version:
            update = unsaved.popleft()
            self._size = update.size
            if update.applied.version > self.version:
                self._applied(update.applied, update.patch)
            self._waiting -= update.memory
            self.hold(-update.memory)
            update.done.set()
        if not unsaved:
            self._none_waits()

    def _none_waits(self) -> None:
        self._unsaved = self._newest = None
        self.hold(-self._waiting)
        self._waiting = 0

    def not_kept(self) -> bool:
        """Forget the updates that the store does not have: it failed. Return whether to write the context again."""
        self._fail_unsaved(lambda: errors.AgentToolsError("the service could not keep the update; nothing was changed"))
        return self._ended is None

    def _fail_unsaved(self, error: Callable[[], errors.AgentToolsError]) -> None:
        newest, unsaved = self._newest_size, self._unsaved
        self._none_waits()
        self.hold(self._size.size - newest.size + OF_MEMBER * (self._size.members - newest.members))
        for one in unsaved or ():
            one.error = error()
            one.done.set()


async def _call(function: CleanUp) -> None:
    result = function()
    if inspect.isawaitable(result):
        await result
