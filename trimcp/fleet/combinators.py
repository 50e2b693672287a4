"""Several calls at once: the first good answer, a second attempt after a while, a bounded map, every outcome.

They take async callables, usually calls of tools. A call that is no longer needed is cancelled, also at its server, and
awaited. A single failure is raised unchanged; an exception group is raised only if several attempts failed. Cancelling
the caller cancels everything.
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
from trimcp.support.cleaning import log_crash
from trimcp.support.nurseries import merge_failures, open_service_nursery, split_cancelled, unwrap_single
from trimcp.support.slotted import valued

T = TypeVar("T")
KeyT = TypeVar("KeyT")
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

log: logging.Logger = logging.getLogger("trimcp.client")

_LATE = "another attempt was answered first"


# The first good answer


async def first_of(*attempts: Callable[[], Awaitable[T]], good: Callable[[T], bool] | None = None) -> T:
    """Make all attempts at once and return the first good answer: `await first_of(partial(a.call_tool, "x"), ...)`.

    The others are then cancelled, also at their servers, and awaited; their failures are only logged. Cancelling this
    cancels all of them.

    Args:
        attempts: functions without arguments, at least one.
        good: returns whether an answer is good, such as `lambda result: not result.is_error`; by default any is.

    Raises:
        ValueError: no attempts are given.
        NoGoodAnswer: all attempts returned, and no answer was good.
        Exception: there was no good answer, and this attempt failed; an `ExceptionGroup` if several failed.
    """
    return await _race(attempts, 0.0, good)


async def hedge(*attempts: Callable[[], Awaitable[T]], after: float, good: Callable[[T], bool] | None = None) -> T:
    """Make an attempt, and another one if there is no answer after `after` seconds; return the first good answer.

    With the 95th percentile of the call's time as the delay, one call in twenty is made twice. After a failed attempt
    the next one begins at once. The others are cancelled, also at their servers, and awaited. The call may be carried
    out more than once, so it should be one that only reads.

    Args:
        attempts: functions without arguments, in the order in which they begin. A single one is made twice.
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
    answers: list[T] = []  # at most one of them is good
    rejected: list[T] = []
    failures: list[Exception] = []

    async def make(attempt: Callable[[], Awaitable[T]], failed: trio.Event, scope: trio.CancelScope) -> None:
        try:
            answer = await attempt()
            if good is not None and not good(answer):
                rejected.append(answer)
            elif not answers:
                answers.append(answer)
                scope.cancel(reason=_LATE)
                return
        except BaseException as error:  # a nursery of the attempt may have grouped its failure with our cancellation
            crash, cancelled = split_cancelled(error)
            if crash is not None and not isinstance(crash, Exception):
                raise
            if crash is not None and answers:
                log_crash(log, crash, "an attempt that was too late failed", level=logging.DEBUG)
            elif crash is not None:
                failures.append(crash)
            if cancelled is not None:
                raise cancelled from None
        failed.set()

    try:
        async with trio.open_nursery() as nursery:
            for attempt in attempts:
                failed = trio.Event()
                nursery.start_soon(make, attempt, failed, nursery.cancel_scope)
                if delay:
                    with trio.move_on_after(delay):
                        await failed.wait()
    except BaseExceptionGroup as group:  # failures of attempts are kept elsewhere, so it is an interrupt
        raise unwrap_single(group) from None
    if answers:
        return answers[0]
    if rejected:
        failures.append(NoGoodAnswer("no answer was as it was wanted", rejected))
    try:
        raise failures[0] if len(failures) == 1 else ExceptionGroup("every attempt failed", failures)
    finally:
        failures.clear()  # a frame and the exception raised from it would keep each other alive


# Every outcome


@attrs.frozen
@valued
class Outcome(Generic[KeyT, ResultT]):
    """The result or the failure of one of several calls.

    Attributes:
        key: which call: an item of `map_bounded`, a name of `call_all`.
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
    """Call, and return the result or the failure; a cancellation and other non-`Exception`s are raised."""
    try:
        return Outcome(key, await function())
    except Exception as error:  # any failure: the caller gets it with the other outcomes
        return Outcome(key, None, error)


async def call_all(
    calls: Mapping[KeyT, Callable[[], Awaitable[ResultT]]], *, most: int | None = None
) -> dict[KeyT, Outcome[KeyT, ResultT]]:
    """Make all calls and return each one's outcome by its key, in the order of `calls`; no failure ends another call.

    Cancelling this cancels the calls in progress, also at their servers.

    Args:
        calls: functions without arguments by name, such as
            `{name: partial(group[name].call_tool, "status") for name in group}`.
        most: how many run at a time; by default all of them.

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
    except BaseExceptionGroup as group:  # failures of calls are kept elsewhere, so it is an interrupt
        raise unwrap_single(group) from None
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

    `items` is read as the work proceeds, so it may be endless. At most `most` items are in progress or have a result
    that was not received yet: a slow reader makes the work wait. Leaving the block early cancels the calls in progress,
    also at their servers, and waits for them.

    Args:
        function: called with one item.
        items: the arguments.
        most: how many at a time.
        ordered: return the results in the order of the items; if not, in the order in which they are ready.
        collect: yield an `Outcome` for each item, failed or not. If not, the first failure cancels the rest and is
            raised by the next `receive`, or on leaving the block.

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
    except BaseException as error:  # after any exception, an item's failure must not be lost
        late = mapped.unseen
        if late is None or split_cancelled(error)[0] is None:
            raise
        both = merge_failures("the body and an item of its map both failed", late, error)
        assert both is not None
        raise both from None
    if mapped.unseen is not None:
        raise mapped.unseen


@attrs.define(eq=False, repr=False)
class _Slot:
    """The place of one item's result."""

    done: bool = False
    result: Any = None


@attrs.define(eq=False, repr=False)
class Mapped(Generic[ResultT]):
    """The results of `map_bounded`; iterate over it, or `receive` them one by one."""

    _function: Callable[[Any], Awaitable[Any]]
    _items: Iterator[Any]
    _most: int
    _ordered: bool
    _collect: bool
    _slots: deque[_Slot] = attrs.field(init=False, factory=deque)
    _room: trio.Semaphore = attrs.field(init=False)
    _ended: bool = attrs.field(init=False, default=False)
    _raised: bool = attrs.field(init=False, default=False)
    _failure: Exception | None = attrs.field(init=False, default=None)
    _scope: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    _reading: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)

    def __attrs_post_init__(self) -> None:
        self._room = trio.Semaphore(self._most)

    async def receive(self) -> ResultT:
        """Wait for the next result. Cancelling this loses nothing.

        Raises:
            trio.EndOfChannel: there are no more results.
            Exception: raised by the function or by `items`; the rest was cancelled.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            if self._failure is not None:
                self._raised = True
                raise self._failure
            if self._slots and self._slots[0].done:
                break
            if self._ended and self._room.value == self._most:
                raise trio.EndOfChannel
            await self._reading.park()
        found = self._slots.popleft()
        self._room.release()
        await trio.lowlevel.cancel_shielded_checkpoint()
        return cast("ResultT", found.result)

    @property
    def unseen(self) -> Exception | None:
        """The failure that cancelled the rest, if no `receive` has raised it yet; else None."""
        return None if self._raised else self._failure

    def __aiter__(self) -> Mapped[ResultT]:
        return self

    async def __anext__(self) -> ResultT:
        try:
            return await self.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None

    async def _feed(self) -> None:
        """Start item after item, as long as there is room and nothing has failed."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                while not self._ended:
                    await self._room.acquire()
                    try:
                        item = next(self._items)
                    except Exception as error:  # the end, or the failure of the caller's own iterator
                        self._ended = True
                        self._room.release()
                        if not isinstance(error, StopIteration):
                            self._fail(error)
                    else:
                        slot = _Slot()
                        if self._ordered:
                            self._slots.append(slot)
                        nursery.start_soon(self._run, slot, item)
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
        """Store the first failure and cancel the rest."""
        if self._failure is None:
            self._failure = error
            self._scope.cancel(reason="another item failed")
        else:
            log_crash(log, error, "another item failed, too, when the rest was cancelled", level=logging.DEBUG)
        self._reading.unpark_all()
