"""Promise 3: 4 MiB per message into a server: a clear error, little memory, and the session lives on."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import trio

import trimcp
from tests.guarantees.client_posts import POSTED
from tests.guarantees.client_side import ROADS, asked_by_hand, served_by_hand
from tests.guarantees.report import figure
from tests.guarantees.worlds import ALONE, WORLDS, Home, Homes, Journal, World, worlds
from tests.peers.clients import ChannelPeer, EventsPeer, Peer, PostPeer, WebSocketPeer
from tests.peers.http1 import post
from tests.peers.messages import text_of
from tests.peers.processes import MIB
from tests.peers.websockets import CONTINUATION, FIN, TEXT, frame, message
from trimcp.channel import CLIENT_MAX_MESSAGE, SERVER_MAX_MESSAGE
from trimcp.transports.stream import StreamChannel
from trimcp.wire.codes import INVALID_REQUEST

pytestmark = pytest.mark.slow
Everywhere = pytest.mark.parametrize("world", WORLDS, ids=str)

LIMIT = 4 * MIB
SPENT = 8 * MIB
_PIECE = b"x" * 65_536


def large(peer: Peer, size: int) -> bytes:
    """A tool call of this size, with its id at the end, where it is read last; a body is refused by its head, so there
    it stands at the beginning."""
    text = peer.call(77, "echo", text="@")
    if not isinstance(peer, PostPeer | EventsPeer):
        text = text.replace(b'"id":77,', b"")[:-1] + b',"id":77}'
    return text.replace(b"@", b"x" * (size - len(text) + 1))


async def pour(peer: ChannelPeer, *texts: bytes) -> None:
    """Write into the pipe of a framed connection as it is."""
    assert isinstance(peer.channel, StreamChannel)
    for text in texts:
        for first in range(0, len(text), len(_PIECE)):
            await peer.channel._sender.send_all(text[first : first + len(_PIECE)])


@Everywhere
async def test_a_byte_more_than_four_mebibytes_is_refused_by_its_id(homes: Homes, world: World) -> None:
    assert SERVER_MAX_MESSAGE == LIMIT
    async with homes(world) as home:
        await home.warm()
        async with home.peer() as peer:
            fits, too_large = large(peer, LIMIT), large(peer, LIMIT + 1)
            assert (len(fits), len(too_large)) == (LIMIT, LIMIT + 1)
            base = home.forget_peak()
            if world.transport == "framed":
                await pour(peer, too_large, b"\n")  # in pieces: a copy of ours is none of its memory
            else:
                await peer.say(too_large)
            if world.transport == "websocket" and not world.own:
                assert await peer.raw.close_code() == 1009
                spent = home.peak - base
            else:
                refusal = await peer.hear()
                spent = home.peak - base
                assert (refusal["id"], refusal["error"]["code"]) == (77, INVALID_REQUEST)
                assert "4194304 bytes" in refusal["error"]["message"].replace(",", "")
                if world.transport in ("http", "sse"):
                    assert peer.status == 413
                await peer.say(fits)
                assert len(text_of(await peer.hear())) > LIMIT - 1_000, "just not too large"
        async with home.peer() as peer:
            assert text_of(await peer.ask("well", "echo", text="well")) == "well"
    figure(3, "memory for a message of 4 MiB and a byte", spent / MIB, 8, "MiB", str(world))
    assert spent <= SPENT


@pytest.mark.parametrize("world", worlds(transport="stdio"), ids=str)
async def test_a_long_line_costs_no_more(homes: Homes, world: World) -> None:
    async with homes(world) as home, home.peer() as peer:
        await home.warm()
        base = home.forget_peak()
        await peer.target.pour(b'{"jsonrpc":"2.0","method":"x","params":{"a":"')
        for _ in range(60):
            await peer.target.pour(_PIECE * 16)
        await peer.target.pour(b'"},"id":78}\n')
        refusal = await peer.hear()
        spent = home.peak - base
        assert (refusal["id"], refusal["error"]["code"]) == (78, INVALID_REQUEST)
        assert text_of(await peer.ask("well", "echo", text="well")) == "well"
    figure(3, "memory for a line of 60 MiB", spent / MIB, 8, "MiB", str(world))
    assert spent <= SPENT


@pytest.mark.parametrize("world", worlds(transport="stdio"), ids=str)
async def test_an_endless_line_is_answered_and_then_ends_the_session(homes: Homes, world: World) -> None:
    async with homes(world) as home, home.peer() as peer:
        await home.warm()
        base = home.forget_peak()
        await peer.target.pour(b'{"jsonrpc":"2.0","id":79,"method":"x","params":{"a":"')
        for _ in range(5):
            await peer.target.pour(_PIECE * 16)
        refusal = await peer.hear()  # while it goes on
        assert (refusal["id"], refusal["error"]["code"]) == (79, INVALID_REQUEST)
        said = 5
        with contextlib.suppress(trio.BrokenResourceError):
            while said < 200:
                await peer.target.pour(_PIECE * 16)
                said += 1
                spent = home.peak - base
        assert said < 70, "it was read on and on"
        assert await peer.target.process.wait() == 0
    figure(3, "memory for a line without end", spent / MIB, 8, "MiB", str(world))
    assert spent <= SPENT


@pytest.mark.parametrize("world", worlds(transport="framed"), ids=str)
async def test_a_long_line_in_memory_costs_no_more(homes: Homes, world: World) -> None:
    async with homes(world) as home:
        await home.warm()
        async with home.peer() as peer:
            base = home.forget_peak()
            await pour(peer, b'{"jsonrpc":"2.0","method":"x","params":{"a":"')
            for _ in range(800):
                await pour(peer, _PIECE)
            await pour(peer, b'"},"id":78}\n')
            refusal = await peer.hear()
            spent = home.peak - base
            assert (refusal["id"], refusal["error"]["code"]) == (78, INVALID_REQUEST)
            assert text_of(await peer.ask("well", "echo", text="well")) == "well"
    figure(3, "memory for a line of 50 MiB", spent / MIB, 8, "MiB", str(world))
    assert spent <= SPENT


@pytest.mark.parametrize("world", [*worlds(transport="http"), *worlds(transport="sse")], ids=str)
async def test_a_body_without_end_costs_no_more(homes: Homes, world: World) -> None:
    """Neither one that says its size and is believed, nor one in chunks."""
    async with homes(world) as home:
        await home.warm()
        async with home.peer() as peer:
            served = home.served
            assert served is not None
            plain = post(b"{}", session=peer.session, path=peer.path).removesuffix(b"{}")
            length, chunked = b"Content-Length: 2", b"Transfer-Encoding: chunked"
            chunk = b"10000\r\n" + _PIECE + b"\r\n"
            for head, piece in (
                (plain.replace(length, chunked), chunk),
                (plain.replace(length, b"Content-Length: 1099511627776"), _PIECE),
            ):
                base = home.forget_peak()
                async with served.wire() as wire:
                    said = 0
                    try:
                        await wire.send(head)
                        while said < 100 * MIB:
                            await wire.send(piece)
                            said += len(_PIECE)
                    except trio.BrokenResourceError:
                        pass
                    try:
                        assert (await wire.answer()).status == 413
                    except (trio.BrokenResourceError, EOFError):
                        assert not world.own, "Hypercorn's last words can be lost to a reset"
                spent = home.peak - base
                how = "in chunks" if piece is chunk else "of a tebibyte, it says"
                figure(3, f"memory for a body without end, {how}", spent / MIB, 8, "MiB", str(world))
                assert said <= 16 * MIB, "it was read on and on: more than the limit and what is on its way"
                assert spent <= SPENT
            assert text_of(await peer.ask("well", "echo", text="well")) == "well"


@pytest.mark.parametrize("world", [*worlds(transport="websocket"), ALONE], ids=str)
async def test_a_frame_or_a_message_without_end_costs_no_more(homes: Homes, world: World) -> None:
    endless = {
        "one frame": [frame(FIN | TEXT, b"", size=1 << 40), _PIECE],
        "large pieces": [frame(TEXT, b'"'), frame(CONTINUATION, _PIECE)],
        "small pieces": [frame(TEXT, b'"'), frame(CONTINUATION, b"x") * 10_000],
        "empty pieces": [frame(TEXT, b'"'), frame(CONTINUATION, b"") * 10_000],
    }
    async with homes(world) as home:
        await home.warm()
        for name, (first, again) in endless.items():
            base = home.forget_peak()
            said = 0
            async with home.peer() as peer:
                assert isinstance(peer, WebSocketPeer)
                with trio.move_on_after(0.5):
                    try:
                        await peer.raw.say(first)
                        while said < 200 * MIB:
                            await peer.raw.say(again)
                            said += len(again)
                    except trio.BrokenResourceError:
                        pass
                    if name in ("one frame", "large pieces"):
                        assert await peer.raw.close_code() in (1009, None)
            spent = home.peak - base
            figure(3, f"memory for a message without end, {name}", spent / MIB, 8, "MiB", str(world))
            assert spent <= SPENT
        async with home.peer() as peer:
            assert text_of(await peer.ask("well", "echo", text="well")) == "well"


@pytest.mark.parametrize("world", worlds(transport="websocket", host="own"), ids=str)
async def test_a_websocket_lives_on_after_one_that_is_ten_times_too_large(homes: Homes, world: World) -> None:
    async with homes(world) as home:
        await home.warm()
        async with home.peer() as peer:
            text = large(peer, 10 * LIMIT)
            base = home.forget_peak()
            await peer.raw.say(message(text))
            refusal = await peer.hear()
            spent = home.peak - base
            assert (refusal["id"], refusal["error"]["code"]) == (77, INVALID_REQUEST)
            assert text_of(await peer.ask("well", "echo", text="well")) == "well"
    figure(3, "memory for a message of 40 MiB", spent / MIB, 8, "MiB", str(world))
    assert spent <= SPENT


# The client's side


@pytest.mark.parametrize("road", ROADS)
async def test_a_client_takes_64_mebibytes_and_a_byte_more_fails_one_call(road: str, tmp_path: Path) -> None:
    assert CLIENT_MAX_MESSAGE == 64 * MIB
    home = Home(World("framed", "", False), Journal(tmp_path / "journal"))
    head = b'{"jsonrpc":"2.0","result":{"content":[{"type":"text","text":"'
    spent: list[int] = []
    async with served_by_hand(road, trimcp.Client("c"), tmp_path) as (session, server):
        for more in (1, 0):
            calling: list[Any] = []

            async def call(calling: list[Any] = calling) -> None:
                try:
                    calling.append(await session.call_tool("x"))
                except trimcp.McpError as error:
                    calling.append(error)

            base = home.forget_peak()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(call)
                tail = b'"}]},"id":%d}' % (await server.hear())["id"]
                size = CLIENT_MAX_MESSAGE + more - len(head) - len(tail)
                pieces = [_PIECE] * (size // len(_PIECE)) + [_PIECE[: size % len(_PIECE)]]
                if server.raw is None:
                    await server.pour(head, *pieces, tail, b"\n")
                else:
                    await server.pour(frame(FIN | TEXT, b"", masked=False, size=CLIENT_MAX_MESSAGE + more))
                    await server.pour(head, *pieces, tail)
            spent.append(home.peak - base)
            if more:
                assert isinstance(calling[0], trimcp.InvalidReply), calling
                assert "67,108,864 bytes" in str(calling[0])
            else:
                assert len(calling[0].content[0].text) == size
    figure(3, "memory beside the limit for 64 MiB and a byte into a client", spent[0] / MIB - 64, 8, "MiB", road)
    assert spent[0] <= CLIENT_MAX_MESSAGE + SPENT


@pytest.mark.parametrize("road", [*POSTED, "direct"])
async def test_a_client_takes_64_mebibytes_in_a_reply_and_a_byte_more_fails_one_call(road: str, tmp_path: Path) -> None:
    home = Home(World("framed", "", False), Journal(tmp_path / "journal"))
    result = (
        b'"result":{"resultType":"complete","content":[{"type":"text","text":"'
        if "2026" in road
        else (b'"result":{"content":[{"type":"text","text":"')
    )
    async with asked_by_hand(road, trimcp.Client("c"), tmp_path) as (session, server):

        async def call(told: list[Any]) -> None:
            try:
                told.append(await session.call_tool("x"))
            except trimcp.McpError as error:
                told.append(error)

        async def told_too_much(more: int) -> tuple[Any, int, int]:
            told: list[Any] = []
            base = home.forget_peak()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(call, told)
                asked = await server.called()
                head = b'{"jsonrpc":"2.0","id":%d,%b' % (asked.message["id"], result)
                size = CLIENT_MAX_MESSAGE + more - len(head) - len(b'"}]}}')
                pieces = [_PIECE] * (size // len(_PIECE)) + [_PIECE[: size % len(_PIECE)]]
                await server.reply(asked, head, *pieces, b'"}]}}')
            return told[0], size, home.peak - base

        answer, _, spent = await told_too_much(1)
        assert isinstance(answer, trimcp.InvalidReply), answer
        assert "67,108,864 bytes" in str(answer)
        answer, size, _ = await told_too_much(0)
        assert len(answer.content[0].text) == size
    if road == "direct":
        return  # what it is told is there already, and is the memory of whoever tells it
    figure(3, "memory beside the limit for 64 MiB and a byte into a client", spent / MIB - 64, 8, "MiB", road)
    assert spent <= CLIENT_MAX_MESSAGE + SPENT
