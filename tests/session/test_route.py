"""How often a call changes module: a framed `tools/call`, with client and server in one process.

Counted is each function that begins in another module than the one that began before it. A coroutine that goes on after
it has waited is the event loop's choice, and a comprehension is a function of its own only until Python 3.11; neither
counts. A call that goes back and forth is hard to follow, so a bound holds it.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from types import FrameType
from typing import Any

from trio.testing import wait_all_tasks_blocked

import trimcp

MOST = 80


async def test_a_framed_call_changes_module_at_most_80_times() -> None:
    server: trimcp.Server[None] = trimcp.Server("route")

    @server.tool
    async def echo(text: str) -> str:
        return text

    begun: list[str] = []
    known: set[FrameType] = set()  # those that are kept have identities of their own

    def note(frame: FrameType, event: str, arg: Any) -> None:
        code, module = frame.f_code, frame.f_globals.get("__name__", "")
        written = module.startswith("trimcp.") and code.co_filename.endswith(".py")  # not made by attrs
        if event == "call" and written and frame not in known:
            known.add(frame)
            if not code.co_name.startswith("<"):
                begun.append(module)

    sys.setprofile(note)
    try:
        async with trimcp.Client("route").connect(trimcp.in_process(server, framed=True)) as session:
            await session.call_tool("echo", {"text": "first"})  # which loads and prepares
            await wait_all_tasks_blocked()
            begun.clear()
            await session.call_tool("echo", {"text": "second"})
            route = list(begun)
    finally:
        sys.setprofile(None)
        known.clear()
    assert {"trimcp.client.session", "trimcp.session.job", "trimcp.server.tools"} <= set(route)
    assert sum(one != other for one, other in pairwise(route)) <= MOST
