"""A protected server for tests of the command. The ports of both are in the environment."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trimcp
from trimcp.auth import ResourceServer
from trimcp.testing import toy_issuer

PORT, ISSUER = int(os.environ["PROTECTED_PORT"]), int(os.environ["ISSUER_PORT"])

if os.environ.get("PROTECTED_BY") != "options":
    auth = ResourceServer(f"http://127.0.0.1:{PORT}/mcp", [f"http://127.0.0.1:{ISSUER}"])


@asynccontextmanager
async def lifespan(server: trimcp.Server[None]) -> AsyncIterator[None]:
    async with toy_issuer(ISSUER):
        yield


server = trimcp.Server("protected", version="1.0", lifespan=lifespan)


@server.tool
async def whoami(*, ctx: trimcp.Context) -> str:
    """Say who is asking."""
    return "nobody" if ctx.principal is None else str(ctx.principal.subject)


@server.tool(scopes=["write"])
async def write() -> str:
    """Write."""
    return "written"
