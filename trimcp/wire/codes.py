"""The table of error codes: the name of each, its HTTP status, and whether a retry is safe.

Sources: JSON-RPC 2.0 section 5.1, and the MCP specification, "Basic Protocol", "Error Codes". trimcp's own
codes are positive, outside the range -32768..-32000 that JSON-RPC reserves.
"""

from __future__ import annotations

from typing import Final

from trimcp.support.slotted import slotted, valued

PARSE_ERROR: Final = -32700
"""The text is not JSON (JSON-RPC 2.0 section 5.1)."""
INVALID_REQUEST: Final = -32600
"""JSON, but not a valid message, or beyond a limit (JSON-RPC 2.0 section 5.1)."""
METHOD_NOT_FOUND: Final = -32601
"""The method does not exist, or not in this revision (JSON-RPC 2.0 section 5.1)."""
INVALID_PARAMS: Final = -32602
"""The method exists, but its parameters are invalid (JSON-RPC 2.0 section 5.1)."""
INTERNAL_ERROR: Final = -32603
"""The receiver failed (JSON-RPC 2.0 section 5.1)."""
RESOURCE_NOT_FOUND: Final = -32002
"""No such resource; until 2025-11-25, INVALID_PARAMS after it ("Resources", "Error Handling")."""
URL_ELICITATION_REQUIRED: Final = -32042
"""The user must visit a URL first; 2025-11-25 only ("Elicitation", "Error Handling")."""
HEADER_MISMATCH: Final = -32020
"""HTTP headers are missing, malformed or different from the body; from 2026-07-28 ("Streamable HTTP")."""
MISSING_CAPABILITY: Final = -32021
"""The request needs a capability that its client did not declare; from 2026-07-28 ("Basic Protocol", "_meta")."""
UNSUPPORTED_VERSION: Final = -32022
"""The server does not support the requested revision; from 2026-07-28 ("Versioning")."""
OVERLOADED: Final = 1001
"""trimcp's own: too many requests are in progress; this one was refused before anything was done."""
CANCELLED_BY_DRAIN: Final = 1002
"""trimcp's own: the receiver is shutting down. If `data.started` is false nothing was done, else perhaps a half."""
TIMED_OUT: Final = 1003
"""trimcp's own: the call exceeded its tool's timeout and was cancelled; it may be half done."""
FORBIDDEN: Final = 1004
"""trimcp's own: the principal may not do this; `data.requiredScopes` names the scopes that a token needs for it."""

CANCELLED_BY_OPERATOR: Final = 1005
"""trimcp's own: whoever runs the receiver cancelled the request; it may be half done. The message says why."""


@slotted(frozen=True)
@valued
class ErrorKind:
    """What is known about one error code.

    Attributes:
        code: the integer on the wire.
        name: its name in the specification, or ours.
        http_status: status of an HTTP response that consists of this error, if it is known before the first
            byte. The specification requires 400 and 404 for some. Otherwise an error that a handler raised is 200,
            because older clients read the body only with that status.
        retryable: the receiver did nothing, so sending the same request again later is safe and may succeed.
        reason: a short name for programs, sent as `data.reason` with trimcp's own errors.
    """

    code: int
    name: str
    http_status: int
    retryable: bool
    reason: str


ERRORS: Final[dict[int, ErrorKind]] = {
    kind.code: kind
    for kind in (
        ErrorKind(PARSE_ERROR, "ParseError", 400, False, "parse_error"),
        ErrorKind(INVALID_REQUEST, "InvalidRequest", 400, False, "invalid_request"),
        ErrorKind(METHOD_NOT_FOUND, "MethodNotFound", 404, False, "method_not_found"),
        ErrorKind(INVALID_PARAMS, "InvalidParams", 400, False, "invalid_params"),
        ErrorKind(INTERNAL_ERROR, "InternalError", 200, False, "internal_error"),
        ErrorKind(RESOURCE_NOT_FOUND, "ResourceNotFound", 200, False, "resource_not_found"),
        ErrorKind(URL_ELICITATION_REQUIRED, "URLElicitationRequired", 200, False, "url_elicitation_required"),
        ErrorKind(HEADER_MISMATCH, "HeaderMismatch", 400, False, "header_mismatch"),
        ErrorKind(MISSING_CAPABILITY, "MissingRequiredClientCapability", 400, False, "missing_capability"),
        ErrorKind(UNSUPPORTED_VERSION, "UnsupportedProtocolVersion", 400, False, "unsupported_version"),
        ErrorKind(OVERLOADED, "Overloaded", 503, True, "overloaded"),
        ErrorKind(CANCELLED_BY_DRAIN, "CancelledByDrain", 503, False, "drain"),
        ErrorKind(FORBIDDEN, "Forbidden", 403, False, "forbidden"),
        ErrorKind(TIMED_OUT, "TimedOut", 200, False, "deadline"),
        ErrorKind(CANCELLED_BY_OPERATOR, "CancelledByOperator", 200, False, "operator"),
    )
}
"""Every error code trimcp sends, by code."""
