"""A server that says, wherever it says something, what could control a terminal or pass for a line of the command's."""

from __future__ import annotations

import sys
from typing import Any

import trimcp
from trimcp import Context, ErrorReply, ToolError

BAD = "bad\x1b[2J\x07\u202e\u2028\x9b\r\nError: all is lost"

print(BAD, file=sys.stderr)
server = trimcp.Server(BAD, version=BAD, instructions="bad\x1b[2J")


@server.tool(title=BAD, description=BAD)
async def says(ctx: Context[Any]) -> str:
    await ctx.report_progress(1, message=BAD)
    await ctx.log("info", BAD, logger=BAD)
    return BAD


@server.tool(description=BAD)
async def fails() -> str:
    raise ToolError(BAD)


@server.tool
async def crashes() -> str:
    raise RuntimeError(BAD)


@server.tool
async def refuses() -> str:
    raise ErrorReply(77, BAD, {"bad": BAD})


@server.tool
async def asks(ctx: Context[Any]) -> str:
    return str(await ctx.elicit(BAD, bool))


@server.resource("notes:///bad", title=BAD, description=BAD, mime_type=BAD)
async def bad() -> str:
    return BAD


@server.prompt(description=BAD)
async def asked() -> str:
    return BAD
