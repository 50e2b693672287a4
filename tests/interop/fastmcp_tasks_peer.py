"""FastMCP's own tasks, as a server or as a client of one. Runs where `fastmcp-tasks` is installed.

    python tests/interop/fastmcp_tasks_peer.py serve
    python tests/interop/fastmcp_tasks_peer.py call URL

The client prints what it was told as JSON.
"""

import asyncio
import json
import sys

from asgi_serving import serve
from fastmcp import Client, FastMCP
from fastmcp.client.elicitation import ElicitResult
from fastmcp.utilities.tasks import TaskConfig
from fastmcp_tasks import TasksExtension
from fastmcp_tasks.client import call_tool_task

server = FastMCP("fastmcp-tasks")
server.add_extension(TasksExtension())
QUICK = TaskConfig(mode="required")


@server.tool(task=QUICK)
async def double(number: int) -> int:
    """Double a number."""
    return 2 * number


@server.tool(task=QUICK)
async def fail() -> str:
    """Fail."""
    raise ValueError("no luck")


@server.tool(task=QUICK)
async def wait() -> str:
    """Wait for long."""
    await asyncio.sleep(600)
    return "late"


async def fill_in(message: str, response_type: type, params: object, context: object) -> ElicitResult:
    return ElicitResult(action="accept", content={"name": "Ada"})


async def call(url: str) -> None:
    told = {}
    async with Client(url, elicitation_handler=fill_in) as client:
        for name in ("plain", "count", "ask", "fail"):
            result = await client.call_tool(name, raise_on_error=False)
            told[name] = [result.content[0].text, result.is_error]
        task = await call_tool_task(client, "wait")
        before = (await task.status()).status
        await task.cancel()
        while (after := (await task.status()).status) == "working":
            pass
        told["wait"] = [before, after]
    print(json.dumps(told))


if sys.argv[1] == "serve":
    serve(server.http_app(stateless_http=True))
else:
    asyncio.run(call(sys.argv[2]))
