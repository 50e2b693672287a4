"""Which of the tasks in a store a run of a server carries out: claimed while it has a lease, left when it ends."""

from __future__ import annotations

import logging
import time
from typing import Final

import attrs
import trio

from trimcp.principal import Principal
from trimcp.server.extensions.task_runs import RECORD, TaskRun, TaskRuns
from trimcp.store.tasks import KeptTask
from trimcp.support.cleaning import log_crash
from trimcp.wire.codes import CANCELLED_BY_DRAIN, INTERNAL_ERROR
from trimcp.wire.jsonrpc import encode

log: logging.Logger = logging.getLogger("trimcp.server")

_MOST_RUNS: Final = 5  # processes that may end without a word while they run one task: it may be why they do
_AT_ONCE: Final = 4  # tasks claimed at once, so that other workers get their share
_ENDED_BY_RESTART: Final = "the server ended while this task ran, and does not begin it again"


@attrs.define(eq=False)
class TaskClaims:
    """The lease of a run of a server, and the tasks that it claims."""

    runs: TaskRuns

    async def keep_up(self) -> None:
        """Look around as often as the lease wants, and when there is something; forget what is over."""
        pause, looked = self.runs.served.lease / 3, trio.current_time()
        while True:
            with trio.move_on_at(looked + pause):
                await self.runs.woken.wait()
            self.runs.woken = trio.Event()
            try:
                await self.look_around()
                if trio.current_time() >= looked + pause:
                    looked, now = trio.current_time(), time.time()
                    await self.runs.store.forget((), now)
                    for run in [run for run in self.runs.tasks.values() if run.kept.ended and run.kept.until < now]:
                        run.leave()
            except Exception as error:  # of a store: the next time it may be there again
                looked, self.runs.missed = trio.current_time(), True
                log_crash(log, error, "the leases of tasks could not be renewed")

    async def hear(self) -> None:
        """Look whenever others have changed something."""
        seen = 0
        while True:
            try:
                seen = await self.runs.store.news(seen)
            except Exception as error:
                log_crash(log, error, "changes of tasks cannot be heard")
                return  # they are found when the lease is renewed
            self.runs.wake()

    async def look_around(self) -> None:
        if not self.runs.served.workers:
            for id, note in await self.runs.store.renew(self.runs.runner, self.runs.served.lease):
                if (run := self.runs.tasks.get(id)) is not None:
                    await run.tell(note)
            if self.runs.missed:
                held = await self.runs.store.held(self.runs.runner)
                await self.runs.store.release([id for id in held if id not in self.runs.tasks], self.runs.runner)
                self.runs.missed = False
            await self._take_over()
        await self.runs.tell_watchers()

    async def _take_over(self) -> None:
        """Claim as many tasks that wait as may run, and do with each what its tool wants."""
        while not self.runs.draining:
            free = self.runs.served.running - sum(run.at_work for run in self.runs.tasks.values())
            claimed = await self.runs.store.claim(self.runs.runner, min(free, _AT_ONCE)) if free > 0 else ()
            begun = [await self._begin(kept) for kept in claimed]
            if not all(begun) or not claimed:
                return

    async def _begin(self, kept: KeptTask) -> bool:
        """Begin a task, or leave it to others if there is no room for it; return whether there was."""
        if kept.id in self.runs.tasks:
            self.runs.tasks.pop(kept.id).lose()
        crashed, note = kept.runs, kept.note
        kept.runs, kept.note = crashed + 1, {}
        principal = None if kept.principal is None else Principal(**kept.principal)
        run = TaskRun(self.runs, kept, principal)
        if not self.runs.admit(run, RECORD + len(encode(kept.params)) + len(kept.checkpoint or b"")):
            await self.runs.store.release([kept.id], self.runs.runner)
            return False
        run.stored.set()
        if kept.restart == "again":
            kept.checkpoint = kept.memory = None
            kept.questions, kept.answers, kept.status = {}, {}, "working"
        elif kept.restart == "fail" and crashed and kept.status != "input_required":
            run.fail(CANCELLED_BY_DRAIN, _ENDED_BY_RESTART, {"reason": "drain", "started": True})
        if crashed >= _MOST_RUNS:
            run.fail(INTERNAL_ERROR, f"{_MOST_RUNS} processes have ended while they ran this task")
        if note:
            await run.tell(note)
        try:
            await self.runs.store.save(kept)  # before its handler can end this one
        except BaseException:
            run.leave()
            raise
        self.runs.nursery.start_soon(run.live)
        return True

    async def drain(self) -> None:
        """Let tasks at work end for a while, then stop the rest, which another run may claim."""
        self.runs.draining = True
        with trio.move_on_after(self.runs.served.grace):
            while working := [run for run in self.runs.tasks.values() if run.at_work]:
                await working[0].over.wait()
        left = [run for run in self.runs.tasks.values() if not run.kept.ended]
        for run in left:
            run.lose()
        with trio.move_on_after(self.runs.served.grace):
            for run in left:
                await run.over.wait()
        try:
            for run in left:
                run.kept.runs = min(run.kept.runs, run.begun)  # an orderly end is not the task's doing
                await self.runs.store.save(run.kept)
            await self.runs.store.release([run.id for run in left], self.runs.runner)
        except Exception as error:  # of a store: they are claimed when the lease is over
            log_crash(log, error, "tasks could not be left to others")
