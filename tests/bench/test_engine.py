"""A measurement from end to end: first with a server that is a function, in virtual time; then with real ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import trio

from tests.bench.support import FakeChannel, a_load, after, fake_opener, progress, reply
from trimcp.bench.discovery import Found
from trimcp.bench.engine import Measurement, measure
from trimcp.bench.mux import multiplexed
from trimcp.bench.plan import Plan
from trimcp.bench.report import Report, Snapshot
from trimcp.errors import LocalError
from trimcp.transports.stdio.child import StdioServer
from trimcp.wire.revisions import LATEST

Serve = Callable[[dict[str, Any], FakeChannel], object]


async def measured(
    serve: Serve,
    *,
    ticks: list[Snapshot] | None = None,
    tick: float = 0.5,
    stop: trio.Event | None = None,
    channels: list[FakeChannel] | None = None,
    **options: Any,
) -> Report:
    """Measure a server that is a function."""
    load = a_load(**options)
    load.tally.began = math.inf
    found = Found("stdio", LATEST, "fake", "1", tuple(load.supply.requests))
    opener = fake_opener(serve, [] if channels is None else channels)
    run = Measurement(
        load,
        partial(multiplexed, opener),
        trio.Event() if stop is None else stop,
        None if ticks is None else ticks.append,
        tick,
    )
    await run.run()
    return run.report("a function", found)


def counts(report: Report) -> dict[str, int]:
    return {kind: each.count for kind, each in report.errors.items()}


async def test_seconds_are_measured(autojump_clock: object) -> None:
    report = await measured(after(0.1), seconds=2.05, under_way=2)
    assert report.seconds == pytest.approx(2.05)
    assert (report.calls, report.latency.count) == (40, 42)  # two were under way at the end
    assert report.per_second == pytest.approx(40 / 2.05)
    assert [each.calls for each in report.over_time] in ([20, 20], [18, 22], [18, 20])
    assert (report.errors, report.interrupted, report.right) == ({}, False, True)


async def test_a_count_is_measured_exactly(autojump_clock: object) -> None:
    report = await measured(after(0.1), count=7, under_way=2)
    assert (report.calls, report.latency.count) == (7, 7)
    assert report.seconds == pytest.approx(0.4)


async def test_the_warm_up_is_not_counted(autojump_clock: object) -> None:
    channels: list[FakeChannel] = []
    report = await measured(after(0.1), seconds=1.05, warm_up=5.0, channels=channels)
    assert report.calls in (10, 11)
    assert len(channels[0].calls) == pytest.approx(61, abs=1)
    channels.clear()
    report = await measured(after(0.1), count=10, warm_up_count=25, under_way=5, channels=channels)
    assert (report.calls, len(channels[0].calls)) == (10, 35)
    assert report.seconds == pytest.approx(0.2)


@pytest.mark.parametrize("warm_up", [{"warm_up": 1.05}, {"warm_up_count": 30}])
async def test_what_is_counted_begins_when_the_warm_up_is_over(warm_up: dict[str, Any], autojump_clock: object) -> None:
    """The calls counted are those made after it, with nothing else under way."""
    channels: list[FakeChannel] = []
    report = await measured(after(0.1), count=20, under_way=4, channels=channels, **warm_up)
    assert (report.calls, report.latency.count) == (20, 20)
    assert report.seconds == pytest.approx(0.5)
    at = [at for at, _ in channels[0].calls]
    assert at[-20] - at[-21] == pytest.approx(0.1)


async def test_an_open_loop_keeps_its_rate(autojump_clock: object) -> None:
    report = await measured(after(0.5), seconds=9.95, rate=20.0, warm_up=2.0)
    assert report.per_second == pytest.approx(20.0, rel=0.05)
    assert report.latency.most == pytest.approx(0.5)
    assert report.late == 0


async def test_a_server_slower_than_the_rate_is_found_out(autojump_clock: object) -> None:
    report = await measured(after(0.1), seconds=10.0, rate=20.0, under_way=1)
    assert report.per_second == pytest.approx(10.0, rel=0.05)
    assert report.latency.most > 4.0
    assert report.late > 90
    assert counts(report)["not begun"] == pytest.approx(100, abs=3)


async def test_calls_longer_than_the_measurement_are_measured_all_the_same(autojump_clock: object) -> None:
    report = await measured(after(3.0), seconds=1.0, under_way=4)
    assert (report.calls, report.after, report.seconds) == (0, 4, pytest.approx(1.0))
    assert report.per_second == pytest.approx(4 / 3)
    assert (report.rough, report.right) == (True, True)


@pytest.mark.parametrize("warm_up", [0.0, 0.4, 1.0, 2.9, 3.1])
@pytest.mark.parametrize("seconds", [0.5, 1.0, 2.0, 5.0, 20.0])
async def test_the_rate_of_long_calls_does_not_depend_on_which_of_them_end_in_time(
    warm_up: float, seconds: float, autojump_clock: object
) -> None:
    report = await measured(after(3.0), seconds=seconds, warm_up=warm_up, under_way=10)
    assert report.rough
    assert report.per_second == pytest.approx(10 / 3, rel=1e-6)


async def test_the_rate_is_no_estimate_where_ten_calls_fit_in(autojump_clock: object) -> None:
    report = await measured(after(0.1), seconds=2.0, under_way=2)
    assert (report.rough, report.per_second) == (False, report.calls / report.seconds)
    report = await measured(after(3.0), count=4, under_way=4)
    assert (report.rough, report.per_second) == (False, pytest.approx(4 / 3)), "what is counted is not cut off"
    report = await measured(after(3.0), seconds=2.0, rate=5.0, warm_up=3.0)
    assert (report.rough, report.per_second) == (False, pytest.approx(5.0, rel=0.11))


@pytest.mark.parametrize("options", [{"seconds": 2.0}, {"count": 100}])
async def test_a_server_that_never_answers_ends_the_measurement(
    options: dict[str, Any], autojump_clock: object
) -> None:
    began = trio.current_time()
    report = await measured(lambda message, channel: None, under_way=3, patience=5.0, **options)
    assert trio.current_time() - began <= 11.0
    assert (report.calls, counts(report)) == (0, {"no answer": 3})
    assert not report.right


async def test_a_server_that_falls_silent_is_told_from_one_that_answers(autojump_clock: object) -> None:
    answered = 0

    def serve(message: dict[str, Any], channel: FakeChannel) -> None:
        nonlocal answered
        answered += 1
        if answered <= 50:
            channel.answer_after(0.01, reply(message))

    report = await measured(serve, count=100, under_way=2, patience=5.0)
    assert (report.calls, counts(report)) == (50, {"no answer": 2})


async def test_long_thinking_is_no_silence(autojump_clock: object) -> None:
    report = await measured(after(0.1), count=3, think=60.0, patience=5.0)
    assert (report.calls, report.errors) == (3, {})


async def test_servers_that_are_all_dead_end_the_measurement(autojump_clock: object) -> None:
    began = trio.current_time()
    report = await measured(lambda message, channel: channel.die(), seconds=3600.0, sessions=3, reopen=2)
    assert trio.current_time() - began < 5.0
    assert (report.calls, counts(report)) == (0, {"connection lost": 9})


async def test_some_wrong_answers_are_counted_and_the_rest_is_measured(autojump_clock: object) -> None:
    def serve(message: dict[str, Any], channel: FakeChannel) -> None:
        wrong = message["id"] % 10 == 0
        channel.answer_after(0.1, reply(message, "\x1b[0mno" if wrong else None))

    report = await measured(serve, count=100, under_way=10)
    assert (report.calls, counts(report)) == (90, {"wrong text": 10})
    assert report.errors["wrong text"].example == "\\x1b[0mno"
    assert report.latency.count == 90
    assert sum(each.errors for each in report.over_time) == 10
    assert not report.right


async def test_it_can_be_ended_before_its_time(autojump_clock: object) -> None:
    stop = trio.Event()
    channels: list[FakeChannel] = []
    reports: list[Report] = []

    async def measure() -> None:
        reports.append(await measured(after(0.1), stop=stop, channels=channels, seconds=3600.0))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(measure)
        await trio.sleep(10.05)
        stop.set()
    (report,) = reports
    assert report.interrupted
    assert report.seconds == pytest.approx(10.05)
    assert report.calls == pytest.approx(100, abs=1)
    assert report.errors == {}
    assert channels[0].closed


async def test_what_is_under_way_when_it_is_ended_is_nobodys_fault(autojump_clock: object) -> None:
    stop = trio.Event()

    def serve(message: dict[str, Any], channel: FakeChannel) -> None:
        stop.set()

    began = trio.current_time()
    report = await measured(serve, stop=stop, seconds=3600.0, patience=100.0)
    assert (report.interrupted, report.errors, report.calls) == (True, {}, 0)
    assert trio.current_time() - began < 2.0


async def test_ending_it_while_the_last_answers_are_awaited_does_not_wait_for_them(autojump_clock: object) -> None:
    stop = trio.Event()
    began = trio.current_time()

    async def end() -> None:
        await trio.sleep(5.0)
        stop.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(end)
        report = await measured(lambda message, channel: None, stop=stop, seconds=1.0, patience=100.0)
    assert trio.current_time() - began < 7.0
    assert (report.seconds, report.errors) == (pytest.approx(1.0), {})


async def test_being_cancelled_closes_every_connection(autojump_clock: object) -> None:
    channels: list[FakeChannel] = []
    with trio.move_on_after(3.0) as scope:
        await measured(after(0.1), channels=channels, seconds=3600.0, sessions=5)
    assert scope.cancelled_caught
    assert len(channels) == 5
    assert all(channel.closed for channel in channels)


async def test_how_things_stand_is_told_twice_a_second(autojump_clock: object) -> None:
    ticks: list[Snapshot] = []

    def serve(message: dict[str, Any], channel: FakeChannel) -> None:
        channel.answer_after(0.1, reply(message, "no" if message["id"] == 30 else None))

    await measured(serve, ticks=ticks, seconds=3.01, warm_up=1.01, under_way=2)
    assert [tick.warming_up for tick in ticks[:3]] == [True, True, False]
    assert ticks[0].elapsed == pytest.approx(-0.51)
    inside = [tick for tick in ticks if 0.6 < tick.elapsed < 3.0]
    assert len(inside) == 5
    for tick in inside:
        assert tick.rate == pytest.approx(20.0, abs=5.0)
        assert tick.times.percentile(50) == pytest.approx(0.1, rel=0.01)
        assert (tick.under_way, tick.sessions) == (2, 1)
    assert inside[-1].share == pytest.approx(inside[-1].elapsed / 3.01)
    assert ticks[-1].errors == {"wrong text": 1}
    assert ticks[-1].calls == pytest.approx(60, abs=3)


async def test_what_is_told_covers_all_since_the_last_time(autojump_clock: object) -> None:
    ticks: list[Snapshot] = []

    def serve(message: dict[str, Any], channel: FakeChannel) -> None:
        channel.answer_after(0.1, progress(message), reply(message))

    await measured(serve, ticks=ticks, tick=1.0, seconds=3.01, progress=True)
    assert [tick.elapsed for tick in ticks] == pytest.approx([1.0, 2.0, 3.0])
    for tick in ticks:
        assert tick.seconds == pytest.approx(1.0)
        assert (tick.times.count, tick.reported) == (pytest.approx(10, abs=1), pytest.approx(10, abs=1))


async def test_the_share_of_a_count_is_that_of_its_calls(autojump_clock: object) -> None:
    ticks: list[Snapshot] = []
    await measured(after(0.1), ticks=ticks, count=20)
    assert [tick.share for tick in ticks[:3]] == pytest.approx([0.25, 0.5, 0.75], abs=0.06)


async def test_a_plan_without_requests_is_refused() -> None:
    with pytest.raises(LocalError, match="there is nothing to send"):
        await measure(StdioServer(("none",)), Plan())
