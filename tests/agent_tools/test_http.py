"""Agent tools over HTTP, on a host in memory: each path and method, streams, refusals, and what ends them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import orjson
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import trimcp
from tests.agent_tools.world import WEATHER, World, call_of, conforms, events_of, make_world
from tests.transports.http.face import Answer, Visitor, visiting
from trimcp.agent_tools import AgentTools
from trimcp.agent_tools.contexts.state import ContextLimits
from trimcp.agent_tools.messages import messages
from trimcp.errors import LocalError
from trimcp.transports.http.interfaces import Head, HttpResponse, Upgrade
from trimcp.wire.codes import FORBIDDEN
from trimcp.wire.revisions import LATEST_LEGACY

JSON = {"content-type": "application/json", "accept": "*/*"}
EVENTS = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
ONLY_EVENTS = {"content-type": "application/json", "accept": "text/event-stream"}


@attrs.define(eq=False)
class Agent:
    """An agent, which speaks through a host in memory."""

    visitor: Visitor
    world: World
    token: str | None = "demo-token"

    async def begin(
        self, method: str, path: str, body: Any = None, headers: dict[str, Any] | None = None, **more: str
    ) -> Answer:
        """Send a request, whose answer may have only begun."""
        ours: dict[str, Any] = {**JSON, **(headers or {}), **{name.replace("_", "-"): more[name] for name in more}}
        if self.token is not None:
            ours = {"authorization": f"Bearer {self.token}", **ours}
        data = b"" if body is None else body if isinstance(body, bytes) else orjson.dumps(body)
        return await self.visitor.send(method, path, data, ours)

    async def send(
        self, method: str, path: str, body: Any = None, headers: dict[str, Any] | None = None, **more: str
    ) -> Answer:
        """Send a request, and return its whole answer, which conforms to the schemas."""
        answer = await (await self.begin(method, path, body, headers, **more)).done()
        if answer.headers.get("content-type") == "application/json" and b'"jsonrpc"' not in answer.body:
            conforms(answer.json)
        return answer

    async def call(self, tool: str, path: str = "/tools/call", **members: Any) -> Answer:
        return await self.send("POST", path, call_of(tool, **members))

    def as_other(self, token: str | None) -> Agent:
        return attrs.evolve(self, token=token)


@asynccontextmanager
async def agents(
    world: World | None = None, settings: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[Agent]:
    world = make_world(**options) if world is None else world
    http = trimcp.HttpSettings(agent_tools=world.agent_tools, **(settings or {}))
    async with visiting(world.server, settings=http) as visitor:
        visitor.peer = "127.0.0.1:40000"
        yield Agent(visitor, world)
        world.release.set()


def failure(answer: Answer) -> tuple[int, str]:
    """The status, and the code of the error."""
    return answer.status, answer.json["error"]["code"]


# Calls


@pytest.mark.parametrize("path", ["/mcp", "/tools/call"])
async def test_a_call_is_answered_with_its_result(path: str) -> None:
    async with agents() as agent:
        answer = await agent.call("echo", path, text="hello", context="ctx-001")
        assert answer.status == 200
        assert answer.json == {"type": "tool_response", "request_id": "r1", "status": "success", "result": "hello"}


async def test_both_protocols_share_the_endpoint() -> None:
    async with agents() as agent:
        agent.visitor.headers["authorization"] = "Bearer demo-token"
        reply = await (await agent.visitor.call("echo", text="over mcp")).done()
        assert reply.json["result"]["content"][0]["text"] == "over mcp"
        # An argument `type` makes no message of this protocol, even where that of the other one is malformed.
        broken = {"jsonrpc": "2.0", "id": None, "method": "tools/call", "type": "tool_request"}
        assert (await agent.send("POST", "/mcp", broken)).json["jsonrpc"] == "2.0"
        assert (await agent.send("POST", "/mcp", [1, "type"])).json["jsonrpc"] == "2.0"
        assert (await agent.send("POST", "/mcp", {"tool_name": "echo"})).json["jsonrpc"] == "2.0"
        assert failure(await agent.send("POST", "/mcp", b'{"type": "tool_request", ')) == (400, "malformed")


async def test_progress_makes_the_answer_a_stream() -> None:
    async with agents() as agent:
        answer = await agent.send("POST", "/tools/call", call_of("count_to", number=3), EVENTS)
        assert answer.headers["content-type"] == "text/event-stream"
        *progress, last = events_of(bytes(answer.body))
        assert [(kind, each["progress"], each["total"], each["message"]) for kind, each in progress] == [
            ("tool_progress", number, 3, f"at {number}") for number in (1, 2, 3)
        ]
        assert last == (
            "tool_response",
            {"type": "tool_response", "request_id": "r1", "status": "success", "result": 3},
        )


async def test_without_progress_or_for_any_format_the_answer_is_json() -> None:
    async with agents() as agent:
        quick = await agent.send("POST", "/tools/call", call_of("echo", text="x"), EVENTS)
        assert quick.json["result"] == "x"
        for accept in ("*/*", "application/json", "text/*", "application/json, text/event-stream;q=0"):
            answer = await agent.send("POST", "/tools/call", call_of("count_to", number=3), accept=accept)
            assert answer.json["result"] == 3


async def test_who_accepts_only_events_gets_nothing_else() -> None:
    async with agents() as agent:
        answer = await agent.send("POST", "/tools/call", call_of("echo", text="x"), ONLY_EVENTS)
        [(kind, message)] = events_of(bytes(answer.body))
        assert (kind, message["result"]) == ("tool_response", "x")
        refused = await agent.send("POST", "/tools/call", call_of("nothing"), ONLY_EVENTS)
        assert failure(refused) == (404, "unknown_tool")  # an error with a status of its own is JSON, as in MCP


async def test_a_silent_call_becomes_a_stream(autojump_clock: MockClock) -> None:
    async with agents(settings={"silence": 5.0, "keep_alive": 10.0}) as agent:
        answer = await agent.begin("POST", "/tools/call", call_of("wait"), EVENTS)
        plain = await agent.begin("POST", "/tools/call", call_of("wait", "r2"))
        await trio.sleep(4)
        assert not answer.status
        await trio.sleep(2)
        assert answer.headers["content-type"] == "text/event-stream"
        assert not plain.status
        await trio.sleep(20)
        assert answer.body.startswith(b":")  # comments keep it open
        agent.world.release.set()
        await answer.done()
        assert [message["result"] for _, message in events_of(bytes(answer.body))] == ["released"]
        assert (await plain.done()).json["result"] == "released"


@pytest.mark.parametrize("headers", [JSON, EVENTS])
@pytest.mark.parametrize("context", [None, "c"])
async def test_closing_the_request_cancels_the_handler(headers: dict[str, str], context: str | None) -> None:
    async with agents() as agent:
        answer = await agent.begin("POST", "/tools/call", call_of("count_and_wait", context=context), headers)
        await agent.world.began.wait()
        assert agent.visitor.face.shared.exchanges == 1
        answer.leave()
        await agent.world.wait_for(1)
        assert agent.world.reasons == ["disconnected"]
        assert agent.visitor.face.shared.exchanges == 0
        assert agent.world.server.statistics().hosts["agent_calls"] == 0
        # The id is free again.
        agent.world.release.set()
        assert (await agent.call("wait", context=context)).json["result"] == "released"


async def test_closing_a_request_that_waits_for_its_context_ends_it(autojump_clock: MockClock) -> None:
    async with agents() as agent:
        run = next(iter(agent.world.agent_tools._runs.values()))
        waited = run.contexts.find_or_make

        async def slow(*args: Any, **options: Any) -> Any:
            await trio.sleep(10)
            return await waited(*args, **options)

        run.contexts.find_or_make = slow
        answer = await agent.begin("POST", "/tools/call", call_of("echo", text="x", context="c"))
        await wait_all_tasks_blocked()
        assert agent.visitor.face.shared.exchanges == 1
        answer.leave()
        await wait_all_tasks_blocked()
        assert agent.visitor.face.shared.exchanges == 0
        assert agent.world.calls == []


async def test_a_slow_reader_makes_the_tool_wait(autojump_clock: MockClock) -> None:
    async with agents(settings={"stream_buffer": 4_096}) as agent:
        body = orjson.dumps(call_of("count_to", number=1_000))
        answer = await agent.begin("POST", "/tools/call", body, EVENTS)
        answer.stalled = True
        await trio.sleep(100)
        assert 0 < len(answer.held) < 16_384
        assert not answer.finished
        answer.read_on()
        await answer.done()
        found = [message for _, message in events_of(bytes(answer.body))]
        assert found[-1]["result"] == 1_000
        assert [each["progress"] for each in found[:-1]] == sorted(each["progress"] for each in found[:-1])


async def test_of_progress_that_nobody_reads_the_latest_is_kept(autojump_clock: MockClock) -> None:
    async with agents(settings={"stream_buffer": 4_096}) as agent:
        body = orjson.dumps(call_of("hurry", number=10_000))
        answer = await agent.begin("POST", "/tools/call", body, EVENTS)
        answer.stalled = True
        await trio.sleep(10)
        assert 0 < len(answer.held) < 16_384
        answer.read_on()
        await answer.done()
        found = [message for _, message in events_of(bytes(answer.body))]
        assert found[-1]["result"] == 10_000
        assert [each["progress"] for each in found[:-1]][-2:] == [10_000, 10_001]
        assert len(found) < 200


async def test_without_a_stream_progress_goes_nowhere() -> None:
    async with agents() as agent:
        assert (await agent.call("hurry", number=10)).json["result"] == 10


async def test_questions_are_an_answer_where_statuses_are_extended() -> None:
    async with agents() as agent:
        plain = await agent.call("ask")
        assert (plain.status, plain.json["status"], plain.json["error"]["code"]) == (200, "error", "tool_error")
        first = (await agent.call("ask", statuses="extended", id="r2")).json
        assert first["status"] == "input_required"
        [(key, asked)] = first["result"]["input_requests"].items()
        assert asked["params"]["message"] == "How old?"
        responses = {key: {"action": "accept", "content": {"value": 42}}}
        state = first["result"]["request_state"]
        more = {} if state is None else {"request_state": state}
        answer = await agent.call("ask", id="r3", statuses="extended", input_responses=responses, **more)
        assert answer.json["status"] == "success"
        assert answer.json["result"] == "accept 42"


async def test_results_of_every_shape_are_the_value_itself() -> None:
    world = make_world()

    @world.server.tool
    def big() -> dict[str, int]:
        return {"number": 2**62 + 1}

    @world.server.tool
    def nothing() -> None:
        return None

    @world.server.tool
    def content() -> trimcp.CallToolResult:
        return trimcp.CallToolResult(content=[], structured_content={"own": 1})

    @world.server.tool
    def two() -> list[Any]:
        return [1, "zwei"]

    async with agents(world) as agent:
        assert (await agent.call("big")).json["result"] == {"number": 2**62 + 1}
        assert "result" in (await agent.call("nothing")).json
        assert (await agent.call("content")).json["result"] == {"own": 1}
        assert (await agent.call("two")).json["result"] == [1, "zwei"]


# Tools


async def test_tools_are_listed_registered_and_removed() -> None:
    async with agents() as agent:
        added = await agent.send("POST", "/tools/register", WEATHER)
        assert added.status == 200
        [registered] = added.json["tools"]
        assert (registered["name"], registered["version"], registered["status"]) == ("get_weather", "1", "registered")
        newer = {**WEATHER, "version": "2"}
        assert (await agent.send("POST", "/tools/register", newer)).status == 200
        listed = await agent.send("GET", "/tools")
        names = [tool["name"] for tool in listed.json["tools"]]
        assert names.count("get_weather") == 2
        assert "echo" in names
        one = await agent.send("GET", "/tools/get_weather")
        assert [tool["version"] for tool in one.json["tools"]] == ["2", "1"]
        for path in ("/tools/get_weather?version=1", "/tools?name=get_weather&version=1"):
            old = await agent.send("GET", path)
            assert [tool["version"] for tool in old.json["tools"]] == ["1"]
        assert failure(await agent.send("GET", "/tools/get_weather?version=3")) == (404, "unknown_tool")
        assert failure(await agent.send("GET", "/tools/none")) == (404, "unknown_tool")
        removed = await agent.send("DELETE", "/tools/get_weather?version=2")
        assert removed.json == {"type": "tool_removed", "name": "get_weather", "version": "2"}
        assert (await agent.send("DELETE", "/tools/get_weather")).status == 200
        assert failure(await agent.send("DELETE", "/tools/get_weather")) == (404, "unknown_tool")
        assert failure(await agent.send("DELETE", "/tools/echo"))[0] in (403, 404)


async def test_a_registered_tool_is_one_of_mcp_too() -> None:
    async with agents() as agent:
        agent.visitor.headers["authorization"] = "Bearer demo-token"
        await agent.send("POST", "/tools/register", WEATHER)
        reply = await (await agent.visitor.call("get_weather", city="Beijing")).done()
        assert reply.message["result"]["structuredContent"]["temperature"] == 5


@pytest.mark.parametrize("header", ["x-forwarded-for", "forwarded", "via"])
async def test_registering_without_a_token_is_for_this_machine_alone(header: str) -> None:
    async with agents(anonymous=True) as agent:
        anybody = agent.as_other(None)
        assert (await anybody.send("POST", "/tools/register", WEATHER)).status == 200
        proxied = await anybody.send("POST", "/tools/register", WEATHER, {header: "for=192.0.2.1"})
        assert failure(proxied) == (401, "unauthenticated")
        for peer in ("192.0.2.1:40000", "[2001:db8::1]:40000", ""):  # the last where the host does not say
            anybody.visitor.peer = peer
            elsewhere = await anybody.send("POST", "/tools/register", WEATHER)
            assert failure(elsewhere) == (401, "unauthenticated")
        anybody.visitor.peer = "127.0.0.1:40000"
        assert failure(await anybody.send("GET", "/tools")) == (401, "unauthenticated")
        assert failure(await anybody.send("DELETE", "/tools/get_weather")) == (401, "unauthenticated")
    async with agents() as agent:
        assert failure(await agent.as_other(None).send("POST", "/tools/register", WEATHER)) == (401, "unauthenticated")
        weak = agent.as_other("weak-token")
        assert failure(await weak.send("POST", "/tools/register", WEATHER)) == (403, "forbidden")


# Contexts


@pytest.mark.parametrize("what", ["read", "watched"])
async def test_large_contexts_that_are_read_together_take_several_turns(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    turns = [0]
    encode = messages.encode_message

    class Turns(trio.abc.Instrument):
        def before_io_wait(self, timeout: float) -> None:
            turns.append(0)

    def counted(message: messages.AgentMessage) -> bytes:
        data = encode(message)
        turns[-1] += len(data) > 200_000
        return data

    monkeypatch.setattr(messages, "encode_message", counted)
    trio.lowlevel.add_instrument(Turns())
    async with agents() as agent:
        await agent.send("POST", "/contexts", {"context_id": "large", "state": {"text": "x" * 200_000}})
        async with trio.open_nursery() as nursery:
            for _ in range(40):
                if what == "read":
                    nursery.start_soon(agent.send, "GET", "/contexts/large")
                else:
                    nursery.start_soon(agent.begin, "GET", "/contexts/large/events")
        await wait_all_tasks_blocked()
        await agent.send("DELETE", "/contexts/large")
        await wait_all_tasks_blocked()
    assert sum(turns) == 40 + 1
    assert max(turns) <= 2  # 256 KiB, and what exceeds them


async def test_a_context_is_made_read_changed_and_ended() -> None:
    async with agents() as agent:
        made = await agent.send("POST", "/contexts", {"state": {"a": 1}})
        assert made.status == 201
        assert made.headers["etag"] == '"0"'
        id = made.json["context_id"]
        assert id.startswith("ctx_")
        read = await agent.send("GET", f"/contexts/{id}")
        assert (read.status, read.headers["etag"], read.json["state"]["a"]) == (200, '"0"', 1)
        changed = await agent.send("PATCH", f"/contexts/{id}", {"a": None, "b": 2}, if_match='"0"')
        assert changed.json == {
            "type": "context_update",
            "context_id": id,
            "updates": {"a": None, "b": 2},
            "version": 1,
        }
        assert changed.headers["etag"] == '"1"'
        conflict = await agent.send("PATCH", f"/contexts/{id}", {"b": 3}, if_match='"0"')
        assert failure(conflict) == (409, "version_conflict")
        assert conflict.json["error"]["data"] == {"version": 1}
        patch = {"content-type": "application/merge-patch+json; charset=utf-8"}
        assert (await agent.send("PATCH", f"/contexts/{id}", {"b": 3}, patch, if_match='W/"1"')).status == 200
        assert (await agent.send("PATCH", f"/contexts/{id}", {"b": 4}, if_match="*")).json["version"] == 3
        ended = await agent.send("DELETE", f"/contexts/{id}?reason=done")
        assert ended.json == {"type": "context_destroyed", "context_id": id, "reason": "done"}
        for method in ("GET", "DELETE"):
            assert failure(await agent.send(method, f"/contexts/{id}")) == (410, "context_gone")
        assert failure(await agent.send("PATCH", f"/contexts/{id}", {})) == (410, "context_gone")


@pytest.mark.parametrize("condition", ['"x"', "-1", '"1", "2"', '"' + "9" * 30 + '"', '"²"'])
async def test_a_condition_is_a_version(condition: str) -> None:
    async with agents() as agent:
        assert failure(await agent.send("PATCH", "/contexts/c", {}, if_match=condition)) == (400, "malformed")


async def test_an_update_of_a_version_begins_no_context() -> None:
    async with agents() as agent:
        assert failure(await agent.send("PATCH", "/contexts/c", {"a": 1}, if_match='"3"')) == (404, "unknown_context")
        assert failure(await agent.send("GET", "/contexts/c")) == (404, "unknown_context")
        assert (await agent.send("PATCH", "/contexts/c", {"a": 1}, if_match='"0"')).json["version"] == 1


async def test_a_context_is_nobody_elses() -> None:
    async with agents() as agent:
        await agent.send("PATCH", "/contexts/c", {"a": 1})
        stranger = agent.as_other("other-token")
        assert failure(await stranger.send("GET", "/contexts/c")) == (404, "unknown_context")
        assert failure(await stranger.send("DELETE", "/contexts/c")) == (404, "unknown_context")
        assert failure(await stranger.send("GET", "/contexts/c/events")) == (404, "unknown_context")
        minted = (await agent.send("POST", "/contexts", {})).json["context_id"]
        assert failure(await stranger.call("echo", text="x", context=minted)) == (404, "unknown_context")
        assert (await agent.send("GET", "/contexts/c")).json["state"]["a"] == 1


async def test_a_watcher_sees_each_update_and_the_end() -> None:
    async with agents() as agent:
        await agent.send("PATCH", "/contexts/c", {"a": 1})
        watch = await agent.begin("GET", "/contexts/c/events")
        await watch.events(1)
        await agent.send("PATCH", "/contexts/c", {"a": 2})
        await agent.call("remember", context="c", key="k", value="v")
        await watch.events(3)
        await agent.send("DELETE", "/contexts/c?reason=over")
        await watch.done()
        found = list(events_of(bytes(watch.body)))
        assert [kind for kind, _ in found] == ["context_state", "context_update", "context_update", "context_destroyed"]
        assert [message.get("version") for _, message in found] == [1, 2, 3, None]
        assert found[2][1]["updates"] == {"intermediate_results": {"k": "v"}}
        assert found[3][1]["reason"] == "over"


async def test_a_watch_that_crashes_ends(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(message: Any) -> bytes:
        raise KeyError("a bug")

    async with agents() as agent:
        await agent.send("PATCH", "/contexts/c", {"a": 1})
        monkeypatch.setattr("trimcp.agent_tools.messages.messages.encode_message", encode)
        watch = await agent.begin("GET", "/contexts/c/events")
        await watch.done()
        assert (watch.status, watch.body) == (200, b"")
        assert "incident" in caplog.text


async def test_a_watch_ends_with_its_request() -> None:
    async with agents() as agent:
        await agent.send("PATCH", "/contexts/c", {"a": 1})
        watch = await agent.begin("GET", "/contexts/c/events")
        await watch.events(1)
        assert agent.visitor.face.shared.exchanges == 1
        watch.leave()
        await wait_all_tasks_blocked()
        assert agent.visitor.face.shared.exchanges == 0
        run = next(iter(agent.world.agent_tools._runs.values()))
        assert run.contexts.statistics().watchers == 0


async def test_a_watch_ends_with_the_token(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    started = time.time()
    async with agents(settings={"keep_alive": 10.0}) as agent:
        begun = trio.current_time()
        monkeypatch.setattr(time, "time", lambda: started + trio.current_time() - begun)
        brief = agent.as_other("short-token")
        await brief.send("PATCH", "/contexts/c", {"a": 1})
        watch = await brief.begin("GET", "/contexts/c/events")
        await watch.events(1)
        await trio.sleep(55)
        assert not watch.finished
        await trio.sleep(15)
        assert watch.finished
        assert b"expired" in watch.body
        await wait_all_tasks_blocked()
        assert agent.visitor.face.shared.exchanges == 0


async def test_a_slow_watcher_sees_the_last_state(autojump_clock: MockClock) -> None:
    async with agents(settings={"stream_buffer": 4_096}) as agent:
        await agent.send("PATCH", "/contexts/c", {"a": 1})
        watch = await agent.begin("GET", "/contexts/c/events")
        await watch.events(1)
        watch.stalled = True
        for number in range(300):
            await agent.send("PATCH", "/contexts/c", {"n": number, "padding": "x" * 100})
        assert len(watch.held) < 32_768
        watch.read_on()
        await wait_all_tasks_blocked()
        await agent.send("DELETE", "/contexts/c")
        await watch.done()
        *_, (kind, last), end = events_of(bytes(watch.body))
        assert last["version"] == 301
        assert (last["state"] if kind == "context_state" else last["updates"])["n"] == 299
        assert end[0] == "context_destroyed"


async def test_the_end_of_a_context_cancels_its_calls() -> None:
    async with agents() as agent:
        call = await agent.begin("POST", "/tools/call", call_of("wait", context="c", statuses="extended"))
        await agent.world.began.wait()
        await agent.send("DELETE", "/contexts/c?reason=enough")
        await call.done()
        assert call.status == 499
        assert conforms(call.json)["status"] == "cancelled"
        assert call.json["error"] == {"code": "cancelled", "message": "enough"}
        assert agent.world.reasons == ["cancelled by peer: enough"]


async def test_the_history_has_each_call() -> None:
    async with agents() as agent:
        await agent.call("echo", context="c", text="a secret")
        await agent.call("fail", context="c", id="r2")
        await agent.call("echo", context="c", id="r3", number=1)
        history = (await agent.send("GET", "/contexts/c")).json["state"]["tool_history"]
        assert [(each["tool"], each["status"], each["arguments"]) for each in history] == [
            ("echo", "success", {"text": "string(8)"}),
            ("fail", "error", {}),
        ]


async def test_what_the_service_writes_is_not_written_over_the_wire() -> None:
    async with agents() as agent:
        for name in ("permissions", "session_id", "tool_history"):
            refused = await agent.send("PATCH", "/contexts/c", {name: [], "a": 1})
            assert failure(refused) == (400, "malformed")
            assert name in refused.json["error"]["message"]
            refused = await agent.send("POST", "/contexts", {"context_id": "d", "state": {name: []}})
            assert failure(refused) == (400, "malformed")
        state = (await agent.send("PATCH", "/contexts/c", {"b": 1})).json
        assert state["version"] == 1
        assert (await agent.send("GET", "/contexts/c")).json["state"]["permissions"] == ["read", "tools:register"]


async def test_ids_may_have_slashes() -> None:
    async with agents() as agent:
        assert (await agent.send("PATCH", "/contexts/a/b", {"a": 1})).json["context_id"] == "a/b"
        assert (await agent.send("GET", "/contexts/a/b")).json["state"]["a"] == 1
        watch = await agent.begin("GET", "/contexts/a/b/events")
        await watch.events(1)
        await agent.send("DELETE", "/contexts/a/b")
        await watch.done()
        assert failure(await agent.send("GET", "/tools/a/b")) == (404, "unknown_tool")


# Every message at the endpoint of MCP


async def test_every_request_is_also_a_message() -> None:
    async with agents() as agent:
        for number, (message, answered, status) in enumerate(
            [
                ({"type": "register_tool", "tool": WEATHER}, "tools_registered", 200),
                ({"type": "list_tools", "name": "get_weather"}, "tools", 200),
                ({"type": "remove_tool", "name": "get_weather"}, "tool_removed", 200),
                ({"type": "context_create", "context_id": "c", "ttl": 60}, "context_state", 201),
                ({"type": "context_update", "context_id": "c", "updates": {"a": 1}}, "context_update", 200),
                ({"type": "context_read", "context_id": "c"}, "context_state", 200),
                ({"type": "context_destroy", "context_id": "c"}, "context_destroyed", 200),
                ({"type": "context_read", "context_id": "c"}, "error", 410),
                (call_of("echo", text="x"), "tool_response", 200),
            ]
        ):
            answer = await agent.send("POST", "/mcp", {**message, "request_id": f"n{number}"})
            assert (answer.status, answer.json["type"]) == (status, answered)
            assert answer.json["request_id"] == f"n{number}"


@pytest.mark.parametrize(
    "message",
    [
        {"type": "context_watch", "context_id": "c"},
        {"type": "context_unwatch", "context_id": "c"},
        {"type": "provide_tools", "tools": []},
        {"type": "tool_cancel", "request_id": "r1"},
        {"type": "tool_response", "request_id": "r1", "status": "success"},
        {"type": "tools", "tools": []},
        {"type": "odd"},
        {"type": 1},
        {"type": None},
    ],
)
async def test_other_messages_are_no_request(message: dict[str, Any]) -> None:
    async with agents() as agent:
        assert failure(await agent.send("POST", "/mcp", message)) == (400, "malformed")


# What HTTP refuses


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/tools/call", "POST"),
        ("PUT", "/tools/register", "POST"),
        ("POST", "/tools", "GET"),
        ("POST", "/tools/echo", "GET, DELETE"),
        ("GET", "/contexts", "POST, DELETE"),
        ("PUT", "/contexts/c", "GET, PATCH, DELETE"),
        ("DELETE", "/contexts/c/events", "GET"),
        ("POST", "/schemas", "GET, HEAD"),
        ("OPTIONS", "/tools", "GET"),
    ],
)
async def test_wrong_methods(method: str, path: str, allowed: str) -> None:
    async with agents() as agent:
        answer = await agent.send(method, path)
        assert (*failure(answer), answer.headers["allow"]) == (405, "malformed", allowed)


@pytest.mark.parametrize("path", ["/tools/", "/contexts/", "/contexts//events"])
async def test_wrong_paths(path: str) -> None:
    async with agents() as agent:
        assert failure(await agent.send("GET", path)) == (404, "not_found")


async def test_other_paths_are_not_ours() -> None:
    async with agents() as agent:
        for path in ("/tool", "/toolsx", "/schemas/x", "/agents", "/contextsx/c"):
            answer = await agent.send("GET", path)
            assert answer.status == 404
            assert answer.json["jsonrpc"] == "2.0"


async def test_bodies_are_json_and_not_compressed() -> None:
    async with agents() as agent:
        message = call_of("echo", text="x")
        for content in ("text/plain", None, "application/json; charset=latin-1", "application/merge-patch+json"):
            answer = await agent.send("POST", "/tools/call", message, {"content-type": content})
            assert failure(answer) == (415, "malformed")
        packed = await agent.send("POST", "/tools/call", message, content_encoding="gzip")
        assert (packed.status, packed.headers["accept-encoding"]) == (415, "identity")
        for body in (b"", b"{", b"[]", b"1", b"null", b"\xff", b"[" * 500, b'{"type": "list_tools"}'):
            assert failure(await agent.send("POST", "/tools/call", body)) == (400, "malformed")
        deep = b'{"a":' * 200 + b"1" + b"}" * 200
        assert failure(await agent.send("PATCH", "/contexts/c", deep)) == (400, "malformed")


async def test_the_websocket_is_asked_for_as_one() -> None:
    async with agents() as agent:
        answer = await agent.send("GET", "/agent")
        assert (*failure(answer), answer.headers["upgrade"]) == (426, "malformed", "websocket")


async def test_what_is_malformed_is_answered_by_its_own_name() -> None:
    async with agents() as agent:
        call = {"request_id": "mine", "statuses": "extended"}
        for path, message in (("/tools/call", call), ("/mcp", {"type": "tool_request", **call})):
            answer = await agent.send("POST", path, message)
            assert (answer.status, answer.json["type"], answer.json["request_id"]) == (400, "tool_response", "mine")
        other = await agent.send("POST", "/mcp", {"type": "context_read", "request_id": "mine"})
        assert (other.json["type"], other.json["request_id"]) == ("error", "mine")
        for id in ("x" * 300, "", 7, None):
            unnamed = await agent.send("POST", "/tools/call", {"request_id": id})
            assert unnamed.json["type"] == "error"
            assert "request_id" not in unnamed.json
        # What a manifest or a patch has by that name is their own.
        patch = await agent.send("PATCH", "/contexts/c", {"request_id": "mine", "permissions": []})
        assert "request_id" not in patch.json


async def test_what_is_refused_is_a_security_event(caplog: pytest.LogCaptureFixture) -> None:
    async with agents(settings={"max_exchanges": 1}, limits=trimcp.Limits(max_message=1_000)) as agent:
        await agent.call("echo", text="x" * 1_000)
        call = await agent.begin("POST", "/tools/call", call_of("wait"))
        assert failure(await agent.send("GET", "/tools")) == (429, "too_much")
        call.leave()
    assert "oversize" in caplog.text
    assert "flood_refused" in caplog.text


async def test_a_host_is_told_what_is_at_rest_and_tells_who_is_slow() -> None:
    async with agents() as agent:
        agent.visitor.peer = "192.0.2.1:5"
        answer = await agent.begin("POST", "/tools/call", call_of("wait"))
        handler = answer.handler
        assert handler is not None
        await agent.world.began.wait()
        assert not handler.at_rest
        answer.gone = True
        handler.disconnected("it read nothing")
        assert handler.at_rest
        await agent.world.wait_for(1)
        assert agent.world.reasons == ["limit: it read nothing"]
        record = agent.world.audit[-1]
        assert (record["outcome"], record["reason"], record["address"]) == ("cancelled", "limit", "192.0.2.1")


async def test_handshakes_are_judged_as_those_of_mcp() -> None:
    async with agents() as agent:
        face = agent.visitor.face
        headers = {"host": "localhost", "authorization": "Bearer demo-token"}
        odd = Head("GET", "/agent", headers={**headers, "sec-websocket-key": "short"}, websocket=True)
        refused = await face.admit(odd)
        assert isinstance(refused, HttpResponse)
        assert refused.status == 400
        good = Head("GET", "/agent", headers={**headers, "sec-websocket-protocol": "mcp, agent-tools"}, websocket=True)
        upgrade = await face.admit(good)
        assert isinstance(upgrade, Upgrade)
        assert upgrade.subprotocol == "agent-tools"
        await face.drain(0)
        late = await face.admit(Head("GET", "/agent", headers=headers, websocket=True))
        assert isinstance(late, HttpResponse)
        assert late.status == 503


async def test_queries_are_bounded() -> None:
    async with agents() as agent:
        many = "&".join(f"a{number}=1" for number in range(100))
        assert failure(await agent.send("GET", f"/tools?{many}")) == (400, "malformed")
        assert failure(await agent.send("GET", f"/tools?name={'x' * 300}")) == (400, "malformed")
        assert failure(await agent.send("GET", f"/tools/echo?version={'1' * 300}")) == (400, "malformed")
        assert failure(await agent.send("DELETE", f"/contexts/c?reason={'x' * 5_000}")) == (400, "malformed")
        assert (await agent.send("GET", "/tools?other=1")).status == 200
        assert (await agent.send("GET", "/tools?name=%FF%00")).status == 404


async def test_a_body_beyond_the_bound_is_refused() -> None:
    async with agents(limits=trimcp.Limits(max_message=1_000)) as agent:
        answer = await agent.call("echo", text="x" * 1_000)
        assert failure(answer) == (413, "too_large")


async def test_schemas_are_for_everybody() -> None:
    async with agents() as agent:
        answer = await agent.as_other(None).begin("GET", "/schemas")
        assert answer.status == 200
        assert answer.headers["content-type"] == "application/schema+json"
        assert {each["$ref"] for each in answer.json["oneOf"]} >= {"#/$defs/tool_request", "#/$defs/error"}
        assert (await agent.as_other(None).begin("HEAD", "/schemas")).status == 200


async def test_unknown_members_are_ignored_or_refused() -> None:
    more = {**call_of("echo", text="x"), "more": 1}
    async with agents() as agent:
        for path in ("/mcp", "/tools/call"):
            assert (await agent.send("POST", path, more)).status == 200
        assert (await agent.send("POST", "/contexts", {"more": 1})).status == 201
    async with agents(strict=True) as agent:
        for path in ("/mcp", "/tools/call"):
            refused = await agent.send("POST", path, more)
            assert failure(refused) == (400, "malformed")
            assert "`more`" in refused.json["error"]["message"]
        assert failure(await agent.send("POST", "/contexts", {"more": 1})) == (400, "malformed")
        assert (await agent.call("echo", text="x")).status == 200
        assert (await agent.send("PATCH", "/contexts/c", {"more": 1})).status == 200


async def test_the_header_repeats_the_agent_of_the_token() -> None:
    async with agents() as agent:
        same = await agent.send("POST", "/tools/call", call_of("echo", text="x"), agent_id="agent-of-demo")
        assert same.status == 200
        other = await agent.send("POST", "/tools/call", call_of("echo", text="x"), agent_id="somebody")
        assert failure(other) == (403, "forbidden")
        assert failure(await agent.send("GET", "/contexts/c", agent_id="somebody")) == (403, "forbidden")
    async with agents(agent_claim="team") as agent:
        assert (await agent.send("GET", "/tools", agent_id="demo")).status == 200
    async with agents(agent_claim="none") as agent:
        assert failure(await agent.call("echo", text="x")) == (403, "forbidden")
        agent.visitor.headers["authorization"] = "Bearer demo-token"
        over_mcp = await (await agent.visitor.call("echo", text="x")).done()
        assert (over_mcp.status, over_mcp.json["error"]["code"]) == (403, FORBIDDEN)


async def test_pages_of_allowed_origins_may_use_every_method_and_header() -> None:
    page = "https://app.example"
    async with agents(settings={"origins": trimcp.Origins(allow_origins=[page])}) as agent:
        asked = {"origin": page, "access-control-request-method": "PATCH"}
        preflight = await agent.as_other(None).begin("OPTIONS", "/contexts/c", None, asked)
        assert preflight.status == 204
        assert {"PATCH", "DELETE"} <= set(preflight.headers["access-control-allow-methods"].split(", "))
        allowed = set(preflight.headers["access-control-allow-headers"].split(", "))
        assert {"Authorization", "Content-Type", "If-Match", "Agent-Id"} <= allowed
        made = await agent.send("PATCH", "/contexts/c", {"a": 1}, origin=page)
        assert made.headers["access-control-allow-origin"] == page
        assert {"ETag", "Retry-After"} <= set(made.headers["access-control-expose-headers"].split(", "))
        watch = await agent.begin("GET", "/contexts/c/events", origin=page)
        await watch.begun()
        assert watch.headers["access-control-allow-origin"] == page
        watch.leave()
        refused = await agent.send("GET", "/contexts/nobodys", origin=page)
        assert refused.headers["access-control-allow-origin"] == page
        foreign = await agent.begin("GET", "/tools", None, {"origin": "https://evil.example"})
        assert foreign.status == 403


async def test_too_many_requests_are_refused() -> None:
    async with agents(settings={"max_exchanges": 2}) as agent:
        call = await agent.begin("POST", "/tools/call", call_of("wait"))
        await agent.send("PATCH", "/contexts/c", {"a": 1})
        watch = await agent.begin("GET", "/contexts/c/events")
        await watch.begun()
        refused = await agent.send("GET", "/tools")
        assert (*failure(refused), refused.headers["retry-after"]) == (429, "too_much", "1")
        watch.leave()
        await wait_all_tasks_blocked()
        assert (await agent.send("GET", "/tools")).status == 200
        agent.world.release.set()
        await call.done()


@pytest.mark.parametrize("anonymous", [True, False])
async def test_a_head_that_comes_again_is_not_judged_again_but_counted(anonymous: bool) -> None:
    options = {"authenticate": None} if anonymous else {}
    async with agents(settings={"max_exchanges": 1}, **options) as agent:
        headers = {"host": "localhost:8000", **JSON, **({} if anonymous else {"authorization": "Bearer demo-token"})}
        head = Head("POST", "/tools/call", "", headers, agent.visitor.peer)
        assert not isinstance(await agent.visitor.face.admit(head), HttpResponse)
        if not anonymous:  # the check may say otherwise the next time
            assert head.again is None
            return
        assert head.again is not None
        handler = head.again(head)
        assert handler is not None
        answer = Answer()
        handler.start(orjson.dumps(call_of("wait")), answer)
        assert head.again(head) is None
        agent.world.release.set()
        await answer.done()
        assert answer.status == 200
        assert head.again(head) is not None


# Callers without a token


@pytest.mark.parametrize("peer", ["192.0.2.1:5", "127.0.0.1:5", "unix", "[::1]:7"])
@pytest.mark.parametrize("proxied", [False, True])
@pytest.mark.parametrize("anonymous", [None, "loopback", "anywhere"])
async def test_callers_without_a_token_are_served_on_this_machine_only(
    peer: str, proxied: bool, anonymous: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with agents(authenticate=None, anonymous_agents=anonymous) as agent:
        agent.visitor.peer = peer
        agent.token = None
        served = anonymous == "anywhere" or (peer != "192.0.2.1:5" and not proxied)
        more = {"x-forwarded-for": "192.0.2.9"} if proxied else {}
        for method, path, body in (
            ("GET", "/tools", None),
            ("POST", "/contexts", {"context_id": "c"}),
            ("POST", "/tools/call", call_of("echo", text="x")),
            ("POST", "/mcp", call_of("echo", text="x")),
            ("DELETE", "/contexts/c", None),
        ):
            answer = await agent.send(method, path, body, **more)
            assert answer.status in ((200, 201) if served else (401,)), (path, answer.json)
            if not served:
                assert answer.json["error"]["code"] == "unauthenticated"
                assert "its own machine only" in answer.json["error"]["message"]
        assert (await agent.send("GET", "/schemas", **more)).status == 200
    warned = [record for record in caplog.records if "without a check of tokens" in record.getMessage()]
    assert len(warned) == (anonymous is None)


async def test_the_id_of_a_context_that_nobody_owns_stands_in_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """It is all that protects the context; the audit has a digest, by which calls in one context are found together."""
    caplog.set_level(0)
    id, limits = "a-secret-id", ContextLimits(max_contexts=1)
    async with agents(authenticate=None, anonymous_agents="loopback", contexts=limits) as agent:
        agent.token = None
        for tool in ("echo", "crash"):
            await agent.send(
                "POST", "/tools/call", call_of(tool, tool, context=id, **({"text": "x"} if tool == "echo" else {}))
            )
        await agent.send("POST", "/contexts", {"context_id": "another"})
        await agent.send("PATCH", f"/contexts/{id}", {"permissions": []})
        await agent.send("DELETE", f"/contexts/{id}")
        first, second = [record["context"] for record in agent.world.audit if "context" in record]
    assert id not in caplog.text
    assert id not in str(agent.world.audit)
    assert first == second
    assert len(first) == 12


async def test_no_warning_where_callers_are_identified(caplog: pytest.LogCaptureFixture) -> None:
    async with agents() as agent:
        assert (await agent.send("GET", "/tools")).status == 200
    assert "without a check of tokens" not in caplog.text
    with pytest.raises(ValueError, match="anonymous"):
        trimcp.agent_tools.AgentTools(trimcp.Server("s"), anonymous="everywhere")


# The end


async def test_draining_lets_calls_answer_and_refuses_others() -> None:
    async with agents() as agent, trio.open_nursery() as nursery:
        call = await agent.begin("POST", "/tools/call", call_of("wait"))
        await agent.send("PATCH", "/contexts/c", {"a": 1})
        watch = await agent.begin("GET", "/contexts/c/events")
        await watch.begun()
        await agent.world.began.wait()
        nursery.start_soon(agent.visitor.face.drain, 60)
        await wait_all_tasks_blocked()
        for answer in (await agent.call("echo", id="r2", text="x"), await agent.send("GET", "/contexts/c")):
            assert (*failure(answer), answer.headers["retry-after"]) == (503, "draining", "1")
        assert not watch.finished
        agent.world.release.set()
        assert (await call.done()).json["result"] == "released"
        await watch.done()


async def test_what_is_left_after_the_grace_is_cancelled(autojump_clock: MockClock) -> None:
    async with agents() as agent:
        for number, headers in enumerate((JSON, EVENTS)):
            await agent.begin("POST", "/tools/call", call_of("wait", f"r{number}"), headers)
        call = await agent.begin("POST", "/tools/call", call_of("wait", "r2", statuses="extended"))
        await agent.world.began.wait()
        await agent.visitor.face.drain(5)
        await call.done()
        assert (call.status, call.json["error"]["code"]) == (503, "draining")
        assert agent.world.reasons == ["drain"] * 3


async def test_a_request_under_way_when_the_port_closes_is_answered(autojump_clock: MockClock) -> None:
    async with agents() as agent:
        run = next(iter(agent.world.agent_tools._runs.values()))

        async def slow(*args: Any, **options: Any) -> Any:
            await trio.sleep_forever()

        run.contexts.find = slow
        answer = await agent.begin("GET", "/contexts/c")
        await wait_all_tasks_blocked()
        await agent.visitor.face.drain(0)
        await answer.done()
        assert failure(answer) == (503, "draining")


# Records


async def test_statistics_have_contexts_calls_and_tools() -> None:
    async with agents() as agent:
        await agent.send("POST", "/tools/register", WEATHER)
        plain = await agent.begin("POST", "/tools/call", call_of("wait"))
        within = await agent.begin("POST", "/tools/call", call_of("wait", context="c"))
        await wait_all_tasks_blocked()
        hosts = agent.world.server.statistics().hosts
        assert {name: hosts[name] for name in ("agent_contexts", "agent_calls", "agent_tools", "exchanges")} == {
            "agent_contexts": 1,
            "agent_calls": 2,
            "agent_tools": 1,
            "exchanges": 2,
        }
        agent.world.release.set()
        await plain.done()
        await within.done()


async def test_the_audit_names_agent_and_context() -> None:
    async with agents() as agent:
        await agent.call("echo", text="x", context="c", id="mine")
        record = agent.world.audit[-1]
        assert (record["transport"], record["agent"], record["context"], record["request_id"]) == (
            "http",
            "agent-of-demo",
            "c",
            "mine",
        )
        assert (record["principal"], record["target"], record["outcome"]) == ("demo", "echo", "ok")
        call = await agent.begin("POST", "/tools/call", call_of("wait"))
        await agent.world.began.wait()
        call.leave()
        await agent.world.wait_for(1)
        assert (agent.world.audit[-1]["outcome"], agent.world.audit[-1]["reason"]) == ("cancelled", "disconnected")
        assert "context" not in agent.world.audit[-1]


async def test_a_trace_shows_both_directions() -> None:
    lines: list[str] = []
    async with agents(settings={"trace": lines.append}) as agent:
        await agent.call("echo", "/tools/call", text="x")
        await agent.call("echo", "/mcp", text="x")
        await agent.send("GET", "/tools")
    assert [line.split()[1] for line in lines] == ["<--", "-->", "<--", "-->", "-->"]
    assert '"tool_request"' in lines[0]
    assert '"tool_response"' in lines[1]


async def test_a_crash_outside_of_a_tool_has_an_incident_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def approve(manifest: Any, caller: Any) -> bool:
        raise KeyError("a secret")

    rules = trimcp.agent_tools.RegistrationRules(approve=approve)
    async with agents(registration=rules) as agent:
        answer = await agent.send("POST", "/tools/register", WEATHER)
        assert answer.status == 500
        assert "secret" not in answer.body.decode()
        assert answer.json["error"]["data"]["incident"] in caplog.text


async def test_who_may_not_see_a_tool_learns_nothing_of_its_schema() -> None:
    async with agents() as agent:
        weak = agent.as_other("weak-token")
        answer = await weak.call("guarded", wrong=1)
        assert failure(answer) == (403, "forbidden")
        assert "text" not in answer.json["error"]["message"]
        assert (agent.world.audit[-1]["outcome"], agent.world.audit[-1]["agent"]) == ("refused", "agent-of-weak")


async def test_other_servers_tools_are_refused() -> None:
    other = AgentTools(trimcp.Server("other", "1"))
    with pytest.raises(LocalError, match="another server"):
        async with visiting(trimcp.Server("one", "1"), settings=trimcp.HttpSettings(agent_tools=other)):
            raise AssertionError


async def test_agent_tools_come_before_the_server_runs() -> None:
    """They were told to belong to another server."""
    server = trimcp.Server("one", "1")
    async with server.running():
        with pytest.raises(LocalError, match="cannot be added while the server runs"):
            AgentTools(server)
    AgentTools(server)


def test_agent_tools_need_the_newest_revision() -> None:
    with pytest.raises(LocalError, match="does not speak"):
        AgentTools(trimcp.Server("old", "1", revisions=[LATEST_LEGACY]))


async def test_contexts_are_bounded() -> None:
    async with agents(contexts=ContextLimits(max_per_owner=1, max_state=1_000)) as agent:
        await agent.send("PATCH", "/contexts/c", {"a": 1})
        refused = await agent.send("PATCH", "/contexts/d", {"a": 1})
        assert failure(refused) == (429, "too_much")
        assert refused.headers["retry-after"] == "60"
        large = await agent.send("PATCH", "/contexts/c", {"a": "x" * 2_000})
        assert failure(large) == (413, "too_large")
