"""Waiting for a state of this process that another task brings about, and of which no event tells."""

from __future__ import annotations

from collections.abc import Callable

import trio

__all__ = ["until"]


async def until(condition: Callable[[], object]) -> None:
    """Return as soon as this holds: it is looked at after each step of each task. What it raises is raised here."""
    if condition():
        return
    looking = _Looking(condition)
    trio.lowlevel.add_instrument(looking)
    try:
        await looking.over.wait()
    finally:
        trio.lowlevel.remove_instrument(looking)
    if looking.error is not None:
        raise looking.error


class _Looking(trio.abc.Instrument):
    def __init__(self, condition: Callable[[], object]) -> None:
        self.over = trio.Event()
        self.error: Exception | None = None
        self._condition = condition

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        try:
            holds = self._condition()
        except Exception as error:  # which Trio would log, and look no more
            self.error, holds = error, True
        if holds:
            self.over.set()
