"""The state of a context: its limits, its value and version, what a store has yet to keep of it, and its memory.

A change is made between two checkpoints, so none sees another half done. With a store that outlives the process, a
change is applied on top of those that are not stored yet, and becomes the state, for readers and watchers alike, once
the store has it (`saving`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import attrs
import trio

from trimcp.agent_tools.contexts.history import GivenAnswers, HistoryArguments, ToolHistory, history_entry
from trimcp.agent_tools.contexts.merging import MAX_DEPTH, StateBounds, StateSize, patched
from trimcp.agent_tools.messages import errors
from trimcp.agent_tools.messages.answers import CallAnswer
from trimcp.agent_tools.watching import WatchChannel
from trimcp.budget import MemoryAccount
from trimcp.session.agent_context import ContextEvent
from trimcp.store.contexts import ContextKey, ContextStore, KeptContext, Owner
from trimcp.support.bounds import check_number, checked
from trimcp.support.deadlines import Deadlines
from trimcp.support.shares import Shares
from trimcp.support.slotted import valued

SERVER_MEMBERS: Final = ("permissions", "session_id", "tool_history")
"""Members of a context's state that no agent can write."""


def _check_depth(instance: object, attribute: object, value: object) -> None:
    depth = check_number("ContextLimits.max_depth", value, whole=True)
    if depth > MAX_DEPTH:
        raise ValueError(f"ContextLimits.max_depth is at most {MAX_DEPTH}, not {depth}")


@attrs.frozen(field_transformer=checked(zero=("history", "answers", "gone", "max_gone")))
@valued
class ContextLimits:
    """How much contexts may hold, and how long they live. Sizes are in bytes, times in seconds.

    Attributes:
        max_contexts: contexts of all owners together.
        max_per_owner: contexts of one principal and agent; without a principal, of one address.
        max_state: JSON text of a state, and of one update. In memory a state also takes 100 bytes per member.
        max_depth: levels of objects and arrays in a state.
        max_members: members and elements on all levels of a state.
        idle: how long a context lives without use. A request that names it and a call under way are use; watchers and
            tasks that were started in it are not.
        lifetime: how long a context lives at most.
        history: calls kept in its `tool_history`; 0 for none.
        max_history: memory of its history; beyond it fewer calls are kept.
        history_arguments: how the history shows arguments: "shapes" names, kinds and sizes; "masked" the values, with
            secrets masked by name and long texts cut; "whole" all values; "none" nothing.
        answers: memory of the answers that are kept for requests sent again: those of the latest calls, about 20 small
            ones; 0 for none.
        max_watchers: channels that watch one context.
        max_unsaved: updates of one context that wait for a store.
        gone: how long an ended context's id is answered with "gone"; after that it is unknown.
        max_gone: ended ids remembered.
        cleanup: how long calls and tasks of an ended context may take to unwind, and each of its clean-ups.
    """

    max_contexts: int = 10_000
    max_per_owner: int = 1_000
    max_state: int = 256 * 1024
    max_depth: int = attrs.field(default=32, validator=_check_depth)
    max_members: int = 10_000
    idle: float = 1_800.0
    lifetime: float = 86_400.0
    history: int = 100
    max_history: int = 4 * 1024
    history_arguments: HistoryArguments = attrs.field(
        default="shapes", validator=attrs.validators.in_(("none", "shapes", "masked", "whole"))
    )
    answers: int = 16 * 1024
    max_watchers: int = 100
    max_unsaved: int = 1_000
    gone: float = 300.0
    max_gone: int = 10_000
    cleanup: float = 5.0


def refuse_server_members(updates: Mapping[str, Any], members: Sequence[str] = SERVER_MEMBERS) -> None:
    """Raise MalformedMessage if an update writes one of these members."""
    for name in members:
        if name in updates:
            raise errors.MalformedMessage(f"`{name}` is written by the service alone", {"member": name})


OF_MEMBER: Final = 100
"""Bytes of memory that a member of a state takes beside its text."""

_COPIES: Final = 2  # of a state's objects beside it, while updates wait for the store: as it is written, and the newest
_STEP: Final = 4 * 1024  # bytes by which the memory for answers is counted, so that most calls change nothing
OF_CONTEXT: Final = 2_048  # bytes of memory that an idle context takes beside its state and history
_OF_UNSAVED: Final = 8 * 1024  # bytes that an update which waits takes beside its patch, with the request and its task


def memory_of(size: StateSize) -> int:
    """Return about how many bytes of memory a state of this size takes."""
    return size.size + OF_MEMBER * size.members


@attrs.define(eq=False, repr=False)
class Applied:
    """An update that was applied.

    Attributes:
        updates: the patch.
        version: the context's version after it.
        size: of the state that it leads to. With a store it keeps no state: that with all of them is the newest.
        patch: the size of the patch.
        memory: bytes counted for it while it waits for the store.
        wanted: the version that it was to change; None for any.
        creates: whether it is the first writing of a context that nobody else may have.
    """

    updates: Mapping[str, Any]
    version: int
    size: StateSize
    patch: StateSize
    memory: int = 0
    wanted: int | None = None
    creates: bool = False
    # None without a store to wait for
    _tried: trio.Event | None = attrs.field(default=None, alias="tried")
    _error: errors.AgentToolsError | None = attrs.field(init=False, default=None)

    async def stored(self) -> Applied:
        """Wait until the store has it, and return it. Raises as `ContextActor.update`."""
        if self._tried is not None:
            await self._tried.wait()
        if self._error is not None:
            raise self._error
        return self

    def finish(self, error: errors.AgentToolsError | None = None) -> None:
        """Note that the store has it, or why it does not."""
        self._error = error
        if self._tried is not None:
            self._tried.set()


@attrs.define(eq=False, repr=False)
class ContextsShared:
    """What all contexts of one run share."""

    limits: ContextLimits
    store: ContextStore
    save: Callable[[StoredState], object]  # has the store write one soon
    end: Callable[[Any, str], object]  # ends one for a reason; the table does
    # how many each principal or address has, and which of them gives way to a newcomer's
    shares: Shares[Any] = attrs.field(init=False)
    bounds: StateBounds = attrs.field(init=False)  # of a state
    deadlines: Deadlines = attrs.field(init=False, factory=Deadlines)  # watches their times
    nursery: trio.Nursery | None = attrs.field(init=False, default=None)  # runs their tasks, while the table runs
    durable: bool = attrs.field(init=False)  # whether the store keeps them, so that an update has to wait for it
    updates: int = attrs.field(init=False, default=0)  # how many updates were applied
    replaced: int = attrs.field(init=False, default=0)  # updates that slow watchers got as part of a whole state

    def __attrs_post_init__(self) -> None:
        self.shares = Shares(owner_of=lambda actor: actor.holding.owner.name)
        limits, self.durable = self.limits, self.store.durable
        self.bounds = StateBounds(limits.max_state, limits.max_depth, limits.max_members)


class StateVersion(NamedTuple):
    """The state after so many updates."""

    number: int
    state: dict[str, Any]
    size: StateSize


@attrs.define(eq=False, repr=False)
class StoredState:
    """The state of one context, which a store may keep. `ContextActor` is the context with its life."""

    owner: Owner
    id: str
    _shared: ContextsShared
    holding: MemoryAccount  # counts its memory, with the owner's others
    version: int  # the number of updates so far
    _state: dict[str, Any]
    _size: StateSize
    _ends: float  # when its lifetime is over, on Trio's clock
    created: float  # when it was made, in seconds since 1970
    _history: ToolHistory
    _newest: StateVersion | None = attrs.field(init=False, default=None)  # with what the store does not have yet
    # what calls that are over were answered; None before the first that may come again
    answers: GivenAnswers | None = attrs.field(init=False, default=None)
    ended: str | None = attrs.field(init=False, default=None)  # why it has ended, or None while it lives
    _kept_on: bool = attrs.field(init=False, default=False)  # it ended here, and goes on in the store
    stamp: int = attrs.field(init=False, default=0)  # of what it is in a shared store, as far as that is known here
    recorded: int = attrs.field(init=False, default=0)  # calls in the history that the store does not have yet
    _held: int = attrs.field(init=False, default=0)
    # The oldest first. These are tuples: of the many contexts that are idle none has a list of nothing.
    _unsaved: tuple[Applied, ...] = attrs.field(init=False, default=())
    _waiting: int = attrs.field(init=False, default=0)  # bytes of memory counted for them
    _watches: tuple[WatchChannel[ContextEvent], ...] = attrs.field(init=False, default=())

    # Reading

    @property
    def key(self) -> ContextKey:
        return self.owner, self.id

    @property
    def _latest(self) -> StateVersion:
        """The state with what the store does not have yet."""
        return self._newest or StateVersion(self.version, self._state, self._size)

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
        return {
            "session_id": self.id,
            "permissions": [],
            "tool_history": self._history.read(),
            "intermediate_results": {},
            **self._state,
        }

    def whole(self) -> ContextEvent:
        """Return what a watcher is told of the state as it is."""
        return ContextEvent("state", self.id, self.version, self.snapshot())

    def check(self) -> None:
        """Raise ContextGone if the context has ended."""
        if self.ended is not None:
            raise self._gone()

    def _gone(self) -> errors.AgentToolsError:
        return errors.draining() if self._kept_on else errors.context_gone(self.ended)

    # Changing

    def apply(self, updates: Mapping[str, Any], version: int | None = None, *, of_server: bool = False) -> Applied:
        """Change the state by a JSON merge patch, without waiting: `stored` waits for the store.

        Args:
            updates: the patch. It becomes part of the state: do not change it later.
            version: the version that it changes; None for any.
            of_server: whether it may write every member.

        Raises:
            MalformedMessage: it writes a member of `SERVER_MEMBERS`.
            VersionConflict: the context has another version.
            TooLargeMessage: the patch or the new state is beyond the limits.
            TooMuch: the server has no memory for it, or too many updates wait for the store.
            ContextGone: the context has ended.
        """
        if not of_server:
            refuse_server_members(updates)
        self.check()
        newest, shared = self._latest, self._shared
        if version is not None and version != newest.number:
            raise errors.VersionConflict(f"the context has version {newest.number}", {"version": newest.number})
        if len(self._unsaved) >= shared.limits.max_unsaved:
            raise errors.TooMuch(f"{len(self._unsaved):,} updates of the context wait for the store", retry_after=1)
        state, size, patch = patched(newest.state, newest.size, updates, shared.bounds)
        become = StateVersion(newest.number + 1, state, size)
        growth = memory_of(size) - memory_of(newest.size)
        if not shared.durable:
            self._check_fits(growth)
            self.version, self._state, self._size = become
            self.weigh()
            applied = Applied(updates, become.number, size, patch)
            self._tell(applied)
            return applied
        memory = _OF_UNSAVED + memory_of(patch)
        copied = _COPIES * OF_MEMBER * (size.members - (0 if self._newest is None else newest.size.members))
        self._check_fits(growth + memory + copied)
        self._newest = become
        self._waiting += memory + copied
        return self._store(Applied(updates, become.number, size, patch, memory, version, tried=trio.Event()))

    def _check_fits(self, growth: int) -> None:
        """Raise TooMuch if there is no memory for so many more bytes."""
        if growth > 0 and not self.holding.fits(growth):
            self.holding.refuse("context")
            raise errors.TooMuch("the server has no memory for a larger state", retry_after=self._shared.limits.idle)

    def _tell(self, applied: Applied) -> None:
        """Count an update whose result is the state from now on, and tell the watchers."""
        self._shared.updates += 1
        if self._watches:
            event = ContextEvent("update", self.id, applied.version, applied.updates)
            for watch in self._watches:
                watch.add(event, applied.patch.size)

    def record(self, entry: Mapping[str, Any], asked: bytes | None = None, answer: CallAnswer | None = None) -> None:
        """Add a call to the tool history; no effect once the context has ended. The version stays.

        `entry` has the arguments as received. `asked` is what was asked, in a form that compares; the same request is
        given the answer again.
        """
        limits = self._shared.limits
        if self.ended is not None:
            return
        if asked is not None and answer is not None:
            if self.answers is None:
                self.answers = GivenAnswers()
            self.answers.add(entry["request_id"], asked, answer, limits.answers)
        if limits.history:
            self._history.add(history_entry(entry, limits.history_arguments), limits.history, limits.max_history)
            if self._shared.durable:
                self.recorded += 1
                self._shared.save(self)
        self.weigh()

    def weigh(self) -> None:
        """Count the memory that it takes now."""
        size, members = self._size if self._newest is None else self._newest.size
        held = OF_CONTEXT + size + OF_MEMBER * members + self._waiting + self._history.held
        if self.answers is not None:
            held += (self.answers.held | _STEP - 1) + 1
        if held != self._held:
            self.holding.add(held - self._held)
            self._held = held

    # For the store

    async def save(self) -> None:
        """Wait until the store has this new context. Raises NameTaken, or AgentToolsError if the store failed."""
        self._waiting += _OF_UNSAVED
        newest, tried = self._latest, trio.Event()
        first = Applied({}, newest.number, newest.size, StateSize(), _OF_UNSAVED, creates=True, tried=tried)
        await self._store(first).stored()

    def _store(self, applied: Applied) -> Applied:
        self._unsaved += (applied,)
        self.weigh()
        self._shared.save(self)
        return applied

    @property
    def text_size(self) -> int:
        """About how many bytes it takes as text."""
        return self._latest.size.size + self._history.held

    def to_store(self) -> KeptContext:
        """Return its newest state, for the store."""
        now, newest = time.time(), self._latest
        ends = now + self._ends - trio.current_time()
        # It is saved again before half of that is over: its deadline comes after `idle` seconds at the latest, with
        # other processes after twice as many.
        until = min(ends, now + (2 if self._shared.store.alone else 3) * self._shared.limits.idle)
        history = tuple(self._history.entries)
        of = self.owner, self.id, newest.number, newest.state, history, self.created, ends, until, self.stamp
        return KeptContext(*of)

    def note_stored(self, one: KeptContext, stamp: int, recorded: int) -> None:
        """Make the updates up to this version the state: the store has them, with this stamp. Never raises.

        `recorded` says how many calls were in the history by then that the store did not have.
        """
        self.stamp = stamp
        self.recorded -= recorded
        state = cast("dict[str, Any]", one.state)  # as `to_store` returned it
        stored = [update for update in self._unsaved if update.version <= one.version]
        self._unsaved = self._unsaved[len(stored) :]
        for update in stored:
            if update.version > self.version:
                self.version, self._state, self._size = update.version, state, update.size
                self._tell(update)
            self._waiting -= update.memory
            update.finish()
        if not self._unsaved:
            self._newest, self._waiting = None, 0
        self.weigh()

    def note_failed(self, unsure: bool = False) -> bool:
        """Forget the updates that the store does not have: it failed. Return whether to write the context again.

        It is `unsure` whether the store has them if it was lost meanwhile.
        """
        what = "it may or may not have been kept" if unsure else "nothing was changed"
        self._fail_unsaved(lambda: errors.AgentToolsError(f"the service could not keep the update; {what}"))
        return self.ended is None

    @property
    def waits(self) -> bool:
        """Whether updates wait for the store."""
        return bool(self._unsaved)

    def build_on(self, kept: KeptContext, size: StateSize) -> None:
        """Become what another process made of it, with what the store does not have yet on top of that.

        An update that named a version is refused if it would change another one now.
        """
        unsaved, limits, before = self._unsaved, self._shared.limits, self._history
        self.version, self._state, self._size, self.stamp = kept.version, dict(kept.state), size, kept.stamp
        self.created, self._ends = kept.created, trio.current_time() + kept.ends - time.time()
        self._history = history = ToolHistory(kept.history)
        for entry in before.entries[len(before.entries) - self.recorded :]:
            history.add(entry, limits.history, limits.max_history)
        self._none_waits()
        for watch in self._watches:
            watch.start_over()
        for update in unsaved:
            self._apply_again(update)
        if self.recorded and not self._unsaved:
            self._shared.save(self)

    def _apply_again(self, update: Applied) -> None:
        try:
            if update.creates:
                raise errors.NameTaken("there is a context with this id")
            again = self.apply(update.updates, update.wanted, of_server=True)
        except errors.AgentToolsError as error:
            update.finish(error)
        else:
            update.version, update.size, update.memory = again.version, again.size, again.memory
            self._unsaved = (*self._unsaved[:-1], update)

    def _none_waits(self) -> None:
        self._unsaved, self._newest, self._waiting = (), None, 0
        self.weigh()

    def _fail_unsaved(self, error: Callable[[], errors.AgentToolsError]) -> None:
        unsaved = self._unsaved
        self._none_waits()
        for one in unsaved:
            one.finish(error())
