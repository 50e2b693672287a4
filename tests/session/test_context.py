"""What a handler can say and see: progress, log messages, who asks."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from tests.session.support import call, cancel, linked, modern_meta, served
from trimcp.errors import LocalError, RemoteError
from trimcp.session.limits import Limits
from trimcp.wire.jsonrpc import encode_request
from trimcp.wire.revisions import LATEST_LEGACY, REVISIONS, V2024_11_05, V2026_07_28, Revision


def _progress(messages: list[Any]) -> list[Any]:
    return [m["params"]["progress"] for m in messages if m.get("method") == "notifications/progress"]


# Progress


@pytest.mark.parametrize("revision", REVISIONS)
async def test_progress_speaks_the_words_of_the_revision(revision: Revision) -> None:
    async def run(ctx: Any) -> str:
        await ctx.report_progress(1, total=2, message="half")
        return "x"

    async with served({"run": run}, revision) as (wire, _session):
        wire.feed(call(1, token=0, revision=revision))
        await wait_all_tasks_blocked()
        params = wire.take()[0]["params"]
        expected = {"progressToken": 0, "progress": 1, "total": 2, "message": "half"}
        if revision is V2024_11_05:
            del expected["message"]
        assert {name: params[name] for name in params if name != "_meta"} == expected


async def test_without_a_token_nothing_is_sent_but_it_still_yields() -> None:
    async def run(ctx: Any) -> str:
        for n in range(200):
            await ctx.report_progress(n)
            ctx.report_progress_nowait(n + 0.5)
        return "x"

    async with served({"run": run}) as (wire, _session):
        wire.feed(call(1))
        await wait_all_tasks_blocked()
        assert [message["id"] for message in wire.take()] == [1]


@pytest.mark.parametrize("value", [1, 0.5, float("nan"), -1])
async def test_progress_that_does_not_increase_is_not_sent(value: float, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "trimcp.session")

    async def run(ctx: Any) -> str:
        await ctx.report_progress(1)
        with trio.testing.assert_checkpoints():
            await ctx.report_progress(value)
        ctx.report_progress_nowait(value)
        await ctx.report_progress(2)
        return "x"

    async with served({"run": run}) as (wire, _session):
        wire.feed(call(1, token="t"))
        await wait_all_tasks_blocked()
        sent = wire.take()
        assert _progress(sent) == [1, 2]
        assert "result" in sent[-1]
    said = [record for record in caplog.records if "must increase" in record.getMessage()]
    assert [record.levelname for record in said] == ["DEBUG", "DEBUG"]


async def test_progress_that_cannot_be_sent_stops_none_after_it() -> None:
    async def run(ctx: Any) -> str:
        with pytest.raises(LocalError):
            await ctx.report_progress(float("inf"))
        await ctx.report_progress(1)
        with pytest.raises(LocalError):
            ctx.report_progress_nowait(2**64)
        await ctx.report_progress(2)
        return "x"

    async with served({"run": run}) as (wire, _session):
        wire.feed(call(1, token="t"))
        await wait_all_tasks_blocked()
        assert _progress(wire.take()) == [1, 2]


async def test_reporting_is_a_cancel_point_each_time_and_a_schedule_point_at_least_every_64th() -> None:
    async def run(ctx: Any) -> str:
        others = 0

        async def other() -> None:
            nonlocal others
            while True:
                await trio.lowlevel.checkpoint()
                others += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            for n in range(640):
                await ctx.report_progress(n)
            assert others >= 8
            nursery.cancel_scope.cancel()
        with trio.CancelScope() as scope:
            scope.cancel()
            await ctx.report_progress(1000)
        assert scope.cancelled_caught
        return "x"

    for token in (None, "t"):
        async with served({"run": run}) as (wire, _session):
            wire.feed(call(1, token=token))
            await wait_all_tasks_blocked()
            assert "result" in wire.take()[-1]


async def report_much(ctx: Any) -> str:
    for n in range(100):
        await ctx.report_progress(n)
    return "x"


async def test_reports_wait_for_room_and_none_is_lost() -> None:
    async with served({"run": report_much}, limits=Limits(outbox_messages=5)) as (wire, session):
        wire.hold()
        wire.feed(call(1, token="t"))
        await wait_all_tasks_blocked()
        assert session.statistics().outbox == 5
        wire.release()
        await wait_all_tasks_blocked()
        assert _progress(wire.take()) == list(range(100))


async def test_a_report_that_waits_for_room_can_be_cancelled() -> None:
    async with served({"run": report_much}, limits=Limits(outbox_messages=5)) as (wire, session):
        wire.hold()
        wire.feed(call(1, token="t"))
        await wait_all_tasks_blocked()
        wire.feed(cancel(1))
        await wait_all_tasks_blocked()
        assert not session.jobs


async def test_reports_without_waiting_keep_the_latest_and_the_last_precedes_the_result() -> None:
    gate = trio.Event()

    async def run(ctx: Any) -> str:
        for n in range(1000):
            ctx.report_progress_nowait(n)
        await gate.wait()
        for n in range(1000, 2000):
            ctx.report_progress_nowait(n)
        return "x"

    async with served({"run": run}, limits=Limits(outbox_messages=5)) as (wire, session):
        wire.hold()
        wire.feed(encode_request("p", "ping", None), call(1, token="t"))
        await wait_all_tasks_blocked()
        assert session.statistics().outbox <= 1
        gate.set()
        await wait_all_tasks_blocked()
        wire.release()
        await wait_all_tasks_blocked()
        sent = wire.take()
        progress = _progress(sent)
        assert progress[-1] == 1999
        assert len(progress) <= 3
        assert sent[-1]["id"] == 1


async def test_reports_after_the_answer_or_a_cancellation_say_nothing() -> None:
    contexts: list[Any] = []

    async def run(ctx: Any) -> str:
        contexts.append(ctx)
        if len(contexts) == 2:
            try:
                await trio.sleep_forever()
            finally:
                ctx.report_progress_nowait(1)
        return "x"

    async with served({"run": run}) as (wire, session):
        wire.feed(call(1, token="t"))
        await wait_all_tasks_blocked()
        assert [message["id"] for message in wire.take()] == [1]
        contexts[0].report_progress_nowait(1)
        wire.feed(call(2, token="t"))
        await wait_all_tasks_blocked()
        wire.feed(cancel(2))
        await wait_all_tasks_blocked()
        assert wire.take() == []
        assert session.statistics().outbox == 0


# Log messages


async def test_log_messages_follow_the_level_of_the_connection() -> None:
    async def run(ctx: Any) -> str:
        await ctx.debug("d")
        await ctx.info("i")
        await ctx.warning({"w": 1}, logger="here")
        await ctx.error("e")
        return "x"

    async with served({"run": run}) as (wire, _session):
        wire.feed(call(1))
        await wait_all_tasks_blocked()
        assert [m["params"]["data"] for m in wire.take()[:-1]] == ["i", {"w": 1}, "e"]
        wire.feed(encode_request(2, "logging/setLevel", {"level": "warning"}), call(3))
        await wait_all_tasks_blocked()
        assert [m["params"] for m in wire.take()[1:-1]] == [
            {"level": "warning", "data": {"w": 1}, "logger": "here"},
            {"level": "error", "data": "e"},
        ]


async def test_a_modern_request_says_whether_it_wants_log_messages() -> None:
    async def run(ctx: Any) -> str:
        await ctx.info("i")
        await ctx.error("e")
        return "x"

    async with served({"run": run}, V2026_07_28) as (wire, _session):
        for level, wanted in ((None, []), ("error", ["e"]), ("debug", ["i", "e"])):
            meta = modern_meta()
            if level is not None:
                meta["io.modelcontextprotocol/logLevel"] = level
            wire.feed(encode_request(1, "tools/call", {"name": "run", "arguments": {}, "_meta": meta}))
            await wait_all_tasks_blocked()
            assert [m["params"]["data"] for m in wire.take()[:-1]] == wanted


async def test_log_nowait_drops_and_counts_when_there_is_no_room() -> None:
    results: list[bool] = []

    async def run(ctx: Any) -> str:
        results.extend(ctx.log_nowait("info", n) for n in range(10))
        results.append(ctx.log_nowait("debug", "not wanted"))
        return "x"

    async with served({"run": run}, limits=Limits(outbox_messages=4)) as (wire, session):
        wire.hold()
        wire.feed(call(1))
        await wait_all_tasks_blocked()
        assert results == [True] * 4 + [False] * 6 + [True]
        assert session.statistics().dropped == 6
        wire.release()


@pytest.mark.parametrize("level", ["debug", "error"])
async def test_logging_is_a_checkpoint_wanted_or_not(level: str) -> None:
    async def run(ctx: Any) -> str:
        with assert_checkpoints():
            await ctx.log(level, "x")
        return "x"

    async with linked({"run": run}) as pair:
        assert await pair.call() == "x"


async def test_what_cannot_be_logged_is_said_to_the_handler() -> None:
    async def run(ctx: Any) -> str:
        with pytest.raises(LocalError):
            await ctx.error(float("nan"))
        await ctx.report_progress(1, message="\ud800")  # of a text what can be sent
        return "x"

    async with served({"run": run}) as (wire, _session):
        wire.feed(call(1, token=1))
        await wait_all_tasks_blocked()
        progress, answer = wire.take()
        assert progress["params"]["message"] == "\\ud800"
        assert list(answer)[1:] == ["id", "result"]


# Who asks


@pytest.mark.parametrize("revision", [LATEST_LEGACY, V2026_07_28])
async def test_a_handler_sees_who_asks(revision: Revision) -> None:
    seen: list[Any] = []

    async def run(ctx: Any) -> str:
        seen.append((ctx.revision, ctx.method, ctx.request_id, ctx.principal, dict(ctx.headers), ctx.peer.name))
        seen.append(ctx.meta.get("traceparent"))
        return "x"

    async with served({"run": run}, revision) as (wire, _session):
        wire.feed(call("id-1", token=1, revision=revision).replace(b'"progressToken"', b'"traceparent":"00-1","x"'))
        await wait_all_tasks_blocked()
    assert seen == [(revision, "tools/call", "id-1", None, {}, "client"), "00-1"]


async def test_elicit_refuses_forms_the_specification_does_not_know() -> None:
    async def run(ctx: Any) -> str:
        with pytest.raises(LocalError, match="flat"):
            await ctx.elicit("?", {"type": "object", "properties": {"n": {"type": "object"}}})
        return "x"

    async with linked({"run": run}) as pair:
        assert await pair.call() == "x"


async def test_an_unknown_tool_is_an_error_of_that_call() -> None:
    async with linked({}) as pair:
        with pytest.raises(RemoteError):
            await pair.call("nothing")


@pytest.mark.parametrize("token", [None, "t", 0])
async def test_a_handler_knows_whether_progress_is_wanted(token: Any) -> None:
    async def run(ctx: Any) -> str:
        return str(ctx.progress_wanted)

    async with served({"run": run}) as (wire, _session):
        wire.feed(call(1, token=token))
        await wait_all_tasks_blocked()
        assert wire.take()[-1]["result"]["content"][0]["text"] == str(token is not None)
