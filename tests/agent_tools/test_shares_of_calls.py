"""Calls of all agents together: one who has taken all places loses the oldest to somebody who has next to none."""

from __future__ import annotations

import pytest
import trio

from tests.agent_tools.streams import ADA, BOB, Peer, until
from tests.agent_tools.test_http import agents
from tests.agent_tools.test_websocket import agent, call
from tests.agent_tools.world import call_of
from trimcp.agent_tools import AgentCaller
from trimcp.support.shares import FAR


@pytest.mark.parametrize("context", [None, "ctx-1"])
async def test_who_has_far_more_loses_the_oldest(context: str | None, caplog: pytest.LogCaptureFixture) -> None:
    of = {} if context is None else {"context_id": context}
    async with agent(max_calls=FAR) as (at, eve):
        await eve.say(*(call("wait", str(n), **of) for n in range(FAR + 1)))
        refused = await eve.hear()
        assert (refused["request_id"], refused["error"]["code"]) == (str(FAR), "too_much"), "not for herself"
        await until(lambda: at.run.calls.taken == FAR)
        bob = await at.connect(BOB)
        answer = await bob.ask(**call("add", "b", arguments={"a": 1, "b": 2}, **of))
        assert answer["result"] == 3
        lost = await eve.hear()
        assert (lost["request_id"], lost["error"]["code"]) == ("0", "cancelled")
        assert "too much under way" in lost["error"]["message"]
        await until(lambda: at.server.seen)
        assert at.run.calls.taken == FAR - 1
        await bob.say(call("wait", "b1", **of), call("wait", "b2", **of))
        refused = await bob.hear()
        assert refused["error"]["code"] == "too_much", "he has one, so that she has not sixteen times as much"
        eve.leave()
        bob.leave()
    assert "gave_way" in caplog.text
    assert "flood_refused" in caplog.text


async def test_callers_without_a_token_are_told_apart_by_their_address() -> None:
    eve, more = AgentCaller(address="192.0.2.7"), AgentCaller(address="192.0.2.7", agent="another")
    async with agent(max_calls=FAR) as (at, _):
        peers: list[Peer] = [await at.connect(who) for who in (eve, more)]
        for n, peer in enumerate(peers):
            await peer.say(*(call("wait", f"{n}-{one}") for one in range(FAR // 2)))
        await until(lambda: at.run.calls.taken == FAR)
        ada = await at.connect(AgentCaller(address="192.0.2.8"))
        assert (await ada.ask(**call("add", arguments={"a": 1, "b": 2})))["result"] == 3
        for peer in (*peers, ada):
            peer.leave()


async def test_a_request_over_http_comes_in_where_the_requests_of_one_are_all_that_may_be() -> None:
    async with agents(settings={"max_exchanges": FAR}) as agent:
        waiting = [await agent.begin("POST", "/tools/call", call_of("wait", f"r{n}")) for n in range(FAR)]
        await until(lambda: len(agent.world.calls) == FAR)
        assert (await agent.send("GET", "/tools")).status == 429, "not for himself"
        other = await agent.send("GET", "/tools", authorization="Bearer other-token")
        assert other.status == 200
        first = await waiting[0].done()
        assert (first.status, first.json["error"]["code"]) == (499, "cancelled")
        await agent.world.wait_for(1)
        assert len(agent.world.reasons) == 1
        agent.world.release.set()
        assert [(await one.done()).status for one in waiting[1:]] == [200] * (FAR - 1)


async def test_a_call_that_gives_way_may_shield_its_end() -> None:
    """Its place is free at once, and its session is used again only after it has unwound."""
    async with agent(max_calls=FAR) as (at, eve):
        release = trio.Event()

        @at.server.tool
        async def stubborn() -> None:
            with trio.CancelScope(shield=True):
                await release.wait()

        await eve.say(*(call("stubborn", str(n)) for n in range(FAR)))
        await until(lambda: at.run.calls.taken == FAR)
        for n in range(3):
            bob = await at.connect(AgentCaller(BOB.principal, f"agent-{n}"))
            assert (await bob.ask(**call("add", arguments={"a": n, "b": 2})))["result"] == n + 2
            bob.leave()
        assert (await eve.hear())["error"]["code"] == "cancelled"
        release.set()
        for _ in range(FAR - 1):
            await eve.hear()
        ada = await at.connect(ADA)
        assert (await ada.ask(**call("add", arguments={"a": 1, "b": 2})))["result"] == 3
        ada.leave()
