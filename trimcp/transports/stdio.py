"""This process's own standard input and output as a message channel, for a server.

Those of a server started as a child are `child`'s, which a server need not load.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from trimcp.transports.claimed import claim
from trimcp.transports.stream import SERVER_MAX_MESSAGE, StreamChannel
from trimcp.wire.jsonrpc import DEFAULT_LIMITS, Limits

__all__ = ["claim_stdio"]


@asynccontextmanager
async def claim_stdio(
    *, max_message: int = SERVER_MAX_MESSAGE, limits: Limits = DEFAULT_LIMITS
) -> AsyncIterator[StreamChannel]:
    """Yield the channel over this process's real standard input and output, which are put back on leaving.

    Meanwhile user code and its children read an empty standard input, and what they print goes to standard
    error, so that nothing but messages reaches the client (specification, "stdio": the server must not write
    anything else). Neither a terminal's nor another process's view of these descriptors changes, not even if
    we are killed.

    Args:
        max_message: bytes of the largest message taken in; a larger one arrives as `Malformed`.
        limits: what else one message may cost.

    Raises:
        RuntimeError: another server in this process has claimed them.
    """
    claimed = claim()
    try:
        async with StreamChannel(claimed.receiver, claimed.sender, max_message=max_message, limits=limits) as channel:
            yield channel
    finally:
        claimed.release()
