"""Every exception trimcp raises on purpose, as one tree.

    McpError
    ├── LocalError            our side tried something the protocol forbids; nothing was sent
    │   ├── CannotAsk         a handler sent its client a request that the client did not declare support for
    │   │   └── AskRefused    ... or that the client answered with an error, such as a user's no (a RemoteError too)
    │   ├── NotInRevision     the negotiated revision cannot express it (`trimcp.wire.converter`)
    │   └── Unencodable       a value that JSON cannot represent (`trimcp.wire.jsonrpc`)
    ├── RemoteError           the peer answered a request with an error
    │   ├── Overloaded        ... because too many requests are in progress; a later retry is safe
    │   ├── NotStarted        ... because it is shutting down, and did nothing; a retry is safe
    │   └── Stopped           ... because it is shutting down; the request may be half done
    ├── InvalidReply          the peer's answer is not valid for this request
    ├── ConnectionLost        the peer is gone; the request may or may not have been carried out
    │   └── UpstreamDown      ... and was gone before: nothing was sent (supervised upstreams)
    ├── AuthorizationError    no access token could be obtained, or it is not sufficient
    ├── NoGoodAnswer          none of several attempts returned an acceptable answer
    ├── ErrorReply            raised *by a handler* to answer with exactly this error
    ├── ResourceNotFound      raised *by a resource* that does not exist
    └── ToolError             raised *by a tool* to tell the model what went wrong

Any other exception that leaves trimcp is Trio's own (`trio.Cancelled`, `trio.TooSlowError`, ...) or a bug in trimcp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class McpError(Exception):
    """The base class of trimcp's exceptions: `except McpError` catches every error of the protocol or the peer."""


class LocalError(McpError):
    """This side tried something that the session does not allow, so nothing was sent.

    Examples: calling a method that the negotiated revision does not have, sending a value that JSON cannot represent,
    asking a client for sampling when it did not declare the capability.
    """


class CannotAsk(LocalError):
    """A handler sent its client a request that the client did not declare support for, or that is not possible there.

    A handler may catch it and continue without the answer. If not caught, the client gets its revision's error for a
    missing capability. In a revision without one, a tool's result tells the model, and any other request gets -32600.

    Attributes:
        required: the capabilities that the client would have to declare, in revisions with an error for that; else
            None.
    """

    def __init__(self, message: str, required: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.required = required


class _CodedError(McpError):
    """A JSON-RPC error: `code`, `message` and `data`."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(code, message, data)
        self.code = code
        self.message = message
        self.data = data

    def __str__(self) -> str:
        return f"{self.message} (code {self.code})"


class RemoteError(_CodedError):
    """The peer answered a request with a JSON-RPC error.

    Attributes:
        code: the error's integer code (JSON-RPC 2.0 section 5.1, and the specification's "Error Codes").
        message: the peer's one-line explanation. Untrusted text.
        data: whatever the peer attached, as JSON values, or None.
        method: the method of the request, or "".
    """

    method: str = ""


class AskRefused(CannotAsk, RemoteError):
    """The client answered a handler's request with an error, such as a user's no.

    Like `CannotAsk`, a tool that does not catch it reports it to the model.

    Attributes:
        code, message, data: of the client's error. Untrusted text.
        method: what it was asked.
    """

    def __init__(self, method: str, error: RemoteError) -> None:
        RemoteError.__init__(self, error.code, error.message, error.data)
        self.required: Mapping[str, Any] | None = None
        self.method = method

    def __str__(self) -> str:
        return f"the client refused {self.method}: {self.message} (code {self.code})"


class Overloaded(RemoteError):
    """The peer refused at once because too many requests are in progress. Nothing was done; a later retry is safe."""

    @property
    def retry_after(self) -> float | None:
        """Seconds after which to retry, as sent by the peer; None if it sent none."""
        seconds: Any = self.data.get("retryAfter") if isinstance(self.data, dict) else None
        return float(seconds) if type(seconds) in (int, float) else None


class NotStarted(RemoteError):
    """The peer is shutting down and did not begin the request: it may be sent again, over another connection."""


class Stopped(RemoteError):
    """The peer is shutting down and stopped the request, which may be half done: sending it again may do it twice."""


class InvalidReply(McpError):
    """The peer's answer is not valid for this request. The connection stays open.

    Attributes:
        listed: what the pages before it brought, if it ended a list; else None.
    """

    listed: list[Any] | None = None


class AnsweredByTask(InvalidReply):
    """The server carries a call out as a task, which whoever made the call has to follow.

    Attributes:
        task: what the server said of it, as JSON.
    """

    def __init__(self, task: dict[str, Any]) -> None:
        super().__init__("the call was answered with a task, which nobody follows")
        self.task: dict[str, Any] = task


class ConnectionLost(McpError):
    """The connection ended while this request was in progress. It may or may not have been carried out.

    Attributes:
        nothing_sent: it was certainly not carried out, since nothing of it was sent. False if that is not known.
    """

    def __init__(self, message: str = "", *, nothing_sent: bool = False) -> None:
        super().__init__(message)
        self.nothing_sent: bool = nothing_sent


class UpstreamDown(ConnectionLost):
    """A supervised upstream is down, so nothing was sent. The text says why, and when it reconnects.

    Attributes:
        reasons: why its last connections failed, the newest last.
        retry_at: when it reconnects, on Trio's clock; None if it is connecting now or will not reconnect.
        given_up: whether it will not reconnect by itself.
    """

    def __init__(
        self, message: str, reasons: Sequence[str] = (), retry_at: float | None = None, given_up: bool = False
    ) -> None:
        super().__init__(message, nothing_sent=True)
        self.reasons: tuple[str, ...] = tuple(reasons)
        self.retry_at: float | None = retry_at
        self.given_up: bool = given_up


class AuthorizationError(McpError):
    """No access token could be obtained for a server, or the present one is not sufficient.

    Attributes:
        code: the authorization server's error code (RFC 6749 sections 4.1.2.1 and 5.2), such as "access_denied", or "".
    """

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code: str = code


class NoGoodAnswer(McpError):
    """None of several attempts returned an acceptable answer.

    Attributes:
        answers: the answers, in the order of arrival.
    """

    def __init__(self, message: str, answers: Sequence[Any]) -> None:
        super().__init__(message)
        self.answers: tuple[Any, ...] = tuple(answers)


class ErrorReply(_CodedError):
    """Raised inside a handler to answer its request with exactly this JSON-RPC error.

    Args:
        code: an integer. Use your own codes outside -32768..-32000 (specification, "Error Codes").
        message: one line for a person, sent to the peer unchanged.
        data: any JSON value for a program, or None for no `data` member.

    Raises:
        TypeError: the code is no integer that JSON-RPC can say, or the message is no text.
    """

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        if type(code) is not int or not -(2**63) <= code < 2**63:
            raise TypeError(f"the code of an ErrorReply is an integer of 64 bits, not {code!r:.60}")
        if not isinstance(message, str):
            raise TypeError(f"the message of an ErrorReply is a text, not {message!r:.60}")
        super().__init__(code, message, data)


class ResourceNotFound(McpError):
    """Raised inside a resource function: the resource does not exist. The peer gets its revision's error for that."""


class ToolError(McpError):
    """Raised inside a tool to tell the model what went wrong: the result carries the text and `isError: true`.

    Unlike the text of other exceptions, this text is always sent to the peer, so it must not contain secrets.
    """
