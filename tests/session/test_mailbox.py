"""The mailbox: order, bounds, removal."""

from __future__ import annotations

import time
from typing import Any

import attrs

from trimcp.session.mailbox import Mailbox


@attrs.define(eq=False)
class _Job:
    size: int = 10


def test_jobs_leave_in_the_order_they_came() -> None:
    mailbox, jobs = Mailbox(10, 1000), [_Job() for _ in range(3)]
    for job in jobs:
        mailbox.put(job)  # type: ignore[arg-type]
    assert (len(mailbox), mailbox.bytes_queued) == (3, 30)
    taken: list[Any] = [mailbox.take() for _ in jobs]
    assert taken == jobs
    assert (len(mailbox), mailbox.bytes_queued) == (0, 0)


def test_it_is_full_by_count_by_bytes_and_by_what_waits_elsewhere() -> None:
    mailbox = Mailbox(2, 25)
    job: Any = _Job()
    mailbox.put(job)
    assert not mailbox.full()
    assert mailbox.full(parked=1)
    heavy: Any = _Job(15)
    mailbox.put(heavy)
    assert mailbox.full()
    mailbox.remove(job)
    assert not mailbox.full()
    assert Mailbox(10, 15).full() is False


def test_a_job_is_removed_wherever_it_stands_and_only_once() -> None:
    mailbox, jobs = Mailbox(10, 1000), [_Job() for _ in range(3)]
    for job in jobs:
        mailbox.put(job)  # type: ignore[arg-type]
    middle: Any = jobs[1]
    assert mailbox.remove(middle)
    assert not mailbox.remove(middle)
    assert mailbox.bytes_queued == 20
    left: list[Any] = [mailbox.take(), mailbox.take()]
    assert left == [jobs[0], jobs[2]]


def test_removing_the_newest_first_is_not_quadratic() -> None:
    mailbox: Any = Mailbox(10**6, 10**9)
    jobs = [_Job() for _ in range(40_000)]
    for job in jobs:
        mailbox.put(job)
    started = time.perf_counter()
    for job in reversed(jobs):
        assert mailbox.remove(job)
    # 0.02 s here; a search from the front takes some 10 s.
    assert time.perf_counter() - started < 2
