"""Load on contexts over WebSockets: agents that update theirs at a rate and watch them, checked message by message.

python -m tests.soak.agent_load --contexts 1000 --agents 50 --rate 10 --seconds 60 [--host hypercorn] [--file FILE]

The server is a process of its own. It fails if an update is lost, comes twice or out of order, if a watcher does not
see the last state, if an idle context takes more than 8 KiB, or if anything is left at the end. `--profile FILE` keeps
a profile of the server.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import attrs
import orjson
import trio

import trimcp
from tests.peers.http1 import HttpWire
from tests.peers.serving import connect
from tests.peers.websockets import FIN, TEXT, message, upgrade
from trimcp.agent_tools import AgentTools, MemoryContexts, RegistrationRules, SqliteContexts

MOST_PER_CONTEXT: Final = 8 * 1024
_PATIENCE: Final = 30.0
_HOST: Final = "127.0.0.1"


@attrs.frozen
class AgentLoad:
    """What to do.

    Attributes:
        contexts, agents: of each; each agent has a connection, and the contexts are shared out evenly.
        rate: updates of each context per second.
        seconds: for how long.
        writes: in how many writes, evenly apart, an agent sends one update of each of its contexts.
        host: what the server listens with, "own" or "hypercorn".
        file: where the server keeps contexts; None for its memory.
        profile: the file for a profile of the server, or None.
    """

    contexts: int = 1_000
    agents: int = 50
    rate: float = 10.0
    seconds: float = 60.0
    writes: int = 4
    host: str = "own"
    file: str | None = None
    profile: str | None = None

    @property
    def rounds(self) -> int:
        """Updates of each context."""
        return round(self.rate * self.seconds)


@attrs.define
class AgentFigures:
    """What was measured: times in seconds, memory in bytes."""

    updates: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    per_context: float = 0.0
    per_watch: float = 0.0
    slowest: float = 0.0
    states: int = 0
    left: float = 0.0

    @property
    def per_update(self) -> float:
        """Microseconds of CPU of the server per update, with its answer and what its watcher is told."""
        return 1e6 * self.cpu / self.updates

    def __str__(self) -> str:
        return (
            f"{self.updates:,} updates, {self.updates / self.seconds:,.0f} a second, {self.per_update:.1f} us of CPU "
            f"each; slowest answer {1000 * self.slowest:.0f} ms; {self.states:,} whole states; "
            f"{self.per_context:,.0f} bytes per idle context, {self.per_watch:,.0f} more when watched; "
            f"{self.left / 1024:,.0f} KiB left"
        )


def update_of(context: str, n: int) -> bytes:
    """The update number `n` of a context, as the text of a message."""
    updates = {
        "n": n,
        "last_query_time": f"2025-12-12T10:00:{n % 60:02}Z",
        "user_verified": n % 2 == 0,
        "intermediate_results": {f"step-{n % 8}": {"balance": n / 4, "note": f"update {n}"}},
    }
    return orjson.dumps(
        {"type": "context_update", "context_id": context, "updates": updates, "request_id": f"{context}/{n}"}
    )


@attrs.define(eq=False)
class _Followed:
    """What was sent, answered and watched of one context, whose update number n sets `n` to n."""

    id: str
    sent: int = 0
    answered: int = 0
    watched: int = 0
    since: float = 0.0
    over: bool = False

    def answer(self, value: dict[str, Any]) -> None:
        n = self.answered + 1
        assert value["request_id"] == f"{self.id}/{n}", f"{value} after the answer number {self.answered}"
        assert (value["version"], value["updates"]["n"]) == (n, n), value
        self.answered = n

    def watch(self, value: dict[str, Any]) -> bool:
        """Note an event; return whether it is a whole state."""
        version: int = value["version"]
        whole: bool = value["type"] == "context_state"
        content = value["state" if whole else "updates"]
        assert content.get("n", 0) == version, value
        if whole:
            assert version >= self.watched, value
        else:
            assert version == self.watched + 1, f"{value} after {self.watched}"
        self.watched = version
        return whole


@attrs.define(eq=False)
class _LoadAgent:
    """One connection and its contexts."""

    stream: trio.abc.Stream
    figures: AgentFigures
    contexts: dict[str, _Followed]
    buffer: bytearray = attrs.field(factory=bytearray)
    other: list[dict[str, Any]] = attrs.field(factory=list)
    changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    async def say(self, *texts: bytes) -> None:
        await self.stream.send_all(b"".join(map(message, texts)))

    async def ask(self, **value: Any) -> dict[str, Any]:
        await self.say(orjson.dumps(value))
        await self.until(lambda: self.other)
        return self.other.pop()

    async def until(self, condition: Any) -> None:
        """Wait for a state of what has arrived."""
        with trio.fail_after(_PATIENCE):
            while not condition():
                await self.changed.park()

    async def read(self) -> None:
        """Read and check until the connection is closed."""
        while True:
            try:
                chunk = await self.stream.receive_some(65536)
            except (trio.ClosedResourceError, trio.BrokenResourceError):
                return
            if not chunk:
                return
            self.buffer += chunk
            for payload in self._payloads():
                self._take(orjson.loads(payload))
            self.changed.unpark_all()

    def _payloads(self) -> Iterator[bytes]:
        buffer, at, have = self.buffer, 0, len(self.buffer)
        while have - at >= 2:
            first, size, head = buffer[at], buffer[at + 1], 2
            if size > 125:
                head = 4 if size == 126 else 10
                if have - at < head:
                    break
                size = int.from_bytes(buffer[at + 2 : at + head], "big")
            if have - at < head + size:
                break
            if first == FIN | TEXT:
                yield bytes(buffer[at + head : at + head + size])
            at += head + size
        del buffer[:at]

    def _take(self, value: dict[str, Any]) -> None:
        id = value.get("request_id")
        followed = self.contexts.get(value.get("context_id", ""))
        if followed is None or id is None:
            self.other.append(value)
        elif value["type"] == "context_destroyed":
            followed.over = followed.over or id == "end"
        elif id == "watch":
            self.figures.states += followed.watch(value)
        else:
            followed.answer(value)
            if followed.since and followed.answered == followed.sent:
                self.figures.slowest = max(self.figures.slowest, trio.current_time() - followed.since)

    async def update(self, load: AgentLoad, offset: float) -> None:
        """Send the updates at their rate."""
        followed = list(self.contexts.values())
        groups = [followed[number :: load.writes] for number in range(load.writes)]
        began = trio.current_time() + offset
        for n in range(load.rounds):
            for number, group in enumerate(groups):
                await trio.sleep_until(began + (n + number / load.writes) / load.rate)
                for each in group:
                    each.sent += 1
                    each.since = trio.current_time()
                await self.say(*(update_of(each.id, each.sent) for each in group))


async def put_load(load: AgentLoad) -> AgentFigures:
    """Put the load on a server, and return what was measured."""
    figures = AgentFigures()
    async with _serving(load) as port, trio.open_nursery() as nursery:
        agents = []
        for number in range(load.agents):
            wire = HttpWire(await connect(port))
            socket = await upgrade(wire, f"Authorization: Bearer token-{number}", path="/agent")
            ids = [f"ctx-{number}-{each}" for each in range(number, load.contexts, load.agents)]
            agent = _LoadAgent(socket.stream, figures, {id: _Followed(id) for id in ids})
            nursery.start_soon(agent.read)
            agents.append(agent)
        first = agents[0]
        await _warm(agents)
        base = await _figures(first)
        for agent in agents:
            for id in agent.contexts:
                await agent.say(update_of(id, 1))
                agent.contexts[id].sent = 1
            await agent.until(lambda agent=agent: all(each.answered for each in agent.contexts.values()))
        idle = await _figures(first)
        figures.per_context = (idle["memory"] - base["memory"]) / load.contexts
        for agent in agents:
            await agent.say(*(_of(id, "context_watch", "watch") for id in agent.contexts))
            await agent.until(lambda agent=agent: all(each.watched for each in agent.contexts.values()))
        watched = await _figures(first)
        figures.per_watch = (watched["memory"] - idle["memory"]) / load.contexts
        assert watched["watchers"] == load.contexts

        states, figures.states = figures.states, 0
        assert states == load.contexts
        began = time.perf_counter()
        async with trio.open_nursery() as sending:
            for number, agent in enumerate(agents):
                sending.start_soon(agent.update, load, number / load.agents / load.rate / load.writes)
        for agent in agents:
            await agent.until(lambda agent=agent: _all_there(agent, load.rounds + 1))
        figures.seconds = time.perf_counter() - began
        after = await _figures(first)
        figures.updates, figures.cpu = load.contexts * load.rounds, after["cpu"] - watched["cpu"]
        assert after["updates"] - watched["updates"] == figures.updates

        for agent in agents:
            await agent.say(*(_of(id, "context_destroy", "end") for id in agent.contexts))
            await agent.until(lambda agent=agent: all(each.over for each in agent.contexts.values()))
        left = await _figures(first)
        assert (left["contexts"], left["watchers"], left["bytes"]) == (0, 0, 0), left
        figures.left = left["memory"] - base["memory"]
        assert left["tasks"] == base["tasks"], (left, base)
        for agent in agents:
            await agent.stream.aclose()
        nursery.cancel_scope.cancel(reason="all is done")
    return figures


def _all_there(agent: _LoadAgent, rounds: int) -> bool:
    return all(each.answered == each.watched == rounds for each in agent.contexts.values())


def _of(id: str, kind: str, request_id: str) -> bytes:
    return orjson.dumps({"type": kind, "context_id": id, "request_id": request_id})


async def _warm(agents: list[_LoadAgent]) -> None:
    """Have the server do a little of everything."""
    for agent in agents:
        for n in range(3):
            about = {"context_id": f"warm-{n}", "request_id": "warm"}
            await agent.ask(type="context_update", updates={"n": 1}, **about)
            await agent.ask(type="context_watch", **about)
            await agent.ask(type="context_destroy", **about)
            await agent.until(lambda agent=agent: agent.other)
            agent.other.clear()


async def _figures(agent: _LoadAgent) -> dict[str, Any]:
    """What the server says of itself."""
    answer = await agent.ask(type="tool_request", tool_name="figures", request_id="figures")
    found: dict[str, Any] = answer["result"]
    return found


# The server


def resident() -> int:
    """Bytes of memory that this process has resident."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGESIZE")


@asynccontextmanager
async def _serving(load: AgentLoad) -> AsyncIterator[int]:
    """Run the server in a process of its own; yield its port."""
    command = [sys.executable, "-m", "tests.soak.agent_load", "--serve", json.dumps(attrs.asdict(load))]
    process = await trio.to_thread.run_sync(partial(subprocess.Popen, command, stdout=subprocess.PIPE, text=True))
    try:
        assert process.stdout is not None
        yield int(await trio.to_thread.run_sync(process.stdout.readline))
    finally:
        process.terminate()
        with trio.CancelScope(shield=True):
            code = await trio.to_thread.run_sync(process.wait)
        if process.stdout is not None:
            process.stdout.close()
    assert code == 0, f"the server ended with {code}"


def serve(load: AgentLoad) -> None:
    """Be the server."""
    server = trimcp.Server("load")
    store = MemoryContexts() if load.file is None else SqliteContexts(Path(load.file))
    tokens = {f"token-{number}": f"agent-{number}" for number in range(load.agents)}
    authenticate = trimcp.bearer_tokens(tokens)
    tools = AgentTools(server, store=store, authenticate=authenticate, registration=RegistrationRules(scope=None))

    @server.tool
    async def figures(ctx: trimcp.Context) -> dict[str, Any]:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        (run,) = tools._runs.values()
        found = run.contexts.statistics()
        return {
            "cpu": time.process_time(),
            "memory": resident(),
            "tasks": trio.lowlevel.current_statistics().tasks_living,
            "contexts": found.contexts + found.ending,
            "watchers": found.watchers,
            "bytes": found.bytes,
            "updates": found.updates,
        }

    async def run() -> None:
        software: Any = load.host
        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            async with trio.open_nursery() as nursery:
                start = partial(trimcp.serve_http, server, port=0, agent_tools=tools, software=software)
                (url,) = await nursery.start(start)
                print(urlsplit(url).port, flush=True)
                await anext(signals)
                nursery.cancel_scope.cancel(reason="it was told to stop")

    with _profiled(load.profile):
        trio.run(run)


@contextmanager
def _profiled(file: str | None) -> Iterator[None]:
    if file is None:
        yield
        return
    import cProfile

    profile = cProfile.Profile(time.process_time)
    profile.enable()
    try:
        yield
    finally:
        profile.disable()
        profile.dump_stats(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in attrs.fields(AgentLoad):
        kind = str if field.default is None else type(field.default)
        parser.add_argument(f"--{field.name}", type=kind, default=field.default)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = vars(parser.parse_args())
    told = options.pop("serve")
    if told is not None:
        serve(AgentLoad(**json.loads(told)))
        return
    figures = trio.run(put_load, AgentLoad(**options))
    print(figures)
    assert figures.per_context <= MOST_PER_CONTEXT


if __name__ == "__main__":
    main()
