"""Promise 7: SIGTERM and SIGINT let calls under way answer, and nothing is left; a second signal ends at once."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from tests.fuzz.effort import PATIENCE
from tests.guarantees.report import figure
from tests.guarantees.worlds import LOCAL, PROGRAM, Homes, Journal, World, interpreter, worlds
from tests.peers.clients import LinePeer, Peer, PostPeer, WebSocketPeer, over_the_network
from tests.peers.messages import call, reported_call, text_of
from tests.peers.processes import ENVIRONMENT, MIB, child_server, seconds_an_interpreter_needs
from tests.peers.servers import start_server, stop_server
from tests.peers.serving import HTTP2, ON_EACH
from tests.peers.websockets import close
from tests.stopwatch import Stopwatch
from trimcp.session.limits import Limits
from trimcp.wire.codes import CANCELLED_BY_DRAIN

pytestmark = pytest.mark.slow

HOSTS = ("stdio 2025", "stdio 2026", *ON_EACH)
OnEach = pytest.mark.parametrize("host", HOSTS)
BySignal = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
MANY = 10


@attrs.define(eq=False)
class Program:
    """A whole program, and a client on every transport that it serves.

    Attributes:
        process: the program.
        peers: its clients, by transport.
        journal: what its handlers went through.
        log: its standard error: a file, or what has come of it so far.
        silent: set once no more will come.
    """

    process: Any
    peers: dict[World, Peer]
    journal: Journal
    log: Any
    silent: trio.Event | None = None

    @property
    def errors(self) -> str:
        """What it wrote to its standard error."""
        if isinstance(self.log, bytearray):
            return self.log.decode()
        self.log.seek(0)
        return str(self.log.read().decode())

    def stopwatch(self) -> Stopwatch:
        """A stopwatch for what it and we do from now on."""
        return Stopwatch((self.process.pid,))

    async def exited(self, clock: Stopwatch | None = None) -> int:
        """Wait until it is gone."""
        while self.process.poll() is None:
            if clock is not None:
                clock.look()
            await trio.sleep(0.002)
        if self.silent is not None:  # else its standard error is a file
            await self.silent.wait()
        return int(self.process.returncode)

    async def begin(self, tool: str, **arguments: Any) -> dict[World, list[str]]:
        """Begin calls on every transport; returns their names."""
        names = {}
        for world, peer in self.peers.items():
            names[world] = [f"{tool} {n} in {world} of {self.process.pid}" for n in range(MANY)]
            calls = [peer.call(f"{n}", tool, name=name, **arguments) for n, name in enumerate(names[world])]
            await peer.say(*calls)
        for each in names.values():
            await self.journal.until("begun", *each)
        return names


@asynccontextmanager
async def running(host: str, journal: Path, **options: Any) -> AsyncIterator[Program]:
    """Run the server as a program, and connect to it in every way."""
    more: dict[str, Any] = {"journal": str(journal), **options}
    with trio.fail_after(PATIENCE):
        async with AsyncExitStack() as stack:
            if host.startswith("stdio"):
                [world] = worlds(transport="stdio", modern=host.endswith("2026"))
                child = await stack.enter_async_context(child_server(program=PROGRAM, serve="stdio", **more))
                peer = LinePeer(world.modern, child)
                await peer.meet()
                await peer.ask("there", "echo")
                yield Program(child.process, {world: peer}, Journal(journal), child.errors, child.silent)
                return
            software = "own" if host == HTTP2 else host
            command = interpreter(json.dumps({"serve": "http", "software": software, **more}))
            served = await trio.to_thread.run_sync(start_server, command, software)
            stack.callback(stop_server, served)
            if host == HTTP2:
                await stack.enter_async_context(served.by_http2())
            peers: dict[World, Peer] = {}
            for world in worlds(host=host):
                connecting = over_the_network(world.transport, served, modern=world.modern)
                peers[world] = await stack.enter_async_context(connecting)
                await peers[world].ask("there", "echo")
            yield Program(served.process, peers, Journal(journal), served.log)
            for peer in peers.values():
                if isinstance(peer, PostPeer):
                    peer.session = None  # there is nobody to be told that it ends


def quiet(program: Program) -> None:
    assert "Traceback" not in program.errors, program.errors
    assert "Error" not in program.errors, program.errors


@OnEach
@BySignal
async def test_ten_of_ten_calls_under_way_are_answered(host: str, number: signal.Signals, tmp_path: Path) -> None:
    async with running(host, tmp_path / "journal") as program:
        names = await program.begin("nap", seconds=1.0)
        program.process.send_signal(number)
        missing = {}
        for world, peer in program.peers.items():
            answers = [await peer.hear() for _ in range(MANY)]
            good = {answer["id"] for answer in answers if "result" in answer and text_of(answer) == "slept"}
            missing[world] = MANY - len(good)
            figure(7, f"of {MANY} replies cut by {number.name}", missing[world], 0, "replies", str(world))
            await program.journal.until("ended", *names[world])
        assert await program.exited() == 0
        quiet(program)
        assert program.errors == ""
    assert not any(missing.values())


@pytest.mark.parametrize(
    ("host", "number"), [*zip(HOSTS, itertools.cycle((signal.SIGTERM, signal.SIGINT, signal.SIGINT)), strict=False)]
)
async def test_what_takes_longer_is_cancelled_with_an_error_and_cleans_up(
    host: str, number: signal.Signals, tmp_path: Path
) -> None:
    async with running(host, tmp_path / "journal", grace=0.3) as program:
        names = await program.begin("nap", seconds=600)
        clock = program.stopwatch()
        program.process.send_signal(number)
        for world, peer in program.peers.items():
            for _ in range(MANY):
                answer = await peer.hear()
                assert answer["error"]["code"] == CANCELLED_BY_DRAIN, answer
            lines = await program.journal.until("ended", *names[world])
            await program.journal.until("beside ended", *names[world])
            assert {line["reason"] for line in lines} == {"DRAIN"}
            late = max(0.0, clock.took(max(line["at"] for line in lines)) - 0.3)
            figure(7, "clean-ups after the grace", late * 1000, None, "ms", str(world))
            assert late <= 4 * 0.1
        assert await program.exited() == 0
        quiet(program)
        assert "still at work after 0.3 seconds" in program.errors


async def part(peer: WebSocketPeer) -> None:
    """Answer a Close frame, as a client does."""
    await peer.raw.close_code()
    await peer.raw.say(close(1001))
    await peer.hang_up()


@OnEach
@BySignal
async def test_without_work_it_is_gone_in_half_a_second(host: str, number: signal.Signals, tmp_path: Path) -> None:
    """With a client connected on every transport."""
    control = await seconds_an_interpreter_needs("trimcp.cli.app, trimcp.cli.serve.network")
    async with running(host, tmp_path / "journal") as program, trio.open_nursery() as nursery:
        for peer in program.peers.values():
            if isinstance(peer, WebSocketPeer):
                nursery.start_soon(part, peer)
        clock = program.stopwatch()
        program.process.send_signal(number)
        assert await program.exited(clock) == 0
        took = clock.took()
        assert program.errors == ""
    figure(7, f"idle, gone after {number.name}", took, 0.5, "s", host)
    figure(7, "an interpreter that has nothing to do, gone", control, None, "s", f"beside {host}")
    assert took <= max(4 * 0.5, 10 * control)


async def turned_away(peer: Peer) -> bool:
    """Whether a new call is refused, or there is nobody any more to take it."""
    try:
        if isinstance(peer, PostPeer):
            async with peer.server.wire() as wire:
                answer = (await wire.ask(peer.posted(peer.call("new", "echo")))).reply
        else:
            await peer.say(peer.call("new", "echo"))
            answer = await peer.hear()
    except (OSError, EOFError, trio.BrokenResourceError):
        return True
    assert answer["id"] == "new"
    assert "result" in answer or answer["error"]["code"] == CANCELLED_BY_DRAIN
    return "error" in answer


@OnEach
async def test_nobody_new_is_served_while_it_ends(host: str, tmp_path: Path) -> None:
    async with running(host, tmp_path / "journal") as program:
        names = await program.begin("nap", seconds=3.0)
        program.process.send_signal(signal.SIGTERM)
        for world, peer in program.peers.items():
            with trio.fail_after(PATIENCE):
                while not await turned_away(peer):  # it takes a moment until the signal has arrived
                    pass
            assert not [name for name in names[world] if program.journal.of(name, "ended")], "that was too late to tell"
        assert await program.exited() == 0
        quiet(program)


@pytest.mark.parametrize(("host", "drains"), [(HOSTS[0], False), (HOSTS[1], False), (HOSTS[0], True)])
async def test_its_input_closed_it_is_gone_in_a_second(host: str, drains: bool, tmp_path: Path) -> None:
    """Whatever time a signal before has given to the calls under way."""
    async with running(host, tmp_path / "journal", grace=600) as program:
        [names] = (await program.begin("nap", seconds=600)).values()
        if drains:
            before = await until_asleep(program.process.pid)
            program.process.send_signal(signal.SIGTERM)
            await until_asleep(program.process.pid, before)
        clock = program.stopwatch()
        await program.process.stdin.aclose()
        await program.exited(clock)
        took = clock.took()
        await program.journal.until("ended", *names)
        assert program.process.returncode == 0
        quiet(program)
    figure(7, "input closed with calls under way, gone", took, 1.0, "s", f"{host}, after a signal" if drains else host)
    assert took <= 4 * 1.0


PARENT = """
import subprocess, sys
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
server.stdin.write(sys.stdin.buffer.readline())
server.stdin.flush()
print(server.pid, flush=True)
server.wait()
"""


def alive(pid: int) -> bool:
    """Whether a process is there that nobody waits for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("world", worlds(transport="stdio", modern=True), ids=str)
async def test_its_parent_killed_it_is_gone_in_a_second(world: World, tmp_path: Path) -> None:
    """By nothing but the end of its pipes, with a call under way."""
    journal = Journal(tmp_path / "journal")
    options = json.dumps({"serve": "stdio", "journal": str(journal.path)})
    command = [sys.executable, "-c", PARENT, sys.executable, str(PROGRAM), options]
    call = reported_call(1, "nap", modern=True, name="orphan", seconds=600)
    with trio.fail_after(PATIENCE):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        parent = await trio.lowlevel.open_process(command, env=ENVIRONMENT, **pipes)
        assert parent.stdin is not None
        assert parent.stdout is not None
        async with parent.stdin, parent.stdout:
            await parent.stdin.send_all(call + b"\n")
            pid = int(await parent.stdout.receive_some())
            await journal.until("begun", "orphan")
            clock = Stopwatch((pid,))
            parent.kill()
            await parent.wait()
            try:
                while alive(pid):  # it is nobody's child any more
                    clock.look()
                    await trio.sleep(0.002)
            finally:
                if alive(pid):
                    os.kill(pid, signal.SIGKILL)
            took = clock.took()
        await journal.until("ended", "orphan")
    figure(7, "parent killed with a call under way, gone", took, 1.0, "s", str(world))
    assert took <= 4 * 1.0


@pytest.mark.parametrize("world", worlds(transport="stdio"), ids=str)
async def test_nobody_there_any_more_it_is_gone_in_a_second_although_it_does_not_read(
    homes: Homes, world: World
) -> None:
    """The end of its input is behind what it has no time to read; that nobody takes its output tells it."""
    async with homes(world) as home, home.peer() as peer:
        assert home.target is not None
        process, name = home.target.process, f"in vain {world}"
        assert process.stdin is not None
        assert process.stdout is not None
        await peer.say(peer.call("nap", "nap", name=name, seconds=600))
        await home.journal.until("begun", name)
        async with trio.open_nursery() as nursery:
            large = peer.call("large", "watch", gate="never", filling="." * 100_000)
            hanging = [peer.call(n, "hang") for n in range(Limits().max_running)]
            more = (large.replace(b'"large"', b"%d" % n) for n in range(10_000, 11_000))
            nursery.start_soon(peer.pour, [*hanging, *more])
            before = 0
            while not before or peer.unread != before:  # nobody tells
                before = peer.unread
                await trio.sleep(0.4)
            nursery.cancel_scope.cancel()
        clock = home.stopwatch()
        await process.stdin.aclose()
        await process.stdout.aclose()
        with trio.move_on_after(PATIENCE):
            while process.poll() is None:
                clock.look()
                await trio.sleep(0.002)
        took = clock.took()
        if process.returncode is None:
            process.kill()
        await home.journal.until("ended", name)
    figure(7, "nobody there, and more said than is read, gone", took, 1.0, "s", str(world))
    assert process.returncode == 0
    assert took <= 4 * 1.0


async def test_a_server_whose_client_is_killed_is_gone_within_a_second() -> None:
    """The client leaves by nothing but the end of its pipes, with a call under way and its output unread."""
    async with child_server() as server:
        await server.meet()
        assert server.process.stdin is not None
        assert server.process.stdout is not None
        await server.say(call(1, "hang"), call(2, "big", size=MIB))
        await trio.lowlevel.wait_readable(server.process.stdout.fileno())
        clock = Stopwatch((server.process.pid,))
        await server.process.stdin.aclose()
        await server.process.stdout.aclose()
        while server.process.poll() is None:
            clock.look()
            await trio.sleep(0.002)
        took = clock.took()
        assert server.process.returncode == 0
    figure(7, "client killed with a call under way and its output unread, gone", took, 1.0, "s", "stdio 2025")
    assert took <= 4 * 1.0
    assert b"Traceback" not in server.errors


@OnEach
@BySignal
async def test_a_second_signal_ends_it_at_once(host: str, number: signal.Signals, tmp_path: Path) -> None:
    """With calls under way on every transport."""
    async with running(host, tmp_path / "journal", grace=600) as program:
        await program.begin("nap", seconds=30)
        await ended_by_a_second(program, number, f"with calls under way, {number.name}", host)


@OnEach
async def test_a_second_signal_ends_a_frozen_loop_at_once(host: str, tmp_path: Path) -> None:
    async with running(host, tmp_path / "journal", grace=600) as program:
        peer = next(iter(program.peers.values()))
        await peer.say(peer.call("x", "freeze", name="second", seconds=30))
        await program.journal.until("begun", "second")
        await ended_by_a_second(program, signal.SIGTERM, "with a frozen loop", host)


async def ended_by_a_second(program: Program, number: signal.Signals, how: str, host: str) -> None:
    before = await until_asleep(program.process.pid)
    program.process.send_signal(number)
    await until_asleep(program.process.pid, before)
    assert program.process.poll() is None, "the first one lets it go on"
    clock = program.stopwatch()
    program.process.send_signal(number)
    assert await program.exited(clock) == 128 + number
    took = clock.took()
    assert program.errors == ""
    figure(7, f"gone after a second signal, {how}", took, 0.5, "s", host)
    assert took <= 4 * 0.5


async def until_asleep(pid: int, before: int = -1) -> int:
    """Wait until the program has taken its signals and sleeps, again since `before`; return how often it fell asleep.

    Two signals of a kind would be one before Python's own handler has run, and that runs before the next sleep.
    """
    while True:
        status = dict(
            line.split(":\t", 1) for line in (await trio.Path(f"/proc/{pid}/status").read_text()).splitlines()
        )
        times = int(status["voluntary_ctxt_switches"])
        waiting = any(int(status[name], 16) for name in ("SigPnd", "ShdPnd"))
        if not waiting and times > before and status["State"].startswith("S"):
            return times
        await trio.sleep(0.002)


# In one process, in virtual time


@pytest.mark.parametrize("world", LOCAL, ids=str)
async def test_in_one_process_calls_under_way_are_answered_too(
    homes: Homes, world: World, autojump_clock: trio.testing.MockClock
) -> None:
    async with homes(world) as home, home.peer() as peer, trio.open_nursery() as nursery:
        assert home.running is not None
        names = [f"drained {n} in {world}" for n in range(MANY)]
        await peer.say(*(peer.call(f"{n}", "nap", name=name, seconds=1.0) for n, name in enumerate(names)))
        await trio.testing.wait_all_tasks_blocked()
        assert all(home.journal.of(name, "begun") for name in names)
        nursery.start_soon(home.running.drain, 5.0)
        began = trio.current_time()
        answers = [await peer.hear() for _ in range(MANY)]
        assert trio.current_time() - began == pytest.approx(1.0)
        good = [answer for answer in answers if text_of(answer) == "slept"]
        figure(7, f"of {MANY} replies cut by a drain", MANY - len(good), 0, "replies", str(world))
        assert len(good) == MANY
        await peer.say(peer.call("new", "echo"))
        assert (await peer.hear())["error"]["code"] == CANCELLED_BY_DRAIN


@pytest.mark.parametrize("world", LOCAL, ids=str)
async def test_in_one_process_the_grace_is_exact(
    homes: Homes, world: World, autojump_clock: trio.testing.MockClock
) -> None:
    async with homes(world) as home, home.peer() as peer, trio.open_nursery() as nursery:
        assert home.running is not None
        name = f"exact in {world}"
        await peer.say(peer.call("x", "nap", name=name, seconds=600))
        await trio.testing.wait_all_tasks_blocked()
        began = trio.current_time()
        nursery.start_soon(home.running.drain, 5.0)
        answer = await peer.hear()
        assert trio.current_time() - began == pytest.approx(5.0)
        assert answer["error"]["code"] == CANCELLED_BY_DRAIN
        [line] = home.journal.of(name, "ended")
        assert line["reason"] == "DRAIN"
