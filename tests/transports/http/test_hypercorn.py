"""Hypercorn serves the face over real sockets: HTTP/1.1, TLS, WebSocket, mounted, limited, and to its end."""

from __future__ import annotations

import gc
import logging
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import httpx2
import pytest
import trio
from hypercorn.utils import LifespanFailureError
from trio.testing import wait_all_tasks_blocked
from trio_websocket import open_websocket_url

from tests.peers.tls import authority, client_context
from tests.peers.websockets import CLOSE, FIN, frame, handshake
from tests.transports.http.asgi_support import TEXT, DummyFace, DummyHandler, failing, upgrade
from tests.transports.http.hypercorn_support import (
    open_websocket,
    over_tls,
    read_until,
    serving,
)
from trimcp.transports.http.asgi.app import AsgiApp
from trimcp.transports.http.asgi.hypercorn import serve_hypercorn
from trimcp.transports.http.interfaces import HttpReply, HttpResponse
from trimcp.transports.http.settings import HttpLimits
from trimcp.wire.jsonrpc import encode_request


def hello() -> DummyFace:
    face = DummyFace()
    face["/here"] = HttpResponse(200, TEXT, b"hello")
    face["/mcp"] = DummyHandler(max_body=1_000_000)
    face["/ws"] = upgrade(max_message=100_000)
    return face


def open_stream(body: bytes, reply: HttpReply) -> None:
    reply.start(HttpResponse(200, TEXT, b"begin "))


async def settle() -> None:
    await wait_all_tasks_blocked(0.02)


# Protocols


async def test_http_1_1_keeps_its_connection() -> None:
    face = hello()
    async with serving(AsgiApp(face.running)) as served, httpx2.AsyncClient(base_url=served.address) as client:
        assert served.address.startswith("http://127.0.0.1:")
        for n in range(3):
            answer = await client.post("/mcp", content=b"%d" % n)
            assert (answer.status_code, answer.content) == (200, b"%d" % n)
            assert answer.headers["content-length"] == "1"
            assert "server" not in answer.headers
        assert (await client.head("/here")).headers["content-length"] == "5"
        assert (await client.get("/nowhere")).status_code == 404
    assert len({head.peer for head in face.heads}) == 1
    assert served.failure is None


async def test_a_stream_arrives_as_it_is_written() -> None:
    face = hello()
    face["/stream"] = handler = DummyHandler(open_stream)
    async with serving(AsgiApp(face.running)) as served, await served.connect() as stream:
        await stream.send_all(b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"Transfer-Encoding: chunked" in await read_until(stream, b"begin ")
        assert handler.reply is not None
        handler.reply.write(b"middle ")
        assert b"middle " in await read_until(stream, b"middle ")
        handler.reply.finish(b"end")
        assert (await read_until(stream, b"0\r\n\r\n")).endswith(b"end\r\n0\r\n\r\n")
        assert handler.disconnects == 0


async def test_a_client_that_leaves_is_noticed() -> None:
    face = hello()
    face["/stream"] = handler = DummyHandler(open_stream)
    async with serving(AsgiApp(face.running)) as served:
        stream = await served.connect()
        await stream.send_all(b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await read_until(stream, b"begin ")
        await stream.aclose()
        await handler.gone.wait()
        await settle()
        assert face.ended == [("/stream", 200, 6)]


async def test_an_aborted_response_is_cut() -> None:
    face = hello()
    face["/stream"] = handler = DummyHandler(open_stream)
    async with serving(AsgiApp(face.running)) as served, await served.connect() as stream:
        await stream.send_all(b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await read_until(stream, b"begin ")
        assert handler.reply is not None
        handler.reply.abort()
        assert b"0\r\n\r\n" not in await read_until(stream, b"never")


async def test_an_early_answer_survives_a_body_that_goes_on(steady_clock: trio.abc.Clock) -> None:
    face = hello()
    limits = HttpLimits(linger_timeout=0.3, linger_bytes=8_000_000)
    async with serving(AsgiApp(face.running, limits=limits)) as served:
        for _ in range(5):
            async with await served.connect() as stream:
                await stream.send_all(b"POST /mcp HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2000000\r\n\r\n")
                await stream.send_all(b"x" * 1_800_000)
                answer = await read_until(stream, b"1000000")
                assert answer.startswith(b"HTTP/1.1 413 "), answer
    assert served.failure is None


@attrs.frozen
class Identity:
    certfile: Path
    keyfile: Path
    client: ssl.SSLContext


@pytest.fixture(scope="session")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    folder = tmp_path_factory.mktemp("tls")
    certificate = authority().issue_cert("localhost", "127.0.0.1")
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    for n, blob in enumerate(certificate.cert_chain_pems):
        blob.write_to_path(folder / "cert.pem", append=n > 0)
    return Identity(folder / "cert.pem", folder / "key.pem", client_context())


@pytest.mark.parametrize("own_context", [False, True])
async def test_tls_agrees_on_http_1_1(identity: Identity, own_context: bool) -> None:
    face = hello()
    tls: dict[str, Any] = {"certfile": identity.certfile, "keyfile": identity.keyfile}
    if own_context:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(identity.certfile, identity.keyfile)
        tls = {"ssl_context": context}
    async with serving(AsgiApp(face.running), **tls) as served:
        assert served.address.startswith("https://127.0.0.1:")
        identity.client.set_alpn_protocols(["h2", "http/1.1"])
        stream = await over_tls(served, identity.client)
        assert stream.selected_alpn_protocol() == "http/1.1"
        await trio.aclose_forcefully(stream)
        async with httpx2.AsyncClient(base_url=served.address, verify=identity.client) as http1:
            assert (await http1.post("/mcp", content=b"x")).content == b"x"
    assert all(head.secure for head in face.heads)
    assert served.failure is None


async def test_the_key_may_stand_in_the_file_of_the_certificate(identity: Identity, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes(identity.keyfile.read_bytes() + identity.certfile.read_bytes())
    async with serving(AsgiApp(hello().running), certfile=both) as served:
        assert served.address.startswith("https://")
        async with httpx2.AsyncClient(base_url=served.address, verify=identity.client) as client:
            assert (await client.get("/here")).content == b"hello"


async def test_a_unix_socket(tmp_path: Path) -> None:
    face = hello()
    path = tmp_path / "mcp.sock"
    async with serving(AsgiApp(face.running), bind=f"unix:{path}") as served:
        assert served.address == f"unix:{path}"
        transport = httpx2.AsyncHTTPTransport(uds=str(path))
        async with httpx2.AsyncClient(base_url="http://localhost", transport=transport) as client:
            assert (await client.get("/here")).content == b"hello"
    assert (face.heads[0].peer, face.heads[0].loopback) == ("unix", True)


async def test_several_addresses_and_an_open_socket() -> None:
    """Workers share a socket this way: each serves the descriptor it inherited."""
    face = hello()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        stop = trio.Event()
        async with trio.open_nursery() as nursery:

            async def serve(task_status: trio.TaskStatus[list[str]]) -> None:
                bind = [f"fd://{listener.fileno()}", "127.0.0.1:0"]
                app = AsgiApp(face.running)
                await serve_hypercorn(app, bind=bind, shutdown_trigger=stop.wait, task_status=task_status)

            addresses = await nursery.start(serve)
            assert addresses[0] == f"http://127.0.0.1:{listener.getsockname()[1]}"
            for address in addresses:
                async with httpx2.AsyncClient(base_url=address) as client:
                    assert (await client.get("/here")).content == b"hello"
            stop.set()
        listener.detach()  # closed by the server


async def test_websocket_echo() -> None:
    face = hello()
    async with serving(AsgiApp(face.running)) as served:
        url = f"ws://127.0.0.1:{served.port}/ws"
        async with open_websocket_url(url, subprotocols=["mcp"]) as websocket:
            assert websocket.subprotocol == "mcp"
            for n in range(20):
                message = encode_request(n, "check", {"text": "x" * 1000 * n})
                await websocket.send_message(message.decode())
                size = len(message)
                assert await websocket.get_message() == f'{{"jsonrpc":"2.0","id":{n},"result":{{"size":{size}}}}}'
        await settle()
        assert face.ended[0][:2] == ("/ws", 101)
    assert served.failure is None


@pytest.mark.parametrize(
    ("opcode", "message", "code"),
    [(2, b"{}", 1003), (1, '"é"'.encode() * 30_000, 1009), (1, b"x" * 3_000_000, 1009)],
)
async def test_a_websocket_message_that_is_none_ends_it(opcode: int, message: bytes, code: int) -> None:
    face = hello()
    async with serving(AsgiApp(face.running)) as served:
        async with await open_websocket(served) as stream:
            await stream.send_all(frame(FIN | opcode, message))
            closing = await stream.receive_some(4)
            assert closing[:2] + closing[2:] == b"\x88\x02" + code.to_bytes(2, "big")
            await stream.send_all(frame(FIN | CLOSE, closing[2:]))
            assert await stream.receive_some() == b""
        await settle()
        assert face.ended[0][:2] == ("/ws", 101)
        assert await served.alive()


async def test_a_websocket_is_refused_with_a_response() -> None:
    face = hello()
    face["/ws"] = HttpResponse(401, (*TEXT, ("WWW-Authenticate", "Bearer")), b"who?")
    async with serving(AsgiApp(face.running)) as served, await served.connect() as stream:
        await stream.send_all(handshake())
        answer = await read_until(stream, b"who?")
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert b"www-authenticate: Bearer\r\n" in answer
    assert served.failure is None


@pytest.mark.parametrize("header", ["Connection: upgrade, \xfe", "Sec-WebSocket-Protocol: mcp, \xfe"])
async def test_a_handshake_with_bytes_beyond_ascii_harms_only_itself(
    header: str, caplog: pytest.LogCaptureFixture
) -> None:
    face = hello()
    name = header.partition(":")[0]
    asked = [line for line in handshake().split(b"\r\n") if not line.startswith(name.encode())]
    asked[1:1] = [header.encode("latin-1")]
    async with serving(AsgiApp(face.running)) as served:
        async with await served.connect() as stream:
            await stream.send_all(b"\r\n".join(asked))
            assert (await read_until(stream, b"\r\n\r\n")).startswith((b"HTTP/1.1 400", b"HTTP/1.1 101"))
        assert await served.alive()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# Mounting


def router(app: AsgiApp, *, strips: bool, forwards: bool) -> Any:
    """An application of somebody else's that has ours below /api."""

    async def route(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            if forwards:
                return await app(scope, receive, send)
            await receive()
            async with app.lifespan():
                await send({"type": "lifespan.startup.complete"})
                await receive()
            return await send({"type": "lifespan.shutdown.complete"})
        if scope["path"].startswith("/api/"):
            below = {**scope, "root_path": "/api"}
            if strips:
                below["path"] = scope["path"].removeprefix("/api")
            return await app(below, receive, send)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        return await send({"type": "http.response.body", "body": b"home"})

    return route


@pytest.mark.parametrize("strips", [True, False])
@pytest.mark.parametrize("forwards", [True, False])
async def test_it_can_be_mounted_in_another_application(strips: bool, forwards: bool) -> None:
    face = hello()
    app = router(AsgiApp(face.running), strips=strips, forwards=forwards)
    async with serving(app) as served, httpx2.AsyncClient(base_url=served.address) as client:
        assert (await client.get("/")).content == b"home"
        assert (await client.post("/api/mcp", content=b"x")).content == b"x"
        assert (await client.get("/api/nowhere")).status_code == 404
        async with open_websocket_url(f"ws://127.0.0.1:{served.port}/api/ws", subprotocols=["mcp"]) as websocket:
            await websocket.send_message('{"jsonrpc":"2.0","id":1,"method":"m"}')
            assert '"id":1' in await websocket.get_message()
    assert {head.path for head in face.heads} == {"/mcp", "/nowhere", "/ws"}
    assert {head.root for head in face.heads} == {"/api"}
    assert served.failure is None


# Limits


async def test_a_slow_head_is_not_waited_for(steady_clock: trio.abc.Clock) -> None:
    assert HttpLimits().head_timeout <= 10
    face = hello()
    async with serving(AsgiApp(face.running), limits=HttpLimits(head_timeout=0.2)) as served:
        async with await served.connect() as slow, await served.connect() as silent, await served.connect() as second:
            await second.send_all(b"GET /here HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"hello" in await read_until(second, b"hello")
            with trio.fail_after(2):
                sent = 0
                try:
                    for byte in b"GET /here HTTP/1.1\r\nHost: localhost\r\n" + b"X-Y: z\r\n" * 1000:
                        await slow.send_all(bytes([byte]))
                        sent += 1
                        await trio.sleep(0.01)  # the client is slow; nobody waits for anything here
                except trio.BrokenResourceError:
                    pass
                assert 5 < sent < 50
                assert await silent.receive_some() == b""
                assert await second.receive_some() == b""
        assert await served.alive()


async def test_a_slow_handshake_is_not_waited_for(identity: Identity, steady_clock: trio.abc.Clock) -> None:
    tls: dict[str, Any] = {"certfile": identity.certfile, "keyfile": identity.keyfile}
    limits = HttpLimits(head_timeout=0.2)
    async with serving(AsgiApp(hello().running), limits=limits, **tls) as served, await served.connect() as stream:
        with trio.fail_after(2):
            assert await stream.receive_some() == b""


async def test_a_large_head_is_refused() -> None:
    limits = HttpLimits(max_head=2000)
    async with serving(AsgiApp(hello().running), limits=limits) as served, await served.connect() as stream:
        await stream.send_all(b"GET /here HTTP/1.1\r\nHost: localhost\r\nX-Y: " + b"z" * 3000)
        assert (await read_until(stream, b"\r\n\r\n")).startswith(b"HTTP/1.1 431 ")


async def test_connections_beyond_the_most_are_closed() -> None:
    limits = HttpLimits(max_connections=2)
    async with serving(AsgiApp(hello().running), limits=limits) as served:
        async with await served.connect() as first, await served.connect():
            await first.send_all(b"GET /here HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"hello" in await read_until(first, b"hello")
            async with await served.connect() as third:
                assert await third.receive_some() == b""
        await settle()
        assert await served.alive()


OtherAddresses = pytest.mark.skipif(sys.platform != "linux", reason="only there every 127.x.y.z is this machine")


async def asked(stream: trio.SocketStream) -> bool:
    await stream.send_all(b"GET /here HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return b"hello" in await read_until(stream, b"hello")


@OtherAddresses
async def test_an_idle_connection_of_who_holds_most_gives_way_to_another() -> None:
    async with (
        serving(AsgiApp(hello().running), limits=HttpLimits(max_connections=3)) as served,
        AsyncExitStack() as all,
    ):
        ours = [await all.enter_async_context(await served.connect(source="127.0.0.1")) for _ in range(3)]
        for stream in ours:
            assert await asked(stream)
        async with await served.connect(source="127.0.0.1") as another:
            assert await another.receive_some() == b"", "not for one of its own"
        newcomer = await all.enter_async_context(await served.connect(source="127.0.0.2"))
        assert await asked(newcomer)
        with pytest.raises(trio.BrokenResourceError):
            await ours[0].receive_some()
        for stream in ours[1:]:
            assert await asked(stream)


class Shared(DummyHandler):
    """Begins streams for many."""

    def disconnected(self, slow: str | None = None) -> None:
        self.disconnects += 1


@OtherAddresses
async def test_who_holds_far_more_gives_way_with_a_request_under_way() -> None:
    face = hello()
    face["/stream"] = handler = Shared(open_stream)
    most = 16
    async with (
        serving(AsgiApp(face.running), limits=HttpLimits(max_connections=most)) as served,
        AsyncExitStack() as all,
    ):
        for _ in range(most):
            stream = await all.enter_async_context(await served.connect(source="127.0.0.1"))
            await stream.send_all(b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await read_until(stream, b"begin ")
        newcomer = await all.enter_async_context(await served.connect(source="127.0.0.2"))
        assert await asked(newcomer)
        await settle()
        assert handler.disconnects == 1


# The end


async def test_an_idle_server_ends_at_once(steady_clock: trio.abc.Clock) -> None:
    async with serving(AsgiApp(hello().running)) as served, await served.connect() as idle:
        await idle.send_all(b"GET /here HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await read_until(idle, b"hello")
        began = trio.current_time()
        served.stop.set()
        await served.ended.wait()
        assert trio.current_time() - began < 0.5
        assert await idle.receive_some() == b""
    assert served.failure is None


async def test_a_request_under_way_is_answered_in_its_grace(steady_clock: trio.abc.Clock) -> None:
    face = hello()
    face["/stream"] = handler = DummyHandler(open_stream)
    async with serving(AsgiApp(face.running)) as served, await served.connect() as stream:
        await stream.send_all(b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await read_until(stream, b"begin ")
        served.stop.set()
        await settle()
        assert not await served.alive()
        assert handler.reply is not None
        handler.reply.finish(b"end")
        assert b"end" in await read_until(stream, b"0\r\n\r\n")
        with trio.fail_after(1):
            await served.ended.wait()
    assert handler.disconnects == 0


async def test_a_request_that_outlasts_its_grace_is_cut(steady_clock: trio.abc.Clock) -> None:
    face = hello()
    face["/stream"] = handler = DummyHandler(open_stream)
    async with serving(AsgiApp(face.running), grace=0.1) as served, await served.connect() as stream:
        await stream.send_all(b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await read_until(stream, b"begin ")
        served.stop.set()
        with trio.fail_after(2):
            await served.ended.wait()
    assert handler.disconnects == 1
    assert served.failure is None


@asynccontextmanager
async def fails_to_start() -> AsyncIterator[DummyFace]:
    raise OSError("no such file: events.db")
    yield DummyFace()


async def test_a_face_that_cannot_start_is_told() -> None:
    with pytest.raises(LifespanFailureError, match=r"startup.*no such file: events\.db") as caught:
        await serve_hypercorn(AsgiApp(fails_to_start), bind="127.0.0.1:0")
    assert isinstance(caught.value.__context__, OSError)


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # Hypercorn forgets the socket it could not bind
async def test_an_address_in_use_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        await serve_hypercorn(AsgiApp(hello().running), bind=f"127.0.0.1:{taken.getsockname()[1]}")
    gc.collect()


async def test_a_face_that_fails_ends_the_server(steady_clock: trio.abc.Clock) -> None:
    trouble = trio.Event()
    async with serving(AsgiApp(partial(failing, hello(), trouble))) as served:
        assert await served.alive()
        trouble.set()
        with trio.fail_after(2):
            await served.ended.wait()
    assert isinstance(served.failure, ExceptionGroup)
    assert served.failure.subgroup(OSError) is not None


async def test_an_application_without_a_lifespan_is_served() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"plain"})

    async with serving(app) as served:
        assert await served.alive()
    assert served.failure is None


async def test_ordinary_lives_and_deaths_are_quiet(caplog: pytest.LogCaptureFixture) -> None:
    face = hello()
    face["/stream"] = handler = DummyHandler(open_stream)
    with caplog.at_level(logging.INFO):
        async with serving(AsgiApp(face.running)) as served:
            assert await served.alive()
            async with await served.connect() as stream:
                await stream.send_all(b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
                await read_until(stream, b"begin ")
            await handler.gone.wait()
            async with await served.connect() as stream:
                await stream.send_all(b"\x00\x01nonsense\r\n\r\n")
                assert b" 400 " in await read_until(stream, b"\r\n\r\n")
            await settle()
    assert [record.getMessage() for record in caplog.records if record.name.startswith(("trimcp", "hyper"))] == []


async def test_a_handler_that_crashes_is_one_error(caplog: pytest.LogCaptureFixture) -> None:
    def crash(body: bytes, reply: HttpReply) -> None:
        raise ZeroDivisionError("a secret")

    face = hello()
    face["/mcp"] = DummyHandler(crash)
    async with serving(AsgiApp(face.running)) as served, httpx2.AsyncClient(base_url=served.address) as client:
        answer = await client.post("/mcp")
        assert (answer.status_code, answer.content) == (500, b"")
        assert (await client.get("/here")).status_code == 200
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
