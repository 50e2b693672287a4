"""A request that is sent again in its context gets the answer that it got, and is not carried out again."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import trio

import trimcp
from tests.agent_tools.streams import until, world
from tests.agent_tools.test_against_service import TRANSPORTS, site
from tests.agent_tools.test_http import agents, failure
from tests.agent_tools.world import call_of
from trimcp import agent_tools
from trimcp.agent_tools import ContextLimits
from trimcp.agent_tools.client.connection import opened_wire
from trimcp.agent_tools.client.wire import AgentTarget
from trimcp.agent_tools.messages.messages import ToolRequest


def counting(**limits: Any) -> tuple[trimcp.Server[Any], list[str]]:
    server, ran = trimcp.Server("s"), list[str]()

    @server.tool
    async def pay(amount: float, to: str = "") -> dict[str, Any]:
        ran.append("pay")
        return {"paid": amount, "number": len(ran)}

    @server.tool
    async def fail() -> None:
        ran.append("fail")
        raise trimcp.ToolError(f"the {len(ran)}th failed")

    @server.tool
    async def crash() -> None:
        ran.append("crash")
        raise KeyError("secret")

    @server.tool(timeout=0.01)
    async def slow() -> None:
        ran.append("slow")
        await trio.sleep_forever()

    @server.tool
    async def ask(ctx: trimcp.Context) -> str:
        ran.append("ask")
        return (await ctx.elicit("Sure?", bool)).action

    @server.tool
    async def text(size: int) -> str:
        ran.append("text")
        return "x" * size

    return server, ran


def call(name: str, request_id: str = "1", context_id: str | None = "c", **arguments: Any) -> dict[str, Any]:
    found = {"type": "tool_request", "tool_name": name, "request_id": request_id, "arguments": arguments}
    return found if context_id is None else {**found, "context_id": context_id}


async def test_the_same_request_gets_the_same_answer_and_a_different_one_409() -> None:
    server, ran = counting()
    async with world(server) as at:
        peer = await at.connect()
        first = await peer.ask(**call("pay", amount=5, to="zoe"))
        assert first["result"] == {"paid": 5.0, "number": 1}
        again = {**call("pay"), "arguments": {"to": "zoe", "amount": 5}}  # in another order
        assert await peer.ask(**again) == first
        other = await at.connect()
        assert await other.ask(**again) == first, "over whatever connection"
        for different in (
            call("pay", amount=6, to="zoe"),
            call("fail"),
            {**call("pay", amount=5, to="zoe"), "version": "1"},
        ):
            refused = await peer.ask(**different)
            assert (refused["status"], refused["error"]["code"]) == ("error", "duplicate_request")
        assert ran == ["pay"]
        assert (await peer.ask(**call("pay", "2", amount=5, to="zoe")))["result"]["number"] == 2
        assert (await peer.ask(**call("pay", "1", "another", amount=5)))["result"]["number"] == 3
        assert (await peer.ask(**call("pay", "1", None, amount=5)))["result"]["number"] == 4
        assert (await peer.ask(**call("pay", "1", None, amount=5)))["result"]["number"] == 5, "no context, no memory"
        state = (await peer.ask(type="context_read", context_id="c"))["state"]
        assert [each["request_id"] for each in state["tool_history"]] == ["1", "2"]
        peer.leave()
        other.leave()


async def test_errors_of_the_tool_are_answers_and_others_are_not() -> None:
    server, ran = counting()
    async with world(server) as at:
        peer = await at.connect()
        for name, remembered in (("fail", True), ("crash", True), ("slow", False), ("ask", False)):
            asked = {**call(name, name), "statuses": "extended"}
            first = await peer.ask(**asked)
            assert first["status"] != "success"
            again = await peer.ask(**asked)
            assert again == first or not remembered
            assert ran.count(name) == (1 if remembered else 2), name
        questions = await peer.ask(**{**call("ask", "ask"), "statuses": "extended"})
        [key] = questions["result"]["input_requests"]
        answers = {key: {"action": "accept", "content": {"value": True}}}
        done = {**call("ask", "ask"), "statuses": "extended", "input_responses": answers}
        state = questions["result"].get("request_state")
        answered = await peer.ask(**done, **({} if state is None else {"request_state": state}))
        assert answered["result"] == "accept", "answers to questions have the id of the request"
        peer.leave()


async def test_it_is_forgotten_with_its_context_and_beyond_the_bound() -> None:
    server, ran = counting()
    async with world(server, contexts=ContextLimits(answers=20_000, gone=0)) as at:
        peer = await at.connect()
        held = at.server.budget.held
        for number in range(200):
            assert (await peer.ask(**call("text", str(number), size=3_000)))["status"] == "success"
        context = at.run.contexts.get(("ada", "agent-a"), "c")
        assert context is not None
        answers = context.answers
        assert 2 <= len(answers.by_id) <= 6
        assert sum(3_000 + len(asked) for asked, _, _ in answers.by_id.values()) <= answers.held <= 20_000
        assert at.server.budget.held - held >= answers.held
        ran.clear()
        await peer.ask(**call("text", "199", size=3_000))
        assert ran == []
        await peer.ask(**call("text", "0", size=3_000))
        assert ran == ["text"]
        await peer.ask(**call("text", "large", size=30_000))
        await peer.ask(**call("text", "large", size=30_000))
        assert ran == ["text"] * 3, "too large to be kept"
        await peer.ask(type="context_destroy", context_id="c")
        await peer.ask(**call("text", "199", size=3_000))
        assert ran == ["text"] * 4
        peer.leave()


async def test_none_are_kept_if_so_set() -> None:
    server, ran = counting()
    async with world(server, contexts=ContextLimits(answers=0)) as at:
        peer = await at.connect()
        for _ in range(2):
            await peer.ask(**call("pay", amount=5))
        assert ran == ["pay"] * 2
        peer.leave()


async def test_the_same_request_while_it_is_under_way_is_refused() -> None:
    async with agents() as agent:
        first = await agent.begin("POST", "/tools/call", call_of("wait", context="c"))
        await until(lambda: agent.world.calls)
        assert failure(await agent.send("POST", "/tools/call", call_of("wait", context="c"))) == (
            409,
            "duplicate_request",
        )
        agent.world.release.set()
        answer = await first.done()
        again = await agent.send("POST", "/tools/call", call_of("wait", context="c"))
        assert (again.status, again.json) == (200, answer.json)
        streamed = await agent.send("POST", "/tools/call", call_of("wait", context="c"), accept="text/event-stream")
        assert b"tool_response" in streamed.body
        assert agent.world.calls == ["wait"]
        assert failure(await agent.send("POST", "/tools/call", call_of("echo", context="c", text="x"))) == (
            409,
            "duplicate_request",
        )


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_it_holds_on_every_face(transport: str) -> None:
    async with (
        site(transport) as found,
        agent_tools.connect(found.url, token="token") as agent,
        opened_wire(AgentTarget(found.url, token="token")) as wire,
        agent.context("c") as context,
    ):
        request = ToolRequest(tool_name="remember", arguments={"key": "a", "value": "b"}, request_id="1")
        request.context_id = "c"
        first, again = [await wire.call(attrs.evolve(request), None) for _ in range(2)]
        assert (first.status, first.result, again.result) == ("success", 1, 1)
        assert (await context.read()).version == 1
        different = attrs.evolve(request, arguments={"key": "a", "value": "c"})
        answer: Any
        try:
            answer = (await wire.call(different, None)).error
        except agent_tools.RequestUnderWay as error:
            answer = error.body()
        assert answer["code"] == "duplicate_request"
        failing = ToolRequest(tool_name="fail", arguments={}, request_id="2", context_id="c")
        errors = [(await wire.call(attrs.evolve(failing), None)).error for _ in range(2)]
        assert errors[0] == errors[1]
        assert errors[0] is not None
