"""Connections for load: kept or not, counted, and what is told of their ends."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from urllib.parse import quote

import attrs
import pytest
import trio
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from tests.bench.support import a_load
from trimcp.bench.connection import LoadConnection, LoadSite
from trimcp.errors import ConnectionLost
from trimcp.transports.http.client.target import HttpServer
from trimcp.transports.http.h1.replies import UnreadableReply

OK = b"HTTP/1.1 200 OK\r\n"
JSON = OK + b"Content-Type: application/json; charset=utf-8\r\nMCP-Session-Id: s1\r\nContent-Length: 2\r\n\r\n{}"
EVENTS = OK + b"content-type: Text/Event-Stream\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"


@attrs.define(eq=False)
class Far:
    """The far ends of connections, over sockets or in memory, in the order in which they were opened."""

    in_memory: bool = False
    ends: list[trio.abc.HalfCloseableStream] = attrs.field(factory=list)

    async def dial(self) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        ours: trio.abc.HalfCloseableStream
        theirs: trio.abc.HalfCloseableStream
        if self.in_memory:
            ours, theirs = memory_stream_pair()
        else:
            ours, theirs = (trio.SocketStream(trio.socket.from_stdlib_socket(each)) for each in socket.socketpair())
        self.ends.append(theirs)
        return ours


@asynccontextmanager
async def connected(max_size: int = 1000, in_memory: bool = False) -> AsyncIterator[tuple[LoadConnection, Far]]:
    far = Far(in_memory)
    connection = LoadConnection(LoadSite("http://a.example/mcp", {}, far.dial), a_load(), max_size=max_size)
    try:
        yield connection, far
    finally:
        await connection.close()
        for end in far.ends:
            await end.aclose()


async def ask(connection: LoadConnection, far: Far, *reply: bytes, request: bytes = b"x") -> bytes:
    """Send a request, have it answered with these writes, and return the body."""
    await connection.request(request)
    body: list[bytes] = []

    async def read() -> None:
        body.append(await connection.body())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        for each in reply:
            await far.ends[-1].send_all(each)
            await wait_all_tasks_blocked()
    return body[0]


@pytest.mark.parametrize("in_memory", [False, True])
async def test_a_connection_is_used_for_one_request_after_the_other(in_memory: bool) -> None:
    async with connected(in_memory=in_memory) as (connection, far):
        assert await ask(connection, far, JSON) == b"{}"
        assert await ask(connection, far, EVENTS[:70], EVENTS[70:]) == b"abcde"
        assert await ask(connection, far, JSON) == b"{}"
        assert await far.ends[0].receive_some() == b"xxx"
        assert len(far.ends) == 1
        tally = connection.load.tally
        assert (tally.bytes_out, tally.bytes_in) == (3, 2 * len(JSON) + len(EVENTS))


async def test_a_request_that_does_not_fit_is_sent_by_and_by() -> None:
    request = bytes(range(256)) * 40_000
    received = b""
    async with connected() as (connection, far), trio.open_nursery() as nursery:
        nursery.start_soon(connection.request, request)
        await wait_all_tasks_blocked()
        while len(received) < len(request):
            received += await far.ends[0].receive_some()
    assert received == request


@pytest.mark.parametrize(
    "last",
    [
        JSON.replace(b"200 OK\r\n", b"200 OK\r\nConnection: close\r\n"),
        JSON.replace(b"HTTP/1.1", b"HTTP/1.0"),
        JSON + b"HTTP/1.1 200 OK\r\n",
    ],
)
async def test_a_connection_that_the_server_does_not_keep_is_not_used_again(last: bytes) -> None:
    async with connected() as (connection, far):
        assert await ask(connection, far, last, request=b"a") == b"{}"
        assert await far.ends[0].receive_some() == b"a"
        assert await far.ends[0].receive_some() == b""
        assert await ask(connection, far, JSON, request=b"b") == b"{}"
        assert await far.ends[1].receive_some() == b"b"


async def test_a_reply_may_end_with_its_connection() -> None:
    async with connected() as (connection, far):
        await connection.request(b"a")
        await far.ends[0].send_all(JSON.replace(b"Content-Length: 2\r\n", b""))
        await far.ends[0].send_eof()
        assert await connection.body() == b"{}"
        assert await ask(connection, far, JSON) == b"{}"
        assert len(far.ends) == 2


@pytest.mark.parametrize("ended", [False, True])
async def test_a_connection_idle_for_long_is_looked_at_first(ended: bool, autojump_clock: object) -> None:
    async with connected() as (connection, far):
        await ask(connection, far, JSON)
        await trio.sleep(5)
        await ask(connection, far, JSON)
        assert len(far.ends) == 1
        await (far.ends[0].send_eof() if ended else far.ends[0].send_all(b"unasked"))
        await trio.sleep(5)
        await ask(connection, far, JSON)
        assert len(far.ends) == 2
        assert await far.ends[0].receive_some() == b"xx"
        with nullcontext() if ended else pytest.raises(trio.BrokenResourceError):  # it left bytes unread
            assert await far.ends[0].receive_some() == b""


@pytest.mark.parametrize("cut", [b"", JSON[:20], JSON[:-1], EVENTS[:-3]])
async def test_an_end_before_the_reply_is_told(cut: bytes) -> None:
    async with connected() as (connection, far):
        await connection.request(b"a")
        await far.ends[0].send_all(cut)
        await far.ends[0].send_eof()
        with pytest.raises(trio.BrokenResourceError, match="the server closed the connection before it had answered"):
            await connection.body()


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[trio.SocketListener, str]]:
    """A listener of this machine, and its URL without a scheme."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        yield listener, f"://127.0.0.1:{listener.socket.getsockname()[1]}/mcp"


def site_of(url: str, opening: float = 5.0) -> LoadSite:
    return LoadSite.of(HttpServer(url), a_load(opening=opening))


async def test_a_reset_is_told() -> None:
    async with listening() as (listener, url):
        connection = LoadConnection(site_of(f"http{url}"), a_load())
        await connection.request(b"x")
        stream = await listener.accept()
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        stream.socket.close()
        with pytest.raises(
            trio.BrokenResourceError, match=r"^receiving failed: \[Errno \d+\] Connection reset by peer$"
        ):
            await connection.body()
        with pytest.raises(trio.BrokenResourceError, match=r"^sending failed: \[Errno \d+\] "):
            await connection.request(b"x")
        await connection.close()


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "SSH-2.0"),
        (JSON.replace(b": 2", b": 5000") + b"x" * 2000, "a reply larger than 1,000 bytes"),
    ],
)
async def test_what_cannot_be_read_is_told(reply: bytes, told: str) -> None:
    async with connected() as (connection, far):
        await connection.request(b"a")
        await far.ends[0].send_all(reply)
        with pytest.raises(UnreadableReply, match=told):
            await connection.body()


async def test_nobody_there_is_no_connection(tmp_path: Path) -> None:
    async with listening() as (_, url):
        pass
    with pytest.raises(ConnectionLost, match="Connection refused; is the server running"):
        await LoadConnection(site_of(f"http{url}"), a_load()).ready()
    path = quote(str(tmp_path / "nobody"), safe="")
    with pytest.raises(ConnectionLost, match="No such file"):
        await LoadConnection(site_of(f"http+unix://{path}/mcp"), a_load()).ready()


async def test_a_server_that_does_not_shake_hands_is_no_connection() -> None:
    async with listening() as (_, url):
        with pytest.raises(ConnectionLost, match=r"no connection within 0\.1 seconds"):
            await LoadConnection(site_of(f"https{url}", opening=0.1), a_load()).ready()


async def test_what_is_no_tls_is_no_connection() -> None:
    async def answer(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with listening() as (listener, url), trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, answer, [listener])
        with pytest.raises(ConnectionLost, match="TLS failed"):
            await LoadConnection(site_of(f"https{url}"), a_load()).ready()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("url", "head"),
    [
        ("http://a.example/mcp?x=1", b"GET /mcp?x=1 HTTP/1.1\r\nhost: a.example\r\n"),
        ("https://a.example:8443", b"GET / HTTP/1.1\r\nhost: a.example:8443\r\n"),
        (
            "http://user:secret@[::1]:99/mcp",
            b"GET /mcp HTTP/1.1\r\nhost: [::1]:99\r\nauthorization: Basic dXNlcjpzZWNyZXQ=\r\n",
        ),
        ("http+unix://%2Frun%2Fs.sock/mcp", b"GET /mcp HTTP/1.1\r\nhost: localhost\r\n"),
    ],
)
def test_a_head_leads_where_the_url_does(url: str, head: bytes) -> None:
    assert site_of(url).head("GET") == head


def test_a_head_says_what_the_user_wants_and_never_the_host_twice() -> None:
    site = LoadSite.of(HttpServer("http://a.example/mcp", {"X-Key": "k", "Host": "b.example"}), a_load())
    assert site.head("POST", {"accept": "*/*"}, url="http://a.example/x") == (
        b"POST /x HTTP/1.1\r\nhost: b.example\r\nx-key: k\r\naccept: */*\r\n"
    )
