"""What no client of gRPC should say ends at most its own connection: others are served, and nothing stays."""

from __future__ import annotations

import random
from typing import Any

import h2.config
import h2.connection
import pytest
import trio

import trimcp
from tests.fuzz.effort import PATIENCE, count
from tests.peers.serving import ServedHere, connect, served
from tests.peers.states import until
from tests.transports.grpc.test_server import EXCHANGE, call, make_server
from trimcp.framing.grpc import message_frame

HEAD = [
    (":method", "POST"),
    (":scheme", "http"),
    (":authority", "127.0.0.1"),
    (":path", EXCHANGE),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]


def conversation(*, end: bool = True) -> list[bytes]:
    """What a client says, frame by frame."""
    frames = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    frames.initiate_connection()
    said = [frames.data_to_send()]
    for number in (1, 3):
        frames.send_headers(number, HEAD)
        said.append(frames.data_to_send())
        for id in range(3):
            frames.send_data(number, message_frame(call(id, "echo", text="x" * 50)))
            said.append(frames.data_to_send())
        frames.send_data(number, b"", end_stream=end)
        said.append(frames.data_to_send())
    frames.increment_flow_control_window(1_000)
    frames.ping(b"12345678")
    said.append(frames.data_to_send())
    frames.reset_stream(3)
    said.append(frames.data_to_send())
    return said


def mutated(said: list[bytes], lots: random.Random) -> bytes:
    """The same, with a few frames or bytes changed, left out, doubled or moved; the preface stays."""
    said = list(said)
    for _ in range(lots.randrange(1, 4)):
        at = lots.randrange(1, len(said))
        kind = lots.randrange(5)
        if kind == 0:
            del said[at]
        elif kind == 1:
            said.insert(at, said[lots.randrange(1, len(said))])
        elif kind == 2:
            said[at] = said[at][: lots.randrange(len(said[at]) + 1)]
        else:
            frame = bytearray(said[at])
            for _ in range(lots.randrange(1, 4)):
                frame[lots.randrange(len(frame))] = lots.randrange(256)
            said[at] = bytes(frame)
        if len(said) < 2:
            break
    return b"".join(said)


async def said_to(place: ServedHere, data: bytes) -> None:
    """Say it on a connection of its own, hear a little, and leave."""
    stream = await connect(place.port)
    try:
        with trio.move_on_after(0.02):
            await stream.send_all(data)
            while await stream.receive_some(65536):
                pass
    except trio.BrokenResourceError:
        pass
    finally:
        await trio.aclose_forcefully(stream)


async def assert_well(place: ServedHere) -> None:
    with trio.fail_after(PATIENCE):
        async with trimcp.Client("c").connect(place.target()) as session:
            assert (await session.call_tool("echo", {"text": "well"})).text == "well"
        await until(lambda: not place.server.statistics().sessions)


@pytest.mark.slow
async def test_mutations(caplog: pytest.LogCaptureFixture) -> None:
    lots = random.Random(14)
    async with served(make_server(), "grpc") as place:
        for _ in range(count(150)):
            await said_to(place, mutated(conversation(end=lots.random() < 0.5), lots))
        await assert_well(place)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize(
    "frames",
    [
        b"\0\0\0\0\0\0\0\0\1" * 5_000,  # empty frames of data
        b"\0\0\4\x08\0\0\0\0\0\0\0\0\1" * 5_000,  # windows
        b"\0\0\x08\6\0\0\0\0\0pingping" * 5_000,
        b"\0\0\0\4\0\0\0\0\0" * 2_000,  # settings
    ],
    ids=["data", "windows", "pings", "settings"],
)
async def test_floods_of_tiny_frames_keep_nobody_waiting(frames: bytes) -> None:
    async with served(make_server(), "grpc") as place, trio.open_nursery() as nursery:
        opening = b"".join(conversation(end=False)[:2])

        async def flood() -> None:
            for _ in range(5):
                await said_to(place, opening + frames)

        nursery.start_soon(flood)
        await assert_well_beside(place)


async def assert_well_beside(place: ServedHere) -> None:
    with trio.fail_after(PATIENCE):
        async with trimcp.Client("c").connect(place.target()) as session:
            for _ in range(5):
                assert (await session.call_tool("echo", {"text": "well"})).text == "well"


async def test_a_client_that_grants_no_window_is_dropped() -> None:
    """It asks for much and takes nothing; what it asked for ends with it."""
    limits = trimcp.HttpLimits(stall_timeout=0.5)
    server: Any = make_server()
    async with served(server, "grpc", limits=limits) as place:
        frames = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        frames.initiate_connection()
        frames.update_settings({4: 0})  # the window of each stream
        frames.send_headers(1, HEAD)
        frames.send_data(1, message_frame(call(1, "echo", text="x" * 10_000)))
        for number in range(40):
            frames.send_data(1, message_frame(call(number + 2, "echo", text="x" * 1_000)))
        stream = await connect(place.port)
        await stream.send_all(frames.data_to_send())
        with trio.fail_after(PATIENCE):
            await until(lambda: server.statistics().sessions)
            await until(lambda: not server.statistics().sessions)
        await trio.aclose_forcefully(stream)
        await assert_well(place)
