"""Connections of our own to one server: used again, watched, bounded, fair, and let go; what of a request was sent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

import trimcp
from tests.peers.tls import authority, server_context
from tests.transports.http.scripted import Exchange, exchanges_with, listening, receive, request, scripted
from trimcp.channel import HttpClientStatistics
from trimcp.support.nurseries import open_service_nursery
from trimcp.transports.http.client.engine import ExchangeBroken
from trimcp.transports.http.client.exchanges import Http
from trimcp.transports.http.client.h1 import H1Engine
from trimcp.transports.http.client.policy import Timeouts
from trimcp.transports.http.client.pool import Pool
from trimcp.wire.jsonrpc import Lost

REPLY = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@attrs.define(eq=False)
class Far:
    """The far ends of connections in memory, in the order in which they were opened."""

    ends: list[trio.StapledStream] = attrs.field(factory=list)
    refuse: bool = False
    delay: float = 0

    async def dial(self) -> trio.abc.Stream:
        await trio.sleep(self.delay)
        if self.refuse:
            raise trimcp.ConnectionLost("connection refused")
        ours, theirs = memory_stream_pair()
        self.ends.append(theirs)
        return ours


@asynccontextmanager
async def pooled(most: int = 256, **timeouts: float) -> AsyncIterator[tuple[Http, Far]]:
    far = Far()
    pool = Pool(far.dial, "http://x.test", "http://x.test", Timeouts(**timeouts), 1_024 + most, most)
    async with open_service_nursery() as nursery:
        await nursery.start(pool.run)
        try:
            yield Http("http://x.test/mcp", H1Engine(pool), {"user-agent": "trimcp", "accept-encoding": "gzip"}), far
        finally:
            pool.close()


async def get(http: Http, said: list[Any] | None = None) -> None:
    """Make a request and note the body of its reply, or why there is none."""
    try:
        async with http.open("GET", {}) as reply:
            outcome: Any = await reply.body(100)
    except ExchangeBroken as broken:
        outcome = (broken.why, broken.nothing_sent)
    if said is not None:
        said.append(outcome)


def is_clean(statistics: HttpClientStatistics) -> bool:
    return statistics.in_use == statistics.waiting == 0 and statistics.connections == statistics.idle


@pytest.mark.parametrize("more", [b"", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP", b"no HTTP at all\r\n"])
async def test_an_idle_connection_that_ends_or_speaks_is_not_used_again(more: bytes, autojump_clock: object) -> None:
    said: list[Any] = []
    async with pooled() as (http, far), trio.open_nursery() as nursery:
        for n in (0, 1):
            nursery.start_soon(get, http, said)
            await wait_all_tasks_blocked()
            await far.ends[n].send_all(REPLY)
            await wait_all_tasks_blocked()
            assert http.statistics() == HttpClientStatistics("trimcp", 1, 1, 0)
            await (far.ends[n].send_all(more) if more else far.ends[n].aclose())
            await wait_all_tasks_blocked()
            assert http.statistics() == HttpClientStatistics("trimcp", 0, 0, 0)
        assert said == [b"ok", b"ok"]


async def test_idle_connections_are_let_go(autojump_clock: object) -> None:
    async with pooled() as (http, far), trio.open_nursery() as nursery:
        nursery.start_soon(get, http)
        await wait_all_tasks_blocked()
        await far.ends[0].send_all(REPLY)
        await trio.sleep(3.9)
        assert http.statistics().idle == 1
        await trio.sleep(0.2)
        assert http.statistics().connections == 0
        assert (
            await far.ends[0].receive_some()
            == b"GET /mcp HTTP/1.1\r\nhost: x.test\r\nuser-agent: trimcp\r\naccept-encoding: gzip\r\n\r\n"
        )
        assert await far.ends[0].receive_some() == b""


async def test_no_more_connections_are_kept_than_requests_may_be_under_way(autojump_clock: object) -> None:
    async with pooled(most=2) as (http, far):
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(get, http)
            await wait_all_tasks_blocked()
            for end in far.ends:
                await end.send_all(REPLY)
        await wait_all_tasks_blocked()
        assert http.statistics() == HttpClientStatistics("trimcp", 2, 2, 0)


async def test_beyond_the_bound_exchanges_wait_in_order(autojump_clock: object) -> None:
    said: list[Any] = []

    async def numbered(http: Http, number: int) -> None:
        await get(http)
        said.append(number)

    async with pooled(most=1) as (http, far):
        http.h1.pool._most = 2  # it is a thousand
        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(numbered, http, number)
                await wait_all_tasks_blocked()
            assert http.statistics() == HttpClientStatistics("trimcp", 2, 0, 6, 4)
            for n in (0, 1, 0, 1, 0, 1):
                await far.ends[n].send_all(REPLY)
                await wait_all_tasks_blocked()
        assert said == [0, 1, 2, 3, 4, 5]
        assert is_clean(http.statistics())


async def test_nobody_waits_for_a_connection_for_ever(autojump_clock: object) -> None:
    said: list[Any] = []
    async with pooled(connect=10) as (http, _), trio.open_nursery() as nursery:
        http.h1.pool._most = 1
        nursery.start_soon(get, http)
        await wait_all_tasks_blocked()
        await get(http, said)
        assert trio.current_time() == 10
        assert said == [("cannot connect to http://x.test: no connection within 10 seconds", True)]
        nursery.cancel_scope.cancel()


async def test_whoever_waits_takes_the_first_connection_that_is_free(autojump_clock: object) -> None:
    async with pooled() as (http, far):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(get, http)
            await wait_all_tasks_blocked()
            far.delay = 5
            nursery.start_soon(get, http)
            await wait_all_tasks_blocked()
            assert http.statistics() == HttpClientStatistics("trimcp", 2, 0, 2, 1)
            await far.ends[0].send_all(REPLY)
            await wait_all_tasks_blocked()
            assert http.statistics().waiting == 0
            await far.ends[0].send_all(REPLY)
        assert trio.current_time() == 0


async def test_a_refused_connection_fails_one_exchange_each(autojump_clock: object) -> None:
    said: list[Any] = []
    async with pooled() as (http, far):
        far.refuse = True
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(get, http, said)
        assert said == [("cannot connect to http://x.test: connection refused", True)] * 3
        assert http.statistics() == HttpClientStatistics("trimcp", 0, 0, 0)


async def test_giving_up_while_connecting_connects_no_further(autojump_clock: object) -> None:
    async with pooled() as (http, far):
        far.delay = 5
        with trio.move_on_after(1):
            await get(http)
        await wait_all_tasks_blocked()
        assert http.statistics() == HttpClientStatistics("trimcp", 0, 0, 0)


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (b"", "before its reply"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "in the middle of its reply"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\no", "in the middle of its reply"),
        (b"nonsense", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 10_000 + b"\r\n", "headers"),
    ],
)
async def test_a_reply_that_cannot_be_had_breaks_its_exchange_alone(
    reply: bytes, why: str, autojump_clock: object
) -> None:
    said: list[Any] = []
    async with pooled() as (http, far):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(get, http)
            await wait_all_tasks_blocked()
            nursery.start_soon(get, http, said)
            await wait_all_tasks_blocked()
            if reply:
                await far.ends[1].send_all(reply)
            await far.ends[1].aclose()
            await wait_all_tasks_blocked()
            ((text, nothing_sent),) = said
            assert why in text
            assert "the connection to http://x.test broke" in text
            assert not nothing_sent
            await far.ends[0].send_all(REPLY)
        assert http.statistics() == HttpClientStatistics("trimcp", 1, 1, 0)


async def test_two_replies_close_the_connection_after_the_first(autojump_clock: object) -> None:
    said: list[Any] = []
    async with pooled() as (http, far):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(get, http, said)
            await wait_all_tasks_blocked()
            await far.ends[0].send_all(REPLY + REPLY)
        assert said == [b"ok"]
        await wait_all_tasks_blocked()
        assert http.statistics() == HttpClientStatistics("trimcp", 0, 0, 0)


async def test_an_early_reply_is_delivered_and_its_connection_closed() -> None:
    """The server answers before it has read the request."""
    body = bytes(16 * 1024 * 1024)

    async def serve(stream: trio.SocketStream) -> None:
        await stream.receive_some(1_000)
        await stream.send_all(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        await closed.wait()

    closed = trio.Event()
    async with trio.open_nursery() as nursery:
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        port = listener.socket.getsockname()[1]
        async with exchanges_with(f"http://127.0.0.1:{port}/") as http:
            async with http.open("POST", {}, body) as reply:
                assert (reply.status, await reply.body(10)) == (413, b"no")
            await wait_all_tasks_blocked()
            assert http.statistics() == HttpClientStatistics("trimcp", 0, 0, 0)
        nursery.cancel_scope.cancel()


async def test_a_server_that_takes_no_request_is_left(autojump_clock: object) -> None:
    async def never(stream: trio.SocketStream) -> None:
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, never, [listener])
        port = listener.socket.getsockname()[1]
        async with exchanges_with(f"http://127.0.0.1:{port}/", timeouts=Timeouts(write=30)) as http:
            with pytest.raises(ExchangeBroken, match="took nothing more of the request for 30 s"):
                async with http.open("POST", {}, bytes(16 * 1024 * 1024)):
                    pass
            await wait_all_tasks_blocked()
            assert http.statistics() == HttpClientStatistics("trimcp", 0, 0, 0)
        nursery.cancel_scope.cancel()


async def test_a_slow_reader_lets_the_server_wait(autojump_clock: object) -> None:
    sent = 0

    async def flood(exchange: Exchange) -> None:
        nonlocal sent
        await exchange.start(200)
        while not exchange.gone.is_set():
            await exchange.write(bytes(10_000))
            sent += 10_000

    async with listening(flood) as (_, port), exchanges_with(f"http://127.0.0.1:{port}/") as http:
        async with http.open("GET", {}) as reply, reply.chunks() as chunks:
            await wait_all_tasks_blocked(0.05)
            held = sent
            taken = 0
            for _ in range(50):
                taken += len(await anext(chunks))
            assert taken > 0
        assert held < 16 * 1024 * 1024  # what the system buffers, and a little more
        await wait_all_tasks_blocked()
        assert is_clean(http.statistics())


async def test_a_connection_that_is_idle_may_end_as_it_is_wanted_again() -> None:
    """The end has arrived, and the connection's task has not yet seen it."""
    served = 0

    async def serve(stream: trio.SocketStream) -> None:
        nonlocal served
        await stream.receive_some(1_000)
        served += 1
        await stream.send_all(REPLY)
        await close.wait()
        await stream.aclose()
        closed.set()

    close, closed = trio.Event(), trio.Event()
    async with trio.open_nursery() as nursery:
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        port = listener.socket.getsockname()[1]
        async with exchanges_with(f"http://127.0.0.1:{port}/") as http:
            await get(http)
            await wait_all_tasks_blocked()
            (connection,) = http.h1.pool._idle
            assert connection.is_quiet()
            close.set()
            while connection.is_quiet():  # a network is between
                await trio.lowlevel.checkpoint()
            said: list[Any] = []
            await get(http, said)
            assert said == [b"ok"]
        assert served == 2
        nursery.cancel_scope.cancel()


async def test_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trusted = tmp_path / "authority.pem"
    authority().cert_pem.write_to_path(str(trusted))
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))

    async def serve(stream: trio.SSLStream[trio.SocketStream]) -> None:
        async with stream:
            while data := await stream.receive_some(100_000):
                body = b"%d" % len(data.partition(b"\r\n\r\n")[2])
                await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_ssl_over_tcp_listeners(
            0, server_context("127.0.0.1"), host="127.0.0.1", https_compatible=True
        )
        nursery.start_soon(trio.serve_listeners, serve, listeners)
        port = listeners[0].transport_listener.socket.getsockname()[1]
        async with trimcp.http(f"https://127.0.0.1:{port}/").exchanges() as http:
            for _ in range(3):
                async with http.open("POST", {}, b"x" * 100) as reply:
                    assert await reply.body(10) == b"100"
            assert http.statistics() == HttpClientStatistics("trimcp", 1, 1, 0)
        monkeypatch.delenv("SSL_CERT_FILE")
        async with trimcp.http(f"https://127.0.0.1:{port}/").exchanges() as http:
            with pytest.raises(ExchangeBroken, match=r"its certificate is not trusted.*SSL_CERT_FILE"):
                async with http.open("GET", {}):
                    pass
        nursery.cancel_scope.cancel()


# Pushed


async def test_a_call_has_no_task(autojump_clock: object) -> None:
    async def wait(exchange: Exchange) -> None:
        await release.wait()
        await exchange.result()

    release = trio.Event()
    async with scripted(wait) as server, server.target().connect() as channel:
        await channel.send([request(1)])
        await wait_all_tasks_blocked()
        before = trio.lowlevel.current_statistics().tasks_living
        await channel.send([request(n) for n in range(2, 12)])
        await wait_all_tasks_blocked()
        # A connection has a task here, and of the server two.
        assert trio.lowlevel.current_statistics().tasks_living == before + 10 * 3
        release.set()
        assert len(await receive(channel, 11)) == 11
        statistics = channel.http_statistics()
        assert statistics == HttpClientStatistics("trimcp", 11, 11, 0)


async def test_a_full_inbox_is_not_read_for(autojump_clock: object) -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.result()

    async with scripted(answer) as server, server.target().connect() as channel:
        channel._inbox.max_messages = 2
        await channel.send([request(n) for n in range(5)])
        await wait_all_tasks_blocked()
        statistics = channel.http_statistics()
        assert statistics is not None
        assert statistics.in_use == 3
        assert sorted(message.id for message in await receive(channel, 5)) == [0, 1, 2, 3, 4]
        await wait_all_tasks_blocked()
        assert is_clean(channel.http_statistics())


async def test_a_request_with_a_header_that_cannot_be_sent_is_lost(autojump_clock: object) -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.result()

    async with scripted(answer) as server, server.target().connect() as channel:
        bad = request(1)
        bad.headers = {**(bad.headers or {}), "mcp-name": "a\r\nx-evil: 1"}
        await channel.send([bad])
        (message,) = await receive(channel)
        assert isinstance(message, Lost)
        assert "cannot be sent" in message.message
        assert server.asked == []
