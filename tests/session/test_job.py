"""Why a request was cancelled reaches the log, and a stranger's words cannot forge a line of it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import trio

import trimcp
from trimcp.testing import connected


@pytest.mark.parametrize("how", ["peer", "deadline", "drain", "disconnected"])
async def test_the_log_says_why(how: str, caplog: pytest.LogCaptureFixture, autojump_clock: Any) -> None:
    server: trimcp.Server[None] = trimcp.Server("s")

    @server.tool(timeout=5.0 if how == "deadline" else None)
    async def wait() -> str:
        await trio.sleep_forever()
        raise AssertionError

    with caplog.at_level(logging.DEBUG, "trimcp"):
        async with connected(server) as session, trio.open_nursery() as nursery:

            async def call(scope: trio.CancelScope) -> None:
                with scope:
                    try:
                        await session.call_tool("wait")
                    except (trimcp.RemoteError, trimcp.ConnectionLost):
                        pass

            scope = trio.CancelScope()
            nursery.start_soon(call, scope)
            await trio.testing.wait_all_tasks_blocked()
            if how == "peer":
                scope.cancel(reason="line one\nERROR forged")
            elif how == "drain":
                await session.peer.drain(1)
            elif how == "disconnected":
                session.session.sink.close()
                session.session.lose("gone")
            await trio.sleep(10)
    lines = [record.getMessage() for record in caplog.records if "is cancelled" in record.getMessage()]
    wanted = {"peer": "cancelled by peer", "deadline": "deadline", "drain": "drain", "disconnected": "disconnected"}
    assert len(lines) == 1, lines
    assert wanted[how] in lines[0]
    assert "tools/call" in lines[0]
    assert "\n" not in lines[0]
