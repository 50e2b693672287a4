"""Channels over WebSocket: the contract, both of our sides against each other, and peers that break every rule."""

from __future__ import annotations

import gc
import socket
import ssl
import struct
import sys
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from tests.peers.websockets import (
    BINARY,
    CLOSE,
    CONTINUATION,
    FIN,
    HANDSHAKE,
    PING,
    PONG,
    TEXT,
    close,
    frame,
    message,
    read_head,
)
from tests.transports.websocket_support import (
    Meeting,
    connected,
    host,
    ids,
    outgoing,
    raw_client,
    text,
    turns_of,
)
from trimcp.channel import Incoming, Kind, MessageChannel, Outgoing
from trimcp.testing.contract import check_channel
from trimcp.transports.http.h1.sockets import open_tcp
from trimcp.transports.http.h1.wires import SocketWire, StreamWire
from trimcp.transports.http.interfaces import Upgrade
from trimcp.transports.websocket.channel import WebSocketChannel
from trimcp.transports.websocket.frames import GatedStream, KeepAlive
from trimcp.wire.jsonrpc import Batch, Malformed, Request


@pytest.mark.parametrize("client", [True, False])
async def test_contract(client: bool) -> None:
    @asynccontextmanager
    async def make() -> AsyncIterator[tuple[MessageChannel, MessageChannel]]:
        async with connected() as (ours, theirs):
            yield (ours, theirs) if client else (theirs, ours)

    await check_channel(make)


async def test_ten_thousand_messages_in_either_direction() -> None:
    async def send(channel: MessageChannel) -> None:
        for start in range(0, 10_000, 100):
            await channel.send([outgoing(n) for n in range(start, start + 100)])

    async def receive(channel: MessageChannel) -> None:
        arrived: list[Incoming] = []
        while len(arrived) < 10_000:
            arrived += await channel.receive()
        assert ids(arrived) == list(range(10_000))

    async with connected() as (client, server), trio.open_nursery() as nursery:
        for channel in (client, server):
            nursery.start_soon(send, channel)
            nursery.start_soon(receive, channel)


async def test_a_message_is_a_text_message_and_a_batch_one_write(autojump_clock: MockClock) -> None:
    async with raw_client(Meeting()) as (raw, server):
        await server.send([Outgoing(b"{}", Kind.REPLY), Outgoing(b"[]", Kind.REPLY)])
        assert await raw.stream.receive_some() == b"\x81\x02{}\x81\x02[]"


async def test_receive_returns_all_that_has_arrived(autojump_clock: MockClock) -> None:
    async with raw_client(Meeting()) as (raw, server):
        await raw.say(message(text(1)), message(b"[%s]" % text(2)), message(b"nonsense"), message(b""))
        one, two, three, four = await server.receive()
        assert isinstance(one.message, Request)
        assert isinstance(two.message, Batch)
        assert isinstance(three.message, Malformed)
        assert isinstance(four.message, Malformed)
        assert one.size == len(text(1))


# What a server takes


@pytest.mark.parametrize("pieces", [1, 3])
async def test_a_message_too_large_is_told_by_its_id_and_the_connection_lives_on(
    autojump_clock: MockClock, pieces: int
) -> None:
    async with raw_client(Meeting(max_message=1000)) as (raw, server):
        large = text(7, "x" * 2000)
        cuts = [large[at * 700 : (at + 1) * 700 if at < pieces - 1 else None] for at in range(pieces)]
        firsts = [TEXT, *[CONTINUATION] * (pieces - 1)]
        firsts[-1] |= FIN
        await raw.say(message(text(6)), *map(frame, firsts, cuts), message(text(8)))
        six, seven, eight = await server.receive()
        assert ids([six, seven, eight]) == [6, 7, 8]
        assert isinstance(seven.message, Malformed)
        assert seven.message.reason == "size"
        await server.send([outgoing(9)])
        assert await raw.hear() == (FIN | TEXT, text(9))


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([frame(FIN | BINARY, b"{}")], 1003),
        ([message(b'{"method":"\xff"}')], 1007),
        ([message(b'{"method":"\xe2\x82')], 1007),
        ([frame(FIN | TEXT, b"", size=20_000)], 1009),
        ([frame(FIN | 0x40 | TEXT, b"compressed")], 1002),
        ([frame(FIN | CONTINUATION, b"{}")], 1002),
        ([frame(TEXT, b"{"), message(b"{}")], 1002),
        ([frame(FIN | 0x7, b"{}")], 1002),
        ([frame(PING, b"half")], 1002),
        ([frame(FIN | PING, b"x" * 126)], 1002),
        ([frame(FIN | TEXT, b"{}", masked=False)], 1002),
        ([frame(FIN | CLOSE, b"x")], 1002),
        ([close(1005)], 1002),
        ([close(999)], 1002),
        ([frame(FIN | CLOSE, b"\x03\xe8\xff")], 1007),
    ],
)
async def test_whoever_breaks_the_protocol_is_told_with_a_close_code(
    autojump_clock: MockClock, frames: list[bytes], code: int
) -> None:
    async with raw_client(Meeting(max_message=1000)) as (raw, server):
        await raw.say(message(text(1)), *frames, message(text(2)))
        assert ids(list(await server.receive())) == [1]
        for _ in range(2):
            with pytest.raises(trio.BrokenResourceError, match=f"broke the WebSocket protocol .{code}"):
                await server.receive()
        assert await raw.close_code() == code
        with pytest.raises(trio.BrokenResourceError):
            await server.send([outgoing(3)])
        assert str(code) in (server.close_reason() or "")


def dribble(large: bytes) -> bytes:
    """A message in fragments of one character each, with empty ones between."""
    pieces = [character.encode() for character in large.decode()]
    frames = [frame(TEXT, pieces[0])]
    for piece in pieces[1:]:
        frames += [frame(CONTINUATION, piece), frame(CONTINUATION)]
    return b"".join(frames) + frame(FIN | CONTINUATION)


@pytest.mark.parametrize(
    ("attack", "most"),
    [
        # A message within the limit costs its bytes here, then the text in pieces and whole in the library.
        (dribble(text(1, "€" * 5_000)), 300_000),
        (message(text(1, "\N{WRENCH}" + "x" * 15_000)), 450_000),
        # One that is too large costs what was kept before that was known.
        (dribble(text(1, "€" * 10_000)), 250_000),
        (message(text(1, "x" * 200_000)), 200_000),
    ],
)
async def test_what_a_message_costs(autojump_clock: MockClock, attack: bytes, most: int) -> None:
    # The first of a process also costs what is made once.
    assert min([await _peak_of(attack) for _ in range(2)]) < most


async def _peak_of(attack: bytes) -> int:
    """What the memory of this process was at its worst, above what it was before, while this was received."""
    async with raw_client(Meeting(max_message=16_384), tcp=True) as (raw, server):

        async def attacking() -> None:
            for at in range(0, len(attack), 10_000):
                await raw.say(attack[at : at + 10_000])

        async with trio.open_nursery() as nursery:  # once for what is made when it is first needed, and kept
            nursery.start_soon(attacking)
            await server.receive()
        gc.collect()
        tracemalloc.start()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(attacking)
                (incoming,) = await server.receive()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert ids([incoming]) == [1]
        return peak


async def test_reading_stops_while_nobody_takes_and_nothing_is_lost(autojump_clock: MockClock) -> None:
    async with raw_client(Meeting(), tcp=True) as (raw, server):
        sent = 0

        async def flood(task_status: trio.TaskStatus[trio.CancelScope]) -> None:
            nonlocal sent
            with trio.CancelScope() as scope:
                task_status.started(scope)
                while True:
                    await raw.say(*[message(text(n, "x" * 1000)) for n in range(sent, sent + 10)])
                    sent += 10

        async with trio.open_nursery() as nursery:
            scope = await nursery.start(flood)
            await wait_all_tasks_blocked(0.05)
            stopped = sent
            await wait_all_tasks_blocked(0.05)
            assert sent == stopped, "somebody reads although nobody takes"
            scope.cancel()
        arrived: list[Incoming] = []
        while len(arrived) < sent:
            arrived += await server.receive()
        assert ids(arrived)[:sent] == list(range(sent))


@pytest.mark.parametrize("padding", [0, 1_000, 60_000])
async def test_what_arrives_at_once_and_what_lies_here_then_is_no_more_than_it_says(
    padding: int, autojump_clock: MockClock
) -> None:
    async with raw_client(Meeting(), tcp=True) as (raw, server):
        assert isinstance(server, WebSocketChannel)

        async def flood() -> None:
            some = b"".join(message(text(n, "x" * padding)) for n in range(20))
            while True:
                await raw.say(some)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood)
            await wait_all_tasks_blocked(0.05)
            arrived = await server.receive()
            await wait_all_tasks_blocked(0.05)
            requests, size = server.read_ahead
            assert len(arrived) <= requests
            assert sum(each.size for each in arrived) + server._gate.weight <= size
            assert server._gate.weight > size // 4, "so much lies there again"
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("count", [0, 10, 1_500])  # the last are more than is taken in while nobody takes them
@pytest.mark.parametrize("how", ["an end", "a reset", "a close"])
async def test_a_peer_that_leaves_before_it_was_read_is_noticed(
    how: str, count: int, steady_clock: trio.abc.Clock
) -> None:
    if sys.platform != "linux" and count > 10:
        pytest.skip("others do not tell")
    # What nobody reads (of 400 KB, 256 are taken in) has to find room at the receiver, else an end or a reset is
    # not seen. The kernel sizes the room by how fast it was read so far, which on a busy machine is not enough.
    enough = 200_000
    async with (
        raw_client(Meeting(), tcp=True, receive_buffer=enough) as (raw, server),
        trio.open_nursery() as nursery,
    ):
        gone = trio.Event()

        async def listen() -> None:
            await server.wait_peer_closed()
            gone.set()

        nursery.start_soon(listen)
        await raw.say(*(message(text(n, "x" * 200)) for n in range(count)))
        await wait_all_tasks_blocked(0.05)
        assert not gone.is_set()
        assert isinstance(raw.stream, trio.SocketStream)
        if how == "a reset":
            raw.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif how == "a close":
            await raw.say(close(1000))
        if how != "a close" or count > 10:
            await trio.aclose_forcefully(raw.stream)
        with trio.fail_after(5):
            await gone.wait()
            await server.wait_peer_closed()
        if how != "a reset":  # whoever wants it all the same has it
            arrived: list[Incoming] = []
            while len(arrived) < count:
                arrived += await server.receive()
            assert ids(arrived) == list(range(count))


@pytest.mark.skipif(sys.platform != "linux", reason="others do not tell")
async def test_a_peer_whose_end_finds_no_room_is_noticed_when_we_speak_next(autojump_clock: MockClock) -> None:
    async with raw_client(Meeting(), tcp=True, keep_alive=KeepAlive(20.0)) as (raw, server):
        assert isinstance(raw.stream, trio.SocketStream)
        stuck, rest = 0, b""
        while stuck < 3:  # the kernel may take a moment to say that there is room again
            rest = rest or message(b"x" * 100_000)
            with trio.move_on_after(1) as scope:
                rest = rest[await raw.stream.socket.send(rest) :]
                stuck = 0
            if scope.cancelled_caught:
                stuck += 1
                time.sleep(0.02)  # noqa: ASYNC251 -- the kernel's time, which no clock of ours moves
        gone = trio.Event()

        async def listen() -> None:
            await server.wait_peer_closed()
            gone.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen)
            await trio.aclose_forcefully(raw.stream)
            await wait_all_tasks_blocked(0.01)
            assert not gone.is_set()
            await trio.sleep(25)
            await gone.wait()


@pytest.mark.parametrize("tiny", [frame(FIN | PONG), frame(CONTINUATION, b" ")])
async def test_a_client_that_sends_tiny_frames_lets_others_in_between(autojump_clock: MockClock, tiny: bytes) -> None:
    async with raw_client(Meeting()) as (raw, server):
        await raw.say(frame(TEXT, b"{"), tiny * 10_000, frame(FIN | CONTINUATION, b"}"))
        assert await turns_of(server.receive) >= 10_000 / 16


async def test_many_small_messages_at_once_are_all_there(autojump_clock: MockClock) -> None:
    async with raw_client(Meeting()) as (raw, server):
        await raw.say(message(b"1") * 20_000, close(1000))
        arrived = 0
        with pytest.raises(trio.EndOfChannel):
            while True:
                arrived += len(await server.receive())
        assert arrived == 20_000


async def test_messages_before_a_close_wait_for_whoever_takes_them(autojump_clock: MockClock) -> None:
    async with raw_client(Meeting()) as (raw, server):
        await raw.say(*[message(text(n)) for n in range(20)], close(1000))
        await trio.sleep(10)
        assert ids(list(await server.receive())) == list(range(20))
        with pytest.raises(trio.EndOfChannel):
            await server.receive()


@pytest.mark.parametrize("turns", range(1, 12))
async def test_a_receive_that_is_cancelled_before_the_end_loses_nothing(autojump_clock: MockClock, turns: int) -> None:
    async with raw_client(Meeting()) as (raw, server):
        arrived: list[Incoming] = []

        async def receive() -> None:
            arrived.extend(await server.receive())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            await wait_all_tasks_blocked()
            await raw.say(*[message(text(n)) for n in range(4)], message(b"\xff"))
            for _ in range(turns):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        await wait_all_tasks_blocked()
        with pytest.raises(trio.BrokenResourceError):
            while True:
                arrived.extend(await server.receive())
        assert ids(arrived) == [0, 1, 2, 3]


async def test_pings_are_answered_one_by_one(autojump_clock: MockClock) -> None:
    async with raw_client(Meeting(), tcp=True) as (raw, server):
        await raw.say(frame(FIN | PING, b"a"), frame(FIN | PING, b""))
        assert [await raw.hear(), await raw.hear()] == [(FIN | PONG, b"a"), (FIN | PONG, b"")]
        # A peer that asks without listening is not read any more once its pongs find no room.
        pings, sent = frame(FIN | PING, b"x" * 125) * 500, 0
        with trio.move_on_after(60):
            while True:
                await raw.say(pings)
                sent += 1
        assert sent < 1000
        await raw.stream.aclose()
        with pytest.raises(trio.BrokenResourceError):
            await server.receive()


# The end


async def test_close_codes() -> None:
    async with connected() as (client, server):
        await client.aclose()
        with pytest.raises(trio.EndOfChannel):
            await server.receive()
        assert server.close_reason() == "the peer closed the WebSocket with code 1000 (normal)"
        assert not server.half_open
    async with connected() as (client, server):
        assert client.close_reason() is None
        await server.aclose()
        with pytest.raises(trio.EndOfChannel):
            await client.receive()
        assert client.close_reason() == "the peer closed the WebSocket with code 1001 (going away)"


async def test_a_server_that_fails_says_so(autojump_clock: MockClock) -> None:
    async def serve(channel: MessageChannel) -> None:
        await channel.receive()
        raise RuntimeError("on purpose")

    near, far = memory_stream_pair()
    with pytest.raises(RuntimeError, match="on purpose"):
        async with trio.open_nursery() as nursery:
            nursery.cancel_scope.shield = True
            outer = nursery

            async def serving() -> None:
                try:
                    await host(far, Upgrade(serve, None, 1000))
                except RuntimeError as error:
                    failures.append(error)

            failures: list[RuntimeError] = []
            outer.start_soon(serving)
            head = [f"{name}: {value}" for name, value in HANDSHAKE.items()]
            await near.send_all("\r\n".join(("GET / HTTP/1.1", *head, "", "")).encode() + message(b"{}"))
            _, _, rest = await read_head(near)
            rest += await near.receive_some()
            assert rest == b"\x88\x02\x03\xf3"
            await near.aclose()
        raise failures[0]


@pytest.mark.parametrize(
    ("code", "name"), [(4000, ""), (1002, " (protocol error)"), (1007, " (text that is not UTF-8)")]
)
async def test_what_a_peer_says_when_it_leaves(autojump_clock: MockClock, code: int, name: str) -> None:
    async with raw_client(Meeting()) as (raw, server):
        await raw.say(message(text(1)), close(code, "had \n enough"))
        assert ids(list(await server.receive())) == [1]
        with pytest.raises(trio.EndOfChannel):
            await server.receive()
        assert server.close_reason() == rf"the peer closed the WebSocket with code {code}{name}: 'had \n enough'"
        assert await raw.close_code() == code
        with pytest.raises(trio.BrokenResourceError):
            await server.send([outgoing(1)])


@pytest.mark.parametrize("cut", [b"", message(text(2))[:20]])
async def test_a_peer_that_leaves_without_a_word(autojump_clock: MockClock, cut: bytes) -> None:
    async with raw_client(Meeting()) as (raw, server):
        await raw.say(message(text(1)), cut)
        await raw.stream.aclose()
        assert ids(list(await server.receive())) == [1]
        with pytest.raises(trio.BrokenResourceError, match="without a closing handshake"):
            await server.receive()
        assert server.close_reason() == "the peer is gone without a closing handshake"


async def test_a_peer_that_never_says_close_is_waited_for_a_second(autojump_clock: MockClock) -> None:
    async with raw_client(Meeting()) as (raw, server):
        before = trio.current_time()
        await server.aclose()
        assert 0.9 < trio.current_time() - before < 1.1
        assert await raw.hear() == (FIN | CLOSE, b"\x03\xe9")
        assert await raw.hear() == (0, b"")


async def test_what_waits_while_closing_does_not_delay_the_close(autojump_clock: MockClock) -> None:
    async with raw_client(Meeting()) as (raw, server), trio.open_nursery() as nursery:
        # More than is read ahead; the answer to our Close comes behind it.
        await raw.say(*[message(text(n, "x" * 100_000)) for n in range(10)])
        await wait_all_tasks_blocked()
        before = trio.current_time()
        nursery.start_soon(server.aclose)
        assert await raw.hear() == (FIN | CLOSE, b"\x03\xe9")
        await raw.say(message(text(10)), close(1001))
        assert await raw.hear() == (0, b"")
        assert trio.current_time() == before


async def test_nothing_is_said_after_close(autojump_clock: MockClock) -> None:
    async with raw_client(Meeting()) as (raw, server), trio.open_nursery() as nursery:
        nursery.start_soon(server.aclose)
        assert await raw.hear() == (FIN | CLOSE, b"\x03\xe9")
        await raw.say(frame(FIN | BINARY, b"x"))
        assert await raw.hear() == (0, b"")


async def test_nothing_is_said_after_the_answer_to_a_close(autojump_clock: MockClock) -> None:
    async with raw_client(Meeting(), tcp=True) as (raw, server), trio.open_nursery() as nursery:

        async def send() -> None:
            with pytest.raises(trio.BrokenResourceError):
                await server.send([outgoing(1, "x" * 100_000) for _ in range(200)])

        nursery.start_soon(send)
        await wait_all_tasks_blocked(0.05)
        await raw.say(close(1000))
        heard = []
        while first := (await raw.hear())[0]:
            heard.append(first)
        assert heard.pop() == FIN | CLOSE
        assert set(heard) == {FIN | TEXT}


async def test_a_pong_waits_for_its_turn(autojump_clock: MockClock) -> None:
    async with raw_client(Meeting(), tcp=True) as (raw, server), trio.open_nursery() as nursery:

        async def send() -> None:
            for n in range(100):
                await server.send([outgoing(n, "x" * 100_000)])

        nursery.start_soon(send)
        await wait_all_tasks_blocked(0.05)
        await raw.say(frame(FIN | PING, b"?"))
        await wait_all_tasks_blocked(0.05)
        heard = [await raw.hear() for _ in range(101)]
        assert (FIN | PONG, b"?") in heard
        assert [first for first, _ in heard].count(FIN | TEXT) == 100
        await raw.say(message(text(1)))
        assert ids(list(await server.receive())) == [1]


async def send_until(error: type[Exception], channel: MessageChannel) -> None:
    """Send more than the peer takes, until that raises."""
    with pytest.raises(error):
        while True:
            await channel.send([outgoing(1, "x" * 100_000)])


async def test_a_peer_that_stops_reading_delays_no_close(autojump_clock: MockClock) -> None:
    async with raw_client(Meeting(), tcp=True) as (_, server), trio.open_nursery() as nursery:
        nursery.start_soon(send_until, trio.ClosedResourceError, server)
        await wait_all_tasks_blocked(0.05)
        before = trio.current_time()
        await server.aclose()
        assert trio.current_time() == before


async def test_a_peer_that_stops_reading_and_vanishes(autojump_clock: MockClock) -> None:
    async with raw_client(Meeting(), tcp=True) as (raw, server), trio.open_nursery() as nursery:
        nursery.start_soon(send_until, trio.BrokenResourceError, server)
        await wait_all_tasks_blocked(0.05)
        await raw.stream.aclose()
        with pytest.raises(trio.BrokenResourceError):
            await server.receive()


async def test_a_peer_that_closes_and_does_not_read_the_answer(autojump_clock: MockClock) -> None:
    async with raw_client(Meeting(), tcp=True) as (raw, server), trio.open_nursery() as nursery:
        nursery.start_soon(send_until, trio.BrokenResourceError, server)
        await wait_all_tasks_blocked(0.05)
        await raw.say(close(1000))
        before = trio.current_time()
        with pytest.raises(trio.EndOfChannel):
            await server.receive()
        assert trio.current_time() - before < 2


async def test_a_cut_send_breaks_the_channel_and_not_the_frames(autojump_clock: MockClock) -> None:
    async with raw_client(Meeting(), tcp=True) as (raw, server):
        with trio.move_on_after(1):
            while True:
                await server.send([outgoing(1, "x" * 100_000)])
        with pytest.raises(trio.BrokenResourceError, match="cut short"):
            await server.send([outgoing(2)])
        heard = bytearray()

        async def hear() -> None:
            while chunk := await raw.stream.receive_some():
                heard.extend(chunk)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hear)
            await raw.say(frame(FIN | PING, b"?"))
            await wait_all_tasks_blocked(0.05)
            await server.aclose()
        whole = message(text(1, "x" * 100_000), masked=False)
        assert (whole * 1000).startswith(heard), "nothing may follow half a frame"
        assert len(heard) % len(whole), "the last one was cut"


async def test_a_batch_of_large_messages_is_not_there_twice(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    flush = GatedStream.flush

    async def counting(self: GatedStream) -> None:
        held.append(self.held)
        await flush(self)

    async with raw_client(Meeting()) as (raw, server):
        monkeypatch.setattr(GatedStream, "flush", counting)
        await server.send([outgoing(n, "x" * 50_000) for n in range(10)])
        assert [(await raw.hear())[1] for _ in range(10)] == [text(n, "x" * 50_000) for n in range(10)]
    assert max(held) < 120_000


async def test_what_a_server_sends_is_not_copied(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    large = outgoing(1, "x" * 200_000)
    written: list[object] = []
    flush = GatedStream.flush

    async def noting(self: GatedStream) -> None:
        written.extend(self._held)
        await flush(self)

    async with raw_client(Meeting()) as (raw, server):
        monkeypatch.setattr(GatedStream, "flush", noting)
        await server.send([outgoing(0), large])
        assert [(await raw.hear())[1] for _ in range(2)] == [text(0), large.data]
    assert any(piece is large.data for piece in written)


async def test_last_words_arrive_although_the_peer_goes_on(autojump_clock: MockClock) -> None:
    async with raw_client(Meeting(), tcp=True) as (raw, server):
        await raw.say(frame(FIN | BINARY, b"x"), message(b"{}") * 10_000)
        with pytest.raises(trio.BrokenResourceError):
            await server.receive()
        assert await raw.close_code() == 1003
        assert await raw.stream.receive_some() == b"", "a reset would be an error"


async def test_a_peer_that_breaks_the_protocol_and_does_not_read(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with raw_client(Meeting(), tcp=True) as (raw, server), trio.open_nursery() as nursery:
        nursery.start_soon(send_until, trio.BrokenResourceError, server)
        await wait_all_tasks_blocked(0.05)
        await raw.say(frame(FIN | BINARY, b"x"))
        with pytest.raises(trio.BrokenResourceError, match="1003"):
            await server.receive()
        await wait_all_tasks_blocked(0.05)
    assert not caplog.records


# The handshake


@pytest.mark.skipif(sys.platform != "linux", reason="only there does the system cut connections that are not read")
@pytest.mark.parametrize("tls", [False, True])
async def test_a_busy_client_may_leave_unread_what_it_wants(tls: bool) -> None:
    (listening,) = await open_tcp("127.0.0.1", 0, unacknowledged=2)
    with listening, socket.create_connection(listening.getsockname()):
        sock, _ = listening.accept()
        stream: trio.abc.Stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        if tls:
            stream = trio.SSLStream(stream, ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), server_side=True)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 2000
        wire = StreamWire(stream) if tls else SocketWire(sock)
        wire.lift_timeout()
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        sock.close()
