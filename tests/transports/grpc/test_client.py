"""A client of gRPC: what it connects to, what it makes of refusals, and what its connection of HTTP/2 bears."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import pytest
import trio
import trustme
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

import trimcp
from tests.fuzz.effort import PATIENCE
from tests.peers.serving import answering, served
from tests.transports.grpc.test_server import make_server
from tests.transports.grpc_support import meeting_served, target_at
from tests.transports.websocket_support import Meeting
from trimcp.framing.grpc import GrpcDecoder, GrpcStatus, message_frame
from trimcp.transports.grpc.calls import WINDOW, CallFailed
from trimcp.transports.grpc.client import GrpcServer
from trimcp.transports.grpc.http2 import Http2Client, running_http2
from trimcp.transports.http.h2 import frames as h2_frames
from trimcp.transports.http.h2.heads import write_block
from trimcp.transports.http.interfaces import refusal

OK = [("grpc-status", "0")]
HEAD = [(":status", "200"), ("content-type", "application/grpc")]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://localhost", "begins with grpc://"),
        ("grpc://", "begins with grpc://"),
        ("grpc://localhost/mcp", "has no path"),
        ("grpc://localhost?token=1", "has no path"),
        ("grpc://me:secret@localhost", "credentials"),
    ],
)
def test_urls_that_name_no_server(url: str, why: str) -> None:
    with pytest.raises(trimcp.LocalError, match=why):
        GrpcServer(url)


@pytest.mark.parametrize("name", ["grpc-timeout", "te", "Content-Type"])
def test_headers_of_grpc_are_not_for_callers(name: str) -> None:
    with pytest.raises(trimcp.LocalError, match="belongs to gRPC"):
        GrpcServer("grpc://localhost", {name: "x"})


def test_secrets_are_not_shown() -> None:
    assert "secret" not in repr(GrpcServer("grpc://localhost", {"authorization": "Bearer secret"}))


async def test_a_url_alone_is_a_target() -> None:
    async with served(make_server(), "grpc") as place, trimcp.Client("c").connect(place.url) as session:
        assert (await session.call_tool("echo", {"text": "hi"})).text == "hi"


async def test_over_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "server.pem"))
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    async with served(make_server(), "grpc", certfile=tmp_path / "server.pem") as place:
        assert place.url.startswith("grpcs://")
        target = trimcp.grpc(place.url, ssl_context=trust)
        async with trimcp.Client("c").connect(target) as session:
            assert (await session.call_tool("echo", {"text": "x" * 200_000})).text == "x" * 200_000
        with pytest.raises(trimcp.ConnectionLost, match="not trusted"):
            async with trimcp.Client("c").connect(trimcp.grpc(place.url)):
                pass


async def test_a_server_with_tls_and_no_http2(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "server.pem"))
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    certificate.configure_cert(context)
    context.set_alpn_protocols(["http/1.1"])

    async def answer(stream: trio.SocketStream) -> None:
        await trio.SSLStream(stream, context, server_side=True).do_handshake()
        await stream.receive_some(1)

    async with answering(answer) as port:
        target = trimcp.grpc(f"grpcs://127.0.0.1:{port}", ssl_context=trust)
        with pytest.raises(trimcp.ConnectionLost, match="does not speak HTTP/2"):
            async with trimcp.Client("c").connect(target):
                pass


async def test_over_a_unix_socket(tmp_path: Path) -> None:
    async with served(make_server(), "grpc", uds=str(tmp_path / "s.sock")) as place:
        assert place.url.startswith("grpc+unix://")
        async with trimcp.Client("c").connect(trimcp.grpc(place.url)) as session:
            assert (await session.call_tool("echo", {"text": "hi"})).text == "hi"


@pytest.mark.parametrize(
    ("status", "name", "advice"),
    [
        (401, "UNAUTHENTICATED: no entry", "credentials"),
        (403, "PERMISSION_DENIED: no entry", "does not allow"),
        (503, "UNAVAILABLE: no entry", "too much"),
    ],
)
async def test_why_a_server_refuses(status: int, name: str, advice: str) -> None:
    async with meeting_served(Meeting()) as (place, face):
        face.refused = refusal(status, "no entry")
        with pytest.raises(trimcp.ConnectionLost) as caught:
            async with target_at(place).connect():
                pass
    assert name in str(caught.value)
    assert advice in str(caught.value)


async def test_nobody_there() -> None:
    with pytest.raises(
        trimcp.ConnectionLost, match=r"cannot connect to grpc://127\.0\.0\.1:1: .*is the server running"
    ):
        async with trimcp.grpc("grpc://127.0.0.1:1").connect():
            pass


async def test_a_server_that_speaks_something_else() -> None:
    async def answer(stream: trio.SocketStream) -> None:
        await stream.receive_some(100)
        await stream.send_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    async with answering(answer) as port:
        target = trimcp.grpc(f"grpc://127.0.0.1:{port}")
        with trio.fail_after(PATIENCE), pytest.raises(trimcp.ConnectionLost):
            async with target.connect():
                pass


class Peer:
    """A server's end of HTTP/2, which does as it is told."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.frames = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        self.frames.initiate_connection()
        self.seen: list[Any] = []

    async def flush(self) -> None:
        await self.stream.send_all(self.frames.data_to_send())

    async def event(self, kind: type[Any]) -> Any:
        await self.flush()
        while True:
            for event in self.seen:
                if isinstance(event, kind):
                    self.seen.remove(event)
                    return event
            data = await self.stream.receive_some(65536)
            if not data:
                return None
            self.seen += self.frames.receive_data(bytes(data))
            await self.flush()

    async def answer(self, number: int, *messages: bytes, trailers: list[tuple[str, str]] = OK) -> None:
        self.frames.send_headers(number, HEAD)
        for message in messages:
            self.frames.send_data(number, message_frame(message))
        self.frames.send_headers(number, trailers, end_stream=True)
        await self.flush()


@asynccontextmanager
async def client_and_peer() -> AsyncIterator[tuple[Http2Client, Peer]]:
    ours, theirs = memory_stream_pair()
    async with running_http2(Http2Client(ours, "localhost")) as client:
        yield client, Peer(theirs)
        await trio.aclose_forcefully(theirs)


async def test_calls_run_at_once_and_end_in_any_order(autojump_clock: MockClock) -> None:
    async with client_and_peer() as (client, peer):
        answers: dict[str, bytes] = {}

        async def ask(text: str) -> None:
            answers[text] = await client.unary("/a.B/C", text.encode(), timeout=5)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "one")
            nursery.start_soon(ask, "two")
            first, second = [await peer.event(h2.events.RequestReceived) for _ in range(2)]
            assert dict(first.headers)[b"grpc-timeout"] == b"5000m"
            asked = {}
            for _ in range(2):
                data = await peer.event(h2.events.DataReceived)
                asked[data.stream_id] = data.data[5:]
            for number in (second.stream_id, first.stream_id):
                await peer.answer(number, asked[number].upper())
        assert answers == {"one": b"ONE", "two": b"TWO"}


async def test_the_status_of_a_call(autojump_clock: MockClock) -> None:
    async with client_and_peer() as (client, peer), trio.open_nursery() as nursery:

        async def refuse() -> None:
            number = (await peer.event(h2.events.RequestReceived)).stream_id
            await peer.answer(number, trailers=[("grpc-status", "5"), ("grpc-message", "nicht %C3%BCber"), ("x", "y")])

        nursery.start_soon(refuse)
        with pytest.raises(CallFailed, match="NOT_FOUND: nicht über") as caught:
            await client.unary("/a.B/C", b"")
        assert caught.value.status is GrpcStatus.NOT_FOUND
        assert caught.value.trailers["x"] == "y"


async def test_cancelling_a_call_resets_it_and_no_other(autojump_clock: MockClock) -> None:
    async with client_and_peer() as (client, peer), trio.open_nursery() as nursery:
        with trio.move_on_after(1):
            await client.unary("/a.B/C", b"")
        reset = await peer.event(h2.events.StreamReset)
        assert reset.error_code == 8  # CANCEL

        async def answer() -> None:
            await peer.event(h2.events.RequestReceived)
            await peer.answer((await peer.event(h2.events.RequestReceived)).stream_id, b"well")

        nursery.start_soon(answer)
        assert await client.unary("/a.B/C", b"") == b"well"


async def test_calls_under_way_survive_a_goodbye_and_new_ones_do_not_begin(autojump_clock: MockClock) -> None:
    async with client_and_peer() as (client, peer), trio.open_nursery() as nursery:
        answers: list[bytes] = []

        async def ask() -> None:
            answers.append(await client.unary("/a.B/C", b"x" * 100_000))

        nursery.start_soon(ask)
        number = (await peer.event(h2.events.RequestReceived)).stream_id
        goodbye = b"\0\0\x08\x07\0\0\0\0\0" + number.to_bytes(4, "big") + bytes(4)
        await peer.flush()
        await peer.stream.send_all(goodbye)
        taken = 0
        while taken < 100_005:  # what it sends needs windows, which still count
            data = await peer.event(h2.events.DataReceived)
            taken += len(data.data)
            peer.frames.acknowledge_received_data(data.flow_controlled_length, number)
        assert not client.usable
        with pytest.raises(CallFailed) as caught:
            await client.unary("/a.B/C", b"")
        assert (caught.value.status, caught.value.begun) == (GrpcStatus.UNAVAILABLE, False)
        await peer.answer(number, b"last")
        await trio.testing.wait_all_tasks_blocked()
        assert answers == [b"last"]


async def test_what_a_caller_does_not_read_is_not_granted_again(autojump_clock: MockClock) -> None:
    async with client_and_peer() as (client, peer), client.call("/a.B/C") as call:
        number = (await peer.event(h2.events.RequestReceived)).stream_id
        peer.frames.send_headers(number, HEAD)
        await peer.flush()
        sent = 0
        with trio.move_on_after(1):
            while True:
                size = min(peer.frames.local_flow_control_window(number), 16_384)
                if not size:
                    await peer.event(h2.events.WindowUpdated)
                    continue
                peer.frames.send_data(number, bytes(size))
                sent += size
                await peer.flush()
        assert sent == WINDOW
        assert len(await call.receive()) == WINDOW
        call.credit(WINDOW)
        with trio.fail_after(1):
            while peer.frames.local_flow_control_window(number) < WINDOW:
                await peer.event(h2.events.WindowUpdated)


async def test_an_answer_over_the_limit_fails_the_call(autojump_clock: MockClock) -> None:
    async with client_and_peer() as (client, peer), client.call("/a.B/C") as call:
        await peer.answer((await peer.event(h2.events.RequestReceived)).stream_id, bytes(2_000))
        with pytest.raises(CallFailed, match="RESOURCE_EXHAUSTED"):
            await call.next_message(GrpcDecoder(1_000))


@pytest.mark.parametrize("over", [0, 1])
async def test_an_answer_counts_against_its_limit_as_it_arrives(over: int, autojump_clock: MockClock) -> None:
    async with client_and_peer() as (client, peer), trio.open_nursery() as nursery:
        done = trio.Event()

        async def ask() -> None:
            with pytest.raises(CallFailed, match="RESOURCE_EXHAUSTED") if over else nullcontext():
                assert await client.unary("/a.B/C", b"", max_message=1_000) == bytes(1_000)
            done.set()

        nursery.start_soon(ask)
        number = (await peer.event(h2.events.RequestReceived)).stream_id
        peer.frames.send_headers(number, HEAD)
        answer = b"\0" + (9_999 if over else 1_000).to_bytes(4, "big") + bytes(1_000)
        for at in range(0, len(answer), 100):
            peer.frames.send_data(number, answer[at : at + 100])
        await peer.flush()
        await wait_all_tasks_blocked()
        assert not done.is_set()
        if over:
            peer.frames.send_data(number, b"x")
            assert (await peer.event(h2.events.StreamReset)).error_code == h2.errors.ErrorCodes.CANCEL
        else:
            peer.frames.send_headers(number, OK, end_stream=True)
            await peer.flush()
        await done.wait()


async def test_a_silent_server_is_pinged_and_then_given_up(autojump_clock: MockClock) -> None:
    ours, theirs = memory_stream_pair()
    async with running_http2(Http2Client(ours, "localhost")) as client, client.call("/a.B/C") as call:
        began = trio.current_time()
        with pytest.raises(CallFailed, match="nothing was heard of the server for 60 seconds"):
            await call.receive()
        assert trio.current_time() - began == pytest.approx(60)
        seen = Peer(theirs).frames.receive_data(bytes(await theirs.receive_some(65536)))
        assert sum(isinstance(event, h2.events.PingReceived) for event in seen) == 2


async def test_a_server_that_answers_pings_may_be_silent_for_ever(autojump_clock: MockClock) -> None:
    async with client_and_peer() as (client, peer), client.call("/a.B/C") as call, trio.open_nursery() as nursery:

        async def live() -> None:
            while await peer.event(h2.events.PingReceived) is not None:
                pass

        nursery.start_soon(live)
        with trio.move_on_after(500) as scope:
            await call.receive()
        assert scope.cancelled_caught
        nursery.cancel_scope.cancel()


async def test_bytes_that_are_no_http2_end_the_connection(autojump_clock: MockClock) -> None:
    ours, theirs = memory_stream_pair()
    async with running_http2(Http2Client(ours, "localhost")) as client, client.call("/a.B/C") as call:
        await theirs.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)
        with pytest.raises(CallFailed, match="UNAVAILABLE"):
            await call.receive()
        await client.over.wait()
        with pytest.raises(CallFailed):
            await client.unary("/a.B/C", b"")


async def call_again_and_again(client: Http2Client, many: int) -> None:
    async def ask() -> None:
        for _ in range(many):
            assert await client.unary("/grpc.health.v1.Health/Check", b"") == b"\x08\x01"

    async with trio.open_nursery() as nursery:
        for _ in range(32):
            nursery.start_soon(ask)


async def test_a_connection_bears_thousands_of_calls_with_many_at_once() -> None:
    async with meeting_served(Meeting()) as (place, _), target_at(place).open() as client:
        with trio.fail_after(PATIENCE):
            await call_again_and_again(client, 50)


HEARD = h2_frames.settings_frame({})
INTERIM = h2_frames.frame(h2_frames.HEADERS, h2_frames.END_HEADERS, 1, write_block([(":status", "103")]))
ANSWERED = h2_frames.frame(h2_frames.HEADERS, h2_frames.END_HEADERS, 1, write_block(HEAD))
PAID_PINGS = h2_frames.frame(h2_frames.DATA, 0, 1, b"x") + 8 * h2_frames.frame(h2_frames.PING, 0, 0, b"pingping")


@pytest.mark.parametrize(
    ("begins", "piece", "why"),
    [(ANSWERED, PAID_PINGS, "does not read the answers"), (b"", INTERIM, "too many interim heads")],
    ids=["pings that data pays for", "interim heads"],
)
async def test_a_server_that_makes_the_client_work_for_nothing_is_left(begins: bytes, piece: bytes, why: str) -> None:
    """It never reads, and sends frames of which each may have its answer, or none."""

    async def answer(stream: trio.abc.Stream) -> None:
        heard = b""
        while b"/a.B/C" not in heard:
            heard += await stream.receive_some()
        await stream.send_all(HEARD + begins)
        with suppress(trio.BrokenResourceError):
            while True:
                await stream.send_all(piece * 1_000)

    async with answering(answer) as port, trimcp.grpc(f"grpc://127.0.0.1:{port}").open() as client:

        async def watch() -> None:
            while True:
                assert client.writer.waiting < 2 * 1024 * 1024
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            with trio.fail_after(PATIENCE), pytest.raises(CallFailed, match=why):
                await client.unary("/a.B/C", b"")
            nursery.cancel_scope.cancel()


async def test_messages_that_are_there_already_are_returned_in_turns(autojump_clock: MockClock) -> None:
    async with client_and_peer() as (client, peer), client.call("/a.B/C") as call, trio.open_nursery() as nursery:
        await peer.answer((await peer.event(h2.events.RequestReceived)).stream_id, *[b""] * 1_000)
        await wait_all_tasks_blocked()
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await trio.lowlevel.checkpoint()

        nursery.start_soon(others)
        decoder, read = GrpcDecoder(1_000), 0
        while await call.next_message(decoder) is not None:
            read += 1
        assert read == 1_000
        assert turns >= 1_000 // 32
        nursery.cancel_scope.cancel()
