"""A legacy session over HTTP: what it puts into headers, and how it is begun again when the server forgot it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.transports.http.scripted import (
    Exchange,
    Handler,
    Scripted,
    answer,
    cancellation,
    event,
    legacy,
    notification,
    receive,
    reply_event,
    request,
    scripted,
    shake_hands,
    welcome,
)
from trimcp.channel import MessageChannel
from trimcp.wire.jsonrpc import ErrorResponse, Lost, Response
from trimcp.wire.revisions import REVISIONS, V2025_03_26, V2025_06_18, Revision

pytestmark = pytest.mark.usefixtures("on_both_engines")

LEGACY = [revision for revision in REVISIONS if not revision.modern]


async def results(exchange: Exchange) -> None:
    await (exchange.result() if "id" in exchange.message else exchange.respond(202))


@pytest.mark.parametrize("revision", LEGACY)
@pytest.mark.parametrize("session", ["s1", None])
async def test_what_the_handshake_agreed_on_goes_into_every_later_request(
    revision: Revision, session: str | None
) -> None:
    async with (
        scripted(legacy(results, revision=revision, session=session)) as server,
        server.target().connect() as channel,
    ):
        await shake_hands(channel, revision)
        await channel.send([request(1, modern=False), notification("notifications/roots/list_changed"), answer(7)])
        await receive(channel)
        await server.wait_for("reply")
        await server.wait_for("GET")
    first, *others = server.asked
    assert "mcp-protocol-version" not in first.headers
    assert "mcp-session-id" not in first.headers
    for each in others:
        assert each.headers.get("mcp-session-id") == session
        assert each.headers.get("mcp-protocol-version") == (revision.name if revision.version_header else None)
    assert ("DELETE" in server.calls) is (session is not None)


async def test_a_handshake_may_come_as_a_stream(autojump_clock: object) -> None:
    async def handle(exchange: Exchange) -> None:
        if exchange.called == "initialize":
            await exchange.events(event(b"", id="1"), reply_event(0, welcome()), mcp_session_id="s1")
            await exchange.finish()
        else:
            await legacy(results)(exchange)

    async with scripted(handle) as server, server.target().connect() as channel:
        await shake_hands(channel)
        await channel.send([request(1, modern=False)])
        await receive(channel)
        assert server.called("tools/call")[0].headers["mcp-session-id"] == "s1"


@pytest.mark.parametrize("session", ["a b", "x" * 1025, ""])
async def test_what_is_no_session_id_is_not_sent_back(session: str) -> None:
    async with scripted(legacy(results, session=session)) as server, server.target().connect() as channel:
        await shake_hands(channel)
        await server.wait_for("notifications/initialized")
    assert all("mcp-session-id" not in each.headers for each in server.asked)


async def test_no_request_overtakes_the_end_of_the_handshake(autojump_clock: object) -> None:
    """Servers refuse what comes before `notifications/initialized`, and a late GET could look like another one."""

    async def handle(exchange: Exchange) -> None:
        if exchange.called == "notifications/initialized":
            await trio.sleep(5)
            await exchange.respond(202)
        else:
            await legacy(results)(exchange)

    async with scripted(handle) as server, server.target().connect() as channel:
        await channel.send([request(0, "initialize", modern=False)])
        await receive(channel)
        await channel.send([notification("notifications/initialized"), request(1, modern=False)])
        await receive(channel)
        assert server.calls == ["initialize", "notifications/initialized", "GET", "tools/call"]
        assert server.asked[-1].at == 5


@pytest.mark.parametrize(
    "how", [lambda exchange: exchange.respond(400), lambda exchange: exchange.json({"result": {}})]
)
async def test_a_server_that_does_not_take_the_end_of_the_handshake_is_used_all_the_same(how: Handler) -> None:
    async def handle(exchange: Exchange) -> None:
        if exchange.called == "notifications/initialized":
            await how(exchange)
        else:
            await legacy(results)(exchange)

    async with scripted(handle) as server, server.target().connect() as channel:
        await shake_hands(channel)
        await channel.send([request(1, modern=False)])
        assert await receive(channel) == [Response(1, {})]


# A session that was forgotten


class Forgetful:
    """A server that knows only the newest of its sessions, and forgets that when told to."""

    def __init__(self, revision: Revision = REVISIONS[-2]) -> None:
        self.revision = revision
        self.sessions = 0
        self.known = True
        self.forgets_at_once = False
        self.status = 404
        self.body = b""
        self.streams: list[Exchange] = []

    async def __call__(self, exchange: Exchange) -> None:
        session = exchange.headers.get("mcp-session-id")
        if exchange.called == "initialize":
            assert session is None
            self.sessions += 1
            self.known = not self.forgets_at_once or self.sessions == 1
            await exchange.result(welcome(self.revision), mcp_session_id=f"s{self.sessions}")
        elif exchange.called == "notifications/initialized" and session == f"s{self.sessions}":
            await exchange.respond(202)
        elif not self.known or session != f"s{self.sessions}":
            await exchange.respond(self.status, self.body)
        elif exchange.method == "GET":
            self.streams.append(exchange)
            await exchange.events(event(b"", id="1"))
            await exchange.gone.wait()
        else:
            await results(exchange) if exchange.body else await exchange.respond(200)


@asynccontextmanager
async def forgotten(handle: Handler, server_side: Forgetful) -> AsyncIterator[tuple[Scripted, MessageChannel]]:
    """A client whose session the server forgets while its stream is open."""
    async with scripted(handle) as server, server.target().connect() as channel:
        await shake_hands(channel)
        await server.wait_for("GET")
        server_side.known = False
        yield server, channel


@pytest.mark.parametrize("body", [b"", b'{"jsonrpc":"2.0","id":"x","error":{"code":-32001,"message":"no session"}}'])
@pytest.mark.parametrize("method", ["tools/call", "tools/list", "resources/subscribe"])
async def test_after_a_404_for_its_session_it_shakes_hands_once_more(body: bytes, method: str) -> None:
    server_side = Forgetful()
    server_side.body = body
    async with scripted(server_side) as server, server.target().connect() as channel:
        await shake_hands(channel)
        await server.wait_for("GET")
        server_side.known = False
        await channel.send([request(1, method, modern=False)])
        forgotten, result = await receive(channel, 2)
        assert forgotten == Lost(None, "the server forgot the session; a new one was begun")
        assert result == Response(1, {})
        await server.wait_for("GET", 2)
        first, again = server.called("initialize")
        assert first.message["params"] == again.message["params"]
        assert first.id != again.id
        assert [each.headers["mcp-session-id"] for each in server.called(method)] == ["s1", "s2"]
        assert server.called("notifications/initialized")[1].headers["mcp-session-id"] == "s2"
        await server_side.streams[0].gone.wait()  # the stream of the old session is closed, the new one has its own
        assert not server_side.streams[1].gone.is_set()
    assert server.called("DELETE")[0].headers["mcp-session-id"] == "s2"


NO_SESSION = b'{"jsonrpc":"2.0","error":{"code":-32000,"message":"Bad Request: No valid session ID"},"id":null}'
WITH_ID = b'{"jsonrpc":"2.0","id":2,"error":{"code":-32000,"message":"Session not found"}}'


@pytest.mark.parametrize(
    ("status", "body"),
    [
        *((status, body) for status in (400, 401, 410) for body in (b"", NO_SESSION, WITH_ID)),
        (400, b"Invalid or missing session ID"),
    ],
)
async def test_a_session_that_worked_may_be_told_lost_by_other_statuses(status: int, body: bytes) -> None:
    server_side = Forgetful()
    server_side.status, server_side.body = status, body
    async with scripted(server_side) as server, server.target().connect() as channel:
        await shake_hands(channel)
        await server.wait_for("GET")
        await channel.send([request(1, modern=False)])
        assert await receive(channel) == [Response(1, {})]
        server_side.known = False
        await channel.send([request(2, modern=False)])
        assert Response(2, {}) in await receive(channel, 2)
        assert len(server.called("initialize")) == 2
        assert server.called("tools/call")[-1].headers["mcp-session-id"] == "s2"


@pytest.mark.parametrize("code", [-32602, -32600, -32000])
async def test_a_400_that_answers_the_request_leaves_the_session(code: int) -> None:
    error = {"code": code, "message": "no such argument"}

    async def then(exchange: Exchange) -> None:
        if exchange.called == "tools/call":
            await exchange.json({"jsonrpc": "2.0", "id": exchange.id, "error": error}, 400)
        else:
            await results(exchange)

    async with scripted(legacy(then)) as server, server.target().connect() as channel:
        await shake_hands(channel)
        await channel.send([request(1, "tools/list", modern=False), request(2, modern=False)])
        assert ErrorResponse(2, code, "no such argument") in await receive(channel, 2)
        assert len(server.called("initialize")) == 1


async def test_a_status_that_does_not_go_away_with_a_new_session_is_told(autojump_clock: object) -> None:
    async def then(exchange: Exchange) -> None:
        await (exchange.respond(400, b"not today") if exchange.called == "tools/call" else results(exchange))

    async with scripted(legacy(then)) as server, server.target().connect() as channel:
        await shake_hands(channel)
        await channel.send([request(1, "tools/list", modern=False)])
        assert await receive(channel) == [Response(1, {})]
        await channel.send([request(2, modern=False)])
        _, lost = await receive(channel, 2)
        assert isinstance(lost, Lost)
        assert "not today" in lost.message
        assert len(server.called("initialize")) == 2


async def test_many_requests_that_meet_the_loss_cause_one_handshake() -> None:
    server_side = Forgetful()
    async with scripted(server_side) as server, server.target().connect() as channel:
        await shake_hands(channel)
        await server.wait_for("GET")
        server_side.known = False
        await channel.send([request(n, modern=False) for n in range(1, 51)])
        found = await receive(channel, 51)
        assert sorted(each.id for each in found if isinstance(each, Response)) == list(range(1, 51))
        assert [each for each in found if isinstance(each, Lost)] == [found[0]]
        assert len(server.called("initialize")) == 2


async def test_a_session_may_be_forgotten_again_once_something_was_answered_in_it() -> None:
    server_side = Forgetful()
    async with scripted(server_side) as server, server.target().connect() as channel:
        await shake_hands(channel)
        await server.wait_for("GET")
        for n in range(1, 4):
            server_side.known = False
            await channel.send([request(n, modern=False)])
            assert Response(n, {}) in await receive(channel, 2)
        assert len(server.called("initialize")) == 4


async def test_a_session_that_is_forgotten_again_right_away_is_lost(autojump_clock: object) -> None:
    server_side = Forgetful()
    server_side.forgets_at_once = True
    async with scripted(server_side) as server, server.target().connect() as channel:
        await shake_hands(channel)
        await server.wait_for("GET")
        server_side.known = False
        await channel.send([request(1, modern=False)])
        _, lost = await receive(channel, 2)
        assert isinstance(lost, Lost)
        assert "404" in lost.message
        assert len(server.called("initialize")) == 2
        await channel.send([request(2, modern=False)])
        (lost,) = await receive(channel)
        assert isinstance(lost, Lost)
        assert "right after" in lost.message
        assert len(server.called("initialize")) == 2
        server_side.forgets_at_once = False
        await trio.sleep(10)
        await channel.send([request(3, modern=False)])
        assert Response(3, {}) in await receive(channel, 2)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (lambda exchange: exchange.respond(401), "credentials"),
        (lambda exchange: exchange.respond(200, b"{}", {"content-type": "application/json"}), "not answered"),
        (lambda exchange: exchange.result(welcome(V2025_03_26)), "no longer speaks"),
        (lambda exchange: exchange.gone.wait(), "too long"),
        (lambda exchange: exchange.events(), "not answered"),
    ],
)
async def test_where_no_new_session_can_be_begun_requests_are_lost(how: Any, why: str, autojump_clock: object) -> None:
    server_side = Forgetful(V2025_06_18)

    async def handle(exchange: Exchange) -> None:
        if exchange.called == "initialize" and server_side.sessions == 1:
            await how(exchange)
        else:
            await server_side(exchange)

    async with scripted(handle) as server, server.target().connect() as channel:
        await shake_hands(channel, V2025_06_18)
        await server.wait_for("GET")
        server_side.known = False
        await channel.send([request(n, modern=False) for n in range(1, 4)])
        for lost in await receive(channel, 3):
            assert isinstance(lost, Lost)
            assert "a new one could not be begun" in lost.message
            assert why in lost.message
        assert len(server.called("initialize")) == 2


@pytest.mark.parametrize("listens", [False, True])
async def test_a_server_that_is_away_for_a_moment_is_asked_for_a_new_session_again(
    listens: bool, autojump_clock: object
) -> None:
    """As while it is restarted: the old process still says 404, and the new one does not listen or is not ready yet."""
    server_side = Forgetful()
    away = True

    async def handle(exchange: Exchange) -> None:
        if away and exchange.called == "tools/call":
            server.refuse = not listens
            await exchange.respond(404, headers={"connection": "close"})
        elif away and server_side.sessions == 1 and exchange.called == "initialize":
            await exchange.respond(503)
        else:
            await server_side(exchange)

    async with forgotten(handle, server_side) as (server, channel):
        await channel.send([request(1, modern=False), request(2, modern=False)])
        await trio.sleep(0.1)
        server.refuse = away = False
        assert Lost(None, "the server forgot the session; a new one was begun") in await receive(channel, 3)
        await channel.send([request(3, modern=False)])
        assert await receive(channel) == [Response(3, {})]
        assert server_side.sessions == 2
        assert {each.headers["mcp-session-id"] for each in server.asked[-3:]} == {"s2"}


async def test_a_stream_that_ends_with_its_session_is_opened_in_the_next_one_however_long_that_takes(
    autojump_clock: object,
) -> None:
    server_side = Forgetful()
    restart = trio.Event()

    async def handle(exchange: Exchange) -> None:
        if exchange.method == "GET" and not restart.is_set():
            await exchange.events(event(b"", id="1"))
            await restart.wait()
            await exchange.finish()
        elif exchange.called == "initialize" and restart.is_set() and trio.current_time() < 30:
            await exchange.respond(503)
        else:
            await server_side(exchange)

    async with forgotten(handle, server_side) as (_, channel):
        restart.set()
        assert await receive(channel) == [Lost(None, "the server forgot the session; a new one was begun")]
        assert trio.current_time() >= 30
        await trio.sleep(1)
        assert [each.headers["mcp-session-id"] for each in server_side.streams] == ["s2"]


async def test_giving_up_a_request_while_the_hands_are_shaken_leaves_it_to_the_others(autojump_clock: object) -> None:
    server_side = Forgetful()

    async def handle(exchange: Exchange) -> None:
        if exchange.called == "initialize" and server_side.sessions == 1 and trio.current_time() < 5:
            await exchange.gone.wait()
        elif exchange.called == "notifications/cancelled":
            await exchange.respond(202)
        else:
            await server_side(exchange)

    async with forgotten(handle, server_side) as (server, channel):
        await channel.send([request(1, modern=False)])
        await server.wait_for("initialize", 2)
        await channel.send([request(2, modern=False)])
        await trio.sleep(6)
        await channel.send([cancellation(1)])
        assert Response(2, {}) in await receive(channel, 2)


async def test_a_notification_is_sent_in_the_new_session_and_an_answer_is_not() -> None:
    server_side = Forgetful()
    async with scripted(server_side) as server, server.target().connect() as channel:
        await shake_hands(channel)
        await server.wait_for("GET")
        server_side.known = False
        await channel.send([answer(5)])
        await server.wait_for("reply")
        await wait_all_tasks_blocked()
        assert len(server.called("initialize")) == 1
        await channel.send([notification("notifications/roots/list_changed")])
        assert (await server.wait_for("notifications/roots/list_changed", 2)).headers["mcp-session-id"] == "s2"
        assert len(server.called("reply")) == 1


async def test_a_404_without_a_session_is_just_that() -> None:
    async def then(exchange: Exchange) -> None:
        await exchange.respond(404)

    async with scripted(legacy(then, session=None)) as server, server.target().connect() as channel:
        await shake_hands(channel)
        await channel.send([request(1, modern=False)])
        (lost,) = await receive(channel)
        assert isinstance(lost, Lost)
        assert len(server.called("initialize")) == 1


async def test_a_refused_handshake_agrees_on_nothing() -> None:
    async def handle(exchange: Exchange) -> None:
        error = {"jsonrpc": "2.0", "id": exchange.id, "error": {"code": -32602, "message": "no"}}
        await exchange.json(error, mcp_session_id="s1")

    async with scripted(handle) as server, server.target().connect() as channel:
        await channel.send([request(0, "initialize", modern=False)])
        assert await receive(channel) == [ErrorResponse(0, -32602, "no")]
    assert server.calls == ["initialize"]
