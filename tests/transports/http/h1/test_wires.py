"""Wires read, write and wake over sockets, TLS and memory; and a read prefix comes back first."""

from __future__ import annotations

import errno
import gc
import os
import select
import socket
import sys
from collections.abc import Callable

import pytest
import trio
from trio.testing import MockClock, lockstep_stream_pair, memory_stream_pair, wait_all_tasks_blocked

from tests.peers.tls import client_context, server_context
from trimcp.transports.http.h1 import wires
from trimcp.transports.http.h1.wires import PolledWire, Poller, SocketWire, StreamWire, Wire


def unix_socket() -> tuple[Wire, trio.socket.SocketType]:
    ours, theirs = socket.socketpair()
    return SocketWire(ours), trio.socket.from_stdlib_socket(theirs)


def tcp_socket() -> tuple[Wire, trio.socket.SocketType]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        theirs = socket.create_connection(listening.getsockname())
        ours, _ = listening.accept()
    return SocketWire(ours), trio.socket.from_stdlib_socket(theirs)


def polled() -> tuple[Wire, trio.socket.SocketType]:
    ours, theirs = socket.socketpair()
    poller = Poller()
    trio.lowlevel.spawn_system_task(poller.run)
    return PolledWire(ours, poller), trio.socket.from_stdlib_socket(theirs)


def stream() -> tuple[Wire, trio.socket.SocketType]:
    ours, theirs = socket.socketpair()
    return StreamWire(trio.SocketStream(trio.socket.from_stdlib_socket(ours))), trio.socket.from_stdlib_socket(theirs)


_POLLED = pytest.param(polled, marks=pytest.mark.skipif(sys.platform != "linux", reason="there is no epoll"))
EVERY = pytest.mark.parametrize("make", [unix_socket, tcp_socket, _POLLED, stream])
SOCKETS = pytest.mark.parametrize("make", [unix_socket, tcp_socket, _POLLED])
Make = Callable[[], tuple[Wire, trio.socket.SocketType]]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux holds back")
async def test_what_is_held_back_arrives_together_with_the_end() -> None:
    wire, peer = tcp_socket()
    wire.hold_back()
    assert wire.try_write(b"0\r\n\r\n") == 5
    poll = select.poll()
    poll.register(peer.fileno(), select.POLLIN | select.POLLRDHUP)
    assert not poll.poll(0)
    wire.shut_write_now()
    assert poll.poll(0) == [(peer.fileno(), select.POLLIN | select.POLLRDHUP)]
    assert await peer.recv(100) == b"0\r\n\r\n"
    assert await peer.recv(100) == b""
    peer.close()
    await wire.close()


@SOCKETS
async def test_what_cannot_be_held_back_is_sent(make: Make) -> None:
    wire, peer = make()
    wire.hold_back()
    assert wire.try_write(b"end") == 3
    wire.shut_write_now()
    assert await peer.recv(100) == b"end"
    assert await peer.recv(100) == b""
    peer.close()
    wire.hold_back()
    wire.shut_write_now()
    await wire.close()


@EVERY
async def test_it_reads_until_the_end(make: Make) -> None:
    wire, peer = make()
    await peer.send(b"one")
    assert await wire.read(2) == b"on"
    assert await wire.read(100) == b"e"
    peer.close()
    assert await wire.read(100) == b""
    assert await wire.read(100) == b""
    await wire.close()
    await wire.close()


@EVERY
async def test_an_end_that_comes_with_the_last_bytes_is_read_after_them(make: Make) -> None:
    wire, peer = make()
    await peer.send(b"last words")
    peer.shutdown(socket.SHUT_WR)
    for _ in range(3):
        await wait_all_tasks_blocked()
    with trio.fail_after(5):
        assert await wire.read(100) == b"last words"
        assert await wire.read(100) == b""
    await wire.close()
    peer.close()


@EVERY
async def test_what_comes_while_nobody_reads_is_read_piece_by_piece(make: Make) -> None:
    wire, peer = make()
    await peer.send(b"0123456789")
    assert await wire.read(4) == b"0123"
    await peer.send(b"abcdef")
    for _ in range(3):
        await wait_all_tasks_blocked()
    with trio.fail_after(5):
        assert await wire.read(12) == b"456789abcdef"  # all there is, and as much as was asked for
        with trio.move_on_after(0):
            while await wire.read(12) is None:
                pass
        await peer.send(b"more")
        while (data := await wire.read(12)) is None:
            pass
        assert data == b"more"
    await wire.close()
    peer.close()


@EVERY
async def test_a_reader_is_woken_and_nothing_is_lost(make: Make, nursery: trio.Nursery) -> None:
    wire, peer = make()
    results: list[bytes | None] = []

    async def read() -> None:
        results.append(await wire.read(100))

    wire.wake()  # nobody reads: no effect
    nursery.start_soon(read)
    await wait_all_tasks_blocked()
    assert results == []
    wire.wake()
    wire.wake()
    await wait_all_tasks_blocked()
    assert results == [None]
    await peer.send(b"later")
    assert await wire.read(100) == b"later"
    with trio.move_on_after(0):
        await wire.read(100)
    await peer.send(b"last")
    assert await wire.read(100) == b"last"
    await wire.close()
    peer.close()


class Taker:
    """Takes what begins with "t", raises for what begins with "r", and notes everything."""

    def __init__(self) -> None:
        self.offered: list[bytes] = []
        self.then: Callable[[], object] = list

    def __call__(self, data: bytes) -> bool:
        self.offered.append(data)
        self.then()
        if data.startswith(b"r"):
            raise RuntimeError("the taker's bug")
        return data.startswith(b"t")


async def read_into(results: list[bytes | str | None], wire: Wire, take: Taker) -> None:
    try:
        results.append(await wire.read(4, take))
    except RuntimeError as error:
        results.append(str(error))


@pytest.mark.skipif(sys.platform != "linux", reason="there is no epoll")
@pytest.mark.parametrize(
    ("sent", "offered", "read"),
    [
        ([b"t1", b"t2", b"no"], [b"t1", b"t2", b"no"], b"no"),
        ([b"t1", b"raise"], [b"t1", b"rais"], "the taker's bug"),
        ([b"t234"], [b"t234"], None),  # there may be more
        ([b"t1", b""], [b"t1"], b""),
        ([b""], [], b""),
    ],
)
async def test_input_is_offered_while_the_reader_waits(
    sent: list[bytes], offered: list[bytes], read: bytes | str | None, nursery: trio.Nursery
) -> None:
    wire, peer = polled()
    take, results = Taker(), list[bytes | str | None]()
    nursery.start_soon(read_into, results, wire, take)
    await wait_all_tasks_blocked()
    for data in sent:
        assert results == []
        if data:
            await peer.send(data)
        else:
            peer.shutdown(socket.SHUT_WR)
        for _ in range(3):
            await wait_all_tasks_blocked()
    assert (take.offered, results) == (offered, [read])
    await wire.close()
    peer.close()


@pytest.mark.skipif(sys.platform != "linux", reason="there is no epoll")
@pytest.mark.parametrize("data", [b"t1", b"no", b"r"])
async def test_who_is_offered_input_may_wake_the_reader(data: bytes, nursery: trio.Nursery) -> None:
    wire, peer = polled()
    take, results = Taker(), list[bytes | str | None]()
    take.then = wire.wake
    nursery.start_soon(read_into, results, wire, take)
    await wait_all_tasks_blocked()
    await peer.send(data)
    for _ in range(3):
        await wait_all_tasks_blocked()
    assert results == [{b"t1": None, b"no": b"no", b"r": "the taker's bug"}[data]]
    take.then = list
    nursery.start_soon(read_into, results, wire, take)
    await wait_all_tasks_blocked()
    await peer.send(b"more")
    for _ in range(3):
        await wait_all_tasks_blocked()
    assert (take.offered, results[1:]) == ([data, b"more"], [b"more"])
    await wire.close()
    peer.close()


@pytest.mark.skipif(sys.platform != "linux", reason="others do not tell")
@EVERY
async def test_that_the_peer_hung_up_is_known_before_what_it_said_is_read(
    make: Make, nursery: trio.Nursery, steady_clock: trio.abc.Clock
) -> None:
    wire, peer = make()
    heard: list[bool] = []

    async def listen() -> None:
        heard.append(await wire.wait_peer_closed())

    gc.collect()  # what earlier tests left is not counted
    files = len(os.listdir("/proc/self/fd"))
    await peer.send(b"one")
    nursery.start_soon(listen)
    await wait_all_tasks_blocked()
    wire.wake()
    await wait_all_tasks_blocked()
    assert heard == [False]
    nursery.start_soon(listen)
    await peer.send(b"two")
    await wait_all_tasks_blocked()
    assert heard == [False]
    peer.shutdown(socket.SHUT_WR)
    with trio.fail_after(5):
        while len(heard) < 2:
            await wait_all_tasks_blocked()
    assert heard == [False, True]
    assert await wire.wait_peer_closed()
    assert await wire.read(100) == b"onetwo"
    assert await wire.read(100) == b""
    assert not wire.timed_out
    assert len(os.listdir("/proc/self/fd")) == files
    await wire.close()
    peer.close()


@pytest.mark.skipif(sys.platform != "linux", reason="others do not tell")
@pytest.mark.parametrize("make", [tcp_socket, stream])
async def test_a_wire_that_broke_while_nobody_read_says_whether_time_was_up(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broke(sock: object) -> int:
        return errno.ETIMEDOUT

    monkeypatch.setattr(wires, "wait_peer_closed", broke)
    wire, peer = make()
    assert await wire.wait_peer_closed()
    assert wire.timed_out
    assert wire.error == errno.ETIMEDOUT
    await wire.close()
    peer.close()


async def test_a_stream_without_a_socket_waits_to_be_woken(autojump_clock: MockClock) -> None:
    ours, theirs = memory_stream_pair()
    wire = StreamWire(ours)
    await theirs.aclose()
    with trio.move_on_after(100) as scope:
        await wire.wait_peer_closed()
    assert scope.cancelled_caught
    await wire.close()


@SOCKETS
async def test_it_writes_at_once_what_is_taken(make: Make, nursery: trio.Nursery) -> None:
    wire, peer = make()
    assert wire.try_write(b"hello") == 5
    assert await peer.recv(100) == b"hello"
    pending = bytearray(b"x" * 32_000_000)
    taken = wire.try_write(bytes(pending))
    assert 0 < taken < 32_000_000
    del pending[:taken]

    async def write() -> None:
        while pending:
            size = await wire.write_some(pending)
            assert 0 < size <= len(pending)
            del pending[:size]
        await wire.close()

    nursery.start_soon(write)
    received = 0
    async with trio.SocketStream(peer) as rest:
        async for data in rest:
            received += len(data)
    assert received == 32_000_000


async def test_waking_the_reader_leaves_the_writer_alone(nursery: trio.Nursery) -> None:
    wire, peer = unix_socket()
    wire.try_write(b"x" * 10_000_000)
    assert wire.try_write(b"x") == 0
    written: list[int] = []

    async def write() -> None:
        written.append(await wire.write_some(bytearray(b"y" * 10)))

    nursery.start_soon(write)
    nursery.start_soon(wire.read, 1)
    await wait_all_tasks_blocked()
    wire.wake()
    await wait_all_tasks_blocked()
    assert written == []
    while not written:
        await peer.recv(1_000_000)
    assert written == [10]
    await wire.close()
    peer.close()


@EVERY
async def test_writing_to_a_peer_that_is_gone(make: Make) -> None:
    wire, peer = make()
    peer.close()
    with pytest.raises(trio.BrokenResourceError):
        for _ in range(100):
            if not wire.try_write(b"x" * 1_000):
                await wire.write_some(bytearray(b"x" * 1_000))
    await wire.close()


@EVERY
async def test_closing_ends_whoever_drains(make: Make, nursery: trio.Nursery) -> None:
    wire, peer = make()
    ended: list[type[BaseException]] = []

    async def write() -> None:
        try:
            while True:
                await wire.write_some(bytearray(b"x" * 100_000))
        except (trio.ClosedResourceError, trio.BrokenResourceError) as error:
            ended.append(type(error))

    nursery.start_soon(write)
    await wait_all_tasks_blocked()
    await wire.close()
    await wait_all_tasks_blocked()
    assert ended == [trio.ClosedResourceError]
    peer.close()


@EVERY
async def test_the_end_can_be_said_before_closing(make: Make) -> None:
    wire, peer = make()
    await wire.shut_write()
    assert await peer.recv(1) == b""
    await peer.send(b"still heard")
    assert await wire.read(100) == b"still heard"
    peer.close()
    await wire.shut_write()
    await wire.close()


async def test_a_reset_is_told_from_an_end() -> None:
    for reset in (False, True):
        wire, peer = tcp_socket()
        await wire.close(reset=reset)
        if reset:
            with pytest.raises(ConnectionResetError):
                await peer.recv(1)
        else:
            assert await peer.recv(1) == b""
        peer.close()


async def test_a_response_does_not_wait_for_the_one_before_to_be_acknowledged() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()):
        ours, _ = listening.accept()
        wire = SocketWire(ours)
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert not ours.getblocking()
        await wire.close()


@pytest.mark.parametrize("tls", [False, True])
async def test_a_wire_over_a_stream_reads_and_writes_everything(tls: bool) -> None:
    ours, theirs = memory_stream_pair()
    stream: trio.abc.Stream = ours
    peer: trio.abc.Stream = theirs
    if tls:
        stream = trio.SSLStream(ours, client_context(), server_hostname="localhost")
        peer = trio.SSLStream(theirs, server_context("localhost"), server_side=True)
    wire = wires.wire_over(stream)
    sent, received = bytes(range(256)) * 1_000, b""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wire.write_all, sent)
        while len(received) < len(sent):
            received += await peer.receive_some(100_000)
        assert received == sent
        nursery.start_soon(peer.send_all, b"answer")
        assert await wire.read(100) == b"answer"
        await theirs.aclose()
        assert await wire.read(100) == b""
    await wire.close()


async def test_a_stream_takes_a_part_at_a_time() -> None:
    ours, theirs = memory_stream_pair()
    wire = StreamWire(ours)
    assert wire.try_write(b"x") == 0
    assert await wire.write_some(bytearray(b"x" * 1_000_000)) == 65_536
    assert len(await theirs.receive_some(1_000_000)) == 65_536


@pytest.mark.parametrize("reset", [False, True])
async def test_closing_tls_says_goodbye_and_waits_for_nobody(
    reset: bool, autojump_clock: trio.testing.MockClock
) -> None:
    ours, theirs = memory_stream_pair()
    wire = StreamWire(trio.SSLStream(ours, server_context("localhost"), server_side=True))
    peer = trio.SSLStream(theirs, client_context(), server_hostname="localhost")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wire.read, 1)
        await peer.send_all(b"x")
    await wire.close(reset=reset)
    if reset and sys.version_info >= (3, 11, 4):  # to older ones a cut is a goodbye (CPython's gh-95494)
        with pytest.raises(trio.BrokenResourceError):
            await peer.receive_some()
    else:
        assert await peer.receive_some() == b""

    ours, theirs = lockstep_stream_pair()  # here the goodbye gets stuck
    wire = StreamWire(trio.SSLStream(ours, server_context("localhost"), server_side=True))
    peer = trio.SSLStream(theirs, client_context(), server_hostname="localhost")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wire.read, 1)
        await peer.send_all(b"x")
    start = trio.current_time()
    with trio.CancelScope() as scope:
        scope.cancel()
        await wire.close(reset=reset)
    assert trio.current_time() - start == (0 if reset else 1)

    ours, theirs = memory_stream_pair()  # and here nobody has begun to speak
    await StreamWire(trio.SSLStream(ours, server_context("localhost"), server_side=True)).close(reset=reset)
    assert trio.current_time() - start <= 1
    assert await theirs.receive_some() == b""
