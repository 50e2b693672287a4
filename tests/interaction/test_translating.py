"""A proxy between two revisions: what the server behind speaks is not what the client speaks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.fuzz.effort import PATIENCE
from tests.interaction import test_calls_under_way, test_changes, test_questions, test_resources_and_prompts
from tests.interaction.links import IN_MEMORY, Links
from tests.peers.messages import text_of
from trimcp.client.client import Client
from trimcp.errors import RemoteError
from trimcp.wire.input_requests import ElicitResult
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, OLDEST, V2025_06_18, Revision

PAIRS = [
    (road, revision, other)
    for road in ("memory", "http", "websocket", "stdio")
    for revision, other in ((LATEST, LATEST_LEGACY), (LATEST_LEGACY, LATEST))
] + [("memory", LATEST, OLDEST), ("memory", OLDEST, LATEST), ("http", LATEST, V2025_06_18)]


@pytest.fixture(params=PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1].name}-before-{pair[2].name}")
def between(request: Any, tmp_path: Path, caplog: Any) -> Links:
    road, revision, other = request.param
    return Links(road, revision, tmp_path / "journal", caplog, proxied=True, other=other)


@pytest.fixture
def clock(between: Links) -> Any:
    return MockClock(autojump_threshold=0) if between.transport in IN_MEMORY else None


def least(links: Links) -> Revision:
    """The older of the two revisions: what it does not have cannot be passed on."""
    assert links.other is not None
    return min(links.revision, links.other)


async def test_progress_and_cancelling(between: Links, clock: Any) -> None:
    async with between() as session:
        with trio.fail_after(PATIENCE):
            async with session.calling("count", {"to": 200, "wait": True}) as call:
                assert [step.progress async for step in call.progress] == list(range(1, 201))
                assert text_of(await call.result()) == "200"
            await test_calls_under_way.check_left(between, session)
            await test_calls_under_way.check_cancelled(between, session)


async def test_log_messages(between: Links, clock: Any) -> None:
    await test_calls_under_way.test_log_messages_go_to_whoever_asked_for_them(between, clock)


async def test_changes_of_lists_and_resources(between: Links, clock: Any) -> None:
    async with between() as session:
        with trio.fail_after(PATIENCE):
            await test_changes.check_tools(session)
            await test_changes.check_updates(session)
            await test_changes.check_prompts_and_resources(session)


async def test_resources(between: Links, clock: Any) -> None:
    async with between() as session:
        await test_resources_and_prompts.check_resources(between, session)
        for uri in ("notes://nothing", "numbers://1/0"):
            with pytest.raises(RemoteError) as missing:
                await session.read_resource(uri)
            assert missing.value.code == between.revision.resource_missing_code
            assert missing.value.data == {"uri": uri}


async def test_questions_reach_the_client_and_nothing_runs_twice(between: Links, clock: Any) -> None:
    async with between(test_questions.make_client()) as session:
        with trio.fail_after(PATIENCE):
            assert text_of(await session.call_tool("think", {"question": "why"})) == "WHY"
            assert '"file:///a"' in text_of(await session.call_tool("where"))
            assert text_of(await session.call_tool("in_order")) == "ticket 2 2"
            assert between.journal().count("bought") == 1
            [contents] = (await session.read_resource("whose://book")).contents
            assert contents.text == "book of Ada"
            if least(between) >= V2025_06_18:
                assert text_of(await session.call_tool("ask_name")) == "accept: Ada"
                assert text_of(await session.call_tool("greet", {"greeting": "hi"})) == "hi Bob hi Bob"
                assert text_of(await session.call_tool("decline_known")) == "decline"
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(session.call_tool, "where")


async def test_a_client_that_cannot_be_asked_is_not_asked(between: Links, clock: Any) -> None:
    async with between(Client("mute")) as session:
        with trio.fail_after(PATIENCE):
            for tool in ("where", "in_order"):
                assert (await session.call_tool(tool)).is_error is True
            assert text_of(await session.call_tool("echo", {"text": "next"})) == "next"


def answering(name: str) -> Client:
    """A client whose user has this name, and takes a while to say so."""
    client = Client("asked")

    @client.elicitation
    async def user(params: Any) -> ElicitResult:
        await trio.sleep(0.01)
        return ElicitResult(action="accept", content={"name": name})

    return client


@pytest.mark.parametrize("pair", [("http", LATEST, LATEST_LEGACY), ("http", LATEST_LEGACY, LATEST_LEGACY)], ids=str)
async def test_each_question_reaches_the_client_whose_call_asks(pair: Any, tmp_path: Path, caplog: Any) -> None:
    """Clients that say the same of themselves, from one address, at once."""
    links = Links(pair[0], pair[1], tmp_path / "journal", caplog, proxied=True, other=pair[2])
    said: dict[str, str] = {}

    async def ask(connect: Callable[[Client], Any], name: str) -> None:
        async with connect(answering(name)) as session:
            said[name] = text_of(await session.call_tool("ask_name"))

    with trio.fail_after(PATIENCE):
        async with links(answering("first")) as session, trio.open_nursery() as nursery:
            assert links._place is not None
            target = links._place.target()
            for name in ("Ada", "Bob", "Eve", "Kim"):
                nursery.start_soon(ask, lambda client: client.connect(target, revision=links.revision), name)
            assert text_of(await session.call_tool("ask_name")) == "accept: first"
    assert said == {name: f"accept: {name}" for name in ("Ada", "Bob", "Eve", "Kim")}
