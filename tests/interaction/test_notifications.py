"""Notifications of extensions, from either side, over every transport."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from tests.fuzz.effort import PATIENCE
from tests.interaction.links import Links
from tests.peers.messages import text_of
from trimcp.client.client import Client
from trimcp.errors import LocalError


async def test_notifications_of_an_extension_arrive_on_both_sides(links: Links, clock: Any) -> None:
    client = Client("tester", "0.1")
    announced: list[Any] = []
    arrived = trio.Event()

    @client.notification("notifications/example/announced")
    async def note(params: Any) -> None:
        announced.append(params["what"])
        arrived.set()

    async with links(client) as session:
        with trio.fail_after(PATIENCE):
            await session.notify("notifications/example/told", {"what": "tea"})
            await session.notify("notifications/example/unknown")
            assert text_of(await session.call_tool("wait_for", {"line": "told tea"})) == "told tea"
            assert text_of(await session.call_tool("announce", {"what": "milk"})) == "announced"
            await arrived.wait()
            assert announced == ["milk"]
            for name in ("notifications/progress", "tools/call"):
                with pytest.raises(LocalError, match="is of the protocol itself"):
                    await session.notify(name)
            with pytest.raises(LocalError, match="JSON cannot carry"):
                await session.notify("notifications/example/told", {"what": 2**70})
