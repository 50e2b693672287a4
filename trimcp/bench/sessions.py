"""Sessions, which are opened again where they break; and their places, where they make one call at a time each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import attrs
import trio

from trimcp.bench.supply import Load, LoadCall, Seat
from trimcp.errors import McpError

SessionRunner: TypeAlias = Callable[[Load, Seat, Callable[[], object]], Awaitable[bool]]
"""Opens a session within `Plan.opening`, makes calls until none are left, and closes it.

It calls its last argument once calls can be made, counts every failure of one itself, and returns False if the session
is to be opened again. Raises McpError or trio.TooSlowError: it could not be opened.
"""


async def run_session(
    load: Load,
    runner: SessionRunner,
    seat: Seat | None = None,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run one session until its seat is left or the measurement ends; open it again at most `Plan.reopen` times.

    It calls `started` once the session can be used, or the first attempt to open it has failed.
    """
    seat = seat or Seat()
    told = trio.Event()

    def usable() -> None:
        if not told.is_set():
            told.set()
            task_status.started()

    attempt = 0
    while True:
        try:
            if await runner(load, seat, usable):
                return
        except (McpError, trio.TooSlowError) as error:
            load.tally.wrong("no connection", str(error) or "it took too long", trio.current_time())
        usable()
        if seat.left <= 0 or not await load.again(attempt):
            return
        attempt += 1


@attrs.define(eq=False)
class LoadPlaces:
    """What the places of one session share."""

    load: Load
    seat: Seat
    closed: bool = attrs.field(init=False, default=False)  # no place makes another call
    _idle: list[trio.Event] = attrs.field(init=False, factory=list)
    _is_waiting: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self.seat.on_leave = self._wake_all

    async def run(self, make: Callable[[LoadCall], Awaitable[bool]]) -> None:
        """Make calls until no more begin, or too many in a row find no connection.

        `make`: makes a call and counts its outcome; returns False if it found no connection.
        """
        load = self.load
        supply, think = load.supply, load.plan.think
        failures = 0
        while not self.closed:
            call = supply.take(trio.current_time(), self.seat)
            if call is None:
                if supply.over or self.seat.left <= 0:
                    self.seat.leave()  # the others wait for calls that will not be theirs
                    return
                await self._parked()
                continue
            if await make(call):
                failures = 0
                if think:
                    with trio.move_on_after(think):
                        await supply.ended.wait()
            elif await load.again(failures):
                failures += 1
            else:
                return

    def close(self) -> None:
        """Let no place make another call."""
        self.closed = True
        self._wake_all()

    async def _parked(self) -> None:
        """Wait until a call may be available, or no more begin."""
        event = trio.Event()
        self._idle.append(event)
        self._wait()
        await event.wait()

    def _wake_all(self) -> None:
        idle, self._idle = self._idle, []
        for event in idle:
            event.set()

    def _wait(self) -> None:
        if not self._is_waiting and self._idle:
            self._is_waiting = True
            self.load.supply.wait(self._woken)

    def _woken(self) -> None:
        self._is_waiting = False
        if self.seat.left <= 0 or self.closed:
            self.load.supply.pass_on()
        if not self.load.plan.paced or self.load.supply.over or self.seat.left <= 0:
            self._wake_all()
        elif self._idle:
            self._idle.pop().set()  # the place used last has the connection most likely still open
            self._wait()
