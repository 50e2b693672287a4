"""The driver: what leaves it, in which order it takes a session down, and what an ending connection means."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import orjson
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.session.support import FORM, Answers, Tools, Wire, agree, call, client_engine, linked, served, server_engine
from trimcp.budget import Budget
from trimcp.channel import Incoming, Kind, Outgoing
from trimcp.errors import ConnectionLost, RemoteError
from trimcp.session.drive import drive, driving
from trimcp.session.facts import SessionMemory
from trimcp.session.incoming.job import CancelReason
from trimcp.session.limits import Limits
from trimcp.session.outgoing.pending import Pending
from trimcp.session.queues import EACH
from trimcp.session.session import Session
from trimcp.transports.memory import memory_channels
from trimcp.wire.codes import CANCELLED_BY_DRAIN
from trimcp.wire.jsonrpc import encode_request, encode_result
from trimcp.wire.revisions import LATEST_LEGACY
from trimcp.wire.tools import CallToolParams


@asynccontextmanager
async def _client(wire: Wire, **limits: Any) -> AsyncIterator[Session]:
    session = Session(client_engine(), Answers(), Limits(**limits))
    agree(server_engine(), session.engine, LATEST_LEGACY)
    async with driving(session, wire):
        yield session


async def _forever(ctx: Any) -> None:
    await trio.sleep_forever()


# What leaves


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), ExceptionGroup("mine", [ValueError()])])
async def test_what_the_body_raises_leaves_as_itself(error: BaseException) -> None:
    cause = LookupError("why")
    with pytest.raises(type(error)) as caught:
        async with _client(Wire()):
            raise error from cause
    assert caught.value is error
    assert error.__cause__ is cause


async def test_a_cancelled_body_is_cancelled_and_nothing_else() -> None:
    with trio.CancelScope() as scope:
        async with _client(Wire()):
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught


async def test_a_body_that_fails_while_being_cancelled_still_raises_its_own() -> None:
    with pytest.raises(ExceptionGroup) as caught, trio.CancelScope() as scope:
        async with _client(Wire()), trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            scope.cancel()
            raise ValueError("mine")
    assert caught.group_contains(ValueError, match="mine", depth=1)


async def test_a_body_that_failed_keeps_its_exception_when_the_end_is_cancelled_too() -> None:
    wire = Wire()

    async def stubborn(ctx: Any) -> None:
        with trio.CancelScope(shield=True):
            scope.cancel()
            await trio.lowlevel.checkpoint()

    with pytest.raises(ValueError, match="mine"), trio.CancelScope() as scope:
        session = Session(server_engine(), Tools({"run": stubborn}), Limits(eof_grace=0))
        agree(session.engine, client_engine(), LATEST_LEGACY)
        async with driving(session, wire):
            wire.feed(call(1))
            await trio.lowlevel.checkpoint()
            raise ValueError("mine")


class _Broken(Wire):
    """A channel with a bug: it raises what no channel may."""

    async def receive(self) -> Sequence[Incoming]:
        await trio.lowlevel.checkpoint()
        raise OSError("a bug of the channel")


async def test_a_failure_of_ours_leaves_as_itself_too() -> None:
    with pytest.raises(OSError, match="a bug of the channel"):
        async with _client(_Broken()):
            await trio.sleep_forever()


async def test_two_real_failures_are_a_group() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with _client(_Broken()):
            try:
                await trio.sleep_forever()
            finally:
                raise ValueError("mine")
    assert [type(error) for error in caught.value.exceptions] == [ValueError, OSError]


async def test_a_channel_is_closed_whatever_happens() -> None:
    for error in (None, ValueError("mine")):
        wire = Wire()
        try:
            async with _client(wire):
                if error is not None:
                    raise error
        except ValueError:
            pass
        assert wire.closed


async def test_an_endpoint_that_fails_to_forget_does_not_hang_the_end(steady_clock: trio.abc.Clock) -> None:
    class Bad(Answers):
        def closed(self, session: Session) -> None:
            raise LookupError("forgot")

    with pytest.raises(LookupError, match="forgot"):
        with trio.fail_after(5):
            async with driving(Session(client_engine(), Bad()), Wire()):
                pass


async def test_an_interrupt_in_a_handler_ends_the_session_and_leaves_as_itself() -> None:
    error = KeyboardInterrupt()

    async def run(ctx: Any) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            raise error

    wire = Wire()
    session = Session(server_engine(), Tools({"run": run, "wait": _forever}))
    agree(session.engine, client_engine(), LATEST_LEGACY)
    with pytest.raises(KeyboardInterrupt) as caught:
        async with driving(session, wire):
            wire.feed(call(1, "wait"), call(2))
            await trio.sleep_forever()
    assert caught.value is error
    assert not session.jobs
    assert wire.closed


async def test_an_interrupt_in_a_call_leaves_nothing_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire()

    async def interrupted(self: Pending) -> Any:
        raise KeyboardInterrupt

    async with _client(wire) as session:
        monkeypatch.setattr(Pending, "payload", interrupted)
        with pytest.raises(KeyboardInterrupt):
            await session.call("tools/call", CallToolParams("run", {}))
        assert session.statistics().pending == 0
        assert not session.engine.outbound


# What arrives


@pytest.mark.parametrize("padding", [0, 300])
async def test_reading_stops_where_what_one_more_read_brings_still_fits(padding: int) -> None:
    wire = Wire()
    text = call(100, padding="x" * padding)
    wire.read_ahead = (5, 5 * len(text))
    most = 40 * EACH
    session = Session(server_engine(), Tools({"run": _forever}), Limits(max_running=1, backlog_bytes=most, eof_grace=0))
    agree(session.engine, client_engine(), LATEST_LEGACY)
    async with driving(session, wire):
        for n in range(100, 600, 5):
            wire.feed(*(call(id, padding="x" * padding) for id in range(n, n + 5)))
        await wait_all_tasks_blocked()
        held = session.statistics().waiting_bytes
        assert most - 2 * 5 * (EACH + len(text)) < held <= most


async def test_a_channel_that_reads_far_ahead_leaves_half_of_a_small_window() -> None:
    wire = Wire()
    wire.read_ahead = (1_000, 65_536)
    session = Session(
        server_engine(), Tools({"run": _forever}), Limits(max_running=1, backlog_bytes=20 * EACH, eof_grace=0)
    )
    agree(session.engine, client_engine(), LATEST_LEGACY)
    async with driving(session, wire):
        for n in range(50):
            wire.feed(call(n))
        await wait_all_tasks_blocked()
        assert session.statistics().waiting == 10


# The peer leaves


async def test_the_peers_leaving_fails_calls_and_cancels_no_body() -> None:
    wire = Wire()
    async with _client(wire) as session:
        pending = await session.start_call("tools/call", CallToolParams("run", {}))
        wire.leave()
        with pytest.raises(ConnectionLost):
            await pending.payload()
        await wait_all_tasks_blocked()
        for _ in range(2):
            with pytest.raises(ConnectionLost):
                await session.call("tools/call", CallToolParams("run", {}))
        assert session.statistics().pending == 0
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("error", [trio.BrokenResourceError("cut"), trio.ClosedResourceError()])
async def test_a_broken_connection_is_a_lost_one(error: Exception) -> None:
    wire = Wire()
    async with _client(wire) as session:
        pending = await session.start_call("tools/call", CallToolParams("run", {}))
        wire.receive_error = error
        wire.feed(b"{}")
        with pytest.raises(ConnectionLost, match="broke"):
            await pending.payload()


async def test_requests_received_get_their_grace_after_the_peer_closed_its_side(autojump_clock: Any) -> None:
    seen: list[Any] = []

    async def run(ctx: Any) -> str:
        try:
            await trio.sleep(ctx._job.request.params.arguments["seconds"])
        finally:
            seen.append(ctx.cancel_reason)
        return "x"

    async with served({"run": run}, limits=Limits(eof_grace=1)) as (wire, session):
        wire.feed(call(1, seconds=0.5), call(2, seconds=2))
        await wait_all_tasks_blocked()
        start = trio.current_time()
        wire.leave()
        await session.closed.wait()
        assert trio.current_time() - start == pytest.approx(1)
        assert [reply["id"] for reply in wire.take()] == [1]
    assert seen == [None, CancelReason.DISCONNECTED]


async def test_requests_are_cancelled_at_once_where_nobody_reads_after_the_peer_closed(
    steady_clock: trio.abc.Clock,
) -> None:
    seen: list[Any] = []

    async def run(ctx: Any) -> None:
        try:
            await trio.sleep_forever()
        finally:
            seen.append(ctx.cancel_reason)

    async with served({"run": run}, limits=Limits(eof_grace=60)) as (wire, session):
        wire.half_open = False
        wire.feed(call(1))
        await wait_all_tasks_blocked()
        wire.leave()
        with trio.fail_after(1):
            await session.closed.wait()
            await session.jobs.wait_idle()
    assert seen == [CancelReason.DISCONNECTED]


@pytest.mark.parametrize("known", [None, "the server 'x' exited with status 3"])
async def test_a_writer_that_breaks_ends_the_session_and_its_handlers(
    known: str | None, steady_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Wire, "close_reason", lambda wire: known)
    seen: list[Any] = []

    async def flood(ctx: Any) -> None:
        try:
            for n in range(10_000):
                await ctx.report_progress(n)
        finally:
            seen.append(ctx.cancel_reason)

    limits = Limits(outbox_messages=4, eof_grace=5)
    async with served({"run": flood, "wait": _forever}, limits=limits) as (wire, session):
        wire.hold()
        wire.feed(call(1, token="t"), call(2, "wait"))
        await wait_all_tasks_blocked()
        assert session.statistics().outbox == 4
        wire.broken = True
        wire.release()
        with trio.fail_after(1):
            await session.closed.wait()
            await session.jobs.wait_idle()
        assert str(session.lost) == "the peer stopped listening" + ("" if known is None else f": {known}")
    assert seen == [CancelReason.DISCONNECTED]


async def test_an_ordinary_disconnect_is_quiet(caplog: Any) -> None:
    caplog.set_level(logging.DEBUG, "trimcp")
    async with served({"run": _forever}) as (wire, session):
        wire.feed(call(1))
        await wait_all_tasks_blocked()
        wire.leave()
        await session.closed.wait()
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}
    assert len([record for record in caplog.records if "gone" in record.message]) == 1


# Taking down


async def test_the_end_comes_in_order() -> None:
    order: list[str] = []
    wire = Wire()

    class Ordered(Tools):
        def closed(self, session: Session) -> None:
            order.append("forgotten")

    async def run(ctx: Any) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.lowlevel.checkpoint()
            order.append(f"unwound: {ctx.cancel_reason.name}")

    session = Session(server_engine(), Ordered({"run": run}), Limits(eof_grace=0))
    agree(session.engine, client_engine(), LATEST_LEGACY)
    async with driving(session, wire):
        wire.feed(call(1))
        await wait_all_tasks_blocked()
        session.engine.legacy.capabilities = client_engine().profile.capabilities
        pending = await session.start_call("roots/list")
        await wait_all_tasks_blocked()
        order.append("body")
    assert order == ["body", "unwound: DRAIN", "forgotten"]
    assert pending.reply is not None
    assert isinstance(pending.reply.error, ConnectionLost)
    last = wire.take()[-1]
    assert (last["id"], last["error"]["code"]) == (1, CANCELLED_BY_DRAIN)
    assert wire.closed


async def test_last_words_leave_although_everything_around_is_cancelled() -> None:
    wire = Wire()
    with trio.CancelScope() as scope:
        async with _client(wire) as session, trio.open_nursery() as nursery:
            nursery.start_soon(session.call, "tools/call", CallToolParams("run", {}))
            await wait_all_tasks_blocked()
            wire.take()
            scope.cancel(reason="leaving")
    assert [message["method"] for message in wire.take()] == ["notifications/cancelled"]


async def test_a_writer_that_is_stuck_holds_the_end_for_its_time_only(autojump_clock: Any) -> None:
    wire = Wire()
    start = trio.current_time()
    async with _client(wire, drain_timeout=3) as session:
        wire.hold()
        await session.start_call("tools/call", CallToolParams("run", {}))
        await wait_all_tasks_blocked()
        await session.start_call("tools/call", CallToolParams("run", {}))
    assert trio.current_time() - start == pytest.approx(3)
    assert session.statistics().outbox == 0
    assert wire.closed


async def test_a_cancelled_drive_stops_every_handler_with_its_clean_up() -> None:
    cleaned: list[int] = []

    async def run(ctx: Any) -> None:
        try:
            await trio.sleep_forever()
        finally:
            cleaned.append(ctx.request_id)

    wire = Wire()
    session = Session(server_engine(), Tools({"run": run}))
    agree(session.engine, client_engine(), LATEST_LEGACY)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(drive, session, wire)
        wire.feed(call(1), call(2))
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert sorted(cleaned) == [1, 2]
    assert sorted(reply["id"] for reply in wire.take()) == [1, 2]
    assert not session.jobs


async def test_drain_lets_requests_end_and_cuts_the_rest(autojump_clock: Any) -> None:
    cleaned: list[int] = []

    async def run(ctx: Any) -> str:
        try:
            await trio.sleep(ctx._job.request.params.arguments["seconds"])
        finally:
            cleaned.append(ctx.request_id)
        return "x"

    async with served({"run": run}, limits=Limits(max_running=2)) as (wire, session), trio.open_nursery() as nursery:
        wire.feed(call(1, seconds=1), call(2, seconds=60), call(3, seconds=60), call(4, seconds=60))
        await wait_all_tasks_blocked()
        nursery.start_soon(session.drain, 5)
        await wait_all_tasks_blocked()
        wire.feed(call(5, seconds=1), encode_request(6, "ping", None))
        await wait_all_tasks_blocked()
        early = wire.take()
        assert [(reply["id"], reply.get("error", {}).get("code")) for reply in early] == [
            (5, CANCELLED_BY_DRAIN),
            (6, None),
        ]
        await trio.sleep(2)
        assert [reply["id"] for reply in wire.take()] == [1]
        await trio.sleep(4)
        assert sorted(reply["id"] for reply in wire.take() if "error" in reply) == [2, 3, 4]
    assert sorted(cleaned) == [1, 2, 3]


async def test_a_drain_that_is_cancelled_still_stops_the_handlers(steady_clock: trio.abc.Clock) -> None:
    async with served({"run": _forever}) as (wire, session):
        wire.feed(call(1))
        await wait_all_tasks_blocked()
        with trio.move_on_after(0.001):
            await session.drain(60)
        await wait_all_tasks_blocked()
        assert [reply["error"]["code"] for reply in wire.take()] == [CANCELLED_BY_DRAIN]


async def test_closing_twice_and_from_a_handler_is_fine() -> None:
    async def run(ctx: Any) -> str:
        ctx._session.close()
        ctx._session.close()
        return "bye"

    async with linked({"run": run}) as pair:
        with pytest.raises((RemoteError, ConnectionLost)):
            await pair.call()
            await pair.call()


async def test_cancelling_at_once_leaves_nothing() -> None:
    left, right = memory_channels()
    with trio.CancelScope() as scope:
        scope.cancel()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(drive, Session(server_engine(), Tools()), right)
            async with driving(Session(client_engine(), Answers()), left):
                await trio.lowlevel.checkpoint()
    for channel in (left, right):
        with pytest.raises(trio.ClosedResourceError):
            await channel.receive()


async def _work(ctx: Any) -> None:
    ctx.request.start_soon(trio.lowlevel.checkpoint)
    ctx.session.start_soon(trio.sleep_forever)
    await ctx.report_progress(1)


async def _asks(ctx: Any) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ctx.elicit, "?", FORM)
        nursery.start_soon(ctx.elicit, "!", FORM)


async def _crash(ctx: Any) -> None:
    raise ValueError


async def _is_cut(ctx: Any) -> None:
    ctx._session.jobs.cancel_all(CancelReason.LIMIT)
    await trio.sleep_forever()


@pytest.mark.parametrize("run", [_work, _asks, _crash, _is_cut])
@pytest.mark.parametrize("rerun", [False, True])
async def test_an_ended_session_is_freed_without_the_garbage_collector(run: Any, rerun: bool, caplog: Any) -> None:
    caplog.set_level(logging.CRITICAL, "trimcp.session")  # a kept log record keeps its traceback

    async def once() -> list[Any]:
        async with linked({"run": run}, force_rerun=rerun) as pair:
            try:
                await pair.call()
            except RemoteError as error:
                error.__traceback__ = None
            with trio.move_on_after(0):
                await pair.call()
            kept = [weakref.ref(pair.server), weakref.ref(pair.client), weakref.ref(pair.server.engine)]
            kept += [weakref.ref(job) for job in pair.tools.jobs]
        for jobs in (pair.tools.jobs, pair.answers.asked):
            jobs.clear()  # the tests' own lists of jobs, which the sessions hold as their endpoints'
        return kept

    gc.collect()
    gc.disable()
    try:
        for _ in range(20):  # which of several cancelled tasks ends first is random
            kept = await once()
            await trio.lowlevel.checkpoint()
            assert [reference() for reference in kept] == [None] * len(kept)
    finally:
        gc.enable()


async def test_messages_are_written_together_by_one_writer() -> None:
    class Slow(Wire):
        writing = 0
        most = 0
        batches: list[int] = []  # noqa: RUF012  # a class of this test alone

        async def send(self, batch: Sequence[Outgoing]) -> None:
            self.writing += 1
            self.most = max(self.most, self.writing)
            self.batches.append(len(batch))
            await super().send(batch)
            await trio.lowlevel.checkpoint()
            self.writing -= 1

    wire = Slow()
    async with _client(wire) as session, trio.open_nursery() as nursery:
        wire.hold()
        for _ in range(100):
            nursery.start_soon(session.notify, "notifications/roots/list_changed")
        await wait_all_tasks_blocked()
        wire.release()
        await wait_all_tasks_blocked()
        assert len(wire.sent) == 100
        assert wire.most == 1
        assert len(wire.batches) <= 2
        assert all(orjson.loads(out.data)["jsonrpc"] == "2.0" for out in wire.sent)


@attrs.define(eq=False)
class Prompt(Wire):
    """Takes a message at once, and counts the others that a writer sends."""

    sends_now = True
    written: list[int] = attrs.field(factory=list)

    def send_nowait(self, outgoing: Outgoing) -> Outgoing | None:
        self.sent.append(outgoing)
        return None

    async def send(self, batch: Sequence[Outgoing]) -> None:
        self.written.append(len(batch))
        await super().send(batch)


async def test_a_reply_to_a_request_alone_takes_no_turn_of_the_writer() -> None:
    async def run(ctx: Any) -> str:
        return "done"

    wire = Prompt()
    budget = Budget(100 * 2**20)
    session = Session(server_engine(), Tools({"run": run}), Limits(), memory=SessionMemory(budget))
    agree(session.engine, client_engine(), LATEST_LEGACY)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(drive, session, wire)
        for n in range(3):
            wire.feed(call(n, text="x" * 1_000_000))
            await wait_all_tasks_blocked()
            assert len(wire.sent) == n + 1
            assert budget.held == 0
        assert wire.written == []
        wire.feed(call(3), call(4), call(5))
        await wait_all_tasks_blocked()
        assert wire.written == [3], "those that arrive together are answered together"
        session.close()
    assert [orjson.loads(out.data)["id"] for out in wire.sent] == list(range(6))


async def test_a_request_alone_takes_no_turn_of_the_writer() -> None:
    wire = Prompt()

    async def answer(count: int) -> None:
        """Answer the last requests, in one read."""
        await wait_all_tasks_blocked()
        wire.feed(*(encode_result(orjson.loads(out.data)["id"], {}) for out in wire.sent[-count:]))
        await wait_all_tasks_blocked()

    async with _client(wire) as session, trio.open_nursery() as nursery:
        nursery.start_soon(session.call, "ping")
        await answer(1)
        wire.written.clear()
        for _ in range(2):
            nursery.start_soon(session.call, "ping")
        await wait_all_tasks_blocked()
        assert len(wire.sent) == 3
        assert wire.written == [1], "the first is alone; the second follows it"
        await answer(2)
        for _ in range(2):
            nursery.start_soon(session.call, "ping")
        await wait_all_tasks_blocked()
        assert wire.written == [1, 2], "who was woken together sends together"
        await answer(2)


# A peer that leaves while it is not read


@attrs.define(eq=False)
class Phone(Wire):
    """Says when its peer has hung up, if asked."""

    half_open = False
    gone: trio.Event = attrs.field(factory=trio.Event)
    asked: int = 0

    async def wait_peer_closed(self) -> None:
        self.asked += 1
        await self.gone.wait()


@asynccontextmanager
async def _paused(tools: Tools, **limits: Any) -> AsyncIterator[tuple[Phone, Session]]:
    """A session that runs one call, has two that wait, and reads no further ones."""
    wire = Phone()
    session = Session(server_engine(), tools, Limits(max_running=1, backlog_requests=2, **limits))
    agree(session.engine, client_engine(), LATEST_LEGACY)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(drive, session, wire)
        for n in range(9):
            wire.feed(call(n))
        await wait_all_tasks_blocked(0.001)
        assert (wire.reads, wire.asked) == (3, 0)
        yield wire, session
        session.close()


async def test_a_peer_that_leaves_while_it_is_not_read_ends_what_it_began(autojump_clock: MockClock) -> None:
    tools = Tools({"run": _forever})
    async with _paused(tools) as (wire, session):
        await trio.sleep(10)
        assert (wire.asked, session.lost) == (1, None)
        wire.gone.set()
        with trio.fail_after(0.1):
            await session.closed.wait()
        assert str(session.lost) == "the peer closed the connection"
        assert [job.reason for job in tools.jobs] == [CancelReason.DISCONNECTED]
        assert not session.jobs
        assert wire.reads == 3


async def test_a_peer_that_stays_is_read_on_and_no_longer_watched(autojump_clock: MockClock) -> None:
    gate = trio.Event()

    async def run(ctx: Any) -> str:
        await gate.wait()
        return "x"

    async with _paused(Tools({"run": run})) as (wire, session):
        await trio.sleep(10)
        tasks = trio.lowlevel.current_statistics().tasks_living
        gate.set()
        await wait_all_tasks_blocked(0.001)
        assert [reply["id"] for reply in wire.take()] == list(range(9))
        assert trio.lowlevel.current_statistics().tasks_living <= tasks - 1
        wire.gone.set()  # what it says now shows where it is read
        await wait_all_tasks_blocked(0.001)
        assert session.lost is None
        assert wire.asked == 1


async def test_a_short_pause_watches_nobody(autojump_clock: MockClock) -> None:
    async def run(ctx: Any) -> str:
        await trio.sleep(0.01)
        return "x"

    async with _paused(Tools({"run": run})) as (wire, _):
        await trio.sleep(1)
        assert len(wire.take()) == 9
        assert wire.asked == 0


async def test_a_pause_outlasts_a_look_at_a_peer_that_takes_nothing(autojump_clock: MockClock) -> None:
    async with _paused(Tools({"run": _forever}), stall_timeout=60) as (wire, session):
        wire.hold()
        session.sink.post(Outgoing(b"{}", Kind.NOTIFICATION))
        await trio.sleep(50)
        assert session.lost is None
        assert wire.reads == 3
