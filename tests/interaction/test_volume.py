"""Many calls at once: none lost, none crossed."""

from __future__ import annotations

import pytest
import trio

from tests.fuzz.effort import PATIENCE
from tests.interaction.links import EVERY_PAIR, Links
from tests.peers.messages import text_of
from trimcp.client.client import Client
from trimcp.wire.revisions import LATEST, LATEST_LEGACY


async def test_pipelined_calls_that_each_ask_all_end(links: Links) -> None:
    client = Client("busy", asks_per_minute=10_000)
    client.set_roots(["file:///a"])
    # Two or three requests each; over HTTP on as many connections as are needed. Promise 1 has the thousands.
    full = 1_000 if links.connected else 200
    many = full if EVERY_PAIR else full // 5
    answers: list[str] = []
    async with links(client) as session:

        async def call() -> None:
            answers.append(text_of(await session.call_tool("where")))

        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                for _ in range(many):
                    nursery.start_soon(call)
    assert len(answers) == many
    assert set(answers) == {answers[0]}
    assert "file:///a" in answers[0]


@pytest.mark.parametrize("transport", ["memory", "stdio"])
@pytest.mark.parametrize("revision", [LATEST_LEGACY, LATEST], ids=str)
async def test_thousands_of_pipelined_calls_are_all_answered_right(links: Links) -> None:
    many = 10_000 if EVERY_PAIR else 2_000
    answers: dict[int, str] = {}
    async with links.wire() as wire:
        await wire.meet()

        async def pour() -> None:
            for first in range(0, many, 100):
                await wire.say(*(wire.call(id, "echo", text=f"number {id}") for id in range(first, first + 100)))

        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pour)
                for _ in range(many):
                    message = await wire.hear()
                    assert message["id"] not in answers
                    answers[message["id"]] = message["result"]["content"][0]["text"]
        await wire.say(wire.call("end", "statistics"))
        assert (await wire.hear())["id"] == "end", "one answer too many"
    assert answers == {id: f"number {id}" for id in range(many)}
