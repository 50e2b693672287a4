"""A request of ours on its way: what its caller waits on, who follows it, and the headers it carries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import attrs
import trio

from trimcp.channel import Origin
from trimcp.framing.headers import request_headers
from trimcp.protocol.connection import Connection
from trimcp.protocol.events import Replied
from trimcp.protocol.vocabulary import Verb
from trimcp.wire.lifecycle import ProgressParams
from trimcp.wire.revisions import Revision

__all__ = ["Follower", "Pending", "cancellation_text", "mirrored"]

_LONGEST_REASON = 500


class Follower(Protocol):
    """Whoever follows a request to its answer; called by the reader, so it must not wait."""

    def progressed(self, params: ProgressParams) -> None:
        """Take progress."""

    def replied(self, reply: Replied) -> None:
        """Note that the answer is there, or that there will be none."""


@attrs.define(eq=False, repr=False)
class Pending:
    """One request of ours under way. Several tasks may wait for it.

    `origin` is where the request of the peer came in that it belongs to, if it belongs to one.
    """

    engine: Connection
    id: int
    verb: Verb
    origin: Origin | None = None
    follower: Follower | None = None
    reply: Replied | None = None
    _waiting: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)

    def progressed(self, params: ProgressParams) -> None:
        """Hand progress on."""
        if self.follower is not None:
            self.follower.progressed(params)

    def replied(self, reply: Replied) -> None:
        """Take the answer and wake whoever waits."""
        self.reply = reply
        if self.follower is not None:
            self.follower.replied(reply)
        self._waiting.unpark_all()

    async def raw(self) -> dict[str, Any]:
        """Wait for the answer and return it as the JSON object it is.

        Raises:
            RemoteError, InvalidReply, ConnectionLost: as `Session.call`.
        """
        await self._answered()
        return self._unwrap()

    async def payload(self) -> Any:
        """Wait for the answer and return its payload; raises as `raw` does."""
        await self._answered()
        return self.payload_now()

    def payload_now(self) -> Any:
        """Return the payload of the answer, which must be there; raises as `raw` does."""
        return self.engine.load_result(self.verb, self._unwrap())

    async def _answered(self) -> None:
        if self.reply is None:
            await self._waiting.park()
        else:
            await trio.lowlevel.checkpoint()

    def _unwrap(self) -> dict[str, Any]:
        reply = self.reply
        assert reply is not None
        if reply.error is not None:
            raise reply.error
        assert reply.result is not None
        return reply.result


def cancellation_text(cancelled: BaseException) -> str:
    """Return why a wait was cancelled, as a line for the peer.

    Only a reason somebody gave on purpose is told: Trio's own name tasks and quote the exceptions they crashed with.
    """
    source = getattr(cancelled, "source", "unknown")
    reason = getattr(cancelled, "reason", None)
    if source == "deadline":
        return "deadline exceeded"
    if source != "explicit" or not reason:
        return "cancelled by the caller"
    # Never a reason for a cancellation to fail: what UTF-8 cannot carry is replaced.
    return str(reason)[:_LONGEST_REASON].encode("utf-8", "replace").decode("utf-8")


def mirrored(
    revision: Revision | None, verb: Verb, params: Any, more: Mapping[str, str] | None = None
) -> Mapping[str, str] | None:
    """Return the headers in which a request repeats what it is (2026-07-28 streamable-http), where channels carry them.

    Args:
        revision: what it is spoken in; in one that repeats nothing, `more` is returned.
        verb: its method.
        params: its payload, or None.
        more: what it carries besides, such as repeated arguments.

    Raises:
        LocalError: its name cannot be put in a header.
    """
    if revision is None or not revision.method_headers:
        return more
    name = None if verb.method.mirrored is None else getattr(params, verb.method.mirrored)
    return {**request_headers(revision.name, verb.name, name), **(more or {})}
