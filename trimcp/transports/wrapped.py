"""A channel around another one. What a subclass does not override is forwarded."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager

import attrs

from trimcp.budget import MemoryAccount
from trimcp.channel import HttpClientStatistics, Incoming, Link, MessageChannel, Outgoing


@attrs.define(eq=False, repr=False)
class WrappedChannel(MessageChannel):
    """Does what another channel does; subclasses override what they change."""

    channel: MessageChannel  # the wrapped channel

    def __attrs_post_init__(self) -> None:
        self.mirrors_headers: bool = self.channel.mirrors_headers
        # A subclass with a `send` of its own changes what is sent, and has to see all of it.
        self.sends_now: bool = self.channel.sends_now and type(self).send is WrappedChannel.send
        self.read_ahead: tuple[int, int] = self.channel.read_ahead
        self.link: Link | None = self.channel.link

    async def send(self, batch: Sequence[Outgoing]) -> None:
        await self.channel.send(batch)

    def send_nowait(self, outgoing: Outgoing) -> Outgoing | None:
        return self.channel.send_nowait(outgoing)

    async def receive(self) -> Sequence[Incoming]:
        return await self.channel.receive()

    def count_received(self) -> None:
        self.channel.count_received()

    def set_max_message(self, size: int) -> None:
        self.channel.set_max_message(size)

    def set_user_interaction(self, person: Callable[[], AbstractContextManager[None]]) -> None:
        self.channel.set_user_interaction(person)

    async def aclose(self) -> None:
        await self.channel.aclose()

    async def wait_peer_closed(self) -> None:
        await self.channel.wait_peer_closed()

    def close_reason(self) -> str | None:
        return self.channel.close_reason()

    def http_statistics(self) -> HttpClientStatistics | None:
        return self.channel.http_statistics()

    def write_progress(self) -> Hashable:
        return self.channel.write_progress()

    @property
    def half_open(self) -> bool:  # type: ignore[override]  # depends on how the peer ends its side, as over gRPC
        """Whether the peer of the wrapped channel, if it sends nothing more, may still read."""
        return self.channel.half_open

    @property
    def too_slow(self) -> bool:  # type: ignore[override]  # known only at the end, so it cannot be copied
        """Whether the wrapped channel was ended because the peer did not read."""
        return self.channel.too_slow

    @property
    def holding(self) -> MemoryAccount | None:
        """What the wrapped channel counts of the memory that this connection uses."""
        return self.channel.holding

    @holding.setter
    def holding(self, holding: MemoryAccount | None) -> None:
        self.channel.holding = holding
