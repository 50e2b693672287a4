"""What the HTTP face needs of whatever it serves: sessions to push messages into, or to be driven over a channel.

A server in its run is one (`trimcp.server.running.Running`); the face knows no more of it than this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import trio

from trimcp.channel import Incoming, LaneCounts, MessageChannel, Sink
from trimcp.wire.revisions import Revision

__all__ = ["PushedSession", "Service"]


class PushedSession(Protocol):
    """A session into which messages are pushed. It owns no task while nothing is under way."""

    @property
    def revision(self) -> Revision | None:
        """What its handshake agreed on, or None before it."""
        ...

    @property
    def busy(self) -> bool:
        """Whether anything is at work in it. What waits for the peer is not."""
        ...

    @property
    def counts(self) -> LaneCounts:
        """Where it is counted what gave way because its reader was slow or gone."""
        ...

    def assume(self, revision: Revision) -> None:
        """Skip the handshake: the client did it where it is not remembered."""

    def deliver(self, batch: Sequence[Incoming]) -> None:
        """Take what arrived. Never waits, and never raises because of what a peer sent."""

    def disconnect(self, why: str, *, slow: bool = False) -> None:
        """End it because its peer is gone: handlers are stopped. `slow`: we dropped it because it read nothing."""

    def close(self) -> None:
        """End it, now that nothing is under way any more. Whoever calls it forgets it."""

    def leave(self) -> None:
        """End it once what notifications began is done."""


class Service(Protocol):
    """What is served."""

    @property
    def revisions(self) -> Sequence[Revision]:
        """The revisions it speaks, oldest first."""
        ...

    @property
    def nursery(self) -> trio.Nursery:
        """Where its work runs; whoever shares it ends with it."""
        ...

    def open_brief(self) -> PushedSession:
        """Return a session for one request of 2026-07-28 or later, for which it is taken also without its envelope."""
        ...

    def open(self, sink: Sink) -> PushedSession:
        """Return a new session; `sink` takes what belongs to no request, and is closed with it."""
        ...

    async def serve(self, channel: MessageChannel) -> None:
        """Serve one connection until the peer leaves, then close the channel."""

    async def drain(self, grace: float) -> None:
        """Take no more requests, let those under way answer for `grace` seconds, then cancel them."""
