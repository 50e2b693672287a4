"""The face of agents on a stream: every message, their order, and one answer to each."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import trimcp
from tests.agent_tools.streams import BOB, MANIFEST, Peer, World, world
from trimcp.agent_tools import AgentCaller, ContextLimits, RegistrationRules
from trimcp.agent_tools.bindings.websocket import StreamWatches
from trimcp.channel import Outgoing, Sink


def tools() -> trimcp.Server[Any]:
    server = trimcp.Server("s")
    server.seen = []

    @server.tool
    async def add(a: int, b: int) -> int:
        return a + b

    @server.tool
    async def wait(ctx: trimcp.Context) -> str:
        try:
            await trio.sleep_forever()
        finally:
            server.seen.append((ctx.cancel_reason, ctx.cancel_detail))
        raise AssertionError

    @server.tool
    async def count(number: int, ctx: trimcp.Context) -> int:
        for reached in range(1, number + 1):
            await ctx.report_progress(reached, number, f"{reached} of {number}")
        return number

    @server.tool
    async def crash() -> None:
        raise ValueError("secret")

    @server.tool
    async def look(ctx: trimcp.Context) -> int:
        assert ctx.agent_context is not None
        return int(ctx.agent_context.read().get("seen", -1))

    return server


@asynccontextmanager
async def agent(**options: Any) -> AsyncIterator[tuple[World, Peer]]:
    async with world(tools(), **options) as at:
        peer = await at.connect()
        yield at, peer
        peer.leave()


def call(name: str, request_id: str = "1", **members: Any) -> dict[str, Any]:
    return {"type": "tool_request", "tool_name": name, "request_id": request_id, **members}


def update(context_id: str, request_id: str = "u", **updates: Any) -> dict[str, Any]:
    return {"type": "context_update", "context_id": context_id, "updates": updates, "request_id": request_id}


async def test_a_call_and_its_result() -> None:
    async with agent() as (_, peer):
        answer = await peer.ask(**call("add", arguments={"a": 1, "b": 2}))
        assert answer == {"type": "tool_response", "request_id": "1", "status": "success", "result": 3}


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (call("nothing"), "unknown_tool"),
        (call("add", version="7", arguments={"a": 1, "b": 2}), "unknown_tool"),
        (call("add", arguments={"a": "x", "b": 2}), "invalid_arguments"),
        (call("add", arguments=[]), "malformed"),
        (call("add", context_id="ctx_" + "x" * 22), "unknown_context"),
        (call("crash"), "crashed"),
    ],
)
async def test_a_call_that_fails_is_answered_once_by_its_own_name(message: dict[str, Any], code: str) -> None:
    async with agent() as (_, peer):
        answer = await peer.ask(**message)
        assert (answer["type"], answer["request_id"], answer["status"]) == ("tool_response", "1", "error")
        assert answer["error"]["code"] == code
        assert "secret" not in str(answer)
        await wait_all_tasks_blocked()
        assert peer.nothing()
        assert (await peer.ask(**call("add", arguments={"a": 1, "b": 2})))["result"] == 3


@pytest.mark.parametrize(
    ("message", "code", "request_id"),
    [
        (b"nothing", "malformed", None),
        (b"[]", "malformed", None),
        (b"{}", "malformed", None),
        (b'{"type": "list_tools", "request_id": "r", "x": ' + b"[" * 200 + b"]" * 200 + b"}", "malformed", "r"),
        (b'{"request_id": "r", "type": "list_tools", "x": 1e999}', "malformed", "r"),
        (b'{"x": {"request_id": "other"}, "request_id": "r", nothing}', "malformed", "r"),
        ({"type": "unheard", "request_id": "r"}, "malformed", "r"),
        ({"type": "context_read", "request_id": "r"}, "malformed", "r"),
        ({"type": "context_read", "context_id": "c", "request_id": 7}, "malformed", None),
        ({"type": "context_read", "context_id": "c", "request_id": "r"}, "unknown_context", "r"),
        ({"type": "context_watch", "context_id": "c", "request_id": "r"}, "unknown_context", "r"),
        ({"type": "context_destroy", "context_id": "c", "request_id": "r"}, "unknown_context", "r"),
        ({"type": "context_create", "ttl": -1, "request_id": "r"}, "malformed", "r"),
        ({"type": "context_create", "context_id": "ctx_x\n", "request_id": "r"}, "malformed", "r"),
        (update("c", "r", permissions=["all"]), "malformed", "r"),
        ({"type": "list_tools", "name": "nothing", "request_id": "r"}, "unknown_tool", "r"),
        ({"type": "remove_tool", "name": "nothing", "request_id": "r"}, "unknown_tool", "r"),
        ({"type": "remove_tool", "name": "add", "request_id": "r"}, "forbidden", "r"),
        ({"type": "register_tool", "tool": {}, "request_id": "r"}, "invalid_manifest", "r"),
        ({"type": "provide_tools", "tools": [{}], "request_id": "r"}, "invalid_manifest", "r"),
        ({"type": "context_state", "context_id": "c", "version": 1, "state": {}, "request_id": "r"}, "malformed", "r"),
        ({"type": "error", "error": {}, "request_id": "r"}, "malformed", "r"),
        ({"type": "tool_request", "request_id": "x" * 300}, "malformed", None),
    ],
)
async def test_what_cannot_be_carried_out_is_answered_with_an_error(
    message: Any, code: str, request_id: str | None
) -> None:
    async with agent() as (_, peer):
        await peer.say(message)
        answer = await peer.hear()
        assert (answer["type"], answer["error"]["code"], answer.get("request_id")) == ("error", code, request_id)
        await wait_all_tasks_blocked()
        assert peer.nothing()
        assert (await peer.ask(type="list_tools", request_id="l"))["type"] == "tools"


async def test_messages_without_an_answer_get_none() -> None:
    async with agent() as (_, peer):
        await peer.say(
            {"type": "tool_cancel", "request_id": "nothing"},
            {"type": "tool_cancel", "request_id": "nothing", "context_id": "nothing"},
            {"type": "context_unwatch", "context_id": "nothing"},
            {"type": "tool_response", "request_id": "call-1", "status": "success"},
            {"type": "tool_progress", "request_id": "call-1", "progress": 1},
        )
        await wait_all_tasks_blocked()
        assert peer.nothing()


async def test_strict_mode_refuses_members_that_the_protocol_does_not_have() -> None:
    async with agent(strict=True) as (_, peer):
        answer = await peer.ask(**call("add", arguments={"a": 1, "b": 2}, more=1))
        assert answer["error"] == {"code": "malformed", "message": "tool_request: unknown member `more`"}


async def test_the_life_of_a_context() -> None:
    async with agent() as (_, peer):
        made = await peer.ask(type="context_create", state={"a": 1}, request_id="m")
        id = made["context_id"]
        assert (made["type"], made["version"], made["request_id"]) == ("context_state", 0, "m")
        assert made["state"]["a"] == 1
        assert made["state"]["permissions"] == ["tools:register"]
        changed = await peer.ask(**update(id, a=2))
        assert changed == {"type": "context_update", "request_id": "u", "context_id": id, "updates": {"a": 2}} | {
            "version": 1
        }
        conflict = await peer.ask(**update(id, a=3), version=0)
        assert conflict["error"]["code"] == "version_conflict"
        assert conflict["error"]["data"] == {"version": 1}
        read = await peer.ask(type="context_read", context_id=id, request_id="r")
        assert (read["state"]["a"], read["version"]) == (2, 1)
        gone = await peer.ask(type="context_destroy", context_id=id, reason="done", request_id="d")
        assert gone == {"type": "context_destroyed", "context_id": id, "reason": "done", "request_id": "d"}
        assert (await peer.ask(type="context_read", context_id=id))["error"]["code"] == "context_gone"
        assert (await peer.ask(**update(id)))["error"]["code"] == "context_gone"
        assert (await peer.ask(type="context_destroy", context_id=id))["error"]["code"] == "context_gone"


async def test_a_context_that_nobody_made_begins_with_its_first_message() -> None:
    async with agent() as (at, peer):
        assert (await peer.ask(**update("mine", seen=4)))["version"] == 1
        assert (await peer.ask(**call("look", context_id="mine")))["result"] == 4
        assert (await peer.ask(**call("look", context_id="other")))["result"] == -1
        assert at.run.contexts.statistics().contexts == 2
        read = await peer.ask(type="context_read", context_id="mine")
        assert [entry["tool"] for entry in read["state"]["tool_history"]] == ["look"]


async def test_strangers_have_no_contexts_here() -> None:
    async with agent() as (at, peer):
        await peer.ask(**update("mine", seen=4))
        stranger = await at.connect(BOB)
        for message in (
            {"type": "context_read", "context_id": "mine"},
            {"type": "context_watch", "context_id": "mine"},
            {"type": "context_destroy", "context_id": "mine"},
        ):
            assert (await stranger.ask(**message))["error"]["code"] == "unknown_context"
        assert (await stranger.ask(**call("look", context_id="mine")))["result"] == -1


async def test_updates_apply_in_the_order_they_came_and_each_once() -> None:
    async with agent() as (_, peer):
        await peer.say(*(update("c", str(number), n=number, **{f"k{number}": number}) for number in range(500)))
        answers = [await peer.hear() for _ in range(500)]
        assert [answer["request_id"] for answer in answers] == [str(number) for number in range(500)]
        assert [answer["version"] for answer in answers] == list(range(1, 501))
        read = await peer.ask(type="context_read", context_id="c")
        assert read["state"]["n"] == 499
        assert len([key for key in read["state"] if key.startswith("k")]) == 500


async def test_messages_that_come_together_are_carried_out_in_their_order() -> None:
    async with agent() as (_, peer):
        await peer.say(
            {"type": "context_create", "context_id": "c", "state": {"seen": 1}, "request_id": "1"},
            {"type": "context_watch", "context_id": "c", "request_id": "2"},
            update("c", "3", seen=2),
            {"type": "context_read", "context_id": "c", "request_id": "4"},
            {"type": "context_destroy", "context_id": "c", "request_id": "5"},
            {"type": "context_create", "context_id": "c", "state": {"seen": 5}, "request_id": "6"},
            {"type": "context_read", "context_id": "c", "request_id": "7"},
        )
        answers: dict[str, list[dict[str, Any]]] = {}
        for _ in range(9):
            answer = await peer.hear()
            answers.setdefault(answer["request_id"], []).append(answer)
        assert answers["1"][0]["type"] == "context_state"
        assert [event["type"] for event in answers["2"]] == ["context_state", "context_update", "context_destroyed"]
        assert answers["3"][0]["version"] == 1
        assert answers["4"][0]["state"]["seen"] == 2
        assert answers["5"][0]["type"] == "context_destroyed"
        assert answers["6"][0]["state"]["seen"] == 5
        assert answers["7"][0]["state"]["seen"] == 5


# Watching


async def test_a_watcher_gets_the_state_then_each_update_then_the_end() -> None:
    async with agent() as (at, peer):
        await peer.ask(**update("c", a=1))
        watcher = await at.connect()
        state = await watcher.ask(type="context_watch", context_id="c", request_id="w")
        assert (state["type"], state["version"], state["state"]["a"]) == ("context_state", 1, 1)
        for number in range(2, 5):
            await peer.ask(**update("c", a=number))
            event = await watcher.hear_of("w")
            assert (event["type"], event["updates"], event["version"]) == ("context_update", {"a": number}, number)
        await peer.say({"type": "context_destroy", "context_id": "c", "reason": "enough"})
        event = await watcher.hear_of("w")
        assert (event["type"], event["reason"]) == ("context_destroyed", "enough")
        again = await watcher.ask(type="context_watch", context_id="c", request_id="w")
        assert again["error"]["code"] == "context_gone"
        # Another context of this name is watched like any.
        assert (await peer.hear())["type"] == "context_destroyed"
        await peer.ask(type="context_create", context_id="c", state={"a": 7})
        assert (await watcher.ask(type="context_watch", context_id="c", request_id="x"))["state"]["a"] == 7


async def test_a_context_is_watched_once_by_a_connection_and_again_after_it_was_left() -> None:
    async with agent() as (at, peer):
        await peer.ask(**update("c", a=1))
        watch = {"type": "context_watch", "context_id": "c", "request_id": "w"}
        assert (await peer.ask(**watch))["type"] == "context_state"
        assert (await peer.ask(**watch))["error"]["code"] == "malformed"
        await peer.say({"type": "context_unwatch", "context_id": "c"}, {**watch, "request_id": "v"})
        assert (await peer.hear_of("v"))["type"] == "context_state"
        await peer.say({"type": "context_unwatch", "context_id": "c"})
        assert (await peer.ask(**update("c", a=2)))["request_id"] == "u"
        await wait_all_tasks_blocked()
        assert peer.nothing()
        assert at.run.contexts.statistics().watchers == 0


async def test_a_context_ends_though_a_watcher_is_found_gone_when_it_is_told() -> None:
    """What is written can find that the peer has left, which closes all watches of its connection at once."""

    class Leaving(Sink):
        full = False

        def post(self, outgoing: Outgoing) -> None:
            said.append(outgoing.data)
            if len(said) > 1:
                watches.close_all()

    said: list[bytes] = []
    async with world(tools()) as at:
        context = await at.run.contexts.create(("", "anonymous"), "c")
        watches = StreamWatches(SimpleNamespace(sink=Leaving()))  # type: ignore[arg-type]  # no more is asked
        watches.begin(context, "w")
        await context.destroy("done")
        assert len(said) == 2
        counts = at.run.contexts.statistics()
        assert (counts.contexts, counts.ending, counts.watchers) == (0, 0, 0)


async def test_a_watch_takes_no_task_and_ends_with_its_connection() -> None:
    async with agent() as (at, peer):
        await peer.ask(**update("c"))
        await wait_all_tasks_blocked()
        tasks = trio.lowlevel.current_statistics().tasks_living
        for number in range(50):
            await peer.ask(**update(f"c{number}"))
            assert (await peer.ask(type="context_watch", context_id=f"c{number}"))["type"] == "context_state"
        await wait_all_tasks_blocked()
        assert trio.lowlevel.current_statistics().tasks_living == tasks
        assert at.run.contexts.statistics().watchers == 50
        peer.leave()
        await wait_all_tasks_blocked()
        assert at.run.contexts.statistics().watchers == 0


# Calls


@pytest.mark.parametrize("context", [{}, {"context_id": "c"}])
async def test_a_cancelled_call_knows_why_and_is_answered_once(context: dict[str, str]) -> None:
    async with agent() as (at, peer):
        await peer.say(call("wait", statuses="extended", **context))
        await wait_all_tasks_blocked()
        cancel = {"type": "tool_cancel", "request_id": "1", "reason": "no longer needed", **context}
        await peer.say(cancel, cancel)
        answer = await peer.hear_of("1")
        assert (answer["status"], answer["error"]["code"]) == ("cancelled", "cancelled")
        assert answer["error"]["message"] == "no longer needed"
        await wait_all_tasks_blocked()
        assert peer.nothing()
        ((reason, detail),) = at.server.seen
        assert (reason.name, detail) == ("PEER", "no longer needed")


async def test_an_id_is_under_way_once_in_a_context_and_free_after_the_answer() -> None:
    async with agent() as (at, peer):
        await peer.say(call("wait", context_id="c"), call("add", context_id="c", arguments={"a": 1, "b": 1}))
        answer = await peer.hear_of("1")
        assert answer["error"]["code"] == "duplicate_request"
        # In another context, and without one, it is another request.
        for other in ({"context_id": "d"}, {}):
            assert (await peer.ask(**call("add", arguments={"a": 1, "b": 1}, **other)))["result"] == 2
        second = await at.connect()
        assert (await second.ask(**call("add", context_id="c", arguments={"a": 1, "b": 1})))["error"][
            "code"
        ] == "duplicate_request"
        await peer.say({"type": "tool_cancel", "request_id": "1", "context_id": "c"})
        assert (await peer.hear_of("1"))["error"]["code"] == "cancelled"
        assert (await second.ask(**call("add", context_id="c", arguments={"a": 1, "b": 1})))["result"] == 2


async def test_ids_without_a_context_are_those_of_one_connection() -> None:
    nobody = AgentCaller()
    async with world(tools()) as at:
        one, two = await at.connect(nobody), await at.connect(nobody)
        await one.say(call("wait"))
        await wait_all_tasks_blocked()
        assert (await two.ask(**call("add", arguments={"a": 1, "b": 1})))["result"] == 2
        await two.say({"type": "tool_cancel", "request_id": "1", "reason": "not mine"})
        await wait_all_tasks_blocked()
        assert at.server.seen == []
        assert (await one.ask(**call("add", arguments={"a": 1, "b": 1})))["error"]["code"] == "duplicate_request"
        one.leave()
        two.leave()
        await wait_all_tasks_blocked()


async def test_progress_comes_where_it_is_asked_for_and_never_after_the_answer() -> None:
    async with agent() as (_, peer):
        await peer.say(
            call("count", "a", arguments={"number": 3}), call("count", "b", arguments={"number": 3}, progress=True)
        )
        heard = [await peer.hear() for _ in range(5)]
        assert [each["type"] for each in heard if each["request_id"] == "a"] == ["tool_response"]
        of_b = [each for each in heard if each["request_id"] == "b"]
        assert [each.get("progress") for each in of_b] == [1, 2, 3, None]
        assert of_b[0] == {"type": "tool_progress", "request_id": "b", "progress": 1, "total": 3, "message": "1 of 3"}
        await wait_all_tasks_blocked()
        assert peer.nothing()


async def test_a_deadline_of_the_agent(autojump_clock: MockClock) -> None:
    async with agent() as (at, peer):
        answer = await peer.ask(**call("wait", timeout=5, statuses="extended"))
        assert (answer["status"], answer["error"]["code"]) == ("timeout", "deadline")
        assert 5 <= trio.current_time() < 5.5
        ((reason, _),) = at.server.seen
        assert reason.name == "DEADLINE"


async def test_a_context_that_ends_cancels_its_calls_with_the_reason() -> None:
    async with agent() as (at, peer):
        await peer.say(call("wait", context_id="c"))
        await wait_all_tasks_blocked()
        await peer.say({"type": "context_destroy", "context_id": "c", "reason": "the task is done", "request_id": "d"})
        heard = {each["request_id"]: each for each in [await peer.hear(), await peer.hear()]}
        assert heard["1"]["error"] == {"code": "cancelled", "message": "the task is done"}
        assert heard["d"]["type"] == "context_destroyed"
        assert at.server.seen[0][1] == "the task is done"


async def test_a_connection_that_ends_cancels_its_calls() -> None:
    async with agent() as (at, peer):
        await peer.say(call("wait", "1"), call("wait", "2", context_id="c"))
        await wait_all_tasks_blocked()
        peer.leave()
        await wait_all_tasks_blocked()
        assert [reason.name for reason, _ in at.server.seen] == ["DISCONNECTED"] * 2
        (actor,) = at.run.contexts._live
        assert actor.calls == {}
        assert actor.snapshot()["tool_history"][0]["status"] == "cancelled"


# The end of the server


async def test_a_server_that_drains_answers_what_is_under_way_and_refuses_the_rest(autojump_clock: MockClock) -> None:
    server = tools()
    go_on = trio.Event()

    @server.tool
    async def slow() -> str:
        await go_on.wait()
        return "done"

    async with world(server) as at:
        peer = await at.connect()
        await peer.say(call("slow"), update("c"))
        assert (await peer.hear_of("u"))["version"] == 1
        async with trio.open_nursery() as nursery:
            nursery.start_soon(at.running.drain, 5)
            await wait_all_tasks_blocked()
            refused = await peer.ask(**call("add", "2", arguments={"a": 1, "b": 2}, statuses="extended"))
            assert (refused["type"], refused["error"]["code"]) == ("tool_response", "draining")
            for message in (update("c"), update("new"), {"type": "context_create"}, {"type": "list_tools"}):
                assert (await peer.ask(**message))["error"]["code"] == "draining"
            await peer.say({"type": "tool_cancel", "request_id": "nothing"})
            go_on.set()
            assert (await peer.hear_of("1"))["result"] == "done"
            with pytest.raises(trio.EndOfChannel):
                await peer.hear()
        assert trio.current_time() < 5


async def test_a_call_that_outlasts_draining_is_told(autojump_clock: MockClock) -> None:
    async with agent() as (at, peer):
        await peer.say(call("wait"))
        await wait_all_tasks_blocked()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(at.running.drain, 5)
            answer = await peer.hear_of("1")
            assert answer["error"]["code"] == "draining"
        assert at.server.seen[0][0].name == "DRAIN"


# Registration


async def test_tools_are_registered_and_removed_in_the_order_of_the_messages() -> None:
    async def shout(text: str) -> str:
        return text.upper()

    async with agent(implementations={"shout": shout}) as (_, peer):
        await peer.say(
            {"type": "register_tool", "tool": MANIFEST, "request_id": "1"},
            {"type": "list_tools", "name": "shout", "request_id": "2"},
        )
        heard = {each["request_id"]: each for each in [await peer.hear() for _ in range(2)]}
        assert heard["1"]["tools"][0]["status"] == "registered"
        assert heard["2"]["tools"][0]["name"] == "shout"
        assert (await peer.ask(**call("shout", arguments={"text": "a"})))["result"] == "A"
        await peer.say(
            call("shout", "3", arguments={"text": "a"}),  # perhaps removed before it begins
            {"type": "remove_tool", "name": "shout", "request_id": "4"},
            call("shout", "5", arguments={"text": "a"}),
        )
        heard = {each["request_id"]: each for each in [await peer.hear() for _ in range(3)]}
        assert heard["4"] == {"type": "tool_removed", "name": "shout", "request_id": "4"}
        assert heard["5"]["error"]["code"] == "unknown_tool"
        assert heard["3"].get("result") == "A" or heard["3"]["error"]["code"] == "unknown_tool"


async def test_a_registration_that_waits_for_approval_delays_nothing_else() -> None:
    decided = trio.Event()

    async def approve(manifest: Any, caller: AgentCaller) -> bool:
        await decided.wait()
        return True

    async def shout(text: str) -> str:
        return text.upper()

    rules = RegistrationRules(approve=approve)
    async with agent(implementations={"shout": shout}, registration=rules) as (_, peer):
        await peer.say({"type": "register_tool", "tool": MANIFEST, "request_id": "1"})
        assert (await peer.ask(**call("add", "2", arguments={"a": 1, "b": 2})))["result"] == 3
        more = [{**MANIFEST, "name": f"shout{number}", "implementation": "shout"} for number in range(63)]
        await peer.say(*({"type": "register_tool", "tool": each, "request_id": "more"} for each in more))
        over = await peer.ask(type="register_tool", tool={**MANIFEST, "version": "2"}, request_id="over")
        assert (over["request_id"], over["error"]["code"]) == ("over", "too_much")
        decided.set()
        assert [(await peer.hear())["type"] for _ in range(64)] == ["tools_registered"] * 64


async def test_an_approval_that_crashes_is_answered_with_an_incident(caplog: pytest.LogCaptureFixture) -> None:
    async def approve(manifest: Any, caller: AgentCaller) -> bool:
        raise ValueError("secret")

    async def shout(text: str) -> str:
        return text.upper()

    rules = RegistrationRules(approve=approve)
    async with agent(implementations={"shout": shout}, registration=rules) as (_, peer):
        answer = await peer.ask(type="register_tool", tool=MANIFEST, request_id="1")
        assert (answer["request_id"], answer["error"]["code"]) == ("1", "crashed")
        assert answer["error"]["data"]["incident"] in caplog.text
        assert "secret" not in str(answer)


# Limits


async def test_contexts_have_their_bounds_here_too() -> None:
    async with agent(contexts=ContextLimits(max_per_owner=2)) as (_, peer):
        for name in ("a", "b"):
            assert (await peer.ask(**update(name)))["version"] == 1
        assert (await peer.ask(**update("c")))["error"]["code"] == "too_much"
        assert (await peer.ask(**update("a", big="x" * 300_000)))["error"]["code"] == "too_large"


async def test_an_oversize_message_is_answered_and_the_connection_lives_on() -> None:
    async with world(tools()) as at:
        peer, _, _ = await at.connected(largest=1_000)
        answer = await peer.ask(**update("a", big="x" * 2_000))
        assert (answer["request_id"], answer["error"]["code"]) == ("u", "too_large")
        assert (await peer.ask(**update("a")))["version"] == 1
        peer.leave()
        await wait_all_tasks_blocked()


async def test_quotas_are_those_of_mcp(autojump_clock: MockClock) -> None:
    server = trimcp.Server("s", limits=trimcp.Limits(session=trimcp.Quota(running=1, waiting=1)))

    @server.tool
    async def nap() -> str:
        await trio.sleep(1)
        return "rested"

    async with world(server) as at:
        peer, other = await at.connect(), await at.connect()
        await peer.say(*(call("nap", str(number), statuses="extended") for number in range(3)))
        heard = {each["request_id"]: each for each in [await peer.hear() for _ in range(3)]}
        (refused,) = [each for each in heard.values() if each["status"] != "success"]
        assert refused["error"]["code"] == "too_much"
        assert trio.current_time() == 2
        # Another connection has a quota of its own.
        assert (await other.ask(**call("nap")))["result"] == "rested"
        for each in (peer, other):
            each.leave()
        await wait_all_tasks_blocked()


async def test_a_flood_beyond_the_backlog_is_paused_and_each_call_is_answered(autojump_clock: MockClock) -> None:
    server = trimcp.Server("s", limits=trimcp.Limits(max_running=2, backlog_requests=5))
    running = most = 0

    @server.tool
    async def nap() -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await trio.sleep(1)
        running -= 1
        return "rested"

    async with world(server) as at:
        peer = await at.connect()
        await peer.say(*(call("nap", str(number)) for number in range(50)))
        await wait_all_tasks_blocked()
        (session,) = at.running.sessions
        assert len(session.jobs) <= 7
        assert [(await peer.hear())["result"] for _ in range(50)] == ["rested"] * 50
        assert most == 2
        peer.leave()
        await wait_all_tasks_blocked()
