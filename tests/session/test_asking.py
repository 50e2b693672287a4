"""Questions in the middle of a request: in place, and by running the handler again."""

from __future__ import annotations

import logging
from typing import Any

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.session.support import FORM, Answers, Wire, call, linked, modern_meta, served
from trimcp.errors import CannotAsk, ConnectionLost, LocalError, RemoteError
from trimcp.protocol.request_state import Sealer
from trimcp.session.incoming.job import CancelReason
from trimcp.session.limits import Limits
from trimcp.wire.capabilities import ClientCapabilities, ElicitationCapability, RootsCapability, SamplingCapability
from trimcp.wire.codes import INTERNAL_ERROR, INVALID_PARAMS, INVALID_REQUEST, MISSING_CAPABILITY
from trimcp.wire.content import TextContent
from trimcp.wire.input_requests import CreateMessageParams, SamplingMessage
from trimcp.wire.jsonrpc import encode, encode_request
from trimcp.wire.revisions import REVISIONS, V2024_11_05, V2025_03_26, V2025_11_25, V2026_07_28
from trimcp.wire.tools import Tool

LEGACY_THAT_ASK = [r for r in REVISIONS if not r.modern and r not in (V2024_11_05, V2025_03_26)]


async def _name(ctx: Any, question: str = "Name?") -> str:
    answer = await ctx.elicit(question, FORM)
    return str(answer.content["name"]) if answer.action == "accept" else answer.action


@attrs.define
class Rounds:
    """A hand-made modern client over a wire: sends the same call round by round."""

    wire: Wire
    capabilities: dict[str, Any] = attrs.field(factory=lambda: {"elicitation": {}})
    arguments: dict[str, Any] = attrs.field(factory=dict)
    method: str = "tools/call"
    _id: int = 0

    async def send(self, state: Any = None, answers: Any = None, **other: Any) -> Any:
        self._id += 1
        params = {"name": "run", "arguments": self.arguments, "_meta": modern_meta(**self.capabilities), **other}
        if state is not None:
            params["requestState"] = state
        if answers is not None:
            params["inputResponses"] = answers
        self.wire.feed(encode_request(self._id, self.method, params))
        await wait_all_tasks_blocked()
        replies = self.wire.take()
        assert [reply["id"] for reply in replies] == [self._id]
        return replies[0]


def _accept(result: Any, name: str = "Ada") -> dict[str, Any]:
    return {key: {"action": "accept", "content": {"name": name}} for key in result["inputRequests"]}


def _text(reply: Any) -> str:
    return str(reply["result"]["content"][0]["text"])


# In place


@pytest.mark.parametrize("revision", LEGACY_THAT_ASK)
async def test_where_a_server_may_call_the_handler_waits_in_place(revision: Any) -> None:
    runs: list[int] = []

    async def run(ctx: Any) -> str:
        runs.append(1)
        return await _name(ctx, "Ada")

    async with linked({"run": run}, revision) as pair:
        assert await pair.call() == "Ada"
    assert runs == [1]


@pytest.mark.parametrize("force_rerun", [False, True])
async def test_a_refusal_by_the_client_is_raised_where_it_was_asked(force_rerun: bool) -> None:
    async def answer(job: Any) -> Any:
        raise ValueError("client broke")

    async def run(ctx: Any) -> str:
        try:
            return await _name(ctx)
        except RemoteError as error:
            return f"refused {error.code}"

    async with linked({"run": run}, force_rerun=force_rerun, answers=Answers(answer)) as pair:
        assert await pair.call() == f"refused {INTERNAL_ERROR}"


@pytest.mark.parametrize("revision", [LEGACY_THAT_ASK[-1], V2026_07_28])
async def test_a_client_without_the_capability_is_not_asked(revision: Any) -> None:
    caught: list[Exception] = []

    async def run(ctx: Any) -> str:
        try:
            return await _name(ctx)
        except Exception as error:
            caught.append(error)
            raise

    async with linked({"run": run}, revision, can_ask=False) as pair:
        with pytest.raises(RemoteError) as raised:
            await pair.call()
        assert pair.answers.asked == []
    # One exception to catch in every revision, for a handler that can do without.
    assert isinstance(caught[0], CannotAsk)
    if revision.modern:
        assert raised.value.code == MISSING_CAPABILITY
        assert raised.value.data == {"requiredCapabilities": {"elicitation": {}}}
    else:
        assert raised.value.code == INVALID_REQUEST


async def test_what_a_question_needs_beyond_its_capability_is_checked_too() -> None:
    prompt = CreateMessageParams([SamplingMessage("user", TextContent("?"))], 10, tools=[Tool("t", {"type": "object"})])

    async def visit(ctx: Any) -> str:
        return str((await ctx.elicit_url("pay", "https://example.org/pay")).action)

    async def sample(ctx: Any) -> str:
        return str((await ctx.sample(prompt)).model)

    async with linked({"visit": visit, "sample": sample}, V2026_07_28) as pair:
        pair.client.engine.profile.capabilities = ClientCapabilities(
            elicitation=ElicitationCapability(form={}), sampling=SamplingCapability()
        )
        for name, needed in (("visit", {"elicitation": {"url": {}}}), ("sample", {"sampling": {"tools": {}}})):
            with pytest.raises(RemoteError) as raised:
                await pair.call(name)
            assert raised.value.code == MISSING_CAPABILITY
            assert raised.value.data == {"requiredCapabilities": needed}


async def test_cancelling_a_request_cancels_the_question_it_waits_for(steady_clock: trio.abc.Clock) -> None:
    seen: list[Any] = []

    async def answer(job: Any) -> Any:
        try:
            await trio.sleep_forever()
        finally:
            seen.append((job.cancelled.reason, job.cancelled.detail))

    async def run(ctx: Any) -> str:
        return await _name(ctx)

    async with linked({"run": run}, answers=Answers(answer)) as pair:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pair.call)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        await wait_all_tasks_blocked()
        pair.at_rest()
    assert [reason for reason, _ in seen] == [CancelReason.PEER]


async def test_a_handler_whose_peer_leaves_while_it_asks_is_no_crash(caplog: Any) -> None:
    async def run(ctx: Any) -> str:
        return await _name(ctx)

    async def answer(job: Any) -> Any:
        await trio.sleep_forever()

    async with linked({"run": run}, answers=Answers(answer), limits=Limits(eof_grace=5)) as pair:
        await pair.begin()
        await wait_all_tasks_blocked()
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


async def test_a_question_fails_at_once_when_the_connection_is_lost(caplog: Any, steady_clock: trio.abc.Clock) -> None:
    caught: list[Exception] = []

    async def run(ctx: Any) -> str:
        try:
            return await _name(ctx)
        except ConnectionLost as error:
            caught.append(error)
            raise

    async with served({"run": run}, limits=Limits(eof_grace=5)) as (wire, session):
        wire.feed(call(1))
        await wait_all_tasks_blocked()
        assert session.statistics().parked == 1
        wire.leave()
        with trio.fail_after(1):
            await session.closed.wait()
    assert len(caught) == 1
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


# Re-running


async def test_a_question_unwinds_the_handler_and_the_retry_runs_it_again() -> None:
    log: list[str] = []

    async def run(ctx: Any) -> str:
        log.append("start")
        try:
            first = await _name(ctx, "First?")
            second = await _name(ctx, "Second?")
        except Exception:
            log.append("swallowed")
            raise
        finally:
            log.append("finally")
        return f"{first} {second}"

    async with served({"run": run}, V2026_07_28) as (wire, session):
        client = Rounds(wire)
        first = (await client.send())["result"]
        assert first["resultType"] == "input_required"
        assert [q["params"]["message"] for q in first["inputRequests"].values()] == ["First?"]
        assert session.statistics().running == 0
        second = (await client.send(first["requestState"], _accept(first, "Ada")))["result"]
        assert [q["params"]["message"] for q in second["inputRequests"].values()] == ["Second?"]
        last = await client.send(second["requestState"], _accept(second, "Lovelace"))
        assert _text(last) == "Ada Lovelace"
    assert log == ["start", "finally"] * 3


async def test_the_same_question_twice_is_two_questions() -> None:
    async def run(ctx: Any) -> str:
        return f"{await _name(ctx)} {await _name(ctx)}"

    async with served({"run": run}, V2026_07_28) as (wire, _session):
        client = Rounds(wire)
        first = (await client.send())["result"]
        second = (await client.send(first["requestState"], _accept(first, "a")))["result"]
        assert set(first["inputRequests"]).isdisjoint(second["inputRequests"])
        assert _text(await client.send(second["requestState"], _accept(second, "b"))) == "a b"


ROOTS = {"roots": [{"uri": "file:///a"}, {"name": "bad"}, {"uri": "file:///b", "name": "b"}]}


@pytest.mark.parametrize("revision", [V2025_11_25, V2026_07_28])
async def test_a_root_that_cannot_be_read_hides_no_other(revision: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def run(ctx: Any) -> str:
        return " ".join(root.uri for root in await ctx.list_roots())

    async with served({"run": run}, revision) as (wire, session):
        if revision.modern:
            client = Rounds(wire, {"roots": {}})
            first = (await client.send())["result"]
            answers = dict.fromkeys(first["inputRequests"], ROOTS)
            assert _text(await client.send(first["requestState"], answers)) == "file:///a file:///b"
        else:
            session.engine.legacy.capabilities = ClientCapabilities(roots=RootsCapability())
            wire.feed(call(1))
            await wait_all_tasks_blocked()
            [question] = wire.take()
            wire.feed(encode({"jsonrpc": "2.0", "id": question["id"], "result": ROOTS}))
            await wait_all_tasks_blocked()
            assert _text(wire.take()[0]) == "file:///a file:///b"
    [warning] = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert "roots[1] is missing @ $.uri" in warning


async def test_questions_of_siblings_are_gathered() -> None:
    async def run(ctx: Any) -> str:
        found: dict[str, str] = {}

        async def one(question: str) -> None:
            found[question] = await _name(ctx, question)

        async with trio.open_nursery() as nursery:
            for question in ("a", "b", "c"):
                nursery.start_soon(one, question)
        return "".join(sorted(found))

    async with served({"run": run}, V2026_07_28) as (wire, _session):
        client = Rounds(wire)
        asked = (await client.send())["result"]
        assert sorted(q["params"]["message"] for q in asked["inputRequests"].values()) == ["a", "b", "c"]
        assert _text(await client.send(asked["requestState"], _accept(asked))) == "abc"


async def test_work_of_the_request_may_ask_too() -> None:
    async def run(ctx: Any) -> str:
        found: list[str] = []
        answered = trio.Event()

        async def work() -> None:
            found.append(await _name(ctx))
            answered.set()

        ctx.request.start_soon(work)
        await answered.wait()
        return found[0]

    async with served({"run": run}, V2026_07_28) as (wire, _session):
        client = Rounds(wire)
        asked = (await client.send())["result"]
        assert _text(await client.send(asked["requestState"], _accept(asked))) == "Ada"


async def test_except_exception_cannot_swallow_a_question() -> None:
    async def run(ctx: Any) -> str:
        try:
            return await _name(ctx)
        except Exception:
            return "swallowed"

    async with served({"run": run}, V2026_07_28) as (wire, _session):
        assert (await Rounds(wire).send())["result"]["resultType"] == "input_required"


@pytest.mark.parametrize("own_scope", [True, False])
async def test_asking_inside_a_shield_raises_at_once(own_scope: bool, steady_clock: trio.abc.Clock) -> None:
    async def run(ctx: Any) -> str:
        with trio.CancelScope(shield=True) as scope:
            if not own_scope:
                scope.deadline = trio.current_time() + 60
            try:
                return await _name(ctx)
            except LocalError as error:
                return str(error)
        raise AssertionError

    async with served({"run": run}, V2026_07_28) as (wire, _session):
        with trio.fail_after(1):
            assert "shielded" in _text(await Rounds(wire).send())


async def test_asking_under_a_deadline_of_the_handlers_own_is_fine() -> None:
    async def run(ctx: Any) -> str:
        with trio.fail_after(60), trio.CancelScope():
            return await _name(ctx)
        raise AssertionError

    async with served({"run": run}, V2026_07_28) as (wire, _session):
        assert (await Rounds(wire).send())["result"]["resultType"] == "input_required"


async def test_a_cancellation_from_outside_is_not_taken_for_a_question() -> None:
    async def run(ctx: Any) -> str:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_name, ctx)
            ctx._session.jobs.cancel_all(CancelReason.LIMIT)
            await trio.sleep(60)
        return "x"

    async with served({"run": run}, V2026_07_28) as (wire, _session):
        assert (await Rounds(wire).send())["error"]["message"] == "stopped: limit"


async def test_a_crash_while_unwinding_for_a_question_is_a_crash(caplog: Any) -> None:
    async def run(ctx: Any) -> str:
        try:
            return await _name(ctx)
        finally:
            raise ValueError("in clean-up")

    async with served({"run": run}, V2026_07_28) as (wire, _session):
        assert (await Rounds(wire).send())["error"]["code"] == INTERNAL_ERROR
    assert "in clean-up" in caplog.text


async def test_once_keeps_a_result_over_the_rounds() -> None:
    calls: list[int] = []

    async def run(ctx: Any) -> str:
        async def expensive() -> int:
            calls.append(1)
            return 41

        number = await ctx.once("n", expensive)
        return f"{await _name(ctx)} {number + 1}"

    async with served({"run": run}, V2026_07_28) as (wire, _session):
        client = Rounds(wire)
        asked = (await client.send())["result"]
        assert _text(await client.send(asked["requestState"], _accept(asked))) == "Ada 42"
    assert calls == [1]


@pytest.mark.parametrize("revision", [LEGACY_THAT_ASK[-1], V2026_07_28])
async def test_once_refuses_what_is_not_json_where_it_is_said(revision: Any) -> None:
    async def run(ctx: Any) -> str:
        async def odd() -> object:
            return float("nan")

        try:
            await ctx.once("n", odd)
        except LocalError:
            return "refused"
        return "kept"

    async with linked({"run": run}, revision) as pair:
        assert await pair.call() == "refused"


async def test_a_question_that_cannot_be_sealed_fails_its_request_only(caplog: Any) -> None:
    async def run(ctx: Any) -> str:
        async def big() -> str:
            return "x" * 300_000

        await ctx.once("big", big)
        return await _name(ctx)

    async with served({"run": run}, V2026_07_28) as (wire, session):
        client = Rounds(wire)
        assert (await client.send())["error"]["code"] == INTERNAL_ERROR
        assert not session.closed.is_set()
        assert (await client.send())["error"]["code"] == INTERNAL_ERROR
    assert "can be remembered" in caplog.text


@pytest.mark.parametrize(
    "spoil",
    ["altered", "other request", "other key", "expired", "not base64", "empty"],
)
async def test_a_state_that_is_not_ours_for_this_request_is_refused(spoil: str, caplog: Any) -> None:
    async def run(ctx: Any) -> str:
        return await _name(ctx)

    sealer = Sealer(lifetime=-10 if spoil == "expired" else 60)
    async with served({"run": run}, V2026_07_28, sealer=sealer) as (wire, session):
        client = Rounds(wire)
        asked = (await client.send())["result"]
        state = asked["requestState"]
        if spoil == "altered":
            state = state[:-8] + ("A" if state[-8] != "A" else "B") + state[-7:]
        elif spoil == "other request":
            client.arguments = {"to": "somebody else"}
        elif spoil == "other key":
            session.sealer = Sealer()
        elif spoil == "not base64":
            state = "é!"
        elif spoil == "empty":
            state = ""
        reply = await client.send(state, _accept(asked))
        assert (reply["error"]["code"], reply["error"]["message"]) == (
            INVALID_PARAMS,
            "requestState is not valid for this request",
        )
    assert {record.name for record in caplog.records} <= {"trimcp.security"}


async def test_another_question_under_the_same_key_is_asked_anew() -> None:
    question = "Delete one file?"

    async def run(ctx: Any) -> str:
        answer = await ctx.elicit(question, FORM, key="sure")
        return str(answer.action)

    async with served({"run": run}, V2026_07_28) as (wire, _session):
        client = Rounds(wire)
        asked = (await client.send())["result"]
        assert list(asked["inputRequests"]) == ["sure"]
        question = "Delete all files?"
        again = (await client.send(asked["requestState"], _accept(asked)))["result"]
        assert again["inputRequests"]["sure"]["params"]["message"] == "Delete all files?"
        assert _text(await client.send(again["requestState"], _accept(again))) == "accept"


async def test_an_answer_that_is_none_is_refused_by_its_key() -> None:
    async def run(ctx: Any) -> str:
        return await _name(ctx)

    async with served({"run": run}, V2026_07_28) as (wire, _session):
        client = Rounds(wire)
        asked = (await client.send())["result"]
        (key,) = asked["inputRequests"]
        reply = await client.send(asked["requestState"], {key: {"action": "perhaps"}})
        assert reply["error"]["code"] == INVALID_PARAMS
        assert key in reply["error"]["message"]


async def test_only_some_methods_may_ask() -> None:
    async def run(ctx: Any) -> str:
        return await _name(ctx)

    async with served({"tools/list": run}, V2026_07_28) as (wire, _session):
        reply = await Rounds(wire, method="tools/list").send()
        assert reply["error"]["code"] == INVALID_REQUEST
        assert "tools/list may not ask" in reply["error"]["message"]


async def test_a_legacy_peer_cannot_plant_a_state() -> None:
    async def run(ctx: Any) -> str:
        async def value() -> str:
            return "ours"

        return await ctx.once("k", value)

    async with served({"run": run}) as (wire, _session):
        params = {"name": "run", "arguments": {}, "requestState": 7, "inputResponses": [1]}
        wire.feed(encode_request(1, "tools/call", params))
        await wait_all_tasks_blocked()
        assert _text(wire.take()[0]) == "ours"


# Forced


async def test_forced_rerunning_shows_what_is_not_repeatable() -> None:
    runs: list[int] = []

    async def run(ctx: Any) -> str:
        runs.append(1)
        return f"{await _name(ctx, 'a')} {await _name(ctx, 'b')}"

    async with linked({"run": run}, force_rerun=True) as pair:
        assert await pair.call() == "a b"
    assert len(runs) == 3


async def test_forced_rerunning_can_be_cancelled_while_it_asks() -> None:
    async def answer(job: Any) -> Any:
        await trio.sleep_forever()

    async def run(ctx: Any) -> str:
        return await _name(ctx)

    async with linked({"run": run}, force_rerun=True, answers=Answers(answer)) as pair:
        pending = await pair.begin()
        await wait_all_tasks_blocked()
        stats = pair.server.statistics()
        assert (stats.running, stats.parked) == (0, 1)
        pair.client.abandon(pending, "enough")
        await wait_all_tasks_blocked()
        pair.at_rest()


async def test_forced_rerunning_gives_request_work_a_fresh_owner(caplog: Any, steady_clock: trio.abc.Clock) -> None:
    async def crash() -> None:
        raise ValueError("work crashed")

    async def nothing() -> None:
        pass

    async def run(ctx: Any) -> str:
        ctx.request.start_soon(nothing)
        await _name(ctx)
        ctx.request.start_soon(crash)
        await trio.sleep(60)
        return "x"

    async with linked({"run": run}, force_rerun=True) as pair:
        with trio.fail_after(1), pytest.raises(RemoteError):
            await pair.call()
    assert "work crashed" in caplog.text


async def test_answers_nobody_asked_for_do_no_harm() -> None:
    async def run(ctx: Any) -> str:
        return await _name(ctx)

    async with served({"run": run}, V2026_07_28) as (wire, _session):
        client = Rounds(wire)
        asked = (await client.send())["result"]
        junk = {f"junk{n}": {"action": "cancel"} for n in range(1000)}
        reply = await client.send(asked["requestState"], {**junk, **_accept(asked)})
        assert _text(reply) == "Ada"
