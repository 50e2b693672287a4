"""What it costs to tell thousands of a change, and how long others wait meanwhile: `python told.py [--quick]`.

So many sessions of Streamable HTTP (2025-11-25), each with its stream, subscribe to one resource. In a round it changes
twice. The first time the server's CPU is counted until each of them has its notice. The second time somebody else calls
`echo`, one call after the other, until a notice has arrived at each; of these calls the longest counts. Who reads then
would take the core of whoever calls, so the notices are read, and checked, when that is over.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from http.client import HTTPConnection
from typing import Any

import attrs
import trio
from environments import Peer
from http_sessions import STREAMABLE, Connection, Session, StreamableSession, each
from processes import LOAD_CORE, SERVER_CORE, kept_on, listening, on_core
from rows import Rows, command_line
from sessions import open_files
from slow_reader import session

from trimcp.bench.cost import cpu_seconds

__all__ = ["CELLS", "Told", "measure"]

CELLS = {"told-1000": 1_000, "told-3000": 3_000}
"""The cells, with how many are told."""
RESOURCE = "bench://greeting"
UNDER_WAY = 32
WARM_CALLS = 500
PHASE_LIMIT = 240.0
TOLD_LIMIT = 30.0


def measure(
    peers: Sequence[Peer], *, rounds: int, quick: bool, cells: Collection[str] | None = None
) -> list[dict[str, Any]]:
    """Return what a change costs each peer for each subscriber, and how long a call of somebody else takes meanwhile.

    Args:
        peers: who takes part.
        rounds: in each, every peer has its turn.
        quick: makes no difference.
        cells: only these.
    """
    rows = Rows()
    able = [peer for peer in peers if peer.can("http", STREAMABLE, "json")]
    for name, subscribers in CELLS.items():
        if cells is None or name in cells:
            with kept_on(LOAD_CORE), open_files(subscribers + 500):
                trio.run(_measure, rows, name, able, rounds, subscribers)
    return rows.data


async def _measure(rows: Rows, cell: str, peers: Sequence[Peer], rounds: int, subscribers: int) -> None:
    async with AsyncExitStack() as stack:
        told = {peer.name: await stack.enter_async_context(subscribed(peer, subscribers)) for peer in peers}
        for number in range(rounds + 1):
            for name, one in told.items():
                spent, waited = await one.change(), await one.change_beside_calls()
                if number:  # the first of all is slow everywhere
                    rows.add(cell, "cpu", name, "µs", spent / subscribers * 1e6)
                    rows.add(cell, "meanwhile", name, "ms", waited * 1e3)


@asynccontextmanager
async def subscribed(peer: Peer, subscribers: int) -> AsyncIterator[Told]:
    """Start a server, have so many sessions subscribe, and end it with the block."""
    command = [*on_core(SERVER_CORE), *peer.command("http", reply="json")]
    environment = {**os.environ, **peer.environment, "BENCH_CHANGES": "1"}
    async with listening(command, environment) as (url, process):
        streams = [StreamableSession(Connection(url)) for _ in range(subscribers)]
        with trio.fail_after(PHASE_LIMIT):
            await each(streams, _subscribe, UNDER_WAY)
        # Two more sessions: whose call waits for all to be told holds up no other of its own.
        with ExitStack() as stack:
            changer, caller = (Caller(*stack.enter_context(session(url))) for _ in range(2))
            for _ in range(WARM_CALLS):
                caller.call("echo", text="warm")
            try:
                yield Told(process, streams, changer, caller)
            finally:
                for one in streams:
                    await one.stream.close()


async def _subscribe(one: Session, connection: Connection) -> None:
    await one.open(connection)
    await one.ask(connection, "resources/subscribe", {"uri": RESOURCE})


@attrs.define(eq=False)
class Caller:
    """A session whose calls wait for their answers."""

    _connection: HTTPConnection
    _headers: dict[str, str]
    _id: int = 1

    def begin(self, tool: str, **arguments: str) -> None:
        """Send a call."""
        self._id += 1
        params = {"name": tool, "arguments": arguments}
        body = json.dumps({"jsonrpc": "2.0", "id": self._id, "method": "tools/call", "params": params})
        self._connection.request("POST", "/mcp", body, self._headers)

    def end(self) -> str:
        """Return the text of the answer to the call that was sent."""
        response = self._connection.getresponse()
        answer = json.loads(response.read())
        if response.status != 200 or answer["id"] != self._id:
            raise AssertionError(f"{response.status}: {answer}")
        found: str = answer["result"]["content"][0]["text"]
        return found

    def call(self, tool: str, **arguments: str) -> str:
        """Call a tool, and return the text of its answer."""
        self.begin(tool, **arguments)
        return self.end()


@attrs.define(eq=False)
class Told:
    """A server that tells subscribers, who changes its resource, and who calls meanwhile."""

    process: int
    subscribers: Sequence[StreamableSession]
    changer: Caller
    caller: Caller

    async def change(self) -> float:
        """Change the resource, and return the CPU seconds until all have been told."""
        spent = cpu_seconds(self.process)
        self.changer.begin("change")
        await self._read_notices()
        self._check_changed()
        return cpu_seconds(self.process) - spent

    async def change_beside_calls(self) -> float:
        """Change the resource, and return the seconds of the longest call until all have been told."""
        longest, left = 0.0, len(self.subscribers)
        deadline = time.monotonic() + TOLD_LIMIT
        with select.epoll() as arrived:
            for one in self.subscribers:
                arrived.register(one.stream.fileno(), select.EPOLLIN | select.EPOLLONESHOT)
            self.changer.begin("change")
            while left:
                if time.monotonic() > deadline:
                    raise AssertionError(f"{left} were not told")
                began = time.perf_counter()
                text = f"hello {left}"
                if (said := self.caller.call("echo", text=text)) != text:
                    raise AssertionError(f"wanted {text!r}, got {said!r}")
                longest = max(longest, time.perf_counter() - began)
                left -= len(arrived.poll(0, left))
        self._check_changed()
        await self._read_notices()
        return longest

    def _check_changed(self) -> None:
        if (said := self.changer.end()) != "changed":
            raise AssertionError(f"the resource was {said}")

    async def _read_notices(self) -> None:
        with trio.move_on_after(TOLD_LIMIT) as limit:
            for one in self.subscribers:
                notice = json.loads(await one.stream.event())
                said = notice.get("method"), notice.get("params", {}).get("uri")
                if said != ("notifications/resources/updated", RESOURCE):
                    raise AssertionError(f"a subscriber was told {notice}")
        if limit.cancelled_caught:
            raise AssertionError("not all were told")


if __name__ == "__main__":
    command_line("What it costs to tell thousands of a change.", measure, rounds=5)
