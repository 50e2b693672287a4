"""Every error of the agent-tools protocol: its code in messages, its HTTP status and its gRPC status.

Servers raise these, and clients get them again: one class for each row of the table in docs/reference/agent-tools.md.
`ERRORS_BY_CODE` finds the class of a code.
"""

from __future__ import annotations

import logging
import secrets
from typing import Any, ClassVar, Final

from trimcp.errors import McpError
from trimcp.support.cleaning import harmless, log_crash

log: logging.Logger = logging.getLogger("trimcp.agent_tools")


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

    def __init_subclass__(cls, *, code: str = "", http: int = 0, grpc: str = "", extended: str = "") -> None:
        """Take a row of the table; what is not given is that of the base class."""
        cls.code, cls.http_status = code or cls.code, http or cls.http_status
        cls.grpc_status, cls.extended_status = grpc or cls.grpc_status, extended or cls.extended_status

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


class MalformedMessage(AgentToolsError, code="malformed", http=400, grpc="INVALID_ARGUMENT"):
    """It is no message of the protocol: not JSON, a member is missing or has a wrong type."""


class UnknownTool(AgentToolsError, code="unknown_tool", http=404, grpc="NOT_FOUND"):
    """There is no tool of this name, or no such version of it."""


class UnknownContext(AgentToolsError, code="unknown_context", http=404, grpc="NOT_FOUND"):
    """There is no such context for this principal and agent."""


class NothingHere(AgentToolsError, code="not_found", http=404, grpc="UNIMPLEMENTED"):
    """The service has nothing at this path, or has not enabled it."""


class InvalidArguments(AgentToolsError, code="invalid_arguments", http=422, grpc="INVALID_ARGUMENT"):
    """The arguments do not fit the tool's schema; `data["problems"]` says where."""


class UnfitManifest(AgentToolsError, code="invalid_manifest", http=422, grpc="INVALID_ARGUMENT"):
    """A manifest cannot be registered; `data["problems"]` says why."""


class ToolFailed(AgentToolsError, code="tool_error", http=200, grpc="OK"):
    """The tool ran and reports an error of its own."""


class ToolCrashed(AgentToolsError):
    """The tool failed in a way that it did not report; `data["incident"]` stands in the server's log."""


class Unauthenticated(AgentToolsError, code="unauthenticated", http=401, grpc="UNAUTHENTICATED"):
    """The request has no token, or one that is not valid."""


class NotAllowed(AgentToolsError, code="forbidden", http=403, grpc="PERMISSION_DENIED", extended="denied"):
    """The principal or the agent may not do this."""


class ContextGone(AgentToolsError, code="context_gone", http=410, grpc="FAILED_PRECONDITION"):
    """The context existed and has ended: it was destroyed, or its time was over."""


class VersionConflict(AgentToolsError, code="version_conflict", http=409, grpc="ABORTED"):
    """An update names a version that is not the context's present one, which `data["version"]` is."""


class RequestUnderWay(AgentToolsError, code="duplicate_request", http=409, grpc="ALREADY_EXISTS"):
    """A request with this `request_id` is under way in the context, or was another one in it."""


class NameTaken(AgentToolsError, code="name_taken", http=409, grpc="ALREADY_EXISTS"):
    """A tool of this name and version exists, or the name belongs to somebody else."""


class TooMuch(AgentToolsError, code="too_much", http=429, grpc="RESOURCE_EXHAUSTED"):
    """Too much is under way or kept; `retry_after` says when to try again, if that helps."""


class TooLargeMessage(AgentToolsError, code="too_large", http=413, grpc="RESOURCE_EXHAUSTED"):
    """A message, a state or a manifest is larger than its bound."""


class DeadlinePassed(AgentToolsError, code="deadline", http=504, grpc="DEADLINE_EXCEEDED", extended="timeout"):
    """The caller's time was over before there was a result."""


class RequestCancelled(AgentToolsError, code="cancelled", http=499, grpc="CANCELLED", extended="cancelled"):
    """The request was cancelled; `message` has the reason."""


ENDS: Final = "the server is shutting down"
"""Why what is under way ends with the server."""

NOT_STARTED: Final = {"started": False}
"""The data of `Draining` where nothing was done, as MCP's errors have it: the same can be asked again elsewhere."""


class Draining(AgentToolsError, code="draining", http=503, grpc="UNAVAILABLE"):
    """The server is shutting down.

    `data["started"]` says whether anything of the request was done; if it is missing, nobody knows.
    """

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


def unknown_tool(name: str, version: str | None = None) -> UnknownTool:
    """Return the error where there is no tool of this name and version."""
    of = "" if version is None else f" of version {harmless(version, 64)}"
    return UnknownTool(f"there is no tool named {harmless(name, 100)}{of}")


def context_gone(reason: str | None) -> ContextGone:
    """Return the error for a context that has ended for a reason."""
    return ContextGone("the context has ended", {"reason": reason})


class ProviderGone(AgentToolsError, code="provider_gone", http=503, grpc="UNAVAILABLE"):
    """The provider of this tool has disconnected; the call may be half done."""


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


def crashed(error: Exception, message: object) -> ToolCrashed:
    """Log what carrying out a message raised, and return the error that answers it."""
    incident = secrets.token_hex(6)
    kind = message.get("type") if isinstance(message, dict) else getattr(message, "type", None)
    log_crash(log, error, "carrying out a message (%.40r) crashed; incident %s", kind, incident)
    return ToolCrashed("internal error", {"incident": incident})
