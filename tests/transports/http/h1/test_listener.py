"""The server on real sockets: where it listens, whom it accepts, TLS, and how it stops."""

from __future__ import annotations

import errno
import gc
import logging
import os
import select
import socket
import stat
import struct
import sys
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.peers.http1 import HttpWire, http_request
from tests.peers.http2 import FramePeer
from tests.peers.tls import certificate_file, client_context
from tests.transports.http.support import DummyFace
from trimcp.errors import LocalError
from trimcp.transports.http.h1 import listener
from trimcp.transports.http.h1.listener import serve_http1
from trimcp.transports.http.h1.parser import RequestParser
from trimcp.transports.http.h1.sockets import tls_context
from trimcp.transports.http.h1.wires import SocketWire
from trimcp.transports.http.interfaces import HttpResponse
from trimcp.transports.http.settings import HttpLimits

HELLO = b'{"hello": 1}'


@pytest.fixture(autouse=True, params=["trio", "poller"])
def polled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let connections be woken by Trio, as where there is no epoll, or by the poller."""
    if request.param == "trio":
        monkeypatch.setattr(listener, "Poller", nullcontext)


def open_descriptors() -> int:
    return len(os.listdir("/dev/fd"))


async def serve_with_clock(face: DummyFace, *, task_status: trio.TaskStatus[list[str]], **settings: Any) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(face.deadlines.run)
        await serve_http1(face, task_status=task_status, **settings)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def serving(face: DummyFace, **settings: Any) -> AsyncIterator[list[str]]:
    """Serve in the background, on a free port unless told otherwise; leaving cuts everything."""
    if not settings.keys() & {"port", "path", "sockets"}:
        settings["port"] = 0
    async with trio.open_nursery() as nursery:
        yield await nursery.start(partial(serve_with_clock, face, **settings))
        nursery.cancel_scope.cancel()


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


async def connect(url: str) -> HttpWire:
    if url.startswith("unix:"):
        return HttpWire(await trio.open_unix_socket(url.removeprefix("unix:")))
    return HttpWire(await trio.open_tcp_stream("127.0.0.1", port_of(url)))


async def until(condition: Any) -> None:
    """Let the loop go round until something holds that the kernel, which has no event for us, has a part in."""
    while not condition():
        await wait_all_tasks_blocked(0.001)


async def test_it_serves_on_a_port_the_system_chose() -> None:
    before = open_descriptors()
    face = DummyFace()
    async with serving(face) as (url,):
        assert url.startswith("http://127.0.0.1:")
        client = await connect(url)
        for n in range(3):
            assert (await client.fetch("POST", body=HELLO * n)).body == HELLO * n
        head = face.handlers[0].head
        assert isinstance(client.stream, trio.SocketStream)
        assert head.peer == f"127.0.0.1:{client.stream.socket.getsockname()[1]}"
        assert (head.loopback, head.secure) == (True, False)
        await client.stream.aclose()
    assert open_descriptors() == before


async def test_it_serves_on_every_address() -> None:
    async with serving(DummyFace(), host=None) as urls:
        assert len({port_of(url) for url in urls}) == 1
        assert any(url.startswith("http://0.0.0.0:") for url in urls)
        for url in urls:
            host = "::1" if "[" in url else "127.0.0.1"
            client = HttpWire(await trio.open_tcp_stream(host, port_of(url)))
            assert (await client.fetch("POST", body=HELLO)).body == HELLO
            await client.stream.aclose()


async def test_a_name_stands_for_its_addresses() -> None:
    async with serving(DummyFace(), host="localhost") as urls:
        assert urls
        assert all(url.startswith(("http://127.0.0.1:", "http://[::1]:")) for url in urls)
        assert len({port_of(url) for url in urls}) == 1


async def test_it_serves_on_sockets_of_others_and_beside_others() -> None:
    with socket.socket() as theirs:
        theirs.bind(("127.0.0.1", 0))
        async with serving(DummyFace(), sockets=[theirs], port=0) as urls:
            assert port_of(urls[0]) == theirs.getsockname()[1]
            assert len(urls) == 2
            for url in urls:
                client = await connect(url)
                assert (await client.fetch("POST", body=HELLO)).body == HELLO
                await client.stream.aclose()
        assert theirs.fileno() == -1


async def test_two_that_share_a_socket_share_a_burst() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=100) as shared, ExitStack() as clients:
        for _ in range(64):
            clients.enter_context(socket.create_connection(shared.getsockname()))
        faces = DummyFace(), DummyFace()
        async with serving(faces[0], sockets=[shared.dup()]), serving(faces[1], sockets=[shared.dup()]):
            await until(lambda: faces[0].connections + faces[1].connections == 64)
            assert min(face.connections for face in faces) >= 24


async def test_a_port_that_is_taken_is_refused() -> None:
    async with serving(DummyFace()) as (url,):
        with pytest.raises(LocalError, match=r"cannot listen on 127\.0\.0\.1:[0-9]+: Address already in use$"):
            await serve_http1(DummyFace(), port=port_of(url))


async def test_where_it_cannot_listen() -> None:
    with pytest.raises(ValueError, match="where to listen"):
        await serve_http1(DummyFace())
    with pytest.raises(LocalError, match=r"cannot listen on 192\.0\.2\.1:0: "):
        await serve_http1(DummyFace(), host="192.0.2.1", port=0)


# Bodies, slow readers, clients that leave


async def test_large_bodies_both_ways() -> None:
    face = DummyFace(max_body=32 * 1024 * 1024)
    async with serving(face) as (url,):
        client = await connect(url)
        body = os.urandom(20_000_000)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(client.request, "POST", body=body))
            assert (await client.answer()).body == body
        assert (await client.fetch("POST", body=HELLO)).body == HELLO
        assert face.ended == [("/echo", 200, len(body)), ("/echo", 200, len(HELLO))]
        await client.stream.aclose()


async def test_a_slow_reader_disturbs_nobody_and_goes_on_when_it_reads() -> None:
    face = DummyFace()
    async with serving(face) as (url,):
        slow, other = await connect(url), await connect(url)
        await slow.request("POST", "/wait", body=HELLO)
        await until(lambda: face.handlers and face.handlers[0].body is not None)
        reply = face.handlers[0].reply
        reply.start(HttpResponse(200, (), b"x" * 32_000_000))
        reply.write(b"y" * 1_000_000)
        assert 0 < reply.waiting < 33_000_100
        for _ in range(10):
            assert (await other.fetch("POST", body=HELLO)).body == HELLO
        assert reply.waiting > 10_000_000
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reply.room)
            assert (await slow.head()).status == 200
            assert await slow.chunk() == b"x" * 32_000_000
            assert await slow.chunk() == b"y" * 1_000_000
        assert reply.waiting == 0
        assert face.handlers[0].drained == 1
        reply.finish(b"z")
        assert await slow.chunk() == b"z"
        assert await slow.chunk() == b""
        await slow.stream.aclose()
        await other.stream.aclose()


async def test_a_burst_costs_few_system_calls_and_leaves_the_connection_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[int] = []
    try_write = SocketWire.try_write

    def counted(self: SocketWire, data: bytes | bytearray) -> int:
        writes.append(len(data))
        return try_write(self, data)

    monkeypatch.setattr(SocketWire, "try_write", counted)
    face = DummyFace()
    async with serving(face) as (url,):
        client = await connect(url)
        for _ in range(3):
            await client.request("POST", "/wait", body=HELLO)
            await until(lambda: face.handlers)
            writes.clear()
            reply = face.handlers.pop().reply
            reply.start(HttpResponse(200, (), b"first"))
            for number in range(1_000):
                reply.write(b"%d" % number)
            reply.finish(b"last")
            await client.head()
            pieces = [chunk async for chunk in client.chunks()]
            assert pieces == [b"first", *(b"%d" % number for number in range(1_000)), b"last"]
            assert len(writes) < 30
        assert (await client.fetch("POST", body=HELLO)).body == HELLO
        assert len(face.ended) == 4
        await client.stream.aclose()


async def test_a_reader_that_takes_nothing_is_reset(steady_clock: trio.abc.Clock) -> None:
    face = DummyFace()
    async with serving(face, limits=HttpLimits(stall_timeout=0.1)) as (url,):
        client = await connect(url)
        await client.request("POST", "/wait", body=HELLO)
        await until(lambda: face.handlers and face.handlers[0].body is not None)
        face.handlers[0].reply.start(HttpResponse(200, (), b"x" * 32_000_000))
        await until(lambda: face.handlers[0].gone)
        with pytest.raises(trio.BrokenResourceError):
            await client.rest()
        await client.stream.aclose()


async def test_a_client_that_leaves_is_noticed_while_its_request_runs() -> None:
    face = DummyFace()
    async with serving(face) as (url,):
        for number, reset in enumerate((False, True), 1):
            client = await connect(url)
            await client.request("POST", "/wait", body=HELLO)
            await until(lambda number=number: len(face.handlers) == number and face.handlers[-1].body is not None)
            assert isinstance(client.stream, trio.SocketStream)
            if reset:
                client.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await client.stream.aclose()
            await until(lambda: face.handlers[-1].gone)
            face.handlers[-1].reply.send(HttpResponse(200))
        assert face.ended == [("/wait", 0, 0)] * 2


@pytest.mark.parametrize("behind", [0, 10, 100_000])  # the last is more than is read before the answer
@pytest.mark.parametrize("tls", [False, True])
async def test_a_client_that_leaves_with_more_behind_its_request_is_noticed(
    behind: int, tls: bool, certificate: Path, steady_clock: trio.abc.Clock
) -> None:
    face, options = DummyFace(), {}
    if tls:
        options["ssl_context"] = tls_context(certificate)
    async with serving(face, **options) as (url,):
        client = await (connect_tls(url) if tls else connect(url))
        await client.send(http_request("GET", "/wait") + b"x" * behind)
        await until(lambda: face.handlers and face.handlers[0].body is not None)
        face.handlers[0].reply.start(HttpResponse(200, (), b"begun"))
        await client.head()
        assert await client.chunk() == b"begun"
        await wait_all_tasks_blocked(0.01)
        assert face.handlers[0].gone == 0
        await trio.aclose_forcefully(client.stream)  # in order: nothing is left to read
        with trio.fail_after(5):
            await until(lambda: face.handlers[0].gone)
        assert face.ended == [("/wait", 200, 5)]


async def test_pipelined_requests_are_all_answered() -> None:
    face = DummyFace()
    async with serving(face) as (url,):
        client = await connect(url)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.send, b"".join(http_request("POST", body=b"%d" % n) for n in range(3_000)))
            for n in range(3_000):
                assert (await client.answer()).body == b"%d" % n
        await client.send(http_request("POST", "/wait", body=HELLO) * 2)  # the second has to wake a reader that waits
        for n in (3_000, 3_001):
            await until(lambda n=n: len(face.handlers) > n)
            await wait_all_tasks_blocked(0.01)
            face.handlers[n].reply.send(HttpResponse(202))
            assert (await client.answer()).status == 202
        await client.stream.aclose()


async def test_a_client_that_pipelines_lets_others_in_between() -> None:
    face = DummyFace()
    async with serving(face) as (url,):
        client = await connect(url)
        await client.send(http_request("POST", body=HELLO) * 200)
        most = seen = 0
        while seen < 200:
            await trio.lowlevel.checkpoint()
            most = max(most, len(face.handlers) - seen)
            seen = len(face.handlers)
        assert most <= 2
        for _ in range(200):
            assert (await client.answer()).body == HELLO
        await client.stream.aclose()


async def test_a_client_that_sends_tiny_chunks_lets_others_in_between() -> None:
    face = DummyFace()
    async with serving(face) as (url,):
        client = await connect(url)
        await client.send(
            http_request("POST", "/wait", "Transfer-Encoding: chunked") + b"1\r\nx\r\n" * 5_000 + b"0\r\n\r\n"
        )
        turns = 0
        while not (face.handlers and face.handlers[0].body):
            await trio.lowlevel.checkpoint()
            turns += 1
        assert turns >= 150
        assert face.handlers[0].body == b"x" * 5_000
        await client.stream.aclose()


async def test_a_refusal_reaches_a_client_that_sends_everything_first() -> None:
    async with serving(DummyFace(max_body=1_000)) as (url,):
        for data in (http_request("POST", body=b"x" * 900_000), http_request("POST", "/no", body=b"x" * 900_000)):
            client = await connect(url)
            await client.send(data)
            assert (await client.answer()).status in (403, 413)
            await client.closed()
            await client.stream.aclose()


async def test_abort_resets_the_connection() -> None:
    face = DummyFace()
    async with serving(face) as (url,):
        client = await connect(url)
        await client.request("POST", "/wait", body=b"", version="1.0")
        await until(lambda: face.handlers and face.handlers[0].body is not None)
        face.handlers[0].reply.start(HttpResponse(200, (), b"half"))
        await client.head()
        face.handlers[0].reply.abort()
        with pytest.raises(trio.BrokenResourceError):
            await client.rest()
        await client.stream.aclose()


# How many


async def test_connections_beyond_the_cap_wait(caplog: pytest.LogCaptureFixture, steady_clock: trio.abc.Clock) -> None:
    async with serving(DummyFace(), limits=HttpLimits(max_connections=2)) as (url,):
        first, second, third = [await connect(url) for _ in range(3)]
        await third.request("POST", body=HELLO)
        for client in (first, second):
            assert (await client.fetch("POST", body=HELLO)).body == HELLO
        with trio.move_on_after(0.05):
            await third.answer()
            raise AssertionError("it was accepted")
        await first.stream.aclose()
        assert (await third.answer()).body == HELLO
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        for client in (second, third):
            await client.stream.aclose()


OtherAddresses = pytest.mark.skipif(sys.platform != "linux", reason="only there every 127.x.y.z is this machine")


async def from_address(url: str, source: str) -> HttpWire:
    sock = trio.socket.socket()
    await sock.bind((source, 0))
    await sock.connect(("127.0.0.1", port_of(url)))
    return HttpWire(trio.SocketStream(sock))


async def is_cut(client: HttpWire) -> bool:
    """Whether the server has closed it; waits for that a moment."""
    with trio.move_on_after(2):
        try:
            return await client.stream.receive_some(1) == b""
        except trio.BrokenResourceError:
            return True
    return False


@OtherAddresses
async def test_an_idle_connection_of_who_holds_most_gives_way_to_another(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(DummyFace(), limits=HttpLimits(max_connections=3)) as (url,):
        ours = [await from_address(url, "127.0.0.1") for _ in range(3)]
        for client in ours:
            assert (await client.fetch("POST", body=HELLO)).body == HELLO
        await ours[0].request("POST", "/wait", body=HELLO)  # not idle
        another = await from_address(url, "127.0.0.1")
        await another.request("POST", body=HELLO)  # waits, for it is of the same
        newcomer = await from_address(url, "127.0.0.2")
        assert (await newcomer.fetch("POST", body=HELLO)).body == HELLO
        assert await is_cut(ours[1])
        assert (await ours[2].fetch("POST", body=HELLO)).body == HELLO
        await ours[2].stream.aclose()
        assert (await another.answer()).body == HELLO
        for client in (*ours, another, newcomer):
            await client.stream.aclose()
    [event] = [record for record in caplog.records if record.name == "trimcp.security"]
    assert (event.event, event.owner, event.held) == ("gave_way", "address 127.0.0.1", 3)


@OtherAddresses
async def test_who_holds_far_more_gives_way_with_a_request_under_way() -> None:
    face, most = DummyFace(), 16
    async with serving(face, limits=HttpLimits(max_connections=most)) as (url,):
        ours = [await from_address(url, "127.0.0.1") for _ in range(most)]
        for client in ours:
            await client.request("POST", "/wait", body=HELLO)
        await until(lambda: len(face.handlers) == most)
        newcomers = [await from_address(url, "127.0.0.2") for _ in range(2)]
        assert (await newcomers[0].fetch("POST", body=HELLO)).body == HELLO
        await until(lambda: sum(handler.gone for handler in face.handlers) == 1)
        await newcomers[1].request("POST", body=HELLO)  # has a sixteenth already, and waits
        await wait_all_tasks_blocked(0.02)
        assert len(face.handlers) == most + 1
        assert face.connections == most
        await newcomers[0].stream.aclose()
        assert (await newcomers[1].answer()).body == HELLO
        for client in (*ours, *newcomers):
            await client.stream.aclose()


@OtherAddresses
async def test_those_that_wait_are_bounded_and_one_address_does_not_take_their_places() -> None:
    before = open_descriptors()
    async with serving(DummyFace(), limits=HttpLimits(max_connections=1, backlog=4)) as (url,):
        inside = await from_address(url, "127.0.0.1")
        assert (await inside.fetch("POST", body=HELLO)).body == HELLO
        ours = [await from_address(url, "127.0.0.1") for _ in range(4)]
        await wait_all_tasks_blocked(0.02)
        other = await from_address(url, "127.0.0.2")
        await other.request("POST", body=HELLO)
        assert await is_cut(ours[0])
        more = await from_address(url, "127.0.0.1")
        assert await is_cut(ours[1])
        for client in (inside, *ours, more):
            await client.stream.aclose()
        assert (await other.answer()).body == HELLO
        waits = await from_address(url, "127.0.0.2")  # still does when the server ends
        await wait_all_tasks_blocked(0.02)
    for client in (other, waits):
        await client.stream.aclose()
    assert open_descriptors() == before


class Exhausted(socket.socket):
    """A listening socket of a process that has no descriptors left."""

    exhausted = False
    tries = 0

    def accept(self) -> Any:
        self.tries += 1
        if self.exhausted:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


async def test_a_lack_of_descriptors_is_survived_without_spinning(
    caplog: pytest.LogCaptureFixture, steady_clock: trio.abc.Clock
) -> None:
    with Exhausted() as listening:
        listening.bind(("127.0.0.1", 0))
        async with serving(DummyFace(), sockets=[listening]) as (url,):
            first = await connect(url)
            assert (await first.fetch("POST", body=HELLO)).body == HELLO
            tries, listening.exhausted = listening.tries, True
            second = await connect(url)
            await second.request("POST", body=HELLO)
            await until(lambda: listening.tries > tries)
            await wait_all_tasks_blocked(0.02)
            assert listening.tries == tries + 1
            listening.exhausted = False
            await first.stream.aclose()  # at once, not after a pause
            with trio.fail_after(0.9):
                assert (await second.answer()).body == HELLO
            assert [record.levelname for record in caplog.records] == ["WARNING"]
            assert "Too many open files" in caplog.text
            await second.stream.aclose()


async def test_connections_that_are_gone_before_they_are_accepted_disturb_nobody() -> None:
    async with serving(DummyFace()) as (url,):
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", port_of(url))) as gone:
                gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client = await connect(url)
        assert (await client.fetch("POST", body=HELLO)).body == HELLO
        await client.stream.aclose()


async def test_everything_is_given_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    face = DummyFace()
    async with serving(face) as (url,):
        before = open_descriptors()
        tasks = trio.lowlevel.current_statistics().tasks_living
        clients = [await connect(url) for _ in range(100)]
        for n, client in enumerate(clients):
            await client.request("POST", "/wait" if n % 2 else "/echo", body=HELLO)
        await until(lambda: len([handler for handler in face.handlers if handler.body]) == 100)
        for client in clients:
            await client.stream.aclose()
        await until(lambda: open_descriptors() == before)
        await wait_all_tasks_blocked()
        assert trio.lowlevel.current_statistics().tasks_living == tasks
        assert [record.levelname for record in caplog.records] == ["DEBUG"] * 50


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificate_file(tmp_path_factory.mktemp("tls"), "localhost")


async def connect_tls(url: str, protocols: Sequence[str] = ("http/1.1",)) -> HttpWire:
    context = client_context()
    context.set_alpn_protocols(protocols)
    stream = await trio.open_tcp_stream("127.0.0.1", port_of(url))
    return HttpWire(trio.SSLStream(stream, context, server_hostname="localhost"))


async def test_http2_is_agreed_on_over_tls(certificate: Path) -> None:
    face = DummyFace()
    async with serving(face, ssl_context=tls_context(certificate)) as (url,):
        stream = (await connect_tls(url, ["h2", "http/1.1"])).stream
        peer = FramePeer(stream)
        await peer.start()
        assert isinstance(stream, trio.SSLStream)
        assert stream.selected_alpn_protocol() == "h2"
        answer = await peer.fetch("/echo", HELLO * 1_000)
        assert answer.body == HELLO * 1_000
        assert face.handlers[0].head.secure
        await stream.aclose()


async def test_tls(certificate: Path) -> None:
    face = DummyFace()
    async with serving(face, ssl_context=tls_context(certificate)) as (url,):
        assert url.startswith("https://127.0.0.1:")
        client = await connect_tls(url)
        assert (await client.fetch("POST", body=HELLO)).body == HELLO
        assert isinstance(client.stream, trio.SSLStream)
        assert client.stream.selected_alpn_protocol() == "http/1.1"
        assert face.handlers[0].head.secure
        body = os.urandom(1_000_000)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(client.request, "POST", body=body))
            assert (await client.answer()).body == body
        await client.send(http_request("POST", "/wait", body=HELLO) * 3)
        for n in range(3):
            await until(lambda n=n: len(face.handlers) > n + 2)
            face.handlers[n + 2].reply.send(HttpResponse(202))
            assert (await client.answer()).status == 202
        await client.request("POST", "/echo", "Connection: close", body=HELLO)
        assert (await client.answer()).body == HELLO
        await client.closed()  # with a goodbye: it would raise BrokenResourceError otherwise
        await client.stream.aclose()

        client = await connect_tls(url)
        await client.request("POST", "/wait", body=HELLO)
        await until(lambda: len(face.handlers) > 6)
        await trio.aclose_forcefully(client.stream)
        await until(lambda: face.handlers[-1].gone)


async def test_what_is_no_tls_ends_quietly(
    certificate: Path, caplog: pytest.LogCaptureFixture, steady_clock: trio.abc.Clock
) -> None:
    limits = HttpLimits(head_timeout=0.05)
    async with serving(DummyFace(), ssl_context=tls_context(certificate), limits=limits) as (url,):
        plain, silent = await connect(url), await connect(url)
        await plain.request()
        for client in (plain, silent):
            try:
                await client.rest()  # an alert, perhaps
            except trio.BrokenResourceError:
                pass
            await client.stream.aclose()
        assert caplog.records == []


# Unix sockets


async def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "mcp.sock"
    face = DummyFace()
    async with serving(face, path=path) as urls:
        assert urls == [f"unix:{path}"]
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert os.listdir(tmp_path) == [path.name]
        client = await connect(urls[0])
        assert (await client.fetch("POST", body=HELLO)).body == HELLO
        assert (face.handlers[0].head.peer, face.handlers[0].head.loopback) == ("unix", True)
        await client.request("POST", "/wait", body=HELLO)
        await until(lambda: len(face.handlers) == 2)
        await client.stream.aclose()
        await until(lambda: face.handlers[1].gone)
        with pytest.raises(LocalError, match="somebody else does"):
            await serve_http1(face, path=path)
    assert os.listdir(tmp_path) == []


# The end


async def test_a_connection_that_ended_waits_for_no_collector() -> None:
    face = DummyFace()
    others = weakref.WeakSet(each for each in gc.get_objects() if type(each) is RequestParser)  # of other tests
    async with serving(face) as (url,):
        client = await connect(url)
        assert (await client.fetch("POST", body=HELLO)).body == HELLO
        assert (await client.fetch("POST", body=HELLO)).body == HELLO
        gc.collect()
        parsers = [each for each in gc.get_objects() if type(each) is RequestParser]
        [gone] = [weakref.ref(each) for each in parsers if each not in others]
        del parsers
        gc.disable()
        try:
            await client.stream.aclose()
            del client
            with trio.fail_after(5):
                await until(lambda: gone() is None)
        finally:
            gc.enable()


async def test_it_stops_when_it_is_told_to(tmp_path: Path, steady_clock: trio.abc.Clock) -> None:
    face, stop = DummyFace(), trio.Event()
    before = open_descriptors()
    path = tmp_path / "mcp.sock"
    async with trio.open_nursery() as nursery:
        serve = partial(serve_with_clock, face, port=0, path=path, stop=stop, grace=10)
        urls: list[str] = await nursery.start(serve)
        idle, fresh, busy = [await connect(urls[0]) for _ in range(3)]
        await idle.fetch("POST", body=HELLO)
        await busy.request("POST", "/wait", body=HELLO)
        await until(lambda: len(face.handlers) == 2)
        stop.set()
        await idle.closed()
        await fresh.closed()
        assert not path.exists()
        with pytest.raises(OSError):
            await connect(urls[0])
        face.handlers[1].reply.send(HttpResponse(200, (), b"done"))
        answer = await busy.answer()
        assert (answer.body, answer.headers["connection"]) == (b"done", "close")
        await busy.closed()
        for client in (idle, fresh, busy):
            await client.stream.aclose()
        with trio.fail_after(5):
            await until(lambda: not nursery.child_tasks)
    assert open_descriptors() == before


async def test_connections_stay_until_the_work_is_drained() -> None:
    face, stop, drained = DummyFace(), trio.Event(), trio.Event()

    async def drain(end_idle: object) -> None:
        await drained.wait()

    async with trio.open_nursery() as nursery:
        (url,) = await nursery.start(partial(serve_with_clock, face, port=0, stop=stop, drain=drain))
        client = await connect(url)
        await client.fetch("POST", body=HELLO)
        stop.set()
        await wait_all_tasks_blocked()
        with pytest.raises(OSError):
            await connect(url)
        answer = await client.fetch("POST", body=HELLO)
        assert (answer.body, answer.headers.get("connection")) == (HELLO, None)
        drained.set()
        await client.closed()
        await client.stream.aclose()


async def test_who_goes_on_while_it_ends_is_answered_and_told_to_go_elsewhere(steady_clock: trio.abc.Clock) -> None:
    face, stop, idle_ended = DummyFace(), trio.Event(), trio.Event()

    async def drain(end_idle: Callable[[], Awaitable[object]]) -> None:
        await end_idle()
        idle_ended.set()

    async with trio.open_nursery() as nursery:
        serve = partial(serve_with_clock, face, port=0, stop=stop, drain=drain, quiet=60)
        (url,) = await nursery.start(serve)
        clients = [await connect(url) for _ in range(3)]
        for client in clients:
            await client.fetch("POST", body=HELLO)
        streaming = clients[2]
        await streaming.request("POST", "/wait", body=HELLO)
        await until(lambda: face.handlers[-1].head.path == "/wait" and face.handlers[-1].body is not None)
        reply = face.handlers[-1].reply
        reply.start(HttpResponse(200, (), b"event"))
        stop.set()
        await wait_all_tasks_blocked()
        for client in clients[:2]:
            assert not idle_ended.is_set()
            answer = await client.fetch("POST", body=HELLO)
            assert (answer.body, answer.headers.get("connection")) == (HELLO, "close")
            await client.closed()
            await client.stream.aclose()
        await idle_ended.wait()  # there is nobody else to wait for
        if sys.platform == "linux":
            ended = select.poll()
            ended.register(streaming.stream.socket.fileno(), select.POLLRDHUP)
            assert not ended.poll(0)
            reply.finish(b"end")
            assert ended.poll(0), "the connection ends later than the response, and the next request comes between"
        else:
            reply.finish(b"end")
        answer = await streaming.answer()
        assert (answer.body, answer.headers.get("connection")) == (b"eventend", None)
        await streaming.closed()
        await streaming.stream.aclose()


async def test_what_has_connected_before_it_stops_is_answered() -> None:
    face, stop = DummyFace(), trio.Event()
    async with trio.open_nursery() as nursery:
        (url,) = await nursery.start(partial(serve_with_clock, face, port=0, stop=stop))
        early = [socket.create_connection(("127.0.0.1", port_of(url))) for _ in range(50)]
        for sock in early:
            sock.sendall(http_request("POST", "/echo", body=HELLO))
        stop.set()  # no task has run since
        for sock in early:
            client = HttpWire(trio.SocketStream(trio.socket.from_stdlib_socket(sock)))
            assert (await client.answer()).body == HELLO
            await client.closed()
            await client.stream.aclose()


async def test_a_request_that_came_before_its_connection_was_closed_is_answered() -> None:
    face, stop, ending = DummyFace(), trio.Event(), trio.Event()

    async def drain(end_idle: Callable[[], Awaitable[object]]) -> None:
        await ending.wait()
        for client in clients:
            client.stream.socket._sock.send(http_request("POST", "/echo", body=HELLO))
        await end_idle()

    async with trio.open_nursery() as nursery:
        (url,) = await nursery.start(partial(serve_with_clock, face, port=0, stop=stop, drain=drain))
        clients = [await connect(url) for _ in range(5)]
        for client in clients:
            await client.fetch("POST", body=HELLO)
        stop.set()
        await wait_all_tasks_blocked()
        ending.set()
        for client in clients:
            answer = await client.answer()
            assert (answer.body, answer.headers.get("connection")) == (HELLO, "close")
            await client.stream.aclose()


async def test_what_does_not_end_in_time_is_cut(steady_clock: trio.abc.Clock) -> None:
    face, stop = DummyFace(), trio.Event()
    async with trio.open_nursery() as nursery:
        (url,) = await nursery.start(partial(serve_with_clock, face, port=0, stop=stop, grace=0.05))
        client = await connect(url)
        await client.request("POST", "/wait", body=HELLO)
        await until(lambda: face.handlers and face.handlers[0].body is not None)
        stop.set()
        with pytest.raises(trio.BrokenResourceError):
            await client.rest()
        await client.stream.aclose()
    assert face.handlers[0].gone == 1
