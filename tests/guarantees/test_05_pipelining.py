"""Promise 5: who pipelines without reading is read up to a bounded window, and loses nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

import trimcp
from tests.fuzz.effort import PATIENCE
from tests.guarantees.client_side import EVERY_ROAD, asked_by_hand
from tests.guarantees.report import figure
from tests.guarantees.test_04_slow_readers import noticed, p99
from tests.guarantees.worlds import WORLDS, Home, Homes, Journal, World, work_of
from tests.hostile.server_for_attack import make_server
from tests.peers.clients import DirectPeer, Peer, on
from tests.peers.http1 import post
from tests.peers.messages import call, notification, request, text_of
from tests.peers.processes import MIB, child_server
from tests.peers.servers import ServerPool
from tests.peers.serving import SOFTWARE
from tests.stopwatch import Stopwatch
from trimcp.session.limits import Limits
from trimcp.wire.codes import OVERLOADED

pytestmark = pytest.mark.slow
Everywhere = pytest.mark.parametrize("world", WORLDS, ids=str)

WINDOW = 16 * MIB


MOST = 60_000
RUNNING = Limits().max_running


@attrs.define
class Pouring:
    """A peer that asks and reads nothing, until nothing more is taken."""

    peer: Peer
    make: Callable[[int], bytes]
    written: int = 0
    size: int = 0
    answers: dict[Any, Any] = attrs.field(factory=dict)
    ended: trio.Event = attrs.field(factory=trio.Event)
    _over: bool = False

    async def pour(self) -> None:
        while not self._over and self.written < MOST:
            texts = [self.make(id) for id in range(self.written, self.written + 20)]
            await self.peer.pipeline(*texts)
            self.written += 20
            self.size += sum(map(len, texts))
        self.ended.set()

    async def stuck(self, home: Home) -> None:
        """Wait until nothing was taken for a while, in which the server had nothing to do."""
        written, work = -1, "R"
        while not written or work.startswith("R") or (written, work) != (self.written, work_of(home.pid)):
            written, work = self.written, work_of(home.pid)
            await trio.sleep(0.4)
        self._over = True

    async def read(self) -> None:
        """Take every answer, each but once."""
        self.peer.read_on()
        while True:
            answer = await self.peer.hear()
            assert answer["id"] not in self.answers
            self.answers[answer["id"]] = answer

    async def read_all(self) -> None:
        """Read on, and wait until all that was asked is answered, or no longer."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.read)
            await self.ended.wait()
            with trio.move_on_after(PATIENCE):
                while len(self.answers) < self.written:  # noqa: ASYNC110  # nobody tells when the last one came
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()

    @property
    def refused(self) -> int:
        """How many were turned away because too much waits, as a POST that cannot wait is, with its id and a 503."""
        return sum(answer.get("error", {}).get("code") == OVERLOADED for answer in self.answers.values())

    def wrong(self, right: Callable[[int], str]) -> int:
        """How many answers are missing or not what was asked for."""
        right_ones = sum("result" in said and text_of(said) == right(id) for id, said in self.answers.items())
        return self.written - self.refused - right_ones


@Everywhere
async def test_reading_stops_at_a_window_and_nothing_is_lost(homes: Homes, world: World) -> None:
    filling = "." * 500
    async with homes(world) as home:
        await home.warm()
        control = await p99(home, "alone")
        async with home.peer(reading=False) as peer:
            if isinstance(peer, DirectPeer):
                peer.paused = True
            pouring = Pouring(peer, lambda id: peer.call(id, "echo", text=f"number {id}{filling}"))
            base = home.forget_peak()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pouring.pour)
                await pouring.stuck(home)
                spent, taken = home.peak - base, pouring.size
                echo = await p99(home, "beside")
                await pouring.read_all()
    wrong = pouring.wrong(lambda id: f"number {id}{filling}")
    taken -= pouring.refused * taken // pouring.written
    # Here the thousand handlers that wait to answer are in the figure beside the window, and over HTTP+SSE sixteen
    # buffers of answers; what waits behind handlers is measured alone below.
    bound = None if world.transport == "direct" or (world.transport == "sse" and world.own) else 16
    figure(5, "taken of a pipeline before reading stopped", taken / MIB, 16, "MiB", str(world))
    figure(5, "memory for what was pipelined and not read", spent / MIB, bound, "MiB", str(world))
    figure(5, f"answers lost or wrong, of {pouring.written:,} then", wrong, 0, "answers", str(world))
    noticed(world, "one that pipelines and does not read", echo, control)
    assert taken <= WINDOW
    assert wrong == 0
    # Over HTTP+SSE answers come somewhere else than requests go, which is why these are refused and not left unread.
    assert world.transport == "sse" or (not pouring.refused and pouring.written < MOST), "reading never stopped"
    assert bound is None or spent <= WINDOW


STREAMS = [world for world in WORLDS if str(world) in ("stdio 2025", "framed 2026", "websocket own 2025")]


@pytest.mark.parametrize("size", [3_000, 30_000])
@pytest.mark.parametrize("world", STREAMS, ids=str)
async def test_reading_stops_at_a_window_behind_handlers_that_take_their_time(
    homes: Homes, world: World, size: int
) -> None:
    """As many as may run are taken, and of those that wait for them 16 MiB."""
    gate, filling = f"of {world} {size}".replace(" ", "-"), "." * size
    async with homes(world) as home, home.peer() as peer:
        pouring = Pouring(peer, lambda id: peer.call(id, "watch", gate=gate, filling=filling))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pouring.pour)
            await pouring.stuck(home)
            # What the system holds on its way is nobody's yet, and a socket's buffers grow as they like.
            taken, unread = pouring.size, peer.unread
            running = RUNNING * taken // pouring.written
            # Nothing can be said here any more, so what opens the gate is said in the journal.
            home.journal.open(gate)
            await pouring.read_all()
    wrong = pouring.wrong(lambda id: "waited")
    on = f"{world}, of {size:,} bytes each"
    figure(5, "taken behind handlers at work", (taken - running - unread) / MIB, 16, "MiB", on)
    figure(5, "left in the system's buffers then", unread / MIB, None, "MiB", on)
    assert pouring.written < MOST, "reading never stopped"
    assert wrong == 0
    assert taken - running - unread <= WINDOW


BEHIND = [*STREAMS, *(world for world in WORLDS if world.transport == "direct")]


@pytest.mark.parametrize("world", BEHIND, ids=str)
async def test_what_waits_behind_handlers_costs_no_more_than_the_window(homes: Homes, world: World) -> None:
    """As memory, not as text: small requests are several times as large once they were read."""
    gate, filling = f"small-of-{world}".replace(" ", "-"), "." * 500
    async with homes(world) as home:
        await home.warm()
        async with home.peer() as peer:
            pouring = Pouring(peer, lambda id: peer.call(id, "watch", gate=gate, filling=filling))
            await peer.pipeline(*map(pouring.make, range(RUNNING)))
            pouring.written = RUNNING
            before = 0
            while before != (before := home.memory):  # noqa: ASYNC110  # nobody tells when all are at work
                await trio.sleep(0.4)
            base = home.forget_peak()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pouring.pour)
                await pouring.stuck(home)
                spent = home.peak - base
                home.journal.open(gate)
                await pouring.read_all()
    wrong = pouring.wrong(lambda id: "waited")
    figure(5, "memory for what waits behind handlers at work", spent / MIB, 16, "MiB", str(world))
    assert RUNNING + 1_000 < pouring.written < MOST, "reading never stopped"
    assert wrong == 0
    assert spent <= WINDOW


async def test_a_question_left_open_is_no_way_to_have_pongs_piled_up() -> None:
    async with child_server() as server:
        await server.meet(elicitation={})
        await server.warmed()
        base = server.forget_peak()
        await server.say(call("q", "ask"))
        question = await server.hear()
        pings = [request(n, "ping") for n in range(1_000)]
        sent = 0
        with trio.move_on_after(2):
            while True:
                await server.say(*pings)
                sent += 1
        assert 5 < sent < 50
        assert server.peak - base <= 16 * MIB
        assert question["method"] == "elicitation/create"


async def test_replies_held_for_an_array_that_is_never_complete_are_bounded() -> None:
    async with child_server() as server:
        await server.meet("2025-03-26")
        await server.warmed()
        base = server.forget_peak()
        for n in range(5):
            members = [call(f"hang {n}", "hang"), *(call(f"{n}.{m}", "big", size=MIB) for m in range(20))]
            await server.say(b"[" + b",".join(members) + b"]")
        while (await server.statistics())["running"] > 6:
            pass
        assert server.peak - base <= 24 * MIB
        await server.say(*(notification("notifications/cancelled", requestId=f"hang {n}") for n in range(5)))
        arrays = [await server.hear() for _ in range(5)]
        replies = {reply["id"]: reply for array in arrays for reply in array}
        assert len(replies) == 100
        errors = [reply["error"]["code"] for reply in replies.values() if "error" in reply]
        assert 80 <= len(errors) <= 90
        assert set(errors) == {1001}


async def test_requests_under_way_are_bounded_by_what_they_occupy() -> None:
    """An empty array is three bytes on the wire and seventy in memory."""
    junk = [[] for _ in range(60_000)]
    async with child_server() as server:
        await server.meet()
        await server.warmed()
        base = server.forget_peak()
        with trio.move_on_after(3):
            for n in range(100):
                await server.say(request(n, "tools/call", name="hang", arguments={}, _meta={"junk": junk}))
        assert server.peak - base <= 100 * MIB


@pytest.mark.parametrize("host", SOFTWARE)
async def test_posts_of_who_reads_neither_stream_nor_answers_cost_no_more_than_the_window(
    servers: ServerPool, host: str
) -> None:
    """Above, sixteen buffers of answers are in the figure over HTTP+SSE; here answers are small."""
    async with servers(host) as server:
        await server.warm()
        base, sent = server.forget_peak(), 0
        async with on(server, "sse", receive_buffer=4096) as lane, server.wire(receive_buffer=4096) as wire:
            with trio.move_on_after(0.5):
                while True:
                    texts = [lane.call(sent + n, "echo", text=f"number {sent + n}") for n in range(100)]
                    await wire.send(*(post(text, path=lane.path) for text in texts))
                    sent += 100
            spent = server.peak - base
            async with on(server, "modern") as beside:
                assert (await beside.ask(1, "echo"))["id"] == 1
    what = "memory for POSTs whose stream is not read"
    figure(5, what, spent / MIB, 16, "MiB", f"sse {host} 2024")
    assert spent <= WINDOW


# The client's side: a server may ask, and not take the answers


# In one process an answer is handed to whoever asked, who cannot leave it unread.
APART = [road for road in EVERY_ROAD if road != "direct"]


@pytest.mark.parametrize("road", APART)
async def test_a_client_reads_no_further_than_a_window_and_nothing_is_lost(road: str, tmp_path: Path) -> None:
    """The answers are as large as the questions. Other sessions of the same program do not notice."""
    home = Home(World("framed", "", False), Journal(tmp_path / "journal"))
    filling = "." * 2_000
    written = size = 0
    heard: list[Any] = []
    beside = trimcp.Client("beside").connect(trimcp.in_process(make_server(), framed=True))
    async with asked_by_hand(road, trimcp.Client("c"), tmp_path) as (_, server), beside as session:
        await session.call_tool("echo")
        server.stop_reading()
        base = home.forget_peak()
        stuck = False

        async def pour() -> None:
            nonlocal written, size
            while not stuck and written < MOST:
                text = request(f"{written} {filling}", "ping")
                await server.say(text)
                written += 1
                size += len(text)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(pour)
            before = -1
            while written != before or not before:
                before = written
                await trio.sleep(0.2)
            stuck, taken, spent = True, size, home.peak - base
            took = []
            for _ in range(100):
                clock = Stopwatch(())
                await session.call_tool("echo")
                took.append(clock.took())
            server.read_on()
            with trio.fail_after(PATIENCE):
                while len(heard) < before:
                    heard.append(await server.hear())
        heard += [await server.hear() for _ in range(written - before)]
    told = {answer["id"].split()[0] for answer in heard if answer.get("result") == {}}
    wrong = written - len(told) + len(heard) - len(told)
    figure(5, "taken of a pipeline before reading stopped", taken / MIB, 16, "MiB", f"{road}, a client")
    figure(5, "memory for what was pipelined and not read", spent / MIB, 16, "MiB", f"{road}, a client")
    figure(5, "answers lost or wrong of a client whose server did not read", wrong, 0, "answers", road)
    noticed(World(road, "a client", False), "one that pipelines and does not read", sorted(took)[-2], 0.0)
    assert before < MOST, "reading never stopped"
    assert taken <= WINDOW
    assert spent <= WINDOW
    assert not wrong
