from __future__ import annotations

from typing import Any

import attrs
import pytest
import trio
import trio.testing

from trimcp.channel import Incoming, Kind, Outgoing, Sink
from trimcp.errors import ConnectionLost, LocalError
from trimcp.server.server import Server
from trimcp.session.context import Context
from trimcp.session.limits import Limits
from trimcp.wire.codes import CANCELLED_BY_DRAIN, OVERLOADED
from trimcp.wire.common import META_CLIENT_CAPABILITIES, META_PROTOCOL_VERSION
from trimcp.wire.jsonrpc import Lost, Notification, Request
from trimcp.wire.revisions import LATEST, LATEST_LEGACY


@attrs.define(eq=False)
class Road(Sink):
    """A sink, and where a message came from."""

    name: str = "road"
    posted: list[Outgoing] = attrs.field(factory=list)
    silent: list[Any] = attrs.field(factory=list)
    blocked: bool = False
    one_way: bool = False
    closed: bool = False
    lot: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    @property
    def sink(self) -> Road:
        return self

    @property
    def full(self) -> bool:
        return self.blocked

    async def room(self) -> None:
        while self.blocked:
            await self.lot.park()

    def post(self, outgoing: Outgoing) -> None:
        if outgoing.kind is Kind.REQUEST and self.one_way:
            raise LocalError("no road")
        self.posted.append(outgoing)

    def unanswered(self, request_id: Any) -> None:
        self.silent.append(request_id)

    def release(self) -> None:
        self.silent.append("released")

    def close(self) -> None:
        self.closed = True


def make_server(limits: Limits | None = None) -> Server[Any]:
    server: Server[Any] = Server("pushed", "1", limits=limits)

    @server.tool
    async def wait(*, ctx: Context) -> str:
        await ctx.report_progress(1)
        await trio.sleep(10)
        return "waited"

    @server.tool
    async def quick() -> str:
        return "quick"

    @server.tool
    async def release(*, ctx: Context) -> str:
        ctx.close_stream()
        return "released"

    @server.tool
    async def begin(*, ctx: Context) -> str:
        ctx.session.start_soon(trio.sleep, 50)
        await trio.lowlevel.checkpoint()
        return "begun"

    return server


def modern_call(id: Any, tool: str, road: Road) -> Incoming:
    meta = {META_PROTOCOL_VERSION: LATEST.name, META_CLIENT_CAPABILITIES: {}}
    return Incoming(Request(id, "tools/call", {"name": tool, "arguments": {}, "_meta": meta}), 100, road)


def call(id: Any, tool: str, road: Road | None) -> Incoming:
    params = {"name": tool, "arguments": {}, "_meta": {"progressToken": id}}
    return Incoming(Request(id, "tools/call", params), 100, road)


async def test_what_belongs_to_a_request_takes_the_road_it_came_by(autojump_clock: Any) -> None:
    server, own, one, two = make_server(), Road(), Road(), Road()
    async with server.running() as running:
        pushed = running.open(own)
        pushed.assume(LATEST_LEGACY)
        pushed.deliver((call(1, "wait", one), call(2, "wait", two), call(3, "nothing", two)))
        await trio.sleep(20)
        for road, id in ((one, 1), (two, 2)):
            progress, *answers = [outgoing for outgoing in road.posted if outgoing.request_id == id]
            assert (progress.kind, [answer.kind for answer in answers]) == (Kind.NOTIFICATION, [Kind.REPLY])
            assert answers[0].error is None
        [refused] = [outgoing for outgoing in two.posted if outgoing.request_id == 3]
        assert refused.error is not None
        assert not own.posted
        pushed.deliver((call(4, "release", one),))
        await trio.sleep(1)
        assert one.silent == ["released"]


async def test_one_slow_road_holds_up_nobody_else(autojump_clock: Any) -> None:
    server, slow, quick = make_server(), Road(blocked=True), Road()
    async with server.running() as running:
        pushed = running.open(Road())
        pushed.assume(LATEST_LEGACY)
        pushed.deliver((call(1, "wait", slow), call(2, "wait", quick)))
        await trio.sleep(20)
        assert [outgoing.kind for outgoing in quick.posted] == [Kind.NOTIFICATION, Kind.REPLY]
        assert not slow.posted
        pushed.disconnect("gone")
        await trio.testing.wait_all_tasks_blocked()
        assert pushed.session.statistics().running == 0


async def test_a_request_the_peer_gave_up_is_reported_as_unanswered(autojump_clock: Any) -> None:
    server, road = make_server(), Road()
    async with server.running() as running:
        pushed = running.open(Road())
        pushed.assume(LATEST_LEGACY)
        pushed.deliver((call("a", "wait", road),))
        pushed.deliver((Incoming(Notification("notifications/cancelled", {"requestId": "a"}), 50),))
        await trio.testing.wait_all_tasks_blocked()
        assert road.silent == ["a"]


async def test_too_much_is_refused_since_nobody_can_stop_reading(autojump_clock: Any) -> None:
    server, road = make_server(Limits(max_running=1, backlog_requests=2)), Road()
    async with server.running() as running:
        pushed = running.open(Road())
        pushed.assume(LATEST_LEGACY)
        pushed.deliver([call(id, "wait", road) for id in range(5)])
        assert [outgoing.request_id for outgoing in road.posted if outgoing.error == OVERLOADED] == [3, 4]


async def test_a_request_without_a_road_fails_and_leaves_nothing(autojump_clock: Any) -> None:
    server = make_server()
    async with server.running() as running:
        pushed = running.open(Road(one_way=True))
        pushed.assume(LATEST_LEGACY)
        with pytest.raises(LocalError, match="no road"):
            await pushed.session.call("ping")
        assert pushed.session.statistics().pending == 0
        assert not pushed.busy


async def test_closing_ends_everything_it_owns(autojump_clock: Any) -> None:
    server, own, road = make_server(), Road(), Road()
    async with server.running() as running:
        pushed = running.open(own)
        pushed.assume(LATEST_LEGACY)
        pushed.deliver((call(1, "begin", road), call(2, "wait", road)))
        await trio.testing.wait_all_tasks_blocked()
        assert pushed.busy
        assert set(running.sessions) == {pushed.session}
        pushed.close()
        pushed.close()
        await trio.testing.wait_all_tasks_blocked()
        assert own.closed
        assert not running.sessions
        assert [task.name for task in running.nursery.child_tasks] == ["waiting for a job"], "one hand stays"
        with pytest.raises(LocalError, match="ended"):
            pushed.session.background.start_soon(trio.sleep, 1)


async def test_leaving_lets_what_was_started_end_by_itself(autojump_clock: Any) -> None:
    server, road = make_server(), Road()
    async with server.running() as running:
        pushed = running.open(Road())
        pushed.assume(LATEST_LEGACY)
        pushed.deliver((call(1, "begin", road),))
        await trio.testing.wait_all_tasks_blocked()
        pushed.leave()
        assert len(running.nursery.child_tasks) == 2
        assert not running.sessions
        await trio.sleep(60)
        assert [task.name for task in running.nursery.child_tasks] == ["waiting for a job"], "one hand stays"


async def test_a_session_opened_while_draining_refuses_every_request(autojump_clock: Any) -> None:
    server, road = make_server(), Road()
    async with server.running() as running:
        await running.drain(1)
        pushed = running.open(Road())
        pushed.assume(LATEST_LEGACY)
        pushed.deliver((call(1, "wait", road),))
        assert [outgoing.error for outgoing in road.posted] == [CANCELLED_BY_DRAIN]


async def test_a_transport_can_say_that_one_answer_will_not_come(autojump_clock: Any) -> None:
    server = make_server()
    async with server.running() as running:
        pushed = running.open(Road())
        pushed.assume(LATEST_LEGACY)
        session = pushed.session
        one, two = await session.start_call("ping"), await session.start_call("ping")
        pushed.deliver((Incoming(Lost(one.id, "the response was cut")),))
        with pytest.raises(ConnectionLost, match="the response was cut"):
            await one.raw()
        assert two.reply is None
        assert session.lost is None
        pushed.deliver((Incoming(Lost(99, "nobody asked")),))


async def ask_once(running: Any, name: str, road: Road) -> Any:
    """Let a session of its own answer one call of the modern era, and close it as a host does."""
    pushed = running.open_for_one()
    pushed.deliver([modern_call(1, name, road)])
    await trio.testing.wait_all_tasks_blocked()
    pushed.close()
    return pushed


async def test_a_brief_session_that_kept_nothing_serves_another_request(autojump_clock: Any) -> None:
    server, road = make_server(), Road()
    async with server.running() as running:
        first = await ask_once(running, "quick", road)
        assert not running.sessions, "it is nobody's meanwhile"
        second = running.open_for_one()
        assert second is first
        assert set(running.sessions) == {second.session}
        assert running.open_for_one() is not first, "one that is in use is not given to another"
        assert [outgoing.error for outgoing in road.posted] == [None]


@pytest.mark.parametrize("left", ["work", "job", "thread", "notice"])
async def test_a_brief_session_that_kept_something_ends(left: str, autojump_clock: Any) -> None:
    server, road = make_server(), Road()
    async with server.running() as running:
        pushed = await ask_once(running, {"work": "begin", "job": "wait"}.get(left, "quick"), road)
        if left in ("thread", "notice"):
            pushed = running.open_for_one()
            pushed.session.jobs.abandoned_threads = int(left == "thread")
            if left == "notice":
                pushed.session.counts.drop("logs")
            pushed.close()
        assert pushed.session.closed.is_set()
        assert running.open_for_one() is not pushed


async def test_a_brief_session_ends_with_its_request_for_whoever_remembers_it(autojump_clock: Any) -> None:
    server, road = make_server(), Road()
    kept: list[Any] = []

    @server.tool
    async def remember(ctx: Context[Any]) -> str:
        kept.append(ctx.session)
        return "done"

    async with server.running() as running:
        first = await ask_once(running, "remember", road)
        assert running.open_for_one() is first
        with pytest.raises(LocalError, match="the session has ended"):
            kept[0].start_soon(trio.sleep, 1)


async def test_no_session_is_kept_for_a_server_that_drains(autojump_clock: Any) -> None:
    server, road = make_server(), Road()
    async with server.running() as running:
        pushed = running.open_for_one()
        await ask_once(running, "quick", road)
        await running.drain(1)
        pushed.close()
        assert pushed.session.closed.is_set()
        late = running.open_for_one()
        late.deliver([modern_call(2, "quick", road)])
        assert [outgoing.error for outgoing in road.posted] == [None, CANCELLED_BY_DRAIN]
