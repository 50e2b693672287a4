"""The contract check passes for good channels and names what is wrong with bad ones."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
import trio

from trimcp.channel import Incoming, MessageChannel, Outgoing
from trimcp.testing.contract import MakePair, check_channel
from trimcp.transports.memory import memory_channels
from trimcp.transports.wrapped import WrappedChannel

# The bad channels below change one thing each.


class Reordering(WrappedChannel):
    async def send(self, batch: Sequence[Outgoing]) -> None:
        await self.channel.send(batch[::-1])


class Forgetful(WrappedChannel):
    async def receive(self) -> Sequence[Incoming]:
        batch = await self.channel.receive()
        await trio.lowlevel.checkpoint()
        return batch


class NoCheckpoint(WrappedChannel):
    async def send(self, batch: Sequence[Outgoing]) -> None:
        if batch:
            await self.channel.send(batch)


class SlowToClose(WrappedChannel):
    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()
        await self.channel.aclose()


class Shuffling(WrappedChannel):
    """Changes only large messages, which a task of the check compares."""

    async def send(self, batch: Sequence[Outgoing]) -> None:
        await self.channel.send(batch[::-1] if len(batch) == 2 and len(batch[1].data) > 1000 else batch)


class Polite(WrappedChannel):
    async def receive(self) -> Sequence[Incoming]:
        try:
            return await self.channel.receive()
        except trio.EndOfChannel:
            return []


class Deaf(WrappedChannel):
    async def receive(self) -> Sequence[Incoming]:
        try:
            return await self.channel.receive()
        except trio.BusyResourceError:
            await trio.sleep_forever()
            raise


def pairs(wrap: Callable[[MessageChannel], MessageChannel], framed: bool) -> MakePair:
    @asynccontextmanager
    async def make() -> AsyncIterator[tuple[MessageChannel, MessageChannel]]:
        left, right = memory_channels(framed=framed)
        yield wrap(left), wrap(right)

    return make


@pytest.mark.parametrize("framed", [False, True])
async def test_good_channels_pass(framed: bool) -> None:
    await check_channel(pairs(WrappedChannel, framed))


@pytest.mark.parametrize("bad", [Reordering, Shuffling, Forgetful, NoCheckpoint, SlowToClose, Polite])
async def test_a_broken_promise_fails(bad: type[WrappedChannel]) -> None:
    with pytest.raises(AssertionError):
        await check_channel(pairs(bad, False))


async def test_a_hang_fails(autojump_clock: trio.testing.MockClock) -> None:
    with pytest.raises(trio.TooSlowError):
        await check_channel(pairs(Deaf, False))
