"""A server with everything that could give a secret away: run as a child by `test_secrets`, or beside it."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import trio

import trimcp

__all__ = ["make_server"]


def make_server(records: Any = None) -> trimcp.Server[Any]:
    """A server whose tools take secrets, ask for them, and crash with none of their own."""
    audit = (
        trimcp.guard.Audit(logger="trimcp.audit", arguments="masked")
        if records is None
        else trimcp.guard.Audit(write=records)
    )
    server = trimcp.Server("s", audit=audit, confirm="destructive")

    @server.tool(annotations=trimcp.ToolAnnotations(destructive_hint=True))
    async def login(user: str, password: str, api_key: str, ctx: trimcp.Context) -> str:
        kept = await ctx.once("token", lambda: _token(password))
        answer = await ctx.elicit(
            "Second factor?", {"type": "object", "properties": {"secret": {"type": "string"}}}, key="secret"
        )
        return f"{user} {answer.action} {len(kept)}"

    @server.tool
    async def crash(password: str) -> str:
        raise RuntimeError("it broke")

    @server.tool
    async def wait(password: str) -> str:
        await trio.sleep_forever()
        return ""

    @server.resource("notes://{name}{?token}")
    async def note(name: str, token: str = "") -> str:
        return "a note"

    return server


async def _token(password: str) -> str:
    return f"kept-{len(password)}"


if __name__ == "__main__":
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(trimcp.JsonFormatter())  # with every field of every record
    logging.basicConfig(level=logging.DEBUG, handlers=[handler])
    assert os.environ["SERVICE_TOKEN"]
    trimcp.run_stdio(make_server())
