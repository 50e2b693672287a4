"""What a session's reader does beside reading: waits while the session is paused, reports a peer that takes nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import trio

from trimcp.session.job import CancelReason
from trimcp.session.session import Session

_SHORT: Final = 0.02  # seconds without reading after which the session checks whether the peer is still connected


async def readable_or_left(session: Session, wait_peer_closed: Callable[[], Awaitable[bool]]) -> bool:
    """Wait until the session may read on. Most such waits are short; during a long one the peer is watched.

    Args:
        session: may be closed meanwhile, which ends the wait.
        wait_peer_closed: waits until the peer has left, and returns True; or False if there is something else to do.

    Returns:
        Whether the peer has left, so that nobody would read the answers to what is still unread.
    """
    with trio.move_on_after(_SHORT) as short:
        await session.readable()
    if not short.cancelled_caught:
        return False
    left = False

    async def watch() -> None:
        nonlocal left
        left = await wait_peer_closed()
        nursery.cancel_scope.cancel(reason="the peer has left, or the transport has something else to do")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await session.readable()
        nursery.cancel_scope.cancel(reason="the session reads on")
    return left


def report_stalled(session: Session) -> None:
    """Log a peer that was dropped because it took nothing, and stop its handlers for that reason."""
    from trimcp.security import security_event

    why, stats = str(session.lost), session.statistics()
    unread = stats.outbox_bytes + stats.unread_bytes
    security_event("peer_stalled", why=why, unread_bytes=unread, requests=len(session.jobs))
    session.jobs.cancel_all(CancelReason.LIMIT, why)
