"""Channels and streams that misbehave on purpose: slow, cut, stalled, doubled, reordered, garbled.

Each wraps another one and is deterministic: delays run on Trio's clock, chances come from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs
import trio

from trimcp.channel import Incoming, MessageChannel, Outgoing

__all__ = ["CutStream", "FaultyChannel", "SlowChannel"]


@attrs.define(eq=False)
class SlowChannel(MessageChannel):
    """A channel that takes its time, or whose reader stops until released.

    Args:
        channel: the one that does the work.
        send_delay: seconds of Trio's clock before each batch is sent.
        receive_delay: seconds before each receive.
    """

    channel: MessageChannel
    send_delay: float = attrs.field(default=0, kw_only=True)
    receive_delay: float = attrs.field(default=0, kw_only=True)
    _reading: trio.Event = attrs.field(factory=trio.Event, init=False)

    def __attrs_post_init__(self) -> None:
        self.mirrors_headers: bool = self.channel.mirrors_headers
        self.half_open: bool = self.channel.half_open
        self._reading.set()

    def stop_reading(self) -> None:
        """Let every receive from now on wait for `resume`."""
        if self._reading.is_set():
            self._reading = trio.Event()

    def resume(self) -> None:
        """Read on."""
        self._reading.set()

    async def send(self, batch: Sequence[Outgoing]) -> None:
        """Send after the delay; see `MessageChannel.send`."""
        if self.send_delay:
            await trio.sleep(self.send_delay)
        await self.channel.send(batch)

    async def receive(self) -> Sequence[Incoming]:
        """Receive after the delay, once reading is allowed; see `MessageChannel.receive`."""
        if self.receive_delay:
            await trio.sleep(self.receive_delay)
        await self._reading.wait()
        return await self.channel.receive()

    async def aclose(self) -> None:
        """Close the channel underneath, and let a stopped reader find out."""
        self._reading.set()
        await self.channel.aclose()


@attrs.define(eq=False)
class FaultyChannel(MessageChannel):
    """A channel that spoils what is sent through it, each message with the chances given.

    Args:
        channel: the one that does the work.
        seed: the same seed spoils the same messages.
        cut: chance that the connection ends instead of this message.
        stall: chance that sending waits `stall_seconds` first.
        stall_seconds: of Trio's clock.
        duplicate: chance that a message is sent twice.
        reorder: chance that a message changes places with the next of its batch.
        garble: chance that a message loses its second half, and so is no JSON any more.
    """

    channel: MessageChannel
    seed: int = attrs.field(default=0, kw_only=True)
    cut: float = attrs.field(default=0, kw_only=True)
    stall: float = attrs.field(default=0, kw_only=True)
    stall_seconds: float = attrs.field(default=1, kw_only=True)
    duplicate: float = attrs.field(default=0, kw_only=True)
    reorder: float = attrs.field(default=0, kw_only=True)
    garble: float = attrs.field(default=0, kw_only=True)
    _random: random.Random = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.mirrors_headers: bool = self.channel.mirrors_headers
        self.half_open: bool = self.channel.half_open
        self._random = random.Random(self.seed)

    async def send(self, batch: Sequence[Outgoing]) -> None:
        """Send what the faults leave of the batch.

        Raises:
            trio.BrokenResourceError: the connection was cut, besides the reasons of `MessageChannel.send`.
        """
        spoiled: list[Outgoing] = []
        for message in batch:
            if self._happens(self.stall):
                await trio.sleep(self.stall_seconds)
            if self._happens(self.cut):
                await self.channel.send(spoiled)
                await self.channel.aclose()
                raise trio.BrokenResourceError("cut on purpose")
            if self._happens(self.garble):
                message = attrs.evolve(message, data=message.data[: len(message.data) // 2])
            spoiled += [message] * (2 if self._happens(self.duplicate) else 1)
            if len(spoiled) > 1 and self._happens(self.reorder):
                spoiled[-2:] = spoiled[:-3:-1]
        await self.channel.send(spoiled)

    def _happens(self, chance: float) -> bool:
        return chance > 0 and self._random.random() < chance

    async def receive(self) -> Sequence[Incoming]:
        """Receive, unspoiled; see `MessageChannel.receive`."""
        return await self.channel.receive()

    async def aclose(self) -> None:
        """Close the channel underneath."""
        await self.channel.aclose()


@attrs.define(eq=False)
class CutStream(trio.abc.SendStream):
    """A byte stream that breaks after so many bytes, in the middle of a line if need be.

    Args:
        stream: the one that does the work.
        after: bytes that still go through.
    """

    stream: trio.abc.SendStream
    after: int

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send what may still go through, then close the stream and raise `trio.BrokenResourceError`."""
        allowed = bytes(data)[: self.after]
        self.after -= len(allowed)
        await self.stream.send_all(allowed)
        if len(allowed) < len(data):
            await self.stream.aclose()
            raise trio.BrokenResourceError("cut on purpose")

    async def wait_send_all_might_not_block(self) -> None:
        """Ask the stream underneath."""
        await self.stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        """Close the stream underneath."""
        await self.stream.aclose()
