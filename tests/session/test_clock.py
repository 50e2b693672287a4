"""The work clock, in virtual time and in every revision."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from tests.client.peers import busy, connected
from trimcp.client.client import Client
from trimcp.wire.input_requests import ElicitResult
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, REVISIONS

every_revision = pytest.mark.parametrize("revision", REVISIONS, ids=str)
both_eras = pytest.mark.parametrize("revision", [LATEST_LEGACY, LATEST], ids=str)


def person(delay: float) -> Client:
    client = Client("c", request_timeout=5)

    @client.elicitation
    async def answer(params: Any) -> Any:
        await trio.sleep(delay)
        return ElicitResult("accept", {"name": "Ada"})

    return client


@every_revision
async def test_the_work_clock_fires_and_the_server_is_told(revision: Any, autojump_clock: Any) -> None:
    server, stopped = busy()
    async with connected(server, Client("c", request_timeout=5), revision) as session:
        start = trio.current_time()
        with pytest.raises(trio.TooSlowError):
            await session.call_tool("hang")
        assert trio.current_time() - start == pytest.approx(5)
        with pytest.raises(trio.TooSlowError):
            async with session.calling("hang") as call:
                async for _ in call.progress:
                    pass
        await trio.testing.wait_all_tasks_blocked()
        assert stopped.reasons == [("cancelled by peer", "deadline exceeded")] * 2
        assert (await session.call_tool("count", {"to": 1})).content[0].text == "counted"


async def test_progress_sets_the_work_clock_back(autojump_clock: Any) -> None:
    server, _ = busy()
    async with connected(server, Client("c", request_timeout=5)) as session:
        assert (await session.call_tool("work", {"steps": 5})).content[0].text == "worked"
        async with session.calling("work", {"steps": 5}) as call:
            await call.result()


async def test_the_hard_cap_holds_in_spite_of_progress(autojump_clock: Any) -> None:
    server, _ = busy()
    for client in (Client("c", request_timeout=5, max_request_time=13), Client("c", max_request_time=13)):
        async with connected(server, client) as session:
            start = trio.current_time()
            with pytest.raises(trio.TooSlowError):
                await session.call_tool("work", {"steps": 50})
            assert trio.current_time() - start == pytest.approx(13)


@both_eras
async def test_the_work_clock_stands_still_while_a_person_answers(revision: Any, autojump_clock: Any) -> None:
    server, _ = busy()
    async with connected(server, person(delay=100), revision) as session:
        start = trio.current_time()
        with pytest.raises(trio.TooSlowError):
            await session.call_tool("ask")
        # 3 s of work, 100 s of a person, and the 2 s that were left.
        assert trio.current_time() - start == pytest.approx(105)
        start = trio.current_time()
        session.clocks.limit = 10
        assert (await session.call_tool("ask")).content[0].text == "asked"
        assert trio.current_time() - start > 100
        async with session.calling("ask") as call:
            assert (await call.result()).content[0].text == "asked"


async def test_the_hard_cap_runs_while_a_person_answers(autojump_clock: Any) -> None:
    server, _ = busy()
    client = person(delay=100)
    client.max_request_time = 50
    async with connected(server, client, LATEST) as session:
        start = trio.current_time()
        with pytest.raises(trio.TooSlowError):
            await session.call_tool("ask")
        assert trio.current_time() - start == pytest.approx(50)
        assert session.clocks.asked == 0


async def test_the_clock_of_a_streaming_call_stops_with_its_answer(autojump_clock: Any) -> None:
    server, _ = busy()
    client = Client("c", request_timeout=5, max_request_time=6)
    async with connected(server, client) as session, session.calling("count", {"to": 1}) as call:
        await call.result()
        await trio.sleep(100)
