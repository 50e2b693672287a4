"""Every error of the agent-tools protocol: its code in messages, its HTTP status and its gRPC status.

Servers raise these, and clients get them again: one class for each row of the table in docs/reference/agent-tools.md.
`ERRORS_BY_CODE` finds the class of a code.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

from trimcp.errors import McpError


class AgentToolsError(McpError):
    """A request of the agent-tools protocol failed.

    Attributes:
        code: the error's name in messages.
        http_status: the status of an HTTP response with it.
        grpc_status: the name of its gRPC status.
        extended_status: the `status` of a `tool_response` with it, for a request with `"statuses": "extended"`.
        message: one line for a person. Untrusted text in a client.
        data: any JSON value for a program, or None.
        retry_after: seconds after which to try again, or None.
    """

    code: ClassVar[str] = "crashed"
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"
    extended_status: ClassVar[str] = "error"

    def __init__(self, message: str, data: Any = None, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message: str = message
        self.data: Any = data
        self.retry_after: float | None = retry_after

    def body(self) -> dict[str, Any]:
        """Return the `error` member of a message: `{"code", "message"}`, and `"data"` if there is any."""
        body: dict[str, Any] = {"code": self.code, "message": self.message}
        if self.data is not None:
            body["data"] = self.data
        if self.retry_after is not None:
            body["retry_after"] = self.retry_after
        return body


class MalformedMessage(AgentToolsError):
    """It is no message of the protocol: not JSON, a member is missing or has a wrong type."""

    code = "malformed"
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"


class UnknownTool(AgentToolsError):
    """There is no tool of this name, or no such version of it."""

    code = "unknown_tool"
    http_status = 404
    grpc_status = "NOT_FOUND"


class UnknownContext(AgentToolsError):
    """There is no such context for this principal and agent."""

    code = "unknown_context"
    http_status = 404
    grpc_status = "NOT_FOUND"


class NothingHere(AgentToolsError):
    """The service has nothing at this path, or has not enabled it."""

    code = "not_found"
    http_status = 404
    grpc_status = "UNIMPLEMENTED"


class InvalidArguments(AgentToolsError):
    """The arguments do not fit the tool's schema; `data["problems"]` says where."""

    code = "invalid_arguments"
    http_status = 422
    grpc_status = "INVALID_ARGUMENT"


class UnfitManifest(AgentToolsError):
    """A manifest cannot be registered; `data["problems"]` says why."""

    code = "invalid_manifest"
    http_status = 422
    grpc_status = "INVALID_ARGUMENT"


class ToolFailed(AgentToolsError):
    """The tool ran and reports an error of its own."""

    code = "tool_error"
    http_status = 200
    grpc_status = "OK"


class ToolCrashed(AgentToolsError):
    """The tool failed in a way that it did not report; `data["incident"]` stands in the server's log."""


class Unauthenticated(AgentToolsError):
    """The request has no token, or one that is not valid."""

    code = "unauthenticated"
    http_status = 401
    grpc_status = "UNAUTHENTICATED"


class NotAllowed(AgentToolsError):
    """The principal or the agent may not do this."""

    code = "forbidden"
    http_status = 403
    grpc_status = "PERMISSION_DENIED"
    extended_status = "denied"


class ContextGone(AgentToolsError):
    """The context existed and has ended: it was destroyed, or its time was over."""

    code = "context_gone"
    http_status = 410
    grpc_status = "FAILED_PRECONDITION"


class VersionConflict(AgentToolsError):
    """An update names a version that is not the context's present one, which `data["version"]` is."""

    code = "version_conflict"
    http_status = 409
    grpc_status = "ABORTED"


class RequestUnderWay(AgentToolsError):
    """A request with this `request_id` is under way in the context, or was another one in it."""

    code = "duplicate_request"
    http_status = 409
    grpc_status = "ALREADY_EXISTS"


class NameTaken(AgentToolsError):
    """A tool of this name and version exists, or the name belongs to somebody else."""

    code = "name_taken"
    http_status = 409
    grpc_status = "ALREADY_EXISTS"


class TooMuch(AgentToolsError):
    """Too much is under way or kept; `retry_after` says when to try again, if that helps."""

    code = "too_much"
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"


class TooLargeMessage(AgentToolsError):
    """A message, a state or a manifest is larger than its bound."""

    code = "too_large"
    http_status = 413
    grpc_status = "RESOURCE_EXHAUSTED"


class DeadlinePassed(AgentToolsError):
    """The caller's time was over before there was a result."""

    code = "deadline"
    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"
    extended_status = "timeout"


class RequestCancelled(AgentToolsError):
    """The request was cancelled; `message` has the reason."""

    code = "cancelled"
    http_status = 499
    grpc_status = "CANCELLED"
    extended_status = "cancelled"


ENDS: Final = "the server is shutting down"
"""Why what is under way ends with the server."""

NOT_STARTED: Final = {"started": False}
"""The data of `Draining` where nothing was done, as MCP's errors have it: the same can be asked again elsewhere."""


class Draining(AgentToolsError):
    """The server is shutting down.

    `data["started"]` says whether anything of the request was done; if it is missing, nobody knows.
    """

    code = "draining"
    http_status = 503
    grpc_status = "UNAVAILABLE"

    @property
    def not_started(self) -> bool:
        """Whether the service says that nothing was done."""
        return isinstance(self.data, dict) and self.data.get("started") is False


def draining(*, started: bool | None = None) -> Draining:
    """Return the error while the server ends; `started` is False where nothing was done, None if that is unknown."""
    return Draining(ENDS, NOT_STARTED if started is False else None)


def too_much() -> TooMuch:
    """Return the error where nothing more can be under way."""
    return TooMuch("too much is under way; try again later", retry_after=1)


def context_gone(reason: str | None) -> ContextGone:
    """Return the error for a context that has ended for a reason."""
    return ContextGone("the context has ended", {"reason": reason})


class ProviderGone(AgentToolsError):
    """The provider of this tool has disconnected; the call may be half done."""

    code = "provider_gone"
    http_status = 503
    grpc_status = "UNAVAILABLE"


ERRORS_BY_CODE: Final[dict[str, type[AgentToolsError]]] = {cls.code: cls for cls in AgentToolsError.__subclasses__()}
"""The class of each code, in the order of the table, which is that of the classes above."""

_BY_STATUS: Final = (
    MalformedMessage,
    Unauthenticated,
    NotAllowed,
    NothingHere,
    TooLargeMessage,
    TooMuch,
    DeadlinePassed,
    RequestCancelled,
    Draining,
)

ERRORS_BY_HTTP_STATUS: Final[dict[int, type[AgentToolsError]]] = {
    **{cls.http_status: cls for cls in _BY_STATUS},
    408: DeadlinePassed,
}
"""What a status means without the error's own text, as from a proxy in between."""

ERRORS_BY_GRPC_STATUS: Final[dict[str, type[AgentToolsError]]] = {cls.grpc_status: cls for cls in _BY_STATUS}
"""The same of gRPC."""


def error_from(body: Any) -> AgentToolsError:
    """Return the exception for an `error` member that a service sent, whatever it holds."""
    if not isinstance(body, dict):
        return AgentToolsError("the service reported an error without saying which")
    code, message, seconds = body.get("code"), body.get("message"), body.get("retry_after")
    found = ERRORS_BY_CODE.get(code, AgentToolsError) if isinstance(code, str) else AgentToolsError
    after = float(seconds) if isinstance(seconds, int | float) and not isinstance(seconds, bool) else None
    text = message if isinstance(message, str) else str(code)
    return found(text, body.get("data"), retry_after=after)
