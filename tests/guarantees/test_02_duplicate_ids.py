"""Promise 2: an id already under way is refused at once; the first handler and its reply are untouched."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import trio

import trimcp
from tests.fuzz.effort import PATIENCE
from tests.guarantees.client_posts import question
from tests.guarantees.client_side import EVERY_ROAD, QUESTIONED, asked_by_hand
from tests.guarantees.report import figure
from tests.guarantees.worlds import WORLDS, Homes, World, worlds
from tests.peers.clients import PostPeer
from tests.peers.messages import call, notification, request, text_of
from tests.peers.processes import child_server
from trimcp.wire.codes import INVALID_REQUEST

pytestmark = pytest.mark.slow

# Since 2026-07-28 each POST is alone with its ids.
SHARED = [world for world in WORLDS if world.transport != "http" or not world.modern]


@pytest.mark.parametrize("world", SHARED, ids=str)
async def test_an_id_under_way_is_refused_at_once_and_its_call_is_untouched(homes: Homes, world: World) -> None:
    name = f"first in {world}"
    worst = 0.0
    async with homes(world) as home, home.peer() as peer:
        await peer.say(peer.call("same", "wait", gate=name), peer.call(1, "nap", name=name, seconds=600))
        await home.journal.until("begun", name)
        for method in ("tools/call", "tools/list", "nothing/here"):
            clock = home.stopwatch()
            await peer.say(peer.request("same", method, name="echo", arguments={}))
            refusal = await peer.hear()
            worst = max(worst, clock.took())
            assert (refusal["id"], refusal["error"]["code"]) == ("same", INVALID_REQUEST), refusal
        # 1 and "1" are two ids.
        assert text_of(await peer.ask("1", "echo", text="another")) == "another"
        assert not home.journal.of(name, "ended"), "the first handler was touched"
        await peer.say(peer.call("open", "open", gate=name))
        answers = [await peer.hear() for _ in range(2)]
        assert {answer["id"]: text_of(answer) for answer in answers} == {"open": "open", "same": "waited"}
        for n in range(3):
            assert text_of(await peer.ask("same", "echo", text=f"again {n}")) == f"again {n}"
        await peer.cancel(1)
        await home.journal.until("ended", name)
    figure(2, "slowest refusal of an id under way", worst * 1000, None, "ms", str(world))
    assert worst < 4 * 0.1


@pytest.mark.parametrize("world", [world for world in SHARED if not world.local], ids=str)
async def test_a_hundred_duplicates_change_nothing(homes: Homes, world: World) -> None:
    """In one breath: the first call, and a hundred more of its id; all but one are refused, and one is answered."""
    codes: list[int] = []
    name = f"of a hundred in {world}"
    async with homes(world) as home, home.peer() as peer:
        await peer.say(peer.call("same", "wait", gate=name))
        await peer.say(peer.call("seen", "echo"))
        seen = await peer.hear()
        assert seen["id"] == "seen"
        await peer.pour([peer.call("same", "echo", text="second")] * 100)
        for _ in range(100):
            answer = await peer.hear()
            assert answer["id"] == "same"
            codes.append(answer["error"]["code"])
        await peer.say(peer.call("open", "open", gate=name))
        texts = [text_of(await peer.hear()), text_of(await peer.hear())]
    figure(2, "of 100 duplicates not refused", 100 - codes.count(INVALID_REQUEST), 0, "", str(world))
    assert codes == [INVALID_REQUEST] * 100
    assert sorted(texts) == ["open", "waited"]


@pytest.mark.parametrize("world", worlds(transport="http", modern=True), ids=str)
async def test_since_2026_each_post_is_alone_with_its_ids(homes: Homes, world: World) -> None:
    name = f"alone in {world}"
    async with homes(world) as home, home.peer() as peer:
        assert isinstance(peer, PostPeer)
        await peer.say(peer.call("same", "wait", gate=name))
        await peer.say(peer.call("same", "echo", text="second"))
        answers: list[Any] = [text_of(await peer.hear())]
        await peer.say(peer.call("same", "open", gate=name))
        answers += sorted([text_of(await peer.hear()), text_of(await peer.hear())])
    assert answers == ["second", "open", "waited"]


async def test_cancel_storms_and_ids_reused_under_way_leave_nothing() -> None:
    async with child_server() as server:
        await server.meet()
        await server.warmed()
        before = await server.at_rest()
        await server.say(*(notification("notifications/cancelled", requestId=n) for n in range(50_000)))
        for first in range(0, 5_000, 500):
            pairs = [
                (call(id, "hang"), notification("notifications/cancelled", requestId=id))
                for id in range(first, first + 500)
            ]
            await server.say(*itertools.chain.from_iterable(pairs))
        await server.say(call("same", "hang"))

        async def again() -> None:
            for _ in range(100):
                await server.say(*[call("same", "hang")] * 100)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(again)
            for _ in range(10_000):
                answer = await server.hear()
                assert (answer["id"], answer["error"]["code"]) == ("same", -32600)
        await server.say(notification("notifications/cancelled", requestId="same"))
        with trio.fail_after(PATIENCE):
            while await server.statistics() != before:
                pass


# The client's side: it is asked, too


@pytest.mark.parametrize("road", EVERY_ROAD)
async def test_a_client_refuses_a_question_whose_id_is_under_way(road: str, tmp_path: Path) -> None:
    client = trimcp.Client("c")
    begun, go, asked = trio.Event(), trio.Event(), []

    @client.sampling
    async def sample(params: trimcp.CreateMessageParams) -> str:
        asked.append(params)
        begun.set()
        await go.wait()
        return f"said {len(asked)}"

    said = {"role": "user", "content": {"type": "text", "text": "?"}}
    question = request("same", "sampling/createMessage", messages=[said], maxTokens=9)
    refused = 0
    async with asked_by_hand(road, client, tmp_path) as (_, server):
        await server.say(question)
        await begun.wait()
        for method in ("sampling/createMessage", "ping", "nothing/here"):
            await server.say(question.replace(b"sampling/createMessage", method.encode()))
            refusal = await server.hear()
            refused += (refusal["id"], refusal["error"]["code"]) == ("same", INVALID_REQUEST)
        await server.say(*[question] * 97)
        for _ in range(97):
            refusal = await server.hear()
            refused += (refusal["id"], refusal["error"]["code"]) == ("same", INVALID_REQUEST)
        assert len(asked) == 1, "the first handler was touched"
        go.set()
        answer = await server.hear()
        assert (answer["id"], answer["result"]["content"]["text"]) == ("same", "said 1")
        for n in range(2, 5):
            await server.say(question)
            assert (await server.hear())["result"]["content"]["text"] == f"said {n}", "it may be used again"
    figure(2, "of 100 duplicates not refused", 100 - refused, 0, "", f"{road}, a client")
    assert refused == 100


@pytest.mark.parametrize("road", QUESTIONED)
async def test_since_2026_names_of_questions_are_good_for_their_call(road: str, tmp_path: Path) -> None:
    """Two calls at once are asked by the same names: each has its own questions, and gets its own answers back."""
    client = trimcp.Client("c")
    both, asked = trio.Event(), []

    @client.elicitation
    async def ask(params: trimcp.ElicitParams) -> trimcp.ElicitResult:
        asked.append(params.message)
        if len(asked) == 2:
            both.set()
        await both.wait()
        return trimcp.ElicitResult(action="accept", content={"name": params.message})

    async with asked_by_hand(road, client, tmp_path) as (session, server), trio.open_nursery() as nursery:
        for name in ("one", "two"):
            nursery.start_soon(session.call_tool, name)
        for _ in range(2):
            call = await server.called()
            name = call.message["params"]["name"]
            requests = {"same": question(name)}
            await server.result(call, resultType="input_required", inputRequests=requests, requestState=name)
        for _ in range(2):
            call = await server.called()
            params = call.message["params"]
            answers = {"same": {"action": "accept", "content": {"name": params["name"]}}}
            assert (params["requestState"], params["inputResponses"]) == (params["name"], answers)
            await server.result(call, resultType="complete", content=[])
    assert sorted(asked) == ["one", "two"]
