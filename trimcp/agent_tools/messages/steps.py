"""Conversions that stop now and then, so that a long one can be carried out in turns with everybody else."""

from __future__ import annotations

from collections.abc import Generator
from typing import Final, TypeAlias, TypeVar

import trio

ResultT = TypeVar("ResultT")

Steps: TypeAlias = Generator[None, None, ResultT]
"""A conversion that stops every quarter of a millisecond, about, and returns its result."""

_PARTS: Final = 8  # parts of a conversion that follow each other before others have their turn


def at_once(steps: Steps[ResultT]) -> ResultT:
    """Return the result of a conversion, without a pause."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # what the generator returns


_locks: Final = trio.lowlevel.RunVar[tuple[trio.Lock, trio.Lock]]("trimcp.protobuf")


async def in_turns(steps: Steps[ResultT]) -> ResultT:
    """Return the result of a conversion; other tasks run in between, but of all conversions only one at a time.

    Most end in their first turn. Of longer ones only one goes on at a time, so that few are in memory by halves.
    """
    try:
        turn, long = _locks.get()
    except LookupError:
        _locks.set((turn := trio.Lock(), long := trio.Lock()))
    try:
        turn.acquire_nowait()
    except trio.WouldBlock:
        await turn.acquire()
    try:
        try:
            for _ in range(_PARTS):
                next(steps)
                await trio.lowlevel.checkpoint()
        finally:
            turn.release()
        async with long:
            while True:
                async with turn:
                    next(steps)
                    await trio.lowlevel.checkpoint()
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # as above
