"""What a context's `permissions` allow: they bind without an `allow` function that reads them."""

from __future__ import annotations

from typing import Any

import pytest

import trimcp
from tests.agent_tools.streams import world
from tests.agent_tools.test_http import agents, failure
from tests.agent_tools.world import call_of, make_world
from trimcp.agent_tools import AgentCaller

SCOPED = AgentCaller(trimcp.Principal("ada", scopes={"read", "openid"}), "agent-a")
NOBODY = AgentCaller()


def guarded() -> trimcp.Server[Any]:
    server = trimcp.Server("s")

    @server.tool
    async def plain() -> str:
        return "plain"

    @server.tool(scopes=["read"])
    async def read() -> str:
        return "read"

    @server.tool(scopes=["read", "write"])
    async def write() -> str:
        return "write"

    @server.tool
    async def narrow(to: list[str] | None, ctx: trimcp.Context) -> str:
        assert ctx.agent_context is not None
        await ctx.agent_context.update({"permissions": to})
        return "narrowed"

    return server


ALL = {"plain", "read", "write"}


@pytest.mark.parametrize(
    ("who", "permissions", "allowed"),
    [
        (SCOPED, None, {"plain", "read"}),  # the scopes of its token
        (SCOPED, ["read"], {"plain", "read"}),
        (SCOPED, ["openid"], {"plain"}),
        (SCOPED, [], set()),
        (SCOPED, ["plain"], {"plain"}),
        (SCOPED, ["plain", "read"], {"plain", "read"}),
        (SCOPED, ["gone"], set()),  # a tool that is no longer there still excludes the rest
        (SCOPED, ["write"], {"plain"}),  # `write` is also a scope, and what the token lacks stays refused
        (NOBODY, None, ALL),
        (NOBODY, ["read"], {"plain", "read"}),
        (NOBODY, ["read", "write"], ALL),
        (NOBODY, ["plain"], {"plain"}),
        (NOBODY, [], set()),
    ],
)
async def test_calls_are_held_to_the_permissions_of_their_context(
    who: AgentCaller, permissions: list[str] | None, allowed: set[str]
) -> None:
    async with world(guarded()) as at:
        peer = await at.connect(who)
        in_context = {"type": "tool_request", "context_id": "c", "statuses": "extended"}
        if permissions is None:
            await peer.ask(type="context_create", context_id="c")
        else:
            arguments = {"to": permissions}
            await peer.ask(**in_context, tool_name="narrow", request_id="n", arguments=arguments)
        found = {}
        for name in sorted(ALL):
            answer = await peer.ask(**in_context, tool_name=name, request_id=name)
            found[name] = answer["status"]
            assert answer["status"] in ("success", "denied"), answer
        assert {name for name, status in found.items() if status == "success"} == allowed
        without = await peer.ask(type="tool_request", tool_name="plain", request_id="w")
        assert without["status"] == "success", "a call without a context is not held to one"
        peer.leave()


async def test_who_decides_on_its_own_is_left_to_it() -> None:
    async with world(guarded(), bind_permissions=False) as at:
        peer = await at.connect(SCOPED)
        for name, arguments in (("narrow", {"to": ["boss"]}), ("plain", {}), ("read", {})):
            asked = {"tool_name": name, "request_id": name, "context_id": "c", "arguments": arguments}
            assert (await peer.ask(type="tool_request", **asked))["status"] == "success"
        peer.leave()


@pytest.mark.parametrize("wrong", ["read", [1], {"read": True}, 7])
async def test_permissions_are_a_list_of_texts(wrong: Any) -> None:
    world = make_world()

    @world.server.tool
    async def spoil(ctx: trimcp.Context) -> str:
        assert ctx.agent_context is not None
        with pytest.raises(trimcp.agent_tools.messages.errors.MalformedMessage, match="list of texts"):
            await ctx.agent_context.update({"permissions": wrong})
        await ctx.agent_context.update({"permissions": ["spoil"]})
        return "right"

    async with agents(world) as agent:
        assert (await agent.send("POST", "/tools/call", call_of("spoil", context="c"))).json["result"] == "right"
        refused = await agent.send("POST", "/tools/call", call_of("echo", "r2", context="c", text="x"))
        assert failure(refused) == (403, "forbidden")
        assert refused.json["error"]["message"] == "the permissions of the context do not include echo"
