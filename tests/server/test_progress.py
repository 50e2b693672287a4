"""Progress over the runs of one handler: it never goes back."""

from __future__ import annotations

import pytest

import trimcp
import trimcp.testing


def asking() -> tuple[trimcp.Server[None], trimcp.Client]:
    server: trimcp.Server[None] = trimcp.Server("s")

    @server.tool
    async def book(ctx: trimcp.Context) -> str:
        await ctx.report_progress(1, 4)
        await ctx.report_progress(2.5, 4)
        await ctx.elicit("Sure?", bool)
        await ctx.report_progress(3, 4)
        await ctx.elicit("Really?", bool)
        await ctx.report_progress(4, 4)
        return "booked"

    @server.tool
    def in_a_thread(ctx: trimcp.ThreadContext) -> str:
        ctx.report_progress(1)
        ctx.elicit("Sure?", bool)
        ctx.report_progress(2)
        return "done"

    client = trimcp.Client("c")

    @client.elicitation
    async def answer(params: trimcp.ElicitParams) -> trimcp.ElicitResult:
        return trimcp.ElicitResult("accept", {"value": True})

    return server, client


@pytest.mark.parametrize(("tool", "values"), [("book", [1, 2.5, 3, 4]), ("in_a_thread", [1, 2])])
@pytest.mark.parametrize("force_rerun", [False, True])
@trimcp.testing.every_revision
async def test_a_run_after_a_question_does_not_send_progress_back(
    tool: str, values: list[float], force_rerun: bool, revision: trimcp.Revision
) -> None:
    if revision < "2025-06-18":
        return  # it cannot ask
    server, client = asking()
    async with (
        trimcp.testing.connected(server, client, revision=revision, force_rerun=force_rerun) as session,
        session.calling(tool) as call,
    ):
        told = [step.progress async for step in call.progress]
        assert not (await call.result()).is_error
    assert told == values
