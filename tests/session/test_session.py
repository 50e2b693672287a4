"""The session's law: calls, cancellation, what is sent in which order, backpressure, and the books."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
import trio
import trio.testing
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from tests.session.support import (
    FORM,
    NO_ONE_WAITS,
    Answers,
    Wire,
    agree,
    call,
    cancel,
    client_engine,
    linked,
    served,
    server_engine,
)
from trimcp.channel import Incoming
from trimcp.errors import ConnectionLost, InvalidReply, LocalError, Overloaded, RemoteError
from trimcp.session.drive import driving
from trimcp.session.incoming.job import CancelReason
from trimcp.session.limits import Limits
from trimcp.session.queues import EACH, Outbox
from trimcp.session.session import Session
from trimcp.wire.codes import CANCELLED_BY_DRAIN, INTERNAL_ERROR, INVALID_REQUEST
from trimcp.wire.jsonrpc import encode_error, encode_notification, encode_request, encode_result, parse
from trimcp.wire.revisions import LATEST_LEGACY, REVISIONS, V2025_03_26, Revision
from trimcp.wire.tools import CallToolParams, CallToolResult


def _client(revision: Revision = LATEST_LEGACY, limits: Limits = NO_ONE_WAITS) -> Session:
    session = Session(client_engine(), Answers(), limits)
    agree(server_engine(), session.engine, revision)
    return session


def _run(**arguments: Any) -> CallToolParams:
    return CallToolParams("run", arguments)


async def _echo(ctx: Any) -> str:
    await trio.lowlevel.checkpoint()
    return str(ctx._job.request.params.arguments.get("n"))


async def _forever(ctx: Any) -> None:
    await trio.sleep_forever()


# Calls


@pytest.mark.parametrize("framed", [False, True])
@pytest.mark.parametrize("revision", REVISIONS)
async def test_pipelined_calls_each_get_their_own_answer(revision: Revision, framed: bool) -> None:
    async with linked({"run": _echo}, revision, framed=framed) as pair:
        got: dict[int, str] = {}

        async def one(n: int) -> None:
            got[n] = await pair.call(n=n)

        async with trio.open_nursery() as nursery:
            for n in range(50):
                nursery.start_soon(one, n)
        assert got == {n: str(n) for n in range(50)}


@pytest.mark.slow
async def test_nothing_is_lost_of_ten_thousand_pipelined() -> None:
    limits = Limits(max_running=16, backlog_requests=64, backlog_bytes=4096 + 64 * EACH, outbox_messages=32)
    async with served({"run": _echo}, limits=limits) as (wire, session):
        wire.hold()
        for n in range(10_000):
            wire.feed(call(n, n=n))
        await wait_all_tasks_blocked()
        assert wire.reads < 200
        stats = session.statistics()
        assert stats.waiting <= 65
        assert stats.outbox <= 32
        wire.release()
        with trio.fail_after(60):
            while len(wire.sent) < 10_000:
                await wait_all_tasks_blocked()
        replies = wire.take()
        assert sorted(reply["id"] for reply in replies) == list(range(10_000))
        assert all(reply["result"]["content"][0]["text"] == str(reply["id"]) for reply in replies)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (encode_error(2, -32000, "no", {"a": 1}), RemoteError),
        (encode_error(2, 1001, "busy", None), Overloaded),
        (encode_result(2, {"content": "wrong"}), InvalidReply),
        (b'{"jsonrpc":"2.0","id":2,"result":5}', InvalidReply),
        (b'{"jsonrpc":"2.0","id":2,"result":{"a":"\\ud800"}}', InvalidReply),
        (b'{"jsonrpc":"2.0","result":{"n":' + b"9" * 5000 + b'},"id":2}', InvalidReply),
    ],
)
async def test_a_bad_answer_fails_its_call_only(reply: bytes, error: type[Exception]) -> None:
    wire, session = Wire(), _client()
    async with driving(session, wire):
        bad = await session.start_call("tools/call", _run())
        good = await session.start_call("tools/call", _run())
        assert (bad.id, good.id) == (2, 3)
        wire.feed(reply, encode_result(3, {"content": []}))
        with pytest.raises(error):
            await bad.payload()
        assert (await good.payload()).content == []
        await wait_all_tasks_blocked()
        assert len(wire.take()) == 2  # garbage is never answered
        assert session.statistics().pending == 0


async def test_late_unknown_and_doubled_replies_are_ignored() -> None:
    wire, session = Wire(), _client()
    async with driving(session, wire):
        pending = await session.start_call("tools/call", _run())
        await wait_all_tasks_blocked()
        wire.take()
        session.abandon(pending, "enough")
        session.abandon(pending, "again")
        answer = encode_result(pending.id, {"content": []})
        wire.feed(answer, answer, encode_result(99, {}), encode_result("2", {}), encode_error("x", 1, "m", None))
        await wait_all_tasks_blocked()
        assert [message["method"] for message in wire.take()] == ["notifications/cancelled"]
        assert pending.reply is None


async def test_a_call_that_may_not_be_made_sends_nothing() -> None:
    wire, session = Wire(), Session(client_engine(), Answers())
    async with driving(session, wire):
        with pytest.raises(LocalError):
            await session.call("tools/call", _run())
        agree(server_engine(), session.engine, LATEST_LEGACY)
        with pytest.raises(LocalError):
            await session.call("roots/list")
        with pytest.raises(LocalError):
            await session.call("no/such")
        with pytest.raises(LocalError):
            await session.call("tools/call", CallToolParams("run", {"n": float("nan")}))
        await wait_all_tasks_blocked()
        assert wire.take() == []
        assert session.statistics().pending == 0


# Cancelling


async def test_a_timeout_tells_the_peer_and_its_handler_cleans_up(autojump_clock: Any) -> None:
    cleaned: list[Any] = []

    async def run(ctx: Any) -> None:
        try:
            await trio.sleep_forever()
        finally:
            cleaned.append((ctx.cancel_reason.name, ctx.cancel_detail, trio.current_time() - start))

    async with linked({"run": run, "echo": _echo}) as pair:
        start = trio.current_time()
        with pytest.raises(trio.TooSlowError), trio.fail_after(1.5):
            await pair.call()
        await wait_all_tasks_blocked()
        assert cleaned == [("PEER", "deadline exceeded", pytest.approx(1.5))]
        pair.at_rest()
        assert await pair.call("echo", n=1) == "1"


async def test_a_request_not_yet_written_is_withdrawn_and_nothing_is_said() -> None:
    wire, session = Wire(), _client()
    async with driving(session, wire):
        wire.hold()
        first = await session.start_call("tools/call", _run(n=1))
        await wait_all_tasks_blocked()  # the writer holds the first
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.call, "tools/call", _run(n=2))
                await wait_all_tasks_blocked()
                assert session.statistics().outbox == 1
                scope.cancel()
        stats = session.statistics()
        assert (stats.pending, stats.outbox, stats.outbox_bytes) == (1, 0, 0)
        assert not session.engine.outbound.keys() - {first.id}
        wire.release()
        await wait_all_tasks_blocked()
        assert [message["params"]["arguments"]["n"] for message in wire.take()] == [1]


async def test_cancelling_never_waits_though_the_outbox_is_full(steady_clock: trio.abc.Clock) -> None:
    wire, session = Wire(), _client(limits=Limits(outbox_messages=2, drain_timeout=0.01))
    async with driving(session, wire):
        wire.hold()
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                for n in range(10):
                    nursery.start_soon(session.call, "tools/call", _run(n=n))
                await wait_all_tasks_blocked()
                assert session.sink.full
                scope.cancel(reason="all of them")
        await wait_all_tasks_blocked()
        wire.release()
        await wait_all_tasks_blocked()
        sent = wire.take()
        calls = [message["id"] for message in sent if message["method"] == "tools/call"]
        cancels = [message["params"] for message in sent if message["method"] == "notifications/cancelled"]
        assert sorted(params["requestId"] for params in cancels) == sorted(calls)
        assert {params["reason"] for params in cancels} <= {"all of them"}
        assert session.statistics().pending == 0


async def test_a_call_that_waits_for_room_when_the_peer_leaves_sends_nothing(steady_clock: trio.abc.Clock) -> None:
    wire, session = Wire(), _client(limits=Limits(outbox_messages=1, drain_timeout=0.01))
    lost: list[int] = []

    async def one(n: int) -> None:
        with pytest.raises(ConnectionLost, match="gone"):
            await session.call("tools/call", _run(n=n))
        lost.append(n)

    async with driving(session, wire):
        wire.hold()
        with trio.fail_after(1):
            async with trio.open_nursery() as nursery:
                for n in range(5):
                    nursery.start_soon(one, n)
                await wait_all_tasks_blocked()
                session.lose("gone")
                assert isinstance(session.sink, Outbox)
                session.sink.abandon()
        assert sorted(lost) == [0, 1, 2, 3, 4]
        assert session.statistics().pending == 0
        assert not session.engine.outbound


async def test_what_arrives_after_closing_is_turned_away() -> None:
    started: list[Any] = []

    async def run(ctx: Any) -> None:
        started.append(ctx.request_id)

    async with served({"run": run}) as (wire, session):
        await wait_all_tasks_blocked()
        session.close()
        session.deliver([Incoming(parse(call(1)), 1)])
    assert started == []
    assert [message["error"]["code"] for message in wire.take()] == [CANCELLED_BY_DRAIN]


async def test_the_peer_is_told_only_reasons_given_on_purpose() -> None:
    wire, session = Wire(), _client()

    async def crash() -> None:
        await wait_all_tasks_blocked()
        raise ValueError("the password is swordfish")

    async with driving(session, wire):
        with pytest.raises(ExceptionGroup):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.call, "tools/call", _run())
                nursery.start_soon(crash)
        await wait_all_tasks_blocked()
        assert wire.take()[-1]["params"]["reason"] == "cancelled by the caller"


async def test_a_reason_that_cannot_be_written_is_no_reason_not_to_cancel() -> None:
    wire, session = Wire(), _client()
    async with driving(session, wire):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.call, "tools/call", _run())
                await wait_all_tasks_blocked()
                scope.cancel(reason="\udcff" + "x" * 10_000)
        await wait_all_tasks_blocked()
        last = wire.take()[-1]
        assert last["method"] == "notifications/cancelled"
        assert len(last["params"]["reason"]) == 500
        assert session.statistics().pending == 0


async def test_a_reply_that_crosses_the_cancellation_is_dropped() -> None:
    wire, session = Wire(), _client()
    async with driving(session, wire):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.call, "tools/call", _run())
                await wait_all_tasks_blocked()
                scope.cancel()
                session.deliver([])
                wire.feed(encode_result(2, {"content": []}))
        await wait_all_tasks_blocked()
        assert session.statistics().pending == 0
        assert not session.engine.outbound


# What leaves, in which order


async def test_progress_comes_before_the_result_and_nothing_after_it() -> None:
    contexts: list[Any] = []

    async def run(ctx: Any) -> str:
        contexts.append(ctx)
        await ctx.report_progress(1)
        ctx.report_progress_nowait(2)
        await ctx.report_progress(3)
        ctx.report_progress_nowait(4)
        ctx.report_progress_nowait(5)
        return "x"

    async with served({"run": run}) as (wire, session):
        wire.feed(call(1, token="t"))
        await wait_all_tasks_blocked()
        contexts[0].report_progress_nowait(6)
        await contexts[0].report_progress(7)
        await contexts[0].error("late")
        await wait_all_tasks_blocked()
        sent = wire.take()
        assert [message["params"]["progress"] for message in sent[:-1]] == [1, 2, 3, 5]
        assert sent[-1]["id"] == 1
        assert session.statistics().merged == 1


async def test_nothing_more_is_said_about_a_request_the_peer_gave_up() -> None:
    async def run(ctx: Any) -> None:
        try:
            await trio.sleep_forever()
        finally:
            ctx.report_progress_nowait(1)
            ctx.log_nowait("error", "cleaning up")
            with trio.CancelScope(shield=True):
                await ctx.report_progress(2)
                await ctx.error("cleaned up")

    async with served({"run": run}) as (wire, _session):
        wire.feed(call(1, token="t"))
        await wait_all_tasks_blocked()
        wire.feed(cancel(1))
        await wait_all_tasks_blocked()
        assert wire.take() == []


# Slow readers


async def test_a_slow_reader_costs_a_bounded_number_of_bytes(steady_clock: trio.abc.Clock) -> None:
    size = 10_000

    async def run(ctx: Any) -> str:
        for n in range(100):
            await ctx.report_progress(n, message="x" * size)
        return "x"

    limits = Limits(outbox_bytes=100_000)
    async with served({"run": run}, limits=limits) as (wire, session):
        wire.hold()
        wire.feed(*(call(n, token=n) for n in range(20)))
        await wait_all_tasks_blocked()
        stats = session.statistics()
        assert stats.running == 20
        # One message may begin where there is room for a byte; what the writer holds is not counted here.
        assert 100_000 <= stats.outbox_bytes <= 100_000 + size + 200
        wire.release()
        with trio.fail_after(10):
            while session.jobs:
                await wait_all_tasks_blocked()
        for n in range(20):
            steps = [
                message["params"]["progress"]
                for message in map(orjson.loads, (out.data for out in wire.sent if out.request_id == n))
                if "method" in message
            ]
            assert steps == list(range(100))


async def test_a_peer_that_only_asks_and_never_reads_is_not_read_and_loses_nothing() -> None:
    limits = Limits(outbox_messages=10)
    async with served({}, limits=limits) as (wire, session):
        wire.hold()
        for n in range(1000):
            wire.feed(encode_request(n, "ping", None))
        await wait_all_tasks_blocked()
        assert wire.reads < 30
        assert session.statistics().outbox == 10
        wire.release()
        await wait_all_tasks_blocked()
        assert [reply["id"] for reply in wire.take()] == list(range(1000))


async def test_our_own_backlog_never_keeps_us_from_reading(steady_clock: trio.abc.Clock) -> None:
    wire, session = Wire(), _client(limits=Limits(outbox_messages=2, drain_timeout=0.01))
    async with driving(session, wire):
        pendings = [await session.start_call("tools/call", _run()) for _ in range(2)]
        await wait_all_tasks_blocked()
        wire.hold()
        wire.feed(encode_request("p", "ping", None))
        await wait_all_tasks_blocked()
        for pending in pendings:
            session.abandon(pending, "enough")
        await wait_all_tasks_blocked()
        assert session.sink.full
        before = wire.reads
        wire.feed(encode_request("q", "ping", None))
        wire.feed(encode_request("r", "ping", None))
        await wait_all_tasks_blocked()
        assert wire.reads == before + 2


async def test_reading_pauses_on_a_full_backlog_and_goes_on() -> None:
    gate = trio.Event()

    async def run(ctx: Any) -> str:
        await gate.wait()
        return "x"

    limits = Limits(max_running=1, backlog_requests=3)
    async with served({"run": run}, limits=limits) as (wire, session):
        for n in range(20):
            wire.feed(call(n))
        await wait_all_tasks_blocked()
        assert wire.reads == 4
        assert session.statistics().waiting == 3
        gate.set()
        await wait_all_tasks_blocked()
        assert [reply["id"] for reply in wire.take()] == list(range(20))


async def test_the_backlog_is_bounded_in_bytes_too() -> None:
    limits = Limits(max_running=1, backlog_bytes=3 * (1000 + EACH))
    async with served({"run": _forever}, limits=limits) as (wire, session):
        for n in range(20):
            wire.feed(call(n, padding="x" * 1000))
        await wait_all_tasks_blocked()
        assert wire.reads == 4
        assert 3000 <= session.statistics().waiting_bytes - 3 * EACH < 4500
        for n in range(4):
            wire.feed(cancel(n))


async def test_a_paused_reader_reads_on_when_a_handler_asks(steady_clock: trio.abc.Clock) -> None:
    asked = trio.Event()

    async def run(ctx: Any) -> str:
        await asked.wait()
        return str((await ctx.elicit("?", FORM)).action)

    limits = Limits(max_running=1, backlog_requests=1)
    async with served({"run": run}, limits=limits) as (wire, _session):
        wire.feed(call(1))
        wire.feed(call(2))
        wire.feed(b'{"jsonrpc":"2.0","id":1,"result":{"action":"cancel"}}')
        await wait_all_tasks_blocked()
        assert wire.reads == 2  # the answer stands behind the backlog
        asked.set()
        with trio.fail_after(1):
            await wait_all_tasks_blocked()
        first, *_rest = wire.take()
        assert (first["method"], wire.reads) == ("elicitation/create", 3)


# Duplicates


async def test_a_duplicate_id_is_refused_and_the_first_untouched() -> None:
    gate = trio.Event()

    async def run(ctx: Any) -> str:
        await gate.wait()
        return "first"

    async with served({"run": run}) as (wire, session):
        wire.feed(call(1), call(1), call("1"))
        await wait_all_tasks_blocked()
        (refusal,) = wire.take()
        assert (refusal["id"], refusal["error"]["code"]) == (1, INVALID_REQUEST)
        assert session.statistics().running == 2
        gate.set()
        await wait_all_tasks_blocked()
        assert sorted(str(reply["id"]) for reply in wire.take() if "result" in reply) == ["1", "1"]
        wire.feed(call(1))
        await wait_all_tasks_blocked()
        assert wire.take()[0]["result"]["content"][0]["text"] == "first"


# Batches of 2025-03-26


def _batch(*members: bytes) -> bytes:
    return b"[" + b",".join(members) + b"]"


async def test_a_batch_is_answered_by_one_array_when_all_of_it_is_done() -> None:
    gate = trio.Event()

    async def run(ctx: Any) -> str:
        if ctx.request_id == 1:
            await gate.wait()
        return "x"

    async with served({"run": run}, V2025_03_26) as (wire, session):
        ping = encode_request("p", "ping", None)
        wire.feed(_batch(call(1), call(2), ping, call(2), b'{"jsonrpc":"2.0","id":9}', cancel(77)))
        wire.feed(encode_request("alone", "ping", None))
        await wait_all_tasks_blocked()
        assert [reply["id"] for reply in wire.take()] == ["alone"]
        gate.set()
        await wait_all_tasks_blocked()
        ((array),) = wire.take()
        assert sorted((str(reply["id"]), "result" in reply) for reply in array) == [
            ("1", True),
            ("2", False),
            ("2", True),
            ("9", False),
            ("p", True),
        ]
        assert not session.jobs


async def test_a_batch_of_notifications_is_never_answered() -> None:
    async with served({}, V2025_03_26) as (wire, _session):
        wire.feed(_batch(cancel(1), encode_notification("notifications/roots/list_changed", None)))
        await wait_all_tasks_blocked()
        assert wire.take() == []


async def test_cancelled_members_leave_a_batch() -> None:
    async with served({"run": _forever, "echo": _echo}, V2025_03_26) as (wire, session):
        wire.feed(_batch(call(1), call(2, "echo"), call(3), cancel(3)))
        await wait_all_tasks_blocked()
        assert wire.take() == []
        wire.feed(cancel(1))
        await wait_all_tasks_blocked()
        assert [[reply["id"] for reply in array] for array in wire.take()] == [[2]]
        wire.feed(_batch(call(4)))
        await wait_all_tasks_blocked()
        wire.feed(cancel(4))
        await wait_all_tasks_blocked()
        assert wire.take() == []
        assert session.memory.in_arrays == 0


async def test_an_id_under_way_in_one_batch_is_refused_in_another() -> None:
    async with served({"run": _forever, "echo": _echo}, V2025_03_26) as (wire, _session):
        wire.feed(_batch(call(1), call(2, "echo")))
        wire.feed(_batch(call(1, "echo"), call(3, "echo")))
        await wait_all_tasks_blocked()
        [array] = wire.take()
        assert [(reply["id"], "error" in reply) for reply in array] == [(1, True), (3, False)]
        wire.feed(cancel(1))
        await wait_all_tasks_blocked()
        assert [[reply["id"] for reply in array] for array in wire.take()] == [[2]]


async def test_members_of_a_batch_are_refused_inside_it_while_draining() -> None:
    async with served({"run": _forever}, V2025_03_26) as (wire, session):
        session.draining.set()
        wire.feed(_batch(call(1), call(2), cancel(2)))
        await wait_all_tasks_blocked()
        assert [[reply["id"] for reply in array] for array in wire.take()] == [[1]]


# Checkpoints and books


async def test_what_waits_is_a_checkpoint() -> None:
    session = _client()
    wire = Wire()
    async with driving(session, wire):
        with assert_checkpoints():
            await session.notify("notifications/roots/list_changed")
        with assert_checkpoints():
            await session.jobs.wait_idle()
        with assert_checkpoints():
            await session.drain(0)
        pending = await session.start_call("tools/call", _run())
        wire.feed(encode_result(pending.id, {"content": []}))
        await wait_all_tasks_blocked()
        with assert_checkpoints():
            await pending.payload()


async def test_latest_notifications_keep_one_each() -> None:
    wire, session = Wire(), _client()
    async with driving(session, wire):
        wire.hold()
        await session.notify("notifications/roots/list_changed")
        await wait_all_tasks_blocked()
        for n in range(100):
            session.notify_latest("notifications/roots/list_changed", key=n % 2)
        stats = session.statistics()
        assert (stats.outbox, stats.merged) == (2, 98)
        wire.release()
        await wait_all_tasks_blocked()
        assert len(wire.take()) == 3


# What is told of requests that ended


async def test_every_request_that_ended_is_told_of_once(autojump_clock: trio.testing.MockClock) -> None:
    """With its reply as it leaves, or None where it gets none; refused ones, too."""
    told: list[tuple[Any, bytes | None, int | None, CancelReason | None, bool]] = []

    async def run(ctx: Any) -> Any:
        what = ctx._job.request.params.arguments["what"]
        if what == "wait":
            await trio.sleep_forever()
        if what == "fail":
            return CallToolResult(content=[], is_error=True)
        if what == "crash":
            raise ValueError("secret")
        return "fine"

    async with served({"run": run}, limits=Limits(max_running=1, backlog_requests=2)) as (wire, session):
        session.on_finished = [
            lambda job, reply: told.append(
                (
                    job.request.id,
                    reply,
                    None if job.error is None else job.error.code,
                    job.reason,
                    job.extras is not None and job.extras.failed,
                )
            )
        ]
        for id, what in ((1, "fine"), (2, "fail"), (3, "crash")):
            wire.feed(call(id, what=what))
            await wait_all_tasks_blocked()
        wire.feed(call(4, what="wait"), call(5, what="fine"), cancel(4, "no use"), cancel(5))
        await wait_all_tasks_blocked()
        session.draining.set()
        wire.feed(call(6, what="fine"))
        await wait_all_tasks_blocked()
        sent = {reply["id"]: reply for reply in wire.take()}
    assert [(id, error, reason, failed) for id, _, error, reason, failed in told] == [
        (1, None, None, False),
        (2, None, None, True),
        (3, INTERNAL_ERROR, None, False),
        (5, None, CancelReason.PEER, False),
        (4, None, CancelReason.PEER, False),
        (6, CANCELLED_BY_DRAIN, None, False),
    ]
    assert {id: None if reply is None else orjson.loads(reply) for id, reply, *_ in told} == {**sent, 4: None, 5: None}


async def test_whoever_is_told_and_crashes_costs_no_reply(caplog: pytest.LogCaptureFixture) -> None:
    def crash(job: Any, reply: Any) -> None:
        raise ValueError("books")

    async with served({"run": _echo}) as (wire, session):
        session.on_finished = [crash]
        wire.feed(call(1, n=1))
        await wait_all_tasks_blocked()
        assert [reply["id"] for reply in wire.take()] == [1]
    (record,) = caplog.records
    assert (record.levelname, record.exc_info is not None) == ("ERROR", True)


@pytest.mark.parametrize("revision", REVISIONS, ids=str)
async def test_a_result_larger_than_may_be_sent_becomes_an_error(
    revision: Revision, caplog: pytest.LogCaptureFixture
) -> None:
    async def run(ctx: Any) -> str:
        return "x" * int(ctx._job.request.params.arguments["n"])

    async with linked({"run": run}, revision, limits=Limits(max_result=2_000)) as pair:
        await pair.client.call("tools/call", _run(n=1_000))
        with pytest.raises(RemoteError) as caught:
            await pair.client.call("tools/call", _run(n=2_000))
        assert caught.value.code == INTERNAL_ERROR
        assert caught.value.message == "the result is larger than 2000 bytes"
        assert caught.value.data == {"reason": "result_size"}
        await pair.client.call("tools/call", _run(n=1_000))
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "at most 2000 are sent" in record.getMessage()
