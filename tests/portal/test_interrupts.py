"""Whole programs: interrupted, forked, and ended without a word, they leave nothing."""

from __future__ import annotations

import pytest

from tests.portal.programs import run


@pytest.mark.slow
def test_of_a_thousand_interrupted_calls_no_thread_and_no_task_is_left() -> None:
    assert run("interrupts") == ["True True", "0"]


@pytest.mark.slow
def test_a_connection_that_is_interrupted_leaves_nothing() -> None:
    assert run("connects") == ["3 1", "0"]


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
