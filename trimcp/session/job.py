"""One request of the peer being worked on: its cancel scope, why it was cancelled, and what it asked."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

import attrs
import trio

from trimcp.channel import Origin, Sink
from trimcp.protocol.requests import InboundRequest
from trimcp.wire.codes import CANCELLED_BY_DRAIN, OVERLOADED, TIMED_OUT
from trimcp.wire.jsonrpc import encode_error

if TYPE_CHECKING:
    from trimcp.session.asking import Questions
    from trimcp.session.clock import WorkClock
    from trimcp.session.scopes import Work

__all__ = ["CancelReason", "Job"]

log: logging.Logger = logging.getLogger("trimcp.session")


class CancelReason(Enum):
    """Why a handler is being stopped; its value is the text of `trio.CancelScope.cancel(reason=)`.

    Attributes:
        PEER: whoever asked cancelled the request, or gave it up at its own deadline.
        DISCONNECTED: whoever asked is gone.
        DEADLINE: the caller's time was over and no cancellation came, or the tool's own time was.
        DRAIN: the server or the session ends.
        LIMIT: the peer took nothing for too long and was dropped (`Limits.stall_timeout`).

    Idleness is none: a session in which anything is at work is not idle.
    """

    PEER = "cancelled by peer"
    DISCONNECTED = "disconnected"
    DEADLINE = "deadline"
    DRAIN = "drain"
    LIMIT = "limit"


_FAREWELLS = {
    CancelReason.DEADLINE: TIMED_OUT,
    CancelReason.DRAIN: CANCELLED_BY_DRAIN,
    CancelReason.LIMIT: OVERLOADED,
}


@attrs.define(eq=False, repr=False)
class Job:
    """A request of the peer from the moment it was admitted until its answer is queued.

    Attributes:
        request: the engine's record of it.
        params: its payload, in the words of its revision.
        raw: its params as they came.
        sink: where its answer goes, and whatever belongs to it.
        size: roughly the bytes it occupies.
        origin, headers: where it came in and with which transport headers; both may be None.
        scope: cancelling it stops the handler; None while there is none to stop.
        task: what runs it, or None.
        reply: its answer, once there is one.
        error: the code of the error that answers it, or None.
        retry_after: seconds after which it makes sense to try again, if that is what the error says.
        failed: whether its result says `isError`; looked at only where `Session.on_finished` is told.
        reason: why it was cancelled, or None; `detail` is what the canceller said.
        queued: when it began to wait for a running slot, on Trio's clock; None if it never did.
        started: whether its handler has begun, and `since` when, on Trio's clock; `over`: whether its answer is queued.
        waited: seconds its handler waited for its turn, where a quota made it.
        crash: what the handler raised, where its crash is to end the session.
        parked: how many questions it waits for in place.
        clock: the time its handler has for its work, if that is limited; it stands still while the peer is asked.
        work: the tasks started for it with `ctx.request.start_soon`, if any.
        questions: what it asked in the re-run style, if anything.
    """

    request: InboundRequest
    params: Any
    raw: Mapping[str, Any]
    sink: Sink
    size: int = 0
    origin: Origin | None = None
    headers: Mapping[str, str] | None = None
    scope: trio.CancelScope | None = attrs.field(init=False, default=None)
    task: trio.lowlevel.Task | None = attrs.field(init=False, default=None)
    reply: bytes | None = attrs.field(init=False, default=None)
    error: int | None = attrs.field(init=False, default=None)
    retry_after: float | None = attrs.field(init=False, default=None)
    failed: bool = attrs.field(init=False, default=False)
    reason: CancelReason | None = attrs.field(init=False, default=None)
    detail: str | None = attrs.field(init=False, default=None)
    queued: float | None = attrs.field(init=False, default=None)
    waited: float = attrs.field(init=False, default=0.0)
    started: bool = attrs.field(init=False, default=False)
    since: float = attrs.field(init=False, default=0.0)
    over: bool = attrs.field(init=False, default=False)
    crash: Exception | None = attrs.field(init=False, default=None)
    parked: int = attrs.field(init=False, default=0)
    clock: WorkClock | None = attrs.field(init=False, default=None)
    work: Work | None = attrs.field(init=False, default=None)
    questions: Questions | None = attrs.field(init=False, default=None)

    @property
    def arrived(self) -> float:
        """When it came in, on Trio's clock; 0 if it was refused before anything was noted."""
        return self.since if self.queued is None else self.queued

    def cancel(self, reason: CancelReason, detail: str | None = None) -> None:
        """Stop the handler; the first reason given is the one it can read, and what the log says."""
        if self.reason is None:
            self.reason, self.detail = reason, detail
            said = "" if detail is None else f" ({detail!r})"  # a stranger's text: escaped
            log.debug("%s %r is cancelled: %s%s", self.request.verb.name, self.request.id, reason.value, said)
        if self.scope is not None:
            self.scope.cancel(reason=reason.value if detail is None else f"{reason.value}: {detail}")

    def timed_out(self, detail: str) -> None:
        """Note that its time was over, which has cancelled its handler, in a scope of its own."""
        self.reason, self.detail = CancelReason.DEADLINE, detail
        log.debug("%s %r is cancelled: %s (%s)", self.request.verb.name, self.request.id, self.reason.value, detail)

    def farewell(self) -> bytes | None:
        """Return the answer to a request whose handler was cancelled here, or None if none is owed."""
        # Without a reason it is a scope around the whole session that was cancelled.
        reason = self.reason or CancelReason.DRAIN
        self.error = _FAREWELLS.get(reason)
        return None if self.error is None else encode_error(self.request.id, self.error, f"stopped: {reason.value}")
