"""The errors that answer requests: which one follows from what a handler raised, and what is kept of it."""

from __future__ import annotations

import logging
import math
from typing import Any

from trimcp.errors import CannotAsk, ConnectionLost, ErrorReply, RemoteError
from trimcp.support.nurseries import unwrap_single
from trimcp.support.slotted import slotted
from trimcp.wire import codes
from trimcp.wire.jsonrpc import JSON

log: logging.Logger = logging.getLogger("trimcp.session")


@slotted
class ErrorAnswer:
    """The error that answers a request, without its `data`: what transports and the audit need of it."""

    code: int
    message: str
    retry_after: float | None = None  # seconds after which to retry, if it says so
    required: tuple[str, ...] = ()  # scopes that a token needs for the request, if it says so

    @classmethod
    def of(cls, answer: ErrorReply) -> ErrorAnswer:
        """Return what is kept of an error. A handler may have written it, so its data may be anything."""
        data: Any = answer.data if isinstance(answer.data, dict) else {}
        retry_after: float | None = None
        required: tuple[str, ...] = ()
        if answer.code == codes.OVERLOADED:
            seconds = data.get("retryAfter")
            if type(seconds) in (int, float) and 0 <= seconds < math.inf:
                retry_after = seconds
        elif answer.code == codes.FORBIDDEN:
            scopes = data.get("requiredScopes")
            if isinstance(scopes, list | tuple):
                required = tuple(scope for scope in scopes if isinstance(scope, str))
        return cls(answer.code, answer.message, retry_after, required)

    @property
    def headers(self) -> dict[str, str] | None:
        """Transport headers that say the same, or None."""
        if self.retry_after is not None:
            return {"retry-after": str(math.ceil(self.retry_after))}
        return {"scope": " ".join(self.required)} if self.required else None


def own_error_data(code: int, *, started: bool) -> dict[str, JSON]:
    """Return the `data` of an error of our own: its reason and, in a drain, whether anything was done."""
    data: dict[str, JSON] = {"reason": codes.ERRORS[code].reason}
    return {**data, "started": started} if code == codes.CANCELLED_BY_DRAIN else data


def error_for(error: BaseException, name: str, *, peer_lost: bool) -> ErrorReply | None:
    """Return the error that answers a request whose handler raised `error`; None if that is a crash.

    If the session has lost its peer, a handler that failed because of that did not crash.
    """
    cause = unwrap_single(error)
    if isinstance(cause, CannotAsk):
        if cause.required is not None:
            return ErrorReply(codes.MISSING_CAPABILITY, str(cause), {"requiredCapabilities": cause.required})
        return ErrorReply(codes.INVALID_REQUEST, str(cause))
    if isinstance(cause, ErrorReply):
        return cause
    drained = isinstance(cause, RemoteError) and cause.code == codes.CANCELLED_BY_DRAIN
    if drained or (peer_lost and isinstance(cause, ConnectionLost) and not isinstance(cause, RemoteError)):
        log.debug("the handler of %s lost its peer", name)
        return ErrorReply(codes.INTERNAL_ERROR, "the connection was lost")
    return None
