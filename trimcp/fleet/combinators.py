"""Several calls at once: the first good answer, a second attempt after a while, a bounded map, every outcome.

They take any async callables, most often calls of tools. What is no longer wanted is cancelled (a call at its server,
too, so that its handler stops) and waited for. A failure leaves as itself; an exception group appears only where two
attempts really failed. Cancelling the caller cancels everything.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Generic, Literal, TypeVar, cast, overload

import attrs
import trio

from trimcp.errors import NoGoodAnswer
from trimcp.session.scopes import open_service_nursery, parted, reconciled, sole
from trimcp.values import valued

__all__ = ["Mapped", "Outcome", "call_all", "first_of", "hedge", "map_bounded"]

T = TypeVar("T")
KeyT = TypeVar("KeyT")
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

log: logging.Logger = logging.getLogger("trimcp.client")

_LOST_RACE = "another attempt was answered first"


# The first good answer


async def first_of(*attempts: Callable[[], Awaitable[T]], good: Callable[[T], bool] | None = None) -> T:
    """Make all attempts at once and return the first good answer: `await first_of(partial(a.call_tool, "x"), ...)`.

    The others are then cancelled, at their servers too, and waited for; how they end matters to nobody any more.
    Cancelling it cancels all of them.

    Args:
        attempts: functions without arguments, at least one.
        good: whether an answer is what is wanted, such as `lambda result: not result.is_error`; by default any is.

    Raises:
        ValueError: there is no attempt to make.
        NoGoodAnswer: all were answered, and no answer was good.
        Exception: what the only failing attempt raised, if none was answered well; an `ExceptionGroup` of what they
            raised where several failed.
    """
    return await _race(attempts, 0.0, good)


async def hedge(*attempts: Callable[[], Awaitable[T]], after: float, good: Callable[[T], bool] | None = None) -> T:
    """Make an attempt, and another one if there is no answer `after` so many seconds; return the first good answer.

    A delay at which one call in twenty is still under way (its 95th percentile) takes the long tail off the waiting
    for a twentieth more work. An attempt that fails is followed by the next one at once. The losers are cancelled, at
    their servers too, and waited for. The call may be carried out more than once, so it should be one that only reads.

    Args:
        attempts: functions without arguments, in the order in which they are begun. A single one is made twice.
        after: seconds between the beginnings.
        good: as for `first_of`.

    Raises:
        ValueError: as `first_of`.
        NoGoodAnswer, Exception: as `first_of`, once all attempts were made.
    """
    return await _race(attempts * 2 if len(attempts) == 1 else attempts, after, good)


async def _race(attempts: tuple[Callable[[], Awaitable[T]], ...], delay: float, good: Callable[[T], bool] | None) -> T:
    if not attempts:
        raise ValueError("there has to be at least one attempt")
    race = _Race[T](good)
    try:
        async with trio.open_nursery() as nursery:
            for attempt in attempts:
                failed = trio.Event()
                nursery.start_soon(race.run, attempt, failed, nursery.cancel_scope)
                if delay:
                    with trio.move_on_after(delay):
                        await failed.wait()
    except BaseExceptionGroup as group:  # no attempt's failure comes here, so it is an interrupt
        raise sole(group) from None
    return race.outcome()


@attrs.define(eq=False, repr=False)
class _Race(Generic[T]):
    """Attempts under way, and what came of them."""

    good: Callable[[T], bool] | None
    _won: list[T] = attrs.field(init=False, factory=list)
    _answers: list[T] = attrs.field(init=False, factory=list)
    _failures: list[Exception] = attrs.field(init=False, factory=list)

    async def run(self, attempt: Callable[[], Awaitable[T]], failed: trio.Event, scope: trio.CancelScope) -> None:
        """Make an attempt: the first good answer cancels `scope`, any other end sets `failed`."""
        try:
            answer = await attempt()
            if self.good is not None and not self.good(answer):
                self._answers.append(answer)
            elif not self._won:
                self._won.append(answer)
                scope.cancel(reason=_LOST_RACE)
                return
        except BaseException as error:  # a nursery of the attempt's may have put its failure beside our cancellation
            crash, cancelled = parted(error)
            if crash is not None and not isinstance(crash, Exception):
                raise
            if crash is not None:
                self._fail(crash)
            if cancelled is not None:
                raise cancelled from None
        failed.set()

    def _fail(self, error: Exception) -> None:
        if self._won:
            log.debug("an attempt that was too late failed", exc_info=error)
        else:
            self._failures.append(error)

    def outcome(self) -> T:
        """Return what won, or raise what went wrong."""
        if self._won:
            return self._won[0]
        failures = list(self._failures)
        if self._answers:
            failures.append(NoGoodAnswer("no answer was as it was wanted", self._answers))
        try:
            raise failures[0] if len(failures) == 1 else ExceptionGroup("every attempt failed", failures)
        finally:
            self._failures.clear()  # a frame and what was raised from it would keep each other alive
            del failures


# Every outcome


@attrs.frozen
@valued
class Outcome(Generic[KeyT, ResultT]):
    """What came of one of several calls.

    Attributes:
        key: which one it was: an item of `map_bounded`, a name of `call_all`.
        value: what it returned, None if it failed.
        error: what it raised, None if it did not fail.
    """

    key: KeyT
    value: ResultT | None = None
    error: Exception | None = None

    @property
    def ok(self) -> bool:
        """Whether it returned."""
        return self.error is None

    def result(self) -> ResultT:
        """Return what it returned, or raise what it raised."""
        if self.error is not None:
            raise self.error
        return cast("ResultT", self.value)


async def _outcome(key: KeyT, function: Callable[[], Awaitable[ResultT]]) -> Outcome[KeyT, ResultT]:
    """Call, and return what came of it; only a cancellation and what is no `Exception` pass."""
    try:
        return Outcome(key, await function())
    except Exception as error:  # whatever it is, the caller gets it with the others' outcomes
        return Outcome(key, None, error)


async def call_all(
    calls: Mapping[KeyT, Callable[[], Awaitable[ResultT]]], *, most: int | None = None
) -> dict[KeyT, Outcome[KeyT, ResultT]]:
    """Make all calls and return what came of each, by its key and in the order of `calls`; none ends another.

    Cancelling it cancels those under way, at their servers too.

    Args:
        calls: functions without arguments by name, such as
            `{name: partial(group[name].call_tool, "status") for name in group}`.
        most: how many are under way at a time; by default all of them.

    Raises:
        ValueError: `most` is less than 1.
    """
    if most is not None and most < 1:
        raise ValueError("at least one call has to be made at a time")
    found: dict[KeyT, Outcome[KeyT, ResultT]] = {}
    limiter = trio.CapacityLimiter(max(1, len(calls)) if most is None else most)

    async def make(key: KeyT, function: Callable[[], Awaitable[ResultT]]) -> None:
        async with limiter:
            found[key] = await _outcome(key, function)

    try:
        async with trio.open_nursery() as nursery:
            for key, function in calls.items():
                nursery.start_soon(make, key, function)
    except BaseExceptionGroup as group:  # no call's failure comes here, so it is an interrupt
        raise sole(group) from None
    return {key: found[key] for key in calls}


# A bounded map


@overload
def map_bounded(
    function: Callable[[ItemT], Awaitable[ResultT]],
    items: Iterable[ItemT],
    *,
    most: int,
    ordered: bool = ...,
    collect: Literal[False] = ...,
) -> AbstractAsyncContextManager[Mapped[ResultT]]: ...
@overload
def map_bounded(
    function: Callable[[ItemT], Awaitable[ResultT]],
    items: Iterable[ItemT],
    *,
    most: int,
    ordered: bool = ...,
    collect: Literal[True],
) -> AbstractAsyncContextManager[Mapped[Outcome[ItemT, ResultT]]]: ...
def map_bounded(
    function: Callable[[Any], Awaitable[Any]],
    items: Iterable[Any],
    *,
    most: int,
    ordered: bool = True,
    collect: bool = False,
) -> AbstractAsyncContextManager[Mapped[Any]]:
    """Call a function for each item, some at a time, and yield the results as they are read:

        async with map_bounded(session.read_resource, uris, most=8) as results:
            async for result in results: ...

    `items` is read only as far as it is worked on, so it may be endless. At most `most` items are under way or done
    and not yet read: who reads slowly makes the work wait. Leaving the block early cancels what is under way, at its
    servers too, and waits for it.

    Args:
        function: called with one item.
        items: what it is called with.
        most: how many at a time.
        ordered: results come in the order of the items; if not, as they come.
        collect: yield an `Outcome` for each item, failed or not. If not, the first failure cancels the rest and is
            raised where the results are read, or on leaving if they are read no more.

    Raises:
        ValueError: `most` is less than 1.
    """
    if most < 1:
        raise ValueError("at least one item has to be worked on at a time")
    return _mapping(function, iter(items), most, ordered, collect)


@asynccontextmanager
async def _mapping(
    function: Callable[[Any], Awaitable[Any]], items: Iterator[Any], most: int, ordered: bool, collect: bool
) -> AsyncIterator[Mapped[Any]]:
    mapped: Mapped[Any] = Mapped(function, items, most, ordered, collect)
    try:
        async with open_service_nursery() as nursery:
            nursery.start_soon(mapped._feed)
            yield mapped
    except BaseException as error:  # whatever leaves the block, an item's failure must not be lost with it
        late = mapped.unseen
        if late is None or parted(error)[0] is None:
            raise
        both = reconciled("the body and an item of its map both failed", late, error)
        assert both is not None
        raise both from None
    if mapped.unseen is not None:
        raise mapped.unseen


@attrs.define(eq=False, repr=False)
class _Slot:
    """One item's place."""

    done: bool = False
    result: Any = None


@attrs.define(eq=False, repr=False)
class Mapped(Generic[ResultT]):
    """The results of `map_bounded` as they come; iterate over it, or `receive` them one by one."""

    _function: Callable[[Any], Awaitable[Any]]
    _items: Iterator[Any]
    _most: int
    _ordered: bool
    _collect: bool
    _slots: deque[_Slot] = attrs.field(init=False, factory=deque)
    _taken: int = attrs.field(init=False, default=0)
    _ended: bool = attrs.field(init=False, default=False)
    _raised: bool = attrs.field(init=False, default=False)
    _failure: Exception | None = attrs.field(init=False, default=None)
    _scope: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    _reading: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    _feeding: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)

    async def receive(self) -> ResultT:
        """Wait for the next result. Cancelling it loses nothing.

        Raises:
            trio.EndOfChannel: that was all.
            Exception: what the function or `items` raised; the rest was cancelled.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            if self._failure is not None:
                self._raised = True
                raise self._failure
            if (found := self._next()) is not None:
                break
            if self._ended and not self._taken:
                raise trio.EndOfChannel
            await self._reading.park()
        self._taken -= 1
        self._feeding.unpark()
        await trio.lowlevel.cancel_shielded_checkpoint()
        return cast("ResultT", found.result)

    @property
    def unseen(self) -> Exception | None:
        """The failure that cancelled the rest, if no reader was told of it yet; else None."""
        return None if self._raised else self._failure

    def _next(self) -> _Slot | None:
        """Take the slot to be read next, if it is done."""
        if self._slots and self._slots[0].done:
            return self._slots.popleft()
        return None

    def __aiter__(self) -> Mapped[ResultT]:
        return self

    async def __anext__(self) -> ResultT:
        try:
            return await self.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None

    async def _feed(self) -> None:
        """Begin with item after item, as long as there is room and nothing failed."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                while True:
                    while self._taken >= self._most:
                        await self._feeding.park()
                    try:
                        item = next(self._items)
                    except StopIteration:
                        break
                    except Exception as error:  # the caller's own iterator may raise any; who reads is told
                        self._fail(error)
                        break
                    self._taken += 1
                    slot = _Slot()
                    if self._ordered:
                        self._slots.append(slot)
                    nursery.start_soon(self._run, slot, item)
                    await trio.lowlevel.checkpoint()
                self._ended = True
                self._reading.unpark_all()

    async def _run(self, slot: _Slot, item: Any) -> None:
        outcome = await _outcome(item, lambda: self._function(item))
        if outcome.error is not None and not self._collect:
            self._fail(outcome.error)
            return
        slot.result = outcome if self._collect else outcome.value
        slot.done = True
        if not self._ordered:
            self._slots.append(slot)
        self._reading.unpark_all()

    def _fail(self, error: Exception) -> None:
        """Note the first failure and cancel the rest."""
        if self._failure is None:
            self._failure = error
            self._scope.cancel(reason="another item failed")
        else:
            log.debug("another item failed, too, when the rest was cancelled", exc_info=error)
        self._reading.unpark_all()
