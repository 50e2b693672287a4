"""Clients that keep a site busy, and write down what they see."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import trio

import trimcp
from tests.replicas.histories import CounterHistory, History, WatchHistory
from tests.store.history import CallHistory, CountingClient
from trimcp import agent_tools
from trimcp.agent_tools.messages import messages

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COUNT = 20
PAUSE = 0.02
LONG = 30.0
"""Seconds within which everything has an end, whatever happens."""


@attrs.define(eq=False)
class Load:
    """Clients of one site, and what they saw."""

    url: str
    histories: list[History] = attrs.field(factory=list)
    stopping: bool = False
    said: list[str] = attrs.field(factory=list)  # errors of clients, for whoever reads a failure
    at_work: set[str] = attrs.field(factory=set)  # the clients that were answered
    _counted: dict[str, CounterHistory] = attrs.field(factory=dict)

    def told(self, who: str, error: BaseException) -> None:
        if len(self.said) < 200:
            self.said.append(f"{who}: {type(error).__name__}: {error}")

    # Our own clients

    async def raw(self, revision: str) -> None:
        """A client with a connection for each request, which comes back for the rest of streams."""
        client = CountingClient(self.url, revision, patience=LONG)
        begun = False
        while not self.stopping:
            if not begun:
                begun = await self._begin(client)
                continue
            call = await client.count(COUNT, PAUSE)
            self.histories.append(call)
            self.at_work.add(f"raw {revision}")
            begun = call.ends != ["session lost"]
            if call.ends == ["refused"]:
                await trio.sleep(0.1)

    async def _begin(self, client: CountingClient) -> bool:
        client.session = ""
        try:
            with trio.fail_after(LONG):
                await client.begin()
        except Exception as error:
            self.told(f"raw {client.revision} begins", error)
            await trio.sleep(0.1)
            return False
        return True

    async def ours(self, revision: str) -> None:
        """Our client: calls with progress, and questions."""
        number = 0

        async def answer(request: trimcp.ElicitParams) -> trimcp.ElicitResult:
            return trimcp.ElicitResult(action="accept", content={"number": number})

        program = trimcp.Client("ours", "1.0", asks_per_minute=1_000_000)
        program.elicitation(answer)

        async def talk(session: trimcp.ClientSession) -> None:
            nonlocal number
            await self.once(f"ours {revision}", COUNT, lambda call: self._count(session, call))
            number += 1
            await self.once(f"ours {revision} asked", 0, lambda call: self._choose(session, number))
            self.at_work.add(f"ours {revision}")

        while not self.stopping:
            await self.connected(program, revision, talk)

    async def watching(self, revision: str) -> None:
        """Our client, which watches what it changes itself."""
        watch = WatchHistory(f"watch {revision}")
        self.histories.append(watch)
        uri = f"note://{revision}"

        async def talk(session: trimcp.ClientSession) -> None:
            async with session.listen(resources=[uri]) as changes:
                while not self.stopping:
                    await session.call_tool("change", {"name": revision})
                    with trio.move_on_after(LONG) as patience:
                        await changes.receive()
                    if patience.cancelled_caught:
                        watch.missed.append(watch.heard)
                        return
                    watch.heard += 1
                    self.at_work.add(watch.name)
                    await trio.sleep(PAUSE)

        program = trimcp.Client("watching", "1.0")
        while not self.stopping:
            await self.connected(program, revision, talk, once=True)
            watch.ended += 1

    async def connected(
        self,
        program: trimcp.Client,
        revision: str,
        talk: Callable[[trimcp.ClientSession], Awaitable[None]],
        *,
        once: bool = False,
    ) -> None:
        try:
            async with program.connect(trimcp.http(self.url), revision=revision) as session:
                while not self.stopping:
                    await talk(session)
                    if once:
                        return
        except (trimcp.McpError, trio.EndOfChannel) as error:
            self.told(f"a client of {revision}", error)
            await trio.sleep(0.1)

    async def once(self, who: str, to: int, run: Callable[[CallHistory], Awaitable[None]]) -> None:
        """Make one call, and write down how it ended."""
        call = CallHistory(to)
        began = trio.current_time()
        with trio.move_on_after(LONG) as scope:
            try:
                await run(call)
            except trimcp.McpError as error:
                self.told(who, error)
                call.ends.append("error")
            else:
                call.ends.append("result")
        if scope.cancelled_caught:
            call.ends.append("silent")
        call.seconds = trio.current_time() - began
        self.histories.append(call)
        if call.ends != ["result"]:
            await trio.sleep(0.1)

    @staticmethod
    async def _count(session: trimcp.ClientSession, call: CallHistory) -> None:
        async with session.calling("count", {"to": call.to, "pause": PAUSE}) as calling:
            async for step in calling.progress:
                call.numbers.append(int(step.progress))
            assert (await calling.result()).text == f"counted to {call.to}"

    @staticmethod
    async def _choose(session: trimcp.ClientSession, number: int) -> None:
        assert (await session.call_tool("choose", {"name": "x"})).text == f"x: {number}"

    async def agent(self, name: str) -> None:
        """An agent that raises a counter in a context, each time on top of what it is."""
        counter = CounterHistory(name)
        self.histories.append(counter)
        self._counted[name] = counter
        while not self.stopping:
            try:
                async with agent_tools.connect(self.url.removesuffix("/mcp")) as agent:
                    context = agent.existing_context(name)
                    while not self.stopping:
                        with trio.fail_after(LONG):
                            await self._raise(context, counter)
                        self.at_work.add(name)
            except (trimcp.McpError, trio.TooSlowError) as error:
                self.told(f"agent {name}", error)
                await trio.sleep(0.1)

    @staticmethod
    async def _raise(context: Any, counter: CounterHistory) -> None:
        seen = await context.read()
        try:
            await context.update({"n": seen.state.get("n", 0) + 1}, version=seen.version)
        except agent_tools.VersionConflict:
            return
        except BaseException:
            counter.unknown += 1
            raise
        counter.acknowledged += 1

    # Others' clients

    async def official(self, mode: str) -> None:
        """The official Python client, in a process of its own."""
        command = [sys.executable, str(HERE / "official_load.py"), self.url, mode, str(COUNT), str(PAUSE), str(LONG)]
        process = await trio.lowlevel.open_process(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
        )
        assert process.stdin is not None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._hear, f"official {mode}", process)
                while not self.stopping:  # noqa: ASYNC110
                    await trio.sleep(0.05)
                await process.stdin.aclose()
        finally:
            with trio.CancelScope(shield=True):
                with trio.move_on_after(LONG):
                    await process.wait()
                process.kill()
                await process.wait()

    async def _hear(self, who: str, process: trio.Process) -> None:
        rest = b""
        assert process.stdout is not None
        async for data in process.stdout:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                said = json.loads(line)
                if "why" in said:
                    self.told(who, RuntimeError(said["why"]))
                else:
                    self.histories.append(CallHistory(**said))
                    self.at_work.add(who)
        assert process.stderr is not None
        errors = b"".join([data async for data in process.stderr])
        if errors:
            self.said.append(f"{who}: {errors[-2000:].decode(errors='replace')}")


OLDER = ("2025-03-26", "2025-06-18", "2025-11-25")
NEWEST = "2026-07-28"
AGENTS = ("counter-1", "counter-2")


@asynccontextmanager
async def busy(url: str, *, agents: bool = True, official: bool = True) -> AsyncIterator[Load]:
    """Keep a site busy while the block runs, in which all clients are at work.

    Then all come to an end, and there are their histories.
    """
    load, clients = Load(url), {f"raw {revision}" for revision in OLDER}
    if agents:
        async with agent_tools.connect(url.removesuffix("/mcp")) as agent:
            for name in AGENTS:
                await agent.ask(messages.ContextCreate(context_id=name), messages.ContextState)
    async with trio.open_nursery() as nursery:
        for revision in OLDER:
            nursery.start_soon(load.raw, revision)
        for revision in ("2025-11-25", NEWEST):
            nursery.start_soon(load.ours, revision)
            nursery.start_soon(load.watching, revision)
            clients |= {f"ours {revision}", f"watch {revision}"}
        if agents:
            for name in AGENTS:
                nursery.start_soon(load.agent, name)
                clients.add(name)
        if official:
            for mode in ("legacy", "auto"):
                nursery.start_soon(load.official, mode)
                clients.add(f"official {mode}")
        with trio.fail_after(LONG):
            while not clients <= load.at_work:  # noqa: ASYNC110
                await trio.sleep(0.02)
        yield load
        load.stopping = True
        nursery.cancel_scope.deadline = trio.current_time() + 2 * LONG
    if agents:
        for name, counter in load._counted.items():
            async with agent_tools.connect(url.removesuffix("/mcp")) as agent:
                counter.found = (await agent.existing_context(name).read()).state.get("n", 0)
