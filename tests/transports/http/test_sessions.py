from __future__ import annotations

import gc
import weakref
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from tests.transports.http.face import LEGACY, Answer, Visitor, visiting
from tests.transports.http.test_exchange import make_server
from trimcp.errors import LocalError
from trimcp.principal import Principal
from trimcp.session.context import Context
from trimcp.store.events import MemoryEvents
from trimcp.transports.http.interfaces import Head
from trimcp.transports.http.peers.identity import Identity, Refused
from trimcp.transports.http.settings import HttpSettings
from trimcp.wire.revisions import REVISIONS, Revision


async def test_a_session_ends_when_its_client_says_so(autojump_clock: Any) -> None:
    journal: list[str] = []
    async with visiting(make_server(journal), LEGACY) as visitor:
        await visitor.initialize()
        stream = await visitor.listen()
        call = await visitor.call("steps", token=1, count=60)
        await trio.testing.wait_all_tasks_blocked()
        ended = await visitor.send("DELETE", "/mcp", headers={"mcp-session-id": visitor.session or ""})
        assert ended.status == 200
        await call.done()
        assert stream.finished
        await trio.testing.wait_all_tasks_blocked()
        assert journal == ["disconnected"]
        late = await visitor.call("echo", text="hi")
        assert (late.status, late.json["id"]) == (404, 3)
        assert (await visitor.listen()).status == 404
        assert len(visitor.face.shared.sessions) == 0


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_a_session_has_to_be_named(method: str, autojump_clock: Any) -> None:
    async with visiting(make_server(), LEGACY) as visitor:
        assert (await visitor.send(method, "/mcp")).status == 400
        assert (await visitor.send(method, "/mcp", headers={"mcp-session-id": "unknown"})).status == 404


def by_header(head: Head) -> Identity:
    name = head.headers.get("authorization")
    return Principal(name) if name else Refused()


async def test_a_session_belongs_to_who_made_it(autojump_clock: Any) -> None:
    async with visiting(make_server(), LEGACY, HttpSettings(authenticate=by_header)) as ada:
        assert (await ada.call("echo", text="hi")).status == 401
        ada.headers["authorization"] = "ada"
        await ada.initialize()
        call = await (await ada.call("steps", token=1, count=1)).done()
        eve = Visitor(ada.face, LEGACY, {"authorization": "eve"}, ada.session)
        for answer in (
            await eve.call("echo", text="hi"),
            await eve.listen(),
            await eve.listen(call.now()[0].id),
            await eve.send("DELETE", "/mcp", headers={"mcp-session-id": ada.session or ""}),
        ):
            assert answer.status == 404
        assert (await (await ada.call("echo", text="hi")).done()).status == 200


async def test_events_of_another_session_are_not_told(autojump_clock: Any) -> None:
    async with visiting(make_server(), LEGACY) as one:
        await one.initialize()
        two = Visitor(one.face, LEGACY)
        await two.initialize()
        call = await (await one.call("steps", token="secret", count=1)).done()
        found = await two.listen(call.now()[0].id)
        assert (found.status, bytes(found.body).count(b"secret")) == (400, 0)
        own = await (await one.listen(call.now()[0].id)).done()
        assert own.status == 200


@pytest.mark.parametrize("last", ["", "x", "1", "1-", "9-9", "-1-1", "1-1-1", "9" * 200, "1-99999999999999999999"])
async def test_an_event_nobody_sent_is_refused(last: str, autojump_clock: Any) -> None:
    async with visiting(make_server(), LEGACY) as visitor:
        await visitor.initialize()
        answer = await visitor.listen(last)
        assert answer.status == (400 if last else 200)


@pytest.mark.parametrize("revision", [r for r in REVISIONS if r.sessions], ids=str)
async def test_what_belongs_to_no_request_goes_to_the_stream(revision: Revision, autojump_clock: Any) -> None:
    server = make_server()
    server.dynamic = True
    async with visiting(server, revision) as visitor:
        await visitor.initialize()
        stream = await visitor.listen()
        server.remove_tool("echo")
        await trio.testing.wait_all_tasks_blocked()
        assert [message["method"] for message in stream.messages] == ["notifications/tools/list_changed"]


async def test_changes_are_kept_once_until_somebody_reads(autojump_clock: Any) -> None:
    server = make_server()
    server.dynamic = True
    async with visiting(server, LEGACY) as visitor:
        await visitor.initialize()
        for name in ("echo", "ask", "flood"):
            server.remove_tool(name)
        stream = await visitor.listen()
        assert [message["method"] for message in stream.messages] == ["notifications/tools/list_changed"]
        stream.leave()
        server.remove_tool("fast")
        server.remove_tool("wait")
        again = await visitor.listen()
        assert [message["method"] for message in again.messages] == ["notifications/tools/list_changed"]


async def test_a_second_stream_takes_over_from_the_first(autojump_clock: Any) -> None:
    server = make_server()
    server.dynamic = True
    async with visiting(server, LEGACY) as visitor:
        await visitor.initialize()
        first = await visitor.listen()
        second = await visitor.listen()
        assert first.finished
        server.remove_tool("echo")
        assert len(second.messages) == 1
        first.leave()
        server.remove_tool("ask")
        assert len(second.messages) == 2


async def test_an_idle_session_expires_and_a_busy_one_does_not(autojump_clock: Any) -> None:
    async with visiting(make_server(), LEGACY, HttpSettings(session_idle=60)) as listening:
        await listening.initialize()
        stream = await listening.listen()
        working = Visitor(listening.face, LEGACY)
        await working.initialize()
        call = await working.call("wait", seconds=500)
        idle = Visitor(listening.face, LEGACY)
        await idle.initialize()
        assert len(listening.face.shared.sessions) == 3
        await trio.sleep(300)
        assert (await idle.call("echo", text="hi")).status == 404
        assert (await (await listening.call("echo", text="hi")).done()).status == 200
        assert not stream.finished
        await call.done()
        assert call.messages[-1]["result"]["content"][0]["text"] == "waited"


async def test_a_question_nobody_answers_does_not_keep_a_session(autojump_clock: Any) -> None:
    async with visiting(make_server(), LEGACY, HttpSettings(session_idle=60)) as visitor:
        await visitor.initialize({"elicitation": {}})
        call = await visitor.call("ask")
        await trio.testing.wait_all_tasks_blocked()
        assert call.messages[-1]["method"] == "elicitation/create"
        await trio.sleep(300)
        assert len(visitor.face.shared.sessions) == 1, "the client is still there"
        call.leave()
        await trio.sleep(300)
        assert len(visitor.face.shared.sessions) == 0


async def test_a_question_with_no_way_to_the_client_fails(autojump_clock: Any) -> None:
    server = make_server()
    failed: list[BaseException] = []

    @server.tool
    async def late(*, ctx: Context) -> str:
        await ctx.report_progress(1)
        await trio.sleep(1)
        try:
            await ctx.list_roots()
        except LocalError as error:
            failed.append(error)
        return "late"

    async with visiting(server, LEGACY, HttpSettings(resumable=False)) as visitor:
        await visitor.initialize({"roots": {}})
        call = await visitor.call("late", token=1)
        await trio.testing.wait_all_tasks_blocked()
        call.leave()
        await trio.sleep(2)
        assert len(failed) == 1


def from_address(visitor: Visitor, n: int) -> Visitor:
    """Another client of the same face."""
    return Visitor(visitor.face, LEGACY, peer=f"192.0.2.{n}:40000")


async def begin(visitor: Visitor) -> Answer:
    params = {"protocolVersion": LEGACY.name, "capabilities": {}, "clientInfo": {"name": "v", "version": "1"}}
    visitor.session = None
    answer = await visitor.post(visitor.request("initialize", params))
    visitor.session = answer.headers.get("mcp-session-id")
    return answer


async def use(visitor: Visitor) -> int:
    """Ask for something, and return the status of the answer."""
    return (await (await visitor.call("echo", text="hi")).done()).status


async def test_there_are_only_so_many_sessions(autojump_clock: Any) -> None:
    async with visiting(make_server(), LEGACY, HttpSettings(max_sessions=1)) as visitor:
        await visitor.initialize()
        assert await use(visitor) == 200
        refused = await begin(Visitor(visitor.face, LEGACY))
        assert (refused.status, refused.json["id"], refused.headers["retry-after"]) == (503, 1, "1")
        assert await use(visitor) == 200


async def test_a_session_that_was_never_used_makes_room_for_a_new_one(autojump_clock: Any, caplog: Any) -> None:
    async with visiting(make_server(), LEGACY, HttpSettings(max_sessions=2)) as visitor:
        await visitor.initialize()  # and says that it is initialized, which asks for nothing
        other = Visitor(visitor.face, LEGACY)
        await other.initialize()
        third = Visitor(visitor.face, LEGACY)
        await third.initialize()
        assert len(visitor.face.shared.sessions) == 2
        assert [await use(client) for client in (visitor, other, third)] == [404, 200, 200]
        assert (await begin(visitor)).status == 503, "all are in use now"
    event = next(record for record in caplog.records if record.name == "trimcp.security")
    assert (event.event, event.what, event.held, event.used) == ("gave_way", "session", 2, False)


async def test_a_session_that_is_listened_to_is_in_use(autojump_clock: Any) -> None:
    async with visiting(make_server(), LEGACY, HttpSettings(max_sessions=1)) as visitor:
        await visitor.initialize()
        stream = await visitor.listen()
        assert (await begin(Visitor(visitor.face, LEGACY))).status == 503
        assert not stream.finished


@pytest.mark.parametrize("used", [False, True])
async def test_one_address_does_not_fill_the_table_for_others(used: bool, autojump_clock: Any) -> None:
    """Nor where it asks for something in each of its sessions, or leaves a call at work in them."""
    journal: list[str] = []
    async with visiting(make_server(journal), LEGACY, HttpSettings(max_sessions=100)) as visitor:
        honest = [from_address(visitor, n) for n in range(2, 5)]
        for client in honest[:2]:
            assert (await begin(client)).status == 200
            assert await use(client) == 200
        mallory = from_address(visitor, 1)
        calls = []
        statuses = []
        for _ in range(300):
            statuses.append((await begin(mallory)).status)
            if used and mallory.session:
                calls.append(await mallory.call("wait", seconds=1_000_000))
        assert statuses == ([200] * 98 + [503] * 202 if used else [200] * 300)
        assert len(visitor.face.shared.sessions) == 100
        assert (await begin(honest[2])).status == 200
        assert [await use(client) for client in honest] == [200, 200, 200]
        assert len(visitor.face.shared.sessions) == 100
        for call in calls:
            call.leave()
        visitor.face.end()


async def test_shares_are_by_principal_before_they_are_by_address(autojump_clock: Any) -> None:
    settings = HttpSettings(max_sessions=20, authenticate=by_header)
    async with visiting(make_server(), LEGACY, settings) as visitor:
        ada = Visitor(visitor.face, LEGACY, {"authorization": "ada"}, peer="192.0.2.1:1")
        for n in range(20):
            eve = Visitor(visitor.face, LEGACY, {"authorization": "eve"}, peer=f"192.0.2.{n}:1")
            assert (await begin(eve)).status == 200
            assert await use(eve) == 200
        assert (await begin(eve)).status == 503
        assert (await begin(ada)).status == 200
        assert await use(ada) == 200


async def test_a_network_of_ipv6_is_one_and_a_mapped_address_is_its_ipv4(autojump_clock: Any) -> None:
    async with visiting(make_server(), LEGACY, HttpSettings(max_sessions=20)) as visitor:
        for n in range(20):
            eve = Visitor(visitor.face, LEGACY, peer=f"[2001:db8::{n + 1:x}]:1")
            assert (await begin(eve)).status == 200
            assert await use(eve) == 200
        assert (await begin(Visitor(visitor.face, LEGACY, peer="[2001:db8::ffff]:1"))).status == 503
        ada = Visitor(visitor.face, LEGACY, peer="[::ffff:192.0.2.7]:1")
        assert (await begin(ada)).status == 200
        assert await use(ada) == 200
        # A sixteenth more than she has, and she is no newcomer any more.
        assert (await begin(Visitor(visitor.face, LEGACY, peer="192.0.2.7:2"))).status == 503


async def test_an_initialize_that_fails_leaves_no_session(autojump_clock: Any) -> None:
    async with visiting(make_server(), LEGACY) as visitor:
        answer = await visitor.post(visitor.request("initialize", {"protocolVersion": LEGACY.name}))
        assert "error" in answer.json
        assert "mcp-session-id" not in answer.headers
        assert len(visitor.face.shared.sessions) == 0


async def test_a_finished_stream_is_forgotten_after_a_while(autojump_clock: Any) -> None:
    events = MemoryEvents()
    async with visiting(make_server(), LEGACY, HttpSettings(events=events, replay_time=60)) as visitor:
        await visitor.initialize()
        call = await (await visitor.call("steps", token=1, count=2)).done()
        assert events.statistics().events > 0
        assert (await (await visitor.listen(call.now()[0].id)).done()).status == 200
        await trio.sleep(200)
        assert events.statistics().events == 0
        assert (await visitor.listen(call.now()[0].id)).status == 400


async def test_streams_that_ended_are_kept_up_to_a_number(autojump_clock: Any) -> None:
    events = MemoryEvents()
    async with visiting(make_server(), LEGACY, HttpSettings(events=events, max_replays=3)) as visitor:
        await visitor.initialize()
        unread = await visitor.call("steps", token=1, count=2)
        await unread.events(2)
        unread.leave()
        await trio.sleep(5)
        read = [await (await visitor.call("steps", token=1, count=1)).done() for _ in range(4)]
        found = [(await visitor.listen(call.now()[0].id)).status for call in (unread, *read)]
        assert found == [200, 400, 400, 200, 200], "what nobody read goes last"
        for _ in range(4):
            abandoned = await visitor.call("steps", token=1, count=2)
            await abandoned.events(2)
            abandoned.leave()
            await trio.sleep(5)
        assert (await visitor.listen(unread.now()[0].id)).status == 400
        assert (await visitor.listen(abandoned.now()[0].id)).status == 200
        [session] = visitor.face.shared.sessions
        assert not session.streams, "those that ended are no more than a number and their events"
        assert events.statistics().events == 9


async def test_a_session_takes_its_events_with_it(autojump_clock: Any) -> None:
    events = MemoryEvents()
    async with visiting(make_server(), LEGACY, HttpSettings(events=events)) as visitor:
        await visitor.initialize()
        await (await visitor.call("steps", token=1, count=2)).done()
        await visitor.send("DELETE", "/mcp", headers={"mcp-session-id": visitor.session or ""})
        assert events.statistics().events == 0


async def test_background_work_ends_with_its_session(autojump_clock: Any) -> None:
    ended: list[str] = []
    server = make_server()

    async def work() -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.append("work")

    @server.tool
    async def begin(*, ctx: Context) -> str:
        ctx.session.start_soon(work)
        await trio.lowlevel.checkpoint()
        return "begun"

    async with visiting(server, LEGACY, HttpSettings(session_idle=60)) as visitor:
        await visitor.initialize()
        await (await visitor.call("begin")).done()
        await trio.sleep(300)
        assert not ended
        await visitor.send("DELETE", "/mcp", headers={"mcp-session-id": visitor.session or ""})
        await trio.testing.wait_all_tasks_blocked()
        assert ended == ["work"]
        assert not visitor.face.service.sessions


async def test_without_an_event_store_streams_have_no_ids(autojump_clock: Any) -> None:
    async with visiting(make_server(), LEGACY, HttpSettings(resumable=False)) as visitor:
        await visitor.initialize()
        call = await (await visitor.call("steps", token=1, count=2)).done()
        assert [event.id for event in call.now()] == [None] * 3
        polled = await (await visitor.call("polled")).done()
        assert [event.id for event in polled.now()] == [None], "it becomes a stream for its silence alone"
        assert (await visitor.listen("1-1")).status == 200


async def test_sessions_that_came_and_went_leave_nothing(autojump_clock: Any) -> None:
    async with visiting(make_server(), LEGACY) as visitor:
        for _ in range(50):
            one = Visitor(visitor.face, LEGACY)
            await one.initialize()
            stream = await one.listen()
            await (await one.call("steps", token=1, count=1)).done()
            await one.send("DELETE", "/mcp", headers={"mcp-session-id": one.session or ""})
            assert stream.finished
        await trio.testing.wait_all_tasks_blocked()
        assert len(visitor.face.shared.sessions) == 0
        assert not visitor.face.service.sessions
        assert visitor.face.shared.events is not None
        assert attrs.asdict(visitor.face.shared.events.statistics())["events"] == 0


async def test_a_session_that_ended_waits_for_no_collector(autojump_clock: Any) -> None:
    async with visiting(make_server([]), LEGACY) as visitor:
        await visitor.initialize()
        answer = await visitor.call("echo", text="hi")
        await answer.done()
        session = visitor.face.shared.sessions.find(visitor.session or "", None)
        assert session is not None
        gone = [weakref.ref(session), weakref.ref(session.pushed)]
        del session, answer
        gc.collect()
        gc.disable()
        try:
            await visitor.send("DELETE", "/mcp", headers={"mcp-session-id": visitor.session or ""})
            await trio.testing.wait_all_tasks_blocked()
            assert [reference() for reference in gone] == [None, None]
        finally:
            gc.enable()
