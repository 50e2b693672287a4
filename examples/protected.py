"""A server that wants an access token, and a toy that gives them, to try at home: the toy believes whoever comes.

    trimcp run examples/protected.py --http
    trimcp login http://127.0.0.1:8000/mcp
    trimcp call http://127.0.0.1:8000/mcp whoami

Both listen on this machine alone. A real server names a real authorization server in place of the toy.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trimcp
from trimcp.auth import ResourceServer
from trimcp.testing import toy_issuer

HERE = "http://127.0.0.1:8000/mcp"
ISSUER = "http://127.0.0.1:8001"

auth = ResourceServer(HERE, [ISSUER], scopes_supported=("notes:read",))
"""Takes the toy's tokens; `trimcp run --http` finds it by its name."""

notes: dict[str, list[str]] = {}


@asynccontextmanager
async def lifespan(server: trimcp.Server[None]) -> AsyncIterator[None]:
    """Run the toy beside the server."""
    async with toy_issuer(8001):
        yield


server = trimcp.Server("protected", version="1.0", lifespan=lifespan)


@server.tool
async def whoami(*, ctx: trimcp.Context) -> str:
    """Say who is asking."""
    who = ctx.principal
    if who is None:
        return "nobody, over a pipe"
    return f"{who.subject}, with the scopes {', '.join(sorted(who.scopes or ())) or 'none'}"


@server.tool(scopes=["notes:read"])
async def read_notes(*, ctx: trimcp.Context) -> list[str]:
    """Read the notes of whoever asks."""
    return notes.get(str(ctx.principal), [])


@server.tool(scopes=["notes:read", "notes:write"])
async def write_note(text: str, *, ctx: trimcp.Context) -> str:
    """Write a note."""
    notes.setdefault(str(ctx.principal), []).append(text)
    return f"{len(notes[str(ctx.principal)])} notes"
