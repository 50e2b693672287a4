"""Providers on streams: their tools are called over both protocols, live as long as the stream, and fail with it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import trimcp
from tests.agent_tools.streams import ADA, BOB, MANIFEST, Peer, World, world
from trimcp.agent_tools import ERRORS_BY_CODE, AgentCaller, ProviderGone, RegistrationRules
from trimcp.agent_tools.bindings.websocket import AgentStream
from trimcp.agent_tools.messages.messages import ProvideTools
from trimcp.errors import ConnectionLost
from trimcp.session.drive import direct_ends
from trimcp.support.cleaning import digest
from trimcp.testing.connect import every_revision
from trimcp.wire.revisions import LATEST, Revision

SHOUT = "agent-a.shout"


def call(request_id: str = "1", name: str = SHOUT, **members: Any) -> dict[str, Any]:
    return {"type": "tool_request", "tool_name": name, "arguments": {"text": "a"}, "request_id": request_id, **members}


def success(asked: dict[str, Any], result: Any = None) -> dict[str, Any]:
    return {"type": "tool_response", "request_id": asked["request_id"], "status": "success", "result": result}


def failure(asked: dict[str, Any], code: str, **members: Any) -> dict[str, Any]:
    error = {"code": code, "message": f"it is {code}", **members}
    return {"type": "tool_response", "request_id": asked["request_id"], "status": "error", "error": error}


@asynccontextmanager
async def provided(*manifests: Any, **options: Any) -> AsyncIterator[tuple[World, Peer, Peer]]:
    """A server, a provider with its tools, and an agent of somebody else."""
    async with world(**options) as at:
        yield at, await at.provider(*manifests), await at.connect(BOB)


@asynccontextmanager
async def mcp_client(at: World, revision: Revision = LATEST) -> AsyncIterator[trimcp.ClientSession]:
    """A client of MCP in the same run of the server."""
    ours, theirs = direct_ends()
    at.nursery.start_soon(at.running.serve, ours)
    async with trimcp.Client("c").connect(theirs, revision=revision) as session:
        yield session


async def test_a_tool_is_called_at_its_provider() -> None:
    async with provided() as (_, provider, agent):
        await agent.say(call())
        asked = await provider.hear()
        id = asked.pop("request_id")
        assert asked == {
            "type": "tool_request",
            "tool_name": "shout",
            "version": "1",
            "arguments": {"text": "a"},
            "progress": True,
            "statuses": "extended",
        }
        await provider.say(success({"request_id": id}, ["A", 1, None]))
        assert await agent.hear() == success({"request_id": "1"}, ["A", 1, None])


async def test_a_picture_has_each_provider_and_context_and_no_context_s_id() -> None:
    async with provided() as (at, provider, agent):
        await agent.say(call(context_id="secret-context"))
        await provider.hear()
        with at.server.observe() as pictures:
            found = {one.kind: one for one in pictures.picture().beside}
        assert found["provider"].name == "agent-a"
        assert found["provider"].state == "tools: 1"
        assert found["context"].name == f"{digest('secret-context')} of {BOB.agent}"
        assert found["context"].state == "calls: 1, tasks: 0, watchers: 0"
        assert "secret-context" not in str(found)
    assert at.server.beside == []


async def test_arguments_are_checked_before_the_provider_sees_them() -> None:
    async with provided() as (_, provider, agent):
        answer = await agent.ask(**call(arguments={"text": 1}))
        assert answer["error"]["code"] == "invalid_arguments"
        await wait_all_tasks_blocked()
        assert provider.nothing()


@pytest.mark.parametrize("code", [*ERRORS_BY_CODE, "unheard"])
async def test_an_error_of_each_code_reaches_the_agent(code: str) -> None:
    own = {"tool_error", "invalid_arguments", "forbidden", "too_much", "provider_gone", "deadline", "draining"}
    async with provided() as (_, provider, agent):
        await agent.say(call(statuses="extended"))
        await provider.say(failure(await provider.hear(), code, data={"problems": ["x"]}))
        answer = await agent.hear()
        # What else a provider may say of itself is no fault of who calls.
        expected = code if code in own else "crashed"
        assert answer["error"]["code"] == expected
        assert answer["status"] == ERRORS_BY_CODE[expected].extended_status
        assert "it is" in answer["error"]["message"] or answer["error"]["data"]["problems"] == ["x"]


@pytest.mark.parametrize("code", ["tool_error", "invalid_arguments", "forbidden", "provider_gone", "crashed"])
async def test_an_error_reaches_a_client_of_mcp(code: str) -> None:
    async with provided() as (at, provider, _), mcp_client(at) as session, trio.open_nursery() as nursery:

        async def answer() -> None:
            await provider.say(failure(await provider.hear(), code))

        nursery.start_soon(answer)
        if code in ("tool_error", "invalid_arguments"):
            assert (await session.call_tool(SHOUT, {"text": "a"})).is_error
        else:
            with pytest.raises(trimcp.RemoteError, match=f"it is {code}"):
                await session.call_tool(SHOUT, {"text": "a"})


@pytest.mark.parametrize("status", ["error", "cancelled", "input_required"])
async def test_an_answer_without_an_error_is_one(status: str) -> None:
    async with provided() as (_, provider, agent):
        await agent.say(call())
        await provider.say({**success(await provider.hear()), "status": status})
        answer = await agent.hear()
        assert answer["error"]["code"] == "tool_error"
        assert f"`{status}`" in answer["error"]["message"]


async def test_progress_passes_through_to_both_protocols() -> None:
    async with provided() as (at, provider, agent), mcp_client(at) as session:

        async def answer() -> None:
            asked = await provider.hear()
            for number in (1, 2):
                await provider.say(
                    {"type": "tool_progress", "request_id": asked["request_id"], "progress": number, "total": 2}
                )
                await wait_all_tasks_blocked()
            await provider.say({"type": "tool_progress", "request_id": asked["request_id"], "progress": 1})
            await provider.say(success(asked, "A"))
            await provider.say({"type": "tool_progress", "request_id": asked["request_id"], "progress": 3})

        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer)
            await agent.say(call(progress=True))
            heard = [await agent.hear() for _ in range(3)]
            assert [each.get("progress") for each in heard] == [1, 2, None]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer)
            async with session.calling(SHOUT, {"text": "a"}) as called:
                told = [(progress.progress, progress.total) async for progress in called.progress]
                assert told == [(1, 2), (2, 2)]
                assert (await called.result()).data == {"result": "A"}


# What providers should not do


async def test_a_provider_that_answers_twice_or_what_nobody_asked_changes_nothing() -> None:
    async with provided() as (_, provider, agent):
        await agent.say(call("1"), call("2"))
        first, second = await provider.hear(), await provider.hear()
        await provider.say(
            success({"request_id": "call-1"}, "forged"),
            success(first, "A"),
            success(first, "B"),
            {"type": "tool_progress", "request_id": "nothing", "progress": 1},
            failure(first, "crashed"),
        )
        assert (await agent.hear_of("1"))["result"] == "A"
        await wait_all_tasks_blocked()
        assert agent.nothing()
        await provider.say(success(second, "C"))
        assert (await agent.hear_of("2"))["result"] == "C"


async def test_a_provider_answers_only_its_own_calls() -> None:
    async with provided() as (at, provider, agent):
        other = await at.provider({**MANIFEST, "name": "whisper"}, caller=BOB)
        await agent.say(call())
        asked = await provider.hear()
        await other.say(success(asked, "forged"))
        await wait_all_tasks_blocked()
        await provider.say(success(asked, "A"))
        assert (await agent.hear())["result"] == "A"


async def test_an_answer_after_the_call_was_cancelled_is_dropped() -> None:
    async with provided() as (at, provider, agent):
        await agent.say(call())
        asked = await provider.hear()
        await agent.say({"type": "tool_cancel", "request_id": "1", "reason": "enough"})
        assert (await agent.hear_of("1"))["error"]["code"] == "cancelled"
        cancel = await provider.hear()
        assert cancel == {"type": "tool_cancel", "request_id": asked["request_id"], "reason": cancel["reason"]}
        assert "enough" in cancel["reason"]
        await provider.say(success(asked, "late"))
        await wait_all_tasks_blocked()
        assert agent.nothing()
        (stream,) = streams(at)
        assert not stream.calls


async def test_a_provider_that_never_answers(autojump_clock: MockClock) -> None:
    async with provided(registration=RegistrationRules(timeout=5)) as (_, provider, agent):
        await agent.say(call())
        asked = await provider.hear()
        answer = await agent.hear_of("1")
        assert answer["error"] == {"code": "deadline", "message": "agent-a.shout did not finish within 5 seconds"}
        assert trio.current_time() >= 5
        assert await provider.hear() == {
            "type": "tool_cancel",
            "request_id": asked["request_id"],
            "reason": "deadline exceeded",
        }


async def test_a_giant_answer_is_passed_on_or_refused_but_harms_nobody() -> None:
    server = trimcp.Server("s", limits=trimcp.Limits(max_result=250_000))
    async with provided(server=server) as (_, provider, agent):
        await agent.say(call())
        await provider.say(success(await provider.hear(), "x" * 90_000))
        assert len((await agent.hear_of("1"))["result"]) == 90_000
        await agent.say(call("2"))
        await provider.say(success(await provider.hear(), "x" * 200_000))
        assert (await agent.hear_of("2"))["error"]["code"] == "crashed"
        await agent.say(call("3"))
        await provider.say(success(await provider.hear(), "A"))
        assert (await agent.hear_of("3"))["result"] == "A"


async def test_an_answer_beyond_the_size_of_a_message_leaves_the_call_to_its_timeout(
    autojump_clock: MockClock,
) -> None:
    async with provided(registration=RegistrationRules(timeout=5)) as (_, provider, agent):
        await agent.say(call())
        await provider.say(success(await provider.hear(), "x" * 5_000_000))
        assert (await provider.hear())["error"]["code"] == "too_large"
        assert (await agent.hear_of("1"))["error"]["code"] == "deadline"


# Their end


async def test_a_provider_that_leaves_fails_its_calls_at_once_and_its_tools_vanish(autojump_clock: MockClock) -> None:
    async with provided() as (at, provider, agent), mcp_client(at) as session:
        failures: list[trimcp.RemoteError] = []

        async def called() -> None:
            with pytest.raises(trimcp.RemoteError) as caught:
                await session.call_tool(SHOUT, {"text": "a"})
            failures.append(caught.value)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(called)
            await agent.say(call(statuses="extended"))
            await provider.hear()
            await provider.hear()
            began = trio.current_time()
            provider.leave()
            answer = await agent.hear_of("1")
        assert trio.current_time() == began
        assert (answer["status"], answer["error"]["code"]) == ("error", "provider_gone")
        assert failures[0].data == {"reason": "provider_gone"}
        assert [tool.name for tool in await session.list_tools()] == []
        assert (await agent.ask(**call()))["error"]["code"] == "unknown_tool"
        assert (at.tools.catalog._table.families, dict(at.tools.catalog._table.owned)) == ({}, {})


async def test_calls_of_others_do_not_wait_for_what_else_the_provider_had_running(autojump_clock: MockClock) -> None:
    server = trimcp.Server("s")

    @server.tool
    async def slow_to_end() -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(3)

    async with provided(server=server) as (at, provider, agent):
        await provider.say(call("own", name="slow_to_end", arguments={}))
        await agent.say(call())
        assert (await provider.hear())["type"] == "tool_request"
        provider.leave()
        assert (await agent.hear_of("1"))["error"]["code"] == "provider_gone"
        assert trio.current_time() == 0
        assert at.tools.catalog._table.families == {}


@every_revision
async def test_clients_of_mcp_are_told_of_tools_that_come_and_vanish(revision: Revision) -> None:
    async with world() as at, mcp_client(at, revision) as session, session.listen(tools=True) as changes:
        provider = await at.provider()
        await changes.receive()
        assert [tool.name for tool in await session.list_tools()] == [SHOUT]
        provider.leave()
        await changes.receive()
        assert await session.list_tools() == []


async def test_calls_that_wait_for_their_turn_fail_too() -> None:
    rules = RegistrationRules(max_concurrent=1)
    async with provided(registration=rules) as (_, provider, agent):
        await agent.say(call("1"), call("2"), call("3"))
        await provider.hear()
        await wait_all_tasks_blocked()
        provider.leave()
        codes = {each["request_id"]: each["error"]["code"] for each in [await agent.hear() for _ in range(3)]}
        assert codes == {"1": "provider_gone", "2": "provider_gone", "3": "provider_gone"}


async def test_a_provider_calls_its_own_tools() -> None:
    async with provided() as (_, provider, _agent):
        await provider.say(call("mine"))
        asked = await provider.hear()
        await provider.say(success(asked, "A"))
        assert (await provider.hear_of("mine"))["result"] == "A"
        await provider.say(call("mine"))
        await provider.hear()
        provider.leave()
        await wait_all_tasks_blocked()


async def test_two_providers_of_one_principal() -> None:
    async with provided() as (at, provider, agent):
        second = await at.connect(ADA)
        taken = await second.ask(type="provide_tools", tools=[{**MANIFEST, "name": "other"}, MANIFEST])
        assert taken["error"]["code"] == "name_taken"
        assert [each.name for each in at.tools.catalog.manifests()] == [SHOUT]
        other = await second.ask(type="provide_tools", tools=[{**MANIFEST, "version": "2"}], request_id="o")
        assert other["tools"][0]["version"] == "2"
        await agent.say(call("new"), call("old", version="1"))
        await second.say(success(await second.hear(), "new"))
        await provider.say(success(await provider.hear(), "old"))
        heard = {each["request_id"]: each["result"] for each in [await agent.hear(), await agent.hear()]}
        assert heard == {"new": "new", "old": "old"}
        # Each takes its own tools with it.
        second.leave()
        await wait_all_tasks_blocked()
        await agent.say(call("newest"))
        await provider.say(success(await provider.hear(), "old"))
        assert (await agent.hear())["result"] == "old"


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        ({**MANIFEST, "name": "agent-b.shout"}, None),  # under the prefix of this agent
        ({**MANIFEST, "parameters": {"type": "object", "$ref": "https://x.test/"}}, "invalid_manifest"),
        ({**MANIFEST, "implementation": "built_in"}, "invalid_manifest"),
        ({**MANIFEST, "callback": "https://x.test/"}, "invalid_manifest"),
        ({**MANIFEST, "name": "first"}, "invalid_manifest"),  # twice in one offer
        ({"name": "agent-a.shout", "parameters": {"type": "array"}}, "invalid_manifest"),
        (7, "invalid_manifest"),
    ],
)
async def test_an_offer_is_taken_whole_or_not_at_all(bad: Any, code: str | None) -> None:
    server = trimcp.Server("s")

    @server.tool
    async def built_in(text: str) -> str:
        return text

    first = {**MANIFEST, "name": "first"}
    async with world(server) as at:
        provider = await at.connect()
        await provider.say({"type": "provide_tools", "tools": [first, bad], "request_id": "o"})
        answer = await provider.hear()
        if code is None:
            assert [one["name"] for one in answer["tools"]] == ["agent-a.first", "agent-a.agent-b.shout"]
            return
        assert (answer["request_id"], answer["error"]["code"]) == ("o", code)
        assert [each.name for each in at.tools.catalog.manifests()] == ["built_in"]
        assert at.tools.catalog._table.families == {}
        assert (await provider.ask(type="provide_tools", tools=[first]))["type"] == "tools_registered"


async def test_nobody_provides_over_a_tool_of_the_server() -> None:
    server = trimcp.Server("s")

    @server.tool(name="agent-a.shout")
    async def shout(text: str) -> str:
        return "the server's own"

    async with world(server) as at:
        provider = await at.connect()
        answer = await provider.ask(type="provide_tools", tools=[{**MANIFEST, "name": "first"}, MANIFEST])
        assert answer["error"]["code"] == "name_taken"
        agent = await at.connect(BOB)
        assert (await agent.ask(**call()))["result"] == "the server's own"
        assert (await agent.ask(**call(name="agent-a.first")))["error"]["code"] == "unknown_tool"


async def test_an_offer_again_changes_nothing_and_a_changed_one_is_refused_whole() -> None:
    async with provided() as (at, provider, agent):
        again = await provider.ask(type="provide_tools", tools=[MANIFEST, {**MANIFEST, "name": "more"}])
        assert [one["status"] for one in again["tools"]] == ["registered", "registered"]
        changed = {**MANIFEST, "description": "something else"}
        answer = await provider.ask(type="provide_tools", tools=[{**MANIFEST, "name": "third"}, changed])
        assert answer["error"]["code"] == "name_taken"
        assert [each.name for each in at.tools.catalog.manifests()] == [SHOUT, "agent-a.more"]
        await agent.say(call())
        await provider.say(success(await provider.hear(), "A"))
        assert (await agent.hear())["result"] == "A"


async def test_a_changed_offer_that_fails_leaves_what_was_approved_before() -> None:
    def approve(manifest: Any, caller: AgentCaller) -> bool:
        return bool(manifest.description != "refused")

    async with provided(registration=RegistrationRules(approve=approve)) as (at, provider, _):
        before = at.tools.catalog.manifests()[0].hash
        changed = {**MANIFEST, "description": "something else"}
        refused = {**MANIFEST, "name": "other", "description": "refused"}
        answer = await provider.ask(type="provide_tools", tools=[changed, refused])
        assert answer["error"]["code"] == "forbidden"
        (left,) = at.tools.catalog.manifests()
        assert left.hash == before
        assert (await provider.ask(type="provide_tools", tools=[changed]))["tools"][0]["status"] == "registered"
        (left,) = at.tools.catalog.manifests()
        assert left.hash != before


async def test_tools_that_wait_for_approval_vanish_with_their_provider() -> None:
    decided = trio.Event()

    async def approve(manifest: Any, caller: AgentCaller) -> bool | None:
        if manifest.name == SHOUT:
            return None
        await decided.wait()
        return True

    async with world(registration=RegistrationRules(approve=approve)) as at:
        provider = await at.connect()
        answer = await provider.ask(type="provide_tools", tools=[MANIFEST])
        assert answer["tools"][0]["status"] == "pending"
        await provider.say({"type": "provide_tools", "tools": [{**MANIFEST, "name": "slow"}]})
        await wait_all_tasks_blocked()
        assert len(at.tools.catalog.pending()) == 2
        provider.leave()
        await wait_all_tasks_blocked()
        assert at.tools.catalog.pending() == []
        decided.set()
        await wait_all_tasks_blocked()
        assert at.tools.catalog._table.families == {}


async def test_an_offer_that_is_taken_when_the_provider_has_left_registers_nothing() -> None:
    async with world() as at:
        session = at.running.session()
        stream = AgentStream(at.run, ADA, session)
        session.lose("it has left")
        stream.lost(ConnectionLost("it has left"))
        with pytest.raises(ProviderGone):
            await stream._offer(ProvideTools(tools=[MANIFEST]))
        assert at.tools.catalog._table.families == {}
        at.running.closed(session)


async def test_who_may_not_register_does_not_provide() -> None:
    nobody = AgentCaller(trimcp.Principal("eve", scopes=set()), "agent-e")
    async with world() as at:
        provider = await at.connect(nobody)
        answer = await provider.ask(type="provide_tools", tools=[MANIFEST])
        assert answer["error"]["code"] == "forbidden"
        assert at.tools.catalog._table.families == {}


# Draining


async def test_calls_under_way_at_a_provider_are_answered_while_the_server_drains(autojump_clock: MockClock) -> None:
    async with provided() as (at, provider, agent):
        await agent.say(call())
        asked = await provider.hear()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(at.running.drain, 5)
            await wait_all_tasks_blocked()
            refused = await agent.ask(**call("2"))
            assert refused["error"]["code"] == "draining"
            await provider.say(success(asked, "A"))
            assert (await agent.hear_of("1"))["result"] == "A"
        assert trio.current_time() < 1


async def test_draining_does_not_wait_for_a_provider_beyond_its_time(autojump_clock: MockClock) -> None:
    async with provided() as (at, provider, agent):
        await agent.say(call())
        await provider.hear()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(at.running.drain, 5)
            answer = await agent.hear_of("1")
            assert answer["error"]["code"] in ("draining", "provider_gone")
        assert 5 <= trio.current_time() < 8


def streams(at: World) -> list[Any]:
    """The streams of providers whose tools are offered."""
    found = {each.by for each in at.tools.catalog._table.offered()}
    return list(found)
