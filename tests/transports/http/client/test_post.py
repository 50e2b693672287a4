"""One request over Streamable HTTP: every form of answer, every way to get none, attempts, resumption, cancellation."""

from __future__ import annotations

import logging
import random
from itertools import pairwise
from typing import Any

import httpx2
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.transports.http.scripted import (
    Exchange,
    Handler,
    Scripted,
    cancellation,
    close_idle,
    event,
    legacy,
    receive,
    reply_event,
    request,
    scripted,
    shake_hands,
    welcome,
)
from trimcp.channel import CLIENT_MAX_MESSAGE
from trimcp.client.client import Client
from trimcp.errors import InvalidReply
from trimcp.transports.http.client.channel import HttpChannel
from trimcp.transports.http.client.pool import Pool
from trimcp.wire.codes import METHOD_NOT_FOUND, OVERLOADED
from trimcp.wire.jsonrpc import ErrorResponse, Lost, Malformed, Notification, Request, Response, encode_result
from trimcp.wire.revisions import V2025_03_26, V2025_06_18, V2025_11_25, V2026_07_28, Revision

pytestmark = pytest.mark.usefixtures("on_both_engines")

NOTE = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "x"}}
JSON = {"content-type": "application/json"}


async def ask(handler: Handler, *requests: Any, **settings: Any) -> tuple[list[Any], Scripted]:
    """Return what comes of requests: as many messages as there are requests."""
    settings.setdefault("random", random.Random(1))
    requests = requests or (request(1),)
    most = settings.pop("max_message", CLIENT_MAX_MESSAGE)
    async with scripted(handler) as server, server.target(**settings).connect() as channel:
        channel.set_max_message(most)
        await channel.send(requests)
        return list(await receive(channel, len(requests))), server


async def ask_legacy(handler: Handler, method: str = "tools/call", **settings: Any) -> tuple[Any, Scripted]:
    settings.setdefault("random", random.Random(1))
    async with scripted(handler) as server, server.target(**settings).connect() as channel:
        await shake_hands(channel)
        await channel.send([request(1, method, modern=False)])
        (message,) = await receive(channel)
        return message, server


# Answers


async def test_json_is_the_answer() -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.result({"x": 1})

    (message,), server = await ask(handle)
    assert message == Response(1, {"x": 1})
    head = server.asked[0].headers
    assert head["accept"] == "application/json, text/event-stream"
    assert head["content-type"] == "application/json"
    assert head["mcp-protocol-version"] == V2026_07_28.name
    assert head["mcp-method"] == "tools/call"


async def test_a_stream_brings_notifications_and_the_answer(autojump_clock: object) -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.events(b": hello\n\n", event(NOTE), event(b"", id="1"), event({**NOTE, "id": 7}))
        await exchange.write(event(b"x", event="ping"))
        await exchange.write(reply_event(exchange.id, {"x": 1}))
        await exchange.finish()

    async with scripted(handle) as server, server.target().connect() as channel:
        await channel.send([request(1)])
        found = await receive(channel, 3)
        assert [type(each) for each in found] == [Notification, Request, Response]
        await wait_all_tasks_blocked()
        await channel.send([request(2)])  # the stream was read to its end, so its connection serves again
        await receive(channel, 3)
        assert server.connections == 1


async def test_a_stream_that_does_not_end_with_the_answer_is_left_after_a_moment(autojump_clock: object) -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.events(reply_event(1), event(NOTE))
        await exchange.gone.wait()

    async with scripted(handle) as server, server.target().connect() as channel:
        await channel.send([request(1)])
        await receive(channel, 2)
        await server.asked[0].gone.wait()
        assert trio.current_time() == pytest.approx(0.5)


@pytest.mark.parametrize("status", [200, 400, 404, 500, 503])
async def test_an_error_is_delivered_whatever_the_status_and_whatever_its_id(status: int) -> None:
    async def handle(exchange: Exchange) -> None:
        id = exchange.id if status == 200 else "server-error"
        await exchange.json(
            {"jsonrpc": "2.0", "id": id, "error": {"code": -32021, "message": "no", "data": [1]}}, status
        )

    (message,), server = await ask(handle, request(1, "tools/list"))
    assert message == ErrorResponse(1, -32021, "no", [1])
    assert len(server.asked) == 1


# Nonsense


@pytest.mark.parametrize(
    ("body", "headers", "why"),
    [
        (
            b"<html>",
            {"content-type": "text/html"},
            "200 OK at http://server.test/mcp with the content type 'text/html'",
        ),
        (b"{", JSON, "not valid JSON"),
        (b'{"jsonrpc":"2.0","id":1,"result":"\xff"}', JSON, "UTF-8"),
        (b"", JSON, "200 OK and no result"),
        (b'{"jsonrpc":"2.0","id":1,"result":[]}', JSON, "must be an object"),
    ],
)
async def test_what_is_no_answer_fails_the_request_and_nothing_else(
    body: bytes, headers: dict[str, str], why: str
) -> None:
    async def handle(exchange: Exchange) -> None:
        if exchange.id == 1:
            await exchange.respond(200, body, headers)
        else:
            await exchange.result()

    found, server = await ask(handle, request(1), request(2))
    (bad,) = [each for each in found if isinstance(each, Malformed)]
    assert bad.id == 1
    assert bad.is_response
    assert why in bad.message
    assert Response(2, {}) in found
    assert len(server.asked) == 2


async def test_an_answer_to_another_request_is_nobodys(caplog: pytest.LogCaptureFixture) -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.json({"jsonrpc": "2.0", "id": 99, "result": {}})

    async with scripted(handle) as server, server.target().connect() as channel:
        await channel.send([request(1)])
        (bad,) = await receive(channel, 1)
        assert isinstance(bad, Malformed)
        assert bad.id == 1
    assert "an answer to another request" in caplog.text


async def test_an_acknowledgement_is_no_answer() -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.respond(202)

    (message,), _ = await ask(handle)
    assert isinstance(message, Malformed)
    assert "202 Accepted" in message.message


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_beyond_the_limit_fails_its_request_only(stream: bool, autojump_clock: object) -> None:
    async def handle(exchange: Exchange) -> None:
        result = {"x": "y" * 2000} if exchange.id == 1 else {}
        if stream:
            await exchange.events(reply_event(exchange.id, result))
            await exchange.finish()
        else:
            await exchange.result(result)

    found, _ = await ask(handle, request(1), request(2), max_message=1000)
    (bad,) = [each for each in found if isinstance(each, Malformed)]
    assert (bad.id, bad.reason) == (1, "size")
    assert Response(2, {}) in found


async def test_garbage_in_a_stream_is_survived(autojump_clock: object) -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.events(b"data: \xff\xfe\n\n", b"\x00\xff\n\n", b"data: {\n\n", reply_event(1, {"x": 1}))
        await exchange.finish()

    async with scripted(handle) as server, server.target().connect() as channel:
        await channel.send([request(1)])
        *garbage, good = await receive(channel, 3)
        assert all(isinstance(each, Malformed) and each.id is None for each in garbage)
        assert good == Response(1, {"x": 1})


# No answer


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (400, "400 Bad Request"),
        (401, "wants credentials"),
        (403, "does not allow"),
        (404, "404 Not Found"),
        (418, "418"),
        (500, "500 Internal Server Error"),
    ],
)
async def test_a_refusal_without_an_error_loses_the_request(status: int, why: str) -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.respond(status, b"<html>\n" * 100)

    async with scripted(handle) as server, server.target().connect() as channel:
        await channel.send([request(1)])
        (message,) = await receive(channel)
        assert isinstance(message, Lost)
        assert message.id == 1
        assert why in message.message
        assert channel.close_reason() == message.message
        assert len(server.asked) == 1


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("after", [None, "7"])
async def test_an_overload_told_by_the_status_alone_is_one(status: int, after: str | None) -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.respond(status, b"<html>", {} if after is None else {"retry-after": after})

    (message,), _ = await ask(handle)
    assert isinstance(message, ErrorResponse)
    assert message.code == OVERLOADED
    assert str(status) in message.message
    assert message.data == {"reason": "overloaded", **({} if after is None else {"retryAfter": 7.0})}


@pytest.mark.parametrize("status", [400, 403, 404, 500])
@pytest.mark.parametrize("form", [None, "text/plain; charset=utf-8", "text/html", "application/octet-stream"])
async def test_a_refusal_in_plain_text_is_told(status: int, form: str | None) -> None:
    async def handle(exchange: Exchange) -> None:
        headers = {} if form is None else {"content-type": form}
        await exchange.respond(status, b"Forbidden: invalid \x1b[2J Host header\n" + b"x" * 1000, headers)

    (message,), _ = await ask(handle)
    assert isinstance(message, Lost)
    assert ("invalid" in message.message) is (form is None or form.startswith("text/plain"))
    assert "\x1b" not in message.message
    assert len(message.message) < 500


@pytest.mark.parametrize("status", [401, 403, 404, 405, 426])
async def test_what_a_gatekeeper_says_is_no_answer_of_the_servers(status: int) -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.json({"jsonrpc": "2.0", "id": 1, "error": {"code": -32600, "message": "no\nway"}}, status)

    (message,), _ = await ask(handle)
    assert isinstance(message, Lost)
    assert str(status) in message.message
    assert "'no\\nway'" in message.message


async def test_a_redirect_to_another_origin_loses_the_request_and_says_why() -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.respond(308, b"", {"location": "https://server.test/mcp?token=x"})

    (message,), _ = await ask(handle)
    assert isinstance(message, Lost)
    assert "'https://server.test'" in message.message
    assert "token" not in message.message


@pytest.mark.parametrize("how", ["status", "json", "stream"])
async def test_one_cut_reply_loses_its_request_only(how: str) -> None:
    async def handle(exchange: Exchange) -> None:
        if exchange.id == 2:
            return await exchange.result()
        if how == "json":
            await exchange.start(200, {**JSON, "content-length": "100"})
            await exchange.write(b'{"jsonrpc":')
        elif how == "stream":
            await exchange.events(event(b"", id="1"))
        exchange.answered = True
        return None

    found, server = await ask(handle, request(1), request(2))
    (lost,) = [each for each in found if isinstance(each, Lost)]
    assert lost.id == 1
    assert Response(2, {}) in found
    assert len(server.asked) == 2  # in this revision no stream is resumed, and no tool is called twice


@pytest.mark.parametrize(
    "handler",
    [
        lambda exchange: exchange.respond(500),
        lambda exchange: exchange.respond(401),
        lambda exchange: exchange.respond(404),
        lambda exchange: exchange.events(),
    ],
)
async def test_a_probe_without_an_answer_is_lost_and_no_more(handler: Handler, autojump_clock: object) -> None:
    (message,), _ = await ask(handler, request(1, "server/discover"))
    assert isinstance(message, Lost)
    assert message.id == 1


def fail(*args: object, **named: object) -> None:
    raise RuntimeError("a bug")


async def test_a_bug_loses_one_request_and_is_logged_whole(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.result()

    async with scripted(handle) as server, server.target().connect() as channel:
        assert isinstance(channel, HttpChannel)
        for place, name in ((Pool, "begin"), (httpx2.AsyncClient, "send")):
            monkeypatch.setattr(place, name, fail)
        await channel.send([request(1)])
        (message,) = await receive(channel)
        assert isinstance(message, Lost)
        (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
        assert record.exc_info is not None


# Attempts


def failing(times: int, how: Handler, method: str = "") -> Handler:
    """A server that does `how` with the first requests and answers the rest."""
    count = 0

    async def handle(exchange: Exchange) -> None:
        nonlocal count
        count += 1
        if count <= times:
            await how(exchange)
        else:
            await exchange.result({"attempt": count})

    return handle


async def cut(exchange: Exchange) -> None:
    exchange.answered = True


async def busy(exchange: Exchange) -> None:
    await exchange.respond(503, b"busy", {"retry-after": "7"})


@pytest.mark.parametrize("how", [cut, lambda exchange: exchange.respond(502), lambda exchange: exchange.events()])
@pytest.mark.parametrize(
    ("method", "settings", "again"),
    [
        ("tools/list", {}, True),
        ("resources/read", {}, True),
        ("tools/call", {}, False),
        ("tools/call", {"retry_calls": True}, True),
        ("logging/setLevel", {"retry_calls": True}, False),
    ],
)
async def test_what_only_reads_is_asked_again(
    how: Handler, method: str, settings: dict[str, Any], again: bool, autojump_clock: object
) -> None:
    (message,), server = await ask(failing(2, how), request(1, method), **settings)
    if again:
        assert message == Response(1, {"attempt": 3})
        pauses = [b.at - a.at for a, b in zip(server.asked, server.asked[1:], strict=False)]
        assert 0.125 <= pauses[0] <= 0.25
        assert 0.25 <= pauses[1] <= 0.5
    else:
        assert isinstance(message, Lost)
        assert len(server.asked) == 1


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("after", [None, "2"])
async def test_a_server_that_is_too_busy_to_begin_is_asked_again(
    status: int, after: str | None, autojump_clock: object
) -> None:
    """It has refused the handshake before it did anything."""

    async def handle(exchange: Exchange) -> None:
        if len(server.asked) == 1:
            await exchange.respond(status, b"later", {} if after is None else {"retry-after": after})
        else:
            await legacy(Exchange.result)(exchange)

    async with scripted(handle) as server, server.target().connect() as channel:
        await shake_hands(channel)
        assert server.called("initialize")[1].at >= float(after or 0.125)


async def test_attempts_end(autojump_clock: object) -> None:
    (message,), server = await ask(failing(99, cut), request(1, "tools/list"), retries=2)
    assert isinstance(message, Lost)
    assert len(server.asked) == 3


async def test_a_server_may_say_when_to_come_back(autojump_clock: object) -> None:
    (message,), server = await ask(failing(1, busy), request(1, "tools/list"))
    assert message == Response(1, {"attempt": 2})
    assert server.asked[1].at == 7


async def test_but_not_in_an_hour(autojump_clock: object) -> None:
    async def closed(exchange: Exchange) -> None:
        await exchange.respond(503, b"", {"retry-after": "3600"})

    (message,), server = await ask(failing(1, closed), request(1, "tools/list"))
    assert isinstance(message, ErrorResponse)
    assert (message.code, message.data["retryAfter"]) == (OVERLOADED, 3600)
    assert "503" in message.message
    assert len(server.asked) == 1


async def test_an_error_that_says_when_to_come_back_is_not_the_last_word(autojump_clock: object) -> None:
    error = {"jsonrpc": "2.0", "id": 1, "error": {"code": 1001, "message": "busy"}}

    async def overloaded(exchange: Exchange) -> None:
        await exchange.json(error, 503, retry_after="2")

    (message,), _ = await ask(failing(1, overloaded), request(1, "tools/list"))
    assert message == Response(1, {"attempt": 2})
    (message,), server = await ask(failing(1, overloaded), request(1, "tools/call"))
    assert message == ErrorResponse(1, 1001, "busy")
    assert len(server.asked) == 1


@pytest.mark.parametrize("started", [False, True, None])
async def test_a_call_that_a_server_did_not_begin_because_it_ends_is_sent_again(
    started: bool | None, autojump_clock: object
) -> None:
    data = {"reason": "drain", **({} if started is None else {"started": started})}
    error = {"jsonrpc": "2.0", "id": 1, "error": {"code": 1002, "message": "shutting down", "data": data}}

    async def ending(exchange: Exchange) -> None:
        await exchange.json(error, 503, retry_after="1")

    (message,), server = await ask(failing(1, ending), request(1, "tools/call"))
    if started is False:
        assert message == Response(1, {"attempt": 2})
        assert server.asked[1].at == 1
    else:
        assert message == ErrorResponse(1, 1002, "shutting down", data)
        assert len(server.asked) == 1


async def test_what_never_left_is_sent_again_whatever_it_is(autojump_clock: object) -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.result()

    async with scripted(handle) as server, server.target(random=random.Random(1)).connect() as channel:
        server.refuse = True
        await channel.send([request(1, "tools/call")])
        await trio.sleep(0.5)
        server.refuse = False
        assert await receive(channel) == [Response(1, {})]
        assert len(server.asked) == 1


async def test_an_unreachable_server_is_tried_patiently_once(autojump_clock: object) -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.result()

    async with scripted(handle) as server, server.target(random=random.Random(1)).connect() as channel:
        server.refuse = True
        await channel.send([request(1, "tools/call")])
        (message,) = await receive(channel)
        assert isinstance(message, Lost)
        assert message.message == server.refusal
        waited = trio.current_time()
        assert 0.5 < waited < 2
        await channel.send([request(2, "tools/call")])
        (message,) = await receive(channel)
        assert isinstance(message, Lost)
        assert trio.current_time() == waited
        server.refuse = False
        await channel.send([request(3, "tools/call")])
        assert await receive(channel) == [Response(3, {})]
        server.refuse = True
        server.asked.clear()
        await close_idle(channel)
        await channel.send([request(4, "tools/call")])
        await receive(channel)
        assert trio.current_time() > waited + 0.5  # it was reached in between


# Resumption


async def hang_up(exchange: Exchange) -> None:
    """Begin a stream, and end it in order before the answer."""
    await exchange.events(event(b"", id="one", retry=500), event(NOTE, id="two"))
    await exchange.finish()


@pytest.mark.parametrize("revision", [V2025_03_26, V2025_06_18, V2025_11_25])
@pytest.mark.parametrize("in_order", [True, False])
async def test_a_stream_that_ends_early_is_taken_up_where_it_ended(
    revision: Any, in_order: bool, autojump_clock: object
) -> None:
    async def call(exchange: Exchange) -> None:
        await exchange.events(event(b"", id="one", retry=500), event(NOTE, id="two"))
        if in_order:
            await exchange.finish()

    async def get(exchange: Exchange) -> None:
        if "last-event-id" not in exchange.headers:
            return await exchange.respond(405)
        await exchange.events(reply_event(1, {"x": 1}, id="three"))
        return await exchange.finish()

    async with scripted(legacy(call, revision=revision, get=get)) as server, server.target().connect() as channel:
        await shake_hands(channel, revision)
        await channel.send([request(1, modern=False)])
        note, message = await receive(channel, 2)
        assert isinstance(note, Notification)
        assert message == Response(1, {"x": 1})
        resumed = server.called("GET")[1]
        assert resumed.headers["last-event-id"] == "two"
        assert resumed.headers["mcp-session-id"] == "s1"
        assert resumed.headers["accept"] == "text/event-stream"
        assert ("mcp-protocol-version" in resumed.headers) is revision.version_header
        assert resumed.at == pytest.approx(0.5)
        assert len(server.called("tools/call")) == 1


async def test_a_stream_may_be_polled_for_as_long_as_something_comes(autojump_clock: object) -> None:
    polls = 0

    async def get(exchange: Exchange) -> None:
        nonlocal polls
        if "last-event-id" not in exchange.headers:
            return await exchange.respond(405)
        polls += 1
        await exchange.events(event(b"", id=f"poll{polls}", retry=1000) if polls < 20 else reply_event(1))
        return await exchange.finish()

    async with scripted(legacy(hang_up, get=get)) as server, server.target().connect() as channel:
        await shake_hands(channel)
        await channel.send([request(1, modern=False)])
        assert (await receive(channel, 2))[1] == Response(1, {})
        assert [each.headers.get("last-event-id") for each in server.called("GET")][1:4] == ["two", "poll1", "poll2"]


@pytest.mark.parametrize("retry", [0, 1, 10])
async def test_a_server_that_wants_no_pause_is_left_alone_all_the_same(retry: int, autojump_clock: object) -> None:
    polls = 0

    async def call(exchange: Exchange) -> None:
        await exchange.events(event(b"", id="one", retry=retry))
        await exchange.finish()

    async def get(exchange: Exchange) -> None:
        nonlocal polls
        if "last-event-id" not in exchange.headers:
            return await exchange.respond(405)
        polls += 1
        await exchange.events(event(b"", id=f"poll{polls}", retry=retry))
        return await exchange.finish()

    async with (
        scripted(legacy(call, get=get)) as server,
        server.target(random=random.Random(1)).connect() as channel,
    ):
        await shake_hands(channel)
        await channel.send([request(1, modern=False)])
        await trio.sleep(10)
        resumed = [each for each in server.called("GET") if "last-event-id" in each.headers]
        assert 8 < len(resumed) < 20
        pauses = [b.at - a.at for a, b in pairwise(resumed)]
        assert min(pauses) >= 0.25
        assert 0.5 <= pauses[-1] <= 1
        assert len(set(pauses)) > 5  # many clients do not come back at once


@pytest.mark.parametrize(
    ("get", "attempts"),
    [
        (lambda exchange: exchange.respond(405), 1),
        (lambda exchange: exchange.respond(400), 1),
        (lambda exchange: exchange.respond(200, b"{}", JSON), 1),
        (cut, 4),
        (lambda exchange: exchange.respond(503), 4),
    ],
)
async def test_a_stream_that_cannot_be_taken_up_loses_the_request(
    get: Handler, attempts: int, autojump_clock: object
) -> None:
    async def resume(exchange: Exchange) -> None:
        await (get(exchange) if "last-event-id" in exchange.headers else exchange.respond(405))

    async with scripted(legacy(hang_up, get=resume)) as server, server.target().connect() as channel:
        await shake_hands(channel)
        await channel.send([request(1, modern=False)])
        _, message = await receive(channel, 2)
        assert isinstance(message, Lost)
        assert "ended before the answer" in message.message
        assert len([each for each in server.called("GET") if "last-event-id" in each.headers]) == attempts
        assert len(server.called("tools/call")) == 1


async def test_a_stream_of_a_session_that_is_gone_is_not_taken_up_in_another(autojump_clock: object) -> None:
    sessions = 0

    async def handle(exchange: Exchange) -> None:
        nonlocal sessions
        if exchange.called == "initialize":
            sessions += 1
            await exchange.result(welcome(), mcp_session_id=f"s{sessions}")
        elif exchange.called == "notifications/initialized":
            await exchange.respond(202)
        elif not exchange.body:
            await exchange.respond(405)
        elif exchange.called == "tools/call":
            await hang_up(exchange)
        elif exchange.headers["mcp-session-id"] == "s1":
            await exchange.respond(404)
        else:
            await exchange.result()

    async with scripted(handle) as server, server.target().connect() as channel:
        await shake_hands(channel)
        await channel.send([request(1, modern=False), request(2, "tools/list", modern=False)])
        found = await receive(channel, 4)
        (lost,) = [each for each in found if isinstance(each, Lost) and each.id == 1]
        assert "ended before the answer" in lost.message
        assert all("last-event-id" not in each.headers for each in server.called("GET"))


async def test_without_ids_there_is_nothing_to_take_up(autojump_clock: object) -> None:
    async def call(exchange: Exchange) -> None:
        await exchange.events(event(NOTE))
        await exchange.finish()

    async with scripted(legacy(call)) as server, server.target().connect() as channel:
        await shake_hands(channel)
        await channel.send([request(1, modern=False)])
        _, message = await receive(channel, 2)
        assert isinstance(message, Lost)
        assert len(server.called("GET")) == 1


async def test_a_list_whose_stream_cannot_be_taken_up_is_asked_for_again(autojump_clock: object) -> None:
    count = 0

    async def then(exchange: Exchange) -> None:
        nonlocal count
        count += 1
        await (exchange.events() if count == 1 else exchange.result({"tools": []}))
        if count == 1:
            await exchange.finish()

    message, _ = await ask_legacy(legacy(then), "tools/list")
    assert message == Response(1, {"tools": []})


# Giving up


@pytest.mark.parametrize("stream", [True, False])
async def test_cancelling_closes_the_stream_where_that_says_it(stream: bool, autojump_clock: object) -> None:
    async def handle(exchange: Exchange) -> None:
        if stream:
            await exchange.events(event(NOTE))
        await exchange.gone.wait()

    async with scripted(handle) as server, server.target().connect() as channel:
        await channel.send([request(1)])
        exchange = await server.wait_for("tools/call")
        await channel.send([cancellation(1)])
        with trio.fail_after(0.1):
            await exchange.gone.wait()
        await wait_all_tasks_blocked()
        assert server.calls == ["tools/call"]


async def test_cancelling_a_request_in_a_pause_ends_its_attempts(autojump_clock: object) -> None:
    async with scripted(failing(1, cut)) as server, server.target().connect() as channel:
        await channel.send([request(1, "tools/list")])
        await server.wait_for("tools/list")
        await wait_all_tasks_blocked()
        await channel.send([cancellation(1)])
        await trio.sleep(100)
        assert len(server.asked) == 1


async def test_cancelling_is_said_where_closing_the_stream_does_not_say_it(autojump_clock: object) -> None:
    async def then(exchange: Exchange) -> None:
        if exchange.called == "notifications/cancelled":
            await exchange.respond(202)
        else:
            await exchange.events(event(b"", id="1"))
            await exchange.gone.wait()

    async with scripted(legacy(then)) as server, server.target().connect() as channel:
        await shake_hands(channel)
        await channel.send([request(1, modern=False)])
        call = await server.wait_for("tools/call")
        await channel.send([cancellation(1)])
        cancelled = await server.wait_for("notifications/cancelled")
        assert cancelled.message["params"] == {"requestId": 1}
        assert cancelled.headers["mcp-session-id"] == "s1"
        await call.gone.wait()  # nobody waits for its answer any more
        await trio.sleep(100)
        assert len(server.called("GET")) == 1  # and nobody takes its stream up


async def test_a_cancellation_does_not_overtake_its_request(autojump_clock: object) -> None:
    async def then(exchange: Exchange) -> None:
        if exchange.called == "notifications/cancelled":
            await exchange.respond(202)
        else:
            await exchange.gone.wait()

    async with scripted(legacy(then)) as server, server.target().connect() as channel:
        await shake_hands(channel)
        await server.wait_for("GET")
        await wait_all_tasks_blocked()
        await channel.send([request(1, modern=False), cancellation(1)])
        await server.wait_for("notifications/cancelled")
        assert server.calls[-2:] == ["tools/call", "notifications/cancelled"]


async def test_cancelling_what_was_answered_says_nothing() -> None:
    async def then(exchange: Exchange) -> None:
        await exchange.result()

    async with scripted(legacy(then)) as server, server.target().connect() as channel:
        await shake_hands(channel)
        await channel.send([request(1, modern=False)])
        await receive(channel)
        await wait_all_tasks_blocked()
        await channel.send([cancellation(1)])
        await wait_all_tasks_blocked()
        assert "notifications/cancelled" not in server.calls


async def test_a_method_that_does_not_exist_is_no_lost_session() -> None:
    async def then(exchange: Exchange) -> None:
        await exchange.json({"jsonrpc": "2.0", "id": 1, "error": {"code": METHOD_NOT_FOUND, "message": "no"}}, 404)

    message, server = await ask_legacy(legacy(then))
    assert message == ErrorResponse(1, METHOD_NOT_FOUND, "no")
    assert len(server.called("initialize")) == 1


@pytest.mark.parametrize("as_events", [False, True])
@pytest.mark.parametrize("revision", [V2025_06_18, V2025_11_25, V2026_07_28])
async def test_an_answer_in_an_array_fails_the_call(
    revision: Revision, as_events: bool, autojump_clock: object
) -> None:
    async def handle(exchange: Exchange) -> None:
        if exchange.called == "server/discover":
            await exchange.result({"supportedVersions": [revision.name], "capabilities": {}, "ttlMs": 0})
            return
        answer = b"[%b]" % encode_result(exchange.id, {"content": []})
        if not as_events:
            await exchange.json(answer)
            return
        await exchange.events(event(answer))
        await exchange.finish()

    async with (
        scripted(legacy(handle, revision=revision)) as server,
        Client("c").connect(server.target(), revision=revision) as session,
    ):
        with pytest.raises(InvalidReply, match="in an array"), trio.fail_after(60):
            await session.call_tool("t")
