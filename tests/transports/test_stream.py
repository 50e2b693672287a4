"""Stream channels keep the contract over pipes, sockets and threads, and batch their reads and writes."""

from __future__ import annotations

import errno
import os
import pty
import re
import select
import socket
import struct
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import pytest
import trio
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

import trimcp
from tests.transports.websocket_support import turns_of
from trimcp.budget import Budget
from trimcp.channel import Incoming, Kind, MessageChannel, Outgoing
from trimcp.testing.contract import check_channel
from trimcp.transports.descriptors import wait_peer_closed
from trimcp.transports.stdio.streams import FdReceiver, FdSender, ThreadReceiver, ThreadSender
from trimcp.transports.stream import StreamChannel
from trimcp.wire.jsonrpc import Malformed, Notification, Request, encode_notification, encode_request

PING = encode_request(1, "ping") + b"\n"


def pipes() -> tuple[MessageChannel, MessageChannel]:
    (left_in, right_out), (right_in, left_out) = os.pipe(), os.pipe()
    return (
        StreamChannel(FdReceiver(left_in), FdSender(left_out)),
        StreamChannel(FdReceiver(right_in), FdSender(right_out)),
    )


def threaded_pipes() -> tuple[MessageChannel, MessageChannel]:
    (left_in, right_out), (right_in, left_out) = os.pipe(), os.pipe()
    return (
        StreamChannel(ThreadReceiver(left_in), ThreadSender(left_out)),
        StreamChannel(FdReceiver(right_in), FdSender(right_out)),
    )


def sockets() -> tuple[MessageChannel, MessageChannel]:
    def channel(end: socket.socket) -> StreamChannel:
        fd = end.detach()
        return StreamChannel(FdReceiver(os.dup(fd), dontwait=True), FdSender(fd, dontwait=True))

    left, right = socket.socketpair()
    return channel(left), channel(right)


def open_descriptors() -> int:
    return len(os.listdir("/dev/fd"))


@pytest.mark.parametrize("connect", [pipes, sockets, threaded_pipes])
async def test_contract(connect: Callable[[], tuple[MessageChannel, MessageChannel]]) -> None:
    @asynccontextmanager
    async def make() -> AsyncIterator[tuple[MessageChannel, MessageChannel]]:
        yield connect()

    before = open_descriptors()
    # A writer thread may still hold what it was given when its channel is closed.
    await check_channel(make, clogs=connect is not threaded_pipes)
    if connect is not threaded_pipes:
        assert open_descriptors() == before


async def test_contract_over_tcp() -> None:
    @asynccontextmanager
    async def make() -> AsyncIterator[tuple[MessageChannel, MessageChannel]]:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        async with listener:
            client = await trio.testing.open_stream_to_socket_listener(listener)
            server = await listener.accept()
        yield StreamChannel(client, client), StreamChannel(server, server)

    await check_channel(make)


@attrs.define(eq=False)
class CountingStream(trio.abc.SendStream):
    written: list[bytes] = attrs.field(factory=list)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    async def wait_send_all_might_not_block(self) -> None:
        raise NotImplementedError

    async def aclose(self) -> None:
        self.written.append(b"closed")


async def test_a_batch_is_one_write() -> None:
    sender = CountingStream()
    receiver, _ = memory_stream_pair()
    async with StreamChannel(receiver, sender) as channel:
        await channel.send([Outgoing(b"{}", Kind.NOTIFICATION), Outgoing(b"[]", Kind.NOTIFICATION)])
    assert sender.written == [b"{}\n[]\n", b"closed"]


@pytest.mark.parametrize("connect", [pipes, sockets])
async def test_what_is_begun_at_once_is_ended_by_the_next_send(
    connect: Callable[[], tuple[MessageChannel, MessageChannel]],
) -> None:
    near, far = connect()
    messages = [Outgoing(encode_request(n, "m", {"text": "x" * 50_000}), Kind.REQUEST, n) for n in range(20)]
    async with near, far:
        assert near.sends_now
        sent = 0
        while (rest := near.send_nowait(messages[sent])) is None:
            sent += 1
        assert sent, "at least the first finds room"
        assert near.send_nowait(rest) is rest, "nothing more is taken until the peer reads"
        if rest is not messages[sent]:  # a part of it was taken
            assert rest.request_id is None, "else it could be withdrawn"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(near.send, [rest, *messages[sent + 1 :]])
            arrived: list[Incoming] = []
            while len(arrived) < len(messages):
                arrived += await far.receive()
        assert [each.message for each in arrived] == [Request(n, "m", {"text": "x" * 50_000}) for n in range(20)]


async def test_what_cannot_be_sent_at_once_is_left_to_send() -> None:
    near, far = pipes()
    note = Outgoing(b'{"jsonrpc":"2.0","method":"m"}', Kind.NOTIFICATION)
    large = Outgoing(b"x" * 100_000, Kind.NOTIFICATION)
    assert near.send_nowait(large) is large
    await far.aclose()
    assert near.send_nowait(note) is note
    with pytest.raises(trio.BrokenResourceError):
        await near.send([note])
    await near.aclose()
    assert near.send_nowait(note) is note
    assert not StreamChannel(*memory_stream_pair()).sends_now, "only pipes and sockets of ours"


async def test_a_reader_that_found_all_waits_before_it_reads_again(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    receiver = FdReceiver(read_end)
    reads: list[int] = []
    read = os.read

    def counted(fd: int, size: int) -> bytes:
        reads.append(size)
        return read(fd, size)

    monkeypatch.setattr(os, "read", counted)
    os.write(write_end, b"abcd")
    assert await receiver.receive_some(2) == b"ab"
    assert await receiver.receive_some(8) == b"cd"
    assert len(reads) == 2
    async with trio.open_nursery() as nursery:
        nursery.start_soon(receiver.receive_some, 8)
        await wait_all_tasks_blocked()
        assert len(reads) == 2, "a read now would only fail"
        os.write(write_end, b"ef")
    assert len(reads) == 3
    receiver.close()
    os.close(write_end)


async def test_one_receive_returns_all_that_arrived() -> None:
    near, far = memory_stream_pair()
    async with StreamChannel(near, near) as channel:
        text = encode_notification("n")
        await far.send_all(text + b"\n" + text + b"\nnonsense\n" + text)
        batch = await channel.receive()
        assert [type(each.message) for each in batch] == [Notification, Notification, Malformed]
        await far.send_eof()
        assert [each.message for each in await channel.receive()] == [Notification("n")]
        with pytest.raises(trio.EndOfChannel):
            await channel.receive()


async def test_input_may_end_behind_what_has_arrived() -> None:
    read_end, write_end = os.pipe()
    receiver = FdReceiver(read_end)
    os.write(write_end, b"before")
    receiver.end_after_buffered()
    os.write(write_end, b"after")
    assert await receiver.receive_some(4) == b"befo"
    assert await receiver.receive_some() == b"re"
    assert await receiver.receive_some() == b""
    receiver.close()
    os.close(write_end)


@pytest.mark.parametrize("waiting", [False, True])
async def test_a_sender_that_gives_up_breaks(waiting: bool) -> None:
    read_end, write_end = os.pipe()
    sender = FdSender(write_end)
    async with trio.open_nursery() as nursery:
        if waiting:

            async def clog() -> None:
                with pytest.raises(trio.BrokenResourceError):
                    await sender.send_all(bytes(10_000_000))

            nursery.start_soon(clog)
            await trio.testing.wait_all_tasks_blocked()
        sender.give_up()
    with pytest.raises(trio.BrokenResourceError):
        await sender.send_all(b"x")
    sender.close()
    os.close(read_end)


@pytest.mark.parametrize("end", [FdReceiver, FdSender])
async def test_flags_are_restored_where_asked(end: type[FdReceiver] | type[FdSender]) -> None:
    read_end, write_end = os.pipe()
    fd = read_end if end is FdReceiver else write_end
    shared = os.dup(fd)
    stream = end(fd, restore=True)
    assert not os.get_blocking(shared)
    stream.close()
    assert os.get_blocking(shared)
    for each in (shared, read_end if end is FdSender else write_end):
        os.close(each)


async def test_a_socket_s_flags_are_left_alone() -> None:
    left, right = socket.socketpair()
    with left, right:
        receiver = FdReceiver(os.dup(left.fileno()), dontwait=True)
        sender = FdSender(os.dup(left.fileno()), dontwait=True)
        async with receiver, sender:
            await sender.send_all(b"x")
            right.sendall(b"yz")
            assert await receiver.receive_some(1) == b"y"
            assert await receiver.receive_some() == b"z"
            assert os.get_blocking(left.fileno())


async def test_a_terminal_that_hung_up_is_the_end() -> None:
    controller, terminal = pty.openpty()
    os.close(terminal)
    async with FdReceiver(controller) as receiver:
        assert await receiver.receive_some() == b""


async def test_a_writer_thread_that_was_left_writing_takes_no_more(steady_clock: trio.abc.Clock) -> None:
    read_end, write_end = os.pipe()
    async with ThreadSender(write_end) as sender:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sender.send_all, bytes(10_000_000))
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        with trio.fail_after(1), pytest.raises(trio.BrokenResourceError, match="cut short"):
            await sender.send_all(b"x")
        os.close(read_end)


async def test_a_reader_thread_hands_over_in_the_size_asked_for() -> None:
    read_end, write_end = os.pipe()
    async with ThreadReceiver(read_end) as receiver:
        os.write(write_end, b"abcdef")
        assert await receiver.receive_some(2) == b"ab"
        assert await receiver.receive_some(3) == b"cde"
        assert await receiver.receive_some() == b"f"
        os.close(write_end)
        assert await receiver.receive_some() == b""
        assert await receiver.receive_some() == b""


@pytest.mark.parametrize("padding", [0, 5_000])
async def test_one_read_brings_no_more_than_it_says(padding: int) -> None:
    line = encode_request(1, "tools/call", {"name": "x" + "y" * padding}) + b"\n"
    (incoming, outgoing), channel = os.pipe(), None
    channel = StreamChannel(FdReceiver(incoming), FdSender(os.dup(outgoing)))
    requests, size = channel.read_ahead
    async with channel:
        os.set_blocking(outgoing, False)
        written = os.write(outgoing, line * (65_536 // len(line) + 1))
        arrived = await channel.receive()
        os.close(outgoing)
    assert written == 65_536, "the pipe was full"
    assert len(arrived) == min(128, written // len(line))
    assert len(arrived) <= requests
    assert sum(each.size for each in arrived) <= size


async def test_of_many_lines_others_have_their_turn_in_between() -> None:
    for line in (b"\n", b"x\n"):
        near, far = memory_stream_pair()
        async with StreamChannel(near, near) as channel:
            await far.send_all(line * 10_000 + PING)
            arrived: list[Incoming] = []

            async def receive(arrived: list[Incoming] = arrived, channel: MessageChannel = channel) -> None:
                while not (arrived and isinstance(arrived[-1].message, Request)):
                    arrived += await channel.receive()

            assert await turns_of(receive) >= 10_000 / 128
            assert len(arrived) == (10_001 if line.strip() else 1)


async def test_lines_that_wait_are_not_lost_to_a_cancellation() -> None:
    near, far = memory_stream_pair()
    async with StreamChannel(near, near) as channel:
        await far.send_all(PING * 1_000)
        arrived = list(await channel.receive())
        while len(arrived) < 1_000:
            with trio.CancelScope() as scope:
                scope.cancel()
                arrived += await channel.receive()
            assert scope.cancelled_caught
            arrived += await channel.receive()
        assert len(arrived) == 1_000


async def test_a_message_that_goes_on_is_told_of_and_then_ends_the_connection() -> None:
    near, far = memory_stream_pair()
    async with StreamChannel(near, near) as channel:
        channel.set_max_message(10_000)
        await far.send_all(b'{"jsonrpc":"2.0","id":5,"method":"x","params":"' + b"x" * 10_000)
        [told] = await channel.receive()
        assert isinstance(told.message, Malformed)
        assert (told.message.id, told.message.reason) == (5, "size")
        await far.send_all(b"x" * 140_000 + b'"}\n' + PING + b'"' + b"x" * 160_001)
        [after] = await channel.receive()
        assert isinstance(after.message, Request)
        [told] = await channel.receive()
        assert isinstance(told.message, Malformed)
        assert (told.message.id, told.message.reason) == (None, "size")
        for _ in range(2):
            with pytest.raises(trio.BrokenResourceError, match="goes on after 16 times the bytes"):
                await channel.receive()
        await channel.send([Outgoing(b"{}", Kind.REPLY)])


async def test_a_server_answers_an_endless_message_and_leaves(autojump_clock: MockClock) -> None:
    near, far = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        server = trimcp.Server("s", limits=trimcp.Limits(max_message=10_000))
        nursery.start_soon(server.serve, StreamChannel(near, near))
        await far.send_all(b'{"jsonrpc":"2.0","id":5,"method":"tools/call","params":"' + b"x" * 10_000)
        answer = await far.receive_some()
        assert b'"id":5' in answer
        assert b"message larger than 10,000 bytes" in answer
        await far.send_all(b"x" * 150_000)
        assert await far.receive_some() == b""


async def test_a_client_fails_the_call_of_an_endless_answer_and_then_all(autojump_clock: MockClock) -> None:
    near, far = memory_stream_pair()
    over = trio.Event()

    async def serve() -> None:
        asked = b""
        while b'"tools/call"' not in asked:
            asked = bytes(await far.receive_some())
            [id] = re.findall(rb'"id":(\w+)', asked) or [b""]
            if b'"initialize"' in asked:
                about = b'"protocolVersion":"2025-11-25","capabilities":{},"serverInfo":{"name":"s","version":"1"}'
                await far.send_all(b'{"jsonrpc":"2.0","id":%b,"result":{%b}}\n' % (id, about))
        await far.send_all(b'{"jsonrpc":"2.0","id":%b,"result":{"x":"' % id + b"x" * 10_000)
        await over.wait()
        await far.send_all(b"x" * 160_000)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        client = trimcp.Client("c", limits=trimcp.Limits(max_message=10_000))
        async with client.connect(StreamChannel(near, near), revision="2025-11-25") as session:
            with pytest.raises(trimcp.InvalidReply, match="larger than 10,000 bytes"):
                await session.call_tool("endless")
            over.set()
            with pytest.raises(trimcp.ConnectionLost, match="goes on after 16 times the bytes"):
                await session.call_tool("other")


# Peers that have hung up

Linux = pytest.mark.skipif(sys.platform != "linux", reason="others do not tell")


@Linux
@pytest.mark.parametrize("reset", [False, True])
async def test_why_a_peer_hung_up_is_told(reset: bool, steady_clock: trio.abc.Clock) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        peer = socket.create_connection(listening.getsockname())
        sock, _ = listening.accept()
    with sock:
        peer.send(b"unread")
        if reset:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
        with trio.fail_after(5):
            assert await wait_peer_closed(sock) == (errno.ECONNRESET if reset else 0)
    assert await wait_peer_closed(sock) == errno.EBADF


@pytest.mark.parametrize("socketless", [False, True])
async def test_where_the_system_cannot_tell_nobody_is_disturbed(
    socketless: bool, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    def no_more(size: int) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(select, "epoll", no_more, raising=False)
    ours, theirs = socket.socketpair()
    with ours, theirs, trio.move_on_after(100) as scope:
        theirs.shutdown(socket.SHUT_WR)
        await wait_peer_closed(None if socketless else ours)
    assert scope.cancelled_caught


@Linux
@pytest.mark.parametrize("kind", ["pipe", "dontwait", "tcp"])
async def test_that_nobody_listens_is_known_before_anything_is_written(kind: str, steady_clock: trio.abc.Clock) -> None:
    if kind == "tcp":
        with socket.create_server(("127.0.0.1", 0)) as listening:
            peer = socket.create_connection(listening.getsockname())
            sock, _ = listening.accept()
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        channel = StreamChannel(stream, stream)
        say, listen = peer.send, peer
    else:
        reading, theirs_out = os.pipe()
        if kind == "pipe":
            theirs_in, writing = os.pipe()
            listen = os.fdopen(theirs_in, "rb")
        else:
            listen, ours = socket.socketpair()
            writing = ours.detach()
        channel = StreamChannel(FdReceiver(reading), FdSender(writing, dontwait=kind == "dontwait"))

        def say(data: bytes) -> int:
            return os.write(theirs_out, data)

    gone = trio.Event()

    async def ask() -> None:
        await channel.wait_peer_closed()
        gone.set()

    async with channel, trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        say(encode_notification("unread", None) + b"\n")
        if kind == "tcp":
            peer.shutdown(socket.SHUT_WR)
        else:
            os.close(theirs_out)
        await wait_all_tasks_blocked(0.05)
        assert not gone.is_set(), "who has said its last word may still listen"
        if kind == "tcp":
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        listen.close()
        with trio.fail_after(5):
            await gone.wait()


async def test_of_a_file_and_of_what_is_no_descriptor_nobody_can_tell(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    ours, _ = memory_stream_pair()
    with open(tmp_path / "file", "wb") as file:  # noqa: ASYNC230  # it never blocks
        for sender in (ours, FdSender(os.dup(file.fileno()))):
            with trio.move_on_after(100) as scope:
                await StreamChannel(ours, sender).wait_peer_closed()
            assert scope.cancelled_caught
            await sender.aclose()


async def test_a_large_message_is_counted_until_somebody_else_counts_it() -> None:
    """Were it counted nowhere for a moment, the next connection of its owner that waits for room would go on."""
    budget = Budget(1 << 20)
    sender, receiver = memory_stream_pair()
    channel = StreamChannel(receiver, receiver)
    channel.holding = budget.holding("somebody")
    text = encode_notification("note", {"text": "x" * 200_000}) + b"\n"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sender.send_all, text)
        assert len(await channel.receive()) == 1
        assert budget.held > 100_000
        channel.count_received()
        assert budget.held == 0
    await sender.aclose()
    await channel.aclose()
