"""A WebSocket connection looks after silent peers, spares busy ones, and outlives no crash of its library."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import math
from typing import NoReturn

import pytest
import trio
import trio_websocket
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.peers.websockets import CONTINUATION, FIN, PING, PONG, TEXT, RawWebSocket, frame, message
from tests.transports.websocket_support import Meeting, connected, ids, listening, outgoing, raw_client, text
from trimcp.framing.frames import FrameGate
from trimcp.transports.websocket.channel import WebSocketChannel
from trimcp.transports.websocket.client import WebSocketServer
from trimcp.transports.websocket.frames import KeepAlive


async def test_a_silent_peer_is_pinged_and_then_given_up(autojump_clock: MockClock) -> None:
    async with raw_client(Meeting()) as (raw, server):
        began = trio.current_time()
        first, _ = await raw.hear()
        assert first == FIN | PING
        assert trio.current_time() - began == pytest.approx(20)
        with pytest.raises(trio.BrokenResourceError, match="nothing was heard of the peer for 60 seconds"):
            await server.receive()
        assert trio.current_time() - began == pytest.approx(60)
        assert server.close_reason() == "nothing was heard of the peer for 60 seconds"
        with pytest.raises(trio.BrokenResourceError, match="nothing was heard"):
            await server.send([outgoing(1)])
        assert await raw.hear() == (0, b"")


async def answer_pings(raw: RawWebSocket, heard: list[float]) -> None:
    while True:
        first, payload = await raw.hear()
        if first != FIN | PING:
            return
        heard.append(trio.current_time())
        await raw.say(frame(FIN | PONG, payload))


async def test_a_peer_that_answers_pings_may_be_silent_for_ever(autojump_clock: MockClock) -> None:
    async with raw_client(Meeting()) as (raw, server), trio.open_nursery() as nursery:
        heard: list[float] = []
        nursery.start_soon(answer_pings, raw, heard)
        with trio.move_on_after(1000) as scope:
            await server.receive()
        assert scope.cancelled_caught
        gaps = {round(later - earlier, 3) for earlier, later in itertools.pairwise(heard)}
        assert gaps == {20}
        await server.send([outgoing(1)])
        nursery.cancel_scope.cancel()


async def test_a_ping_without_an_answer_delays_no_end(autojump_clock: MockClock) -> None:
    async with raw_client(Meeting()) as (raw, server):
        await trio.sleep(30)
        await raw.stream.aclose()
        with pytest.raises(trio.BrokenResourceError, match="without a closing handshake"):
            await server.receive()
        await server.aclose()
        assert trio.current_time() == 30


@pytest.mark.parametrize("sign", [message(b"{}"), frame(FIN | PONG)])
async def test_a_whole_message_or_control_frame_is_a_sign_of_life(autojump_clock: MockClock, sign: bytes) -> None:
    async with raw_client(Meeting()) as (raw, server), trio.open_nursery() as nursery:
        began = trio.current_time()

        async def receive() -> None:
            with pytest.raises(trio.BrokenResourceError, match="nothing was heard"):
                while True:
                    await server.receive()

        nursery.start_soon(receive)
        await trio.sleep(59)
        await raw.say(sign)
        await trio.sleep(59)
        await raw.say(frame(FIN | PING))
        while (await raw.hear()) != (0, b""):
            pass
        assert trio.current_time() - began == pytest.approx(59 + 59 + 60)


async def dribble(raw: RawWebSocket, piece: bytes) -> None:
    """Say something every ten seconds, for as long as that can be."""
    with contextlib.suppress(trio.BrokenResourceError):
        while True:
            await trio.sleep(10)
            await raw.say(piece)


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (frame(TEXT, b"x" * 65_000), frame(CONTINUATION, b"x")),
        (frame(FIN | TEXT, b"x" * 65_000, size=4_000_000), b"x"),
        (frame(TEXT, b"x" * 65_000), frame(FIN | PONG)),
    ],
)
async def test_a_message_has_a_time_in_which_it_must_be_whole(
    autojump_clock: MockClock, begin: bytes, piece: bytes
) -> None:
    async with raw_client(Meeting()) as (raw, server), trio.open_nursery() as nursery:
        await trio.sleep(45)
        await raw.say(message(b"{}"))
        await server.receive()
        began = trio.current_time()
        await raw.say(begin)
        nursery.start_soon(dribble, raw, piece)
        with trio.fail_after(500), pytest.raises(trio.BrokenResourceError, match="took too long to end a message"):
            await server.receive()
        assert trio.current_time() - began == pytest.approx(31, abs=0.01), "30 seconds, and one for 64 KiB"
        assert server.close_reason() == "the peer took too long to end a message"
        assert await raw.close_code() == 1008
        nursery.cancel_scope.cancel()


async def test_a_message_that_comes_at_its_rate_may_take_its_time(autojump_clock: MockClock) -> None:
    async with raw_client(Meeting()) as (raw, server), trio.open_nursery() as nursery:
        nursery.start_soon(answer_pings, raw, [])
        for first in (TEXT, *[CONTINUATION] * 300, FIN | CONTINUATION):
            await trio.sleep(0.1)
            await raw.say(frame(first, b"x" * 6_600))
        (late,) = await server.receive()
        assert late.size == 302 * 6_600
        for _ in range(3):  # and so may the next
            await raw.say(frame(TEXT, b"{"))
            await trio.sleep(25)
            await raw.say(frame(FIN | CONTINUATION, b"}"))
            await server.receive()
        nursery.cancel_scope.cancel()


async def test_a_peer_in_the_middle_of_a_message_answers_pings_too(autojump_clock: MockClock) -> None:
    patient = KeepAlive(message_timeout=math.inf)
    async with raw_client(Meeting(), keep_alive=patient) as (raw, server), trio.open_nursery() as nursery:
        await raw.say(frame(TEXT, b"x"))
        nursery.start_soon(dribble, raw, frame(CONTINUATION, b"x"))
        with (
            trio.fail_after(500),
            pytest.raises(trio.BrokenResourceError, match="nothing was heard of the peer for 60 seconds"),
        ):
            await server.receive()
        assert trio.current_time() == pytest.approx(60, abs=0.1)
        assert (await raw.hear())[0] == FIN | PING
        nursery.cancel_scope.cancel()


async def test_while_we_do_not_read_no_message_is_late(autojump_clock: MockClock) -> None:
    async with raw_client(Meeting()) as (raw, server):
        large = frame(FIN | TEXT, b"x" * 100_000)
        await raw.say(large * 10, large[:20_000])
        await trio.sleep(300)
        taken = 0
        while taken < 10:
            taken += len(await server.receive())
        await trio.sleep(25)
        await raw.say(large[20_000:])
        (last,) = await server.receive()
        assert last.size == 100_000


async def test_whoever_talks_is_not_pinged(autojump_clock: MockClock) -> None:
    async with raw_client(Meeting()) as (raw, server), trio.open_nursery() as nursery:
        frames: list[tuple[int, bytes]] = []

        async def hear() -> None:
            while True:
                frames.append(await raw.hear())

        nursery.start_soon(hear)
        for n in range(20):
            await trio.sleep(19)
            await raw.say(message(text(n)))
            assert ids(list(await server.receive())) == [n]
        assert frames == []
        nursery.cancel_scope.cancel()


async def test_while_we_do_not_read_nobody_is_dead_and_we_say_that_we_are_not(autojump_clock: MockClock) -> None:
    async with raw_client(Meeting()) as (raw, server), trio.open_nursery() as nursery:
        frames: list[int] = []

        async def hear() -> None:
            while True:
                frames.append((await raw.hear())[0])

        nursery.start_soon(hear)
        # More than is read ahead, so that the reader waits for whoever takes messages.
        sent = [message(text(n, "x" * 100_000)) for n in range(10)]
        await raw.say(*sent)
        await trio.sleep(610)
        assert frames == [FIN | PONG] * 30
        arrived = []
        while len(arrived) < 10:
            arrived += ids(list(await server.receive()))
        assert arrived == list(range(10))
        nursery.cancel_scope.cancel()


async def test_two_of_ours_wait_for_each_other_as_long_as_it_takes(autojump_clock: MockClock) -> None:
    async with connected() as (client, server), trio.open_nursery() as nursery:
        # Neither reads: both directions are full to the brim, so no ping gets through either.
        for channel in (client, server):

            async def send(channel: object = channel) -> None:
                for n in range(100):
                    await channel.send([outgoing(n, "x" * 100_000)])

            nursery.start_soon(send)
        await trio.sleep(100)
        tasks = trio.lowlevel.current_statistics().tasks_living
        await trio.sleep(3600)
        assert trio.lowlevel.current_statistics().tasks_living == tasks
        for channel in (client, server):

            async def receive(channel: object = channel) -> None:
                arrived: list[object] = []
                while len(arrived) < 100:
                    arrived += ids(list(await channel.receive()))
                assert arrived == list(range(100))

            nursery.start_soon(receive)


async def test_a_peer_that_never_answers_is_asked_once_and_lives_while_it_talks(autojump_clock: MockClock) -> None:
    async with raw_client(Meeting()) as (raw, server), trio.open_nursery() as nursery:
        pings = 0

        async def hear() -> None:
            nonlocal pings
            while (heard := await raw.hear())[0]:
                pings += heard[0] == FIN | PING

        nursery.start_soon(hear)
        for n in range(100):
            await trio.sleep(50)
            await raw.say(message(text(n)))
            assert ids(list(await server.receive())) == [n]
        assert pings == 1
        assert len(trio.lowlevel.current_task().parent_nursery.child_tasks) < 10
        with pytest.raises(trio.BrokenResourceError):
            await server.receive()


async def test_looking_after_the_peer_can_be_left_out(autojump_clock: MockClock) -> None:
    never = KeepAlive(math.inf, math.inf)
    async with raw_client(Meeting(), keep_alive=never) as (raw, server), trio.open_nursery() as nursery:
        with trio.move_on_after(100_000) as scope:
            await raw.hear()
        assert scope.cancelled_caught
        nursery.start_soon(raw.say, message(text(1)))
        assert ids(list(await server.receive())) == [1]


async def test_a_crash_of_the_library_ends_this_connection_and_is_logged(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def crash(self: trio_websocket.WebSocketConnection, event: object) -> NoReturn:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(trio_websocket.WebSocketConnection, "_handle_ping_event", crash)
    async with raw_client(Meeting()) as (raw, server):
        await raw.say(message(text(1)), frame(FIN | PING))
        assert ids(list(await server.receive())) == [1]
        with pytest.raises(trio.BrokenResourceError):
            await server.receive()
        assert await raw.hear() == (0, b"")
    (record,) = [record for record in caplog.records if record.name == "trimcp.websocket"]
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None


async def test_ordinary_ends_are_quiet(autojump_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with raw_client(Meeting()) as (raw, server):
        await raw.stream.aclose()
        with pytest.raises(trio.BrokenResourceError):
            await server.receive()
    async with connected() as (client, server):
        await client.aclose()
        with pytest.raises(trio.EndOfChannel):
            await server.receive()
    assert not caplog.records


async def test_what_the_body_raises_comes_out_as_itself(autojump_clock: MockClock) -> None:
    async with listening(Meeting().upgrade()) as port:
        with pytest.raises(KeyError, match="mine"):
            async with WebSocketServer(f"ws://127.0.0.1:{port}").connect():
                raise KeyError("mine")


async def test_nothing_is_left_of_a_connection(autojump_clock: MockClock) -> None:
    def links() -> int:
        return sum(
            isinstance(each, WebSocketChannel | FrameGate | trio_websocket.WebSocketConnection)
            for each in gc.get_objects()
        )

    before = len(trio.lowlevel.current_root_task().child_nurseries)
    gc.collect()
    gc.disable()
    others = links()  # of other tests
    try:
        for _ in range(3):
            async with connected() as (client, server):
                await client.send([outgoing(1)])
                await server.receive()
                await client.aclose()
        await wait_all_tasks_blocked()
        del client, server
        assert links() == others, "a cycle of references keeps what is closed"
    finally:
        gc.enable()
    assert len(trio.lowlevel.current_root_task().child_nurseries) == before
