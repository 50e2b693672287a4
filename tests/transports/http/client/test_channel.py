"""A client's channel over HTTP: turns, the end, what it leaves behind, and whole sessions over it."""

from __future__ import annotations

import gc
import logging
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from tests.transports.http.scripted import (
    Exchange,
    Handler,
    answer,
    cancellation,
    event,
    legacy,
    listening,
    notification,
    receive,
    reply_event,
    request,
    scripted,
    shake_hands,
    welcome,
)
from trimcp.client.client import Client
from trimcp.errors import ConnectionLost, InvalidReply, Overloaded, RemoteError
from trimcp.session.outgoing.listening import ToolsChanged
from trimcp.transports.http.client import posts as client_request
from trimcp.transports.http.client.policy import Timeouts
from trimcp.transports.http.client.target import HttpServer
from trimcp.wire.jsonrpc import ErrorResponse, Notification, Response
from trimcp.wire.revisions import V2025_11_25, V2026_07_28

pytestmark = pytest.mark.usefixtures("on_both_engines")

COMPLETE = {"resultType": "complete"}
CACHED = {**COMPLETE, "ttlMs": 0, "cacheScope": "private"}
TOOL = {"name": "t", "description": "d", "inputSchema": {"type": "object"}}
DISCOVERED = {
    "supportedVersions": [V2026_07_28.name],
    "capabilities": {"tools": {"listChanged": True}, "resources": {"subscribe": True}},
    **CACHED,
}


async def results(exchange: Exchange) -> None:
    await (exchange.result() if "id" in exchange.message else exchange.respond(202))


async def until_gone(exchange: Exchange) -> None:
    await exchange.gone.wait()


# Turns


async def test_no_more_requests_are_under_way_than_is_said(autojump_clock: object) -> None:
    under_way = most = 0

    async def handle(exchange: Exchange) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await trio.sleep(1)
        under_way -= 1
        await exchange.result()

    async with scripted(handle) as server, server.target(max_posts=10).connect() as channel:
        with assert_checkpoints():
            await channel.send([request(n) for n in range(100)])
        assert trio.current_time() == 0
        found = await receive(channel, 100)
        assert sorted(each.id for each in found) == list(range(100))
        assert most == 10
        assert trio.current_time() == 10


async def test_a_cancellation_passes_those_that_wait(autojump_clock: object) -> None:
    async with scripted(until_gone) as server, server.target(max_posts=2).connect() as channel:
        await channel.send([request(n) for n in range(10)])
        await server.wait_for("tools/call", 2)
        first = server.asked[0]
        await channel.send([cancellation(5), cancellation(first.id)])
        await first.gone.wait()
        await server.wait_for("tools/call", 3)
        await channel.send([cancellation(n) for n in range(10)])
        await wait_all_tasks_blocked()
        assert 5 not in [each.id for each in server.asked]  # it had not had its turn, so it was never sent
        assert all(each.gone.is_set() for each in server.asked)


async def test_listening_takes_no_turn(autojump_clock: object) -> None:
    async def handle(exchange: Exchange) -> None:
        await (exchange.gone.wait() if exchange.called == "subscriptions/listen" else exchange.result())

    async with scripted(handle) as server, server.target(max_posts=1).connect() as channel:
        await channel.send([request(n, "subscriptions/listen") for n in range(5)])
        await channel.send([request(9)])
        assert await receive(channel) == [Response(9, {})]
        await channel.send([cancellation(n) for n in range(5)])
        await channel.send([request(10), request(11)])
        assert len(await receive(channel, 2)) == 2


@pytest.mark.parametrize("bound", ["_WAITING", "_WAITING_BYTES"])
async def test_too_many_that_wait_are_refused_and_not_waited_for(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_request, bound, 3 if bound == "_WAITING" else 3 * len(request(1).data) - 1)
    async with scripted(until_gone) as server, server.target(max_posts=1).connect() as channel:
        await channel.send([request(n) for n in range(1, 7)])
        refused = await receive(channel, 2)
        assert [(each.id, each.code) for each in refused if isinstance(each, ErrorResponse)] == [(5, 1001), (6, 1001)]


@pytest.mark.slow
async def test_a_great_many_at_once_are_all_answered() -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.result({"n": exchange.id})

    async with scripted(handle) as server, server.target().connect() as channel:
        await channel.send([request(n) for n in range(1_000)])
        answered: dict[Any, Any] = {}
        while len(answered) < 1_000:
            for message in await receive(channel):
                assert isinstance(message, Response)
                assert message.id not in answered
                answered[message.id] = message.result["n"]
        assert all(id == n for id, n in answered.items())
        assert server.connections <= 256


KERNEL = sum(int(Path("/proc/sys/net/ipv4", name).read_text().split()[-1]) for name in ("tcp_rmem", "tcp_wmem"))
"""Bytes to which the buffers of two connected sockets may grow."""


async def test_what_arrives_is_held_back_while_nobody_receives() -> None:
    """Streams wait, and with them, in the end, the server."""
    written = 0

    async def handle(exchange: Exchange) -> None:
        nonlocal written
        await exchange.events()
        note = event({"jsonrpc": "2.0", "method": "n", "params": {"x": "y" * 10_000}})
        while True:
            await exchange.write(note)
            written += len(note)

    async with listening(handle) as (_, port), HttpServer(f"http://127.0.0.1:{port}/").connect() as channel:
        await channel.send([request(1)])
        before = -1
        while before != written:
            before = written
            await wait_all_tasks_blocked(0.05)
        assert written < 8 * 1024 * 1024 + KERNEL
        for _ in range(3):
            assert sum(each.size for each in await channel.receive()) < 5 * 1024 * 1024


# The end


async def test_one_task_sends_and_one_receives() -> None:
    async with (
        scripted(until_gone) as server,
        server.target(mode="sse").connect() as channel,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(channel.receive)
        nursery.start_soon(channel.send, [request(1, modern=False)])
        await wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await channel.send([request(2)])
        with pytest.raises(trio.BusyResourceError):
            await channel.receive()
        nursery.cancel_scope.cancel()


async def test_closing_gives_up_everything_and_ends_the_session() -> None:
    async def then(exchange: Exchange) -> None:
        await exchange.events(event(b"", id="1"))
        await exchange.gone.wait()

    async with scripted(legacy(then, get=then)) as server, server.target().connect() as channel:
        await shake_hands(channel)
        await channel.send([request(1, modern=False), request(2, modern=False)])
        await server.wait_for("tools/call", 2)
        await server.wait_for("GET")
        with assert_checkpoints():
            await channel.aclose()
        await wait_all_tasks_blocked()
        assert all(each.gone.is_set() for each in server.asked if each.called in ("tools/call", "GET"))
        ended = server.called("DELETE")[0]
        assert ended.headers["mcp-session-id"] == "s1"
        assert ended.headers["mcp-protocol-version"] == V2025_11_25.name
        for _ in range(2):
            with pytest.raises(trio.ClosedResourceError):
                await channel.send([request(3)])
            with pytest.raises(trio.ClosedResourceError):
                await channel.receive()
        with assert_checkpoints():
            await channel.aclose()
        assert len(server.called("DELETE")) == 1


@pytest.mark.parametrize(
    "how", [until_gone, lambda exchange: exchange.respond(405), lambda exchange: exchange.events()]
)
async def test_the_end_of_the_session_takes_a_second_at_most_and_is_said_even_when_cancelled(
    how: Handler, autojump_clock: object
) -> None:
    async def handle(exchange: Exchange) -> None:
        await (how(exchange) if exchange.method == "DELETE" else legacy(results)(exchange))

    async with scripted(handle) as server:
        with trio.move_on_after(10) as scope:
            async with server.target(timeouts=Timeouts(close=0.7)).connect() as channel:
                await shake_hands(channel)
                await trio.sleep_forever()
        assert scope.cancelled_caught
        assert trio.current_time() == pytest.approx(10.7 if how is until_gone else 10)
        assert len(server.called("DELETE")) == 1


async def test_what_is_sent_while_a_cancellation_ends_the_channel_breaks_in_trios_words() -> None:
    async with scripted(legacy(results)) as server:
        with trio.CancelScope() as scope:
            async with server.target().connect() as channel:
                await shake_hands(channel)
                scope.cancel()
                with trio.CancelScope(shield=True):
                    await wait_all_tasks_blocked()
                    for late in (request(1), notification("notifications/roots/list_changed"), answer(2)):
                        with pytest.raises(trio.BrokenResourceError):
                            await channel.send([late])
        assert scope.cancelled_caught


async def test_what_the_body_raises_comes_out_as_itself() -> None:
    async with scripted(results) as server:
        with pytest.raises(ZeroDivisionError):
            async with server.target().connect() as channel:
                await channel.send([request(1)])
                raise ZeroDivisionError
        with pytest.raises(KeyError):
            async with server.target().connect() as channel:
                await channel.aclose()
                raise KeyError


@pytest.mark.parametrize("mode", ["auto", "sse"])
async def test_nothing_of_it_waits_for_a_garbage_collection(mode: str) -> None:
    async with scripted(legacy(results)) as server:
        target = server.target(mode=mode)
        gc.collect()
        gc.disable()
        try:
            async with target.connect() as channel:
                if mode == "auto":
                    await shake_hands(channel)
                    await channel.send([request(1, modern=False)])
                    await receive(channel)
                gone = weakref.ref(channel)
            del channel
            await wait_all_tasks_blocked()
            assert gone() is None
        finally:
            gc.enable()


async def test_sockets_are_closed(steady_clock: trio.abc.Clock) -> None:
    async with listening(legacy(results)) as (server, port):
        async with HttpServer(f"http://127.0.0.1:{port}/").connect() as channel:
            await shake_hands(channel)
            await channel.send([request(n, modern=False) for n in range(20)])
            await receive(channel, 20)
        with trio.fail_after(5):
            while server.open:
                await server.changed.park()


# Whole sessions


async def modern(exchange: Exchange) -> None:
    if exchange.called == "server/discover":
        await exchange.result(DISCOVERED)
    elif exchange.called == "tools/list":
        await exchange.result({"tools": [TOOL], **CACHED})
    else:
        await exchange.result({"content": [], **COMPLETE})


async def test_a_session_of_the_modern_era() -> None:
    async with scripted(modern) as server, Client("c").connect(server.target()) as session:
        assert session.revision is V2026_07_28
        await session.call_tool("t", {})
        assert all(each.headers["mcp-protocol-version"] == V2026_07_28.name for each in server.asked)
        assert [each.headers["mcp-method"] for each in server.asked] == server.calls
    assert all(each.method == "POST" for each in server.asked)


@pytest.mark.parametrize(
    "probe",
    [
        lambda exchange: exchange.respond(400),
        lambda exchange: exchange.respond(404, b"<html>"),
        lambda exchange: exchange.respond(405),
        lambda exchange: exchange.respond(500),
        lambda exchange: exchange.respond(202),
        lambda exchange: exchange.json({"jsonrpc": "2.0", "id": "x", "error": {"code": -32600, "message": "no"}}, 400),
        lambda exchange: exchange.json({"jsonrpc": "2.0", "id": exchange.id, "error": {"code": -32601, "message": ""}}),
        lambda exchange: exchange.events(),
    ],
)
async def test_a_server_that_does_not_understand_the_probe_is_met_on_the_same_connection(
    probe: Handler, autojump_clock: object
) -> None:
    async def handle(exchange: Exchange) -> None:
        await (probe if exchange.called == "server/discover" else legacy(modern))(exchange)

    client = Client("c")
    async with scripted(handle) as server:
        target = server.target()
        for _ in range(2):
            async with client.connect(target) as session:
                assert session.revision is V2025_11_25
                await session.call_tool("t", {})
        assert len(server.called("initialize")) == 2
        probes = [n for n, called in enumerate(server.calls) if called == "server/discover"]
        assert max(probes) < server.calls.index("initialize")  # what era it is of is remembered


async def test_a_modern_server_that_refuses_the_probe_is_not_taken_for_an_old_one() -> None:
    async def handle(exchange: Exchange) -> None:
        error = {"code": -32022, "message": "no", "data": {"supported": ["2099-01-01"], "requested": "x"}}
        await exchange.json({"jsonrpc": "2.0", "id": exchange.id, "error": error}, 400)

    async with scripted(handle) as server:
        with pytest.raises(InvalidReply, match="2099-01-01"):
            async with Client("c").connect(server.target()):
                pass
        assert server.calls == ["server/discover"]


async def test_a_server_that_wants_another_modern_revision_is_asked_again() -> None:
    """The conformance suite refuses the very first request in this way."""

    async def handle(exchange: Exchange) -> None:
        if len(server.asked) == 1:
            error = {"code": -32022, "message": "no", "data": {"supported": [V2026_07_28.name], "requested": "x"}}
            await exchange.json({"jsonrpc": "2.0", "id": exchange.id, "error": error}, 400)
        else:
            await modern(exchange)

    async with scripted(handle) as server, Client("c").connect(server.target()) as session:
        assert session.revision is V2026_07_28
        assert server.calls == ["server/discover", "server/discover"]


async def test_a_pinned_modern_revision_fails_for_what_was_met(autojump_clock: object) -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.respond(401)

    async with scripted(handle) as server:
        with pytest.raises(ConnectionLost, match=r"server/discover was not answered: .*401 Unauthorized.*credentials"):
            async with Client("c").connect(server.target(), revision=V2026_07_28):
                pytest.fail("nobody may come in")
        server.refuse = True
        with pytest.raises(ConnectionLost, match=re.escape(server.refusal)):
            async with Client("c").connect(server.target(), revision=V2026_07_28):
                pytest.fail("there is nobody")


@pytest.mark.parametrize(("status", "why"), [(401, "credentials"), (403, "does not allow"), (404, "HTTP\\+SSE either")])
async def test_a_server_that_lets_nobody_in_says_why(status: int, why: str) -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.respond(status)

    async with scripted(handle) as server:
        with pytest.raises(ConnectionLost, match=why):
            async with Client("c").connect(server.target()):
                pass


async def test_a_server_that_is_not_there_is_named(autojump_clock: object) -> None:
    async with scripted(results) as server:
        server.refuse = True
        with pytest.raises(ConnectionLost, match=re.escape(server.refusal)):
            async with Client("c").connect(server.target("http://server.test/secret/mcp?key=1")):
                pass
        assert trio.current_time() < 3
    async with listening(results) as (_, port):
        pass
    with pytest.raises(ConnectionLost, match=rf"cannot connect to http://127\.0\.0\.1:{port}: Connection refused; is"):
        async with Client("c").connect(HttpServer(f"http://127.0.0.1:{port}/secret/mcp?key=1")):
            pass


async def test_a_server_that_answers_everything_with_a_result_is_survived(caplog: pytest.LogCaptureFixture) -> None:
    """The conformance suite's mock for `initialize` does, to notifications as well, and refuses every GET with 400."""
    caplog.set_level(logging.INFO, "trimcp")

    async def handle(exchange: Exchange) -> None:
        if not exchange.body:
            error = {"jsonrpc": "2.0", "error": {"code": -32700, "message": "Parse error"}}
            await exchange.json(error, 400)
        elif exchange.called == "initialize":
            await exchange.result(welcome())
        elif exchange.called == "tools/list":
            await exchange.result({"tools": []})
        else:
            await exchange.json(
                {"jsonrpc": "2.0", **({"id": exchange.id} if "id" in exchange.message else {}), "result": {}}
            )

    async with scripted(handle) as server, Client("c").connect(server.target()) as session:
        assert await session.list_tools() == []
        await server.wait_for("GET")
        await wait_all_tasks_blocked()
    assert server.calls == ["server/discover", "initialize", "notifications/initialized", "GET", "tools/list"]
    assert caplog.text == ""


async def test_a_stream_that_is_resumed_as_the_conformance_suite_wants_it(autojump_clock: object) -> None:
    """Its scenario sse-retry times the last GET of all, so no other may come late."""
    pending: list[int] = []
    events = 0

    async def handle(exchange: Exchange) -> None:
        nonlocal events
        events += 1
        prime = event(b"", id=f"event-{events}", retry=500)
        if exchange.method == "GET":
            await exchange.events(prime)
            if pending:
                await exchange.write(
                    reply_event(pending.pop(), {"content": [{"type": "text", "text": "done"}]}, id="x")
                )
            await exchange.gone.wait()
        elif exchange.called == "tools/call":
            pending.append(exchange.id)
            await exchange.events(prime)
            await trio.sleep(0.05)
            await exchange.finish()
        else:
            await legacy(modern)(exchange)

    async with scripted(handle) as server, Client("c", revisions=[V2025_11_25]).connect(server.target()) as session:
        result = await session.call_tool("t", {})
        assert result.content[0].text == "done"
        first, last = server.called("GET")
        assert first.at == 0
        assert last.at == pytest.approx(0.55)
        assert last.headers["last-event-id"].startswith("event-")


async def test_one_cut_reply_does_not_end_the_connection(autojump_clock: object) -> None:
    async def handle(exchange: Exchange) -> None:
        if exchange.called == "tools/call" and len(server.called("tools/call")) == 1:
            await exchange.events()
        else:
            await modern(exchange)

    async with scripted(handle) as server, Client("c").connect(server.target()) as session:
        with pytest.raises(ConnectionLost, match="ended before the answer"):
            await session.call_tool("t", {})
        await session.call_tool("t", {})


async def test_a_busy_server_is_told_apart() -> None:
    async def handle(exchange: Exchange) -> None:
        if exchange.called == "tools/call":
            error = {"code": 1001, "message": "too much under way"}
            await exchange.json({"jsonrpc": "2.0", "id": exchange.id, "error": error}, 503)
        else:
            await modern(exchange)

    async with scripted(handle) as server, Client("c").connect(server.target()) as session:
        with pytest.raises(Overloaded):
            await session.call_tool("t", {})


async def test_giving_a_call_up_closes_its_stream(autojump_clock: object) -> None:
    async def handle(exchange: Exchange) -> None:
        await (until_gone(exchange) if exchange.called == "tools/call" else modern(exchange))

    async with scripted(handle) as server, Client("c").connect(server.target()) as session:
        with trio.move_on_after(5):
            await session.call_tool("t", {})
        assert trio.current_time() == 5
        with trio.fail_after(0.1):
            await server.called("tools/call")[0].gone.wait()
        assert "notifications/cancelled" not in server.calls


@pytest.mark.parametrize("cut", [True, False])
async def test_a_subscription_lives_and_ends_with_its_stream(cut: bool, autojump_clock: object) -> None:
    end = trio.Event()

    async def handle(exchange: Exchange) -> None:
        if exchange.called != "subscriptions/listen":
            return await modern(exchange)
        meta = {"_meta": {"io.modelcontextprotocol/subscriptionId": exchange.id}}
        acknowledged = {"notifications": {"toolsListChanged": True}, **meta}
        await exchange.events(
            event({"jsonrpc": "2.0", "method": "notifications/subscriptions/acknowledged", "params": acknowledged}),
            event({"jsonrpc": "2.0", "method": "notifications/tools/list_changed", "params": meta}),
        )
        await end.wait()
        if cut:
            return None
        await exchange.write(reply_event(exchange.id, COMPLETE))
        return await exchange.finish()

    async with (
        scripted(handle) as server,
        Client("c").connect(server.target()) as session,
        session.listen(tools=True) as changes,
    ):
        assert await changes.receive() == ToolsChanged()
        end.set()
        with pytest.raises(ConnectionLost if cut else trio.EndOfChannel):
            await changes.receive()


async def test_a_forgotten_session_ends_subscriptions_and_nothing_else() -> None:
    known = True
    sessions = 0

    async def handle(exchange: Exchange) -> None:
        nonlocal sessions, known
        if exchange.called == "initialize":
            sessions += 1
            known = True
            await exchange.result(welcome(), mcp_session_id=f"s{sessions}")
        elif exchange.called == "notifications/initialized":
            await exchange.respond(202)
        elif not known:
            await exchange.respond(404)
        elif exchange.called == "tools/call":
            await exchange.result({"content": []})
        else:
            await exchange.result({}) if exchange.body else await exchange.respond(405)

    client = Client("c", revisions=[V2025_11_25])
    async with scripted(handle) as server, client.connect(server.target()) as session:
        async with session.listen(resources=["a://b"]) as changes:
            known = False
            await session.call_tool("t", {})
            with pytest.raises(ConnectionLost, match="forgot the session"):
                await changes.receive()
        await session.call_tool("t", {})
        assert sessions == 2


async def test_a_refusal_in_a_tool_call_is_an_error_of_the_servers() -> None:
    async def handle(exchange: Exchange) -> None:
        if exchange.called == "tools/call":
            error = {"code": -32602, "message": "wrong"}
            await exchange.json({"jsonrpc": "2.0", "id": exchange.id, "error": error}, 400)
        else:
            await modern(exchange)

    async with scripted(handle) as server, Client("c").connect(server.target()) as session:
        with pytest.raises(RemoteError, match="wrong"):
            await session.call_tool("t", {})


async def test_the_trace_shows_messages_and_no_headers() -> None:
    lines: list[str] = []
    async with scripted(legacy(results)) as server:
        target = server.target(trace=lines.append, headers={"authorization": "Bearer secret"})
        async with target.connect() as channel:
            assert channel.mirrors_headers
            await channel.send([request(0, "initialize", modern=False), notification("n")])
            assert isinstance((await receive(channel))[0], Response | Notification)
    assert [line.split()[1] for line in lines] == ["-->", "-->", "<--"]
    assert "secret" not in "".join(lines)


@pytest.mark.parametrize(
    "body", [b"", b'{"jsonrpc":"2.0","id":"x","error":{"code":-32600,"message":"check the path"}}']
)
@pytest.mark.parametrize("revision", [None, V2025_11_25, V2026_07_28], ids=str)
async def test_a_path_where_nothing_is_is_named_with_its_status(
    body: bytes, revision: Any, autojump_clock: object
) -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.respond(404, body)

    async with scripted(handle) as server:
        target = server.target("http://me:secret@server.test/v1/key0123456789?token=secret")
        with pytest.raises(ConnectionLost, match=r"404 Not Found at http://server\.test/v1/\.\.\.") as caught:
            async with Client("c").connect(target, revision=revision):
                pytest.fail("there is nothing")
        assert "secret" not in str(caught.value)
        assert ("check the path" in str(caught.value)) == bool(body)
