"""Jobs: what a handler's result, crash or cancellation turns into, and the slots they run in."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.session.support import FORM, Answers, call, call_all, cancel, linked, served
from trimcp.budget import Budget
from trimcp.errors import ErrorReply, Overloaded, RemoteError
from trimcp.session.facts import SessionMemory
from trimcp.session.incoming.job import CancelReason
from trimcp.session.limits import Limits
from trimcp.session.queues import EACH
from trimcp.wire.codes import CANCELLED_BY_DRAIN, CANCELLED_BY_OPERATOR, FORBIDDEN, INTERNAL_ERROR, TIMED_OUT
from trimcp.wire.content import TextContent
from trimcp.wire.input_requests import ElicitResult
from trimcp.wire.tools import CallToolResult

SECRET = "the password is swordfish"


async def _fine(ctx: Any) -> str:
    return "fine"


async def test_a_result_answers_its_request() -> None:
    async with linked({"run": _fine}) as pair:
        assert await pair.call() == "fine"


async def _plain(ctx: Any) -> None:
    raise ValueError(SECRET)


async def _group(ctx: Any) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_plain, ctx)
        nursery.start_soon(_plain, ctx)


async def _in_finally(ctx: Any) -> None:
    try:
        raise KeyError("first")
    finally:
        raise ValueError(SECRET)


async def _own_scope_and_crash(ctx: Any) -> None:
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            scope.cancel()
            nursery.start_soon(_plain, ctx)


@pytest.mark.parametrize("crash", [_plain, _group, _in_finally, _own_scope_and_crash])
async def test_a_crash_is_answered_without_its_text_and_logged_once(crash: Any, caplog: Any) -> None:
    async with linked({"crash": crash, "fine": _fine}) as pair:
        with pytest.raises(RemoteError) as caught:
            await pair.call("crash")
        assert caught.value.code == INTERNAL_ERROR
        assert "swordfish" not in str(caught.value)
        assert await pair.call("fine") == "fine"
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert errors[0].exc_info is not None
    assert "swordfish" in caplog.text


async def test_an_error_reply_is_sent_as_it_is_and_not_logged(caplog: Any) -> None:
    async def refuse(ctx: Any) -> None:
        async with trio.open_nursery():
            raise ErrorReply(7, "no", {"why": [1]})

    async with linked({"run": refuse}) as pair:
        with pytest.raises(RemoteError) as caught:
            await pair.call()
    assert (caught.value.code, caught.value.message, caught.value.data) == (7, "no", {"why": [1]})
    assert not caplog.records


@pytest.mark.parametrize("value", ["\ud800", 2**70, float("nan"), object()])
async def test_what_json_cannot_carry_fails_its_own_request_only(value: Any, caplog: Any) -> None:
    async def run(ctx: Any) -> CallToolResult:
        text = value if isinstance(value, str) else "x"
        return CallToolResult(content=[TextContent(text=text, meta={"n": value})])

    async def data(ctx: Any) -> None:
        raise ErrorReply(7, "no", value)

    async with linked({"run": run, "data": data, "fine": _fine}) as pair:
        for name in ("run", "data"):
            with pytest.raises(RemoteError) as caught:
                await pair.call(name)
            escaped = name == "data" and isinstance(value, str)  # of a text what can be sent
            assert caught.value.code == (7 if escaped else INTERNAL_ERROR)
        assert await pair.call("fine") == "fine"


@pytest.mark.parametrize("scopes", [5, None, [1], "read", {"read": 1}])
async def test_required_scopes_that_are_none_fail_nothing_but_their_request(scopes: Any) -> None:
    async def run(ctx: Any) -> None:
        raise ErrorReply(FORBIDDEN, "no", {"requiredScopes": scopes})

    async with linked({"run": run, "fine": _fine}) as pair:
        with pytest.raises(RemoteError) as caught:
            await pair.call()
        assert (caught.value.code, caught.value.data) == (FORBIDDEN, {"requiredScopes": scopes})
        assert await pair.call("fine") == "fine"


async def test_handler_errors_can_end_the_session_after_answering(caplog: Any) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with served({"run": _plain}, handler_errors="raise") as (wire, _session):
            wire.feed(call(1))
            await trio.sleep_forever()
    assert isinstance(caught.value.exceptions[0], ValueError)
    assert [reply["error"]["code"] for reply in wire.take()] == [INTERNAL_ERROR]
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1


async def test_a_crash_while_being_cancelled_from_outside_does_not_escape(caplog: Any) -> None:
    async def crash_late(ctx: Any) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            try:
                await trio.sleep_forever()
            finally:
                raise ValueError(SECRET)

    async with trio.open_nursery() as around, served({"run": crash_late}) as (wire, _session):
        wire.feed(call(1))
        await wait_all_tasks_blocked()
        around.cancel_scope.cancel()
        await trio.sleep(60)
    assert [reply["id"] for reply in wire.take()] == [1]
    assert caplog.text.count("swordfish") == 1


# Reasons


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (CancelReason.DRAIN, CANCELLED_BY_DRAIN),
        (CancelReason.DEADLINE, TIMED_OUT),
        (CancelReason.LIMIT, Overloaded.__name__),
        (CancelReason.OPERATOR, CANCELLED_BY_OPERATOR),
    ],
)
async def test_a_cut_request_is_answered_with_why(reason: CancelReason, code: Any) -> None:
    seen: list[Any] = []

    async def run(ctx: Any) -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled as cancelled:
            seen.append((ctx.cancel_reason, cancelled.reason))
            raise

    async with linked({"run": run}) as pair:
        pending = await pair.begin()
        await wait_all_tasks_blocked()
        pair.server.jobs.cancel_all(reason)
        with pytest.raises(RemoteError) as caught:
            await pending.payload()
    assert code in (caught.value.code, type(caught.value).__name__)
    assert seen == [(reason, reason.value)]


async def test_the_peers_reason_reaches_the_handler_and_nothing_is_answered() -> None:
    seen: list[Any] = []

    async def run(ctx: Any) -> None:
        assert ctx.cancel_reason is None
        try:
            await trio.sleep_forever()
        except trio.Cancelled as cancelled:
            seen.append((ctx.cancel_reason, ctx.cancel_detail, cancelled.reason))
            raise

    async with served({"run": run}) as (wire, session):
        wire.feed(call(1))
        await wait_all_tasks_blocked()
        wire.feed(cancel(1, "tired"))
        await wait_all_tasks_blocked()
        assert not session.jobs
        assert wire.take() == []
    assert seen == [(CancelReason.PEER, "tired", "cancelled by peer: tired")]


@pytest.mark.parametrize("id", [0, "", "1", -5])
async def test_every_id_can_be_cancelled(id: Any) -> None:
    async def run(ctx: Any) -> None:
        await trio.sleep_forever()

    async with served({"run": run}) as (wire, session):
        wire.feed(call(id), call(1))
        await wait_all_tasks_blocked()
        assert session.statistics().running == 2
        wire.feed(cancel(id))
        await wait_all_tasks_blocked()
        assert list(session.jobs.by_id) == [1]


async def test_a_cancelled_handler_that_swallows_it_is_still_not_answered(autojump_clock: Any) -> None:
    async def run(ctx: Any) -> str:
        with trio.CancelScope(shield=True):
            await trio.sleep(1)
        return "too late"

    async with served({"run": run}) as (wire, session):
        wire.feed(call(1))
        await wait_all_tasks_blocked()
        wire.feed(cancel(1))
        await wait_all_tasks_blocked()
        assert session.statistics().running == 1
        session.close()
    assert wire.take() == []


async def test_cancel_and_result_in_one_read_answer_at_most_once() -> None:
    async def run(ctx: Any) -> str:
        return "done"

    async with served({"run": run}) as (wire, _session):
        wire.feed(call(1), cancel(1), call(2))
        await wait_all_tasks_blocked()
        assert [reply["id"] for reply in wire.take()] == [2]
        wire.feed(call(1))
        await wait_all_tasks_blocked()
        assert [reply["id"] for reply in wire.take()] == [1]


# Slots


async def test_requests_beyond_the_slots_wait_in_order() -> None:
    order: list[int] = []
    gates = [trio.Event() for _ in range(5)]

    async def run(ctx: Any) -> str:
        n = ctx._job.request.params.arguments["n"]
        order.append(n)
        await gates[n].wait()
        return "x"

    async with served({"run": run}, limits=Limits(max_running=2)) as (wire, session):
        wire.feed(*(call(n, n=n) for n in range(5)))
        await wait_all_tasks_blocked()
        stats = session.statistics()
        assert (stats.running, stats.waiting, stats.parked) == (2, 3, 0)
        assert stats.waiting_bytes == sum(len(call(n, n=n)) + EACH for n in (2, 3, 4))
        for n in (1, 0, 2, 3, 4):
            gates[n].set()
            await wait_all_tasks_blocked()
        assert order in ([0, 1, 2, 3, 4], [1, 0, 2, 3, 4])
        assert [reply["id"] for reply in wire.take()] == [1, 0, 2, 3, 4]


async def test_a_waiting_request_that_is_cancelled_never_starts() -> None:
    started: list[int] = []
    gate = trio.Event()

    async def run(ctx: Any) -> str:
        started.append(ctx.request_id)
        await gate.wait()
        return "x"

    async with served({"run": run}, limits=Limits(max_running=1)) as (wire, session):
        wire.feed(call(1), call(2), call(3))
        await wait_all_tasks_blocked()
        wire.feed(cancel(2))
        await wait_all_tasks_blocked()
        assert session.statistics().waiting == 1
        gate.set()
        await wait_all_tasks_blocked()
        assert [reply["id"] for reply in wire.take()] == [1, 3]
    assert started == [1, 3]


async def _asks(ctx: Any) -> str:
    answer = await ctx.elicit("Ada", FORM)
    return str(answer.content["name"])


async def test_a_job_that_asks_gives_its_one_slot_back_however_much_it_asks() -> None:
    release = trio.Event()

    async def answer(job: Any) -> ElicitResult:
        await release.wait()
        return ElicitResult(action="accept", content={"name": "x"})

    async def ask_three(ctx: Any) -> str:
        async with trio.open_nursery() as nursery:
            for n in range(3):
                nursery.start_soon(ctx.elicit, f"q{n}", FORM)
        return "asked"

    async with linked({"run": ask_three, "fine": _fine}, limits=Limits(max_running=1), answers=Answers(answer)) as pair:
        pending = await pair.begin()
        await wait_all_tasks_blocked()
        stats = pair.server.statistics()
        assert (stats.running, stats.parked, stats.pending) == (0, 1, 3)
        assert await pair.call("fine") == "fine"
        release.set()
        await pending.payload()


async def test_the_slot_of_a_job_that_asks_goes_to_the_one_that_waits() -> None:
    may_ask = trio.Event()

    async def asks(ctx: Any) -> str:
        await may_ask.wait()
        return str((await ctx.elicit("?", FORM)).action)

    async with served({"asks": asks, "fine": _fine}, limits=Limits(max_running=1)) as (wire, session):
        wire.feed(call(1, "asks"), call(2, "fine"))
        await wait_all_tasks_blocked()
        assert session.statistics().waiting == 1
        may_ask.set()
        await wait_all_tasks_blocked()
        question, answer = wire.take()
        assert (question["method"], answer["id"]) == ("elicitation/create", 2)
        wire.feed(b'{"jsonrpc":"2.0","id":%d,"result":{"action":"cancel"}}' % question["id"])
        await wait_all_tasks_blocked()
        assert [message["id"] for message in wire.take()] == [1]


async def test_four_slots_and_fourteen_calls_that_ask_do_not_deadlock(steady_clock: trio.abc.Clock) -> None:
    with trio.fail_after(5):
        async with linked({"run": _asks}, limits=Limits(max_running=4, backlog_requests=8)) as pair:
            pendings = [await pair.begin() for _ in range(14)]
            ended = 0
            for pending in pendings:
                try:
                    await pending.payload()
                except Overloaded:
                    pass
                ended += 1
            assert ended == 14


@pytest.mark.slow
@pytest.mark.parametrize("framed", [False, True])
async def test_a_thousand_pipelined_calls_that_ask_all_end(framed: bool) -> None:
    with trio.fail_after(60):
        async with linked({"run": _asks}, limits=Limits(max_running=100, eof_grace=0), framed=framed) as pair:
            assert await call_all(pair, "run", 1000) == ["Ada"] * 1000


async def test_asking_when_the_backlog_is_full_turns_new_requests_away() -> None:
    release = trio.Event()

    async def answer(job: Any) -> ElicitResult:
        await release.wait()
        return ElicitResult(action="accept", content={"name": "x"})

    limits = Limits(max_running=1, backlog_requests=2)
    async with linked({"run": _asks, "fine": _fine}, limits=limits, answers=Answers(answer)) as pair:
        pendings = [await pair.begin()]
        await wait_all_tasks_blocked()
        assert await pair.call("fine") == "fine"
        pendings.append(await pair.begin())
        await wait_all_tasks_blocked()
        assert pair.server.statistics().parked == 2
        with pytest.raises(Overloaded):
            await pair.call("fine")
        release.set()
        for pending in pendings:
            await pending.payload()
        assert await pair.call("fine") == "fine"


async def test_handlers_that_ask_a_silent_peer_are_bounded() -> None:
    limits = Limits(max_running=4, backlog_requests=10, outbox_messages=10_000)
    async with served({"run": _asks}, limits=limits) as (wire, session):
        for n in range(500):
            wire.feed(call(n))
            if n % 50 == 0:
                await wait_all_tasks_blocked()
        await wait_all_tasks_blocked()
        assert wire.reads == 500
        assert len(session.jobs) <= 14
        refused = [reply for reply in wire.take() if "error" in reply]
        assert len(refused) == 500 - len(session.jobs)


# Work of a request


async def test_the_answer_waits_for_the_work_of_its_request() -> None:
    gate = trio.Event()
    done: list[str] = []

    async def work(ctx: Any) -> None:
        await gate.wait()
        ctx.request.start_soon(later)

    async def later() -> None:
        await trio.lowlevel.checkpoint()
        done.append("later")

    async def run(ctx: Any) -> str:
        ctx.request.start_soon(work, ctx)
        return "x"

    async with linked({"run": run}) as pair:
        pending = await pair.begin()
        await wait_all_tasks_blocked()
        assert pending.reply is None
        gate.set()
        await pending.payload()
        assert done == ["later"]


async def test_work_can_be_started_after_earlier_work_has_ended() -> None:
    ran: list[int] = []

    async def work(n: int) -> None:
        ran.append(n)

    async def run(ctx: Any) -> str:
        for n in range(20):
            ctx.request.start_soon(work, n)
            await trio.lowlevel.checkpoint()
        return "x"

    async with linked({"run": run}) as pair:
        assert await pair.call() == "x"
    assert sorted(ran) == list(range(20))


async def test_work_is_cancelled_with_its_request_before_it_counts_as_over() -> None:
    order: list[str] = []

    async def work() -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.lowlevel.checkpoint()
            order.append("work unwound")

    async def run(ctx: Any) -> None:
        ctx.request.start_soon(work)
        await trio.sleep_forever()

    async with served({"run": run}) as (wire, session):
        wire.feed(call(1))
        await wait_all_tasks_blocked()
        session.jobs.cancel_all(CancelReason.DRAIN)
        await session.jobs.wait_idle()
        order.append("over")
        await wait_all_tasks_blocked()
        assert [reply["error"]["code"] for reply in wire.take()] == [CANCELLED_BY_DRAIN]
    assert order == ["work unwound", "over"]


@pytest.mark.parametrize("waits", [True, False])
async def test_a_crash_of_its_work_is_the_requests(waits: bool, caplog: Any, steady_clock: trio.abc.Clock) -> None:
    async def crash() -> None:
        await trio.lowlevel.checkpoint()
        raise ValueError(SECRET)

    async def run(ctx: Any) -> str:
        ctx.request.start_soon(crash)
        if waits:
            await trio.sleep_forever()
        return "x"

    async with linked({"run": run, "fine": _fine}) as pair:
        with trio.fail_after(1), pytest.raises(RemoteError) as caught:
            await pair.call()
        assert caught.value.code == INTERNAL_ERROR
        assert await pair.call("fine") == "fine"
    assert caplog.text.count("ValueError: " + SECRET) == 1


async def test_both_crashes_are_logged_when_handler_and_work_fail(caplog: Any) -> None:
    async def work() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise KeyError("of the work")

    async def run(ctx: Any) -> None:
        ctx.request.start_soon(work)
        await trio.lowlevel.checkpoint()
        await trio.lowlevel.checkpoint()
        raise ValueError("of the handler")

    async with served({"run": run}) as (wire, _session):
        wire.feed(call(1))
        await wait_all_tasks_blocked()
        assert [reply["error"]["code"] for reply in wire.take()] == [INTERNAL_ERROR]
    assert "of the work" in caplog.text
    assert "of the handler" in caplog.text


async def test_nothing_is_started_or_asked_for_a_request_that_is_over() -> None:
    kept: list[Any] = []

    async def run(ctx: Any) -> str:
        kept.append(ctx)
        return "x"

    async with linked({"run": run}) as pair:
        await pair.call()
        with pytest.raises(Exception, match="the request is over"):
            kept[0].request.start_soon(trio.sleep, 0)
        with pytest.raises(Exception, match="the request is over"):
            await kept[0].elicit("q", FORM)


async def test_work_of_the_session_outlives_the_request_and_its_crash_ends_nothing(caplog: Any) -> None:
    gate = trio.Event()
    ended: list[str] = []

    async def work() -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)
                await trio.sleep_forever()
        finally:
            ended.append("cancelled")
            raise ValueError("in clean-up")

    async def crash() -> None:
        await gate.wait()
        raise ValueError(SECRET)

    async def run(ctx: Any) -> str:
        ctx.session.start_soon(work)
        ctx.session.start_soon(crash)
        return "x"

    async with linked({"run": run}) as pair:
        assert await pair.call() == "x"
        gate.set()
        await wait_all_tasks_blocked()
        assert ended == []
        assert await pair.call() == "x"
    assert ended == ["cancelled"] * 2
    assert SECRET in caplog.text
    assert "in clean-up" in caplog.text


# Results that the peer does not read


async def test_results_that_are_not_read_keep_further_handlers_from_beginning() -> None:
    begun = 0

    async def large(ctx: Any) -> str:
        nonlocal begun
        begun += 1
        return "x" * 10_000

    limits = Limits(running_bytes=100_000, outbox_bytes=20_000, eof_grace=0)
    budget = Budget(100 * 1024 * 1024)
    async with served({"run": large}, limits=limits, memory=SessionMemory(budget)) as (wire, session):
        wire.hold()
        wire.feed(*(call(n) for n in range(200)))
        await wait_all_tasks_blocked()
        # In the writer's hands, in the outbox, and waiting for room there.
        assert 12 <= begun <= 16
        assert session.jobs.bytes_running <= 120_000
        session.weigh()
        assert budget.held <= 2 * 200_000 + 200 * 4096
        wire.release()
        await wait_all_tasks_blocked()
        assert begun == 200
        assert sorted(reply["id"] for reply in wire.take()) == list(range(200)), "nothing is lost"
        assert budget.held == 0


async def test_results_that_come_all_at_once_and_are_not_read_are_bounded() -> None:
    gate = trio.Event()

    async def large(ctx: Any) -> str:
        await gate.wait()
        return "x" * 10_000

    limits = Limits(running_bytes=100_000, outbox_bytes=20_000, eof_grace=0)
    async with served({"run": large}, limits=limits) as (wire, session):
        wire.hold()
        wire.feed(*(call(n) for n in range(200)))
        await wait_all_tasks_blocked()
        gate.set()
        await wait_all_tasks_blocked()
        assert session.jobs.bytes_unread <= 200_000 + 10_100
        wire.release()
        await wait_all_tasks_blocked()
        replies = wire.take()
        refused = [reply["error"] for reply in replies if "error" in reply]
        assert len(replies) == 200
        assert 180 <= len(refused) <= 182
        # Not what is said of calls that were refused before they began: those may be tried again.
        assert {error["code"] for error in refused} == {INTERNAL_ERROR}
        assert refused[0]["data"] == {"reason": "results_unread"}
        assert refused[0]["message"] == (
            "the call was carried out, but its result was dropped: those that wait to be read are too large together"
        )


async def test_results_of_a_session_that_gives_way_are_dropped_before_its_tasks_have_unwound() -> None:
    async def large(ctx: Any) -> str:
        return "x" * 10_000

    limits = Limits(running_bytes=100_000, outbox_bytes=20_000, eof_grace=0)
    memory = SessionMemory(Budget(100 * 1024 * 1024))
    async with served({"run": large}, limits=limits, memory=memory) as (wire, session):
        wire.hold()
        wire.feed(*(call(n) for n in range(10)))
        await wait_all_tasks_blocked()
        jobs = list(session.jobs)
        assert sum(len(job.reply or b"") for job in jobs) > 50_000
        assert session.memory.holding is not None
        assert session.memory.holding.holder is not None
        session.memory.holding.holder.evict("for the test")
        assert all(job.task is not None for job in jobs)
        assert sum(len(job.reply or b"") for job in jobs) < 10_000


async def test_one_result_may_be_larger_than_the_bound() -> None:
    async def large(ctx: Any) -> str:
        return "x" * 1_000_000

    limits = Limits(running_bytes=100_000, outbox_bytes=20_000, eof_grace=0)
    async with served({"run": large}, limits=limits) as (wire, _):
        wire.hold()
        wire.feed(*(call(n) for n in range(3)))
        await wait_all_tasks_blocked()
        wire.release()
        await wait_all_tasks_blocked()
        assert [len(reply["result"]["content"][0]["text"]) for reply in wire.take()] == [1_000_000] * 3


async def test_small_answers_overtake_no_bound_of_unread_results() -> None:
    """Those that wait are woken one by one, also by jobs that wait for no reader themselves."""

    async def run(ctx: Any) -> str:
        return "x" * (30_000 if ctx.request_id < 8 else 1)

    limits = Limits(running_bytes=100_000, outbox_bytes=20_000, eof_grace=0)
    async with served({"run": run}, limits=limits) as (wire, _):
        wire.hold()
        wire.feed(*(call(n) for n in range(100)))
        await wait_all_tasks_blocked()
        wire.release()
        await wait_all_tasks_blocked()
        assert len(wire.take()) == 100
