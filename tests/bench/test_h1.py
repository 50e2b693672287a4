"""HTTP/1.1 replies piece by piece, and connections that are kept or not."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest
import trio

from tests.bench.support import a_load
from trimcp.bench.h1 import LoadConnection, Site
from trimcp.bench.link import Address, LoadLink
from trimcp.transports.http.client.target import HttpServer
from trimcp.transports.http.h1.replies import UnreadableReply

OK = b"HTTP/1.1 200 OK\r\n"
JSON = OK + b"Content-Type: application/json; charset=utf-8\r\nMCP-Session-Id: s1\r\nContent-Length: 2\r\n\r\n{}"
EVENTS = OK + b"content-type: Text/Event-Stream\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"


@attrs.define(eq=False)
class FakeLink:
    """A link that receives what the test says; each `receive` takes the next of it."""

    chunks: list[bytes]
    sent: bytes = b""
    takes: int = 1_000_000
    has_ended: bool = False
    closed: bool = False

    def send_nowait(self, data: bytes) -> int:
        self.sent += data[: self.takes]
        return min(len(data), self.takes)

    async def send_all(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.sent += data

    async def receive(self) -> bytes:
        await trio.lowlevel.checkpoint()
        return self.chunks.pop(0) if self.chunks else b""

    def ended(self) -> bool:
        return self.has_ended

    def close(self) -> None:
        self.closed = True


def a_connection(monkeypatch: pytest.MonkeyPatch, *links: FakeLink, max_size: int = 1000) -> LoadConnection:
    """A connection whose dialling gives these links, one after the other."""
    waiting = list(links)

    async def dial(self: Address, patience: float, context: object = None) -> LoadLink:
        await trio.lowlevel.checkpoint()
        return waiting.pop(0)

    monkeypatch.setattr(Address, "dial", dial)
    site = Site(Address("localhost", 80), b"/mcp", b"localhost", b"")
    return LoadConnection(site, a_load(), max_size=max_size)


async def test_a_connection_is_used_for_one_request_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    link = FakeLink([JSON, EVENTS[:70], EVENTS[70:], JSON])
    connection = a_connection(monkeypatch, link)
    for body in (b"{}", b"abcde", b"{}"):
        await connection.request(b"x")
        assert await connection.body() == body
    assert link.sent == b"xxx"
    assert (connection.load.tally.bytes_out, connection.load.tally.bytes_in) == (3, 2 * len(JSON) + len(EVENTS))


async def test_a_request_that_does_not_fit_is_sent_by_and_by(monkeypatch: pytest.MonkeyPatch) -> None:
    link = FakeLink([JSON], takes=3)
    connection = a_connection(monkeypatch, link)
    await connection.request(b"abcdefgh")
    assert link.sent == b"abcdefgh"


@pytest.mark.parametrize(
    "last",
    [
        JSON.replace(b"200 OK\r\n", b"200 OK\r\nConnection: close\r\n"),
        JSON.replace(b"HTTP/1.1", b"HTTP/1.0"),
        JSON.replace(b"Content-Length: 2\r\n", b""),
    ],
)
async def test_a_connection_that_the_server_does_not_keep_is_not_used_again(
    last: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = FakeLink([last]), FakeLink([JSON])
    connection = a_connection(monkeypatch, first, second)
    await connection.request(b"a")
    assert await connection.body() == b"{}"
    assert first.closed
    await connection.request(b"b")
    assert second.sent == b"b"


async def test_a_connection_idle_for_long_is_looked_at_first(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    first, second = FakeLink([JSON, JSON, JSON]), FakeLink([JSON])
    connection = a_connection(monkeypatch, first, second)
    for pause, ended, used in ((0.0, False, b"a"), (0.1, True, b"aa"), (5.0, False, b"aaa"), (5.0, True, b"aaa")):
        await trio.sleep(pause)
        first.has_ended = ended
        await connection.request(b"a")
        await connection.body()
        assert first.sent == used
    assert second.sent == b"a"
    assert first.closed


@pytest.mark.parametrize("cut", [b"", JSON[:20], JSON[:-1], EVENTS[:-3]])
async def test_an_end_before_the_reply_is_told(cut: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = a_connection(monkeypatch, FakeLink([cut] if cut else []))
    await connection.request(b"a")
    with pytest.raises(trio.BrokenResourceError, match="closed the connection before it had answered"):
        await connection.body()


@pytest.mark.parametrize(
    ("chunks", "told"),
    [
        ([b"SSH-2.0-OpenSSH\r\n"], "SSH-2.0"),
        ([JSON.replace(b": 2", b": 5000") + b"x" * 2000], "a reply larger than 1,000 bytes"),
    ],
)
async def test_what_cannot_be_read_is_told(chunks: Sequence[bytes], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = a_connection(monkeypatch, FakeLink(list(chunks)))
    await connection.request(b"a")
    with pytest.raises(UnreadableReply, match=told):
        await connection.body()


@pytest.mark.parametrize(
    ("url", "address", "path", "host"),
    [
        ("http://a.example/mcp?x=1", Address("a.example", 80), b"/mcp?x=1", b"a.example"),
        ("https://a.example:8443", Address("a.example", 8443, True), b"/", b"a.example:8443"),
        ("http://user:secret@[::1]:99/mcp", Address("::1", 99), b"/mcp", b"[::1]:99"),
        ("http+unix://%2Frun%2Fs.sock/mcp", Address("localhost", 80, path="/run/s.sock"), b"/mcp", b"localhost"),
    ],
)
def test_a_site_is_where_its_url_leads(url: str, address: Address, path: bytes, host: bytes) -> None:
    site = Site.of(HttpServer(url))
    assert (site.address, site.path, site.host) == (address, path, host)


def test_a_head_says_what_the_user_wants_and_never_the_host_twice() -> None:
    site = Site.of(HttpServer("http://a.example/mcp", {"X-Key": "k", "Host": "b.example"}))
    assert site.head(b"POST", {"accept": "*/*"}, path=b"/x") == (
        b"POST /x HTTP/1.1\r\nhost: b.example\r\nx-key: k\r\naccept: */*\r\n"
    )
