"""What all sessions of a measurement share."""

from __future__ import annotations

import ssl
from typing import Final, Literal

import attrs
import trio

from trimcp.bench.plan import Plan
from trimcp.bench.shot import CLIENT
from trimcp.bench.supply import Supply
from trimcp.bench.tally import Tally
from trimcp.wire.common import META_CLIENT_CAPABILITIES, META_CLIENT_INFO, META_PROTOCOL_VERSION
from trimcp.wire.jsonrpc import encode_request
from trimcp.wire.revisions import Revision

__all__ = ["INITIALIZED", "Load"]

INITIALIZED: Final = b'{"jsonrpc":"2.0","method":"notifications/initialized"}'
"""What ends the handshake of a legacy session."""


@attrs.define(eq=False)
class Load:
    """What all sessions of a measurement share.

    Attributes:
        revision: what is spoken.
        ssl_context: whom to trust at an https or wss URL; None for whom this system trusts.
        pids: the child processes that were started.
        open: how many sessions can be used now.
        over: set when no more calls begin.
        overdue: what is not answered by now is given up.
        replies: which kinds of reply have come over Streamable HTTP.
    """

    plan: Plan
    revision: Revision
    supply: Supply
    tally: Tally
    ssl_context: ssl.SSLContext | None = None
    pids: set[int] = attrs.field(init=False, factory=set)
    open: int = attrs.field(init=False, default=0)
    over: trio.Event = attrs.field(init=False, factory=trio.Event)
    overdue: bool = attrs.field(init=False, default=False)
    replies: set[Literal["json", "sse"]] = attrs.field(init=False, factory=set)

    @property
    def reply(self) -> Literal["json", "sse", "mixed"] | None:
        """Which kind of reply has come over Streamable HTTP."""
        if len(self.replies) > 1:
            return "mixed"
        return next(iter(self.replies), None)

    def greeting(self) -> bytes:
        """Return the first request on a connection. Its id is 0, the calls' ids begin with 1.

        The modern era has no handshake, but a process that is just starting would let the first calls wait.
        """
        if self.revision.modern:
            meta = {META_PROTOCOL_VERSION: self.revision.name, META_CLIENT_INFO: CLIENT, META_CLIENT_CAPABILITIES: {}}
            return encode_request(0, "server/discover", {"_meta": meta})
        params = {"protocolVersion": self.revision.name, "capabilities": {}, "clientInfo": CLIENT}
        return encode_request(0, "initialize", params)

    async def again(self, attempt: int) -> bool:
        """Wait before something that failed is opened again, 0 times until now; False if it is not to be."""
        if self.supply.over or attempt >= self.plan.reopen:
            return False
        await trio.sleep(min(0.05 * 2**attempt, 2.0))
        return not self.supply.over
