"""Notices a peer that takes nothing of what a session's writer sends to it."""

from __future__ import annotations

import math
from collections.abc import Hashable

import attrs
import trio

from trimcp.channel import MessageChannel, PeerProgress
from trimcp.session.outgoing import Outbox

__all__ = ["StallWatch"]


@attrs.define(eq=False, repr=False)
class StallWatch:
    """Notices a peer that takes nothing of what is being written to it, without a timer for every write.

    Most writes are over at once, and a timer for each would cost more than the write. So the first write after a pause
    sets an alarm, and the reader looks when it rings: if no write is under way it is switched off, else the reader
    looks whether the peer has taken anything since.

    Args:
        outbox: where the writer takes messages from.
        channel: what it writes them to.
        patience: seconds in which the peer has to take something; infinity for no limit.

    Attributes:
        asleep: whether the alarm is off, and the next write has to `wake` this.
    """

    outbox: Outbox
    channel: MessageChannel
    patience: float
    asleep: bool = attrs.field(init=False)
    _progress: PeerProgress = attrs.field(init=False)
    _scope: trio.CancelScope | None = attrs.field(init=False, default=None)
    _due: float = attrs.field(init=False, default=math.inf)

    def __attrs_post_init__(self) -> None:
        self.asleep = self.patience < math.inf
        self._progress = PeerProgress(self.patience)

    def wake(self) -> None:
        """Set the alarm, because a write begins."""
        self.asleep = False
        self._due = trio.current_time() + self._progress.begin(self._mark())
        if self._scope is not None:
            self._scope.deadline = self._due

    def alarm(self) -> trio.CancelScope:
        """Return a scope for the reader, which is cancelled when it is time to ask `stalled`."""
        self._scope = trio.CancelScope(deadline=self._due)
        return self._scope

    def stalled(self) -> bool:
        """Return whether the peer has taken nothing for too long; if not, set the alarm anew or switch it off."""
        if not self.outbox.writing:
            self.asleep = True
            self._due = math.inf
            return False
        wait = self._progress.look(self._mark())
        self._due = trio.current_time() + wait
        return not wait

    def _mark(self) -> Hashable:
        return self.outbox.steps, self.channel.taken()
