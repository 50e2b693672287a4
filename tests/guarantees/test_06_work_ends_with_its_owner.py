"""Promise 6: work stops with its owner: every clean-up within 100 ms, and tasks, sockets and files as before."""

from __future__ import annotations

import gc
import os
import socket
import struct
import time
from itertools import count
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing

import trimcp
from tests.fuzz.effort import PATIENCE
from tests.guarantees.client_posts import question
from tests.guarantees.client_side import EVERY_ROAD, QUESTIONED, asked_by_hand
from tests.guarantees.report import figure
from tests.guarantees.worlds import ALONE, WORLDS, Home, Homes, World, worlds
from tests.peers.clients import Peer, PostPeer, WebSocketPeer
from tests.peers.messages import notification, request, text_of
from tests.peers.serving import HTTP2
from tests.stopwatch import Stopwatch
from trimcp.session.limits import Limits

pytestmark = pytest.mark.slow
Everywhere = pytest.mark.parametrize("world", WORLDS, ids=str)

MANY = 10
EOF_GRACE = Limits().eof_grace
RUNNING = Limits().max_running
# Over Streamable HTTP who leaves before 2026-07-28 means to come back; since then leaving is how a call is given up.
CONNECTED = [world for world in WORLDS if world.transport != "http"]


async def begun(home: Home, peer: Peer, what: str, tool: str = "nap", **arguments: Any) -> list[str]:
    """Begin calls that last, each with a file, a socket and a task of its own; returns their names."""
    names = [f"{what} {number} in {home.world}" for number in range(MANY)]
    await peer.say(*(peer.call(f"{n}", tool, name=name, **arguments) for n, name in enumerate(names)))
    await home.journal.until("begun", *names)
    return names


async def ended(home: Home, names: list[str], since: list[Stopwatch] | Stopwatch) -> tuple[float, set[str]]:
    """Wait until all of them have cleaned up; returns the longest that one took, and the reasons they could read."""
    lines = await home.journal.until("ended", *names)
    beside = await home.journal.until("beside ended", *names)
    clocks = since if isinstance(since, list) else [since] * len(names)
    took = [clock.took(max(one["at"], other["at"])) for one, other, clock in zip(lines, beside, clocks, strict=True)]
    return max(took), {line["reason"] for line in lines}


def clean(world: World, how: str, seconds: float) -> None:
    """Assert that clean-ups took no longer than promised."""
    figure(6, f"last of {MANY} clean-ups after {how}", seconds * 1000, 100, "ms", str(world))
    assert seconds <= 4 * 0.1


@Everywhere
async def test_what_is_cancelled_or_late_is_cleaned_up_and_leaves_nothing(homes: Homes, world: World) -> None:
    async with homes(world) as home:
        base = await home.counts()
        async with home.peer() as peer:
            names = await begun(home, peer, "cancelled", seconds=600)
            cancelled = []
            for n in range(MANY):
                cancelled.append(home.stopwatch())
                await peer.cancel(str(n))
            took, reasons = await ended(home, names, cancelled)
            clean(world, "a cancel", took)
            assert reasons == {"DISCONNECTED" if world.transport == "http" and world.modern else "PEER"}

            clock = home.stopwatch()
            names = await begun(home, peer, "late", "limited")
            began = [line["at"] for line in await home.journal.until("begun", *names)]
            _, reasons = await ended(home, names, clock)
            lines = await home.journal.until("beside ended", *names)
            took = max(line["at"] - at for line, at in zip(lines, began, strict=True))
            clean(world, "a timeout", max(0.0, took - 0.3 - clock.lost))
            assert reasons == {"DEADLINE"}
            told = [await peer.hear() for _ in range(MANY)]
            assert {answer["id"] for answer in told} == {str(n) for n in range(MANY)}
            assert all("error" in answer or answer["result"]["isError"] for answer in told)
        await home.back_to(base)
    figure(6, "tasks, sockets and files more than before", 0, 0, "", str(world))


@pytest.mark.parametrize("world", [*CONNECTED, ALONE], ids=str)
async def test_who_disconnects_stops_what_it_began(homes: Homes, world: World) -> None:
    async with homes(world) as home:
        base = await home.counts()
        async with home.peer() as peer:
            names = await begun(home, peer, "left", seconds=600)
            clock = home.stopwatch()
            await peer.hang_up()
            took, reasons = await ended(home, names, clock)
            # Who closes a pipe may still read what comes out of the other one: calls get this long.
            clean(world, "a disconnect", max(0.0, took - (EOF_GRACE if world.half_open else 0)))
            assert reasons == {"DISCONNECTED"}
            if home.target is not None:
                assert await home.target.process.wait() == 0
                return
        await home.back_to(base)


async def left_unread(peer: WebSocketPeer, since: int = 0) -> bool:
    """Whether the server has stopped reading: more waits for it than before, and it takes nothing of that."""
    held = peer.unread
    if held <= since:
        await trio.sleep(0.01)
        return False
    await trio.sleep(0.3)
    return peer.unread == held


@pytest.mark.parametrize("reset", [False, True])
# Over HTTP/2 the system keeps nothing unread of a stream: its window does, and a proxy has the end and the reset.
@pytest.mark.parametrize("world", [each for each in worlds(transport="websocket") if each.host != HTTP2], ids=str)
async def test_who_disconnects_is_noticed_while_nothing_is_read_of_it(homes: Homes, world: World, reset: bool) -> None:
    """Its end is behind what it said before, if that found room in the system; if it did not, a reset tells it."""
    async with homes(world) as home:
        base = await home.counts()
        async with home.peer() as peer:
            assert isinstance(peer, WebSocketPeer)
            names = await begun(home, peer, f"left unread with{'' if reset else 'out'} a reset", seconds=600)
            await peer.say(*(peer.call(n, "hang") for n in range(MANY, RUNNING)))
            large = [peer.call(RUNNING + n, "watch", gate="never", filling="." * 100_000) for n in range(1_000)]
            first = len(large) // 7  # for these there is room
            await peer.say(*large[:first])
            # Small enough for the system to take one whole that the server does not read any more.
            small = (peer.call(f"small {n}", "watch", gate="never", filling="." * 40_000) for n in count())
            while not await left_unread(peer):
                await peer.say(next(small))
            if reset:
                before = peer.unread
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(peer.say, *large[first:])
                    while not await left_unread(peer, before):
                        pass
                    nursery.cancel_scope.cancel()
                assert isinstance(peer.raw.stream, trio.SocketStream)
                peer.raw.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            clock = home.stopwatch()
            await peer.hang_up()
            took, reasons = await ended(home, names, clock)
            clean(world, f"a {'reset' if reset else 'disconnect'} of who is not read", took)
            assert reasons == {"DISCONNECTED"}
        await home.back_to(base)


@pytest.mark.parametrize("world", worlds(transport="websocket"), ids=str)
async def test_a_goodbye_stops_what_was_begun(homes: Homes, world: World) -> None:
    async with homes(world) as home, home.peer() as peer:
        assert isinstance(peer, WebSocketPeer)
        names = await begun(home, peer, "goodbye", seconds=600)
        clock = home.stopwatch()
        await peer.say_goodbye()
        took, reasons = await ended(home, names, clock)
        clean(world, "a Close frame", took)
        assert reasons == {"DISCONNECTED"}


@pytest.mark.parametrize("world", worlds(transport="http", modern=False), ids=str)
async def test_a_session_ends_with_its_delete_and_not_with_a_connection(homes: Homes, world: World) -> None:
    async with homes(world) as home:
        base = await home.counts()
        async with home.peer() as peer:
            assert isinstance(peer, PostPeer)
            names = await begun(home, peer, "deleted", seconds=600)
            await peer.hang_up()
            counts = await home.counts()
            with trio.move_on_after(PATIENCE):
                while counts["files"] > base["files"] + 2 * MANY:  # a file and a socket each; no connections
                    counts = await home.counts()
            assert counts["running"] == MANY, "it was a connection that ended, and no call"
            assert not [name for name in names if home.journal.of(name, "ended")]
            clock = home.stopwatch()
            assert await peer.delete() == 200
            took, reasons = await ended(home, names, clock)
            clean(world, "a DELETE", took)
            assert reasons == {"DISCONNECTED"}
        await home.back_to(base)


async def abandoned(peer: Peer, number: int) -> None:
    """Wait until so many threads are counted whose calls are over."""
    with trio.fail_after(PATIENCE):
        for n in range(10_000):
            if text_of(await peer.ask(f"count{n}", "abandoned")) == str(number):
                return
            await trio.sleep(0.01)


@Everywhere
async def test_a_thread_that_cannot_be_stopped_is_counted(homes: Homes, world: World) -> None:
    name = f"thread in {world}"

    async with homes(world) as home:
        base = await home.counts()
        async with home.peer() as peer:
            await abandoned(peer, 0)
            await peer.say(peer.call("t", "stuck", name=name))
            await home.journal.until("begun", name)
            clock = home.stopwatch()
            await peer.cancel("t")
            await abandoned(peer, 1)
            took = clock.took()
            assert not home.journal.of(name, "ended"), "nobody can stop a thread"
            await peer.ask("u", "unstick", name=name)
            await home.journal.until("ended", name)
            await abandoned(peer, 0)
        await home.back_to(base)
    figure(6, "until a thread that cannot be stopped is counted", took * 1000, 100, "ms", str(world))
    assert took <= 4 * 0.1


@pytest.mark.parametrize("world", [world for world in CONNECTED if world.host], ids=str)
async def test_a_thread_is_counted_also_when_its_session_has_ended(homes: Homes, world: World) -> None:
    name = f"survivor in {world}"
    async with homes(world) as home:
        async with home.peer() as peer:
            await peer.say(peer.call("t", "stuck", name=name))
            await home.journal.until("begun", name)
        async with home.peer() as peer:
            await abandoned(peer, 1)
            await peer.ask("u", "unstick", name=name)
            await abandoned(peer, 0)


# The client's side: what a server asks has an owner, too


@attrs.define(eq=False)
class Asking:
    """A client whose handler has a file, a socket and a task of its own, and says how it ended."""

    client: trimcp.Client = attrs.field(factory=lambda: trimcp.Client("c"))
    begun: int = 0
    ended: list[tuple[float, str]] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.client.sampling(self.sample)
        self.client.elicitation(self.sample)

    async def sample(self, params: Any) -> str:
        why = "it was not cancelled"
        with open(os.devnull), socket.socket():  # noqa: ASYNC230  # it never blocks
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(trio.sleep_forever)
                    self.begun += 1
                    try:
                        await trio.sleep_forever()
                    except trio.Cancelled as cancelled:
                        why = str(cancelled)
                        raise
            finally:
                self.ended.append((time.monotonic(), why))
        return ""

    async def until(self, begun: int, ended: int) -> None:
        with trio.fail_after(PATIENCE):
            while (self.begun, len(self.ended)) != (begun, ended):  # noqa: ASYNC110  # sockets are between
                await trio.sleep(0.001)


def counts() -> tuple[int, int]:
    """Tasks and descriptors of this process."""
    gc.collect()
    return trio.lowlevel.current_statistics().tasks_living, len(os.listdir("/proc/self/fd"))


async def back_to(base: tuple[int, int]) -> None:
    with trio.move_on_after(PATIENCE):
        while counts() != base:  # noqa: ASYNC110  # connections close when the other side does
            await trio.sleep(0.01)
    assert counts() == base


@pytest.mark.parametrize("road", EVERY_ROAD)
async def test_what_a_server_no_longer_asks_is_cleaned_up(road: str, tmp_path: Path) -> None:
    asking = Asking()
    async with asked_by_hand(road, asking.client, tmp_path) as (_, server):
        base = (0, 0)
        for _ in range(2):  # after the first one a task stays, to run the next
            asking.ended.clear()
            asking.begun, base = 0, counts()
            for n in range(MANY):
                await server.say(request(n, "sampling/createMessage", messages=[], maxTokens=9))
            await asking.until(MANY, 0)
            clock = Stopwatch(())
            await server.say(*(notification("notifications/cancelled", requestId=n) for n in range(MANY)))
            await asking.until(MANY, MANY)
            took = clock.took(max(ended for ended, _ in asking.ended))
            assert all("cancelled by peer" in why for _, why in asking.ended), "it could read the reason"
            await server.say(request("ping", "ping"))
            await server.hear()
        await back_to(base)
    figure(6, f"last of {MANY} clean-ups after a cancel", took * 1000, 100, "ms", f"{road}, a client")
    assert took <= 4 * 0.1


CONNECTIONS = [road for road in EVERY_ROAD if road not in ("http events", "http json")]


@pytest.mark.parametrize("road", CONNECTIONS)
async def test_a_client_stops_what_a_server_asked_that_has_left(road: str, tmp_path: Path) -> None:
    asking = Asking()
    async with asked_by_hand(road, asking.client, tmp_path) as (_, server):
        for n in range(MANY):
            await server.say(request(n, "sampling/createMessage", messages=[], maxTokens=9))
        await asking.until(MANY, 0)
        clock = Stopwatch(())
        await server.leave()
        await asking.until(MANY, MANY)
        took = clock.took(max(ended for ended, _ in asking.ended))
        assert all("disconnected" in why for _, why in asking.ended), "it could read the reason"
    grace = EOF_GRACE if road in ("stdio", "framed", "direct") else 0
    figure(6, f"last of {MANY} clean-ups after a disconnect", (took - grace) * 1000, 100, "ms", f"{road}, a client")
    assert took - grace <= 4 * 0.1


@pytest.mark.parametrize("unread", [False, True])
@pytest.mark.parametrize("road", ["websocket", "http+sse"])
async def test_a_client_notices_that_a_server_has_left_of_which_it_reads_nothing(
    road: str, unread: bool, tmp_path: Path
) -> None:
    """Because it asked for too much: what the client has taken in is its backlog, or more is left in the system."""
    asking = Asking(trimcp.Client("c", limits=Limits(max_running=MANY, backlog_requests=MANY)))
    async with asked_by_hand(road, asking.client, tmp_path) as (_, server):
        for n in range(3 * MANY):
            await server.say(request(n, "sampling/createMessage", messages=[], maxTokens=9))
        if unread:
            for n in range(44 if road == "http+sse" else 4):  # 4 MiB there, 256 KiB here, and a little
                await server.say(request(f"{n}{'.' * 100_000}", "ping"))
        await asking.until(MANY, 0)
        await trio.testing.wait_all_tasks_blocked(0.3)  # it must not be in the middle of reading
        clock = Stopwatch(())
        await server.leave()
        await asking.until(MANY, MANY)
        took = clock.took(max(ended for ended, _ in asking.ended))
        assert all("disconnected" in why for _, why in asking.ended), "it could read the reason"
    how = f"{road}, a client, {'with' if unread else 'without'} more to read"
    figure(6, f"last of {MANY} clean-ups after a disconnect of who is not read", took * 1000, 100, "ms", how)
    assert took <= 4 * 0.1


@pytest.mark.parametrize("road", QUESTIONED)
async def test_a_call_that_is_given_up_takes_its_questions_with_it(road: str, tmp_path: Path) -> None:
    asking = Asking()
    async with asked_by_hand(road, asking.client, tmp_path) as (session, server):
        async with trio.open_nursery() as nursery:
            for n in range(MANY):
                nursery.start_soon(session.call_tool, f"t{n}")
            for _ in range(MANY):
                call = await server.called()
                requests = {"q": question("?")}
                await server.result(call, resultType="input_required", inputRequests=requests, requestState="s")
            await asking.until(MANY, 0)
            clock = Stopwatch(())
            nursery.cancel_scope.cancel()
        took = clock.took(max(ended for ended, _ in asking.ended))
        assert len(asking.ended) == MANY
    figure(6, f"last of {MANY} clean-ups after a cancel", took * 1000, 100, "ms", f"{road}, a client")
    assert took <= 4 * 0.1
