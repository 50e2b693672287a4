"""A load that changes: when each call has to begin, and how many sessions there are."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from tests.bench.support import FakeChannel, a_load, a_plan, after
from tests.bench.test_engine import counts, measured
from tests.bench.test_supply import pace
from trimcp.bench.stages import Stages
from trimcp.errors import LocalError

RAMP = "0:10,30s:200,2m:200,10s:0"


def test_stages_are_read_as_they_are_written() -> None:
    stages = Stages.read(RAMP)
    assert stages.seconds == 160.0
    assert [stages.level(at) for at in (0.0, 15.0, 30.0, 100.0, 155.0, 160.0)] == [10, 105, 200, 200, 100, 0]
    assert Stages.read("500ms:3,1h:3").seconds == 3600.5


def test_a_jump_takes_no_time() -> None:
    spike = Stages.read("0:5,10s:5,0:50,2s:50,0:5,10s:5")
    assert [spike.level(at) for at in (9.9, 10.0, 11.9, 12.0)] == [5, 50, 50, 5]
    assert spike.total(22.0) == 5 * 10 + 50 * 2 + 5 * 10


@pytest.mark.parametrize("text", [RAMP, "0:5,10s:5,0:50,2s:50", "10s:100,5s:0,5s:0,5s:40"])
def test_each_call_begins_when_as_many_should_have_begun(text: str) -> None:
    stages = Stages.read(text)
    whole = int(stages.total(stages.seconds))
    at = [stages.after(number) for number in range(1, whole)]
    assert at == sorted(at)
    assert [stages.total(each) for each in at] == pytest.approx(list(range(1, whole)))
    assert stages.after(whole + 1) == math.inf


def test_a_level_without_end_is_a_rate() -> None:
    stages = Stages.constant(8.0)
    assert [stages.after(each) for each in (0, 1, 80)] == [0.0, 0.125, 10.0]
    assert stages.level(1e9) == 8.0


@pytest.mark.parametrize("text", ["", "10", "10:x", "1d:5", "0:5", "10s:0", "-1s:5", "0:5,"])
def test_what_is_no_course_is_refused(text: str) -> None:
    with pytest.raises(LocalError, match=r"is no stage|take no time"):
        Stages.read(text)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"rate": 5.0}, "leave out --rate"),
        ({"count": 5}, "leave out --rate"),
        ({"warm_up": 1.0}, "make that the warm-up"),
        ({"think": 1.0}, "no time to think"),
    ],
)
def test_stages_say_how_much_and_how_long(options: dict[str, float], why: str) -> None:
    with pytest.raises(LocalError, match=why):
        a_plan(stages="0:5,2s:5", **options)
    assert a_plan(stages="0:5,2s:5").duration == 2.0


async def test_calls_follow_the_stages(autojump_clock: object) -> None:
    due = await pace(a_load(stages="0:10,2s:10,0:100,1s:100,2s:0"), 5.0)
    per_second = Counter(int(each + 1e-9) for each in due)
    assert [per_second[second] for second in range(5)] == pytest.approx([10, 10, 100, 75, 25], abs=1)


async def test_at_random_calls_follow_the_stages_in_the_mean(autojump_clock: object) -> None:
    due = await pace(a_load(stages="0:0,10s:400", spacing="poisson"), 10.0)
    assert len(due) == pytest.approx(2000, rel=0.1)
    assert sum(each < 5.0 for each in due) == pytest.approx(500, rel=0.15)


async def test_a_stall_in_a_stage_shows_in_all_calls_that_were_due(autojump_clock: object) -> None:
    report = await measured(after(0.5), stages="0:20,5s:20", under_way=1)
    assert report.latency.most > 3.0
    assert report.late > 50


async def test_sessions_come_and_go_with_the_stages(autojump_clock: object) -> None:
    channels: list[FakeChannel] = []
    report = await measured(after(0.1), stages="0:1,2s:1,0:5,2s:5,0:2,2s:2", stages_of="sessions", channels=channels)
    assert len(channels) == 5
    assert counts(report) == {}
    last = [channel.calls[-1][0] - channels[0].calls[0][0] for channel in channels]
    assert sorted(last) == pytest.approx([3.9, 3.9, 3.9, 5.9, 5.9], abs=0.11)
    assert report.calls == pytest.approx(10 * (2 + 10 + 4), rel=0.06)


async def test_a_session_ends_after_its_calls_and_another_takes_its_place(autojump_clock: object) -> None:
    channels: list[FakeChannel] = []
    report = await measured(after(0.1), count=95, session_calls=10, sessions=2, under_way=3, channels=channels)
    assert (report.calls, counts(report)) == (95, {})
    assert len(channels) == 10
    assert all(len(channel.calls) <= 10 for channel in channels)
    assert all(channel.closed for channel in channels)


async def test_sessions_that_come_and_go_keep_the_rate_of_an_open_loop(autojump_clock: object) -> None:
    channels: list[FakeChannel] = []
    report = await measured(
        after(0.1), seconds=9.95, rate=20.0, session_calls=5, sessions=3, under_way=4, channels=channels
    )
    assert report.per_second == pytest.approx(20.0, rel=0.05)
    assert report.latency.most < 0.2
    assert len(channels) == pytest.approx(41, abs=4)
