"""Everything at once, in an order drawn from a seed: nothing deadlocks, nothing is lost and nothing is left."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import trio
import trio.testing

from tests.session.support import FORM, Answers, linked
from trimcp.errors import ConnectionLost, Overloaded, RemoteError
from trimcp.session.limits import Limits
from trimcp.wire.input_requests import ElicitResult
from trimcp.wire.revisions import LATEST_LEGACY, V2025_06_18, Revision

_LIMITS = (
    Limits(eof_grace=0),
    Limits(max_running=2, backlog_requests=4, outbox_messages=3, eof_grace=0),
    Limits(max_running=4, backlog_requests=8, outbox_bytes=500, eof_grace=0),
)


class _Mix:
    """Tools that do a little of everything, each with its own random numbers."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.started = self.ended = 0

    async def run(self, ctx: Any) -> str:
        self.started += 1
        try:
            for step in range(self.random.randrange(5)):
                await self._step(ctx, step)
            return "done"
        finally:
            self.ended += 1

    async def _step(self, ctx: Any, step: int) -> None:
        kind = self.random.randrange(8)
        if kind == 0:
            await ctx.elicit(f"q{step}", FORM)
        elif kind == 1:
            async with trio.open_nursery() as nursery:
                for n in range(3):
                    nursery.start_soon(ctx.elicit, f"q{step}.{n}", FORM)
        elif kind == 2:
            ctx.request.start_soon(trio.sleep, self.random.random())
        elif kind == 3:
            await ctx.report_progress(step + 0.5)
            ctx.report_progress_nowait(step + 0.7)
        elif kind == 4:
            await ctx.info("x" * self.random.randrange(200))
        elif kind == 5:
            ctx.session.start_soon(trio.sleep, self.random.random())
        elif kind == 6:
            await trio.sleep(self.random.random())
        elif self.random.random() < 0.2:
            raise RuntimeError("crash")

    async def answer(self, job: Any) -> ElicitResult:
        await trio.sleep(self.random.random() * 0.3)
        return ElicitResult(action="accept", content={"name": "x"})


@pytest.mark.parametrize("revision", [V2025_06_18, LATEST_LEGACY])
@pytest.mark.parametrize("framed", [False, True])
@pytest.mark.parametrize("limits", _LIMITS)
@pytest.mark.parametrize("seed", range(2))
async def test_everything_at_once(
    seed: int, limits: Limits, framed: bool, revision: Revision, autojump_clock: Any, caplog: Any
) -> None:
    mix, outcomes = _Mix(seed), Counter[str]()
    answers = Answers(mix.answer)

    async def caller() -> None:
        for _ in range(4):
            with trio.move_on_after(mix.random.choice([0.001, 0.3, 1.0, 60.0])) as scope:
                try:
                    outcomes[await pair.call(wants=1)] += 1
                except Overloaded:
                    outcomes["overloaded"] += 1
                except RemoteError as error:
                    outcomes[error.message] += 1
            if scope.cancelled_caught:
                outcomes["cancelled"] += 1

    with trio.fail_after(10_000):
        async with linked({"run": mix.run}, revision, limits=limits, answers=answers, framed=framed) as pair:
            async with trio.open_nursery() as nursery:
                for _ in range(30):
                    nursery.start_soon(caller)
            await pair.server.jobs.wait_idle()
            await pair.client.jobs.wait_idle()
            await trio.sleep(1)
            await trio.testing.wait_all_tasks_blocked()
            pair.at_rest()
    assert outcomes.total() == 120
    assert outcomes.keys() <= {"done", "internal error", "overloaded", "cancelled"}
    assert outcomes["done"]
    assert mix.started == mix.ended


@pytest.mark.parametrize("seed", range(5))
async def test_an_end_at_any_moment_leaves_nothing(seed: int, autojump_clock: Any, caplog: Any) -> None:
    mix = _Mix(seed)
    with trio.fail_after(10_000):
        async with linked({"run": mix.run}, limits=_LIMITS[seed % 3], answers=Answers(mix.answer)) as pair:

            async def caller() -> None:
                while pair.client.lost is None:
                    await trio.sleep(mix.random.random() * 0.1)
                    try:
                        await pair.call()
                    except (RemoteError, ConnectionLost):
                        pass

            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(caller)
                await trio.sleep(mix.random.random() * 3)
                if seed % 2:
                    pair.server.close()
                else:
                    nursery.cancel_scope.cancel()
    assert mix.started == mix.ended
