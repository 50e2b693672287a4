"""The mailbox: order, bounds, removal."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import attrs
import pytest
import trio

from tests.session.support import Tools, agree, call, client_engine, server_engine
from tests.yardsticks import turns
from trimcp.channel import Incoming
from trimcp.session.incoming.jobs import HandlerTasks
from trimcp.session.limits import Limits
from trimcp.session.queues import EACH, Mailbox
from trimcp.session.session import Session
from trimcp.wire.jsonrpc import parse
from trimcp.wire.revisions import LATEST_LEGACY, V2026_07_28, Revision


@attrs.define(eq=False)
class _Job:
    size: int = 10
    headers: Mapping[str, str] | None = None


def test_jobs_leave_in_the_order_they_came() -> None:
    mailbox, jobs = Mailbox(10, 10_000), [_Job() for _ in range(3)]
    for job in jobs:
        mailbox.put(job)
    assert (len(mailbox), mailbox.bytes_queued) == (3, 3 * (EACH + 10))
    taken: list[Any] = [mailbox.take() for _ in jobs]
    assert taken == jobs
    assert (len(mailbox), mailbox.bytes_queued) == (0, 0)


def test_it_is_full_by_count_by_bytes_and_by_what_waits_elsewhere() -> None:
    mailbox = Mailbox(2, 2 * EACH + 25)
    job: Any = _Job()
    mailbox.put(job)
    assert not mailbox.full()
    assert mailbox.full(parked=1)
    heavy: Any = _Job(15)
    mailbox.put(heavy)
    assert mailbox.full()
    mailbox.remove(job)
    assert not mailbox.full()
    assert Mailbox(10, EACH + 15).full() is False


def test_a_job_is_removed_wherever_it_stands_and_only_once() -> None:
    mailbox, jobs = Mailbox(10, 10_000), [_Job() for _ in range(3)]
    for job in jobs:
        mailbox.put(job)
    middle: Any = jobs[1]
    assert mailbox.remove(middle)
    assert not mailbox.remove(middle)
    assert mailbox.bytes_queued == 2 * (EACH + 10)
    left: list[Any] = [mailbox.take(), mailbox.take()]
    assert left == [jobs[0], jobs[2]]


def test_removing_the_newest_first_is_not_quadratic() -> None:
    def remove_all(number: int, turn: Callable[[], AbstractContextManager[None]]) -> None:
        mailbox: Any = Mailbox(10**6, 10**9)
        jobs = [_Job() for _ in range(number)]
        for job in jobs:
            mailbox.put(job)
        with turn():
            for job in reversed(jobs):
                assert mailbox.remove(job)

    # Eight times the jobs: a search from the front takes sixty-four times as long.
    for turn in turns(at_most=24):
        remove_all(40_000, turn.of_work)
        remove_all(5_000, turn.of_yardstick)


def test_room_is_left_for_what_is_on_its_way_but_half_of_it_is_used() -> None:
    mailbox, job = Mailbox(10, 10 * EACH), _Job(EACH)
    mailbox.leave_room(3, EACH)
    for _ in range(3):
        assert not mailbox.full()
        mailbox.put(_Job(EACH))
    assert mailbox.full()
    assert mailbox.bytes_queued == 6 * EACH
    small = Mailbox(10, 10 * EACH)
    small.leave_room(1_000, 0)
    small.put(job)
    small.put(_Job(EACH))
    assert not small.full()
    small.put(_Job(EACH))
    assert small.full()


def test_headers_weigh_where_each_request_brings_its_own() -> None:
    mailbox = Mailbox(100, 10**6)
    shared = {"user-agent": "x" * 5_000}
    jobs = [_Job(10, shared) for _ in range(3)]
    for job in jobs:
        mailbox.put(job)
    assert 5_000 < mailbox.bytes_queued - 3 * (EACH + 10) < 5_500
    before = mailbox.bytes_queued
    other: Any = _Job(10, {"user-agent": "y" * 60_000, "host": "z"})
    mailbox.put(other)
    assert 60_000 < mailbox.bytes_queued - before < 63_000
    mailbox.remove(other)
    assert mailbox.bytes_queued == before
    for _ in jobs:
        mailbox.take()
    assert mailbox.bytes_queued == 0


MANY = 500  # requests, beside which what the queues themselves take is little


@pytest.mark.parametrize("revision", [LATEST_LEGACY, V2026_07_28], ids=str)
@pytest.mark.parametrize("padding", [0, 700, 3_000])
async def test_what_waits_weighs_what_it_occupies(revision: Revision, padding: int) -> None:
    """Not only its text, beside which a small request is several times as large."""
    session = Session(
        server_engine(), Tools({}), Limits(max_running=1, backlog_bytes=1 << 40, backlog_requests=1 << 40)
    )
    agree(session.engine, client_engine(), revision)

    def arrive(first: int, count: int) -> None:
        for id in range(first, first + count):
            text = call(id, revision=revision, padding="x" * padding)
            session.deliver([Incoming(parse(text), len(text))])

    async with trio.open_nursery() as nursery:
        session.start(HandlerTasks(nursery))
        arrive(1_000, 100)
        gc.collect()
        before = session.jobs.mailbox.bytes_queued
        tracemalloc.start()
        try:
            arrive(2_000, MANY)
            gc.collect()
            occupied, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        weighed = session.jobs.mailbox.bytes_queued - before
        nursery.cancel_scope.cancel()
    assert occupied <= weighed <= occupied + MANY * EACH // 2
