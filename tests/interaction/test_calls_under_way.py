"""What happens between a call and its answer: progress, log messages, cancellation and timeouts."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from tests.fuzz.effort import PATIENCE
from tests.interaction.links import Links
from tests.peers.messages import text_of
from trimcp.client.client import Client
from trimcp.client.session import ClientSession
from trimcp.wire.lifecycle import LoggingMessageParams
from trimcp.wire.revisions import V2025_03_26

MANY = 1_000


async def test_progress_comes_in_order_and_none_is_lost(links: Links, clock: Any) -> None:
    async with links() as session:
        with trio.fail_after(PATIENCE):
            async with session.calling("count", {"to": MANY, "wait": True}) as call:
                steps = [step async for step in call.progress]
                assert text_of(await call.result()) == str(MANY)
            assert [step.progress for step in steps] == list(range(1, MANY + 1))
            assert {step.total for step in steps} == {MANY}
            assert steps[-1].message == (f"step {MANY}" if links.revision >= V2025_03_26 else None)

            async with session.calling("count", {"to": MANY, "wait": False}) as call:
                latest = [step.progress async for step in call.progress]
                await call.result()
            assert latest[-1] == MANY, "the last one leaves before the result"
            assert latest == sorted(latest)
            assert len(latest) < MANY or not links.queues, "the ones before give way"

            assert text_of(await session.call_tool("count", {"to": 5, "wait": True})) == "5", "nobody asked for it"
            async with session.calling("beside") as call:
                assert [step.progress async for step in call.progress] == [1]
                assert text_of(await call.result()) == "both"


async def test_log_messages_go_to_whoever_asked_for_them(links: Links, clock: Any) -> None:
    heard: list[LoggingMessageParams] = []
    client = Client("listener", log_level="warning")
    client.logging(heard.append)
    async with links(client) as session:
        await session.set_log_level("warning")
        for level in ("debug", "warning", "emergency"):
            await session.call_tool("log", {"level": level, "text": level})
        await session.set_log_level("emergency")
        await session.call_tool("log", {"level": "error", "text": "too low"})
    said = [(message.level, message.data, message.logger) for message in heard]
    assert said == [
        ("warning", "bridged debug", "everything.inner"),
        ("warning", {"text": "warning"}, "everything"),
        ("warning", "bridged warning", "everything.inner"),
        ("emergency", {"text": "emergency"}, "everything"),
        ("warning", "bridged emergency", "everything.inner"),
    ]


async def test_cancelling_and_timing_out_stop_the_handler(links: Links, clock: Any) -> None:
    async with links() as session:
        with trio.fail_after(PATIENCE):
            await check_cancelled(links, session)
            await check_left(links, session)
            with trio.CancelScope() as outside:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(session.call_tool, "hang", {"name": "third"})
                    await session.call_tool("wait_for", {"line": "third started"})
                    outside.cancel(reason="the user pressed stop")
            await session.call_tool("wait_for", {"line": f"third stopped: {links.cancelled}"})
        with pytest.raises(trio.TooSlowError), trio.fail_after(PATIENCE) as patience:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.call_tool, "hang", {"name": "late"})
                await session.call_tool("wait_for", {"line": "late started"})
                patience.deadline = trio.current_time() + 0.01
        with trio.fail_after(PATIENCE):
            await session.call_tool("wait_for", {"line": f"late stopped: {links.cancelled}"})
            assert text_of(await session.call_tool("echo", {"text": "next"})) == "next"
    assert "stopped: None" not in " ".join(links.journal())


async def check_cancelled(links: Links, session: ClientSession) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.call_tool, "hang", {"name": "first"})
        await session.call_tool("wait_for", {"line": "first started"})
        nursery.cancel_scope.cancel()
    await session.call_tool("wait_for", {"line": f"first stopped: {links.cancelled}"})


async def check_left(links: Links, session: ClientSession) -> None:
    """Leaving the block of a call without its result cancels it."""
    async with session.calling("hang", {"name": "second"}):
        await session.call_tool("wait_for", {"line": "second started"})
    await session.call_tool("wait_for", {"line": f"second stopped: {links.cancelled}"})
