"""A process over a store of contexts: it carries out one JSON line after another, and answers each with one."""

from __future__ import annotations

import json
import sys
from typing import Any

import trio

from trimcp.agent_tools.contexts.state import ContextLimits
from trimcp.agent_tools.contexts.table import ContextTable
from trimcp.agent_tools.messages.errors import AgentToolsError, VersionConflict
from trimcp.budget import Budget
from trimcp.store.naming import contexts_of

OWNER = ("ada", "agent-a")


async def count(table: ContextTable, id: str, name: str, times: int) -> int:
    """Raise a member that others raise too, each time on top of what it is; return how often others were first."""
    conflicts = 0
    for _ in range(times):
        while True:
            actor = await table.find(OWNER, id)
            version, state = actor.version, actor.snapshot()
            try:
                await actor.update({"n": state.get("n", 0) + 1, name: state.get(name, 0) + 1}, version)
            except VersionConflict:
                conflicts += 1
            else:
                break
    return conflicts


async def do(table: ContextTable, line: dict[str, Any]) -> Any:
    match line:
        case {"create": str(id)}:
            return (await table.create(OWNER, id)).version
        case {"read": str(id)}:
            return (await table.find(OWNER, id)).snapshot()
        case {"update": str(id), "patch": dict(patch)}:
            return (await (await table.find(OWNER, id)).update(patch)).version
        case {"count": str(id), "name": str(name), "times": int(times)}:
            return await count(table, id, name, times)
        case {"destroy": str(id)}:
            await (await table.find(OWNER, id)).destroy()
    return None


async def main() -> None:
    table = ContextTable(ContextLimits(), contexts_of(sys.argv[1]), Budget())
    async with table.running():
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            try:
                answer = {"result": await do(table, json.loads(line))}
            except AgentToolsError as error:
                answer = {"error": error.code}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    trio.run(main)
