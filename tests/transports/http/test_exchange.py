from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from tests.transports.http.face import LEGACY, Visitor, visiting
from trimcp.errors import LocalError
from trimcp.net import http_application
from trimcp.server.server import Server
from trimcp.session.context import Context
from trimcp.session.incoming.job import CancelReason
from trimcp.session.limits import Limits, Quota
from trimcp.transports.http.settings import HttpSettings
from trimcp.wire.codes import CANCELLED_BY_DRAIN, INVALID_PARAMS, METHOD_NOT_FOUND, OVERLOADED
from trimcp.wire.revisions import LATEST, REVISIONS, V2025_03_26, Revision

_LONG = (("wait", "seconds"), ("steps", "count"))
ERAS = pytest.mark.parametrize("revision", [LEGACY, LATEST], ids=str)


def make_server(journal: list[str] | None = None) -> Server[Any]:
    server: Server[Any] = Server("tester", "1")
    said = journal if journal is not None else []

    @server.tool
    async def echo(text: str) -> str:
        return text

    @server.tool
    async def steps(count: int, every: float = 1.0, *, ctx: Context) -> str:
        try:
            for step in range(count):
                await ctx.report_progress(step + 1, count)
                await trio.sleep(every)
        finally:
            said.append(f"{ctx.cancel_reason.value if ctx.cancel_reason else 'finished'}")
        return "done"

    @server.tool
    async def fast(count: int, *, ctx: Context) -> str:
        for step in range(count):
            ctx.report_progress_nowait(step + 1, count, "x" * 100)
            await trio.lowlevel.checkpoint()
        return "done"

    @server.tool
    async def flood(count: int, *, ctx: Context) -> str:
        for step in range(count):
            await ctx.report_progress(step + 1, count, "x" * 1000)
            said.append("step")
        return "done"

    @server.tool
    async def wait(seconds: float, *, ctx: Context) -> str:
        try:
            await trio.sleep(seconds)
        finally:
            said.append(f"{ctx.cancel_reason.value if ctx.cancel_reason else 'finished'}")
        return "waited"

    @server.tool
    async def ask(*, ctx: Context) -> str:
        answer = await ctx.elicit("Your name?", {"type": "object", "properties": {"name": {"type": "string"}}})
        return f"Hello, {answer.content['name']}"

    @server.tool
    async def polled(*, ctx: Context) -> str:
        ctx.close_stream()
        await trio.sleep(1)
        return "after all"

    return server


@pytest.mark.parametrize("revision", REVISIONS[1:], ids=str)
async def test_an_answer_is_json_where_nothing_comes_before_it(revision: Revision, autojump_clock: Any) -> None:
    async with visiting(make_server(), revision) as visitor:
        if not revision.modern:
            await visitor.initialize()
        answer = await (await visitor.call("echo", text="hi")).done()
        assert (answer.status, answer.headers["content-type"], answer.writes) == (200, "application/json", 1)
        assert answer.json["result"]["content"][0]["text"] == "hi"


@pytest.mark.parametrize("revision", REVISIONS[1:], ids=str)
async def test_an_answer_becomes_a_stream_at_its_first_notification(revision: Revision, autojump_clock: Any) -> None:
    async with visiting(make_server(), revision) as visitor:
        if not revision.modern:
            await visitor.initialize()
        answer = await visitor.call("steps", token=7, count=2)
        await trio.testing.wait_all_tasks_blocked()
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["x-accel-buffering"] == "no"
        assert [message["params"]["progress"] for message in answer.messages] == [1]
        await answer.done()
        assert [message.get("method", "answer") for message in answer.messages][1:] == [
            "notifications/progress",
            "answer",
        ]
        ids = [event.id for event in answer.now()]
        assert all(ids) if revision.resumable else not any(ids)
        assert (answer.now()[0].data == b"") is revision.priming_event


@ERAS
async def test_a_silent_answer_becomes_a_stream_that_is_kept_alive(revision: Revision, autojump_clock: Any) -> None:
    async with visiting(make_server(), revision) as visitor:
        if not revision.modern:
            await visitor.initialize()
        began = trio.current_time()
        answer = await visitor.call("wait", seconds=60)
        await answer.begun()
        assert 0.05 <= trio.current_time() - began <= 0.2, "clients count it as under way from then on"
        assert bytes(answer.body).startswith(b"id: ") is revision.priming_event
        await answer.done()
        assert 3 <= bytes(answer.body).count(b"\n:\n") + bytes(answer.body).startswith(b":\n") <= 4
        assert answer.messages[-1]["result"]["content"][0]["text"] == "waited"


@ERAS
@pytest.mark.parametrize("form", ["json", "sse"])
async def test_the_form_of_an_answer_can_be_forced(revision: Revision, form: Any, autojump_clock: Any) -> None:
    async with visiting(make_server(), revision, HttpSettings(reply=form)) as visitor:
        if not revision.modern:
            await visitor.initialize() if form == "json" else None
        if not revision.modern and form == "sse":
            opened = await visitor.post(
                visitor.request(
                    "initialize",
                    {"protocolVersion": revision.name, "capabilities": {}, "clientInfo": {"name": "v", "version": "1"}},
                )
            )
            assert opened.headers["content-type"] == "text/event-stream"
            visitor.session = opened.headers["mcp-session-id"]
        answer = await (await visitor.call("steps", token=1, count=3)).done()
        if form == "json":
            assert answer.headers["content-type"] == "application/json"
            assert answer.json["result"]["content"][0]["text"] == "done"
        quick = await (await visitor.call("echo", text="hi")).done()
        wanted = {"json": "application/json", "sse": "text/event-stream"}[form]
        assert (quick.headers["content-type"], quick.writes) == (wanted, 1)


@ERAS
@pytest.mark.parametrize(
    ("accept", "status", "kind"),
    [
        ("application/json", 200, "application/json"),
        ("text/event-stream", 200, "text/event-stream"),
        ("*/*", 200, "application/json"),
        ("text/html, image/*", 406, "application/json"),
    ],
)
async def test_the_client_says_which_forms_it_takes(
    revision: Revision, accept: str, status: int, kind: str, autojump_clock: Any
) -> None:
    async with visiting(make_server(), revision) as visitor:
        if not revision.modern:
            await visitor.initialize()
        answer = await (await visitor.call("echo", {"accept": accept}, text="hi")).done()
        assert (answer.status, answer.headers["content-type"]) == (status, kind)


async def test_since_2026_the_client_cancels_by_leaving(autojump_clock: Any) -> None:
    journal: list[str] = []
    async with visiting(make_server(journal)) as visitor:
        streaming = await visitor.call("steps", token=1, count=9)
        silent = await visitor.call("wait", seconds=60)
        await trio.testing.wait_all_tasks_blocked()
        assert streaming.status == 200
        assert silent.status == 0
        streaming.leave()
        silent.leave()
        await trio.testing.wait_all_tasks_blocked()
        assert journal == [CancelReason.DISCONNECTED.value] * 2


async def test_before_that_the_call_goes_on_and_its_answer_waits(autojump_clock: Any) -> None:
    journal: list[str] = []
    async with visiting(make_server(journal), LEGACY) as visitor:
        await visitor.initialize()
        answer = await visitor.call("steps", token=1, count=3)
        await trio.testing.wait_all_tasks_blocked()
        answer.leave()
        await trio.sleep(10)
        assert journal == ["finished"]
        seen = answer.now()[-1]
        rest = await (await visitor.listen(seen.id)).done()
        assert [message.get("method", "answer") for message in rest.messages] == [
            "notifications/progress",
            "notifications/progress",
            "answer",
        ]
        again = await (await visitor.listen(rest.now()[0].id)).done()
        assert again.messages == rest.messages[1:]


async def test_a_lost_stream_is_taken_up_while_its_call_goes_on(autojump_clock: Any) -> None:
    async with visiting(make_server(), LEGACY) as visitor:
        await visitor.initialize()
        answer = await visitor.call("steps", token=1, count=3)
        await trio.testing.wait_all_tasks_blocked()
        primed = answer.now()[0]
        rest = await visitor.listen(primed.id)  # although the first connection still seems to be there
        assert answer.finished
        await rest.done()
        assert [message.get("method", "answer") for message in rest.messages][-1] == "answer"
        assert len(rest.messages) == 4


async def test_a_stream_may_be_closed_early_and_polled(autojump_clock: Any) -> None:
    async with visiting(make_server(), LEGACY, HttpSettings(retry=100)) as visitor:
        await visitor.initialize()
        answer = await (await visitor.call("polled")).done()
        assert not answer.messages
        assert answer.now()[0].data == b""
        head, _, rest = bytes(answer.body).partition(b"\n\n")
        assert (head[:4], head[-6:], rest) == (b"id: ", b"data: ", b"retry: 100\n\n"), "some clients know no `retry`"
        rest = await (await visitor.listen(answer.now()[0].id)).done()
        assert rest.messages[0]["result"]["content"][0]["text"] == "after all"


@pytest.mark.parametrize("revision", [V2025_03_26, LEGACY, LATEST], ids=str)
async def test_retry_is_said_only_where_the_server_is_about_to_close(revision: Revision, autojump_clock: Any) -> None:
    async with visiting(make_server(), revision) as visitor:
        streams = []
        if not revision.modern:
            await visitor.initialize()
            streams.append(await visitor.listen())
        streams.append(await (await visitor.call("steps", token=1, count=2)).done())
        visitor.headers["accept"] = "text/event-stream"
        streams.append(await (await visitor.call("echo", text="x")).done())
        assert [stream for stream in streams if b"retry" in bytes(stream.body)] == []


@pytest.mark.parametrize("revision", [V2025_03_26, LATEST], ids=str)
async def test_where_a_client_cannot_poll_its_stream_stays(revision: Revision, autojump_clock: Any) -> None:
    async with visiting(make_server(), revision) as visitor:
        if not revision.modern:
            await visitor.initialize()
        answer = await (await visitor.call("polled")).done()
        assert b"retry" not in bytes(answer.body)
        assert answer.messages[-1]["result"]["content"][0]["text"] == "after all"


async def test_a_question_travels_on_the_stream_of_its_request(autojump_clock: Any) -> None:
    async with visiting(make_server(), LEGACY) as visitor:
        await visitor.initialize({"elicitation": {}})
        answer = await visitor.call("ask")
        await trio.testing.wait_all_tasks_blocked()
        [question] = answer.messages
        assert question["method"] == "elicitation/create"
        said = {"jsonrpc": "2.0", "id": question["id"], "result": {"action": "accept", "content": {"name": "Ada"}}}
        assert (await visitor.post(said)).status == 202
        await answer.done()
        assert answer.messages[-1]["result"]["content"][0]["text"] == "Hello, Ada"


async def test_a_question_without_a_stream_fails_the_call_and_not_the_session(autojump_clock: Any) -> None:
    async with visiting(make_server(), LEGACY, HttpSettings(reply="json")) as visitor:
        await visitor.initialize({"elicitation": {}})
        answer = await (await visitor.call("ask")).done()
        assert "error" in answer.json or answer.json["result"]["isError"]
        assert (await (await visitor.call("echo", text="hi")).done()).status == 200


async def test_a_request_that_its_client_cancelled_ends_without_an_answer(autojump_clock: Any) -> None:
    journal: list[str] = []
    async with visiting(make_server(journal), LEGACY) as visitor:
        await visitor.initialize()
        waiting, stepping = ({"name": name, "arguments": {key: 60}} for name, key in _LONG)
        silent = await visitor.post(visitor.request("tools/call", waiting, id="a"))
        loud = await visitor.post(visitor.request("tools/call", stepping, id="b", progressToken=1))
        await trio.testing.wait_all_tasks_blocked()  # a request that is cancelled before its handler began runs none
        for id in "ab":
            cancel = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": id}}
            assert (await visitor.post(cancel)).status == 202
        await silent.done()
        await loud.done()
        assert (silent.status, bytes(silent.body)) == (200, b"")
        assert all("id" not in message for message in loud.messages)
        assert sorted(journal) == [CancelReason.PEER.value] * 2


async def test_a_slow_reader_makes_its_own_handler_wait_and_no_other(autojump_clock: Any) -> None:
    journal: list[str] = []
    async with visiting(make_server(journal), LATEST, HttpSettings(stream_buffer=20_000)) as visitor:
        slow = await visitor.call("flood", token=1, count=2)
        await slow.done()
        journal.clear()
        slow = await visitor.call("flood", token=1, count=1_000)
        slow.stalled = True
        await trio.testing.wait_all_tasks_blocked()
        assert 15 <= len(journal) <= 30
        quick = await (await visitor.call("flood", token=1, count=100)).done()
        assert len(quick.messages) == 101
        slow.read_on()
        await slow.done()
        assert len(slow.messages) == 1_001


async def test_what_only_counts_last_is_merged_for_a_slow_reader(autojump_clock: Any) -> None:
    async with visiting(make_server(), LATEST, HttpSettings(stream_buffer=5_000)) as visitor:
        answer = await visitor.call("fast", token=1, count=500)
        await trio.lowlevel.checkpoint()
        answer.stalled = True
        await trio.sleep(1)
        answer.read_on()
        await answer.done()
        progress = [message["params"]["progress"] for message in answer.messages[:-1]]
        assert progress == sorted(progress)
        assert len(progress) < 100
        assert progress[-1] == 500


@pytest.mark.parametrize(
    ("method", "params", "status", "code"),
    [
        ("nothing/here", {}, 404, METHOD_NOT_FOUND),
        ("tools/call", {"name": "unknown"}, 400, INVALID_PARAMS),
        ("ping", {}, 404, METHOD_NOT_FOUND),
        ("initialize", {}, 404, METHOD_NOT_FOUND),
    ],
)
async def test_since_2026_errors_have_a_status(
    method: str, params: dict[str, Any], status: int, code: int, autojump_clock: Any
) -> None:
    async with visiting(make_server()) as visitor:
        answer = await (await visitor.post(visitor.request(method, params, id="x"))).done()
        assert (answer.status, answer.json["id"], answer.json["error"]["code"]) == (status, "x", code)


async def test_before_that_they_are_answers_like_others(autojump_clock: Any) -> None:
    async with visiting(make_server(), LEGACY) as visitor:
        await visitor.initialize()
        answer = await (await visitor.post(visitor.request("nothing/here", id="x"))).done()
        assert (answer.status, answer.json["id"], answer.json["error"]["code"]) == (200, "x", METHOD_NOT_FOUND)


@ERAS
async def test_a_body_that_is_no_message_is_refused_by_its_id(revision: Revision, autojump_clock: Any) -> None:
    async with visiting(make_server(), revision) as visitor:
        headers = {}
        if revision.modern:
            headers = {"mcp-protocol-version": revision.name, "mcp-method": "tools/call"}
        else:
            await visitor.initialize()
        nested = b'{"jsonrpc":"2.0","params":' + b'{"a":' * 900 + b"1" + b"}" * 900 + b',"id":77,"method":"ping"}'
        answer = await visitor.post(nested, headers)
        assert (answer.status, answer.json["id"], answer.json["error"]["data"]) == (400, 77, {"reason": "depth"})
        broken = await visitor.post(b"{", headers)
        assert broken.status == 400
        assert "id" not in broken.json


@ERAS
async def test_a_body_beyond_the_limit_is_refused(revision: Revision, autojump_clock: Any) -> None:
    server = make_server()
    server.limits = Limits(max_message=1_000)
    async with visiting(server, revision) as visitor:
        if not revision.modern:
            await visitor.initialize()
        answer = await visitor.call("echo", text="x" * 2_000)
        assert (answer.status, answer.json["error"]["data"]) == (413, {"reason": "size"})
        assert (await (await visitor.call("echo", text="hi")).done()).status == 200


async def test_draining_lets_calls_answer_and_then_cuts_them(autojump_clock: Any) -> None:
    async with visiting(make_server(), LEGACY) as visitor:
        await visitor.initialize()
        quick = await visitor.call("wait", seconds=1)
        long = await visitor.call("wait", seconds=60)
        streaming = await visitor.call("steps", token=1, count=60)
        stream = await visitor.listen()
        began = trio.current_time()
        await visitor.face.drain(5)
        assert 4.9 <= trio.current_time() - began <= 5.6
        assert quick.messages[-1]["result"]["content"][0]["text"] == "waited"
        assert long.messages[-1]["error"]["code"] == CANCELLED_BY_DRAIN
        assert streaming.messages[-1]["error"]["code"] == CANCELLED_BY_DRAIN
        assert stream.finished
        late = await visitor.call("echo", text="hi")
        assert late.status == 404
        visitor.session = None
        other = await visitor.post(visitor.request("initialize", {"protocolVersion": LEGACY.name}))
        assert (other.status, other.headers["retry-after"]) == (503, "1")


async def test_what_arrives_while_draining_is_refused(autojump_clock: Any) -> None:
    async with visiting(make_server()) as visitor:
        await visitor.face.drain(5)
        late = await (await visitor.call("echo", text="hi")).done()
        assert (late.status, late.json["error"]["code"]) == (503, CANCELLED_BY_DRAIN)


async def test_nobody_can_be_asked_outside_a_request_in_2026(autojump_clock: Any) -> None:
    caught: list[BaseException] = []
    server = make_server()

    @server.tool
    async def rude(*, ctx: Context) -> str:
        session, _ = ctx.internals
        try:
            await session.call("roots/list")
        except LocalError as error:
            caught.append(error)
        return "sorry"

    async with visiting(server) as visitor:
        await (await visitor.call("rude")).done()
        assert caught


# Quotas


@ERAS
async def test_who_is_refused_is_told_when_to_come_again(revision: Revision, autojump_clock: Any) -> None:
    server: Server[Any] = Server("s")

    @server.tool(quota=Quota(per_second=0.2, burst=1, waiting=0))
    async def rare() -> str:
        return "once"

    async with visiting(server, revision) as visitor:
        if not revision.modern:
            await visitor.initialize()
        assert (await (await visitor.call("rare")).done()).status == 200
        refused = await (await visitor.call("rare")).done()
        error = refused.json["error"]
        assert (error["code"], error["data"]["reason"]) == (OVERLOADED, "overloaded")
        assert error["data"]["retryAfter"] == pytest.approx(5, abs=0.01)
        if revision.modern:
            assert (refused.status, refused.headers["retry-after"]) == (503, "5")
        else:  # whose clients do not read the body of another status
            assert refused.status == 200
        await trio.sleep(5)
        assert (await (await visitor.call("rare")).done()).status == 200


async def test_clients_without_a_session_are_told_apart_by_where_they_are(autojump_clock: Any) -> None:
    """Since 2026-07-28 each request has a session of its own, so a quota of sessions counts by principal or address."""
    server = make_server()
    server.limits = Limits(session=Quota(running=1, waiting=0))
    async with http_application(server) as face, trio.open_nursery() as nursery:
        first, second = Visitor(face, LATEST, peer="10.0.0.1:4711"), Visitor(face, LATEST, peer="10.0.0.2:4711")
        waiting = await first.call("wait", seconds=5)
        first.peer = "10.0.0.1:4712"
        await trio.testing.wait_all_tasks_blocked()
        refused = await (await first.call("echo", text="hi")).done()
        assert refused.status == 503
        assert refused.json["error"]["message"] == "this session: too many calls wait already"
        assert (await (await second.call("echo", text="hi")).done()).status == 200
        assert server.statistics().hosts == {"connections": 0, "exchanges": 1, "sessions": 0, "streams": 0}
        await waiting.done()
        assert (await (await first.call("echo", text="hi")).done()).status == 200
        nursery.cancel_scope.cancel()
    assert server.statistics().hosts == {}
