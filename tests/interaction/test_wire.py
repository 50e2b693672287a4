"""What only a bare wire can say: duplicate ids, messages beyond the limits, garbage, arrays, and words out of turn."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
import trio

from tests.fuzz.effort import PATIENCE
from tests.interaction.links import LOCAL, WEBSOCKET, Links, Wire
from trimcp.channel import SERVER_MAX_MESSAGE
from trimcp.wire.codes import INVALID_PARAMS, INVALID_REQUEST, METHOD_NOT_FOUND, PARSE_ERROR, UNSUPPORTED_VERSION
from trimcp.wire.common import META_PROTOCOL_VERSION
from trimcp.wire.revisions import LEGACY

# Over HTTP each message is an exchange of its own, with a status: tests/transports/http/test_routing.py and
# test_exchange.py say these things there.
ONLY_OVER = (*LOCAL, *WEBSOCKET, "grpc")


def failure(message: Any) -> tuple[Any, int]:
    return message.get("id"), message["error"]["code"]


async def is_well(wire: Wire) -> None:
    """Assert that the session lives on, and that nothing else was waiting to be heard."""
    await wire.say(wire.call("well", "echo", text="well"))
    answer = await wire.hear()
    assert answer["id"] == "well", answer
    assert answer["result"]["content"][0]["text"] == "well"


async def test_wrong_messages_are_answered_by_their_id_and_the_session_lives_on(links: Links, clock: Any) -> None:
    async with links.wire() as wire:
        with trio.fail_after(PATIENCE):
            await wire.meet()
            await check_duplicates(wire)
            await check_malformed(wire)
            await check_ids_in_what_cannot_be_parsed(wire)
            # Hypercorn closes a WebSocket on which more comes than fits (1009), see test_asgi_websocket.py.
            if links.transport not in ("memory", "websocket on hypercorn"):
                await check_oversize(wire)
            await check_methods(wire)
            await check_arrays(links, wire)
            await is_well(wire)


async def check_duplicates(wire: Wire) -> None:
    await wire.say(wire.call("same", "hold", name="same", until="go"), wire.call("same", "echo", text="second"))
    assert failure(await wire.hear()) == ("same", INVALID_REQUEST)
    await wire.say(wire.call("same", "echo", text="third"))
    assert failure(await wire.hear()) == ("same", INVALID_REQUEST)
    # 1 and "1" are two ids.
    await wire.say(wire.call(1, "hold", name="number", until="go"), wire.call("1", "hold", name="text", until="go"))
    await wire.say(wire.call("go", "note", line="go"))
    answers = {}
    for _ in range(4):
        message = await wire.hear()
        answers[message["id"]] = message["result"]["content"][0]["text"]
    assert answers == {"go": "go", "same": "same done", 1: "number done", "1": "text done"}
    await wire.say(wire.call("same", "echo", text="again"))
    assert (await wire.hear())["result"]["content"][0]["text"] == "again"


async def check_malformed(wire: Wire) -> None:
    for text, code in (
        (b"{", PARSE_ERROR),
        (b"nonsense", PARSE_ERROR),
        (b'{"jsonrpc":"2.0","id":null,"method":"ping"}', INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","id":1.5,"method":"ping"}', INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","id":true,"method":"ping"}', INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","id":{},"method":"ping"}', INVALID_REQUEST),
        (b"42", INVALID_REQUEST),
        (b"\xff\xfe", PARSE_ERROR),
    ):
        if wire.carries(text):
            await wire.say(text)
            id, found = failure(await wire.hear())
            assert (id, found) == (None, code), text
    for text in (b'{"jsonrpc":"2.0","id":5,"method":7}', b'{"jsonrpc":"1.0","id":5,"method":"ping"}'):
        await wire.say(text)
        assert failure(await wire.hear()) == (5, INVALID_REQUEST), text


async def check_ids_in_what_cannot_be_parsed(wire: Wire) -> None:
    """Wherever the id stands, and whatever stands around it."""
    deep = b"[" * 900 + b"]" * 900
    for text in (
        b'{"jsonrpc":"2.0","id":"x","method":"tools/call","params":{"a":"\\ud800"}}',
        b'{"jsonrpc":"2.0","method":"tools/call","params":{"id":"inner","a":"\xff"},"id":"x"}',
        b'{"params":{"number":%b,"id":3},"method":"ping","jsonrpc":"2.0","id":"x"}' % (b"1" * 5_000),
        b'{"params":{"deep":%b},"method":"ping","jsonrpc":"2.0","id":"x"}' % deep,
        b'{"params":{"nan":NaN},"method":"ping","jsonrpc":"2.0","id":"x"}',
    ):
        if wire.carries(text):
            await wire.say(text)
            message = await wire.hear()
            assert message.get("id") == "x", text[:80]
            assert message["error"]["code"] in (PARSE_ERROR, INVALID_REQUEST)


async def check_oversize(wire: Wire) -> None:
    padding = "x" * SERVER_MAX_MESSAGE
    await wire.say(wire.call("big", "echo", text=padding))
    assert failure(await wire.hear()) == ("big", INVALID_REQUEST)
    last = orjson.dumps({"jsonrpc": "2.0", "method": "ping", "params": {"id": 7, "padding": padding}, "id": "last"})
    await wire.say(last)
    assert failure(await wire.hear()) == ("last", INVALID_REQUEST)
    fits = wire.call("fits", "echo", text="")
    await wire.say(wire.call("fits", "echo", text="y" * (SERVER_MAX_MESSAGE - len(fits))))
    answer = await wire.hear()
    assert len(answer["result"]["content"][0]["text"]) == SERVER_MAX_MESSAGE - len(fits)


async def check_methods(wire: Wire) -> None:
    for method in ("nothing/here", "notifications/cancelled", "sampling/createMessage", "tasks/list", ""):
        message = await wire.ask("m", method)
        assert failure(message) == ("m", METHOD_NOT_FOUND), method
    refused = await wire.ask("p", "tools/call", {"arguments": {}})
    assert failure(refused) == ("p", INVALID_PARAMS)
    assert "$.name" in refused["error"]["message"]
    assert failure(await wire.ask("p", "tools/call", {"name": "echo", "arguments": []})) == ("p", INVALID_PARAMS)
    # Nobody answers notifications, replies to nothing, or what nobody knows.
    await wire.say(
        wire.notification("notifications/nothing"),
        wire.notification("notifications/cancelled", requestId="nobody"),
        wire.notification("notifications/cancelled"),
        b'{"jsonrpc":"2.0","id":999,"result":{}}',
        b'{"jsonrpc":"2.0","id":999,"error":{"code":1,"message":"no"}}',
    )
    await is_well(wire)


async def check_arrays(links: Links, wire: Wire) -> None:
    """One revision has arrays of messages; the others refuse one as a whole."""
    members = [wire.call("a", "echo", text="a"), wire.notification("notifications/nothing"), wire.call("b", "nothing")]
    await wire.say(b"[" + b",".join([*members, b"7"]) + b"]")
    answer = await wire.hear()
    if not links.revision.batching:
        assert failure(answer) == (None, INVALID_REQUEST)
        return
    assert isinstance(answer, list)
    by_id = {member.get("id"): member for member in answer}
    assert len(answer) == 3
    assert by_id["a"]["result"]["content"][0]["text"] == "a"
    assert failure(by_id["b"]) == ("b", INVALID_PARAMS)
    assert failure(by_id[None]) == (None, INVALID_REQUEST)
    await wire.say(b"[]")
    assert failure(await wire.hear()) == (None, INVALID_REQUEST)


async def check_envelope(links: Links, wire: Wire) -> None:
    """Every request says which revision it is in; there is nothing to say first."""
    await wire.say(
        b'{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28"}}}'
    )
    assert failure(await wire.hear()) == (1, INVALID_PARAMS)
    refused = await wire.ask(2, "tools/list", {"_meta": {META_PROTOCOL_VERSION: "1999-01-01"}})
    assert failure(refused) == (2, UNSUPPORTED_VERSION)
    assert refused["error"]["data"] == {"supported": [links.revision.name], "requested": "1999-01-01"}
    discovered = (await wire.ask(3, "server/discover"))["result"]
    assert discovered["supportedVersions"] == [links.revision.name]
    assert failure(await wire.ask(4, "ping")) == (4, METHOD_NOT_FOUND)
    assert failure(await wire.ask(5, "resources/subscribe", {"uri": "notes://readme"})) == (5, METHOD_NOT_FOUND)
    await is_well(wire)


async def test_words_in_and_out_of_turn(links: Links, clock: Any) -> None:
    async with links.wire() as wire:
        with trio.fail_after(PATIENCE):
            await check_first_words(links, wire)
            await check_unasked_log_messages(links, wire)
            await check_cancelled_without_reply(wire)
            await check_nothing_is_overtaken(wire)
            await check_rounds(links, wire)
            await is_well(wire)


async def check_first_words(links: Links, wire: Wire) -> None:
    wire.capabilities = {"roots": {}}
    if links.modern:
        await check_envelope(links, wire)
        return
    assert failure(await wire.ask(1, "tools/list")) == (1, INVALID_REQUEST)
    assert failure(await wire.ask(2, "initialize", {})) == (2, INVALID_PARAMS)
    assert (await wire.ask(3, "ping"))["result"] == {}
    await wire.meet()
    # Where there is one connection, a new handshake begins anew: its params are looked at.
    assert failure(await wire.ask(4, "initialize", {})) == (4, INVALID_PARAMS if links.connected else INVALID_REQUEST)


async def check_unasked_log_messages(links: Links, wire: Wire) -> None:
    """Before each request says so itself, a server chooses a level until the client sets one."""
    await wire.say(wire.call(1, "log", level="error", text="unasked"))
    heard = [await wire.hear()]
    while "id" not in heard[-1]:
        heard.append(await wire.hear())
    methods = [message["method"] for message in heard[:-1]]
    assert methods == ([] if links.modern else ["notifications/message"] * 2)


async def check_cancelled_without_reply(wire: Wire) -> None:
    cancel = wire.notification("notifications/cancelled", requestId="a", reason="no more")
    await wire.say(wire.call("a", "hang", name="a"), wire.call("b", "wait_for", line="a started"))
    assert (await wire.hear())["id"] == "b"
    await wire.say(cancel, cancel, wire.call("c", "wait_for", line="a stopped: PEER"))
    assert (await wire.hear())["id"] == "c"
    # Late, and of nothing under way: ignored. The id may be used again.
    await wire.say(cancel, wire.call("a", "echo", text="again"))
    assert (await wire.hear())["id"] == "a"


async def check_nothing_is_overtaken(wire: Wire) -> None:
    """In one write: a call, its cancellation, another call. They take effect in that order."""
    for id in range(20):
        cancel = wire.notification("notifications/cancelled", requestId=id)
        await wire.say(wire.call(id, "hang", name=f"call {id}"), cancel, wire.call(f"after {id}", "echo", text="x"))
        assert (await wire.hear())["id"] == f"after {id}", "a cancelled call was answered"
    # Had a cancellation come before its call, the call would be under way still.
    await wire.say(wire.call("end", "statistics"))
    counted = orjson.loads((await wire.hear())["result"]["content"][0]["text"])
    assert counted["running"] == 1


async def check_rounds(links: Links, wire: Wire) -> None:
    """The modern era asks inside results, and takes only the state it gave, for the request it gave it for."""
    await wire.say(wire.call(1, "where"))
    asked = await wire.hear()
    if not links.modern:
        assert asked["method"] == "roots/list"
        await wire.say(b'{"jsonrpc":"2.0","id":%d,"result":{"roots":[{"uri":"file:///z"}]}}' % asked["id"])
        assert (await wire.hear())["id"] == 1
        return
    result = asked["result"]
    assert (asked["id"], result["resultType"]) == (1, "input_required")
    [(key, question)] = result["inputRequests"].items()
    assert question == {"method": "roots/list", "params": {}}, "clients in Go need the member"
    state = result["requestState"]
    roots = {"roots": [{"uri": "file:///z"}]}
    call = {"name": "where", "arguments": {}, "inputResponses": {key: roots}, "requestState": state}
    answer = await wire.ask(2, "tools/call", call)
    assert "file:///z" in answer["result"]["content"][0]["text"]
    for other in (
        {**call, "requestState": state[:-4] + ("AAAA" if state[-4:] != "AAAA" else "BBBB")},
        {**call, "name": "in_order"},
        {**call, "inputResponses": {key: {"roots": "none"}}},
        {**call, "inputResponses": [roots]},
    ):
        assert failure(await wire.ask(3, "tools/call", other)) == (3, INVALID_PARAMS), other


@pytest.mark.parametrize("transport", LOCAL)
@pytest.mark.parametrize("revision", LEGACY)
async def test_on_a_pipe_another_client_may_begin_anew(links: Links, clock: Any) -> None:
    """As behind a bridge whose clients share one server."""
    async with links.wire() as wire:
        with trio.fail_after(PATIENCE):
            for _ in range(3):
                await wire.meet()
                await is_well(wire)
