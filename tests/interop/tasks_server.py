"""A server whose calls are tasks, for clients of other makes."""

from __future__ import annotations

import trio

import trimcp

server = trimcp.Server("tasks", version="1")
server.tasks(poll_interval=0.05, grace=0)
FORM = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


@server.tool
async def plain() -> str:
    """Be no task."""
    return "plain"


@server.tool(task="required")
async def count(ctx: trimcp.Context, to: int = 3) -> str:
    """Count."""
    for number in range(to):
        await ctx.report_progress(number + 1, to, "counting")
        await trio.sleep(0.05)
    return f"counted to {to}"


@server.tool(task="required")
async def ask(ctx: trimcp.Context) -> str:
    """Ask for a name."""
    answer = await ctx.elicit("Your name?", FORM)
    return f"Hello {(answer.content or {}).get('name')}"


@server.tool(task="required")
async def fail() -> str:
    """Fail as a tool does."""
    raise trimcp.ToolError("no luck")


@server.tool(task="required")
async def wait() -> None:
    """Wait for ever."""
    await trio.sleep_forever()


if __name__ == "__main__":
    trimcp.run_http(server, port=0, grace=0.1, ready=lambda urls: print(*urls, flush=True))
