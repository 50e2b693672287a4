"""A server that can be lost, refused and silenced, as something to connect to again and again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

import trimcp
from trimcp.channel import Incoming, MessageChannel
from trimcp.support.nurseries import open_service_nursery
from trimcp.transports.memory import memory_channels
from trimcp.transports.wrapped import WrappedChannel


@attrs.define(eq=False)
class Freezable(WrappedChannel):
    """A channel that takes everything, and from one moment on brings nothing, not even what was on its way."""

    frozen: bool = False

    async def receive(self) -> Sequence[Incoming]:
        batch = await self.channel.receive()
        if self.frozen:
            await trio.sleep_forever()
        return batch


@attrs.define(eq=False)
class Shaky:
    """Serves in this process; each connection is one of its own.

    Attributes:
        refusals, stalls: how many openings from now on fail, or never end.
        times: when it was connected to.
        instead: another target to connect to from now on.
        handled: what its tools were called with, in order; `ended` how they ended.
    """

    server: trimcp.Server[Any] = attrs.field(factory=lambda: trimcp.Server("shaky", "1", dynamic=True))
    refusals: float = 0
    stalls: float = 0
    instead: Any = None
    times: list[float] = attrs.field(factory=list)
    handled: list[Any] = attrs.field(factory=list)
    ended: list[trimcp.CancelReason | None] = attrs.field(factory=list)
    channel: Freezable = attrs.field(init=False)
    _ours: MessageChannel = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        async def work(seconds: float = 0, progress: bool = False, *, ctx: trimcp.Context[Any]) -> str:
            self.handled.append(seconds)
            try:
                if progress:
                    for step in range(int(seconds)):
                        await trio.sleep(1)
                        await ctx.report_progress(step + 1)
                else:
                    await trio.sleep(seconds)
            finally:
                self.ended.append(ctx.cancel_reason)
            return "done"

        add, hints = self.server.tool, trimcp.ToolAnnotations
        add(work)
        add(name="look", annotations=hints(read_only_hint=True))(work)
        add(name="wipe", annotations=hints(read_only_hint=False, idempotent_hint=False))(work)
        add(name="set", annotations=hints(idempotent_hint=True, destructive_hint=True))(work)

        @self.server.resource("note://{name}")
        async def note(name: str) -> str:
            self.handled.append(name)
            await trio.sleep(2)
            return name

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[MessageChannel]:
        self.times.append(trio.current_time())
        if self.refusals > 0:
            self.refusals -= 1
            raise OSError(f"nobody is there ({len(self.times)})")
        if self.stalls > 0:
            self.stalls -= 1
            await trio.sleep_forever()
        if self.instead is not None:
            async with self.instead.connect() as channel:
                yield channel
            return
        self._ours, theirs = memory_channels()
        self.channel = Freezable(theirs)
        async with open_service_nursery() as nursery:
            nursery.start_soon(self.server.serve, self._ours)
            yield self.channel

    async def die(self) -> None:
        """Cut the connection there is."""
        await self._ours.aclose()

    def freeze(self) -> None:
        """Say nothing more over the connection there is."""
        self.channel.frozen = True
