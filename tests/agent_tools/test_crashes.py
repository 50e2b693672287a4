"""Whatever a function of the user's raises or leaves open ends no agent tools: the rows of reference/errors.md."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

import trimcp
from tests.agent_tools.faces import FACES, AgentLink, serving_world
from tests.agent_tools.rpc_faces import RPC_FACES
from tests.agent_tools.world import World, call_of
from tests.interaction import crashing_server
from tests.interaction.crashing_server import LEFT, RAISED, SECRET
from tests.interaction.everything_server import Journal
from trimcp.agent_tools import AgentTools, RegistrationRules

EVERY = {**FACES, **RPC_FACES}
_TOLD = ("ToolError", "ErrorReply", "trio.TooSlowError")  # the agent is told what the tool says
_PLACES = ("in_tool", "in_work", "in_middleware", "in_thread_of_tool", "in_context")


def _world(journal: Path) -> World:
    """The tools that crash, one that crashes in a task of its context, and functions that decide by leaving."""
    server = crashing_server.make_server(Journal(journal))

    @server.tool
    async def in_context(what: str, ctx: trimcp.Context) -> str:
        assert ctx.agent_context is not None
        over = trio.Event()

        async def work() -> None:
            try:
                await crashing_server._do(what)
            finally:
                over.set()

        ctx.agent_context.start_soon(work)
        await over.wait()
        return "done"

    @server.tool
    async def guarded() -> str:
        raise AssertionError

    def allow(access: Any) -> bool:
        return sys.exit(SECRET) if access.name == "guarded" else True

    async def approve(manifest: Any, caller: Any) -> bool:
        sys.exit(SECRET)

    world = World(server)
    world.agent_tools = AgentTools(
        server,
        registration=RegistrationRules(anonymous_on_loopback=True, approve=approve),
        implementations={"leave": lambda: None},
        allow=allow,
    )
    return world


async def _crashed(agent: AgentLink, caplog: pytest.LogCaptureFixture, message: dict[str, Any]) -> None:
    """Send what crashes: its answer says nothing, the log has one ERROR."""
    caplog.clear()
    reply = await agent.ask(message)
    assert reply.error["code"] == "crashed", message
    assert SECRET not in str(reply.message)
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1, message


@pytest.mark.parametrize("face", EVERY)
async def test_no_function_ends_the_service(face: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = _world(tmp_path / "journal")
    async with serving_world(face, world, faces=EVERY) as served, served.link(None) as agent:
        for place in _PLACES:
            rows = RAISED if place == "in_thread_of_tool" else (*RAISED, *LEFT)
            for n, what in enumerate(rows):
                message = call_of(place, id=f"{place} {n}", context="c" if place == "in_context" else None, what=what)
                if place != "in_context" and what not in _TOLD:
                    await _crashed(agent, caplog, message)
                    continue
                caplog.clear()
                reply = await agent.ask(message)
                if place == "in_context":
                    assert reply.message["result"] == "done"
                    assert [record.levelname for record in caplog.records if record.levelno >= logging.ERROR] == [
                        "ERROR"
                    ]
                else:
                    assert reply.error["code"] == "tool_error", message
        await _crashed(agent, caplog, call_of("exit_in_process", id="process"))
        await _crashed(agent, caplog, call_of("guarded", id="guarded"))
        await _crashed(
            agent, caplog, {"type": "register_tool", "tool": {"name": "leave", "parameters": {"type": "object"}}}
        )
        assert (await agent.ask(call_of("echo", id="after", text="as ever"))).message["result"] == "as ever"
