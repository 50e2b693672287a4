from __future__ import annotations

import gc
import weakref
from typing import Any

import orjson
import pytest
import trio
import trio.testing

from tests.transports.http.face import Answer, Visitor, visiting
from tests.transports.http.test_exchange import make_server
from tests.transports.http.test_sessions import by_header
from trimcp.session.limits import Limits
from trimcp.transports.http.settings import HttpSettings
from trimcp.wire.codes import CANCELLED_BY_DRAIN, PARSE_ERROR
from trimcp.wire.revisions import OLDEST


async def opened(visitor: Visitor) -> tuple[Answer, str]:
    """Open a stream, and return it with where to post."""
    stream = await visitor.send("GET", "/sse", headers={"accept": "text/event-stream"})
    assert stream.status == 200
    [endpoint] = stream.now()
    assert endpoint.event == "endpoint"
    return stream, endpoint.data.decode()


async def say(visitor: Visitor, place: str, message: Any) -> Answer:
    body = message if isinstance(message, bytes) else orjson.dumps(message)
    return await visitor.send("POST", place, body, {"content-type": "application/json"})


async def met(visitor: Visitor) -> tuple[Answer, str]:
    """Open a stream and shake hands."""
    stream, place = await opened(visitor)
    params = {
        "protocolVersion": OLDEST.name,
        "capabilities": {"elicitation": {}},
        "clientInfo": {"name": "v", "version": "1"},
    }
    assert (await say(visitor, place, visitor.request("initialize", params))).status == 202
    await say(visitor, place, {"jsonrpc": "2.0", "method": "notifications/initialized"})
    return stream, place


def spoken(stream: Answer) -> list[Any]:
    return [orjson.loads(event.data) for event in stream.now() if event.event == "message" and event.data]


async def test_answers_come_on_the_stream(autojump_clock: Any) -> None:
    async with visiting(make_server(), OLDEST) as visitor:
        stream, place = await met(visitor)
        call = visitor.request("tools/call", {"name": "steps", "arguments": {"count": 2}}, id="c", progressToken=5)
        assert (await say(visitor, place, call)).status == 202
        await stream.events(5)
        handshake, *rest = spoken(stream)
        assert handshake["result"]["protocolVersion"] == OLDEST.name
        assert [message.get("method", message.get("id")) for message in rest] == [
            "notifications/progress",
            "notifications/progress",
            "c",
        ]
        stream.leave()


@pytest.mark.parametrize("root", ["/tools", "/tools/"])
async def test_behind_a_proxy_that_cuts_a_prefix_the_address_to_post_to_has_it(root: str, autojump_clock: Any) -> None:
    async with visiting(make_server(), OLDEST, HttpSettings(root=root)) as visitor:
        stream = await visitor.send("GET", "/sse", headers={"accept": "text/event-stream"})
        await stream.events(1)
        assert stream.now()[0].data.startswith(b"/tools/messages?session_id=")
        stream.leave()


async def test_what_is_no_plain_json_is_not_taken(autojump_clock: Any) -> None:
    async with visiting(make_server(), OLDEST) as visitor:
        stream, place = await met(visitor)
        for headers in (
            {},
            {"content-type": "text/plain"},
            {"content-type": "application/json", "content-encoding": "gzip"},
        ):
            answer = await visitor.send("POST", place, orjson.dumps(visitor.request("ping")), headers)
            assert answer.status == 415
        assert len(spoken(stream)) == 1
        stream.leave()


async def test_the_end_of_the_stream_ends_the_session(autojump_clock: Any) -> None:
    journal: list[str] = []
    async with visiting(make_server(journal), OLDEST) as visitor:
        stream, place = await met(visitor)
        await say(visitor, place, visitor.request("tools/call", {"name": "wait", "arguments": {"seconds": 60}}))
        await trio.testing.wait_all_tasks_blocked()
        stream.leave()
        await trio.testing.wait_all_tasks_blocked()
        assert journal == ["disconnected"]
        assert (await say(visitor, place, visitor.request("ping"))).status == 404
        assert len(visitor.face.sse2024.streams) == 0


async def test_the_endpoint_stands_below_the_prefix(autojump_clock: Any) -> None:
    from trimcp.transports.http.interfaces import Head

    async with visiting(make_server(), OLDEST) as visitor:
        head = Head("GET", "/sse", headers={"host": "localhost"}, root="/a b")
        found: Any = await visitor.face.admit(head)
        answer = Answer(handler=found)
        found.start(b"", answer)
        assert answer.now()[0].data.startswith(b"/a%20b/messages?session_id=")
        answer.leave()


async def test_a_stream_belongs_to_who_opened_it(autojump_clock: Any) -> None:
    async with visiting(make_server(), OLDEST, HttpSettings(authenticate=by_header)) as ada:
        ada.headers["authorization"] = "ada"
        stream, place = await met(ada)
        eve = Visitor(ada.face, OLDEST, {"authorization": "eve"})
        assert (await say(eve, place, eve.request("ping"))).status == 404
        assert (await say(ada, "/messages", ada.request("ping"))).status == 404
        assert (await say(ada, place, ada.request("ping"))).status == 202
        stream.leave()


async def test_the_address_may_be_spelled_anew(autojump_clock: Any) -> None:
    async with visiting(make_server(), OLDEST) as visitor:
        stream, place = await met(visitor)
        path, _, id = place.partition("?session_id=")
        escaped = "".join(f"%{ord(letter):02X}" for letter in id)
        for query in (f"session_id={escaped}", f"a=b&session_id={id}", f"session_id={id}&a=b"):
            assert (await say(visitor, f"{path}?{query}", visitor.request("ping"))).status == 202
        for query in (id, f"id={id}", f"session_id={id}+", f"session_id={id[:-1]}", "session_id=", "session_id"):
            assert (await say(visitor, f"{path}?{query}", visitor.request("ping"))).status == 404
        stream.leave()


async def test_garbage_is_answered_on_the_stream(autojump_clock: Any) -> None:
    server = make_server()
    server.limits = Limits(max_message=100_000)
    async with visiting(server, OLDEST) as visitor:
        stream, place = await met(visitor)
        assert (await say(visitor, place, b'{"id": 5,')).status == 202
        assert spoken(stream)[-1]["error"]["code"] == PARSE_ERROR
        assert (await say(visitor, place, b"x" * 100_001)).status == 413
        wrong = await visitor.send("POST", place, b"{}", {"content-type": "text/plain"})
        assert wrong.status == 415
        stream.leave()


async def test_who_asks_without_reading_is_held_back(autojump_clock: Any) -> None:
    async with visiting(make_server(), OLDEST, HttpSettings(stream_buffer=1_000)) as visitor:
        stream, place = await met(visitor)
        stream.stalled = True
        statuses = [(await say(visitor, place, visitor.request("ping"))).status for _ in range(1_000)]
        assert 503 in statuses
        assert stream.waiting < 25_000
        stream.read_on()
        assert (await say(visitor, place, visitor.request("ping"))).status == 202
        stream.leave()


async def test_draining_ends_the_stream_with_its_answers(autojump_clock: Any) -> None:
    async with visiting(make_server(), OLDEST) as visitor:
        stream, place = await met(visitor)
        for id, seconds in (("a", 1), ("b", 60)):
            call = {"name": "wait", "arguments": {"seconds": seconds}}
            await say(visitor, place, visitor.request("tools/call", call, id=id))
        await visitor.face.drain(5)
        assert stream.finished
        answers = {message["id"]: message for message in spoken(stream)[1:]}
        assert answers["a"]["result"]["content"][0]["text"] == "waited"
        assert answers["b"]["error"]["code"] == CANCELLED_BY_DRAIN
        late = await visitor.send("GET", "/sse", headers={"accept": "text/event-stream"})
        assert late.status == 503


async def test_a_quiet_stream_is_kept_alive(autojump_clock: Any) -> None:
    async with visiting(make_server(), OLDEST) as visitor:
        stream, _ = await met(visitor)
        before = len(stream.body)
        await trio.sleep(60)
        assert 3 <= bytes(stream.body[before:]).count(b":\n\n") <= 4
        stream.leave()


async def test_there_are_only_so_many_streams_and_one_address_does_not_take_them_all(autojump_clock: Any) -> None:
    async with visiting(make_server(), OLDEST, HttpSettings(max_sessions=20)) as visitor:
        eve = [Visitor(visitor.face, OLDEST, peer=f"192.0.2.1:{n}") for n in range(25)]
        streams = [await met(each) for each in eve]
        # A handshake asks for nothing: the first ones made room for the last.
        assert [stream.finished for stream, _ in streams] == [True] * 5 + [False] * 20
        assert len(visitor.face.sse2024.streams) == 20
        for each, (stream, place) in zip(eve[5:], streams[5:], strict=True):
            assert (
                await say(each, place, each.request("tools/call", {"name": "echo", "arguments": {"text": "x"}}))
            ).status == 202
            await stream.events(3)
        full = await eve[0].send("GET", "/sse", headers={"accept": "text/event-stream"})
        assert (full.status, full.headers["retry-after"]) == (503, "1")
        ada = Visitor(visitor.face, OLDEST, peer="192.0.2.2:1")
        stream, place = await met(ada)
        await say(ada, place, ada.request("tools/call", {"name": "echo", "arguments": {"text": "x"}}))
        await stream.events(3)
        assert not stream.finished
        assert sum(stream.finished for stream, _ in streams) == 6
        assert len(visitor.face.sse2024.streams) == 20
        visitor.face.end()


async def test_a_session_that_ended_waits_for_no_collector(autojump_clock: Any) -> None:
    async with visiting(make_server(), OLDEST) as visitor:
        stream, _ = await met(visitor)
        [session] = visitor.face.service.sessions
        gone = weakref.ref(session)
        del session
        gc.collect()
        gc.disable()
        try:
            stream.leave()
            del stream
            await trio.testing.wait_all_tasks_blocked()
            assert gone() is None
        finally:
            gc.enable()
