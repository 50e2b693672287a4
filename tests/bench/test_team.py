"""Several generators as one: who may join, what each does, and that nothing of it is lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random

import attrs
import pytest
import trio
import trio.testing

from tests.bench.test_regression import a_run
from tests.bench.test_report import a_report, times
from trimcp.bench.plan import MixEntry, Plan
from trimcp.bench.report import Failures, Generator, Histogram, Report, Second, Slice
from trimcp.bench.stages import Stages
from trimcp.bench.team import SignedLink, Team, join, merged, share
from trimcp.errors import ConnectionLost, LocalError

PLAN = Plan(MixEntry("ping"), sessions=5, seconds=2.0, warm_up_count=3, pids=(7,), seed=10)
SECRET = b"one that both know"
Gate = Callable[[], Awaitable[None]]


# The plan


def test_a_plan_is_shared_without_a_rest() -> None:
    parts = [share(PLAN, number, 3) for number in range(3)]
    assert [each.sessions for each in parts] == [2, 2, 1]
    assert [each.warm_up_count for each in parts] == [1, 1, 1]
    assert [each.pids for each in parts] == [(7,), (), ()]
    assert len({each.seed for each in parts}) == len({each.first_number for each in parts}) == 3
    counted = [share(attrs.evolve(PLAN, seconds=None, count=10), number, 4).count for number in range(4)]
    assert counted == [3, 3, 2, 2]
    assert share(Plan(MixEntry("ping"), rate=90.0), 1, 3).rate == 30.0
    staged = Plan(MixEntry("ping"), stages="0:10,30s:200,0:50,1m:50")
    whole, part = Stages.read(staged.stages or ""), Stages.read(share(staged, 1, 4).stages or "")
    assert [part.level(at) * 4 for at in (0, 10, 29, 30, 80)] == pytest.approx(
        [whole.level(at) for at in (0, 10, 29, 30, 80)], abs=1e-4
    )


@pytest.mark.parametrize(("plan", "why"), [({"sessions": 2}, "--sessions; there are 2"), ({"count": 2}, "--count")])
def test_a_plan_that_is_too_small_is_not_shared(plan: dict[str, int], why: str) -> None:
    with pytest.raises(LocalError, match=why):
        share(Plan(MixEntry("ping"), **{"sessions": 3, **plan}), 0, 3)


# The reports


def test_reports_are_merged_without_loss() -> None:
    chance = Random(2)
    parts = [[chance.expovariate(50) for _ in range(count)] for count in (300, 1000, 5)]
    reports = []
    for number, part in enumerate(parts):
        half = len(part) // 2
        slices = (Slice(0.0, 1.0, {"a": times(*part[:half])}, {"x": 1}, 0.5, 10, busy=0.4, lag=0.1 * number),)
        slices += (Slice(1.0, 1.0, {"a": times(*part[half:])}, {}, 0.5, 20, busy=0.4),)
        seconds = (Second(0, half, 1, 0.1, 0.2), Second(1, len(part) - half, 0, 0.1, 0.2))
        reports.append(
            a_report(
                calls=len(part),
                latency=times(*part),
                requests={"a": times(*part)},
                slices=slices,
                over_time=seconds,
                errors={"x": Failures(1, f"by {number}")},
                generator=Generator(1.0, 2.0, 7),
            )
        )
    whole = merged([Report.from_json(each.to_json()) for each in reports], PLAN)
    every = times(*[each for part in parts for each in part])
    for found in (whole.latency, whole.requests["a"], Histogram.merged(each.whole for each in whole.slices)):
        assert list(found.buckets()) == list(every.buckets())
        assert (found.count, found.most) == (every.count, pytest.approx(every.most))
    assert (whole.calls, whole.errors["x"], whole.plan) == (1305, Failures(3, "by 0"), PLAN)
    first, second = whole.slices
    assert (first.errors, first.cpu, first.rss, first.lag) == ({"x": 3}, 1.5, 30, pytest.approx(0.2))
    assert [each.calls for each in whole.over_time] == [652, 653]
    assert whole.over_time[0].p99 == first.whole.percentile(99)
    assert (whole.generator.busy, whole.generator.busiest, whole.generator.saturated) == (1.5, 0.5, False)
    assert whole.generator.ceiling == 3 * 21 / 3.0
    assert not second.errors


# Who may join


async def linked(one: bytes, other: bytes) -> tuple[BaseException | None, BaseException | None]:
    ends = trio.testing.memory_stream_pair()
    failures: list[BaseException | None] = [None, None]

    async def open(index: int, secret: bytes) -> None:
        try:
            await SignedLink(ends[index], secret).open(listening=index == 0)
        except ConnectionLost as error:
            failures[index] = error
            await ends[index].aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(open, 0, one)
        nursery.start_soon(open, 1, other)
    return failures[0], failures[1]


async def test_only_who_knows_the_secret_is_let_in() -> None:
    assert await linked(SECRET, SECRET) == (None, None)
    found = await linked(SECRET, b"another")
    assert all("secret" in str(each) or "lost" in str(each) for each in found)
    assert None not in found


@pytest.mark.parametrize("what", ["changed", "again", "returned", "endless"])
async def test_what_was_not_said_by_the_other_side_is_refused(what: str) -> None:
    ours, outside = trio.testing.memory_stream_pair()
    inside, theirs = trio.testing.memory_stream_pair()
    lines: list[bytes] = []

    async def pass_on(source: trio.abc.Stream, target: trio.abc.Stream, keep: bool) -> None:
        async for data in source:
            if keep:
                lines.append(bytes(data))
            await target.send_all(data)

    a, b = SignedLink(ours, SECRET), SignedLink(theirs, SECRET)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pass_on, outside, inside, True)
        nursery.start_soon(pass_on, inside, outside, False)
        async with trio.open_nursery() as opening:
            opening.start_soon(lambda: a.open(listening=True))
            opening.start_soon(lambda: b.open(listening=False))
        await a.send({"plan": 1})
        assert await b.receive() == {"plan": 1}
        if what == "changed":
            await inside.send_all(lines[-1].replace(b"1}", b"2}"))
        elif what == "again":
            await inside.send_all(lines[-1])
        elif what == "returned":
            await outside.send_all(lines[-1])
        else:
            await inside.send_all(b"x" * 5000)
        with pytest.raises(ConnectionLost, match=r"secret|too long"):
            await (a if what == "returned" else b).receive(4096)
        nursery.cancel_scope.cancel()


# Together


class Generators:
    """A team at work in this process, whose generators are functions."""

    def __init__(self, size: int = 2, **options: float) -> None:
        self.stop = trio.Event()
        self.team = Team(SECRET, size, attrs.evolve(PLAN, **options), self.stop)
        self.began: list[float] = []
        self.plans: list[Plan] = []

    async def measure(self, plan: Plan, gate: Gate, stop: trio.Event) -> Report:
        self.plans.append(plan)
        await gate()
        self.began.append(trio.current_time())
        with trio.move_on_after(0.05):
            await stop.wait()
        return attrs.evolve(a_run(plan.seed, slices=4), interrupted=stop.is_set())

    async def run(self, *measures: Callable[[Plan, Gate, trio.Event], Awaitable[Report]]) -> Report:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listeners[0].socket.getsockname()[1]

        async def member(measure: Callable[[Plan, Gate, trio.Event], Awaitable[Report]]) -> None:
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                with (
                    pytest.raises((ConnectionLost, LocalError, RuntimeError))
                    if measure != self.measure
                    else (trio.CancelScope())
                ):
                    await join(stream, SECRET, measure)

        async with trio.open_nursery() as nursery:
            for each in measures:
                nursery.start_soon(member, each)
            with trio.fail_after(20):
                return await self.team.run(listeners)


async def test_generators_begin_together_and_are_one_report() -> None:
    team = Generators(size=3)
    report = await team.run(team.measure, team.measure, team.measure)
    assert report.latency.count == sum(a_run(seed, slices=4).latency.count for seed in (10, 11, 12))
    assert max(team.began) - min(team.began) < 0.2
    assert sorted(each.seed for each in team.plans) == [10, 11, 12]
    assert (team.team.lost, report.interrupted) == ([], False)


async def test_whoever_dies_while_it_measures_is_told_and_the_others_count() -> None:
    team = Generators()

    async def dies(plan: Plan, gate: Gate, stop: trio.Event) -> Report:
        await gate()
        raise RuntimeError("killed")

    report = await team.run(team.measure, dies)
    assert report.latency.count in [a_run(seed, slices=4).latency.count for seed in (10, 11)]
    (why,) = team.team.lost
    assert "died" in why


async def test_whoever_cannot_begin_ends_it_with_the_reason() -> None:
    team = Generators()

    async def cannot(plan: Plan, gate: Gate, stop: trio.Event) -> Report:
        await trio.lowlevel.checkpoint()
        raise LocalError("the server has no tool")

    with pytest.raises((LocalError, ExceptionGroup)) as caught:
        await team.run(cannot)
    assert "the server has no tool" in str(caught.value) or caught.group_contains(LocalError, match="has no tool")


async def test_a_signal_reaches_all() -> None:
    team = Generators()
    team.stop.set()
    assert (await team.run(team.measure, team.measure)).interrupted


async def test_strangers_do_not_disturb() -> None:
    team = Generators(size=1)

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listeners[0].socket.getsockname()[1]
        reports: list[Report] = []

        async def listen() -> None:
            reports.append(await team.team.run(listeners))

        nursery.start_soon(listen)
        for noise in (b"GET / HTTP/1.1\r\n\r\n", b"", b"x" * 10_000):
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                with trio.move_on_after(0.05):
                    await stream.send_all(noise)
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            with pytest.raises(ConnectionLost):
                await join(stream, b"another secret", team.measure)
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await join(stream, SECRET, team.measure)
    assert len(reports) == 1
