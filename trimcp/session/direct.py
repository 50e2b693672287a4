"""Two sessions in one process, joined without a wire: what one posts is delivered straight into the other.

There is no reader and no writer, so a message wakes nobody but whoever waits for it. It is encoded and parsed all the
same: neither side can see the other's objects, and what a wire would refuse is refused here.
"""

from __future__ import annotations

import logging

import attrs
import trio

from trimcp.channel import CLIENT_MAX_MESSAGE, SERVER_MAX_MESSAGE, Incoming, Outgoing, Sink
from trimcp.session.job import CancelReason
from trimcp.session.session import Session
from trimcp.wire.jsonrpc import parse, too_large

__all__ = ["DirectEnd", "direct_ends", "wind_down"]

log: logging.Logger = logging.getLogger("trimcp.session")


def direct_ends() -> tuple[DirectEnd, DirectEnd]:
    """Return the two ends of a direct connection, each to be given to a driver. What one posts the other receives.

    The first is a server's: as over any transport, what it takes may be smaller than what a client takes.
    """
    left, right = DirectEnd(SERVER_MAX_MESSAGE), DirectEnd(CLIENT_MAX_MESSAGE)
    left.other, right.other = right, left
    return left, right


@attrs.define(eq=False, repr=False)
class DirectEnd(Sink):
    """One end of a direct connection: the sink of the session that is driven over it.

    Room is the other session's: a sender waits while the other one would not read.

    Attributes:
        max_message: bytes of the largest message that our session takes.
    """

    max_message: int = CLIENT_MAX_MESSAGE
    other: DirectEnd = attrs.field(init=False)
    session: Session | None = attrs.field(init=False, default=None)
    closed: bool = attrs.field(init=False, default=False)
    _early: list[Incoming] = attrs.field(init=False, factory=list)

    def attach(self, session: Session) -> None:
        """Deliver to this session from now on, beginning with what came before it was there."""
        self.session, self.max_message = session, session.max_message
        early, self._early = self._early, []
        session.deliver(early)
        if self.other.closed:
            self._peer_left()

    def close_reason(self) -> str | None:
        """Return how the other side ended, for an error message: there is nothing to say."""
        return None

    # The sink of our session

    @property
    def full(self) -> bool:
        """Whether the other session would not read now."""
        peer = self.other.session
        return peer is not None and peer.paused

    async def room(self) -> None:
        """Wait until the other session would read, or has ended and room no longer matters."""
        peer = self.other.session
        if peer is not None:
            await peer.readable()

    def post(self, outgoing: Outgoing) -> None:
        """Deliver a message. After either side closed it is dropped: nobody is listening."""
        other = self.other
        if self.closed or other.closed:
            return
        data = outgoing.data
        size = len(data)
        most = other.max_message
        incoming = Incoming(parse(data) if size <= most else too_large(data, most), size)
        if other.session is None:
            other._early.append(incoming)
        else:
            other.session.deliver((incoming,))

    def close(self) -> None:
        """Deliver nothing more, and let the other session know that its peer is gone. Safe to call twice."""
        if not self.closed:
            self.closed = True
            self.other._peer_left()

    def _peer_left(self) -> None:
        session = self.session
        if session is None or session.closed.is_set():
            return
        why = "the peer closed the connection"
        session.lose(why)
        log.debug("the peer is gone: %s", why)
        session.nursery.start_soon(wind_down, session, session.limits.eof_grace)


async def wind_down(session: Session, grace: float) -> None:
    """End a session whose peer is gone: its handlers get `grace` seconds, then they are cancelled."""
    with trio.move_on_after(grace):
        await session.wait_idle()
    session.cancel_jobs(CancelReason.DISCONNECTED)
    await session.wait_idle()
    session.close()
