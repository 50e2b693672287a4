"""A server whose tools are also called by the agent-tools protocol, with contexts and tools registered by manifest.

    trimcp run examples/agent_tools.py --agent-tools --port 8080

Then, in another shell:

    curl -X POST http://localhost:8080/tools/register -H "Content-Type: application/json" \
        -d '{"name": "get_weather", "description": "Get current weather for a city", "parameters":
             {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}'
    curl -X POST http://localhost:8080/mcp -H "Authorization: Bearer demo-token" -H "Content-Type: application/json" \
        -d '{"type": "tool_request", "tool_name": "get_weather", "arguments": {"city": "Beijing"},
             "request_id": "req-001", "context_id": "ctx-001"}'

The first of these shows no token: on this machine ANYBODY MAY REGISTER TOOLS with this server, which says so when it
starts. That is for trying things out; leave `anonymous_on_loopback` out of a server of your own. Calls do need a token,
and it says which agent calls: `demo-token`, `hr-token` (which alone may call `pay_salary`), or `units-token`, which
provider.py shows: a program that brings more tools.
"""

from __future__ import annotations

from typing import TypedDict

import trio

import trimcp
from trimcp.agent_tools import AgentAccess, AgentTools, RegistrationRules
from trimcp.guard import Denied

server = trimcp.Server("agent-tools-example", "1")


class Weather(TypedDict):
    city: str
    temperature: int
    unit: str


TEMPERATURES = {"Beijing": 5, "Lisbon": 17, "Oslo": -3}


def get_weather(city: str) -> Weather:
    """Return the weather. This is no tool until a manifest of that name is registered."""
    if city not in TEMPERATURES:
        raise trimcp.ToolError(f"no weather is known for {city}")
    return {"city": city, "temperature": TEMPERATURES[city], "unit": "Celsius"}


@server.tool
async def count_to(number: int, ctx: trimcp.Context) -> int:
    """Count slowly, with progress."""
    for reached in range(1, number + 1):
        await trio.sleep(0.1)
        await ctx.report_progress(reached, number)
    return number


@server.tool
async def remember(key: str, value: str, ctx: trimcp.Context) -> int:
    """Keep a value in the context of the call, and return the context's version."""
    if ctx.agent_context is None:
        raise trimcp.ToolError("only a call with a context can remember something")
    return await ctx.agent_context.update({"intermediate_results": {key: value}})


@server.tool
def pay_salary(employee: str, amount: float) -> str:
    """Pay a salary. Only agents of the human resources department may."""
    return f"paid {amount:.2f} to {employee}"


def allow(call: AgentAccess) -> bool | Denied:
    """Decide on each call, over both protocols."""
    if call.name == "pay_salary" and not call.agent.startswith("hr-"):
        return Denied("only agents of HR pay salaries")
    return True


agent_tools = AgentTools(
    server,
    implementations={"get_weather": get_weather},
    # ANYBODY ON THIS MACHINE may register tools without a token. Leave this out of a server of your own.
    registration=RegistrationRules(anonymous_on_loopback=True),
    authenticate=trimcp.bearer_tokens({"demo-token": "demo", "hr-token": "hr-payroll", "units-token": "units"}),
    allow=allow,
)


if __name__ == "__main__":
    trimcp.run_http(server, agent_tools=agent_tools, port=8080)
