"""A channel around another one. What a subclass does not override is forwarded."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trimcp.channel import Incoming, MessageChannel, Outgoing
from trimcp.support.slotted import forwarding


@attrs.define(eq=False, repr=False)
@forwarding("channel", MessageChannel)
class WrappedChannel(MessageChannel):
    """Does what another channel does; subclasses override what they change."""

    channel: MessageChannel  # the wrapped channel

    @property
    def sends_now(self) -> bool:  # type: ignore[override]  # as the wrapped channel is asked
        """Whether the wrapped channel can send at once, and nothing else is done with what is sent."""
        # A subclass with a `send` of its own changes what is sent, and has to see all of it.
        return self.channel.sends_now and type(self).send is WrappedChannel.send

    async def send(self, batch: Sequence[Outgoing]) -> None:
        await self.channel.send(batch)

    async def receive(self) -> Sequence[Incoming]:
        return await self.channel.receive()

    async def aclose(self) -> None:
        await self.channel.aclose()
