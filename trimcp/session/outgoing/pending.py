"""One request of ours, from the queue to its answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import trio

from trimcp.channel import Origin
from trimcp.protocol.bound_methods import BoundMethod
from trimcp.protocol.connection import Connection
from trimcp.protocol.events import Replied
from trimcp.session.scopes import WaitingTasks
from trimcp.support.slotted import slotted
from trimcp.wire.lifecycle import ProgressParams


@slotted
class Pending:
    """One request of ours in progress. Several tasks may wait for it."""

    engine: Connection
    id: int
    method: BoundMethod
    origin: Origin | None = None  # the origin of the peer's request that it belongs to, or None
    # called with each progress message, or None to ask for none
    on_progress: Callable[[ProgressParams], object] | None = None
    # called with the answer, or with the reason why there will be none; or None. Neither must block.
    on_reply: Callable[[Replied], object] | None = None
    reply: Replied | None = None  # the answer, once there is one
    _waiting: WaitingTasks = attrs.field(init=False, factory=WaitingTasks)

    def replied(self, reply: Replied) -> None:
        """Store the answer and wake the waiting tasks."""
        self.reply = reply
        if self.on_reply is not None:
            self.on_reply(reply)
        self._waiting.wake()

    async def raw(self) -> dict[str, Any]:
        """Wait for the answer and return it as a JSON object; raises as `Session.call` does."""
        if self.reply is None:
            await self._waiting.wait()
        else:
            await trio.lowlevel.checkpoint()
        return self._raw_now()

    async def payload(self) -> Any:
        """Wait for the answer and return its payload; raises as `Session.call` does."""
        if self.reply is None:
            await self._waiting.wait()
        else:
            await trio.lowlevel.checkpoint()
        return self.engine.load_result(self.method, self._raw_now())

    def payload_now(self) -> Any:
        """Return the payload of an answer that has arrived; raises as `Session.call` does."""
        return self.engine.load_result(self.method, self._raw_now())

    def _raw_now(self) -> dict[str, Any]:
        reply = self.reply
        assert reply is not None
        if reply.error is not None:
            raise reply.error
        assert reply.result is not None
        return reply.result
