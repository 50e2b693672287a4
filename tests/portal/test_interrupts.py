"""Whole programs: interrupted, forked, and ended without a word, they leave nothing."""

from __future__ import annotations

import threading

import pytest

from tests.portal.programs import make_server, run
from trimcp import blocking


@pytest.mark.slow
def test_of_a_thousand_interrupted_calls_no_thread_and_no_task_is_left() -> None:
    assert run("interrupts") == ["True True", "0"]


@pytest.mark.slow
def test_of_a_thousand_cancelled_calls_of_asyncio_no_thread_and_no_task_is_left() -> None:
    assert run("cancels") == ["True True 1", "1", "0"]


@pytest.mark.slow
def test_a_connection_that_is_interrupted_leaves_nothing() -> None:
    assert run("connects") == ["3 1", "0"]


def test_the_thread_is_started_where_no_interrupt_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Thread.start` waits on a lock of Python's, which an interrupt of the waiting thread breaks."""
    start, where = threading.Thread.start, dict[str, int]()

    def noted(thread: threading.Thread) -> None:
        where[thread.name] = threading.get_ident()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    with blocking.connect(make_server()) as session:
        session.ping()
    assert where["trimcp"] != threading.get_ident()


def test_after_a_fork_each_process_has_its_own() -> None:
    assert run("forks") == [
        "3",
        "this connection was made before os.fork(): make another in the new process",
        "child 7 1",
        "child left 0",
        "parent 11 1",
        "parent left 0",
    ]


def test_a_program_that_forgets_a_connection_ends() -> None:
    assert run("forgets") == ["3"]
