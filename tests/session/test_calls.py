"""A call's life: rounds of questions, progress for slow readers, and leaving early."""

from __future__ import annotations

import json
from contextvars import ContextVar
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from tests.client.peers import FORM, Scripted, busy, connected, discover_result
from trimcp.client.client import Client
from trimcp.errors import ConnectionLost, InvalidReply, RemoteError
from trimcp.session.limits import Limits
from trimcp.wire.input_requests import ElicitResult
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, REVISIONS

every_revision = pytest.mark.parametrize("revision", REVISIONS, ids=str)
both_eras = pytest.mark.parametrize("revision", [LATEST_LEGACY, LATEST], ids=str)

# Progress


@every_revision
async def test_progress_comes_in_order_and_ends_with_the_answer(revision: Any) -> None:
    server, _ = busy()
    async with connected(server, revision=revision) as session:
        async with session.calling("count", {"to": 200}) as call:
            assert [step.progress async for step in call.progress] == list(range(1, 201))
            assert (await call.result()).content[0].text == "counted"
            assert await call.result() is await call.result()
        assert session.statistics().dropped == 0


async def test_a_slow_reader_of_progress_loses_the_oldest_and_they_are_counted() -> None:
    server, _ = busy()
    client = Client("c", limits=attrs.evolve(Limits(), progress_kept=10))
    async with connected(server, client) as session:
        async with session.calling("count", {"to": 50}) as call:
            await call.result()
            assert [step.progress async for step in call.progress] == list(range(41, 51))
        assert session.statistics().dropped == 40


async def test_a_reader_who_closes_progress_still_gets_the_result() -> None:
    server, _ = busy()
    async with connected(server) as session, session.calling("count", {"to": 50}) as call:
        call.progress.close()
        assert (await call.result()).content[0].text == "counted"


# Leaving


@both_eras
async def test_leaving_without_the_result_cancels_the_call(revision: Any) -> None:
    server, stopped = busy()
    async with connected(server, revision=revision) as session:
        async with session.calling("hang"):
            await trio.testing.wait_all_tasks_blocked()
        await trio.testing.wait_all_tasks_blocked()
        assert stopped.reasons == [("cancelled by peer", "the caller left before the result was there")]
        assert server.session.statistics().running == 0
        assert session.statistics().pending == 0


async def test_the_bodys_exception_leaves_as_itself_and_cancels_the_call() -> None:
    server, stopped = busy()
    async with connected(server) as session:
        with pytest.raises(KeyError):
            async with session.calling("hang"):
                await trio.testing.wait_all_tasks_blocked()
                raise KeyError("mine")
        await trio.testing.wait_all_tasks_blocked()
        assert len(stopped.reasons) == 1


@both_eras
async def test_a_deadline_around_a_call_stops_the_handler_and_says_why(revision: Any, autojump_clock: Any) -> None:
    server, stopped = busy()
    async with connected(server, revision=revision) as session:
        with pytest.raises(trio.TooSlowError), trio.fail_after(2):
            await session.call_tool("hang")
        with pytest.raises(trio.TooSlowError), trio.fail_after(2):
            async with session.calling("hang") as call:
                async for _ in call.progress:
                    pass
        await trio.testing.wait_all_tasks_blocked()
        assert stopped.reasons == [("cancelled by peer", "deadline exceeded")] * 2


async def test_cancelling_the_wait_for_a_result_leaves_the_call_alone(autojump_clock: Any) -> None:
    server, stopped = busy()
    async with connected(server) as session, session.calling("work", {"steps": 2}) as call:
        with trio.move_on_after(1):
            await call.result()
        assert (await call.result()).content[0].text == "worked"
    assert stopped.reasons == []


async def test_several_tasks_may_wait_for_one_result() -> None:
    server, _ = busy()
    results: list[Any] = []
    async with (
        connected(server) as session,
        session.calling("count", {"to": 3}) as call,
        trio.open_nursery() as nursery,
    ):

        async def wait() -> None:
            results.append((await call.result()).content[0].text)

        nursery.start_soon(wait)
        nursery.start_soon(wait)
    assert results == ["counted", "counted"]


@both_eras
async def test_an_error_is_raised_by_result_each_time_and_ends_progress(revision: Any) -> None:
    server, _ = busy()
    async with connected(server, revision=revision) as session, session.calling("nowhere") as call:
        assert [step async for step in call.progress] == []
        for _ in range(2):
            with pytest.raises(RemoteError):
                await call.result()


async def test_the_loss_of_the_server_ends_progress_and_fails_the_result() -> None:
    server = Scripted(lambda message: discover_result(1) if message["method"] == "server/discover" else "die")
    async with Client("c").connect(server, revision=LATEST) as session, session.calling("x") as call:
        assert [step async for step in call.progress] == []
        with pytest.raises(ConnectionLost):
            await call.result()


# Rounds


def rounds_server(answers: list[dict[str, Any]]) -> Scripted:
    """A modern server that answers tools/call with one result after the other, the last one for ever."""

    def script(message: dict[str, Any]) -> Any:
        if message["method"] == "server/discover":
            return discover_result(message["id"], tools={})
        if "id" not in message:
            return None
        result = answers.pop(0) if len(answers) > 1 else answers[0]
        return {"id": message["id"], "result": result}

    return Scripted(script)


def asking(state: str | None, **questions: str) -> dict[str, Any]:
    requests = {
        key: {"method": "elicitation/create", "params": {"message": message, "requestedSchema": FORM}}
        for key, message in questions.items()
    }
    return {
        "resultType": "input_required",
        **({"inputRequests": requests} if requests else {}),
        **({} if state is None else {"requestState": state}),
    }


DONE = {"resultType": "complete", "content": []}


def echoing() -> Client:
    client = Client("c")

    @client.elicitation
    async def answer(params: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return ElicitResult("accept", {"name": params.message})

    return client


@pytest.mark.parametrize("streaming", [False, True])
async def test_each_round_is_a_new_request_with_the_answers_and_the_state_of_the_last(streaming: bool) -> None:
    server = rounds_server([asking("s\u00e9al\n1", a="Ada", b="Bob"), asking(None, c="Cy"), asking("only"), DONE])
    async with echoing().connect(server, revision=LATEST) as session:
        if streaming:
            async with session.calling("t", {"n": 1}) as call:
                assert [step async for step in call.progress] == []
                await call.result()
        else:
            await session.call_tool("t", {"n": 1})
    calls = [message for message in server.heard if message["method"] == "tools/call"]
    assert len({message["id"] for message in calls}) == 4
    params = [{key: value for key, value in call["params"].items() if key != "_meta"} for call in calls]
    base = {"name": "t", "arguments": {"n": 1}}

    def accepted(name: str) -> dict[str, Any]:
        return {"action": "accept", "content": {"name": name}}

    assert params == [
        base,
        {**base, "inputResponses": {"a": accepted("Ada"), "b": accepted("Bob")}, "requestState": "s\u00e9al\n1"},
        {**base, "inputResponses": {"c": accepted("Cy")}},
        {**base, "requestState": "only"},
    ]
    if streaming:
        tokens = [call["params"]["_meta"]["progressToken"] for call in calls]
        assert tokens == [call["id"] for call in calls]


async def test_nothing_of_one_calls_rounds_is_seen_by_another() -> None:
    server = rounds_server([asking("mine", a="Ada"), DONE])
    async with echoing().connect(server, revision=LATEST) as session:
        await session.call_tool("t")
        await session.call_tool("t")
    assert "requestState" not in json.dumps(server.heard[-1])


async def test_a_server_that_keeps_asking_is_given_up() -> None:
    server = rounds_server([asking("again", a="Ada")])
    client = echoing()
    client.max_rounds = 3
    async with client.connect(server, revision=LATEST) as session:
        with pytest.raises(InvalidReply, match="keeps asking"):
            await session.call_tool("t")
        assert server.methods.count("tools/call") == 4
        await session.ping()


async def test_questions_of_one_round_are_asked_at_the_same_time(autojump_clock: Any) -> None:
    client = Client("c")

    @client.elicitation
    async def answer(params: Any) -> Any:
        await trio.sleep(10)
        return ElicitResult("accept")

    server = rounds_server([asking(None, a="1", b="2", c="3"), DONE])
    start = trio.current_time()
    async with client.connect(server, revision=LATEST) as session:
        await session.call_tool("t")
    assert trio.current_time() - start == pytest.approx(10)


async def test_one_failing_answer_stops_the_others_and_leaves_as_itself(autojump_clock: Any) -> None:
    client = Client("c")
    stopped: list[str] = []

    @client.elicitation
    async def answer(params: Any) -> Any:
        if params.message == "bad":
            raise KeyError("mine")
        try:
            await trio.sleep_forever()
        finally:
            stopped.append(params.message)

    server = rounds_server([asking(None, a="good", b="bad"), DONE])
    async with client.connect(server, revision=LATEST) as session:
        with pytest.raises(KeyError, match="mine"):
            await session.call_tool("t")
    assert stopped == ["good"]


async def test_leaving_a_call_while_a_person_is_asked_stops_the_asking() -> None:
    client = Client("c")
    stopped: list[bool] = []
    place: ContextVar[str] = ContextVar("place")

    @client.elicitation
    async def answer(params: Any) -> Any:
        assert place.get() == "here"
        try:
            await trio.sleep_forever()
        finally:
            stopped.append(True)

    server = rounds_server([asking(None, a="?"), DONE])
    place.set("here")
    async with client.connect(server, revision=LATEST) as session:
        async with session.calling("t"):
            await trio.testing.wait_all_tasks_blocked()
        assert stopped == [True]
        assert session.clocks.asked == 0
