"""HTTP exchanges over httpx2 on Trio: bounds, failures, redirects, cancellation, sockets, and what is never logged."""

from __future__ import annotations

import gzip
import logging
import re
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.transports.http.scripted import URL, Exchange, Handler, Scripted, engine, exchanges_with, listening, scripted
from tests.transports.websocket_support import turns_of
from trimcp.transports.http.client.engine import ExchangeBroken
from trimcp.transports.http.client.exchanges import Http, OpenReply, TooLarge
from trimcp.transports.http.client.policy import Timeouts
from trimcp.transports.http.client.target import HttpServer
from trimcp.transports.targets import origin, resolved

pytestmark = pytest.mark.usefixtures("on_both_engines")

MEGABYTE = 1024 * 1024


@asynccontextmanager
async def http_to(handler: Handler, **settings: object) -> AsyncIterator[tuple[Http, Scripted]]:
    async with scripted(handler) as server, server.target(**settings).exchanges() as http:
        yield http, server


async def ok(exchange: Exchange) -> None:
    await exchange.respond(200, b"fine")


async def test_a_reply_is_a_status_headers_and_a_body() -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.respond(201, b"body", {"content-type": "Application/JSON; charset=utf-8", "x-one": "1"})

    async with http_to(handle, headers={"X-Key": "k"}) as (http, server):
        async with http.open("POST", {"x-two": "2"}, b"sent") as reply:
            assert (reply.status, reply.content_type) == (201, "application/json")
            assert (reply.header("x-one"), reply.header("x-none")) == ("1", "")
            assert await reply.body(100) == b"body"
        asked = server.asked[0]
        assert (asked.body, asked.headers["x-key"], asked.headers["x-two"]) == (b"sent", "k", "2")
        assert asked.headers["user-agent"] == "trimcp"
        assert http.last_status == "201 Created"


async def test_a_connection_is_used_again() -> None:
    async with http_to(ok) as (http, server):
        for _ in range(3):
            async with http.open("GET", {}) as reply:
                await reply.body(100)
        assert server.connections == 1


async def test_a_body_larger_than_announced_or_allowed_is_refused() -> None:
    async def handle(exchange: Exchange) -> None:
        if exchange.target == "/length":
            await exchange.respond(200, b"x" * 101)
        else:
            await exchange.start(200)
            for _ in range(100):
                await exchange.write(b"x" * 10)
            await exchange.finish()

    async with http_to(handle) as (http, _):
        for path in ("/length", "/chunked"):
            async with http.open("GET", {}, url=http.resolve(path)) as reply:
                with pytest.raises(TooLarge):
                    await reply.body(100)


async def test_a_body_in_tiny_chunks_lets_others_in_between() -> None:
    async def serve(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        # Some come with the head, before anybody counts turns.
        await stream.send_all(head + b"1\r\nx\r\n" * 5_050 + b"0\r\n\r\n")

    async with trio.open_nursery() as nursery:
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        async with exchanges_with(f"http://127.0.0.1:{listener.socket.getsockname()[1]}/mcp") as http:
            for leave in (False, True):
                async with http.open("GET", {}) as reply:
                    if not leave:

                        async def read(reply: OpenReply = reply) -> None:
                            assert await reply.body(5_050) == b"x" * 5_050

                        assert await turns_of(read) >= 5_000 / 16
                    else:

                        async def abandon(reply: OpenReply = reply) -> None:
                            async with reply.chunks() as chunks:
                                assert 1 <= len(await anext(chunks)) <= 16

                        if engine.get() == "httpx2":
                            assert await turns_of(abandon) >= 5_000 / 16
                        else:  # what was not read is not parsed either
                            await abandon()
                            assert http.statistics().in_use == 0
        nursery.cancel_scope.cancel()


async def test_a_small_body_that_unpacks_to_a_huge_one_costs_little() -> None:
    bomb = gzip.compress(bytes(100 * MEGABYTE))
    assert len(bomb) < 200_000

    async def handle(exchange: Exchange) -> None:
        await exchange.respond(200, bomb, {"content-encoding": "GZip"})

    async with http_to(handle) as (http, _):
        tracemalloc.start()
        try:
            async with http.open("GET", {}) as reply:
                with pytest.raises(TooLarge):
                    await reply.body(2 * MEGABYTE)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 8 * MEGABYTE


async def test_a_compressed_body_is_unpacked() -> None:
    data = bytes(range(256)) * 10_000

    async def handle(exchange: Exchange) -> None:
        assert exchange.headers["accept-encoding"] == "gzip"
        await exchange.respond(200, gzip.compress(data), {"content-encoding": "gzip"})

    async with http_to(handle) as (http, _), http.open("GET", {}) as reply:
        assert await reply.body(3 * MEGABYTE) == data


@pytest.mark.parametrize("coding", ["gzip", "gzip, gzip", "br", "deflate"])
async def test_what_is_not_compressed_as_it_says_or_as_was_asked_is_a_cut(coding: str) -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.respond(200, b"no gzip", {"content-encoding": coding})

    async with http_to(handle) as (http, _), http.open("GET", {}) as reply:
        with pytest.raises(ExchangeBroken):
            await reply.body(100)


# Failures


async def test_a_refused_connection_has_sent_nothing() -> None:
    async with http_to(ok) as (http, server):
        server.refuse = True
        with pytest.raises(ExchangeBroken, match=re.escape(server.refusal)) as caught:
            async with http.open("POST", {}, b"x"):
                pass
        assert caught.value.nothing_sent


@pytest.mark.parametrize("half", [True, False])
async def test_a_connection_that_is_cut_may_have_done_anything(half: bool) -> None:
    async def handle(exchange: Exchange) -> None:
        if half:
            await exchange.start(200, {"content-length": "10"})
            await exchange.write(b"12345")
        exchange.answered = True

    async with http_to(handle) as (http, _):
        with pytest.raises(ExchangeBroken, match="broke") as caught:
            async with http.open("POST", {}, b"x") as reply:
                await reply.body(100)
        assert not caught.value.nothing_sent


async def test_what_is_no_http_is_a_cut_and_quoted_harmlessly() -> None:
    async def babble(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some(1000)
            await stream.send_all(b"\x1b[31m \xff nonsense\n" * 100)

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, babble, [listener])
        async with exchanges_with(f"http://127.0.0.1:{listener.socket.getsockname()[1]}/") as http:
            with pytest.raises(ExchangeBroken) as caught:
                async with http.open("GET", {}):
                    pass
        assert caught.value.why.isascii()
        assert caught.value.why.isprintable()
        assert len(caught.value.why) < 400
        nursery.cancel_scope.cancel()


async def test_silence_is_borne_as_long_as_is_said(autojump_clock: object) -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.start(200)
        await exchange.write(b"x")
        await exchange.gone.wait()

    async with http_to(handle, timeouts=Timeouts(silence=20)) as (http, _):
        async with http.open("GET", {}) as reply:
            with pytest.raises(ExchangeBroken, match="silent for too long"):
                await reply.body(100)
        assert trio.current_time() == pytest.approx(20)


async def test_headers_without_end_are_a_cut() -> None:
    async def babble(stream: trio.SocketStream) -> None:
        async with stream:
            try:
                await stream.receive_some(1000)
                await stream.send_all(b"HTTP/1.1 200 OK\r\n")
                while True:
                    await stream.send_all(b"x: " + b"y" * 60_000 + b"\r\n")
            except trio.BrokenResourceError:
                pass

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, babble, [listener])
        async with exchanges_with(f"http://127.0.0.1:{listener.socket.getsockname()[1]}/") as http:
            with pytest.raises(ExchangeBroken):
                async with http.open("GET", {}):
                    pass
        nursery.cancel_scope.cancel()


# Cancellation


@pytest.mark.parametrize("started", [True, False])
async def test_cancelling_cuts_the_connection(started: bool, autojump_clock: object) -> None:
    async def handle(exchange: Exchange) -> None:
        if started:
            await exchange.start(200)
        await exchange.gone.wait()

    async with http_to(handle) as (http, server):
        with trio.move_on_after(5) as scope:
            async with http.open("POST", {}, b"x") as reply:
                await reply.body(100)
        assert scope.cancelled_caught
        with trio.fail_after(1):
            await server.asked[0].gone.wait()
        await wait_all_tasks_blocked()
        statistics = http.statistics()
        assert (statistics.client, statistics.in_use, statistics.connections or 0) == (engine.get(), 0, 0)


async def test_leaving_a_stream_early_cuts_its_connection_and_no_other() -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.start(200)
        await exchange.write(b"x")
        await exchange.gone.wait()

    async with http_to(handle) as (http, server), http.open("GET", {}) as first:
        async with http.open("GET", {}) as second, second.chunks() as chunks:
            assert await anext(chunks) == b"x"
        await server.asked[1].gone.wait()
        assert not server.asked[0].gone.is_set()
        async with first.chunks() as chunks:
            assert await anext(chunks) == b"x"


async def test_more_connections_than_any_pool_has_by_default(steady_clock: trio.abc.Clock) -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.start(200)
        await exchange.write(b"x")
        await exchange.gone.wait()

    async def hold(http: Http) -> None:
        async with http.open("GET", {}) as reply, reply.chunks() as chunks:
            await anext(chunks)
            await trio.sleep_forever()

    async with (
        listening(handle) as (server, port),
        exchanges_with(f"http://127.0.0.1:{port}/") as http,
        trio.open_nursery() as nursery,
    ):
        for _ in range(150):
            nursery.start_soon(hold, http)
        with trio.fail_after(20):
            await server.wait_for("GET", 150)
        nursery.cancel_scope.cancel()


async def test_written_is_called_when_the_request_has_left(autojump_clock: object) -> None:
    async def handle(exchange: Exchange) -> None:
        await trio.sleep(5)
        await exchange.respond(200)

    written: list[float] = []
    async with (
        http_to(handle) as (http, _),
        http.open("POST", {}, b"x", written=lambda: written.append(trio.current_time())),
    ):
        assert trio.current_time() == 5
    assert written == [0]


# Redirects


def redirecting(status: int, to: str) -> Handler:
    async def handle(exchange: Exchange) -> None:
        if exchange.target == "/mcp":
            await exchange.respond(status, b"gone", {"location": to})
        else:
            await exchange.respond(200, exchange.body)

    return handle


@pytest.mark.parametrize("status", [301, 307, 308])
@pytest.mark.parametrize("to", ["/mcp/", "http://server.test/mcp/", "http://server.test:80/mcp/", "?x=1"])
async def test_a_redirect_within_the_origin_is_followed(status: int, to: str) -> None:
    async with http_to(redirecting(status, to), headers={"authorization": "Bearer x"}) as (http, server):
        for _ in range(2):
            async with http.open("POST", {}, b"sent") as reply:
                assert (reply.status, await reply.body(100)) == (200, b"sent")
        assert server.asked[1].headers["authorization"] == "Bearer x"
        # What moved for good is not asked for at its old place again.
        assert len(server.asked) == (4 if status == 307 else 3)


@pytest.mark.parametrize("status", [302, 303])
async def test_a_redirect_that_would_turn_a_post_into_a_get_is_not_followed(status: int) -> None:
    async with http_to(redirecting(status, "/other")) as (http, server):
        async with http.open("POST", {}, b"sent") as reply:
            assert (reply.status, reply.elsewhere) == (status, None)
            assert "points to 'http://server.test/other'" in reply.refusal()
        async with http.open("GET", {}) as reply:
            assert reply.status == 200
        assert len(server.asked) == 3


@pytest.mark.parametrize(
    "to", ["https://server.test/mcp", "http://other.test/mcp", "http://server.test:81/", "//user:pw@other.test/x"]
)
async def test_nothing_is_sent_to_another_origin(to: str) -> None:
    async with http_to(redirecting(307, to), headers={"authorization": "Bearer x"}) as (http, server):
        async with http.open("POST", {}, b"sent") as reply:
            assert reply.status == 307
            assert reply.elsewhere is not None
            assert "user" not in reply.elsewhere
            assert "nothing is sent" in reply.refusal()
        assert len(server.asked) == 1


async def test_redirects_end() -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.respond(307, b"", {"location": "/mcp"})

    async with http_to(handle) as (http, server):
        async with http.open("POST", {}, b"x") as reply:
            assert reply.status == 307
        assert len(server.asked) == 4


@pytest.mark.parametrize("location", ["http://[", "\x7f", "javascript:x", "mailto:a@b", "http://" + "a" * 70000])
def test_a_redirect_to_nowhere_is_no_redirect(location: str) -> None:
    target = resolved(location, URL)
    assert target is None or origin(target) != origin(URL)


async def test_a_client_of_ones_own_is_not_closed_and_follows_no_redirects_either() -> None:
    async with scripted(redirecting(307, "http://other.test/")) as server:
        client = server.client()
        client.follow_redirects = True
        async with client:
            for _ in range(2):
                target = HttpServer("http://server.test/mcp", client=client)
                async with target.exchanges() as http, http.open("GET", {}) as reply:
                    assert reply.status == 307
        assert len(server.asked) == 2


# Sockets and secrets


async def test_a_unix_socket_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    async with HttpServer("http://localhost/mcp", uds=path).exchanges() as http:
        with pytest.raises(
            ExchangeBroken, match=f"cannot connect to the socket '{path}': No such file or directory; is the"
        ):
            async with http.open("GET", {}):
                pass


async def test_over_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "server.sock")
    async with trio.open_nursery() as nursery:
        server = Scripted(ok)
        sock = trio.socket.socket(trio.socket.AF_UNIX)
        await sock.bind(path)
        sock.listen(5)
        nursery.start_soon(trio.serve_listeners, server.serve, [trio.SocketListener(sock)])
        for target in (
            HttpServer("http://some.name/mcp", uds=path),
            HttpServer(f"http+unix://{path.replace('/', '%2F')}/mcp"),
        ):
            async with target.exchanges() as http, http.open("GET", {}) as reply:
                assert await reply.body(10) == b"fine"
        assert [each.headers["host"] for each in server.asked] == ["some.name", "localhost"]
        nursery.cancel_scope.cancel()


async def test_no_proxy_stands_between_us_and_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    async with (
        listening(ok) as (_, port),
        exchanges_with(f"http://127.0.0.1:{port}/") as http,
        http.open("GET", {}) as reply,
    ):
        assert reply.status == 200
    async with HttpServer("http://server.invalid/").exchanges() as http:
        with pytest.raises(ExchangeBroken, match="cannot connect"):  # to the proxy, which is not there
            async with http.open("GET", {}):
                pass


async def test_credentials_in_the_url_are_sent_as_such_and_go_nowhere_else() -> None:
    async with scripted(redirecting(307, "/other")) as server:
        target = server.target("http://alice:s3cret@server.test/mcp")
        async with target.exchanges() as http, http.open("GET", {}) as reply:
            assert reply.status == 200
        assert {each.headers["authorization"] for each in server.asked} == {"Basic YWxpY2U6czNjcmV0"}
        assert "s3cret" not in str(http.url)


async def test_nothing_secret_is_logged_at_any_level(caplog: pytest.LogCaptureFixture) -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.respond(200, b"", {"mcp-session-id": "the-session", "set-cookie": "the=cookie"})

    caplog.set_level(logging.DEBUG)
    async with http_to(handle, headers={"authorization": "the-key"}) as (http, server):
        url = http.resolve("/messages?session_id=the-session")
        async with http.open("POST", {"mcp-session-id": "the-session"}, b"the-body", url=url):
            pass
        assert len(server.asked) == 1
        text = caplog.text
        for secret in ("the-session", "the=cookie", "the-key", "the-body"):
            assert secret not in text
        if engine.get() == "httpx2":
            assert "send_request_body" in text  # it is not that nothing is logged
            # Other users of the library are logged as ever.
            async with server.client() as client:
                await client.get("http://server.test/?x=the-session")
            assert "the-session" in caplog.text
