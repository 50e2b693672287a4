"""A server of agent tools through gRPC, and gRPC's own client for it, which nobody here wrote."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import trio

import trimcp
from tests.peers.serving import ServedHere, served
from trimcp.agent_tools import AgentTools
from trimcp.agent_tools.proto import agent_tools_pb2

PB: Any = agent_tools_pb2
SERVICE = "/trimcp.v1.AgentTools/"

_METHODS = {
    "Call": ("unary_unary", "ToolRequest", "ToolResponse"),
    "CallStream": ("unary_stream", "ToolRequest", "CallEvent"),
    "ListTools": ("unary_unary", "ListToolsRequest", "ToolList"),
    "RegisterTool": ("unary_unary", "RegisterToolRequest", "ToolsRegistered"),
    "RemoveTool": ("unary_unary", "RemoveToolRequest", "ToolRemoved"),
    "CreateContext": ("unary_unary", "ContextCreate", "ContextState"),
    "ReadContext": ("unary_unary", "ContextRead", "ContextState"),
    "UpdateContext": ("unary_unary", "ContextUpdate", "ContextUpdate"),
    "DestroyContext": ("unary_unary", "ContextDestroy", "ContextDestroyed"),
    "WatchContext": ("unary_stream", "ContextWatch", "ContextEvent"),
    "Provide": ("stream_stream", "FromProvider", "ToProvider"),
}


def stub(channel: grpc.Channel, name: str) -> Any:
    """A method of the service, as generated code would have it."""
    kind, asked, answer = _METHODS[name]
    return getattr(channel, kind)(
        SERVICE + name,
        request_serializer=getattr(PB, asked).SerializeToString,
        response_deserializer=getattr(PB, answer).FromString,
    )


def make_server(ended: list[str] | None = None) -> trimcp.Server[Any]:
    server = trimcp.Server("s", version="1")

    @server.tool
    async def add(a: int, b: int) -> int:
        return a + b

    @server.tool
    async def steps(ctx: trimcp.Context[Any]) -> str:
        for step in range(3):
            await ctx.report_progress(step, 3, f"step {step}")
        return "done"

    @server.tool
    async def wait(ctx: trimcp.Context[Any]) -> str:
        await ctx.report_progress(0, 1, "waiting")
        try:
            await trio.sleep_forever()
        finally:
            (ended if ended is not None else []).append("ended")
        return "never"

    @server.tool
    async def fail() -> str:
        raise trimcp.ToolError("no luck")

    @server.tool
    async def crash() -> str:
        raise RuntimeError("boom")

    return server


@asynccontextmanager
async def serving(
    ended: list[str] | None = None, settings: trimcp.HttpSettings | None = None, **options: Any
) -> AsyncIterator[ServedHere]:
    """Serve it; options are those of `AgentTools`."""
    server = make_server(ended)
    tools = AgentTools(server, **options)
    async with served(server, "grpc", settings=settings, agent_tools=tools) as place:
        yield place
