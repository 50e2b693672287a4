"""Promise 1: every request with a readable id gets exactly one reply or error, unless its peer cancelled it."""

from __future__ import annotations

from collections import Counter
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
from tests.peers.clients import in_turn
from tests.peers.messages import notification, request, text_of

pytestmark = pytest.mark.slow
Everywhere = pytest.mark.parametrize("world", WORLDS, ids=str)

MANY = 10_000

_PING = b'{"jsonrpc":"2.0","method":"ping","params":%b,"id":%b}'
BAD: dict[str, tuple[bytes, int | None, int]] = {
    "null id": (_PING % (b"{}", b"null"), None, -32600),
    "float id": (_PING % (b"{}", b"1.5"), None, -32600),
    "object id": (_PING % (b"{}", b"{}"), None, -32600),
    "bool id": (_PING % (b"{}", b"true"), None, -32600),
    "huge id": (_PING % (b"{}", b"9" * 20), None, -32600),
    "lone surrogate": (_PING % (b'{"a":"\\ud800"}', b"7"), 7, -32700),
    "invalid UTF-8": (_PING % (b'{"a":"\xff"}', b"7"), 7, -32700),
    "900 levels": (_PING % (b'{"a":' + b"[" * 900 + b"]" * 900 + b"}", b"7"), 7, -32600),
    "5,000 digits": (_PING % (b'{"a":' + b"9" * 5_000 + b"}", b"7"), 7, -32600),
    "infinite": (_PING % (b'{"a":1e999}', b"7"), 7, -32600),
    "300,000 members": (_PING % (b'{"a":[' + b"[]," * 300_000 + b"1]}", b"7"), 7, -32600),
    "another version": (b'{"jsonrpc":"1.0","id":7,"method":"ping"}', 7, -32600),
    "params in an array": (_PING % (b"[]", b"7"), 7, -32602),
    "half": (_PING[:30], None, -32700),
    "no message": (b"7", None, -32600),
    "no message in an array": (b"[]", None, -32600),
    "nothing": (b"", None, -32700),
}


@Everywhere
async def test_ten_thousand_pipelined_requests_get_ten_thousand_replies(homes: Homes, world: World) -> None:
    answers: dict[Any, str] = {}
    doubled = 0
    async with homes(world) as home, home.peer() as peer, trio.open_nursery() as nursery:
        texts = in_turn(MANY, lambda n: peer.call(n, "echo", text=f"number {n}"))
        began = trio.current_time()
        nursery.start_soon(peer.pour, texts)
        for _ in range(MANY):
            answer = await peer.hear()
            doubled += answer["id"] in answers
            answers[answer["id"]] = text_of(answer)
        took = trio.current_time() - began
        await peer.ask("end", "echo")  # which fails if there was one answer more
    crossed = sum(text != f"number {id}" for id, text in answers.items())
    wrong = MANY - len(answers) + doubled + crossed
    figure(1, f"replies missing, doubled or crossed, of {MANY:,}", wrong, 0, "replies", str(world))
    print(f"{world}: {took:.1f} s")
    assert (len(answers), doubled, crossed) == (MANY, 0, 0)


@Everywhere
async def test_what_is_no_message_gets_one_error_by_its_id_where_that_can_be_read(homes: Homes, world: World) -> None:
    silent = []
    async with homes(world) as home, home.peer() as peer:
        for name, (text, id, code) in BAD.items():
            if name == "nothing" and world.transport != "http":
                continue  # an empty line is no message, and no frame is empty by accident
            if name == "invalid UTF-8" and world.transport == "websocket":
                continue  # that breaks the WebSocket itself (RFC 6455, section 8.1): test_a_websocket_...
            await peer.say(text)
            answer = None
            with trio.move_on_after(PATIENCE):
                answer = await peer.hear()
            if answer is None:
                silent.append(name)
                continue
            assert (answer.get("id"), answer["error"]["code"]) == (id, code), (name, answer)
            if world.transport in ("http", "sse"):
                assert peer.status == (400 if world.transport == "http" else 202), name
        assert text_of(await peer.ask("well", "echo", text="well")) == "well"
    figure(1, f"of {len(BAD)} kinds of broken messages left unanswered", len(silent), 0, "", str(world))
    assert not silent


@pytest.mark.parametrize("world", worlds(transport="websocket"), ids=str)
async def test_a_websocket_with_bytes_that_are_no_text_is_told_so_and_ended(homes: Homes, world: World) -> None:
    async with homes(world) as home:
        async with home.peer() as peer:
            await peer.say(BAD["invalid UTF-8"][0])
            code = await peer.raw.close_code()
            # Hypercorn's last words can be lost to a reset.
            assert code == 1007 or (not world.own and code in (None, 1002)), code
        async with home.peer() as peer:
            assert text_of(await peer.ask("well", "echo", text="well")) == "well"


@Everywhere
async def test_a_request_its_peer_cancelled_gets_none(homes: Homes, world: World) -> None:
    async with homes(world) as home, home.peer() as peer:
        name = f"cancelled in {world}"
        await peer.say(peer.call("c", "nap", name=name, seconds=600))
        await home.journal.until("begun", name)
        await peer.cancel("c")
        await home.journal.until("ended", name)
        for n in range(10):
            await peer.ask(f"after{n}", "echo")  # which has to be the next answer


# The client's side: it answers, too


@pytest.mark.parametrize("road", EVERY_ROAD)
async def test_a_client_answers_each_of_ten_thousand_requests_and_no_garbage(road: str, tmp_path: Path) -> None:
    ids: list[Any] = []
    async with asked_by_hand(road, trimcp.Client("c"), tmp_path) as (_, server), trio.open_nursery() as nursery:

        async def pour() -> None:
            for first in range(0, MANY, 100):
                await server.say(*(request(id, "ping") for id in range(first, first + 100)))

        nursery.start_soon(pour)
        for _ in range(MANY):
            answer = await server.hear()
            assert answer["result"] == {}
            ids.append(answer["id"])
        # What names no method and no id of a request is not answered: it may come from a program that only prints.
        waiting = 0
        for name, (text, id, _) in BAD.items():
            if name != "nothing" and (name != "invalid UTF-8" or road != "websocket"):
                await server.say(text)
                waiting += id is not None
        while waiting:
            answer = await server.hear()
            waiting -= 1
            assert (answer["id"], answer["error"]["code"]) in {(id, code) for _, id, code in BAD.values()}
        for n in range(10):
            await server.say(request(f"end {n}", "ping"))
            assert (await server.hear())["id"] == f"end {n}", "one answer more"
    wrong = MANY - len(set(ids)) + len(ids) - len(set(ids))
    figure(1, f"replies of a client missing or doubled, of {MANY:,}", wrong, 0, "replies", road)
    assert sorted(ids) == list(range(MANY))


@pytest.mark.parametrize("road", QUESTIONED)
async def test_a_client_answers_each_of_ten_thousand_questions_that_came_as_replies(road: str, tmp_path: Path) -> None:
    """Ten calls at once, each of which is answered with a hundred questions ten times before it has its result."""
    calls, rounds, questions = 10, 10, MANY // 100
    client = trimcp.Client("c", asks_per_minute=MANY)
    asked: Counter[str] = Counter()
    wrong = 0

    @client.elicitation
    async def ask(params: trimcp.ElicitParams) -> trimcp.ElicitResult:
        asked[params.message] += 1
        return trimcp.ElicitResult(action="accept", content={"name": params.message})

    async with asked_by_hand(road, client, tmp_path) as (session, server), trio.open_nursery() as nursery:
        for number in range(calls):
            nursery.start_soon(session.call_tool, f"t{number}")
        for _ in range(calls * (rounds + 1)):
            call = await server.called()
            params = call.message["params"]
            number, round = params["name"][1:], int(params.get("requestState", "0"))
            expected = {f"q{n}": f"{number} {round} {n}" for n in range(questions)} if round else {}
            given = {name: answer["content"]["name"] for name, answer in params.get("inputResponses", {}).items()}
            wrong += len(expected.items() ^ given.items())
            if round == rounds:
                await server.result(call, resultType="complete", content=[])
                continue
            requests = {f"q{n}": question(f"{number} {round + 1} {n}") for n in range(questions)}
            state = str(round + 1)
            await server.result(call, resultType="input_required", inputRequests=requests, requestState=state)
    wrong += MANY - len(asked) + asked.total() - len(asked)
    figure(1, f"answers of a client missing, doubled or crossed, of {MANY:,}", wrong, 0, "answers", road)
    assert not wrong


@pytest.mark.parametrize("road", EVERY_ROAD)
async def test_a_question_its_server_cancelled_gets_no_answer(road: str, tmp_path: Path) -> None:
    client = trimcp.Client("c")
    begun, ended = trio.Event(), trio.Event()

    @client.sampling
    async def sample(params: trimcp.CreateMessageParams) -> str:
        begun.set()
        try:
            await trio.sleep_forever()
        finally:
            ended.set()
        return ""

    async with asked_by_hand(road, client, tmp_path) as (_, server):
        await server.say(request("c", "sampling/createMessage", messages=[], maxTokens=9))
        await begun.wait()
        await server.say(notification("notifications/cancelled", requestId="c"))
        await ended.wait()
        for n in range(10):
            await server.say(request(f"after {n}", "ping"))
            assert (await server.hear())["id"] == f"after {n}", "it was answered"
