"""A session with a server of faults, on either engine, which knows what it held when all was well."""

from __future__ import annotations

import math
import os
import re
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import attrs
import httpx2
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import trimcp
from tests.hostile.faults import ANSWERED, HANGS, INVALID, LOST, SECRET, FaultServer, faulty
from tests.peers.tls import client_context
from trimcp.channel import HttpClientStatistics
from trimcp.wire.revisions import LATEST, V2025_11_25, Revision

__all__ = ["MAX_MESSAGE", "PATIENCE", "InBoth", "OnBoth", "World", "connected", "load", "sensible", "sockets", "world"]

ENGINES: Final = ("own", "httpx2")
MAX_MESSAGE: Final = 1024 * 1024
PATIENCE: Final = 30.0
"""Seconds after which something hangs."""

_MOMENT = 0.25  # seconds that a call has beside many others
_AT_ONCE, _BESIDE = 16, 5  # calls that faults befall, and that none does

OnBoth = pytest.mark.parametrize("engine", ENGINES)
InBoth = pytest.mark.parametrize("revision", [V2025_11_25, LATEST], ids=str)


@attrs.define(eq=False)
class World:
    """A session and the server that it is connected to, and what both held when all was well.

    Attributes:
        open: connections, and `sockets` and `tasks` of this process, at that time.
        most: connections that there may be.
        busy: calls that are under way all the time.
    """

    engine: str
    session: trimcp.ClientSession
    server: FaultServer
    sockets: int = 0
    tasks: int = 0
    open: int = 0
    most: int = 0
    busy: int = 0
    _count: int = 0

    async def fine(self) -> None:
        """Make a call that is answered, once, with its own answer."""
        text = self.next_text()
        with trio.fail_after(PATIENCE):
            result = await self.session.call_tool("echo", {"text": text})
        assert result.content == [trimcp.wire.TextContent(text)]
        assert self.server.heard.pop(text) == 1

    async def harm(
        self, fault: str, time: float = math.inf, text: str | None = None, **arguments: Any
    ) -> tuple[str, trimcp.McpError | None]:
        """Make a call that the fault befalls, and return what came of it."""
        text = self.next_text() if text is None else text
        try:
            # `load` has those that wait do so for as long as it takes.
            with trio.fail_after(math.inf if fault == "waits" else PATIENCE), trio.move_on_after(time):
                result = await self.session.call_tool("harm", {"text": text, "fault": fault, **arguments})
                assert result.content == [trimcp.wire.TextContent(text)] or fault == "at_random"
                return ANSWERED, None
        except trimcp.ConnectionLost as error:
            return LOST, error
        except (trimcp.InvalidReply, trimcp.RemoteError) as error:
            return INVALID, error
        finally:
            assert self.server.heard.pop(text, 0) <= 1, "no tool is called twice"
        return HANGS, None

    async def recover(self) -> None:
        """Make a call of which anything may come, where the bytes of an earlier reply may be taken for its own."""
        with trio.fail_after(PATIENCE), suppress(trimcp.McpError):
            await self.session.call_tool("echo", {"text": "anything"})

    def next_text(self) -> str:
        """An argument by which a call is known."""
        self._count += 1
        return f"call {self._count}"

    async def settle(self) -> None:
        """Note what is held now."""
        await self.fine()
        await wait_all_tasks_blocked(0.01)
        self.sockets, self.tasks, self.open = sockets(), _tasks(), self.server.open
        # In this era a cancellation is a request of its own, which another connection may have been opened for.
        self.most = max(self.most, self.open + (self.server.revision is not LATEST))

    async def clean(self) -> None:
        """Make a call that is fine, and assert that then no more is held than when all was well."""
        await self.fine()
        await wait_all_tasks_blocked(0.01)
        with trio.fail_after(PATIENCE):
            await self.server.wait_for(self._has_closed)
        await wait_all_tasks_blocked(0.01)
        more = self.server.open - self.open
        assert sockets() - self.sockets <= 2 * more, "both ends of each are in this process"
        assert _tasks() - self.tasks <= max(0, 2 * more), "and perhaps a task for each"
        assert self.session.session.lost is None
        pool = self._pool
        assert (pool.in_use, pool.waiting) == (self.busy, 0)
        if self.engine == "own":
            assert pool.connections == self.server.open
            assert pool.idle == self.server.open - self.busy

    def _has_closed(self) -> bool:
        """Whether no exchange lingers, and the server has seen the end of all connections that the client closed."""
        most = self.most if self._pool.connections is None else min(self.most, self._pool.connections)
        return self._pool.in_use == self.busy and self.server.open <= most

    @property
    def _pool(self) -> HttpClientStatistics:
        pool = self.session.statistics().http
        assert pool is not None
        return pool


async def load(here: World, count: int, *, seed: int = 15) -> None:
    """Make so many calls that faults befall, sixteen at a time, beside some that wait; see what is left."""
    left = iter(range(count))
    outcomes: Counter[str] = Counter()

    async def suffer() -> None:
        for n in left:
            # httpx2 takes what follows a reply for the next one, see `AFTER_THE_REPLY`.
            outcome, error = await here.harm("at_random", _MOMENT, seed=f"{seed} {n}", last=here.engine == "httpx2")
            outcomes[outcome] += 1
            sensible(error)
            if n % 10 == 0:
                # A server that closes after its answer may do so just as its connection is used again.
                with suppress(trimcp.ConnectionLost):
                    await here.fine()

    async def hold() -> None:
        assert await here.harm("waits") == (ANSWERED, None)

    here.server.release = trio.Event()
    async with trio.open_nursery() as nursery:
        before = here.server.faults["waits"]
        for _ in range(_BESIDE):
            nursery.start_soon(hold)
        with trio.fail_after(PATIENCE):
            await here.server.wait_for(lambda: here.server.faults["waits"] == before + _BESIDE)
        async with trio.open_nursery() as suffering:
            for _ in range(_AT_ONCE):
                suffering.start_soon(suffer)
        here.server.release.set()
    print(f"{count:,} faults: {dict(outcomes)}")
    assert min(outcomes[each] for each in (ANSWERED, LOST, INVALID)) > 0
    here.most = _AT_ONCE * 2 + _BESIDE  # with those of cancellations
    await here.clean()


def sockets() -> int:
    """Sockets of this process."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except FileNotFoundError:
            pass  # the one that the list was read from
    return count


def _tasks() -> int:
    return trio.lowlevel.current_statistics().tasks_living


@asynccontextmanager
async def world(
    engine: str,
    revision: Revision,
    *,
    tls: ssl.SSLContext | None = None,
    uds: Path | None = None,
    **options: Any,
) -> AsyncIterator[World]:
    """A session with a server of faults, on one of the engines."""
    async with faulty(revision, tls=tls, uds=uds) as server, connected(server, engine, uds=uds, **options) as session:
        here = World(engine, session, server)
        await here.settle()
        yield here


@asynccontextmanager
async def connected(
    server: FaultServer, engine: str, *, uds: Path | None = None, trusting: bool = True, **options: Any
) -> AsyncIterator[trimcp.ClientSession]:
    """A session with this server, on one of the engines."""
    tls = server.url.startswith("https")
    verify: Any = (client_context() if trusting else True) if tls else False
    transport = httpx2.AsyncHTTPTransport(verify=verify, uds=None if uds is None else str(uds))
    async with httpx2.AsyncClient(transport=transport) as client:
        headers = {"Authorization": f"Bearer {SECRET}"}
        own = client if engine == "httpx2" else None
        target = trimcp.http(server.url, headers=headers, client=own, **options)
        limited = trimcp.Client("c", limits=trimcp.Limits(max_message=MAX_MESSAGE))
        async with limited.connect(target, revision=server.revision) as session:
            yield session


def sensible(error: BaseException | None) -> None:
    """Assert that an error's text can be shown: one line without paths, secrets or bytes that a terminal obeys."""
    if error is not None:
        text = str(error)
        assert text.isprintable(), text
        assert 10 < len(text) < 700, text
        assert not re.search(r'Traceback|File "|site-packages|/usr/|\.py|object at 0x', text), text
        assert SECRET not in text
