"""Several calls at once: who wins, who is cancelled (at its server too) and waited for, and what leaves."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import attrs
import pytest
import trio
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

import trimcp
from tests.peers.serving import connected as connected_over
from tests.peers.states import until
from trimcp import CancelReason, NoGoodAnswer
from trimcp.fleet import Outcome, call_all, first_of, hedge, map_bounded
from trimcp.testing import connected, every_revision


@attrs.define(eq=False)
class Slow:
    """A server with tools that take their time, and how their handlers ended."""

    server: trimcp.Server[Any] = attrs.field(factory=lambda: trimcp.Server("slow", "1"))
    running: int = 0
    began: int = 0
    most: int = 0
    ended: list[tuple[CancelReason | None, str | None]] = attrs.field(factory=list)

    async def idle(self) -> None:
        """Wait until every handler that began has ended, where a network is between."""
        await until(lambda: not self.running and len(self.ended) >= self.began)

    def __attrs_post_init__(self) -> None:
        @self.server.tool
        async def work(seconds: float, *, ctx: trimcp.Context[Any]) -> str:
            self.began += 1
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                await trio.sleep(seconds)
            finally:
                self.running -= 1
                self.ended.append((ctx.cancel_reason, ctx.cancel_detail))
            return f"{seconds:g}"

        @self.server.tool
        async def fail() -> str:
            raise trimcp.ToolError("no")


def text(result: trimcp.CallToolResult) -> str:
    (content,) = result.content
    assert isinstance(content, trimcp.Text)
    return content.text


def working(session: trimcp.ClientSession, seconds: float) -> Callable[[], Awaitable[trimcp.CallToolResult]]:
    return partial(session.call_tool, "work", {"seconds": seconds})


async def after(seconds: float, value: Any) -> Any:
    """Return a value, or raise it if it is an exception, so many seconds later."""
    await trio.sleep(seconds)
    if isinstance(value, BaseException):
        raise value
    return value


@asynccontextmanager
async def stopped_after(seconds: float) -> AsyncIterator[trio.CancelScope]:
    """Cancel the body, for a reason: a deadline would travel to the server, which would then stop by itself."""
    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()

        async def stop() -> None:
            await trio.sleep(seconds)
            scope.cancel(reason="enough")

        nursery.start_soon(stop)
        with scope:
            yield scope


# The first good answer


@every_revision
@pytest.mark.parametrize("framed", [False, True], ids=["direct", "framed"])
async def test_the_losers_of_a_race_are_cancelled_on_the_wire(
    revision: trimcp.Revision, framed: bool, autojump_clock: Any
) -> None:
    slow = Slow()
    async with connected(slow.server, revision=revision, framed=framed) as session:
        result = await first_of(*(working(session, seconds) for seconds in (30, 2, 20)))
        assert text(result) == "2"
        assert trio.current_time() < 3
        await wait_all_tasks_blocked()
        assert slow.running == 0
        lost = (CancelReason.PEER, "another attempt was answered first")
        assert slow.ended == [(None, None), lost, lost]
        assert session.peer is not None
        assert session.peer.statistics().running == 0
        assert session.statistics().pending == 0


@pytest.mark.parametrize(
    ("revision", "reason"),
    [(trimcp.LATEST, CancelReason.DISCONNECTED), (trimcp.LATEST_LEGACY, CancelReason.PEER)],
    ids=["modern", "legacy"],
)
async def test_the_losers_of_a_race_are_cancelled_over_http(revision: trimcp.Revision, reason: CancelReason) -> None:
    slow = Slow()
    client = trimcp.Client("racer", "1")
    with trio.fail_after(60):
        async with connected_over(slow.server, "http", client, revision=revision) as session:
            result = await first_of(working(session, 600), working(session, 0.05), working(session, 600))
            assert text(result) == "0.05"
            await slow.idle()
    assert {why for why, _ in slow.ended} == {None, reason}
    assert len(slow.ended) == 3


async def test_a_failure_is_no_good_answer_and_alone_leaves_as_itself(autojump_clock: Any) -> None:
    assert await first_of(partial(after, 1, OSError()), partial(after, 2, "good")) == "good"
    with pytest.raises(OSError, match=r"^mine$"):
        await first_of(partial(after, 1, OSError("mine")))
    with pytest.raises(ExceptionGroup) as caught:
        await first_of(partial(after, 2, OSError("second")), partial(after, 1, KeyError("first")))
    assert [type(error) for error in caught.value.exceptions] == [KeyError, OSError]
    with pytest.raises(ValueError, match="at least one"):
        await first_of()


async def test_what_good_means_is_said_by_the_caller(autojump_clock: Any) -> None:
    slow = Slow()
    async with connected(slow.server) as session:
        attempts = [partial(session.call_tool, "fail"), working(session, 5)]
        assert (await first_of(*attempts)).is_error
        assert text(await first_of(*attempts, good=lambda result: not result.is_error)) == "5"
    with pytest.raises(NoGoodAnswer, match="as it was wanted") as caught:
        await first_of(partial(after, 2, 4), partial(after, 1, 2), good=lambda number: number > 9)
    assert caught.value.answers == (2, 4)
    with pytest.raises(ExceptionGroup) as both:
        await first_of(partial(after, 2, 4), partial(after, 1, OSError()), good=lambda number: False)
    assert [type(error) for error in both.value.exceptions] == [OSError, NoGoodAnswer]


async def test_losers_are_waited_for_and_how_they_end_no_longer_matters(autojump_clock: Any) -> None:
    ended: list[float] = []

    async def stubborn() -> str:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(7)
            ended.append(trio.current_time())
            raise OSError("too late")

    assert await first_of(stubborn, partial(after, 1, "won")) == "won"
    assert ended == [trio.current_time()]
    assert 8 <= trio.current_time() < 9


async def test_cancelling_a_race_cancels_all_and_passes_through(autojump_clock: Any) -> None:
    slow = Slow()
    async with connected(slow.server) as session:
        async with stopped_after(3) as scope:
            await first_of(working(session, 30), working(session, 40))
        assert scope.cancelled_caught
        await wait_all_tasks_blocked()
        assert slow.ended == [(CancelReason.PEER, "enough")] * 2
        with trio.CancelScope() as scope:
            scope.cancel()
            await first_of(working(session, 1))
        assert scope.cancelled_caught


async def test_an_interrupt_leaves_a_race_as_itself(autojump_clock: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        await first_of(partial(after, 1, KeyboardInterrupt()), trio.sleep_forever)
    with pytest.raises(KeyboardInterrupt):
        await call_all({1: partial(after, 1, KeyboardInterrupt()), 2: trio.sleep_forever})


# Hedging


@every_revision
async def test_a_second_attempt_comes_after_a_delay_and_the_loser_is_cancelled(
    revision: trimcp.Revision, autojump_clock: Any
) -> None:
    slow = Slow()
    async with connected(slow.server, revision=revision) as session:
        start = trio.current_time()
        result = await hedge(working(session, 60), working(session, 3), after=2)
        assert text(result) == "3"
        assert trio.current_time() - start == pytest.approx(5, abs=0.1)
        await wait_all_tasks_blocked()
        assert slow.ended == [(None, None), (CancelReason.PEER, "another attempt was answered first")]


async def test_a_quick_answer_needs_no_second_attempt(autojump_clock: Any) -> None:
    slow = Slow()
    async with connected(slow.server) as session:
        assert text(await hedge(working(session, 1), after=2)) == "1"
        assert slow.began == 1
        assert text(await hedge(working(session, 3), after=2)) == "3"
        assert slow.began == 3  # a single attempt is made twice
        await wait_all_tasks_blocked()
        assert slow.running == 0


async def test_an_attempt_that_fails_is_followed_at_once(autojump_clock: Any) -> None:
    start = trio.current_time()
    assert await hedge(partial(after, 1, OSError()), partial(after, 1, "second"), after=60) == "second"
    assert trio.current_time() - start == pytest.approx(2, abs=0.1)
    with pytest.raises(ExceptionGroup):
        await hedge(partial(after, 1, OSError()), after=60)
    assert trio.current_time() - start == pytest.approx(4, abs=0.1)


# Every outcome


async def test_every_outcome_is_told(autojump_clock: Any) -> None:
    boom = OSError("boom")
    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "slow": partial(after, 3, 1),
        "bad": partial(after, 1, boom),
        "fast": partial(after, 2, 2),
    }
    outcomes = await call_all(calls)
    assert outcomes == {"slow": Outcome("slow", 1), "bad": Outcome("bad", None, boom), "fast": Outcome("fast", 2)}
    assert list(outcomes) == list(calls)
    assert outcomes["slow"].ok
    assert outcomes["slow"].result() == 1
    assert not outcomes["bad"].ok
    with pytest.raises(OSError, match="boom"):
        outcomes["bad"].result()
    assert trio.current_time() == pytest.approx(3, abs=0.1)
    await call_all(calls, most=1)
    assert trio.current_time() == pytest.approx(9, abs=0.1)
    assert await call_all({}) == {}
    with pytest.raises(ValueError, match="at least one"):
        await call_all(calls, most=0)


async def test_cancelling_all_calls_reaches_their_servers(autojump_clock: Any) -> None:
    slow = Slow()
    async with connected(slow.server) as session:
        async with stopped_after(1) as scope:
            await call_all({n: working(session, 60) for n in range(3)})
        assert scope.cancelled_caught
        await wait_all_tasks_blocked()
        assert [why for why, _ in slow.ended] == [CancelReason.PEER] * 3


# A bounded map


@pytest.mark.parametrize("ordered", [True, False])
async def test_a_map_is_bounded_and_its_order_is_chosen(ordered: bool, autojump_clock: Any) -> None:
    slow = Slow()
    waits = [5, 1, 4, 2, 3, 1.5]

    async with connected(slow.server) as session:

        async def work(seconds: float) -> str:
            return text(await session.call_tool("work", {"seconds": seconds}))

        async with map_bounded(work, waits, most=3, ordered=ordered) as results:
            found = [result async for result in results]
    assert sorted(found) == sorted(f"{wait:g}" for wait in waits)
    assert found == ([f"{wait:g}" for wait in waits] if ordered else ["1", "2", "4", "5", "1.5", "3"])
    assert slow.most == 3
    assert slow.began == len(waits)


async def test_a_slow_reader_makes_the_work_wait_so_the_items_may_be_endless(autojump_clock: Any) -> None:
    taken: list[int] = []

    def numbers() -> Iterator[int]:
        for number in itertools.count():
            taken.append(number)
            yield number

    async with map_bounded(partial(after, 0.1), numbers(), most=4) as results:
        await trio.sleep(1000)
        assert taken == [0, 1, 2, 3]
        assert [await results.receive() for _ in range(10)] == list(range(10))
        await trio.sleep(1000)
        assert len(taken) == 14
    assert len(taken) == 14


@pytest.mark.parametrize("ordered", [True, False])
async def test_the_first_failure_cancels_the_rest(ordered: bool, autojump_clock: Any) -> None:
    slow = Slow()
    found: list[Any] = []
    async with connected(slow.server) as session:

        async def work(seconds: float) -> str:
            result = await session.call_tool("work", {"seconds": seconds})
            if seconds == 2:
                raise OSError("the second")
            return text(result)

        with pytest.raises(OSError, match=r"^the second$"):
            async with map_bounded(work, itertools.chain([1, 2], itertools.repeat(60)), most=5, ordered=ordered) as all:
                found += [await all.receive()]
                found += [result async for result in all]
        await wait_all_tasks_blocked()
        assert found == ["1"]
        assert trio.current_time() < 3
        assert slow.running == 0
        assert [why for why, _ in slow.ended] == [None, None, *[CancelReason.PEER] * (slow.began - 2)]
        assert slow.ended[-1][1] == "another item failed"


async def test_failures_are_collected_if_asked_for(autojump_clock: Any) -> None:
    odd = OSError("odd")

    async def work(number: int) -> int:
        return await after(1, odd if number % 2 else number)

    async with map_bounded(work, range(4), most=2, collect=True) as outcomes:
        found = [outcome async for outcome in outcomes]
    assert found == [Outcome(0, 0), Outcome(1, None, odd), Outcome(2, 2), Outcome(3, None, odd)]


async def test_a_failure_nobody_read_is_raised_on_leaving_beside_that_of_the_body(autojump_clock: Any) -> None:
    failing = partial(map_bounded, partial(after, 1), [OSError("item")], most=1)
    with pytest.raises(OSError, match="item"):
        async with failing():
            await trio.sleep(5)
    with pytest.raises(BaseExceptionGroup) as both:
        async with failing():
            await trio.sleep(5)
            raise KeyError("body")
    assert {type(error) for error in both.value.exceptions} == {OSError, KeyError}
    with pytest.raises(KeyError, match="body"):
        async with map_bounded(partial(after, 1), [1], most=1):
            raise KeyError("body")
    with trio.move_on_after(3) as scope:
        async with failing():
            await trio.sleep(5)
    assert scope.cancelled_caught


async def test_items_that_fail_end_the_map(autojump_clock: Any) -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise LookupError("no more")

    with pytest.raises(LookupError, match="no more"):
        async with map_bounded(partial(after, 1), broken(), most=3) as results:
            async for _ in results:
                pass


async def test_leaving_a_map_early_cancels_what_is_under_way(autojump_clock: Any) -> None:
    slow = Slow()
    async with connected(slow.server) as session:

        async def work(seconds: float) -> str:
            return text(await session.call_tool("work", {"seconds": seconds}))

        async with map_bounded(work, [1, 60, 60], most=3) as results:
            async for result in results:
                assert result == "1"
                break
        await wait_all_tasks_blocked()
        assert [why for why, _ in slow.ended] == [None, CancelReason.PEER, CancelReason.PEER]
        with trio.move_on_after(1) as scope:
            async with map_bounded(work, itertools.repeat(60), most=2) as results:
                await results.receive()
        assert scope.cancelled_caught
        await wait_all_tasks_blocked()
        assert slow.running == 0
    with pytest.raises(ValueError, match="at least one"):
        map_bounded(work, [], most=0)


async def test_receiving_is_a_checkpoint_and_loses_nothing_when_cancelled(autojump_clock: Any) -> None:
    async with map_bounded(partial(after, 1), [1, 2], most=2) as results:
        with trio.move_on_after(0.5) as scope:
            await results.receive()
        assert scope.cancelled_caught
        await trio.sleep(2)
        with assert_checkpoints():
            assert await results.receive() == 1
        with trio.CancelScope() as scope:
            scope.cancel()
            await results.receive()
        assert scope.cancelled_caught
        assert await results.receive() == 2
        with pytest.raises(trio.EndOfChannel), assert_checkpoints():
            await results.receive()
