"""The route of a framed `tools/call`, with client and server in one process: how long it is, and whether pages tell it.

Noted is each function when it begins. A coroutine that goes on after it has waited is the event loop's choice, and a
comprehension is a function of its own only until Python 3.11; neither counts. A call that goes back and forth between
modules is hard to follow, so a bound holds it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest
from trio.testing import wait_all_tasks_blocked

import trimcp
from tests.pages import ROOT, blocks_of

MOST = 80

WAITS = {"StreamChannel.receive"}
"""What has begun before the call and waits for it."""


@asynccontextmanager
async def noted() -> AsyncIterator[list[tuple[str, str]]]:
    """Yield the module and the qualified name of each of our functions that begins, in order."""
    begun: list[tuple[str, str]] = []
    known: set[FrameType] = set()  # those that are kept have identities of their own

    def note(frame: FrameType, event: str, arg: Any) -> None:
        code, module = frame.f_code, frame.f_globals.get("__name__", "")
        written = module.startswith("trimcp.") and code.co_filename.endswith(".py")  # not made by attrs
        if event == "call" and written and frame not in known:
            known.add(frame)
            if not code.co_name.startswith("<"):
                begun.append((module, code.co_qualname))

    sys.setprofile(note)
    try:
        yield begun
    finally:
        sys.setprofile(None)
        known.clear()


async def route_of_a_call() -> list[tuple[str, str]]:
    server: trimcp.Server[None] = trimcp.Server("route")

    @server.tool
    async def echo(text: str) -> str:
        return text

    async with noted() as begun, trimcp.Client("route").connect(trimcp.in_process(server, framed=True)) as session:
        await session.call_tool("echo", {"text": "first"})  # which loads and prepares
        await wait_all_tasks_blocked()
        begun.clear()
        await session.call_tool("echo", {"text": "second"})
        return list(begun)


async def test_a_framed_call_changes_module_at_most_80_times() -> None:
    route = [module for module, _ in await route_of_a_call()]
    assert {"trimcp.client.session", "trimcp.session.incoming.job", "trimcp.server.tools"} <= set(route)
    assert sum(one != other for one, other in pairwise(route)) <= MOST


@pytest.mark.parametrize(("heading", "least"), [("## A call comes in", 15), ("## A call goes out", 12)])
async def test_the_architecture_has_the_steps_in_their_order(heading: str, least: int) -> None:
    page = ROOT / "docs" / "design" / "architecture.md"
    below = page.read_text("utf-8").split("\n").index(heading)
    diagram = next(block.text for block in blocks_of(page) if block.line > below)
    begun = [f"{module}.{name}" for module, name in await route_of_a_call()]
    steps = [step for step in steps_of(diagram) if any(is_step(name, step) for name in begun)]
    assert len(steps) >= least
    left = iter(begun)
    late = [step for step in steps if not any(is_step(name, step) for name in left)]
    assert late == []  # else the step before the first of these comes too early on the page


def steps_of(diagram: str) -> Iterator[tuple[str, str]]:
    """Yield the module that begins a line, or one above, and each function that is called there."""
    module = ""
    for line in diagram.split("\n"):
        if beginning := re.match(r" *([a-z]\w*\.[\w.]+)", line):
            module = beginning[1]
        yield from ((module, name) for name in re.findall(r"((?:[A-Z]\w+\.)?\w+)\(", line) if name not in WAITS)


def is_step(name: str, step: tuple[str, str]) -> bool:
    module, function = step
    return f".{module}." in name and name.endswith(f".{function}")
