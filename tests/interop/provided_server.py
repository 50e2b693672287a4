"""A server whose tools others bring, and a provider that brings some: programs for tests of other people's clients.

`python provided_server.py own|hypercorn` serves MCP and agent tools on a free port and prints where;
`python provided_server.py provide URL` brings `provided.shout` and `provided.wait` until it is ended.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import trio

import trimcp
from trimcp.agent_tools import AgentTools, RegistrationRules, provide
from trimcp.transports.http.interfaces import Head
from trimcp.transports.http.peers.identity import Refused

_TOKEN = "Bearer provided"

server = trimcp.Server("interop", "1.0")


def identify(head: Head) -> trimcp.Principal | Refused:
    """The provider by its token; everybody else is a guest."""
    if head.headers.get("authorization") == _TOKEN:
        return trimcp.Principal("provided", scopes={"tools:register"})
    return trimcp.Principal("guest", scopes=())


tools = AgentTools(server, authenticate=identify, registration=RegistrationRules())


@server.tool
async def left() -> dict[str, Any]:
    """What is there of providers and of calls, beside this one."""
    (run,) = tools._runs.values()
    jobs = [job for session in run.server.sessions for job in session.jobs]
    return {
        "tools": [manifest.name for manifest in tools.catalog.manifests() if "." in manifest.name],
        "owners": len(tools.catalog._table.owned),
        "streams": sum(1 for session in run.server.sessions if session.transport.owed),
        "calls": sum(1 for job in jobs if job.request.method.name == "tools/call") - 1,
        "under_way": run.calls.taken,
    }


async def shout(text: str, ctx: trimcp.Context) -> str:
    """Say it loud, with progress."""
    await ctx.report_progress(1, 2)
    return text.upper()


async def wait() -> str:
    """Never answer."""
    await trio.sleep_forever()
    raise AssertionError


def main() -> None:
    word, *more = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    if word == "provide":
        trio.run(lambda: provide(more[0], [shout, wait], token=_TOKEN.partition(" ")[2]))
        return
    settings = trimcp.HttpSettings(agent_tools=tools)
    software: Any = word
    trimcp.run_http(server, port=0, settings=settings, software=software, ready=lambda urls: print(*urls, flush=True))


if __name__ == "__main__":
    main()
