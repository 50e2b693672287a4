"""One tool over MCP and over every face of agent tools: one function, one quota, one record of each call."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from secrets import token_hex
from typing import Any

import attrs
import httpx2
import pytest
import trio

import trimcp
from tests.agent_tools.faces import FACES, serving_world
from tests.agent_tools.world import call_of, make_world
from tests.fuzz.effort import PATIENCE
from tests.peers.serving import ServedHere, served
from trimcp.agent_tools import AgentAccess, AgentTools
from trimcp.wire.revisions import LATEST

grpc = pytest.importorskip("grpc", reason="the dependencies of trimcp[grpc]")


@attrs.define(eq=False)
class One:
    """A server with one tool, and what was seen of its calls."""

    calls: list[str] = attrs.field(factory=list)
    asked: list[AgentAccess] = attrs.field(factory=list)
    records: list[dict[str, Any]] = attrs.field(factory=list)
    server: trimcp.Server[Any] = attrs.field(init=False)
    agent_tools: AgentTools = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.server = trimcp.Server("one", "1", audit=trimcp.guard.Audit(write=self.records.append))
        quota = trimcp.Quota(per_second=0.0001, burst=len(WAYS), waiting=0)

        @self.server.tool(quota=quota, annotations=trimcp.ToolAnnotations(read_only_hint=True))
        async def echo(text: str) -> str:
            self.calls.append(text)
            return text

        def allow(access: AgentAccess) -> bool:
            self.asked.append(access)
            return True

        self.agent_tools = AgentTools(
            self.server, allow=allow, authenticate=trimcp.bearer_tokens({"demo-token": "demo"})
        )


HEADERS = {"authorization": "Bearer demo-token"}


async def over_mcp(place: ServedHere, text: str) -> str:
    url = place.url.replace("grpc", "http", 1).rstrip("/") + "/mcp"
    target = trimcp.http(url, headers=HEADERS)
    async with trimcp.Client("mcp").connect(target, revision=LATEST) as session:
        try:
            result = await session.call_tool("echo", {"text": text})
        except trimcp.Overloaded:
            return "too_much"
        return str(result.content[0].text)


async def over_http(place: ServedHere, text: str, path: str = "/tools/call", *, http2: bool = False) -> str:
    url = place.url.replace("grpc", "http", 1).rstrip("/")
    async with httpx2.AsyncClient(http1=not http2, http2=http2, trust_env=False) as web:
        asked = call_of("echo", token_hex(4), context="c", text=text)
        answer = (await web.post(url + path, json=asked, headers=HEADERS)).json()
    return str(answer["result"] if answer["status"] == "success" else answer["error"]["code"])


async def over_http2(place: ServedHere, text: str) -> str:
    return await over_http(place, text, "/mcp", http2=True)


async def over_websocket(place: ServedHere, text: str) -> str:
    return await with_client(place.url.replace("grpc", "ws", 1).rstrip("/") + "/agent", text)


async def over_grpc(place: ServedHere, text: str) -> str:
    return await with_client(place.url, text)


async def with_client(url: str, text: str) -> str:
    async with trimcp.agent_tools.connect(url, token="demo-token") as agent:
        try:
            return str(await agent.call("echo", {"text": text}, context="c"))
        except trimcp.agent_tools.TooMuch:
            return "too_much"


WAYS: dict[str, tuple[Callable[[ServedHere, str], Awaitable[str]], str]] = {
    "mcp": (over_mcp, "http"),
    "http": (over_http, "http"),
    "http/2": (over_http2, "http"),
    "websocket": (over_websocket, "websocket"),
    "grpc": (over_grpc, "grpc"),
}
"""How each is called, and what the audit names its transport."""


async def test_one_function_one_quota_one_record() -> None:
    one = One()
    async with served(one.server, "grpc", agent_tools=one.agent_tools) as place:
        with trio.fail_after(PATIENCE):
            for name, (call, _) in WAYS.items():
                assert await call(place, name) == name
            for name, (call, _) in WAYS.items():
                assert await call(place, name) == "too_much", name
    assert one.calls == list(WAYS)
    assert [record["outcome"] for record in one.records] == ["ok"] * len(WAYS) + ["refused"] * len(WAYS)
    for half in (one.records[: len(WAYS)], one.records[len(WAYS) :]):
        for record, (name, (_, transport)) in zip(half, WAYS.items(), strict=True):
            assert record["transport"] == transport, name
            assert (record["method"], record["target"], record["principal"]) == ("tools/call", "echo", "demo")
            assert record["arguments"] == {"text": f"string({len(name)})"}
            expected = (None, None) if name == "mcp" else ("demo", "c")
            assert (record.get("agent"), record.get("context")) == expected, name
    for access, name in zip(one.asked, (*WAYS, *WAYS), strict=True):
        assert (access.name, access.principal, access.agent, access.version) == ("echo", "demo", "demo", "1")
        assert access.arguments == {"text": name}
        assert access.annotations is not None
        assert access.annotations.read_only_hint is True
        assert (access.agent_context is None) is (name == "mcp")


@pytest.mark.parametrize("face", FACES)
async def test_questions_and_their_answers(face: str) -> None:
    """A tool that asks is run again with the answers, over each face."""
    world = make_world()
    async with serving_world(face, world) as served_here, served_here.link("demo-token") as agent:
        plain = await agent.ask(call_of("ask"))
        assert plain.error["code"] == "tool_error"
        first = (await agent.ask(call_of("ask", "r2", statuses="extended"))).message
        assert first["status"] == "input_required"
        [key] = first["result"]["input_requests"]
        answers = {key: {"action": "accept", "content": {"value": 7}}}
        state = first["result"].get("request_state")
        more = {} if state is None else {"request_state": state}
        done = await agent.ask(call_of("ask", "r3", statuses="extended", input_responses=answers, **more))
        assert done.message["result"] == "accept 7"
        odd = await agent.ask(
            call_of("ask", "r4", statuses="extended", request_state="forged", input_responses=answers)
        )
        assert odd.error["code"] == "malformed"
    assert [record["outcome"] for record in world.audit if record["target"] == "ask"][1:3] == ["asked", "ok"]


def test_a_server_without_agent_tools_imports_none_of_them() -> None:
    program = """
import sys
import httpx2, trio, trimcp
server = trimcp.Server("plain")
@server.tool
def add(a: int, b: int) -> int:
    return a + b
async def main():
    async with trio.open_nursery() as nursery:
        url = (await nursery.start(lambda task_status: trimcp.serve_http(server, port=0, task_status=task_status)))[0]
        async with trimcp.Client("c").connect(trimcp.http(url)) as session:
            assert (await session.call_tool("add", {"a": 1, "b": 2})).structured_content == {"result": 3}
        nursery.cancel_scope.cancel()
trio.run(main)
found = sorted(name for name in sys.modules if name.startswith("trimcp.agent_tools"))
assert not found, found
"""
    root = Path(trimcp.__file__).parent.parent
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True, timeout=PATIENCE)
